"""Measure the peak memory of a case. On a CPU this takes a fresh process: elsewhere an allocation
may reuse memory that was freed earlier, which does not raise the peak.
"""

from dataclasses import asdict
from typing import Any

import torch

from visionattn.cli.fresh_process import ask
from visionattn.lab.cases import Case, Work
from visionattn.lab.measure import peak_bytes


def build(case: Case, device: str = "cpu") -> Work:
    """Build the operation or the model of a case, with its inputs."""
    if case.kind == "operation":
        from visionattn.lab.compared_operations import build_operation

        return build_operation(case, device)
    from visionattn.lab.compared_models import build_network

    return build_network(case, device)


def case_peak_bytes(case: Case, device: str = "cpu", *, warm: bool = True) -> int:
    """Return the peak memory of one run in bytes, above the level with inputs and weights in
    memory. The result counts.

    Args:
        case: the operation or model.
        device: where it runs.
        warm: run once before. Libraries keep buffers from their first call at a size (some MiB per
            thread), which then do not count.

    Raises:
        torch.OutOfMemoryError: the case does not fit into memory.
        Failed: the process failed in another way. Measuring a CPU needs Linux.
    """
    if device != "cpu":
        return peak_here(asdict(case), None, device, warm)
    given = {"case": asdict(case), "threads": torch.get_num_threads(), "device": device}
    return ask(peak_here, given | {"warm": warm}, f"{case.label} at {case.size}")


def peak_here(case: dict[str, Any], threads: int | None, device: str, warm: bool) -> int:
    """Measure ``case_peak_bytes`` in this process, for a case given as plain values."""
    torch.set_num_threads(threads or torch.get_num_threads())
    work = build(Case(**case), device)
    if warm:
        work()
    return peak_bytes(work, device)
