"""The flags of ``visionattn train``, read into a ``TrainConfig`` with a name for its folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from visionattn.cli.parsing import config_files, parse
from visionattn.training.config import TrainConfig

EXAMPLE = "--config digits --epochs 1 --optim.warmup_epochs 0.5 --run try --overwrite"
MOVED = {
    "data.aug": "--data.augment takes a preset, or a file of albumentations.save",
    "data.mask_classes": "it is classes of --data.masks, or of classes.yaml beside the masks",
    "data.mask_colours": "it is colours of --data.masks, or of classes.yaml beside the masks",
    "data.mask_ignored": "it is ignored of --data.masks, or of classes.yaml beside the masks",
    "data.num_classes": "it is --data.args.num_classes",
    "data.download": "it is --data.args.download",
    "data.range_found": "leave it out",
    "optim.warmup_lr": "the warm-up begins at 1e-6; leave it out",
    "eval_batch_size": "evaluation takes batch_size; leave it out",
    "log_every": "metrics.jsonl has a line every 50 steps, or 200 lines; leave it out",
    "sequence_ranks": "it is --parallel NUMBER",
    "init_model": "`visionattn convert` makes a file for --init_from",
}
"""Options of version 0.1 that are gone, and what takes their place."""


def parse_train(argv: Sequence[str]) -> TrainConfig:
    """Read the flags of ``visionattn train``.

    A run without a name has that of its first configuration file, or of its data and its model.

    Raises:
        ValueError, FileNotFoundError: a flag or a file is wrong; one line.
    """
    about = "Train a model."
    try:
        config = parse(TrainConfig, argv, command="train", description=about, example=EXAMPLE)
    except ValueError as error:
        raise ValueError(_with_place(str(error))) from error
    files = config_files(argv)
    config.run = config.run or (
        Path(files[0]).stem if files else f"{config.data.name}_{config.model.name}"
    )
    return config


def _with_place(message: str) -> str:
    """Return an error about an unknown option, with what takes the place of one that is gone."""
    unknown = re.search(r"unknown (?:option --|key )([\w.-]+)", message)
    for key, place in MOVED.items():
        if unknown and f"{unknown[1].replace('-', '_')}.".startswith(f"{key}."):
            return f"{message[: unknown.end()]} is gone: {place}"
    return message
