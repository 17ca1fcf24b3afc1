"""Time calls on a GPU with ``triton.testing.do_bench``, and compute the floor of an operation.

The floor is the time of its minimum operations and bytes, at the rates of a large matrix product
and a large copy.
"""

import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.lab.cases import Case
from visionattn.ops.taylorshift.taylorshift_triton import tile_features

Call = Callable[[], object]
COPY_BYTES, MATMUL_SIZE = 2**31, 8192
BENCH_MS = 200
"""Milliseconds for which a call is timed."""
BROKEN = re.compile(
    r"illegal (memory access|instruction|address)|misaligned|unspecified launch failure"
)
"""Matches errors after which the process can no longer use its GPU."""


def pick_gpu() -> torch.device:
    """Return the GPU of this machine.

    Raises:
        ValueError: PyTorch can use no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "expected a GPU for PyTorch, got none (torch.cuda.is_available() is False)"
        )
    return torch.device("cuda", torch.cuda.current_device())


def recorded(call: Call) -> Call | None:
    """Record the call as a CUDA graph, and return its replay, which has no launch overhead. Return
    None if the call cannot be recorded.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and load kernels before recording
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer context restores the current stream after a failed recording.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        torch.cuda.synchronize()
        return None
    return graph.replay


def seconds_of(call: Call, device: torch.device, *, graph: bool = True) -> float:
    """Return the median seconds of a call with a cold cache; on a CPU, the seconds of one call.

    With ``graph`` the call is replayed from a CUDA graph, if it can be recorded.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    from triton.testing import do_bench

    call = (recorded(call) if graph else None) or call
    return do_bench(call, rep=BENCH_MS, return_mode="median") / 1000


def fresh_memory() -> None:
    """Release the memory of earlier rows, compiled code included."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def in_words(error: Exception) -> str:
    """Return an error of a measurement as one line."""
    words = " ".join(str(error).split())
    return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {words[:200]}"


def is_broken(error: Exception) -> bool:
    """Tell whether the process can no longer use its GPU after the error, such as an illegal memory
    access.
    """
    return BROKEN.search(str(error)) is not None


@dataclass(frozen=True)
class Ceilings:
    """Rates of a GPU for a large copy and a large matrix product in bfloat16."""

    bytes_per_second: float
    operations_per_second: float

    @classmethod
    def measured(
        cls, device: torch.device, size: int = MATMUL_SIZE, copied: int = COPY_BYTES
    ) -> "Ceilings":
        """Measure the rates on random numbers, because zeros would be faster."""
        options = dict(device=device, dtype=torch.bfloat16)
        source = torch.randn(copied // 2, **options)
        target, (x, y) = torch.empty_like(source), torch.randn(2, size, size, **options)
        copy = seconds_of(lambda: target.copy_(source), device)
        matmul = seconds_of(lambda: torch.mm(x, y), device)
        return cls(2 * copied / copy, 2 * size**3 / matmul)

    def floor_seconds(self, case: Case) -> float:
        """Return the floor in seconds, which no implementation of an operation can undercut by
        much.

        Each input is read once and each output written once, in two bytes per value. TaylorShift's
        efficient form counts the features of whole pairs of 16-wide tiles, as fast code computes
        them.
        """
        n, d, backward = case.size, case.width, case.backward
        per_token = (4 + 8 * backward) * d**2
        if case.base == "taylorshift" and case.form == "direct":
            per_token = (4 + 10 * backward) * n * d
        elif case.base == "taylorshift":
            features = tile_features(d)
            per_token = (4 + 8 * backward) * features * d + (8 + 20 * backward) * d**2
        tokens = case.batch * case.heads * n
        return tokens * max(
            per_token / self.operations_per_second, (8 + 14 * backward) * d / self.bytes_per_second
        )

    def __str__(self) -> str:
        return (
            f"copy {self.bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
            f"{self.operations_per_second / 1e12:.0f} TFLOP/s"
        )
