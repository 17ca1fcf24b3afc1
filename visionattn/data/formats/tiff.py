"""TIFF through tifffile: tiles, strips, BigTIFF, planes, pages and pyramids, of which the segments
are read that a part of the image lies in.

This module owns which TIFF goes to which reader: georeferenced ones to rasterio where it is
installed, and palettes, inks, black-and-white and the like to Pillow, which knows their colours.
"""

import importlib.util
import logging
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import BinaryIO

import numpy as np

from visionattn.data.formats.pillow import PillowImage
from visionattn.data.formats.reader import (
    DAMAGED_IMAGE,
    TURNS,
    MissingPackage,
    Reader,
    check_page,
    choose_level,
    damage,
    lengths,
    one_line,
)
from visionattn.data.geometry import Box

GEO_KEYS, ORIENTATION, LARGEST_VALUE = 34735, 274, 281
GDAL_NODATA = 42113
MIN_IS_WHITE, MIN_IS_BLACK, RGB, YCBCR = 0, 1, 2, 6
OLD_JPEG = 6
JPEGS = (OLD_JPEG, 7, 33007, 34892)
REDUCED, MASK = 1, 4
"""Bits of the tag that tells smaller copies and masks from pages."""
# tifffile logs what it finds wrong; the error says it too.
logging.getLogger("tifffile").addHandler(logging.NullHandler())


def open_reader(file: BinaryIO, page: int | None) -> Reader:
    """Open a TIFF with what suits it: tifffile, rasterio or Pillow."""
    path = getattr(file, "name", None)
    path = path if isinstance(path, str) and os.path.isfile(path) else None
    with_rasterio = path is not None and importlib.util.find_spec("rasterio") is not None
    if importlib.util.find_spec("tifffile") is None:
        with_pillow = _open_without_tifffile(file, page)
        if with_rasterio and with_pillow.has_tag(GEO_KEYS) and with_pillow.pages == 1:
            return _with_rasterio(with_pillow, path)
        return with_pillow
    with damage_of_tiff():
        image = TiffImage(file, page)
        if with_rasterio and GEO_KEYS in image.page.tags and image.pages == 1 and image.plain:
            return _with_rasterio(image, path)
        return image if image.plain else PillowImage(file, page)


def _with_rasterio(image: Reader, path: str) -> Reader:
    from visionattn.data.formats.raster import open_reader

    image.close()
    return open_reader(path, None)


def _open_without_tifffile(file: BinaryIO, page: int | None) -> PillowImage:
    try:
        return PillowImage(file, page)
    except MissingPackage:
        raise
    except DAMAGED_IMAGE as error:
        reason = one_line(error).partition(" <")[0]  # Pillow names an open file as Python shows it
        raise MissingPackage(
            f"{reason}; TIFF of most kinds needs tifffile: pip install 'visionattn[tiff]'"
        ) from error


def _named_nodata(page) -> float | None:
    """Return the value that GDAL's tag names for pixels that hold nothing; None without one."""
    tag = page.tags.get(GDAL_NODATA)
    try:
        return None if tag is None else float(str(tag.value).strip("\0 "))
    except ValueError:
        return None


def _check_ends(starts: Sequence[int], counts: Sequence[int], size: int) -> None:
    """Raise ValueError where tiles or strips end beyond the end of their file: some decoders fill
    up what is missing.
    """
    last = max((start + count for start, count in zip(starts, counts, strict=True)), default=0)
    if last > size:
        raise ValueError(
            f"TIFF that is cut off: it has {size:,} bytes, and a tile or strip ends at {last:,}"
        )


def damage_of_tiff() -> AbstractContextManager[None]:
    """Turn what tifffile raises for garbled files into one of ``DAMAGED_IMAGE``."""
    from tifffile import TiffFileError

    return damage("TIFF", TiffFileError, MemoryError)


