"""What features or predictions of many images will take, said before the first one: memory and
time, and what would fit where the memory is not there.

``training/passes.py`` tells the memory of a forward. Here a trial image tells the time, and both
become those of all images.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from visionattn.cli.memory import (
    SHARE,
    check_fits,
    largest_fit,
    memory_there_is,
    sensible,
    taken_bytes,
)
from visionattn.cli.tables import lasting, sized
from visionattn.data.buckets import canvases, cell_px
from visionattn.data.formats import DAMAGED_IMAGE, read_size
from visionattn.data.geometry import Size
from visionattn.inference.opening import Opened
from visionattn.inference.reading import ReadImages
from visionattn.inference.running import Compute
from visionattn.models.filled import takes_sizes
from visionattn.training.build import fixed_size
from visionattn.training.evaluate import autocast
from visionattn.training.forecast import images_of
from visionattn.training.passes import Passes

FEW_PIXELS = 1 << 20
"""So many pixels in all take no time worth a word."""
HEADS, HEADS_SECONDS = 2000, 5.0
"""How many images' sizes are read at most, evenly among all, and how long."""
TRIAL_SECONDS = 10.0
"""How long a trial image may be expected to take; smaller ones tell of larger ones."""
LARGEST_BATCH = 512
"""The most images that ``batch_size auto`` takes."""
WORKER_BYTES = 45 * 2**20
"""What a process that reads images takes of its own, without images."""


@dataclass(frozen=True)
class Outlook:
    """What a run over images will take."""

    batch_size: int
    """Images per batch, also where that was left to the memory."""
    lines: tuple[str, ...] = ()
    """What is worth saying; nothing where all is done at once."""


