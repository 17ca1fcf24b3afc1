"""Run the trainings of a sweep as processes, and record their outcomes in the folder of the sweep.

The folder holds:

- ``base.yaml``: the training that is varied.
- ``runs/``: for each training a run folder, a ``.yaml`` and a ``.log``.
- ``endings.jsonl`` and ``measurements.jsonl``: columns of ``cells.csv`` by training and by network.
  Of several lines, the last one counts.
- ``table.md``, ``cells.csv`` and ``sweep.png``: the results.
"""

import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from visionattn.cli.files import (
    add_line,
    added_to,
    check_folder,
    lock,
    read_lines,
    unfinished,
    write_text,
)
from visionattn.cli.fresh_process import ended_for_memory, environment, memory_kills
from visionattn.cli.interruption import Interruption
from visionattn.cli.parsing import yaml_text
from visionattn.cli.progress import Progress
from visionattn.cli.tables import Record
from visionattn.lab.sweep.head_grid import SweepCell, SweepPlan
from visionattn.training.config import TrainConfig
from visionattn.training.run_folder import can_go_on, read_status

BASE, TABLE, ROWS, PLOT, LOCK = "base.yaml", "table.md", "cells.csv", "sweep.png", "lock"
KEPT = ENDINGS, MEASUREMENTS = "endings.jsonl", "measurements.jsonl"
QUIET = ("output", "run", "resume", "overwrite", "save_every", "threads", "seed")
"""Keys in which calls of one sweep may differ: storage, speed, and the seed, which the grid varies.
"""
STATUSES = {0: "finished", 1: "nan", 3: "oom", 130: "stopped"}
"""Status by exit code; all other codes mean "failed". Code 1 without an error line means "failed",
too, because Python ends with it after an uncaught exception.
"""
ERROR = "error: "
"""Start of the line in which a command reports its error."""
POLL_SECONDS = 0.05
RESULTS = ("best_epoch", "validation_accuracy", "test_accuracy", "test_loss", "test_images")
RESULTS += ("train_seconds",)
"""Values of a training's result that are recorded."""


