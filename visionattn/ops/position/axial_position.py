"""Sums of values over the rows of a grid, weighted by clipped row distance: one axis of ``Axial``,
as one operator with its gradient.

The query at (y, x) gives every key in row y' the weight ``phi(q) . r_clip(y' - y)`` with
``phi = elu1``, for any column. So a row enters only through the sum of its values. The class of a
row is its clipped distance; for queries in row y the classes are:

    rows 0 .. y-R: one class     y-R+1 .. y+R-1: a class each     y+R .. H-1: one class

The output of a row of queries is a ``W x C`` by ``C x e`` product of weights and class sums. The
sums of the outermost classes are running sums, never differences, in the backward pass too. For
columns, the caller passes transposed views.

The operator accepts queries and values of any dtype and strides, and computes in the dtype of the
table, by bands of rows that stay in cache. Autograd saves only the inputs. R may exceed the grid.
``relative_position.py`` handles layouts and masks.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.chunking import (
    HeadChunk,
    add_of_heads,
    chunks,
    head_chunks,
    part_of,
    part_of_shared,
)
from visionattn.ops.feature_maps import elu1
from visionattn.ops.nonfinite import skips_idle_rows
from visionattn.ops.operator import differentiate, operator

BAND_ELEMENTS = 1 << 20

Band = tuple[slice, slice]


def _above(x: Tensor, lag: int) -> Tensor:
    """Return the sums of ``x [g, H, c]`` over the rows at least ``lag`` above each row;
    ``lag <= H``.
    """
    return F.pad(x.cumsum(1), (0, 0, lag, 0))[:, : x.shape[1]]


def _below(x: Tensor, lag: int) -> Tensor:
    """Return the sums of ``x [g, H, c]`` over the rows at least ``lag`` below each row;
    ``lag <= H``.
    """
    return F.pad(x.flip(1).cumsum(1).flip(1), (0, 0, 0, lag))[:, lag:]


class RowClasses:
    """Class sums of rows ``[g, H, c]``, loaded for some rows of queries at a time, and their
    gradient. ``horizon <= H``.
    """

    def __init__(self, rows: Tensor, horizon: int):
        self.horizon, self.height = horizon, rows.shape[1]
        if horizon == 0:
            self.all = rows.sum(1)
        else:
            self.above, self.below = _above(rows, horizon), _below(rows, horizon)
            self.window = F.pad(rows, (0, 0, horizon - 1, horizon - 1))

    def load(self, rows: slice) -> Tensor:
        """Return the class sums ``[g, T, C, c]`` for T rows of queries, from past to future."""
        if self.horizon == 0:
            return self.all[:, None, None].expand(-1, rows.stop - rows.start, -1, -1)
        # The rows within the horizon of each row of queries, as a view.
        size = 2 * self.horizon - 1
        window = self.window[:, rows.start : rows.stop + size - 1].unfold(1, size, 1).mT
        return torch.cat(
            [self.above[:, rows].unsqueeze(2), window, self.below[:, rows].unsqueeze(2)], dim=2
        )

    def add(self, grad: Tensor, rows: slice) -> None:
        """Add the gradient ``[g, T, C, c]`` of the result of ``load(rows)``.

        The object must have been created from zeros, to hold gradients instead of sums.
        """
        if self.horizon == 0:
            self.all += grad.sum((1, 2))
            return
        self.above[:, rows] += grad[:, :, 0]
        self.below[:, rows] += grad[:, :, -1]
        window = grad[:, :, 1:-1]
        # Row i and class j meet at i + j: loop over the shorter axis.
        if window.shape[1] > window.shape[2]:
            window = window.transpose(1, 2)
        for i, part in enumerate(window.unbind(1), rows.start):
            self.window[:, i : i + part.shape[1]] += part

    def collect(self) -> Tensor:
        """Return the gradient ``[g, H, c]`` of the rows, after all calls of ``add``."""
        if self.horizon == 0:
            return self.all.unsqueeze(1).expand(-1, self.height, -1)
        inside = self.window[:, self.horizon - 1 : self.horizon - 1 + self.height]
        return inside + _below(self.above, self.horizon) + _above(self.below, self.horizon)


class _Chunk:
    """The operands of one chunk of heads: queries, table and sums of rows.

    Table and sums are in the dtype of the table.
    """

    def __init__(
        self,
        chunk: HeadChunk,
        q: Tensor,
        table: Tensor,
        v: Tensor,
        keys: Tensor,
        total: Tensor | None,
    ):
        self.chunk, heads = chunk, chunk[1]
        self.dtype, middle, height = table.dtype, table.shape[1] // 2, q.shape[2]
        self.horizon = min(middle, height)  # no row is further away than H - 1
        self.classes = slice(middle - self.horizon, middle + self.horizon + 1)
        table = (table if table.shape[0] == 1 else table[heads])[:, self.classes]
        rows = v[chunk].sum(3, dtype=self.dtype)
        self.table = table.expand(*rows.shape[:2], -1, -1).flatten(0, 1)
        self.q = part_of(q, chunk)
        rows = rows.flatten(0, 1)
        keys = part_of_shared(keys, chunk).unsqueeze(2)
        # A last column with the number of keys gives the mass.
        self.sums = RowClasses(
            torch.cat([rows, keys.expand(len(rows), -1, -1)], dim=2), self.horizon
        )
        self.total = None if total is None else part_of_shared(total, chunk)

    def bands(self, e: int) -> list[Band]:
        """Return bands that cover the grid and stay in cache, as pairs of slices (rows,
        columns).
        """
        heads, (height, width, d), classes = len(self.q), self.q.shape[1:], self.table.shape[1]
        columns = max(1, BAND_ELEMENTS // (heads * (2 * d + e + classes)))
        rows = max(1, BAND_ELEMENTS // (heads * _row_elements(width, d, e, classes)))
        return [(y, x) for y in chunks(height, rows) for x in chunks(width, columns)]

    def features(self, band: Band) -> Tensor:
        """Return ``elu1`` of the queries of a band, ``[g, T, d]``."""
        return elu1(self.q[:, *band].to(self.dtype)).flatten(1, 2)

    def weights(self, phi: Tensor, band: Band) -> Tensor:
        """Return the weights ``[g * rows, columns, C]`` for features ``[g, T, d]``."""
        return torch.bmm(phi, self.table.mT).view(
            -1, band[1].stop - band[1].start, self.table.shape[1]
        )

    def class_sums(self, band: Band) -> tuple[Tensor, Tensor | None]:
        """Return the class sums of values and keys ``[g * rows, C, e + 1]`` and, for "mean", the
        factor ``total / n`` that they include; else None.
        """
        sums, scale = self.sums.load(band[0]).flatten(0, 1), None
        if self.total is not None:
            counts = sums[..., -1:].unflatten(0, (len(self.q), -1))
            scale = torch.where(counts > 0, self.total / counts.clamp(min=1), 0).flatten(0, 1)
            sums = sums * scale
        return sums, scale


def _row_elements(width: int, d: int, e: int, classes: int) -> int:
    """Return the number of elements in memory for one row of queries."""
    return width * (2 * d + e + classes) + classes * (e + 1)


def _chunks(q: Tensor, table: Tensor, v: Tensor, keys: Tensor, total: Tensor | None, mean: bool):
    (batch, heads, height, width, d), e = q.shape, v.shape[4]
    classes = 2 * min(table.shape[1] // 2, height) + 1
    total = total.to(table.dtype) if mean and total is not None else None
    for chunk in head_chunks(
        batch, heads, BAND_ELEMENTS // max(1, height * _row_elements(width, d, e, classes))
    ):
        yield _Chunk(chunk, q, table, v, keys, total)


def _empty_sums(q: Tensor, table: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized memory for values ``[B, h, H, W, e]`` and mass ``[B, h, H, W]``."""
    return table.new_empty(*q.shape[:4], v.shape[4]), table.new_empty(q.shape[:4])


