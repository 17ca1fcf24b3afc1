"""Peak memory of a case. On a processor it is measured in a fresh process, where nothing freed
earlier hides an allocation.
"""

import sys
from typing import Any

import torch

from visionattn.cli.ends import Failed
from visionattn.cli.fresh_process import ask
from visionattn.lab.cases import Case, Work
from visionattn.lab.measure import peak_bytes


def build(case: Case, device: str = "cpu") -> Work:
    """Build inputs in memory and the operation or the model on them."""
    if case.kind == "operation":
        from visionattn.lab.operations import build_operation

        return build_operation(case, device)
    from visionattn.lab.networks import build_network

    return build_network(case, device)


def case_peak_bytes(case: Case, device: str = "cpu", *, warm: bool = True) -> int:
    """Return the peak memory of one run above the level with its inputs, and for models the
    weights, in place; the result is part of it.

    Args:
        case: what is run.
        device: where.
        warm: a run before it takes what libraries keep from their first call at a size (some MiB
            for each thread), so that it does not count.

    Raises:
        torch.OutOfMemoryError: it does not fit, or the system ended the process that tried for want
            of memory.
        NotImplementedError: a CPU under another system than Linux.
        Failed: the process failed in another way.
    """
    if device != "cpu":
        return _peak(case, device, warm)
    if not sys.platform.startswith("linux"):
        raise NotImplementedError("peak memory of a CPU is measured under Linux only")
    given = {"case": case.as_dict(), "threads": torch.get_num_threads(), "warm": warm}
    try:
        return ask(peak_here, given, f"{case.label} at {case.size}")
    except Failed as error:
        raise Failed(f"measuring the memory of {case.label} failed: {error}") from error


def peak_here(case: dict[str, Any], threads: int, warm: bool) -> int:
    """Return the bytes of a case, told as plain values, in this process."""
    torch.set_num_threads(threads)
    return _peak(Case(**case), "cpu", warm)


def _peak(case: Case, device: str, warm: bool) -> int:
    work = build(case, device)
    if warm:
        work()
    return peak_bytes(work, device)
