"""Sums over the classes of relative position in the tiled form: one matrix product for each tile of
queries and its window of keys.

The grid is cut into tiles of queries. Along one axis, a tile of ``t`` queries has a window of
``t + 2R`` entries: the ``t + 2R - 2`` places within the horizon of some query, one sum of all
places before them, and one sum of all places after them. A place is an index along the axis. With
t = 4, R = 2 and tiles at 0, 4, 8:

    places    -1 0 1 2 3 4 5 6 7 8 9 10 ...
    tile 1    [sum to 2] 3 4 5 6 7 8 [sum from 9 on]      the queries are 4 5 6 7

Entry j of the window has the class ``clip(j - R - p, -R, R)`` for query p of the tile. So one
gather with the same index in every tile turns weights of classes into weights of entries. Both axes
of a grid work in the same way. R = 0 is a single class: the sum of all places.

The sums of far places are running sums of whole tiles, never differences, so float32 loses no
precision. Feature maps and counts are in ``joint_position.py``.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.attention_sums import wide
from visionattn.ops.chunking import chunks

TILE_ROWS, TILE_COLUMNS, TILE_OF_ONE_ROW, LONGEST_TILE = 8, 8, 32, 64
BAND_ELEMENTS, MOST_THREADS = 1 << 21, 8


@dataclass(frozen=True)
class KeyAxis:
    """One axis of a grid of keys: places padded with zeros, followed by the sums of far places.

    Args:
        places: number of places of queries or keys, whichever is larger.
        horizon: R of the ``2R+1`` classes.
        size: number of queries per tile.
    """

    places: int
    horizon: int
    size: int

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.places // self.size)

    @property
    def window(self) -> int:
        """The number of entries in the window of a tile."""
        return self.size + 2 * self.horizon if self.horizon else 1

    @property
    def margin(self) -> int:
        """The number of zeros before the first and after the last tile."""
        return max(self.horizon - 1, 0)

    @property
    def padded(self) -> int:
        """The number of places including padding."""
        return self.tiles * self.size + 2 * self.margin

    @property
    def length(self) -> int:
        """The number of padded places and sums: two sums per tile, or for R = 0 one sum."""
        return self.padded + (2 * self.tiles if self.horizon else 1)

    def classes(self, device: torch.device) -> Tensor:
        """Return the class of each entry of the window for each query, ``[t, window]``."""
        key = torch.arange(self.window, device=device) - self.horizon
        query = torch.arange(self.size, device=device)[:, None]
        return (key - query).clamp(-self.horizon, self.horizon) + self.horizon

    def windows(self, device: torch.device) -> Tensor:
        """Return the index along the axis of each entry of each window, ``[tiles, window]``."""
        tile = torch.arange(self.tiles, device=device)[:, None]
        if not self.horizon:
            return torch.full_like(tile, self.padded)
        inside = tile * self.size + torch.arange(self.window - 2, device=device)
        before = tile + self.padded
        return torch.cat([before, inside, before + self.tiles], dim=1)

    def add_up(self, x: Tensor) -> None:
        """Write the sums of far places of ``x [..., length, m]`` behind its padded places."""
        places, sums = x.split([self.padded, self.length - self.padded], -2)
        if not self.horizon:
            torch.sum(places, -2, keepdim=True, out=sums)
            return
        # Cut the padded places into blocks of t. The sum before the window of tile i covers the
        # first i blocks. The sum after the window covers the blocks after block i, where blocks
        # begin at twice the margin. Both add up steps, whose size divides t and twice the margin.
        step = gcd(self.size, 2 * self.margin)
        steps, count = places.unflatten(-2, (-1, step)).sum(-2), self.size // step
        first, last = (
            steps.narrow(-2, start, self.tiles * count).unflatten(-2, (-1, count)).sum(-2)
            for start in (0, 2 * self.margin // step)
        )
        sums[..., : self.tiles, :] = _earlier(first)
        sums[..., self.tiles :, :] = _earlier(last.flip(-2)).flip(-2)

    def add_up_backward(self, grad: Tensor) -> None:
        """Add the gradients of the sums to the gradients of the places that they cover."""
        places, sums = grad.split([self.padded, self.length - self.padded], -2)
        if not self.horizon:
            places += sums
            return
        before, after = sums.split(self.tiles, -2)
        first, last = (
            places.narrow(-2, start, self.tiles * self.size).unflatten(-2, (-1, self.size))
            for start in (0, 2 * self.margin)
        )
        first += _earlier(before.flip(-2)).flip(-2).unsqueeze(-2)
        last += _earlier(after).unsqueeze(-2)


def _earlier(x: Tensor) -> Tensor:
    """Return for each row of ``x [..., n, m]`` the sum of all earlier rows; 0 for the first."""
    return F.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


class Band(NamedTuple):
    """The tiles that are processed at once: some rows and columns of tiles."""

    rows: slice
    columns: slice


class QueryTiles:
    """A grid of queries, cut into tiles.

    Args:
        height, width: numbers of places; ``width`` of queries or keys, whichever is larger.
        horizons: Ry and Rx.
        device: device of the index tensors.
    """

    def __init__(self, height: int, width: int, horizons: tuple[int, int], device: torch.device):
        rows = min(TILE_ROWS, height)
        longest = min(2 * horizons[1], LONGEST_TILE)
        columns = TILE_COLUMNS if rows > 1 else max(TILE_OF_ONE_ROW, longest)
        self.rows = KeyAxis(height, horizons[0], rows)
        self.columns = KeyAxis(width, horizons[1], min(columns, width))
        self.queries = rows * self.columns.size
        self.window = self.rows.window * self.columns.window
        self.device = device
        self.buffers: dict[str, Tensor] = {}
        # The class of each entry of the window for each query, [queries, window].
        y, x = self.rows.classes(device), self.columns.classes(device)
        index = y[:, None, :, None] * (2 * horizons[1] + 1) + x[None, :, None, :]
        self.index = index.flatten(2).flatten(0, 1)
        # The index of each entry of each window along either axis, [tiles, window].
        self.places = self.rows.windows(device) * self.columns.length, self.columns.windows(device)

    def bands(self, heads: int, e: int) -> list[Band]:
        """Return bands whose weights and windows stay in cache."""
        cpu = self.device.type == "cpu"
        threads = min(torch.get_num_threads(), MOST_THREADS) if cpu else MOST_THREADS
        tiles = max(1, BAND_ELEMENTS * threads // (heads * self.window * (self.queries + e)))
        rows = chunks(self.rows.tiles, max(1, tiles // self.columns.tiles))
        return [Band(r, c) for r in rows for c in chunks(self.columns.tiles, tiles)]

    def keys(self, v: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``v [g, H, W', e]`` with padding and sums along both axes,
        ``[g, rows.length, columns.length, e]``.
        """
        size = v.shape[0], self.rows.length, self.columns.length, v.shape[3]
        keys = v.new_empty(size, dtype=dtype)
        for own, values in zip(keys.split(1), v.split(1), strict=True):  # one head stays in cache
            sums = own if wide(dtype) == dtype else torch.empty_like(own, dtype=wide(dtype))
            self.inside(sums.zero_(), v.shape[2]).copy_(values)
            self.rows.add_up(sums.flatten(2))
            self.columns.add_up(sums)
            if sums is not own:
                own.copy_(sums)
        return keys

    def keys_backward(self, grad: Tensor, width: int) -> Tensor:
        """Return the gradient of values, ``[g, H, width, e]``, from the gradient of keys, which is
        overwritten.
        """
        self.columns.add_up_backward(grad)
        self.rows.add_up_backward(grad.flatten(2))
        return self.inside(grad, width)

    def inside(self, keys: Tensor, width: int) -> Tensor:
        """Return the places of ``keys``, without padding and sums, as a view."""
        y, x = self.rows.margin, self.columns.margin
        return keys[:, y : y + self.rows.places, x : x + width]

    def windows(self, keys: Tensor, places: Tensor) -> Tensor:
        """Return the windows ``[g * tiles, window, e]`` of ``keys``, at the indices of
        ``where``.
        """
        out = self._memory("windows", (len(places), keys.shape[3]), keys)
        torch.index_select(keys.flatten(0, 2), 0, places, out=out)
        return out.view(-1, self.window, keys.shape[3])

    def where(self, heads: int, band: Band) -> Tensor:
        """Return the indices in ``keys.flatten(0, 2)`` of a band's windows,
        ``[g * tiles * window]``.
        """
        rows, columns = self.places[0][band.rows], self.places[1][band.columns]
        head = torch.arange(heads, device=self.device) * (self.rows.length * self.columns.length)
        y = head[:, None, None] + rows
        return (y[:, :, None, :, None] + columns[:, None]).flatten()

    def load(self, x: Tensor, band: Band, dtype: torch.dtype) -> Tensor:
        """Return a copy of the queries of a band of ``x [g, H, W', c]`` in the order of tiles,
        ``[g, n, c]``; 0 outside the grid.
        """
        part = self._part(x, band)
        shape = self._shape(band)
        missing = shape[0] * shape[1] - part.shape[1], shape[2] * shape[3] - part.shape[2]
        if any(missing):
            part = F.pad(part, (0, 0, 0, missing[1], 0, missing[0]))
        part = part.unflatten(2, shape[2:]).unflatten(1, shape[:2]).transpose(2, 3)
        return part.new_empty(part.shape, dtype=dtype).copy_(part).flatten(1, 4)

    def store(self, part: Tensor, band: Band, out: Tensor) -> None:
        """Write the queries of a band in the order of tiles, ``part [g, n, c]``, to their places in
        ``out [g, H, W', c]``.
        """
        target, (rows, height, columns, width) = self._part(out, band), self._shape(band)
        grid = part.unflatten(1, (rows, columns, height, width)).transpose(2, 3)
        if target.shape[1:3] == (rows * height, columns * width):
            target.unflatten(2, (columns, width)).unflatten(1, (rows, height)).copy_(grid)
        else:
            target.copy_(grid.flatten(3, 4).flatten(1, 2)[:, : target.shape[1], : target.shape[2]])

    def _part(self, x: Tensor, band: Band) -> Tensor:
        height, width = self.rows.size, self.columns.size
        rows = slice(band.rows.start * height, band.rows.stop * height)
        return x[:, rows, band.columns.start * width : band.columns.stop * width]

    def _shape(self, band: Band) -> tuple[int, int, int, int]:
        rows, columns = (tiles.stop - tiles.start for tiles in band)
        return rows, self.rows.size, columns, self.columns.size

    def spread(self, weights: Tensor) -> Tensor:
        """Return the weights of the entries of windows, ``[g * tiles, queries, window]``, from
        weights of classes ``[g, n, C]``.
        """
        weights = weights.view(-1, self.queries, weights.shape[2])
        index = self.index.expand(len(weights), -1, -1)
        out = self._memory("weights", index.shape, weights)
        if weights.dtype == torch.bfloat16:  # gather is faster on integers
            torch.gather(weights.view(torch.int16), 2, index, out=out.view(torch.int16))
        else:
            torch.gather(weights, 2, index, out=out)
        return out

    def _memory(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a buffer that the next band reuses; allocation would cost more than filling it."""
        if name not in self.buffers or self.buffers[name].shape != shape:
            self.buffers[name] = like.new_empty(shape)
        return self.buffers[name]

    def collect(self, grad: Tensor, classes: int) -> Tensor:
        """Return the gradient of the weights of classes, ``[g * n, C]``, from the gradient of the
        result of ``spread``.
        """
        out = grad.new_zeros(*grad.shape[:2], classes)
        out.scatter_add_(2, self.index.expand(len(grad), -1, -1), grad)
        return out.flatten(0, 1)
