"""The folder of a run and the lines on the screen: everything a run says, except its weights.

Owns the names of the files in the folder, and what may be deleted there.
"""

import csv
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from visionattn.models.weights import write_whole
from visionattn.training.config import TrainConfig

BEST, LAST, CONFIG, METRICS, SUMMARY = "best.safetensors", "last.pt", "config.yaml", "metrics.jsonl", "summary.csv"
WRITTEN = (BEST, LAST, CONFIG, METRICS, SUMMARY, "events.out.tfevents.*", "*.tmp")
"""Patterns of the files that runs write."""


def run_folder(config: TrainConfig) -> Path:
    """The folder of the run, after checking that the run may have it; nothing is written.

    Raises:
        ValueError: no usable name, or the folder is in use and neither ``resume`` nor ``overwrite`` is given, or there
            is nothing to resume.
    """
    if not config.run or Path(config.run).name != config.run or config.run in (".", ".."):
        raise ValueError(f"run must be the name of a folder within {config.output}, got {config.run!r}")
    folder = Path(config.output) / config.run
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{place} is a file, so {folder} cannot be a folder; choose another output or run")
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    if not os.access(existing, os.W_OK):
        raise ValueError(f"no permission to write to {existing}; choose another output")
    filled = folder.is_dir() and any(folder.iterdir())
    if config.resume and not (folder / LAST).is_file():
        raise ValueError(f"nothing to resume: {folder / LAST} does not exist; leave out --resume")
    if filled and not (config.resume or config.overwrite):
        way_on = "--resume goes on with it, " if (folder / LAST).is_file() else ""
        raise ValueError(f"{folder} is not empty; {way_on}--overwrite deletes it, --run NAME writes elsewhere")
    return folder


def clear(folder: Path) -> None:
    """Delete the files that an earlier run wrote to the folder; anything else there stays."""
    for pattern in WRITTEN:
        for path in folder.glob(pattern):
            path.unlink()


class Record:
    """Writes a run's config, metrics, summary and TensorBoard events, and prints its progress.

    On a terminal a rich progress bar shows the current epoch; elsewhere plain lines are all there is.

    Args:
        folder: the run's folder; made if need be.
        config: kept as ``config.yaml``.
        since: on resumption, the optimiser steps done and the epochs done; later lines of an earlier process are
            dropped.
        stream: where to print.
    """

    def __init__(
        self, folder: Path, config: TrainConfig, *, since: tuple[int, int] = (0, 0), stream: TextIO | None = None
    ):
        import yaml
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.stream = folder, stream or sys.stdout
        folder.mkdir(parents=True, exist_ok=True)
        keep = asdict(config) | {"resume": False, "overwrite": False}
        write_text(folder / CONFIG, yaml.safe_dump(keep, sort_keys=False))
        steps, epochs = since
        forget_after(folder, steps, epochs)
        self._events = SummaryWriter(folder, purge_step=steps + 1 if steps else None)
        self._bar = ProgressBar(self.stream) if self.stream.isatty() else None

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *exception: object) -> None:
        self._events.close()
        if self._bar:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self._bar:
            self._bar.print(line)
        else:
            print(line, file=self.stream, flush=True)

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """Move the progress bar; without a terminal nothing happens."""
        if self._bar:
            self._bar.show(what, done, total, note)

    def step(self, values: dict[str, Any]) -> None:
        """Keep the means since the last such line: a line of ``metrics.jsonl`` and TensorBoard's ``train/``."""
        self._line({"kind": "train"} | values)
        for key, value in values.items():
            if key not in ("step", "epoch"):
                self._events.add_scalar(f"train/{key}", value, values["step"])

    def epoch(self, values: dict[str, Any]) -> None:
        """Keep an epoch's figures: a line of ``metrics.jsonl``, a row of ``summary.csv``, TensorBoard's ``epoch/``."""
        self._line({"kind": "epoch"} | values)
        path = self.folder / SUMMARY
        fresh = not path.exists()
        with open(path, "a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, values)
            if fresh:
                writer.writeheader()
            writer.writerow(values)
        for key, value in values.items():
            if key not in ("step", "epoch") and value is not None:
                self._events.add_scalar(f"epoch/{key}", value, values["step"])
        self._events.flush()

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Keep something that happens now and then: a line of ``metrics.jsonl``."""
        self._line({"kind": kind} | values)

    def _line(self, values: dict[str, Any]) -> None:
        # JSON has no NaN and no infinity.
        values = {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in values.items()}
        with open(self.folder / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


class ProgressBar:
    """One line of a terminal that moves; without a percentage, so that those printed are results."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=Console(file=stream, highlight=False), transient=True)
        self._task = self._progress.add_task("", note="")
        self._progress.start()

    def print(self, line: str) -> None:
        """Print above the bar."""
        self._progress.console.print(line, markup=False, soft_wrap=True)

    def show(self, what: str, done: int, total: int, note: str) -> None:
        """Set the bar."""
        self._progress.update(self._task, description=what, completed=done, total=total, note=note)

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()


def forget_after(folder: Path, steps: int, epochs: int) -> None:
    """Drop the lines of metrics and summary that lie after a state, so that a resumed run writes each once."""
    metrics, summary = folder / METRICS, folder / SUMMARY
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [
            line
            for line in lines
            if line.endswith("\n")
            and json.loads(line).get("step", 0) <= steps
            and not (json.loads(line)["kind"] == "epoch" and json.loads(line)["epoch"] > epochs)
        ]
        write_text(metrics, "".join(kept))
    if summary.exists():
        header, *rows = summary.read_text(encoding="utf-8").splitlines(keepends=True)
        write_text(summary, "".join([header, *(row for row in rows if int(row.split(",")[0]) <= epochs)]))


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))
