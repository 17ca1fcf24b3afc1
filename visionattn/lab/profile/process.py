"""A case measured in a process of its own, where nothing freed earlier hides an allocation."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from visionattn.cli.fresh_process import ask
from visionattn.lab.cases import Case
from visionattn.lab.measure import peak_bytes, resident_bytes
from visionattn.lab.profile.step import Step

BUILDING_BYTES, SLACK_BYTES = 2**30, 2**26
"""What a process may ask for beyond the budget while its model is built, and after that; most of it
is never touched.
"""


@dataclass(frozen=True)
class Bytes:
    """The memory that a case takes."""

    peak_bytes: int
    """Highest level during the pass: on a GPU what PyTorch's allocator handed out, on a CPU the
    resident memory of the process, interpreter and libraries included.
    """
    reserved_bytes: int | None
    """Highest level of what PyTorch's allocator took from the GPU; None on a CPU."""
    above_bytes: int
    """The peak above the level just before the pass, with model, image and optimiser in place, and
    after a pass over the same image, so that what libraries keep for good is part of the level.
    """
    parameters_bytes: int
    """Parameters and buffers: their tensors."""
    gradients_bytes: int
    """Gradients after the pass: their tensors, that of the class token with all tokens
    (``step.py``).
    """
    optimizer_bytes: int
    """State of the optimiser: its tensors."""
    activations_bytes: int
    """What autograd saves of the forward for the backward, parameters and image left out, 16-bit
    copies of parameters under mixed precision counted; for inference, which saves nothing,
    ``above_bytes``.
    """


@dataclass(frozen=True)
class Job:
    """The work that the process is told."""

    case: Case
    device: str = "cpu"
    threads: int | None = None
    budget_bytes: int | None = None
    """A peak of so many bytes (on a GPU: reserved) counts as out of memory; None on a GPU is the
    card's own memory.
    """
    snapshot: str | None = None
    """File for the allocations of one pass, recorded after the measurement and without the budget.
    """


def measure(job: Job) -> Bytes:
    """Measure in a fresh process, the first that ends when the system runs out of memory.

    Raises:
        torch.OutOfMemoryError: it does not fit into the budget, or the system ended the process for
            want of memory.
        Failed: the process failed in another way; the text is the last line that it wrote, or the
            signal that ended it.
    """
    what = f"{job.case.name} at {job.case.size} px"
    return Bytes(**ask(measure_told, {"job": asdict(job)}, what))


def measure_here(job: Job) -> Bytes:
    """Measure in this process.

    Raises:
        torch.OutOfMemoryError, MemoryError, RuntimeError: it does not fit (``is_out_of_memory``),
            or another error of the model.
    """
    limit_memory(job, BUILDING_BYTES)
    step = Step(job.case, job.device)
    step.warm_up()
    limit_memory(job, SLACK_BYTES)
    step.place(job.case.size)
    # Libraries keep buffers and code from their first call at a size: some 2 MiB a thread on an AMD
    # EPYC, 4 MiB on an Intel Xeon. After one pass they belong to the level, and no longer to the
    # peak.
    step.run()
    step.model.zero_grad(set_to_none=True)
    if job.device != "cpu":
        torch.cuda.empty_cache()
    above = peak_bytes(step.run, job.device)
    gpu = job.device != "cpu"
    peak = torch.cuda.max_memory_allocated(job.device) if gpu else resident_bytes("VmHWM")
    reserved = torch.cuda.max_memory_reserved(job.device) if gpu else None
    if job.budget_bytes is not None and (reserved or peak) >= job.budget_bytes:
        raise torch.OutOfMemoryError(
            f"a peak of {reserved or peak} bytes reaches the budget of {job.budget_bytes}"
        )
    parts = {
        name: getattr(step, name)
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    }
    step.model.zero_grad(set_to_none=True)
    saved = above if not job.case.backward else step.saved_bytes()
    if job.snapshot:
        from visionattn.lab.profile.snapshot import write_snapshot

        lift_limit(job)  # the recording takes memory that the pass does not
        write_snapshot(Path(job.snapshot), step)
    return Bytes(peak, reserved, above, **parts, activations_bytes=saved)


def limit_memory(job: Job, slack_bytes: int) -> None:
    """Let this process take no more than the budget: an allocation beyond it fails instead of
    starving the machine.

    On a CPU Linux counts what is asked for, written or not, so that the limit is a little wider
    than the budget.

    Raises:
        torch.OutOfMemoryError: the process, without any image, has reached the budget.
    """
    if job.budget_bytes is None:
        return
    if job.device != "cpu":
        total = torch.cuda.get_device_properties(job.device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, job.budget_bytes / total), torch.device(job.device).index
        )
        return
    import resource  # Linux has it

    left = job.budget_bytes - resident_bytes("VmRSS")
    if left <= 0:
        raise torch.OutOfMemoryError(
            f"the process alone takes the budget of {job.budget_bytes} bytes"
        )
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = resident_bytes("VmData") + left + slack_bytes
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard),
    )


def lift_limit(job: Job) -> None:
    """Let this process take what the system gives again."""
    if job.budget_bytes is None:
        return
    if job.device != "cpu":
        torch.cuda.set_per_process_memory_fraction(1.0, torch.device(job.device).index)
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def measure_told(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the bytes of a job, both as plain values, in this process."""
    told = Job(**job | {"case": Case(**job["case"])})
    if told.threads:
        torch.set_num_threads(told.threads)
    return asdict(measure_here(told))
