"""From the bands and values of a file to a model's channels: which bands, and which values are
black and white.

For a dataset, a few files determine the value range once for all.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np

from visionattn.data.formats.known_formats import Source, open_image
from visionattn.data.formats.read_options import ReadOptions
from visionattn.data.formats.reader import DAMAGED_IMAGE, NotAsAsked, Reader
from visionattn.data.geometry import Box, View

GREY = np.array([0.299, 0.587, 0.114], np.float32)
"""Weights of red, green and blue in gray, as in Pillow (ITU-R 601-2)."""
TILE_ROWS = 256
BLOCK_PX = 2**24
"""Maximum number of pixels read at once when a whole image is inspected."""
BITS = (8, 10, 12, 14, 16)
"""Possible numbers of bits in 16-bit integers, if the file does not state it."""
FEW_FILES = 8
"""Number of files that determine the value range, and are checked for pages."""
MOST_HEADERS = 2048
"""Number of files checked for more than 8 bits if the inspected files have 8."""
EIGHT_BITS = (".jpg", ".jpeg", ".gif", ".webp", ".bmp")
"""Suffixes of formats that hold 8 bits only."""


def read_image(reader: Reader, view: View, options: ReadOptions) -> np.ndarray:
    """Read the part of an image that a model sees, at the size of the content of ``view``.

    Shrinking averages over areas; enlarging is bilinear.

    Returns:
        ``[h, w, C]``: uint8 for 8-bit files, else float32 in [0, 1].

    Raises:
        One of ``DAMAGED_IMAGE``: the image cannot be read; ValueError also if bands are missing or
            its values have no known range.
    """
    stored = reader.read(view.box, *view.content, bands_of(reader, options))
    return resize(channels_of(stored, reader, options), *view.content)


def channels_of(stored: np.ndarray, reader: Reader, options: ReadOptions) -> np.ndarray:
    """Return a model's channels from the bands that were read: uint8 for 8-bit files, else float32
    in [0, 1]; 0 for pixels without data.
    """
    pixels = scale_values(stored, reader, options)
    return pixels if options.bands is not None else _coloured(pixels, options.channels)


def read_blocks(reader: Reader, options: ReadOptions) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield an image at its full size in parts that fit into memory: stored values
    ``[h, w, bands]`` and channels ``[h, w, C]``.

    They are masked arrays if some pixels have no data.
    """
    bands = bands_of(reader, options)
    for box in blocks(reader):
        stored = reader.read(box, box.height, box.width, bands)
        channels = channels_of(stored, reader, options)
        if isinstance(stored, np.ma.MaskedArray):
            empty = np.ma.getmaskarray(stored)
            if empty.shape != channels.shape:  # gray that became color, or the reverse
                empty = np.broadcast_to(empty.any(2, keepdims=True), channels.shape)
            channels = np.ma.MaskedArray(channels, empty)
        yield stored, channels


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize ``[H, W, C]`` to ``[height, width, C]``: by area averaging, or by interpolation if the
    image grows.
    """
    if image.shape[:2] == (height, width):
        return image
    shrinks = height <= image.shape[0] and width <= image.shape[1]
    way = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    # For some types and methods, OpenCV supports at most 4 channels.
    parts = [
        cv2.resize(
            np.ascontiguousarray(image[..., start : start + 4]), (width, height), interpolation=way
        ).reshape(height, width, -1)
        for start in range(0, image.shape[2], 4)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)


def bands_of(reader: Reader, options: ReadOptions) -> list[int] | None:
    """Return the bands to read, from 1; None: all."""
    held = "1 band" if reader.bands == 1 else f"{reader.bands} bands"
    if options.bands is not None:
        if max(options.bands) > reader.bands:
            raise NotAsAsked(f"expected band {max(options.bands)}, the image has {held}")
        return list(options.bands)
    if reader.bands > 4 or (reader.bands == 2 and not reader.alpha):
        raise NotAsAsked(
            f"the image has {held}; choose bands, e.g. --data.bands "
            f"{' '.join(map(str, range(1, min(reader.bands, 3) + 1)))}"
        )
    kept = {2: 1, 4: 3}.get(reader.bands, reader.bands)
    return None if kept == reader.bands else list(range(1, kept + 1))


def _coloured(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Convert gray, or red, green and blue, to a number of channels."""
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    if pixels.dtype == np.uint8:
        # As in Pillow, in integer arithmetic.
        weights = np.array([19595, 38470, 7471], np.uint32)
        return (((pixels @ weights) + 0x8000) >> 16).astype(np.uint8)[..., None]
    return (pixels @ GREY)[..., None]


