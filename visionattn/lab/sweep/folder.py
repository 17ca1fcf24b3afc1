"""The folder of a sweep: its files, what is known of each cell, and who may write to it.

``sweep.json`` (the training that is varied, and each call), ``runs/`` (a run folder, its ``.yaml``
and its ``.log`` for each training), ``cells/`` (how each training ended), ``measurements/``,
``hparams/`` (TensorBoard), ``table.md``, ``cells.csv``, ``sweep.png``. It trains and measures
nothing.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from visionattn.cli.files import check_folder, lock, write_text
from visionattn.lab.sweep.grid import Cell, Network
from visionattn.training.config import TrainConfig

SWEEP, TABLE, ROWS, PLOT, LOCK = "sweep.json", "table.md", "cells.csv", "sweep.png", "lock"
RUNS, CELLS, MEASUREMENTS, HPARAMS = "runs", "cells", "measurements", "hparams"
QUIET = ("output", "run", "resume", "overwrite", "log_every", "save_every", "threads", "seed")
"""Keys in which calls of one sweep may differ: those of the place, of the speed, and those that the
grid varies.
"""


@dataclass(frozen=True)
class Ending:
    """How a training ended."""

    status: str
    """"finished", "nan", "oom", "failed" or, after Ctrl-C, "stopped"."""
    reason: str | None
    """One line; None for a finished one."""
    exit_code: int
    """The exit code of the process; below 0, the signal that killed it."""
    seconds: float
    """The seconds of all its attempts."""
    attempts: int
    result: dict[str, Any] | None
    """``validation_accuracy``, ``test_accuracy`` (None without a test split) and the like; None
    unless finished.
    """
    provenance: dict[str, Any]
    """The provenance of the training's process, as far as it said."""

    @property
    def goes_on(self) -> bool:
        """Tell whether the next call resumes it without being asked: it was killed or stopped, and
        did not fail by itself.
        """
        return self.status == "stopped" or (self.status == "failed" and self.exit_code < 0)


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
        different = differences(
            comparable(TrainConfig()), self.read(SWEEP)["base"], comparable(base)
        )
        if different and not overwrite:
            raise ValueError(
                f"{self.path} holds a sweep of another training: {different[0]}; choose another "
                f"--output, or --overwrite"
            )

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
        self._lock = lock(self.path / LOCK, taken, inherited=True)
        if overwrite:
            self._clear()
        for name in (RUNS, CELLS, MEASUREMENTS):
            (self.path / name).mkdir(exist_ok=True)
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
        content = self.read(f"{CELLS}/{cell.name}.json")
        return Ending(**content["ending"]) if content else None

    def keep_ending(self, cell: Cell, ending: Ending) -> None:
        """Write how a training ended."""
        self.write(f"{CELLS}/{cell.name}.json", {"cell": asdict(cell), "ending": asdict(ending)})

    def measurement(self, network: Network) -> dict[str, Any] | None:
        """Return what was measured of a network; None where nothing was."""
        return self.read(f"{MEASUREMENTS}/{network.name}.json")

    def keep_measurement(self, network: Network, measured: dict[str, Any]) -> None:
        """Write what was measured."""
        self.write(f"{MEASUREMENTS}/{network.name}.json", measured)

    def keep_call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Add a call (command, date, seconds) to the sweep's own; returns all of them."""
        content = self.read(SWEEP)
        content["calls"].append(call)
        self.write(SWEEP, content)
        return content["calls"]

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a JSON file; None where there is none.

        Raises:
            ValueError: it is damaged.
        """
        path = self.path / name
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path} is damaged ({error}); delete it to repeat what it stands for"
            ) from error

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
