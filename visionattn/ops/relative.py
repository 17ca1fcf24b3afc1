"""Linear relative position: weights ``S_ij = phi(q_i) . r_class(i,j)`` that are added to those of the content.

Relative position is key minus query; tables run from past to future: entry ``clip(delta, -R, R) + R``. Three forms of the
class: ``Flat`` clips the offset in the sequence, ``Joint`` the pair of offsets on the grid, ``Axial`` adds a table of rows and
one of columns. Prefix tokens take no part. ``phi`` is ``elu1`` of the queries as given.

With ``normalization="sum"`` the weights are S, as in the papers. With "mean" each class counts as the mean of its keys: S is
divided by the number of keys of the class that the query sees, and the content by the number of all keys it sees, so that
classes that grow with the image cannot drown the near ones.

Source: Scaleformer (Favier and Dal'Maz Silva 2021), section 3.3, for one dimension and "sum"; the rest is ours.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.class_sums import axis_classes, class_sums
from visionattn.ops.feature_maps import elu1
from visionattn.ops.sums import Sums

Normalization = Literal["sum", "mean"]


@dataclass(frozen=True)
class Flat:
    """Relative position along the sequence.

    Args:
        table: ``[h or 1, 2R+1, d]``, non-negative (signed for ``softmax_attention``).
        layout: with one, the prefix is skipped and patches count row by row; None: every token counts.
        normalization: "sum" or "mean".
    """

    table: Tensor
    layout: TokenLayout | None = None
    normalization: Normalization = "sum"


@dataclass(frozen=True)
class Axial:
    """Relative position as a row part plus a column part, ``r = rows[clip(dy)] + columns[clip(dx)]``.

    Args:
        rows, columns: ``[h or 1, 2R+1, d]``, each with its own R, non-negative (signed for ``softmax_attention``).
        layout: where the tokens lie.
        normalization: "sum" or "mean"; each part over the keys of its own classes.
    """

    rows: Tensor
    columns: Tensor
    layout: TokenLayout
    normalization: Normalization = "sum"


@dataclass(frozen=True)
class Joint:
    """Relative position with one entry for each pair ``(clip(dy), clip(dx))``.

    Args:
        table: ``[h or 1, 2R+1, 2R+1, d]``, rows (dy) first, non-negative (signed for ``softmax_attention``).
        layout: where the tokens lie.
        normalization: "sum" or "mean".
    """

    table: Tensor
    layout: TokenLayout
    normalization: Normalization = "sum"


RelativePosition = Flat | Axial | Joint


def tables_of(relative: RelativePosition) -> dict[str, Tensor]:
    """The tables by name."""
    if isinstance(relative, Axial):
        return {"rows": relative.rows, "columns": relative.columns}
    return {"table": relative.table}


def check_relative(relative: RelativePosition, q: Tensor, k: Tensor, *, signed: bool = False) -> None:
    """Raise the ValueError that says what is wrong with tables or layout for ``q [B, h, N, d]`` and ``k [B, h, M, d]``."""
    if not isinstance(relative, RelativePosition):
        raise ValueError(f"relative: wanted Flat, Axial or Joint, got {type(relative).__name__}")
    if relative.normalization not in ("sum", "mean"):
        raise ValueError(f'normalization {relative.normalization!r}: wanted "sum" or "mean"')
    heads, d = q.shape[1], q.shape[3]
    for name, table in tables_of(relative).items():
        sides = table.shape[1:-1]
        wanted = 4 if isinstance(relative, Joint) else 3
        if table.ndim != wanted or table.shape[0] not in (1, heads) or table.shape[-1] != d or any(s % 2 == 0 for s in sides):
            shape = ", ".join(["h or 1"] + ["2R+1"] * (wanted - 2) + ["d"])
            raise ValueError(f"{name}: wanted [{shape}] with h = {heads}, d = {d}, got {tuple(table.shape)}")
        readable = table.device.type == "cpu" and not torch.compiler.is_compiling()
        if readable and not signed and bool((table < 0).any()):
            lowest = table.min().item()
            raise ValueError(f"{name}: relative position needs non-negative entries, got {lowest:.3g}; pass it through elu1")
    if relative.layout is not None:
        kept = relative.layout.kept
        if kept is not None and (kept.ndim != 2 or kept.shape[0] != q.shape[0]):
            raise ValueError(f"layout.kept: wanted [{q.shape[0]}, n], a row for each image, got {tuple(kept.shape)}")
        tokens = relative.layout.num_tokens
        if q.shape[2] != tokens or k.shape[2] != tokens:
            raise ValueError(f"layout has {tokens} tokens, got {q.shape[2]} queries and {k.shape[2]} keys")


def key_counts(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """Keys that take part, ``[B or 1, 1, 1]`` in the dtype of ``k [B, h, M, d]``."""
    if key_mask is None:
        return k.new_full((1, 1, 1), k.shape[2])
    return key_mask.sum(-1, dtype=k.dtype)[:, None, None]


def _axis_counts(length: int, horizon: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Keys per class of one full axis, ``[2R+1, length]``, in closed form."""
    if horizon == 0:
        return torch.ones(1, length, dtype=dtype, device=device) * length
    i = torch.arange(length, dtype=dtype, device=device)
    offsets = torch.arange(1 - horizon, horizon, dtype=dtype, device=device)[:, None]
    window = ((i + offsets >= 0) & (i + offsets < length)).to(dtype)
    return torch.cat([(i - horizon + 1).clamp(min=0)[None], window, (length - horizon - i).clamp(min=0)[None]])


