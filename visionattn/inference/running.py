"""Images through a model in batches of one size: the output of each, in order, or why there is
none.

This module owns batching, reading ahead within bounds, and what happens where memory is short or
numbers are not finite. It knows nothing of what becomes of the outputs.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from visionattn.cli.ends import Failed, is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.inference.opening import Opened
from visionattn.inference.reading import ReadImages, Sample
from visionattn.models.machine import autocast
from visionattn.models.patches import takes_sizes
from visionattn.models.segmentation import Segmenter

Item = TypeVar("Item")
Compute = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""``compute(model, inputs [B, C, H, W], sizes [B, 2]) -> [B, ...]``; ``models.patches`` says what
sizes are.
"""
Status = Literal["ok", "unreadable", "oom", "nan"]


@dataclass(frozen=True)
class Outcome:
    """The output of one image, or why there is none."""

    path: str
    status: Status
    """``oom``: too little memory for it alone. ``nan``: the output is not finite."""
    reason: str | None
    """Why there is no output, in one line; None where there is one."""
    height: int | None
    """Height of the image in its file, in pixels; None where it cannot be read."""
    width: int | None
    input_height: int | None
    """Height of what the model saw."""
    input_width: int | None
    value: Tensor | None
    """The output, on the CPU."""


Banded = Callable[[int, Sample, torch.dtype], Outcome]
"""Computes an image by its number, its sample without pixels, and the dtype of its output."""


def masks(model: nn.Module, inputs: Tensor, sizes: Tensor | None) -> Tensor:
    """Return the class of each pixel, uint8 ``[B, H, W]``, for inputs ``[B, C, H, W]``."""
    assert isinstance(model, Segmenter)
    return model.masks(inputs, sizes)


def batch_samples(samples: Iterator[Sample], batch_size: int) -> Iterator[list[Sample]]:
    """Divide samples, in order, into batches of at most ``batch_size`` whose images have one size
    and one type.
    """
    return batched(samples, batch_size, _size_and_type, lambda sample: sample.banded)


def _size_and_type(sample: Sample) -> tuple[torch.Size, torch.dtype] | None:
    return None if sample.pixels is None else (sample.pixels.shape, sample.pixels.dtype)


def batched(
    items: Iterable[Item],
    batch_size: int,
    size_of: Callable[[Item], Any],
    is_alone: Callable[[Item], bool] = lambda item: False,
) -> Iterator[list[Item]]:
    """Divide items, in order, into batches of at most ``batch_size`` and of one size; an item whose
    size is None goes with any, and one that ``is_alone`` is a batch of its own.
    """
    batch, size = [], None
    for item in items:
        if is_alone(item):
            if batch:
                yield batch
            yield [item]
            batch, size = [], None
            continue
        own = size_of(item)
        if batch and (len(batch) == batch_size or (own and size and own != size)):
            yield batch
            batch, size = [], None
        batch.append(item)
        size = size or own
    if batch:
        yield batch


def read_ahead(
    images: ReadImages, start: int, *, batch_size: int, workers: int
) -> Iterator[Sample]:
    """Yield samples from number ``start`` on, in order, read by processes that stay a bounded
    number of images ahead: two batches at one size, else one image for each process.

    Raises:
        RuntimeError: a process ended (``_is_of_a_dead_worker``).
    """
    from visionattn.data.batches import start_worker

    ahead = 1 if images.geometry.canvas is None else math.ceil(2 * batch_size / max(workers, 1))
    loader = DataLoader(
        images,
        batch_size=None,
        sampler=range(start, len(images)),
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=start_worker,
        prefetch_factor=ahead if workers else None,
        generator=torch.Generator(),  # leaves torch's own generator alone
    )
    yield from loader


