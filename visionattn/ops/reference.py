"""The definition of each operation: quadratic and plain, in the dtype of the inputs.

Every function computes all weights ``[B, h, N, M]`` of its formula and then the weighted mean of
the values. Tests and tools compare the fast operations with this module; nothing else imports it.
It has no forms, blocks or kernels, and leaves argument checks to the public operations.

A relative position is an object of ``ops/position/relative_position.py``, recognized by its fields:
``rows`` and ``columns`` (Axial), a table ``[h or 1, 2R+1, 2R+1, d]`` (Joint) or a table
``[h or 1, 2R+1, d]`` (Flat).
"""

import torch
from torch import Tensor

from visionattn.layout import TokenLayout


def taylorshift_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    temperature: Tensor | None = None,
    coefficients: tuple[float, float, float] = (0.5, 1.0, 1.0),
    relative=None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    output_scale: bool = False,
) -> Tensor:
    """Return the mean of v under the weights ``a x^2 + b x + c`` of ``x = q.k``.

    Args:
        q: ``[B, h, N, d]``.
        k: ``[B, h, M, d]``.
        v: ``[B, h, M, e]``.
        temperature: ``[h]``; q is scaled to this length, and k to unit length. None: both are
            unchanged.
        coefficients: ``(a, b, c)``.
        relative: adds the weights of ``relative_weights``.
        key_mask: ``[B, M]`` bool, True takes part.
        causal: query i attends to keys 0 to i only.
        output_scale: multiply the result by ``sqrt(keys / d)``, with ``keys`` the number of keys
            that take part.

    Returns:
        ``[B, h, N, e]``; 0 where no key takes part.

    Source: TaylorShift (Nauen et al. 2024), eq. 2; the general polynomial and the relative term are
    ours.
    """
    a, b, c = coefficients
    present = _present(k, key_mask, relative)
    queries, keys = q, k
    if temperature is not None:
        queries, keys = temperature.to(q.dtype)[:, None, None] * unit_length(q), unit_length(k)
    x = queries @ keys.mT
    out = _weighted_mean(a * x * x + b * x + c, v, relative, q, present, causal)
    if output_scale:
        keys_seen = present.sum(-1).to(out.dtype)
        out = out * (keys_seen / q.shape[-1]).sqrt()[:, None, None, None]
    return out


