"""Maps written in bands of rows: zarr with shards, ``.npy`` and GeoTIFF.

This module owns the three formats. A map gets its name only when it is finished. Until then it has
a temporary name next to its place, where the same writes resume after a kill and end with the same
bytes. The module is independent of the maps' contents.
"""

import io
import math
import os
import warnings
from abc import abstractmethod
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from visionattn.cli.files import (
    Continued,
    check_free,
    check_new,
    check_room,
    named,
    reserve_bytes,
    write_whole,
)
from visionattn.cli.untrusted import refuse
from visionattn.data.formats.reader import Closing, Georeference, require

Shape = tuple[int, int, int]
"""Bands, rows and columns of a map."""
FILES = 128
"""Approximate maximum number of shards of a map."""
SHARD_BYTES = (2**22, 2**26)
"""Bytes of a shard before compression: shards grow to the first, and never beyond the second."""
CHUNK_BYTES = 2**20
"""Approximate uncompressed bytes of a zarr chunk."""
TILE_PX = 256
"""Height and width of the tiles of a TIFF."""
DRIVER_BYTES = 2**26
"""Size of GDAL's cache."""
HEAD, ZARR = 128, "zarr.json"
"""Header size of an ``.npy``, enough for any map, and the file that marks a folder as zarr."""


class MapSink(Closing):
    """A map ``[C, H, W]`` written in bands of rows, a context manager; ``open_sink`` makes it.

    Attributes:
        rows: bands whose length and first row are multiples of it are the fastest to write; known
            after ``begin``.
    """

    rows: int = 1

    _shape: Shape
    _place: Continued
    _is_folder = False

    def __init__(
        self,
        path: Path,
        overwrite: bool,
        dtype: np.dtype | None,
        georeference: Georeference | None = None,
    ):
        """Store the path of the map and its georeference."""
        self.path, self._overwrite, self._asked = path, overwrite, dtype
        self._georeference, self._held = georeference, ExitStack()

    def begin(self, shape: Shape, dtype: Any) -> None:
        """Create a map, or resume an unfinished one of the same shape and type.

        Args:
            shape: bands, rows and columns.
            dtype: type of the map; a float16 sink converts floats to it.

        Raises:
            ValueError: not enough disk space, a file is in the way, or another process writes it;
                one line, and nothing is written.
            OSError: it cannot be written.
        """
        bands, height, width = (int(side) for side in shape)
        dtype = np.dtype(dtype)
        if min(bands, height, width) < 1 or dtype.kind not in "buif":
            raise ValueError(f"{self.path}: expected a map of numbers, got {dtype} {list(shape)}")
        self._shape = bands, height, width
        self.dtype = self._asked if self._asked is not None and dtype.kind == "f" else dtype
        there = _bytes_of(Continued.beside(self.path, folder=self._is_folder))
        check_room(self.path, max(0, self._bytes() - there))
        self._place = Continued(self.path, folder=self._is_folder, overwrite=self._overwrite)
        self._held.callback(self._place.close)
        with named(self.path):
            self._begin()

    def write(self, first_row: int, band: np.ndarray) -> None:
        """Write a band of rows; the same rows may be written again.

        Args:
            first_row: index of its first row.
            band: ``[C, h, W]``.

        Raises:
            ValueError: it is not a band of this map, or float16 cannot hold its values.
            OSError: it cannot be written.
        """
        bands, height, width = self._shape
        rows = slice(first_row, first_row + (band.shape[1] if band.ndim == 3 else 0))
        fits = band.ndim == 3 and (band.shape[0], band.shape[2]) == (bands, width)
        if not fits or not 0 <= rows.start < rows.stop <= height:
            raise ValueError(
                f"{self.path}: a band {list(band.shape)} from row {first_row} does not fit into a "
                f"map {list(self._shape)}"
            )
        with named(self.path):
            self._write(rows, self._cast(rows, band))

    def _cast(self, rows: slice, band: np.ndarray) -> np.ndarray:
        if band.dtype == self.dtype:
            return band
        with np.errstate(over="ignore"):
            cast = band.astype(self.dtype)
        if self.dtype.kind == "f" and (np.isinf(cast) & np.isfinite(band)).any():
            raise ValueError(
                f"{self.path}: expected values up to {np.finfo(self.dtype).max:,.6g} for "
                f"{self.dtype}, got {np.abs(band[np.isfinite(band)]).max():,.6g} in rows "
                f"{rows.start:,} to {rows.stop:,}; use float32"
            )
        return cast

    def finish(self) -> None:
        """Give the map its name, once all of it is on the disk.

        Raises:
            ValueError: a file is in the way by now.
            OSError: it cannot be written.
        """
        with named(self.path):
            self._finish()

    def close(self) -> None:
        """Close the map; unfinished work stays for a resume."""
        self._held.close()

    def _bytes(self) -> int:
        """Return the size of the map in bytes."""
        return math.prod(self._shape) * self.dtype.itemsize + HEAD

    @abstractmethod
    def _begin(self) -> None:
        """Create an empty map, or check that the unfinished one is of this kind."""

    @abstractmethod
    def _write(self, rows: slice, band: np.ndarray) -> None:
        """Write some rows."""

    def _finish(self) -> None:
        """Give the map its name."""
        self._place.finish()


