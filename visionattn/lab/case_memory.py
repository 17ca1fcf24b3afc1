"""Peak memory of a case. On a processor it is measured in a fresh process, where nothing freed
earlier hides an allocation.
"""

from typing import Any

import torch

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
        Failed: the process failed in another way, as on a CPU without Linux.
    """
    if device != "cpu":
        return peak_here(case.as_dict(), None, device, warm)
    given = {"case": case.as_dict(), "threads": torch.get_num_threads(), "device": device}
    return ask(peak_here, given | {"warm": warm}, f"{case.label} at {case.size}")


def peak_here(case: dict[str, Any], threads: int | None, device: str, warm: bool) -> int:
    """Return the bytes of a case, told as plain values, in this process."""
    torch.set_num_threads(threads or torch.get_num_threads())
    work = build(Case(**case), device)
    if warm:
        work()
    return peak_bytes(work, device)
