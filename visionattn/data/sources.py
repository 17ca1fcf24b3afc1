"""Where encoded images are: files, members of a tar, rows of a Hugging Face table.

This module owns finding and opening one image by its number. It knows nothing of what is in it.
"""

import errno
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

from visionattn.data.formats import Openable, check_file, is_folder_format


class Source(Protocol):
    """Encoded images by number."""

    def open(self, index: int) -> Openable:
        """Return what ``open_image`` takes, which closes it; raises one of ``DAMAGED_IMAGE`` where
        there is no image.
        """
        ...

    def name(self, index: int) -> str:
        """Return what messages call the image: its path, or its file and the place within it."""
        ...

    def part(self, index: int, size: int) -> bytes:
        """Return what tells the image from another one of its name: how many bytes it has, and the
        first and the last ``size`` of these. Empty where there is none.
        """
        ...


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

    def part(self, index: int, size: int) -> bytes:
        """Return the number of its bytes, the first and the last ones; nothing of a folder."""
        path = self.paths[index]
        try:
            check_file(path)
            if os.path.isdir(path):
                return b""
            with open(path, "rb") as file:
                return ends_of(file, 0, os.fstat(file.fileno()).st_size, size)
        except (OSError, ValueError):
            return b""


class PartOfFile(io.RawIOBase):
    """Some bytes of a file as a file of their own, of which only what is asked for is read."""

    def __init__(self, path: str, start: int, length: int):
        """Open ``length`` bytes from byte ``start`` on."""
        self._file = io.FileIO(path)
        self._start, self._length = start, length
        self._at = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be sought in."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte; return its number."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def readinto(self, buffer) -> int:
        """Fill the buffer as far as there are bytes; return how many there were."""
        room = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(room)
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._file.close()
        super().close()


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

    def open(self, index: int) -> BinaryIO:
        """Open the member."""
        _, start, size = self.members[index]
        return io.BufferedReader(PartOfFile(self.root, start, size))

    def name(self, index: int) -> str:
        """Return ``tar:member``."""
        return f"{self.root}:{self.members[index].path}"

    def part(self, index: int, size: int) -> bytes:
        """Return the number of its bytes, the first and the last ones."""
        _, start, length = self.members[index]
        with open(self.root, "rb") as file:
            return ends_of(file, start, length, size)


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

    def part(self, index: int, size: int) -> bytes:
        """Return nothing: a row is decoded as a whole, and its table has a version."""
        return b""


def ends_of(file: BinaryIO, start: int, length: int, size: int) -> bytes:
    """Return how many bytes a part of a file has, and up to ``size`` of them at either end."""
    file.seek(start)
    head = file.read(min(size, length))
    file.seek(start + max(0, length - size))
    return b"%d" % length + head + file.read(min(size, length))
