"""Trainings as processes: which to start, how, and what their ends mean.

It knows the exit codes and the files of ``visionattn train``, and nothing of what a training does.
"""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from visionattn.cli.files import added_to, write_text
from visionattn.cli.fresh_process import ended_for_memory, environment, memory_kills
from visionattn.cli.interruption import Interruption
from visionattn.cli.parsing import yaml_text
from visionattn.cli.progress import Progress
from visionattn.cli.untrusted import read_json
from visionattn.lab.sweep.folder import Ending, SweepFolder
from visionattn.lab.sweep.grid import Cell, Plan
from visionattn.training.config import TrainConfig
from visionattn.training.run_folder import STATUS, can_go_on

STATUSES = {0: "finished", 1: "nan", 3: "oom", 130: "stopped"}
"""What exit codes mean; all others are "failed", and so is 1 without an error line: Python ends so
by itself.
"""
ERROR = "error: "
"""How tools begin the line that says why they end."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Attempt:
    """A training that runs."""

    process: subprocess.Popen
    begin: float
    """On the monotonic clock, in seconds."""
    kills: int
    """Processes that the system had ended before for want of memory."""
    log_from: int
    """Bytes of the log that earlier attempts wrote."""


def to_train(cells: Sequence[Cell], folder: SweepFolder, *, retry: bool) -> list[Cell]:
    """Return the cells that are not finished, without those that failed by themselves unless
    ``retry``.
    """
    wanted = []
    for cell in cells:
        ending = folder.ending(cell)
        if ending is None or ending.goes_on or (retry and ending.status != "finished"):
            wanted.append(cell)
    return wanted


def train_cells(
    plan: Plan,
    cells: Sequence[Cell],
    folder: SweepFolder,
    *,
    jobs: int,
    command: Sequence[str],
    say: Callable[[str], None],
    after: Callable[[], None] = lambda: None,
) -> bool:
    """Train cells, ``jobs`` at a time, each in a process of its own, and keep how each ended.

    Ctrl-C and SIGTERM reach this process alone: the trainings are asked once to stop, and save
    their states. A second Ctrl-C kills them.

    Args:
        plan: the sweep.
        cells: what to train.
        folder: of the sweep, open.
        jobs: processes at a time.
        command: starts a training; ``--config FILE`` and ``--resume`` or ``--overwrite`` are added.
        say: takes a line when a cell starts or ends.
        after: called after each cell.

    Returns:
        Whether all were trained; False after Ctrl-C.
    """
    waiting = deque(cells)
    running: dict[Cell, Attempt] = {}
    asked = False
    with Interruption() as interruption, Progress(len(cells), unit="trainings") as progress:
        try:
            while running or (waiting and not asked):
                while waiting and len(running) < jobs and not asked:
                    cell = waiting.popleft()
                    count = f"{len(cells) - len(waiting)} of {len(cells)}"
                    progress.say(f"{cell.name}: starts ({count})", say)
                    running[cell] = start(plan, cell, folder, command)
                # Each training is asked once; a second Ctrl-C raises KeyboardInterrupt.
                if interruption.requested and not asked:
                    asked = True
                    progress.say(
                        f"stopping {len(running)} trainings; a second Ctrl-C kills them", say
                    )
                    for attempt in running.values():
                        attempt.process.send_signal(signal.SIGINT)
                for cell, attempt in list(running.items()):
                    if attempt.process.poll() is not None:
                        del running[cell]
                        ending = end(cell, folder, attempt)
                        folder.keep_ending(cell, ending)
                        progress.say(f"{cell.name}: {describe(ending)}", say)
                        after()
                        progress.advance(1, ending.result is None)
                progress.show(at_work(running, folder))
                time.sleep(POLL_SECONDS)
        finally:
            # Only an error or a second Ctrl-C leaves processes here.
            for attempt in running.values():
                os.killpg(attempt.process.pid, signal.SIGKILL)
                attempt.process.wait()
    return not asked


def at_work(running: Iterable[Cell], folder: SweepFolder) -> str:
    """Return what runs, and the last line that the first of it has written."""
    cells = list(running)
    if not cells:
        return ""
    with open(folder.runs / f"{cells[0].name}.log", "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 1000))
        lines = log.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{cells[0].name}{more}: {last[:60]}" if last else f"{cells[0].name}{more}"


def config_of(plan: Plan, cell: Cell, runs: Path) -> TrainConfig:
    """Return the configuration of a cell's training, whose folder is in ``runs``."""
    return replace(
        plan.base,
        model=plan.model(cell.network),
        data=replace(plan.base.data, img_size=cell.network.img_size),
        seed=cell.seed,
        output=str(runs),
        run=cell.name,
        resume=False,
        overwrite=False,
    )


