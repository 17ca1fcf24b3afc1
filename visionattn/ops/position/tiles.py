"""Sums over the classes of relative position in the tiled form: small matrix products on windows of
the values' own memory.

A row of the grid is cut into tiles of t queries. All keys within reach ``r = Rx - 1`` of a tile
stand in one window of ``t + 2r`` keys; those left and right of it are two sums. So for one class of
rows the tile's output is a product of a ``t x (t + 2r)`` matrix of weights with the window, which
is read where it lies, and one of ``t x 2`` with the two sums.

Order in memory: tokens first, channels contiguous. A row of the line has r zeros, its keys, and
zeros up to a whole number of tiles; R - 1 rows of zeros stand between the heads of one chunk. With
t = 4, r = 1 and five keys:

    0 v v v | v v 0 0 | 0 0 0 0 | 0 v v v ...        windows: 0 v v v v v,  v v 0 0 0 0

The weights of one query to all offsets ``-(r + t - 1) .. r + t - 1`` are those of its 2R+1 classes
with the outermost repeated; the matrix of a tile is a strided view of them, since each query sees
the window one key further to the left.

Sums over rows above and below are running sums, never differences: nothing is lost in float32. This
file knows neither feature maps nor counts; ``joint.py`` does.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from visionattn.ops.chunking import chunks

WIDE_VALUES = 32
MANY_CLASSES = 12
"""From so many classes of columns on, spreading weights by copies is faster than by a product."""
TILE_QUERIES, TILE_QUERIES_OF_NARROW_VALUES, MOST_TILE_QUERIES = 8, 16, 64
BAND_ELEMENTS, MOST_THREADS = 1 << 16, 8


def _run_rows(x: Tensor, lag: int, out: Tensor, *, up: bool) -> Tensor:
    """Write to ``out [g, H, ...]``, which is 0, the sums of ``x`` over all rows at least
    ``lag >= 1`` above each row (``up``: below it).
    """
    rows, sources = (list(x.unbind(1)) for x in (out, x))
    if up:
        rows.reverse()
        sources.reverse()
    for y in range(lag, len(rows)):
        torch.add(rows[y - 1], sources[y - lag], out=rows[y])
    return out


class Band(NamedTuple):
    """A run of tiles that is worked on at once.

    Args:
        tiles: which tiles, counted in the line of all heads.
        heads: the heads they belong to.
        rows, columns: the part of each head's grid that it holds.
        shape: rows and columns of memory that this part takes in each head, zeros included.
    """

    tiles: slice
    heads: slice
    rows: slice
    columns: slice
    shape: tuple[int, int]


class Tiles:
    """Geometry of one chunk of heads: ``heads`` grids of ``height`` rows of ``width`` places.

    ``width`` is that of queries or keys, whichever is more; e is the width of the values; dtype and
    device are those of ``like``.
    """

    def __init__(
        self, heads: int, height: int, width: int, e: int, horizons: tuple[int, int], like: Tensor
    ):
        self.heads = heads
        self.height = height
        self.width = width
        self.e = e
        self.horizons = horizons
        self.like = like
        self.reach = max(horizons[1] - 1, 0)
        # Tiles as wide as both margins of their window together, so that half of each product is of
        # use, within bounds.
        fewest = TILE_QUERIES if e >= WIDE_VALUES else TILE_QUERIES_OF_NARROW_VALUES
        self.size = max(fewest, min(2 * self.reach, MOST_TILE_QUERIES))
        # Tiles that hold queries, and with those that hold the margin behind the row.
        self.used = -(-width // self.size)
        self.per_row = self.used + -(-self.reach // self.size)
        self.pitch = self.per_row * self.size
        self.gap = max(horizons[0] - 1, 0)
        self.period = height + self.gap
        self.window = self.size + 2 * self.reach
        self.columns = 2 * (self.reach + self.size) - 1 + 2
        # A source is a class of rows: a row of its own for each offset within the horizon, and a
        # sum of rows on either side.
        rows = range(-self.gap, self.gap + 1)
        self.sources = (
            [("above", 0), *(("here", a) for a in rows), ("below", 0)]
            if horizons[0]
            else [("all", 0)]
        )
        self.own = "here" if horizons[0] else "all"
        self.classes = (len(self.sources), 2 * horizons[1] + 1)
        # Weights of a band are as large as the caches of the threads that share it.
        threads = (
            min(torch.get_num_threads(), MOST_THREADS)
            if like.device.type == "cpu"
            else MOST_THREADS
        )
        self.band_elements = BAND_ELEMENTS * self.size * threads

    def rows(self, x: Tensor) -> Tensor:
        """Lay out ``x [g, H, W', c]`` with zeros after each row and the gap below each head:
        ``[g, period * pitch, c]``.
        """
        line = x.new_zeros(x.shape[0], self.period, self.pitch, x.shape[3])
        line[:, : self.height, : x.shape[2]] = x
        return line.flatten(1, 2)

    def bands(self) -> list[Band]:
        """Return bands whose weights stay in cache: all heads at once, or whole rows of one head,
        or tiles of the only row of one.
        """
        tiles_of_a_head = self.period * self.per_row
        per_band = max(1, self.band_elements // (self.size * self.classes[0] * self.columns))
        everything = slice(0, self.width)
        # Small grids: every head in one band.
        if self.heads * tiles_of_a_head <= per_band:
            shape, rows = (self.period, self.pitch), slice(0, self.height)
            return [
                Band(
                    slice(0, self.heads * tiles_of_a_head),
                    slice(0, self.heads),
                    rows,
                    everything,
                    shape,
                )
            ]
        bands = []
        for head in range(self.heads):
            own, first = slice(head, head + 1), head * tiles_of_a_head
            # Larger ones: whole rows of one head, or pieces of its only row.
            if self.height > 1:
                for rows in chunks(self.height, max(1, per_band // self.per_row)):
                    tiles = slice(
                        first + rows.start * self.per_row, first + rows.stop * self.per_row
                    )
                    bands.append(
                        Band(tiles, own, rows, everything, (rows.stop - rows.start, self.pitch))
                    )
            else:
                for t in chunks(self.used, per_band):
                    columns = slice(t.start * self.size, t.stop * self.size)
                    shape = (1, columns.stop - columns.start)
                    bands.append(
                        Band(
                            slice(first + t.start, first + t.stop), own, slice(0, 1), columns, shape
                        )
                    )
        return bands

    def places(self, band: Band) -> slice:
        """Return where in the line of a head, as ``rows`` gives it, the band's queries stand."""
        start = band.rows.start * self.pitch + band.columns.start
        return slice(start, start + band.shape[0] * band.shape[1])

    def load(self, x: Tensor, band: Band, like: Tensor) -> Tensor:
        """Copy the queries of the band of ``x [g, H, W', c]``, ``[heads, n, c]`` in the dtype of
        ``like``; zeros outside the grid.
        """
        part = x[band.heads, band.rows, band.columns]
        out = like.new_empty(part.shape[0], *band.shape, x.shape[3])
        height, width = part.shape[1:3]
        out[:, :height, :width] = part
        out[:, height:] = 0
        out[:, :height, width:] = 0
        return out.flatten(1, 2)

    def store(self, part: Tensor, band: Band, out: Tensor) -> None:
        """Write the queries of the band, ``part [heads, n, c]``, to their places in
        ``out [g, H, W', c]``.
        """
        there = out[band.heads, band.rows, band.columns]
        there.copy_(part.unflatten(1, band.shape)[:, : there.shape[1], : there.shape[2]])

    @cached_property
    def repeat(self) -> Tensor:
        """Return the class of each offset and, last, those of the two ends, as ``[2R+1, columns]``
        of 0 and 1.
        """
        options, horizon = dict(device=self.like.device), self.horizons[1]
        offset = torch.arange(self.columns - 2, **options) - (self.columns - 2) // 2
        index = (
            torch.cat(
                [offset.clamp(-horizon, horizon), torch.tensor([-horizon, horizon], **options)]
            )
            + horizon
        )
        return (index == torch.arange(self.classes[1], **options)[:, None]).to(self.like.dtype)

    @property
    def middle(self) -> slice | None:
        """Return where in a row of ``repeat`` the classes between the outermost stand, one beside
        the other; None for few classes, which a product with ``repeat`` spreads faster.
        """
        classes = self.classes[1]
        if classes < MANY_CLASSES:
            return None
        outermost = (self.columns - classes) // 2
        return slice(outermost, outermost + classes - 2)

    def matrices(self, weights: Tensor, source: int) -> tuple[Tensor, Tensor]:
        """Return the matrices of the tiles for one class of rows, ``[n, t, window]`` and
        ``[n, t, 2]``, as views of the weights.
        """
        # From a query to the next of its tile, rows of weights lie ``step`` apart; one entry less
        # makes each query read its window one key further to the left.
        step = weights.shape[1] * self.columns
        count = weights.shape[0] // self.size
        start = source * self.columns
        window = weights.as_strided(
            (count, self.size, self.window), (self.size * step, step - 1, 1), start + self.size - 1
        )
        ends = weights.as_strided(
            (count, self.size, 2), (self.size * step, step, 1), start + self.columns - 2
        )
        return window, ends


class Lines:
    """Values of one chunk of heads, or their gradients, as the tiles read them: keys, sums of rows,
    and sums of the ends of rows.
    """

    def __init__(self, tiles: Tiles):
        """Hold zeros; ``fill`` puts values in."""
        self.tiles, self.e = tiles, tiles.e
        names = dict.fromkeys(name for name, _ in tiles.sources)
        self.keys = {name: self._zeros(name) for name in names}
        self.ends = {
            name: tiles.like.new_zeros(self._num_rows(name), tiles.per_row, 2, tiles.e)
            for name in names
        }

    def _num_rows(self, name: str) -> int:
        return self.tiles.heads * self.tiles.period + (2 * self.tiles.gap if name == "here" else 0)

    def _zeros(self, name: str) -> Tensor:
        return self.tiles.like.new_zeros(
            self._num_rows(name) * self.tiles.pitch + 2 * self.tiles.reach, self.e
        )

    def _grid(self, x: Tensor, name: str) -> Tensor:
        """Return the rows of all heads in ``keys`` or ``ends`` as ``[g, H, ...]``, without the
        margins of the line.
        """
        tiles, start = self.tiles, self.tiles.gap if name == "here" else 0
        x = (
            x[: self._num_rows(name) * tiles.pitch].view(-1, tiles.pitch, self.e)
            if x.ndim == 2
            else x
        )
        return x[start : start + tiles.heads * tiles.period].unflatten(
            0, (tiles.heads, tiles.period)
        )[:, : tiles.height]

    def _blocks(self, name: str) -> tuple[Tensor, Tensor]:
        """Return blocks of t keys, ``[rows, used, t, e]``, twice: those that begin where tiles do,
        and those that begin where windows end.
        """
        tiles = self.tiles
        size = (self._num_rows(name), tiles.used, tiles.size, self.e)
        stride = (tiles.pitch * self.e, tiles.size * self.e, self.e, 1)
        return self.keys[name].as_strided(size, stride, 0), self.keys[name].as_strided(
            size, stride, 2 * tiles.reach * self.e
        )

    def fill(self, v: Tensor) -> "Lines":
        """Lay out ``v [g, H, W', e]`` and form its sums."""
        tiles, inside = self.tiles, slice(self.tiles.reach, self.tiles.reach + v.shape[2])
        v, name = v.to(tiles.like.dtype), tiles.own
        self._grid(self.keys[name], name)[:, :, inside] = (
            v if name == "here" else v.sum(1, keepdim=True)
        )
        # What lies left of a tile's window is all blocks before it, what lies right all after it:
        # running sums of whole blocks from either end, none of them a difference.
        left, right = (blocks.sum(2) for blocks in self._blocks(name))
        self.ends[name][:, 1 : tiles.used, 0] = left.cumsum(1)[:, :-1]
        self.ends[name][:, : tiles.used - 1, 1] = right.flip(1).cumsum(1).flip(1)[:, 1:]
        if name == "here":
            # All rows beyond the horizon are one row, their sum; its ends are the sums of theirs.
            ends = self._grid(self.ends[name], name)
            for far, up in (("above", False), ("below", True)):
                _run_rows(
                    v, tiles.horizons[0], self._grid(self.keys[far], far)[:, :, inside], up=up
                )
                _run_rows(ends, tiles.horizons[0], self._grid(self.ends[far], far), up=up)
        return self

    def collect(self, width: int) -> Tensor:
        """Return the gradient of the values, ``[g, H, width, e]``: the transpose of ``fill``, which
        uses up keys and sums.
        """
        tiles, name = self.tiles, self.tiles.own
        inside = slice(tiles.reach, tiles.reach + width)
        total = None
        if name == "here":
            # First the sums of far rows give their gradients to rows, running the other way.
            total = torch.zeros_like(self._grid(self.keys["above"], "above")[:, :, inside])
            own_ends = self._grid(self.ends[name], name)
            for far, up in (("above", True), ("below", False)):
                ends = self._grid(self.ends[far], far)
                own_ends += _run_rows(ends, tiles.horizons[0], torch.zeros_like(ends), up=up)
                keys = self._grid(self.keys[far], far)[:, :, inside]
                total += _run_rows(keys, tiles.horizons[0], torch.zeros_like(keys), up=up)
        # Then the sums of ends do to keys, each to all of the blocks that it is the sum of.
        left, right = self._blocks(name)
        d_left, d_right = self.ends[name][:, : tiles.used].unbind(2)
        left[:, :-1] += d_left[:, 1:].flip(1).cumsum(1).flip(1).unsqueeze(2)
        right[:, 1:] += d_right[:, :-1].cumsum(1).unsqueeze(2)
        rows = self._grid(self.keys[name], name)[:, :, inside]
        return rows.sum(1, keepdim=True).expand_as(rows) if total is None else total.add_(rows)

    def _first_row(self, source: int) -> int:
        name, shift = self.tiles.sources[source]
        return shift + self.tiles.gap if name == "here" else 0

    def windows(self, source: int, band: slice, every: slice = slice(None)) -> Tensor:
        """Return the keys that each tile of ``band`` sees in one class of rows, ``[n, window, e]``,
        as a view of where they lie.
        """
        tiles = self.tiles
        index = range(band.start, band.stop)[every]
        start = (self._first_row(source) * tiles.per_row + index.start) * tiles.size
        stride = (index.step * tiles.size * self.e, self.e, 1)
        return self.keys[tiles.sources[source][0]].as_strided(
            (len(index), tiles.window, self.e), stride, start * self.e
        )

    def pairs(self, source: int, band: slice) -> Tensor:
        """Return the sums left and right of those windows, ``[n, 2, e]``."""
        start = self._first_row(source) * self.tiles.per_row
        return self.ends[self.tiles.sources[source][0]].flatten(0, 1)[
            start + band.start : start + band.stop
        ]


def spread_weights(tiles: Tiles, weights: Tensor) -> Tensor:
    """Turn weights of classes ``[q, C]`` into those of offsets and ends, ``[q, rows, columns]``."""
    given, middle = weights.view(-1, tiles.classes[1]), tiles.middle
    if middle is None:
        spread = torch.mm(given, tiles.repeat)
    else:
        spread = given.new_empty(len(given), tiles.columns)
        spread[:, : middle.start] = given[:, :1]
        spread[:, middle] = given[:, 1:-1]
        spread[:, middle.stop : -2] = given[:, -1:]
        spread[:, -2:] = given[:, :: tiles.classes[1] - 1]
    return spread.view(-1, tiles.classes[0], tiles.columns)


def collect_weights(tiles: Tiles, spread: Tensor) -> Tensor:
    """Return the gradient of ``spread_weights``: sums ``[q * rows, 2R+1]`` of offsets and ends."""
    given, middle = spread.view(-1, tiles.columns), tiles.middle
    if middle is None:
        return torch.mm(given, tiles.repeat.T)
    sums = given.new_empty(len(given), tiles.classes[1])
    sums[:, 1:-1] = given[:, middle]
    torch.sum(given[:, : middle.start], 1, out=sums[:, 0])
    torch.sum(given[:, middle.stop : -2], 1, out=sums[:, -1])
    sums[:, :: tiles.classes[1] - 1] += given[:, -2:]
    return sums


def multiply(tiles: Tiles, lines: Lines, weights: Tensor, band: slice) -> Tensor:
    """Return the sums of values ``[n * t, e]`` of the queries of ``band`` for the weights
    ``[n * t, C]`` of their classes.
    """
    spread, out = spread_weights(tiles, weights), None
    # For each class of rows one product with the keys in reach and one with the two sums beyond.
    for source in range(tiles.classes[0]):
        window, ends = tiles.matrices(spread, source)
        keys = lines.windows(source, band)
        out = torch.bmm(window, keys) if out is None else out.baddbmm_(window, keys)
        out.baddbmm_(ends, lines.pairs(source, band))
    return out.flatten(0, 1)


def multiply_backward(
    tiles: Tiles, lines: Lines, weights: Tensor, band: slice, grad: Tensor, d_lines: Lines
) -> Tensor:
    """Return the gradient ``[n * t, C]`` of the weights for ``grad [n * t, e]`` of the sums; add
    that of the values to ``d_lines``.
    """
    spread, grad = spread_weights(tiles, weights), grad.unflatten(0, (-1, tiles.size))
    d_spread, apart = torch.zeros_like(spread), -(-tiles.window // tiles.size)
    for source in range(tiles.classes[0]):
        window, ends = tiles.matrices(spread, source)
        d_window, d_ends = tiles.matrices(d_spread, source)
        # Into the strided view of the weights' gradient, where windows of two queries share no
        # entry.
        d_window.copy_(torch.bmm(grad, lines.windows(source, band).mT))
        d_ends.copy_(torch.bmm(grad, lines.pairs(source, band).mT))
        d_lines.pairs(source, band).baddbmm_(ends.mT, grad)
        for first in range(min(apart, len(grad))):  # windows of tiles so far apart do not overlap
            every = slice(first, None, apart)
            d_lines.windows(source, band, every).baddbmm_(window[every].mT, grad[every])
    return collect_weights(tiles, d_spread).view_as(weights)
