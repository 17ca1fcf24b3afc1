"""Sums of values over the classes of clipped relative position on a grid, as one operator with its
gradient.

The class (a, b) of a pair is its clipped offset ``(clip(dy), clip(dx))``. ``U_ab(y, x)`` is the sum
of the values whose keys are in class (a, b) for the query at (y, x). The output is
``sum_ab w_ab U_ab`` with ``w_ab = phi(q) . r_ab`` and ``phi = elu1``. There are two forms: the
tiled form (``tiled_position.py``) is linear in the number of patches; on small grids the direct
form, with a weight for each pair, is faster (``direct_is_faster``).

The operator accepts queries and values of any dtype and strides, and multiplies in the dtype of the
table, some heads at a time. Autograd saves only the inputs.
"""

from functools import partial
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.attention_sums import wide
from visionattn.ops.chunking import (
    add_of_heads,
    head_chunks,
    in_turn,
    part_of,
    part_of_shared,
)
from visionattn.ops.feature_maps import elu1
from visionattn.ops.form_choice import tokens_asked
from visionattn.ops.nonfinite import skips_idle_rows
from visionattn.ops.operator import contiguous_like, differentiate, operator
from visionattn.ops.position.tiled_position import Band, QueryTiles

PAIRS = 1 << 19
KEY_ELEMENTS = 1 << 22


def axis_classes(x: Tensor, horizon: int, num_queries: int) -> Tensor:
    """Return the sums of ``x [..., M]`` over the keys of each class along one axis, for each query:
    ``[..., 2R+1, N]``, from past to future.

    It is differentiable, for any N and M. R = 0 is a single class with all keys.
    """
    num_keys = x.shape[-1]
    if horizon == 0:
        return x.sum(-1, keepdim=True).unsqueeze(-1).expand(*x.shape[:-1], 1, num_queries)
    tail = torch.sym_max(num_queries - num_keys, 0)
    padded = F.pad(x, (horizon, horizon + tail))
    # The outermost classes are running sums from either end; each class between is a shift.
    before = padded.cumsum(-1)[..., :num_queries]
    after = padded.flip(-1).cumsum(-1).flip(-1)[..., 2 * horizon : 2 * horizon + num_queries]
    window = [
        padded[..., horizon + a : horizon + a + num_queries] for a in range(1 - horizon, horizon)
    ]
    return torch.stack([before, *window, after], dim=-2)


def direct_is_faster(keys: int, rows: int) -> bool:
    """Return whether the direct form is faster: few keys for ``rows = 2Ry+1`` classes of rows.

    Measured on a CPU, forward and backward, both forms break even near 220 keys on one row and near
    700 at R = 3, for e from 16 to 256. The bound limits the number of keys only, so memory stays
    linear in the number of queries.
    """
    return tokens_asked(keys) < 150 + 80 * rows


class _Chunk:
    """Some heads of some images, with their table ``[g, C, d]``; selects their part of other
    tensors.
    """

    def __init__(self, table: Tensor, images: slice, heads: slice):
        self.images, self.heads = images, heads
        shape = (images.stop - images.start, heads.stop - heads.start)
        self.table = (
            (table if table.shape[0] == 1 else table[heads]).expand(*shape, -1, -1).flatten(0, 1)
        )

    def part(self, x: Tensor) -> Tensor:
        """Return the chunk's part ``[g, ...]`` of ``x [B, h, ...]``."""
        return part_of(x, (self.images, self.heads))

    def part_shared(self, x: Tensor | None) -> Tensor | None:
        """Return the chunk's part of a tensor ``[1 or B, ...]`` that all heads share."""
        return None if x is None else part_of_shared(x, (self.images, self.heads))


def _chunks(q: Tensor, table: Tensor, size: int) -> list[_Chunk]:
    """Return chunks of about ``size`` heads."""
    return [_Chunk(table, *chunk) for chunk in head_chunks(*q.shape[:2], max(1, size))]  # type: ignore[call-arg]


