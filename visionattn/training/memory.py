"""Whether a run fits into memory: what it takes at its largest batch, what would fit where that is
too much, and which batch ``batch_size auto`` stands for.

``passes.py`` tells the memory of one pass. Here it becomes that of a run, with its images and its
processes.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from visionattn.cli.memory import (
    check_fits,
    memory_there_is,
    sensible,
    taken_bytes,
)
from visionattn.data.buckets import cell_px
from visionattn.data.config import DataConfig
from visionattn.data.geometry import Geometry, Size
from visionattn.data.splits import Splits, geometry_choices
from visionattn.models.building import patch_size
from visionattn.models.cost import (
    LARGEST_BATCH,
    WORKER_BYTES,
    Expected,
    Shape,
    fits,
    largest_batch,
    largest_image,
)
from visionattn.models.patches import takes_sizes
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes
from visionattn.training.objective import Objective
from visionattn.training.parallel import choose_kind
from visionattn.training.passes import StepPasses
from visionattn.training.trainer import Trainer

COUNTED_PATCHES = 1 << 14
"""Patches of the largest image whose step is counted itself: larger ones take minutes to count."""
PREFETCHED = 2
"""How many batches each of them has ready."""


class TrainingMemory:
    """Tell what a run takes at batches of some shapes, and how much there is.

    It is made before the average and the optimiser are there, and counts both.

    Args:
        config: the run; its batch size does not matter.
        model: on its device.
        splits: the images.
        device: where to compute.
        processes: those that train together.
        objective: what the model learns; None: the classes of the images.

    Attributes:
        there_bytes: the memory there is for this process; None where nobody knows.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        splits: Splits,
        device: torch.device,
        processes: Processes,
        objective: Objective | None = None,
    ):
        self.config, self.splits, self.processes = config, splits, processes
        beside = processes.hosts.count(processes.hosts[processes.rank])
        self.there_bytes = memory_there_is(device, beside)
        self.base_bytes = taken_bytes(device)
        if config.optim.ema_decay:
            self.base_bytes += sum(x.numel() * x.element_size() for x in model.parameters())
        self.patch_px = patch_size(model)
        leaves_out = splits.spec.fit == "pad" and takes_sizes(model)
        self.passes = StepPasses(
            objective.called(model) if objective else model,
            splits.spec,
            device,
            config.amp,
            leaves_out=leaves_out,
            checkpointing=config.model.grad_checkpointing,
            objective=objective,
        )

    def bytes_of(self, training: Shape, evaluation: Shape | None = None) -> int | None:
        """Return the memory of one process and of those that load its images, at its largest batch
        of training and of evaluation; None where nobody can tell.
        """
        size = self.processes.size
        kind = choose_kind(replace(self.config, batch_size="auto"), size)
        step = self._told(
            lambda shape: self.passes.step_bytes(
                shape, self.config.optim, kind=kind, processes=size
            ),
            self.own_part(training),
        )
        if step is None:
            return None
        # An evaluation beside what the optimiser keeps, where its batches are the larger ones.
        if evaluation is not None and math.prod(evaluation) > math.prod(training):
            forward = self._told(self.passes.forward_bytes, self.own_part(evaluation)) or 0
            step = max(step, forward + self.passes.kept_bytes(kind, size))
        loading = loading_bytes(
            self.config.data,
            self.splits.train,
            self.splits.spec,
            share_of(training, self.processes.data_size),
        )
        on_gpu = self.passes.device.type == "cuda"
        return self.base_bytes + step + (0 if on_gpu else loading)

    def _told(self, count: Callable[[Shape], int | None], shape: Shape) -> int | None:
        """Return what ``count`` says of a batch, or of images that take long to count what follows
        from two smaller ones: memory grows at least evenly with the pixels.
        """
        patch = math.prod(self.patch_px)
        patches = math.prod(shape[1:]) // patch
        if patches <= COUNTED_PATCHES or self.passes.device.type == "cuda":
            return count(shape)
        sides = [math.isqrt(COUNTED_PATCHES // part) for part in (8, 2)]
        less, more = (tuple(side * each for each in self.patch_px) for side in sides)
        few, many = count((shape[0], *less)), count((shape[0], *more))
        if few is None or many is None:
            return None
        grown = (many - few) / (sides[1] ** 2 - sides[0] ** 2)
        return few + int(grown * (patches - sides[0] ** 2))

    def own_part(self, shape: Shape) -> Shape:
        """Return what one process computes of a batch: some images, or some rows of them."""
        images, height, width = share_of(shape, self.processes.data_size)
        rows = -(-height // self.patch_px[0])
        return images, -(-rows // self.processes.per_image) * self.patch_px[0], width


def share_of(shape: Shape, processes: int) -> Shape:
    """Return the part of a batch that one of several processes takes at most."""
    images, height, width = shape
    return -(-images // processes), height, width


def loading_bytes(config: DataConfig, dataset: Dataset, spec: DataSpec, shape: Shape) -> int:
    """Return what the processes take that load images: batches that wait, and an image each as it
    is in its file.
    """
    images, height, width = shape
    channels = 1 if spec.encoding else spec.in_chans
    batch = images * channels * height * width
    if not config.workers:
        return batch
    found = getattr(dataset, "known_sizes", None)
    largest = 0 if found is None or not len(found) else int(found.prod(1).max()) * channels
    return config.workers * (WORKER_BYTES + PREFETCHED * batch + 2 * largest)


def largest_shape(shapes: np.ndarray) -> Shape:
    """Return the batch of the most pixels; of equals, that of the largest images."""
    pixels = shapes[:, 1:].prod(1)
    order = np.lexsort((pixels, pixels * shapes[:, 0]))
    images, height, width = shapes[order[-1]].tolist()
    return images, height, width


def check_memory(trainer: Trainer, memory: TrainingMemory) -> Expected:
    """Return the memory that a run will take at most.

    Raises:
        DoesNotFit: it is clearly more than there is; one line, with what would fit.
    """
    training, evaluated = known(trainer.batches.shapes()), known(trainer.validation.shapes())
    if not len(training):
        return Expected(None, memory.there_bytes)
    shape = largest_shape(training)
    needed = memory.bytes_of(shape, largest_shape(evaluated) if len(evaluated) else None)
    images, height, width = shape
    # The first process decides, as the others may count a little less or more.
    processes = trainer.processes
    needed, there = processes.on_first(lambda: (needed, memory.there_bytes))
    check_fits(
        needed,
        there,
        f"a step on {images} images of {height} x {width} pixels",
        lambda: way_out(trainer.config, memory, shape),
    )
    return Expected(needed, there)


def known(shapes: np.ndarray) -> np.ndarray:
    """Return the batches whose images have a known size."""
    return shapes[shapes[:, 1:].prod(1) > 0]


def way_out(config: TrainConfig, memory: TrainingMemory, shape: Shape) -> str:
    """Say which batch, or if none which size of images, would fit."""
    images, *size = shape
    fit = largest_batch(memory, (size[0], size[1]), images - 1)
    native = memory.splits.spec.fit == "native"
    patch = memory.patch_px[0] * memory.patch_px[1]
    cell = patch if patch > 1 else 256
    saves = "" if config.model.grad_checkpointing else ", and model.grad_checkpointing saves memory"
    if fit >= memory.processes.data_size:
        fit = max(1, sensible(fit))
        if native:
            patches = fit * (size[0] * size[1] // cell)
            return (
                f"--data.batch_patches {patches} would fit, {fit} such images; --batch-size auto "
                f"takes the most that fits{saves}"
            )
        raised = -(-images * config.optim.accumulate // fit)
        return (
            f"--batch-size {fit} would fit, with --optim.accumulate {raised} for as many images "
            f"in a step; --batch-size auto takes the most that fits{saves}"
        )

    # Not one image fits: a smaller one of the same aspect ratio.
    found = largest_image(lambda one: fits(memory, (1, *one)), (size[0], size[1]), memory.patch_px)
    if found is None:
        return f"not even an image of one patch would fit: a smaller model takes less{saves}"
    rows, columns = found
    if native:
        return (
            f"one image of up to {rows * columns // cell} patches would fit: --data.max_patches "
            f"{rows * columns // cell} with --data.img_size null, or --data.img_size "
            f"{max(rows, columns)}{saves}"
        )
    size_px = str(rows) if rows == columns else f"{rows} {columns}"
    return f"one image of {rows} x {columns} pixels would fit: --data.img_size {size_px}{saves}"


def with_batch(
    config: TrainConfig, splits: Splits, memory: TrainingMemory
) -> tuple[TrainConfig, list[str]]:
    """Return the run with a number for ``batch_size auto``, the largest that fits, and a line that
    says which; where images differ in size, with ``data.batch_patches`` too.

    Raises:
        ValueError: nobody can tell what fits.
        DoesNotFit: not one image fits.
    """
    if config.batch_size != "auto":
        return config, []
    choices = geometry_choices(splits.spec, config.data, memory.patch_px)
    most = min(LARGEST_BATCH * memory.processes.data_size, len(splits.train))
    size, mean = largest_images(splits.train, choices)
    if memory.there_bytes is None or memory.bytes_of((1, *size)) is None:
        raise ValueError(
            "batch_size auto: nobody can tell the memory of this model here; name a number"
        )
    chosen = memory.processes.on_first(lambda: largest_batch(memory, size, most))
    if chosen < memory.processes.data_size:  # one image each may just do, or is refused
        chosen = memory.processes.data_size
        check_fits(
            memory.bytes_of((chosen, *size)),
            memory.there_bytes,
            f"a step on {chosen} image{'s' if chosen > 1 else ''} of {size[0]} x {size[1]} pixels",
            lambda: way_out(config, memory, (chosen, *size)),
        )
    taken = sensible(chosen)
    native = choices[0].canvas is None
    if not native:
        line = f"batch_size auto: {taken} images fit, of {size[0]} x {size[1]} pixels"
        return replace(config, batch_size=taken), [line]
    # As many patches as so many of the largest images have.
    cell = cell_px(choices[0])
    patches = taken * (size[0] * size[1] // cell)
    average = max(1, min(most, sensible(max(1, int(patches * cell / mean)))))
    if config.data.batch_patches is not None:
        raise ValueError(
            f"batch_size auto chooses data.batch_patches, which is {config.data.batch_patches}; "
            "leave one of them out"
        )
    line = (
        f"batch_size auto: {patches} patches fit, {taken} of the largest images and {average} on "
        "average"
    )
    data = replace(config.data, batch_patches=patches)
    return replace(config, batch_size=average, data=data), [line]


def largest_images(dataset: Dataset, choices: tuple[Geometry, ...]) -> tuple[Size, float]:
    """Return the size of the largest images as the model sees them, and their mean pixels."""
    if choices[0].canvas is not None:
        sizes = np.array([choice.canvas for choice in choices])
    else:
        seen = [dataset.canvases(choice) for choice in choices]  # type: ignore[attr-defined]
        sizes = np.concatenate(seen)
    pixels = sizes.prod(1)
    rows, columns = sizes[pixels.argmax()].tolist()
    return (rows, columns), float(pixels[pixels > 0].mean()) if pixels.any() else 1.0