def outlook(
    opened: Opened,
    images: ReadImages,
    compute: Compute,
    *,
    batch_size: int | str,
    workers: int,
    amp: str,
    start: int = 0,
    held_bytes: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Outlook:
    """Say what a run over images will take, from the sizes of some of them and a trial image.

    Args:
        opened: the model.
        images: all images.
        compute: which outputs of the model are wanted.
        batch_size: images per batch, or ``auto`` for as many as fit into memory.
        workers: processes that read.
        amp: precision.
        start: the image that the run begins with.
        held_bytes: what waits in memory to be written.
        clock: seconds.

    Raises:
        DoesNotFit: a batch clearly takes more memory than there is; one line, with what would fit.
        ValueError: nobody can tell the memory for ``auto``.
    """
    seen = sizes_seen(opened, images, start, clock)
    count = len(images) - start
    if not len(seen):  # none of them can be read, which their turn will show
        return Outlook(1 if batch_size == "auto" else int(batch_size))
    pixels = seen.prod(1)
    total = float(pixels.mean()) * count
    rows, columns = seen[pixels.argmax()].tolist()
    memory = Memory(opened, compute, amp, (rows, columns), workers, held_bytes)
    lines, number = [], batch_size
    if number == "auto":
        number, line = memory.auto(count)
        lines.append(line)
    number = int(number)
    if total <= FEW_PIXELS:
        return Outlook(number, tuple(lines))
    together = min(number, count)
    needed = memory.bytes_of(together)
    check_fits(
        needed,
        memory.there_bytes,
        f"{together} image{'s' if together > 1 else ''} of {rows} x {columns} pixels",
        lambda: memory.way_out(together),
    )
    each = trial_seconds(opened, compute, (rows, columns), amp, clock)
    computing = None if each is None else each * total / (rows * columns)
    reading = reading_seconds(images, start, clock) * count
    seconds = None
    if computing is not None:
        seconds = max(computing, reading / workers) if workers else computing + reading
    line = describe(seen, count, cell_px(opened.geometry), needed, memory.there_bytes, seconds)
    return Outlook(number, (*lines, line))


def describe(
    seen: np.ndarray,
    count: int,
    cell: int,
    needed: int | None,
    there: int | None,
    seconds: float | None,
) -> str:
    """Put what a run will take into a line.

    Args:
        seen: sizes at which the model sees images, ``[n, 2]``.
        count: how many images there are.
        cell: pixels of a patch.
        needed: bytes that a run takes; None where nobody can tell.
        there: bytes that there are; likewise.
        seconds: of all images; None where nothing was tried.
    """
    beside = "" if there is None else f", {sized(there)} there"
    memory = (
        "memory: not known beforehand for this model"
        if needed is None
        else f"memory: {sized(needed)} expected{beside}"
    )
    parts = [images_of(seen, count, cell), memory]
    if seconds is not None:
        parts.append(f"{lasting(seconds / count)} per image, {lasting(seconds)} in all")
    return "; ".join(parts)


def batch_for(
    opened: Opened,
    images: ReadImages,
    compute: Compute,
    asked: int | str,
    *,
    workers: int,
    amp: str,
) -> int:
    """Return how many images make a batch: as many as asked, or with ``auto`` as fit into memory.

    Raises:
        ValueError: nobody can tell the memory for ``auto``.
    """
    if asked != "auto":
        return int(asked)
    seen = sizes_seen(opened, images, 0, time.perf_counter)
    if not len(seen):
        return 1
    rows, columns = seen[seen.prod(1).argmax()].tolist()
    return Memory(opened, compute, amp, (rows, columns), workers, 0).auto(len(images))[0]


class Memory:
    """Tell what a run over images takes at batches of some number, and how much there is.

    Args:
        opened, compute: the model, and which outputs are wanted.
        amp: precision.
        size: height and width of the largest images, as the model sees them.
        workers: processes that read.
        held_bytes: what waits to be written.
    """

    def __init__(
        self,
        opened: Opened,
        compute: Compute,
        amp: str,
        size: Size,
        workers: int,
        held_bytes: int,
    ):
        self.opened, self.compute, self.size = opened, compute, size
        leaves_out = opened.geometry.fit == "pad" and takes_sizes(opened.model)
        self.passes = Passes(opened.model, opened.spec, opened.device, amp, leaves_out=leaves_out)
        self.workers, self.held_bytes = workers, held_bytes
        self.there_bytes = memory_there_is(opened.device)
        self.base_bytes = taken_bytes(opened.device)

    def bytes_of(self, images: int, size: Size | None = None) -> int | None:
        """Return the memory of a run at batches of so many images; None where nobody can tell."""
        size = size or self.size
        forward = self.passes.forward_bytes((images, *size), self.compute)
        if forward is None:
            return None
        image = self.opened.spec.in_chans * math.prod(size)
        # Readers have two batches ready, or an image each where images differ in size.
        ahead = 2 * images if self.opened.geometry.canvas else self.workers
        loading = self.workers * WORKER_BYTES + (ahead + images) * image
        beside = 0 if self.opened.device.type == "cuda" else loading + self.held_bytes
        return self.base_bytes + forward + beside

    def fits(self, images: int, size: Size | None = None) -> bool:
        """Tell whether a batch leaves some of the memory there is."""
        needed = self.bytes_of(images, size)
        return needed is not None and needed <= SHARE * (self.there_bytes or math.inf)

    def auto(self, count: int) -> tuple[int, str]:
        """Return the most images of a batch, and a line that says so."""
        if self.there_bytes is None or self.bytes_of(1) is None:
            raise ValueError(
                "batch_size auto: nobody can tell the memory of this model here; name a number"
            )
        found = sensible(max(1, largest_fit(self.fits, 8, min(count, LARGEST_BATCH))))
        rows, columns = self.size
        return found, f"batch_size auto: {found} images fit, of {rows} x {columns} pixels"

    def way_out(self, images: int) -> str:
        """Say which batch, or if none which size of images, would fit."""
        fit = largest_fit(self.fits, 8, images - 1) if images > 1 else 0
        if fit:
            return (
                f"--batch-size {sensible(fit)} would fit; --batch-size auto takes the most that "
                "fits"
            )
        geometry = self.opened.geometry
        if fixed_size(self.opened.model):
            return "the model takes this size alone; a smaller model takes less"
        step, longest = max(geometry.patch_px), max(self.size)

        def smaller(number: int) -> Size:
            rows, columns = (
                max(each, round(number * step * side / longest / each) * each)
                for side, each in zip(self.size, geometry.patch_px, strict=True)
            )
            return rows, columns

        found = largest_fit(lambda n: self.fits(1, smaller(n)), 8, max(1, longest // step - 1))
        if not found:
            return "not even an image of one patch would fit: a smaller model takes less"
        rows, columns = smaller(found)
        if geometry.canvas is None:
            patches = rows * columns // cell_px(geometry)
            return (
                f"--fit native --max-patches {patches} would fit, images of up to about {rows} x "
                f"{columns} pixels"
            )
        size = str(rows) if rows == columns else f"{rows} {columns}"
        return f"--img-size {size} would fit"


def sizes_seen(
    opened: Opened, images: ReadImages, start: int, clock: Callable[[], float]
) -> np.ndarray:
    """Return the sizes at which the model sees images, ``[n, 2]``: one where all are equal, else
    those of some of them.
    """
    geometry = opened.geometry
    if geometry.canvas is not None:
        return np.array([geometry.canvas])
    found, begin = [], clock()
    step = max(1, math.ceil((len(images) - start) / HEADS))
    for index in range(start, len(images), step):
        try:
            found.append(read_size(images.listing.open(index), images.options))
        except DAMAGED_IMAGE:
            continue
        if clock() - begin > HEADS_SECONDS:
            break
    if not found:
        return np.empty((0, 2), np.int64)
    seen = canvases(np.array(found, np.int64), geometry)
    return seen[seen.prod(1) > 0]


def trial_seconds(
    opened: Opened, compute: Compute, size: Size, amp: str, clock: Callable[[], float]
) -> float | None:
    """Return the seconds of a forward of one image; those of a large one follow from smaller ones
    where it would take long. None where the model does not take such images, or they do not fit.
    """
    small = fixed_size(opened.model) or math.prod(size) <= FEW_PIXELS
    shares = [1] if small else [1024, 256, 64, 16, 4, 1]
    known: list[tuple[int, float]] = []
    for share in shares:
        part = scaled(size, 1 / share, opened.geometry.patch_px)
        pixels = math.prod(part)
        if known and further(known, pixels) > TRIAL_SECONDS:
            break
        try:
            seconds = one_pass(opened, compute, part, amp, clock)
            if seconds < 1:  # libraries start in the first pass
                seconds = one_pass(opened, compute, part, amp, clock)
        except (RuntimeError, AssertionError, MemoryError, ValueError):
            return None
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


def one_pass(
    opened: Opened, compute: Compute, size: Size, amp: str, clock: Callable[[], float]
) -> float:
    """Return the seconds of a forward of one black image."""
    channels = 1 if opened.spec.encoding else opened.spec.in_chans
    image = torch.zeros(1, channels, *size, dtype=torch.uint8, device=opened.device)
    with torch.inference_mode(), autocast(opened.device, amp):
        inputs = opened.spec.prepare(image)
        start = clock()
        compute(opened.model, inputs, None).to("cpu")
        return clock() - start


def reading_seconds(images: ReadImages, start: int, clock: Callable[[], float]) -> float:
    """Return the seconds of reading an image, over a few that lie evenly among all."""
    found, length = [], len(images) - start
    for index in sorted({start + length * i // 4 for i in range(4)}):
        begin = clock()
        images[index]
        found.append(clock() - begin)
        if sum(found) > 2:
            break
    return float(np.mean(found[1:] or found))
