"""Names of splits, and the line that tells what a data set leaves out.

This module knows names only: ``tree.py`` finds them.
"""

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from visionattn.data.walk import counted, in_order

SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
"""What each split may be called, in any case."""
_SPLITS = {name: split for split, names in SPLIT_NAMES.items() for name in names}
MOST_NAMES = 10
"""How many names a line lists."""


def split_of(name: str) -> str | None:
    """Return the split that a name stands for, in any case; None for other names."""
    return _SPLITS.get(name.lower())


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
                f"data root {root} has two {split} splits, {found[split]} and {name}; wanted one: "
                "join them, or rename one"
            )
        found[split] = name
    return {split: found[split] for split in SPLIT_NAMES if split in found}


@dataclass
class LeftOut:
    """What a data set does not use of its root."""

    folders: list[str] = field(default_factory=list)
    """Folders at the top, or splits of a table."""
    outside: int = 0
    """Images that lie in no class folder, or in no split."""
    suffixes: Counter[str] = field(default_factory=Counter)
    """Files of other kinds, by suffix."""

    def files_there(self) -> str:
        """Return the counts of other files for the end of an error; an empty text without any."""
        return f"; it holds {counted(self.suffixes)}" if self.suffixes else ""

    def warn(self, root: object) -> None:
        """Tell in one line what is left out."""
        words = [
            self.folders and listed(self.folders),
            self.outside and f"images in no class or split folder: {self.outside}",
            self.suffixes and f"files of other kinds: {counted(self.suffixes)}",
        ]
        if any(words):
            warnings.warn(f"left out of {root}: {'; '.join(filter(None, words))}", stacklevel=2)


def listed(names: Iterable[str], most: int = MOST_NAMES) -> str:
    """Return names for people, at most ``most`` of them."""
    given = list(names)
    more = f" and {len(given) - most} more" if len(given) > most else ""
    return ", ".join(given[:most]) + more
