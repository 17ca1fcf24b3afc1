"""A small classifier, trained in seconds on pictures whose evidence lies in a known place."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from tests.helpers.small_runs import lines_of, small_config

CLASSES = ("ash", "birch", "cedar", "elm")
"""An image's class is the color of its one bright quadrant."""
BRIGHT = ((150, 0, 0), (0, 150, 0), (0, 0, 150), (130, 130, 130))
PX = 16


class Trained(NamedTuple):
    """A run that has ended."""

    checkpoint: Path
    """``best.safetensors``, with ``config.yaml`` beside it."""
    images: Path
    """The folder of the validation images, of 16 x 16 px."""


def quadrant_image(label: int, number: int) -> np.ndarray:
    """Return noise whose quadrant ``number % 4`` (upper left, upper right, lower left, lower right)
    has the color of a class, uint8 ``[16, 16, 3]``.
    """
    image = np.random.default_rng((number, label)).integers(0, 90, (PX, PX, 3))
    half = PX // 2
    top, left = half * (number % 4 // 2), half * (number % 2)
    image[top : top + half, left : left + half] += BRIGHT[label]
    return image.astype(np.uint8)


def train_classifier(folder: Path) -> Trained:
    """Train on folders of classes until nearly all validation images are right."""
    data = folder / "data"
    for split, count, first in (("train", 12, 0), ("val", 4, 100)):
        for label, name in enumerate(CLASSES):
            (data / split / name).mkdir(parents=True)
            for number in range(count):
                picture = Image.fromarray(quadrant_image(label, first + number))
                picture.save(data / split / name / f"{number}.png")
    options = dict(name="folder", root=str(data), fit="crop")
    lines_of(small_config(folder / "runs", data=options, epochs=10, optim=dict(lr=1e-2)))
    return Trained(next((folder / "runs").rglob("best.safetensors")), data / "val")
