"""Manage the folder of a run: file names, lock, ``status.json``, metrics, TensorBoard, and
deletion. Weights and states are in ``checkpoint.py``.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Required, TextIO

from typing_extensions import TypedDict

from visionattn.cli.commands import typed
from visionattn.cli.exit_codes import (
    DoesNotFit,
    NonFinite,
    OutOfMemory,
    Stopped,
    exit_code,
    in_one_line,
)
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
from visionattn.cli.untrusted import from_json, refuse
from visionattn.training.config import TrainConfig
from visionattn.training.picture_sheet import add_predictions
from visionattn.training.run_progress import Result
from visionattn.training.trackers import TRACKERS, Mlflow, Wandb

BEST, LAST = "best.safetensors", "last.pt"
PREVIOUS, STATUS = "previous.pt", "status.json"
CONFIG, METRICS = "config.yaml", "metrics.jsonl"
SUMMARY = "summary.csv"
BY_CLASS = {"validation": "validation.json", "test": "test.json"}
"""Files with the results of the best weights for each class, by split."""
IDS = tuple(f"{name}.id" for name in TRACKERS)
"""Files with the identifier of the run in each tracker."""
NAMES = (BEST, LAST, PREVIOUS, STATUS, CONFIG, METRICS, SUMMARY, *BY_CLASS.values(), *IDS)
"""The files of a run, except TensorBoard's."""
LOCK = "run.lock"
"""The lock file; it exists while a run is active, and after a kill."""
ENDS: dict[type, str] = {NonFinite: "nan", OutOfMemory: "oom", DoesNotFit: "oom"}
ENDS |= {Stopped: "stopped", KeyboardInterrupt: "stopped"}
"""Status of a run by the error that ended it; ``failed`` for other errors."""


class Figures(TypedDict, total=False):
    """``result`` of ``status.json``, from ``Result.figures``."""

    best_epoch: Required[int]
    train_seconds: Required[float]
    validation_accuracy: float | None
    test_accuracy: float | None
    test_loss: float | None
    test_images: int | None


class Origin(TypedDict, total=False):
    """``provenance`` of ``status.json``."""

    commit: str | None


class Ended(TypedDict, total=False):
    """The content of ``status.json``."""

    status: str
    reason: str | None
    provenance: Origin
    result: Figures | None


def read_status(folder: Path) -> Ended:
    """Return the content of ``status.json``; empty if it is missing or damaged by a kill."""
    with suppress(OSError, ValueError):
        return from_json(Ended, (folder / STATUS).read_text(), STATUS)
    return {}


def named_folder(output: str, run: str | None, names: Sequence[str]) -> Path:
    """Return the folder ``run`` in ``output``, and check that files with these names can be
    written; write nothing.

    Raises:
        ValueError: unusable name, unwritable folder, or a folder in use by another process.
    """
    if not run or Path(run).name != run or run in (".", ".."):
        raise ValueError(f"expected run to be the name of a folder within {output}, got {run!r}")
    folder = Path(output) / run
    check_folder(folder, "choose another output or run")
    if (folder / LOCK).exists():
        with held(folder):  # raises if another process holds it
            pass
    for name in names:  # refuses pipes and devices
        target_of(folder / name)
    return folder


def run_folder(config: TrainConfig) -> Path:
    """Return the folder of the run after checking that the run may use it; write nothing.

    Raises:
        ValueError: unusable name; the folder is not empty and neither ``resume`` nor ``overwrite``
            is given; nothing to resume; or another run uses the folder.
    """
    folder = named_folder(config.output, config.run, NAMES)
    # A run that was refused, e.g. because it did not fit into memory, leaves only its status.
    filled = folder.is_dir() and any(each.name not in (STATUS, LOCK) for each in folder.iterdir())
    way_on = "--resume continues it, " if can_go_on(folder) else ""
    refuse(
        (
            config.resume and not way_on,
            f"nothing to resume: {folder / LAST} does not exist; check --run and --output, or omit "
            "--resume to start the run",
        ),
        (
            filled and not (config.resume or config.overwrite),
            f"{folder} is not empty; {way_on}--overwrite deletes it, --run NAME writes to another "
            "folder",
        ),
    )
    return folder


def how_to_resume(config: TrainConfig) -> str:
    """Return the command that resumes a run."""
    kept = Path(config.output) / config.run / CONFIG
    return typed("train", "--config", str(kept), "--resume")


