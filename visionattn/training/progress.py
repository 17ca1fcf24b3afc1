"""How far a run has come, and what came of it."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from visionattn.data.geometry import Geometry, Size
from visionattn.training.evaluate import Evaluation

LONG_WAIT = 0.2
"""The share of time spent waiting for data above which a run warns."""
WATCH_STEPS, WATCH_SECONDS = 20, 10.0
"""The fewest steps and seconds over which such a share is measured."""


@dataclass
class Position:
    """How far a run has come."""

    epoch: int = 0
    """Epochs finished, validation included."""
    batch: int = 0
    """Batches done of the epoch after those."""
    step: int = 0
    """Optimiser steps done, skipped ones included."""
    skipped: int = 0
    """Steps without an update, as the loss or the gradient was not finite."""
    non_finite_in_a_row: int = 0
    """How many of these came last, one after another, as far as they count as a fault."""
    loss_sum: float = 0.0
    """Sum of the losses of the images of this epoch so far."""
    images: int = 0
    """Images of this epoch so far."""
    waited: float = 0.0
    """Seconds of the steps of this epoch that were spent waiting for data."""
    stepped: float = 0.0
    """Seconds of the steps of this epoch."""
    epoch_seconds: float = 0.0
    """Time of this epoch so far, validation included."""
    seconds: float = 0.0
    """Time of training and validation."""
    images_before: int = 0
    """Images of the epochs before."""
    stepped_before: float = 0.0
    """Seconds of the steps of the epochs before."""
    best: float = -1.0
    """Best score on the validation images, in [0, 1]."""
    best_loss: float = math.inf
    """Validation loss of the same weights; the smaller one counts among equal scores."""
    best_epoch: int = 0
    """The epoch of these weights, counted from 1; 0 before there are any."""

    def add(self, loss: float, images: int, waited: float, seconds: float) -> None:
        """Count the images of a step, their mean loss, and its time."""
        self.loss_sum, self.images = self.loss_sum + loss * images, self.images + images
        self.waited, self.stepped = self.waited + waited, self.stepped + seconds

    def means(self) -> dict[str, float]:
        """Return loss per image, images per second, and the share of time spent waiting for data,
        for this epoch.
        """
        return {
            "train_loss": self.loss_sum / self.images if self.images else math.nan,
            "images_per_second": round(self.images / self.stepped, 1) if self.stepped else 0.0,
            "wait_share": round(self.waited / self.stepped, 4) if self.stepped else 0.0,
        }

    def images_per_second(self) -> float:
        """Return the images per second of all steps."""
        return (self.images_before + self.images) / max(self.stepped_before + self.stepped, 1e-9)

    def next_epoch(self) -> None:
        """Count the epoch as finished."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.images_before += self.images
        self.stepped_before += self.stepped
        self.loss_sum, self.images = 0.0, 0
        self.waited, self.stepped = 0.0, 0.0
        self.epoch_seconds = 0.0


@dataclass
class Window:
    """Sums over the steps since the last line of metrics."""

    steps: int = 0
    loss: float = 0.0
    norm: float = 0.0
    images: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, norm: float, images: int, waited: float, seconds: float) -> None:
        """Count a step."""
        self.steps, self.images = self.steps + 1, self.images + images
        self.loss, self.norm = self.loss + loss * images, self.norm + norm
        self.waited, self.seconds = self.waited + waited, self.seconds + seconds

    def means(self) -> dict[str, float]:
        """Return loss per image, gradient norm per step, images per second, and the share of time
        spent waiting for data.
        """
        return {
            "loss": self.loss / self.images,
            "grad_norm": self.norm / self.steps,
            "images_per_second": round(self.images / self.seconds, 1),
            "wait_share": round(self.waited / self.seconds, 4),
        }


@dataclass
class WaitWatch:
    """Notice, once, that steps wait for their data. The first steps, while the loader's processes
    start, do not count.
    """

    unwatched: int = 10
    """How many more steps not to count."""
    steps: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    told: bool = False

    def add(self, waited: float, seconds: float) -> float | None:
        """Count a step.

        Returns:
            The share of time spent waiting, the first time that it is above ``LONG_WAIT`` in a
            stretch of at least ``WATCH_STEPS`` steps and ``WATCH_SECONDS``; otherwise None.
        """
        if self.unwatched or self.told:
            self.unwatched = max(0, self.unwatched - 1)
            return None
        self.steps, self.waited = self.steps + 1, self.waited + waited
        self.seconds = self.seconds + seconds
        if self.steps < WATCH_STEPS or self.seconds < WATCH_SECONDS:
            return None
        share = self.waited / self.seconds
        self.steps, self.waited = 0, 0.0
        self.seconds, self.told = 0.0, share > LONG_WAIT
        return share if self.told else None


def waiting(share: float, workers: int) -> str:
    """Say that a share of the time goes into waiting for data, and what helps."""
    return (
        f"{100 * share:.0f} % of the time goes into waiting for data; more processes that load it "
        f"help: data.workers is {workers}, this machine has {os.cpu_count()} cores"
    )


def sizes_worth_trying(model: nn.Module, geometry: Geometry) -> tuple[Size, ...]:
    """Return the size of the images, and about 1.5 and 2 times it in whole patches; only the first
    where the model takes no other, and none where images have no such size.
    """
    size = geometry.img_size
    if size is None:
        return ()
    embed = getattr(model, "patch_embed", None)
    if embed is None or getattr(embed, "strict_img_size", False):
        return (size,)
    patch = math.lcm(*embed.patch_size)
    larger = (math.ceil(1.5 * size[0] / patch) * patch, math.ceil(1.5 * size[1] / patch) * patch)
    return (size, larger, (2 * size[0], 2 * size[1]))


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    """The run's folder."""
    checkpoint: Path
    """The best weights."""
    seconds: float
    """Time of training and validation, earlier parts of a resumed run included."""
    images_per_second: float
    """Training images per second of all steps, waiting for data included."""
    best_epoch: int
    """The epoch, counted from 1, whose weights were best on the validation images."""
    validation: float | None
    """Their score on the validation images, in [0, 1]; None where those have no classes."""
    test: Evaluation | None
    """The same weights on the test images; None where there are none."""
    sizes_px: tuple[Size, ...]
    """Image sizes worth evaluating: that of the training, and larger ones where the model takes
    them; none where images are seen at sizes of their own.
    """
    measure: str = "accuracy"
    """What the score is of: ``accuracy`` of images, ``mean IoU`` of pixels."""
    unit: str = ""
    """What follows the number of a loss, for people."""

    def figures(self) -> dict[str, float | int | None]:
        """Return the result for programs, in plain types."""
        score = self.measure.lower().replace(" ", "_")
        return {
            "best_epoch": self.best_epoch,
            f"validation_{score}": self.validation,
            f"test_{score}": self.test.score if self.test else None,
            "test_loss": self.test.loss if self.test else None,
            "test_images": self.test.images if self.test else None,
            "train_seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 1),
        }
