"""Read the flags of ``visionattn train`` into a ``TrainConfig`` with a run name."""

from collections.abc import Sequence
from pathlib import Path

from visionattn.cli.parsing import config_files, parse
from visionattn.data.option_ranges import fold_name
from visionattn.training.config import TrainConfig

EXAMPLE = "--config digits --epochs 1 --optim.warmup_epochs 0.5 --run try --overwrite"


def parse_train(argv: Sequence[str]) -> TrainConfig:
    """Read the flags of ``visionattn train``.

    Without ``run``, the run is named after its first configuration file, or after data and model.
    The name of a run on a fold ends in the fold.

    Raises:
        ValueError, FileNotFoundError: wrong flag or file; one line.
    """
    config = parse(
        TrainConfig, argv, command="train", description="Train a model.", example=EXAMPLE
    )
    files = config_files(argv)
    usual = Path(files[0]).stem if files else f"{config.data.name}_{config.model.name}"
    config.run, fold = config.run or usual, fold_name(config.data.fold)
    config.run += "" if fold in config.run else fold
    return config