def can_go_on(folder: Path) -> bool:
    """Tell whether there is a state to resume, or a run that ended before its first state.

    Best weights without a state cannot be resumed: a user has deleted the state.
    """
    if any((folder / name).is_file() for name in (LAST, PREVIOUS)):
        return True
    begun = folder.is_dir() and (bool(written(folder)) or not any(folder.iterdir()))
    return begun and not (folder / BEST).exists()


def clear(folder: Path) -> None:
    """Delete the files of an earlier run in the folder, and keep all other files.

    Raises:
        ValueError: another run uses the folder.
    """
    with held(folder):
        for path in written(folder):
            if path.name != LOCK:
                path.unlink()


def written(folder: Path) -> list[Path]:
    """List the files in a folder that runs write, unfinished files of killed runs included."""
    return [
        *(folder / name for name in (*NAMES, LOCK) if (folder / name).is_file()),
        *unfinished(folder),
        *folder.glob("events.out.tfevents.*"),
    ]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock an existing folder against runs of other processes; a killed process leaves no lock.

    Raises:
        ValueError: another run uses the folder.
    """
    taken = (
        f"another process is running in {folder}; wait for it or end it, or pass --run NAME for "
        "another folder"
    )
    with locked(folder / LOCK, taken):
        yield


class Status:
    """Lock the run folder in a context. Write ``running`` to ``status.json`` on entry, and the
    outcome on exit.

    A status is ``running`` (which stays after a kill), ``finished``, ``stopped`` (Ctrl-C or
    SIGTERM), ``nan``, ``oom`` or ``failed``.

    Args:
        folder: the run folder; created if missing.
        provenance: provenance of the run's numbers.
        writes: whether this process writes.
    """

    def __init__(self, folder: Path, provenance: dict[str, Any], *, writes: bool = True):
        self.folder, self.provenance, self.writes = folder, provenance, writes
        self.result: Result | None = None
        """The result of a finished run."""

    def __enter__(self) -> "Status":
        with ExitStack() as lock:
            if self.writes:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(held(self.folder))
            self._write("running", None, None)
            self._lock = lock.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        with self._lock:
            if error is None:
                self._write("finished", None, 0)
            else:
                self.end(error)

    def end(self, error: BaseException) -> None:
        """Write the status of a run that ended early."""
        reason = in_one_line(error)
        if isinstance(error, KeyboardInterrupt):
            reason = "interrupted twice, without saving the state"
        # Twice: torch's handler for dead loader processes may raise RuntimeError anywhere.
        for _ in range(2):
            with suppress(OSError, RuntimeError):
                return self._write(ENDS.get(type(error), "failed"), reason, exit_code(error))

    def _write(self, status: str, reason: str | None, code: int | None) -> None:
        if not self.writes:
            return
        content = {
            "status": status,
            "reason": reason,
            "exit_code": code,
            "provenance": self.provenance,
            "result": self.result.figures() if self.result else None,
        }
        text, path = json.dumps(content, indent=2, allow_nan=False) + "\n", self.folder / STATUS
        try:
            write_text(path, text)
        except OSError:
            with open(path, "rb+") as file:  # overwrite in place: the disk may be full
                file.write(text.encode())
                file.truncate()


class Record:
    """Write a run's config, metrics, summary and TensorBoard events, send metrics to trackers, and
    print its progress.

    On a terminal a progress bar shows the current epoch; elsewhere a line is printed every half
    minute.

    Args:
        folder: the run folder; created if missing.
        config: written as ``config.yaml``.
        step: on resume, the finished optimizer steps; later lines of an earlier process are
            dropped.
        history: on resume, the metrics of finished epochs.
        stream: where to print; None: standard output.
        writes: whether this process writes and prints.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        *,
        step: int = 0,
        history: Sequence[dict[str, Any]] = (),
        stream: TextIO | None = None,
        writes: bool = True,
    ):
        self.folder, self.writes = folder, writes
        self.stream = (stream or sys.stdout) if writes else io.StringIO()
        self._progress: Progress | None = None
        self._events: Any = None
        self._trackers: list[Mlflow | Wandb] = []
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        for path in unfinished(folder):
            path.unlink(missing_ok=True)
        keep = asdict(config) | {"resume": False, "overwrite": False}
        keep |= {"parallel": None}
        write_text(folder / CONFIG, yaml_text(keep))
        forget_after(folder, step, len(history))
        if history or (folder / SUMMARY).exists():
            self._summarize(history)
        self.options = {
            key: str(value) if isinstance(value, list) else value
            for key, value in flat(asdict(config)).items()
        }
        self._events = SummaryWriter(folder, purge_step=step + 1)
        for name in config.log or ():
            self._trackers.append(TRACKERS[name](folder / f"{name}.id", config.run, self.options))

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type | None, *exception: object) -> None:
        if self._progress:
            self._progress.stop()
        # If another error ends the run, do not report a full disk, too.
        with suppress(OSError) if kind else nullcontext():
            if self._events:
                self._events.close()
            for tracker in self._trackers:
                tracker.close(failed=kind is not None)

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._progress:
            self._progress.say(line, self._print)
        else:
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self.stream, flush=True)

    def begin(self, what: str, total: int, done: int, unit: str) -> Progress:
        """Replace the progress bar, and return the new one."""
        if self._progress:
            self._progress.stop()
        self._progress = Progress(total, done, self.stream, what=what, unit=unit)
        return self._progress

    def step(self, values: dict[str, Any]) -> None:
        """Write the means since the last line about steps."""
        self.event("train", values)
        self._plot("train", values)

    def epoch(self, history: Sequence[dict[str, Any]], more: dict[str, Any]) -> None:
        """Write the metrics of an epoch to ``metrics.jsonl``, summary and TensorBoard.

        Args:
            history: the metrics of all epochs so far, with equal keys; the last entry is new.
            more: further values for ``metrics.jsonl``.
        """
        self.event("epoch", history[-1] | more)
        if self.writes:
            self._summarize(history)
            self._plot("epoch", history[-1])
            self._events.flush()
            for tracker in self._trackers:
                numbers = {key: x for key, x in history[-1].items() if x is not None}
                tracker.log(numbers, numbers["step"])

    def predictions(self, split: str, step: int, *found: Any) -> None:
        """Write the predictions of a split to TensorBoard: ``picture_sheet.add_predictions``."""
        if self._events:
            add_predictions(self._events, split, step, *found)

    def finish(self, result: Result, step: int) -> None:
        """Write the result of the run, with its configuration, as a row of TensorBoard's table of
        runs and to the trackers.

        Args:
            result: the result of the run.
            step: the step of the values, after the last step of the training.
        """
        if not self._events:
            return
        from torch.utils.tensorboard.summary import hparams

        figures = {f"result/{key}": x for key, x in result.figures().items() if x is not None}
        for summary in hparams(self.options, figures):
            self._events.file_writer.add_summary(summary)
        for key, value in figures.items():
            self._events.add_scalar(key, value, step)
        for tracker in self._trackers:
            tracker.log(figures, step)

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``."""
        if not self.writes:
            return
        line = {"kind": kind} | {
            key: None if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in values.items()
        }
        path = self.folder / METRICS
        with named(path), added_to(path) as file:
            file.write((json.dumps(line) + "\n").encode())

    def sync(self) -> None:
        """Flush the lines so far to the disk, before the next state is saved."""
        path = self.folder / METRICS
        if self.writes and path.exists():
            with named(path):
                flush_to_disk(path)

    def _plot(self, group: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if self._events and key not in ("step", "epoch") and value is not None:
                self._events.add_scalar(f"{group}/{key}", value, values["step"])

    def _summarize(self, history: Sequence[dict[str, Any]]) -> None:
        text = io.StringIO(newline="")
        if history:
            writer = csv.DictWriter(text, history[0])
            writer.writeheader()
            writer.writerows(history)
        write_text(self.folder / SUMMARY, text.getvalue())


def forget_after(folder: Path, steps: int, epochs: int) -> None:
    """Drop the lines of ``metrics.jsonl`` written after a state, so that a resumed run writes each
    line once. The line of the test is always dropped.
    """
    path = folder / METRICS
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with suppress(ValueError):  # the last line of a killed process may be cut off
            line = json.loads(text)
            done = line["epoch"] <= epochs if line["kind"] == "epoch" else line["kind"] != "test"
            if text.endswith("\n") and line["step"] <= steps and done:
                kept.append(text)
    write_text(path, "".join(kept))


def flat(values: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Return nested options by dotted name, without empty groups."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{group}{key}.")
        else:
            found[f"{group}{key}"] = value
    return found
