"""Seconds of calls on a GPU, by ``triton.testing.do_bench``, and the floor of an operation: the
fewest operations and bytes over the rates of a large product and a large copy.
"""

import gc
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from visionattn.cli.ends import is_out_of_memory
from visionattn.lab.cases import Case
from visionattn.ops.taylorshift.gpu import tile_features

Call = Callable[[], object]
COPY_BYTES, MATMUL_SIZE = 2**31, 8192
BENCH_MS = 200
"""How long a call is timed."""
BROKEN = re.compile(
    r"illegal (memory access|instruction|address)|misaligned|unspecified launch failure"
)
"""What errors say after which a process computes nothing right on its GPU."""


def pick_gpu() -> torch.device:
    """Return the GPU at hand.

    Raises:
        ValueError: there is none that PyTorch can use.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU here that PyTorch can use (torch.cuda.is_available() is False)")
    return torch.device("cuda", torch.cuda.current_device())


def recorded(call: Call) -> Call | None:
    """Return what replays the call as a CUDA graph, in which launching costs nothing; None where it
    cannot be recorded.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # kernels are compiled and loaded before anything is recorded
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer context restores the stream that a failed recording leaves behind.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        torch.cuda.synchronize()
        return None
    return graph.replay


def seconds_of(call: Call, device: torch.device, *, graph: bool = True) -> float:
    """Return the median seconds of a call, its inputs not in the cache: replayed from a CUDA graph
    where ``graph`` asks for it and it can be recorded. On a processor, of one call.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    from triton.testing import do_bench

    call = (recorded(call) if graph else None) or call
    return do_bench(call, rep=BENCH_MS, return_mode="median") / 1000


def fresh_memory() -> None:
    """Let go of what earlier rows held, compiled code included."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def in_words(error: Exception) -> str:
    """Say why something could not be measured, in one line."""
    words = " ".join(str(error).split())
    return "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {words[:200]}"


def is_broken(error: Exception) -> bool:
    """Tell whether the GPU computes nothing right in this process after the error: a kernel has
    read or written where it must not.
    """
    return BROKEN.search(str(error)) is not None


@dataclass(frozen=True)
class Ceilings:
    """Rates of a GPU: of a large copy, and of a large product in bfloat16."""

    bytes_per_second: float
    operations_per_second: float

    @classmethod
    def measured(
        cls, device: torch.device, size: int = MATMUL_SIZE, copied: int = COPY_BYTES
    ) -> "Ceilings":
        """Measure the rates on random numbers; zeros would be faster."""
        options = dict(device=device, dtype=torch.bfloat16)
        source = torch.randn(copied // 2, **options)
        target, (x, y) = torch.empty_like(source), torch.randn(2, size, size, **options)
        copy = seconds_of(lambda: target.copy_(source), device)
        matmul = seconds_of(lambda: torch.mm(x, y), device)
        return cls(2 * copied / copy, 2 * size**3 / matmul)

    def floor_seconds(self, case: Case) -> float:
        """Return the seconds below which no version of an operation gets by much.

        TaylorShift's efficient form is counted with the features of whole pairs of tiles of 16,
        which is what fast code computes; each input is read once and each output written once, in
        two bytes.
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
