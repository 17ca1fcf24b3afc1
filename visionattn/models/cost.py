"""The one estimate of memory and time: what a forward or a step takes, whether a batch fits, which
batch or image would, and how long the work takes.

On a processor the tensors of a pass are counted without computing it. On a GPU, where too much is
an error and no disaster, a pass is run and its peak is read. This module knows neither files nor
runs.
"""

import copy
import math
import time
import weakref
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

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.memory import (
    SHARE,
    check_fits,
    clearly_above,
    largest_fit,
    memory_there_is,
    taken_bytes,
)
from visionattn.cli.tables import lasting, sized
from visionattn.models.building import fixed_size
from visionattn.models.machine import autocast, random_state, restore_random_state
from visionattn.models.patches import call
from visionattn.models.weights import DataSpec
from visionattn.ops.chunking import only_few
from visionattn.ops.operator import function_of

Model = TypeVar("Model", bound=nn.Module)
Size = tuple[int, int]
Shape = tuple[int, int, int]
"""Images, height and width in pixels of a batch."""
Compute = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""``compute(model, inputs [B, C, H, W], sizes [B, 2]) -> [B, ...]``."""

LARGE_BYTES = 32 * 2**20
"""From here on, glibc takes each block from the system and gives it back when it is freed."""
LIBRARIES_BYTES = 50 * 2**20
"""What libraries take with the first pass on a processor: code, threads, buffers for packing."""
WORKER_BYTES = 45 * 2**20
"""What a process that loads images takes of its own, without images."""
SCATTERED, SCATTERED_CHECKPOINTED = 1.2, 3.5
"""How much more a process takes from the system than its small tensors hold: freed tensors leave
gaps, most where checkpointed blocks are computed anew. Measured with glibc.
"""
LARGEST_BATCH = 512
"""The most images that ``batch_size auto`` takes."""
COUNTED_PIXELS = 1 << 22
"""Pixels of the largest image that is counted itself: larger ones take minutes to count."""
FEW_PIXELS = 1 << 20
"""Forwards of images of fewer pixels in all take no time worth a word."""
TRIAL_PIXELS = 1 << 18
"""Pixels of the largest image that a forward is timed on; larger ones take time in proportion."""
TRIAL_SECONDS = 0.5
"""How long the timed forward of several images may take."""
SHORT_SECONDS = 1.0
"""What takes less time is timed twice."""


class Footprint(TorchDispatchMode):
    """Count the bytes of the tensors that are alive while it is active.

    Attributes:
        live_bytes: of the tensors alive now that were made within it.
        peak_bytes: the most at any time.
        small_bytes: at that time, of tensors below ``LARGE_BYTES``, which allocators put side by
            side, so that gaps stay between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.small_bytes = self._live_small = 0
        self._alive: dict[int, tuple[weakref.ref, int]] = {}
        self._left_out: set[int] = set()
        self._inside: dict[tuple, int] = {}

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count tensors that are there without the work, whatever views of them are made."""
        self._left_out = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operator and count what it returns; of ours also what they hold in between."""
        given = kwargs or {}
        own = function_of(func)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        # On an accelerator ours are kernels, which do not run on fake tensors.
        if own is None or any(x.device.type != "cpu" for x in tensors):
            out = func(*args, **given)
        else:
            out = self._run_own(func, own, args, given)
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._count(made)
        return out

    def _run_own(self, func, own: Callable, args: tuple, given: dict) -> object:
        """Run an operator of ours from within, once for each kind of arguments: later calls hold as
        much.
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
        """Keep the level, with more bytes of small tensors, where it is the highest."""
        if self.live_bytes + more_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes + more_bytes
            self.small_bytes = self._live_small + more_bytes

    def _forget(self, key: int) -> None:
        size = self._alive.pop(key)[1]
        self.live_bytes -= size
        self._live_small -= size if size < LARGE_BYTES else 0


def _kind(value: object) -> object:
    """Return the part of an argument that decides how much memory a work takes."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return repr(value)


