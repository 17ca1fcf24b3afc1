"""One small classifier and one small segmenter, trained in seconds on pictures whose evidence lies
in a known place.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from tests.helpers.small_runs import MODEL, lines_of, small_config

CLASSES = ("ash", "birch", "cedar", "elm")
"""An image's class is the color of its one bright quadrant."""
BRIGHT = ((150, 0, 0), (0, 150, 0), (0, 0, 150), (130, 130, 130))
MATERIALS = ("dark", "light", "red")
COLOURS = np.array([[20, 20, 20], [230, 230, 230], [200, 10, 10]], np.uint8)
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


def block_mask(seed: int) -> np.ndarray:
    """Return the classes of blocks of 4 x 4 pixels, uint8 ``[16, 16]``."""
    blocks = np.random.default_rng(seed).integers(0, 3, (PX // 4, PX // 4))
    return blocks.repeat(4, 0).repeat(4, 1).astype(np.uint8)


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
    return _train(folder, options, MODEL, data / "val")


def train_segmenter(folder: Path) -> Trained:
    """Train on images and masks of three materials."""
    data = folder / "data"
    for split, count, first in (("train", 16, 0), ("val", 4, 100)):
        for kind in ("images", "masks"):
            (data / split / kind).mkdir(parents=True)
        for number in range(count):
            mask = block_mask(first + number)
            Image.fromarray(COLOURS[mask]).save(data / split / "images" / f"{number}.png")
            Image.fromarray(mask).save(data / split / "masks" / f"{number}.png")
    options = dict(name="folder", task="segmentation", root=str(data), fit="crop")
    options |= dict(masks={"classes": list(MATERIALS)})
    return _train(folder, options, MODEL | {"head_stride": 2}, data / "val" / "images")


def _train(folder: Path, data: dict, model: dict, images: Path) -> Trained:
    optim = {"lr": 1e-2, "warmup_epochs": 0.5}
    config = small_config(folder / "runs", data=data, model=model, epochs=10, optim=optim)
    lines_of(config)
    return Trained(next((folder / "runs").rglob("best.safetensors")), images)
