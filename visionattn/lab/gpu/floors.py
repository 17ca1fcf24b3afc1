"""Floors on a GPU: the operations and bytes that an operation cannot do without, over the rates
measured on the same GPU.

Counts are per head of N tokens of width d, in two bytes per element. The efficient form of
TaylorShift is counted with the features of whole pairs of tiles of 16, which is what fast code
computes.
"""

from dataclasses import dataclass

import torch

from visionattn.lab.gpu.device import Gpu
from visionattn.lab.gpu.timing import called, seconds_of
from visionattn.ops.taylorshift.gpu import tile_features

COPY_BYTES, MATMUL_SIZE = 2**31, 8192


@dataclass(frozen=True)
class Cost:
    """What has to be done."""

    operations: float
    """Of matrix products, a multiply and an add being two."""
    bytes: float
    """Each input read once, each output written once."""


@dataclass(frozen=True)
class Ceilings:
    """Rates of a GPU."""

    bytes_per_second: float
    """Of a large copy, bytes read and bytes written."""
    operations_per_second: float
    """Of a large matrix product in bfloat16 on random numbers."""

    def floor_seconds(self, cost: Cost) -> float:
        """No version runs much faster."""
        return max(cost.operations / self.operations_per_second, cost.bytes / self.bytes_per_second)

    def __str__(self) -> str:
        return (
            f"copy {self.bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
            f"{self.operations_per_second / 1e12:.0f} TFLOP/s"
        )


def cost_of(operation: str, form: str, tokens: int, d: int, *, groups: int, backward: bool) -> Cost:
    """Counts of one forward, or of one forward and one backward, of ``groups`` heads with values as
    wide as d.

    Args:
        operation: "kernelized" or "taylorshift".
        form: "direct" or "efficient".
    """
    if operation == "taylorshift" and form == "direct":
        operations = (4 + 10 * backward) * tokens**2 * d
    elif operation == "taylorshift":
        operations = (4 + 8 * backward) * tokens * tile_features(d) * d + (
            8 + 20 * backward
        ) * tokens * d**2
    else:
        operations = (4 + 8 * backward) * tokens * d**2
    return Cost(groups * operations, groups * (8 + 14 * backward) * tokens * d)


def measure_ceilings(
    gpu: Gpu,
    generator: torch.Generator,
    *,
    copy_bytes: int = COPY_BYTES,
    matmul_size: int = MATMUL_SIZE,
    seconds: float = 0.5,
    rounds: int = 5,
) -> Ceilings:
    """The rates of this GPU, in one interleaved run."""
    options = dict(device=gpu.device, dtype=torch.bfloat16)
    source = torch.randn(copy_bytes // 2, generator=generator, **options)
    target = torch.empty_like(source)
    x, y = (torch.randn(matmul_size, matmul_size, generator=generator, **options) for _ in range(2))
    product = torch.empty(matmul_size, matmul_size, **options)
    works = [called([lambda: target.copy_(source)]), called([lambda: torch.mm(x, y, out=product)])]
    copy, matmul = seconds_of(works, gpu, seconds=seconds, rounds=rounds)
    return Ceilings(2 * copy_bytes / copy.median, 2 * matmul_size**3 / matmul.median)
