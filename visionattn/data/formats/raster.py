"""Georeferenced rasters through rasterio: windows, overviews and whatever else GDAL reads."""

import warnings
from collections.abc import Sequence

import numpy as np

from visionattn.data.formats.reader import (
    Georeference,
    Reader,
    check_page,
    damage,
    one_line,
    require,
)
from visionattn.data.geometry import Box


def open_reader(path: str, page: int | None) -> Reader:
    """Open a raster."""
    require("raster", "rasterio", what="a raster")
    return Raster(path, page)


class Raster(Reader):
    """A raster that GDAL opens, with all its bands."""

    def __init__(self, path: str, page: int | None):
        import rasterio
        from rasterio.enums import ColorInterp
        from rasterio.errors import NotGeoreferencedWarning, RasterioError

        check_page(page, 1)
        self._path = path
        with damage("raster", RasterioError), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            self._raster = rasterio.open(path)
            self.bands = self._raster.count
            if not self.bands:
                self._raster.close()
                raise ValueError("raster without bands; name one of its parts")
            self.stored = self._raster.shape
            self.dtype = np.dtype(np.result_type(*self._raster.dtypes))
            self.nodata = self._raster.nodata
            self.alpha = self._raster.colorinterp[-1] == ColorInterp.alpha
            bits = self._raster.tags(1, ns="IMAGE_STRUCTURE").get("NBITS")
            self.georeference = self._placed()
        whole = self.dtype.itemsize * 8
        if self.dtype.kind == "u" and (whole == 8 or (bits and int(bits) < whole)):
            self.bits = int(bits or 8)

    def _placed(self) -> Georeference | None:
        """Return where the raster lies, as the file says it."""
        points, of_points = self._raster.gcps
        if points:
            return Georeference(of_points, None, tuple(points))
        transform, crs = self._raster.transform, self._raster.crs
        if transform.is_identity:
            return None if crs is None else Georeference(crs, None)
        return Georeference(crs, transform)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of the raster and of its overviews."""
        from rasterio import Env

        with Env():
            return [
                self.stored,
                *((-(-self.stored[0] // by), -(-self.stored[1] // by)) for by in self._factors()),
            ]

    def _factors(self) -> list[int]:
        """Return how many times smaller each overview is."""
        return self._raster.overviews(1)

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return max(self._raster.block_shapes)

    def _take_level(self, level: int) -> None:
        import rasterio
        from rasterio.errors import RasterioError

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
        from rasterio import Env
        from rasterio.enums import Resampling
        from rasterio.errors import RasterioError
        from rasterio.windows import Window

        wanted = min(box.height // height, box.width // width)
        with Env():  # where GDAL does not print what it finds, here and below
            overviews = self._raster.overviews(1)
        factor = max([1, *(each for each in overviews if each <= wanted)])
        shape = -(-box.height // factor), -(-box.width // factor)
        self.check_decoded(*shape)
        chosen = [band + 1 for band in (range(self.bands) if bands is None else bands)]
        with damage("raster", RasterioError), Env():
            try:
                pixels = self._raster.read(
                    chosen,
                    window=Window(box.left, box.top, box.width, box.height),
                    out_shape=(len(chosen), *shape),
                    resampling=Resampling.average if factor > 1 else Resampling.nearest,
                )
            except RasterioError as error:  # whose text may only tell of its cause
                said = one_line(error.__cause__ or error)
                raise ValueError(f"raster that cannot be read: {said}") from error
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))

    def close(self) -> None:
        """Close the file."""
        self._raster.close()
