"""The folder of a run and the lines on the screen: everything a run says, except its weights.

This module names the files in the folder, and decides what may be deleted there.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TextIO, TypedDict

from visionattn.cli.files import (
    added_to,
    check_folder,
    flush_to_disk,
    locked,
    named,
    target_of,
    unfinished,
    write_text,
)
from visionattn.cli.parsing import yaml_text
from visionattn.cli.progress import Progress
from visionattn.cli.untrusted import from_json
from visionattn.training.config import TrainConfig

BEST, LAST = "best.safetensors", "last.pt"
PREVIOUS, STATUS = "previous.pt", "status.json"
CONFIG, METRICS = "config.yaml", "metrics.jsonl"
SUMMARY = "summary.csv"
BY_CLASS = {"validation": "validation.json", "test": "test.json"}
"""What the best weights say of each class of a split, by the name of the split."""
NAMES = (BEST, LAST, PREVIOUS, STATUS, CONFIG, METRICS, SUMMARY, *BY_CLASS.values())
"""The files that runs write, besides those of TensorBoard."""
LOCK = "run.lock"
"""A file that is there while a run is at work, and after one that was killed."""
HELD: set[Path] = set()
"""The folders in which this process is at work."""


def named_folder(output: str, run: str | None, names: Sequence[str]) -> Path:
    """Return the folder ``run`` within ``output``, after checking that files of these names may be
    written to it; nothing is.

    Raises:
        ValueError: no usable name, or what is there cannot be written to, or another process is at
            work there.
    """
    if not run or Path(run).name != run or run in (".", ".."):
        raise ValueError(f"run must be the name of a folder within {output}, got {run!r}")
    folder = Path(output) / run
    check_folder(folder, "choose another output or run")
    if (folder / LOCK).exists():
        with held(folder):  # or else another one is at work
            pass
    for name in names:  # a pipe or a device of such a name is not written to
        target_of(folder / name)
    return folder


def run_folder(config: TrainConfig) -> Path:
    """Return the folder of the run, after checking that the run may have it; nothing is written.

    Raises:
        ValueError: no usable name, or the folder is in use and neither ``resume`` nor ``overwrite``
            is given, or there is nothing to resume, or another run is at work there.
    """
    folder = named_folder(config.output, config.run, NAMES)
    filled = folder.is_dir() and any(folder.iterdir())
    if config.resume and not can_go_on(folder):
        raise ValueError(f"nothing to resume: {folder / LAST} does not exist; leave out --resume")
    if filled and not (config.resume or config.overwrite):
        way_on = "--resume goes on with it, " if can_go_on(folder) else ""
        raise ValueError(
            f"{folder} is not empty; {way_on}--overwrite deletes it, --run NAME writes elsewhere"
        )
    return folder


def can_go_on(folder: Path) -> bool:
    """Tell whether there is a state to go on from, or a run that ended before its first one and can
    begin anew.

    Best weights without a state are there only if somebody has deleted the state: a run does not
    replace those.
    """
    if any((folder / name).is_file() for name in (LAST, PREVIOUS)):
        return True
    begun = folder.is_dir() and (bool(written(folder)) or not any(folder.iterdir()))
    return begun and not (folder / BEST).exists()


def clear(folder: Path) -> None:
    """Delete the files that an earlier run wrote to the folder; anything else there stays.

    Raises:
        ValueError: another run is at work there.
    """
    with held(folder):
        for path in written(folder):
            if path.name != LOCK:
                path.unlink()


def written(folder: Path) -> list[Path]:
    """List the files in a folder that runs write, those of a killed process included."""
    return [
        *(folder / name for name in (*NAMES, LOCK) if (folder / name).is_file()),
        *unfinished(folder),
        *folder.glob("events.out.tfevents.*"),
    ]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep the runs of other processes out of a folder that exists; a killed process keeps nobody
    out.

    Only this process holds the lock: those that load its data may outlive it by seconds.

    Raises:
        ValueError: another run is at work there.
    """
    if folder in HELD:
        yield
        return
    taken = (
        f"another run is at work in {folder}; wait for it or end it, or --run NAME writes elsewhere"
    )
    with locked(folder / LOCK, taken):
        HELD.add(folder)
        try:
            yield
        finally:
            HELD.discard(folder)


