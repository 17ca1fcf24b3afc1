"""A model in training: what an epoch is, the best weights, and the state to go on from.

The loop is here. The step, data, evaluation, files and interruption have modules of their own.
"""

import math
import time
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from visionattn.cli.ends import NonFinite
from visionattn.cli.interruption import Interruption
from visionattn.cli.progress import Progress
from visionattn.cli.untrusted import brief
from visionattn.data.batches import Batch, EvalBatches
from visionattn.data.drawn_images import seen_as
from visionattn.data.images import ImageDataset
from visionattn.data.splits import Splits, eval_batches, train_batches
from visionattn.data.streams import StreamEvalBatches, StreamTrainBatches
from visionattn.models.building import patch_size
from visionattn.models.large.row_parallel import cut_rows
from visionattn.models.machine import random_state, restore_random_state
from visionattn.models.registration import complete
from visionattn.models.weights import load_model, save_model
from visionattn.training.config import TrainConfig
from visionattn.training.distributed import Processes
from visionattn.training.evaluate import Evaluation, Tally, evaluate
from visionattn.training.learner import Learner
from visionattn.training.mistakes import SplitName, by_class, write_by_class
from visionattn.training.objective import Objective
from visionattn.training.progress import (
    Position,
    Result,
    WaitWatch,
    Window,
    sizes_worth_trying,
    waiting,
)
from visionattn.training.record import BEST, BY_CLASS, Record
from visionattn.training.states import (
    PARTS,
    BestFigures,
    States,
    changes,
    check_options,
    completed,
    differences,
)

NON_FINITE_STEPS = 3
"""Steps in a row without a finite loss that end a run."""
LOG_EVERY, LINES = 50, 200
"""Steps between two lines about steps where nothing is asked for; fewer, so that a run has so many
lines.
"""


