"""The images below a folder: which files and folders count, each real folder once.

It leaves out folders that a link leads to for the second time, hidden files, pipes, sockets and
devices, and counts files of other kinds. It opens no image.
"""

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from visionattn.data.formats import extensions, is_folder_format

Identity = tuple[int, int]
"""Device and inode, which all names of a folder share."""

TEXTS = frozenset(
    (".txt", ".md", ".rst", ".html", ".ini", ".log", ".py", ".ipynb", ".lst")
    + (".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".db", ".parquet", ".xlsx")
    + (".tfw", ".pgw", ".jgw", ".wld", ".prj", ".ovr", ".msk", ".aux")
)
"""Texts, tables and the companions of rasters, never counted as lost images."""
MOST_SUFFIXES = 10
"""How many suffixes a line names."""


def images_below(
    folder: str | Path,
    apart: frozenset[Identity] | set[Identity] = frozenset(),
    others: Counter[str] | None = None,
    *,
    deep: bool = True,
) -> list[str]:
    """List the paths of the images below a folder at any depth, in natural order.

    A link is followed, once: a folder that can be reached by two paths counts under the one without
    a link. A link to nothing counts as an image, which then cannot be read.

    Args:
        folder: where to look.
        apart: folders besides, which are not entered.
        others: counts the suffixes of files that are neither images nor ``TEXTS``.
        deep: enter folders.

    Raises:
        OSError: a folder cannot be read.
    """
    seen = {identity(folder), *apart} if deep else None
    images, rest = by_kind(_files(os.fspath(folder), seen))
    if others is not None:
        others.update(rest)
    return sorted(images, key=in_order)


def holds_images(folder: str | Path) -> bool:
    """Tell whether there is an image below a folder, at any depth."""
    known = extensions()
    return any(suffix_of(path) in known for path in _files(os.fspath(folder), {identity(folder)}))


def by_kind(
    paths: Iterable[str], unread: frozenset[str] = frozenset()
) -> tuple[list[str], Counter[str]]:
    """Return the paths of images, by the ends of their names, and counts by suffix of the files
    that are neither images nor ``TEXTS``.

    Args:
        paths: of any files.
        unread: suffixes of images that cannot be read where the files are.
    """
    known, images, others = extensions() - unread, [], Counter[str]()
    for path in paths:
        suffix = suffix_of(path)
        if suffix in known:
            images.append(path)
        elif suffix not in TEXTS:
            others[suffix] += 1
    return images, others


def suffix_of(path: str) -> str:
    """Return the end of a name in small letters, with its dot."""
    return os.path.splitext(path)[1].lower()


def subfolders(folder: str | Path) -> list[str]:
    """List the names of the folders in a folder, without hidden ones, folders that are images, and
    links to the folder itself.
    """
    own = identity(folder)
    with os.scandir(folder) as entries:
        names = [
            entry.name
            for entry in entries
            if not is_hidden(entry.name)
            and entry.is_dir()
            and not is_folder_format(entry.name)
            and identity(entry.path) != own
        ]
    return sorted(names, key=in_order)


def is_hidden(name: str) -> bool:
    """Tell whether a file or folder is hidden, or made by macOS for its own use."""
    return name.startswith(".") or name == "__MACOSX"


def counted(suffixes: Counter[str]) -> str:
    """Return counts by suffix for people, the largest first: ``12 .heic, 3 .pdf``."""
    ordered = sorted(suffixes.items(), key=lambda each: (-each[1], each[0]))
    words = [f"{count} {suffix or 'without a suffix'}" for suffix, count in ordered[:MOST_SUFFIXES]]
    if rest := sum(count for _, count in ordered[MOST_SUFFIXES:]):
        words.append(f"{rest} more")
    return ", ".join(words)


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC): macOS writes é as e and an accent."""
    return unicodedata.normalize("NFC", name)


def natural_key(text: str) -> list[str | int]:
    """Return what names are sorted by: numbers within them by their value, as in timm, whose own
    key takes ``²`` for a number.
    """
    parts = re.split(r"(\d+)", text.lower())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def in_order(path: str) -> tuple[list, str]:
    """Return what names and paths are sorted by: numbers within them by their value. The order is
    total: ``Dog`` comes before ``dog``, and ``01`` before ``1``.
    """
    return natural_key(path), path


def identity(folder: str | Path) -> Identity:
    """Return what tells a folder from others, whatever path leads to it."""
    state = os.stat(folder)
    return state.st_dev, state.st_ino


def _files(folder: str, seen: set[Identity] | None) -> Iterator[str]:
    """Yield the files below a folder, and the folders that are images; ``seen`` grows. None enters
    no folder.
    """
    with os.scandir(folder) as entries:
        visible = sorted((entry for entry in entries if not is_hidden(entry.name)), key=_links_last)
    for entry in visible:
        if not entry.is_dir():
            # What is there and no file is a pipe, a socket or a device.
            if entry.is_file() or not os.path.exists(entry.path):
                yield entry.path
        elif is_folder_format(entry.path):
            yield entry.path
        elif seen is not None and (here := identity(entry.path)) not in seen:
            seen.add(here)
            yield from _files(entry.path, seen)


def _links_last(entry: os.DirEntry) -> tuple[bool, str]:
    return entry.is_symlink(), entry.name
