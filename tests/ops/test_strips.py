"""Attention of strips of rows, put together, is the attention of the whole grid: values and
gradients, against the quadratic definition.
"""

import pytest
import torch

from tests.helpers.oracles import assert_agree, draw, draw_qkv, draw_table, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, attend, reference, summarize
from visionattn.ops.strips import (
    SeenLines,
    SeenRows,
    Strip,
    halo_of,
    strip_attention,
)

PREFIX = 2
GRIDS = ((11, 7), (1, 2, 8)), ((40, 25), (17,)), ((3, 5), ())


def seen_of(relative, strip, values):
    """What a strip sees of ``values [B, h, H, W, e]``, by slices alone."""
    height, width = strip.grid
    if isinstance(relative, Axial):
        return SeenLines(values.sum(3), values.sum(2))
    if isinstance(relative, Flat):
        reach = max(0, relative.table.shape[1] // 2 - 1)
        run = values.flatten(2, 3)
        first, last = strip.first * width - reach, strip.last * width + reach
        parts = run[:, :, : max(0, first)], run[:, :, max(0, first) : last], run[:, :, last:]
        sums = [part.sum(2) if part.shape[2] else None for part in (parts[0], parts[2])]
        return SeenRows(parts[1], *sums)
    halo = strip.with_halo(halo_of(relative))
    parts = values[:, :, : halo.first], values[:, :, halo.last :]
    above, below = (part.sum(2) if part.shape[2] else None for part in parts)
    return SeenRows(values[:, :, halo.first : halo.last], above, below)


def in_strips(kind, layout, cuts, make, options):
    """Attention put together from strips that end at ``cuts``."""

    def attention(q, k, v, **tables):
        relative, grid = make(layout, **tables), layout.grid
        state = summarize(k, v, kind, **options)
        values = v[:, :, PREFIX:].unflatten(2, tuple(grid))
        out = [attend(q[:, :, :PREFIX], state).divide()]
        for first, last in zip([0, *cuts], [*cuts, grid.height], strict=True):
            strip = Strip(grid, first, last)
            place = slice(PREFIX + first * grid.width, PREFIX + last * grid.width)
            seen = None if relative is None else seen_of(relative, strip, values)
            out.append(strip_attention(q[:, :, place], state, relative, strip, seen))
        return torch.cat(out, 2)

    return attention


def tables_of(name, horizon, d):
    side = 2 * horizon + 1
    if name == "joint":
        return {"table": draw_table(3, side, side, d, seed=5)}
    if name == "axial":
        return {"rows": draw_table(3, side, d, seed=5), "columns": draw_table(3, side, d, seed=6)}
    return {"table": draw_table(1, side, d, seed=5)} if name == "flat" else {}


@pytest.mark.parametrize(
    "kind, position, normalization",
    [
        ("taylorshift", "joint", "mean"),
        ("kernelized", "joint", "sum"),
        ("kernelized", "axial", "mean"),
        ("taylorshift", "axial", "sum"),
        ("kernelized", "flat", "mean"),
        ("kernelized", "flat", "sum"),
    ],
)
@pytest.mark.parametrize(
    "grid, cuts, horizon",
    [(*GRIDS[0], 0), (*GRIDS[0], 3), (*GRIDS[0], 40), (*GRIDS[1], 1), (*GRIDS[2], 40)],
)
def test_strips_agree_with_the_definition(kind, position, grid, cuts, horizon, normalization):
    grid = Grid(*grid)
    layout = TokenLayout(PREFIX, grid)
    tensors = draw_qkv(1, queries=layout.num_tokens, d=4, e=5) | tables_of(position, horizon, 4)
    options = {}
    if kind == "taylorshift":
        options["temperature"] = draw(3, seed=9).abs() + 1
    whole = getattr(reference, f"{kind}_attention")

    def make(layout, **tables):
        if position == "axial":
            return Axial(tables["rows"], tables["columns"], layout, normalization)
        return {"joint": Joint, "flat": Flat}[position](tables["table"], layout, normalization)

    def expected(q, k, v, **tables):
        return whole(q, k, v, relative=make(layout, **tables), **options)

    assert_agree(run(in_strips(kind, layout, cuts, make, options), tensors), run(expected, tensors))


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_without_position_the_state_is_enough(kind):
    layout = TokenLayout(PREFIX, Grid(4, 3))
    tensors = draw_qkv(queries=layout.num_tokens, d=4, e=5)
    options = {"temperature": draw(3, seed=9).abs() + 1} if kind == "taylorshift" else {}
    whole = getattr(reference, f"{kind}_attention")
    assert_agree(
        run(in_strips(kind, layout, (1, 3), lambda layout: None, options), tensors),
        run(lambda q, k, v: whole(q, k, v, **options), tensors),
    )


def test_queries_far_below_zero_keep_their_digits():
    layout = TokenLayout(0, Grid(4, 3))
    tensors = draw_qkv(1, queries=12, d=4, e=5)
    tensors["q"] -= 2000
    table = draw_table(3, 3, 3, 4, seed=5)
    q, k, v = (tensors[name] for name in "qkv")
    strip = Strip(layout.grid, 1, 3)
    relative = Joint(table, layout, "mean")
    seen = seen_of(relative, strip, v.unflatten(2, (4, 3)))
    out = strip_attention(q[:, :, 3:9], summarize(k, v), relative, strip, seen)
    # What all entries of a query share is a factor of its weights.
    high = q - q.amax(3, keepdim=True)
    expected = reference.kernelized_attention(high, k, v, relative=relative)
    torch.testing.assert_close(out, expected[:, :, 3:9], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"strip": Strip(Grid(4, 3), 2, 5)}, "no rows of the layout"),
        ({"strip": Strip(Grid(4, 4), 1, 3)}, "no rows of the layout"),
        ({"strip": None}, "wanted a strip and SeenRows"),
        ({"seen": None}, "wanted a strip and SeenRows"),
        ({"strip": Strip(Grid(4, 3), 1, 2)}, "wanted 3 patches"),
        ({"layout": TokenLayout(0, Grid(4, 3), kept=torch.arange(12)[None])}, "all present"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    tensors = draw_qkv(1, queries=12, d=4, e=5)
    q, k, v = (tensors[name] for name in "qkv")
    layout, strip = TokenLayout(0, Grid(4, 3)), Strip(Grid(4, 3), 1, 3)
    relative = Joint(draw_table(3, 5, 5, 4, seed=5), layout, "mean")
    given = {"strip": strip, "seen": seen_of(relative, strip, v.unflatten(2, (4, 3)))}
    given["relative"] = Joint(relative.table, change.get("layout", layout), "mean")
    given |= {name: value for name, value in change.items() if name != "layout"}
    with pytest.raises(ValueError, match=message):
        strip_attention(q[:, :, 3:9], summarize(k, v), **given)


def test_a_halo_of_another_height_is_said():
    tensors = draw_qkv(1, queries=12, d=4, e=5)
    q, k, v = (tensors[name] for name in "qkv")
    layout, strip = TokenLayout(0, Grid(4, 3)), Strip(Grid(4, 3), 1, 3)
    relative = Joint(draw_table(3, 7, 7, 4, seed=5), layout, "mean")
    seen = SeenRows(v.unflatten(2, (4, 3))[:, :, 1:3], None, None)
    with pytest.raises(ValueError, match="wanted values of 4 x 3 patches"):
        strip_attention(q[:, :, 3:9], summarize(k, v), relative, strip, seen)
