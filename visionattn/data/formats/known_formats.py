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
from visionattn.data.formats.reader import DAMAGED_IMAGE, Reader, path_of, require

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
    """Module name below this package. Its ``open_reader(source, page)`` returns the reader."""
    suffixes: tuple[str, ...]
    starts: tuple[bytes, ...] = ()
    """First bytes that identify such files, whatever their names."""
    by_path: bool = False
    """Whether its reader needs a path; others need an open file."""
    needs: tuple[str, str, str] | None = None
    """The extra of ``pyproject.toml``, the package that it installs, and the name of such files in
    messages.
    """


TABLE = (
    Format(
        "gdal_raster",
        (".vrt", ".img", ".hgt", ".ntf"),
        by_path=True,
        needs=("raster", "rasterio", "a raster"),
    ),
    Format("arrays", (".zarr",), by_path=True, needs=("arrays", "zarr", "a zarr array")),
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
    reader = _open(source, options.page)
    reader.most_px = options.max_pixels
    try:
        reader.take_level(options.level)
    except DAMAGED_IMAGE:
        reader.close()
        raise
    return reader


def _open(source: Openable, page: int | None) -> Reader:
    if not isinstance(source, str | os.PathLike):
        path = path_of(source)
        if not _by_path(path):
            return _open_file(source, page)
        source.close()
        source = path
    check_file(source)
    if row := _by_path(source):
        return _module(row).open_reader(os.fspath(source), page)
    return _open_file(open(source, "rb"), page)  # the reader closes it


def _open_file(file: BinaryIO, page: int | None) -> Reader:
    """Open an image by its first bytes; the file is closed on failure."""
    with ExitStack() as failed:
        failed.callback(file.close)
        file.seek(0)
        start = file.read(16)
        file.seek(0)
        known = (row for row in TABLE if any(start.startswith(each) for each in row.starts))
        reader = _module(next(known, TABLE[-1])).open_reader(file, page)
        failed.pop_all()
    return reader


def _by_path(path: str | os.PathLike) -> Format | None:
    """Return the row of a file that is opened by its path, according to its name."""
    suffix = os.path.splitext(path)[1].lower()
    return next((row for row in TABLE if row.by_path and suffix in row.suffixes), None)


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
    return os.path.splitext(path)[1].lower() == ".zarr"


def _module(row: Format):
    if row.needs is not None:
        extra, package, what = row.needs
        require(extra, package, what=what)
    return importlib.import_module(f"visionattn.data.formats.{row.module}")