class TiffImage(Reader):
    """A TIFF whose values are grey levels, colours or bands as they are."""

    def __init__(self, file: BinaryIO, page: int | None):
        import tifffile

        self._file = file
        self._tiff = tifffile.TiffFile(file)
        number = 0 if page is None else self._number_of(page)
        self.page = first = self._tiff.pages[number]
        self.stored = int(first.imagelength), int(first.imagewidth)
        self.turn = TURNS.get(self._tag(ORIENTATION, 1), TURNS[1])
        self.bands = first.samplesperpixel
        self.alpha = bool(first.extrasamples) and first.extrasamples[-1] in (1, 2)
        self.dtype = np.dtype(first.dtype or np.uint8)
        self.bits = self._bits()
        self.inverted = first.photometric == MIN_IS_WHITE and self.dtype.kind == "u"
        self.nodata = _named_nodata(first)
        self._number = number
        self._check_segments(first)

    @property
    def pages(self) -> int:
        """How many pages there are; smaller copies and masks are none."""
        pages = sum(not page.subfiletype & (REDUCED | MASK) for page in self._tiff.pages)
        return max(pages, (self._tiff.imagej_metadata or {}).get("images", 1))

    def _number_of(self, page: int) -> int:
        """Return the place in the file of a page that is counted from 1."""
        places = [
            place
            for place, each in enumerate(self._tiff.pages)
            if not each.subfiletype & (REDUCED | MASK)
        ]
        return places[check_page(page, len(places))]

    @property
    def plain(self) -> bool:
        """Whether the values are grey levels, colours or bands as they are."""
        page = self.page
        colours = (MIN_IS_WHITE, MIN_IS_BLACK, RGB)
        plain = page.photometric in colours or (
            page.photometric == YCBCR and page.compression in JPEGS
        )
        whole = page.dtype is not None and page.dtype.kind in "uif" and page.imagedepth == 1
        return plain and whole and not (self.dtype == np.uint8 and page.bitspersample != 8)

    def _tag(self, number: int, default: int) -> int:
        tag = self.page.tags.get(number)
        if tag is None:
            return default
        return max(tag.value) if isinstance(tag.value, tuple) else tag.value

    def _bits(self) -> int | None:
        """Return the bits that the values fill, where fewer are stated than their type has."""
        if self.dtype.kind != "u":
            return None
        if self.dtype == np.uint8:
            return 8
        whole = self.dtype.itemsize * 8
        largest = int(self._tag(LARGEST_VALUE, 0)).bit_length()
        bits = largest if 0 < largest < whole else self.page.bitspersample
        return bits if isinstance(bits, int) and bits < whole else None

    @cached_property
    def levels(self) -> list:
        """The page and its smaller copies, the largest first: those within it, and those that
        follow it in the file.
        """
        found = list(self.page.pages or [])
        for place in range(self._number + 1, len(self._tiff.pages)):
            following = self._tiff.pages[place]
            if not following.subfiletype & (REDUCED | MASK):
                break
            found.append(following)
        alike = [
            copy
            for copy in found
            if copy.subfiletype & REDUCED
            and not copy.subfiletype & MASK
            and (copy.dtype, copy.samplesperpixel) == (self.page.dtype, self.bands)
            and copy.imagelength < self.stored[0]
        ]
        return [self.page, *sorted(alike, key=lambda copy: -copy.imagelength)]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of the page and of its smaller copies."""
        return [(int(level.imagelength), int(level.imagewidth)) for level in self.levels]

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a tile or strip."""
        return self._segment_size(self.page)

    def _take_level(self, level: int) -> None:
        self.levels = self.levels[level:]
        self.page = self.levels[0]

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        # Whatever a garbled header says comes out here: sizes of nothing, lists of other lengths.
        with damage_of_tiff():
            number, part = choose_level(self.sizes, box, height, width)
            self.check_decoded(*lengths(part))
            self.check_decoded(*self._segment_size(self.levels[number]))
            pixels = self._segments(self.levels[number], part, bands)
        return pixels

    def _segments(self, page, part: tuple[slice, slice], bands: Sequence[int] | None) -> np.ndarray:
        """Decode the tiles or strips that a part of a page lies in, of the planes of ``bands``."""
        self._check_segments(page)
        planar = page.planarconfig == 2 and self.bands > 1
        chosen = list(range(self.bands)) if bands is None else list(bands)
        shape = (part[0].stop - part[0].start, part[1].stop - part[1].start, len(chosen))
        pixels = np.full(shape, page.nodata or 0, self.dtype)
        arguments = {}
        if page.compression in JPEGS:
            arguments = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader}
        indices = [
            plane_start + index
            for plane_start in self._plane_starts(page, chosen if planar else [0])
            for index in self._indices(page, part)
        ]
        starts = [page.dataoffsets[index] for index in indices]
        counts = [page.databytecounts[index] for index in indices]
        _check_ends(starts, counts, self._tiff.filehandle.size)
        segments = self._tiff.filehandle.read_segments(
            starts,
            counts,
            indices=indices,
            flat=True,
        )
        for content, index in segments:
            segment, place, size = page.decode(content, index, **arguments)
            if segment is None:  # nothing is stored where all is background
                continue
            segment = segment[0, : size[1], : size[2]]
            for band, source in enumerate(chosen):
                if planar and source != place[0]:
                    continue
                self._place(
                    pixels[..., band], segment[..., 0 if planar else source], part, place[2:4]
                )
        return pixels

    def _indices(self, page, part: tuple[slice, slice]) -> list[int]:
        """Return the numbers of the segments of the first plane that a part lies in."""
        height, width = self._segment_size(page)
        columns = math.ceil(page.imagewidth / width)
        return [
            row * columns + column
            for row in range(part[0].start // height, (part[0].stop - 1) // height + 1)
            for column in range(part[1].start // width, (part[1].stop - 1) // width + 1)
        ]

    def _check_segments(self, page) -> None:
        """Raise ValueError where a page is said to be larger than the tiles or strips it lists."""
        if page.imagedepth != 1 or page.compression == OLD_JPEG:  # these count them otherwise
            return
        height, width = self._segment_size(page)
        planes = page.samplesperpixel if page.planarconfig == 2 else 1
        wanted = math.ceil(page.imagelength / height) * math.ceil(page.imagewidth / width) * planes
        if len(page.dataoffsets) < wanted:
            raise ValueError(
                f"TIFF that says it has {page.imagelength:,} x {page.imagewidth:,} pixels, in "
                f"{wanted:,} tiles or strips, and lists {len(page.dataoffsets):,}"
            )

    def _segment_size(self, page) -> tuple[int, int]:
        if page.is_tiled:
            return page.tilelength, page.tilewidth
        return min(page.rowsperstrip, page.imagelength) or page.imagelength, page.imagewidth

    def _plane_starts(self, page, planes: Sequence[int]) -> list[int]:
        """Return the numbers of the first segments of planes."""
        height, width = self._segment_size(page)
        each = math.ceil(page.imagelength / height) * math.ceil(page.imagewidth / width)
        return [plane * each for plane in dict.fromkeys(planes)]

    def _place(
        self,
        target: np.ndarray,
        segment: np.ndarray,
        part: tuple[slice, slice],
        corner: tuple[int, int],
    ) -> None:
        """Copy what a segment shares with the part that is read."""
        into, out_of = [], []
        for wanted, start, length in zip(part, corner, segment.shape, strict=True):
            first, last = max(wanted.start, start), min(wanted.stop, start + length)
            into.append(slice(first - wanted.start, last - wanted.start))
            out_of.append(slice(first - start, last - start))
        target[tuple(into)] = segment[tuple(out_of)]

    def close(self) -> None:
        """Close the file."""
        self._tiff.close()
        self._file.close()