def kernelized_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map="elu1",
    relative=None,
    key_mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Return the mean of v under the weights ``phi(q).phi(k)``; 0 if all weights of a query are 0.

    Args:
        q: ``[B, h, N, d]``.
        k: ``[B, h, M, d]``.
        v: ``[B, h, M, e]``.
        feature_map: "elu1", "relu", "softmax" (for q over the features; for k over the positions
            that take part, times their number), or an object with ``.query`` and ``.key``.
        relative: adds the weights of ``relative_weights``.
        key_mask: ``[B, M]`` bool, True takes part.
        causal: query i attends to keys 0 to i only.

    Returns:
        ``[B, h, N, e]``.

    Source: Katharopoulos et al. 2020, eq. 4 and 7 ("elu1"); Shen et al. 2021, eq. 7 ("softmax").
    """
    present = _present(k, key_mask, relative)
    if feature_map == "softmax":
        phi_q, phi_k = q.softmax(-1), _softmax_over_positions(k, present)
    elif isinstance(feature_map, str):
        phi = {"elu1": elu1, "relu": torch.relu}[feature_map]
        phi_q, phi_k = phi(q), phi(k)
    else:
        phi_q, phi_k = feature_map.query(q), feature_map.key(k)
    return _weighted_mean(phi_q @ phi_k.mT, v, relative, q, present, causal)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``softmax(q.k / sqrt(d) + bias) v`` over the keys that take part; 0 where there are
    none.

    Args:
        q: ``[B, h, N, d]``.
        k: ``[B, h, M, d]``.
        v: ``[B, h, M, e]``.
        causal: query i attends to keys 0 to i only.
        key_mask: ``[B, M]`` bool, True takes part.
        bias: broadcasts to ``[B, h, N, M]``; added to the scaled scores.

    Source: Vaswani et al. 2017, eq. 1.
    """
    present = _present(k, key_mask)[:, None, None, :]
    if causal:
        i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        present = present & (j <= i[:, None])
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~present, float("-inf"))
    empty = ~present.any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int = 7,
    shifted: bool = False,
    layout: TokenLayout | None = None,
    relative=None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Return ``softmax((q.k + q.r) / sqrt(d)) v`` over the keys in the query's window; 0 if there
    are none.

    Only keys that take part count. Prefix tokens belong to all windows.

    Args:
        q: ``[B, h, N, d]``.
        k: ``[B, h, N, d]``.
        v: ``[B, h, N, e]``.
        window_size: patches along a side of a window.
        shifted: the first window of each axis has ``window_size // 2`` patches.
        layout: the grid positions of the tokens, if there is no relative position.
        relative: Axial or Joint; entries may have any sign.
        key_mask: ``[B, N]`` bool, True takes part.

    Source: Liu et al. 2021 (Swin), section 3.2; smaller windows at borders and prefix tokens are
    ours.
    """
    layout = relative.layout if layout is None else layout
    rows, columns, patch = _places(layout, q)
    pairs = torch.ones_like(patch[:, :, None] & patch[:, None, :])
    for places in (rows, columns):
        first = window_size // 2 if shifted else 0
        window = (places - first).div(window_size, rounding_mode="floor")
        pairs = pairs & (window[:, :, None] == window[:, None, :])
    pairs = pairs | ~patch[:, :, None] | ~patch[:, None, :]
    pairs = pairs & _present(k, key_mask, layout=layout)[:, None, :]
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if relative is not None:
        scores = scores + relative_bias(relative, q)
    scores = scores.masked_fill(~pairs[:, None], float("-inf"))
    empty = ~pairs[:, None].any(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ v


def relative_bias(relative, q: Tensor, num_keys: int | None = None) -> Tensor:
    """Return ``q_i.r_(j-i) / sqrt(d)`` of signed tables, the bias of the softmax baseline; 0 for
    pairs with a prefix token.

    Args:
        relative: Flat, Axial or Joint; entries may have any sign.
        q: ``[B, h, N, d]``, as passed to the operation.
        num_keys: M; None: N.

    Returns:
        ``[B, h, N, M]``.

    Source: Shaw et al. 2018, eq. 5, in one dimension; two dimensions are ours.
    """
    parts, patches = _classes_and_patches(relative, q, q.shape[2] if num_keys is None else num_keys)
    scores = sum(_class_scores(q, table, classes) for table, classes in parts)
    return torch.where(patches[:, None], scores / q.shape[-1] ** 0.5, 0.0)


def relative_weights(relative, q: Tensor, present: Tensor, causal: bool = False) -> Tensor:
    """Return the dense weights ``S_ij = elu1(q_i).r_(j-i)`` of a linear relative position.

    The class of a pair is ``clip(key - query, -R, R) + R``; on a grid the rows give one class and
    the columns another. A pair with a prefix token, or with a key that the query does not see, has
    weight 0. Under "mean" the weight is divided by the number of patches of its class that the
    query sees.

    Args:
        relative: Flat, Axial or Joint.
        q: ``[B, h, N, d]`` as passed to the operation: neither normalized nor scaled.
        present: ``[B, M]`` bool, the keys that take part.
        causal: query i attends to keys 0 to i only.

    Returns:
        ``[B, h, N, M]``.

    Source: Scaleformer, eq. 6 to 10, with delta = key minus query; both forms on grids are ours.
    """
    parts, patches = _classes_and_patches(relative, q, present.shape[1])
    pairs, mean = patches & _visible(present, q, causal), relative.normalization == "mean"
    weights = (_table_weights(elu1(q), table, classes, pairs, mean) for table, classes in parts)
    return sum(weights, start=q.new_zeros(()))


def value_convolution(
    v: Tensor, weight: Tensor, layout: TokenLayout, *, key_mask: Tensor | None = None
) -> Tensor:
    """Convolve the values over the grid: for each patch and channel, sum
    ``weight[channel, 0, dy, dx] * v``.

    The sum runs over the patches that take part, at offset ``(dy - K // 2, dx - K // 2)``. Prefix
    tokens get 0.

    Args:
        v: ``[B, h, N, e]``.
        weight: ``[h * e, 1, K, K]``.
        layout: the grid positions of the tokens.
        key_mask: ``[B, N]`` bool, True takes part.

    Returns:
        ``[B, h, N, e]``.
    """
    rows, columns, patch = _places(layout, v)
    side = weight.shape[-1]
    down = rows[:, None, :] - rows[:, :, None] + side // 2
    right = columns[:, None, :] - columns[:, :, None] + side // 2
    present = layout.key_mask(key_mask)
    pairs = patch[:, :, None] & patch[:, None, :]
    pairs = pairs & (down >= 0) & (down < side) & (right >= 0) & (right < side)
    if present is not None:
        pairs = pairs & present[:, None, :]
        v = torch.where(present[:, None, :, None], v, 0.0)
    taps = weight.reshape(v.shape[1], v.shape[3], side, side)
    taps = taps[:, :, down.clamp(0, side - 1), right.clamp(0, side - 1)]
    weights = torch.where(pairs, taps, 0.0).expand(-1, -1, v.shape[0], -1, -1)
    return torch.einsum("hebij,bhje->bhie", weights, v)


def centred_keys(k: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Return the keys ``[B, h, M, d]`` minus the mean of the keys that take part; other keys are
    undefined.
    """
    present = _present(k, key_mask)[:, None, :, None]
    kept_keys = torch.where(present, k, 0.0)
    return kept_keys - kept_keys.sum(2, keepdim=True) / present.sum(2, keepdim=True).clamp(min=1)


def elu1(x: Tensor) -> Tensor:
    """Return ``elu(x) + 1``: ``x + 1`` above 0, and ``exp(x)`` below without rounding to 0."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def unit_length(x: Tensor) -> Tensor:
    """Return ``x / max(|x|, 1e-6)`` along the last axis, the norm in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / wide.norm(dim=-1, keepdim=True).clamp(min=1e-6)).to(x.dtype)


