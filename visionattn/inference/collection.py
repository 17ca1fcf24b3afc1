"""Parts of a collection of images: which images each of n jobs takes, where its features lie, and
how the parts become one folder.

What a part writes is a folder of features like any other. Merging checks that the parts follow each
other without a gap and writes one index over their files, which stay where they are.
"""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from visionattn.cli.files import check_folder, is_unfinished, locked
from visionattn.cli.untrusted import brief
from visionattn.inference.shards import (
    LOCK,
    PARTS,
    read_shard,
    report_failures,
    shard_paths,
    write_index,
)
from visionattn.inference.work import briefly

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

    def images(self, total: int) -> range:
        """Return the numbers of its images among all.

        Raises:
            ValueError: there are more parts than images.
        """
        if self.of > total:
            raise ValueError(
                f"{self.of} parts of {total} images would leave some empty; name at most {total}"
            )
        return range(total * (self.number - 1) // self.of, total * self.number // self.of)


def parts_in(output: Path) -> dict[Part, Path]:
    """Return the parts that lie in a folder, in order."""
    named = ((FOLDER.fullmatch(path.name), path) for path in sorted((output / PARTS).glob("*")))
    return {Part(int(name[1]), int(name[2])): path for name, path in named if name is not None}


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
    strange = [name for name in names if name not in (PARTS, LOCK) and not is_unfinished(name)]
    if not there and strange:
        raise ValueError(f"{output} holds other things ({strange[0]}); choose another --output")


def merge(output: Path, say: Callable[[str], None]) -> None:
    """Write one index over the features of all parts in a folder.

    Raises:
        ValueError: a part is missing, unfinished, at work, or other than the first; or none of the
            images has features. One line.
    """
    check_folder(output, "name the --output of the parts")
    parts = parts_in(output)
    if not parts:
        raise ValueError(f"{output} holds no parts; --shard 1/n writes the first one")
    with ExitStack() as held:
        for part, folder in parts.items():
            taken = f"part {part} is at work in {output}; wait for it or end it"
            held.enter_context(locked(folder / LOCK, taken))
        total = _check_whole(output, parts)
        index = write_index(output)
    say(f"{total} images in {len(parts)} part{'' if len(parts) == 1 else 's'}: {index}")
    report_failures(output, say)


def _check_whole(output: Path, parts: dict[Part, Path]) -> int:
    """Check that parts follow each other from the first image to the last, and are of the same
    features; return how many images there are.
    """
    done, identity = 0, None
    of = max(part.of for part in parts)
    for part in (Part(number, of) for number in range(1, of + 1)):
        for path in shard_paths(parts.get(part, output / PARTS)):
            read = read_shard(path)
            if read is None or read[0].first != done:
                break
            own = read[1]
            identity = identity or own
            for key in identity:
                if own.get(key) != identity[key]:
                    here, there = briefly(own.get(key), identity[key])
                    raise ValueError(
                        f"part {part} is of other features: {key} {here} there, {there} in the "
                        f"first part; call --shard {part} again with the other parts' options and "
                        "--overwrite"
                    )
            done += len(read[0].rows)
        wanted = part.images(identity["images"]).stop if identity else None
        if done != wanted:
            raise ValueError(
                f"part {part} is missing or not finished in {output}; call --shard {part}"
            )
    return done
