"""Whether a run fits into memory: what it takes at its largest batch, what would fit where that is
too much, and which batch ``batch_size auto`` stands for.

``models/cost.py`` counts passes and finds what fits. Here are steps, several processes
and the loading of images.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from visionattn.cli.memory import sensible
from visionattn.data.buckets import cell_px
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Geometry, Size, geometry_of
from visionattn.data.splits import Splits, geometry_choices
from visionattn.models.building import patch_size
from visionattn.models.cost import (
    LARGEST_BATCH,
    SCATTERED,
    SCATTERED_CHECKPOINTED,
    WORKER_BYTES,
    Expected,
    Memory,
    Passes,
    Shape,
    images_that_fit,
    whole_bytes,
)
from visionattn.models.machine import autocast
from visionattn.models.patches import takes_sizes
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes
from visionattn.training.evaluate import objective_of
from visionattn.training.objective import Objective
from visionattn.training.parallel import choose_kind
from visionattn.training.trainer import Trainer

MOMENTS = 2
"""How many tensors of the size of the parameters the optimisers keep."""
PREFETCHED = 2
"""How many batches each process that loads images has ready."""


class TrainingMemory(Memory):
    """What a run takes at batches of some shapes.

    It is made before the average and the optimiser are there, and counts both.

    Args:
        config: the run; its batch size does not matter.
        model: on its device.
        splits: the images.
        device: where to compute.
        processes: those that train together.
        objective: what the model learns; None: the classes of the images.
    """

    doing = "a step on "

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
        checkpointing, patch_px = config.model.grad_checkpointing, patch_size(model)
        self.objective = objective or objective_of(splits.spec, config.optim)
        self.kind = choose_kind(replace(config, batch_size="auto"), processes.size)
        passes = Passes(
            objective.called(model) if objective else model,
            splits.spec,
            device,
            config.amp,
            leaves_out=splits.spec.fit == "pad" and takes_sizes(model),
        )
        beside = processes.hosts.count(processes.hosts[processes.rank])
        super().__init__(passes, patch_px, cell_px(geometry_of(splits.spec, patch_px)), beside)
        if config.optim.ema_decay:
            self.base_bytes += sum(x.numel() * x.element_size() for x in model.parameters())
        self.least = processes.data_size
        self.saves = "" if checkpointing else ", and model.grad_checkpointing saves memory"

    def bytes_of(self, shape: Shape, evaluation: Shape | None = None) -> int | None:
        """Return the memory of one process and of those that load its images, at its largest batch
        of training and of evaluation; None where nobody can tell.
        """
        step = self.extended(self.step_bytes, self.own_part(shape))
        if step is None:
            return None
        # An evaluation, with the moments of the optimiser, where its batches are larger.
        if evaluation is not None and math.prod(evaluation) > math.prod(shape):
            forward = self.extended(self.passes.forward_bytes, self.own_part(evaluation)) or 0
            step = max(step, forward + self.kept_bytes())
        if self.passes.device.type == "cuda":
            return self.base_bytes + step
        part = share_of(shape, self.processes.data_size)
        loading = loading_bytes(self.config.data, self.splits.train, self.splits.spec, part)
        return self.base_bytes + step + loading

    def step_bytes(self, shape: Shape) -> int | None:
        """Return the bytes of a step of one process, with what the optimiser keeps; None where
        nobody can tell, on a GPU infinity where it is too much.
        """
        passes, optim = self.passes, self.config.optim

        def work(model: nn.Module) -> None:
            model.train()
            if optim.accumulate > 1:  # the gradients of the batches before are there
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            images, sizes = passes.batch(shape)
            targets = self.objective.targets(len(images), shape[1:]).to(passes.device)
            with autocast(passes.device, passes.amp):
                logits = self.objective.outputs(model, passes.spec.prepare(images), sizes, targets)
            if optim.mixup or optim.cutmix:
                targets = torch.zeros(len(images), logits.shape[1], device=passes.device)
            self.objective.loss(logits.float(), targets).backward()

        checkpointing = self.config.model.grad_checkpointing
        scattered = SCATTERED_CHECKPOINTED if checkpointing else SCATTERED
        took = passes.peak(work, scattered, "step", shape)
        return None if took is None else whole_bytes(took + self.kept_bytes())

    def kept_bytes(self) -> float:
        """Return what the optimiser keeps between steps, and buffers for sums over processes:
        ``ddp`` sums gradients in buffers of their size, and ``fsdp`` divides the moments.
        """
        learnt = (x for x in self.passes.model.parameters() if x.requires_grad)
        weights = sum(x.numel() * x.element_size() for x in learnt)
        kept = MOMENTS * weights / (self.processes.size if self.kind == "fsdp" else 1)
        kept += weights if self.kind in ("ddp", "sequence") else 0
        return kept * (1 if self.passes.device.type == "cuda" else SCATTERED)

    def own_part(self, shape: Shape) -> Shape:
        """Return what one process computes of a batch: some images, or some rows of them."""
        images, height, width = share_of(shape, self.processes.data_size)
        rows = -(-height // self.patch_px[0])
        return images, -(-rows // self.processes.per_image) * self.patch_px[0], width

    def batch_that_fits(self, images: int, shape: Shape) -> str:
        """Name the options for batches of ``images`` images that keep the images of a step."""
        if self.splits.spec.fit == "native":
            patches = images * (math.prod(shape[1:]) // self.cell_px)
            return f"--data.batch_patches {patches} would fit, {images} such images"
        raised = -(-shape[0] * self.config.optim.accumulate // images)
        return (
            f"--batch-size {images} would fit, with --optim.accumulate {raised} for as many images "
            "in a step"
        )

    def image_that_fits(self, size: Size) -> str:
        """Name the options for images of a size."""
        rows, columns = size
        if self.splits.spec.fit == "native":
            patches = rows * columns // self.cell_px
            return (
                f"one image of up to {patches} patches would fit: --data.max_patches {patches} "
                f"with --data.img_size null, or --data.img_size {max(size)}"
            )
        size_px = str(rows) if rows == columns else f"{rows} {columns}"
        return f"one image of {rows} x {columns} pixels would fit: --data.img_size {size_px}"


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
    # The first process decides, as the others may count a little less or more.
    needed, memory.there_bytes = trainer.processes.on_first(lambda: (needed, memory.there_bytes))
    return memory.check(shape, needed)


def known(shapes: np.ndarray) -> np.ndarray:
    """Return the batches whose images have a known size."""
    return shapes[shapes[:, 1:].prod(1) > 0]


def with_batch(
    config: TrainConfig, splits: Splits, memory: TrainingMemory
) -> tuple[TrainConfig, list[str]]:
    """Return the run with a number for ``batch_size auto``, the largest that fits, and a line that
    says which; where images differ in size, with ``data.batch_patches`` too.

    Raises:
        ValueError: nobody can tell what fits.
    """
    if config.batch_size != "auto":
        return config, []
    choices = geometry_choices(splits.spec, config.data, memory.patch_px)
    size, mean = largest_images(splits.train, choices)
    count = len(splits.train)
    taken = memory.processes.on_first(lambda: memory.auto(size, count))
    if choices[0].canvas is not None:
        return replace(config, batch_size=taken), [images_that_fit(taken, size)]
    # As many patches as the largest images have that fit.
    patches = taken * (size[0] * size[1] // memory.cell_px)
    most = min(LARGEST_BATCH * memory.least, count)
    average = min(most, sensible(max(1, int(patches * memory.cell_px / mean))))
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