def count_classes(
    layout: TokenLayout,
    horizons: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    present: Tensor | None = None,
) -> Tensor:
    """Keys of each class as seen from each place of the grid: ``[1 or B, (2Ry+1) * (2Rx+1), H, W]``.

    Args:
        layout: the grid, and which patches are present.
        horizons: Ry and Rx.
        present: ``[B, 1, H, W]`` of 0 and 1 that replaces what the layout says; None: the layout's.
    """
    height, width = layout.grid.height, layout.grid.width
    if present is None and layout.kept is not None:
        ones = torch.ones(layout.kept.shape, dtype=dtype, device=device)
        present = ones.new_zeros(ones.shape[0], height * width).scatter(1, layout.kept, ones).unflatten(1, (1, height, width))
    if present is None:
        rows = _axis_counts(height, horizons[0], dtype, device)
        columns = _axis_counts(width, horizons[1], dtype, device)
        return (rows[:, None, :, None] * columns[None, :, None, :]).flatten(0, 1).unsqueeze(0)
    by_column = axis_classes(present[:, 0], horizons[1], width)
    both = axis_classes(by_column.permute(0, 2, 3, 1), horizons[0], height)
    return both.permute(0, 3, 1, 4, 2).flatten(1, 2)


class _Canvas:
    """Patches on their grid: from tokens ``[B, h, N, c]`` to ``[B, h, c, H, W]`` and back, absent patches being zero."""

    def __init__(self, layout: TokenLayout):
        self.layout, self.prefix = layout, layout.num_prefix
        self.size = (layout.grid.height, layout.grid.width)

    def _index(self, x: Tensor) -> Tensor:
        return self.layout.kept[:, None, None, :].expand(x.shape[0], x.shape[1], x.shape[2], -1)

    def spread(self, x: Tensor) -> Tensor:
        x = x[:, :, self.prefix :].transpose(2, 3)
        if self.layout.kept is not None:
            x = x.new_zeros(*x.shape[:3], self.layout.grid.num_patches).scatter(3, self._index(x), x)
        return x.unflatten(3, self.size)

    def collect(self, x: Tensor) -> Tensor:
        x = x.flatten(3)
        if self.layout.kept is not None:
            x = x.gather(3, self._index(x))
        x = x.transpose(2, 3)
        return F.pad(x, (0, 0, self.prefix, 0)) if self.prefix else x

    def present(self, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """``[B, 1, H, W]`` of 0 and 1 under a mask of the tokens; None without one."""
        return None if key_mask is None else self.spread(key_mask[:, None, :, None].to(dtype))[:, :, 0]


def _joint_sums(table: Tensor, phi_q: Tensor, v: Tensor, counts: Tensor, horizons: tuple[int, int], normalization: str):
    """Values ``[B, h, e, Hq, Wq]`` and mass ``[B, h, Hq, Wq]`` for ``phi_q [B, h, d, Hq, Wq]`` and ``v [B, h, e, Hk, Wk]``."""
    heads = phi_q.shape[:2]
    operands = (phi_q.flatten(0, 1), table.to(v.dtype), v.flatten(0, 1), counts.to(v.dtype))
    values, mass = class_sums(*operands, *horizons, normalization == "mean")
    return values.unflatten(0, heads), mass.unflatten(0, heads)


def _axis_sums(table: Tensor, phi_q: Tensor, v: Tensor, counts: Tensor, normalization: str) -> tuple[Tensor, Tensor]:
    """The row part: values ``[B, h, e, H, W]`` and mass ``[B, h, H, W]``; all columns of a row are one key."""
    counts = counts.unsqueeze(1)
    weights = torch.matmul(table.to(v.dtype), phi_q.flatten(3)).unflatten(3, phi_q.shape[3:])
    mass = (weights * (counts > 0 if normalization == "mean" else counts)).sum(2)
    if normalization == "mean":
        weights = weights * torch.where(counts > 0, 1 / counts.clamp(min=1), 0)
    sums = axis_classes(v.sum(-1), table.shape[1] // 2, v.shape[3])
    values = torch.matmul(weights.permute(0, 1, 3, 4, 2), sums.permute(0, 1, 4, 3, 2))
    return values.permute(0, 1, 4, 2, 3), mass


def relative_sums(relative: RelativePosition, phi_q: Tensor, v: Tensor, key_mask: Tensor | None) -> Sums:
    """The relative term's sums of values and of weights, with "mean" in units of one key.

    Args:
        phi_q: ``[B, h, N, d]``, queries after ``elu1``, in the dtype of the sums.
        v: ``[B, h, M, e]``, zero where masked.
        key_mask: bool ``[B, M]``; None: every key takes part.
    """
    if isinstance(relative, Flat):
        return _flat_relative_sums(relative, phi_q, v, key_mask)
    canvas = _Canvas(relative.layout)
    phi_q, v, present = canvas.spread(phi_q), canvas.spread(v), canvas.present(key_mask, v.dtype)
    options = dict(dtype=v.dtype, device=v.device, present=present)
    if isinstance(relative, Joint):
        horizons = (relative.table.shape[1] // 2, relative.table.shape[2] // 2)
        reusable = present is None and relative.layout.counts is not None
        counts = relative.layout.counts if reusable else count_classes(relative.layout, horizons, **options)
        values, mass = _joint_sums(relative.table.flatten(1, 2), phi_q, v, counts, horizons, relative.normalization)
    else:
        counts = count_classes(relative.layout, (relative.rows.shape[1] // 2, 0), **options)
        by_row, row_mass = _axis_sums(relative.rows, phi_q, v, counts, relative.normalization)
        counts = count_classes(relative.layout, (0, relative.columns.shape[1] // 2), **options).transpose(-1, -2)
        by_column, column_mass = _axis_sums(relative.columns, phi_q.mT, v.mT, counts, relative.normalization)
        values, mass = by_row + by_column.mT, row_mass + column_mass.mT
    return Sums(canvas.collect(values), canvas.collect(mass.unsqueeze(2)).squeeze(3))


def _flat_relative_sums(relative: Flat, phi_q: Tensor, v: Tensor, key_mask: Tensor | None) -> Sums:
    """A sequence is a grid of one row, on which the number of queries and of keys may differ."""
    horizons, layout = (0, relative.table.shape[1] // 2), relative.layout
    if layout is None:
        present = v.new_ones(1, v.shape[2]) if key_mask is None else key_mask.to(v.dtype)
        phi_q, v = phi_q.mT.unsqueeze(3), v.mT.unsqueeze(3)
    else:
        canvas = _Canvas(layout)
        if key_mask is None:
            key_mask = torch.ones(v.shape[0], layout.num_tokens, dtype=torch.bool, device=v.device)
        present = canvas.present(key_mask, v.dtype).flatten(1)
        phi_q, v = canvas.spread(phi_q).flatten(3).unsqueeze(3), canvas.spread(v).flatten(3).unsqueeze(3)
    counts = axis_classes(present, horizons[1], phi_q.shape[4]).unsqueeze(2)
    values, mass = _joint_sums(relative.table, phi_q, v, counts, horizons, relative.normalization)
    if layout is None:
        return Sums(values.squeeze(3).mT, mass.squeeze(2))
    return Sums(canvas.collect(values), canvas.collect(mass.unsqueeze(2)).squeeze(3))


def add_relative(
    content: Sums, relative: RelativePosition | None, q: Tensor, v: Tensor, count: Tensor, key_mask: Tensor | None
) -> Sums:
    """Content plus relative term, both in the unit that ``relative.normalization`` asks for.

    Args:
        content: the sums of the content term.
        relative: None leaves the content alone.
        q: ``[B, h, N, d]`` as given to the attention, in the dtype of the sums.
        v, key_mask: see ``relative_sums``.
        count: keys that take part, ``[B or 1, 1, 1]``.
    """
    if relative is None:
        return content
    phi_q = elu1(q)
    if relative.normalization == "mean":  # content / M + S / n, all times M: the same mean, and the content stays as it is
        phi_q = phi_q * count.unsqueeze(-1)
    return content + relative_sums(relative, phi_q, v, key_mask)
