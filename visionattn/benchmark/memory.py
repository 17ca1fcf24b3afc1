"""Peak memory of a case. On a processor it is measured in a fresh process, where nothing freed earlier hides an allocation.

``python -m visionattn.benchmark.memory`` is that process: a case as JSON on standard input, the bytes on standard output.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

import visionattn
from visionattn.benchmark.cases import Case, Work
from visionattn.measure import is_out_of_memory, memory_kills, peak_bytes
from visionattn.training.interrupt import Failed

OUT_OF_MEMORY = 3
"""Exit code of the process for a case that does not fit."""
PACKAGE = Path(visionattn.__file__).parents[1]


def build(case: Case, device: str = "cpu") -> Work:
    """Inputs in memory and the operation or the model on them."""
    if case.kind == "operation":
        from visionattn.benchmark.operations import build_operation

        return build_operation(case, device)
    from visionattn.benchmark.networks import build_network

    return build_network(case, device)


def case_peak_bytes(case: Case, device: str = "cpu") -> int:
    """Peak memory of one run above the level with its inputs, and for models the weights, in place; the result is part of it.

    Raises:
        torch.OutOfMemoryError: it does not fit, or the system ended the process that tried for want of memory.
        NotImplementedError: a CPU under another system than Linux.
        Failed: the process failed in another way.
    """
    if device != "cpu":
        work = build(case, device)
        work()
        return peak_bytes(work, device)
    if not sys.platform.startswith("linux"):
        raise NotImplementedError("peak memory of a CPU is measured under Linux only")
    paths = [str(PACKAGE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "visionattn.benchmark.memory"]
    told = json.dumps({"case": case.as_dict(), "threads": torch.get_num_threads()})
    kills = memory_kills()
    done = subprocess.run(command, input=told, capture_output=True, text=True, env=env)
    ended = done.returncode == -signal.SIGKILL and memory_kills() > kills
    if ended or done.returncode == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{case.label} at {case.size} does not fit into memory")
    if done.returncode < 0:
        raise Failed(f"measuring the memory of {case.label} failed: killed by signal {-done.returncode}")
    if done.returncode:
        raise Failed(f"measuring the memory of {case.label} failed: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout)


def main() -> int:
    """Measure the case on standard input; the first process to end when the system runs out of memory is this one."""
    if Path("/proc/self/oom_score_adj").exists():
        Path("/proc/self/oom_score_adj").write_text("1000")
    told = json.load(sys.stdin)
    torch.set_num_threads(told["threads"])
    case = Case(**told["case"])
    try:
        small = build(replace(case, size=min(case.size, 128)))
        small()  # libraries and threads take their own memory before the measurement
        print(peak_bytes(build(case)))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main())
