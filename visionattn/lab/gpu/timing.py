"""Time on a GPU: works recorded as CUDA graphs, run in turns with what they are compared to.

Inputs rotate, so that the cache forgets them. It knows neither operations nor models.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from visionattn.cli.ends import is_out_of_memory
from visionattn.lab.compare import Quartiles
from visionattn.lab.gpu.device import Call, Gpu, run_all
from visionattn.lab.measure import interleaved_seconds, warm_up

MOST_SETS = 16
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
    """The calls as they are, each launch included."""
    return Timed(lambda: run_all(calls), len(calls))


def recorded(calls: Sequence[Call], gpu: Gpu) -> Timed:
    """The calls one after the other as one CUDA graph; as they are where that cannot be recorded.

    Raises:
        RuntimeError: the calls themselves do not run.
    """
    replay = gpu.graph_of(calls)
    return called(calls) if replay is None else Timed(replay, len(calls), replayed=True)


def seconds_of(
    entries: Sequence[Timed], gpu: Gpu, *, seconds: float = 0.25, rounds: int = 5
) -> list[Quartiles]:
    """Seconds of one call of each entry, over rounds in which each has its turn.

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


def sets_needed(set_bytes: int, gpu: Gpu) -> int:
    """How many sets of inputs of this size to rotate, so that none is read from the cache."""
    return max(1, min(MOST_SETS, -(-CACHES * gpu.cache_bytes // max(1, set_bytes))))


def in_words(error: Exception) -> str:
    """Why something could not be measured, in one line: "out of memory", or "failed: ..."."""
    if is_out_of_memory(error):
        return "out of memory"
    words = " ".join(str(error).split())
    return f"failed: {type(error).__name__}: {words[:200]}"


def is_fatal(error: Exception) -> bool:
    """Whether a GPU computes nothing right in this process after the error.

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
        """Whether no more shall be begun."""
        return self.why_over is not None

    @property
    def why_over(self) -> str | None:
        """Why no more shall be begun."""
        if self.fatal:
            return "an earlier row broke what this process computes on the GPU"
        if self.clock() - self.start < 60 * self.minutes:
            return None
        return f"{self.minutes:g} minutes were over"
