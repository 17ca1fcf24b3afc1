"""Attention of a strip of grid rows, from short summaries of all other rows.

Far keys enter the attention of a query only through sums: the state of the content
(``summarize``), and for relative position the sum of the values of each class. So three inputs give
the exact attention of a strip: the state of all tokens, the values of the strip and of a halo of
R - 1 rows on either side, and the sums of the rows beyond the halo. Each sum runs from one end of
the grid; none is a difference.

    rows of the grid    0 ........ first - a | .. first .. last .. | last + b ........ H - 1
    inputs of a strip   one sum, ``above``   |     values          |   one sum, ``below``

This module defines the inputs of a strip and computes the attention; the caller distributes and
transfers rows. Everything is differentiable. Prefix tokens have only the content term: ``attend``.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import Grid
from visionattn.ops.attention_sums import Sums
from visionattn.ops.chunking import chunks
from visionattn.ops.feature_maps import elu1, is_tiny, raised
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.axial_position import RowClasses
from visionattn.ops.position.joint_position import class_sums
from visionattn.ops.position.relative_position import (
    Axial,
    Flat,
    Joint,
    RelativePosition,
    axis_counts,
)
from visionattn.ops.states import KernelState, State, attend

LINE_ELEMENTS = 1 << 22


class Strip(NamedTuple):
    """Rows ``first`` to ``last - 1`` of a grid of patches."""

    grid: Grid
    first: int
    last: int

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.last - self.first

    def with_halo(self, rows: int) -> "Strip":
        """Return the strip extended by ``rows`` rows on either side, within the grid."""
        first, last = max(0, self.first - rows), min(self.grid.height, self.last + rows)
        return Strip(self.grid, first, last)


@dataclass(frozen=True)
class SeenRows:
    """The values that ``Joint``, or ``Flat`` with a layout, needs for a strip.

    Args:
        values: for ``Joint`` ``[B, h, rows, W, e]``, the rows of the strip and its halo
            (``Strip.with_halo``); for ``Flat`` ``[B, h, n, e]``, the strip's patches and up to
            R - 1 patches before and after them in the sequence.
        above, below: ``[B, h, W, e]`` (``Flat``: ``[B, h, e]``), the sums of all rows (patches)
            before and after ``values``; None if there are none.
    """

    values: Tensor
    above: Tensor | None
    below: Tensor | None


@dataclass(frozen=True)
class SeenLines:
    """The values that ``Axial`` needs for a strip: sums over the whole grid.

    Args:
        rows: sum of each row, ``[B, h, H, e]``.
        columns: sum of each column, ``[B, h, W, e]``.
    """

    rows: Tensor
    columns: Tensor


Seen = SeenRows | SeenLines


def _reach(relative: Joint | Flat) -> int:
    """Return the number of rows (``Flat``: patches along the sequence) on either side whose values
    a query needs individually.
    """
    return max(0, relative.table.shape[1] // 2 - 1)


def halo_of(relative: RelativePosition | None) -> int:
    """Return the number of halo rows on either side of a strip: rows whose values queries need
    individually.

    For ``Flat`` it is the number of rows that hold R - 1 patches.
    """
    if relative is None or isinstance(relative, Axial):
        return 0
    width = relative.layout.grid.width if isinstance(relative, Flat) else 1
    return -(-_reach(relative) // width)


def seen_span(relative: Joint | Flat, strip: Strip) -> slice:
    """Return the rows of the grid (``Flat``: the patches) whose values a strip needs
    individually.
    """
    if isinstance(relative, Joint):
        whole = strip.with_halo(halo_of(relative))
        return slice(whole.first, whole.last)
    reach, (_, width) = _reach(relative), strip.grid
    first, last = strip.first * width - reach, strip.last * width + reach
    return slice(max(0, first), min(last, strip.grid.num_patches))


def strip_attention(
    q: Tensor,
    state: State,
    relative: RelativePosition | None = None,
    strip: Strip | None = None,
    seen: Seen | None = None,
) -> Tensor:
    """Return the weighted mean of all values for the patches of a strip.

    The result equals the attention of the whole grid, up to rounding.

    Args:
        q: ``[B, h, n, d]``, the queries of the strip's patches, row by row, as passed to the
            attention. Without relative position any queries, prefix tokens included.
        state: state of all keys, prefix tokens included.
        relative: relative position of the whole grid, with all patches present; None: content only.
        strip: the rows; needed with relative position.
        seen: the values for relative position: ``SeenRows`` for ``Joint`` and ``Flat``,
            ``SeenLines`` for ``Axial``.

    Returns:
        ``[B, h, n, e]`` in the dtype of the state.
    """
    mean, mass = _mean(q, state, relative, strip, seen)
    if isinstance(state, KernelState) and state.feature_map == "elu1" and is_tiny(mass):
        raised_q = raised(q, (3,))
        if raised_q is not q:
            mean, _ = _mean(raised_q, state, relative, strip, seen)
    return mean


def _mean(
    q: Tensor,
    state: State,
    relative: RelativePosition | None,
    strip: Strip | None,
    seen: Seen | None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean under all terms, and the mass of the content term."""
    content = attend(q, state)
    if relative is None:
        return content.divide(), content.mass
    total = state.count.to(content.mass.dtype)
    with without_autocast(q):
        more = strip_sums(q.to(content.values.dtype), seen, relative, strip, total)
    return content.divide_with(more, 0), content.mass


