"""How far a run has come, and what came of it."""

import math
from dataclasses import dataclass
from pathlib import Path

from visionattn.training.evaluate import Evaluation


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
    """Steps without an update, for want of a finite loss and gradient."""
    loss_sum: float = 0.0
    """Sum of the losses of the images of this epoch so far."""
    images: int = 0
    """Images of this epoch so far."""
    seconds: float = 0.0
    """Time of training and validation."""
    best: float = -1.0
    """Best accuracy on the validation images, in [0, 1]."""
    best_loss: float = math.inf
    """Validation loss of the same weights; the smaller one counts among equal accuracies."""
    best_epoch: int = 0
    """The epoch of it, counted from 1."""


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
        """Loss per image, gradient norm per step, images per second, and the share of time spent waiting for data."""
        return {
            "loss": self.loss / self.images,
            "grad_norm": self.norm / self.steps,
            "images_per_second": round(self.images / self.seconds, 1),
            "wait_share": round(self.waited / self.seconds, 4),
        }


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    """The run's folder."""
    checkpoint: Path
    """The best weights."""
    seconds: float
    """Time of training and validation, earlier parts of a resumed run included."""
    best_epoch: int
    """The epoch, counted from 1, whose weights were best on the validation images."""
    validation: float
    """Their accuracy on the validation images, in [0, 1]."""
    test: Evaluation | None
    """The same weights on the test images; None where there are none."""
    sizes_px: tuple[int, ...]
    """Image sizes worth evaluating: that of the training, and larger ones where the model takes them."""
