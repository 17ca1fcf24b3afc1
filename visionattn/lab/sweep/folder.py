"""The folder of a sweep: its files, what is known of each cell, and who may write to it.

``sweep.json`` (the training that is varied, and each call), ``runs/`` (a run folder, its ``.yaml``
and its ``.log`` for each training), ``cells/`` (how each training ended), ``measurements/``,
``hparams/`` (TensorBoard), ``table.md``, ``cells.csv``, ``sweep.png``. It trains and measures
nothing.
"""

import json
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TextIO

from typing_extensions import TypedDict

from visionattn.cli.files import check_folder, lock, unfinished, write_text
from visionattn.cli.provenance import Provenance
from visionattn.cli.untrusted import brief, check_partly, read_json
from visionattn.lab.sweep.grid import Cell, Network
from visionattn.training.config import TrainConfig

SWEEP, TABLE, ROWS, PLOT, LOCK = "sweep.json", "table.md", "cells.csv", "sweep.png", "lock"
RUNS, CELLS, MEASUREMENTS, HPARAMS = "runs", "cells", "measurements", "hparams"
WAY_OUT = "delete it to repeat what it stands for"
"""What to do with a file that cannot be read."""
QUIET = ("output", "run", "resume", "overwrite", "save_every", "threads", "seed")
"""Keys in which calls of one sweep may differ: those of the place, of the speed, and those that the
grid varies.
"""


@dataclass(frozen=True)
class Ending:
    """How a training ended."""

    status: Literal["finished", "nan", "oom", "failed", "stopped"]
    """"stopped": after Ctrl-C."""
    reason: str | None
    """One line; None for a finished one."""
    exit_code: int
    """The exit code of the process; below 0, the signal that killed it."""
    seconds: float
    """The seconds of all its attempts."""
    attempts: int
    result: dict[str, int | float | None] | None
    """``validation_accuracy``, ``test_accuracy`` (None without a test split) and the like; None
    unless finished.
    """
    provenance: dict[str, str | int | float | bool | None]
    """The provenance of the training's process, as far as it said."""

    @property
    def goes_on(self) -> bool:
        """Tell whether the next call resumes it without being asked: it was killed or stopped, and
        did not fail by itself.
        """
        return self.status == "stopped" or (self.status == "failed" and self.exit_code < 0)


class _Known(TypedDict):
    """The file of a training that has ended; ``cell`` is for people."""

    ending: Ending


class _Call(TypedDict):
    """A call of the sweep."""

    seconds: float
    command: NotRequired[str]
    date: NotRequired[str]
    commit: NotRequired[str | None]
    jobs: NotRequired[int]


class _Sweep(TypedDict):
    """The file of a sweep."""

    base: dict[str, Any]
    calls: list[_Call]


class _Conditions(TypedDict):
    """What measurements depend on, as far as tables say it."""

    batch: int


class _Pass(TypedDict):
    """What was measured of a pass."""

    status: Literal["ok", "oom", "failed"]
    reason: str | None
    peak_bytes: NotRequired[int | None]
    backends: NotRequired[list[str]]
    seconds: NotRequired[list[float]]


class _Measured(TypedDict):
    """The file of a network's measurements; ``network`` is for people."""

    conditions: _Conditions
    timed: str | None
    provenance: NotRequired[Provenance]
    inference: _Pass
    training: _Pass


