"""Summarise the finished folds of a cross-validation in a CSV file next to their run folders."""

import io
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from visionattn.cli.files import write_text
from visionattn.cli.tables import write_rows
from visionattn.cli.untrusted import read_json, read_yaml
from visionattn.data.ranges import fold_name, fold_of
from visionattn.training.checkpoint import BestFigures, best_figures
from visionattn.training.config import TrainConfig
from visionattn.training.run_folder import BEST, CONFIG, STATUS


def summarise_folds(folder: Path, config: TrainConfig, measure: str) -> list[str]:
    """Write mean and standard deviation of score and loss over the finished folds with the seed of
    this run, and return lines about them.

    Args:
        folder: the run folder; the folders of the other folds have its name with another fold.
        config: the configuration of the run.
        measure: the name of the score.
    """
    own, count = fold_name(config.data.fold), fold_of(config.data.fold)[1]
    if own not in folder.name:
        return [f"no summary over folds: the name of the run folder needs {own}, got {folder.name}"]
    rows: list[dict[str, Any]] = []
    missing = []
    for number in range(1, count + 1):
        run = folder.with_name(folder.name.replace(own, fold_name(f"{number}/{count}")))
        found = _finished(run, config.seed)
        if found is None:
            missing.append(f"{number}/{count}")
        else:
            about = {"fold": number, "run": run.name, "best_epoch": found.epoch}
            rows.append(about | {measure: found.score, "loss": found.loss})
    lines = [f"summary of {len(rows)} of {count} folds on their validation images:"]
    deviations: dict[str, Any] = {"fold": "standard deviation"}
    means: dict[str, Any] = {"fold": "mean"}
    for name in (measure, "loss"):
        values = [row[name] for row in rows]
        if None in values:
            continue
        means[name], deviations[name] = mean(values), stdev(values) if values[1:] else None
        spread = "" if deviations[name] is None else f" +- {deviations[name]:.4f}"
        each = ", ".join(f"{value:.4f}" for value in values)
        lines.append(f"  {name} {means[name]:.4f}{spread} ({each})")
    text, path = io.StringIO(newline=""), folder.with_name(folder.name.replace(own, "_folds.csv"))
    write_rows(text, list(rows[0]), [*rows, means, deviations])
    write_text(path, text.getvalue())
    lines.append(f"  {path}")
    if missing:
        lines.append(f"  missing folds: {', '.join(missing)}; --data.fold {missing[0]} trains one")
    return lines


def _finished(run: Path, seed: int) -> BestFigures | None:
    """Return the best metrics of a finished run with this seed; None for other and unfinished
    runs.
    """
    try:
        done = read_json(dict[str, Any], run / STATUS, "").get("status") == "finished"
        if done and read_yaml(run / CONFIG)["seed"] == seed:
            return best_figures(run / BEST)
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        pass
    return None
