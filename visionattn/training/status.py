"""How a run stands, for programs that start runs: ``status.json`` in its folder.

This module has the words for the ways in which a run ends. The exit codes are those of
``cli/ends.py``.
"""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from visionattn.cli.ends import (
    DoesNotFit,
    NonFinite,
    OutOfMemory,
    Stopped,
    exit_code,
    in_one_line,
)
from visionattn.cli.files import write_text
from visionattn.training.progress import Result
from visionattn.training.record import STATUS, held

ROOM = 4000
"""Bytes of the file while a run is at work, most of them blanks: its end is written there where the
disk is full.
"""
ENDS = {NonFinite: "nan", OutOfMemory: "oom", DoesNotFit: "oom"}
ENDS |= {Stopped: "stopped", KeyboardInterrupt: "stopped"}


class Status:
    """Write ``running`` on entry and how the run ended on exit, and keep other runs out of the
    folder.

    The file is whole at all times, except for a moment on a full disk. A status is one of
    ``running`` (which stays after a kill that left no time to say more), ``finished``, ``stopped``
    (Ctrl-C or SIGTERM), ``nan``, ``oom`` and ``failed``.

    Args:
        folder: the run's folder; it is made where it does not exist.
        provenance: what the numbers depend on besides the configuration.
        writes: whether this is the process that writes.
    """

    def __init__(self, folder: Path, provenance: dict[str, Any], *, writes: bool = True):
        self.folder, self.provenance = folder, provenance
        self.writes = writes
        self.result: Result | None = None
        """What the run came to, once it has finished."""

    def __enter__(self) -> "Status":
        with ExitStack() as lock:
            if self.writes:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock.enter_context(held(self.folder))
            self._write("running", None, None)
            self._lock = lock.pop_all()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if error is None:
                self._write("finished", None, 0)
            else:
                self.end(error)

    def end(self, error: BaseException) -> None:
        """Write how a run ended that did not finish."""
        for _ in range(2):
            try:
                return self._write(ENDS.get(type(error), "failed"), reason(error), exit_code(error))
            except OSError:  # the disk that ended the run; what ended it is told anyway
                return None
            # torch's signal handler tells of a loader's process in the middle of anything
            except RuntimeError:
                continue

    def _write(self, status: str, why: str | None, code: int | None) -> None:
        if not self.writes:
            return
        content = {
            "status": status,
            "reason": why,
            "exit_code": code,
            "provenance": self.provenance,
        }
        content["result"] = self.result.figures() if self.result else None
        text, path = json.dumps(content, indent=2, allow_nan=False) + "\n", self.folder / STATUS
        try:
            write_text(path, text.ljust(ROOM) if status == "running" else text)
        except OSError:
            if status == "running" or not overwrite(path, text):
                raise


def overwrite(path: Path, text: str) -> bool:
    """Write a text into the space that a file has already, as on a full disk; return whether it
    fits.
    """
    content = text.encode()
    with open(path, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if len(content) > size:
            return False
        file.seek(0)
        file.write(content.ljust(size))
    return True


def reason(error: BaseException) -> str:
    """Say why a run ended, in one line."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted twice, without saving the state"
    return in_one_line(error)
