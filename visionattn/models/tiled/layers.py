"""A block over bands of rows: first it gathers what its attention needs of all tokens, then it
maps band after band.

This module owns what a block needs of others' rows. Which band is when, and where tokens are kept,
is the caller's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from visionattn.layers import Block
from visionattn.layout import Grid, TokenLayout
from visionattn.models.tiled.bands import Bands, FarSums, even_bands, window_bands
from visionattn.models.tiled.softmax import RunningSoftmax
from visionattn.models.tiled.stores import Store
from visionattn.ops.position.kinds import Axial, Flat, Joint
from visionattn.ops.states import COEFFICIENTS, KernelState, State, TaylorState
from visionattn.ops.strips import (
    Seen,
    SeenLines,
    SeenRows,
    Strip,
    halo_of,
    seen_span,
    strip_attention,
)
from visionattn.ops.sums import accumulation_dtype

PIECE_TOKENS = 8192
"""Tokens whose MLP is computed at once: its hidden layer is four times as wide."""


def layer_of(block: Block, layout: TokenLayout, rows: int, values: Store | None) -> "Layer":
    """Return what computes a block in bands of about ``rows`` rows."""
    kind = WindowLayer if block.attn.kind.windows else LinearLayer
    return kind(block, layout, rows, values)


class Layer:
    """A block, and what it needs of all tokens."""

    bands: Bands
    halo: int
    """Rows of values that a band needs on either side."""
    keeps_values: bool
    """Whether it needs values besides their sums."""
    passes: int = 1
    """How often all tokens are to be taken before the first band."""

    def __init__(self, block: Block, layout: TokenLayout, rows: int, values: Store | None):
        self.block, self.attn, self.layout = block, block.attn, layout
        self.grid, self.values = layout.grid, values
        conv = self.attn.value_conv
        self.conv_reach = 0 if conv is None else conv.reach

    def take_prefix(self, x: Tensor) -> None:
        """Take the prefix tokens ``[1, P, D]``, before all others."""
        raise NotImplementedError

    def take(self, first: int, x: Tensor) -> None:
        """Take the tokens ``[1, n, D]`` of rows from ``first`` on."""
        raise NotImplementedError

    def take_again(self, first: int, x: Tensor | None) -> None:
        """Take all tokens once more, the prefix too, where ``passes`` is 2."""

    def prefix(self, x: Tensor) -> Tensor:
        """Map the prefix tokens ``[1, P, D]``."""
        normed = self.block.norm1(x)
        out = self._prefix(normed).to(normed.dtype)
        attended = self.attn.project(out.transpose(1, 2).flatten(2), normed)
        return self.block.added(x, attended)

    def band(self, first: int, last: int, x: Tensor, above: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Map the tokens ``[1, n, D]`` of a band; yield rows and new tokens, piece by piece.

        Args:
            above: values ``[halo or fewer, W, D]`` of the rows before the band, as they were before
                the pass over the bands.
        """
        out, width = self._attend(first, last, x, above), self.grid.width
        rows = max(1, PIECE_TOKENS // width)
        for begin, end in even_bands(last - first, rows):
            piece = slice(begin * width, end * width)
            own = out[:, :, piece].transpose(1, 2).flatten(2)
            tokens = x[:, piece]
            normed = self.block.norm1(tokens)
            yield first + begin, self.block.added(tokens, self.attn.project(own, normed))

    def old_rows(self, first: int, last: int, above: Tensor) -> Tensor:
        """Return the values that the band behind this one needs of the rows before it."""
        if not self.halo or self.values is None:
            return above
        return torch.cat([above, self.values.read(first, last)])[-self.halo :].clone()

    def sums(self) -> dict[str, Tensor]:
        """Return what was gathered, by name, to be kept in a file."""
        raise NotImplementedError

    def restore(self, sums: dict[str, Tensor]) -> None:
        """Take up what ``sums`` returned."""
        raise NotImplementedError

    def _prefix(self, normed: Tensor) -> Tensor:
        raise NotImplementedError

    def _attend(self, first: int, last: int, x: Tensor, above: Tensor) -> Tensor:
        raise NotImplementedError

    def _keep(self, first: int, v: Tensor) -> Tensor:
        """Keep values ``[1, h, n, e]`` where they are needed; return them as rows ``[r, W, D]``."""
        rows = v.transpose(1, 2).flatten(2)[0].unflatten(0, (-1, self.grid.width))
        if self.keeps_values:
            assert self.values is not None
            self.values.write(first, rows)
        return rows

    def _heads(self, rows: Tensor) -> Tensor:
        """Turn rows ``[r, W, D]`` into values with heads ``[1, h, r, W, e]``."""
        return rows.unflatten(2, (self.attn.num_heads, -1)).permute(2, 0, 1, 3).unsqueeze(0)

    def _around(self, strip: Strip, above: Tensor) -> Tensor:
        """Return the values of a strip and its halo, ``[r, W, D]``."""
        assert self.values is not None
        whole = strip.with_halo(self.halo)
        before = strip.first - whole.first
        own = self.values.read(strip.first, whole.last)
        return torch.cat([above[len(above) - before :], own]) if before else own

    def _convolved(self, strip: Strip, around: Tensor) -> Tensor:
        """Return what the convolution of the values adds to the strip, ``[1, h, n, e]``."""
        halo = self._part(strip, around, self.conv_reach)
        rows, width = halo.shape[:2]
        layout = TokenLayout(0, Grid(rows, width))
        found = self.attn.value_conv(self._heads(halo).flatten(2, 3), layout)
        skip = strip.first - strip.with_halo(self.conv_reach).first
        return found[:, :, skip * width : (skip + strip.rows) * width]

    def _part(self, strip: Strip, around: Tensor, halo: int) -> Tensor:
        """Return the rows of a smaller halo."""
        small, whole = strip.with_halo(halo), strip.with_halo(self.halo)
        return around[small.first - whole.first : small.last - whole.first]


class LinearLayer(Layer):
    """A block of kernelized attention or TaylorShift."""

    def __init__(self, block: Block, layout: TokenLayout, rows: int, values: Store | None):
        super().__init__(block, layout, rows, values)
        self.bands = even_bands(self.grid.height, rows)
        self.relative = None if self.attn.relative is None else self.attn.relative(layout)
        self.halo = max(halo_of(self.relative), self.conv_reach)
        rowwise = isinstance(self.relative, Joint | Flat)
        self.keeps_values = rowwise or self.conv_reach > 0
        self.passes = 2 if self.attn.centre_keys else 1
        self.state: State | None = None
        self.key_sum: Tensor | None = None
        self.far: FarSums | None = None
        self.lines: tuple[Tensor, Tensor] | None = None

    def take_prefix(self, x: Tensor) -> None:
        """Take the keys of the prefix tokens."""
        self._take_keys(*self.attn.heads(self.block.norm1(x), "kv"))

    def take(self, first: int, x: Tensor) -> None:
        """Take keys and values of rows."""
        k, v = self.attn.heads(self.block.norm1(x), "kv")
        self._take_keys(k, v)
        self._take_values(first, self._keep(first, v))

    def _take_keys(self, k: Tensor, v: Tensor) -> None:
        if self.attn.centre_keys:
            total = k.sum(2, dtype=accumulation_dtype(k))
            self.key_sum = total if self.key_sum is None else self.key_sum + total
        else:
            self._add(self.attn.summarize(k, v))

    def _add(self, state: State) -> None:
        self.state = state if self.state is None else self.state + state

    def _take_values(self, first: int, rows: Tensor) -> None:
        like, wide = rows[0], accumulation_dtype(rows)
        if isinstance(self.relative, Axial):
            if self.lines is None:
                zeros = like.new_zeros(self.grid.height, like.shape[1], dtype=wide)
                self.lines = zeros, torch.zeros_like(like, dtype=wide)
            by_row, by_column = self.lines
            by_row[first : first + len(rows)] = rows.sum(1, dtype=wide)
            by_column += rows.sum(0, dtype=wide)
        elif isinstance(self.relative, Joint):
            if self.far is None:
                self.far = self._far_sums(like.to(wide))
            self.far.add(first, rows)
        elif isinstance(self.relative, Flat):
            if self.far is None:
                self.far = self._far_sums(like[0].to(wide))
            self.far.add(first * self.grid.width, rows.flatten(0, 1))

    def _far_sums(self, like: Tensor) -> FarSums:
        spans = [self._span(Strip(self.grid, first, last)) for first, last in self.bands]
        items = self.grid.num_patches if isinstance(self.relative, Flat) else self.grid.height
        return FarSums(spans, items, like)

    def _span(self, strip: Strip) -> tuple[int, int]:
        """Return the rows, or for ``Flat`` the patches, that a strip sees one by one."""
        assert isinstance(self.relative, Joint | Flat)
        span = seen_span(self.relative, strip)
        return span.start, span.stop

    def take_again(self, first: int, x: Tensor | None) -> None:
        """Take keys once more, without what all of them share."""
        if x is None or self.passes == 1:
            return
        k, v = self.attn.heads(self.block.norm1(x), "kv")
        assert self.key_sum is not None
        mean = (self.key_sum / self.layout.num_tokens).to(k.dtype)
        self._add(self.attn.summarize(k - mean.unsqueeze(2), v))

    def _prefix(self, normed: Tensor) -> Tensor:
        assert self.state is not None
        return strip_attention(self.attn.heads(normed, "q")[0], self.state)

    def _attend(self, first: int, last: int, x: Tensor, above: Tensor) -> Tensor:
        assert self.state is not None
        q, strip = self.attn.heads(self.block.norm1(x), "q")[0], Strip(self.grid, first, last)
        around = self._around(strip, above) if self.keeps_values else None
        if self.relative is None:
            out = strip_attention(q, self.state)
        else:
            out = strip_attention(q, self.state, self.relative, strip, self._seen(strip, around))
        out = out.to(q.dtype)
        return out + self._convolved(strip, around) if self.conv_reach else out

    def _seen(self, strip: Strip, around: Tensor | None) -> Seen:
        if isinstance(self.relative, Axial):
            assert self.lines is not None
            rows, columns = (x.unflatten(1, (self.attn.num_heads, -1)) for x in self.lines)
            return SeenLines(rows.transpose(0, 1)[None], columns.transpose(0, 1)[None])
        assert self.far is not None and around is not None
        span = self._span(strip)
        ends = [None if x is None else self._apart(x) for x in self.far.around(*span)]
        if isinstance(self.relative, Joint):
            own = self._part(strip, around, halo_of(self.relative))
            return SeenRows(self._heads(own), *ends)
        start = strip.with_halo(self.halo).first * self.grid.width
        run = around.flatten(0, 1)[span[0] - start : span[1] - start]
        return SeenRows(self._apart(run), *ends)

    def _apart(self, x: Tensor) -> Tensor:
        """Turn ``[W, D]`` or ``[n, D]`` into ``[1, h, n, e]``, and ``[D]`` into ``[1, h, e]``."""
        x = x.unflatten(-1, (self.attn.num_heads, -1))
        return (x if x.ndim == 2 else x.transpose(0, 1)).unsqueeze(0)

    def sums(self) -> dict[str, Tensor]:
        """Return the parts of the state and the sums of values."""
        found: dict[str, Tensor] = {}
        if self.state is not None:
            found |= {
                f"state.{name}": getattr(self.state, name) for name in (*self.state.SUMS, "count")
            }
        if self.key_sum is not None:
            found["key_sum"] = self.key_sum
        if self.far is not None:
            found["far"] = self.far.sums
        if self.lines is not None:
            found["rows"], found["columns"] = self.lines
        return found

    def restore(self, sums: dict[str, Tensor]) -> None:
        """Take up the state and the sums."""
        self.key_sum = sums.get("key_sum")
        parts = {n.removeprefix("state."): x for n, x in sums.items() if n.startswith("state.")}
        self.state = self._state(parts) if parts else None
        self.far = None
        if "far" in sums:
            self.far = self._far_sums(sums["far"][0])
            self.far.sums = sums["far"]
        self.lines = (sums["rows"], sums["columns"]) if "rows" in sums else None

    def _state(self, parts: dict[str, Tensor]) -> State:
        if "S" in parts:
            return KernelState(**parts, feature_map=self.attn.feature_map)
        options: dict[str, Any] = {"temperature": self.attn.temperature}
        return TaylorState(**parts, **options, coefficients=COEFFICIENTS)


class WindowLayer(Layer):
    """A block of exact softmax within windows, which bands do not part. Prefix tokens see all keys,
    whose softmax is summed up as they come.
    """

    def __init__(self, block: Block, layout: TokenLayout, rows: int, values: Store | None):
        super().__init__(block, layout, rows, values)
        size = self.attn.window_size
        self.bands = window_bands(self.grid.height, rows, size, self.attn.shifted)
        self.halo, self.keeps_values = self.conv_reach, self.conv_reach > 0
        self.prefix_x: Tensor | None = None
        self.running = RunningSoftmax()

    def take_prefix(self, x: Tensor) -> None:
        """Take the prefix tokens: their queries see all keys, and all queries their keys."""
        self.prefix_x = x
        self._take_keys(*self.attn.heads(self.block.norm1(x), "kv"))

    def take(self, first: int, x: Tensor) -> None:
        """Take the keys of rows, where there are prefix tokens to see them, and keep values."""
        if self.prefix_x is None and not self.keeps_values:
            return
        k, v = self.attn.heads(self.block.norm1(x), "kv")
        if self.prefix_x is not None:
            self._take_keys(k, v)
        self._keep(first, v)

    def _take_keys(self, k: Tensor, v: Tensor) -> None:
        assert self.prefix_x is not None
        self.running.add(self.attn.heads(self.block.norm1(self.prefix_x), "q")[0], k, v)

    def _prefix(self, normed: Tensor) -> Tensor:
        return self.running.mean()

    def _attend(self, first: int, last: int, x: Tensor, above: Tensor) -> Tensor:
        normed, size, width = self.block.norm1(x), self.attn.window_size, self.grid.width
        tokens = self.attn.heads(normed)
        # The first windows of a grid are half as high where they are shifted, and those of a band
        # further down are not: rows of nothing stand for the half that is missing.
        skip = size // 2 if self.attn.shifted and first else 0
        prefix = 0 if self.prefix_x is None else self.prefix_x.shape[1]
        if prefix:
            own = self.block.norm1(self.prefix_x)
            before = self.attn.heads(own)
        if skip or prefix:
            nothing = tokens[0].new_zeros(*tokens[0].shape[:2], skip * width, tokens[0].shape[3])
            parts = zip(before if prefix else [nothing[:, :, :0]] * 3, tokens, strict=True)
            tokens = [torch.cat([a, nothing, b], 2) for a, b in parts]
        layout = TokenLayout(prefix, Grid(last - first + skip, width))
        options: dict[str, Any] = {"window_size": size, "shifted": self.attn.shifted}
        if self.attn.relative is None:
            options["layout"] = layout
        else:
            options["relative"] = self.attn.relative(layout)
        out = self.attn.operation(*tokens, **options)[:, :, prefix + skip * width :]
        if not self.conv_reach:
            return out
        strip = Strip(self.grid, first, last)
        return self._convolved(strip, self._around(strip, above)) + out

    def sums(self) -> dict[str, Tensor]:
        """Return the prefix tokens and the sums of their softmax."""
        found = {f"running.{i}": x for i, x in enumerate(self.running.sums)}
        return found if self.prefix_x is None else found | {"prefix": self.prefix_x}

    def restore(self, sums: dict[str, Tensor]) -> None:
        """Take them up."""
        self.running.sums = [sums[f"running.{i}"] for i in range(len(sums) - 1)]
        self.prefix_x = sums.get("prefix")