def _present(
    k: Tensor, key_mask: Tensor | None, relative=None, layout: TokenLayout | None = None
) -> Tensor:
    """Return which keys take part, bool ``[B, M]``: in the mask, and not an absent patch."""
    present = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    if key_mask is not None:
        present = key_mask.clone()
    layout = layout if relative is None else relative.layout
    if layout is not None and layout.present is not None:
        of_tokens = layout.present
        if layout.kept is not None:
            of_tokens = torch.stack(
                [of[own] for of, own in zip(of_tokens, layout.kept, strict=True)]
            )
        present[:, layout.num_prefix :] &= of_tokens
    return present


def _visible(present: Tensor, q: Tensor, causal: bool) -> Tensor:
    """Return which keys take part and are visible to each query, bool ``[B, N, M]``."""
    visible = present[:, None, :].expand(-1, q.shape[2], -1)
    return visible.tril() if causal else visible


def _softmax_over_positions(k: Tensor, present: Tensor) -> Tensor:
    """Return the softmax along M over the keys that take part, times their number; 0 elsewhere."""
    absent = ~present[:, None, :, None]
    empty = absent.all(dim=2, keepdim=True)
    weights = (
        k.masked_fill(absent, float("-inf"))
        .masked_fill(empty, 0.0)
        .softmax(2)
        .masked_fill(absent, 0.0)
    )
    return weights * present.sum(-1).to(k.dtype)[:, None, None, None]


def _weighted_mean(
    content: Tensor, v: Tensor, relative, q: Tensor, present: Tensor, causal: bool
) -> Tensor:
    """Add the relative weights to the content weights ``[B, h, N, M]``, drop invisible keys, divide
    by the mass.
    """
    visible = _visible(present, q, causal)
    weights = torch.where(visible[:, None], content, 0.0)
    if relative is not None:
        if relative.normalization == "mean":
            weights = weights / visible.sum(-1).clamp(min=1)[:, None, :, None]
        weights = weights + relative_weights(relative, q, present, causal)
    mass = weights.sum(-1, keepdim=True)
    empty = mass == 0
    return torch.where(empty, 0.0, (weights @ v) / torch.where(empty, 1.0, mass))