def strip_sums(
    q: Tensor, seen: Seen, relative: RelativePosition, strip: Strip, total: Tensor
) -> Sums:
    """Return the relative term's sums of values and of weights for the patches of a strip.

    Args:
        q: ``[B, h, n, d]``, float32 or float64, the dtype of the sums.
        seen, relative, strip: see ``strip_attention``.
        total: number of keys that each query sees, ``[1, 1, 1]``, prefix tokens included. With
            "mean", each class contributes its mean times this number.
    """
    factor = total.unsqueeze(3) if relative.normalization == "mean" else None
    sums_of_kind = _axial_sums if isinstance(seen, SeenLines) else _sums_of_classes
    return sums_of_kind(q, seen, relative, strip, factor)


def _sums_of_classes(
    q: Tensor, seen: SeenRows, relative: Joint | Flat, strip: Strip, factor: Tensor | None
) -> Sums:
    """Return the sums over classes for ``Joint`` and ``Flat``.

    The sums ``above`` and ``below`` become one extra row of values before and one after the halo.
    For queries of the strip, an extra row has the classes of the rows that it sums. ``Flat`` treats
    the sequence of patches as a grid of one row.
    """
    table, halo, (height, width) = (
        relative.table.to(q.dtype),
        seen_span(relative, strip),
        strip.grid,
    )
    own, dim, shape = slice(strip.first, strip.last), 2, (strip.rows, width)
    far, values = [seen.above, seen.below], seen.values
    if isinstance(relative, Flat):
        own, dim, shape = slice(own.start * width, own.stop * width), 3, (1, q.shape[2])
        table, height, width = table.unsqueeze(1), 1, height * width
        far, values = [None if x is None else x.unsqueeze(2) for x in far], values.unsqueeze(2)
    above, below = (None if x is None else x.unsqueeze(dim).to(q.dtype) for x in far)
    values = [x for x in (above, values.to(q.dtype), below) if x is not None]
    before = own.start - halo.start + (above is not None)
    behind = halo.stop - own.stop + (below is not None)
    horizons = table.shape[1] // 2, table.shape[2] // 2
    axes = ((height, horizons[0]), (width, horizons[1]))
    rows, columns = (axis_counts(*axis, q.dtype, q.device).T for axis in axes)
    counts = (rows[:, None, :, None] * columns[None, :, None, :]).flatten(2).unsqueeze(0)
    counts = counts.narrow(dim - 1, own.start, own.stop - own.start)
    # Pad the queries to the rows of the values; results of padding are dropped.
    pad = (0, 0) * (4 - dim) + (before, behind)
    queries, counts = F.pad(q.unflatten(2, shape), pad), F.pad(counts, pad)
    classes = queries, table.flatten(1, 2), torch.cat(values, dim), counts, factor, *horizons
    sums, mass = (x.narrow(dim, before, shape[dim - 2]) for x in class_sums(*classes))
    return Sums(sums.flatten(2, 3), mass.flatten(2, 3))


def _axial_sums(
    q: Tensor, seen: SeenLines, relative: Axial, strip: Strip, factor: Tensor | None
) -> Sums:
    (height, width), queries = strip.grid, q.unflatten(2, (strip.rows, strip.grid.width))
    rows, columns = (x.to(q.dtype) for x in (seen.rows, seen.columns))
    own = slice(strip.first, strip.last)
    by_row = _line_sums(queries, relative.rows.to(q.dtype), rows, width, own, factor)
    across = queries.transpose(2, 3)
    every = slice(0, width)
    by_column = _line_sums(across, relative.columns.to(q.dtype), columns, height, every, factor)
    both = by_row + by_column.transpose(2, 3)
    return Sums(both[..., :-1].flatten(2, 3), both[..., -1].flatten(2, 3))


def _line_sums(
    q: Tensor, table: Tensor, sums: Tensor, keys: int, lines: slice, factor: Tensor | None
) -> Tensor:
    """Return the sums of one axis, with the mass as last column, ``[B, h, lines, n, e + 1]``.

    A line is a row of the grid, or a column.

    Args:
        q: ``[B, h, lines, n, d]``, the queries of some lines.
        table: ``[h or 1, 2R+1, d]``.
        sums: sums of the values of each line of the grid, ``[B, h, L, e]``.
        keys: number of patches in a line.
        lines: which of the L lines the queries are in.
        factor: with "mean", the number of all keys, ``[1, 1, 1, 1]``; else None.
    """
    length = sums.shape[2]
    horizon = min(table.shape[1] // 2, length)  # no line is further away than L - 1
    middle = table.shape[1] // 2
    table = table[:, middle - horizon : middle + horizon + 1]
    # A last column with the number of keys gives the mass.
    x = torch.cat([sums, sums.new_full((*sums.shape[:3], 1), keys)], 3)
    of_lines = RowClasses(x.flatten(0, 1), horizon)
    lines_at_once = max(
        1, LINE_ELEMENTS // (q.shape[1] * (2 * horizon + 1) * (q.shape[3] + x.shape[3]))
    )
    sums_of_lines = []
    for part in chunks(lines.stop - lines.start, lines_at_once):
        part_lines = slice(lines.start + part.start, lines.start + part.stop)
        classes = of_lines.load(part_lines).unflatten(0, x.shape[:2])
        if factor is not None:
            counts = classes[..., -1:]
            scale = torch.where(counts > 0, factor.unsqueeze(4) / counts.clamp(min=1), 0)
            classes = classes * scale
        weights = elu1(q[:, :, part]) @ table[:, None].mT
        sums_of_lines.append(weights @ classes)
    return torch.cat(sums_of_lines, 2)
