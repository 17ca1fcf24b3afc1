"""Images through a model as the options of a command say: what predictions, masks and features have
in common.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from visionattn.cli.progress import Progress
from visionattn.inference.banded import Banding, folder_of
from visionattn.inference.forecast import outlook
from visionattn.inference.listing import Listing
from visionattn.inference.opening import Opened
from visionattn.inference.options import InferenceOptions
from visionattn.inference.reading import ReadImages
from visionattn.inference.running import Compute, Outcome, run_images
from visionattn.inference.tiling import work_of


class ImageRun:
    """A model and its images; nothing is written.

    Args:
        options: how images come to the model.
        opened: the model.
        listing: the images.
        compute: which outputs are wanted.
        masks: gives logits of pixels, where ``compute`` gives their classes.

    Raises:
        ValueError: tiles, or what images are read as, are wrong; one line.
    """

    def __init__(
        self,
        options: InferenceOptions,
        opened: Opened,
        listing: Listing,
        compute: Compute,
        *,
        masks: Compute | None = None,
    ):
        self.options, self.opened = options, opened
        self.images = ReadImages(
            listing, opened.spec, opened.geometry, options.max_pixels, level=options.level
        )
        self.work = work_of(options, opened, compute, masks=masks)

    def choose_banded(self, output: Path | None = None, *, held_bytes: int = 0) -> None:
        """Find which images are computed band by band.

        Args:
            output: beside what such images keep how far they have come; None: nowhere.
            held_bytes: what waits in memory to be written.

        Raises:
            ValueError: the bound of memory is below one band, or other work is kept there.
        """
        folder = None
        if output is not None:
            folder = folder_of(self.opened, self.images, self.options, output)
        self.banding = Banding(
            self.opened,
            self.images,
            self.work.compute,
            self.options,
            folder,
            held_bytes=held_bytes,
        )

    def announce(self, say: Callable[[str], None], start: int = 0) -> int:
        """Say what the images from ``start`` on will take; return how many make a batch.

        Raises:
            DoesNotFit: a batch clearly takes more memory than there is.
        """
        told = outlook(self.banding, self.work.batch_size, start=start)
        for text in told.lines:
            say(text)
        return told.batch_size

    def outcomes(
        self, batch_size: int, dtype: torch.dtype = torch.float32, *, first: int = 0, done: int = 0
    ) -> Iterator[list[Outcome]]:
        """Yield the outcomes of batches, and show how far the run is.

        Args:
            batch_size: images per batch at most.
            dtype: of the outputs.
            first: the image that the whole run begins with.
            done: how many of its images are done.
        """
        batches = run_images(
            self.opened,
            self.images,
            self.work.compute,
            start=first + done,
            batch_size=batch_size,
            workers=self.options.workers,
            amp=self.options.amp,
            dtype=dtype,
            banded=self.banding.outcome,
        )
        self.progress = Progress(len(self.images) - first, done)
        self.banding.before = self.progress.stop
        with self.progress as progress, progress.within(self.work.shown, batch_size):
            for batch in batches:
                yield batch
                progress.advance(len(batch), sum(outcome.value is None for outcome in batch))