class Trainer(Learner):
    """A learner with its images, epoch by epoch.

    Args:
        config: the run.
        splits: the images.
        model: on its device.
        args: the arguments that build it again, for the best weights' file.
        device: where to compute.
        states: where the states go; None: they are not kept.
        processes: those that train together; each has a trainer, and all call the same methods in
            the same order.
        objective: what the model learns; None: the classes of the images.
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
    ):
        self.splits, self.args = splits, args
        self.states = states
        self.batches = train_batches(
            splits,
            config.data,
            batch_size=config.batch_size,
            seed=config.seed,
            patch_px=patch_size(model),
        )
        steps = math.ceil(len(self.batches) / config.optim.accumulate)
        super().__init__(
            config, model, splits.spec, device, steps, processes or Processes(), objective
        )
        parts = self.processes.data_rank, self.processes.data_size
        if isinstance(self.batches, StreamTrainBatches):  # of which one process alone has the order
            parts = self.processes.rank, self.processes.size
        self.batches.divide(*parts, pairs=self.mix is not None)
        self.eval_batch_size = config.eval_batch_size or config.batch_size
        self.validation = self.batches_of(splits.validation)
        self.window = Window()
        self.waits = WaitWatch()
        self.history: list[dict[str, Any]] = []
        self.progress = Progress(0)
        self.watched = nn.Identity() if config.compile or self.processes.size > 1 else model
        """Whose blocks show how far a step has come; compiled ones show nothing."""
        self.log_every = config.log_every or max(1, min(LOG_EVERY, config.epochs * steps // LINES))
        self._listing: dict[str, Any] | None = None
        self.clock: float | None = None
        """When the time was last counted; None while it is not."""

    def batches_of(self, dataset: Dataset) -> EvalBatches | StreamEvalBatches:
        """Return batches of the images to evaluate on that this process takes."""
        batches = eval_batches(
            dataset,
            self.config.data,
            batch_size=self.eval_batch_size,
            geometry=self.geometry,
        )
        batches.divide(self.processes.data_rank, self.processes.data_size)
        return batches

    def check_rows(self) -> None:
        """Raise ValueError where an image has too few rows of patches for the processes that share
        it, as far as sizes are known.
        """
        if self.processes.per_image == 1:
            return
        test = [] if self.splits.test is None else [self.batches_of(self.splits.test)]
        for batches in (self.batches, self.validation, *test):
            heights = batches.shapes()[:, 1]
            if len(known := heights[heights > 0]):
                cut_rows(
                    -(-int(known.min()) // patch_size(self.model)[0]), self.processes.per_image
                )

    def describe(self) -> list[str]:
        """Describe the run in a line or two."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        seen = f"preprocessing: {seen_as(self.splits.train, self.geometry)}"
        if self.geometry.fit == "pad" and not self.leaves_out:
            seen += f"; {self.config.model.name} sees the rest as black"
        images = "{} training and {} validation images".format(*self.images())
        return [
            f"{self.config.model.name}: {count:,} parameters, {images}, {self.config.epochs} "
            f"epochs of {self.steps_per_epoch} steps on "
            f"{self.processes.describe(self.device, self.spread.kind)}",
            seen,
        ]

    def where(self) -> str:
        """Say what the run is doing, for people."""
        if self.position.epoch == self.config.epochs:
            return "all epochs are done, the test images are not"
        return f"epoch {self.position.epoch + 1} of {self.config.epochs}"

    def fit(self, record: Record, interruption: Interruption) -> None:
        """Train the epochs that are left, each followed by validation, the best weights and the
        state.

        A state is saved before the first step, so that a run that is killed early can go on.

        Raises:
            NonFinite: the loss is not finite for several steps in a row, in a validation, or in
                every step.
            ValueError: nothing is left to train, and the best weights are lost.
        """
        if self.position.epoch >= self.config.epochs and not self.position.best_epoch:
            raise ValueError(
                f"all {self.position.epoch} epochs are done and their best weights are lost; "
                f"--epochs {self.position.epoch + 1} trains one more and keeps its weights"
            )
        self.clock = time.perf_counter()
        if self.states and self.states.step is None:
            self.save(record)
        while self.position.epoch < self.config.epochs:
            self.train_epoch(record, interruption)
            model, tally = self.spread.whole(self.evaluated), Tally()
            result = self.evaluate(
                model, self.validation, interruption, record, "validation images", tally
            )
            self.close_epoch(model, result, tally, record)
            del model, result, tally
        self.clock = None
        if self.position.step and self.position.skipped == self.position.step:
            raise NonFinite(
                f"none of the {self.position.step} steps had a finite loss and gradient: nothing "
                "was learnt"
            )

    def count_time(self) -> None:
        """Add the time since the last call to that of the epoch and of the run."""
        if self.clock is not None:
            now = time.perf_counter()
            self.position.seconds += now - self.clock
            self.position.epoch_seconds += now - self.clock
            self.clock = now

    def save(self, record: Record) -> None:
        """Save the state, after the lines of the record that led to it."""
        self.count_time()
        record.sync()
        state = self.state()
        self.processes.on_first(lambda: self.states.save(state))
        self.states.step = self.position.step

    def train_epoch(self, record: Record, interruption: Interruption) -> None:
        """Train the batches that are left of the current epoch."""
        position, every = self.position, self.config.save_every
        self.model.train()
        name = f"epoch {position.epoch + 1}/{self.config.epochs}"
        self.progress = record.begin(name, len(self.batches), position.batch, "batches")
        batches = interruption.watch(self.batches.epoch(position.epoch, start=position.batch))
        start = time.perf_counter()
        # A group of batches makes one optimiser step; processes agree on it, and on errors of
        # loading.
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
        """Add a step to the sums, and write them when they are due.

        The step took ``seconds``, ``waited`` of them for its data.
        """
        position = self.position
        if applied:
            position.add(loss, images, waited, seconds)
            position.non_finite_in_a_row = 0
            self.window.add(loss, norm, images, waited, seconds)
        else:
            self.count_skipped(loss, group, record)
        if self.window.steps and position.step % self.log_every == 0:
            place = {"step": position.step, "epoch": position.epoch + 1}
            record.step(
                place
                | self.window.means()
                | {"lr": self.learning_rate(), "skipped": position.skipped}
            )
            self.window = Window()
        if share := self.waits.add(waited, seconds):
            record.say(waiting(share, self.config.data.workers))
        note = f"loss {loss:.3f}, {images / max(seconds, 1e-9):.3g} images/s"
        self.progress.advance(len(group), note=note)

    def count_skipped(self, loss: float, group: list[Batch], record: Record) -> None:
        """Count a step without an update; raise ``NonFinite`` at the third in a row without a
        finite loss or gradient.
        """
        self.position.skipped += 1
        record.event(
            "skipped",
            {"step": self.position.step, "epoch": self.position.epoch + 1, "loss": repr(loss)},
        )
        # A scaled fp16 gradient overflows now and then by design: the scaler lowers its factor
        # until it fits.
        scaler = self.optimizer_step.scaler
        if scaler.is_enabled() and math.isfinite(loss) and scaler.get_scale() >= 1:
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

    def evaluate(
        self,
        model: nn.Module,
        batches: EvalBatches | StreamEvalBatches,
        interruption: Interruption,
        record: Record,
        what: str,
        tally: Tally,
    ) -> Evaluation:
        """Evaluate in the precision of the training; ``what`` says on which images, and ``tally``
        notes what is said of each.
        """
        self.input_shape = self.shape_of(-(-self.eval_batch_size // self.processes.data_size))
        with record.begin(what, len(batches), 0, "batches") as progress, progress.within(model):
            return evaluate(
                self.spread.evaluated(model),
                progress.over(interruption.watch(batches), lambda _: 1),
                self.spec,
                device=self.device,
                amp=self.config.amp,
                processes=self.processes,
                objective=self.objective,
                tally=tally if self.processes.counts else None,
            )

    def keep_classes(
        self,
        split: SplitName,
        tally: Tally,
        batches: EvalBatches | StreamEvalBatches,
        record: Record,
    ) -> None:
        """Write what the best weights say of each class of a split, and their worst mistakes;
        nothing where images have no classes.

        Args:
            split: which images were evaluated.
            tally: what this process has noted of its part of them.
            batches: this part.
        """
        rows = np.concatenate(self.processes.gather(tally.rows(batches.numbers)))
        if len(rows):
            keep = partial(by_class, rows, getattr(self.splits, split), self.spec, self.geometry)
            about = {"epoch": self.position.best_epoch, "root": self.config.data.root}
            self.processes.on_first(
                lambda: write_by_class(record.folder / BY_CLASS[split], keep(split=split, **about))
            )

    def close_epoch(
        self, model: nn.Module, result: Evaluation, tally: Tally, record: Record
    ) -> None:
        """Save the weights if they are the best so far; write and print the epoch's figures, then
        save the state.

        In this order a kill at any moment leaves the state of an earlier step, from which the same
        epoch follows again.

        Raises:
            NonFinite: the loss on the validation images is not finite; the best weights stay those
                of an earlier epoch.
        """
        position = self.position
        check_finite(result, f"the validation images of epoch {position.epoch + 1}")
        figures = BestFigures(position.epoch + 1, result.score, result.loss)
        rank = self.objective.rank
        better = rank(*figures.rank) > rank(position.best, position.best_loss)
        # Best weights first: if the process is killed now, their file says how good they are. What
        # they say of each class comes before them: once they are there, it is not written again.
        if better:
            position.best, position.best_loss = figures.rank
            position.best_epoch = figures.epoch
            name, notes = self.config.model.name, figures.notes()
            self.keep_classes("validation", tally, self.validation, record)
            self.processes.on_first(
                lambda: save_model(
                    record.folder / BEST, model, name, self.args, self.spec, notes=notes
                )
            )
        self.count_time()
        self.share_unreadable()
        values = {
            "epoch": position.epoch + 1,
            "step": position.step,
            **position.means(),
            "val_loss": result.loss,
            "val_accuracy": result.accuracy,
            "val_top5": result.top5,
            **({} if result.mean_iou is None else {"val_mean_iou": result.mean_iou}),
            "lr": self.learning_rate(),
            "skipped": position.skipped,
            "left_out": self.batches.left_out + self.validation.left_out,
            "seconds": round(position.epoch_seconds, 3),
        }
        # Then the figures, and the state last: what it counts as done is on the disk.
        position.next_epoch()
        self.history.append(values)
        more = {f"val_{key}": value for key, value in pixel_figures(result).items()}
        record.epoch(self.history, more)
        self.save(record)
        score = result.score
        reached = "" if score is None else f"  {self.objective.measure} {100 * score:.1f} %"
        record.say(
            f"epoch {position.epoch:{len(str(self.config.epochs))}}/{self.config.epochs}  loss "
            f"{values['train_loss']:.4f}  validation loss {result.loss:.4f}{self.objective.unit}"
            f"{reached}"
            f"{' *' if better else '  '}  lr "
            f"{self.learning_rate():.1e}  {values['seconds']:.1f} s"
        )

    def finish(self, record: Record, interruption: Interruption) -> Result:
        """Evaluate the best weights, as they are on the disk, once on the test images.

        Raises:
            NonFinite: their loss on the test images is not finite.
        """
        checkpoint, test = record.folder / BEST, None
        if self.splits.test is not None:
            model = self.processes.on_first(lambda: load_model(checkpoint)).to(self.device)
            images = self.batches_of(self.splits.test)
            tally = Tally()
            test = self.evaluate(model, images, interruption, record, "test images", tally)
            check_finite(test, "the test images")
            self.keep_classes("test", tally, images, record)
            record.event(
                "test",
                {
                    "step": self.position.step,
                    "accuracy": test.accuracy,
                    "top5": test.top5,
                    "loss": test.loss,
                    "images": test.images,
                }
                | pixel_figures(test),
            )
        best, speed = self.position, self.position.images_per_second()
        sizes = sizes_worth_trying(self.model, self.geometry)
        validation = best.best if best.best >= 0 else None
        return Result(
            record.folder,
            checkpoint,
            best.seconds,
            speed,
            best.best_epoch,
            validation,
            test,
            sizes,
            self.objective.measure,
            self.objective.unit,
        )

    def share_unreadable(self) -> None:
        """Let each process know which images the others have left out."""
        for batches in (self.batches, self.validation):
            for paths in self.processes.gather(sorted(batches.unreadable)):
                batches.unreadable.update(paths)

    def listing(self) -> dict[str, Any] | None:
        """Return what tells the images from others: the names of the classes, and a number for each
        image; None where images come from no files.
        """
        parts = {name: getattr(self.splits, name) for name in PARTS}
        if not any(isinstance(part, ImageDataset) for part in parts.values()):
            return None
        if self._listing is None:
            self._listing = {"class_names": list(self.spec.class_names)} | {
                # torch saves no unsigned numbers of 32 bits everywhere
                name: torch.from_numpy(part.digests().astype(np.int64))
                for name, part in parts.items()
                if part is not None
            }
        return self._listing

    def images(self) -> list[int]:
        """Count the images to train and to validate on."""
        return [len(self.splits.train), len(self.splits.validation)]

    def state(self) -> dict[str, Any]:
        """Return all that the run needs to go on, in plain types; the schedule follows from
        ``position.step``.
        """
        self.share_unreadable()
        return {
            "name": self.config.model.name,
            "args": complete(self.config.model.name, self.args),
            "data": asdict(self.spec),
            "config": asdict(self.config),
            **self.weights(),
            "position": asdict(self.position),
            "window": asdict(self.window),
            "history": self.history,
            "images": self.images(),
            "listing": self.listing(),
            "unreadable": sorted(self.batches.unreadable),
            "random": random_state(),
        }

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Go on from what ``state()`` returned.

        Returns:
            Lines that say from where, and which options differ from those that the state was saved
            with.

        Raises:
            ValueError: the state is of other images or of another optimiser, has no averaged
                weights where they are asked for, or is from the middle of an epoch of other
                batches.
        """
        old, new = completed(state["config"]), asdict(self.config)
        done = state["position"]["epoch"] >= self.config.epochs
        check_options(old, new, amid_epoch=state["position"]["batch"] > 0, done=done)
        if (images := state.get("images", self.images())) != self.images():
            raise ValueError(
                "the run has {} training and {} validation images, here are {} and {}; resume with "
                "the same".format(*images, *self.images())
            )
        if found := changes(state.get("listing"), self.listing(), self.splits):
            raise ValueError(
                f"the images are not those that the run began with: {found}; resume with the same, "
                "or --overwrite begins anew"
            )
        if (state["data"].get("colours") or ()) != (self.spec.colours or ()):
            raise ValueError(
                "the run took the values of its masks for other classes; --overwrite begins anew"
            )
        if state["position"]["batch"] > len(self.batches):
            raise ValueError(
                f"the state is of batch {brief(state['position']['batch'])} of an epoch that has "
                f"{len(self.batches)}; --overwrite starts the run anew"
            )
        self.load_weights(state)
        self.position, self.window = Position(**state["position"]), Window(**state["window"])
        self.history = state["history"]
        self.batches.unreadable.update(state["unreadable"])
        self.scheduler.step_update(self.position.step)
        restore_random_state(state["random"])  # the loaders draw from generators of their own
        return [
            f"goes on after epoch {self.position.epoch}, step {self.position.step}",
            *differences(old, new),
        ]


def pixel_figures(result: Evaluation) -> dict[str, Any]:
    """Return the figures of an evaluation that only classes of pixels have."""
    if result.mean_iou is None:
        return {}
    return {"mean_iou": result.mean_iou, "ious": result.ious}


def check_finite(result: Evaluation, images: str) -> None:
    """Raise ``NonFinite`` where the loss on these images is not finite, as a score beside it means
    nothing.
    """
    if not math.isfinite(result.loss):
        raise NonFinite(
            f"the loss on {images} is {result.loss}: the weights give values that are not finite"
        )
