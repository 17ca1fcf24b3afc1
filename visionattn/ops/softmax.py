"""Softmax attention, exact and quadratic: the baseline of the linear forms.

This module computes the mask of pairs and the bias of relative position, from the scores that
``relative_scores`` returns. Softmax and products are PyTorch's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.attention_sums import drop_values
from visionattn.ops.checks import check_attention, check_options
from visionattn.ops.nonfinite import finite_inputs, masked
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.position_scores import relative_scores
from visionattn.ops.position.relative_position import Flat, Joint, RelativePosition, mask_absent


def _flat_bias(q: Tensor, table: Tensor, num_keys: int, prefix: int = 0) -> Tensor:
    """Return ``q . r`` along the sequence, ``[B, h, P + N, P + M]`` for ``q [B, h, N, d]``.

    The sequence is treated as a grid of one row.
    """
    return relative_scores(q.unsqueeze(2), table.unsqueeze(1), 1, num_keys, prefix)


def _axis_bias(q: Tensor, table: Tensor) -> Tensor:
    """Return ``q . r`` of each pair of queries in the same row, ``[B, h, X, N, N]`` for
    ``q [B, h, X, N, d]`` with X rows of N.
    """
    batch, lines = q.shape[0], q.shape[2]
    return (
        _flat_bias(q.transpose(1, 2).flatten(0, 1), table, q.shape[3])
        .unflatten(0, (batch, lines))
        .transpose(1, 2)
    )


def _patch_bias(q: Tensor, relative: RelativePosition, prefix: int) -> Tensor:
    """Return ``q . r / sqrt(d)`` of each pair of patches of the whole grid,
    ``[B, h, P + H*W, P + H*W]`` for ``q [B, h, H*W, d]``.
    """
    scale, (height, width) = q.shape[3] ** -0.5, relative.layout.grid
    if isinstance(relative, Flat):
        return _flat_bias(q, relative.table * scale, height * width, prefix)
    q = q.unflatten(2, (height, width))
    if isinstance(relative, Joint):
        return relative_scores(q, relative.table * scale, height, width, prefix)
    rows = _axis_bias(q.transpose(2, 3), relative.rows * scale).transpose(2, 3)
    columns = _axis_bias(q, relative.columns * scale)
    # Contiguous operands give a contiguous sum, which ``flatten`` does not copy.
    scores = rows.contiguous().unsqueeze(5) + columns.contiguous().unsqueeze(4)
    return _add_prefix(scores.flatten(4, 5).flatten(2, 3), prefix)


def _add_prefix(bias: Tensor, prefix: int) -> Tensor:
    """Put rows and columns of 0 in front of ``bias [B, h, n, n]``."""
    return F.pad(bias, (prefix, 0, prefix, 0)) if prefix else bias


def relative_bias(q: Tensor, relative: RelativePosition, num_keys: int) -> Tensor:
    """Return the dense bias ``q_i . r_class(i,j) / sqrt(d)``, ``[B, h, N, M]``; 0 for pairs with a
    prefix token.

    Args:
        q: ``[B, h, N, d]``.
        relative: ``Joint``, ``Axial`` or ``Flat`` with signed tables.
        num_keys: M; N with a layout.

    Source: Shaw et al. 2018, eq. 5; two dimensions are ours.
    """
    layout = relative.layout
    if layout is None:
        return _flat_bias(q, relative.table * q.shape[3] ** -0.5, num_keys)
    patches = q[:, :, layout.num_prefix :]
    if layout.kept is None:
        return _patch_bias(patches, relative, layout.num_prefix)
    bias = _patch_bias(layout.on_grid(q).flatten(2, 3), relative, prefix=0)
    bias = layout.off_grid(bias.unflatten(2, layout.grid))
    bias = bias.gather(3, layout.kept[:, None, None, :].expand(*bias.shape[:3], -1))
    return _add_prefix(bias, layout.num_prefix)


def _visible(q: Tensor, k: Tensor, causal: bool, key_mask: Tensor | None) -> Tensor | None:
    """Return the pairs that take part, bool ``[B or 1, 1, N or 1, M]``; None: all."""
    visible = None if key_mask is None else key_mask[:, None, None, :]
    if causal:
        past = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        visible = past[None, None] if visible is None else visible & past
    return visible


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
    value_drop: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Compute ``softmax((q k^T + q r^T) / sqrt(d)) v`` through ``F.scaled_dot_product_attention``.

    Time is quadratic in the number of tokens; with a relative position, memory is quadratic too.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``.
        causal: query i attends to keys 0 to i, in token order (also with a layout); queries from M
            on attend to all keys.
        relative: signed tables; ``normalization`` must be "sum", its default. ``Flat`` without a
            layout allows any N and M. With ``R >= max(N, M) - 1`` each offset has its own entry;
            offsets beyond a smaller R use the outermost entries.
        key_mask: bool ``[B, M]``, True takes part. A query without keys gets 0, with zero gradient.
            Contents of masked keys have no effect, NaN and inf included. On a CPU outside of
            compiled graphs, this also holds for tokens that causal attention hides.
        value_drop: drop whole rows of v with this probability and scale up the others; see
            ``drop_values``.
        generator: random generator for value_drop.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, a layout with another number of
            tokens than N or M, or a normalization other than "sum".

    Source: Vaswani et al. 2017, eq. 1; Ukhov, relative attention, eq. 1, where offsets run from
    future to past.
    """
    check_attention(q, k, v, key_mask, relative, signed=True)
    check_options(value_drop=value_drop, generator=generator, device=q.device)
    if relative is not None and relative.normalization != "sum":
        raise ValueError('normalization="mean" is undefined for a softmax; use "sum"')
    relative, key_mask = mask_absent(relative, key_mask)
    if key_mask is not None:
        k, v = (masked(x, key_mask) for x in (k, v))
    q, k, v, nan_term = finite_inputs(q, k, v, causal)
    mask, empty = None, None
    if key_mask is not None or (causal and relative is not None):
        mask = _visible(q, k, causal, key_mask)
        if key_mask is not None:
            # A query without keys attends to all of them, and its output is then set to 0. This
            # avoids 0/0 forward and backward.
            empty = ~mask.any(-1, keepdim=True)
            mask = mask | empty
    if relative is not None:
        with without_autocast(q):
            bias = relative_bias(q, relative, k.shape[2])
        mask = bias if mask is None else bias.masked_fill_(~mask, float("-inf"))
    v_kept = drop_values(v, value_drop, generator).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k.to(q.dtype), v_kept, attn_mask=mask, is_causal=causal and mask is None
    )
    out = out if nan_term is None else out + nan_term
    return (out if empty is None else out.masked_fill(empty, 0)).to(v.dtype)
