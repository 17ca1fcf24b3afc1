"""How much memory a forward of a model takes, and how many images of which size fit.

On a processor the tensors of a pass are counted without computing it. On a GPU, where too much is
an error and no disaster, a pass is run and its peak is read. This module knows neither files nor
runs.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.memory import SHARE, largest_fit
from visionattn.cli.tables import sized
from visionattn.models.machine import autocast, random_state, restore_random_state
from visionattn.models.patches import call
from visionattn.models.weights import DataSpec
from visionattn.ops.footprint import counting

Size = tuple[int, int]
Shape = tuple[int, int, int]
"""Images, height and width in pixels of a batch."""


Compute = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""``compute(model, inputs [B, C, H, W], sizes [B, 2]) -> [B, ...]``."""


LIBRARIES_BYTES = 50 * 2**20
"""What libraries take with the first pass on a processor: code, threads, buffers for packing."""


SCATTERED, SCATTERED_CHECKPOINTED = 1.2, 3.5
"""How much more a process takes from the system than its small tensors hold: what is freed leaves
gaps, most where a checkpointed block is computed anew between what is kept. Measured with glibc.
"""


class Passes:
    """Tell the bytes that forwards of a model take above what is there.

    Args:
        model: on its device; it stays as it is.
        spec: what its images are.
        device: where it computes.
        amp: ``none``, ``bf16`` or ``fp16``.
        leaves_out: the model is told what images fill, and they do not fill all.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        device: torch.device,
        amp: str,
        *,
        leaves_out: bool = False,
    ):
        self.model, self.spec, self.device = model, spec, device
        self.amp, self.leaves_out = amp, leaves_out
        self._forward = lru_cache(maxsize=None)(self._forward_bytes)

    def forward_bytes(self, shape: Shape, compute: Compute = call) -> int | None:
        """Return the bytes of a forward without gradients, its result included."""
        took = self._forward(shape, compute)
        return None if took is None else whole_bytes(took)

    def _forward_bytes(self, shape: Shape, compute: Compute) -> float | None:
        def work(model: nn.Module) -> None:
            model.eval()
            images, sizes = self.batch(shape)
            with torch.inference_mode(), autocast(self.device, self.amp):
                compute(model, self.spec.prepare(images), sizes)

        return self.peak(work, SCATTERED)

    def batch(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return images and, where the model takes them, the sizes that they fill."""
        images, *size = shape
        channels = 1 if self.spec.encoding else self.spec.in_chans
        made = torch.zeros(images, channels, *size, dtype=torch.uint8, device=self.device)
        return made, torch.tensor([size] * images) if self.leaves_out else None

    def peak(self, work: Callable[[nn.Module], None], scattered: float) -> float | None:
        """Return the most bytes that a work on the model takes; None where nobody can tell."""
        if self.device.type == "cuda":
            return self._measured(work)
        return self._counted(work, scattered)

    def _counted(self, work: Callable[[nn.Module], None], scattered: float) -> float | None:
        """Count the tensors of a work that is not computed; None where the model does not run so:
        it looks at values, or is wrong for these images, which a real pass will tell.
        """
        kept = random_state()
        try:
            with counting() as (count, copied):
                work(copied(self.model))
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError):
            return None
        finally:
            restore_random_state(kept)
        large_bytes = count.peak_bytes - count.small_bytes
        return LIBRARIES_BYTES + large_bytes + scattered * count.small_bytes

    def _measured(self, work: Callable[[nn.Module], None]) -> float | None:
        """Run a work on the GPU, and leave model and generators as they were."""
        kept, training = random_state(), self.model.training
        buffers = [(each, each.clone()) for each in self.model.buffers()]
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            work(self.model)
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - before
        except RuntimeError as error:
            return math.inf if is_out_of_memory(error) else None
        finally:
            restore_random_state(kept)
            self.model.train(training)
            self.model.zero_grad(set_to_none=True)
            put_back(buffers)
            torch.cuda.empty_cache()


def put_back(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the kept values of tensors back into them."""
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


LARGEST_BATCH = 512
"""The most images that ``batch_size auto`` takes."""


WORKER_BYTES = 45 * 2**20
"""What a process that loads images takes of its own, without images."""


class Memory(Protocol):
    """What tells the memory of batches."""

    there_bytes: int | None

    def bytes_of(self, shape: Shape, /) -> int | None:
        """Return the memory at batches of a shape; None where nobody can tell."""


@dataclass(frozen=True)
class Expected:
    """The memory of a run."""

    needed_bytes: int | None
    there_bytes: int | None

    def __str__(self) -> str:
        if self.needed_bytes is None:
            return "memory: not known beforehand for this model"
        there = "" if self.there_bytes is None else f", {sized(self.there_bytes)} there"
        tight = self.there_bytes is not None and self.needed_bytes > self.there_bytes
        return f"memory: {sized(self.needed_bytes)} expected{there}" + (
            ", which may not do" if tight else ""
        )


def largest_image(fits: Callable[[Size], bool], size: Size, patch_px: Size) -> Size | None:
    """Return the largest image of about the same aspect ratio, below ``size`` and in whole patches,
    that fits; None where none does.
    """
    step, longest = max(patch_px), max(size)

    def smaller(number: int) -> Size:
        rows, columns = (
            max(each, round(number * step * side / longest / each) * each)
            for side, each in zip(size, patch_px, strict=True)
        )
        return rows, columns

    most = max(1, longest // step - 1)
    found = largest_fit(lambda number: fits(smaller(number)), max(8, most // 2), most)
    return smaller(found) if found else None


def fits(memory: Memory, shape: Shape) -> bool:
    """Tell whether a batch leaves some of the memory there is."""
    needed = memory.bytes_of(shape)
    return needed is not None and needed <= SHARE * (memory.there_bytes or math.inf)


def largest_batch(memory: Memory, size: Size, most: int) -> int:
    """Return how many images of a size fit at once, ``most`` at most; 0 where not one does."""
    if most < 1:
        return 0
    if memory.there_bytes is None:
        return 0
    room, taken = SHARE * memory.there_bytes, {}
    low, high, guess = 0, most + 1, 1
    # Memory grows about evenly with the images: the line through what was counted leads to the
    # limit, and an eighth below it is near enough.
    while high - low > max(1, low // 8):
        needed = taken[guess] = memory.bytes_of((guess, *size))
        if needed is None:
            return 0
        low, high = (guess, high) if needed <= room else (low, guess)
        if not low:
            return 0
        slope = 0.0
        if len(taken) > 1:
            first, last = sorted(taken)[0], guess if guess > 1 else max(taken)
            slope = (taken[last] - taken[first]) / (last - first)
        further = int((room - taken[low]) / slope) if slope > 0 and math.isfinite(slope) else low
        guess = min(max(low + 1, low + further), high - 1)
    return low


def whole_bytes(count: float) -> int:
    """Return a whole number of bytes, infinity as it is."""
    return count if count == math.inf else int(count)  # type: ignore[return-value]
