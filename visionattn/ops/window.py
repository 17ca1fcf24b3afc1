"""Window attention: exact softmax within each window of a grid, linear in the number of patches.

This module cuts the grid into windows and decides which tokens attend to each other. Results and
gradients are computed window by window, with a few windows in memory at a time. ``relative_scores``
computes the scores of relative position; the forward softmax is PyTorch's
``scaled_dot_product_attention``.

No window is padded. Windows at the borders are smaller, so there are at most nine groups of windows
of equal size. A grid of 5 x 9 with windows of 4, with one letter per group; on the right the
windows are shifted by half a window:

    a a a a b b b b c        a a b b b b c c c
    a a a a b b b b c        a a b b b b c c c
    a a a a b b b b c        d d e e e e f f f
    a a a a b b b b c        d d e e e e f f f
    d d d d e e e e f        d d e e e e f f f
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.attention_sums import accumulation_dtype, drop_values, tokens_first
from visionattn.ops.checks import check_attention, check_layout, check_options
from visionattn.ops.chunking import chunks
from visionattn.ops.nonfinite import is_known_finite
from visionattn.ops.operator import contiguous_like, differentiate, operator, without_autocast
from visionattn.ops.position.position_scores import (
    relative_scores,
    relative_scores_backward,
    score_flops,
)
from visionattn.ops.position.relative_position import Axial, Flat, Joint, RelativePosition

WINDOW_SIZE = 7
"""Default number of patches along a side of a window, as in Swin."""
CACHED_ELEMENTS = 1 << 19
"""Maximum number of scores in memory at a time on a CPU, so that they stay in cache."""
ELEMENTS_AT_ONCE = 1 << 26
"""Maximum number of scores in memory at a time on other devices, where a piece is one launch."""
WINDOWS_AT_ONCE = 1 << 15
"""Maximum number of windows in one call of PyTorch's attention; GPUs allow 65,535."""


class _Piece(NamedTuple):
    """Adjacent windows of equal size in some images.

    If ``rows`` is None, the piece is the prefix tokens, which attend to all tokens.
    """

    images: slice
    rows: slice | None
    columns: slice
    side: tuple[int, int]
    prefix: int
    width: int
    """Patches in a row of the grid."""

    def view(self, x: Tensor) -> Tensor:
        """Return the patches of ``x [B, h, P + H*W, c]`` by window,
        ``[b, windows down, windows across, h, height, width, c]``.
        """
        x = x[self.images, :, self.prefix :].unflatten(2, (-1, self.width))
        x = x[:, :, self.rows, self.columns]
        x = x.unflatten(3, (-1, self.side[1])).unflatten(2, (-1, self.side[0]))
        return x.permute(0, 2, 4, 1, 3, 5, 6)

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of each window, ``[windows, h, height * width, c]``."""
        if self.rows is None:
            return x[self.images, :, : self.prefix]
        return self.view(x).flatten(0, 2).flatten(2, 3)

    def keys(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return a copy of the keys of each window, ``[windows, h, P + height * width, c]``.

        Prefix tokens come first, then the patches of the window. Keys outside ``seen`` are 0.
        """
        if self.rows is None:
            keys = x[self.images].clone()
        else:
            own, size = self.view(x), self.prefix + self.side[0] * self.side[1]
            keys = own.new_empty(*own.shape[:4], size, own.shape[6])
            keys[..., : self.prefix, :] = x[self.images, :, : self.prefix][:, None, None]
            keys[..., self.prefix :, :].unflatten(4, self.side).copy_(own)
            keys = keys.flatten(0, 2)
        return keys if seen is None else keys.masked_fill_(~seen.mT, 0)

    def seen(self, visible: Tensor | None) -> Tensor | None:
        """Return which of the keys of each window take part, bool ``[windows, 1, 1, P + n]``."""
        return None if visible is None else self.keys(visible[:, None, :, None]).mT

    def bias(self, q: Tensor, table: Tensor | None) -> Tensor | None:
        """Return ``q . r / sqrt(d)`` of the pairs of each window, ``[windows, h, n, P + n]``; 0 for
        prefix tokens as keys.
        """
        if table is None or self.rows is None:
            return None
        scaled = table.to(q.dtype) * q.shape[3] ** -0.5
        scores = relative_scores(q.unflatten(2, self.side), scaled, *self.side, self.prefix)
        return scores[:, :, self.prefix :]

    def add(self, x: Tensor, total: Tensor, prefix: int = 0) -> None:
        """Add ``x``, laid out like ``queries`` (``prefix`` 0) or like ``keys``, to
        ``total [B, h, P + H*W, c]``.
        """
        if self.rows is None:
            total[self.images, :, : x.shape[2]] += x
            return
        target = self.view(total)
        x = x.unflatten(0, target.shape[:3])
        target += x[..., prefix:, :].unflatten(4, self.side)
        if prefix:
            total[self.images, :, :prefix] += x[..., :prefix, :].sum((1, 2))