@contextmanager
def counting() -> Iterator[tuple[Footprint, Callable[[Model], Model]]]:
    """Make every tensor that is made in the context a fake one, and count their bytes.

    Fake tensors have shapes and no memory, so that work can be counted that would not fit. Gives
    the count, and a function that copies a module with fake parameters and buffers, which do not
    count.
    """
    # Fake tensors pretend that there is a GPU. A first backward pass after them would start a
    # thread for it, and with that thread no forked process could go backward any more.
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
    """Tell what forwards of a model take: bytes above the present level, and seconds.

    Args:
        model: on its device; it stays as it is.
        spec: what its images are.
        device: where it computes.
        amp: ``none``, ``bf16`` or ``fp16``.
        compute: which outputs are wanted.
        leaves_out: the model is told what images fill, and they do not fill all.
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
        """Return the bytes of a forward without gradients, its result included; None where nobody
        can tell, on a GPU infinity where it is too much.
        """

        def work(model: nn.Module) -> None:
            model.eval()
            images, sizes = self.batch(shape)
            with torch.inference_mode(), autocast(self.device, self.amp):
                self.compute(model, self.spec.prepare(images), sizes)

        return whole_bytes(self.peak(work, SCATTERED, shape))

    def batch(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return images and, where the model takes them, the sizes that they fill."""
        images, *size = shape
        channels = 1 if self.spec.encoding else self.spec.in_chans
        made = torch.zeros(images, channels, *size, dtype=torch.uint8, device=self.device)
        return made, torch.tensor([size] * images) if self.leaves_out else None

    def peak(
        self, work: Callable[[nn.Module], None], scattered: float, *key: object
    ) -> float | None:
        """Return the most bytes that a work on the model takes, found once for each key."""
        if key not in self._known:
            on_gpu = self.device.type == "cuda"
            self._known[key] = self._measured(work) if on_gpu else self._counted(work, scattered)
        return self._known[key]

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

    def forward_seconds(
        self, shape: Shape, patch_px: Size, clock: Callable[[], float] = time.perf_counter
    ) -> float | None:
        """Return the seconds of a forward per image, of large images in proportion to a smaller
        one; None where the model does not take such images, or they do not fit.
        """
        images, rows, columns = shape
        tried, share = (rows, columns), TRIAL_PIXELS / (rows * columns)
        if share < 1 and not fixed_size(self.model):
            tried = scaled(tried, math.sqrt(share), patch_px)

        def timed(part: Shape) -> float:
            with torch.inference_mode(), autocast(self.device, self.amp):
                inputs = self.spec.prepare(self.batch(part)[0])
                start = clock()
                self.compute(self.model, inputs, None).to("cpu")
            return clock() - start

        try:
            seconds = seconds_of(timed, (images, *tried), TRIAL_SECONDS, first=1)
        except (RuntimeError, AssertionError, MemoryError, ValueError):
            return None
        return seconds / images * rows * columns / math.prod(tried)


