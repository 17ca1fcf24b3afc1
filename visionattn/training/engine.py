"""A whole run: every check first, then training, validation after each epoch, and the test of the best weights.

Owns the order of these, and what is kept of a run that ends early. A step is the matter of ``trainer.py``.
"""

import os
import random
from typing import TextIO

import numpy as np
import torch

from visionattn.training.build import build_model, check_img_size, pick_device
from visionattn.training.checkpoint import load_state, place_weights, save_state
from visionattn.training.config import TrainConfig, check
from visionattn.training.data import build_splits
from visionattn.training.interrupt import Interrupted, Interruption, Stopped
from visionattn.training.progress import Result
from visionattn.training.record import LAST, Record, clear, run_folder
from visionattn.training.trainer import Trainer


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
        Stopped: Ctrl-C; the state is saved.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":  # torchrun and its like set it
        raise ValueError("training on several processes is not built yet; start one process")
    check(config)
    folder = run_folder(config)
    device = pick_device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    seed_everything(config.seed)
    splits = build_splits(config.data, config.seed)
    model, args = build_model(config.model, splits.spec)
    check_img_size(model, [config.data.img_size, *(config.data.img_size_choices or [])])
    placement = (
        place_weights(model, config.model.name, config.init_from) if config.init_from and not config.resume else None
    )
    trainer = Trainer(config, splits, model.to(device), args, device)
    changes = trainer.restore(load_state(folder / LAST, model, config.model.name)) if config.resume else []
    if config.overwrite and folder.is_dir():
        clear(folder)
    done, fresh = trainer.position, not folder.exists()
    with Record(folder, config, since=(done.step, done.epoch), stream=stream) as record, Interruption() as interruption:
        for line in [*trainer.describe(), *(placement.lines() if placement else []), *changes]:
            record.say(line)
        try:
            trainer.fit(record, interruption)
            return trainer.finish(record, interruption)
        except Interrupted as error:
            save_state(folder / LAST, trainer.state())
            raise Stopped(
                f"stopped after step {done.step} ({trainer.where()}); the state is in {folder / LAST}"
            ) from error
        except (ValueError, FileNotFoundError):
            if not (folder / LAST).exists():  # an image that cannot be read, met before the first state
                clear(folder)
                if fresh:
                    folder.rmdir()
            raise


def seed_everything(seed: int) -> None:
    """Seed every global generator: weights, dropout and mixing draw from them."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
