"""TIFF through tifffile: tiles, strips, BigTIFF, planes, pages and pyramids, reading only the
segments that overlap a part.

Files with no-data values, scales or masks, and georeferenced files if rasterio is installed, go to
rasterio. 8-bit inks, black-and-white and similar files, whose colors Pillow supports, go to
Pillow.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import BinaryIO

import numpy as np
import tifffile
from PIL import Image, UnidentifiedImageError

from visionattn.data.formats.pillow import PillowImage
from visionattn.data.formats.reader import (
    TURNS,
    NotAsAsked,
    Reader,
    check_page,
    choose_level,
    damage,
    lengths,
    path_of,
    require,
)
from visionattn.data.formats.tiff_pages import (
    GDAL_METADATA,
    GDAL_NODATA,
    GEO_KEYS,
    MIN_IS_BLACK,
    MIN_IS_WHITE,
    PALETTE,
    RGB,
    YCBCR,
    Plane,
    meaning_of,
    named_images,
    named_levels,
    page_levels,
    page_places,
    page_size,
)
from visionattn.data.geometry import Box

ORIENTATION, LARGEST_VALUE = 274, 281
OLD_JPEG = 6
JPEGS = (OLD_JPEG, 7, 33007, 34892)
# tifffile logs problems that its errors report too.
logging.getLogger("tifffile").addHandler(logging.NullHandler())


def open_reader(file: BinaryIO, page: int | None) -> Reader:
    """Open a TIFF with the suitable reader: tifffile, rasterio or Pillow."""
    with damage_of_tiff():
        image = TiffImage(file, page)
        path = path_of(file)
        holes = image.of_gdal or (path and os.path.isfile(f"{path}.msk"))
        placed = path and GEO_KEYS in image.page.tags
        placed = placed and importlib.util.find_spec("rasterio") is not None
        known = image.plain or image.page.photometric == PALETTE
        if known and (holes or (placed and image.pages == 1)):
            return _with_rasterio(image, file)
        return image if image.plain else _of_other_kinds(image, file, page)


def _with_rasterio(image: "TiffImage", file: BinaryIO) -> Reader:
    """Open a file that is georeferenced or holds information that only GDAL reads."""
    what = "TIFF with nodata, scale, offset or a mask"
    require("raster", "rasterio", what=what)
    if image.pages > 1:
        raise NotAsAsked(f"{what} and {image.pages} pages; write each page to its own file")
    from visionattn.data.formats.gdal_raster import Raster

    return Raster(file, None)


def _of_other_kinds(image: "TiffImage", file: BinaryIO, page: int | None) -> Reader:
    """Open with Pillow a file whose colors tifffile does not decode."""
    said, kind = image.page, image.page.photometric
    try:
        if np.max(said.bitspersample) <= 8 or said.samplesperpixel == 1:
            return PillowImage(file, page)
    except UnidentifiedImageError:
        pass
    raise NotAsAsked(
        f"TIFF of photometric interpretation {getattr(kind, 'name', kind)}, compression "
        f"{getattr(said.compression, 'name', said.compression)} and {said.bitspersample} bits, "
        "which cannot be read as colors; convert it to RGB or gray"
    )


def open_mask(file: BinaryIO) -> Image.Image:
    """Open a mask that Pillow does not support, such as a 64-bit one."""
    with damage_of_tiff():
        image = TiffImage(file, None)
        if image.page.samplesperpixel > 1 or image.page.dtype.kind not in "ui":
            raise NotAsAsked(
                f"it has {image.page.samplesperpixel} values of {image.page.dtype} for each pixel; "
                "expected the number of a class"
            )
        values = image.turn.apply(image._read(Box(0, 0, *image.stored), *image.stored, None))
    most = np.iinfo(np.int32)
    return Image.fromarray(values[..., 0].clip(most.min, most.max).astype(np.int32))


def damage_of_tiff() -> AbstractContextManager[None]:
    """Turn tifffile's exceptions for malformed files into one of ``DAMAGED_IMAGE``."""
    return damage("TIFF", tifffile.TiffFileError, MemoryError)