class SweepFolder:
    """A sweep's folder on the disk.

    Args:
        path: the folder; it and its parents need not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock: TextIO | None = None

    @property
    def runs(self) -> Path:
        """The folder of the run folders."""
        return self.path / RUNS

    def check(self, base: TrainConfig, *, overwrite: bool) -> None:
        """Check that this sweep may have the folder; nothing is written.

        Raises:
            ValueError: a file is in the way, the folder holds something else, or a sweep of another
                training.
        """
        check_folder(self.path, "choose another --output")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not (self.path / SWEEP).is_file():
            raise ValueError(
                f"{self.path} is not empty and holds no sweep; choose another --output"
            )
        for name in (RUNS, CELLS, MEASUREMENTS):
            if (self.path / name).exists() and not (self.path / name).is_dir():
                raise ValueError(f"{self.path / name} is no folder; move it out of the way")
        different = differences(comparable(TrainConfig()), self._sweep()["base"], comparable(base))
        if different and not overwrite:
            raise ValueError(
                f"{self.path} holds a sweep of another training: {different[0]}; choose another "
                f"--output, or --overwrite"
            )
        if not overwrite:
            # Everything is read once before anything is written.
            for path in sorted((self.path / CELLS).glob("*.json")):
                self._ending(path)
            for path in sorted((self.path / MEASUREMENTS).glob("*.json")):
                self._measurement(path)

    def open(self, base: TrainConfig, *, overwrite: bool) -> None:
        """Make the folder, empty it where asked to, and keep other sweeps out while this one or a
        training of it lives.

        Raises:
            ValueError: another sweep, or a training that one left behind, is at work here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        taken = (
            f"another sweep, or a training of it, is at work in {self.path}; wait for it or end it"
        )
        self._lock = lock(self.path / LOCK, taken)
        if overwrite:
            self._clear()
        for name in (RUNS, CELLS, MEASUREMENTS):
            (self.path / name).mkdir(exist_ok=True)
        for name in ("", RUNS, CELLS, MEASUREMENTS):
            for path in unfinished(self.path / name):  # of a sweep that was killed as it wrote
                path.unlink()
        if not (self.path / SWEEP).exists():
            self.write(SWEEP, {"base": comparable(base), "calls": []})

    def close(self) -> None:
        """Let other sweeps in."""
        if self._lock:
            self._lock.close()

    def lock_number(self) -> int:
        """Return the file descriptor that processes of the sweep hold, so that none of them is
        overlooked.
        """
        return self._lock.fileno()

    def _clear(self) -> None:
        for name in (RUNS, CELLS, MEASUREMENTS, HPARAMS):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (SWEEP, TABLE, ROWS, PLOT):
            (self.path / name).unlink(missing_ok=True)

    def ending(self, cell: Cell) -> Ending | None:
        """Return how a training ended; None where it has not."""
        return self._ending(self.path / CELLS / f"{cell.name}.json")

    def _ending(self, path: Path) -> Ending | None:
        known = self._read(_Known, path)
        if known is None:
            return None
        ending = known["ending"]
        scores = [
            (ending.result or {}).get(key) for key in ("validation_accuracy", "test_accuracy")
        ]
        wrong = {
            "seconds": not 0 <= ending.seconds < math.inf,
            "attempts": ending.attempts < 0,
            "result": (ending.status == "finished") != (ending.result is not None)
            or (ending.status == "finished" and scores[0] is None)
            or not all(0 <= score <= 1 for score in scores if score is not None)
            or (ending.result is not None and "test_accuracy" not in ending.result),
        }
        for key, is_wrong in wrong.items():
            if is_wrong:
                said = f"ending.{key} is {brief(getattr(ending, key))}, which cannot be"
                raise ValueError(f"{path} is damaged ({said}); {WAY_OUT}")
        return ending

    def keep_ending(self, cell: Cell, ending: Ending) -> None:
        """Write how a training ended."""
        self.write(f"{CELLS}/{cell.name}.json", {"cell": asdict(cell), "ending": asdict(ending)})

    def measurement(self, network: Network) -> dict[str, Any] | None:
        """Return what was measured of a network; None where nothing was."""
        return self._measurement(self.path / MEASUREMENTS / f"{network.name}.json")

    def _measurement(self, path: Path) -> dict[str, Any] | None:
        known = self._read(_Measured, path)
        for name in ("inference", "training") if known else ():
            entry = known[name]
            wrong = not all(0 < each < math.inf for each in entry.get("seconds", []))
            wrong |= entry.get("seconds") == [] or (entry.get("peak_bytes") or 0) < 0
            wrong |= entry["status"] == "ok" and not {"peak_bytes", "backends"} <= entry.keys()
            if wrong:
                raise ValueError(f"{path} is damaged ({name} cannot be so); {WAY_OUT}")
        return known

    def keep_measurement(self, network: Network, measured: dict[str, Any]) -> None:
        """Write what was measured."""
        self.write(f"{MEASUREMENTS}/{network.name}.json", measured)

    def keep_call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Add a call (command, date, seconds) to the sweep's own; returns all of them."""
        content = self._sweep()
        content["calls"].append(call)
        self.write(SWEEP, content)
        return content["calls"]

    def _sweep(self) -> dict[str, Any]:
        """Return the training that is varied, and the calls."""
        path = self.path / SWEEP
        content = self._read(_Sweep, path)
        try:
            check_partly(TrainConfig, content["base"], "base")
            if any(not 0 <= call["seconds"] < math.inf for call in content["calls"]):
                raise ValueError("the seconds of a call are below 0 or without end")
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}); {WAY_OUT}") from error
        return content

    def _read(self, kind: type, path: Path) -> Any:
        """Return a JSON file, as a type says; None where there is none.

        Raises:
            ValueError: it is damaged.
        """
        return read_json(kind, path, WAY_OUT) if path.exists() else None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file whole or not at all."""
        write_text(self.path / name, json.dumps(content, indent=2) + "\n")


def comparable(base: TrainConfig) -> dict[str, Any]:
    """Return what two calls of one sweep share: the training without what the grid varies and what
    says where to write.
    """
    content = {key: value for key, value in asdict(base).items() if key not in QUIET}
    content["data"] = {key: value for key, value in content["data"].items() if key != "img_size"}
    args = {
        key: value for key, value in base.model.args.items() if key not in ("num_heads", "form")
    }
    content["model"] = asdict(base.model) | {"args": args}
    return json.loads(json.dumps(content))


def differences(
    usual: dict[str, Any], old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> list[str]:
    """Return a few words per key whose value is another one; a key that the old does not know had
    its usual value.
    """
    lines = []
    for key in usual | old | new:
        was, is_now = old.get(key, usual.get(key)), new.get(key)
        if isinstance(was, dict) and isinstance(is_now, dict):
            lines += differences(usual.get(key) or {}, was, is_now, f"{prefix}{key}.")
        elif was != is_now:
            lines.append(f"{prefix}{key} is {is_now}, there it is {was}")
    return lines
