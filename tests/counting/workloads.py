"""The operations whose launches are counted, and how they are recorded on memory that nobody
touches."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from unittest.mock import patch

import torch

from tests.helpers.kernel_launches import Launch, recorded
from visionattn.lab.cases import Case
from visionattn.lab.gpu.operations import call_of
from visionattn.lab.operations import function_of, make_tensors

Task = tuple[int, Case, int]
"""Compute capability, what runs, and the width of its values."""
BATCH, HEADS, TOKENS, DIRECT_TOKENS = 2, 6, 65_536, 4096
SHIFT = "taylorshift+temperature"
OPERATIONS = {
    "kernelized": ("kernelized", "auto", TOKENS),
    "kernelized + Joint": ("kernelized+joint", "auto", TOKENS),
    "kernelized causal": ("kernelized+causal", "auto", TOKENS),
    "efficient TaylorShift": (SHIFT, "efficient", TOKENS),
    "efficient TaylorShift + Joint": (f"{SHIFT}+joint", "efficient", TOKENS),
    "direct TaylorShift": (SHIFT, "direct", DIRECT_TOKENS),
}


def case_of(operation: str, d: int, dtype: str, backward: bool) -> Case:
    """The benchmark's case."""
    name, form, tokens = OPERATIONS[operation]
    return Case("operation", name, tokens, d, form, dtype, backward, BATCH, HEADS)


def launches_of(
    case: Case,
    capability: int,
    value_width: int | None = None,
    change: Callable[[str, dict], dict] | None = None,
) -> list[Launch]:
    """Every launch of the case on a GPU of this capability, forward and, where it has one,
    backward.

    The host's code runs as it is, on tensors of the processor that are neither written nor read.
    """
    shape = (case.batch, case.size)
    qkv = torch.empty(*shape, 3, case.heads, case.width, dtype=case.torch_dtype).permute(
        2, 0, 3, 1, 4
    )
    tensors = make_tensors(case, 1, "cpu") | dict(zip("qkv", qkv.unbind(0), strict=True))
    e = value_width or case.width
    if e != case.width:
        tensors["v"] = torch.empty(*shape, case.heads, e, dtype=case.torch_dtype).transpose(1, 2)
    tensors["grad"] = torch.empty(*shape, case.heads, e, dtype=case.torch_dtype).transpose(1, 2)
    function = function_of(case, case.size, "cpu", "triton")
    with kernels_anywhere(), recorded(capability, change) as found:
        call_of(function, tensors, case.backward)()
    return found


@contextlib.contextmanager
def kernels_anywhere() -> Iterator[None]:
    """Within it, no device and no dtype is a reason against kernels."""
    from visionattn.ops.gpu import machine

    with patch.object(machine, "why_not_here", lambda device, dtype: None):
        yield


def usual_tasks(
    operations: Iterable[str], targets: Iterable[int], dtype: str, widths: Iterable[tuple[int, int]]
) -> list[Task]:
    """Operations forward and backward, of widths d and e."""
    every = itertools.product(targets, widths, operations)
    return [(target, case_of(name, d, dtype, True), e) for target, (d, e), name in every]


def widths(dtype: str) -> list[tuple[int, int]]:
    """Widths d and e of the rows of the table of launches."""
    from visionattn.ops.gpu import launch

    bits = 8 * getattr(torch, dtype).itemsize
    sections = json.loads(launch.TABLE.read_text()).values()
    rows = [row for section in sections for kernel in section.values() for row in kernel]
    found = {(row["d"], row["e"]) for row in rows if row["bits"] == bits}
    return sorted((d, e) for d, e in found if min(d, e) >= 16)


def mark_tasks() -> list[Task]:
    """Operations of the marks of the GPU table, on capability 9.0: those of its models, and both
    forms at each crossover."""
    from visionattn.lab.gpu.counts import operations_of
    from visionattn.lab.target_table import gpu_targets

    cases = dict.fromkeys(
        case for figure in gpu_targets() for case in operations_of(figure.case, figure.kind)
    )
    return [(90, case, case.width) for case in cases]
