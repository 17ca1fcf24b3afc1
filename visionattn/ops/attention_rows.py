"""Attention weights of chosen queries over all keys.

The operations never store these weights. A row of weights takes time and memory linear in the
number of keys, so a few rows are affordable for images of any size. Each row sums to 1, and the
mean of the values under it is the output of the operation with the same name. Rows have no
gradient.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.attention_sums import accumulation_dtype, divisor_of
from visionattn.ops.checks import (
    check_attention,
    check_coefficients,
    check_layout,
    check_temperature,
    described,
)
from visionattn.ops.feature_maps import (
    elu1,
    get_feature_map,
    key_features,
    map_name,
    query_features,
    raised,
)
from visionattn.ops.nonfinite import masked
from visionattn.ops.position.relative_position import (
    Axial,
    Flat,
    RelativePosition,
    mask_absent,
    tables_of,
)
from visionattn.ops.taylorshift.taylorshift_features import unit
from visionattn.ops.window import WINDOW_SIZE, check_windows


class AttentionRows(NamedTuple):
    """Rows of attention weights; float32 (float64 for float64 inputs)."""

    content: Tensor
    """``[B, h, Q, M]``: the part of each weight from the content. Under a softmax it is the whole
    weight, because the bias of relative position is not a separate summand.
    """
    relative: Tensor | None
    """``[B, h, Q, M]``: the part of each weight from relative position; None without one."""

    @property
    def total(self) -> Tensor:
        """Return the weights ``[B, h, Q, M]``; each row sums to 1, or to 0 if all weights of the
        query are 0.
        """
        return self.content if self.relative is None else self.content + self.relative


@torch.no_grad()
def taylorshift_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    temperature: Tensor | None = None,
    coefficients: tuple[float, float, float] = (0.5, 1.0, 1.0),
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> AttentionRows:
    """Return rows of ``taylorshift_attention``; see there for the other arguments.

    Args:
        rows: int64 ``[Q]``, indices of queries, from 0 to N - 1.

    Raises:
        ValueError: as the operation, or ``rows`` is out of range.
    """
    operands = _checked_operands(q, k, rows, relative, key_mask)
    check_coefficients(coefficients)
    check_temperature(temperature, q)
    (a, b, c), queries, keys = coefficients, operands.queries, operands.keys
    if temperature is not None:
        tau = temperature.to(queries.dtype)[:, None, None]
        queries, keys = tau * unit(queries), unit(keys)
    x = queries @ keys.mT
    return _linear_rows(operands, (a * x + b) * x + c, elu1(operands.queries))


@torch.no_grad()
def kernelized_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    feature_map="elu1",
    causal: bool = False,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> AttentionRows:
    """Return rows of ``kernelized_attention``; arguments and errors as for ``taylorshift_rows``."""
    operands = _checked_operands(q, k, rows, relative, key_mask, causal)
    feature_map, queries, keys = get_feature_map(feature_map), operands.queries, operands.keys
    if map_name(feature_map) == "elu1":  # see ``raised``: a common factor of all weights cancels
        queries = raised(queries, (3,))
        if relative is None and not causal:
            keys = raised(keys, (2, 3), operands.mask)
    phi_q = query_features(feature_map, queries)
    phi_k = key_features(feature_map, keys, operands.mask, phi_q.shape[3])
    return _linear_rows(operands, phi_q @ phi_k.mT, elu1(queries))


@torch.no_grad()
def softmax_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    causal: bool = False,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> AttentionRows:
    """Return rows of ``softmax_attention``; arguments and errors as for ``taylorshift_rows``."""
    operands = _checked_operands(q, k, rows, relative, key_mask, causal, signed=True)
    return _softmax_rows(operands, operands.visible)


@torch.no_grad()
def window_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    window_size: int = WINDOW_SIZE,
    shifted: bool = False,
    layout: TokenLayout | None = None,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> AttentionRows:
    """Return rows of ``window_attention``; arguments and errors as for ``taylorshift_rows``."""
    check_windows(layout, relative, window_size)
    grid_layout = layout if relative is None else relative.layout
    check_layout(grid_layout, q, k)
    if relative is None:
        key_mask = grid_layout.key_mask(key_mask)
    operands = _checked_operands(q, k, rows, relative, key_mask, signed=True)
    pairs, _, down, right = _places(grid_layout, k, rows)
    first, same_window = window_size // 2 if shifted else 0, pairs
    for positions in (down, right):
        window = (positions - first).div(window_size, rounding_mode="floor")
        same_window = same_window & (window[:, rows, None] == window[:, None])
    # Prefix tokens belong to all windows.
    return _softmax_rows(operands, operands.visible & (same_window | ~pairs))


ROWS: dict[str, Callable[..., AttentionRows]] = {
    "taylorshift": taylorshift_rows,
    "kernelized": kernelized_rows,
    "softmax": softmax_rows,
    "window": window_rows,
}
"""The function of each attention, by its name in ``attentions.py``."""


class _Operands(NamedTuple):
    """The operands of one call: chosen queries ``[B, h, Q, d]``, all keys ``[B, h, M, d]``, and
    ``visible``, the keys that each query sees, bool ``[B or 1, Q or 1, M]``.
    """

    queries: Tensor
    keys: Tensor
    rows: Tensor
    relative: RelativePosition | None
    mask: Tensor | None
    visible: Tensor


def _checked_operands(
    q: Tensor, k: Tensor, rows: Tensor, relative, key_mask, causal=False, *, signed=False
) -> _Operands:
    check_attention(q, k, k, key_mask, relative, signed=signed)
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
        raise ValueError(f"rows: expected int64 [Q], indices of queries, got {described(rows)}")
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < q.shape[2]:
        raise ValueError(
            f"rows: expected indices of queries from 0 to {q.shape[2] - 1}, got {int(rows.min())} "
            f"to {int(rows.max())}"
        )
    relative, mask = mask_absent(relative, key_mask)
    dtype, keys = accumulation_dtype(q, k), torch.arange(k.shape[2], device=k.device)
    visible = (keys >= 0)[None, None] if mask is None else mask[:, None]
    if causal:
        visible = visible & (keys <= rows[:, None])
    selected = q[:, :, rows].to(dtype), masked(k, mask).to(dtype)
    return _Operands(*selected, rows, relative, mask, visible)


def _places(
    layout: TokenLayout | None, k: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which pairs of query and key are both patches, bool ``[1, Q, M]``, and the positions
    of the tokens.

    The positions are the index on the grid, the row and the column, each ``[B or 1, M]``. They are
    arbitrary for prefix tokens.
    """
    tokens, prefix, width, index = torch.arange(k.shape[2], device=k.device), 0, k.shape[2], None
    if layout is not None:
        prefix, width, index = layout.num_prefix, layout.grid.width, layout.kept
    index = tokens[None, : len(tokens) - prefix] if index is None else index
    index, patch = F.pad(index, (prefix, 0)), tokens >= prefix
    pairs = (patch[rows][:, None] & patch)[None]
    return pairs, index, index.div(width, rounding_mode="floor"), index % width


