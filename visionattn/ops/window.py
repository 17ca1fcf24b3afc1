"""Window attention: an exact softmax among the patches of each window of a grid, whose time and
memory grow linearly with the patches.

It owns the windows: where they begin, which tokens see each other, and how results and gradients
are made window by window, a few of them in memory at a time. The scores of relative position are
those of ``relative_scores``, and the softmax forward is PyTorch's
``scaled_dot_product_attention``.

No window is padded. The windows of a grid fall into at most nine pieces of equal ones: those
within, and those at its borders, which are smaller. A grid of 5 x 9 with windows of 4, on the right
shifted by half a window:

    a a a a b b b b c        a a b b b b c c c
    a a a a b b b b c        a a b b b b c c c
    a a a a b b b b c        d d e e e e f f f
    a a a a b b b b c        d d e e e e f f f
    d d d d e e e e f        d d e e e e f f f
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.checks import check_attention, check_layout, check_options
from visionattn.ops.chunking import chunks
from visionattn.ops.nonfinite import is_known_finite
from visionattn.ops.operator import contiguous_like, differentiate, operator, without_autocast
from visionattn.ops.position.kinds import Axial, Flat, Joint, RelativePosition
from visionattn.ops.position.scores import (
    relative_scores,
    relative_scores_backward,
    score_flops,
)
from visionattn.ops.sums import accumulation_dtype, drop_values, tokens_first

WINDOW_SIZE = 7
"""Patches along a side of a window unless another number is given, as in Swin."""
CACHED_ELEMENTS = 1 << 19
"""Scores that are in memory at a time on a processor, where they should stay in cache."""
ELEMENTS_AT_ONCE = 1 << 26
"""Likewise elsewhere, where each piece is a launch of its own."""
WINDOWS_AT_ONCE = 1 << 15
"""Windows that one call of PyTorch's attention gets: GPUs number 65,535 at most."""


@dataclass(frozen=True)
class _Piece:
    """Windows of ``height`` x ``width`` patches beside each other, of some images."""

    images: slice
    rows: slice
    columns: slice
    height: int
    width: int

    def view(self, x: Tensor, prefix: int, row: int) -> Tensor:
        """Return the windows of ``x [B, h, P + H*W, c]``, whose rows have so many patches, as a
        view ``[b, windows down, windows across, h, height, width, c]``.
        """
        x = x[self.images, :, prefix:].unflatten(2, (-1, row))[:, :, self.rows, self.columns]
        x = x.unflatten(3, (-1, self.width)).unflatten(2, (-1, self.height))
        return x.permute(0, 2, 4, 1, 3, 5, 6)

    def take(self, x: Tensor, prefix: int, row: int) -> Tensor:
        """Return a copy, ``[windows, h, height * width, c]``."""
        return self.view(x, prefix, row).flatten(0, 2).flatten(2, 3)

    def take_keys(self, x: Tensor, prefix: int, row: int) -> Tensor:
        """Return what each window sees, ``[windows, h, P + height * width, c]``: the prefix tokens
        before its own patches.
        """
        own = self.view(x, prefix, row)
        seen = own.new_empty(
            *own.shape[:4], prefix + self.height * self.width, own.shape[6], dtype=x.dtype
        )
        seen[..., :prefix, :] = x[self.images, :, :prefix][:, None, None]
        seen[..., prefix:, :].unflatten(4, (self.height, self.width)).copy_(own)
        return seen.flatten(0, 2)


