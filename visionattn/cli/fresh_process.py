"""Work in a fresh process, where nothing freed earlier hides an allocation, and which may run out
of memory.

This module owns what such a process is given and what its end means.
``python -m visionattn.cli.fresh_process`` is that process: it reads from standard input which
function is called with what.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from visionattn.cli.ends import Failed, is_out_of_memory

OUT_OF_MEMORY = 3
"""Exit code of a process whose work does not fit."""
PACKAGE = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "visionattn.cli.fresh_process")
KILLED = 9
"""The number of SIGKILL, which Windows lacks."""


def memory_kills() -> int:
    """Count the processes that the system ended for want of memory: those of this control group, or
    all where groups are not counted, or 0 where nothing is.

    A process that ended by SIGKILL ran out of memory where the count has grown since it began.
    """
    group = Path("/proc/self/cgroup")
    name = group.read_text().strip().rpartition(":")[2].lstrip("/") if group.exists() else ""
    for counts in (Path("/sys/fs/cgroup") / name / "memory.events", Path("/proc/vmstat")):
        try:
            words = counts.read_text().split()
            return int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError):
            continue
    return 0


def environment(*, returning: bool = False) -> dict[str, str]:
    """Return the environment of this process, with the package found wherever it is started.

    Args:
        returning: freed memory goes back to the system at once, which makes the level of memory
            exact and costs time.
    """
    paths = [str(PACKAGE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if returning else {})


def ended_for_memory(code: int, kills: int) -> bool:
    """Tell whether the system ended a process for want of memory.

    Args:
        code: of its end; below 0 the signal that killed it.
        kills: what ``memory_kills`` said before it began.
    """
    return code == -KILLED and memory_kills() > kills


def ask(function: Callable[..., Any], given: dict[str, Any], what: str) -> Any:
    """Return what ``function(**given)`` returns in a process of its own.

    Args:
        function: a function of a module of the package that takes and returns what JSON holds.
        given: its arguments.
        what: what is measured, for the error.

    Raises:
        torch.OutOfMemoryError: it does not fit, or the system ended the process for want of memory.
        Failed: the process failed in another way; the text is the last line that it wrote, or the
            signal that ended it.
    """
    named = {"module": function.__module__, "function": function.__name__}
    kills, told = memory_kills(), json.dumps(named | {"given": given})
    # All is imported anew, so that even the level of memory before the work is its own.
    options = dict(capture_output=True, text=True, env=environment(returning=True))
    done = subprocess.run(COMMAND, input=told, **options)
    full = done.returncode == OUT_OF_MEMORY or (done.returncode and "bad_alloc" in done.stderr)
    if full or ended_for_memory(done.returncode, kills):
        raise torch.OutOfMemoryError(f"{what} does not fit into memory")
    if done.returncode < 0:
        raise Failed(f"killed by signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [
            f"the process ended with code {done.returncode}"
        ]
        raise Failed(lines[-1][:160])
    return json.loads(done.stdout.splitlines()[-1])


def first_to_end() -> None:
    """Let this process be the first that the system ends when it runs out of memory."""
    if Path("/proc/self/oom_score_adj").exists():
        Path("/proc/self/oom_score_adj").write_text("1000")


def answer(told: str) -> int:
    """Print what the function that is asked for returns, and return the exit code."""
    first_to_end()
    request = json.loads(told)
    try:
        function = getattr(import_module(request["module"]), request["function"])
        print(json.dumps(function(**request["given"])))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(answer(sys.stdin.read()))
