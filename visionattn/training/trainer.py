"""A model in training: what a step is, what an epoch is, the best weights, and the state to go on from.

Owns the loop. Optimisation, data, evaluation, files and interruption have modules of their own.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from visionattn.models.weights import DataSpec, load_model, save_model
from visionattn.training.batches import seed_batch
from visionattn.training.checkpoint import random_state, restore_random_state
from visionattn.training.config import TrainConfig
from visionattn.training.data import Splits, eval_batches, train_batches
from visionattn.training.evaluate import Evaluation, autocast, evaluate
from visionattn.training.finite import name_fault
from visionattn.training.interrupt import Interruption, NonFinite
from visionattn.training.optimize import (
    make_criterion,
    make_mixup,
    make_optimizer,
    make_scheduler,
    mix_batch,
    restore_optimizer,
)
from visionattn.training.progress import Position, Result, WaitWatch, Window, sizes_worth_trying, waiting
from visionattn.training.record import BEST, Record
from visionattn.training.states import BestFigures, States, check_options, differences

NON_FINITE_STEPS = 3
"""Steps in a row without a finite loss that end a run."""

Batch = tuple[Tensor, Tensor]


class Trainer:
    """A model, its optimiser and how far they have come.

    Args:
        config: the run.
        splits: the images.
        model: on its device.
        args: the arguments that build it again, for the best weights' file.
        device: where to compute.
        states: where the states go; None: they are not kept.
    """

    def __init__(
        self,
        config: TrainConfig,
        splits: Splits,
        model: nn.Module,
        args: dict[str, Any],
        device: torch.device,
        states: States | None = None,
    ):
        self.config, self.splits, self.model, self.args, self.device = config, splits, model, args, device
        self.states = states
        self.spec: DataSpec = splits.spec
        self.batches = train_batches(splits, config.data, batch_size=config.batch_size, seed=config.seed)
        self.eval_batch_size = config.eval_batch_size or config.batch_size
        self.validation = eval_batches(
            splits.validation, config.data, batch_size=self.eval_batch_size, img_size=config.data.img_size
        )
        self.steps_per_epoch = math.ceil(len(self.batches) / config.optim.accumulate)
        self.optimizer = make_optimizer(model, config.optim)
        self.scheduler = make_scheduler(self.optimizer, config.optim, config.epochs, self.steps_per_epoch)
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.amp == "fp16")
        self.ema = ModelEmaV3(model, decay=config.optim.ema_decay, use_warmup=True) if config.optim.ema_decay else None
        self.mix = make_mixup(config.optim, self.spec.num_classes)
        self.criterion = make_criterion(config.optim)
        self.forward = torch.compile(model) if config.compile else model
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.position = Position()
        self.window = Window()
        self.waits = WaitWatch()
        self.history: list[dict[str, Any]] = []
        size = config.data.img_size
        self.input_shape: tuple[int, ...] = (config.batch_size, self.spec.in_chans, size, size)
        """Of the last batch, ``[B, C, H, W]``."""
        self.clock: float | None = None
        """When the time was last counted; None while it is not."""

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are evaluated and kept: the averaged ones where there is an average."""
        return self.ema.module if self.ema else self.model

    def describe(self) -> list[str]:
        """The run in a line or two."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        images = f"{len(self.splits.train)} training and {len(self.splits.validation)} validation images"
        return [
            f"{self.config.model.name}: {count:,} parameters, {images}, {self.config.epochs} epochs of "
            f"{self.steps_per_epoch} steps on {self.device.type}"
        ]

    def where(self) -> str:
        """What the run is doing, for people."""
        if self.position.epoch == self.config.epochs:
            return "all epochs are done, the test images are not"
        return f"epoch {self.position.epoch + 1} of {self.config.epochs}"

    def fit(self, record: Record, interruption: Interruption) -> None:
        """Train the epochs that are left, each followed by validation, the best weights and the state."""
        self.clock = time.perf_counter()
        while self.position.epoch < self.config.epochs:
            self.train_epoch(record, interruption)
            self.close_epoch(self.evaluate(self.evaluated, self.validation, interruption), record)
        self.clock = None

    def count_time(self) -> None:
        """Add what has passed since the last call to the time of the epoch and of the run."""
        if self.clock is not None:
            now = time.perf_counter()
            self.position.seconds += now - self.clock
            self.position.epoch_seconds += now - self.clock
            self.clock = now

    def save(self, record: Record) -> None:
        """Keep the state, and before it the lines that led to it."""
        self.count_time()
        record.sync()
        self.states.save(self.state())

    def train_epoch(self, record: Record, interruption: Interruption) -> None:
        """Train the batches that are left of the current epoch."""
        position, every = self.position, self.config.save_every
        self.model.train()
        batches = interruption.watch(self.batches.epoch(position.epoch, start=position.batch))
        start = time.perf_counter()
        while group := list(islice(batches, self.config.optim.accumulate)):
            if any(len(labels) for _, labels in group):
                waited = time.perf_counter() - start
                outcome = self.step(group)
                position.step += 1
                self.count(group, *outcome, waited, time.perf_counter() - start, record)
            position.batch += len(group)
            if self.states and every and position.step % every == 0:
                self.save(record)
            start = time.perf_counter()

    def count(
        self,
        group: list[Batch],
        loss: float,
        norm: float,
        applied: bool,
        waited: float,
        seconds: float,
        record: Record,
    ) -> None:
        """Add what came of a step, ``seconds`` long with ``waited`` for its data, to the sums, and write them when due."""
        position = self.position
        if applied:
            images = sum(len(labels) for _, labels in group)
            position.add(loss, images, waited, seconds)
            position.non_finite_in_a_row = 0
            self.window.add(loss, norm, images, waited, seconds)
        else:
            self.count_skipped(loss, group, record)
        if self.window.steps and position.step % self.config.log_every == 0:
            place = {"step": position.step, "epoch": position.epoch + 1}
            record.step(place | self.window.means() | {"lr": self.learning_rate(), "skipped": position.skipped})
            self.window = Window()
        if share := self.waits.add(waited, seconds):
            record.say(waiting(share, self.config.data.workers))
        epoch, done = f"epoch {position.epoch + 1}/{self.config.epochs}", position.batch + len(group)
        record.progress(epoch, done, len(self.batches), f"loss {loss:.3f}")

    def step(self, group: list[Batch]) -> tuple[float, float, bool]:
        """One optimiser step on the images of some batches.

        Each loss is divided by the images of the whole group, so the gradient is that of their mean, however they are
        batched.

        Returns:
            The mean loss, the norm of its gradient before clipping, and whether the weights were updated: a loss or a
            gradient that is not finite leaves them alone.
        """
        total = sum(len(labels) for _, labels in group)
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, (images, labels) in enumerate(group, start=self.position.batch):
            if not len(labels):
                continue
            self.input_shape = tuple(images.shape)
            seed_batch(self.config.seed, self.position.epoch, number)
            inputs, targets = self.inputs(images, labels)
            with autocast(self.device, self.config.amp):
                logits = self.forward(inputs)
            loss = self.criterion(logits.float(), targets) * (len(labels) / total)
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        loss_value, norm_value = torch.stack([torch.stack(losses).sum(), norm]).tolist()
        applied = math.isfinite(loss_value) and math.isfinite(norm_value)
        if applied:
            if self.config.optim.clip_grad:
                nn.utils.clip_grads_with_norm_(self.parameters, self.config.optim.clip_grad, norm)
            self.scaler.step(self.optimizer)
            if self.ema:
                self.ema.update(self.model, step=self.position.step + 1 - self.position.skipped)
        self.scaler.update()
        self.scheduler.step_update(self.position.step + 1)
        return loss_value, norm_value, applied

    def inputs(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The model's input on its device, mixed if so configured, and the targets: classes or shares of classes."""
        labels = labels.to(self.device, non_blocking=True)
        inputs = self.spec.prepare(images.to(self.device, non_blocking=True))
        return (inputs, labels) if self.mix is None else mix_batch(self.mix, inputs, labels)

    def count_skipped(self, loss: float, group: list[Batch], record: Record) -> None:
        """Count a step without an update; at the third in a row without a finite loss raise ``NonFinite``."""
        self.position.skipped += 1
        record.event("skipped", {"step": self.position.step, "epoch": self.position.epoch + 1, "loss": repr(loss)})
        # A scaled fp16 gradient overflows now and then by design: the scaler lowers its factor until it fits.
        if self.scaler.is_enabled() and math.isfinite(loss) and self.scaler.get_scale() >= 1:
            self.position.non_finite_in_a_row = 0
            return
        self.position.non_finite_in_a_row += 1
        what = "loss" if not math.isfinite(loss) else "gradient"
        record.say(f"step {self.position.step}: the {what} is not finite; no update")
        if self.position.non_finite_in_a_row >= NON_FINITE_STEPS:
            raise NonFinite(
                f"the {what} was not finite {NON_FINITE_STEPS} steps in a row, last at step "
                f"{self.position.step}; first at fault: {self.at_fault(group)}"
            )

    def at_fault(self, group: list[Batch]) -> str:
        """The first module with values that are not finite, when the batches of a step run once more."""

        def forward(images: Tensor, labels: Tensor) -> None:
            with autocast(self.device, self.config.amp):
                self.model(self.inputs(images, labels)[0])

        runs = [partial(forward, *batch) for batch in group if len(batch[1])]
        return name_fault(self.model, runs)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], interruption: Interruption) -> Evaluation:
        """Evaluate in the precision of the training."""
        size = self.config.data.img_size
        self.input_shape = (self.eval_batch_size, self.spec.in_chans, size, size)
        return evaluate(model, interruption.watch(batches), self.spec, device=self.device, amp=self.config.amp)

    def close_epoch(self, result: Evaluation, record: Record) -> None:
        """Keep the weights if they are the best so far; write and print the epoch's figures, then keep the state.

        In this order a kill at any moment leaves the state of an earlier step, and the same epoch follows it again.
        """
        position = self.position
        better = (result.accuracy, -result.loss) > (position.best, -position.best_loss)
        if better:
            figures = BestFigures(position.epoch + 1, result.accuracy, result.loss)
            position.best, position.best_loss, position.best_epoch = result.accuracy, result.loss, figures.epoch
            model, name = self.evaluated, self.config.model.name
            save_model(record.folder / BEST, model, name, self.args, self.spec, notes=figures.notes())
        self.count_time()
        values = {
            "epoch": position.epoch + 1,
            "step": position.step,
            **position.means(),
            "val_loss": result.loss,
            "val_accuracy": result.accuracy,
            "val_top5": result.top5,
            "lr": self.learning_rate(),
            "skipped": position.skipped,
            "left_out": self.batches.left_out,
            "seconds": round(position.epoch_seconds, 3),
        }
        position.next_epoch()
        self.history.append(values)
        record.epoch(self.history)
        self.save(record)
        record.say(
            f"epoch {position.epoch:{len(str(self.config.epochs))}}/{self.config.epochs}  "
            f"loss {values['train_loss']:.4f}  validation loss {result.loss:.4f}  "
            f"accuracy {100 * result.accuracy:.1f} %{' *' if better else '  '}  "
            f"lr {self.learning_rate():.1e}  {values['seconds']:.1f} s"
        )

    def finish(self, record: Record, interruption: Interruption) -> Result:
        """Evaluate the best weights, as they are on the disk, once on the test images."""
        checkpoint, test = record.folder / BEST, None
        if self.splits.test is not None:
            batches = eval_batches(
                self.splits.test, self.config.data, batch_size=self.eval_batch_size, img_size=self.config.data.img_size
            )
            test = self.evaluate(load_model(checkpoint, device=self.device), batches, interruption)
            record.event(
                "test",
                {
                    "step": self.position.step,
                    "accuracy": test.accuracy,
                    "top5": test.top5,
                    "loss": test.loss,
                    "images": test.images,
                },
            )
        best, speed = self.position, self.position.images_per_second()
        sizes = sizes_worth_trying(self.model, self.config.data.img_size)
        return Result(record.folder, checkpoint, best.seconds, speed, best.best_epoch, best.best, test, sizes)

    def learning_rate(self) -> float:
        """The rate of the next step, of the group with the highest one."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def state(self) -> dict[str, Any]:
        """All that the run needs to go on, in plain types; the schedule is a function of ``position.step``."""
        return {
            "name": self.config.model.name,
            "args": self.args,
            "data": asdict(self.spec),
            "config": asdict(self.config),
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "position": asdict(self.position),
            "window": asdict(self.window),
            "history": self.history,
            "unreadable": sorted(self.batches.unreadable),
            "random": random_state(),
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Go on from a state of ``state()``.

        Returns:
            Lines that say from where, and which options differ from those that the state was saved with.

        Raises:
            ValueError: the state is of another optimiser, or has no averaged weights where they are asked for.
        """
        old, new = state["config"], asdict(self.config)
        check_options(old, new)
        self.model.load_state_dict(state["model"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        restore_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.position, self.window = Position(**state["position"]), Window(**state["window"])
        self.history = state["history"]
        self.batches.unreadable.update(state["unreadable"])
        self.scheduler.step_update(self.position.step)
        restore_random_state(state["random"])  # the loaders draw from generators of their own
        return [f"goes on after epoch {self.position.epoch}, step {self.position.step}", *differences(old, new)]
