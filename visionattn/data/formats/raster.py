"""Georeferenced rasters through rasterio: windows, overviews and whatever else GDAL reads."""

import warnings
from collections.abc import Sequence

import numpy as np

from visionattn.data.formats.reader import Reader, check_page, damage, require
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
        whole = self.dtype.itemsize * 8
        if self.dtype.kind == "u" and (whole == 8 or (bits and int(bits) < whole)):
            self.bits = int(bits or 8)

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
            pixels = self._raster.read(
                chosen,
                window=Window(box.left, box.top, box.width, box.height),
                out_shape=(len(chosen), *shape),
                resampling=Resampling.average if factor > 1 else Resampling.nearest,
            )
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))

    def close(self) -> None:
        """Close the file."""
        self._raster.close()
