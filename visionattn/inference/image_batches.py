"""Images through a model in batches of one size: the output of each, in order, or the reason why
there is none.

This module owns batching, bounded reading ahead, and the handling of low memory and non-finite
outputs. Callers handle the outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from visionattn.cli.exit_codes import OutOfMemory, is_out_of_memory
from visionattn.cli.files import first_line, printable
from visionattn.inference.image_reading import ReadImages, Sample
from visionattn.inference.model_opening import Opened
from visionattn.models.cost import Compute
from visionattn.models.devices import autocast
from visionattn.models.patches import takes_sizes

Status = Literal["ok", "unreadable", "oom", "nan"]
FIELDS = ("path", "status", "reason", "height", "width", "input_height", "input_width")
"""Columns of an outcome in tables."""
LISTED = 10
"""Maximum number of images without an output that a command lists."""


@dataclass(frozen=True)
class Outcome:
    """The output of one image, or the reason why there is none."""

    path: str
    status: Status
    """``oom``: too little memory even for this image. ``nan``: the output is not finite."""
    reason: str | None = None
    """The reason if there is no output, in one line; else None."""
    height: int | None = None
    """Height of the image in its file, in pixels; None where it cannot be read."""
    width: int | None = None
    input_height: int | None = None
    """Height of the model's input."""
    input_width: int | None = None
    value: Tensor | None = None
    """The output, on the CPU."""

    def row(self) -> dict[str, Any]:
        """Return the ``FIELDS`` of a row in a table."""
        return {name: getattr(self, name) for name in FIELDS}

    def error(self, text: str) -> Exception:
        """Return an error with the reason for a missing output: ``OutOfMemory`` for ``oom``."""
        kind = OutOfMemory if self.status == "oom" else ValueError
        return kind(f"{text}{self.path}: {self.reason}")


def say_failed(failed: Sequence[Outcome], say: Callable[[str], None]) -> None:
    """Report images without an output and the reasons; of many, the first ``LISTED``."""
    for outcome in failed[:LISTED]:
        say(printable(f"  {outcome.path}: {outcome.reason}"))
    if len(failed) > LISTED:
        say(f"  and {len(failed) - LISTED} more")


def check_any(failed: Sequence[Outcome], count: int, what: str) -> None:
    """Raise ValueError or OutOfMemory if none of ``count`` images has an output, named ``what``."""
    if len(failed) == count:
        raise failed[0].error(f"none of the {count} images has {what}; first: ")


def batch_samples(samples: Iterator[Sample], batch_size: int) -> Iterator[list[Sample]]:
    """Group samples, in order, into batches of at most ``batch_size`` whose images have one size
    and one type.

    An unreadable image may join any batch; an image for bands is its own batch.
    """
    batch, kind = list[Sample](), None
    for sample in samples:
        own = None if sample.pixels is None else (sample.pixels.shape, sample.pixels.dtype)
        other = own is not None and kind is not None and own != kind
        if batch and (other or len(batch) == batch_size or sample.banded or batch[0].banded):
            yield batch
            batch, kind = [], None
        batch.append(sample)
        kind = kind or own
    if batch:
        yield batch


def read_ahead(
    images: ReadImages, numbers: range, *, batch_size: int, workers: int
) -> Iterator[Sample]:
    """Yield samples by index, in order, read by processes a bounded number of images ahead.

    They read two batches ahead at one size, else one image per process.

    Raises:
        RuntimeError: a process ended (``is_of_a_dead_worker``).
    """
    from visionattn.data.batches import start_worker

    ahead = 1 if images.geometry.canvas is None else math.ceil(2 * batch_size / max(workers, 1))
    yield from DataLoader(
        images,
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        worker_init_fn=start_worker,
        prefetch_factor=ahead if workers else None,
        generator=torch.Generator(),  # leaves torch's own generator unchanged
    )


def is_of_a_dead_worker(error: BaseException) -> bool:
    """Return whether torch's signal handler raised the error, which can happen anywhere."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


def run_batch(
    opened: Opened,
    batch: list[Sample],
    paths: list[str],
    compute: Compute,
    amp: str = "none",
    dtype: torch.dtype = torch.float32,
) -> list[Outcome]:
    """Compute the outputs of images of one size, named by ``paths``; see ``ImageRun`` for the other
    arguments.

    The pixels of the samples are released.
    """
    readable = [sample for sample in batch if sample.pixels is not None]
    values, size = iter(()), (None, None)
    if readable:
        stacked = torch.stack([sample.pixels for sample in readable])
        size = tuple(stacked.shape[2:])
        for sample in readable:
            sample.pixels = None  # the stack holds them; free their memory
        sizes = None
        # Only a model that skips padding needs the filled sizes.
        if any(sample.present != size for sample in readable) and takes_sizes(opened.model):
            sizes = torch.tensor([sample.present for sample in readable])
        values = iter(_outputs(opened, stacked, sizes, compute, amp, dtype))
    outcomes = []
    for path, sample in zip(paths, batch, strict=True):
        own = (sample.height, sample.width)
        if sample.reason is not None:
            outcomes.append(Outcome(path, "unreadable", sample.reason, *own))
            continue
        outcome = Outcome(path, "ok", None, *own, *size, next(values))
        if outcome.value is None:
            reason = f"out of memory with one image of {size[0]} x {size[1]} pixels"
            outcome = replace(outcome, status="oom", reason=reason)
        outcomes.append(finished(outcome, dtype))
    return outcomes


def finished(outcome: Outcome, dtype: torch.dtype) -> Outcome:
    """Return the outcome, without its output if that is not finite."""
    if outcome.value is None or outcome.value.isfinite().all():
        return outcome
    overflown = dtype == torch.float16 and outcome.value.isinf().any()
    hint = "; float32 may hold them" if overflown else ""
    return replace(outcome, status="nan", reason=f"outputs are not finite{hint}", value=None)


def _outputs(
    opened: Opened,
    images: Tensor,
    sizes: Tensor | None,
    compute: Compute,
    amp: str,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Return one output per image of uint8 ``[B, C, H, W]``, on the CPU; None if memory is too
    small even for this image.
    """
    try:
        with torch.inference_mode(), autocast(opened.device, amp):
            inputs = opened.spec.prepare(images.to(opened.device))
            given = None if sizes is None else sizes.to(opened.device)
            return list(compute(opened.model, inputs, given).to("cpu", dtype))
    except (RuntimeError, AssertionError, MemoryError) as error:
        if is_of_a_dead_worker(error):
            raise
        if not is_out_of_memory(error):
            height, width = images.shape[2:]
            raise ValueError(
                f"{opened.name} does not accept images of {height} x {width} pixels: "
                f"{first_line(error)}"
            ) from error
    if len(images) == 1:
        return [None]
    half = len(images) // 2
    found: list[Any] = []
    for part in (slice(half), slice(half, None)):
        given = None if sizes is None else sizes[part]
        found += _outputs(opened, images[part], given, compute, amp, dtype)
    return found
