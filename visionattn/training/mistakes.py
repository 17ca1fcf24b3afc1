"""What the best weights say of each class, and their worst mistakes with pictures: a file of a run
for each split that they were evaluated on.

This module owns the file. ``tally.py`` counts, ``album.py`` makes the file's content of it, and
what a page makes of that is the laboratory's: it reads the file where no images can be read.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from visionattn.cli.files import write_text
from visionattn.cli.untrusted import read_json
from visionattn.training.pictures import ADDRESS

VERSION = 1
MOST_PX, MOST_PX_WIDE, WIDE = (900, 600), (600, 1200), 1.5
"""Pictures have at most so many pixels of height and width; the second pair where the width is more
than so many times the height.
"""
MOST_BYTES = 150_000
"""Pictures have at most so many bytes."""

SplitName = Literal["validation", "test"]


@dataclass(frozen=True)
class Mistake:
    """An image that the weights get wrong."""

    label: int
    """The number of its class."""
    said: int
    """The number of the most probable class."""
    probability: float
    """That of the most probable class, in [0, 1]."""
    of_label: float
    """The probability of its own class, in [0, 1]."""
    name: str | None
    """Its file, below the root of the data; None where it has none."""
    size: tuple[int, int] | None
    """Height and width in pixels at which the model saw it."""
    picture: str | None
    """What the model saw, as a data address; None where it could not be read again."""

    @property
    def wide(self) -> bool:
        """Tell whether the picture is wider than those of most images."""
        return self.size is not None and is_wide(self.size) and self.size[1] > MOST_PX[1]


@dataclass(frozen=True)
class ByClass:
    """What weights say of the images of a split, class by class."""

    version: int
    split: SplitName
    epoch: int
    """The epoch of the weights, counted from 1."""
    images: int
    """Images that were evaluated."""
    seen: str
    """How images came to the model, in words."""
    class_names: list[str]
    """One for each class; none where classes have no names."""
    classes: list[tuple[int, int, int]]
    """For each class: its images, how many of them are right, and how many images of any class were
    taken for it.
    """
    confusions: list[tuple[int, int, int]]
    """The most frequent mistakes: class, the other that it was taken for, and how often."""
    mistakes: list[Mistake]
    """The worst ones by their loss, the worst first."""

    @property
    def right(self) -> int:
        """Count the images that are right."""
        return sum(right for _, right, _ in self.classes)

    @property
    def complete(self) -> bool:
        """Tell whether every mistake is among ``confusions``."""
        return sum(count for _, _, count in self.confusions) == self.images - self.right

    def name(self, number: int) -> str:
        """Return the name of a class; its number where it has none."""
        return self.class_names[number] if self.class_names else str(number)


def is_wide(size: tuple[int, int]) -> bool:
    """Tell whether an image of a height and width is shown in more width than height."""
    return size[1] > WIDE * size[0]


def write_by_class(path: Path, found: ByClass) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    write_text(path, json.dumps(asdict(found)) + "\n")


def read_by_class(path: Path) -> ByClass:
    """Read the file, whoever wrote it.

    Raises:
        ValueError: it is no such file, or its numbers contradict each other; one line.
        OSError: it cannot be read.
    """
    found: ByClass = read_json(ByClass, path, "the run writes it anew where it is evaluated again")
    count = len(found.classes)

    def wanted(holds: Any, what: str) -> None:
        if not holds:
            raise ValueError(f"{path} is damaged: {what}")

    wanted(found.version == VERSION, f"its version is {found.version}, known is {VERSION}")
    wanted(found.epoch >= 1 and found.images >= 1 and count >= 1, "it is of no images")
    wanted(len(found.class_names) in (0, count), "it has not one name for each class")
    wanted(
        all(0 <= right <= min(own, taken) for own, right, taken in found.classes),
        "more images of a class are right than there are",
    )
    for place, what in ((0, "images"), (2, "images taken for a class")):
        total = sum(row[place] for row in found.classes)
        wanted(total == found.images, f"the {what} of all classes are {total}, not {found.images}")
    for label, said, often in found.confusions:
        wanted(0 <= label < count and 0 <= said < count and label != said, "a class is none")
        wanted(often >= 1, "a mistake was made less than once")
    made = sum(often for _, _, often in found.confusions)
    wanted(made <= found.images - found.right, "there are more mistakes than wrong images")
    for each in found.mistakes:
        wanted(0 <= each.label < count and 0 <= each.said < count, "a class is none")
        wanted(0 <= each.probability <= 1 and 0 <= each.of_label <= 1, "a probability is none")
        wanted(each.size is None or min(each.size) >= 1, "a size is none")
        picture = each.picture
        wanted(picture is None or ADDRESS.fullmatch(picture), "a picture is none")
        wanted(len(picture or "") <= 2 * MOST_BYTES, "a picture is too large")
    return found