class NpySink(MapSink):
    """A map as an ``.npy`` file; all bytes are reserved before the first band."""

    def _begin(self) -> None:
        head = self._head()
        size = len(head) + math.prod(self._shape) * self.dtype.itemsize
        with self._place.open() as file:
            if os.fstat(file.fileno()).st_size == size and file.read(len(head)) == head:
                return
            self._place.empty()
            reserve_bytes(file.fileno(), size)
            # The header comes last: without it the file is not resumed.
            file.seek(0)
            _write_all(file, np.frombuffer(head, np.uint8))

    def _head(self) -> bytes:
        stream = io.BytesIO()
        said = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(stream, said | {"shape": self._shape})
        return stream.getvalue()

    def _write(self, rows: slice, band: np.ndarray) -> None:
        # Use no memory map: its pages count as memory of this process, and a full disk would kill
        # it without a message.
        _, height, width = self._shape
        start, row_bytes = len(self._head()), width * self.dtype.itemsize
        with self._place.open() as file:
            for number, plane in enumerate(band):
                file.seek(start + (number * height + rows.start) * row_bytes)
                _write_all(file, np.ascontiguousarray(plane))


class ZarrSink(MapSink):
    """A map as a zarr of version 3, in shards of whole rows."""

    _is_folder = True

    def _begin(self) -> None:
        import zarr

        place = self._place.place
        shards, chunks = shards_of(self._shape, self.dtype.itemsize)
        self.rows = shards[1]
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = zarr.open_array(place, mode="r+")
            kind = found.shape, found.dtype, found.shards, found.chunks
            if kind == (self._shape, self.dtype, shards, chunks):
                _forget_parts(place)
                self._array = found
                return
        self._place.empty()
        self._array = zarr.create_array(
            place,
            shape=self._shape,
            dtype=self.dtype,
            chunks=chunks,
            shards=shards,
            dimension_names=("c", "y", "x"),
        )

    def _write(self, rows: slice, band: np.ndarray) -> None:
        self._array[:, rows] = band

    def _finish(self) -> None:
        self._place.finish(replaces=ZARR)


class TiffSink(NpySink):
    """A map as a GeoTIFF of deflated tiles, or as a plain TIFF without a georeference.

    Writing a TIFF cannot be resumed, so the map is an ``.npy`` until it is finished.
    """

    def _bytes(self) -> int:
        # The TIFF is written next to the .npy; incompressible data grows slightly.
        return math.ceil(2.01 * super()._bytes())

    def _finish(self) -> None:
        # Refuse an existing file here, because write_whole replaces it.
        check_free(self.path, self._overwrite)
        write_whole(self.path, self._write_tiff)
        self._place.forget()

    def _write_tiff(self, target: Path) -> None:
        import rasterio
        from rasterio.errors import NotGeoreferencedWarning, RasterioError
        from rasterio.windows import Window

        bands, height, width = self._shape
        half = self.dtype == np.float16  # 16-bit floats in GDAL
        profile: dict[str, Any] = {
            "driver": "GTiff",
            "count": bands,
            "height": height,
            "width": width,
            "dtype": "float32" if half else self.dtype.name,
            "tiled": True,
            "blockxsize": TILE_PX,
            "blockysize": TILE_PX,
            "compress": "deflate",
            "predictor": 3 if self.dtype.kind == "f" else 1,
            "interleave": "band",
            "bigtiff": "if_safer",
        }
        if half:
            profile["nbits"] = 16
        place = self._georeference
        if place is not None:
            given = {"crs": place.crs, "transform": place.transform, "gcps": list(place.gcps)}
            profile |= {name: value for name, value in given.items() if value}
        with rasterio.Env(GDAL_CACHEMAX=DRIVER_BYTES), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)
            try:
                with self._place.open() as stored, rasterio.open(target, "w", **profile) as file:
                    stored.seek(len(self._head()))
                    for band, top in product(range(1, bands + 1), range(0, height, TILE_PX)):
                        rows = min(TILE_PX, height - top)
                        part = np.fromfile(stored, self.dtype, rows * width).reshape(rows, width)
                        window = Window(0, top, width, rows)
                        file.write(part.astype(np.float32) if half else part, band, window=window)
            except RasterioError as error:
                raise OSError(f"{self.path} cannot be written: {error}") from error