class TiffImage(Reader):
    """A TIFF whose values are gray levels, colors or bands, or are converted to colors."""

    def __init__(self, file: BinaryIO, page: int | None):
        self._file = file
        self._tiff = tifffile.TiffFile(file)
        self._named = named_images(self._tiff)
        if self._named:
            pages, channels = len(self._named), len(self._named[0][1])
            if page is not None and pages < page <= channels:
                raise NotAsAsked(
                    f"expected page {page}, the image has {pages}; its {channels} channels are "
                    f"bands, as in --data.bands {page}"
                )
            number = check_page(page, pages)
            self.levels, self._masked = named_levels(self._tiff, *self._named[number]), False
        else:
            places = [0] if page is None else page_places(self._tiff)
            self.levels, self._masked = page_levels(
                self._tiff, places[check_page(page, len(places))]
            )
        self.page = first = self.levels[0][0].page
        self.stored = page_size(first)
        self.turn = TURNS.get(self._tag(ORIENTATION, 1), TURNS[1])
        self.bands = first.samplesperpixel * len(self.levels[0])
        last = (first.extrasamples or (0,))[-1]
        self.alpha = last in (1, 2) and len(self.levels[0]) == 1
        self.dtype = np.dtype(first.dtype or np.uint8)
        self.bits = self._bits()
        self.inverted = first.photometric == MIN_IS_WHITE
        self.interpret(meaning_of(first, self.bands, alpha=self.alpha))

    @property
    def pages(self) -> int:
        """The number of pages; smaller copies, masks and channels do not count."""
        return len(self._named) or len(page_places(self._tiff))

    @property
    def plain(self) -> bool:
        """Whether the values are readable as gray levels, colors or bands."""
        page = self.page
        plain = page.photometric in (MIN_IS_WHITE, MIN_IS_BLACK, RGB) or (
            page.photometric == YCBCR and page.compression in JPEGS
        )
        plain = plain or self.meaning.coloured
        whole = page.dtype is not None and page.dtype.kind in "uif" and page.imagedepth == 1
        few = page.dtype == np.uint8 and page.bitspersample != 8
        return plain and whole and (self.meaning.palette is not None or not few)

    @property
    def of_gdal(self) -> bool:
        """Whether tags or a mask mark pixels without data, or define the meaning of values."""
        tags = self.page.tags
        scaled = "role=" in str(tags.valueof(GDAL_METADATA, ""))
        return self._masked or GDAL_NODATA in tags or scaled

    def _tag(self, number: int, default: int) -> int:
        value = self.page.tags.valueof(number, default)
        return max(value) if isinstance(value, tuple) else value

    def _bits(self) -> int | None:
        """Return the number of bits that the values fill, if less than their type has."""
        if self.dtype.kind != "u":
            return None
        if self.dtype == np.uint8:
            return 8
        whole = self.dtype.itemsize * 8
        largest = int(self._tag(LARGEST_VALUE, 0)).bit_length()
        bits = largest if 0 < largest < whole else self.page.bitspersample
        return bits if isinstance(bits, int) and bits < whole else None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of the page and of its smaller copies."""
        return [page_size(planes[0].page) for planes in self.levels]

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a tile or strip."""
        return self._segment_size(self.page)

    def _take_level(self, level: int) -> None:
        self.levels = self.levels[level:]
        self.page = self.levels[0][0].page

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        # Errors from a malformed header show up here: zero sizes, lists of wrong lengths.
        with damage_of_tiff():
            number, part = choose_level(self.sizes, box, height, width)
            planes = self.levels[number]
            self.check_decoded(*lengths(part))
            self.check_decoded(*self._segment_size(planes[0].page))
            samples = self.page.samplesperpixel
            if len(planes) == 1:
                chosen = None if bands is None else [band % samples for band in bands]
                return self._segments(planes[0], part, chosen)
            count = samples * len(planes)
            wanted = [band % count for band in (range(count) if bands is None else bands)]
            parts = [
                self._segments(planes[band // samples], part, [band % samples]) for band in wanted
            ]
        return np.concatenate(parts, 2)

    def _segments(
        self, plane: Plane, part: tuple[slice, slice], bands: Sequence[int] | None
    ) -> np.ndarray:
        """Decode the tiles or strips that overlap a part of a page, for the planes of ``bands``.

        zarr over tifffile's ``aszarr`` gives the same values and takes 1.3 to 6 times as long.
        """
        page = plane.page
        planar = page.planarconfig == 2 and page.samplesperpixel > 1
        chosen = list(range(page.samplesperpixel)) if bands is None else list(bands)
        pixels = np.full((*lengths(part), len(chosen)), page.nodata or 0, page.dtype)
        arguments = {}
        if page.compression in JPEGS:
            arguments = {"jpegtables": page.jpegtables, "jpegheader": page.jpegheader}
        height, width = self._segment_size(page)
        down, across = -(-page.imagelength // height), -(-page.imagewidth // width)
        planes, rows, columns = np.ix_(
            list(dict.fromkeys(chosen)) if planar else [0],
            range(part[0].start // height, (part[0].stop - 1) // height + 1),
            range(part[1].start // width, (part[1].stop - 1) // width + 1),
        )
        indices = ((planes * down + rows) * across + columns).ravel().tolist()
        starts = [page.dataoffsets[index] + plane.shift for index in indices]
        counts = [page.databytecounts[index] for index in indices]
        segments = page.parent.filehandle.read_segments(starts, counts, indices=indices, flat=True)
        for content, index in segments:
            segment, place, size = page.decode(content, index, **arguments)
            if segment is None:  # nothing is stored for pure background
                continue
            into, out_of = [], []
            for wanted, start, length in zip(part, place[2:4], size[1:3], strict=True):
                first, last = max(wanted.start, start), min(wanted.stop, start + length)
                into.append(slice(first - wanted.start, last - wanted.start))
                out_of.append(slice(first - start, last - start))
            for band, source in enumerate(chosen):
                if not planar or source == place[0]:
                    pixels[(*into, band)] = segment[(0, *out_of, 0 if planar else source)]
        return pixels

    def _segment_size(self, page) -> tuple[int, int]:
        if page.is_tiled:
            return page.tilelength, page.tilewidth
        return min(page.rowsperstrip, page.imagelength) or page.imagelength, page.imagewidth

    def close(self) -> None:
        """Close the file."""
        self._tiff.close()
        self._file.close()
