"""Options of blocks: their starts, weights of other models, and which option acts where."""

import copy
import pickle

import pytest
import torch
from timm.models import create_model

from tests.helpers.oracles import draw
from tests.models.test_absent import close, gradients, small
from visionattn.lab.measure import bytes_kept
from visionattn.layers import Attention, RelativeTables
from visionattn.layers.position_tables import HEAD_OFFSETS
from visionattn.layout import Grid, TokenLayout
from visionattn.models import backbone, mixed_blocks
from visionattn.models.state_dicts import checkpoint_filter_fn
from visionattn.models.weight_placement import place_weights
from visionattn.models.weights import DataSpec, load_model, save_model
from visionattn.ops import count_classes
from visionattn.ops.attention_additions import gated

DIM = 24
GATES = [f"blocks.{i}.attn.output_gate.weight" for i in (0, 1)]
SPEC = DataSpec(3, 7, (), (0.5,) * 3, (0.2,) * 3, None, 64)
SMALL = dict(embed_dim=DIM, depth=2, num_heads=3, num_classes=7, img_size=64)


def draw_image(height=80, width=112):
    return draw(2, 3, height, width, seed=5)


# Starts


def test_each_head_starts_peaked_at_its_own_small_offset_in_balance_with_the_content():
    """Wider heads have smaller entries: phi(q) . r is the same where phi(q) is."""
    torch.manual_seed(0)
    table = RelativeTables("joint", 10, 8, horizon=3)(TokenLayout(0, Grid(5, 9))).table
    assert table.shape == (10, 7, 7, 8) and bool((table > 0).all())
    for head, entries in enumerate(table.mean(-1)):
        dy, dx = HEAD_OFFSETS[head % 8]
        peak = entries[dy + 3, dx + 3].item()
        assert peak == pytest.approx(6.0, abs=1.0)  # (elu(2) + 1) * 16 / 8
        assert entries.flatten().sort().values[-2] < 0.24
        assert entries.argmax() == (dy + 3) * 7 + dx + 3


STARTS = {"": 0.02, "jax": 1 / 96**0.5, "moco": 1 / 96**0.5, "reset": 1 / (3 * 96) ** 0.5}
"""The standard deviation that each of timm's starts gives to a linear layer of 96 x 96."""


@pytest.mark.parametrize("start", STARTS)
def test_the_gate_starts_as_the_other_linear_layers_and_the_convolution_at_zero(start):
    """Some of timm's starts draw the weights of every convolution."""
    torch.manual_seed(0)
    options = SMALL | dict(embed_dim=96, weight_init=start)
    model = create_model("scaleformer_vit_t", output_gate=True, value_conv=3, **options)
    for block in model.blocks:
        assert not block.attn.value_conv.weight.any()
        for weight in (block.attn.output_gate.weight, block.attn.proj.weight):
            assert weight.std().item() == pytest.approx(STARTS[start], rel=0.05)
            assert abs(weight.mean().item()) < 0.05 * STARTS[start]


@pytest.mark.parametrize("mode", ["", "jax"])
def test_prefix_tokens_of_gated_models_start_where_a_gate_is_open(mode):
    """A class token that starts at 1e-6, as timm's, gets nothing through its gate."""
    made = [
        create_model("scaleformer_vit_t", **SMALL, reg_tokens=2, output_gate=gate, weight_init=mode)
        for gate in (True, False)
    ]
    for model, std in zip(made, (0.02, 1e-6), strict=True):
        for token in (model.cls_token, model.reg_token):
            assert token.std().item() == pytest.approx(std, rel=0.5)


# Weights of other models


def test_weights_of_another_patch_and_horizon_are_resampled():
    source = create_model("scaleformer_vit_t", **SMALL, patch_size=16, horizon=3)
    model = create_model("scaleformer_vit_t", **SMALL, patch_size=8, horizon=5)
    fitted = checkpoint_filter_fn(source.state_dict(), model)
    model.load_state_dict(fitted)
    old, new = (each.blocks[0].attn.relative.table for each in (source, model))
    assert new.shape == (3, 11, 11, 8)  # with the same corners, middles of sides and centre
    assert torch.allclose(new[:, ::5, ::5], old[:, ::3, ::3])
    between = (4 * old[:, 0, 0] + 6 * old[:, 0, 1]) / 10
    assert torch.allclose(new[:, 0, 1], between)
    assert fitted["patch_embed.proj.weight"].shape == (24, 3, 8, 8)


def checkerless(height, width, prefix=1):
    """A position whose entries are row and column in [0, 1]; resampling keeps linear ones."""
    rows, columns = torch.linspace(0, 1, height), torch.linspace(0, 1, width)
    grid = torch.stack(
        [rows[:, None].expand(height, width), columns.expand(height, width)], -1
    ).reshape(1, -1, 2)
    return torch.cat([torch.full((1, prefix, 2), 9.0), grid], 1).repeat(1, 1, 12)


