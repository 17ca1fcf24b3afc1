"""Any model, ours or timm's, over overlapping tiles of an image: outputs are averaged, and maps are
blended over the seams.

This module places tiles and combines their outputs. Images come from a ``PartSource`` and maps go
to a ``Sink`` band by band, so neither need fit into memory; files are handled elsewhere. A tile
does not see the image outside of it, so results differ from the whole image, unless each output
depends only on the pixels at its own place.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain, product
from typing import Literal, NamedTuple, get_args

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from visionattn.models.large.patched_image import filled
from visionattn.models.large.source_sink import MapWriter, PartSource, Prepare, Sink, as_fractions
from visionattn.models.patches import call, in_eval, last_map, pooled
from visionattn.models.segmentation import IGNORED, Segmenter, classes_of, probabilities_of
from visionattn.ops.chunking import chunks

Want = Literal["logits", "pooled", "dense", "masks", "probabilities"]
Combine = Literal["mean", "max"]
Compute = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""``compute(model, inputs [B, C, H, W], sizes [B, 2]) -> [B, ...]``; ``patches.py`` has some."""
COMPUTES: dict[str, Compute] = {
    "logits": call,
    "pooled": pooled,
    "dense": last_map,
    "masks": call,
    "probabilities": call,
}
CONVERTS = {"masks": classes_of, "probabilities": probabilities_of}
"""Conversions of logits of pixels."""


