"""What a training will take, said in a line before its first step: memory and time.

``memory.py`` tells the memory, and ``trial.py`` what a step takes in seconds. Here that becomes the
time that an epoch computes: how long its images take to load is not known before they do.
"""

import math
from dataclasses import dataclass

import numpy as np

from visionattn.cli.tables import lasting
from visionattn.data.buckets import cell_px
from visionattn.data.outlook import images_of
from visionattn.models.cost import Expected
from visionattn.training.memory import known, largest_shape, share_of
from visionattn.training.trainer import Trainer
from visionattn.training.trial import Trial, try_evaluation, try_steps


@dataclass(frozen=True)
class Forecast:
    """What a training will take."""

    images: str
    memory: Expected
    seconds_per_step: float
    seconds_per_epoch: float
    epochs: int
    """Those that are left."""
    part: str = ""
    """What was tried, where it was less than a step."""

    def line(self) -> str:
        """Put it into a line for people."""
        tried = f" ({self.part})" if self.part else ""
        left = self.epochs * self.seconds_per_epoch
        return (
            f"{self.images}; {self.memory}; computing takes {lasting(self.seconds_per_step)} per "
            f"step{tried}, {lasting(self.seconds_per_epoch)} per epoch, {lasting(left)} in all"
        )


def forecast(trainer: Trainer, memory: Expected) -> Forecast | None:
    """Try some steps and an evaluation, and say what the run will take; all processes call it
    together, and nothing of the run changes. None where no image can be read.
    """
    shapes, size = known(trainer.batches.shapes()), trainer.processes.data_size
    evaluated = known(trainer.validation.shapes())
    if not len(shapes) or not len(evaluated):
        return None
    ordered = shapes[np.argsort(shapes.prod(1), kind="stable")]
    # Two shapes between which most batches lie; one where they are alike.
    chosen = [ordered[len(ordered) * 9 // 10], ordered[len(ordered) // 10]]
    if trainer.config.compile:
        chosen = [shapes[0]]
    tried = [share_of(tuple(each.tolist()), size) for each in chosen]
    if len(set(tried)) > 1 and math.prod(tried[0]) < 1.3 * math.prod(tried[1]):
        tried = tried[:1]
    trials = try_steps(trainer, sorted(set(tried), key=math.prod))
    part = max((trial for trial in trials), key=lambda trial: trial.pixels)
    own = np.ceil(shapes[:, 0] / size) * shapes[:, 1:].prod(1)
    computing = float(seconds_at(trials, own).sum())
    whole = trainer.spread.whole(trainer.evaluated)
    evaluation = try_evaluation(
        trainer,
        trainer.spread.evaluated(whole),
        share_of(largest_shape(evaluated), size),
        trials[-1],
    )
    pixels = np.ceil(evaluated[:, 0] / size) * evaluated[:, 1:].prod(1)
    computing += float(pixels.sum()) * evaluation.seconds / evaluation.pixels
    per_step = float(np.median(seconds_at(trials, own))) * trainer.config.optim.accumulate
    whole_part = part.shape in tried
    cell, cells = cell_px(trainer.geometry), "patches"
    if trainer.spec.task == "generate":
        cell, cells = 1, "pixels"
    return Forecast(
        images_of(shapes[:, 1:], len(trainer.splits.train), cell, cells=cells),
        memory,
        per_step,
        computing,
        trainer.config.epochs - trainer.position.epoch,
        "" if whole_part else f"{part.shape[0]} of {max(tried, key=math.prod)[0]} images tried",
    )


def seconds_at(trials: list[Trial], pixels: np.ndarray) -> np.ndarray:
    """Return the seconds of steps on so many pixels: in proportion to the trial, or on the line
    through the first and the last of several, which does not fall.
    """
    first, last = trials[0], trials[-1]
    slope = 0.0
    if last.pixels > first.pixels:
        slope = max(0.0, (last.seconds - first.seconds) / (last.pixels - first.pixels))
    if slope == 0.0 or first.seconds - slope * first.pixels < 0:
        return pixels * last.seconds / last.pixels
    return last.seconds + slope * (pixels - last.pixels)
