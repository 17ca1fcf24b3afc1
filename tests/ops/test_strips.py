"""Attention of strips of rows, put together, is the attention of the whole grid: values and
gradients, against the quadratic definition.
"""

from dataclasses import replace
from functools import partial

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.oracles import draw_qkv, draw_table
from tests.ops.drawn_cases import Drawn, cases, compare, drawn, paired
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, attend, reference, summarize
from visionattn.ops.strips import (
    SeenLines,
    SeenRows,
    Strip,
    halo_of,
    strip_attention,
)


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


def in_strips(q, k, v, *, case, kind, cuts, relative, key_mask, **options):
    """Attention put together from strips that end at some rows."""
    grid, prefix = Grid(*case.grid), case.prefix
    ends = sorted({cut for cut in cuts if 0 < cut < grid.height})
    state = summarize(k, v, kind, **options)
    values = v[:, :, prefix:].unflatten(2, tuple(grid))
    out = [attend(q[:, :, :prefix], state).divide()]
    for first, last in zip([0, *ends], [*ends, grid.height], strict=True):
        strip = Strip(grid, first, last)
        place = slice(prefix + first * grid.width, prefix + last * grid.width)
        seen = None if relative is None else seen_of(relative, strip, values)
        out.append(strip_attention(q[:, :, place], state, relative, strip, seen))
    return torch.cat(out, 2)


KINDS = ("none", "flat", "axial", "joint")


@drawn
@given(
    cases(kinds=KINDS, sequences=False),
    st.sampled_from(["taylorshift", "kernelized"]),
    st.lists(st.integers(1, 6), max_size=3),
)
@example(Drawn((11, 7), kind="joint", horizons=(3, 3)), "taylorshift", [1, 2, 8])
@example(Drawn((11, 7), kind="flat", horizons=(40, 0), shared=True), "kernelized", [1, 2, 8])
@example(Drawn((40, 25), kind="axial", horizons=(1, 1), heads=1, mean=False), "taylorshift", [17])
@example(Drawn((3, 5), kind="joint", horizons=(40, 40), prefix=2, d=4), "kernelized", [])
def test_strips_agree_with_the_definition(case, kind, cuts):
    case = replace(case, missing=0, absent=False, masked=False)
    operation = partial(in_strips, case=case, kind=kind, cuts=cuts)
    fast, slow, tensors = paired(case, kind, operation)
    if kind == "taylorshift":
        tensors["temperature"] = torch.linspace(0.7, 3.0, case.heads, dtype=torch.float64)
    compare(case, fast, slow, tensors)


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
