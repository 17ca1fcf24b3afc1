"""Estimate memory and time: the cost of a forward pass or a training step, the largest batch or
image that fits, and the total time.

On a CPU the tensors of a pass are counted without computing it. On a GPU, where out of memory is
only an error, a pass is run and its peak memory is read. This module knows neither files nor runs.
"""

import copy
import math
import time
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.memory import (
    SHARE,
    check_fits,
    clearly_above,
    memory_there_is,
    taken_bytes,
)
from visionattn.cli.tables import lasting, sized
from visionattn.models.building import fixed_size
from visionattn.models.devices import autocast, random_state, restore_random_state
from visionattn.models.patches import call, input_size
from visionattn.models.weights import DataSpec
from visionattn.ops.chunking import only_few
from visionattn.ops.operator import function_of

Model = TypeVar("Model", bound=nn.Module)
Size = tuple[int, int]
Shape = tuple[int, int, int]
"""Number of images, height and width in pixels of a batch."""
Compute = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""``compute(model, inputs [B, C, H, W], sizes [B, 2]) -> [B, ...]``."""

LARGE_BYTES = 32 * 2**20
"""From this size on, glibc requests each block from the system and returns it when it is freed."""
LIBRARIES_BYTES = 50 * 2**20
"""Memory that libraries allocate in the first pass on a CPU: code, threads, packing buffers."""
WORKER_BYTES = 45 * 2**20
"""Memory of a data loading process, without images."""
SCATTERED, SCATTERED_CHECKPOINTED = 1.2, 3.5
"""Ratio of memory taken from the system to the size of small tensors, without and with
checkpointing.

Freed tensors leave gaps, most when checkpointed blocks are recomputed. Measured with glibc.
"""
LARGEST_BATCH = 512
"""Maximum number of images for ``batch_size auto``."""
COUNTED_PIXELS = 1 << 22
"""Pixels of the largest image that is counted directly: larger ones take minutes to count."""
FEW_PIXELS = 1 << 20
"""Below this total number of pixels, the time of forward passes is not reported."""
TRIAL_PIXELS = 1 << 18
"""Pixels of the largest image for timing a forward pass; the time of larger ones is scaled in
proportion.
"""
TRIAL_SECONDS = 0.5
"""Maximum duration of the timed forward pass of several images."""
SHORT_SECONDS = 1.0
"""Shorter work is timed twice."""


class Footprint(TorchDispatchMode):
    """Count the bytes of live tensors while the context is active.

    Attributes:
        live_bytes: bytes of live tensors created within the context.
        peak_bytes: maximum of ``live_bytes``.
        small_bytes: at the peak, bytes of tensors below ``LARGE_BYTES``, which allocators place
            next to each other, leaving gaps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.small_bytes = self._live_small = 0
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self._left_out: set[int] = set()
        self._inside: dict[tuple, int] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that exist without the work, and all their views, from the count."""
        self._left_out = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator and count its results; for our own operators also their intermediate
        tensors.
        """
        given = kwargs or {}
        own = function_of(func)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        # On an accelerator our operators are kernels, which do not run on fake tensors.
        if own is None or any(x.device.type != "cpu" for x in tensors):
            out = func(*args, **given)
        else:
            out = self._run_own(func, own, args, given)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made)
        return out

    def _run_own(self, func, own: Callable, args: tuple, given: dict) -> object:
        """Count the tensors inside one of our operators, once per kind of arguments: later calls
        need the same memory.
        """
        kind = (func, *map(_kind, tree_leaves((args, given))))
        if kind in self._inside:
            self._note(self._inside[kind])
            return func(*args, **given)
        before, earlier = self.live_bytes, (self.peak_bytes, self.small_bytes)
        self.peak_bytes = before
        with self, only_few():
            out = own(*args, **given)
        self._inside[kind] = self.peak_bytes - before
        self.peak_bytes, self.small_bytes = max(earlier, (self.peak_bytes, self.small_bytes))
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in self._left_out:
            return
        self._alive[key] = (weakref.ref(storage, lambda _: self._forget(key)), size)
        self.live_bytes += size
        self._live_small += size if size < LARGE_BYTES else 0
        self._note(0)

    def _note(self, more_bytes: int) -> None:
        """Update the peak, with ``more_bytes`` of small tensors in addition."""
        if self.live_bytes + more_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes + more_bytes
            self.small_bytes = self._live_small + more_bytes

    def _forget(self, key: int) -> None:
        size = self._alive.pop(key)[1]
        self.live_bytes -= size
        self._live_small -= size if size < LARGE_BYTES else 0


