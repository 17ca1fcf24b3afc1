"""Time on a GPU: works recorded as CUDA graphs, run in turns with what they are compared to, and
the rates of a large copy and a large product, over which floors are taken.

Inputs rotate, so that the cache forgets them. It knows neither operations nor models.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from visionattn.cli.ends import is_out_of_memory
from visionattn.lab.compare import Quartiles
from visionattn.lab.gpu.device import Call, Gpu, run_all
from visionattn.lab.measure import interleaved_seconds, warm_up

if TYPE_CHECKING:
    from visionattn.lab.gpu.expected import Cost

MOST_SETS = 16
COPY_BYTES, MATMUL_SIZE = 2**31, 8192
FATAL = re.compile(
    r"illegal (memory access|instruction|address)|misaligned|unspecified launch failure|CUDA "
    r"error(?!: (out of memory|CUBLAS))",
    re.IGNORECASE,
)
"""What errors of PyTorch and of Triton say after which the process computes nothing right."""
CACHES = 4
"""Inputs are rotated over this many times the cache, so that none is in it when its turn comes."""


@dataclass(frozen=True)
class Timed:
    """Calls that are timed together."""

    run: Call
    calls: int = 1
    """Calls in one run."""
    replayed: bool = False
    """Whether a run replays a CUDA graph, in which launching costs nothing."""


def called(calls: Sequence[Call]) -> Timed:
    """Return the calls as they are, each launch included."""
    return Timed(lambda: run_all(calls), len(calls))


def recorded(calls: Sequence[Call], gpu: Gpu) -> Timed:
    """Return the calls one after the other as one CUDA graph; as they are where that cannot be
    recorded.

    Raises:
        RuntimeError: the calls themselves do not run.
    """
    replay = gpu.graph_of(calls)
    return called(calls) if replay is None else Timed(replay, len(calls), replayed=True)


def seconds_of(
    entries: Sequence[Timed], gpu: Gpu, *, seconds: float = 0.25, rounds: int = 5
) -> list[Quartiles]:
    """Return seconds of one call of each entry, over rounds in which each has its turn.

    Args:
        seconds: for each entry, while which more than ``rounds`` rounds are made, 25 at most.
    """
    runs = [entry.run for entry in entries]
    warm = [warm_up(run, sample=gpu.seconds) for run in runs]
    plan = dict(rounds=rounds, max_rounds=25, seconds_per_work=seconds, sample_seconds=0.005)
    samples = interleaved_seconds(runs, warm, **plan, sample=gpu.seconds)
    return [
        Quartiles.of([s / entry.calls for s in times])
        for entry, times in zip(entries, samples, strict=True)
    ]


@dataclass(frozen=True)
class Ceilings:
    """Rates of a GPU."""

    bytes_per_second: float
    """The rate of a large copy, bytes read and bytes written."""
    operations_per_second: float
    """The rate of a large matrix product in bfloat16 on random numbers."""

    def floor_seconds(self, cost: "Cost") -> float:
        """Return the seconds below which no version gets by much."""
        return max(cost.operations / self.operations_per_second, cost.bytes / self.bytes_per_second)

    def __str__(self) -> str:
        return (
            f"copy {self.bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
            f"{self.operations_per_second / 1e12:.0f} TFLOP/s"
        )


def measure_ceilings(
    gpu: Gpu,
    generator: torch.Generator,
    *,
    copy_bytes: int = COPY_BYTES,
    matmul_size: int = MATMUL_SIZE,
    seconds: float = 0.5,
    rounds: int = 5,
) -> Ceilings:
    """Measure the rates of this GPU, in one interleaved run."""
    options = dict(device=gpu.device, dtype=torch.bfloat16)
    source = torch.randn(copy_bytes // 2, generator=generator, **options)
    target = torch.empty_like(source)
    x, y = (torch.randn(matmul_size, matmul_size, generator=generator, **options) for _ in range(2))
    product = torch.empty(matmul_size, matmul_size, **options)
    works = [called([lambda: target.copy_(source)]), called([lambda: torch.mm(x, y, out=product)])]
    copy, matmul = seconds_of(works, gpu, seconds=seconds, rounds=rounds)
    return Ceilings(2 * copy_bytes / copy.median, 2 * matmul_size**3 / matmul.median)


def sets_needed(set_bytes: int, gpu: Gpu) -> int:
    """Return how many sets of inputs of this size to rotate, so that none is read from
    the cache.
    """
    return max(1, min(MOST_SETS, -(-CACHES * gpu.cache_bytes // max(1, set_bytes))))


def in_words(error: Exception) -> str:
    """Say why something could not be measured, in one line: "out of memory", or "failed: ..."."""
    if is_out_of_memory(error):
        return "out of memory"
    words = " ".join(str(error).split())
    return f"failed: {type(error).__name__}: {words[:200]}"


def is_fatal(error: Exception) -> bool:
    """Tell whether a GPU computes nothing right in this process after the error.

    A kernel has then read or written where it must not.
    """
    return not is_out_of_memory(error) and FATAL.search(str(error)) is not None


@dataclass
class Budget:
    """Time for a table."""

    minutes: float
    clock: Callable[[], float] = time.monotonic
    start: float = field(init=False)
    fatal: bool = False
    """Whether a row has left the GPU so that later ones would mean nothing."""

    def __post_init__(self) -> None:
        self.start = self.clock()

    @property
    def over(self) -> bool:
        """Tell whether no more shall be begun."""
        return self.why_over is not None

    @property
    def why_over(self) -> str | None:
        """Say why no more shall be begun."""
        if self.fatal:
            return "an earlier row broke what this process computes on the GPU"
        if self.clock() - self.start < 60 * self.minutes:
            return None
        return f"{self.minutes:g} minutes were over"
