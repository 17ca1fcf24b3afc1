"""Softmax attention, exact and quadratic: the baseline against which the linear forms are judged."""

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.checks import check_attention, check_options
from visionattn.ops.relative import Flat, Joint, RelativePosition
from visionattn.ops.sums import without_autocast


def _one_hot_classes(length: int, horizon: int, like: Tensor) -> Tensor:
    """``E [N, 2R+1, M]`` of 0 and 1: whether key j is in class a as seen from query i, on an axis of N = M places."""
    i = torch.arange(length, device=like.device)
    delta = (i[None, None, :] - i[:, None, None]).clamp(-horizon, horizon) + horizon
    return (delta == torch.arange(2 * horizon + 1, device=like.device)[:, None]).to(like.dtype)


def _axis_scores(q: Tensor, table: Tensor) -> Tensor:
    """``q . r`` of each pair of places on one axis, ``[B, h, N, X, M]`` for ``q [B, h, N, X, d]``: X rides along.

    Products with a constant one-hot matrix spread the scores of the classes over the keys: exact, and their gradient is a
    matrix product too, where that of a gather would be a scatter.
    """
    scores = torch.einsum("bhnxd,hcd->bhnxc", q, table.to(q.dtype).expand(q.shape[1], -1, -1))
    return torch.einsum("bhnxc,ncm->bhnxm", scores, _one_hot_classes(q.shape[2], table.shape[1] // 2, q))


def _joint_scores(q: Tensor, table: Tensor) -> Tensor:
    """``q . r`` of each pair of places on the grid, ``[B, h, H, W, H, W]`` for ``q [B, h, H, W, d]``."""
    scores = torch.einsum("bhyxd,hrcd->bhyxrc", q, table.to(q.dtype).expand(q.shape[1], -1, -1, -1))
    columns = _one_hot_classes(q.shape[3], table.shape[2] // 2, q)
    rows = _one_hot_classes(q.shape[2], table.shape[1] // 2, q)
    return torch.einsum("bhyxrw,yru->bhyxuw", torch.einsum("bhyxrc,xcw->bhyxrw", scores, columns), rows)


def _flat_bias(q: Tensor, table: Tensor) -> Tensor:
    """``q . r`` along the sequence, ``[B, h, N, M]``, M = N."""
    scores = torch.matmul(q, table.to(q.dtype).mT)
    i, horizon = torch.arange(q.shape[2], device=q.device), table.shape[1] // 2
    index = (i - i[:, None]).clamp(-horizon, horizon) + horizon
    return scores.gather(3, index.expand(*scores.shape[:2], -1, -1))


def _patch_bias(q: Tensor, relative: RelativePosition) -> Tensor:
    """``q . r`` of each pair of patches of the whole grid, ``[B, h, H*W, H*W]`` for ``q [B, h, H*W, d]``."""
    if isinstance(relative, Flat):
        return _flat_bias(q, relative.table)
    q = q.unflatten(2, tuple(relative.layout.grid))
    if isinstance(relative, Joint):
        scores = _joint_scores(q, relative.table)
    else:
        rows = _axis_scores(q, relative.rows).unsqueeze(5)
        columns = _axis_scores(q.transpose(2, 3), relative.columns).transpose(2, 3).unsqueeze(4)
        scores = rows + columns
    return scores.flatten(4, 5).flatten(2, 3)


def relative_bias(q: Tensor, relative: RelativePosition) -> Tensor:
    """``q_i . r_class(i,j) / sqrt(d)``, dense: ``[B, h, N, N]``; 0 for pairs with a prefix token.

    Args:
        q: ``[B, h, N, d]``.
        relative: ``Joint``, ``Axial`` or ``Flat`` with signed tables.

    Source: Shaw et al. 2018, eq. 5; in two dimensions ours.
    """
    layout = relative.layout
    if layout is None:
        return _flat_bias(q * q.shape[3] ** -0.5, relative.table)
    patches = q[:, :, layout.num_prefix :] * q.shape[3] ** -0.5
    if layout.kept is None:
        bias = _patch_bias(patches, relative)
    else:
        index = layout.kept[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        whole = patches.new_zeros(*q.shape[:2], layout.grid.num_patches, q.shape[3]).scatter(2, index, patches)
        bias = _patch_bias(whole, relative)
        bias = bias.gather(2, layout.kept[:, None, :, None].expand(-1, q.shape[1], -1, bias.shape[3]))
        bias = bias.gather(3, layout.kept[:, None, None, :].expand(*bias.shape[:3], -1))
    return F.pad(bias, (layout.num_prefix, 0, layout.num_prefix, 0))


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
    """``softmax((q k^T + q r^T) / sqrt(d)) v`` through ``F.scaled_dot_product_attention``.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``.
        causal: not built yet; True raises NotImplementedError.
        relative: signed tables, as a dense bias ``[B, h, N, N]``; ``normalization`` has no meaning here. N = M.
        key_mask: bool ``[B, M]``, True takes part. A query without any key gets 0.
        value_drop: drop whole rows of v with this probability and scale up the others; see ``value_drop.py``.
        generator: of the draws of value_drop.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a normalization other than the default.
        NotImplementedError: an option that is not built yet.
    """
    check_attention(q, k, v, key_mask, relative, signed=True)
    check_options(value_drop=value_drop, generator=generator)
    if relative is not None and relative.normalization != "sum":
        raise ValueError('normalization="mean" has no meaning under a softmax; leave it at "sum"')
    if relative is not None and q.shape[2] != k.shape[2]:
        raise NotImplementedError(f"relative position under a softmax wants N = M, got {q.shape[2]} and {k.shape[2]}")
    mask = None if key_mask is None else key_mask[:, None, None, :]
    if relative is not None:
        with without_autocast(q):
            bias = relative_bias(q, relative)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
    if key_mask is not None:
        out = out.masked_fill(~key_mask.any(-1)[:, None, None, None], 0)
    return out.to(v.dtype)
