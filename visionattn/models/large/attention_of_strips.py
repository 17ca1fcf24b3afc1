"""Attention of a strip of rows of a grid, given sums over all tokens and the rows around the strip.

Bands of rows, one after the other, and parallel processes, each with its own rows, both use this.
They differ in how sums of strips become sums of all tokens, and in where rows of other strips come
from.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.ops.attention_sums import accumulation_dtype
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.relative_position import Axial, Flat, Joint
from visionattn.ops.states import State
from visionattn.ops.strips import (
    Seen,
    SeenLines,
    SeenRows,
    Strip,
    halo_of,
    seen_span,
    strip_attention,
)

StripSums = dict[str, Tensor]
"""Sums over tokens by name: the parts of a state, and for ``Axial`` the values of each row and each
column. For windows ``softmax``, the attention of the prefix tokens.
"""


class Around(NamedTuple):
    """Values around a strip that queries see individually, and sums of the other values.

    Args:
        strip: the rows of ``values``.
        values: ``[B, h, rows, W, e]``.
        keys: keys of the same rows, for windows.
        above, below: ``[B, h, W, e]`` (``Flat``: ``[B, h, e]``), sums of the values beyond the rows
            (places) that queries see individually.
    """

    strip: Strip
    values: Tensor
    keys: Tensor | None = None
    above: Tensor | None = None
    below: Tensor | None = None

    def part(self, rows: Tensor, strip: Strip) -> Tensor:
        """Return the rows of a strip within this one, from ``values`` or ``keys``."""
        return rows[:, :, strip.first - self.strip.first : strip.last - self.strip.first]


class StripAttention:
    """The attention of a block, strip by strip.

    Args:
        attn: an attention of this package, with states or windows.
        layout: prefix tokens and the whole grid, with all patches present.

    Attributes:
        halo: rows of values on either side of a strip that its patches see.
        sees_rows: whether patches see values row by row, not only sums.
    """

    def __init__(self, attn: Attention, layout: TokenLayout):
        self.attn, self.layout, self.grid = attn, layout, layout.grid
        self.windows = attn.kind.windows
        self.reach = 0 if attn.value_conv is None else attn.value_conv.reach
        has_tables = attn.relative is not None and not self.windows
        self.relative = attn.relative(layout) if has_tables else None
        self.halo = max(self.reach, halo_of(self.relative))
        self.has_far = isinstance(self.relative, Joint | Flat)
        self.sees_rows = self.windows or self.reach > 0 or self.has_far

    def rows_around(self, strip: Strip) -> Strip:
        """Return the rows whose values the patches of a strip see individually."""
        around = strip.with_halo(self.halo)
        if not self.windows:
            return around
        seen = self._rows_of_windows(strip)
        return Strip(self.grid, min(around.first, seen.first), max(around.last, seen.last))

    def sums(self, k: Tensor, v: Tensor, rows: Tensor | None = None, first: int = 0) -> StripSums:
        """Return the sums over some tokens; sums of disjoint tokens add. Windows have none.

        Args:
            k, v: ``[B, h, n, d]``.
            rows: the values of those tokens that are patches, ``[B, h, rows, W, e]``; None: none.
            first: index of the first of these rows.
        """
        if self.windows:
            return {}
        state = self.attn.summarize(k, v)
        found = {name: getattr(state, name) for name in state.SUMS}
        if isinstance(self.relative, Axial) and rows is not None:
            wide, others = accumulation_dtype(rows), self.grid.height - first - rows.shape[2]
            found["rows"] = F.pad(rows.sum(3, dtype=wide), (0, 0, first, others))
            found["columns"] = rows.sum(2, dtype=wide)
        return found

    def of_prefix(self, q: Tensor, sums: StripSums) -> Tensor:
        """Return the output for prefix tokens ``[B, h, P, d]``, from the sums over all tokens."""
        if self.windows:
            return sums["softmax"][..., :-1]
        return strip_attention(q, self._state(q, sums))

    def of_patches(
        self,
        q: Tensor,
        strip: Strip,
        sums: StripSums,
        around: Around | None,
        prefix: Sequence[Tensor],
    ) -> Tensor:
        """Return the output for the patches of a strip, without ``value_conv``, ``[B, h, n, e]``.

        Args:
            q: ``[B, h, n, d]``.
            strip: their rows.
            sums: sums over all tokens.
            around: the rows of ``rows_around``; None if ``sees_rows`` is False.
            prefix: queries, keys and values of the prefix tokens, for windows.
        """
        if self.windows:
            assert around is not None
            return self._in_windows(q, strip, around, prefix)
        seen = self._seen(strip, sums, around)
        return strip_attention(q, self._state(q, sums), self.relative, strip, seen).to(q.dtype)

    def convolved(self, strip: Strip, around: Around, dtype: torch.dtype) -> Tensor:
        """Return the term of ``value_conv`` for a strip, ``[B, h, n, e]``."""
        whole, width = strip.with_halo(self.reach), self.grid.width
        values = around.part(around.values, whole).to(dtype).flatten(2, 3)
        found = self.attn.value_conv(values, TokenLayout(0, Grid(whole.rows, width)))
        begin = (strip.first - whole.first) * width
        return found[:, :, begin : begin + strip.rows * width]

    def _state(self, q: Tensor, sums: StripSums) -> State:
        empty = self.attn.summarize(q[:, :, :0], q[:, :, :0])
        count = torch.full_like(empty.count, self.layout.num_tokens)
        return replace(empty, **{name: sums[name] for name in empty.SUMS}, count=count)

    def _seen(self, strip: Strip, sums: StripSums, around: Around | None) -> Seen | None:
        if isinstance(self.relative, Axial):
            return SeenLines(sums["rows"], sums["columns"])
        if self.relative is None:
            return None
        assert around is not None
        if isinstance(self.relative, Joint):
            values = around.part(around.values, strip.with_halo(halo_of(self.relative)))
        else:
            span, start = seen_span(self.relative, strip), around.strip.first * self.grid.width
            values = around.values.flatten(2, 3)[:, :, span.start - start : span.stop - start]
        return SeenRows(values, around.above, around.below)

    def _rows_of_windows(self, strip: Strip) -> Strip:
        """Return the rows of all windows that overlap a strip."""
        size, height = self.attn.window_size, self.grid.height
        begin = size // 2 if self.attn.shifted else 0
        edges = [0, *range(begin or size, height, size), height]
        first = max(edge for edge in edges if edge <= strip.first)
        return Strip(self.grid, first, min(edge for edge in edges if edge >= strip.last))

    def _in_windows(
        self, q: Tensor, strip: Strip, around: Around, prefix: Sequence[Tensor]
    ) -> Tensor:
        seen, width, size = self._rows_of_windows(strip), self.grid.width, self.attn.window_size
        # The first windows of a shifted grid are half as high: for strips below the top of the
        # image, empty rows fill the missing half.
        top = size // 2 if self.attn.shifted and seen.first else 0
        grid = Grid(top + seen.rows, width)
        begin = top + strip.first - seen.first
        assert around.keys is not None
        keys, values = (around.part(x, seen) for x in (around.keys, around.values))
        tokens = []
        rows = (q.unflatten(2, (strip.rows, width)), begin), (keys, top), (values, top)
        for own, (x, first) in zip(prefix, rows, strict=True):
            x = F.pad(x, (0, 0, 0, 0, first, grid.height - first - x.shape[2]))
            tokens.append(torch.cat([own, x.flatten(2, 3)], 2))
        layout = TokenLayout(prefix[0].shape[2], grid)
        options: dict[str, Any] = {"window_size": size, "shifted": self.attn.shifted}
        if self.attn.relative is None:
            options["layout"] = layout
        else:
            options["relative"] = self.attn.relative(layout)
        begin = layout.num_prefix + begin * width
        return self.attn.operation(*tokens, **options)[:, :, begin : begin + q.shape[2]]


class FarSums:
    """Sums of the places of a sequence before and after each of some spans, accumulated from places
    in any order.

    They are sums of the pieces between the ends of spans, summed from one side.

    Args:
        spans: the places of each span.
        total: the number of places.
    """

    def __init__(self, spans: Sequence[slice], total: int):
        self.cuts = sorted({0, total} | {end for span in spans for end in (span.start, span.stop)})
        self.sums: Tensor | None = None

    def add(self, first: int, x: Tensor) -> None:
        """Add ``x [B, h, n, ...]``, whose first place has the index ``first``."""
        if self.sums is None:
            shape = len(self.cuts) - 1, *x.shape[:2], *x.shape[3:]
            self.sums = x.new_zeros(shape, dtype=accumulation_dtype(x))
        for piece, (begin, end) in zip(self.sums, pairwise(self.cuts), strict=True):
            part = x[:, :, max(0, begin - first) : max(0, end - first)]
            if part.shape[2]:
                piece += part.sum(2, dtype=piece.dtype)

    def around(self, span: slice) -> tuple[Tensor, Tensor]:
        """Return the sums of the places before and after a span, ``[B, h, ...]``."""
        assert self.sums is not None
        before, behind = self.cuts.index(span.start), self.cuts.index(span.stop)
        return self.sums[:before].sum(0), self.sums[behind:].sum(0)


def softmax_part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the softmax attention of queries ``[B, h, P, d]`` over some of their keys, followed by
    the logarithm of its mass: ``[B, h, P, e + 1]``.

    ``softmax_of`` combines such parts.
    """
    q, k, v = (x.to(accumulation_dtype(q, k, v)) for x in (q, k, v))
    with without_autocast(q):
        scores = q * q.shape[3] ** -0.5 @ k.mT
        mass = scores.logsumexp(3, keepdim=True)
        return torch.cat([(scores - mass).exp() @ v, mass], 3)


def softmax_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the softmax over the keys of all parts, in the format of ``softmax_part``."""
    every = torch.stack(list(parts))
    masses = every[..., -1:]
    mean = (every[..., :-1] * masses.softmax(0)).sum(0)
    return torch.cat([mean, masses.logsumexp(0)], 3)