class SweepFolder:
    """A sweep's folder on the disk.

    Args:
        path: the folder; it and its parents need not exist.

    Attributes:
        runs: the parent of the run folders.
        lock: an open lock file. Trainings inherit the lock, so the folder stays locked until all
            end.
    """

    lock: TextIO

    def __init__(self, path: Path):
        self.path, self.runs = path, path / "runs"

    def check(self, base: TrainConfig, *, overwrite: bool) -> None:
        """Check that this sweep may use the folder; write nothing.

        Raises:
            ValueError: the path is a file, or the folder holds something else or, without
                ``overwrite``, a sweep of another training; one line.
        """
        check_folder(self.path, "choose another --output")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not all((self.path / name).is_file() for name in (BASE, LOCK)):
            raise ValueError(
                f"expected an empty folder or a sweep, got {self.path}; pass another --output"
            )
        there, wanted = (self.path / BASE).read_text(), comparable(base)
        if there != wanted and not overwrite:
            changed = [text for text in wanted.splitlines() if text not in there.splitlines()]
            raise ValueError(
                f"{self.path} holds a sweep of another training ({' '.join(changed).strip()}); "
                "pass another --output, or --overwrite"
            )

    @contextmanager
    def opened(self, base: TrainConfig, *, overwrite: bool) -> Iterator[None]:
        """Create the folder, empty it if ``overwrite``, and lock it while this sweep or one of its
        trainings runs.

        Raises:
            ValueError: another sweep or one of its trainings uses the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        taken = (
            f"another sweep, or a training of it, is running in {self.path}; wait for it or end it"
        )
        with lock(self.path / LOCK, taken) as self.lock:
            if overwrite:
                shutil.rmtree(self.runs, ignore_errors=True)
                for name in (BASE, *KEPT, TABLE, ROWS, PLOT):
                    (self.path / name).unlink(missing_ok=True)
            self.runs.mkdir(exist_ok=True)
            for path in unfinished(self.path) + unfinished(self.runs):  # left by a killed sweep
                path.unlink()
            write_text(self.path / BASE, comparable(base))
            yield

    def known(self, name: str) -> dict[str, Record]:
        """Return the records of trainings (``ENDINGS``) or networks (``MEASUREMENTS``) by name."""
        return {line["name"]: line["columns"] for line in read_lines(self.path / name)}

    def keep(self, name: str, of: str, columns: Record) -> None:
        """Append the record of a training or a network."""
        add_line(self.path / name, {"name": of, "columns": columns})


def comparable(base: TrainConfig) -> str:
    """Return the training as YAML, without ``QUIET`` and the values that the grid varies. It is
    equal for all calls of one sweep.
    """
    content = {key: value for key, value in asdict(base).items() if key not in QUIET}
    del content["data"]["img_size"]
    for key in ("num_heads", "form"):
        content["model"]["args"].pop(key, None)
    return yaml_text(content)


@dataclass(frozen=True)
class Attempt:
    """A running training."""

    process: subprocess.Popen
    begin: float
    """Time of the start, in seconds of the monotonic clock."""
    kills: int
    """Value of ``memory_kills`` before the start."""


def left_to_train(plan: SweepPlan, known: Mapping[str, Record], *, retry: bool) -> list[SweepCell]:
    """Return the cells to train: new, stopped and killed cells and, with ``retry``, failed ones."""
    wanted = []
    for cell in plan.cells():
        ending = known.get(cell.name, {"status": "stopped"})
        killed = ending["status"] == "failed" and ending["exit_code"] < 0
        failed = ending["status"] != "finished"
        if ending["status"] == "stopped" or killed or (retry and failed):
            wanted.append(cell)
    return wanted


def train_cells(
    plan: SweepPlan,
    cells: Sequence[SweepCell],
    folder: SweepFolder,
    *,
    jobs: int,
    command: Sequence[str],
    say: Callable[[str], None],
    after: Callable[[], None],
) -> bool:
    """Train cells, ``jobs`` at a time, each in its own process, and record their outcomes.

    Ctrl-C and SIGTERM reach only this process. It asks the trainings once to stop, and they save
    their state. A second Ctrl-C kills them.

    Args:
        plan: the sweep.
        cells: the cells to train.
        folder: the opened folder of the sweep.
        jobs: number of parallel processes.
        command: command of a training; ``--config FILE`` and ``--resume`` or ``--overwrite`` are
            added.
        say: gets a line when a cell starts or ends.
        after: called after each cell.

    Returns:
        Whether all cells were trained; False after Ctrl-C.
    """
    waiting, running, asked = deque(cells), {}, False
    known = folder.known(ENDINGS)
    with Interruption() as interruption, Progress(len(cells), unit="trainings") as progress:
        try:
            while running or (waiting and not asked):
                while waiting and len(running) < jobs and not asked:
                    cell = waiting.popleft()
                    count = f"{len(cells) - len(waiting)} of {len(cells)}"
                    progress.say(f"{cell.name}: starting ({count})", say)
                    # After NaN a resumed training would fail again, so start it anew.
                    anew = known.get(cell.name, {}).get("status") == "nan"
                    running[cell] = start(plan, cell, folder, command, anew=anew)
                if interruption.requested and not asked:
                    asked = True
                    progress.say(
                        f"stopping {len(running)} trainings; a second Ctrl-C kills them", say
                    )
                    for attempt in running.values():
                        attempt.process.send_signal(signal.SIGINT)
                for cell in [cell for cell in running if running[cell].process.poll() is not None]:
                    before = known.get(cell.name, {})
                    ending = ending_of(cell, folder, running.pop(cell), before)
                    folder.keep(ENDINGS, cell.name, ending)
                    progress.say(f"{cell.name}: {describe(ending)}", say)
                    after()
                    progress.advance(1, ending["status"] != "finished")
                progress.show(", ".join(cell.name for cell in running))
                time.sleep(POLL_SECONDS)
        finally:
            # Trainings still run here only after an error or a second Ctrl-C.
            for attempt in running.values():
                os.killpg(attempt.process.pid, signal.SIGKILL)
                attempt.process.wait()
    return not asked


def start(
    plan: SweepPlan, cell: SweepCell, folder: SweepFolder, command: Sequence[str], *, anew: bool
) -> Attempt:
    """Start a training. Resume it if it has a checkpoint, unless ``anew``."""
    run = folder.runs / cell.name
    path, log_path = folder.runs / f"{cell.name}.yaml", folder.runs / f"{cell.name}.log"
    write_text(path, yaml_text(asdict(plan.training(cell, folder.runs))))
    words = [*command, "--config", str(path)]
    if run.is_dir() and any(run.iterdir()):
        words.append("--resume" if can_go_on(run) and not anew else "--overwrite")
    with added_to(log_path) as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            pass_fds=[folder.lock.fileno()],
            process_group=0,  # a terminal's Ctrl-C reaches only the sweep, which passes it on once
        )
    return Attempt(process, time.monotonic(), memory_kills())


def ending_of(cell: SweepCell, folder: SweepFolder, attempt: Attempt, before: Record) -> Record:
    """Return the outcome of a training's process as columns of ``cells.csv``. A killed process has
    a negative exit code.

    It counts as out of memory only if the system reports such a kill in this control group. Seconds
    and attempts are added to the values in ``before``.
    """
    log = folder.runs / f"{cell.name}.log"
    exit_code, words = attempt.process.returncode, last_words(log)
    status, reason = STATUSES.get(exit_code, "failed"), None
    said = read_status(folder.runs / cell.name)
    result = said.get("result") or {}
    if status == "finished" and not result:
        status, reason = "failed", f"the training ended without a result; see {log}"
    elif ended_for_memory(exit_code, attempt.kills):
        status, reason = "oom", "the system killed the process (out of memory)"
    elif exit_code < 0:
        reason = f"killed by signal {-exit_code}"
    elif status != "finished":
        reason = words.removeprefix(ERROR) or f"ended with exit code {exit_code}"
        status = "failed" if status == "nan" and not words.startswith(ERROR) else status
    seconds = time.monotonic() - attempt.begin + before.get("cell_seconds", 0)
    return {
        "status": status,
        "reason": reason,
        "exit_code": exit_code,
        **{key: result.get(key) if status == "finished" else None for key in RESULTS},
        "cell_seconds": round(seconds, 1),
        "attempts": 1 + before.get("attempts", 0),
        "train_commit": (said.get("provenance") or {}).get("commit"),
    }


def last_words(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return next((text.strip() for text in reversed(lines) if text.strip()), "")


def describe(ending: Record) -> str:
    """Return the outcome of a training as text."""
    if ending["status"] != "finished":
        return f"{ending['status']}: {ending['reason']}"
    split = "validation" if ending["test_accuracy"] is None else "test"
    accuracy = 100 * ending[f"{split}_accuracy"]
    return f"finished, {split} accuracy {accuracy:.1f} %, {ending['cell_seconds']:.0f} s"