def shards_of(shape: Shape, itemsize: int) -> tuple[Shape, Shape]:
    """Return the shard and chunk shapes of a zarr, ``[C, rows, columns]`` each.

    A shard holds all columns and all bands of a power of two of rows, so that bands of rows fill
    whole shards. The number of rows gives at most about ``FILES`` shards, as far as ``SHARD_BYTES``
    allows.
    """
    bands, height, width = shape
    row = bands * width * itemsize
    rows = _power(max(height / FILES, SHARD_BYTES[0] / row))
    while rows > 1 and rows * row > SHARD_BYTES[1]:
        rows //= 2
    rows = min(rows, _power(height))
    columns = max(1, _power(CHUNK_BYTES / (bands * rows * itemsize) + 1) // 2)
    columns = min(columns, _power(width))
    return (bands, rows, math.ceil(width / columns) * columns), (bands, rows, columns)


def _power(least: float) -> int:
    """Return the smallest power of two that is at least ``least``."""
    return 1 << max(0, math.ceil(least) - 1).bit_length()


def _write_all(file: io.RawIOBase, plane: np.ndarray) -> None:
    left = memoryview(plane).cast("B")
    while left:
        left = left[file.write(left) :]


def _bytes_of(place: Path) -> int:
    """Return the disk size in bytes of a file, or of a folder with everything below it."""
    if not place.is_dir():
        return place.stat().st_size if place.exists() else 0
    found = (Path(folder, name) for folder, _, names in os.walk(place) for name in names)
    return sum(path.stat().st_size for path in found)


def _forget_parts(place: Path) -> None:
    """Delete files that zarr was writing when it was killed."""
    for part in place.rglob("*.partial"):
        part.unlink(missing_ok=True)


SINKS = {".zarr": ZarrSink, ".npy": NpySink, ".tif": TiffSink, ".tiff": TiffSink}


def open_sink(
    path: str | os.PathLike,
    *,
    source: Any = None,
    scale: tuple[float, float] = (1, 1),
    overwrite: bool = False,
    dtype: Any = None,
) -> MapSink:
    """Return a sink for a map, by the suffix: ``.zarr``, ``.npy``, ``.tif`` or ``.tiff``.

    Args:
        path: the file, or the folder for zarr; its parent folder exists.
        source: the image of the map; its ``georeference`` is used for a GeoTIFF.
        scale: height and width of a map cell in pixels of ``source``: a patch for features, 1 for
            pixel classes.
        overwrite: replace an existing file once the map is complete; of folders only zarr.
        dtype: ``float16`` or another floating point type for maps of floats; None: their own.

    Raises:
        ValueError, OSError: an unknown suffix, a file in the way, or a missing package; one line.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    asked = None if dtype is None else np.dtype(dtype)
    refuse(
        (suffix not in SINKS, f"expected a path that ends in {', '.join(SINKS)}, got {path}"),
        (
            asked is not None and asked.kind != "f",
            f"{path}: expected a type of floats, got {asked}",
        ),
    )
    if suffix == ".zarr":
        require("arrays", "zarr", what="a zarr array")
        if not overwrite and (path / ZARR).is_file():
            raise ValueError(f"{path} exists; pass --overwrite to replace it")
        check_new(path, replaces=ZARR if overwrite else None)
        return ZarrSink(path, overwrite, asked)
    check_free(path, overwrite)
    if suffix == ".npy":
        return NpySink(path, overwrite, asked)
    require("raster", "rasterio", what="writing a GeoTIFF")
    georeference = getattr(source, "georeference", None)
    placed = None if georeference is None else georeference.scaled(*scale)
    return TiffSink(path, overwrite, asked, placed)