class TileAxis(NamedTuple):
    """Tiles along one side of an image, in pixels or in cells of a map."""

    length: int
    """Length of the side, rounded up to whole patches."""
    tile: int
    """Length of each tile."""
    starts: tuple[int, ...]
    """Starts of the tiles, in order; the last tile ends where the side ends."""
    overlap: int
    """Distance over which the weights of a tile fall off toward its neighbors."""

    def in_cells(self, cell: int) -> "TileAxis":
        """Return the same axis in cells of ``cell`` pixels."""
        starts = tuple(start // cell for start in self.starts)
        return TileAxis(self.length // cell, self.tile // cell, starts, self.overlap // cell)

    def shares(self) -> list[Tensor]:
        """Return for each place in each tile its weight divided by the sum of weights of all tiles
        up to this one: float64 ``[tile]``.

        Moving a running average by these shares, tile after tile, gives the weighted average. It
        preserves exactly any value on which all tiles agree.
        """
        middles = torch.arange(self.tile, dtype=torch.float64) + 0.5
        ramp = middles / max(self.overlap, 0.5)
        so_far = torch.zeros(self.length, dtype=torch.float64)
        found = []
        for number, start in enumerate(self.starts):
            # At the borders of the image this tile has no neighbor.
            weights = torch.ones(self.tile, dtype=torch.float64)
            if number:
                weights = weights.minimum(ramp)
            if number + 1 < len(self.starts):
                weights = weights.minimum(ramp.flip(0))
            here = so_far[start : start + self.tile].add_(weights)
            found.append(weights / here)
        return found


class Tiling(NamedTuple):
    """Tiles of an image; all have one size."""

    down: TileAxis
    across: TileAxis

    def places(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows and columns of each tile in pixels, row by row of tiles."""
        for top, left in product(self.down.starts, self.across.starts):
            yield slice(top, top + self.down.tile), slice(left, left + self.across.tile)


def tiling(height: int, width: int, tile: int, overlap: int, patch_px: tuple[int, int]) -> Tiling:
    """Return the tiles of an image, ``tile - overlap`` pixels apart; the last ones are shifted
    inwards to end with the image.

    Args:
        height, width: of the image in pixels; they are rounded up to whole patches.
        tile: height and width of a tile in pixels; a smaller image is one tile.
        overlap: minimum number of pixels that neighbors share.
        patch_px: height and width of a patch.

    Raises:
        ValueError: tile or overlap are out of range, or not a whole number of patches; one line.
    """
    check_tiles(tile, overlap, patch_px)
    axes = []
    for length, patch in zip((height, width), patch_px, strict=True):
        whole = -(-length // patch) * patch
        side = min(tile, whole)
        starts = (*range(0, whole - side, tile - overlap), whole - side)
        axes.append(TileAxis(whole, side, starts, overlap))
    return Tiling(*axes)


def check_tiles(tile: int, overlap: int, patch_px: tuple[int, int]) -> None:
    """Raise ValueError if tile or overlap are out of range or not a whole number of patches."""
    if tile < 1 or not 0 <= overlap < tile:
        raise ValueError(
            f"expected tile above 0 and overlap from 0 to below tile, got tile {tile} and overlap "
            f"{overlap}"
        )
    step = math.lcm(*patch_px)
    for name, value in (("tiles", tile), ("overlap", overlap)):
        if value % step:
            low, high = value // step * step, -(-value // step) * step
            fit = f"{low} or {high}" if low else f"{high}"
            raise ValueError(
                f"expected {name} in whole {step}-pixel patches, got {value} pixels; use {fit}"
            )


def usual_overlap(tile: int, patch_px: tuple[int, int]) -> int:
    """Return an eighth of a tile, rounded up to whole patches."""
    step = math.lcm(*patch_px)
    return max(0, min(-(-tile // (8 * step)) * step, tile - step))


def cell_of(model: nn.Module, want: Want) -> tuple[int, int]:
    """Return height and width in pixels; tiles must be multiples of them.

    These are patches, and for ``dense`` also cells of the feature map according to timm; 1 x 1 if
    there are neither.
    """
    rows, columns = to_2tuple(getattr(getattr(model, "patch_embed", None), "patch_size", 1))
    told = getattr(model, "feature_info", None)
    if want == "dense" and told and not hasattr(model, "pyramid"):
        last = (told if isinstance(told, list) else told.get_dicts())[-1]["reduction"]
        rows, columns = (math.lcm(side, int(last)) for side in (rows, columns))
    return rows, columns


def forward_tiles(
    model: nn.Module,
    image: Tensor | PartSource,
    *,
    tile: int = 1024,
    overlap: int | None = None,
    want: Want = "logits",
    combine: Combine = "mean",
    batch_size: int = 1,
    prepare: Prepare | None = None,
    sink: Sink | None = None,
) -> Tensor | None:
    """Run a model over overlapping tiles of an image and combine the outputs, in eval mode and
    without gradients.

    Vectors (logits of classes, pooled features) become their elementwise mean or maximum over all
    tiles. Maps (feature maps, logits of pixels) are averaged where tiles overlap, with weights that
    fall off linearly toward the borders of a tile, so that there are no seams; where all tiles
    agree, the result is exactly theirs. Incomplete patches repeat the image's last row and column.

    Args:
        model: any module for ``[B, C, H, W]``; ``pooled`` and ``dense`` need timm's
            ``forward_head`` and ``forward_intermediates``.
        image: the model's input ``[B, C, H, W]``, or a ``PartSource`` that is read tile by tile;
        for ``visionattn.forward_tiles`` also a path or an array, as ``open_source`` opens it.
        tile: height and width of tiles in pixels, a whole number of patches; a smaller image is one
            tile.
        overlap: minimum number of pixels that neighbors share, a whole number of patches; None: an
            eighth of ``tile``, rounded up to whole patches.
        want: ``logits``, ``pooled`` features, the last feature map (``dense``), or the class of
            each pixel (``masks``) or its ``probabilities``.
        combine: ``mean`` or ``max`` over tiles, only for vectors.
        batch_size: tiles per call.
        prepare: only for a ``PartSource``: turns pixels ``[h, w, C]`` into the model's input ``[1,
            C, h, w]``. None: floating point values are unchanged, others are scaled to [0, 1].
        sink: receives the map of one image band by band; a row of tiles is in memory at a time. The
            caller closes it.

    Returns:
        The model's output for an image of that size, on the device of ``image`` (a source: the
        CPU), in float32 or wider; masks uint8 ``[B, H, W]``, 255 for logits that are not finite;
        probabilities float16 ``[B, C, H, W]``, NaN for such logits.
        None with a ``sink``, which gets ``[C, H, W]``, or masks as ``[1, H, W]``.

    Raises:
        ValueError: an argument is out of range or has no effect, tiles are not whole patches or
            whole cells of the map, or the model lacks the output; one line.
    """
    if want not in get_args(Want) or combine not in get_args(Combine):
        raise ValueError(
            f"want {want!r} and combine {combine!r}: expected one of {', '.join(get_args(Want))}, "
            f"and one of {', '.join(get_args(Combine))}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if want == "dense" and isinstance(model, Segmenter):
        model = model.backbone
    method = {"pooled": "forward_head", "dense": "forward_intermediates"}.get(want)
    if method and not hasattr(model, method):
        raise ValueError(
            f"{type(model).__name__} has no {want} features, because it has no {method}"
        )
    patch_px = cell_of(model, want)
    overlap = usual_overlap(tile, patch_px) if overlap is None else overlap
    run = TiledPass(
        COMPUTES[want], tile, overlap, patch_px, combine, batch_size, CONVERTS.get(want)
    )
    reads = _reads(image, prepare, model)
    home = image.device if isinstance(image, Tensor) else torch.device("cpu")
    if sink is not None and len(reads) > 1:
        raise ValueError(f"expected one image for a sink, got {len(reads)}")
    with torch.no_grad(), in_eval(model):
        found = [run.of_image(model, read, size, home=home, sink=sink) for read, size in reads]
    if sink is not None:
        return None
    result = torch.stack(found)
    return result[:, 0] if want == "masks" else result


@dataclass(frozen=True)
class TiledPass:
    """A computation over tiles, image by image, that replaces a computation over images."""

    compute: Compute
    """Turns images into vectors or maps; maps are blended."""
    tile: int
    """As for ``forward_tiles``, like ``overlap``, ``combine`` and ``batch_size``."""
    overlap: int
    patch_px: tuple[int, int]
    """Height and width of a patch."""
    combine: Combine = "mean"
    batch_size: int = 1
    convert: Callable[[Tensor], Tensor] | None = None
    """``classes_of`` or ``probabilities_of``, applied to logits of pixels; classes are uint8
    ``[B, H, W]``.
    """

    def __call__(self, model: nn.Module, inputs: Tensor, sizes: Tensor | None) -> Tensor:
        """Compute images ``[B, C, H, W]``.

        Raises:
            ValueError: as ``forward_tiles``, and for ``sizes``.
        """
        if sizes is not None:
            raise ValueError("tiles need images that fill their input, got padded ones")
        size = inputs.shape[2], inputs.shape[3]
        reads = (_of_tensor(image, image.device) for image in inputs.split(1))
        result = torch.stack([self.of_image(model, read, size) for read in reads])
        return result[:, 0] if self.convert is classes_of else result

    def of_image(
        self,
        model: nn.Module,
        read: Callable[[slice, slice], Tensor],
        size: tuple[int, int],
        *,
        home: torch.device | None = None,
        sink: Sink | None = None,
    ) -> Tensor:
        """Return the combined output of the tiles of one image, ``[D]`` or ``[C, H, W]``; an empty
        map if a sink has it.

        Args:
            model: the model to run.
            read: returns the part ``[1, C, h, w]`` of rows and columns, which may end beyond the
                image.
            size: height and width of the image in pixels.
            home: device for combining outputs; None: the device of the outputs.
            sink: receives a map.
        """
        tiles = tiling(*size, self.tile, self.overlap, self.patch_px)
        outputs = self._outputs(model, read, tiles, home)
        first = next(outputs)
        outputs = chain([first], outputs)
        if first.ndim == 3:
            if self.combine != "mean":
                raise ValueError(
                    f"combine {self.combine} needs outputs per image, got maps, which are "
                    "blended; remove it"
                )
            return self._blended(outputs, first, tiles, size, sink)
        if first.ndim != 1 or self.convert:
            what = "of an image" if first.ndim == 1 else f"of shape {list(first.shape)}"
            raise ValueError(
                f"{type(model).__name__} gives outputs {what}, expected "
                + ("logits of its pixels" if self.convert else "a vector or a map")
            )
        if sink is not None:
            raise ValueError("a sink needs a map, got a vector per image; remove it")
        if self.combine == "max":
            return reduce(torch.maximum, outputs)
        total = reduce(torch.add, outputs, first.new_zeros(first.shape, dtype=torch.float64))
        return (total / len(list(tiles.places()))).to(first.dtype)

    def _outputs(
        self,
        model: nn.Module,
        read: Callable[[slice, slice], Tensor],
        tiles: Tiling,
        home: torch.device | None,
    ) -> Iterator[Tensor]:
        """Yield the output of each tile, in float32 or wider."""
        places = list(tiles.places())
        for part in chunks(len(places), self.batch_size):
            inputs = torch.cat([read(*place) for place in places[part]])
            output = self.compute(model, inputs, None)
            wide = torch.promote_types(output.dtype, torch.float32)
            yield from output.to(home or output.device, wide)

    def _blended(
        self,
        outputs: Iterator[Tensor],
        first: Tensor,
        tiles: Tiling,
        size: tuple[int, int],
        sink: Sink | None,
    ) -> Tensor:
        """Blend maps one row of tiles after the other; only the rows that the next one overlaps are
        kept.
        """
        cell = _cell(tiles, first)
        down, across = tiles.down.in_cells(cell[0]), tiles.across.in_cells(cell[1])
        rows, columns = (-(-px // side) for px, side in zip(size, cell, strict=True))
        if self.convert and len(first) > IGNORED:
            raise ValueError(f"expected at most {IGNORED} classes for masks, got {len(first)}")
        like = self.convert(first[:, :1, :1]) if self.convert else first
        writer = MapWriter((len(like), rows, columns), like.dtype, sink)
        along = [share.to(first) for share in across.shares()]
        beside = [share.to(first)[:, None] for share in down.shares()]
        open_rows = first.new_empty(len(first), 0, across.length)
        for number, top in enumerate(down.starts):
            band = first.new_empty(len(first), down.tile, across.length)
            reached = 0
            for left, share in zip(across.starts, along, strict=True):
                part, known = next(outputs), reached - left
                there = band[:, :, left : left + across.tile]
                there[:, :, :known].lerp_(part[:, :, :known], share[:known])
                there[:, :, known:] = part[:, :, known:]
                reached = left + across.tile
            known = open_rows.shape[1]
            band[:, :known] = open_rows.lerp_(band[:, :known], beside[number][:known])
            # Rows that the next row of tiles does not reach are complete.
            last = number + 1 == len(down.starts)
            done = down.tile if last else down.starts[number + 1] - top
            ready = band[:, : min(done, rows - top), :columns]
            writer.write(top, self.convert(ready) if self.convert else ready)
            open_rows = band[:, done:].clone()
        found = writer.finish()
        return first.new_empty(0) if found is None else found.to(first.device)


def _cell(tiles: Tiling, output: Tensor) -> tuple[int, int]:
    """Return the size in pixels of a cell in a tile's map.

    Raises:
        ValueError: tiles do not begin and end with whole cells.
    """
    found = []
    for axis, side in zip(tiles, output.shape[1:], strict=True):
        cell = axis.tile // max(1, side)
        whole = cell and not any(place % cell for place in (axis.length, *axis.starts))
        if not whole or cell * side != axis.tile:
            raise ValueError(
                f"expected tile, overlap and image in whole cells, got tiles of {tiles.down.tile} "
                f"x {tiles.across.tile} pixels with {output.shape[1]} x {output.shape[2]} cells"
            )
        found.append(cell)
    return found[0], found[1]


def _reads(
    image: Tensor | PartSource, prepare: Prepare | None, model: nn.Module
) -> list[tuple[Callable[[slice, slice], Tensor], tuple[int, int]]]:
    """Return for each image a function that reads its parts, and its size."""
    like = next((each for each in model.parameters() if each.is_floating_point()), None)
    if isinstance(image, Tensor):
        if prepare is not None:
            raise ValueError(
                "prepare needs a source, got a tensor, which is already prepared; remove it"
            )
        if image.ndim != 4 or not image.numel():
            raise ValueError(f"expected images [B, C, H, W], got {list(image.shape)}")
        device = image.device if like is None else like.device
        size = image.shape[2], image.shape[3]
        return [(_of_tensor(one, device), size) for one in image.split(1)]
    size, prepare = (image.height, image.width), prepare or as_fractions

    def read(rows: slice, columns: slice) -> Tensor:
        inside = (
            slice(each.start, min(each.stop, length))
            for each, length in zip((rows, columns), size, strict=True)
        )
        part = _whole(prepare(image.read(*inside)), rows, columns)
        return part if like is None else part.to(like)

    return [(read, size)]


def _of_tensor(image: Tensor, device: torch.device) -> Callable[[slice, slice], Tensor]:
    """Return a function that cuts parts out of ``[1, C, H, W]``."""
    return lambda rows, columns: _whole(image[:, :, rows, columns].to(device), rows, columns)


def _whole(part: Tensor, rows: slice, columns: slice) -> Tensor:
    """Fill up a part that extends beyond the image."""
    below, right = (
        each.stop - each.start - have
        for each, have in zip((rows, columns), part.shape[2:], strict=True)
    )
    return filled(part, below, right)
