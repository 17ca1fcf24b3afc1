"""The files below a folder: which are images, which folders are splits, the order of names, and the
message about unused files.

This module skips hidden files, pipes, sockets and devices, and opens no image.
"""

import os
import re
import unicodedata
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from visionattn.data.formats import extensions, is_folder_format

TEXTS = frozenset(
    (".txt", ".md", ".rst", ".html", ".ini", ".log", ".py", ".ipynb", ".lst")
    + (".csv", ".tsv", ".json", ".jsonl", ".xml", ".yaml", ".yml", ".db", ".parquet", ".xlsx")
    + (".tfw", ".pgw", ".jgw", ".wld", ".prj", ".ovr", ".msk", ".aux")
)
"""Suffixes of texts, tables and companion files of rasters, which never count as missed images."""
MOST_NAMES = 10
"""Maximum number of names or suffixes in a message."""
SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""Accepted names of each split, in any case."""
_SPLITS = {name: split for split, names in SPLIT_NAMES.items() for name in names}


def images_below(folder: str | Path, others: Counter[str] | None = None) -> list[str]:
    """List the paths of the images below a folder at any depth, in natural order.

    ``others`` counts the suffixes of files that are neither images nor ``TEXTS``.

    Raises:
        OSError: a folder cannot be read.
    """
    images, rest = by_kind(path for path, is_folder in below(folder) if not is_folder)
    if others is not None:
        others.update(rest)
    return sorted(images, key=in_order)


def below(
    root: str | Path, split_of: Callable[[str], str | None] = lambda name: None
) -> Iterator[tuple[str, bool]]:
    """Yield the path of everything below a folder, and whether it is a folder.

    Links are followed once: a folder reachable by two paths counts under its path without a link. A
    broken link counts as a file, which then cannot be read.

    Args:
        root: the folder.
        split_of: returns the split of a folder name. Two splits may contain the same folder.
    """
    waiting: deque[tuple[str, str | None]] = deque([(os.fspath(root), None)])
    seen, top = set(), os.stat(root)
    while waiting:
        folder, split = waiting.popleft()
        state = os.stat(folder)
        key = None if os.path.samestat(state, top) else split, state.st_dev, state.st_ino
        if key in seen:
            continue
        seen.add(key)
        yield folder, True
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not is_hidden(entry.name)]
        for entry in sorted(visible, key=lambda entry: entry.name):
            if entry.is_dir() and not is_folder_format(entry.name):
                # Links wait until everything reachable without links has been visited.
                wait = waiting.append if entry.is_symlink() else waiting.appendleft
                wait((entry.path, split or split_of(entry.name)))
            # An existing entry that is neither file nor folder is a pipe, a socket or a device.
            elif entry.is_dir() or entry.is_file() or not os.path.exists(entry.path):
                yield entry.path, False


def by_kind(
    paths: Iterable[str], unread: frozenset[str] = frozenset()
) -> tuple[list[str], Counter[str]]:
    """Return the paths of images, by suffix, and counts by suffix of the files that are neither
    images nor ``TEXTS``.

    Args:
        paths: paths of any files.
        unread: image suffixes that cannot be read in this place.
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
    """Return the lower-case suffix of a name, with its dot."""
    return os.path.splitext(path)[1].lower()


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, or created by macOS for its own use."""
    return name.startswith(".") or name == "__MACOSX"


def counted(suffixes: Counter[str]) -> str:
    """Return counts by suffix for people, the largest first: ``12 .heic, 3 .pdf``."""
    ordered = sorted(suffixes.items(), key=lambda each: (-each[1], each[0]))
    words = [f"{count} {suffix or 'without a suffix'}" for suffix, count in ordered[:MOST_NAMES]]
    if rest := sum(count for _, count in ordered[MOST_NAMES:]):
        words.append(f"{rest} more")
    return ", ".join(words)


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC): macOS writes é as e and an accent."""
    return unicodedata.normalize("NFC", name)


def natural_key(text: str) -> list[str | int]:
    """Return the natural sort key of a name: numbers within it count by value.

    timm does the same, but its key treats ``²`` as a number.
    """
    parts = re.split(r"(\d+)", text.lower())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def in_order(path: str) -> tuple[list, str]:
    """Return the sort key of names and paths: numbers within them count by value.

    The order is total: ``Dog`` comes before ``dog``, and ``01`` before ``1``.
    """
    return natural_key(path), path


def split_of(name: str) -> str | None:
    """Return the split with this name, in any case, also as ``a. Training Set``; None for other
    names.
    """
    return _SPLITS.get(re.sub(r"^\w\. | set$", "", name.lower()))


def by_split(names: Iterable[str], root: object) -> dict[str, str]:
    """Return the name of each split, in the order of ``SPLIT_NAMES``.

    Raises:
        ValueError: two names stand for one split.
    """
    found: dict[str, str] = {}
    for name in sorted(names, key=in_order):
        split = split_of(name)
        if split is None:
            continue
        if split in found:
            raise ValueError(
                f"expected one {split} split in data root {root}, got {found[split]} and {name}; "
                "join them, or rename one"
            )
        found[split] = name
    return {split: found[split] for split in SPLIT_NAMES if split in found}


@dataclass
class LeftOut:
    """The parts of a root that a dataset does not use."""

    folders: list[str] = field(default_factory=list)
    """Top-level folders, or splits of a table."""
    outside: int = 0
    """Number of images outside of class folders or splits."""
    suffixes: Counter[str] = field(default_factory=Counter)
    """Files of other kinds, by suffix."""

    def files_there(self) -> str:
        """Return the counts of other files for the end of an error; empty without any."""
        return f"; it holds {counted(self.suffixes)}" if self.suffixes else ""

    def warn(self, root: object) -> None:
        """Warn in one line about the unused parts."""
        words = [
            self.folders and listed(self.folders),
            self.outside and f"images in no class or split folder: {self.outside}",
            self.suffixes and f"files of other kinds: {counted(self.suffixes)}",
        ]
        if any(words):
            warnings.warn(f"ignored in {root}: {'; '.join(filter(None, words))}", stacklevel=2)


def listed(names: Iterable[str], most: int = MOST_NAMES) -> str:
    """Return names for people, at most ``most`` of them."""
    given = list(names)
    more = f" and {len(given) - most} more" if len(given) > most else ""
    return ", ".join(given[:most]) + more
