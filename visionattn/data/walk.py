"""The images below a folder: which files and folders count, each real folder once.

This module owns what is left out: folders that a link leads to for the second time, files that are
hidden, and pipes, sockets and devices. It opens no image.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from visionattn.data.formats import extensions, is_folder_format

Identity = tuple[int, int]
"""Device and inode, which all names of a folder share."""


def images_below(folder: str | Path, apart: set[Identity] = frozenset()) -> list[str]:
    """List the paths of the images below a folder at any depth, in natural order.

    A link is followed, once: a folder that can be reached by two paths counts under the one without
    a link. A link to nothing counts as an image, which then cannot be read.

    Args:
        folder: where to look.
        apart: folders besides, which are not entered.

    Raises:
        OSError: a folder cannot be read.
    """
    known = extensions()
    found = (
        path
        for path in _files(os.fspath(folder), {identity(folder), *apart})
        if os.path.splitext(path)[1].lower() in known
    )
    return sorted(found, key=in_order)


def natural_key(text: str) -> list[str | int]:
    """Return what names are sorted by: numbers within them by their value, as in timm, whose own
    key takes ``²`` for a number.
    """
    parts = re.split(r"(\d+)", text.lower())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def in_order(path: str) -> tuple[list, str]:
    """Return what paths are sorted by: numbers within them by their value."""
    return natural_key(path), path


def identity(folder: str | Path) -> Identity:
    """Return what tells a folder from others, whatever path leads to it."""
    state = os.stat(folder)
    return state.st_dev, state.st_ino


def _files(folder: str, seen: set[Identity]) -> Iterator[str]:
    """Yield the files below a folder, and the folders that are images; ``seen`` grows."""
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if entry.name[0] != "."), key=_links_last)
    for entry in visible:
        if not entry.is_dir():
            # What is there and no file is a pipe, a socket or a device.
            if entry.is_file() or not os.path.exists(entry.path):
                yield entry.path
        elif is_folder_format(entry.path):
            yield entry.path
        elif (here := identity(entry.path)) not in seen:
            seen.add(here)
            yield from _files(entry.path, seen)


def _links_last(entry: os.DirEntry) -> tuple[bool, str]:
    return entry.is_symlink(), entry.name