def _flops(q, table, v, *, backward: bool) -> int:
    """Count the products of queries with the table, and of weights with class sums; the mass counts
    as a column.
    """
    d, e, classes = q[4], v[4], 2 * min(table[1] // 2, q[2]) + 1
    return 2 * prod(q[:4]) * classes * (3 * d + 2 * e + 1 if backward else d + e + 1)


@operator(fake=_empty_sums, flops=lambda q, table, v: _flops(q, table, v, backward=False))
def axis_sums(
    q: Tensor, table: Tensor, v: Tensor, keys: Tensor, total: Tensor | None, mean: bool = True
) -> tuple[Tensor, Tensor]:
    """Return ``sum_c w_c(y, x) U_c(y)`` and the sum of the weights of all keys.

    ``w_c = elu1(q) . r_c`` is the weight of class c, and ``U_c`` the sum of the values in class c.

    Args:
        q: ``[B, h, H, W, d]``, any dtype.
        table: ``[h or 1, 2R+1, d]``, from rows above to rows below; float32 or float64, the dtype
            of the sums.
        v: ``[B, h, H, W, e]``, any dtype, 0 where a patch is absent.
        keys: number of patches present in each row, ``[1 or B, H]``, in the dtype of the table.
        total: number of all keys, ``[1 or B, 1, 1, 1]``. With ``mean`` the weight of a key is
            ``w_c total / n``, with n the number of keys of its class for the query; without
            ``mean``, or if None, it is ``w_c``.
        mean: see ``total``. The plain form divides by ``total`` either way.

    Returns:
        values ``[B, h, H, W, e]`` and mass ``[B, h, H, W]``.

    Source: ours, after the linear relative position of Scaleformer (section 4).
    """
    e, (values, mass) = v.shape[4], _empty_sums(q, table, v)
    for chunk in _chunks(q, table, v, keys, total, mean):
        out, out_mass = part_of(values, chunk.chunk), part_of(mass, chunk.chunk)
        for band in chunk.bands(e):
            target = out[:, *band]
            sums = torch.bmm(
                chunk.weights(chunk.features(band), band), chunk.class_sums(band)[0]
            ).view(*target.shape[:3], e + 1)
            target.copy_(sums[..., :-1])
            out_mass[:, *band] = sums[..., -1]
    return values, mass


def _empty_gradients(q: Tensor, table: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    column = v.new_empty(*v.shape[:3], 1, v.shape[4])
    return q.new_empty(q.shape), table.new_empty(table.shape), column


@operator(fake=_empty_gradients, flops=lambda q, table, v: _flops(q, table, v, backward=True))
@skips_idle_rows("d_values d_mass", rows="q")
def axis_sums_backward(
    d_values: Tensor,
    d_mass: Tensor,
    q: Tensor,
    table: Tensor,
    v: Tensor,
    keys: Tensor,
    total: Tensor | None,
    mean: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``axis_sums`` with respect to q, to the table, and to one column of
    v, ``[B, h, H, 1, e]``: the gradients of all columns are equal.
    """
    e = v.shape[4]
    dq, d_table, dv = _empty_gradients(q, table, v)
    d_table.zero_()
    for chunk in _chunks(q, table, v, keys, total, mean):
        grad, grad_mass, own_dq = (part_of(x, chunk.chunk) for x in (d_values, d_mass, dq))
        d_sums = RowClasses(table.new_zeros(len(grad), q.shape[2], e), chunk.horizon)
        for band in chunk.bands(e):
            target, phi = own_dq[:, *band], chunk.features(band)
            weights, (sums, scale) = chunk.weights(phi, band), chunk.class_sums(band)
            upstream = torch.cat([grad[:, *band], grad_mass[:, *band].unsqueeze(3)], dim=3).flatten(
                0, 1
            )
            # Gradient of the sums of rows.
            d_classes = torch.bmm(weights.mT, upstream[..., :-1])
            d_classes = d_classes if scale is None else d_classes.mul_(scale)
            d_sums.add(d_classes.unflatten(0, (len(grad), -1)), band[0])
            # Gradient of the table, and of the queries through elu1.
            d_weights = torch.bmm(upstream, sums.mT).view(len(grad), -1, chunk.table.shape[1])
            own_table = torch.bmm(d_weights.mT, phi)
            add_of_heads(d_table[:, chunk.classes], own_table, chunk.chunk[1])
            d_phi = torch.bmm(d_weights, chunk.table)
            target.copy_(d_phi.mul_(phi.clamp_(max=1)).view(target.shape))  # elu1' is min(phi, 1)
        part_of(dv, chunk.chunk).copy_(d_sums.collect().unsqueeze(2))
    return dq, d_table, dv


def _gradients(
    d_values: Tensor,
    d_mass: Tensor,
    q: Tensor,
    table: Tensor,
    v: Tensor,
    keys: Tensor,
    total: Tensor | None,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, d_table, dv = axis_sums_backward(d_values, d_mass, q, table, v, keys, total, mean)
    return dq, d_table, dv.expand(v.shape)


differentiate(axis_sums, _gradients, outputs="values mass", gradients="q table v")