def _is_of_a_dead_worker(error: BaseException) -> bool:
    """Tell whether torch's signal handler raised the error, which can come up at any place."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


def _as_it_is(sample: Sample) -> Sample:
    return sample


def run_images(
    opened: Opened,
    images: ReadImages,
    compute: Compute,
    *,
    start: int = 0,
    batch_size: int,
    workers: int,
    amp: str = "none",
    dtype: torch.dtype = torch.float32,
    banded: Banded | None = None,
) -> Iterator[list[Outcome]]:
    """Compute the outputs of images in order, batch after batch, with only a few batches in memory
    at a time.

    Args:
        opened: the model.
        images: all images.
        compute: which outputs of the model are wanted.
        start: the image to begin with.
        batch_size: images per batch at most; where memory is too small for a batch, halves of it
            are tried.
        workers: processes that read.
        amp: ``none``, ``bf16`` or ``fp16``.
        dtype: the dtype of the outputs.
        banded: computes an image that was not read as it does not fit into memory, by its number;
            None: there are none.

    Raises:
        ValueError: the model does not take images of this size.
        What ``banded`` raises.
        Failed: a process that reads ended.
    """
    samples = read_ahead(images, start, batch_size=batch_size, workers=workers)
    number = start
    try:
        for batch in batch_samples(samples, batch_size):
            first, number = number, number + len(batch)
            if batch[0].banded:
                assert banded is not None
                yield [banded(first, batch[0], dtype)]
                continue
            paths = [images.listing.name(i) for i in range(first, number)]
            yield run_batch(opened, batch, paths, compute, amp, dtype)
    except RuntimeError as error:
        if not _is_of_a_dead_worker(error):
            raise
        raise Failed(
            f"a process that reads images ended ({first_line(error)}); try --workers 0"
        ) from error


def run_batch(
    opened: Opened,
    batch: list[Sample],
    paths: list[str],
    compute: Compute,
    amp: str = "none",
    dtype: torch.dtype = torch.float32,
) -> list[Outcome]:
    """Compute the outputs of images of one size; ``run_images`` explains the arguments. The pixels
    of the samples are given up.
    """
    present = [sample.present for sample in batch if sample.pixels is not None]
    readable = [sample.pixels for sample in batch if sample.pixels is not None]
    for sample in batch:
        sample.pixels = None  # once they are stacked, their memory is free
    values, size = iter(()), (None, None)
    if readable:
        size = readable[0].shape[1:]
        stacked = torch.stack(readable)
        readable.clear()
        # Only a model that leaves out what images do not fill is told of it.
        sizes = None
        if any(filled != size for filled in present) and takes_sizes(opened.model):
            sizes = torch.tensor(present)
        values = iter(_outputs(opened, stacked, sizes, compute, amp, dtype))
    return [
        _outcome(path, sample, size, values, dtype)
        for path, sample in zip(paths, batch, strict=True)
    ]


def _outcome(
    path: str, sample: Sample, size, values: Iterator[Tensor | None], dtype: torch.dtype
) -> Outcome:
    if sample.reason is not None:
        return Outcome(
            path, "unreadable", sample.reason, sample.height, sample.width, None, None, None
        )
    value = next(values)
    seen = (sample.height, sample.width, *size)
    if value is None:
        return Outcome(  # type: ignore[call-arg]
            path,
            "oom",
            f"out of memory with one image of {size[0]} x {size[1]} pixels",
            *seen,
            None,
        )
    return finished(Outcome(path, "ok", None, *seen, value), dtype)  # type: ignore[call-arg]


def finished(outcome: Outcome, dtype: torch.dtype) -> Outcome:
    """Return an outcome as it is, or without its output where that is not finite."""
    if outcome.value is None or outcome.value.isfinite().all():
        return outcome
    hint = "; float32 may hold them" if dtype == torch.float16 else ""
    return replace(outcome, status="nan", reason=f"outputs are not finite{hint}", value=None)


def _outputs(
    opened: Opened,
    images: Tensor,
    sizes: Tensor | None,
    compute: Compute,
    amp: str,
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Return one output per image of uint8 ``[B, C, H, W]``, on the CPU; None where memory is too
    small for it alone.
    """
    try:
        with torch.inference_mode(), autocast(opened.device, amp):
            inputs = opened.spec.prepare(images.to(opened.device))
            given = None if sizes is None else sizes.to(opened.device)
            return list(compute(opened.model, inputs, given).to("cpu", dtype))
    except (RuntimeError, AssertionError, MemoryError) as error:
        if _is_of_a_dead_worker(error):
            raise
        if not is_out_of_memory(error):
            height, width = images.shape[2:]
            raise ValueError(
                f"{opened.name} does not take images of {height} x {width} pixels: "
                f"{first_line(error)}"
            ) from error
    if len(images) == 1:
        return [None]
    half = len(images) // 2
    return [
        value
        for part in (slice(half), slice(half, None))
        for value in _outputs(
            opened, images[part], None if sizes is None else sizes[part], compute, amp, dtype
        )
    ]
