"""Runs commands on malformed input, each in a fork of this process: what is not as promised?

The promise: exit code 2, one line on standard error that begins with ``error: ``, within a time,
and every file as it was. What a tool tolerates on purpose is a case with another code, and says so.
"""

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST_LINE = 600
"""The most characters that an error may have."""
MEMORY_BYTES = 12 * 2**30
"""Address space of a command: more is refused to it, so that an absurd size fails at once."""


@dataclass(frozen=True)
class Case:
    """A command and what it is called on."""

    name: str
    """``group/what``."""
    argv: tuple[str, ...]
    """The words behind ``visionattn``."""
    change: Callable[[Path], object] | None = None
    """Makes the folder of valid files malformed; None: the flags alone are."""
    tolerated: str | None = None
    """Where the command goes on by intent: what it then prints, as far as it must."""
    writes: tuple[str, ...] = ()
    """Files, or folders with all in them, that a command which goes on may write."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    case: Case
    code: int
    out: str
    err: str
    changed: tuple[str, ...]
    """Files that are not as they were."""

    def faults(self) -> list[str]:
        """Return what is not as promised, a few words each."""
        found = []
        if self.code == -signal.SIGALRM:
            return ["hangs: killed"]
        if "Traceback" in self.err or "Traceback" in self.out:
            found.append(f"traceback: {self.err.strip().splitlines()[-1][:200]}")
        wanted = 2 if self.case.tolerated is None else 0
        if self.code != wanted:
            found.append(f"exit code {self.code}, not {wanted}")
        if self.case.tolerated is not None:
            if self.case.tolerated not in self.out + self.err:
                found.append(f"does not say {self.case.tolerated!r}")
        elif not found and not (self.err.startswith("error: ") and self.err.count("\n") == 1):
            found.append(f"not one line that begins with error: {self.err[:200]!r}")
        elif not found and len(self.err) > LONGEST_LINE:
            found.append(f"a line of {len(self.err)} characters")
        if self.changed:
            found.append(f"left behind or changed: {', '.join(self.changed[:5])}")
        return found


def run(cases: Sequence[Case], valid: Path, *, seconds: int = 60) -> Iterator[Result]:
    """Run each command in a copy of the folder of valid files, and yield how it ended; after so
    many seconds it is killed.
    """
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="malformed") as name:
            place = Path(name)
            folder = place / "here"
            shutil.copytree(valid, folder, symlinks=True)
            if case.change is not None:
                case.change(folder)
            before = contents(folder)
            sys.stdout.flush()
            process = os.fork()
            if not process:
                _become(case.argv, place, seconds)
            _, status = os.waitpid(process, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # processes that the command has started
            said = [(place / kind).read_text("utf-8", "replace") for kind in ("out", "err")]
            after = contents(folder)
            changed = [name for name in before | after if before.get(name) != after.get(name)]
            kept = tuple(name for name in changed if not name.startswith(case.writes or ("\0",)))
            yield Result(case, os.waitstatus_to_exitcode(status), *said, kept)


def _become(argv: Sequence[str], place: Path, seconds: int) -> None:
    """Turn this fork into the command; it does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.alarm(seconds)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        for number, name in ((0, os.devnull), (1, place / "out"), (2, place / "err")):
            os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT), number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
        os.chdir(place / "here")
        from visionattn.command import main

        try:
            code = main(argv)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except (Exception, KeyboardInterrupt):  # as Python does with what nobody catches
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 255)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return the files below a folder, and None for what is no file."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }
