"""Causal attention over the values of an image in raster order, with relative position in rows and
columns.

``Flat`` relative position clips the offset along the sequence. Here its entries come from a small
table over rows and columns, so one layer fits images of any width.
"""

from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visionattn.layers.attention_layer import Attention
from visionattn.layers.position_tables import START_FLOOR, START_NOISE, START_PEAK, entries
from visionattn.layout import TokenLayout
from visionattn.ops.feature_maps import RandomFeatures, get_feature_map, is_per_token
from visionattn.ops.position.relative_position import Flat, Normalization
from visionattn.ops.recurrence import KeyValueCache, PastTable, RecurrentState

PEAKS = ((0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (1, 2), (0, 3))
"""Initial peak of each head, as an offset from the value to predict: rows up and pixels to the
left.
"""


class RasterTables(nn.Module):
    """A ``Flat`` table for past keys of an image in raster order.

    Token i holds value i - 1 and predicts value i. Offsets count from the value to predict back to
    the value that a token holds, so the pixel above is exactly one row back. An offset of at most
    ``reach`` columns and ``rows`` rows from the value to predict has its own entry. The other
    values of each of these rows have one common entry, and all rows farther up have another.

    Args:
        num_heads: h; every head has its own table.
        head_dim: d.
        rows: number of rows above whose pixels have individual entries.
        reach: number of pixels on each side of the column with individual entries.
        channels: values per pixel, adjacent in the sequence.
        normalization: "mean" or "sum"; see ``visionattn.ops.position.relative_position``.
        signed: use the parameters unchanged; for softmax attention.

    Source: Scaleformer, section 4 (clipped relative position); rows and columns are ours.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        rows: int = 2,
        reach: int = 3,
        channels: int = 1,
        normalization: Normalization = "mean",
        signed: bool = False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if rows < 0 or reach < 0:
            raise ValueError(
                f"expected integers rows and reach of at least 0, got {rows} and {reach}"
            )
        if normalization not in get_args(Normalization):
            raise ValueError(f"normalization {normalization!r}: expected mean or sum")
        self.rows, self.channels = rows, channels
        self.span = (reach + 1) * channels - 1
        """Number of values on each side with individual entries."""
        self.normalization: Normalization = normalization
        self.signed = signed
        dd = {"device": device, "dtype": dtype}
        side = 2 * self.span + 1
        self.near = nn.Parameter(torch.empty(num_heads, rows + 1, side, head_dim, **dd))
        # One entry for the rest of each row; the last entry is for all rows farther up.
        self.rest = nn.Parameter(torch.empty(num_heads, rows + 2, head_dim, **dd))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the table: random entries, and a peak at a nearby pixel for each head."""
        for parameter in self.parameters():
            parameter.normal_(std=START_NOISE).add_(START_FLOOR)
        for head in range(len(self.near)):
            up, left = PEAKS[head % len(PEAKS)]
            place = self.span + max(-self.span, min(self.span, left * self.channels))
            self.near[head, min(up, self.rows), place] += START_PEAK - START_FLOOR

    def index(self, row: int, tokens: int) -> Tensor:
        """Return the index of the entry of each offset along the sequence, int64 ``[R + 1]``.

        Indices count the entries of ``near`` row by row, and then the entries of ``rest``. The last
        element is for all offsets from R on.

        Args:
            row: number of values per row of the image, its width times the channels.
            tokens: length of the longest sequence; larger offsets need no entries.
        """
        side, device = 2 * self.span + 1, self.near.device
        horizon = min(self.rows * row + self.span, tokens)
        # Offsets start at 1, because a token holds the value before the value to predict.
        offset = torch.arange(1, horizon + 1, device=device)
        rows_up = (offset + row // 2) // row
        columns_left = offset - rows_up * row
        is_near = (rows_up <= self.rows) & (columns_left.abs() <= self.span)
        others = (self.rows + 1) * side
        index = torch.where(
            is_near,
            rows_up * side + columns_left + self.span,
            others + (offset // row).clamp(max=self.rows),
        )
        return F.pad(index, (0, 1), value=others + self.rows + 1)

    def forward(self, layout: TokenLayout) -> Flat:
        """Return the relative position for an image; a row of the layout's grid is a row of
        values.
        """
        table = entries(torch.cat([self.near.flatten(1, 2), self.rest], 1), self.signed)
        past = table[:, self.index(layout.grid.width, layout.grid.num_patches)].flip(1)
        # Entries for later keys are never read in causal attention.
        return Flat(F.pad(past, (0, 0, 0, past.shape[1] - 1)), None, self.normalization)


class RasterAttention(Attention):
    """Causal self-attention over the values of an image in raster order, ``[B, N, D]``.

    Args:
        dim, num_heads: see ``Attention``.
        relative: "flat" (``RasterTables``) or "none".
        rows, reach, channels: see ``RasterTables``.
        normalization: "mean" or "sum"; None: "mean". Not for softmax.
        options: further arguments of ``Attention``.

    Raises:
        ValueError: the attention has no causal form, the keys of the feature map depend on each
            other, or as ``Attention``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        relative: str = "flat",
        rows: int = 2,
        reach: int = 3,
        channels: int = 1,
        normalization: str | None = None,
        device=None,
        dtype=None,
        **options: Any,
    ):
        if relative not in ("flat", "none"):
            raise ValueError(f"relative {relative!r}: expected flat, along the raster, or none")
        super().__init__(dim, num_heads, relative="none", device=device, dtype=dtype, **options)
        self._check(is_causal=True)
        if self.kind.feature_map and not is_per_token(get_feature_map(self.feature_map)):
            raise ValueError(
                f"feature_map={options['feature_map']!r} has no causal form: its keys depend on "
                "those that follow; take elu1, relu or random"
            )
        if normalization is not None and (self.kind.signed or relative == "none"):
            raise ValueError(f"normalization={normalization!r} has no effect; remove it")
        if relative == "flat":
            self.relative = RasterTables(
                num_heads,
                self.head_dim,
                rows=rows,
                reach=reach,
                channels=channels,
                normalization="sum" if self.kind.signed else normalization or "mean",
                signed=self.kind.signed,
                device=device,
                dtype=dtype,
            )

    def forward(
        self,
        x: Tensor,
        layout: TokenLayout | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Apply causal self-attention; see ``Attention.forward`` for the arguments.

        The width of the layout's grid is the number of values per row of the image. The sequence
        may be shorter than the grid.
        """
        return super().forward(x, layout, attn_mask, True)

    def begin(
        self, batch: int, layout: TokenLayout
    ) -> tuple[RecurrentState | KeyValueCache, PastTable | None]:
        """Return the state before the first token, and the table of relative position for ``step``.

        Args:
            batch: B.
            layout: layout of the whole image to generate.
        """
        tokens = layout.grid.num_patches
        table = None if self.relative is None else PastTable(self.relative(layout), tokens)
        like, width = next(self.parameters(), torch.empty(0)), self.head_dim
        # Sums, keys and values are float32 or wider.
        options = {"dtype": torch.promote_types(like.dtype, torch.float32), "device": like.device}
        if self.kind.signed:
            shape = batch, self.num_heads, width, width
            return KeyValueCache.begin(shape, tokens, **options), table
        drawn = isinstance(self.feature_map, RandomFeatures)
        features = len(self.feature_map.projection) if drawn else width
        shape = batch, self.num_heads, features, width
        return RecurrentState.begin(shape, table.horizon if table else 0, **options), table

    def step(
        self, x: Tensor, state: RecurrentState | KeyValueCache, table: PastTable | None
    ) -> Tensor:
        """Add one token ``[B, 1, D]`` to the state, in place, and return its output."""
        q, k, v = self.heads(x)
        if isinstance(state, KeyValueCache):
            out = state.step(q, k, v, table)
        else:
            out = state.step(q, k, v, self.feature_map, table)
        return self.project(out.transpose(1, 2).reshape(x.shape), x)
