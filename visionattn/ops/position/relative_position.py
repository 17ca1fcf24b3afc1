"""Linear relative position: weights ``S_ij = phi(q_i) . r_class(i,j)``, added to the weights of the
content.

An offset is the position of the key minus the position of the query. The class of a pair is its
clipped offset ``clip(delta, -R, R) + R``, an index into a table that runs from past to future.
There are three kinds: ``Flat`` clips the offset in the sequence, ``Joint`` clips both offsets on
the grid, ``Axial`` adds a table of rows and a table of columns. Prefix tokens take no part. ``phi``
is ``elu1`` of the unscaled queries.

With ``normalization="sum"`` the weights are S, as in the papers. With "mean" each class contributes
the mean of its keys: S is divided by the number of keys in the class that the query sees, and the
content by the number of all keys that it sees. Then the outermost classes, which grow with the
image, cannot dominate the near ones.

Source: Scaleformer (Favier and Dal'Maz Silva 2021), section 4, for one dimension and "sum"; the
rest is ours.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.attention_sums import Sums, accumulation_dtype, counting_dtype, product_dtype
from visionattn.ops.position.axial_position import axis_sums
from visionattn.ops.position.joint_position import axis_classes, class_sums

Normalization = Literal["sum", "mean"]


@dataclass(frozen=True)
class Flat:
    """Relative position along the sequence.

    Args:
        table: ``[h or 1, 2R+1, d]``, non-negative (signed for ``softmax_attention``).
        layout: offsets count patches row by row, without the prefix; None: they count all tokens.
        normalization: "sum" or "mean".
    """

    table: Tensor
    layout: TokenLayout | None = None
    normalization: Normalization = "sum"


@dataclass(frozen=True)
class Axial:
    """Relative position as a row part plus a column part,
    ``r = rows[clip(dy)] + columns[clip(dx)]``.

    Args:
        rows, columns: ``[h or 1, 2R+1, d]``, each with its own R, non-negative (signed for
            ``softmax_attention``).
        layout: the grid positions of the tokens.
        normalization: "sum" or "mean"; each part has its own classes.
    """

    rows: Tensor
    columns: Tensor
    layout: TokenLayout
    normalization: Normalization = "sum"


@dataclass(frozen=True)
class Joint:
    """Relative position with one entry for each pair ``(clip(dy), clip(dx))``.

    Args:
        table: ``[h or 1, 2R+1, 2R+1, d]``, rows (dy) first, non-negative (signed for
            ``softmax_attention``).
        layout: the grid positions of the tokens.
        normalization: "sum" or "mean".
    """

    table: Tensor
    layout: TokenLayout
    normalization: Normalization = "sum"


RelativePosition = Flat | Axial | Joint
KINDS: dict[str, type[RelativePosition]] = {"joint": Joint, "axial": Axial, "flat": Flat}
"""The kinds of relative position, by their names in layers, models and tools."""


def tables_of(relative: RelativePosition) -> dict[str, Tensor]:
    """Return the tables by name."""
    if isinstance(relative, Axial):
        return {"rows": relative.rows, "columns": relative.columns}
    return {"table": relative.table}


def key_counts(
    k: Tensor,
    key_mask: Tensor | None,
    causal: bool = False,
    num_queries: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Count the keys that each query sees, ``[B or 1, 1, 1]``, or causal ``[B or 1, 1, N]``.

    The result is in the ``counting_dtype`` of ``dtype``; None: of the dtype of ``k [B, h, M, d]``.
    """
    dtype = counting_dtype(dtype or k.dtype)
    if not causal:
        if key_mask is None:
            return torch.full((1, 1, 1), k.shape[2], dtype=dtype, device=k.device)
        return key_mask.sum(-1, dtype=dtype)[:, None, None]
    visible = torch.arange(1, num_queries + 1, device=k.device).clamp(max=k.shape[2])
    if key_mask is None:
        return visible.to(dtype)[None, None]
    return F.pad(key_mask.cumsum(1, dtype=dtype), (1, 0))[:, None, visible]


