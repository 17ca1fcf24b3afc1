"""The GPU at hand behind one class: clocks, CUDA graphs, memory and properties.

``Gpu(device)`` asks ``torch.cuda``. ``rehearsed()`` is the same class over ``RehearsedCuda``, which
stands for as much of ``torch.cuda`` as ``Gpu`` asks for, on tensors of a processor. So every line
that measures on a GPU can run without one, and only ``torch.cuda`` itself is new there.
"""

import contextlib
import gc
import subprocess
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from visionattn.cli.ends import is_out_of_memory

Call = Callable[[], object]
TICK = 1.0
"""Seconds by which the clock of a rehearsal goes on each time it is read: one round is enough."""
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def run_all(calls: Sequence[Call]) -> None:
    """Make each call in turn; what it returns is let go at once."""
    for call in calls:
        call()


def pick_gpu() -> torch.device:
    """Return the GPU at hand.

    Raises:
        ValueError: there is none that PyTorch can use.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU here that PyTorch can use (torch.cuda.is_available() is False)")
    return torch.device("cuda", torch.cuda.current_device())


class Gpu:
    """What is asked of a GPU besides computing.

    Args:
        device: where tensors are.
        cuda: ``torch.cuda``, or what stands for it.
    """

    def __init__(self, device: torch.device, cuda=torch.cuda):
        self.device, self.cuda = device, cuda

    @property
    def is_rehearsed(self) -> bool:
        """Tell whether nothing that is measured means anything."""
        return self.cuda is not torch.cuda

    def generator(self, seed: int) -> torch.Generator:
        """Return random numbers on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    def describe(self) -> dict[str, object]:
        """Return name, compute capability, multiprocessors, memory, cache and driver."""
        found = self.cuda.get_device_properties(self.device)
        record: dict[str, object] = {"gpu": found.name, "capability": self.capability}
        record |= {"multiprocessors": found.multi_processor_count}
        record |= {"memory_gib": round(found.total_memory / 2**30, 1)}
        return record | {"l2_mib": round(found.L2_cache_size / 2**20), "driver": driver_version()}

    @property
    def name(self) -> str:
        """As the driver has it: "NVIDIA H100 80GB HBM3"."""
        return self.cuda.get_device_properties(self.device).name

    @property
    def capability(self) -> str:
        """Compute capability, as "9.0"."""
        found = self.cuda.get_device_properties(self.device)
        return f"{found.major}.{found.minor}"

    @property
    def cache_bytes(self) -> int:
        """Size of the L2 cache."""
        return self.cuda.get_device_properties(self.device).L2_cache_size

    def seconds(self, work: Call, repeats: int) -> float:
        """Return the mean seconds of ``repeats`` calls, between two events."""
        start, end = self.cuda.Event(enable_timing=True), self.cuda.Event(enable_timing=True)
        self.cuda.synchronize(self.device)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        self.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1000 / repeats

    def graph_of(self, calls: Sequence[Call]) -> Call | None:
        """Return what replays the calls as one CUDA graph; None where they cannot be recorded.

        Raises:
            RuntimeError: the calls themselves do not run.
        """
        cuda, device = self.cuda, self.device
        stream = cuda.Stream(device)
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream):  # kernels are compiled and loaded before anything is recorded
            for _ in range(2):
                run_all(calls)
        cuda.current_stream(device).wait_stream(stream)
        cuda.synchronize(device)
        graph = cuda.CUDAGraph()
        try:
            # the outer context restores the stream that a failed recording leaves behind
            with cuda.stream(cuda.current_stream(device)), cuda.graph(graph):
                run_all(calls)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            cuda.synchronize(device)
            return None
        return graph.replay

    def peak_bytes(self, work: Call) -> int:
        """Return the most memory that PyTorch hands out while ``work()`` runs, above the level
        before.
        """
        gc.collect()
        self.cuda.synchronize(self.device)
        self.cuda.reset_peak_memory_stats(self.device)
        before = self.allocated_bytes()
        work()
        self.cuda.synchronize(self.device)
        return self.cuda.max_memory_allocated(self.device) - before

    def allocated_bytes(self) -> int:
        """Return the bytes that tensors hold now."""
        return self.cuda.memory_allocated(self.device)

    def let_go(self) -> None:
        """Give memory back that no tensor holds."""
        gc.collect()
        self.cuda.empty_cache()


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver; None where its tool is not there or says nothing in
    time.
    """
    try:
        told = subprocess.run(DRIVER, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip().partition("\n")[0] or None


class Ticking:
    """A clock that goes on by ``TICK`` each time it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        self.now += TICK
        return self.now