def put_back(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the kept values of tensors back into them."""
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


def whole_bytes(count: float | None) -> int | None:
    """Return a whole number of bytes; infinity and None as they are."""
    return count if count in (None, math.inf) else int(count)  # type: ignore[return-value]


def seconds_of(
    timed: Callable[[Shape], float], shape: Shape, longest: float, *, first: int
) -> float:
    """Return the seconds of a work on a batch, timed on as many images as ``longest`` seconds take.

    Libraries start in the pass over the ``first`` images, which says how many these are.
    """
    images, *size = shape
    tried = min(first, images)
    seconds = timed((tried, *size))
    more = min(images, int(tried * longest / max(seconds, 1e-9)))
    if more > tried:
        tried = more
        seconds = timed((tried, *size))
    if seconds < SHORT_SECONDS:
        seconds = min(seconds, timed((tried, *size)))
    return seconds * images / tried


def scaled(size: Size, factor: float, patch_px: Size) -> Size:
    """Return a size with both sides times a factor, in whole patches."""
    rows, columns = (
        max(each, round(side * factor / each) * each)
        for side, each in zip(size, patch_px, strict=True)
    )
    return rows, columns


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


class Memory:
    """What a run takes at batches of a shape, how much there is, and what would fit.

    A subclass tells what a batch takes, and names the options for a batch or an image that fits.

    Args:
        passes: what passes of the model take.
        patch_px: height and width of its patches.
        cell_px: how many pixels count as one patch.
        processes: how many like this one share the machine.
        bound_bytes: most bytes of a pass above the model; None: all free memory.

    Attributes:
        there_bytes: the memory there is for this process, or the bound; None where nobody knows.
        base_bytes: what the process takes already.
        bounded: whether ``there_bytes`` is the bound.
    """

    doing = saves = ""
    """What is done to images, and what saves memory, as errors say it."""
    least = 1
    """The fewest images of a batch."""
    fixed = False
    """Whether images can have no other size."""

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

    def bytes_of(self, shape: Shape) -> int | None:
        """Return the memory at batches of a shape; None where nobody can tell, and on a GPU
        infinity where it is too much.
        """
        raise NotImplementedError

    def batch_that_fits(self, images: int, shape: Shape) -> str:
        """Name the option for batches of ``images`` images in place of ``shape``."""
        raise NotImplementedError

    def image_that_fits(self, size: Size) -> str:
        """Name the option for images of a size."""
        raise NotImplementedError

    def extended(self, count: Callable[[Shape], int | None], shape: Shape) -> int | None:
        """Return what ``count`` says of a batch. Of images too large to be counted, go on as it
        grows from an eighth of ``COUNTED_PIXELS`` to a half of them.
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

    def about(self, size: Size) -> int | None:
        """Return what one image of a size takes."""
        return self.bytes_of((1, *size))

    def too_much(self, size: Size) -> bool:
        """Tell whether one image of a size clearly takes more memory than there is."""
        return clearly_above(self.about(size), self.there_bytes, bounded=self.bounded)

    def fits(self, shape: Shape) -> bool:
        """Tell whether a batch leaves some of the memory there is."""
        needed, there = self.bytes_of(shape), self.there_bytes
        return needed is not None and there is not None and needed <= SHARE * there

    def largest_batch(self, size: Size, most: int) -> int:
        """Return how many images of a size fit at once, ``most`` at most: a power of two, or above
        8 a multiple of 8; 0 where not one does.
        """
        batches = [n for n in (1, 2, 4, *range(8, most + 1, 8)) if n <= most]
        found = bisect_left(batches, True, key=lambda n: not self.fits((n, *size)))
        return (0, *batches)[found]

    def largest_image(self, size: Size) -> Size | None:
        """Return the largest image of about the same aspect ratio, below ``size`` and in whole
        patches, that fits; None where none does.
        """
        step, longest = max(self.patch_px), max(size)

        def smaller(number: int) -> Size:
            return scaled(size, number * step / longest, self.patch_px)

        most = max(1, longest // step - 1)
        found = largest_fit(lambda n: self.fits((1, *smaller(n))), max(8, most // 2), most)
        return smaller(found) if found else None

    def auto(self, size: Size, count: int) -> int:
        """Return how many images of a size ``batch_size auto`` stands for: of ``count`` the most
        that fit, but no fewer than ``least``.

        Raises:
            ValueError: nobody can tell what fits.
        """
        if self.there_bytes is None or self.bytes_of((1, *size)) is None:
            raise ValueError(
                "batch_size auto: nobody can tell the memory of this model here; name a number"
            )
        most = min(count, LARGEST_BATCH * self.least)
        return max(self.least, self.largest_batch(size, most))

    def check(self, shape: Shape, needed: int | None) -> Expected:
        """Return the memory that a run takes whose largest batch takes ``needed`` bytes.

        Raises:
            DoesNotFit: it is clearly more than there is; one line, with what would fit.
        """
        images, rows, columns = shape
        what = f"{self.doing}{images} image{'s' if images > 1 else ''} of {rows} x {columns} pixels"
        check_fits(
            needed, self.there_bytes, what, lambda: self.way_out(shape), bounded=self.bounded
        )
        return Expected(needed, None if self.bounded else self.there_bytes)

    def way_out(self, shape: Shape) -> str:
        """Say which batch, or if none which size of images, would fit."""
        images, *sides = shape
        size = sides[0], sides[1]
        fit = self.largest_batch(size, images - 1)
        if fit >= self.least:
            option = self.batch_that_fits(fit, shape)
            return f"{option}; --batch-size auto takes the most that fits{self.saves}"
        if self.fixed:
            return "the model takes this size alone; a smaller model takes less"
        found = self.largest_image(size)
        if found is None:
            none = "not even an image of one patch would fit: a smaller model takes less"
            return none + self.saves
        return self.image_that_fits(found) + self.saves


class ForwardMemory(Memory):
    """What forwards take at batches of some shapes.

    Args:
        passes, patch_px, cell_px, bound_bytes: as for ``Memory``.
        beside: returns further bytes on a processor at batches of a shape: of processes that load
            images, and of results that wait to be written.
        native: images keep their sizes.
        batches: the flag that makes batches smaller, for as many ``images`` or ``patches``.
    """

    def __init__(
        self,
        passes: Passes,
        patch_px: Size,
        cell_px: int,
        beside: Callable[[Shape], int],
        *,
        native: bool,
        batches: str = "--batch-size {images}",
        bound_bytes: int | None = None,
    ):
        super().__init__(passes, patch_px, cell_px, bound_bytes=bound_bytes)
        self.beside, self.native, self.batches = beside, native, batches
        self.fixed = fixed_size(passes.model) is not None

    def bytes_of(self, shape: Shape) -> int | None:
        """Return the memory at batches of a shape, as ``Memory`` says."""
        forward = self.extended(self.passes.forward_bytes, shape)
        if forward is None:
            return None
        alone = self.bounded or self.passes.device.type == "cuda"
        return self.base_bytes + forward + (0 if alone else self.beside(shape))

    def batch_that_fits(self, images: int, shape: Shape) -> str:
        """Name the flag of ``batches``."""
        patches = images * (math.prod(shape[1:]) // self.cell_px)
        return f"{self.batches.format(images=images, patches=patches)} would fit"

    def image_that_fits(self, size: Size) -> str:
        """Name the flag of the command."""
        rows, columns = size
        if not self.native:
            return f"--img-size {rows if rows == columns else f'{rows} {columns}'} would fit"
        return (
            f"--fit native --max-patches {rows * columns // self.cell_px} would fit, images of up "
            f"to about {rows} x {columns} pixels"
        )


def images_that_fit(images: int, size: Size) -> str:
    """Say what ``batch_size auto`` has become."""
    fit = "1 image fits" if images == 1 else f"{images} images fit"
    return f"batch_size auto: {fit}, of {size[0]} x {size[1]} pixels"


def describe(
    seen: np.ndarray,
    count: int,
    cell_px: int,
    memory: Expected,
    seconds: float | None,
    *,
    sizes: int = 1,
) -> str:
    """Put what forwards will take into a line.

    Args:
        seen, count, cell_px, sizes: as for ``images_of``.
        memory: what they take.
        seconds: of computing all images; None where nothing was tried.
    """
    parts = [images_of(seen, count, cell_px, sizes=sizes), str(memory)]
    if seconds is not None:
        each = seconds / (count * sizes)
        parts.append(f"computing takes {lasting(each)} per image, {lasting(seconds)} in all")
    return "; ".join(parts)


def images_of(
    seen: np.ndarray, count: int, cell_px: int, *, sizes: int = 1, cells: str = "patches"
) -> str:
    """Say how many images there are, and at which sizes the model sees them.

    Args:
        seen: heights and widths in pixels, ``[n, 2]``.
        count: how many images there are.
        cell_px: pixels of a patch, or of another of ``cells``.
        sizes: at how many sizes each image is seen.
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