def _counts_and_scale(
    counts: Tensor, total: Tensor | None, mean: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the counts in ``dtype`` and, for "mean", the factor that turns the weight of a class
    into the weight of each of its keys; None for "sum".
    """
    counts = counts.to(dtype)
    if total is None or not mean:
        return counts, None
    # A class without keys adds nothing, for any weight.
    return counts, total.to(dtype) / counts.clamp(min=1)


def _weights(phi: Tensor, table: Tensor, scale: Tensor | None) -> Tensor:
    """Return the weight ``[g, n, C]`` of a key of each class for features ``phi [g, n, d]``."""
    weights = torch.bmm(phi, table.mT)
    return weights if scale is None else weights.mul_(scale)


def _weights_backward(
    d_weights: Tensor,
    query: Tensor,
    phi: Tensor,
    table: Tensor,
    scale: Tensor | None,
    d_table: Tensor,
) -> Tensor:
    """Return the gradient of the queries, ``[g, n, d]``, from ``d_weights [g, n, C]``, which is
    overwritten; add the gradient of the table to ``d_table``.
    """
    if scale is not None:
        d_weights = d_weights.mul_(scale)
    d_table.baddbmm_(d_weights.mT, phi)
    return torch.bmm(d_weights, table).mul_(query.clamp(max=0).exp_())


def _empty_sums(q: Tensor, table: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized memory for values ``[B, h, H, W, e]`` and mass ``[B, h, H, W]``."""
    dtype = wide(table.dtype)
    return tuple(  # type: ignore[return-value]
        table.new_empty(size, dtype=dtype) for size in ((*q.shape[:4], v.shape[4]), q.shape[:4])
    )


def _flops(q, table, v, horizon_y: int, *, backward: bool) -> int:
    """Count the products of queries with the table, and of weights with class sums (tiled form) or
    values (direct form).
    """
    keys, e = v[2] * v[3], v[4]
    terms = keys if direct_is_faster(keys, 2 * horizon_y + 1) else table[1]
    per_query = (3 if backward else 1) * table[1] * table[2] + (2 if backward else 1) * terms * e
    return 2 * prod(q[:4]) * per_query


@operator(fake=_empty_sums, flops=partial(_flops, backward=False))
def class_sums(
    q: Tensor,
    table: Tensor,
    v: Tensor,
    counts: Tensor,
    total: Tensor | None,
    horizon_y: int,
    horizon_x: int,
    later: int = 0,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return ``sum_ab w_ab(y, x) U_ab(y, x)`` (see the module) and the sum of the weights of all
    keys.

    Args:
        q: ``[B, h, H, Wq, d]``, any dtype.
        table: ``[h or 1, C, d]``, ``C = (2Ry+1) * (2Rx+1)`` classes row by row, in the dtype of
            products: float32, float64, or bfloat16 (float32 sums, no gradients).
        v: ``[B, h, H, Wk, e]``, any dtype, 0 where a patch is absent. Wq and Wk may differ only if
            H is 1.
        counts: number of keys in each class for each query, ``[1 or B, H, Wq, C]``.
        total: number of all keys, broadcast to ``[1 or B, H, Wq, 1]``. With ``mean`` the weight of
            a key is ``w_ab total / counts``; without ``mean``, or if None, it is ``w_ab``.
        horizon_y, horizon_x: Ry and Rx.
        later: number of columns by which the keys are shifted to the right compared with ``v``; 0
            unless H is 1.
        mean: see ``total``. The plain form divides by ``total`` either way.

    Returns:
        values ``[B, h, H, Wq, e]`` and mass ``[B, h, H, Wq]``.

    Source: the linear relative position of Scaleformer (section 4) in one dimension; two dimensions
    are ours.
    """
    e, v = v.shape[4], _moved(_with_a_column(v), later)
    values, mass = _empty_sums(q, table, v)
    run = _direct_forward if _takes_direct(v, horizon_y) else _tiled_forward
    counted = _counts_and_scale(counts, total, mean, wide(table.dtype))
    run(q, table, v, *counted, (horizon_y, horizon_x), values, mass)
    return values[..., :e], mass


def _with_a_column(x: Tensor) -> Tensor:
    """Return ``x [..., e]``, or one column of zeros if e is 0: tiles need a width of at least 1."""
    return x if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def _moved(v: Tensor, later: int) -> Tensor:
    """Return values with ``later`` columns of zeros before them."""
    return F.pad(v, (0, 0, later, 0)) if later else v


def _takes_direct(v: Tensor, horizon_y: int) -> bool:
    return direct_is_faster(v.shape[2] * v.shape[3], 2 * horizon_y + 1)


def _tiled_chunks(q: Tensor, table: Tensor, v: Tensor, tiles: QueryTiles):
    """Yield for each chunk of the tiled form: the chunk, its ``QueryTiles.keys``, and its bands."""
    for chunk in in_turn(_chunks(q, table, KEY_ELEMENTS // max(1, prod(v.shape[2:])))):
        keys, heads = tiles.keys(chunk.part(v), table.dtype), len(chunk.table)
        yield chunk, keys, in_turn(tiles.bands(heads, v.shape[4]))


def _band_weights(
    chunk: _Chunk,
    tiles: QueryTiles,
    band: Band,
    q: Tensor,
    counts: Tensor,
    scale: Tensor | None,
):
    """Return the queries, features, weights, counts and scale of a band, in the order of tiles."""
    query = tiles.load(chunk.part(q), band, chunk.table.dtype)
    own_counts = tiles.load(chunk.part_shared(counts), band, counts.dtype)
    if scale is not None:
        scale = tiles.load(chunk.part_shared(scale), band, scale.dtype)
    phi = elu1(query)
    return query, phi, _weights(phi, chunk.table, scale), own_counts, scale


def _tiled_forward(q, table, v, counts, scale, horizons, values: Tensor, mass: Tensor) -> None:
    tiles = QueryTiles(q.shape[2], max(q.shape[3], v.shape[3]), horizons, q.device)
    for chunk, keys, bands in _tiled_chunks(q, table, v, tiles):
        out, out_mass = chunk.part(values), chunk.part(mass).unsqueeze(3)
        for band in bands:
            _, _, w, own_counts, _ = _band_weights(chunk, tiles, band, q, counts, scale)
            tiles.store((w * own_counts).sum(2, keepdim=True), band, out_mass)
            windows = tiles.windows(keys, tiles.where(len(keys), band))
            sums = torch.bmm(tiles.spread(w), windows)
            tiles.store(sums.view(len(w), -1, v.shape[4]), band, out)


def _direct_chunks(
    q: Tensor,
    table: Tensor,
    v: Tensor,
    counts: Tensor,
    scale: Tensor | None,
    horizons: tuple[int, int],
):
    """Yield for each chunk of the direct form: the chunk, its queries, values, counts and scale,
    and the class of each pair.
    """
    index = _class_index(tuple(q.shape[2:4]), tuple(v.shape[2:4]), horizons, v.device)
    counts, scale = counts.flatten(1, 2), None if scale is None else scale.flatten(1, 2)
    for chunk in in_turn(_chunks(q, table, PAIRS // max(1, index.numel()))):
        query, value = (chunk.part(x).flatten(1, 2).to(table.dtype) for x in (q, v))
        yield (
            chunk,
            query,
            value,
            chunk.part_shared(counts),
            chunk.part_shared(scale),
            index.expand(len(query), -1, -1),
        )


def _class_index(
    queries: tuple[int, int], keys: tuple[int, int], horizons: tuple[int, int], device
) -> Tensor:
    """Return the class of each key for each query, ``[Hq * Wq, Hk * Wk]``."""
    axes = []
    for n, m, horizon in zip(queries, keys, horizons, strict=True):
        delta = torch.arange(m, device=device) - torch.arange(n, device=device)[:, None]
        axes.append(delta.clamp(-horizon, horizon) + horizon)
    rows, columns = axes
    return (
        (rows[:, None, :, None] * (2 * horizons[1] + 1) + columns[None, :, None, :])
        .flatten(2)
        .flatten(0, 1)
    )


def _direct_forward(q, table, v, counts, scale, horizons, values: Tensor, mass: Tensor) -> None:
    for chunk, query, value, counts_, scale_, index in _direct_chunks(
        q, table, v, counts, scale, horizons
    ):
        w = _weights(elu1(query), chunk.table, scale_)
        chunk.part(mass).flatten(1).copy_((w * counts_).sum(2))
        chunk.part(values).flatten(1, 2).copy_(torch.bmm(w.gather(2, index), value))


@operator(
    fake=lambda q, table, v: contiguous_like(q, table, v), flops=partial(_flops, backward=True)
)
@skips_idle_rows("d_values d_mass", rows="q")
def class_sums_backward(
    d_values: Tensor,
    d_mass: Tensor,
    q: Tensor,
    table: Tensor,
    v: Tensor,
    counts: Tensor,
    total: Tensor | None,
    horizon_y: int,
    horizon_x: int,
    later: int = 0,
    mean: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``class_sums`` with respect to q, table and v; weights are
    recomputed.
    """
    e, v = v.shape[4], _moved(_with_a_column(v), later)
    d_values = _with_a_column(d_values)
    grads = dq, d_table, dv = contiguous_like(q, table, v)
    d_table.zero_()
    run = _direct_backward if _takes_direct(v, horizon_y) else _tiled_backward
    counted = _counts_and_scale(counts, total, mean, wide(table.dtype))
    run(q, table, v, *counted, (horizon_y, horizon_x), d_values, d_mass, *grads)
    return dq, d_table, dv[:, :, :, later:, :e].contiguous()


def _tiled_backward(
    q, table, v, counts, scale, horizons, d_values, d_mass, dq: Tensor, d_table: Tensor, dv: Tensor
) -> None:
    tiles = QueryTiles(q.shape[2], max(q.shape[3], v.shape[3]), horizons, q.device)
    for chunk, keys, bands in _tiled_chunks(q, table, v, tiles):
        d_keys, d_own_table = (
            torch.zeros_like(keys),
            torch.zeros_like(chunk.table),
        )
        grad, grad_mass = chunk.part(d_values), chunk.part(d_mass).unsqueeze(3)
        for band in bands:
            query, phi, w, own_counts, own_scale = _band_weights(
                chunk, tiles, band, q, counts, scale
            )
            own_grad = tiles.load(grad, band, table.dtype).view(-1, tiles.queries, v.shape[4])
            places = tiles.where(len(keys), band)
            d_windows = torch.bmm(tiles.spread(w).mT, own_grad).flatten(0, 1)
            d_keys.flatten(0, 2).index_add_(0, places, d_windows)
            # The gradient of the weights, through the sums of values and through the mass, the sum
            # of weight times count.
            d_spread = torch.bmm(own_grad, tiles.windows(keys, places).mT)
            d_w = tiles.collect(d_spread, w.shape[2]).view_as(w)
            d_w.addcmul_(tiles.load(grad_mass, band, table.dtype), own_counts)
            d_query = _weights_backward(d_w, query, phi, chunk.table, own_scale, d_own_table)
            tiles.store(d_query, band, chunk.part(dq))
        add_of_heads(d_table, d_own_table, chunk.heads)
        chunk.part(dv).copy_(tiles.keys_backward(d_keys, v.shape[3]))


def _direct_backward(
    q, table, v, counts, scale, horizons, d_values, d_mass, dq: Tensor, d_table: Tensor, dv: Tensor
) -> None:
    for chunk, query, value, counts_, scale_, index in _direct_chunks(
        q, table, v, counts, scale, horizons
    ):
        grad, grad_mass = chunk.part(d_values).flatten(1, 2), chunk.part(d_mass).flatten(1)
        phi = elu1(query)
        w = _weights(phi, chunk.table, scale_)
        chunk.part(dv).flatten(1, 2).copy_(torch.bmm(w.gather(2, index).mT, grad))
        # The gradient of each pair's weight, summed by class.
        d_w = (
            torch.zeros_like(w)
            .scatter_add_(2, index, torch.bmm(grad, value.mT))
            .addcmul_(grad_mass.unsqueeze(2), counts_)
        )
        d_own_table = torch.zeros_like(chunk.table)
        chunk.part(dq).flatten(1, 2).copy_(
            _weights_backward(d_w, query, phi, chunk.table, scale_, d_own_table)
        )
        add_of_heads(d_table, d_own_table, chunk.heads)


differentiate(class_sums, class_sums_backward, outputs="values mass", gradients="q table v")
