"""Run ``make gpu OUT=folder``: check and measure the kernels on this GPU within ten minutes.

The phases are compilation, tests and the table. Each is a process with a time limit. A phase that
fails does not stop the next one, unless the first kernel is wrong. All output also goes to
``OUT/log.txt``, and each row to ``OUT/rows.jsonl`` when ready. The output ends with a summary of
both files, also after Ctrl-C.
"""

import argparse
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from visionattn.cli.files import added_to, printable, read_lines, write_text
from visionattn.cli.tables import Record, duration

ROOT = Path(__file__).parents[3]
PACKAGES = ("torch", "triton", "timm", "einops", "pytest")
WRITTEN = ("log.txt", "rows.jsonl", "summary.txt")
SECONDS, REHEARSAL_SECONDS = 580, 1800
"""Time limits of all phases together: on a GPU a little less than ten minutes, and in a rehearsal.
"""
LAST_ROW = 40
"""Seconds before the end in which no row starts."""
PYTEST = ("-v", "--tb=short", "-p", "no:cacheprovider", "-W", "default")
REHEARSED_TESTS = ("-m", "not gpu", "-k", "grids_that_cuda_does_not_launch")
MOST_LINES, MOST_COLUMNS = 60, 190
MOST_FAILURES = 10
ABOUT = ("gpu", "torch", "triton", "timm", "commit", "date")
TEST = re.compile(r"^(tests/\S+\.py)::(.*) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)


def phases(out: Path, only: str | None, rehearse: bool) -> list[tuple[str, list[str], float]]:
    """Return the name and the command of each phase, and the share of the total time by which it
    ends.
    """
    module = [sys.executable, "-u", "-m"]
    own = ["--rehearse"] * rehearse + (["--only", only] if only else [])
    tests = REHEARSED_TESTS if rehearse else ("-m", "gpu")
    table = [*module, "visionattn", "benchmark", "gpu", *own, "--rows", str(out / "rows.jsonl")]
    return [
        ("compile", [*module, "visionattn.lab.gpu.compile_ahead", *own], 0.4),
        ("tests", [*module, "pytest", *PYTEST, *tests, "tests/kernels"], 0.55),
        ("table", [*table, "--minutes"], 1.0),
    ]


def run_phase(command: Sequence[str], seconds: float, rehearse: bool, say: Callable) -> int:
    """Run a process and pass its output to ``say``; kill it and its children after ``seconds``.

    Return the exit code, which is negative if the process was killed.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "2"}
    environment |= {"TRITON_INTERPRET": "1"} if rehearse else {}
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    options |= dict(cwd=ROOT, env=environment, process_group=0)
    with subprocess.Popen(command, **options) as process:

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            for text in process.stdout:
                say(text.rstrip("\n"))
            return process.wait()
        finally:  # also after Ctrl-C
            timer.cancel()
            end()


def run_all(
    out: Path, seconds: float, only: str | None, rehearse: bool, say: Callable[[str], None]
) -> list[tuple[str, bool]]:
    """Run the phases in order; return the outcome of each as text, and whether it succeeded."""
    began, ended = time.monotonic(), []
    for name, command, share in phases(out, only, rehearse):
        now = time.monotonic() - began
        if name == "table":
            command = [*command, f"{max(0.0, seconds - LAST_ROW - now) / 60:.2f}"]
        say(f"\n== {name}: at {now:.0f} s, until {share * seconds:.0f} s")
        try:
            code = run_phase(command, max(0.0, share * seconds - now), rehearse, say)
        except KeyboardInterrupt:
            say("interrupted; results so far:")
            return [*ended, (f"{name}: interrupted", False)]
        how = "done" if code == 0 else "ended at its limit" if code < 0 else f"exit code {code}"
        ended.append((f"{name}: {how} after {time.monotonic() - began - now:.0f} s", code == 0))
        say(f"== {ended[-1][0]}")
        if name == "compile" and code == 2:
            say("error: the first kernel is wrong, so the other phases are skipped")
            break
    return ended


def summary(out: Path, phases: Sequence[str]) -> tuple[list[str], bool]:
    """Return the summary, and whether some tests passed, none failed, and no row is wrong."""
    tests, tests_good = tests_lines((out / "log.txt").read_text(errors="replace"))
    rows = read_lines(out / "rows.jsonl") if (out / "rows.jsonl").exists() else []
    about = next((row for row in rows if row["kind"] == "provenance"), {})
    on = ", ".join(f"{name} {about[name]}" for name in ABOUT if about.get(name))
    table = [row for row in rows if row["kind"] == "row"]
    lines = ["== summary", on or "no table was begun", *phases, *tests, *map(row_line, table)]
    if len(lines) >= MOST_LINES:
        left = len(lines) - MOST_LINES + 2
        lines = [*lines[: MOST_LINES - 2], f"{left} more lines: see rows.jsonl"]
    lines.append(f"files in {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")
    good = bool(table) and not any(row["status"].startswith(("wrong", "failed")) for row in table)
    return [line[:MOST_COLUMNS] for line in lines], tests_good and good


def tests_lines(log: str) -> tuple[list[str], bool]:
    """Read pytest's output. Return lines with the counts of outcomes and the first failures, and
    whether the tests succeeded.
    """
    found = TEST.findall(log)
    counts = Counter(outcome.lower() for _, _, outcome in found)
    failed = [f"FAILED {path}::{name}" for path, name, how in found if how in ("FAILED", "ERROR")]
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    lines = [f"tests: {outcomes or 'none ran'}", *failed[:MOST_FAILURES]]
    return lines, counts["passed"] > 0 and not failed


def row_line(row: Record) -> str:
    """Return a row as one line of text."""
    named = f"{row['what']}, {row['size']}"
    if row["seconds"] is None:
        return f"{named}: {row['status']}"
    names = [name for name in ("of_floor", "x_sdpa", "x_identity") if row[name]]
    values = [f"{row[name]:.3g} {name.replace('_', ' ')}" for name in names]
    if row["gib"]:
        values.append(f"{row['gib']:.3g} GiB")
    return f"{named}: {', '.join([duration(row['seconds']), *values])}; {row['reached'] or '-'}"


def main(argv: Sequence[str]) -> int:
    """Run all phases. Return 0 if all ran and nothing is wrong, 2 if the folder has files of an
    earlier run, else 1.
    """
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser("python -m visionattn.lab.gpu.gpu_phases", description=about)
    parser.add_argument("out", type=Path, help=f"folder for {', '.join(WRITTEN)}")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, in the interpreter")
    parser.add_argument("--only", metavar="PATTERN", help="rows of the table that match")
    flags = parser.parse_args(argv)
    out = flags.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    there = [name for name in WRITTEN if (out / name).exists()]
    if there:
        what = f"{out} has {there[0]} of an earlier run"
        print(f"error: {what}; pass another folder with OUT=folder", file=sys.stderr)
        return 2
    # On SIGTERM, stop the processes as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    with added_to(out / "log.txt") as log:

        def say(text: str) -> None:
            print(text, flush=True)
            log.write(printable(text + "\n").encode())
            log.flush()

        say(
            f"python {platform.python_version()}, "
            + ", ".join(f"{package} {version(package)}" for package in PACKAGES)
        )
        seconds = REHEARSAL_SECONDS if flags.rehearse else SECONDS
        ended = run_all(out, seconds, flags.only, flags.rehearse, say)
        lines, good = summary(out, [how for how, _ in ended])
        write_text(out / "summary.txt", "\n".join(lines) + "\n")
        say("\n" + "\n".join(lines))
    return 0 if good and len(ended) == 3 and all(well for _, well in ended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
