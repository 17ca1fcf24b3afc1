"""``make gpu OUT=folder``: kernels checked and measured on the GPU at hand, within ten minutes.

Phases follow each other: the first kernel, kernels compiled ahead, tests, the table. Each has a
limit, and whatever happens to one, the next begins; without the first kernel nothing does. All
output goes to ``OUT/log.txt`` too, test results to ``OUT/tests.jsonl``, rows to ``OUT/rows.jsonl``,
each as it comes. The end of the output is a summary (``summary.py``).
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from visionattn.cli.files import added_to, printable, write_text
from visionattn.lab.gpu.summary import summary

PACKAGES = ("torch", "triton", "timm", "einops", "pytest")
ROOT = Path(__file__).parents[3]
SECONDS = 560
"""The time of the whole run, the summary included: a little less than ten minutes."""
REHEARSAL_SECONDS = 1800
"""The time of a rehearsal, which depends on how fast the machine's interpreter is."""
GRACE = 10
"""Seconds that an interrupted process has to end by itself."""
KILLED = 5
"""Seconds until the system has ended what was killed."""
SUMMARY = 5
THREADS = 2
"""Threads of a process: float64 references of several processes would fight for the cores."""
ALONE = (("TORCHINDUCTOR_COMPILE_THREADS", "1"),)
"""Each core has a process that compiles, so none of these is to start more."""
WRITTEN = ("log.txt", "tests.jsonl", "rows.jsonl", "summary.txt")
TEST_FILES = ("tests/kernels/test_*.py",)
PYTEST = ("-q", "-p", "no:benchmark", "-p", "no:cacheprovider", "-W", "default")
"""A run on hardware is not to die of a warning, or of a plugin, of others."""


def versions() -> str:
    """Return Python and the packages that are needed, in one line; nothing is imported for it."""
    found = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} is not installed")
    return ", ".join(found)


@dataclass(frozen=True)
class Phase:
    """Processes that run side by side, and until when."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    until: float
    """Seconds after the start of the run, at which they are ended."""
    needed: bool = False
    """Whether nothing follows where this phase fails."""
    variables: tuple[tuple[str, str], ...] = ()
    """Variables of the environment, for these processes alone."""


@dataclass
class Ended:
    """How a phase ended."""

    name: str
    codes: tuple[int, ...]
    seconds: float
    late: bool
    """Whether its time was over."""

    @property
    def ok(self) -> bool:
        """Tell whether all processes ended well, by themselves."""
        return not self.late and not any(self.codes)

    def __str__(self) -> str:
        how = "ended at its limit" if self.late else "done" if self.ok else "failed"
        codes = "" if self.ok else f", exit codes {' '.join(map(str, self.codes))}"
        return f"{self.name}: {how} after {self.seconds:.0f} s{codes}"


@dataclass
class Run:
    """Where a run writes, and since when it runs."""

    out: Path
    show: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.clock()
        self.log = added_to(self.out / "log.txt")
        self.lock = threading.Lock()

    def say(self, text: str) -> None:
        """Write to the screen and to the log, at once."""
        with self.lock:
            self.show(text)
            self.log.write(printable(text + "\n").encode())
            self.log.flush()

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return self.clock() - self.start


def run_phase(phase: Phase, run: Run, environment: dict[str, str]) -> Ended:
    """Run the processes of a phase side by side, and end what is left at its limit."""
    began = run.seconds
    run.say(f"\n== {phase.name}: at {began:.0f} s, until {phase.until:.0f} s")
    given = environment | dict(phase.variables)
    processes = [_start(command, given) for command in phase.commands]
    width = len(processes)
    readers = [
        threading.Thread(
            target=_copy, args=(process, f"[{i}] " if width > 1 else "", run), daemon=True
        )
        for i, process in enumerate(processes)
    ]
    for reader in readers:
        reader.start()
    late = False
    try:
        late = not _wait(processes, phase.until - run.seconds)
    finally:  # also where Ctrl-C or the end of the machine's time comes in between
        _end(processes)
    for process, reader in zip(processes, readers, strict=True):
        reader.join(timeout=GRACE)
        process.stdout.close()
    ended = Ended(phase.name, tuple(p.returncode for p in processes), run.seconds - began, late)
    run.say(f"== {ended}")
    return ended


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0, **options)


def _copy(process: subprocess.Popen, prefix: str, run: Run) -> None:
    for text in process.stdout:
        run.say(prefix + text.rstrip("\n"))


def _wait(processes: Sequence[subprocess.Popen], seconds: float) -> bool:
    """Tell whether all end within the seconds."""
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """Interrupt what still runs, and kill what does not end then, with all that it started."""
    left = [process for process in processes if process.poll() is None]
    for process in left:
        _signal(process, signal.SIGINT)
    if not _wait(left, GRACE):
        for process in left:
            _signal(process, signal.SIGKILL)
        _wait(left, KILLED)


def _signal(process: subprocess.Popen, number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def phases(
    out: Path,
    claims: Path,
    cores: int,
    seconds: float,
    *,
    rehearse: bool = False,
    only: str | None = None,
) -> list[Phase]:
    """Return what is done, in order, with the share of the time that each may take at most.

    Args:
        cores: of this machine.
        seconds: of the whole run.
        only: regular expression that the rows of the table are to fit; None: all.
    """
    module = (sys.executable, "-u", "-m")
    flags = ("--rehearse",) if rehearse else ()
    rows = ("--only", only) if only else ()
    tests = _tests(rehearse)
    # One compiler per core, and half as many testers, which share the GPU; a rehearsal makes do
    # with one or two.
    compilers, testers = (1 if only else 2,) * 2 if rehearse else (cores, max(1, cores // 2))
    compiling = tuple(
        (*module, "visionattn.lab.gpu.compile", *flags, *rows, f"--share={i}/{compilers}")
        + (f"--claims={claims}", "--", *PYTEST, *tests)
        for i in range(compilers)
    )
    testing = tuple(
        (
            *module,
            "pytest",
            *PYTEST,
            "-p",
            "visionattn.lab.gpu.dealt_tests",
            f"--share={i}/{testers}",
        )
        + (f"--results={out / 'tests.jsonl'}", *tests)
        for i in range(testers)
    )
    last = seconds - SUMMARY - GRACE - KILLED
    table = (*module, "visionattn", "benchmark", "gpu", *flags, *rows)
    table += ("--rows", str(out / "rows.jsonl"), "--minutes")
    # Limits count from the start of the run: a phase that ends early leaves its time to the next.
    found = [
        Phase(
            "first kernel",
            ((*module, "visionattn.lab.gpu.compile", "--first", *flags),),
            0.16 * seconds,
            True,
        ),
        Phase("compile ahead", compiling, 0.36 * seconds, variables=ALONE),
        Phase("tests", testing, 0.5 * seconds),
        Phase("table", (table,), last),
    ]
    if rehearse:
        tune = (*module, "visionattn", "benchmark", "tune", *flags)
        found.append(Phase("tune", (tune,), last))
    return found


def _tests(rehearse: bool) -> tuple[str, ...]:
    if rehearse:
        from visionattn.lab.gpu.rehearsal import selected_tests

        return tuple(selected_tests())
    files = (path for pattern in TEST_FILES for path in sorted(ROOT.glob(pattern)))
    return ("-m", "gpu", *(str(path.relative_to(ROOT)) for path in files))


def with_minutes(phase: Phase, now: float) -> Phase:
    """Return the phase whose command ends with ``--minutes`` given those that are left, less one
    row.
    """
    if phase.commands[0][-1] != "--minutes":
        return phase
    minutes = max(0.0, phase.until - 40 - now) / 60
    return replace(phase, commands=((*phase.commands[0], f"{minutes:.2f}"),))


def environment_of(rehearse: bool) -> dict[str, str]:
    """Return what the processes are given: this checkout, few threads, and the interpreter in a
    rehearsal.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
    given |= {"OMP_NUM_THREADS": str(THREADS)}
    return given | {"TRITON_INTERPRET": "1"} if rehearse else given


