"""Layers: relative tables at their start, weights of other models and other horizons."""

import contextlib
import copy

import pytest
import torch
from timm.models import create_model

from visionattn.layers import Attention, RelativeTables
from visionattn.layers.position import HEAD_OFFSETS
from visionattn.layout import Grid, TokenLayout
from visionattn.models.state_dicts import checkpoint_filter_fn, resample_table
from visionattn.ops import Joint, kernelized_attention, taylorshift_attention

SMALL = dict(embed_dim=24, depth=2, num_heads=3, num_classes=7, img_size=64)


def test_each_head_starts_peaked_at_its_own_small_offset():
    torch.manual_seed(0)
    table = RelativeTables("joint", 10, 16, horizon=3)(TokenLayout(0, Grid(5, 9))).table
    assert table.shape == (10, 7, 7, 16) and bool((table > 0).all())
    for head, entries in enumerate(table.mean(-1)):
        dy, dx = HEAD_OFFSETS[head % 8]
        peak = entries[dy + 3, dx + 3].item()
        assert peak == pytest.approx(3.0, abs=0.5)  # elu(2) + 1
        assert entries.flatten().sort().values[-2] < 0.12
        assert entries.argmax() == (dy + 3) * 7 + dx + 3


@pytest.mark.parametrize("kind", ["joint", "axial", "flat"])
def test_the_scale_of_tables_falls_as_heads_grow_wider(kind):
    """phi(q) . r at the start is the same for any head width when phi(q) is."""
    layout, balance = TokenLayout(0, Grid(5, 9)), []
    for d in (16, 64):
        relative = RelativeTables(kind, 3, d)(layout)
        table = relative.rows if kind == "axial" else relative.table
        balance.append(table.sum(-1).mean().item())
    assert balance[0] == pytest.approx(balance[1], rel=0.05)


def test_reset_draws_the_start_anew_and_sets_the_temperature():
    attn = Attention(24, 3, attention="taylorshift", temperature_init=2.5)
    with torch.no_grad():
        attn.temperature.zero_()
        attn.relative.table.zero_()
    attn.reset_parameters()
    attn.relative.reset_parameters()
    assert attn.temperature.tolist() == [2.5] * 3 and attn.relative.table.min() < -2


def test_a_table_resampled_to_a_longer_horizon_keeps_centre_and_corners():
    table = torch.arange(2 * 5 * 5 * 3, dtype=torch.float32).reshape(2, 5, 5, 3)
    longer = resample_table(table, torch.Size((2, 9, 9, 3)))
    assert torch.equal(longer[:, ::2, ::2], table)
    assert torch.allclose(longer[:, 0, 1], (table[:, 0, 0] + table[:, 0, 1]) / 2)
    assert torch.equal(resample_table(longer, table.shape), table)
    with pytest.raises(ValueError, match="only the horizon may differ"):
        resample_table(table, torch.Size((3, 5, 5, 3)))


def test_weights_of_another_patch_and_horizon_are_resampled():
    source = create_model("scaleformer_vit_t", **SMALL, patch_size=16, horizon=3)
    model = create_model("scaleformer_vit_t", **SMALL, patch_size=8, horizon=5)
    fitted = checkpoint_filter_fn(source.state_dict(), model)
    model.load_state_dict(fitted)
    assert model.blocks[0].attn.relative.table.shape == (3, 11, 11, 8)
    assert torch.allclose(
        model.blocks[0].attn.relative.table[:, 5, 5], source.blocks[0].attn.relative.table[:, 3, 3]
    )
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


def test_an_option_that_would_do_nothing_is_refused():
    for kwargs in (
        dict(attention="kernelized", temperature_init=1.0),
        dict(attention="softmax", normalization="mean"),
        dict(relative="none", horizon=2),
        dict(relative="none", normalization="sum"),
    ):
        with pytest.raises(ValueError, match="would do nothing"):
            Attention(24, 3, **kwargs)


def test_attention_that_forms_no_map_of_pairs_says_so_when_asked_for_one():
    attn = Attention(24, 3)
    attn.fused_attn = False
    with pytest.raises(ValueError, match="weights of all pairs"):
        attn(torch.zeros(1, 6, 24), TokenLayout(0, Grid(2, 3)))


def attend_and_backward(attn, x, layout, autocast=None):
    """Output and gradients of a layer, in float64, for a fixed gradient of the output."""
    x = x.clone().requires_grad_()
    attn.zero_grad()
    with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
        out = attn(x, layout)
    weight = (
        torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    )
    out.backward(weight / weight.norm().to(out.dtype) if out.dtype != torch.float16 else weight)
    scale = 1.0 if out.dtype == torch.float16 else weight.double().norm().item()
    grads = {name: parameter.grad.double() * scale for name, parameter in attn.named_parameters()}
    return {"out": out.double(), "x": x.grad.double() * scale} | grads


def error(actual, wanted):
    return ((actual - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    "attention, dtype, how",
    [
        ("kernelized", torch.float16, "autocast"),
        ("taylorshift", torch.bfloat16, "pure"),
    ],
)
def test_half_precision_survives_65536_tokens_with_activations_sixteen_times_too_large(
    attention, dtype, how
):
    """The budget is the error of the same layer with its operation in float64."""
    torch.manual_seed(0)
    attn = Attention(16, 1, attention=attention, qkv_bias=True)
    layout, x = TokenLayout(0, Grid(256, 256)), 16 * torch.randn(1, 256 * 256, 16)
    low = attn
    if how == "pure":
        low, x = copy.deepcopy(attn).to(dtype), x.to(dtype)
        attn.load_state_dict(low.state_dict())
    wanted = attend_and_backward(attn, x.float(), layout)
    got = attend_and_backward(low, x, layout, dtype if how == "autocast" else None)

    operation = {"kernelized": kernelized_attention, "taylorshift": taylorshift_attention}[
        attention
    ]

    def in_float64(q, k, v, **options):
        relative = options["relative"]
        options["relative"] = Joint(
            relative.table.double(), relative.layout, relative.normalization
        )
        return operation(q.double(), k.double(), v.double(), **options).to(v.dtype)

    low.operation = in_float64
    budget = attend_and_backward(low, x, layout, dtype if how == "autocast" else None)
    for name, value in got.items():
        assert bool(value.isfinite().all()), name
        assert (
            error(value, wanted[name])
            <= 2 * error(budget[name], wanted[name]) + torch.finfo(dtype).eps
        ), name


def test_a_form_that_is_none_or_does_nothing_is_refused():
    with pytest.raises(ValueError, match="form 'linear': wanted one of auto, direct, efficient"):
        Attention(24, 3, form="linear")
    with pytest.raises(ValueError, match="form='direct' would do nothing"):
        Attention(24, 3, attention="softmax", form="direct")
