"""Models whose blocks attend in different ways, windows among them."""

import copy

import pytest
import torch

from tests.models.test_absent import assert_as_alone, batch, close, gradients, small
from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.models import backbone, mixed_blocks
from visionattn.ops import count_classes, reference

MIX = ["window", "kernelized", "window", "taylorshift", "softmax", "window"]
OPTIONS = dict(attention=MIX, depth=6, window_size=3)


def image(height=80, width=112, dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, 3, height, width, generator=generator).to(dtype)


# Which block takes what


def test_each_block_attends_in_its_own_way_with_the_options_that_it_has_a_use_for():
    options = dict(temperature_init=2.0, horizon=1, feature_map="relu", form="efficient")
    model = small(**OPTIONS, **options, normalization="sum")
    layers = [block.attn for block in model.blocks]
    assert [layer.attention for layer in layers] == MIX
    assert [layer.shifted for layer in layers] == [False, False, True, False, False, False]
    assert [layer.relative.horizon for layer in layers] == [2, 1, 2, 1, 1, 2]
    assert [layer.relative.signed for layer in layers] == [True, False, True, False, True, True]
    assert [layer.form for layer in layers] == ["auto", *["efficient", "auto", "efficient"]] + [
        "auto"
    ] * 2
    assert layers[3].temperature_init == 2.0 and layers[1].feature_map is not None
    assert [layer.relative.normalization for layer in layers] == ["sum"] * 6


REFUSED = {
    "wanted a name, or 2, one for each block, got 3": dict(attention=["window"] * 3),
    "attention 'linear': wanted one of": dict(attention=["window", "linear"]),
    "a list of names, one for each block, got 5": dict(attention=5),
    "temperature_init=2.0 would do nothing: attention='window' has no temperature; "
    "attention='kernelized' has no temperature": dict(
        attention=["window", "kernelized"], temperature_init=2.0
    ),
    "window_size=5 would do nothing: attention='kernelized' has no windows": dict(window_size=5),
    "horizon=2 would do nothing: attention='window' has an entry for each offset": dict(
        attention="window", horizon=2
    ),
    "form='direct' would do nothing": dict(attention=["window", "softmax"], form="direct"),
    "relative='flat': attention='window' is on a grid": dict(
        attention=["window", "kernelized"], relative="flat"
    ),
    "window_size: wanted a whole number of patches from 1, got 0": dict(
        attention="window", window_size=0
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_no_block_can_use_and_what_is_no_list_for_the_blocks_is_refused(message):
    with pytest.raises(ValueError, match=message):
        small(**REFUSED[message])


@pytest.mark.parametrize("options", [dict(window_size=5), dict(shifted=True)])
def test_options_of_windows_do_nothing_for_a_layer_without(options):
    with pytest.raises(ValueError, match="would do nothing: attention='kernelized' has no windows"):
        Attention(24, 3, **options)


# What such models compute


def defined(**inputs):
    """The layer's operation by its definition."""
    inputs.pop("value_drop")
    return reference.window_attention(**inputs)


@pytest.mark.parametrize("relative", ["joint", "axial", "none"])
def test_a_layer_of_windows_is_its_definition(relative):
    torch.manual_seed(0)
    layer = Attention(24, 3, attention="window", relative=relative, window_size=3, shifted=True)
    layer, layout = layer.double(), TokenLayout(1, Grid(5, 7))
    slow, x = copy.deepcopy(layer), torch.randn(2, 36, 24, dtype=torch.float64)
    mask = torch.arange(72).view(2, 36) % 5 != 2
    own = dict(window_size=3, shifted=True, key_mask=mask)
    slow.operation = lambda q, k, v, **options: defined(q=q, k=k, v=v, **(options | own))
    close(layer(x, layout, attn_mask=mask), slow(x, layout), 1e-12)
    with pytest.raises(ValueError, match="is_causal=True: attention='window' has no causal form"):
        layer(x, layout, is_causal=True)
    with pytest.raises(ValueError, match="36 tokens without a grid"):
        layer(x)


def test_an_image_among_larger_ones_gives_what_it_gives_alone():
    assert_as_alone(small(**OPTIONS), *batch())


def test_counts_of_classes_are_made_once_and_for_the_block_that_has_a_use_for_them(monkeypatch):
    made = []

    def count(layout, horizons, **options):
        made.append(horizons)
        return count_classes(layout, horizons, **options)

    monkeypatch.setattr(backbone, "count_classes", count)
    model, x = small(**OPTIONS, horizon=1), image()
    found = model(x)
    assert made == [(1, 1)]
    monkeypatch.setattr(backbone, "class_counts_like", lambda layout, horizon, like: None)
    close(found, model(x), 1e-12)
    small(attention=["window", "softmax"])(x)
    assert made == [(1, 1)]


def test_a_gradient_reaches_every_parameter_and_checkpointing_changes_none():
    model, x = small(**OPTIONS), image()
    wanted = gradients(model, model(x).square().sum())
    # Entries of tables for offsets that the grid has not are 0, tables as a whole are not.
    assert [name for name, grad in wanted.items() if not grad.any()] == []
    model.set_grad_checkpointing(True)
    found = gradients(model, model(x).square().sum())
    for name, grad in wanted.items():
        close(found[name], grad, 1e-12)


# What softmax costs


def test_softmax_over_many_tokens_warns(monkeypatch):
    monkeypatch.setattr(mixed_blocks, "MANY_TOKENS", 30)
    model = small(attention=["softmax", "window", "softmax"], depth=3, dtype=torch.float32)
    with pytest.warns(UserWarning) as caught:
        model(image(dtype=torch.float32))
    expected = (
        "softmax over 36 tokens in blocks [0, 2] takes time that grows with their square; "
        '"window" and "kernelized" are linear in them'
    )
    assert [str(one.message) for one in caught] == [expected]
