"""Measure the cost of a callable: time, operations, peak memory, and bytes kept for backward."""

import copy
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from visionattn.cli.memory import resident_bytes
from visionattn.ops.operator import PREFIX, count_operations

count_operations()


def count_flops(model: nn.Module, height: int, width: int) -> int:
    """Count the floating point operations of a forward pass for an image of ``height`` x ``width``
    pixels. A multiply-add counts as two.

    A copy of the model runs on the meta device, without computing. ``torch.utils.flop_counter``
    counts matrix products, convolutions and the operators of this package, but no elementwise work.
    Attention of form "auto" counts as the form with fewer operations.
    """
    model = copy.deepcopy(model).to("meta").eval()
    image = torch.empty(1, model.patch_embed.proj.in_channels, height, width, device="meta")
    with torch.no_grad():
        return flops_of(lambda: model(image))


def peak_bytes(work: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Return the peak memory in bytes while ``work()`` runs, above the level just before it.

    On a GPU this is the memory that PyTorch's allocator hands out. On a CPU it is the resident
    memory of the process, whose peak only Linux can reset. There, call this in a fresh process,
    because reuse of memory that was freed earlier does not raise the peak. Call ``work()`` once
    before: libraries keep buffers and code from their first call at a size, about 2 MiB per thread
    on an AMD EPYC.

    Raises:
        FileNotFoundError: a CPU, on another system than Linux.
    """
    if torch.device(device).type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - held
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    work()
    return max(0, resident_bytes("VmHWM") - before)  # Linux updates the counts in batches


def flops_of(work: Callable[[], object]) -> int:
    """Count the floating point operations of ``work()``, as described at ``count_flops``."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


SDPA_BACKENDS = {
    "aten::_scaled_dot_product_flash_attention": "sdpa flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "sdpa flash",
    "aten::_scaled_dot_product_efficient_attention": "sdpa memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "sdpa cudnn",
    "aten::_scaled_dot_product_fused_attention_overrideable": "sdpa of the device",
    "aten::_scaled_dot_product_attention_math": "sdpa math",
}
"""Backends of ``F.scaled_dot_product_attention``, by the operator name in a profile."""


def attention_backends(work: Callable[[], object]) -> tuple[str, ...]:
    """Return the attention implementations that run within ``work()``, found by a profiler. They
    are sorted.

    Operations of this package are named with their form ("taylorshift efficient", "kernelized
    direct", "kernelized causal efficient"), followed by "triton" if GPU kernels ran. PyTorch's are
    "sdpa flash", "sdpa memory-efficient", "sdpa cudnn", "sdpa math". "eager softmax" is any other
    softmax.
    """
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profiler:
        work()
    seen = {event.name for event in profiler.events()}
    found = {name.removeprefix(PREFIX) for name in seen if name.startswith(PREFIX)}
    found |= {backend for name, backend in SDPA_BACKENDS.items() if name in seen}
    if not found and "aten::_softmax" in seen:
        found = {"eager softmax"}
    return tuple(sorted(found))


def bytes_kept(work: Callable[[], object], without: Sequence[torch.Tensor] = ()) -> int:
    """Return the bytes that autograd saves in ``work()`` for the backward pass of its result.

    Each storage counts once and in full. Saved inputs count; storages of ``without``, such as
    parameters, do not.
    """
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = work()  # keep it until the count is done, so that no address is reused
    total = sum(saved.values())
    del out
    return total


def warm_up(
    work: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Call ``work`` once, or twice if the first call took less than half a second; return the
    seconds of the last call.
    """
    seconds = _seconds(work, 1, device, clock)
    return seconds if seconds >= 0.5 else _seconds(work, 1, device, clock)


def interleaved_seconds(
    works: Sequence[Callable[[], object]],
    warm_seconds: Sequence[float],
    *,
    rounds: int = 5,
    max_rounds: int = 30,
    seconds_per_work: float = 1.0,
    sample_seconds: float = 0.02,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Measure callables in interleaved rounds, and return their seconds per call as
    ``[works][rounds]``.

    Each round samples every callable once, and the order rotates by one from round to round. So a
    temporary slowdown of the machine affects all alike. A sample is the mean over the calls that
    fill ``sample_seconds``.

    Args:
        works: callables after ``warm_up``.
        warm_seconds: the result of ``warm_up`` for each.
        rounds: minimum rounds.
        max_rounds: maximum rounds.
        seconds_per_work: time for each callable. More than ``rounds`` rounds run if they fit.
        sample_seconds: minimum length of a sample.
        device: where they run; a GPU is timed by events.
        clock: returns seconds, for other devices.
    """
    repeats = [max(1, round(sample_seconds / max(seconds, 1e-7))) for seconds in warm_seconds]
    per_round = sum(n * seconds for n, seconds in zip(repeats, warm_seconds, strict=True))
    count = max(rounds, min(max_rounds, int(seconds_per_work * len(works) / max(per_round, 1e-9))))
    samples: list[list[float]] = [[] for _ in works]
    for turn in range(count):
        for index in (*range(turn % len(works), len(works)), *range(turn % len(works))):
            samples[index].append(_seconds(works[index], repeats[index], device, clock))
    return samples


def _seconds(
    work: Callable[[], object], repeats: int, device: torch.device | str, clock: Callable[[], float]
) -> float:
    """Return the mean seconds of ``repeats`` calls."""
    if torch.device(device).type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1000 / repeats
    before = clock()
    for _ in range(repeats):
        work()
    return (clock() - before) / repeats