def range_of(reader: Reader, options: ReadOptions) -> tuple[float, float] | None:
    """Return the values that map to 0 and 1; None if unknown."""
    stated = None
    if reader.dtype.kind == "u" and reader.bits is not None:
        stated = (0.0, float(2**reader.bits - 1))
    if options.value_range is None:
        return stated
    # A range measured on other files applies to integers whose file states no range.
    if options.found and (stated is not None or reader.dtype.kind not in "ui"):
        return stated
    return options.value_range


def scale_values(pixels: np.ndarray, reader: Reader, options: ReadOptions) -> np.ndarray:
    """Return uint8 unchanged and other values as float32 in [0, 1]; pixels without data are 0.

    If the smallest value is white, the range is inverted.

    Raises:
        NotAsAsked: the value range is unknown, or values exceed the range of the other files; one
            line with the smallest and the largest value.
    """
    values, empty = np.ma.getdata(pixels), np.ma.getmask(pixels)
    if values.dtype == np.uint8 and reader.bits in (8, None):
        values = 255 - values if reader.inverted else values
        return values if empty is np.ma.nomask else np.where(empty, np.uint8(0), values)
    limits = range_of(reader, options)
    if limits is None:
        raise NotAsAsked(no_range(reader, extremes(pixels)))
    low, high = limits
    if options.found or limits != options.value_range:
        _check_within(pixels, low, high)
    scaled = values.astype(np.float32)
    scaled -= np.float32(low)
    scaled /= np.float32(high - low)
    np.nan_to_num(scaled, copy=False, nan=0.0, posinf=1.0, neginf=0.0)
    np.clip(scaled, 0, 1, out=scaled)
    if reader.inverted:
        np.subtract(1, scaled, out=scaled)
    scaled[empty] = 0
    return scaled


def no_range(reader: Reader, ends: tuple[float, float]) -> str:
    """Return the message about an image whose value range is unknown."""
    units = "values in physical units" if reader.meaning.scale else f"{reader.dtype} values"
    return (
        f"unknown value range of {units} from {ends[0]:,.6g} to {ends[1]:,.6g}; pass "
        "--data.value_range LOW HIGH"
    )


def _check_within(pixels: np.ndarray, low: float, high: float) -> None:
    smallest, largest = extremes(pixels)
    wrong = f"from {smallest:,.6g}, while other images begin at {low:,.6g}"
    if smallest >= low:
        wrong = f"up to {largest:,.6g}, while other images end at {high:,.6g}"
    if smallest < low or largest > high:
        raise NotAsAsked(f"values {wrong}; pass --data.value_range LOW HIGH")


