"""The table of file formats: which reader opens which file, by the suffix and the first bytes.

A format is a row here and a module with its ``Reader``.
"""

import importlib
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from timm.data.readers.img_extensions import get_img_extensions

from visionattn.data.formats.read_options import ReadOptions
from visionattn.data.formats.reader import Reader, path_of, require

Openable = str | os.PathLike | BinaryIO
"""A path, or a seekable binary stream with the bytes of an image."""


class Source(Protocol):
    """Encoded images by index."""

    def open(self, index: int) -> Openable:
        """Return an input for ``open_image``, which closes it.

        Raises:
            One of ``DAMAGED_IMAGE``: there is no such image.
        """
        ...

    def name(self, index: int) -> str:
        """Return the name of the image in messages: its path, or its file and place."""
        ...


@dataclass(frozen=True)
class Format:
    """A row of the table."""

    module: str
    """Module name below this package. Its ``open_reader(file, page)`` returns the reader."""
    suffixes: tuple[str, ...]
    starts: tuple[bytes, ...] = ()
    """First bytes that identify such files, whatever their names."""
    needs: tuple[str, str, str] | None = None
    """The extra of ``pyproject.toml``, the package that it installs, and the name of such files in
    messages.
    """


RASTER = Format(
    "gdal_raster", (".vrt", ".img", ".hgt", ".ntf"), needs=("raster", "rasterio", "a raster")
)
ZARR = Format("arrays", (".zarr",), needs=("arrays", "zarr", "a zarr array"))
TABLE = (
    RASTER,
    ZARR,
    Format("arrays", (".npy",), (b"\x93NUMPY",)),
    Format(
        "tiff",
        (".tif", ".tiff", ".btf", ".tf8", ".svs", ".ndpi", ".scn", ".bif", ".qptiff"),
        (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    ),
    Format(
        "pillow",
        (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif")
        + (".jp2", ".j2k", ".pbm", ".pgm", ".ppm"),
    ),
)
"""The last row accepts all files that match no other row."""


def extensions() -> frozenset[str]:
    """Return the lower-case suffixes of files that count as images; timm's count too."""
    return frozenset(get_img_extensions()).union(*(row.suffixes for row in TABLE))


def open_image(source: Openable, options: ReadOptions | None = None) -> Reader:
    """Open an image: a context manager that reads parts of it.

    Args:
        source: a path, or an open file, which is closed with the reader, or at once on failure.
        options: ``page``, ``level`` and ``max_pixels`` apply here.

    Raises:
        One of ``DAMAGED_IMAGE``: there is no such image, or it cannot be read. ``MissingPackage``
            is one of them: its format needs a package that is not installed.
    """
    options = options or ReadOptions()
    with ExitStack() as failed:
        if isinstance(source, str | os.PathLike):
            check_file(source)
            path = os.fspath(source)
            source = path if is_folder_format(path) else open(path, "rb")  # noqa: SIM115
        if not isinstance(source, str):
            failed.callback(source.close)
        reader = _module(_format_of(source)).open_reader(source, options.page)
        failed.callback(reader.close)
        reader.most_px = options.max_pixels
        reader.take_level(options.level)
        failed.pop_all()
    return reader


def _format_of(source: str | BinaryIO) -> Format:
    """Return the row of a folder, or of an open file: by its name for rasters, else by its first
    bytes.
    """
    if isinstance(source, str):
        return ZARR
    suffix = os.path.splitext(path_of(source))[1].lower()
    if suffix in RASTER.suffixes:
        return RASTER
    source.seek(0)
    start = source.read(16)
    source.seek(0)
    known = (row for row in TABLE if any(start.startswith(each) for each in row.starts))
    return next(known, TABLE[-1])


def read_size(source: Openable, options: ReadOptions | None = None) -> tuple[int, int]:
    """Return height and width of an image in pixels from its header, after EXIF rotation. Safe to
    call from several threads.

    Raises:
        One of ``DAMAGED_IMAGE``: it cannot be read.
    """
    with open_image(source, options) as reader:
        return reader.height, reader.width


def check_file(path: str | os.PathLike) -> None:
    """Raise ValueError for a path that is neither a file nor a folder: opening a FIFO would wait
    forever.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise ValueError(f"{os.fspath(path)} is a pipe, a socket or a device, not an image file")


def is_folder_format(path: str | os.PathLike) -> bool:
    """Return whether a folder is itself an image, by its name."""
    return os.path.splitext(path)[1].lower() in ZARR.suffixes


def _module(row: Format):
    if row.needs is not None:
        extra, package, what = row.needs
        require(extra, package, what=what)
    return importlib.import_module(f"visionattn.data.formats.{row.module}")
