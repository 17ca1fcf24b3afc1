"""Slides of microscopes through tiffslide, which knows their levels."""

import warnings
from collections.abc import Sequence

import numpy as np

from visionattn.data.formats.reader import (
    Reader,
    check_page,
    choose_level,
    lengths,
    pick,
    require,
)
from visionattn.data.formats.tiff import damage_of_tiff
from visionattn.data.geometry import Box


def open_reader(path: str, page: int | None) -> Reader:
    """Open a slide."""
    require("slides", "tiffslide", what="a slide")
    return Slide(path, page)


class Slide(Reader):
    """The picture of a slide at all its levels; labels and thumbnails are no pages."""

    def __init__(self, path: str, page: int | None):
        import tiffslide

        check_page(page, 1)
        with damage_of_tiff(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what tiffslide does not know of a maker's metadata
            self._slide = tiffslide.TiffSlide(path)
            self._sizes = [size[::-1] for size in self._slide.level_dimensions]
            pixel = self._slide.read_region((0, 0), 0, (1, 1), as_array=True)
        self.stored = self._sizes[0]
        self.bands, self.dtype = pixel.shape[2], pixel.dtype
        self.bits = 8 if self.dtype == np.uint8 else None

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        level, (rows, columns) = choose_level(self._sizes, box, height, width)
        self.check_decoded(*lengths((rows, columns)))
        scale = [full / own for full, own in zip(self._sizes[0], self._sizes[level], strict=True)]
        # Where is asked in pixels of the full size, and how much in those of the level.
        corner = round(columns.start * scale[1]), round(rows.start * scale[0])
        size = columns.stop - columns.start, rows.stop - rows.start
        with damage_of_tiff():
            pixels = self._slide.read_region(corner, level, size, as_array=True)
        return pick(np.asarray(pixels), bands)

    def close(self) -> None:
        """Close the file."""
        self._slide.close()
