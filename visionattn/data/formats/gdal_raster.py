"""Georeferenced rasters through rasterio: windows, overviews and other formats of GDAL.

Only this reader imports rasterio, after ``require`` has found it.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import rasterio
from rasterio.enums import ColorInterp, MaskFlags, Resampling
from rasterio.errors import NotGeoreferencedWarning, RasterioError
from rasterio.windows import Window

from visionattn.data.formats.reader import (
    Georeference,
    NotAsAsked,
    Reader,
    check_page,
    damage,
    one_line,
    path_of,
)
from visionattn.data.formats.value_meaning import Meaning, scaling
from visionattn.data.geometry import Box


def open_reader(file: BinaryIO, page: int | None) -> Reader:
    """Open a raster."""
    return Raster(file, page)


class Raster(Reader):
    """A raster that GDAL opens, with all its bands."""

    single_file = False  # GDAL reads masks, overviews and sources of a .vrt from other files

    def __init__(self, file: BinaryIO, page: int | None):
        """Open a file by its path, or the content of a file without one."""
        check_page(page, 1)
        self._content, self._path = None, path_of(file)
        if not self._path:
            file.seek(0)
            self._content = rasterio.MemoryFile(file.read())
            self._path = self._content.name
        file.close()
        with damage("raster", RasterioError), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            self._raster = rasterio.open(self._path)
            self.bands = self._raster.count
            self.stored = self._raster.shape
            self.dtype = self._dtype = np.dtype(np.result_type(*self._raster.dtypes))
            self.alpha = self._raster.colorinterp[-1] == ColorInterp.alpha
            flags = self._raster.mask_flag_enums[0]
            self._masked = MaskFlags.per_dataset in flags and MaskFlags.alpha not in flags
            bits = self._raster.tags(1, ns="IMAGE_STRUCTURE").get("NBITS")
            self.georeference = self._placed()
            self.inverted = _zero_is_white(self._raster)
            palette = self._palette()
        whole = self.dtype.itemsize * 8
        if self.dtype.kind == "u" and (whole == 8 or (bits and int(bits) < whole)):
            self.bits = int(bits or 8)
        if self.dtype.kind not in "uif":
            self.close()
            raise NotAsAsked(f"expected integers or floats, got {self.dtype}")
        nodata = self._raster.nodatavals
        nodata = nodata[:-1] if self.alpha and nodata[-1] is None else nodata
        meaning = Meaning(
            palette,
            nodata=nodata if any(value is not None for value in nodata) else (),
            alpha=self.alpha,
            **scaling(self._raster.scales, self._raster.offsets),
        )
        self.interpret(meaning)

    def _palette(self) -> np.ndarray | None:
        """Return the colors of a raster's values, uint8 ``[n, 4]``; None without a palette."""
        # For gray levels with white zero, GDAL adds a palette, which is wrong beyond 8 bits.
        if self._raster.colorinterp[0] != ColorInterp.palette or self.inverted:
            return None
        if self.bands - self.alpha != 1 or self._raster.dtypes[0] not in ("uint8", "uint16"):
            return None
        colours = self._raster.colormap(1)
        palette = np.zeros((max(colours) + 1, 4), np.uint8)
        palette[list(colours)] = list(colours.values())
        return palette

    def _placed(self) -> Georeference | None:
        """Return the georeference of the raster as stated in the file."""
        points, of_points = self._raster.gcps
        if points:
            return Georeference(of_points, None, tuple(points))
        transform, crs = self._raster.transform, self._raster.crs
        transform = None if transform.is_identity else transform
        return None if crs is transform is None else Georeference(crs, transform)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of the raster and of its overviews."""
        return [tuple(-(-px // by) for px in self.stored) for by in (1, *self._factors())]

    def _factors(self) -> list[int]:
        """Return the reduction factor of each overview."""
        with rasterio.Env():  # keeps GDAL from printing
            return self._raster.overviews(1)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return max(self._raster.block_shapes)

    def _take_level(self, level: int) -> None:
        with damage("raster", RasterioError):
            smaller = rasterio.open(self._path, overview_level=level - 1)
            self._raster.close()
            self._raster = smaller
        self.stored = smaller.shape
        before = self.georeference
        if before is not None:
            after = self._placed()
            self.georeference = after if before.transform or before.gcps else before

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        count = self._raster.count
        chosen = [band % count + 1 for band in (range(count) if bands is None else bands)]
        alike = len(set(self._raster.dtypes)) == 1  # else rasterio reads only single bands
        together = [chosen] if alike else [[band] for band in chosen]
        parts = [self._ask(self._raster.read, each, box, height, width) for each in together]
        pixels = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return np.ascontiguousarray(pixels.transpose(1, 2, 0)).astype(self._dtype, copy=False)

    def _empty(self, box: Box, height: int, width: int) -> np.ndarray | None:
        if not self._masked:
            return None
        return self._ask(self._raster.read_masks, [1], box, height, width)[0] == 0

    def _ask(
        self, method: Callable[..., np.ndarray], bands: list[int], box: Box, height: int, width: int
    ) -> np.ndarray:
        """Call a rasterio method that reads bands, numbered from 1, of a part: ``[n, h, w]``."""
        wanted = min(box.height // height, box.width // width)
        factor = max([1, *(each for each in self._factors() if each <= wanted)])
        shape = -(-box.height // factor), -(-box.width // factor)
        self.check_decoded(*shape)
        average = factor > 1 and self.meaning.palette is None
        with damage("raster", RasterioError), rasterio.Env():
            try:
                return method(
                    bands,
                    window=Window(box.left, box.top, box.width, box.height),
                    out_shape=(len(bands), *shape),
                    resampling=Resampling.average if average else Resampling.nearest,
                )
            except RasterioError as error:  # its text may only refer to its cause
                said = one_line(error.__cause__ or error)[:200]
                raise ValueError(f"raster that cannot be read: {said}") from error

    def close(self) -> None:
        """Close the file."""
        self._raster.close()
        if self._content is not None:
            self._content.close()


def _zero_is_white(raster: Any) -> bool:
    """Return whether the smallest value of a raster is white; a VRT follows its first file."""
    if raster.driver != "VRT":
        return raster.tags(ns="IMAGE_STRUCTURE").get("MINISWHITE") == "YES"
    text = Path(raster.name).read_text(encoding="utf-8", errors="replace")
    # A color table already converts them to colors.
    return "<ColorTableComponent>" not in text and any(map(_is_of_white_zeros, raster.files[1:2]))


@lru_cache(2**16)
def _is_of_white_zeros(path: str) -> bool:
    with suppress(RasterioError), rasterio.open(path) as raster:
        return _zero_is_white(raster)
    return False
