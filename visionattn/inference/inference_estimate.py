"""Estimates before features or predictions of image files: memory and time, and what would fit if
memory is short.

``models/cost.py`` estimates forward passes; this module adds the sizes of the files.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from visionattn.cli.exit_codes import DoesNotFit
from visionattn.data.buckets import canvases, cell_px
from visionattn.data.formats import DAMAGED_IMAGE, read_size
from visionattn.data.geometry import Size
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import Opened
from visionattn.models.cost import (
    FEW_PIXELS,
    WORKER_BYTES,
    Compute,
    ForwardMemory,
    Passes,
    Shape,
    describe,
    images_that_fit,
)
from visionattn.models.patches import takes_sizes

HEADS, HEADS_SECONDS = 2000, 5.0
"""Maximum number of images whose sizes are read, evenly spaced, and the maximum time for it in
seconds.
"""


def outlook(
    banding: Any,
    numbers: range,
    batch_size: int | str,
    say: Callable[[str], object],
    *,
    trial: bool = True,
) -> int:
    """Estimate a run over images from the sizes of some of them and a timed trial image, and report
    it unless all is done at once.

    Args:
        banding: a ``Banding``: model and images, and which of them are computed band by band.
        numbers: indices of the images.
        batch_size: images per batch, or ``auto`` for as many as fit into memory.
        say: receives the lines.
        trial: whether to time an image; without it, a batch is only checked against a memory limit.

    Returns:
        Images per batch.

    Raises:
        DoesNotFit: a batch clearly needs more than the available memory; one line, with what would
            fit.
        ValueError: the memory for ``auto`` is unknown.
    """
    opened, images = banding.opened, banding.images
    seen = sizes_seen(opened, images, numbers)
    for line in banding.lines:
        say(line)
    if not len(seen):  # none is readable (reported later), or all in bands
        return 1 if batch_size == "auto" else int(batch_size)
    count = max(1, round(len(numbers) * (1 - banding.share)))
    areas = seen.prod(1)
    total = float(areas.mean()) * count
    rows, columns = seen[areas.argmax()].tolist()
    if batch_size == "auto":
        batch_size = banding.memory.auto((rows, columns), count)
        say(images_that_fit(batch_size, (rows, columns)))
    number, together = int(batch_size), min(int(batch_size), count)
    says = trial and total > FEW_PIXELS
    if says or banding.options.memory_bytes is not None:
        try:
            shape = (together, rows, columns)
            expected = banding.memory.check(shape, banding.memory.bytes_of(shape))
        except DoesNotFit as error:
            if banding.reason is None:
                raise
            raise DoesNotFit(f"{error}; {banding.reason}") from error
    if says:
        each = banding.memory.passes.forward_seconds(shape, opened.geometry.patch_px)
        seconds = None if each is None else each * total / (rows * columns)
        cell = cell_px(opened.geometry, opened.spec.encoding)
        say(describe(seen, count, cell, expected, seconds))
    return number


def memory_of(
    opened: Opened, compute: Compute, options: InferenceOptions, held_bytes: int = 0
) -> ForwardMemory:
    """Return the memory estimate of a run over image files, with bytes in memory that wait to be
    written.
    """
    workers = options.workers

    def extra_bytes(shape: Shape) -> int:
        image = opened.spec.in_chans * math.prod(shape[1:])
        # Loading processes keep two batches ready, or one image each if images differ in size.
        ahead = 2 * shape[0] if opened.geometry.canvas else workers
        return workers * WORKER_BYTES + (ahead + shape[0]) * image + held_bytes

    geometry = opened.geometry
    leaves_out = geometry.fit == "pad" and takes_sizes(opened.model)
    return ForwardMemory(
        Passes(
            opened.model,
            opened.spec,
            opened.device,
            options.amp,
            compute,
            leaves_out=leaves_out,
        ),
        geometry.patch_px,
        cell_px(geometry),
        extra_bytes,
        native=geometry.canvas is None,
        bound_bytes=options.memory_bytes,
    )


def sizes_seen(opened: Opened, images: ReadImages, numbers: range) -> np.ndarray:
    """Return the sizes at which the model sees images, ``[n, 2]``: one if all are equal, else the
    sizes of some images, without images computed band by band.
    """
    geometry = opened.geometry
    if geometry.canvas is not None:
        return np.array([geometry.canvas])
    found = [size for size in sizes_read(images, numbers) if not images.is_banded(*size)]
    if not found:
        return np.empty((0, 2), np.int64)
    seen = canvases(np.array(found, np.int64), geometry)
    return seen[seen.prod(1) > 0]


def sizes_read(images: ReadImages, numbers: range) -> list[Size]:
    """Return heights and widths in pixels of some of these images' files."""
    found, begin = list[Size](), time.perf_counter()
    for index in numbers[:: max(1, math.ceil(len(numbers) / HEADS))]:
        try:
            found.append(read_size(images.listing.open(index), images.options))
        except DAMAGED_IMAGE:
            continue
        if time.perf_counter() - begin > HEADS_SECONDS:
            break
    return found