@pytest.mark.parametrize(
    "source, known",
    [((4, 6), True), ((8, 2), True), ((8, 2), False), ((7, 5), False), ((6, 6), False)],
)
def test_absolute_position_moves_from_grid_to_grid(source, known):
    model = create_model(
        "taylorshift_abs_vit_t", **(SMALL | dict(img_size=(32, 128)))
    )  # a grid of 2 x 8
    given = checkerless(*source)
    fitted = checkpoint_filter_fn({"pos_embed": given}, model, source if known else None)[
        "pos_embed"
    ]
    if not known and source != (6, 6):  # 16 tokens like the model's own; 35 tokens, no square
        assert torch.equal(fitted, given)
        return
    assert fitted.shape == model.pos_embed.shape and bool((fitted[:, 0] == 9).all())
    grid = fitted[0, 1:, :2].reshape(2, 8, 2)
    assert bool((grid[0, :, 0] < 0.4).all() and (grid[1, :, 0] > 0.6).all())
    assert bool((grid[:, :, 1].diff(dim=1) > -0.1).all()) and bool((grid[:, -1, 1] > 0.8).all())


def test_weights_that_lack_gates_leave_them_as_they_are(tmp_path):
    source = small(dtype=torch.float32, output_gate=False)
    model = small(dtype=torch.float32, output_gate=True)
    gate = model.blocks[1].attn.output_gate.weight.clone()
    torch.save(source.state_dict(), tmp_path / "plain.pth")
    placement = place_weights(model, "scaleformer_vit_t", tmp_path / "plain.pth")
    assert placement.new == GATES and not placement.left_out
    assert torch.equal(model.blocks[1].attn.output_gate.weight, gate)
    *_, missing, warning = placement.lines()
    assert "blocks.{0-1}.attn.output_gate.weight" in missing and "near 0" in warning


# Random features


def test_random_features_follow_the_seed_and_are_the_blocks_own():
    rows = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = create_model("scaleformer_vit_t", feature_map="random", **SMALL)
        rows.append([block.attn.feature_map.projection for block in model.blocks])
    assert rows[0][0].shape == (8, 8) and torch.equal(rows[0][0], rows[1][0])
    assert not torch.equal(rows[0][0], rows[2][0]) and not torch.equal(*rows[0])


def test_random_features_travel_with_the_weights(tmp_path):
    args, image = dict(feature_map="random", random_features=21), draw_image().float()
    model = small(dtype=torch.float32, num_classes=7, **args).eval()
    out, args = model(image), args | dict(embed_dim=DIM, depth=2, num_heads=3, img_size=64)
    save_model(tmp_path / "model.safetensors", model, "scaleformer_vit_t", args, SPEC)
    state = torch.get_rng_state()
    loaded = load_model(tmp_path / "model.safetensors")
    assert torch.equal(loaded(image), out) and torch.equal(torch.get_rng_state(), state)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(image), out)


# The published temperature


def test_the_temperature_of_a_name_goes_with_its_attention(tmp_path):
    """The published models beside softmax, their baseline."""
    args = dict(attention="softmax", embed_dim=DIM, depth=2, num_heads=3, img_size=64)
    model = create_model("taylorshift_abs_vit_t", num_classes=7, **args).eval()
    assert model.blocks[0].attn.temperature is None
    save_model(tmp_path / "model.safetensors", model, "taylorshift_abs_vit_t", args, SPEC)
    image = draw_image().float()
    assert torch.equal(load_model(tmp_path / "model.safetensors")(image), model(image))
    mixed = create_model("taylorshift_abs_vit_t", **SMALL | dict(attention=MIX[3:5]))
    assert mixed.blocks[0].attn.temperature_init == 1.0
    with pytest.raises(ValueError, match="^temperature_init=2.0 has no effect"):
        create_model("taylorshift_abs_vit_t", **args, temperature_init=2.0)


# The gate


def test_gradients_of_a_compiled_product_leave_unused_tokens_out():
    """A compiled graph looks at no entries: it sets the rows to 0 beforehand."""
    out, gate = draw(2, 7, DIM, seed=1), draw(2, 7, DIM, seed=2)
    compiled = torch.compile(gated, fullgraph=True, backend="aot_eager")
    results = []
    for function, held in ((gated, 1.0), (gated, float("nan")), (compiled, float("inf"))):
        factors = [x.clone() for x in (out, gate)]
        for x in factors:
            x[0, 3] = held
            x.requires_grad_()
        product = function(*factors)
        results.append(torch.autograd.grad(product[:, :3].square().sum(), factors))
    for found in results[1:]:
        for grad, wanted in zip(found, results[0], strict=True):
            close(grad, wanted, 1e-12)
    assert results[0][0][:, :3].abs().min() > 0


def test_backward_keeps_both_factors_and_no_other_tensor():
    """Plain autograd would keep the silu of the second factor too."""
    factors = [draw(2, 7, DIM, seed=i).requires_grad_() for i in (1, 2)]
    assert bytes_kept(lambda: gated(*factors)) == 2 * 2 * 7 * DIM * 8