def _segments(length: int, window: int, shifted: bool) -> list[tuple[int, int, int]]:
    """Cut an axis into windows; return begin, end and window size for each run of equal windows.

    Window borders count from the beginning and do not depend on the length.
    """
    first = min(window // 2, length) if shifted else 0
    inner = first + (length - first) // window * window
    cuts = [(0, first, first), (first, inner, window), (inner, length, length - inner)]
    return [cut for cut in cuts if cut[0] < cut[1]]


def _pieces(q: Tensor, height: int, width: int, window: int, shifted: bool) -> Iterator[_Piece]:
    """Yield all windows of ``q [B, h, P + H*W, d]``, in pieces within the limits on scores and
    windows, and then the prefix tokens.
    """
    batch, heads, tokens = q.shape[:3]
    prefix = tokens - height * width
    most = CACHED_ELEMENTS if q.device.type == "cpu" else ELEMENTS_AT_ONCE
    for top, bottom, rows in _segments(height, window, shifted):
        for left, right, columns in _segments(width, window, shifted):
            across, down = (right - left) // columns, (bottom - top) // rows
            scores = heads * rows * columns * (prefix + rows * columns)
            at_once = max(1, min(most // scores, WINDOWS_AT_ONCE) // across)
            for images in chunks(batch, max(1, at_once // down)):
                for part in chunks(down, at_once):
                    of_rows = slice(top + part.start * rows, top + part.stop * rows)
                    across_all = slice(left, right)
                    yield _Piece(images, of_rows, across_all, (rows, columns), prefix, width)
    for b in range(batch if prefix else 0):
        yield _Piece(slice(b, b + 1), None, slice(0), (0, 0), prefix, width)


def _softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor:
    """Return ``softmax(q k^T / sqrt(d) + bias) v`` over the keys in ``seen``; 0 without any.

    Values outside ``seen`` must be 0.
    """
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    # A query without keys attends to all of them. Their values are 0, so its result is 0, not 0/0.
    mask = seen | ~seen.any(-1, keepdim=True)
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _softmax_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``_softmax`` with respect to q, k, v and the scores, and q.

    If a gradient or q has NaN or inf, rows of q whose result receives no gradient are returned
    as 0.
    """
    scale = q.shape[3] ** -0.5
    weights = torch.matmul(q * scale, k.mT)
    if bias is not None:
        weights += bias
    if seen is not None:
        weights.masked_fill_(~seen, float("-inf"))
    weights = weights.softmax(-1)
    if seen is not None:
        weights.masked_fill_(~seen.any(-1, keepdim=True), 0)
    d_scores = torch.matmul(grad, v.mT)
    d_scores = weights * (d_scores - (weights * d_scores).sum(-1, keepdim=True))
    idle = None
    if not is_known_finite(d_scores, q):
        # A query without upstream gradient may hold anything, and so may keys that only such
        # queries see.
        idle = (grad == 0).all(-1, keepdim=True)
        q = q.masked_fill(idle, 0)
        weights, d_scores = (x.masked_fill_(idle, 0) for x in (weights, d_scores))
    d_q = torch.matmul(d_scores, k).mul_(scale)
    if idle is not None:
        d_q.masked_fill_(idle, 0)
    d_k = torch.matmul(d_scores.mT, q).mul_(scale)
    return d_q, d_k, torch.matmul(weights.mT, grad), d_scores, q


def _flops(q, v, table, height: int, width: int, window: int, shifted: bool, *, backward: bool):
    """Count the products of visible pairs and of relative position.

    The backward pass includes the recomputed scores.
    """
    (batch, heads, tokens, d), e, prefix = q, v[3], q[2] - height * width
    pairs, relative = prefix * tokens, 0
    for top, bottom, rows in _segments(height, window, shifted):
        for left, right, columns in _segments(width, window, shifted):
            patches = (bottom - top) * (right - left)
            pairs += patches * (prefix + rows * columns)
            if table is not None:
                queries = (batch * (patches // (rows * columns)), heads, rows, columns, d)
                relative += score_flops(queries, table, rows, columns, backward=False)
    content = 2 * batch * heads * pairs * ((3 * d + 2 * e) if backward else (d + e))
    return content + relative * (3 if backward else 1)


@operator(
    fake=lambda q, v: tokens_first(v, *v.shape),
    flops=partial(_flops, backward=False),
)
def windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    visible: Tensor | None,
    height: int,
    width: int,
    window: int,
    shifted: bool,
) -> Tensor:
    """Return the output of window attention, ``[B, h, P + H*W, e]``; autograd saves only the
    inputs.

    Args:
        q, k, v: ``[B, h, P + H*W, d]``, twice, and ``[B, h, P + H*W, e]``, of one dtype, patches
            row by row.
        table: signed, ``[h or 1, 2Ry+1, 2Rx+1, d]``; None: no relative position.
        visible: bool ``[B, P + H*W]``, the tokens that take part as keys; None: all.
        height, width: H, W.
        window: patches along a side of a window.
        shifted: begin with half a window.
    """
    out = tokens_first(v, *v.shape).zero_()
    for piece in _pieces(q, height, width, window, shifted) if out.numel() else ():
        queries, seen = piece.queries(q), piece.seen(visible)
        keys, values = (piece.keys(x, seen) for x in (k, v))
        piece.add(_softmax(queries, keys, values, piece.bias(queries, table), seen), out)
    return out


@operator(
    fake=lambda q, k, v, table: contiguous_like(q, k, v, table, like=q),
    flops=partial(_flops, backward=True),
)
def windows_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    visible: Tensor | None,
    height: int,
    width: int,
    window: int,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``windows`` with respect to q, k, v and the table (empty if None).

    Weights are recomputed window by window, in float32 or wider.
    """
    wide, scale = accumulation_dtype(q), q.shape[3] ** -0.5
    d_q, d_k, d_v = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    d_table = q.new_zeros(0 if table is None else table.shape, dtype=wide)
    nonempty = d_q.numel() and d_v.numel()
    for piece in _pieces(q, height, width, window, shifted) if nonempty else ():
        queries, upstream = (piece.queries(x).to(wide) for x in (q, grad))
        seen = piece.seen(visible)
        keys, values = (piece.keys(x, seen).to(wide) for x in (k, v))
        bias = piece.bias(queries, table)
        grads = _softmax_backward(upstream, queries, keys, values, bias, seen)
        own_q, own_k, own_v, d_scores, queries = grads
        if bias is not None:
            d_scores, side = d_scores[..., piece.prefix :] * scale, piece.side
            relative_q, more_table = relative_scores_backward(
                d_scores, queries.unflatten(2, side), table.to(wide), *side, 0
            )
            own_q += relative_q.flatten(2, 3)
            d_table += more_table
        piece.add(own_q, d_q)
        piece.add(own_k, d_k, piece.prefix)
        piece.add(own_v, d_v, piece.prefix)
    d_table = d_table.to(q.dtype if table is None else table.dtype)
    return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_table


differentiate(windows, windows_backward, outputs="out", gradients="q k v table")


def _table_of(relative: RelativePosition | None) -> Tensor | None:
    """Return the table of both axes; for ``Axial`` the sum of its two tables."""
    if isinstance(relative, Axial):
        return relative.rows[:, :, None] + relative.columns[:, None]
    return None if relative is None else relative.table


def check_windows(
    layout: TokenLayout | None, relative: RelativePosition | None, window_size: int
) -> None:
    """Raise ValueError unless there is one layout, relative position on a grid if any, and a window
    size of at least 1.
    """
    if isinstance(relative, Flat):
        raise ValueError("relative: expected Joint or Axial for windows on a grid, got Flat")
    if (layout is None) == (relative is None):
        got = "neither" if layout is None else "both"
        raise ValueError(f"expected layout, or relative, which has its own, got {got}")
    if relative is not None and relative.normalization != "sum":
        raise ValueError('normalization="mean" is undefined for a softmax; use "sum"')
    check_window_size(window_size)


def check_window_size(window_size: int) -> None:
    """Raise ValueError unless it is an integer of at least 1."""
    if not isinstance(window_size, int) or isinstance(window_size, bool) or window_size < 1:
        raise ValueError(
            f"window_size: expected an integer of at least 1 patch, got {window_size!r}"
        )


def _completed(x: Tensor, layout: TokenLayout) -> Tensor:
    """Return ``x [B, h, P + n, c]`` on the whole grid, ``[B, h, P + H*W, c]``, with 0 for missing
    patches.
    """
    return torch.cat([x[:, :, : layout.num_prefix], layout.on_grid(x).flatten(2, 3)], 2)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int = WINDOW_SIZE,
    shifted: bool = False,
    layout: TokenLayout | None = None,
    relative: Joint | Axial | None = None,
    key_mask: Tensor | None = None,
    value_drop: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute ``softmax((q k^T + q r^T) / sqrt(d)) v`` within windows of the grid.

    Each patch attends to the patches of its window and to the prefix tokens. Prefix tokens attend
    to all tokens.

    Windows begin at the top left; at the bottom and right borders they are as large as the grid
    allows. Time is linear in the number of patches: each patch has at most ``P + window_size^2``
    keys. The weights of a few windows are in memory at a time, forward and backward. With 6 heads
    of width 64 in float32, peak memory is 13 MiB above the result; in a training step it is 39 MiB
    above result and gradients. Both figures hold for 4,096 and for 16,384 patches (measured with
    torch's profiler on a CPU).

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, N, d]``, ``[B, h, N, e]`` with N tokens of the layout.
        window_size: patches along a side of a window.
        shifted: the first window of each axis has half a side, ``window_size // 2`` patches.
            Alternating with unshifted windows, it connects patches across window borders.
        layout: the grid positions of the tokens, and which are missing or absent. Needed without
            ``relative``, refused with it, because ``relative`` has a layout.
        relative: signed tables; offsets within a window use the middle entries. With
            ``R >= window_size - 1`` each offset has its own entry. ``normalization`` must be "sum",
            its default.
        key_mask: bool ``[B, N]``, True takes part. A query without keys gets 0, with zero gradient.
            Contents of masked keys, absent patches and other windows have no effect, NaN and inf
            included. In the backward pass this also holds for queries whose result receives no
            gradient.
        value_drop: drop whole rows of v with this probability and scale up the others; see
            ``drop_values``.
        generator: random generator for value_drop.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a layout with another number of
            tokens than N, no layout or two, ``Flat``, or a normalization other than "sum".

    Source: Liu et al. 2021 (Swin), section 3.2, with the relative position of Shaw et al. 2018, eq.
    5, in place of its bias, and smaller windows at the borders in place of its cyclic shift; prefix
    tokens are ours.
    """
    check_windows(layout, relative, window_size)
    check_attention(q, k, v, key_mask, relative, signed=True)
    layout = layout if relative is None else relative.layout
    check_layout(layout, q, k)
    check_options(value_drop=value_drop, generator=generator, device=q.device)
    tokens = [q, k.to(q.dtype), drop_values(v, value_drop, generator).to(q.dtype)]
    visible = layout.key_mask(key_mask)
    if layout.kept is not None:
        if visible is None:
            visible = layout.kept.new_ones(q.shape[0], layout.num_tokens, dtype=torch.bool)
        tokens = [_completed(x, layout) for x in tokens]
        visible = _completed(visible[:, None, :, None], layout)[:, 0, :, 0]
    with without_autocast(q):
        out = windows(*tokens, _table_of(relative), visible, *layout.grid, window_size, shifted)
    if layout.kept is not None:
        prefix, patches = out[:, :, : layout.num_prefix], out[:, :, layout.num_prefix :]
        patches = layout.off_grid(patches.unflatten(2, layout.grid))
        out = torch.cat([prefix, patches], 2)
    return out.to(v.dtype)
