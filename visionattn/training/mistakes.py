"""Write the results of a run's best weights by class, and their worst mistakes with pictures, to
``validation.json`` and ``test.json``.

The report page uses these files and needs no images.
"""

import base64
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from visionattn.cli.untrusted import read_json, refuse
from visionattn.data.batches import SampleKey, Unreadable
from visionattn.data.geometry import Geometry
from visionattn.models.weights import DataSpec

VERSION = 1
MOST_MISTAKES, MOST_PAIRS = 12, 2000
"""Maximum number of mistakes with pictures, and of pairs of a class and a wrong prediction; 2,000
pairs cover 45 classes.
"""
MOST_PX, MOST_PX_WIDE, WIDE = (900, 600), (600, 1200), 1.5
"""Maximum height and width of a picture in pixels; the second pair applies if the width is more
than ``WIDE`` times the height.
"""
MOST_BYTES = 150_000
"""Maximum bytes of a picture."""
SMALL_PX = 64
"""Images of at most 64 x 64 px become PNG, others JPEG."""
QUALITIES = (85, 70, 50, 30)
"""JPEG qualities to try until an image is small enough; if none is, the image is shrunk."""
ADDRESS = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]+={0,2}")

SplitName = Literal["validation", "test"]


@dataclass(frozen=True)
class Mistake:
    """A misclassified image."""

    label: int
    """The index of its class."""
    said: int
    """The index of the predicted class."""
    probability: float
    """The probability of the predicted class, in [0, 1]."""
    of_label: float
    """The probability of its own class, in [0, 1]."""
    name: str | None
    """Its file, relative to the root of the data; None for images without files."""
    size: tuple[int, int] | None
    """Height and width in pixels of the model's input."""
    picture: str | None
    """The model's input as a data URL; None if the image could not be read again."""

    @property
    def wide(self) -> bool:
        """Tell whether the picture is shown wide."""
        return self.size is not None and is_wide(self.size) and self.size[1] > MOST_PX[1]


@dataclass(frozen=True)
class ByClass:
    """The predictions of weights on a split, by class."""

    version: int
    split: SplitName
    epoch: int
    """The epoch of the weights, counted from 1."""
    images: int
    """Number of evaluated images."""
    seen: str
    """The preprocessing in words."""
    class_names: list[str]
    """The names of all classes, or empty."""
    classes: list[tuple[int, int, int]]
    """For each class the number of its images, of its correct predictions, and of all predictions
    of the class.
    """
    confusions: list[tuple[int, int, int]]
    """The most frequent mistakes: class, predicted class, and count."""
    mistakes: list[Mistake]
    """The mistakes with the largest loss, the worst first."""

    @property
    def right(self) -> int:
        """Count the correct predictions."""
        return sum(right for _, right, _ in self.classes)

    @property
    def complete(self) -> bool:
        """Tell whether every mistake is among ``confusions``."""
        return sum(count for _, _, count in self.confusions) == self.images - self.right

    def name(self, number: int) -> str:
        """Return the name of a class, or its index if classes have no names."""
        return self.class_names[number] if self.class_names else str(number)


def by_class(
    rows: np.ndarray,
    dataset: Dataset,
    spec: DataSpec,
    geometry: Geometry,
    *,
    split: SplitName,
    epoch: int,
    root: str | None,
) -> ByClass:
    """Return the results of an evaluation by class; the images of the worst mistakes are read
    again.

    Args:
        rows: ``evaluate.Tally.rows`` of all processes, in any order.
        dataset: the images, indexed by ``SampleKey``.
        spec: the specification of the images.
        geometry: the preprocessing.
        split: the split of the images.
        epoch: the epoch of the weights, counted from 1.
        root: the folder that names of files are relative to; None: no folder.
    """
    label, said = rows[:, :2].astype(np.int64).T
    hit = label == said
    classes = [np.bincount(each, minlength=spec.num_classes) for each in (label, label[hit], said)]
    pairs, counts = np.unique(np.stack([label, said], 1)[~hit], axis=0, return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:MOST_PAIRS]
    wrong = rows[~hit]
    # The lowest probability of the true class first; among equal ones, the first image.
    worst = wrong[np.lexsort((wrong[:, 4], wrong[:, 2]))[:MOST_MISTAKES]]
    return ByClass(
        VERSION,
        split,
        epoch,
        len(rows),
        geometry.describe(),
        list(spec.class_names or ()),
        [tuple(row) for row in np.stack(classes, 1).tolist()],
        [(*pairs[i].tolist(), int(counts[i])) for i in frequent],
        [mistake_of(row, dataset, geometry, root) for row in worst],
    )