# Blocks that attend in different ways


MIX = ["window", "kernelized", "window", "taylorshift", "softmax", "window"]
OPTIONS = dict(attention=MIX, depth=6, window_size=3)


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


def test_counts_of_classes_are_made_once_and_for_the_block_that_has_a_use_for_them(monkeypatch):
    made = []

    def count(layout, horizons, **options):
        made.append(horizons)
        return count_classes(layout, horizons, **options)

    monkeypatch.setattr(backbone, "count_classes", count)
    for model in (small(**OPTIONS, horizon=1), small(attention=["window", "softmax"])):
        model(draw_image())
    assert made == [(1, 1)]


def test_a_gradient_reaches_every_parameter_and_checkpointing_changes_none():
    model, x = small(**OPTIONS), draw_image()
    wanted = gradients(model, model(x).square().sum())
    # Entries of tables for offsets that the grid has not are 0, tables as a whole are not.
    assert [name for name, grad in wanted.items() if not grad.any()] == []
    model.set_grad_checkpointing(True)
    found = gradients(model, model(x).square().sum())
    for name, grad in wanted.items():
        close(found[name], grad, 1e-12)


def test_softmax_over_many_tokens_warns(monkeypatch):
    monkeypatch.setattr(mixed_blocks, "MANY_TOKENS", 30)
    model = small(attention=["softmax", "window", "softmax"], depth=3, dtype=torch.float32)
    with pytest.warns(UserWarning) as caught:
        model(draw_image().float())
    expected = (
        "softmax over 36 tokens in blocks [0, 2] takes quadratic time; "
        '"window" and "kernelized" are linear'
    )
    assert [str(one.message) for one in caught] == [expected]


REFUSED = {
    "expected a name, or 2, one for each block, got 3": dict(attention=["window"] * 3),
    "attention 'linear': expected one of": dict(attention=["window", "linear"]),
    "temperature_init=2.0 has no effect: attention='window' has no temperature; "
    "attention='kernelized' has no temperature": dict(
        attention=["window", "kernelized"], temperature_init=2.0
    ),
    "window_size=5 has no effect: attention='kernelized' has no windows": dict(window_size=5),
    "horizon=2 has no effect: attention='window' has an entry for each offset": dict(
        attention="window", horizon=2
    ),
    "horizon=2 has no effect": dict(relative="none", horizon=2),
    "form='direct' has no effect": dict(attention=["window", "softmax"], form="direct"),
    "form 'linear': expected one of auto, direct, efficient": dict(form="linear"),
    "normalization='mean' has no effect": dict(attention="softmax", normalization="mean"),
    "normalization='sum' has no effect": dict(relative="none", normalization="sum"),
    "relative='flat': attention='window' is on a grid": dict(
        attention=["window", "kernelized"], relative="flat"
    ),
    "window_size: expected an integer of at least 1 patch, got 0": dict(
        attention="window", window_size=0
    ),
    "value_conv: expected an odd side of at least 1 patch, got 4": dict(value_conv=4),
    "centre_keys=True has no effect": dict(attention="softmax", centre_keys=True),
    "feature_map 'elu': expected one of elu1, relu, softmax, random": dict(feature_map="elu"),
    "'relu' has no effect: .*no feature": dict(attention="taylorshift", feature_map="relu"),
    'random_features=5 has no effect: .*feature_map="random"': dict(random_features=5),
    "num_features of at least 1, got 8 and 0": dict(feature_map="random", random_features=0),
    "relative '2d': expected one of joint, axial, flat, none": dict(relative="2d"),
    "normalization 'l2': expected mean or sum": dict(normalization="l2"),
    "horizon: expected 0 or more patches, got -1": dict(horizon=-1),
}


def test_what_no_block_can_use_and_what_is_no_list_for_the_blocks_is_refused():
    for message, options in REFUSED.items():
        with pytest.raises(ValueError, match=message) as caught:
            small(**options)
        assert "\n" not in str(caught.value)


def test_calls_that_a_layer_cannot_answer_say_why():
    """A convolution needs a grid, no causal token sees later ones, and nothing maps all pairs."""
    layout, x = TokenLayout(1, Grid(4, 5)), draw(2, 21, 24, seed=1)
    layer = Attention(24, 3, relative="joint", value_conv=3, centre_keys=True).double()
    with pytest.raises(ValueError, match="expected a layout for 21 .*; pass layout=TokenLayout"):
        layer(x)
    layer.native_layout = layout
    assert torch.equal(layer(x), layer(x, layout))
    windows = Attention(24, 3, attention="window").double()
    for of, message in (
        (layer, "let tokens see later tokens"),
        (windows, "is_causal=True: attention='window' has no causal form"),
    ):
        with pytest.raises(ValueError, match=message):
            of(x, layout, is_causal=True)
    layer.fused_attn = False
    with pytest.raises(ValueError, match="needs the attention matrix"):
        layer(x, layout)
