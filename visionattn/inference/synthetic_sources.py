"""Synthetic images for feature extraction (digits, canvases and documents), with their classes and
masks.

This module decides their number, difficulty and size. They are the images that training validates
and tests on.
"""

from dataclasses import asdict, dataclass, replace
from typing import BinaryIO

import numpy as np
from PIL import Image

from visionattn.data.batches import SampleKey
from visionattn.data.data_checks import args_of
from visionattn.data.data_config import DataConfig
from visionattn.data.digits_and_canvas import digit_splits
from visionattn.data.formats import as_flags
from visionattn.data.geometry import Geometry, Size
from visionattn.data.splits import build_splits
from visionattn.data.synthetic_images import DrawnImage, see_mask, value_names
from visionattn.inference.image_listing import HeldImages, as_file
from visionattn.models.weights import digest_of

SPLITS = ("validation", "test")
"""The splits that are generated, in the order of their images."""


@dataclass(frozen=True)
class Division:
    """The images to fit a probe on, and the images to evaluate it on."""

    fitted: dict[str, int]
    """Path and class of each image."""
    judged: dict[str, int]
    judged_name: str
    """``test``, or ``validation`` without a test split."""
    class_names: tuple[str, ...]


class DigitSource(HeldImages):
    """The digits that scikit-learn ships: train, then validation, then test, as
    ``digits/train/17``.

    Attributes:
        labels: the class of each digit, ``[n]``.
    """

    def __init__(self, val_fraction: float, seed: int):
        """Split the digits by ``val_fraction`` and ``seed``, as for training."""
        parts = digit_splits(val_fraction, seed)
        self._names = [
            f"digits/{split}/{i}" for split, part in parts.items() for i in range(len(part.labels))
        ]
        super().__init__([image for part in parts.values() for image in part.images])
        self.labels = np.concatenate([part.labels for part in parts.values()])

    def name(self, index: int) -> str:
        """Return split and number of the digit as a name."""
        return self._names[index]

    def divide(self) -> Division:
        """Fit on the training digits, and evaluate on the test digits."""
        labels = {self.name(i): int(label) for i, label in enumerate(self.labels)}
        fitted, judged = (
            {path: label for path, label in labels.items() if path.startswith(f"digits/{split}/")}
            for split in ("train", "test")
        )
        return Division(fitted, judged, "test", tuple(str(digit) for digit in range(10)))

    def digest(self) -> str:
        """Return a digest of names and pixels."""
        return digest_of([*self._names, np.stack(self.pictures).tobytes()])


class Drawn:
    """Images generated on request: validation, then test, as ``canvas/test/17``.

    Attributes:
        class_names: names of the images' classes.
        value_names: names of the values in masks.
    """

    def __init__(self, config: DataConfig, seed: int, geometry: Geometry):
        """Store the configuration, the seed and how a model sees images.

        ``geometry`` replaces the size and fit of ``config``.

        Raises:
            ValueError: a value is out of range, or the geometry has no size; one line.
        """
        if geometry.img_size is None:
            raise ValueError(f"{config.name} needs a size in pixels; pass --img-size")
        config = replace(config, fit=geometry.fit, img_size=list(geometry.img_size))
        try:
            splits = build_splits(config, seed)
        except ValueError as error:
            raise ValueError(as_flags(str(error))) from error
        self._config, self._seed, self._geometry = config, seed, geometry
        self._args = asdict(args_of(config))
        self._count = self._args["eval_images"]
        self._datasets = (splits.validation, splits.test)
        self.class_names = splits.spec.class_names
        self.value_names = value_names(self.class_names)

    def __len__(self) -> int:
        return len(SPLITS) * self._count

    def draw(self, index: int, *, masked: bool = False) -> DrawnImage:
        """Generate an image, and with ``masked`` its mask, before it is fitted to a model."""
        split, number = divmod(index, self._count)
        return self._datasets[split].draw(SampleKey(number, 0, self._geometry), masked=masked)

    def open(self, index: int) -> BinaryIO:
        """Return the image as an uncompressed file in memory."""
        return as_file(Image.fromarray(self.draw(index).image[:, :, 0]))

    def name(self, index: int) -> str:
        """Return dataset, split and number of the image as a name."""
        split, number = divmod(index, self._count)
        return f"{self._config.name}/{SPLITS[split]}/{number}"

    def numbers(self, split: str) -> range:
        """Return the indices of the images of a split."""
        first = SPLITS.index(split) * self._count
        return range(first, first + self._count)

    def mask(self, index: int) -> tuple[np.ndarray, Size]:
        """Return the mask of an image as a model sees it, uint8 ``[H, W]``, and its filled height
        and width.
        """
        mask = self.draw(index, masked=True).mask
        view = self._geometry.view(*mask.shape)
        return see_mask(mask, view), view.present

    def digest(self) -> str:
        """Return a digest of the settings that determine the images, and of the pixels of two
        images.
        """
        ends = (self.draw(index).image.tobytes() for index in (0, len(self) - 1))
        return digest_of([*self._deciding().items(), *ends])

    def divide(self) -> Division:
        """Fit on the validation images, and evaluate on the test images."""
        fitted, judged = (
            {self.name(index): self.draw(index).label for index in self.numbers(split)}
            for split in SPLITS
        )
        return Division(fitted, judged, "test", self.class_names)

    def describe(self) -> str:
        """Describe the generated images."""
        given = ", ".join(
            f"{key} {'null' if value is None else value}" for key, value in self._deciding().items()
        )
        each = f"{self._count} validation and {self._count} test images"
        return f"{self._config.name}: {each}; {given}"

    def _deciding(self) -> dict[str, object]:
        """Return the settings that determine the images of one size, by the names of the flags."""
        known = {key: self._args[key] for key in self._args if not key.endswith("_images")}
        if self._config.name == "canvas":
            known["val_fraction"] = self._config.val_fraction
        return known | {"seed": self._seed}