def _segments(length: int, window: int, shifted: bool) -> list[tuple[int, int, int]]:
    """Cut an axis into windows: begin, end and size of those that are equal and beside each other.

    Where they begin does not depend on the length: patches that are absent at the end of an axis
    change nothing.
    """
    first = min(window // 2, length) if shifted else 0
    inner = first + (length - first) // window * window
    cuts = [(0, first, first), (first, inner, window), (inner, length, length - inner)]
    return [cut for cut in cuts if cut[0] < cut[1]]


def _pieces(q: Tensor, height: int, width: int, window: int, shifted: bool) -> Iterator[_Piece]:
    """Yield all windows for ``q [B, h, P + H*W, d]``, so many at once as their scores may be."""
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
                    yield _Piece(images, of_rows, slice(left, right), rows, columns)


def _bias(q: Tensor, table: Tensor | None, piece: _Piece, prefix: int) -> Tensor | None:
    """Return ``q . r / sqrt(d)`` of the pairs of each window, 0 for prefix tokens as keys:
    ``[windows, h, n, P + n]``.
    """
    if table is None:
        return None
    scaled, side = table.to(q.dtype) * q.shape[3] ** -0.5, (piece.height, piece.width)
    return relative_scores(q.unflatten(2, side), scaled, *side, prefix)[:, :, prefix:]


def _seen(visible: Tensor | None, piece: _Piece, prefix: int, width: int) -> Tensor | None:
    """Return which of the keys of each window take part, bool ``[windows, 1, 1, P + n]``."""
    if visible is None:
        return None
    return piece.take_keys(visible[:, None, :, None], prefix, width).transpose(2, 3)


def _masked(x: Tensor, seen: Tensor | None) -> Tensor:
    """Set keys or values ``[..., M, c]`` of one's own to 0 where ``seen [..., 1, M]`` has none."""
    return x if seen is None else x.masked_fill_(~seen.transpose(2, 3), 0)


def _softmax(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor:
    """Return ``softmax(q k^T / sqrt(d) + bias) v`` over the keys that are seen, where the values of
    the others are 0; 0 without any.
    """
    if seen is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    # Where there is no key, all are seen instead, whose values are 0: no 0/0.
    mask = seen | ~seen.any(-1, keepdim=True)
    if bias is not None:
        mask = bias.masked_fill(~mask, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _softmax_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``_softmax`` with respect to q, k, v and the scores, and q as far as
    it has a part in them: 0 where a query's result receives no gradient.
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
    if not is_known_finite(d_scores):
        # What such a query holds, or a key that such queries alone see, may be anything.
        idle = (grad == 0).all(-1, keepdim=True)
        q = q.masked_fill(idle, 0)
        weights, d_scores = (x.masked_fill_(idle, 0) for x in (weights, d_scores))
    d_q = torch.matmul(d_scores, k).mul_(scale)
    if idle is not None:
        d_q.masked_fill_(idle, 0)
    d_k = torch.matmul(d_scores.mT, q).mul_(scale)
    return d_q, d_k, torch.matmul(weights.mT, grad), d_scores, q


def _flops(q, v, table, height: int, width: int, window: int, shifted: bool, *, backward: bool):
    """Count the products of pairs that see each other and those of relative position; backward
    makes the scores once more.
    """
    batch, heads, tokens, d = q
    e, prefix = v[3], tokens - height * width
    pairs, relative = prefix * tokens, 0
    for top, bottom, rows in _segments(height, window, shifted):
        for left, right, columns in _segments(width, window, shifted):
            windows = (bottom - top) // rows * ((right - left) // columns)
            pairs += windows * rows * columns * (prefix + rows * columns)
            if table is not None:
                queries = (batch * windows, heads, rows, columns, d)
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
    """Return the means of v, ``[B, h, P + H*W, e]``; keeps its inputs alone.

    Args:
        q, k, v: ``[B, h, P + H*W, d or e]`` of one dtype, patches row by row.
        table: signed, ``[h or 1, 2Ry+1, 2Rx+1, d]``.
        visible: bool ``[B, P + H*W]``, which tokens take part as keys.
        height, width: H, W.
        window: patches along a side of a window.
        shifted: begin with half a window.
    """
    out = tokens_first(v, *v.shape)
    if out.numel() == 0:
        return out
    prefix, seen = q.shape[2] - height * width, None
    for piece in _pieces(q, height, width, window, shifted):
        queries, seen = piece.take(q, prefix, width), _seen(visible, piece, prefix, width)
        keys, values = (_masked(piece.take_keys(x, prefix, width), seen) for x in (k, v))
        own = _softmax(queries, keys, values, _bias(queries, table, piece, prefix), seen)
        target = piece.view(out, prefix, width)
        target.copy_(own.view(target.shape))
    if prefix:
        # Prefix tokens see all that take part.
        for b in range(q.shape[0]):
            image, seen = slice(b, b + 1), None
            keys, values = k[image], v[image]
            if visible is not None:
                seen = visible[image, None, None]
                keys, values = (_masked(x.clone(), seen) for x in (keys, values))
            out[image, :, :prefix] = _softmax(q[image, :, :prefix], keys, values, None, seen)
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
    """Return the gradients of ``windows`` with respect to q, k, v and the table, empty where there
    is none. The weights are made once more, window by window, in float32 or wider.
    """
    wide, prefix = accumulation_dtype(q), q.shape[2] - height * width
    d_q, d_k, d_v = (x.new_zeros(x.shape, dtype=wide) for x in (q, k, v))
    d_table = None if table is None else table.new_zeros(table.shape, dtype=wide)
    nothing = d_q.numel() == 0 or d_v.numel() == 0
    for piece in () if nothing else _pieces(q, height, width, window, shifted):
        queries, above = (piece.take(x, prefix, width).to(wide) for x in (q, grad))
        seen = _seen(visible, piece, prefix, width)
        keys, values = (_masked(piece.take_keys(x, prefix, width).to(wide), seen) for x in (k, v))
        bias = _bias(queries, table, piece, prefix)
        *found, d_scores, queries = _softmax_backward(above, queries, keys, values, bias, seen)
        if table is not None:
            side, scale = (piece.height, piece.width), q.shape[3] ** -0.5
            more, of_table = relative_scores_backward(
                d_scores[..., prefix:] * scale, queries.unflatten(2, side), table.to(wide), *side, 0
            )
            found[0] += more.flatten(2, 3)
            d_table += of_table
        # Each patch is in one window; the gradients of prefix tokens are sums over all windows.
        for total, own in zip((d_q, d_k, d_v), found, strict=True):
            target = piece.view(total, prefix, width)
            many = own.unflatten(0, target.shape[:3])
            if total is not d_q:
                total[piece.images, :, :prefix] += many[..., :prefix, :].sum((1, 2))
                many = many[..., prefix:, :]
            target += many.unflatten(4, (piece.height, piece.width))
    for b in range(0 if nothing or not prefix else q.shape[0]):
        image = slice(b, b + 1)
        seen = None if visible is None else visible[image, None, None]
        queries, above = (x[image, :, :prefix].to(wide) for x in (q, grad))
        keys, values = (x[image].to(wide) for x in (k, v))
        if seen is not None:
            keys, values = (_masked(x.clone(), seen) for x in (keys, values))
        more_q, more_k, more_v, *_ = _softmax_backward(above, queries, keys, values, None, seen)
        d_q[image, :, :prefix] += more_q
        d_k[image] += more_k
        d_v[image] += more_v
    d_q, d_k, d_v = d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
    return d_q, d_k, d_v, q.new_empty(0) if d_table is None else d_table.to(table.dtype)


differentiate(windows, windows_backward, outputs="out", gradients="q k v table")


def _table_of(relative: RelativePosition | None) -> Tensor | None:
    """Return the table of both axes; that of ``Axial`` is the sum of its two."""
    if isinstance(relative, Axial):
        return relative.rows[:, :, None] + relative.columns[:, None]
    return None if relative is None else relative.table


def _check(layout: TokenLayout | None, relative: RelativePosition | None, window_size: int) -> None:
    if isinstance(relative, Flat):
        raise ValueError("relative: windows are of a grid, wanted Joint or Axial, got Flat")
    if (layout is None) == (relative is None):
        said = "neither" if layout is None else "both"
        raise ValueError(f"wanted layout, or relative, which has its own, got {said}")
    if relative is not None and relative.normalization != "sum":
        raise ValueError('normalization="mean" has no meaning under a softmax; leave it at "sum"')
    check_window_size(window_size)


def check_window_size(window_size: int) -> None:
    """Raise ValueError unless it is a whole number from 1."""
    if not isinstance(window_size, int) or isinstance(window_size, bool) or window_size < 1:
        raise ValueError(
            f"window_size: wanted a whole number of patches from 1, got {window_size!r}"
        )


def _on_grid(x: Tensor, layout: TokenLayout) -> Tensor:
    """Spread tokens ``[B, h, P + n, c]`` over the whole grid, ``[B, h, P + H*W, c]``, with 0 where
    a patch is missing.
    """
    index = layout.kept[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    patches = x.new_zeros(*x.shape[:2], layout.grid.num_patches, x.shape[3])
    prefix, own = x[:, :, : layout.num_prefix], x[:, :, layout.num_prefix :]
    return torch.cat([prefix, patches.scatter(2, index, own)], 2)


def _off_grid(x: Tensor, layout: TokenLayout) -> Tensor:
    """Undo ``_on_grid``."""
    index = layout.kept[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return torch.cat(
        [x[:, :, : layout.num_prefix], x[:, :, layout.num_prefix :].gather(2, index)], 2
    )


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
    """Compute ``softmax((q k^T + q r^T) / sqrt(d)) v`` where each patch sees the patches of its
    window of the grid, and the prefix tokens; those see all tokens, and all see them.

    Windows begin at the top left, and at the bottom and the right they are as large as the grid
    leaves them. Time and memory are linear in the patches: each has ``P + window_size^2`` keys at
    most. Weights of a few windows at a time are in memory, forward and backward.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, N, d]``, ``[B, h, N, e]`` with N tokens of the layout.
        window_size: patches along a side of a window.
        shifted: the first window of each axis has half a side, ``window_size // 2`` patches, so
            that in turns with windows that are not shifted, what lies on both sides of a border
            meets.
        layout: where the tokens lie, and which are missing or absent; left out with ``relative``,
            which has its own.
        relative: signed tables, of which offsets within a window use the middle: with
            ``R >= window_size - 1`` each has an entry of its own. ``normalization`` has no meaning.
        key_mask: bool ``[B, N]``, True takes part. A query that sees no key gets 0, with zero
            gradient. What masked keys, absent patches and other windows hold plays no part, NaN
            and inf included; of a query whose result receives no gradient neither.
        value_drop: drop whole rows of v with this probability and scale up the others; see
            ``drop_values``.
        generator: of the draws of value_drop.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a layout of another number of tokens
            than N, none or two layouts, ``Flat``, or a normalization other than the default.

    Source: Liu et al. 2021 (Swin), section 3.2, with the relative position of Shaw et al. 2018, eq.
    5, in place of its bias, and smaller windows at the borders in place of its cyclic shift; prefix
    tokens are ours.
    """
    _check(layout, relative, window_size)
    check_attention(q, k, v, key_mask, relative, signed=True)
    layout = layout if relative is None else relative.layout
    check_layout(layout, q, k)
    check_options(value_drop=value_drop, generator=generator, device=q.device)
    tokens = [q, k.to(q.dtype), drop_values(v, value_drop, generator).to(q.dtype)]
    visible = layout.key_mask(key_mask)
    if layout.kept is not None:
        if visible is None:
            visible = layout.kept.new_ones(q.shape[0], layout.num_tokens, dtype=torch.bool)
        tokens = [_on_grid(x, layout) for x in tokens]
        visible = _on_grid(visible[:, None, :, None], layout)[:, 0, :, 0]
    with without_autocast(q):
        out = windows(*tokens, _table_of(relative), visible, *layout.grid, window_size, shifted)
    return (out if layout.kept is None else _off_grid(out, layout)).to(v.dtype)