def _places(layout: TokenLayout, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row and the column of every token (0 for prefix tokens), and whether it is a
    patch, each ``[B, N]`` or ``[1, N]``.
    """
    index = layout.kept
    if index is None:
        index = torch.arange(layout.grid.height * layout.grid.width)[None]
    index = index.to(q.device)
    prefix = torch.zeros(index.shape[0], layout.num_prefix, dtype=torch.int64, device=q.device)
    rows = torch.cat([prefix, index // layout.grid.width], dim=1)
    columns = torch.cat([prefix, index % layout.grid.width], dim=1)
    patch = (torch.arange(rows.shape[1], device=q.device) >= layout.num_prefix).expand_as(rows)
    return rows, columns, patch


def _classes_and_patches(
    relative, q: Tensor, num_keys: int
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return each table ``[h or 1, C, d]`` with the class of every pair ``[B or 1, N, M]``, and
    which pairs are two patches.
    """
    if relative.layout is None:
        i = torch.arange(q.shape[2], device=q.device)[None]
        j = torch.arange(num_keys, device=q.device)[None]
        patches = torch.ones(1, q.shape[2], num_keys, dtype=torch.bool, device=q.device)
        return [(relative.table, _classes(i, j, relative.table.shape[1]))], patches
    rows, columns, patch = _places(relative.layout, q)
    patches = patch[:, :, None] & patch[:, None, :]
    # On a grid: two tables of one axis each, one table of both axes, or the grid read row by row.
    if hasattr(relative, "rows"):
        row_classes = _classes(rows, rows, relative.rows.shape[1])
        column_classes = _classes(columns, columns, relative.columns.shape[1])
        return [(relative.rows, row_classes), (relative.columns, column_classes)], patches
    if relative.table.ndim == 4:
        height, width = relative.table.shape[1:3]
        classes = _classes(rows, rows, height) * width + _classes(columns, columns, width)
        return [(relative.table.flatten(1, 2), classes)], patches
    index = rows * relative.layout.grid.width + columns
    if relative.layout.present is not None:
        # Present positions come first in the sequence, then absent ones.
        order = (~relative.layout.present).to(torch.uint8).argsort(dim=1, stable=True)
        index = order.argsort(dim=1).gather(1, index.expand(q.shape[0], -1))
    return [(relative.table, _classes(index, index, relative.table.shape[1]))], patches


def _classes(query_places: Tensor, key_places: Tensor, num_classes: int) -> Tensor:
    """Return ``clip(key - query, -R, R) + R``, ``[B or 1, N, M]``, for positions ``[B or 1, N]`` of
    queries and ``[B or 1, M]`` of keys.
    """
    horizon = num_classes // 2
    return (key_places[:, None, :] - query_places[:, :, None]).clamp(-horizon, horizon) + horizon


def _class_scores(features: Tensor, table: Tensor, classes: Tensor) -> Tensor:
    """Return ``features_i.table_c`` for the class c of each pair, ``[B, h, N, M]``, from features
    ``[B, h, N, d]`` and a table ``[h or 1, C, d]``.
    """
    scores = features @ table.mT
    return scores.gather(-1, classes[:, None].expand(scores.shape[0], scores.shape[1], -1, -1))


def _table_weights(
    phi_q: Tensor, table: Tensor, classes: Tensor, pairs: Tensor, mean: bool
) -> Tensor:
    """Return the weights of one table, 0 outside ``pairs [B or 1, N, M]``.

    With ``mean``, divide each weight by the number of keys in its class.
    """
    weights = torch.where(pairs[:, None], _class_scores(phi_q, table, classes), 0.0)
    if not mean:
        return weights
    # Count for each query the visible pairs of each class.
    classes, pairs = torch.broadcast_tensors(classes, pairs)
    counts = torch.zeros(*pairs.shape[:2], table.shape[1], dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(2, classes, pairs.to(torch.int64))
    return weights / counts.gather(2, classes).clamp(min=1)[:, None]