def mistake_of(row: np.ndarray, dataset: Dataset, geometry: Geometry, root: str | None) -> Mistake:
    """Turn a row of ``Tally.rows`` into a mistake with its picture; see ``by_class``."""
    label, said, number = row[[0, 1, 4]].astype(int).tolist()
    of_label, probability = (float(f"{value:.6g}") for value in np.exp(row[2:4]))
    name = size = picture = None
    if number >= 0:
        if hasattr(dataset, "name"):
            name = dataset.name(number).removeprefix(os.path.join(root or "", ""))
        item = dataset[SampleKey(number, 0, geometry)]
        if not isinstance(item, Unreadable):
            size = item.present
            picture = address(item.pixels[: size[0], : size[1]])
    return Mistake(label, said, probability, of_label, name, size, picture)


def is_wide(size: tuple[int, int]) -> bool:
    """Tell whether an image of this height and width is shown wide."""
    return size[1] > WIDE * size[0]


def address(image: np.ndarray, most_px: tuple[int, int] | None = None) -> str:
    """Return an image ``[H, W, C]``, uint8 or float32 in [0, 1], as a data URL with its first three
    bands, or the first of two. ``most_px`` is the largest height and width in pixels; None: the
    limits of mistakes.
    """
    if image.dtype != np.uint8:
        image = np.rint(image.clip(0, 1) * 255).astype(np.uint8)
    picture = Image.fromarray(image[..., 0] if image.shape[2] < 3 else image[..., :3].copy())
    if max(picture.size) <= SMALL_PX:
        return data_url(picture, "png", optimize=True)
    height, width = most_px or (MOST_PX_WIDE if is_wide(image.shape[:2]) else MOST_PX)
    while True:
        picture.thumbnail((width, height), reducing_gap=3)
        for quality in QUALITIES:
            found = data_url(picture, "jpeg", quality=quality)
            if len(found) * 3 / 4 <= MOST_BYTES:
                return found
        height, width = height * 3 // 4, width * 3 // 4


def data_url(picture: Image.Image, kind: str, **options) -> str:
    """Return a picture as a data URL of kind ``png`` or ``jpeg``; the options are Pillow's."""
    stream = io.BytesIO()
    picture.save(stream, format=kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(stream.getvalue()).decode()}"


def read_by_class(path: Path) -> ByClass:
    """Read results by class from a JSON file, which may be untrusted.

    Raises:
        ValueError: the file has other content, or a number is out of range; one line.
        OSError: the file cannot be read.
    """
    found: ByClass = read_json(ByClass, path, "evaluate the run again to rewrite it")
    classes = range(len(found.classes))
    named = [(label, said) for label, said, _ in found.confusions]
    named += [(each.label, each.said) for each in found.mistakes]
    pictures = [each.picture for each in found.mistakes if each.picture is not None]
    unequal = found.images != sum(own for own, _, _ in found.classes)
    wrong = (
        (found.version != VERSION, f"its version is {found.version}, known is {VERSION}"),
        (unequal or found.images < 1, "the images of the classes do not add up to all images"),
        (
            any(not 0 <= right <= own for own, right, _ in found.classes),
            "a class has more correct predictions than images",
        ),
        (any(often < 1 for _, _, often in found.confusions), "a mistake has a count below 1"),
        (
            len(found.class_names) not in (0, len(classes)),
            "the number of names differs from the number of classes",
        ),
        (any(each not in classes for pair in named for each in pair), "a class does not exist"),
        (not all(map(ADDRESS.fullmatch, pictures)), "a picture is not a data URL"),
        (any(len(each) > 2 * MOST_BYTES for each in pictures), "a picture is too large"),
    )
    refuse(*((holds, f"{path} is damaged: {what}") for holds, what in wrong))
    return found
