"""Slides of microscopes through tiffslide, which knows their levels."""

import math
import warnings
from collections.abc import Sequence

import numpy as np

from visionattn.data.formats.meaning import Meaning
from visionattn.data.formats.reader import (
    Reader,
    check_page,
    choose_level,
    lengths,
    pick,
    require,
)
from visionattn.data.formats.tiff_image import damage_of_tiff
from visionattn.data.formats.tiff_pages import colours_of
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
        self.stored, self._taken = self._sizes[0], 0
        self.bands, self.dtype = pixel.shape[2], pixel.dtype
        self.bits = 8 if self.dtype == np.uint8 else None
        page = self._slide.ts_tifffile.pages[0]
        self.interpret(Meaning(colours=colours_of(page, self.bands)))

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of the levels."""
        return [tuple(size) for size in self._sizes]

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        said, at = self._slide.properties, f"tiffslide.level[{self._taken}]"
        rows, columns = (said.get(f"{at}.tile-{side}") for side in ("height", "width"))
        return int(rows or self.stored[0]), int(columns or self.stored[1])

    def _take_level(self, level: int) -> None:
        self._sizes = self._sizes[level:]
        self._taken = level

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        level, (rows, columns) = choose_level(self._sizes, box, height, width)
        self.check_decoded(*lengths((rows, columns)))
        # Where is asked in pixels of the full size, and how much in those of the level.
        number = self._taken + level
        by = self._slide.level_downsamples[number]
        corner = _full_px(columns.start, by), _full_px(rows.start, by)
        size = columns.stop - columns.start, rows.stop - rows.start
        with damage_of_tiff():
            pixels = self._slide.read_region(corner, number, size, as_array=True)
        return pick(np.asarray(pixels), bands)

    def close(self) -> None:
        """Close the file."""
        self._slide.close()


def _full_px(start: int, by: float) -> int:
    """Return the first pixel of the full size that tiffslide takes for pixel ``start`` of a level;
    ``by`` is how many times smaller the level is, on average over height and width.
    """
    found = math.ceil(start * by)
    return found if int(found / by) == start else found + 1
