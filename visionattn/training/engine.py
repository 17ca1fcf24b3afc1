"""A whole run: every check first, then training, validation after each epoch, and the test of the best weights.

Owns the order of these, and what is kept of a run that ends early. A step is the matter of ``trainer.py``.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import numpy as np
import torch

from visionattn.measure import is_out_of_memory
from visionattn.models.weights import first_line
from visionattn.training.build import build_model, check_img_size, pick_device
from visionattn.training.checkpoint import place_weights
from visionattn.training.config import TrainConfig, check
from visionattn.training.data import build_splits
from visionattn.training.interrupt import Failed, Interrupted, Interruption, OutOfMemory, Stopped
from visionattn.training.progress import Result
from visionattn.training.record import BEST, LAST, Record, clear, run_folder
from visionattn.training.states import States, recall_best
from visionattn.training.status import Status
from visionattn.training.trainer import Trainer
from visionattn.training.validate import provenance


def train(config: TrainConfig, *, stream: TextIO | None = None) -> Result:
    """Train as configured; nothing is written before data, model, sizes and weights to start from are known to be
    right.

    Args:
        config: the run; ``config.run`` names its folder.
        stream: where to print; None: standard output.

    Raises:
        ValueError, FileNotFoundError: something about the configuration, the data or a checkpoint is wrong; one line.
        OSError: a file or a folder cannot be read or written.
        NonFinite: the loss was not finite several steps in a row.
        OutOfMemory: there is too little memory for a step or an evaluation.
        Failed: a process that loads data ended.
        Stopped: Ctrl-C or SIGTERM; the state is saved.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun and its like set it
        raise ValueError("training on several processes is not built yet; start one process")
    check(config)
    folder = run_folder(config)
    states = States(folder)
    resumed = config.resume and states.exist()
    device = pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    seed_everything(config.seed)
    splits = build_splits(config.data, config.seed)
    model, args = build_model(config.model, splits.spec)
    check_img_size(model, [config.data.img_size, *(config.data.img_size_choices or [])])
    first_lines = []
    if config.init_from and not resumed:
        first_lines = place_weights(model, config.model.name, config.init_from).lines()
    trainer = Trainer(config, splits, model.to(device), args, device, states)
    if resumed:
        first_lines = go_on(trainer, states)
    elif config.resume:
        first_lines.insert(0, "no state was saved yet: begins anew")
    fresh = not folder.exists()
    if not (fresh or resumed):
        clear(folder)
    try:
        with Status(folder, provenance(device)) as status:
            status.result = run(trainer, states, first_lines, stream)
            return status.result
    except (ValueError, FileNotFoundError):
        if not states.exist():  # an image that cannot be read, met before the first state
            clear(folder)
            if fresh:
                folder.rmdir()
        raise


def go_on(trainer: Trainer, states: States) -> list[str]:
    """Restore the newest state that can be read; returns what there is to say of it."""
    state, lines = states.load(trainer.model, trainer.config.model.name)
    return [*lines, *trainer.restore(state), *recall_best(trainer.position, states.folder / BEST)]


def run(trainer: Trainer, states: States, first_lines: list[str], stream: TextIO | None) -> Result:
    """Train and test, with a record; an end that comes early says what is kept of the run."""
    position = trainer.position
    since = (position.step, position.epoch)
    with (
        early_ends(trainer, states),
        Record(states.folder, trainer.config, since=since, stream=stream) as record,
        Interruption() as interruption,
    ):
        for line in [*trainer.describe(), *first_lines]:
            record.say(line)
        try:
            trainer.fit(record, interruption)
            return trainer.finish(record, interruption)
        except Interrupted as error:
            trainer.save(record)
            where = f"stopped after step {position.step} ({trainer.where()})"
            raise Stopped(f"{where}; the state is in {states.folder / LAST}") from error


@contextmanager
def early_ends(trainer: Trainer, states: States) -> Iterator[None]:
    """Say of a full disk, of too little memory and of a loader's process that ended what is kept and what helps."""
    try:
        yield
    except OSError as error:
        raise states.explain(error) from error
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            images, _, height, width = trainer.input_shape
            raise OutOfMemory(
                f"out of memory at batches of {images} images of {height} x {width} pixels; a smaller batch_size with "
                "optim.accumulate raised for it does the same steps in less, and so does gradient checkpointing "
                f"(set_grad_checkpointing of the model); {states.kept()}"
            ) from error
        if "DataLoader worker" in str(error):
            raise Failed(f"a process that loads data ended: {first_line(error)}; {states.kept()}") from error
        raise


def seed_everything(seed: int) -> None:
    """Seed every global generator: weights, dropout and mixing draw from them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
