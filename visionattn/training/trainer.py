"""Train a model: the loop over epochs and batches, the optimizer step, and the state for resume.

``fit`` loops over epochs, ``train_epoch`` over batches, and ``step`` does the optimizer step.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Dataset

from visionattn.cli.exit_codes import NonFinite
from visionattn.cli.files import write_json
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.cli.untrusted import refuse
from visionattn.data.batches import Batch, EvalBatches, seed_batch
from visionattn.data.geometry import geometry_of
from visionattn.data.images import ImageDataset
from visionattn.data.splits import Splits, eval_batches, train_batches, training_geometry
from visionattn.data.streams import StreamEvalBatches, StreamTrainBatches
from visionattn.data.synthetic_images import seen_as
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.building import patch_size
from visionattn.models.devices import autocast, precision_taken, random_state, restore_random_state
from visionattn.models.large.row_parallel import cut_rows
from visionattn.models.patches import input_size, takes_sizes
from visionattn.models.registration import complete
from visionattn.models.weights import DataSpec, load_model, save_model
from visionattn.training.checkpoint import PARTS, BestFigures, States, changes, check_options
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import (
    Processes,
    Spread,
    choose_kind,
    cut_optimizer_state,
    load_whole,
    whole_tensor,
    whole_tensors,
)
from visionattn.training.epoch_advice import one_class, overfitting
from visionattn.training.evaluate import Evaluation, OutputEvaluation, Tally, evaluate
from visionattn.training.freezing import begin_training
from visionattn.training.head_training import HeadFiles
from visionattn.training.mistakes import SplitName, by_class
from visionattn.training.nonfinite_modules import name_fault
from visionattn.training.objectives import Objective, objective_of
from visionattn.training.optimize import (
    OptimizerStep,
    make_mixup,
    make_scheduler,
    mix_batch,
    restore_optimizer,
)
from visionattn.training.output_scores import by_output
from visionattn.training.run_folder import BEST, BY_CLASS, Record
from visionattn.training.run_progress import (
    NO_SCORE,
    EpochSums,
    Pace,
    Position,
    Result,
    sizes_worth_trying,
    written,
)

NON_FINITE_STEPS = 3
"""Number of consecutive steps without a finite loss that ends a run."""
LOG_EVERY, LINES = 50, 200
"""Steps between two lines about steps, fewer in short runs to give at least ``LINES`` lines."""
MONITORED = {"accuracy": "accuracy", "f1": "F1", "mean_iou": "mean IoU"}
MONITORED |= {"map": "mAP", "r2": "R2", "mae": "MAE", "rmse": "RMSE"}
"""Names of the scores that ``monitor`` selects."""
ERRORS = ("MAE", "RMSE")
"""Scores whose lower values are better."""
SOME_PX = (224, 224)
"""Height and width in pixels of a placeholder image for models without a fixed size."""


class Trainer:
    """A model with its optimizer, its images, and its progress.

    Args:
        config: the run.
        splits: the images.
        model: on its device.
        args: the arguments that rebuild the model, for the file of the best weights.
        device: device of the model.
        states: writes and reads the states; None: states are not saved.
        processes: the processes that train together. Each has a trainer, and all call the same
            methods in the same order.
        objective: the training objective; None: set by the task of the data.
        files: writes and reads the best weights of a head; None: they are the model's.
    """

    def __init__(
        self,
        config: TrainConfig,
        splits: Splits,
        model: nn.Module,
        args: dict[str, Any],
        device: torch.device,
        states: States | None = None,
        processes: Processes | None = None,
        objective: Objective | None = None,
        files: HeadFiles | None = None,
    ):
        self.config, self.splits, self.spec = config, splits, splits.spec
        self.save_best = files.save if files else save_model
        self.load_best = files.load if files else load_model
        self.model, self.args, self.device = model, args, device
        self.states, self.processes = states, processes or Processes()
        self.objective = objective or objective_of(splits.spec, config.optim, config.loss)
        self.measure = MONITORED.get(config.monitor or "", self.objective.measure)
        """The name of the score, which is printed and saved."""
        self.geometry = geometry_of(splits.spec, patch_size(model))
        self.leaves_out = takes_sizes(model)
        # Images.
        self.mix = make_mixup(config.optim, splits.spec.num_classes)
        self.batches = train_batches(
            splits,
            config.data,
            batch_size=config.batch_size,
            seed=config.seed,
            patch_px=patch_size(model),
        )
        if self.mix and getattr(self.batches, "weights", None) is not None:
            raise ValueError(
                "optim.mixup and optim.cutmix do not work with the column weight of "
                f"{config.data.labels}; remove them or the column"
            )
        parts = self.processes.data_rank, self.processes.data_size
        if isinstance(self.batches, StreamTrainBatches):  # only one process knows the order
            parts = self.processes.rank, self.processes.size
        self.batches.divide(*parts, pairs=self.mix is not None)
        self.validation = self.batches_of(splits.validation)
        # Model and optimizer.
        decay = config.optim.ema_decay
        self.ema = ModelEmaV3(model, decay=decay, use_warmup=True) if decay else None
        self.evaluated: nn.Module = self.ema.module if self.ema else model
        """The model to evaluate and save: the averaged weights if there are any."""
        kind = choose_kind(config, self.processes.size)
        self.called = self.objective.called(model)
        if kind == "sequence" and self.called is not model:
            raise ValueError("parallel sequence needs data.task classification; use ddp")
        self.spread = Spread(
            kind,
            self.called,
            self.ema.module if self.ema else None,
            compiled=config.compile,
            per_image=self.processes.per_image,
            timeout=timedelta(seconds=config.dist_timeout),
        )
        self.precision = precision_taken(config.amp, device)
        self.optimizer_step = OptimizerStep(
            model, config.optim, device, self.precision, loss=self.objective.loss
        )
        self.optimizer = self.optimizer_step.optimizer
        self.steps_per_epoch = steps = math.ceil(len(self.batches) / config.optim.accumulate)
        self.scheduler = make_scheduler(self.optimizer, config.optim, config.epochs, steps)
        # Progress.
        self.position, self.pace = Position(), Pace()
        self.sums, self.window = EpochSums(), EpochSums()
        """Sums of this epoch, and since the last line of metrics."""
        self.history: list[dict[str, Any]] = []
        self.only: int | None = None
        """The only class that the last epoch predicted; None: several."""
        self.progress = Progress(0)
        self.watched = nn.Identity() if config.compile or self.processes.size > 1 else model
        """The model whose blocks move the progress bar; compiled models cannot."""
        self.log_every = max(1, min(LOG_EVERY, config.epochs * steps // LINES))
        self.input_shape: tuple[int, ...] = self.shape_of(config.batch_size)
        """Shape of the last batch, ``[B, C, H, W]``."""
        self.clock: float | None = None
        """Time of the last ``count_time``; None while time does not count."""

    def batches_of(self, dataset: Dataset) -> EvalBatches | StreamEvalBatches:
        """Return the evaluation batches of this process's part of the images."""
        batches = eval_batches(
            dataset,
            self.config.data,
            batch_size=self.config.batch_size,
            geometry=self.geometry,
        )
        batches.divide(self.processes.data_rank, self.processes.data_size)
        return batches

    def check_rows(self) -> None:
        """Raise ValueError if an image of known size has too few rows of patches for the processes
        that share it.
        """
        if self.processes.per_image == 1:
            return
        test = [] if self.splits.test is None else [self.batches_of(self.splits.test)]
        for batches in (self.batches, self.validation, *test):
            heights = batches.shapes()[:, 1]
            if len(known := heights[heights > 0]):
                rows = -(-int(known.min()) // patch_size(self.model)[0])
                cut_rows(rows, self.processes.per_image)

    def describe(self) -> list[str]:
        """Describe the run in two lines."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        frozen = sum(x.numel() for x in self.model.parameters() if not x.requires_grad)
        kept = "" if self.config.freeze is None else f" ({frozen:,} frozen)"
        geometry = training_geometry(self.spec, self.config.data)
        geometry = getattr(self.splits.train, "geometry", geometry)
        seen = f"preprocessing: {seen_as(self.splits.train, geometry)}"
        if self.geometry.fit == "pad" and not self.leaves_out:
            seen += f"; {self.config.model.name} sees padding as black"
        images = "{} training and {} validation images".format(*self.images())
        return [
            f"{self.config.model.name}: {count:,} parameters{kept}, {images}, {self.config.epochs} "
            f"epochs of {self.steps_per_epoch} steps on "
            f"{self.processes.describe(self.device, self.spread.kind)}"
            f"{'' if self.precision == 'none' else f' in {self.precision}'}",
            seen,
        ]

    @property
    def epochs_without_better(self) -> int:
        """Count the epochs since the best weights; 0 before there are any."""
        best = self.position.best_epoch
        return self.position.epoch - best if best else 0

    @property
    def done(self) -> bool:
        """Tell whether the training is over: all epochs are done, or it stops early."""
        patience = self.config.patience
        early = patience is not None and self.epochs_without_better >= patience
        return early or self.position.epoch >= self.config.epochs

    def where(self) -> str:
        """Return the current phase of the run in words."""
        if self.done:
            return "the training is done, the test is not"
        return f"epoch {self.position.epoch + 1} of {self.config.epochs}"

    def fit(self, record: Record, interruption: Interruption) -> None:
        """Train the remaining epochs; after each epoch validate, and save the best weights and the
        state.

        A state is also saved before the first step, so that a run killed early can resume.

        Raises:
            NonFinite: the loss is not finite for several steps in a row, in a validation, or in
                every step.
            ValueError: all epochs are done, and the best weights are lost.
        """
        position = self.position
        if position.epoch >= self.config.epochs and not position.best_epoch:
            raise ValueError(
                f"all {position.epoch} epochs are done, but their best weights are lost; pass "
                f"--epochs {position.epoch + 1} to train one more"
            )
        self.clock = time.perf_counter()
        if self.states and self.states.step is None:
            self.save(record)
        while not self.done:
            self.train_epoch(record, interruption)
            model, tally = self.spread.whole(self.evaluated), Tally.of(self.spec)
            result = self.evaluate(
                model, self.validation, interruption, record, "validation images", tally
            )
            self.close_epoch(model, result, tally, record)
            del model, result, tally
        self.clock = None
        if position.epoch < self.config.epochs:
            metric = self.measure if position.best != NO_SCORE else "loss"
            metric = "validation loss" if self.config.monitor == "loss" else metric
            record.say(
                f"stopped early: no better {metric} for {self.epochs_without_better} epochs; best "
                f"epoch {position.best_epoch}"
            )
        if position.step and position.skipped == position.step:
            raise NonFinite(
                f"none of the {position.step} steps had a finite loss and gradient, so the "
                "weights did not change; try a lower optim.lr"
            )

    def train_epoch(self, record: Record, interruption: Interruption) -> None:
        """Train the remaining batches of the current epoch."""
        position, every = self.position, self.config.save_every
        begin_training(self.model, self.config.freeze)
        name = f"epoch {position.epoch + 1}/{self.config.epochs}"
        self.progress = record.begin(name, len(self.batches), position.batch, "batches")
        batches = interruption.watch(self.batches.epoch(position.epoch, start=position.batch))
        start = time.perf_counter()
        # A group of batches makes one optimizer step; processes agree on the group and on errors
        # in data loading.
        while group := self.processes.together(
            lambda: list(islice(batches, self.config.optim.accumulate))
        ):
            if images := self.images_of(group):
                waited = time.perf_counter() - start
                with self.progress.within(self.watched, len(group)):
                    outcome = self.step(group)
                position.step += 1
                self.count(group, images, *outcome, waited, time.perf_counter() - start, record)
            position.batch += len(group)
            if self.states and every and position.step % every == 0:
                self.save(record)
            start = time.perf_counter()

    def step(self, group: list[Batch]) -> tuple[float, float, bool]:
        """Do one optimizer step on a group of batches.

        Each loss is divided by the number of images in the group. So the gradient is the mean over
        all images, independent of batches and processes.

        Args:
            group: the batches. A process without images in a batch runs the model on a placeholder
                with weight 0, because the others wait for it.

        Returns:
            The mean loss, the gradient norm before clipping, and whether the weights were updated.
            A non-finite loss or gradient causes no update.
        """
        total, size, epoch = self.images_of(group), self.processes.size, self.position.epoch
        self.optimizer.zero_grad(set_to_none=True)
        losses = []
        for number, batch in enumerate(group, start=self.position.batch):
            # All processes that share an image count its loss.
            share = len(batch.labels) / (total * self.processes.per_image)
            if not len(batch.labels):
                if size == 1:
                    continue
                batch = self.placeholder()
            self.input_shape = tuple(batch.images.shape)
            # The index of the batch in its epoch seeds its random draws, for any number of
            # processes.
            seed_batch(self.config.seed, epoch, number, self.processes.data_rank)
            inputs, targets = self.inputs(batch)
            forward = self.forward_of(batch, targets)
            with self.spread.summing(number == self.position.batch + len(group) - 1):
                # Multiply by the number of processes, because their gradients are averaged.
                weights = None if batch.weights is None else batch.weights.to(self.device)
                loss = self.optimizer_step.add_gradients(
                    forward, inputs, targets, weights=weights, share=share, factor=size
                )
            losses.append(loss)
        # Read loss and norm from the device in one transfer; they decide whether the step counts.
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

    def warm_up(self) -> None:
        """Run one backward pass on a placeholder, and change nothing.

        DDP orders its sums by its first pass; without this one, a resumed run with three processes
        would round differently.
        """
        if self.spread.kind not in ("ddp", "sequence"):
            return
        kept, batch = random_state(), self.placeholder()
        begin_training(self.model, self.config.freeze)
        inputs, targets = self.inputs(batch)
        with self.spread.summing(True):
            self.optimizer_step.add_gradients(self.forward_of(batch, targets), inputs, targets)
        self.optimizer.zero_grad(set_to_none=True)
        restore_random_state(kept)

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the model's input on its device, mixed if configured, and the targets: classes of
        images or of pixels, or shares of classes.
        """
        labels = batch.labels.to(self.device, non_blocking=True)
        inputs = self.spec.prepare(batch.images.to(self.device, non_blocking=True))
        return (inputs, labels) if self.mix is None else mix_batch(self.mix, inputs, labels)

    def forward_of(self, batch: Batch, targets: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the forward pass of a batch in training."""
        called, sizes = self.spread.called, self.sizes_of(batch)
        return partial(self.objective.outputs, called, sizes=sizes, targets=targets)

    def sizes_of(self, batch: Batch) -> Tensor | None:
        """Return the size of each image without padding, for a model that skips padding."""
        return batch.sizes if self.leaves_out else None

    def images_of(self, group: list[Batch]) -> int:
        """Count the readable images of the batches, over all processes."""
        counted = self.processes.sum(sum(len(batch.labels) for batch in group))[0]
        return int(counted) // self.processes.per_image

    def placeholder(self) -> Batch:
        """Return a batch of one black image, for a process that has none."""
        channels = 1 if self.spec.encoding else self.spec.in_chans
        size = self.geometry.canvas or self.geometry.view(*SOME_PX).canvas
        image = torch.zeros(1, channels, *input_size(self.model, size), dtype=torch.uint8)
        return Batch(image, self.objective.targets(1, size))

    def shape_of(self, images: int) -> tuple[int, ...]:
        """Return the shape ``[B, C, H, W]`` of a batch, at the largest size if sizes differ."""
        size = (
            self.geometry.canvas or self.geometry.view(*(self.geometry.img_size or SOME_PX)).canvas
        )
        return (images, self.spec.in_chans, *size)

    def count(
        self,
        group: list[Batch],
        images: int,
        loss: float,
        norm: float,
        applied: bool,
        waited: float,
        seconds: float,
        record: Record,
    ) -> None:
        """Add a step to the sums, and write them if due.

        The step took ``seconds``, ``waited`` of them for its data.
        """
        position = self.position
        if applied:
            position.non_finite_in_a_row = 0
            position.images, position.stepped = position.images + images, position.stepped + seconds
            for sums in (self.sums, self.window):
                sums.add(loss, norm, images, waited, seconds)
        else:
            self.count_skipped(loss, group, record)
        if self.window.steps and position.step % self.log_every == 0:
            place = {"step": position.step, "epoch": position.epoch + 1}
            rate = {"lr": self.learning_rate(), "skipped": position.skipped}
            record.step(place | self.window.means() | rate)
            self.window = EpochSums()
        if self.pace.add(waited, seconds):
            record.say(self.pace.line(self.steps_left(), self.config.data.workers))
        note = f"loss {loss:.3f}, {images / max(seconds, 1e-9):.3g} images/s"
        self.progress.advance(len(group), note=note)

    def steps_left(self) -> float:
        """Return the remaining steps, with evaluations converted to steps by their pixels."""
        forward = forward_share(self.called, self.config.model.grad_checkpointing)
        trained, validated = (
            int(batches.shapes().prod(1).sum()) for batches in (self.batches, self.validation)
        )
        epochs = self.config.epochs - self.position.epoch
        done = self.position.batch / self.config.optim.accumulate
        return self.steps_per_epoch * epochs * (1 + forward * validated / trained) - done

    def count_skipped(self, loss: float, group: list[Batch], record: Record) -> None:
        """Count a step without an update; raise ``NonFinite`` at the third in a row without a
        finite loss or gradient.
        """
        position, scaler = self.position, self.optimizer_step.scaler
        position.skipped += 1
        record.event(
            "skipped", {"step": position.step, "epoch": position.epoch + 1, "loss": repr(loss)}
        )
        # Scaled fp16 gradients overflow now and then by design: the scaler then lowers its factor.
        if scaler.is_enabled() and math.isfinite(loss) and scaler.get_scale() >= 1:
            position.non_finite_in_a_row = 0
            return
        position.non_finite_in_a_row += 1
        what = "loss" if not math.isfinite(loss) else "gradient"
        record.say(f"step {position.step}: the {what} is not finite; no update")
        if position.non_finite_in_a_row >= NON_FINITE_STEPS:
            raise NonFinite(
                f"the {what} was not finite {NON_FINITE_STEPS} steps in a row, last at step "
                f"{position.step}; first at fault: {self.at_fault(group)}"
            )

    def at_fault(self, group: list[Batch]) -> str:
        """Run the batches of a step again, with the same mixing, and name the first module with
        non-finite values.
        """
        model = self.spread.whole(self.called, gradients=True)

        def forward(number: int, batch: Batch) -> None:
            seed_batch(self.config.seed, self.position.epoch, number, self.processes.data_rank)
            with autocast(self.device, self.precision):
                inputs, targets = self.inputs(batch)
                self.objective.outputs(model, inputs, self.sizes_of(batch), targets)

        numbered = enumerate(group, start=self.position.batch)
        runs = [partial(forward, number, batch) for number, batch in numbered if len(batch.labels)]
        faults = self.processes.gather(name_fault(model, runs))
        return min(faults, key=lambda fault: fault.startswith(("the gradient", "nothing")))

    def learning_rate(self) -> float:
        """Return the learning rate of the next step, the highest of all parameter groups."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def evaluate(
        self,
        model: nn.Module,
        batches: EvalBatches | StreamEvalBatches,
        interruption: Interruption,
        record: Record,
        what: str,
        tally: Tally,
        spec: DataSpec | None = None,
    ) -> Evaluation:
        """Evaluate in the training precision. ``what`` names the images, ``tally`` records each
        prediction, and ``spec`` has the thresholds (None: choose them).

        Raises:
            NonFinite: the loss is not finite.
        """
        self.input_shape = self.shape_of(-(-self.config.batch_size // self.processes.data_size))
        with record.begin(what, len(batches), 0, "batches") as progress, progress.within(model):
            result = evaluate(
                self.spread.evaluated(model),
                progress.over(interruption.watch(batches), lambda _: 1),
                spec or self.spec,
                device=self.device,
                amp=self.precision,
                processes=self.processes,
                objective=self.objective,
                tally=tally if self.processes.counts else None,
            )
        if not math.isfinite(result.loss):
            raise NonFinite(
                f"the loss on the {what} is {result.loss} ({self.where()}): the outputs are not "
                "finite; try a lower optim.lr"
            )
        return result

    def keep_classes(
        self,
        split: SplitName,
        tally: Tally,
        batches: EvalBatches | StreamEvalBatches,
        record: Record,
        spec: DataSpec,
    ) -> None:
        """Write the predictions of the best weights to TensorBoard and, if images have classes, the
        results by class with the worst mistakes.

        Args:
            split: the evaluated split.
            tally: the predictions of this process.
            batches: the batches of this process.
            record: writes the files of the run.
            spec: the specification of the images, with the thresholds of the weights.
        """
        gathered = self.processes.gather((tally.rows(batches.numbers), tally.probabilities()))
        rows = np.concatenate([each for each, _ in gathered])
        found = [each for _, each in gathered if len(each)]
        probabilities = np.concatenate(found) if found else np.zeros((0, spec.num_classes))
        path, epoch = record.folder / BY_CLASS[split], self.position.best_epoch

        def keep() -> None:
            if len(rows) and spec.task in VECTOR_TASKS:
                ordered = rows[np.argsort(rows[:, -1], kind="stable")]  # for all process counts
                seen = self.geometry.describe()
                write_json(path, by_output(ordered, spec, split=split, epoch=epoch, seen=seen))
            elif len(rows):
                about = {"epoch": epoch, "root": self.config.data.root}
                inputs = getattr(self.splits, split)
                # Mistakes show images, even if the inputs are feature maps.
                images = getattr(inputs, "pictures", inputs)
                geometry = getattr(inputs, "geometry", self.geometry)
                found = by_class(rows, images, spec, geometry, split=split, **about)
                write_json(path, found)
            # The step after the last one: a run that is resumed later drops the test.
            step = self.position.step + (split == "test")
            record.predictions(split, step, spec, tally, rows, probabilities)

        self.processes.on_first(keep)

    def close_epoch(
        self, model: nn.Module, result: Evaluation, tally: Tally, record: Record
    ) -> None:
        """Save the weights if they are the best so far; write and print the epoch's metrics, then
        save the state.

        With this order, a kill at any moment leaves an earlier state, from which the same epoch can
        be repeated.
        """
        position = self.position
        score = result.value(self.measure)
        figures = BestFigures(position.epoch + 1, score, result.loss)
        higher = self.rank(*figures.rank) > self.rank(position.best, position.best_loss)
        better = higher or not position.best_epoch
        # Save the best weights before the state: after a kill, their file tells their metrics.
        # Write results by class before the weights, which are not evaluated again once saved.
        if better:
            position.best, position.best_loss = figures.rank
            position.best_epoch = figures.epoch
            name, notes = self.config.model.name, figures.notes()
            spec = with_thresholds(self.spec, result)
            self.keep_classes("validation", tally, self.validation, record, spec)
            self.processes.on_first(
                lambda: self.save_best(
                    record.folder / BEST, model, name, self.args, spec, notes=notes
                )
            )
        self.count_time()
        self.share_unreadable()
        means = self.sums.means()
        values = {
            "epoch": position.epoch + 1,
            "step": position.step,
            "train_loss": means["loss"],
            "images_per_second": means["images_per_second"],
            "wait_share": means["wait_share"],
            "val_loss": result.loss,
            "val_accuracy": result.accuracy,
            "val_top5": result.top5,
            **({} if result.mean_iou is None else {"val_mean_iou": result.mean_iou}),
            **({"val_f1": result.f1} if self.config.monitor == "f1" else {}),
            **{f"val_{name}": x for name, x in mean_figures(result).items()},
            "lr": self.learning_rate(),
            "skipped": position.skipped,
            "left_out": self.batches.left_out + self.validation.left_out,
            "seconds": round(position.epoch_seconds, 3),
        }
        # Then the metrics, and the state last: all that it counts as done is on the disk.
        position.epoch, position.batch, position.epoch_seconds = position.epoch + 1, 0, 0.0
        self.sums = EpochSums()
        self.history.append(values)
        more = {f"val_{key}": value for key, value in pixel_figures(result).items()}
        record.epoch(self.history, more)
        unreadable = sorted(self.batches.unreadable | self.validation.unreadable)
        before = self.history[-2]["left_out"] if len(self.history) > 1 else 0
        if unreadable and values["left_out"] != before:
            place = {"step": position.step, "epoch": position.epoch}
            record.event("unreadable", place | {"images": unreadable})
        self.save(record)
        reached = "" if score is None else f"  {self.measure} {written(score, self.measure)}"
        record.say(
            f"epoch {position.epoch:{len(str(self.config.epochs))}}/{self.config.epochs}  loss "
            f"{values['train_loss']:.4f}  validation loss {result.loss:.4f}{self.objective.unit}"
            f"{reached}{' *' if better else '  '}  lr {self.learning_rate():.1e}  "
            f"{values['seconds']:.1f} s"
        )
        advice = [overfitting(self.history)]
        if (
            self.objective.learns_labels and result.only != self.only
        ):  # once, not after each epoch that predicts the same class
            advice.append(one_class(result.only, self.spec))
        self.only = result.only
        for line in filter(None, advice):
            record.say(line)

    def rank(self, score: float, loss: float) -> tuple[float, ...]:
        """Return a key that is larger for better weights; arguments as for ``Objective.rank``."""
        if self.config.monitor is None:
            return self.objective.rank(score, loss)
        if self.config.monitor == "loss":
            return (-loss,)
        return (-score if self.measure in ERRORS and score != NO_SCORE else score,)

    def finish(self, record: Record, interruption: Interruption) -> Result:
        """Load the best weights from the disk, and evaluate them once on the test images."""
        checkpoint, test = record.folder / BEST, None
        if self.splits.test is not None:
            model = self.processes.on_first(lambda: self.load_best(checkpoint)).to(self.device)
            spec, tally = model.data_spec, Tally.of(self.spec)
            images = self.batches_of(self.splits.test)
            test = self.evaluate(model, images, interruption, record, "test images", tally, spec)
            self.keep_classes("test", tally, images, record, spec)
            figures = {"accuracy": test.accuracy, "top5": test.top5, "loss": test.loss}
            figures |= {"images": test.images} | mean_figures(test) | pixel_figures(test)
            record.event("test", {"step": self.position.step} | figures)
        position = self.position
        result = Result(
            record.folder,
            checkpoint,
            position.seconds,
            position.images / max(position.stepped, 1e-9),
            position.best_epoch,
            position.best if position.best != NO_SCORE else None,
            test,
            sizes_worth_trying(self.model, self.geometry),
            self.measure,
            self.objective.unit,
        )
        record.finish(result, position.step + 1)
        return result

    def count_time(self) -> None:
        """Add the time since the last call to the time of the epoch and of the run."""
        if self.clock is not None:
            now = time.perf_counter()
            self.position.seconds += now - self.clock
            self.position.epoch_seconds += now - self.clock
            self.clock = now

    def save(self, record: Record) -> None:
        """Flush the record to the disk, then save the state."""
        self.count_time()
        record.sync()
        state = self.state()
        self.processes.on_first(lambda: self.states.save(state))
        self.states.step = self.position.step

    def share_unreadable(self) -> None:
        """Share the unreadable images among all processes."""
        for batches in (self.batches, self.validation):
            for paths in self.processes.gather(sorted(batches.unreadable)):
                batches.unreadable.update(paths)

    @cached_property
    def listing(self) -> dict[str, Any] | None:
        """Return the names of the classes and a digest of each image; None for images without
        files.
        """
        parts = {name: getattr(self.splits, name) for name in PARTS}
        if not any(isinstance(part, ImageDataset) for part in parts.values()):
            return None
        return {"class_names": list(self.spec.class_names)} | {
            # not all versions of torch save unsigned 32-bit integers
            name: torch.from_numpy(part.digests().astype(np.int64))
            for name, part in parts.items()
            if part is not None
        }

    def images(self) -> list[int]:
        """Count the training and validation images."""
        return [len(self.splits.train), len(self.splits.validation)]

    def state(self) -> dict[str, Any]:
        """Return the state for resume, as plain types and whole tensors for any number of
        processes. The schedule follows from ``position.step``.
        """
        self.share_unreadable()
        return {
            "name": self.config.model.name,
            "args": complete(self.config.model.name, self.args),
            "data": self.spec.stored(),
            "config": asdict(self.config),
            "model": whole_tensors(self.model.state_dict()),
            "ema": whole_tensors(self.ema.module.state_dict()) if self.ema else None,
            "optimizer": whole_tensors(self.optimizer.state_dict()),
            "scaler": self.optimizer_step.scaler.state_dict(),
            "position": asdict(self.position),
            "sums": asdict(self.sums),
            "window": asdict(self.window),
            "history": self.history,
            "images": self.images(),
            "listing": self.listing,
            "unreadable": sorted(self.batches.unreadable),
            "random": random_state(),
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Restore a state that ``state()`` returned.

        Returns:
            Lines about the position of the state and the changed options.

        Raises:
            ValueError: the state has other images, another optimizer, or no averaged weights
                although they are required, or is from the middle of an epoch with other batches.
        """
        done = state["position"]["epoch"]
        if self.config.epochs < done:
            raise ValueError(
                f"expected epochs at least {done}, which the run has finished, got "
                f"{self.config.epochs}"
            )
        changed = check_options(
            state["config"],
            asdict(self.config),
            amid_epoch=state["position"]["batch"] > 0,
            done=done >= self.config.epochs,
        )
        found = changes(state["listing"], self.listing, self.splits)
        features, was, now = self.config.data.features, state["data"]["mean"], self.spec.mean
        refuse(
            (
                state["images"] != self.images(),
                "expected {} training and {} validation images, as in the run, got {} and {}; "
                "resume with the same images, or pass --overwrite to start over".format(
                    *state["images"], *self.images()
                ),
            ),
            (
                found,
                f"the images changed since the start of the run: {found}; resume with the same "
                "images, or pass --overwrite to start over",
            ),
            (
                (state["data"]["colours"] or ()) != (self.spec.colours or ()),
                "the mask values had other classes at the start of the run; pass --overwrite to "
                "start over",
            ),
            (
                features is not None and (len(was) != len(now) or not np.allclose(was, now)),
                f"data.features {features} changed since the start of the run; resume with the "
                "same features, or pass --overwrite to start over",
            ),
        )
        load_whole(self.model, state["model"])
        if self.ema:
            load_whole(self.ema.module, state["ema"])
        restore_optimizer(self.optimizer, cut_optimizer_state(self.optimizer, state["optimizer"]))
        scaler = self.optimizer_step.scaler
        if scaler.is_enabled() and state["scaler"]:  # else the precision has changed
            scaler.load_state_dict(state["scaler"])
        self.position = Position(**state["position"])
        self.sums, self.window = EpochSums(**state["sums"]), EpochSums(**state["window"])
        self.history = state["history"]
        self.batches.unreadable.update(state["unreadable"])
        self.scheduler.step_update(self.position.step)
        restore_random_state(state["random"])  # the loaders have their own generators
        return [
            f"resumes after epoch {self.position.epoch}, step {self.position.step}",
            *changed,
        ]


def forward_share(model: nn.Module, checkpointing: bool) -> float:
    """Return the ratio of the time of a forward without gradients to the time of a step: 1/3 (with
    gradient checkpointing 1/4), and more in proportion to the number of frozen parameters.
    """
    sizes = [(x.numel(), x.requires_grad) for x in model.parameters()]
    trained = sum(size for size, learns in sizes if learns) / sum(size for size, _ in sizes)
    return 1 / (1 + (3 if checkpointing else 2) * trained)


def pixel_figures(result: Evaluation) -> dict[str, Any]:
    """Return the metrics that only segmentation has."""
    if result.mean_iou is None:
        return {}
    keys = ("mean_iou", "ious", "average_precisions")
    return {key: getattr(result, key) for key in keys}


def mean_figures(result: Evaluation) -> dict[str, float | None]:
    """Return the means that only ``VECTOR_TASKS`` have, by their names for ``monitor``."""
    if not isinstance(result, OutputEvaluation):
        return {}
    return {name.lower(): x for name, x in result.outputs.means.items()}


def with_thresholds(spec: DataSpec, result: Evaluation) -> DataSpec:
    """Return the specification with the thresholds of an evaluation, if it has some."""
    if spec.task != "multilabel":
        return spec
    assert isinstance(result, OutputEvaluation)
    return replace(spec, thresholds=tuple(result.outputs.columns["threshold"]))
