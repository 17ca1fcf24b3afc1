"""Check operations on a GPU, then time them next to SDPA, FlashAttention and eager operations.

The expected results come from PyTorch's operations in float64, which tests compare with the
definition. ``triton.testing.do_bench`` times the calls. The floor of an operation is the time of
its minimum operations and bytes, at the rates of a large matrix product and a large copy.
"""

import gc
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.tables import Record
from visionattn.lab.accuracy import errors_of, wrong
from visionattn.lab.cases import Case
from visionattn.lab.compared_operations import function_of, make_tensors, sdpa, with_gradients
from visionattn.lab.gpu.gpu_rows import GpuRow
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


@dataclass
class Bench:
    """The device and the settings of the measurements."""

    device: torch.device
    generator: torch.Generator
    rehearsed: bool = False
    """Run on a CPU, in Triton's interpreter."""
    ceilings: Ceilings | None = None

    @classmethod
    def on(cls, device: torch.device, seed: int = 1) -> "Bench":
        """Return a bench with a seeded random generator."""
        return cls(device, torch.Generator(device).manual_seed(seed), device.type != "cuda")


def draw(case: Case, bench: Bench, value_width: int | None = None) -> dict[str, Tensor]:
    """Draw random inputs by name: q, k, v ``[B, h, N, d]``, the inputs of the options, and
    ``grad``, the gradient of the result.

    q, k and v have the memory layout of a model's projection. ``value_width`` changes the channels
    of v.
    """
    options = dict(generator=bench.generator, device=bench.device, dtype=case.torch_dtype)
    shape, e = (case.batch, case.size), value_width or case.width
    qkv = torch.randn(*shape, 3, case.heads, case.width, **options)
    qkv = rearrange(qkv, "b n qkv h d -> qkv b h n d")
    tensors = make_tensors(case, 1, str(bench.device)) | dict(zip("qkv", qkv, strict=True))
    drawn = torch.randn(2, *shape, case.heads, e, **options).transpose(2, 3)
    return tensors | {"grad": drawn[0]} | ({} if e == case.width else {"v": drawn[1]})


def call_of(
    function: Callable[..., Tensor], tensors: dict[str, Tensor], backward: bool
) -> Callable[[], dict[str, Tensor]]:
    """Return a function without arguments that runs the forward or, with ``backward``, also the
    backward. It returns the result and the gradients by name.
    """
    inputs = {name: x.detach() for name, x in tensors.items() if name != "grad"}
    if not backward:

        def forward() -> dict[str, Tensor]:
            with torch.inference_mode():
                return {"out": function(**inputs)}

        return forward
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    return lambda: with_gradients(function(**leaves), leaves, tensors["grad"])


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN in this context. Otherwise a value that a kernel fails to write
    could be right by chance, left by an earlier run.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about non-deterministic operators
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def operation_of(case: Case, bench: Bench, impl: str = "triton") -> Callable[..., Tensor]:
    """Return the operation of the case on this device."""
    return function_of(case, case.size, str(bench.device), impl)


def expected_of(case: Case, tensors: dict[str, Tensor], bench: Bench) -> dict[str, Tensor]:
    """Return the results of PyTorch's operations in float64 for these inputs."""
    wide = {name: x.double() for name, x in tensors.items()}
    function = operation_of(replace(case, dtype="float64"), bench, "eager")
    return call_of(function, wide, case.backward)()


def check(
    case: Case, tensors: dict[str, Tensor], expected: dict[str, Tensor], bench: Bench
) -> tuple[str, float]:
    """Check the kernels on these inputs; return the status ("ok" or a reason) and the largest
    error.
    """
    with poisoned_memory():
        found = call_of(operation_of(case, bench), tensors, case.backward)()
    errors = errors_of(found, expected)
    return wrong(errors, case.dtype) or "ok", max(errors.values())


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute softmax attention with FlashAttention."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v)


def measure_operation(row: GpuRow, bench: Bench) -> Record:
    """Check the kernels, then time them, softmax attention and eager operations.

    If a baseline cannot run, for example for lack of memory, the reason replaces its time.
    """
    case, tensors = row.case, draw(row.case, bench)
    status, error = check(case, tensors, expected_of(case, tensors, bench), bench)
    record: Record = {"status": status, "error": error}
    if status != "ok":
        return record
    plain = {name: tensors[name] for name in ("q", "k", "v", "grad")}
    works = {
        "seconds": (operation_of(case, bench), tensors, True),
        "sdpa_seconds": (sdpa, plain, True),
        "flash_seconds": (flash, plain, True),
        "eager_seconds": (operation_of(case, bench, "eager"), tensors, False),
    }
    for name, (function, inputs, graph) in works.items():
        call = call_of(function, inputs, case.backward)
        try:
            record[name] = seconds_of(call, bench.device, graph=graph)
        except RuntimeError as failure:
            if name == "seconds" or is_broken(failure):
                raise
            record[name] = in_words(failure)
    floor = bench.ceilings.floor_seconds(case)
    return record | {"floor_seconds": floor, "of_floor": floor / record["seconds"]}
