"""What features or predictions of images in files will take, said before the first one: memory and
time, and what would fit where the memory is not there.

``training/outlook.py`` tells both of forwards. Here are the sizes of the files.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from visionattn.cli.ends import DoesNotFit
from visionattn.data.buckets import canvases, cell_px
from visionattn.data.formats import DAMAGED_IMAGE, read_size
from visionattn.data.geometry import Size
from visionattn.inference.opening import Opened
from visionattn.inference.reading import ReadImages
from visionattn.inference.running import Compute
from visionattn.models.patches import takes_sizes
from visionattn.training.memory import WORKER_BYTES, Expected
from visionattn.training.outlook import (
    FEW_PIXELS,
    ForwardMemory,
    Forwards,
    describe,
    trial_seconds,
)
from visionattn.training.passes import Shape

if TYPE_CHECKING:  # which reads the sizes of images by this module
    from visionattn.inference.banded import Banding

HEADS, HEADS_SECONDS = 2000, 5.0
"""How many images' sizes are read at most, evenly among all, and how long."""


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
    banding: "Banding | None" = None,
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
        banding: which of the images are computed band by band; None: none of them.
        clock: seconds.

    Raises:
        DoesNotFit: a batch clearly takes more memory than there is; one line, with what would fit.
        ValueError: nobody can tell the memory for ``auto``.
    """
    seen = sizes_seen(opened, images, start, clock)
    lines = [] if banding is None else list(banding.lines)
    share = 0.0 if banding is None else banding.share
    count = max(1, round((len(images) - start) * (1 - share)))
    if not len(seen):  # none of them can be read, which their turn will show, or all in bands
        return Outlook(1 if batch_size == "auto" else int(batch_size), tuple(lines))
    pixels = seen.prod(1)
    total = float(pixels.mean()) * count
    rows, columns = seen[pixels.argmax()].tolist()
    if banding is None:
        memory = memory_of(opened, compute, amp=amp, workers=workers, held_bytes=held_bytes)
    else:
        memory = banding.memory
    number = batch_size
    if number == "auto":
        number, line = memory.auto((rows, columns), count)
        lines.append(line)
    number = int(number)
    together = min(number, count)
    if total > FEW_PIXELS or memory.bounded:
        expected = _check(memory, (together, rows, columns), banding)
    if total <= FEW_PIXELS:
        return Outlook(number, tuple(lines))
    patch_px = opened.geometry.patch_px
    each = trial_seconds(memory.work, (rows, columns), together, patch_px, clock)
    seconds = None if each is None else each * total / (rows * columns)
    line = describe(seen, count, cell_px(opened.geometry), expected, seconds)
    return Outlook(number, (*lines, line))


def memory_of(
    opened: Opened,
    compute: Compute,
    *,
    amp: str,
    workers: int,
    held_bytes: int,
    bound_bytes: int | None = None,
) -> ForwardMemory:
    """Return what tells the memory of a run over images in files; ``outlook`` and ``ForwardMemory``
    have the arguments.
    """

    def beside(shape: Shape) -> int:
        image = opened.spec.in_chans * math.prod(shape[1:])
        # Readers have two batches ready, or an image each where images differ in size.
        ahead = 2 * shape[0] if opened.geometry.canvas else workers
        return workers * WORKER_BYTES + (ahead + shape[0]) * image + held_bytes

    leaves_out = opened.geometry.fit == "pad" and takes_sizes(opened.model)
    work = Forwards(opened.model, opened.spec, opened.device, amp, compute)
    return ForwardMemory(
        work, opened.geometry, beside, leaves_out=leaves_out, bound_bytes=bound_bytes
    )


def batch_for(opened: Opened, images: ReadImages, asked: int | str, banding: "Banding") -> int:
    """Return how many images make a batch: as many as asked, or with ``auto`` as fit into memory.

    Args:
        opened: the model.
        images: all images.
        asked: a number, or ``auto``.
        banding: which of the images are computed band by band; it tells the memory of the others.

    Raises:
        ValueError: nobody can tell the memory for ``auto``.
        DoesNotFit: a batch takes more than the bound of memory that was given.
    """
    memory = banding.memory
    if asked != "auto" and not memory.bounded:
        return int(asked)
    seen = sizes_seen(opened, images, 0, time.perf_counter)
    if not len(seen):
        return 1 if asked == "auto" else int(asked)
    rows, columns = seen[seen.prod(1).argmax()].tolist()
    size = rows, columns
    number = memory.auto(size, len(images))[0] if asked == "auto" else int(asked)
    if memory.bounded:
        _check(memory, (min(number, len(images)), *size), banding)
    return number


def _check(memory: ForwardMemory, shape: Shape, banding: "Banding | None") -> Expected:
    """Check a batch as ``ForwardMemory.check`` does, and say why an image that does not fit is not
    computed band by band.
    """
    try:
        return memory.check(shape)
    except DoesNotFit as error:
        if banding is None or banding.reason is None:
            raise
        raise DoesNotFit(f"{error}; {banding.reason}") from error


def sizes_seen(
    opened: Opened, images: ReadImages, start: int, clock: Callable[[], float]
) -> np.ndarray:
    """Return the sizes at which the model sees images, ``[n, 2]``: one where all are equal, else
    those of some of them, without those that are computed band by band.
    """
    geometry = opened.geometry
    if geometry.canvas is not None:
        return np.array([geometry.canvas])
    found = [size for size in sizes_read(images, start, clock) if not images.is_banded(*size)]
    if not found:
        return np.empty((0, 2), np.int64)
    seen = canvases(np.array(found, np.int64), geometry)
    return seen[seen.prod(1) > 0]


def sizes_read(images: ReadImages, start: int, clock: Callable[[], float]) -> list[Size]:
    """Return heights and widths of some images in their files, from number ``start`` on."""
    found, begin = list[Size](), clock()
    step = max(1, math.ceil((len(images) - start) / HEADS))
    for index in range(start, len(images), step):
        try:
            found.append(read_size(images.listing.open(index), images.options))
        except DAMAGED_IMAGE:
            continue
        if clock() - begin > HEADS_SECONDS:
            break
    return found
