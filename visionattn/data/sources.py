"""Where encoded images are: files, members of a tar, rows of a Hugging Face table.

This module owns finding and opening one image by its number. It decodes none.
"""

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

from PIL.ContainerIO import ContainerIO

from visionattn.data.formats import Openable, Source, check_file, is_folder_format


class Files:
    """Images that are files."""

    def __init__(self, paths: Sequence[str]):
        """Take ``paths``, one for each image."""
        self.paths = paths

    def open(self, index: int) -> Openable:
        """Open the file; of a folder that is an image, such as zarr, return the path."""
        path = self.paths[index]
        check_file(path)
        return path if is_folder_format(path) else open(path, "rb")

    def name(self, index: int) -> str:
        """Return its path."""
        return self.paths[index]


class PartOfFile(ContainerIO[bytes]):
    """Some bytes of a file as a file of their own, of which only what is asked for is read."""

    name = ""

    def read(self, n: int = -1) -> bytes:
        """Read up to ``n`` bytes, none where it is 0."""
        return super().read(n) if n else b""

    def readinto(self, buffer) -> int:
        """Fill a buffer as far as there are bytes; return how many there were."""
        found = self.read(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def fileno(self) -> int:
        """Refuse, as libraries would read the whole file by its number."""
        raise io.UnsupportedOperation("fileno")


class Member(NamedTuple):
    """A file in a tar."""

    path: str
    """As the tar names it."""
    start: int
    """The byte of the tar at which it begins."""
    size: int
    """In bytes."""


class TarMembers:
    """Images that are members of a tar; each is read through a handle of its own, and no further
    than its reader asks.
    """

    def __init__(self, members: Sequence[Member], root: str):
        """Take the members of the tar file ``root`` that are images."""
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
        """Take timm's ``ReaderHfds`` of each split of ``root``, by name; rows are numbered through
        all of them.
        """
        self.readers, self.root = readers, root
        self.rows = [(name, row) for name, reader in readers.items() for row in range(len(reader))]

    def open(self, index: int) -> BinaryIO:
        """Read the row's image into memory."""
        name, row = self.rows[index]
        return self.readers[name][row][0]

    def name(self, index: int) -> str:
        """Return ``table:file``, or ``table:number`` where the row names no file."""
        name, row = self.rows[index]
        return f"{self.root}/{name}:{self.readers[name].filename(row) or row}"


def known_part(source: Source, index: int, size: int) -> bytes:
    """Return what tells an image from another one of its name, see ``ends_of``. Empty where there
    is no file, and of a row of a table, which is decoded as a whole and whose table has a version.
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
    """Return how many bytes a file has, and up to ``size`` of them at either end."""
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(min(size, length))
    file.seek(max(0, length - size))
    return b"%d" % length + head + file.read(min(size, length))
