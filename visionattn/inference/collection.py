"""Parts of a collection of images: which images each of n jobs takes, and where its features lie
until they are merged.

This module owns how images are divided and the folder of the parts. What a part writes is a folder
of features like any other.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from visionattn.cli.files import is_unfinished
from visionattn.cli.untrusted import brief
from visionattn.inference.shards import INDEX, LOCK, shard_paths

PARTS = "parts"
"""The folder of the parts, within that of the features."""
FOLDER = re.compile(r"(\d{5})-of-(\d{5})")
MOST_PARTS = 99_999


@dataclass(frozen=True)
class Part:
    """Part ``number`` of ``of``, from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @staticmethod
    def parse(text: str) -> "Part":
        """Read ``2/4``.

        Raises:
            ValueError: it is no part; one line.
        """
        found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
        number, of = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= number <= of:
            raise ValueError(
                f"shard must be i/n with i from 1 to n and n at most {MOST_PARTS:,}, got "
                f"{brief(text)}"
            )
        return Part(number, of)

    def folder(self, output: Path) -> Path:
        """Return where the features of the part lie."""
        return output / PARTS / f"{self.number:05d}-of-{self.of:05d}"

    def images(self, total: int, batch_size: int) -> range:
        """Return the numbers of its images among all: a run of whole batches where there are as
        many batches as parts, so that the batches are those of a run without parts.

        Raises:
            ValueError: there are more parts than images.
        """
        if self.of > total:
            raise ValueError(
                f"{self.of} parts of {total} images would leave some empty; name at most {total}"
            )
        batches = -(-total // batch_size)
        unit = batch_size if batches >= self.of else 1
        count = batches if batches >= self.of else total
        first = unit * (count * (self.number - 1) // self.of)
        stop = unit * (count * self.number // self.of)
        return range(first, min(stop, total))


def parts_in(output: Path) -> dict[Part, Path]:
    """Return the parts that lie in a folder, in order.

    Raises:
        ValueError: there is something else among them.
    """
    found = {}
    for path in sorted((output / PARTS).iterdir()) if (output / PARTS).is_dir() else ():
        if path.name == LOCK:
            continue
        name = FOLDER.fullmatch(path.name)
        if name is None or not 1 <= int(name[1]) <= int(name[2]) or not path.is_dir():
            raise ValueError(f"{path} is no part of features; choose another --output")
        found[Part(int(name[1]), int(name[2]))] = path
    return found


def check_beside(output: Path, part: Part) -> None:
    """Raise ValueError unless a part may be written to a folder: it is new, or holds parts of the
    same division.
    """
    there = parts_in(output)
    other = next((found for found in there if found.of != part.of), None)
    if other is not None:
        raise ValueError(
            f"{output} holds parts of {other.of} ({other}), and this is {part}; choose another "
            f"--output, or delete {output / PARTS}"
        )
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    if not there and ((output / INDEX).exists() or shard_paths(output)):
        raise ValueError(f"{output} holds features of a whole run; choose another --output")
    strange = [name for name in names if name not in (PARTS, LOCK) and not is_unfinished(name)]
    if not there and strange:
        raise ValueError(f"{output} holds other things ({strange[0]}); choose another --output")
