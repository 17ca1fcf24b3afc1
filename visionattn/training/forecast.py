"""What a training will take, said in a line before its first step: memory and time.

``memory.py`` tells the memory. A step is tried for the time, a real one whose effects are undone,
so that the training is bit for bit what it would be without. How long images take to load is not
known before they do.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from visionattn.cli.tables import lasting
from visionattn.data.batches import Batch
from visionattn.data.buckets import cell_px
from visionattn.models.cost import Expected, Shape, images_of, put_back, seconds_of
from visionattn.models.machine import random_state, restore_random_state
from visionattn.training.learner import Learner
from visionattn.training.memory import known, share_of
from visionattn.training.trainer import Trainer

LONG_SECONDS = 10.0
"""A step that takes longer is tried on a part of its images."""
FORWARD, FORWARD_CHECKPOINTED = 1 / 3, 1 / 4
"""The time of a forward without gradients over that of a step."""


@dataclass(frozen=True)
class Forecast:
    """What a training will take."""

    images: str
    memory: Expected
    seconds_per_step: float
    seconds_per_epoch: float
    epochs: int
    """Epochs that are left."""

    def line(self) -> str:
        """Put it into a line for people."""
        left = self.epochs * self.seconds_per_epoch
        return (
            f"{self.images}; {self.memory}; computing takes {lasting(self.seconds_per_step)} per "
            f"step, {lasting(self.seconds_per_epoch)} per epoch, {lasting(left)} in all"
        )


def forecast(trainer: Trainer, memory: Expected) -> Forecast | None:
    """Try a step, and say what the run will take, in proportion to the pixels of its batches; all
    processes call it together, and nothing of the run changes. None where no image can be read.
    """
    shapes, evaluated = known(trainer.batches.shapes()), known(trainer.validation.shapes())
    if not len(shapes) or not len(evaluated):
        return None
    config, size = trainer.config, trainer.processes.data_size
    usual = shapes[np.argsort(shapes.prod(1), kind="stable")[len(shapes) // 2]]
    # A compiled model is compiled for the size that comes first.
    images, rows, columns = (shapes[0] if config.compile else usual).tolist()
    tried = share_of((images, rows, columns), size)
    per_pixel = step_seconds(trainer, tried) / math.prod(tried)
    steps, evaluation = (
        np.ceil(each[:, 0] / size) * each[:, 1:].prod(1) for each in (shapes, evaluated)
    )
    share = FORWARD_CHECKPOINTED if config.model.grad_checkpointing else FORWARD
    cell, cells = cell_px(trainer.geometry), "patches"
    if trainer.spec.task == "generate":
        cell, cells = 1, "pixels"
    return Forecast(
        images_of(shapes[:, 1:], len(trainer.splits.train), cell, cells=cells),
        memory,
        per_pixel * float(np.median(steps)) * config.optim.accumulate,
        per_pixel * float(steps.sum() + share * evaluation.sum()),
        config.epochs - trainer.position.epoch,
    )


def step_seconds(
    learner: Learner, shape: Shape, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of an optimiser step on a black batch, the share of one process of
    several; all processes call this together, and nothing changes.
    """

    def timed(part: Shape) -> float:
        batch = batch_of(learner, part)
        synchronize(learner.device)
        start = clock()
        Learner.step(learner, [batch])
        synchronize(learner.device)
        return learner.processes.gather(clock() - start)[0]

    with undone(learner):
        learner.model.train()
        return seconds_of(
            timed, shape, LONG_SECONDS, first=shape[0] if learner.config.compile else 2
        )


@contextmanager
def undone(learner: Learner) -> Iterator[None]:
    """Put back, at the end of the context, everything that steps within it change: weights,
    buffers, averages, the optimiser, the schedule, the scale of fp16, and all generators.
    """
    kept = random_state()
    modules = [learner.model, *([learner.ema.module] if learner.ema else [])]
    training = [(part, part.training) for module in modules for part in module.modules()]
    tensors = [
        (tensor, tensor.detach().clone())
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
    ]
    optimizer, scaler = learner.optimizer, learner.optimizer_step.scaler
    moments = copy.deepcopy(optimizer.state_dict())
    scale, shape = scaler.state_dict(), learner.input_shape
    try:
        yield
    finally:
        put_back(tensors)
        optimizer.zero_grad(set_to_none=True)
        optimizer.load_state_dict(moments)
        if scale:
            scaler.load_state_dict(scale)
        for part, was in training:
            part.training = was
        learner.input_shape = shape
        restore_random_state(kept)


def batch_of(learner: Learner, shape: Shape) -> Batch:
    """Return a batch of black images; their classes are all there are, in turns."""
    images, *size = shape
    channels = 1 if learner.spec.encoding else learner.spec.in_chans
    labels = learner.objective.targets(images, (size[0], size[1]))
    if labels.ndim == 1:
        labels = torch.arange(images) % max(1, learner.spec.num_classes)
    # With pad, a model that takes them is always told what images fill.
    sizes = torch.tensor([size] * images) if learner.geometry.fit == "pad" else None
    return Batch(torch.zeros(images, channels, *size, dtype=torch.uint8), labels, sizes)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
