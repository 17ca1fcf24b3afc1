"""Which images are meant: folders, single files and lists of paths.

This module owns the order of the images. A listing is a ``Source``, as in ``data/images.py``, with
a length. It opens no image.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from visionattn.data.formats import Openable, check_file, extensions, is_folder_format
from visionattn.data.sources import Files
from visionattn.data.walk import TEXTS, LeftOut, images_below, suffix_of


class Listing(Protocol):
    """Encoded images by number, in order."""

    def __len__(self) -> int: ...

    def open(self, index: int) -> Openable:
        """Return what ``open_image`` takes, which closes it; raises OSError where there is none."""
        ...

    def name(self, index: int) -> str:
        """Return the path of an image."""
        ...

    def digest(self) -> str:
        """Return a text that differs where the images are others."""
        ...


class ListedFiles(Files):
    """Images that are files."""

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        """Return a digest of names, sizes in bytes and times of change, without reading a file."""
        return digest_of((path, *_state_of(path)) for path in self.paths)


def find_images(given: Sequence[str]) -> ListedFiles:
    """List the images that paths name: what lies in a folder in natural order, the rest in the
    order given.

    An image that a list names and that does not exist is listed too: its turn will show that it
    cannot be read.

    Raises:
        ValueError, FileNotFoundError: nothing is given, a path does not exist, or there are no
            images; one line.
    """
    if not given:
        raise ValueError(
            "--images is missing: a folder, image files, or a .txt file with a path per line"
        )
    paths: list[str] = []
    for path in given:
        if not os.path.exists(path):
            raise FileNotFoundError(f"no image, folder or list at {path}")
        check_file(path)
        if os.path.isdir(path) and not is_folder_format(path):
            paths += _in_folder(path)
        elif suffix_of(path) == ".txt":
            paths += _in_list(path)
        elif suffix_of(path) in TEXTS:
            raise ValueError(
                f"{path} is no image; a list of images is a .txt file with a path per line, "
                "relative to the current folder"
            )
        else:
            paths.append(path)
    return ListedFiles(paths)


def _in_folder(folder: str) -> list[str]:
    left_out = LeftOut()
    paths = images_below(Path(folder), others=left_out.suffixes)
    if not paths:
        wanted = ", ".join(sorted(extensions()))
        raise ValueError(
            f"no images in {folder}{left_out.files_there()}; wanted files that end in {wanted}"
        )
    left_out.warn(folder)
    return paths


def _in_list(path: str) -> list[str]:
    """Return the paths in a list file, one for each line that is not empty; they are relative to
    the current folder.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file in UTF-8 with a path per line") from error
    paths = [line.strip() for line in lines if line.strip()]
    if not paths:
        raise ValueError(f"{path} names no images; wanted a path per line")
    return paths


def _state_of(path: str) -> tuple[int, ...]:
    """Return the size of a file and the time of its last change; nothing where there is no file."""
    try:
        state = os.stat(path)
    except OSError:
        return ()
    return state.st_size, state.st_mtime_ns


def digest_of(parts: Sequence[object] | Iterator[object]) -> str:
    """Return the SHA-256 of parts: bytes as they are and other things as ``repr`` writes them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode() + b"\n")
    return digest.hexdigest()
