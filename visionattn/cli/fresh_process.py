"""Call a function in a fresh process, to measure memory.

In a fresh process an allocation cannot reuse memory that was freed earlier, and running out of
memory ends only that process. The process is ``python -m visionattn.cli.fresh_process``. It reads
the function and its arguments from standard input.
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

from visionattn.cli.exit_codes import Failed, is_out_of_memory

OUT_OF_MEMORY = 3
"""Exit code of a process that ran out of memory."""
PACKAGE = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "visionattn.cli.fresh_process")
KILLED = 9
"""The number of SIGKILL, which Windows lacks."""


def memory_kills() -> int:
    """Return the number of processes that the system has killed for lack of memory; 0 if unknown.

    The count covers this control group or, if it has no count, the machine. A process killed by
    SIGKILL ran out of memory if the count has grown since its start.
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
    """Return the environment of this process, with the package on ``PYTHONPATH``.

    Args:
        returning: return freed memory to the system at once: slower, but memory readings are exact.
    """
    paths = [str(PACKAGE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if returning else {})


def ended_for_memory(code: int, kills: int) -> bool:
    """Tell whether the system killed a process for lack of memory.

    Args:
        code: its exit code; a negative one is the signal that killed it.
        kills: the value of ``memory_kills`` before its start.
    """
    return code == -KILLED and memory_kills() > kills


def ask(
    function: Callable[..., Any], given: dict[str, Any], what: str, *, returning: bool = True
) -> Any:
    """Return the result of ``function(**given)``, called in a fresh process.

    Args:
        function: a module-level function of the package; arguments and result are JSON values.
        given: its arguments.
        what: name of the work, for the error.
        returning: as for ``environment``.

    Raises:
        torch.OutOfMemoryError: the process ran out of memory.
        Failed: the process failed in another way; the text is its last line on standard error, or
            the signal that killed it.
    """
    named = {"module": function.__module__, "function": function.__name__}
    kills, request = memory_kills(), json.dumps(named | {"given": given})
    # Not a fork, which would share memory with this process.
    options = dict(capture_output=True, text=True, env=environment(returning=returning))
    done = subprocess.run(COMMAND, input=request, **options)
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
    """Make the system kill this process first when memory runs out."""
    if Path("/proc/self/oom_score_adj").exists():
        Path("/proc/self/oom_score_adj").write_text("1000")


def answer(text: str) -> int:
    """Call the requested function, print its result as JSON, and return the exit code."""
    first_to_end()
    request = json.loads(text)
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