def start(plan: Plan, cell: Cell, folder: SweepFolder, command: Sequence[str]) -> Attempt:
    """Start or resume a training.

    One with a state goes on from it; one that ended with NaN would come to the same end and begins
    anew.
    """
    run, before = folder.runs / cell.name, folder.ending(cell)
    config = config_of(plan, cell, folder.runs)
    path = folder.runs / f"{cell.name}.yaml"
    write_text(path, yaml_text(asdict(config)))
    words = [*command, "--config", str(path)]
    if run.is_dir() and any(run.iterdir()):
        nan = before is not None and before.status == "nan"
        words.append("--resume" if can_go_on(run) and not nan else "--overwrite")
    with added_to(folder.runs / f"{cell.name}.log") as log:
        log_from = log.tell()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            pass_fds=[folder.lock_number()],
            process_group=0,  # a terminal's Ctrl-C goes to the sweep, which passes it on once
        )
        return Attempt(process, time.monotonic(), memory_kills(), log_from)


def end(cell: Cell, folder: SweepFolder, attempt: Attempt) -> Ending:
    """Return what the end of a training's process means.

    A process that was killed counts as out of memory only where the system says that it ended one
    of this group for that.
    """
    log = folder.runs / f"{cell.name}.log"
    run = folder.runs / cell.name
    before = folder.ending(cell)
    exit_code, seconds = attempt.process.returncode, time.monotonic() - attempt.begin
    status = STATUSES.get(exit_code, "failed")
    reason = None
    words = last_words(log, attempt.log_from)
    said = read_status(run)
    result = said.get("result")
    # The exit code alone does not decide: a result has to be there, and the system may have ended
    # the process for memory.
    if status == "finished" and result is None:
        status, reason = "failed", f"the training ended without a result; see {log}"
    elif ended_for_memory(exit_code, attempt.kills):
        status, reason = "oom", "the system ended the process for want of memory"
    elif exit_code < 0:
        reason = f"killed by signal {-exit_code}"
    elif status != "finished":
        reason = words.removeprefix(ERROR) or f"ended with exit code {exit_code}"
        status = "failed" if status == "nan" and not words.startswith(ERROR) else status
    # Times and attempts add up over the calls of a sweep.
    seconds = seconds + (before.seconds if before else 0)
    attempts = 1 + (before.attempts if before else 0)
    result = result if status == "finished" else None
    return Ending(
        status, reason, exit_code, round(seconds, 1), attempts, result, said.get("provenance") or {}
    )


def read_status(run: Path) -> dict[str, Any]:
    """Return what a run says of itself in its status file; empty where it says nothing that can be
    read.
    """
    try:
        return read_json(_Said, run / STATUS, "")
    except (OSError, ValueError):
        return {}


class _Said(TypedDict, total=False):
    """What a sweep takes of a status file."""

    result: dict[str, int | float | None] | None
    provenance: dict[str, str | int | float | bool | None]


def last_words(log: Path, start: int) -> str:
    """Return the last error in a log from byte ``start`` on, or its last line."""
    text = log.read_bytes()[start:].decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(ERROR)]
    return (errors or lines or [""])[-1]


def describe(ending: Ending) -> str:
    """Return an ending for people."""
    if ending.result is None:
        return f"{ending.status}: {ending.reason}"
    tested = ending.result["test_accuracy"] is not None
    accuracy = ending.result["test_accuracy" if tested else "validation_accuracy"]
    return (
        f"finished, {'test' if tested else 'validation'} accuracy {100 * accuracy:.1f} %, "
        f"{ending.seconds:.0f} s"
    )
