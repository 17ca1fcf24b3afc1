"""The time that kernels are expected to take on a GPU, from what was counted of them without one.

``counts.json`` beside this file holds, for each launch of an operation, what
``python -m tests.counting.count --record`` counts in its machine code. A launch takes as long as
the slowest of three:

    issue     warp instructions of the busiest multiprocessor over those that it issues in a second
    matrix    operations of products there over the rate of its matrix unit
    memory    bytes of the tensors it reads and writes, each once, over the rate of a large copy

Where a multiprocessor holds one program alone, nothing is issued while that waits for its products:
issue and matrix add up. The busiest multiprocessor has the programs over the multiprocessors,
rounded up. Not in it: latencies, reading anything twice (from the L2 cache, say), PyTorch's own
operations between the launches, and work of the host.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from visionattn.lab.cases import Case

TABLE = Path(__file__).with_name("counts.json")
FIELDS = (
    "programs", "warps", "registers", "spilled_bytes", "shared_bytes", "resident", "looped", "once",
    "matrix", "barriers", "operations", "bytes", "loaded_bytes", "unit", "row",
)  # fmt: skip
"""What the table holds of a launch, in this order; see ``tests/counting/counting.py``."""
ISSUED_PER_CYCLE = 2.0
"""Warp instructions that a multiprocessor issues in a cycle, of the 4 that it could: what such code
usually gets."""
WARPS_FOR_THAT = 8
"""Warps that have to be there for it, two for each scheduler; with fewer it is less in
proportion."""
PATCH = 16
HEADS_OF = {"s": 6, "b": 12}
"""Heads of width 64 of a ViT-S and a ViT-B, by the last letter of a model's name."""
FILLED_TOKENS = 2**20
"""Tokens of all heads and images at a crossover, as ``operations.py`` has them."""
LAUNCH_SECONDS = 2e-6
"""From the end of one launch to the work of the next, in a CUDA graph."""
RATE_OF_UNIT = {"wgmma": 1.0, "tcgen05.mma": 1.0, "mma.sync": 0.62}
"""Shares of the rate of matrix products. Hopper's older instruction reaches 62 % (Luo et al. 2024,
"Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", table of tensor cores)."""


@dataclass(frozen=True)
class Gpu:
    """Rates of a GPU."""

    name: str
    multiprocessors: int
    clock_hertz: float
    bytes_per_second: float
    """The rate of a large copy."""
    operations_per_second: float
    """The rate of a large product of matrices in bfloat16."""


H100 = Gpu("H100 SXM", 132, 1.755e9, 3.0e12, 790e12)
H200 = Gpu("H200", 132, 1.755e9, 4.3e12, 790e12)
"""Multiprocessors and clock from NVIDIA's data sheets; 4.3 TB/s and 790 TFLOP/s were measured on an
H200, and 3.0 TB/s is the same share of an H100's 3.35."""


@dataclass(frozen=True)
class Launch:
    """What was counted of one launch; numbers of all its programs."""

    name: str
    programs: int
    warps: int
    resident: int
    instructions: float
    operations: float
    bytes: float
    unit: str

    def limits(self, gpu: Gpu) -> tuple[float, float, float]:
        """Return seconds of issue, matrix unit and memory."""
        if not self.programs:
            return 0.0, 0.0, 0.0
        busiest = math.ceil(self.programs / gpu.multiprocessors) / self.programs
        warps = (
            max(1, min(self.resident, math.ceil(self.programs / gpu.multiprocessors))) * self.warps
        )
        issued = ISSUED_PER_CYCLE * min(1.0, warps / WARPS_FOR_THAT)
        rate = gpu.operations_per_second / gpu.multiprocessors * RATE_OF_UNIT.get(self.unit, 1.0)
        return (
            self.instructions * busiest / (issued * gpu.clock_hertz),
            self.operations * busiest / rate,
            self.bytes / gpu.bytes_per_second,
        )

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds that the launch is expected to take."""
        issue, matrix, memory = self.limits(gpu)
        alone = min(self.resident, math.ceil(self.programs / gpu.multiprocessors)) <= 1
        return LAUNCH_SECONDS + max(memory, issue + matrix if alone else max(issue, matrix))


@lru_cache(maxsize=1)
def recorded() -> dict[str, dict]:
    """Return the table: by version of Triton, then by ``group_of``, launches and which of them an
    operation makes.
    """
    return json.loads(TABLE.read_text())


def group_of(case: Case, value_width: int | None = None, capability: str = "9.0") -> str:
    """Return what launches share that are recorded once: the GPU's compute capability, dtype and
    sizes.
    """
    e = value_width or case.width
    sizes = f"B={case.batch} h={case.heads} N={case.size} d={case.width} e={e}"
    return f"{capability} {case.dtype} {sizes}"


def launches_of(case: Case, triton: str | None = None) -> list[Launch] | None:
    """Return the launches of an operation's forward, or of its forward and backward, on capability
    9.0; None where none are recorded.

    Args:
        triton: version, as "3.6.0"; None: the first of the table.
    """
    table = recorded()
    group = table.get(triton or next(iter(table), ""), {}).get(group_of(case), {})
    names = (
        group.get("operations", {}).get(case.label, {}).get("both" if case.backward else "forward")
    )
    return None if names is None else [launch_from(name, group["launches"][name]) for name in names]


def launch_from(name: str, values: Sequence) -> Launch:
    """Return a launch of the table."""
    found = dict(zip(FIELDS, values, strict=True))
    own = {
        field: found[field]
        for field in ("programs", "warps", "resident", "operations", "bytes", "unit")
    }
    return Launch(name, instructions=found["looped"] + found["once"], **own)


def expected_seconds(case: Case, gpu: Gpu = H100, triton: str | None = None) -> float | None:
    """Return the seconds that an operation is expected to take on a GPU; None where its launches
    are not recorded.
    """
    launches = launches_of(case, triton)
    return None if launches is None else sum(launch.seconds(gpu) for launch in launches)


def operations_of(case: Case, kind: str) -> list[Case]:
    """Return operations whose counts tell the time of a figure of this kind
    (``target_table.KINDS``).
    """
    if kind == "operation":
        return [case]
    if kind == "crossover":
        filled = max(1, FILLED_TOKENS // (case.size * case.heads))
        return [replace(case, form=form, batch=filled) for form in ("direct", "efficient")]
    heads = HEADS_OF[case.base[-1]]
    tokens = math.prod(side // PATCH for side in case.image_size)
    return [
        Case(
            "operation",
            "kernelized+joint",
            tokens,
            64,
            "auto",
            "bfloat16",
            case.backward,
            case.batch,
            heads,
        )
    ]
