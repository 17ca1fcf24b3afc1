"""Estimate the cost of a training before its first step: memory at its largest batch, and time.

``models/cost.py`` counts passes and finds sizes that fit. This module adds training steps, several
processes and data loading. The time is extrapolated from a forward; ``run_progress.Pace`` measures
steps.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from visionattn.cli.memory import sensible
from visionattn.cli.tables import lasting
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
    images_of,
    images_that_fit,
    whole_bytes,
)
from visionattn.models.devices import autocast
from visionattn.models.patches import in_eval, takes_sizes
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes, choose_kind
from visionattn.training.freezing import begin_training
from visionattn.training.objectives import Objective, objective_of
from visionattn.training.trainer import Trainer, forward_share

MOMENTS = 2
"""Copies of the parameters' memory that the optimizers keep as state."""
PREFETCHED = 2
"""Batches that each loader process prefetches."""


class TrainingMemory(Memory):
    """Memory of a run at given batch shapes.

    It is created before averaged weights and optimizer exist, and counts both.

    Args:
        config: the run; its batch size is ignored.
        model: on its device.
        splits: the images.
        device: device of the model.
        processes: the processes that train together.
        objective: the training objective; None: set by the task of the data.
    """

    doing = "a step on "
    evaluates = False
    """Whether evaluating whole images needs more memory than a step on crops; if so, ``bytes_of``
    and the advice describe an evaluation.
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
        self.objective = objective or objective_of(splits.spec, config.optim, config.loss)
        self.kind = choose_kind(replace(config, batch_size="auto"), processes.size)
        patch_px = patch_size(model)
        passes = Passes(
            self.objective.called(model),
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
        checkpointing = config.model.grad_checkpointing
        self.saves = "" if checkpointing else ", and --model.grad_checkpointing true saves memory"

    def bytes_of(self, shape: Shape, evaluation: Shape | None = None) -> int | None:
        """Return the bytes of one process and its loader processes at the largest training and
        evaluation batch; None if unknown.
        """
        count = self.forward_bytes if self.evaluates else self.step_bytes
        step = self.extended(count, self.own_part(shape))
        if step is None:
            return None
        # An evaluation, with the optimizer's state in memory, if its batches are larger.
        if evaluation is not None and math.prod(evaluation) > math.prod(shape):
            step = max(step, self.extended(self.forward_bytes, self.own_part(evaluation)) or 0)
        if self.passes.device.type == "cuda":
            return self.base_bytes + step
        part = share_of(shape, self.processes.data_size)
        loading = loading_bytes(self.config.data, self.splits.train, self.splits.spec, part)
        return self.base_bytes + step + loading

    def step_bytes(self, shape: Shape) -> int | None:
        """Return the bytes of a step of one process, optimizer state included; None if unknown,
        infinity if a GPU runs out of memory.
        """
        passes, optim = self.passes, self.config.optim

        def work(model: nn.Module) -> None:
            begin_training(model, self.config.freeze)
            if optim.accumulate > 1:  # gradients of earlier batches are in memory
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

    def forward_bytes(self, shape: Shape) -> int | None:
        """Return the bytes of an evaluation of one process, as ``step_bytes`` for a step."""
        took = self.passes.forward_bytes(shape)
        return None if took is None else whole_bytes(took + self.kept_bytes())

    def kept_bytes(self) -> float:
        """Return the bytes of the optimizer state and of communication buffers: ``ddp`` sums
        gradients in buffers of their size, and ``fsdp`` shards the optimizer state.
        """
        learnt = (x for x in self.passes.model.parameters() if x.requires_grad)
        weights = sum(x.numel() * x.element_size() for x in learnt)
        kept = MOMENTS * weights / (self.processes.size if self.kind == "fsdp" else 1)
        kept += weights if self.kind in ("ddp", "sequence") else 0
        return kept * (1 if self.passes.device.type == "cuda" else SCATTERED)

    def own_part(self, shape: Shape) -> Shape:
        """Return one process's part of a batch: some images, or some rows of them."""
        images, height, width = share_of(shape, self.processes.data_size)
        rows = -(-height // self.patch_px[0])
        return images, -(-rows // self.processes.per_image) * self.patch_px[0], width

    @property
    def crops(self) -> bool:
        """Tell whether the images are crops."""
        return self.config.data.crop is not None and not self.evaluates

    @property
    def native(self) -> bool:
        """Tell whether the images have their own sizes."""
        return self.splits.spec.fit == "native" and not self.crops

    def batch_that_fits(self, images: int, shape: Shape) -> str:
        """Return the options for batches of ``images`` images with the same images per step."""
        if self.native:
            patches = images * (math.prod(shape[1:]) // self.cell_px)
            return f"--data.batch_patches {patches} would fit, {images} such images"
        raised = -(-shape[0] * self.config.optim.accumulate // images)
        return (
            f"--batch-size {images} would fit, with --optim.accumulate {raised} for as many images "
            "in a step"
        )

    def image_that_fits(self, size: Size) -> str:
        """Return the options for images of a size."""
        rows, columns = size
        if self.native:
            patches = rows * columns // self.cell_px
            return (
                f"one image of up to {patches} patches would fit: --data.max_patches {patches} "
                f"with --data.img_size null, or --data.img_size {max(size)}, and --batch-size 1"
            )
        size_px = str(rows) if rows == columns else f"{rows} {columns}"
        option = "crop" if self.crops else "img_size"
        return (
            f"one image of {rows} x {columns} pixels would fit: --data.{option} {size_px} "
            "--batch-size 1"
        )


def share_of(shape: Shape, processes: int) -> Shape:
    """Return the largest part of a batch on one of several processes."""
    images, height, width = shape
    return -(-images // processes), height, width


def loading_bytes(config: DataConfig, dataset: Dataset, spec: DataSpec, shape: Shape) -> int:
    """Return the bytes of the loader processes: prefetched batches, and one decoded source image
    for each process.
    """
    images, height, width = shape
    channels = 1 if spec.encoding else spec.in_chans
    # Feature maps have many channels per patch.
    batch = int(images * getattr(dataset, "bytes_per_pixel", channels) * height * width)
    if not config.workers:
        return batch
    found = getattr(dataset, "known_sizes", None)
    largest = 0 if found is None or not len(found) else int(found.prod(1).max()) * channels
    return config.workers * (WORKER_BYTES + PREFETCHED * batch + 2 * largest)


def largest_shape(shapes: np.ndarray) -> Shape:
    """Return the batch with the most pixels; among equal batches, the largest images win."""
    pixels = shapes[:, 1:].prod(1)
    order = np.lexsort((pixels, pixels * shapes[:, 0]))
    images, height, width = shapes[order[-1]].tolist()
    return images, height, width


def known(shapes: np.ndarray) -> np.ndarray:
    """Return the batches whose images have a known size."""
    return shapes[shapes[:, 1:].prod(1) > 0]


def check_memory(trainer: Trainer, memory: TrainingMemory) -> Expected:
    """Return the expected peak memory of a run.

    Raises:
        DoesNotFit: the run clearly does not fit; one line, with options that would fit.
    """
    training, evaluated = known(trainer.batches.shapes()), known(trainer.validation.shapes())
    if not len(training):
        return Expected(None, memory.there_bytes)
    shape = largest_shape(training)
    whole = largest_shape(evaluated) if len(evaluated) else None
    needed = memory.bytes_of(shape, whole)
    if trainer.config.data.crop is not None and whole and memory.bytes_of(shape) != needed:
        memory.evaluates, memory.doing, shape = True, "an evaluation of ", whole
    # The first process decides, because estimates of the others may differ slightly.
    needed, memory.there_bytes = trainer.processes.on_first(lambda: (needed, memory.there_bytes))
    return memory.check(shape, needed)


def with_batch(
    config: TrainConfig, splits: Splits, memory: TrainingMemory
) -> tuple[TrainConfig, list[str]]:
    """Return the run with the largest batch that fits, for ``batch_size auto``, and a line about
    it. If images differ in size, also set ``data.batch_patches``.

    Raises:
        ValueError: the memory of the model is unknown.
    """
    if config.batch_size != "auto":
        return config, []
    choices = geometry_choices(splits.spec, config.data, memory.patch_px)
    size, mean = largest_images(splits.train, choices)
    count = len(splits.train) * config.data.crops
    taken = memory.processes.on_first(lambda: memory.auto(size, count))
    if choices[0].canvas is not None:
        return replace(config, batch_size=taken), [images_that_fit(taken, size)]
    if config.data.batch_patches is not None:
        raise ValueError(
            f"batch_size auto sets data.batch_patches, got {config.data.batch_patches}; remove "
            "one of the two"
        )
    # The number of patches in the largest images that fit.
    patches = taken * (size[0] * size[1] // memory.cell_px)
    most = min(LARGEST_BATCH * memory.least, count)
    average = min(most, sensible(max(1, int(patches * memory.cell_px / mean))))
    line = (
        f"batch_size auto: {patches} patches fit, or {taken} of the largest images, {average} "
        "average ones"
    )
    data = replace(config.data, batch_patches=patches)
    return replace(config, batch_size=average, data=data), [line]


def largest_images(dataset: Dataset, choices: tuple[Geometry, ...]) -> tuple[Size, float]:
    """Return the largest size of preprocessed images, and their mean number of pixels."""
    if choices[0].canvas is not None:
        sizes = np.array([choice.canvas for choice in choices])
    else:
        seen = [dataset.canvases(choice) for choice in choices]  # type: ignore[attr-defined]
        sizes = np.concatenate(seen)
    pixels = sizes.prod(1)
    rows, columns = sizes[pixels.argmax()].tolist()
    return (rows, columns), float(pixels[pixels > 0].mean()) if pixels.any() else 1.0


def forecast(trainer: Trainer, memory: Expected) -> str | None:
    """Return a line about the expected cost of the run; None if no image can be read. All processes
    call it together.

    The time is proportional to a timed forward and to the pixels of the batches.
    """
    shapes, evaluated = known(trainer.batches.shapes()), known(trainer.validation.shapes())
    if not len(shapes) or not len(evaluated):
        return None
    config, size = trainer.config, trainer.processes.data_size
    cells = "pixels" if trainer.spec.task == "generate" else "patches"
    cell = 1 if cells == "pixels" else cell_px(trainer.geometry, trainer.spec.encoding)
    count = len(trainer.splits.train) * config.data.crops
    images = images_of(shapes[:, 1:], count, cell, cells=cells)
    usual = shapes[np.argsort(shapes.prod(1), kind="stable")[len(shapes) // 2]].tolist()
    tried = share_of((usual[0], usual[1], usual[2]), size)
    later = f"{memory}; estimated time: known after the first steps"
    if config.data.features is not None:  # samples of patches, whose size says nothing of images
        return later
    # A sharded model, or a model that shares images, cannot run on one process.
    timed = trainer.spread.kind in (None, "ddp")
    each = trainer.processes.gather(forward_seconds(trainer, tried) if timed else None)[0]
    if each is None:
        return f"{images}; {later}"
    share = forward_share(trainer.called, config.model.grad_checkpointing)
    per_pixel = each / math.prod(tried[1:]) / share
    trained, validated = (
        per_pixel * np.ceil(part[:, 0] / size) * part[:, 1:].prod(1) for part in (shapes, evaluated)
    )
    step = float(np.median(trained)) * config.optim.accumulate
    epoch = float(trained.sum() + share * validated.sum())
    left = (config.epochs - trainer.position.epoch) * epoch
    return (
        f"{images}; {memory}; estimated time: {lasting(step)} per step, {lasting(epoch)} per "
        f"epoch, {lasting(left)} in total"
    )


def forward_seconds(trainer: Trainer, shape: Shape) -> float | None:
    """Return the seconds per image of a forward; None if it cannot be timed."""
    objective, device = trainer.objective, trainer.device

    def compute(model: nn.Module, inputs: Tensor, sizes: Tensor | None) -> Tensor:
        targets = objective.targets(len(inputs), (inputs.shape[2], inputs.shape[3])).to(device)
        return objective.outputs(model, inputs, sizes, targets)

    passes = Passes(trainer.called, trainer.spec, device, trainer.config.amp, compute)
    with in_eval(trainer.called):
        return passes.forward_seconds(shape, patch_size(trainer.model))