def _scores(operands: _Operands, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each table the scores of all pairs, and the number of keys in each pair's class.

    The score of a pair of class c is ``features . table_c``, ``[B, h, Q, M]``; it is 0 unless both
    tokens are patches. The numbers of visible keys are ``[B or 1, 1, Q, M]``, at least 1.
    """
    pairs, *positions = _places(operands.relative.layout, operands.keys, operands.rows)
    tables = tables_of(operands.relative).values()
    axes_of_tables = [positions[:1]] if isinstance(operands.relative, Flat) else [positions[1:]]
    if isinstance(operands.relative, Axial):
        axes_of_tables = [positions[1:2], positions[2:]]
    for table, table_axes in zip(tables, axes_of_tables, strict=True):
        classes = torch.zeros_like(pairs, dtype=torch.int64)
        for axis, size in zip(table_axes, table.shape[1:-1], strict=True):
            offset = axis[:, None] - axis[:, operands.rows, None]
            classes = classes * size + offset.clamp(-(size // 2), size // 2) + size // 2
        table = table.flatten(1, -2).to(features.dtype)
        index, visible_pairs = torch.broadcast_tensors(classes, pairs & operands.visible)
        counts = index.new_zeros(*index.shape[:2], table.shape[1])
        counts = counts.scatter_add_(2, index, visible_pairs.long()).gather(2, index).clamp(min=1)
        scores = features @ table.mT
        scores = scores.gather(3, classes[:, None].expand(*scores.shape[:2], -1, -1))
        yield scores.masked_fill(~pairs[:, None], 0), counts[:, None]


def _linear_rows(operands: _Operands, content: Tensor, features: Tensor) -> AttentionRows:
    """Return the rows for content weights ``[B, h, Q, M]``; ``features`` are ``elu1`` of the
    queries.
    """
    hidden = ~operands.visible[:, None]
    content = content.masked_fill(hidden, 0)
    if operands.relative is None:
        return AttentionRows(content / divisor_of(content.sum(-1)), None)
    mean, relative = operands.relative.normalization == "mean", torch.zeros_like(content)
    if mean:
        content = content / operands.visible.sum(-1).clamp(min=1)[:, None, :, None]
    for scores, counts in _scores(operands, features):
        relative += (scores / counts if mean else scores).masked_fill(hidden, 0)
    mass = divisor_of(content.sum(-1) + relative.sum(-1))
    return AttentionRows(content / mass, relative / mass)


def _softmax_rows(operands: _Operands, visible: Tensor) -> AttentionRows:
    """Return the rows of a softmax over the keys that are ``visible [B or 1, Q or 1, M]``."""
    scores = operands.queries @ operands.keys.mT
    if operands.relative is not None:
        scores = scores + sum(bias for bias, _ in _scores(operands, operands.queries))
    scores = scores * operands.queries.shape[3] ** -0.5
    empty = ~visible.any(-1, keepdim=True)[:, None]
    scores = scores.masked_fill(~visible[:, None], float("-inf")).masked_fill(empty, 0)
    return AttentionRows(scores.softmax(-1).masked_fill(empty, 0), None)
