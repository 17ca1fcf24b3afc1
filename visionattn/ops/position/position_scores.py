"""Scores of clipped relative position for every pair of query and key, as one operator with its
gradient, for use in a softmax.

This module expands one score per class to one score per pair. The table has two axes, rows and
columns; an unused axis has length 1. Callers handle softmax and masks.

A block is b queries of one row of the grid. Each query has a score for every column offset that
occurs in the block, and they are stored as one line of memory per query. Column j of the grid is at
a different place in each line, one further left per query. So a view whose stride per query is one
less than a line has all keys in order, without an index lookup. For b = 3 queries and 4 keys, with
``c`` the place in the line (``.`` is not read):

    c         0  1  2  3  4  5          lines of 6, viewed with a stride of 5 from c = 2
    query 0   .  .  0  1  2  3    ->    0  1  2  3
    query 1   . -1  0  1  2  .         -1  0  1  2
    query 2  -2 -1  0  1  .  .         -2 -1  0  1

Offsets beyond the horizon repeat the score of the outermost class. Rows need no shift, because all
queries of a block are in one row.
"""

from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from visionattn.ops.attention_sums import accumulation_dtype
from visionattn.ops.chunking import chunks
from visionattn.ops.operator import contiguous_like, differentiate, operator

BLOCK_QUERIES = 128


@dataclass(frozen=True)
class _Reach:
    """Consecutive offsets along one axis.

    ``classes`` are the classes that occur. ``before`` and ``after`` are the numbers of further
    offsets, beyond the horizon, in the first and in the last of them.
    """

    classes: slice
    before: int
    after: int

    def spread(self, x: Tensor, dim: int) -> Tensor:
        """Expand one entry per class to one per offset."""
        if not (self.before or self.after):
            return x
        before, after = list(x.shape), list(x.shape)
        before[dim], after[dim] = self.before, self.after
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
        return torch.cat([first.expand(before), x, last.expand(after)], dim)

    def collect(self, grad: Tensor, dim: int) -> Tensor:
        """Sum one entry per offset to one per class: the transpose of ``spread``."""
        if not (self.before or self.after):
            return grad
        num, last = grad.shape[dim], grad.shape[dim] - self.after
        out = grad.narrow(dim, self.before, last - self.before).clone()
        out.select(dim, 0).add_(grad.narrow(dim, 0, self.before).sum(dim))
        out.select(dim, out.shape[dim] - 1).add_(grad.narrow(dim, last, num - last).sum(dim))
        return out


def _reach(first: int, count: int, num_classes: int) -> _Reach:
    """Return the ``_Reach`` of the offsets ``first .. first + count - 1``, with ``first <= 0``, for
    ``num_classes`` = 2R+1 classes.
    """
    horizon = num_classes // 2
    low, high = (max(-horizon, min(horizon, offset)) for offset in (first, first + count - 1))
    before = min(low - first, count - 1)
    return _Reach(
        slice(low + horizon, high + horizon + 1), before, count - before - (high - low + 1)
    )


def _shifted(lines: Tensor, width: int) -> Tensor:
    """Return a view ``[..., b, H, width]`` of contiguous lines ``[..., b, H, b - 1 + width]``, in
    which query i begins at place ``b - 1 - i``.
    """
    block, heads = lines.shape[-3], lines.stride()[:-3]
    strides = (*heads, lines.stride(-3) - 1, lines.stride(-2), 1)
    return lines.as_strided((*lines.shape[:-1], width), strides, lines.storage_offset() + block - 1)


def _blocks(q: Tensor, table: Tensor, height: int, width: int):
    """Yield for each block of queries its row, its columns, and its offsets along rows and along
    columns.
    """
    for y in range(q.shape[2]):
        for x in chunks(q.shape[3], BLOCK_QUERIES):
            columns = _reach(1 - x.stop, x.stop - x.start - 1 + width, table.shape[2])
            yield y, x, _reach(-y, height, table.shape[1]), columns


def _by_head(x: Tensor, y: int, columns: slice) -> Tensor:
    """Return the queries of one block as a view, heads first: ``[h, B, b, ...]`` of
    ``x [B, h, H, W, ...]``.
    """
    return x[:, :, y, columns].transpose(0, 1)


def _classes(table: Tensor, rows: _Reach, columns: _Reach, q: Tensor) -> Tensor:
    """Return the n table entries that occur in a block, in the dtype of q, ``[h, n, d]``."""
    return (
        table[:, rows.classes, columns.classes].flatten(1, 2).to(q.dtype).expand(q.shape[1], -1, -1)
    )


