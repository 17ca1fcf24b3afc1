"""A trial before the first step: what steps and evaluations take in seconds.

Steps are real ones whose effects are undone, so that the training is bit for bit what it would be
without them. This module owns how much is tried; ``forecast.py`` makes an estimate of it.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from visionattn.data.batches import Batch
from visionattn.models.cost import Shape, put_back
from visionattn.models.machine import autocast, random_state, restore_random_state
from visionattn.models.patches import in_eval
from visionattn.training.learner import Learner

LONG_SECONDS = 20.0
"""A step that takes longer is not tried whole, nor twice."""
SHORT_SECONDS = 2.0
"""A step that takes longer is timed the first time that it runs."""


@dataclass(frozen=True)
class Trial:
    """What was tried, in the shape of batches, and the seconds that it took."""

    shape: Shape
    seconds: float

    @property
    def pixels(self) -> int:
        """Count the pixels of the batch."""
        images, height, width = self.shape
        return images * height * width


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


def try_steps(
    learner: Learner, shapes: Sequence[Shape], clock: Callable[[], float] = time.perf_counter
) -> list[Trial]:
    """Time optimiser steps, each on one black batch, of the share of one process of several.

    The first pass, of few images, does not count where a further one is made: libraries start in
    it. It says how much of a batch is tried.

    Args:
        learner: whose steps they are; all processes call this together.
        shapes: of batches, the smallest first; one that takes too long is tried in part.
        clock: seconds.
    """
    found = []

    def timed(shape: Shape) -> float:
        batch = batch_of(learner, shape)
        synchronize(learner.device)
        start = clock()
        Learner.step(learner, [batch])
        synchronize(learner.device)
        return learner.processes.gather(clock() - start)[0]

    with undone(learner):
        learner.model.train()
        first = shapes[0]
        # A compiled model is compiled for the size that comes first.
        few = first if learner.config.compile else (min(2, first[0]), *first[1:])
        trial = Trial(few, timed(few))
        for shape in shapes:
            expected = trial.seconds * pixels_of(shape) / trial.pixels
            if expected > LONG_SECONDS and not learner.config.compile:
                images = int(shape[0] * LONG_SECONDS / 2 / expected)
                if images <= trial.shape[0]:
                    found.append(trial)
                    continue
                shape = (images, *shape[1:])
                expected = LONG_SECONDS / 2
            seconds = timed(shape)
            if min(seconds, expected) < SHORT_SECONDS:
                seconds = timed(shape)
            trial = Trial(shape, seconds)
            found.append(trial)
    return found


def try_evaluation(
    learner: Learner,
    model: nn.Module,
    shape: Shape,
    step: Trial,
    clock: Callable[[], float] = time.perf_counter,
) -> Trial:
    """Time a forward without gradients, of as many images as half a second takes.

    Args:
        learner: whose images they are.
        model: whole, on its device.
        shape: of a batch of evaluation.
        step: what a step took, which a forward does not exceed.
        clock: seconds.
    """
    each = step.seconds * shape[1] * shape[2] / step.pixels
    shape = (max(1, min(shape[0], int(0.5 / max(each, 1e-9)))), *shape[1:])
    batch = batch_of(learner, shape)
    with in_eval(model), torch.inference_mode(), autocast(learner.device, learner.config.amp):
        inputs = learner.spec.prepare(batch.images.to(learner.device))
        synchronize(learner.device)
        start = clock()
        labels = batch.labels.to(learner.device)
        learner.objective.judge(model, inputs, learner.sizes_of(batch), labels)
        synchronize(learner.device)
        return Trial(shape, clock() - start)


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


def pixels_of(shape: Shape) -> int:
    """Count the pixels of a batch."""
    images, height, width = shape
    return images * height * width


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