def axis_counts(length: int, horizon: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Count the keys of each class for each query along one full axis, ``[2R+1, length]``, in
    closed form.
    """
    if horizon == 0:
        return torch.ones(1, length, dtype=dtype, device=device) * length
    i = torch.arange(length, dtype=dtype, device=device)
    offsets = torch.arange(1 - horizon, horizon, dtype=dtype, device=device)[:, None]
    window = ((i + offsets >= 0) & (i + offsets < length)).to(dtype)
    return torch.cat(
        [(i - horizon + 1).clamp(min=0)[None], window, (length - horizon - i).clamp(min=0)[None]]
    )


def count_classes(
    layout: TokenLayout,
    horizons: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    present: Tensor | None = None,
) -> Tensor:
    """Count the keys of each class for a query at each grid position,
    ``[1 or B, H, W, (2Ry+1) * (2Rx+1)]``.

    Args:
        layout: the grid, and which patches are present.
        horizons: Ry and Rx.
        present: ``[B, 1, H, W]`` of 0 and 1, used in place of the layout's patches; None: the
            layout's.

    Raises:
        ValueError: a grid with negative sides.
    """
    layout.check_sizes()
    height, width = layout.grid.height, layout.grid.width
    dtype = counting_dtype(dtype)
    if present is None:
        present = _present(layout, layout.key_mask(), dtype)
    if present is None:
        rows = axis_counts(height, horizons[0], dtype, device)
        columns = axis_counts(width, horizons[1], dtype, device)
        return (rows.T[:, None, :, None] * columns.T[None, :, None, :]).flatten(2).unsqueeze(0)
    by_column = axis_classes(present[:, 0], horizons[1], width)
    both = axis_classes(by_column.permute(0, 2, 3, 1), horizons[0], height)
    return both.permute(0, 4, 2, 3, 1).flatten(3)


def _present(layout: TokenLayout, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return which grid positions have a patch that takes part, ``[B, 1, H, W]`` of 0 and 1; None
    if all have.

    ``key_mask`` is a mask of the tokens.
    """
    kept = layout.kept
    if key_mask is None and kept is None:
        return None
    if key_mask is None:
        key_mask = kept.new_ones(kept.shape[0], layout.num_tokens, dtype=torch.bool)
    return layout.on_grid(key_mask[:, None, :, None].to(dtype))[..., 0]


def mask_absent(
    relative: RelativePosition | None, key_mask: Tensor | None
) -> tuple[RelativePosition | None, Tensor | None]:
    """Return an equivalent relative position whose layout has no absent patches, and a key mask
    that excludes them.

    Counts of the layout are kept unless ``key_mask`` removes further keys. Operations call this
    first, so that forms and kernels need to handle masks only.
    """
    if relative is None or relative.layout is None:
        return relative, key_mask
    layout = relative.layout
    mask = layout.key_mask(key_mask)
    if mask is None:
        return relative, None
    if isinstance(relative, Flat) and layout.present is not None:
        places = _places_in_sequence(layout.present)
        kept = places if layout.kept is None else places.gather(1, layout.kept)
        layout = layout._replace(kept=kept)
    counts = layout.counts if key_mask is None else None
    return replace(relative, layout=layout._replace(present=None, counts=counts)), mask


def _places_in_sequence(present: Tensor) -> Tensor:
    """Return the index along the sequence of each grid position, ``[B, H*W]``: present positions
    first, then absent ones, each in grid order.
    """
    index, absent_index = present.cumsum(1), (~present).cumsum(1)
    return torch.where(present, index, index[:, -1:] + absent_index) - 1


def _axial_sums(
    relative: Axial, q: Tensor, v: Tensor, present: Tensor | None, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sums of values ``[B, h, H, W, e]`` and of weights ``[B, h, H, W]`` of both
    parts; columns are the rows of transposed views.
    """
    (height, width), options = q.shape[2:4], dict(dtype=relative.rows.dtype, device=q.device)
    mean = relative.normalization == "mean"
    if present is None:
        in_rows = torch.full((1, height), width, **options)
        in_columns = torch.full((1, width), height, **options)
    else:
        in_rows, in_columns = present[:, 0].sum(2), present[:, 0].sum(1)
    values, mass = axis_sums(q, relative.rows, v, in_rows, total, mean)
    by_column, column_mass = axis_sums(
        q.transpose(2, 3), relative.columns, v.transpose(2, 3), in_columns, total, mean
    )
    return values + by_column.transpose(2, 3), mass + column_mass.transpose(2, 3)


def joint_classes(
    relative: Joint, key_mask: Tensor | None, total: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the table, the number of keys in each class ``[1 or B, H, W, C]`` and, for "mean", the
    number of all keys ``[1 or B, 1, 1, 1]`` (else None).

    All are in the dtype of ``total``, which is as for ``relative_sums``.
    """
    dtype = total.dtype
    return (
        relative.table.to(dtype),
        _joint_counts(relative, key_mask, dtype, total.device).to(dtype),
        total.unsqueeze(3) if relative.normalization == "mean" else None,
    )


def _joint_counts(
    relative: Joint, key_mask: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the number of keys in each class, from the layout if it has ``counts``."""
    if relative.layout.counts is not None:
        return relative.layout.counts
    present = _present(relative.layout, key_mask, dtype)
    horizons = (relative.table.shape[1] // 2, relative.table.shape[2] // 2)
    return count_classes(relative.layout, horizons, dtype=dtype, device=device, present=present)


def _products(q: Tensor, v: Tensor) -> torch.dtype:
    """Return the dtype of the products of ``class_sums``.

    With gradients it is never bfloat16, because the gradients of content and relative term nearly
    cancel.
    """
    return accumulation_dtype(q, v) if torch.is_grad_enabled() else product_dtype(q, v)


def _joint_sums(
    relative: Joint,
    q: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    total: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    layout, table = relative.layout, relative.table.to(_products(q, v))
    counts = _joint_counts(relative, key_mask, dtype, v.device)
    horizons = (table.shape[1] // 2, table.shape[2] // 2)
    options = (counts, total.unsqueeze(3), *horizons, 0, relative.normalization == "mean")
    return class_sums(layout.on_grid(q), table.flatten(1, 2), layout.on_grid(v), *options)


def relative_sums(
    relative: RelativePosition,
    q: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    total: Tensor,
    causal: bool = False,
) -> Sums:
    """Return the relative term's sums of values and of weights, for the tokens after the prefix.

    Args:
        q: ``[B, h, N, d]`` as passed to the attention.
        v: ``[B, h, M, e]``, 0 where masked.
        key_mask: bool ``[B, M]``, True takes part, after ``mask_absent``; None: all keys.
        total: number of keys that each query sees, ``[B or 1, 1, 1 or N]``. With "mean", each class
            contributes its mean times this number.
        causal: with ``Flat``, token i attends to tokens j <= i only.
    """
    dtype = accumulation_dtype(q, v)
    if isinstance(relative, Flat):
        return _flat_relative_sums(relative, q, v, key_mask, total, dtype, causal)
    layout = relative.layout
    if isinstance(relative, Joint):
        values, mass = _joint_sums(relative, q, v, key_mask, total, dtype)
    else:
        q, v, present = layout.on_grid(q), layout.on_grid(v), _present(layout, key_mask, dtype)
        relative = replace(
            relative, rows=relative.rows.to(dtype), columns=relative.columns.to(dtype)
        )
        values, mass = _axial_sums(relative, q, v, present, total.unsqueeze(3))
    return Sums(layout.off_grid(values), layout.off_grid(mass.unsqueeze(4)).squeeze(3))


def _flat_relative_sums(
    relative: Flat,
    q: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    total: Tensor,
    dtype: torch.dtype,
    causal: bool,
) -> Sums:
    """Return the sums along a sequence, treated as a grid of one row.

    The numbers of queries and keys may differ.
    """
    table, layout = relative.table.to(_products(q, v)), relative.layout
    counted, mean = counting_dtype(dtype), relative.normalization == "mean"
    if layout is None:
        present = (
            torch.ones(1, v.shape[2], dtype=counted, device=v.device)
            if key_mask is None
            else key_mask.to(counted)
        )
        q, v = q.unsqueeze(2), v.unsqueeze(2)
    else:
        if key_mask is None:
            key_mask = torch.ones(v.shape[0], layout.num_tokens, dtype=torch.bool, device=v.device)
        present = _present(layout, key_mask, counted).flatten(1)
        q, v = (layout.on_grid(x).flatten(2, 3).unsqueeze(2) for x in (q, v))
        if causal:
            total = layout.on_grid(total.unsqueeze(3)).flatten(2)
    horizon, factor = table.shape[1] // 2, None
    if causal and horizon == 0:
        # One class: earlier tokens and the token itself, each with the weight of the whole class.
        table, horizon = table.expand(-1, 3, -1), 1
        mean, factor = False, total if mean else None
    past, later = horizon, 0
    if causal:
        table, later = _of_the_past(table)
        present, horizon = F.pad(present, (later, 0)), table.shape[1] // 2
    # The number of keys in each class for each query; a causal query has no future keys.
    counts = axis_classes(present, horizon, q.shape[3]).mT
    if causal:
        future = torch.arange(2 * horizon + 1, device=table.device) > past
        counts = counts.masked_fill(future, 0)
    options = (total.unsqueeze(3), 0, horizon, later, mean)
    values, mass = (x.squeeze(2) for x in class_sums(q, table, v, counts.unsqueeze(1), *options))
    if factor is not None:
        visible = counts.sum(2).unsqueeze(1)
        factor = torch.where(visible > 0, factor / visible.clamp(min=1), 0).to(dtype)
        values, mass = values * factor.unsqueeze(3), mass * factor
    if layout is None:
        return Sums(values, mass)
    values, mass = (x.unflatten(2, layout.grid) for x in (values, mass.unsqueeze(3)))
    return Sums(layout.off_grid(values), layout.off_grid(mass).squeeze(3))


def _of_the_past(table: Tensor) -> tuple[Tensor, int]:
    """Return a table with about half the classes of ``table [h or 1, 2R+1, d]``, for past keys
    only, and the shift that it needs.

    With the keys shifted to the right by the second result, the offsets from -R to 0 become offsets
    from ``-R'`` to ``R - R'`` with ``R' = R // 2 + 1``. Entries for later offsets are 0.
    """
    horizon = table.shape[1] // 2
    later = (horizon - 1) // 2
    return F.pad(table[:, : horizon + 1], (0, 0, 0, horizon - 2 * later)), later


def mean_with_relative(
    content: Sums,
    relative: RelativePosition | None,
    q: Tensor,
    v: Tensor,
    count: Tensor,
    key_mask: Tensor | None,
    causal: bool = False,
) -> Tensor:
    """Return the weighted mean ``[B, h, N, e]`` under content and relative term.

    With the normalization "mean" the weights ``content / M + S / n`` are multiplied by M: this
    leaves the content unchanged, and M cancels in the weighted mean.

    Args:
        content: the sums of the content term.
        relative: None: content only.
        q: ``[B, h, N, d]`` as passed to the attention.
        v, key_mask, causal: see ``relative_sums``.
        count: M, the number of keys that each query sees, ``[B or 1, 1, 1 or N]``, in the dtype of
            the sums.
    """
    if relative is None:
        return content.divide()
    prefix = 0 if relative.layout is None else relative.layout.num_prefix
    return content.divide_with(relative_sums(relative, q, v, key_mask, count, causal), prefix)
