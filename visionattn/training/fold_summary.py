"""Summarize the finished folds of a cross-validation in a CSV file next to their run folders."""

from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from visionattn.cli.files import write_text
from visionattn.cli.tables import csv_text, markdown
from visionattn.cli.untrusted import read_yaml
from visionattn.data.option_ranges import fold_name, fold_of
from visionattn.training.checkpoint import BestFigures, best_figures
from visionattn.training.config import TrainConfig
from visionattn.training.run_folder import BEST, CONFIG, read_status


def summarise_folds(folder: Path, config: TrainConfig, measure: str) -> list[str]:
    """Write validation score and loss of the finished folds with this run's seed, with mean and
    sample standard deviation, and return the table as lines.

    Args:
        folder: the run folder; the folders of the other folds have its name with another fold.
        config: the configuration of the run.
        measure: the name of the score.
    """
    own, count = fold_name(config.data.fold), fold_of(config.data.fold)[1]
    if own not in folder.name:
        return [
            f"no summary over folds: expected {own} in the name of the run folder, got "
            f"{folder.name}"
        ]
    rows, missing = list[dict[str, Any]](), list[str]()
    for fold in (f"{number}/{count}" for number in range(1, count + 1)):
        run = folder.with_name(folder.name.replace(own, fold_name(fold)))
        if found := _finished(run, config.seed):
            score = {} if found.score is None else {measure: found.score}
            rows.append({"fold": fold, "best_epoch": found.epoch} | score | {"loss": found.loss})
        else:
            missing.append(fold)
    shared = [key for key in (measure, "loss") if all(key in row for row in rows)]
    values = {key: [row[key] for row in rows] for key in shared}
    for name, how in (("mean", mean), ("standard deviation", stdev)) if rows[1:] else ():
        empty = dict.fromkeys(rows[0]) | {"fold": name}
        rows.append(empty | {key: how(column) for key, column in values.items()})
    path = folder.with_name(folder.name.replace(own, "_folds") + ".csv")
    write_text(path, csv_text(rows, {}))
    absent = f"; missing: {', '.join(missing)}" if missing else ""
    shown = [
        {key: round(cell, 4) if isinstance(cell, float) else cell for key, cell in row.items()}
        for row in rows
    ]
    return [markdown(shown), f"summary of {count - len(missing)} of {count} folds: {path}{absent}"]


def _finished(run: Path, seed: int) -> BestFigures | None:
    """Return the best metrics of a finished run with this seed; None for other and unfinished
    runs.
    """
    with suppress(OSError, ValueError, LookupError, TypeError):  # missing or damaged
        finished = read_status(run).get("status") == "finished"
        if finished and read_yaml(run / CONFIG)["seed"] == seed:
            return best_figures(run / BEST)
    return None