def extremes(pixels: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest finite value of pixels with data; 0 and 0 if there are
    none.
    """
    if isinstance(pixels, np.ma.MaskedArray):
        pixels = pixels.compressed()
    if pixels.dtype.kind == "f":
        pixels = pixels[np.isfinite(pixels)]
    return (float(pixels.min()), float(pixels.max())) if pixels.size else (0.0, 0.0)


def blocks(reader: Reader) -> Iterator[Box]:
    """Yield parts of an image in whole rows that fit into memory."""
    rows = max(1, BLOCK_PX // reader.width)
    if rows > TILE_ROWS:  # so that no tile is read twice
        rows -= rows % TILE_ROWS
    for top in range(0, reader.height, rows):
        yield Box(top, 0, min(rows, reader.height - top), reader.width)


class _Seen(NamedTuple):
    """Properties of one inspected file of a dataset."""

    name: str
    pages: int
    """Number of pages; 1 if a page was requested."""
    dtype: np.dtype
    scaled: bool
    """Whether it states scale and offset."""
    drops_alpha: bool
    """Whether it has an alpha channel that is not read."""
    ends: tuple[float, float] | None = None
    """The smallest and the largest value, if the range is unknown."""
    unknown: str = ""
    """Message if no range is given either."""


def settle(
    source: Source, indices: Sequence[int], options: ReadOptions, *, strict: bool = True
) -> tuple[ReadOptions, list[str]]:
    """Inspect a few evenly spaced files of a dataset, for settings that hold for all of them.

    Args:
        source: the files.
        indices: indices of the dataset's files.
        options: how they are read.
        strict: raise if values have no range; otherwise such a file is an error when it is read.

    Returns:
        The options, with the value range of integers whose files do not state it, and messages
        about this range, unused pages and transparency.

    Raises:
        ValueError: the values are not integers of up to 16 bits and have no range, or no inspected
            file has the required bands, page or package; one line with the file.
    """
    seen: list[_Seen] = []
    refused: list[str] = []
    for place in np.linspace(0, len(indices) - 1, min(FEW_FILES, len(indices))).round():
        index = int(indices[int(place)])
        try:
            with open_image(source.open(index), options) as reader:
                seen.append(_look(reader, source.name(index), options))
        except NotAsAsked as error:
            refused.append(f"{source.name(index)}: {error}")
        except DAMAGED_IMAGE:
            continue  # reported when it is read
    if strict and refused and not seen:
        raise ValueError(refused[0])
    if seen and all(file.dtype == np.uint8 for file in seen):
        seen += _first_deep(source, indices, options)
    options, lines = _settled(seen, options, strict)
    lines += _of_pages(seen)
    if transparent := [file.name for file in seen if file.drops_alpha]:
        lines.append(
            f"the alpha channel (transparency) is dropped: transparent pixels show the color that "
            f"the file stores, often black or white ({transparent[0]})"
        )
    return options, lines


def settle_one(reader: Reader, name: str, options: ReadOptions) -> tuple[ReadOptions, list[str]]:
    """Inspect one open image like ``settle``, reading all of it if its value range is unknown.

    Raises:
        One of ``DAMAGED_IMAGE``: it cannot be read, or has no such bands.
    """
    seen = [_look(reader, name, options)]
    options, lines = _settled(seen, options, strict=False)
    return options, lines + _of_pages(seen)


def _first_deep(source: Source, indices: Sequence[int], options: ReadOptions) -> Iterator[_Seen]:
    """Yield the first file without a known value range among up to ``MOST_HEADERS`` evenly spaced
    files; of the other files only headers are read.
    """
    named = [int(i) for i in indices if not source.name(int(i)).lower().endswith(EIGHT_BITS)]
    for index in named[:: -(-len(named) // MOST_HEADERS) or 1]:
        with suppress(*DAMAGED_IMAGE), open_image(source.open(index), options) as reader:
            if reader.dtype != np.uint8 and range_of(reader, options) is None:
                yield _look(reader, source.name(index), options)
                return


def _of_pages(seen: Sequence[_Seen]) -> list[str]:
    """Return the message about unused pages."""
    many = max(seen, key=lambda file: file.pages, default=None)
    if many is None or many.pages == 1:
        return []
    return [
        f"images have several pages ({many.pages} in {many.name}); reading page 1 of each; pass "
        "--data.page N for another"
    ]


def _look(reader: Reader, name: str, options: ReadOptions) -> _Seen:
    bands = bands_of(reader, options)
    pages = reader.pages if options.page is None else 1
    # In some formats alpha marks pixels without data, which is used.
    drops_alpha = reader.alpha and options.bands is None and not reader.meaning.alpha
    seen = _Seen(name, pages, reader.dtype, reader.meaning.scale is not None, drops_alpha)
    if reader.dtype == np.uint8 or range_of(reader, options) is not None:
        return seen
    parts = (reader.read(box, box.height, box.width, bands) for box in blocks(reader))
    lows, highs = zip(*map(extremes, parts), strict=True)
    ends = min(lows), max(highs)
    return seen._replace(ends=ends, unknown=no_range(reader, ends))


def _settled(
    seen: Sequence[_Seen], options: ReadOptions, strict: bool
) -> tuple[ReadOptions, list[str]]:
    """Return the options with the range of integers whose files do not state it, and messages about
    values.
    """
    lines, whole = [], []
    ranged = options.value_range is not None and not options.found
    for file in seen:
        if file.ends is None:
            continue
        if file.dtype.kind in "ui" and file.ends[0] >= 0 and file.ends[1] < 2**16:
            whole.append(file)
        elif strict:
            raise ValueError(f"{file.name}: {file.unknown}")
    if whole:
        largest = int(max(file.ends[1] for file in whole if file.ends))
        held = next(few for few in BITS if largest < 2**few)
        options = replace(options, value_range=(0.0, float(2**held - 1)), found=True)
        lines.append(
            f"{max(file.dtype.itemsize * 8 for file in whole)}-bit images hold values up to "
            f"{largest:,}: read as {held} bits; override with --data.value_range LOW HIGH"
        )
    if ranged and seen and all(file.dtype == np.uint8 for file in seen):
        lines.append(
            f"data.value_range has no effect on 8-bit files; all {len(seen)} inspected files have "
            "8 bits"
        )
    if scaled := [file.name for file in seen if file.scaled]:
        lines.append(
            f"data.value_range is in physical units, because {scaled[0]} states scale and offset"
        )
    return options, lines
