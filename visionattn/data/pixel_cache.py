"""Arrays kept in a folder, so that later epochs and runs do not compute them again; decoded pixels
of large files are such arrays.

An entry is the result of a function, as a ``.npy`` file named by everything that determines it.
Entries are written atomically and never change. So several processes and runs share a folder
without locks, and it may be deleted at any time.
"""

import errno
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import cv2
import numpy as np
import torch

import visionattn
from visionattn.cli.files import write_whole
from visionattn.cli.tables import sized
from visionattn.data.formats import Source
from visionattn.data.formats.reader import Keep, not_kept
from visionattn.data.sources import KNOWN_BYTES, PartOfFile, ends_of

DECODERS = ("numpy", "pillow", "tifffile", "imagecodecs")
"""Libraries whose other versions may decode to other pixels; OpenCV has several package names."""
SPARE_BYTES = 2**31
"""Free space that a cache leaves on its disk, for states and weights of runs."""


class ArrayCache:
    """A folder of arrays.

    Args:
        folder: the first entry creates it.
        option: the option with the folder, for messages.
    """

    def __init__(self, folder: str, option: str):
        self.folder, self.option = Path(folder), option
        # Shared with loading processes, so that only the first failure is reported.
        self._full = torch.zeros((), dtype=torch.bool).share_memory_()

    def entry(self, key: bytes, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array of a key; if it is missing or damaged, make and keep it."""
        name = hashlib.sha256(key).hexdigest()
        path = self.folder / name[:2] / f"{name[2:]}.npy"
        try:
            # Copy-on-write: values are read from the disk as they are used.
            return np.asarray(np.load(path, mmap_mode="c"))
        except (OSError, ValueError, EOFError):  # missing or damaged
            made = make()
        if not self._full:
            self._write(path, made)
        return made

    def _write(self, path: Path, array: np.ndarray) -> None:
        """Write an entry; after a failure, warn and write no more."""

        def write(place: Path) -> None:
            with open(place, "wb") as file:  # np.save would add a suffix to a path
                np.save(file, array)

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(path.parent).free < array.nbytes + SPARE_BYTES:
                raise OSError(errno.ENOSPC, f"less than {sized(SPARE_BYTES)} free on its disk")
            write_whole(path, write)
        except OSError as error:
            self._full.fill_(True)
            warnings.warn(
                f"{self.option} {self.folder} is full ({error.strerror}); further images are "
                "computed in each epoch",
                stacklevel=2,
            )


class PixelCache(ArrayCache):
    """A folder of decoded pixels."""

    def __init__(self, folder: str):
        super().__init__(folder, "data.cache")
        self._versions = (visionattn.__version__, cv2.__version__, *map(version, DECODERS))

    def keep(self, source: Source, index: int, *options: object) -> Keep:
        """Return the ``Keep`` of an image.

        Args:
            source: the encoded images.
            index: index of the image.
            options: all options that determine its pixels; their ``repr`` is part of the key.
        """
        known = identity(source, index)
        return (
            not_kept if known is None else partial(self._entry, (*self._versions, known, *options))
        )

    def _entry(self, known: tuple, part: object, make: Callable[[], np.ndarray]) -> np.ndarray:
        return self.entry(repr((known, part)).encode("utf-8", "surrogateescape"), make)


def identity(source: Source, index: int) -> str | None:
    """Return a text that changes with the content of an image's file.

    It has the path, the time of the last change, the number of bytes and ``KNOWN_BYTES`` at either
    end; for a row of a table, a digest of all bytes. None for a folder, and for a file that cannot
    be opened.
    """
    try:
        file = source.open(index)
    except (OSError, ValueError):
        return None
    if isinstance(file, (str, os.PathLike)):
        return None
    with file:
        if isinstance(file, io.BytesIO):
            return hashlib.sha256(file.getbuffer()).hexdigest()
        stored = file.fh if isinstance(file, PartOfFile) else file
        changed = os.fstat(stored.fileno()).st_mtime_ns
        return f"{os.path.abspath(source.name(index))} {changed} {ends_of(file, KNOWN_BYTES)!r}"