def run_all(todo: Sequence[Phase], run: Run, environment: dict[str, str]) -> list[Ended]:
    """Run phases one after the other and return how each ended; stop where a needed one fails."""
    ended: list[Ended] = []
    try:
        for phase in todo:
            ended.append(run_phase(with_minutes(phase, run.seconds), run, environment))
            if phase.needed and not ended[-1].ok:
                run.say(f"error: {phase.name} failed, so nothing else was begun")
                break
    except KeyboardInterrupt:
        run.say("interrupted: what was found until now follows")
        ended.append(Ended("the run", (130,), run.seconds, False))
    return ended


def main(argv: Sequence[str]) -> int:
    """Run all phases; 0 where everything ran and is right, 1 otherwise, 2 for a folder in the
    way.
    """
    parser = argparse.ArgumentParser(
        "python -m visionattn.lab.gpu.run", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("out", type=Path, help=f"folder for {', '.join(WRITTEN)}")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, in the interpreter")
    parser.add_argument(
        "--seconds", type=float, help=f"of the whole run ({SECONDS}; rehearsed {REHEARSAL_SECONDS})"
    )
    parser.add_argument("--only", metavar="PATTERN", help="rows of the table that this fits")
    flags = parser.parse_args(argv)
    flags.out.mkdir(parents=True, exist_ok=True)
    there = [name for name in WRITTEN if (flags.out / name).exists()]
    if there:
        what = f"{flags.out} has {there[0]} of an earlier run"
        print(f"error: {what}; take another folder with OUT=folder", file=sys.stderr)
        return 2
    # Ended by SIGTERM, the run still stops its processes, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    run = Run(flags.out.resolve(), lambda text: print(text, flush=True))
    run.say(versions())
    with tempfile.TemporaryDirectory() as claims:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        seconds = flags.seconds or (REHEARSAL_SECONDS if flags.rehearse else SECONDS)
        given = dict(rehearse=flags.rehearse, only=flags.only)
        todo = phases(run.out, Path(claims), cores, seconds, **given)
        ended = run_all(todo, run, environment_of(flags.rehearse))
    lines, good = summary(run.out, [str(one) for one in ended])
    write_text(run.out / "summary.txt", "\n".join(lines) + "\n")
    run.say("\n" + "\n".join(lines))
    return 0 if good and len(ended) == len(todo) and all(one.ok for one in ended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
