"""Sources of encoded images: files, members of a tar, rows of a Hugging Face table.

This module finds and opens an image by its index. It decodes none.
"""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple, cast

from PIL.ContainerIO import ContainerIO

from visionattn.data.formats import Openable, Source, check_file, is_folder_format
from visionattn.data.formats.reader import damage

KNOWN_BYTES = 8192
"""Number of bytes at either end of a file that identify its content."""


class Files:
    """Images that are files."""

    def __init__(self, paths: Sequence[str]):
        """Store ``paths``, one per image."""
        self.paths = paths

    def open(self, index: int) -> Openable:
        """Open the file; for a folder that is an image, such as zarr, return the path."""
        path = self.paths[index]
        check_file(path)
        return path if is_folder_format(path) else open(path, "rb")

    def name(self, index: int) -> str:
        """Return its path."""
        return self.paths[index]


class PartOfFile(ContainerIO[bytes]):
    """A byte range of a file, presented as a file; only requested bytes are read."""

    name = ""

    def read(self, n: int = -1) -> bytes:
        """Read up to ``n`` bytes, none if ``n`` is 0."""
        return super().read(n) if n else b""

    def readinto(self, buffer) -> int:
        """Fill a buffer as far as possible; return the number of bytes."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def fileno(self) -> int:
        """Raise, because libraries would read the whole file by its descriptor."""
        raise io.UnsupportedOperation("fileno")


class Member(NamedTuple):
    """A file in a tar."""

    path: str
    """Path in the tar."""
    start: int
    """Offset in the tar, in bytes."""
    size: int
    """In bytes."""


class TarMembers:
    """Images that are members of a tar; each has its own file handle, and only requested bytes are
    read.
    """

    def __init__(self, members: Sequence[Member], root: str):
        """Store the members of the tar file ``root`` that are images."""
        self.members, self.root = members, root

    def open(self, index: int) -> Openable:
        """Open the member."""
        _, start, size = self.members[index]
        return cast(BinaryIO, PartOfFile(open(self.root, "rb"), start, size))

    def name(self, index: int) -> str:
        """Return ``tar:member``."""
        return f"{self.root}:{self.members[index].path}"


class TableRows:
    """Images that are rows of Hugging Face tables, through timm's reader."""

    def __init__(self, readers: Mapping[str, Any], root: str):
        """Store timm's ``ReaderHfds`` of each split of ``root``, by name; rows are numbered across
        all of them.
        """
        self.readers, self.root = readers, root
        self.rows = [(name, row) for name, reader in readers.items() for row in range(len(reader))]

    def open(self, index: int) -> BinaryIO:
        """Read the row's image into memory."""
        name, row = self.rows[index]
        with damage("row of a table", AssertionError):  # a row without an image
            return self.readers[name][row][0]

    def name(self, index: int) -> str:
        """Return ``table:file``, or ``table:index`` if the row has no file name."""
        name, row = self.rows[index]
        with suppress(TypeError):  # a row without an image
            row = self.readers[name].filename(row) or row
        return f"{self.root}/{name}:{row}"


def known_part(source: Source, index: int, size: int) -> bytes:
    """Return the part of an image that identifies it, see ``ends_of``.

    Empty without a file, and for a row of a table, which is decoded completely and whose table has
    a version.
    """
    try:
        found = b"" if isinstance(source, TableRows) else source.open(index)
    except (OSError, ValueError):
        return b""
    if isinstance(found, (bytes, str)):
        return b""
    with found as file:
        return ends_of(file, size)


def ends_of(file: BinaryIO, size: int) -> bytes:
    """Return the number of bytes of a file, and up to ``size`` bytes at either end."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(min(size, length))
    file.seek(max(0, length - size))
    return b"%d" % length + head + file.read(min(size, length))
