"""Runs commands on malformed input, each in a fork of this process: what is not as promised?

The promise: exit code 2, one line on standard error that begins with ``error: ``, within a time,
and every file as it was. What a tool tolerates on purpose is a case with another code, and says so.
"""

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
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
    code: int | None
    """None: it was killed, as it took too long."""
    out: str
    err: str
    changed: tuple[str, ...]
    """Files that are not as they were."""
    seconds: float

    def faults(self) -> list[str]:
        """Return what is not as promised, a few words each."""
        found = []
        if self.code is None:
            return [f"hangs: killed after {self.seconds:.0f} s"]
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


def run(
    cases: Sequence[Case], valid: Path, *, jobs: int = 1, seconds: float = 60
) -> Iterator[Result]:
    """Run commands, ``jobs`` at a time, and yield how each ended, in the order in which they end.

    Args:
        cases: the commands.
        valid: a folder of valid files, which each command gets a copy of as its current folder.
        jobs: commands at a time.
        seconds: after which a command is killed.
    """
    waiting = list(cases)[::-1]
    running: dict[int, _Running] = {}
    with tempfile.TemporaryDirectory(prefix="malformed") as place:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    one = _Running(waiting.pop(), valid, Path(place))
                    running[one.process] = one
                for process, one in list(running.items()):
                    if (result := one.ended(seconds)) is not None:
                        del running[process]
                        yield result
                time.sleep(0.002)
        finally:
            for one in running.values():
                one.kill()


class _Running:
    """A command at work in a folder of its own."""

    def __init__(self, case: Case, valid: Path, place: Path):
        self.case = case
        self.place = Path(tempfile.mkdtemp(dir=place))
        self.folder = self.place / "here"
        shutil.copytree(valid, self.folder, symlinks=True)
        if case.change is not None:
            case.change(self.folder)
        self.before = contents(self.folder)
        self.began = time.monotonic()
        sys.stdout.flush()
        self.process = os.fork()
        if not self.process:
            _become(case.argv, self.folder, self.place)

    def ended(self, seconds: float) -> Result | None:
        """Return how the command ended; None while it is at work."""
        process, status = os.waitpid(self.process, os.WNOHANG)
        took = time.monotonic() - self.began
        if not process and took < seconds:
            return None
        self.kill(reaped=bool(process))
        out, err = (
            (self.place / name).read_text(encoding="utf-8", errors="replace")
            for name in ("out", "err")
        )
        changed = tuple(
            name
            for name in differing(self.before, contents(self.folder))
            if not name.startswith(self.case.writes or ("\0",))
        )
        shutil.rmtree(self.place, ignore_errors=True)
        code = os.waitstatus_to_exitcode(status) if process else None
        return Result(self.case, code, out, err, changed, took)

    def kill(self, *, reaped: bool = False) -> None:
        """End the command, and processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        if not reaped:
            os.waitpid(self.process, 0)


def _become(argv: Sequence[str], folder: Path, place: Path) -> None:
    """Turn this fork into the command; it does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, name in ((0, os.devnull), (1, place / "out"), (2, place / "err")):
            descriptor = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
            os.dup2(descriptor, number)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)
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


def contents(folder: Path) -> dict[str, str]:
    """Return what lies below a folder: a digest and the time of change of each file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = f"link to {os.readlink(path)}"
        elif path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = f"{digest} {path.stat().st_mtime_ns}"
        else:
            found[name] = f"{path.stat().st_mode:o}"
    return found


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of what is new, gone or changed."""
    return [name for name in sorted(before | after) if before.get(name) != after.get(name)]
