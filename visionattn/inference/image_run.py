"""Images through a model with the options of a command, for predictions, masks and features.

This module combines batches, tiles and bands; images in tiles still have to fit into memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from visionattn.cli.exit_codes import Failed
from visionattn.cli.files import first_line
from visionattn.cli.progress import Progress
from visionattn.data.geometry import pixels
from visionattn.inference.banded_inference import Banding, folder_of
from visionattn.inference.image_batches import (
    Outcome,
    batch_samples,
    is_of_a_dead_worker,
    read_ahead,
    run_batch,
)
from visionattn.inference.image_listing import Listing
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.inference_estimate import outlook
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import Opened
from visionattn.models.cost import Compute
from visionattn.models.patches import call, last_map

NATIVE_BATCH, SIZED_BATCH = 1, 16
"""Default images per batch: at their own sizes, and at one size."""


class ImageRun:
    """A model and its images; nothing is written.

    Args:
        options: how images are read and preprocessed.
        opened: the model.
        images: the images.
        compute: computes the wanted outputs.
        convert: turns logits of pixels into the values that ``compute`` returns; None: it returns
            no values of pixels.
        numbers: indices of the images to run; None: all.
        output: images computed band by band store their progress in a folder next to it; None:
            nowhere.
        held_bytes: bytes in memory that wait to be written.

    Attributes:
        compute: ``compute``, or its combination over tiles.
        banding: the images computed band by band.
        lines: messages at the beginning.

    Raises:
        ValueError: tiles are wrong, or the folder holds other work; one line.
    """

    def __init__(
        self,
        options: InferenceOptions,
        opened: Opened,
        images: ReadImages,
        compute: Compute,
        *,
        convert: Callable[[Tensor], Tensor] | None = None,
        numbers: range | None = None,
        output: Path | None = None,
        held_bytes: int = 0,
    ):
        self.options, self.opened, self.images = options, opened, images
        usual = NATIVE_BATCH if opened.geometry.canvas is None else SIZED_BATCH
        self.compute, self.lines = compute, [*opened.notes]
        self.batch_size = options.batch_size or usual
        self.numbers = range(len(images)) if numbers is None else numbers
        if options.tiles is not None:
            self.compute, line = over_tiles_of(options, opened, compute, convert)
            self.batch_size = 1
            self.lines.append(line)
        work = None if output is None else folder_of(opened, images, options, output)
        known = dict(numbers=self.numbers, held_bytes=held_bytes)
        self.banding = Banding(opened, images, self.compute, options, work, **known)

    def announce(self, say: Callable[[str], object], done: int = 0, *, trial: bool = True) -> None:
        """Report the cost of the images after the first ``done``, and set the batch size.

        Raises:
            DoesNotFit: a batch clearly needs more than the available memory.
        """
        left = self.numbers[done:]
        self.batch_size = outlook(self.banding, left, self.batch_size, say, trial=trial)

    def batches(self, dtype: torch.dtype = torch.float32, done: int = 0) -> Iterator[list[Outcome]]:
        """Yield the outputs of the images after the first ``done`` in order, of type ``dtype``,
        batch by batch, with only a few batches in memory.

        If memory is too small for a batch, its halves are tried.

        Raises:
            ValueError: the model does not accept images of this size, or the folder of large images
                holds other work.
            Stopped: Ctrl-C in a large image.
            Failed: a process that reads images ended.
        """
        left, size = self.numbers[done:], self.batch_size
        samples = read_ahead(self.images, left, batch_size=size, workers=self.options.workers)
        try:
            for batch in batch_samples(samples, size):
                own, left = left[: len(batch)], left[len(batch) :]
                if batch[0].banded:
                    yield [self.banding.outcome(own[0], batch[0], dtype)]
                    continue
                paths = [self.images.listing.name(number) for number in own]
                yield run_batch(self.opened, batch, paths, self.compute, self.options.amp, dtype)
        except RuntimeError as error:
            if not is_of_a_dead_worker(error):
                raise
            raise Failed(
                f"a data loader process died ({first_line(error)}); try --workers 0"
            ) from error

    @contextmanager
    def begun(self, say: Callable[[str], object], done: int = 0) -> Iterator[None]:
        """Report model, preprocessing and cost of the images after the first ``done``; in the
        context, hold the work folder of images in bands, if there is or will be one.

        Raises:
            DoesNotFit: a batch clearly needs more than the available memory.
        """
        for line in self.lines:
            say(line)
        if self.numbers[done:]:
            self.announce(say, done)
        work = self.banding.work
        if work is not None:
            self.banding.say = say
        needed = work is not None and (self.banding.lines or work.folder.exists())
        with work if needed and work is not None else nullcontext():
            yield

    def outcomes(
        self, dtype: torch.dtype = torch.float32, done: int = 0
    ) -> Iterator[list[Outcome]]:
        """Yield ``batches``, and show progress."""
        self.progress = Progress(len(self.numbers), done)
        self.banding.before = self.progress.stop
        # With tiles an image needs many passes.
        shown = self.opened.model if self.options.tiles is None else nn.Identity()
        with self.progress as progress, progress.within(shown, self.batch_size):
            for batch in self.batches(dtype, done):
                yield batch
                progress.advance(len(batch), sum(outcome.value is None for outcome in batch))


def over_tiles_of(
    options: InferenceOptions,
    opened: Opened,
    compute: Compute,
    convert: Callable[[Tensor], Tensor] | None,
) -> tuple[Compute, str]:
    """Return a computation over overlapping tiles, and a line about the tiles; see ``ImageRun`` for
    the arguments.

    Raises:
        ValueError: tiles are not whole patches, or no image would be larger than a tile; one line.
    """
    from visionattn.models.large.tiled_inference import (
        TiledPass,
        cell_of,
        check_tiles,
        usual_overlap,
    )

    blended = convert is not None or compute is last_map
    patch_px = cell_of(opened.model, "dense" if compute is last_map else "logits")
    tile, overlap = options.tiles or 0, options.overlap
    overlap = usual_overlap(tile, patch_px) if overlap is None else overlap
    check_tiles(tile, overlap, patch_px)
    if opened.geometry.fit == "pad":
        raise ValueError(
            "tiles must not contain padding, which fit pad of training adds; pass another --fit, "
            "or remove --img-size for native sizes"
        )
    seen, combine = opened.geometry.img_size, options.combine or "mean"
    if seen is not None and max(seen) <= tile:
        raise ValueError(
            "expected tiles smaller than the images, which are resized to at most "
            f"{pixels(seen)}, got {tile} pixels; use smaller tiles or --img-size native"
        )
    plain, count = compute if convert is None else call, options.batch_size or 1
    found = TiledPass(plain, tile, overlap, patch_px, combine, count, convert)
    how = {"mean": "the mean of their outputs", "max": "the maximum of their outputs"}[combine]
    how = "maps are blended" if blended else how
    return found, f"images are cut into tiles of {tile} px with an overlap of {overlap} px: {how}"


def read_as_asked(options: InferenceOptions, opened: Opened, listing: Listing) -> ReadImages:
    """Return a reader of the images with the model's specification and the given options."""
    limits = (options.max_pixels, options.level)
    return ReadImages(listing, opened.spec, opened.geometry, *limits)
