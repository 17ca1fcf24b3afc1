"""Models whose blocks attend in different ways, windows among them."""

import copy
import warnings

import pytest
import torch
from timm.models import create_model
from timm.models._features_fx import create_feature_extractor

from tests.models.test_absent import assert_as_alone, batch, close, gradients, small
from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.models import backbone, mixed_blocks
from visionattn.models.state_dicts import checkpoint_filter_fn, resample_table
from visionattn.models.weights import DataSpec, load_model, save_model
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


def test_every_second_block_of_windows_is_shifted():
    model = small(attention="window", depth=4)
    assert [block.attn.shifted for block in model.blocks] == [False, True, False, True]
    assert model.blocks[0].attn.window_size == 7 and model.blocks[0].attn.relative.horizon == 6


def test_a_list_of_one_name_is_that_name():
    x = image()
    for attention in ("kernelized", "window"):
        named, listed = (small(attention=of) for of in (attention, [attention] * 2))
        assert torch.equal(named(x), listed(x))


REFUSED = {
    "wanted a name, or 2, one for each block, got 3": dict(attention=["window"] * 3),
    "wanted a name, or 2, one for each block, got 0": dict(attention=[]),
    "attention 'linear': wanted one of": dict(attention=["window", "linear"]),
    "a list of names, one for each block, got 5": dict(attention=5),
    r"a list of names, one for each block, got \['window', 1\]": dict(attention=["window", 1]),
    "temperature_init=2.0 would do nothing: attention='window' has no temperature; "
    "attention='kernelized' has no temperature": dict(
        attention=["window", "kernelized"], temperature_init=2.0
    ),
    "window_size=5 would do nothing: attention='kernelized' has no windows": dict(window_size=5),
    "horizon=2 would do nothing: attention='window' has an entry for each offset": dict(
        attention="window", horizon=2
    ),
    "form='direct' would do nothing": dict(attention=["window", "softmax"], form="direct"),
    "random_features=4 would do nothing: attention='window' has no feature map; they are of": dict(
        attention=["window", "kernelized"], random_features=4
    ),
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


@pytest.mark.parametrize("relative", ["joint", "axial"])
def test_an_image_among_larger_ones_gives_what_it_gives_alone(relative):
    assert_as_alone(small(**OPTIONS, relative=relative), *batch())


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


def test_blocks_called_by_others_know_the_native_grid():
    model = small(**OPTIONS, img_size=(80, 112)).eval()
    tokens, _ = model._embed(image())
    close(model.norm(model.blocks(tokens)), model.forward_features(image()), 1e-12)


def test_a_gradient_reaches_every_parameter_and_checkpointing_changes_none():
    model, x = small(**OPTIONS), image()
    wanted = gradients(model, model(x).square().sum())
    # Entries of tables for offsets that the grid has not are 0, tables as a whole are not.
    assert [name for name, grad in wanted.items() if not grad.any()] == []
    model.set_grad_checkpointing(True)
    found = gradients(model, model(x).square().sum())
    for name, grad in wanted.items():
        close(found[name], grad, 1e-12)


def test_dropped_patches_and_masks_of_the_caller_go_together():
    model = small(**OPTIONS, patch_drop_rate=0.4).train()
    x, mask = image(), torch.rand(2, 22, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, 0] = True
    torch.manual_seed(2)
    out = model(x, attn_mask=mask)
    slow = copy.deepcopy(model)
    for block in slow.blocks:
        if block.attn.attention == "window":
            block.attn.operation = lambda q, k, v, **options: defined(q=q, k=k, v=v, **options)
    torch.manual_seed(2)
    close(out, slow(x, attn_mask=mask), 1e-11)


# What clients do with them


def test_features_intermediates_and_fx_work_as_for_the_others():
    model, x = small(**OPTIONS, dtype=torch.float32).eval(), image(dtype=torch.float32)
    final, maps = model.forward_intermediates(x)
    assert torch.equal(final, model.forward_features(x)) and maps[0].shape == (2, 24, 5, 7)
    features = create_model("scaleformer_vit_t", features_only=True, img_size=64, **OPTIONS)
    assert [tuple(of.shape[2:]) for of in features(x)] == [(5, 7)] * 3
    extracted = create_feature_extractor(model, {"blocks.5": "last"})(x)["last"]
    close(model.norm(extracted), final, 1e-6)
    model.prune_intermediate_layers([1])
    assert len(model.blocks) == 2 and model(x).shape[0] == 2


def test_one_graph_and_one_exported_program_serve_all_sizes():
    model = small(attention=["window", "kernelized", "window"], depth=3, window_size=3).eval()
    side = torch.export.Dim("side", min=2, max=64)
    exported = torch.export.export(
        model, (image(),), dynamic_shapes=({2: 16 * side, 3: torch.export.Dim.AUTO},), strict=False
    ).module()
    for height, width in ((80, 112), (32, 208), (160, 96)):
        close(exported(image(height, width)), model(image(height, width)), 1e-11)


def test_weights_carry_the_list(tmp_path):
    model, args = small(**OPTIONS, dtype=torch.float32), dict(OPTIONS, embed_dim=24, num_heads=3)
    spec = DataSpec(3, 5, (), (0.5,) * 3, (0.5,) * 3, None, 64)
    path = tmp_path / "weights.safetensors"
    save_model(path, model, "scaleformer_vit_t", args, spec)
    again = load_model(path)
    assert [block.attn.attention for block in again.blocks] == MIX
    x = image(dtype=torch.float32)
    assert torch.equal(again(x), model.eval()(x))


def test_weights_of_one_mix_fit_another_as_far_as_they_go():
    """Blocks that become windows keep all but their tables, which are resampled."""
    source = small(attention="softmax", depth=6, dtype=torch.float32).state_dict()
    model = small(attention="window", depth=6, dtype=torch.float32)
    model.load_state_dict(checkpoint_filter_fn(source, model))
    for name, value in model.state_dict().items():
        if source[name].shape == value.shape:
            assert torch.equal(value, source[name]), name
        else:
            assert torch.equal(value, resample_table(source[name], value.shape)), name


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


def test_softmax_over_few_tokens_and_models_without_do_not_warn(monkeypatch):
    monkeypatch.setattr(mixed_blocks, "MANY_TOKENS", 36)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small(attention=["softmax", "window"], dtype=torch.float32)(image(dtype=torch.float32))
        monkeypatch.setattr(mixed_blocks, "MANY_TOKENS", 1)
        small(attention=["kernelized", "window"], dtype=torch.float32)(image(dtype=torch.float32))
