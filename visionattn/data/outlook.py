"""What forwards over many images will take, said before the first one: memory and time, and what
would fit where the memory is not there.

``passes.py`` tells the memory of a forward. Here a trial tells the time, and both become those of
all images. Evaluations, features and predictions are such forwards; this module knows no files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from visionattn.cli.memory import (
    check_fits,
    clearly_above,
    memory_there_is,
    sensible,
    taken_bytes,
)
from visionattn.cli.tables import lasting
from visionattn.data.buckets import cell_px
from visionattn.data.geometry import Geometry, Size
from visionattn.models.building import fixed_size
from visionattn.models.cost import (
    LARGEST_BATCH,
    Compute,
    Expected,
    Passes,
    Shape,
    fits,
    largest_batch,
    largest_image,
)
from visionattn.models.machine import autocast
from visionattn.models.patches import call
from visionattn.models.weights import DataSpec

FEW_PIXELS = 1 << 20
"""So many pixels in all take no time worth a word."""
ABOUT_PIXELS = 1 << 22
"""Pixels from which on what an image takes is told from smaller ones."""
COUNTED_PIXELS = 1 << 22
"""Pixels of the largest image that is counted itself: larger ones take minutes to count."""
TRIAL_SECONDS = 10.0
"""How long a trial image may be expected to take; smaller ones tell of larger ones."""
BATCH_SECONDS = 0.5
"""How long a trial of several small images may take."""


@dataclass(frozen=True)
class Forwards:
    """A model at work on images.

    Args:
        model: in eval mode, on its device.
        spec: what its images are.
        device: where it computes.
        amp: ``none``, ``bf16`` or ``fp16``.
        compute: which outputs are wanted.
    """

    model: nn.Module
    spec: DataSpec
    device: torch.device
    amp: str
    compute: Compute = call


class ForwardMemory:
    """Tell what forwards take at batches of some shapes, and how much there is.

    Args:
        work: the model at work.
        geometry: how it sees images.
        beside: returns what on a processor is there beside a forward at batches of a shape: what
            loads images, and what waits to be written.
        leaves_out: the model is told what images fill, and they do not fill all.
        bound_bytes: what a pass may take beside the model; None: what there is.

    Attributes:
        there_bytes: the memory there is for this process, or the bound; None where nobody knows.
        bounded: whether it is the bound.
    """

    def __init__(
        self,
        work: Forwards,
        geometry: Geometry,
        beside: Callable[[Shape], int],
        *,
        leaves_out: bool = False,
        bound_bytes: int | None = None,
    ):
        self.work, self.geometry, self.beside = work, geometry, beside
        self.bounded = bound_bytes is not None
        self.there_bytes, self.base_bytes = memory_there_is(work.device), taken_bytes(work.device)
        if self.bounded:
            self.there_bytes, self.base_bytes = bound_bytes, 0
        self.passes = Passes(work.model, work.spec, work.device, work.amp, leaves_out=leaves_out)

    def bytes_of(self, shape: Shape) -> int | None:
        """Return the memory at batches of a shape; None where nobody can tell, and on a GPU
        infinity where it is too much. What images of more than ``COUNTED_PIXELS`` take is told from
        two smaller sizes.
        """
        images, *size = shape
        if math.prod(size) > COUNTED_PIXELS:
            return self._extended(images, (size[0], size[1]))
        forward = self.passes.forward_bytes(shape, self.work.compute)
        if forward is None:
            return None
        alone = self.bounded or self.work.device.type == "cuda"
        beside = 0 if alone else self.beside(shape)
        return self.base_bytes + forward + beside

    def _extended(self, images: int, size: Size) -> int | None:
        """Return the memory at images that are too large to be counted: as it grows from an eighth
        of ``COUNTED_PIXELS`` to a half of them, so it goes on.
        """
        share = COUNTED_PIXELS / math.prod(size)
        less, more = (scaled(size, part * share, self.geometry.patch_px) for part in (1 / 8, 1 / 2))
        few, many = self.bytes_of((images, *less)), self.bytes_of((images, *more))
        if few is None or many is None or many == math.inf:
            return many
        pixels = math.prod(more)
        grown = max(0, many - few) / max(1, pixels - math.prod(less)) * (math.prod(size) - pixels)
        return many + int(min(grown, 1 << 62))

    def auto(self, size: Size, count: int) -> tuple[int, str]:
        """Return the most images of a size, of ``count``, that ``batch_size auto`` stands for, and
        a line that says so.

        Raises:
            ValueError: nobody can tell what fits.
        """
        if self.there_bytes is None or self.bytes_of((1, *size)) is None:
            raise ValueError(
                "batch_size auto: nobody can tell the memory of this model here; name a number"
            )
        found = sensible(max(1, largest_batch(self, size, min(count, LARGEST_BATCH))))
        rows, columns = size
        images = "1 image fits" if found == 1 else f"{found} images fit"
        return found, f"batch_size auto: {images}, of {rows} x {columns} pixels"

    def check(self, shape: Shape, batches: str = "--batch-size {images}") -> Expected:
        """Return the memory that batches of a shape take.

        Args:
            shape: of the largest batch.
            batches: the flag that makes batches smaller, for as many ``images`` or ``patches``.

        Raises:
            DoesNotFit: it is clearly more than there is; one line, with what would fit.
        """
        images, rows, columns = shape
        needed = self.bytes_of(shape)
        check_fits(
            needed,
            self.there_bytes,
            f"{images} image{'s' if images > 1 else ''} of {rows} x {columns} pixels",
            lambda: self.way_out(shape, batches),
            bounded=self.bounded,
        )
        return Expected(needed, None if self.bounded else self.there_bytes)

    def too_much(self, size: Size) -> bool:
        """Tell whether one image of a size clearly takes more memory than there is.

        To count what a large one takes is long work itself: smaller ones come first.
        """
        pixels, part = math.prod(size), ABOUT_PIXELS
        while part < min(pixels / 2, COUNTED_PIXELS):
            if self._too_much(scaled(size, part / pixels, self.geometry.patch_px)):
                return True
            part *= 4
        return self._too_much(size)

    def about(self, size: Size) -> int | None:
        """Return about what one image of a size takes; of a large one in proportion to a smaller
        one, as attention that is linear in patches has it. None where nobody can tell.
        """
        share = min(1.0, ABOUT_PIXELS / math.prod(size))
        part = size if share == 1 else scaled(size, share, self.geometry.patch_px)
        found = self.bytes_of((1, *part))
        if found is None or part == size:
            return found
        more = (found - self.base_bytes) * math.prod(size) / math.prod(part)
        return self.base_bytes + int(min(more, 1 << 62))

    def _too_much(self, size: Size) -> bool:
        return clearly_above(self.bytes_of((1, *size)), self.there_bytes, bounded=self.bounded)

    def way_out(self, shape: Shape, batches: str) -> str:
        """Say which batch, or if none which size of images, would fit."""
        images, *sides = shape
        size, cell = (sides[0], sides[1]), cell_px(self.geometry)
        fit = largest_batch(self, size, images - 1)
        if fit:
            fit = sensible(fit)
            flag = batches.format(images=fit, patches=fit * (math.prod(size) // cell))
            return f"{flag} would fit; --batch-size auto takes the most that fits"
        if fixed_size(self.work.model):
            return "the model takes this size alone; a smaller model takes less"
        found = largest_image(lambda one: fits(self, (1, *one)), size, self.geometry.patch_px)
        if found is None:
            return "not even an image of one patch would fit: a smaller model takes less"
        rows, columns = found
        if self.geometry.canvas is None:
            return (
                f"--fit native --max-patches {rows * columns // cell} would fit, images of up to "
                f"about {rows} x {columns} pixels"
            )
        return f"--img-size {rows if rows == columns else f'{rows} {columns}'} would fit"


def describe(
    seen: np.ndarray,
    count: int,
    cell: int,
    memory: Expected,
    seconds: float | None,
    *,
    sizes: int = 1,
) -> str:
    """Put what forwards will take into a line.

    Args:
        seen: sizes at which the model sees images, ``[n, 2]``.
        count: how many images there are.
        cell: pixels of a patch.
        memory: what they take.
        seconds: of computing all images; None where nothing was tried.
        sizes: at how many sizes each image is seen.
    """
    parts = [images_of(seen, count, cell, sizes=sizes), str(memory)]
    if seconds is not None:
        each = seconds / (count * sizes)
        parts.append(f"computing takes {lasting(each)} per image, {lasting(seconds)} in all")
    return "; ".join(parts)


def images_of(
    seen: np.ndarray, count: int, cell: int, *, sizes: int = 1, cells: str = "patches"
) -> str:
    """Say how many images there are, and at which sizes ``[n, 2]`` the model sees them, with
    patches (or other ``cells``) of ``cell`` pixels; ``sizes`` says at how many it sees each.
    """
    pixels = seen.prod(1)
    low, high = (seen[at].tolist() for at in (pixels.argmin(), pixels.argmax()))
    patches = [rows * columns // cell for rows, columns in (low, high)]
    size, number = f"{high[0]} x {high[1]} px", str(patches[1])
    if low != high:
        size = f"{low[0]} x {low[1]} to {size}"
        number = f"{patches[0]} to {number}"
    several = f" at {sizes} sizes" if sizes > 1 else ""
    return f"{count} images{several} of {size}, {number} {cells}"


def trial_seconds(
    work: Forwards, size: Size, batch: int, patch_px: Size, clock: Callable[[], float]
) -> float | None:
    """Return the seconds of a forward, per image: of a few small images at once, and of a large one
    from smaller ones where it would take long. None where the model does not take such images, or
    they do not fit.

    Args:
        work: the model at work.
        size: of an image.
        batch: how many images are computed at once, at most.
        patch_px: of the model.
        clock: seconds.
    """
    try:
        if fixed_size(work.model) or math.prod(size) <= FEW_PIXELS:
            return _of_small(work, size, batch, clock)
        return _of_large(work, size, patch_px, clock)
    except (RuntimeError, AssertionError, MemoryError, ValueError):
        return None


def _of_small(work: Forwards, size: Size, batch: int, clock: Callable[[], float]) -> float:
    """Try one image, and then as many as half a second takes."""
    seconds = one_pass(work, (1, *size), clock)
    if seconds < 1:  # libraries start in the first pass
        seconds = one_pass(work, (1, *size), clock)
    several = min(batch, int(BATCH_SECONDS / max(seconds, 1e-9)))
    return seconds if several < 2 else one_pass(work, (several, *size), clock) / several


def _of_large(work: Forwards, size: Size, patch_px: Size, clock: Callable[[], float]) -> float:
    """Try ever larger images of the same shape, as far as ten seconds go."""
    known: list[tuple[int, float]] = []
    for share in (1024, 256, 64, 16, 4, 1):
        part = scaled(size, 1 / share, patch_px)
        pixels = math.prod(part)
        if known and further(known, pixels) > TRIAL_SECONDS:
            break
        seconds = one_pass(work, (1, *part), clock)
        if seconds < 1:
            seconds = one_pass(work, (1, *part), clock)
        known.append((pixels, seconds))
    return further(known, math.prod(size))


def further(known: list[tuple[int, float]], pixels: int) -> float:
    """Return the seconds at so many pixels: they grow at least evenly, at most with the square, and
    between the two as they grew last.
    """
    (last, seconds), power = known[-1], 1.0
    if len(known) > 1 and last > known[-2][0]:
        power = math.log(seconds / known[-2][1]) / math.log(last / known[-2][0])
    return seconds * (pixels / last) ** min(2.0, max(1.0, power))


def scaled(size: Size, share: float, patch_px: Size) -> Size:
    """Return a size of about this share of the pixels, in whole patches."""
    rows, columns = (
        max(each, round(side * math.sqrt(share) / each) * each)
        for side, each in zip(size, patch_px, strict=True)
    )
    return rows, columns


def one_pass(work: Forwards, shape: Shape, clock: Callable[[], float]) -> float:
    """Return the seconds of a forward of black images."""
    images, *size = shape
    channels = 1 if work.spec.encoding else work.spec.in_chans
    given = torch.zeros(images, channels, *size, dtype=torch.uint8, device=work.device)
    with torch.inference_mode(), autocast(work.device, work.amp):
        inputs = work.spec.prepare(given)
        start = clock()
        work.compute(work.model, inputs, None).to("cpu")
        return clock() - start
