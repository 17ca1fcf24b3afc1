"""Track the progress of a run, and report its result."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from visionattn.cli.commands import typed
from visionattn.cli.tables import lasting
from visionattn.data.geometry import Geometry, Size
from visionattn.training.config import TrainConfig
from visionattn.training.evaluate import Evaluation

STARTING_STEPS, STARTING_SECONDS = 10, 10.0
NO_SCORE = -1.0
"""``Position.best`` before the first score, and for images without scores."""
PACE_STEPS, PACE_SECONDS, LONGEST_PACE = 20, 10.0, 60.0
"""The fewest steps and seconds that ``Pace`` measures."""


@dataclass
class Position:
    """The progress of a run."""

    epoch: int = 0
    """Finished epochs, validation included."""
    batch: int = 0
    """Finished batches of the current epoch."""
    step: int = 0
    """Finished optimizer steps, skipped steps included."""
    skipped: int = 0
    """Steps without an update, because the loss or the gradient was not finite."""
    non_finite_in_a_row: int = 0
    """Current number of consecutive skipped steps that count as a fault."""
    epoch_seconds: float = 0.0
    """Time of this epoch so far, validation included."""
    seconds: float = 0.0
    """Time of training and validation."""
    images: int = 0
    """Training images of all steps."""
    stepped: float = 0.0
    """Seconds of all steps."""
    best: float = NO_SCORE
    """Best score on the validation images: a share in [0, 1], R2 or an error."""
    best_loss: float = math.inf
    """Validation loss of the same weights; the lower loss wins among equal scores."""
    best_epoch: int = 0
    """The epoch of these weights, counted from 1; 0 before there are any."""


@dataclass
class EpochSums:
    """Sums over the steps of an epoch, or since the last line of metrics."""

    steps: int = 0
    loss: float = 0.0
    norm: float = 0.0
    images: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, norm: float, images: int, waited: float, seconds: float) -> None:
        """Add a step: mean loss, gradient norm, number of images, and seconds, which include
        ``waited`` seconds for data.
        """
        self.steps, self.images = self.steps + 1, self.images + images
        self.loss, self.norm = self.loss + loss * images, self.norm + norm
        self.waited, self.seconds = self.waited + waited, self.seconds + seconds

    def means(self) -> dict[str, float]:
        """Return loss per image, gradient norm per step, images per second, and the share of time
        spent waiting for data.
        """
        return {
            "loss": self.loss / self.images if self.images else math.nan,
            "grad_norm": self.norm / self.steps if self.steps else math.nan,
            "images_per_second": round(self.images / self.seconds, 1) if self.seconds else 0.0,
            "wait_share": round(self.waited / self.seconds, 4) if self.seconds else 0.0,
        }


@dataclass
class Pace:
    """Measure the time of the first steps, data loading included, and report it once."""

    started: int = 0
    """Skipped first steps, while libraries and loader processes start: ten steps or 10 seconds."""
    start_seconds: float = 0.0
    steps: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    told: bool = False

    def add(self, waited: float, seconds: float) -> bool:
        """Add a step; return True once, when enough steps are measured."""
        if self.told:
            return False
        if self.started < STARTING_STEPS and self.start_seconds < STARTING_SECONDS:
            self.started, self.start_seconds = self.started + 1, self.start_seconds + seconds
            return False
        self.steps, self.waited = self.steps + 1, self.waited + waited
        self.seconds += seconds
        enough = self.steps >= PACE_STEPS and self.seconds >= PACE_SECONDS
        self.told = enough or self.seconds >= LONGEST_PACE
        return self.told

    def line(self, steps_left: float, workers: int) -> str:
        """Return the measured time, and the share that more loader processes would save.

        Args:
            steps_left: remaining steps, with evaluations converted to steps of equal time.
            workers: ``data.workers``.
        """
        each, share = self.seconds / self.steps, self.waited / self.seconds
        return (
            f"measured: {lasting(each)} per step, {share:.0%} of it waiting for data "
            f"(data.workers {workers}, {os.cpu_count()} cores); about "
            f"{lasting(each * steps_left)} left"
        )


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    folder: Path
    """The run's folder."""
    checkpoint: Path
    """The best weights."""
    seconds: float
    """Time of training and validation, earlier parts of a resumed run included."""
    images_per_second: float
    """Training throughput over all steps, waiting for data included."""
    best_epoch: int
    """Epoch of the best weights on the validation images, counted from 1."""
    validation: float | None
    """Score of the best weights on the validation images; None for images without classes."""
    test: Evaluation | None
    """Evaluation of the best weights on the test images; None without a test split."""
    sizes_px: tuple[Size, ...]
    """Image sizes worth evaluating, see ``sizes_worth_trying``."""
    measure: str = "accuracy"
    """The name of the score: ``accuracy``, ``mean IoU`` or ``F1``."""
    unit: str = ""
    """Unit of the loss, for printing."""

    @property
    def test_score(self) -> float | None:
        """Return the score on the test images; None without a test split or classes."""
        return self.test.value(self.measure) if self.test else None

    def figures(self) -> dict[str, float | int | None]:
        """Return the result as plain values."""
        score = self.measure.lower().replace(" ", "_")
        return {
            "best_epoch": self.best_epoch,
            f"validation_{score}": self.validation,
            f"test_{score}": self.test_score,
            "test_loss": self.test.loss if self.test else None,
            "test_images": self.test.images if self.test else None,
            "train_seconds": round(self.seconds, 3),
            "images_per_second": round(self.images_per_second, 1),
        }


def sizes_worth_trying(model: nn.Module, geometry: Geometry) -> tuple[Size, ...]:
    """Return the training size and, if the model accepts other sizes, about 1.5 and 2 times that
    size in whole patches. Empty for native image sizes.
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


def report(config: TrainConfig, result: Result) -> list[str]:
    """Return the final lines of a finished run. The last line is the score on the test images, or
    on the validation images without a test split; no other line has a percentage.
    """
    return [
        f"trained in {result.seconds:.0f} seconds",
        f"best weights (of epoch {result.best_epoch}): {result.checkpoint}",
        "try next:",
        *(f"  {command}" for command in next_commands(config, result)),
        reached(result),
    ]


def reached(result: Result) -> str:
    """Return a line with the score of a run, or the loss for images without classes."""
    if result.test is None:
        if result.validation is None:
            return f"epoch {result.best_epoch} has the lowest validation loss"
        score = written(result.validation, result.measure)
        return f"validation {result.measure} {score} (there is no test split)"
    if result.test_score is None:
        return f"test loss {result.test.loss:.4f}{result.unit}"
    return f"test {result.measure} {written(result.test_score, result.measure)}"


def written(score: float, measure: str) -> str:
    """Format a score: R2 and errors as numbers, others in %."""
    return f"{score:.4g}" if measure in ("R2", "MAE", "RMSE") else f"{100 * score:.1f} %"


def next_commands(config: TrainConfig, result: Result) -> list[str]:
    """Return commands that evaluate the weights at several image sizes, or generate samples."""
    best = str(result.checkpoint)
    if config.data.task == "generate":
        samples = str(result.folder / "samples.png")
        return [
            typed("generate", best, "--output", samples),
            typed("validate", "--checkpoint", best),
        ]
    validate = ["validate", "--checkpoint", best]
    if result.sizes_px:
        square = all(rows == columns for rows, columns in result.sizes_px)
        sizes = [str(rows) for rows, _ in result.sizes_px]
        if not square:
            sizes = [str([list(each) for each in result.sizes_px])]
        validate += ["--img-size", *sizes]
    return [typed(*validate)]