def _pairs(matrix: Tensor, q: Tensor, height: int, width: int, prefix: int) -> Tensor:
    """Return the pairs of patches in ``matrix [B, h, P + H*W, P + height*width]`` as a view
    ``[B, h, H, W, height, width]``.
    """
    return matrix[:, :, prefix:, prefix:].unflatten(3, (height, width)).unflatten(2, q.shape[2:4])


def _empty_scores(q: Tensor, height: int, width: int, prefix: int) -> Tensor:
    return q.new_empty(*q.shape[:2], prefix + q.shape[2] * q.shape[3], prefix + height * width)


def score_flops(q, table, height: int, width: int, *, backward: bool) -> int:
    """Count the products of each query with the table entries that may occur on the grid."""
    _, _, rows, columns, _ = q
    classes = min(table[1], rows + height - 1) * min(table[2], columns + width - 1)
    return 2 * prod(q) * classes * (2 if backward else 1)


@operator(fake=_empty_scores, flops=partial(score_flops, backward=False))
def relative_scores(q: Tensor, table: Tensor, height: int, width: int, prefix: int = 0) -> Tensor:
    """Return the score of each query and key, ``[B, h, P + H*W, P + height*width]``: ``q_yx . r``
    with the class ``(clip(u - y), clip(w - x))`` for the key at (u, w).

    Autograd saves only q and the table. In addition to the result, the scores of one block of at
    most 128 queries are in memory.

    Args:
        q: ``[B, h, H, W, d]``, any strides.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, past to future; the horizons may exceed the grid.
        height, width: size of the grid of the keys, with the same top left as the grid of queries.
        prefix: P, the number of rows and columns of 0 in front.

    Returns:
        Scores in the dtype of q; a gradient of the table is summed in float32 or wider.

    Source: Shaw et al. 2018, eq. 5, with clipping. The strided view corresponds to the stacked
    diagonals of Ukhov's relative attention, which run from future to past; blocks and two
    dimensions are ours.
    """
    out = _empty_scores(q, height, width, prefix)
    out[:, :, :prefix] = 0
    out[:, :, prefix:, :prefix] = 0
    pairs = _pairs(out, q, height, width, prefix)
    if pairs.numel() == 0:
        return out
    for y, x, rows, columns in _blocks(q, table, height, width):
        queries, entries = _by_head(q, y, x), _classes(table, rows, columns, q)
        # One score per occurring class, repeated beyond the horizon, and viewed with a shift that
        # aligns the keys.
        scores = torch.bmm(queries.flatten(1, 2), entries.mT)
        num_rows = rows.classes.stop - rows.classes.start
        scores = scores.unflatten(1, queries.shape[1:3]).unflatten(3, (num_rows, -1))
        scores = _shifted(columns.spread(scores, 4), width)
        # Rows of keys beyond the horizon take the scores of the outermost class of rows.
        target, end = _by_head(pairs, y, x), rows.before + num_rows
        target[..., rows.before : end, :] = scores
        target[..., : rows.before, :] = scores[..., :1, :]
        target[..., end:, :] = scores[..., -1:, :]
    return out


@operator(
    fake=lambda q, table: contiguous_like(q, table), flops=partial(score_flops, backward=True)
)
def relative_scores_backward(
    grad: Tensor, q: Tensor, table: Tensor, height: int, width: int, prefix: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``relative_scores`` with respect to q and the table for
    ``grad [B, h, P + H*W, P + height*width]``.
    """
    d_q = q.new_zeros(q.shape)
    d_table = table.new_zeros(table.shape, dtype=accumulation_dtype(q, table))
    pairs = _pairs(grad, q, height, width, prefix)
    if pairs.numel() == 0:
        return d_q, d_table.to(table.dtype)
    for y, x, rows, columns in _blocks(q, table, height, width):
        queries, entries = _by_head(q, y, x), _classes(table, rows, columns, q)
        # The forward steps in reverse: repeated scores are summed, the shifted view is written to.
        d_scores = rows.collect(_by_head(pairs, y, x), 3)
        lines = d_scores.new_zeros(*d_scores.shape[:4], x.stop - x.start - 1 + width)
        _shifted(lines, width).copy_(d_scores)
        lines = columns.collect(lines, 4).flatten(3, 4).flatten(1, 2)
        _by_head(d_q, y, x).copy_(torch.bmm(lines, entries).unflatten(1, queries.shape[1:3]))
        d_entries = torch.bmm(lines.mT, queries.flatten(1, 2)).to(d_table.dtype)
        if table.shape[0] == 1:
            d_entries = d_entries.sum(0, keepdim=True)
        part = d_table[:, rows.classes, columns.classes]
        part += d_entries.view(part.shape)
    return d_q, d_table.to(table.dtype)


differentiate(relative_scores, relative_scores_backward, outputs="scores", gradients="q table")
