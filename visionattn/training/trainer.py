"""A model in training: what a step is, what an epoch is, the best weights, and the state to go on from.

Owns the loop. Optimisation, data, evaluation, files and interruption have modules of their own.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from visionattn.models.weights import DataSpec, load_model, save_model
from visionattn.training.checkpoint import random_state, restore_random_state, save_state
from visionattn.training.config import TrainConfig
from visionattn.training.data import Splits, eval_batches, train_batches
from visionattn.training.evaluate import Evaluation, autocast, evaluate
from visionattn.training.finite import first_non_finite
from visionattn.training.interrupt import Interruption, NonFinite
from visionattn.training.optimize import (
    make_criterion,
    make_mixup,
    make_optimizer,
    make_scheduler,
    mix_batch,
    restore_optimizer,
)
from visionattn.training.progress import Position, Result, Window
from visionattn.training.record import BEST, LAST, Record

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
    """

    def __init__(
        self, config: TrainConfig, splits: Splits, model: nn.Module, args: dict[str, Any], device: torch.device
    ):
        self.config, self.splits, self.model, self.args, self.device = config, splits, model, args, device
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
        self.non_finite_in_a_row = 0

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
        while self.position.epoch < self.config.epochs:
            start = time.perf_counter()
            try:
                self.train_epoch(record, interruption)
                result = self.evaluate(self.evaluated, self.validation, interruption)
            finally:
                self.position.seconds += time.perf_counter() - start
            self.close_epoch(result, record, time.perf_counter() - start)

    def train_epoch(self, record: Record, interruption: Interruption) -> None:
        """Train the batches that are left of the current epoch."""
        position = self.position
        self.model.train()
        batches = interruption.watch(islice(self.batches.epoch(position.epoch), position.batch, None))
        start = time.perf_counter()
        while group := list(islice(batches, self.config.optim.accumulate)):
            waited = time.perf_counter() - start
            loss, norm, applied = self.step(group)
            position.step += 1
            position.batch += len(group)
            if applied:
                images = sum(len(labels) for _, labels in group)
                position.loss_sum, position.images = position.loss_sum + loss * images, position.images + images
                self.non_finite_in_a_row = 0
                self.window.add(loss, norm, images, waited, time.perf_counter() - start)
            else:
                self.count_skipped(loss, group, record)
            if self.window.steps and position.step % self.config.log_every == 0:
                place = {"step": position.step, "epoch": position.epoch + 1}
                record.step(place | self.window.means() | {"lr": self.learning_rate(), "skipped": position.skipped})
                self.window = Window()
            record.progress(
                f"epoch {position.epoch + 1}/{self.config.epochs}",
                position.batch,
                len(self.batches),
                f"loss {loss:.3f}",
            )
            start = time.perf_counter()

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
        for images, labels in group:
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
            self.non_finite_in_a_row = 0
            return
        self.non_finite_in_a_row += 1
        what = "loss" if not math.isfinite(loss) else "gradient"
        record.say(f"step {self.position.step}: the {what} is not finite; no update")
        if self.non_finite_in_a_row >= NON_FINITE_STEPS:
            raise NonFinite(
                f"the {what} was not finite {NON_FINITE_STEPS} steps in a row, last at step "
                f"{self.position.step}; first at fault: {self.at_fault(group)}"
            )

    def at_fault(self, group: list[Batch]) -> str:
        """The first module with values that are not finite, when the batches of a step run once more."""
        for images, labels in group:
            inputs, _ = self.inputs(images, labels)

            def run(inputs: Tensor = inputs) -> None:
                with autocast(self.device, self.config.amp):
                    self.model(inputs)

            if place := first_non_finite(self.model, run):
                return place
        names = [
            name
            for name, value in self.model.named_parameters()
            if value.grad is not None and not torch.isfinite(value.grad).all()
        ]
        return (
            f"the gradient of {names[-1]}; the forward pass is finite" if names else "nothing that a second pass shows"
        )

    def evaluate(self, model: nn.Module, batches: Iterable[Batch], interruption: Interruption) -> Evaluation:
        """Evaluate in the precision of the training."""
        return evaluate(model, interruption.watch(batches), self.spec, device=self.device, amp=self.config.amp)

    def close_epoch(self, result: Evaluation, record: Record, seconds: float) -> None:
        """Keep the weights if they are the best so far, then the state; write and print the epoch's figures."""
        position = self.position
        position.epoch, position.batch = position.epoch + 1, 0
        better = (result.accuracy, -result.loss) > (position.best, -position.best_loss)
        if better:
            position.best, position.best_loss, position.best_epoch = result.accuracy, result.loss, position.epoch
            save_model(record.folder / BEST, self.evaluated, self.config.model.name, self.args, self.spec)
        train_loss = position.loss_sum / position.images if position.images else math.nan
        position.loss_sum, position.images = 0.0, 0
        save_state(record.folder / LAST, self.state())
        record.epoch(
            {
                "epoch": position.epoch,
                "step": position.step,
                "train_loss": train_loss,
                "val_loss": result.loss,
                "val_accuracy": result.accuracy,
                "val_top5": result.top5,
                "lr": self.learning_rate(),
                "skipped": position.skipped,
                "left_out": self.batches.left_out,
                "seconds": round(seconds, 3),
            }
        )
        record.say(
            f"epoch {position.epoch:{len(str(self.config.epochs))}}/{self.config.epochs}  loss {train_loss:.4f}  "
            f"validation loss {result.loss:.4f}  accuracy {100 * result.accuracy:.1f} %{' *' if better else '  '}  "
            f"lr {self.learning_rate():.1e}  {seconds:.1f} s"
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
        best = self.position
        return Result(record.folder, checkpoint, best.seconds, best.best_epoch, best.best, test, self.sizes_px())

    def sizes_px(self) -> tuple[int, ...]:
        """The image size, and about 1.5 and 2 times it in whole patches; it alone where the model takes no other."""
        size, embed = self.config.data.img_size, getattr(self.model, "patch_embed", None)
        if embed is None or getattr(embed, "strict_img_size", False):
            return (size,)
        patch = math.lcm(*embed.patch_size)
        return (size, math.ceil(1.5 * size / patch) * patch, 2 * size)

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
        for key in ("name", "layer_decay"):
            if old["optim"][key] != new["optim"][key]:
                raise ValueError(
                    f"the run has optim.{key} {old['optim'][key]}, not {new['optim'][key]}; resume with the same"
                )
        if bool(state["ema"]) != bool(self.ema):
            raise ValueError(
                f"the run has optim.ema_decay {old['optim']['ema_decay']}; it cannot be switched on or off halfway"
            )
        self.model.load_state_dict(state["model"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        restore_optimizer(self.optimizer, state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.position = Position(**state["position"])
        self.scheduler.step_update(self.position.step)
        restore_random_state(state["random"])  # the loaders draw from generators of their own
        return [f"goes on after epoch {self.position.epoch}, step {self.position.step}", *differences(old, new)]


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """One line per option whose value changed, besides those that say where and how often to write."""
    quiet = {"resume", "overwrite", "output", "run", "log_every", "init_from"}
    lines = []
    for key in new:
        if isinstance(new[key], dict) and isinstance(old.get(key), dict):
            lines += differences(old[key], new[key], f"{prefix}{key}.")
        elif key not in quiet and old.get(key) != new[key]:
            lines.append(f"  {prefix}{key} is now {new[key]}, was {old.get(key)}")
    return lines
