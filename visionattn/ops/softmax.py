"""Softmax attention, exact and quadratic: the baseline against which the linear forms are judged."""

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.checks import check_attention, check_options
from visionattn.ops.relative import Axial, Flat, Joint, RelativePosition


def _one_hot_classes(length: int, horizon: int, like: Tensor) -> Tensor:
    """``E [N, 2R+1, M]`` of 0 and 1: whether key j is in class a as seen from query i, on an axis of N = M places."""
    i = torch.arange(length, device=like.device)
    delta = (i[None, None, :] - i[:, None, None]).clamp(-horizon, horizon) + horizon
    return (delta == torch.arange(2 * horizon + 1, device=like.device)[:, None]).to(like.dtype)


def _grid_scores(q: Tensor, relative: Joint, layout: TokenLayout) -> Tensor:
    """``q . r`` of each pair of places on the grid, ``[B, h, H*W, H*W]`` for ``q [B, h, H*W, d]``.

    Products with constant one-hot matrices spread the scores of the classes over the keys: exact, and their gradient is
    a matrix product too, where that of a gather would be a scatter.
    """
    height, width = layout.grid.height, layout.grid.width
    table = relative.table.to(q.dtype)
    scores = torch.einsum("bhnd,hacd->bhnac", q, table.expand(q.shape[1], -1, -1, -1)).unflatten(2, (height, width))
    columns = _one_hot_classes(width, table.shape[2] // 2, q)
    rows = _one_hot_classes(height, table.shape[1] // 2, q)
    by_column = torch.einsum("bhyxrc,xcw->bhyxrw", scores, columns)
    return torch.einsum("bhyxrw,yru->bhyxuw", by_column, rows).flatten(4, 5).flatten(2, 3)


def relative_bias(q: Tensor, relative: RelativePosition) -> Tensor:
    """``q_i . r_class(i,j) / sqrt(d)``, dense: ``[B, h, N, N]``; 0 for pairs with a prefix token.

    Args:
        q: ``[B, h, N, d]``.
        relative: ``Joint`` with a signed table.

    Source: Shaw et al. 2018, eq. 5; in two dimensions ours.
    """
    layout = relative.layout
    patches = q[:, :, layout.num_prefix :] * q.shape[3] ** -0.5
    if layout.kept is not None:
        index = layout.kept[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
        patches = patches.new_zeros(*q.shape[:2], layout.grid.num_patches, q.shape[3]).scatter(2, index, patches)
    bias = _grid_scores(patches, relative, layout)
    if layout.kept is not None:
        index = layout.kept[:, None, :, None].expand(-1, q.shape[1], -1, bias.shape[3])
        bias = bias.gather(2, index)
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
        relative: ``Joint`` with a signed table, as a dense bias ``[B, h, N, N]``. ``Flat`` and ``Axial`` are not built yet.
        key_mask: bool ``[B, M]``, True takes part. A query without any key gets 0.
        value_drop, generator: not built yet; anything but 0 raises NotImplementedError.

    Returns:
        ``[B, h, N, e]`` in the dtype of v.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, or a normalization other than the default.
        NotImplementedError: an option that is not built yet.
    """
    check_attention(q, k, v, key_mask, relative, signed=True)
    check_options(causal=causal, value_drop=value_drop)
    if relative is not None and relative.normalization != "sum":
        raise ValueError('normalization="mean" has no meaning under a softmax; leave it at "sum"')
    if isinstance(relative, (Flat, Axial)):
        raise NotImplementedError(f"softmax with {type(relative).__name__} is not built yet; use Joint")
    mask = None if key_mask is None else key_mask[:, None, None, :]
    if relative is not None:
        with torch.autocast(q.device.type, enabled=False):
            bias = relative_bias(q, relative)
        mask = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    out = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
    if key_mask is not None:
        out = out.masked_fill(~key_mask.any(-1)[:, None, None, None], 0)
    return out.to(v.dtype)
