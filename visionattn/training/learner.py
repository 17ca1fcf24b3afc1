"""A model and what makes it learn: one optimiser step on the images of some batches.

The step is here, on one process or on several, with the state of all that it changes. The module
knows neither epochs nor files.
"""

import math
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from visionattn.data.batches import Batch, seed_batch
from visionattn.data.geometry import geometry_of
from visionattn.models.building import patch_size
from visionattn.models.machine import autocast
from visionattn.models.patches import takes_sizes
from visionattn.models.weights import DataSpec
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes
from visionattn.training.evaluate import objective_of
from visionattn.training.finite import name_fault
from visionattn.training.objective import Objective
from visionattn.training.optimize import (
    OptimizerStep,
    check_moments,
    make_mixup,
    make_scheduler,
    mix_batch,
    restore_optimizer,
)
from visionattn.training.parallel import (
    Spread,
    choose_kind,
    cut_optimizer_state,
    load_whole,
    whole_tensor,
    whole_tensors,
)
from visionattn.training.progress import Position

SOME = (224, 224)
"""Height and width in pixels of an image where any will do."""


class Learner:
    """A model, its optimiser and how far they have come.

    Args:
        config: the run.
        model: on its device.
        spec: what the images are.
        device: where to compute.
        steps_per_epoch: optimiser steps of an epoch, which the schedule needs.
        processes: those that train together; each has a learner, and all call the same methods in
            the same order.
        objective: what the model learns; None: the classes of the images.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        spec: DataSpec,
        device: torch.device,
        steps_per_epoch: int,
        processes: Processes,
        objective: Objective | None = None,
    ):
        self.objective = objective or objective_of(spec, config.optim)
        self.config, self.processes = config, processes
        self.model, self.spec = model, spec
        self.device = device
        self.steps_per_epoch = steps_per_epoch
        self.ema = (
            ModelEmaV3(model, decay=config.optim.ema_decay, use_warmup=True)
            if config.optim.ema_decay
            else None
        )
        kind, average = choose_kind(config, processes.size), self.ema.module if self.ema else None
        self.called = self.objective.called(model)
        if kind == "sequence" and self.called is not model:
            raise ValueError(
                "parallel sequence is for a model that learns classes of images alone; take ddp"
            )
        self.spread = Spread(
            kind,
            self.called,
            average,
            compiled=config.compile,
            per_image=processes.per_image,
            timeout=timedelta(seconds=config.dist_timeout),
        )
        self.optimizer_step = OptimizerStep(
            model, config.optim, device, config.amp, loss=self.objective.loss
        )
        self.optimizer = self.optimizer_step.optimizer
        self.scheduler = make_scheduler(
            self.optimizer, config.optim, config.epochs, steps_per_epoch
        )
        self.mix = make_mixup(config.optim, spec.num_classes)
        self.position = Position()
        self.geometry = geometry_of(spec, patch_size(model))
        self.leaves_out = takes_sizes(model)
        self.input_shape: tuple[int, ...] = self.shape_of(config.batch_size)
        """Shape of the last batch, ``[B, C, H, W]``."""

    @property
    def evaluated(self) -> nn.Module:
        """Return the weights that are evaluated and kept: the averaged ones where there is an
        average.
        """
        return self.ema.module if self.ema else self.model

    def images_of(self, group: list[Batch]) -> int:
        """Count the readable images of some batches, over all processes."""
        counted = self.processes.sum(sum(len(batch.labels) for batch in group))[0]
        return int(counted) // self.processes.per_image

    def shape_of(self, images: int) -> tuple[int, ...]:
        """Return the shape of a batch of so many images; where they differ in size, that of the
        largest ones, or of some.
        """
        size = self.geometry.canvas or self.geometry.view(*(self.geometry.img_size or SOME)).canvas
        return (images, self.spec.in_chans, *size)

    def step(self, group: list[Batch]) -> tuple[float, float, bool]:
        """Do one optimiser step on the images of some batches.

        Each loss is divided by the images of the whole group, so the gradient is that of their
        mean, however they are batched and divided over processes.

        Args:
            group: batches; a process without images of one of them runs the model on an image that
                does not count, as the others wait for it.

        Returns:
            The mean loss, the norm of its gradient before clipping, and whether the weights were
            updated: a loss or a gradient that is not finite leaves them alone.
        """
        total, size = self.images_of(group), self.processes.size
        self.optimizer.zero_grad(set_to_none=True)
        # The number of the batch in its epoch seeds its draws, on any number of processes.
        losses = []
        for number, batch in enumerate(group, start=self.position.batch):
            # Processes that share an image have its loss each.
            share = len(batch.labels) / (total * self.processes.per_image)
            if not len(batch.labels):
                if size == 1:
                    continue
                batch = self.stand_in()
            self.input_shape = tuple(batch.images.shape)
            seed_batch(self.config.seed, self.position.epoch, number, self.processes.data_rank)
            inputs, targets = self.inputs(batch)
            with self.spread.summing(number == self.position.batch + len(group) - 1):
                # Times the processes, whose gradients are averaged.
                loss = self.optimizer_step.add_gradients(
                    partial(
                        self.objective.outputs,
                        self.spread.called,
                        sizes=self.sizes_of(batch),
                        targets=targets,
                    ),
                    inputs,
                    targets,
                    share=share,
                    factor=size,
                )
            losses.append(loss)
        # One reading from the device for loss and norm, which decide whether the step counts.
        norm = whole_tensor(self.optimizer_step.unscale())
        loss = self.spread.total(torch.stack(losses).sum())
        loss_value, norm_value = torch.stack([loss, norm]).tolist()
        applied = math.isfinite(loss_value) and math.isfinite(norm_value)
        if applied:
            self.optimizer_step.apply(norm)
            if self.ema:
                self.ema.update(self.model, step=self.position.step + 1 - self.position.skipped)
        self.optimizer_step.scaler.update()
        self.scheduler.step_update(self.position.step + 1)
        return loss_value, norm_value, applied

    def stand_in(self) -> Batch:
        """Return a batch of one image, for a process that has none."""
        channels = 1 if self.spec.encoding else self.spec.in_chans
        size = self.geometry.canvas or self.geometry.view(*SOME).canvas
        image = torch.zeros(1, channels, *size, dtype=torch.uint8)
        return Batch(image, self.objective.targets(1, size))

    def sizes_of(self, batch: Batch) -> Tensor | None:
        """Return what images fill, for a model that leaves out the rest; None for others."""
        return batch.sizes if self.leaves_out else None

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the model's input on its device, mixed if so configured, and the targets: classes
        of images or of pixels, or shares of classes.
        """
        labels = batch.labels.to(self.device, non_blocking=True)
        inputs = self.spec.prepare(batch.images.to(self.device, non_blocking=True))
        return (inputs, labels) if self.mix is None else mix_batch(self.mix, inputs, labels)

    def at_fault(self, group: list[Batch]) -> str:
        """Run the batches of a step once more, mixed alike, and name the first module with values
        that are not finite.
        """
        model = self.spread.whole(self.called, gradients=True)

        def forward(number: int, batch: Batch) -> None:
            seed_batch(self.config.seed, self.position.epoch, number, self.processes.data_rank)
            with autocast(self.device, self.config.amp):
                inputs, targets = self.inputs(batch)
                self.objective.outputs(model, inputs, self.sizes_of(batch), targets)

        numbered = enumerate(group, start=self.position.batch)
        runs = [partial(forward, number, batch) for number, batch in numbered if len(batch.labels)]
        faults = self.processes.gather(name_fault(model, runs))
        return min(faults, key=lambda fault: fault.startswith(("the gradient", "nothing")))

    def learning_rate(self) -> float:
        """Return the learning rate of the next step, in the group where it is highest."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def weights(self) -> dict[str, Any]:
        """Return what steps change, in plain types and whole tensors, however many processes there
        are.
        """
        return {
            "model": whole_tensors(self.model.state_dict()),
            "ema": whole_tensors(self.ema.module.state_dict()) if self.ema else None,
            "optimizer": whole_tensors(self.optimizer.state_dict()),
            "scaler": self.optimizer_step.scaler.state_dict(),
        }

    def load_weights(self, state: dict[str, Any]) -> None:
        """Take what ``weights()`` gave.

        Raises:
            ValueError: they belong to another optimiser, or are garbled.
        """
        check_moments(self.optimizer, state["optimizer"]["state"])
        load_whole(self.model, state["model"])
        if self.ema:
            load_whole(self.ema.module, state["ema"])
        restore_optimizer(self.optimizer, cut_optimizer_state(self.optimizer, state["optimizer"]))
        scaler = self.optimizer_step.scaler
        if scaler.is_enabled() and state["scaler"]:  # else the precision is another one now
            scaler.load_state_dict(state["scaler"])