class Record:
    """Write a run's config, metrics, summary and TensorBoard events, and print its progress.

    On a terminal a progress bar shows the current epoch; elsewhere a line does every half minute.

    Args:
        folder: the run's folder; it is made where it does not exist.
        config: kept as ``config.yaml``.
        since: on resumption, the optimiser steps done and the epochs done; later lines of an
            earlier process are dropped.
        stream: where to print.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        since: tuple[int, int] = (0, 0),
        stream: TextIO | None = None,
    ):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.stream = folder, stream or sys.stdout
        folder.mkdir(parents=True, exist_ok=True)
        for path in unfinished(folder):  # of a process that was killed while it wrote
            path.unlink(missing_ok=True)
        keep = asdict(config) | {"resume": False, "overwrite": False}
        keep |= {"parallel": None, "sequence_ranks": None}
        write_text(folder / CONFIG, yaml_text(keep))
        steps, epochs = since
        forget_after(folder, steps, epochs)
        self._events = SummaryWriter(folder, purge_step=steps + 1 if steps else None)
        self._progress: Progress | None = None

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if self._progress:
            self._progress.stop()
        try:
            self._events.close()
        except OSError:
            if kind is None:  # otherwise the error that ends the run is the one to tell
                raise

    def say(self, line: str) -> None:
        """Print a line, above the progress bar where there is one."""
        if self._progress:
            self._progress.say(line, self._print)
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def begin(self, what: str, total: int, done: int, unit: str) -> Progress:
        """Return what shows how far something has come, in place of what was shown before."""
        if self._progress:
            self._progress.stop()
        self._progress = Progress(total, done, self.stream, what=what, unit=unit)
        return self._progress

    def step(self, values: dict[str, Any]) -> None:
        """Write the means since the last such line: a line of ``metrics.jsonl``, and TensorBoard's
        ``train/``.
        """
        self._line({"kind": "train"} | values)
        for key, value in values.items():
            if key not in ("step", "epoch"):
                self._events.add_scalar(f"train/{key}", value, values["step"])

    def epoch(self, history: list[dict[str, Any]], more: dict[str, Any]) -> None:
        """Write an epoch's figures: a line of ``metrics.jsonl``, a row of ``summary.csv``, and
        TensorBoard's ``epoch/``.

        Args:
            history: the figures of all epochs so far, under equal keys; those of the last one are
                new.
            more: what else the line of the last one has.
        """
        values = history[-1]
        self._line({"kind": "epoch"} | values | more)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, values)
        writer.writeheader()
        writer.writerows(history)
        write_text(self.folder / SUMMARY, text.getvalue())
        for key, value in values.items():
            if key not in ("step", "epoch") and value is not None:
                self._events.add_scalar(f"epoch/{key}", value, values["step"])
        self._events.flush()

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line of ``metrics.jsonl`` about something that happens now and then."""
        self._line({"kind": kind} | values)

    def sync(self) -> None:
        """Return once the lines so far are on the disk, so that no state that is saved after them
        outlives them.
        """
        path = self.folder / METRICS
        if path.exists():
            with named(path):
                flush_to_disk(path)

    def _line(self, values: dict[str, Any]) -> None:
        # JSON has no NaN and no infinity.
        values = {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in values.items()
        }
        path = self.folder / METRICS
        with named(path), added_to(path) as file:
            file.write((json.dumps(values) + "\n").encode())


class NoRecord:
    """Stand in for ``Record`` in the processes of a run that write and print nothing."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __enter__(self) -> "NoRecord":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def _pass(self, *what: object, **how: object) -> None:
        """Do nothing with what the first process writes and prints."""

    def begin(self, what: str, total: int, done: int, unit: str) -> Progress:
        """Return what shows nothing."""
        return Progress(total, done, io.StringIO(), what=what, unit=unit)

    say = step = epoch = event = sync = _pass


def forget_after(folder: Path, steps: int, epochs: int) -> None:
    """Drop the lines of metrics and summary that were written after a state, so that a resumed run
    writes each once. The line of a test always counts as written after it.
    """
    metrics, summary = folder / METRICS, folder / SUMMARY
    if metrics.exists():
        lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_text(metrics, "".join(line for line in lines if belongs(line, steps, epochs)))
    if summary.exists():
        header, *rows = summary.read_text(encoding="utf-8", errors="replace").splitlines(
            keepends=True
        ) or [""]
        write_text(summary, "".join([header, *(row for row in rows if is_of(row, epochs))]))


def is_of(row: str, epochs: int) -> bool:
    """Tell whether a row of ``summary.csv`` is of one of the first epochs."""
    number = row.partition(",")[0]
    return number.isdecimal() and len(number) < 10 and int(number) <= epochs


class _Line(TypedDict):
    """What each line of ``metrics.jsonl`` says."""

    kind: str
    step: int
    epoch: NotRequired[int]


def belongs(text: str, steps: int, epochs: int) -> bool:
    """Tell whether a line of ``metrics.jsonl`` is whole, and was written before a state."""
    try:
        line = from_json(_Line, text, METRICS)
    except ValueError:
        return False
    return (
        text.endswith("\n")
        and line["step"] <= steps
        and line["kind"] != "test"
        and not (line["kind"] == "epoch" and line.get("epoch", 0) > epochs)
    )