WAITS_FOR_THE_GPU = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
)
"""Operators that read a result on the host, which CUDA refuses while a graph is recorded."""


class _Recording(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold."""

    supports_higher_order_operators = True
    """Such as flex_attention's."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that compiled functions run compiled within it."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if (
            isinstance(function, torch._ops.OpOverload)
            and function._schema.name in WAITS_FOR_THE_GPU
        ):
            raise RuntimeError("operation not permitted when stream is capturing (rehearsed)")
        return function(*args, **(kwargs or {}))


class RehearsedCuda:
    """As much of ``torch.cuda`` as ``Gpu`` asks for, on a processor.

    Events read a clock, recorded graphs replay nothing, and memory is a made-up number, so
    nothing that is measured means anything.
    """

    def __init__(self, clock: Callable[[], float] | None = None):
        self.clock = clock or Ticking()
        self.replays = 0

    def Event(self, enable_timing: bool = False) -> "RehearsedEvent":
        """Return a moment of the clock."""
        return RehearsedEvent(self.clock, enable_timing)

    def Stream(self, device: torch.device | None = None) -> SimpleNamespace:
        """Return a stream that is waited for by nobody."""
        return SimpleNamespace(device=device, wait_stream=lambda stream: None)

    def current_stream(self, device: torch.device | None = None) -> SimpleNamespace:
        """Return a stream like any other."""
        return self.Stream(device)

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        """Change nothing."""
        yield

    def CUDAGraph(self) -> SimpleNamespace:
        """Return a graph whose replays are counted."""

        def replay() -> None:
            self.replays += 1

        return SimpleNamespace(replay=replay)

    @contextlib.contextmanager
    def graph(self, cuda_graph: SimpleNamespace) -> Iterator[None]:
        """Let what is called within run, and refuse what CUDA would refuse to record."""
        with _Recording():
            yield

    def synchronize(self, device: torch.device | None = None) -> None:
        """Do nothing: a processor is never behind."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def reset_peak_memory_stats(self, device: torch.device | None = None) -> None:
        """Do nothing: the peak is made up."""

    def memory_allocated(self, device: torch.device | None = None) -> int:
        """Return 1 MiB."""
        return 2**20

    def max_memory_allocated(self, device: torch.device | None = None) -> int:
        """Return 3 MiB."""
        return 3 * 2**20

    def get_device_properties(self, device: torch.device | None = None) -> SimpleNamespace:
        """Return those of a GPU that is not there, with a cache so small that two sets of inputs
        do.
        """
        about = dict(name="rehearsal on a processor", major=9, minor=0, multi_processor_count=2)
        return SimpleNamespace(**about, total_memory=80 * 2**30, L2_cache_size=2**12)


class RehearsedEvent:
    """An event: it records a moment of the clock."""

    def __init__(self, clock: Callable[[], float], enable_timing: bool):
        self.clock, self.enable_timing = clock, enable_timing

    def record(self) -> None:
        """Take down the time."""
        self.at = self.clock()

    def elapsed_time(self, end_event: "RehearsedEvent") -> float:
        """Return the milliseconds from this event to the other one."""
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("both events must be created with enable_timing=True")
        return 1000 * (end_event.at - self.at)


def rehearsed(clock: Callable[[], float] | None = None) -> Gpu:
    """Return a GPU that is not there; its tensors are those of the processor."""
    return Gpu(torch.device("cpu"), RehearsedCuda(clock))
