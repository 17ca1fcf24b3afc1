"""A sweep for TensorBoard's HParams page: a run per row of the table of all cells, all of them with
equal keys.
"""

import math
import shutil
from pathlib import Path

from visionattn.lab.sweep.grid import Cell, Network
from visionattn.lab.sweep.table import Outcome, records

METRICS = ("test_accuracy", "validation_accuracy", "train_seconds", "parameters", "flops")
METRICS += tuple(
    f"{name}_{what}"
    for name in ("inference", "training")
    for what in ("images_per_second", "peak_bytes")
)
PARAMETERS = (
    "attention",
    "heads",
    "head_dim",
    "form",
    "trained_form",
    "img_size",
    "seed",
    "status",
)


def write_hparams(folder: Path, outcome: Outcome) -> None:
    """Write the runs anew below ``folder``; what is not known is NaN, or the word "none"."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    shutil.rmtree(folder, ignore_errors=True)
    base = outcome.plan.base
    for row in records(outcome):
        shown = {key: "none" if row[key] is None else row[key] for key in PARAMETERS}
        shown |= {"epochs": base.epochs, "batch_size": base.batch_size, "lr": base.optim.lr}
        metrics = {
            f"sweep/{key}": math.nan if row[key] is None else float(row[key]) for key in METRICS
        }
        network = Network(row["attention"], row["heads"], row["form"], row["img_size"])
        with SummaryWriter(folder / Cell(network, row["seed"]).name) as writer:
            for part in hparams(shown, metrics):
                writer.file_writer.add_summary(part)
            for key, value in metrics.items():
                writer.add_scalar(key, value)