def _kind(value: object) -> object:
    """Return the properties of an argument that determine the memory of a call."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return repr(value)


@contextmanager
def counting() -> Iterator[tuple[Footprint, Callable[[Model], Model]]]:
    """Replace every tensor created in the context by a fake one, and count their bytes.

    Fake tensors have shapes and no memory, so work can be counted that would not fit. Yield the
    count, and a function that copies a module with fake, uncounted parameters and buffers.
    """
    # Fake tensors pretend that there is a GPU. A first backward pass after them would start a
    # thread for it, and forked processes could then run no backward pass.
    torch.ones((), requires_grad=True).backward()
    fake, count = FakeTensorMode(), Footprint()

    def copied(model: Model) -> Model:
        with _disable_current_modes(), FakeCopyMode(fake):
            made = copy.deepcopy(model)
        count.leave_out([*made.parameters(), *made.buffers()])
        return made

    with fake, count:
        yield count, copied


class Passes:
    """Measure forward passes of a model: bytes above the present level, and seconds.

    Args:
        model: on its device; unchanged afterwards.
        spec: specification of its images.
        device: where it computes.
        amp: ``none``, ``bf16`` or ``fp16``.
        compute: computes the wanted outputs.
        leaves_out: the model gets the filled sizes of images that do not fill the canvas.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        device: torch.device,
        amp: str,
        compute: Compute = call,
        *,
        leaves_out: bool = False,
    ):
        self.model, self.spec, self.device = model, spec, device
        self.amp, self.compute, self.leaves_out = amp, compute, leaves_out
        self._known: dict[tuple, float | None] = {}

    def forward_bytes(self, shape: Shape) -> int | None:
        """Return the bytes of a forward pass without gradients, including its result.

        None if unknown; infinity if it does not fit on a GPU.
        """

        def work(model: nn.Module) -> None:
            model.eval()
            images, sizes = self.batch(shape)
            with torch.inference_mode(), autocast(self.device, self.amp):
                self.compute(model, self.spec.prepare(images), sizes)

        return whole_bytes(self.peak(work, SCATTERED, shape))

    def batch(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return images and, if the model accepts them, their filled sizes."""
        images, *size = shape
        channels = 1 if self.spec.encoding else self.spec.in_chans
        of_input = input_size(self.model, tuple(size))
        made = torch.zeros(images, channels, *of_input, dtype=torch.uint8, device=self.device)
        return made, torch.tensor([size] * images) if self.leaves_out else None

    def peak(
        self, work: Callable[[nn.Module], None], scattered: float, *key: object
    ) -> float | None:
        """Return the peak bytes of work on the model, measured once per key."""
        if key not in self._known:
            on_gpu = self.device.type == "cuda"
            self._known[key] = self._measured(work) if on_gpu else self._counted(work, scattered)
        return self._known[key]

    def _counted(self, work: Callable[[nn.Module], None], scattered: float) -> float | None:
        """Count the tensors of the work without computing it.

        None if the model cannot run this way: it reads values, or fails on these images, which a
        real pass will report.
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
        """Run the work on the GPU, and restore model and generators afterwards."""
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
            with torch.no_grad():
                for tensor, value in buffers:
                    tensor.copy_(value)
            torch.cuda.empty_cache()

    def forward_seconds(self, shape: Shape, patch_px: Size) -> float | None:
        """Return the seconds of a forward pass per image, extrapolated from a smaller one for large
        images.

        None if the model does not accept such images, or they do not fit.
        """
        images, rows, columns = shape
        tried, share = (rows, columns), TRIAL_PIXELS / (rows * columns)
        if share < 1 and not fixed_size(self.model):
            tried = scaled(tried, math.sqrt(share), patch_px)

        def timed(part: Shape) -> float:
            with torch.inference_mode(), autocast(self.device, self.amp):
                inputs = self.spec.prepare(self.batch(part)[0])
                start = time.perf_counter()
                self.compute(self.model, inputs, None).to("cpu")
            return time.perf_counter() - start

        try:
            seconds = seconds_of(timed, (images, *tried))
        except (RuntimeError, AssertionError, MemoryError, ValueError):
            return None
        return seconds / images * rows * columns / math.prod(tried)


def whole_bytes(count: float | None) -> int | None:
    """Return an integer number of bytes; infinity and None are unchanged."""
    return count if count in (None, math.inf) else int(count)  # type: ignore[return-value]


def seconds_of(timed: Callable[[Shape], float], shape: Shape) -> float:
    """Return the seconds of work on a batch, timed on the number of images that take about
    ``TRIAL_SECONDS``.

    Libraries start up in the pass over one image, which determines this number.
    """
    images, *size = shape
    seconds = timed((1, *size))
    tried = max(1, min(images, int(TRIAL_SECONDS / max(seconds, 1e-9))))
    if tried > 1:
        seconds = timed((tried, *size))
    if seconds < SHORT_SECONDS:
        seconds = min(seconds, timed((tried, *size)))
    return seconds * images / tried


def scaled(size: Size, factor: float, patch_px: Size) -> Size:
    """Return a size with both sides multiplied by a factor, in whole patches."""
    rows, columns = (
        max(each, round(side * factor / each) * each)
        for side, each in zip(size, patch_px, strict=True)
    )
    return rows, columns


@dataclass(frozen=True)
class Expected:
    """The memory that a run needs."""

    needed_bytes: int | None
    there_bytes: int | None

    def __str__(self) -> str:
        if self.needed_bytes is None:
            return "peak memory: unknown for this model"
        there = "" if self.there_bytes is None else f", {sized(self.there_bytes)} available"
        tight = self.there_bytes is not None and self.needed_bytes > self.there_bytes
        return f"peak memory: {sized(self.needed_bytes)} estimated{there}" + (
            ", which may not be enough" if tight else ""
        )


class Memory(ABC):
    """Memory of a run for batches of a shape, available memory, and what would fit.

    A subclass defines the memory of a batch, and names the options for a batch or an image that
    fits.

    Args:
        passes: measures passes of the model.
        patch_px: height and width of its patches.
        cell_px: pixels that count as one patch.
        processes: number of equal processes that share the machine.
        bound_bytes: maximum bytes of a pass above the model; None: all free memory.

    Attributes:
        there_bytes: memory available to this process, or the bound; None if unknown.
        base_bytes: memory that the process already uses.
        bounded: whether ``there_bytes`` is the bound.
    """

    doing = saves = ""
    """Wording of errors: the operation on images, and how to save memory."""
    least = 1
    """Minimum number of images per batch."""
    fixed = False
    """Whether images cannot have another size."""

    def __init__(
        self,
        passes: Passes,
        patch_px: Size,
        cell_px: int,
        processes: int = 1,
        bound_bytes: int | None = None,
    ):
        self.passes, self.patch_px, self.cell_px = passes, patch_px, cell_px
        self.bounded = bound_bytes is not None
        self.there_bytes, self.base_bytes = bound_bytes, 0
        if not self.bounded:
            self.there_bytes = memory_there_is(passes.device, processes)
            self.base_bytes = taken_bytes(passes.device)

    @abstractmethod
    def bytes_of(self, shape: Shape) -> int | None:
        """Return the memory for batches of a shape; None if unknown, infinity if it does not fit on
        a GPU.
        """

    @abstractmethod
    def batch_that_fits(self, images: int, shape: Shape) -> str:
        """Return the option for batches of ``images`` images in place of ``shape``."""

    @abstractmethod
    def image_that_fits(self, size: Size) -> str:
        """Return the option for images of a size."""

    def extended(self, count: Callable[[Shape], int | None], shape: Shape) -> int | None:
        """Return ``count`` for a batch, extrapolated for images that are too large to count.

        The extrapolation uses the growth from an eighth to a half of ``COUNTED_PIXELS``.
        """
        images, rows, columns = shape
        share = COUNTED_PIXELS / (rows * columns)
        if share >= 1:
            return count(shape)
        less, more = (
            scaled((rows, columns), math.sqrt(part * share), self.patch_px)
            for part in (1 / 8, 1 / 2)
        )
        few, many = (self.extended(count, (images, *part)) for part in (less, more))
        if few is None or many is None or many == math.inf:
            return many
        pixels = math.prod(more)
        slope = max(0, many - few) / max(1, pixels - math.prod(less))
        return many + int(min(slope * (rows * columns - pixels), 1 << 62))

    def too_much(self, size: Size) -> bool:
        """Return whether one image of a size clearly needs more than the available memory."""
        return clearly_above(self.bytes_of((1, *size)), self.there_bytes, bounded=self.bounded)

    def fits(self, shape: Shape) -> bool:
        """Return whether a batch leaves some of the available memory free."""
        needed, there = self.bytes_of(shape), self.there_bytes
        return needed is not None and there is not None and needed <= SHARE * there

    def largest_batch(self, size: Size, most: int) -> int:
        """Return how many images of a size fit at once, at most ``most``: a power of two, or above
        8 a multiple of 8; 0 if none fits.
        """
        batches = [n for n in (1, 2, 4, *range(8, most + 1, 8)) if n <= most]
        found = bisect_left(batches, True, key=lambda n: not self.fits((n, *size)))
        return (0, *batches)[found]

    def largest_image(self, size: Size) -> Size | None:
        """Return the largest image that fits, below ``size``, of about the same aspect ratio, in
        whole patches; None if none fits.
        """
        step, longest = max(self.patch_px), max(size)

        def smaller(number: int) -> Size:
            return scaled(size, number * step / longest, self.patch_px)

        numbers = range(1, max(2, longest // step))
        found = bisect_left(numbers, True, key=lambda n: not self.fits((1, *smaller(n))))
        return smaller(found) if found else None

    def auto(self, size: Size, count: int) -> int:
        """Return the batch size of ``batch_size auto``: as many of ``count`` images as fit, but at
        least ``least``.

        Raises:
            ValueError: the memory is unknown.
        """
        if self.there_bytes is None or self.bytes_of((1, *size)) is None:
            raise ValueError(
                "batch_size auto: the peak memory of this model is unknown; pass a number"
            )
        most = min(count, LARGEST_BATCH * self.least)
        return max(self.least, self.largest_batch(size, most))

    def check(self, shape: Shape, needed: int | None) -> Expected:
        """Return the memory of a run whose largest batch needs ``needed`` bytes.

        Raises:
            DoesNotFit: it is clearly more than the available memory; one line, with what would fit.
        """
        images, rows, columns = shape
        what = f"{self.doing}{images} image{'s' if images > 1 else ''} of {rows} x {columns} pixels"
        check_fits(
            needed, self.there_bytes, what, lambda: self.way_out(shape), bounded=self.bounded
        )
        return Expected(needed, None if self.bounded else self.there_bytes)

    def way_out(self, shape: Shape) -> str:
        """Return a message with the batch, or otherwise the image size, that would fit."""
        images, *sides = shape
        size = sides[0], sides[1]
        fit = self.largest_batch(size, images - 1)
        if fit >= self.least:
            option = self.batch_that_fits(fit, shape)
            return f"{option}; --batch-size auto uses the largest batch that fits{self.saves}"
        if self.fixed:
            return "the model accepts only this size; use a smaller model"
        found = self.largest_image(size)
        if found is None:
            none = "not even an image of one patch would fit; use a smaller model"
            return none + self.saves
        return self.image_that_fits(found) + self.saves


class ForwardMemory(Memory):
    """Memory of forward passes for batches of some shapes.

    Args:
        passes, patch_px, cell_px, bound_bytes: as for ``Memory``.
        extra_bytes: returns further bytes on a CPU for batches of a shape: of data loading
            processes, and of results that wait to be written.
        native: images keep their sizes.
        batches: the flag for smaller batches, with ``images`` or ``patches`` to fill in.
    """

    def __init__(
        self,
        passes: Passes,
        patch_px: Size,
        cell_px: int,
        extra_bytes: Callable[[Shape], int],
        *,
        native: bool,
        batches: str = "--batch-size {images}",
        bound_bytes: int | None = None,
    ):
        super().__init__(passes, patch_px, cell_px, bound_bytes=bound_bytes)
        self.extra_bytes, self.native, self.batches = extra_bytes, native, batches
        self.fixed = fixed_size(passes.model) is not None

    def bytes_of(self, shape: Shape) -> int | None:
        """Return the memory for batches of a shape; see ``Memory``."""
        forward = self.extended(self.passes.forward_bytes, shape)
        if forward is None:
            return None
        model_only = self.bounded or self.passes.device.type == "cuda"
        return self.base_bytes + forward + (0 if model_only else self.extra_bytes(shape))

    def batch_that_fits(self, images: int, shape: Shape) -> str:
        """Return the flag of ``batches``, filled in."""
        patches = images * (math.prod(shape[1:]) // self.cell_px)
        return f"{self.batches.format(images=images, patches=patches)} would fit"

    def image_that_fits(self, size: Size) -> str:
        """Return the flag of the command for smaller images."""
        rows, columns = size
        if not self.native:
            return f"--img-size {rows if rows == columns else f'{rows} {columns}'} would fit"
        return (
            f"--fit native --max-patches {rows * columns // self.cell_px} would fit, images of up "
            f"to about {rows} x {columns} pixels"
        )


def images_that_fit(images: int, size: Size) -> str:
    """Return a message with the result of ``batch_size auto``."""
    fit = "1 image fits" if images == 1 else f"{images} images fit"
    return f"batch_size auto: {fit} ({size[0]} x {size[1]} pixels)"


def describe(
    seen: np.ndarray,
    count: int,
    cell_px: int,
    memory: Expected,
    seconds: float | None,
    *,
    sizes: int = 1,
) -> str:
    """Return a line about the cost of forward passes.

    Args:
        seen, count, cell_px, sizes: as for ``images_of``.
        memory: the memory that they need.
        seconds: total computing time; None if not measured.
    """
    parts = [images_of(seen, count, cell_px, sizes=sizes), str(memory)]
    if seconds is not None:
        each = seconds / (count * sizes)
        parts.append(f"estimated time: {lasting(each)} per image, {lasting(seconds)} in total")
    return "; ".join(parts)


def images_of(
    seen: np.ndarray, count: int, cell_px: int, *, sizes: int = 1, cells: str = "patches"
) -> str:
    """Return a description of the number of images and their sizes as the model sees them.

    Args:
        seen: heights and widths in pixels, ``[n, 2]``.
        count: number of images.
        cell_px: pixels of a patch, or of another of ``cells``.
        sizes: number of sizes at which each image is processed.
    """
    pixels = seen.prod(1)
    low, high = (seen[at].tolist() for at in (pixels.argmin(), pixels.argmax()))
    patches = [rows * columns // cell_px for rows, columns in (low, high)]
    size, number = f"{high[0]} x {high[1]} px", str(patches[1])
    if low != high:
        size = f"{low[0]} x {low[1]} to {size}"
        number = f"{patches[0]} to {number}"
    several = f" at {sizes} sizes" if sizes > 1 else ""
    return f"{count} images{several} of {size}, {number} {cells}"
