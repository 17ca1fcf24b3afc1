"""Measure the memory of a case in a fresh process. Elsewhere an allocation may reuse memory that
was freed earlier, which does not raise the peak.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from visionattn.cli.files import write_whole
from visionattn.cli.fresh_process import ask
from visionattn.cli.memory import resident_bytes
from visionattn.lab.cases import Case
from visionattn.lab.compared_models import build_model, make_image
from visionattn.lab.measure import peak_bytes
from visionattn.lab.model_step import ModelStep, bytes_of

BUILDING_BYTES, SLACK_BYTES = 2**30, 2**26
"""Bytes that a process may allocate beyond its budget while it builds the model, and afterwards.
Most of them are never used.
"""
WARM_UP_PATCHES = 8
"""Patches per side of the warm-up image. With it, libraries, threads and the optimizer allocate
their memory before the measurement.
"""
MAX_EVENTS = 1_000_000
"""Maximum number of events that PyTorch records."""
PARTS = ("peak", "reserved", "above", "parameters", "gradients", "optimizer", "activations")
"""The measured parts; ``measure`` defines them."""


def measure(case: Case, device: str, budget_bytes: int | None) -> dict[str, int | None]:
    """Measure the bytes of each of ``PARTS`` in a fresh process, which the system kills first when
    memory runs out.

    - ``peak_bytes``: peak memory of the pass. On a GPU: the memory that PyTorch's allocator hands
      out. On a CPU: the resident memory of the process, with interpreter and libraries.
    - ``reserved_bytes``: peak of the memory that PyTorch's allocator reserves on a GPU; None on a
      CPU.
    - ``above_bytes``: the peak above the level just before the pass. Another pass over the same
      image runs first.
    - ``parameters_bytes`` (with buffers), ``gradients_bytes`` (after the pass) and
      ``optimizer_bytes`` (its state): the bytes of their tensors.
    - ``activations_bytes``: the bytes that autograd saves in the forward, without parameters and
      image. Inference saves nothing; there it equals ``above_bytes``.

    Args:
        case: a model with its settings.
        device: "cpu" or a GPU.
        budget_bytes: a peak of this size counts as out of memory (on a GPU: the reserved memory).
            None on a GPU: its memory.

    Raises:
        torch.OutOfMemoryError: the case exceeds the budget or the memory of the machine.
        Failed: the process failed in another way; the text is its last line on standard error, or
            the signal that killed it.
    """
    given = {"case": asdict(case), "device": device, "budget_bytes": budget_bytes}
    given["threads"] = torch.get_num_threads()
    return ask(measure_here, given, f"{case.name} at {case.size} px")


def measure_here(
    case: dict[str, Any], device: str, budget_bytes: int | None, threads: int
) -> dict[str, int | None]:
    """Measure a case, given as plain values, in this process.

    Raises:
        torch.OutOfMemoryError, MemoryError, RuntimeError: out of memory (``is_out_of_memory``), or
            another error of the model.
    """
    torch.set_num_threads(threads)
    limit_memory(device, budget_bytes, BUILDING_BYTES)
    step = warm_step(Case(**case), device)
    limit_memory(device, budget_bytes, SLACK_BYTES)
    place(step, Case(**case))
    # A first pass, because libraries keep buffers and code from their first call at a size: about 2
    # MiB per thread on an AMD EPYC, 4 MiB on an Intel Xeon. They belong to the level, not the peak.
    step.run()
    step.model.zero_grad(set_to_none=True)
    gpu = device != "cpu"
    if gpu:
        torch.cuda.empty_cache()
    above = peak_bytes(step.run, device)
    peak = torch.cuda.max_memory_allocated(device) if gpu else resident_bytes("VmHWM")
    reserved = torch.cuda.max_memory_reserved(device) if gpu else None
    if budget_bytes is not None and (reserved or peak) >= budget_bytes:
        raise torch.OutOfMemoryError(
            f"a peak of {reserved or peak} bytes reaches the budget of {budget_bytes}"
        )
    held = step.parameters(), step.gradients(), step.optimizer_state()
    parts = [peak, reserved, above, *map(bytes_of, held)]
    step.model.zero_grad(set_to_none=True)
    parts.append(step.saved_bytes() if step.backward else above)
    return {f"{name}_bytes": value for name, value in zip(PARTS, parts, strict=True)}


def warm_step(case: Case, device: str) -> ModelStep:
    """Build a case and run one pass over a small image, which creates the optimizer's state. Then
    delete the gradients.
    """
    model = build_model(case, device)
    how = dict(backward=case.backward, update=case.update)
    step = ModelStep(model, torch.device(device), case.amp, **how)
    small = WARM_UP_PATCHES * max(model.patch_embed.patch_size)
    place(step, replace(case, size=min(case.size, small)))
    step.run()
    step.model.zero_grad(set_to_none=True)
    return step


def place(step: ModelStep, case: Case) -> None:
    """Give the pass an image of the size of the case."""
    step.images = None  # so that memory never holds two images
    step.place(make_image(case, step.model, case.size, case.size, str(step.device)))


def snapshot_here(case: dict[str, Any], device: str, threads: int, path: str) -> None:
    """Record the allocations of a pass on a GPU, and write them for PyTorch's memory viewer.

    There is no budget, because the recording itself takes memory.
    """
    torch.set_num_threads(threads)
    step = warm_step(Case(**case), device)
    place(step, Case(**case))
    torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
    step.run()
    write_whole(Path(path), lambda place: torch.cuda.memory._dump_snapshot(str(place)))


def limit_memory(device: str, budget_bytes: int | None, slack_bytes: int) -> None:
    """Limit the memory of this process to the budget, so that a larger allocation fails instead of
    starving the machine.

    On a CPU the limit is above the budget, because Linux also counts allocated memory that is never
    used.

    Raises:
        torch.OutOfMemoryError: the process has reached the budget without any image.
    """
    if budget_bytes is None:
        return
    if device != "cpu":
        total = torch.cuda.get_device_properties(device).total_memory
        share, index = min(1.0, budget_bytes / total), torch.device(device).index
        torch.cuda.set_per_process_memory_fraction(share, index)
        return
    import resource  # exists on Linux

    left = budget_bytes - resident_bytes("VmRSS")
    if left <= 0:
        raise torch.OutOfMemoryError(f"the process uses the budget of {budget_bytes} bytes")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = resident_bytes("VmData") + left + slack_bytes
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))
