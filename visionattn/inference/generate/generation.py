"""Which images are written, of which class and of which given rows, in which batches.

This module owns the order of the images and of their draws. It writes no files.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from einops import rearrange
from torch import Tensor

from visionattn.cli.ends import OutOfMemory, is_out_of_memory
from visionattn.cli.memory import check_fits, largest_fit, memory_there_is, taken_bytes
from visionattn.cli.progress import Progress
from visionattn.data.geometry import pixels, sides
from visionattn.inference.generate.decoder import check_size, memory_of
from visionattn.inference.generate.options import GenerateOptions
from visionattn.inference.generate.prompts import Prompt, likeliest_class, read_prompts
from visionattn.inference.generate.writing import Asked, write_values
from visionattn.inference.listing import Listing
from visionattn.inference.look.find import class_number
from visionattn.inference.opening import Opened
from visionattn.models.machine import autocast
from visionattn.models.pixel_decoder import PixelDecoder

COUNT, KEEP = 64, 0.5
"""Images that are written, and the share of rows that is given, where nobody says so."""
Plan = tuple[int, int, int | None]
"""An image that is to be written: its number, of a completion the number of the prompt, on which
its draws depend; the number of the completion; and its class, None where there are none or where
the prompt decides.
"""
Batch = dict[str, Tensor]
"""What was written: ``values`` int32 ``[B, N]``, ``nats`` float64 ``[B, 2]``, as ``write_values``
has them, and ``labels`` int64 ``[B]`` where images have classes.
"""


@dataclass(frozen=True)
class Drawn:
    """An image that was written."""

    image: int
    """Its number; of a completion the number of the prompt."""
    copy: int
    """The number of the completion of a prompt."""
    pixels: Tensor
    """uint8 ``[C, H, W]`` on the CPU."""
    label: int | None
    bits_per_dim: float
    """Minus the binary logarithm of the probability that the model gives to the written values,
    whatever the temperature, over their number.
    """
    given_bits_per_dim: float | None
    """Likewise of given values; None where there are none."""


class Generation:
    """All images of a call, after all checks.

    Args:
        opened: the model.
        options: checked by ``options.check``.
        listing: the images of ``complete``; None: there are none.

    Attributes:
        classes: the numbers of the classes that images take in turn; none for a model without.
        prompts: images of which rows are given.
        copies: the number of completions of each prompt; 1 where there are no prompts.
        images: the number of images that are written.
        size: their height and width.
        rows: how many rows are given.
        values: the number of values of an image.

    Raises:
        ValueError: classes, sizes or prompts do not go together; one line.
        DoesNotFit: a batch clearly takes more memory than there is.
    """

    def __init__(self, opened: Opened, options: GenerateOptions, listing: Listing | None):
        assert isinstance(opened.model, PixelDecoder)
        self.opened, self.options, self.model = opened, options, opened.model
        channels = self.model.in_chans
        self.classes = self._classes()
        size = sides(options.img_size)
        if size is not None:
            check_size(size, channels)
        self.prompts: list[Prompt] = []
        self.copies, self.images = 1, options.count or COUNT
        if listing is not None:
            self.prompts = read_prompts(listing, opened, size)
            self.copies = options.count or 1
            self.images = len(self.prompts) * self.copies
            height, width = self.prompts[0].pixels.shape[1:]
            size = height, width
        size = size or sides(opened.spec.img_size)
        if size is None:
            raise ValueError(
                "img_size is missing: the model was trained on images of their own sizes"
            )
        check_size(size, channels)
        self.size, self.values = size, math.prod(size) * channels
        self.rows = self._rows() if self.prompts else 0
        self._check_memory()

    def _classes(self) -> list[int]:
        spec, given = self.opened.spec, self.options.classes
        if not self.model.conditioned:
            if given is not None:
                raise ValueError(
                    f"classes do nothing: {self.opened.name} was trained without, conditioned false"
                )
            return []
        count = self.model.num_classes
        if given is None:
            return list(range(count))
        return [class_number(word, spec.class_names, count) for word in given]

    def _rows(self) -> int:
        keep = KEEP if self.options.keep is None else self.options.keep
        rows, height = round(keep * self.size[0]), self.size[0]
        if not 0 < rows < height:
            what = "none of them" if rows == 0 else "all of them and leaves nothing to write"
            raise ValueError(f"keep {keep} of {height} rows is {what}")
        return rows

    def _check_memory(self) -> None:
        """Raise DoesNotFit where a batch clearly takes more memory than there is."""
        together, each = memory_of(self.model, self.size)
        device = self.opened.device
        together += taken_bytes(device)
        there, batch = memory_there_is(device), min(self.options.batch_size, self.images)

        def way_out() -> str:
            fit = largest_fit(lambda count: together + count * each <= (there or 0), most=batch)
            return f"--batch-size {fit} fits" if fit else "name a smaller --img-size"

        what = f"{batch} images of {pixels(self.size)} at once"
        check_fits(together + batch * each, there, what, way_out)

    def plan(self, number: int) -> Plan:
        """Return what is to be written as the image of a number."""
        image, copy = divmod(number, self.copies)
        if not self.classes or (self.prompts and self.options.classes is None):
            return image, copy, None
        in_turn = copy if self.prompts else image
        return image, copy, self.classes[in_turn % len(self.classes)]

    def run(
        self,
        progress: Progress | None = None,
        kept: Callable[[int, Callable[[], Batch]], Batch] = lambda number, write: write(),
    ) -> list[Drawn]:
        """Write all images.

        Args:
            progress: counts values.
            kept: returns a batch by its number: what an earlier run wrote, or what the function
                that it is given writes now.

        Raises:
            ValueError: outputs of the model are not finite; one line.
            OutOfMemory: a batch does not fit into memory.
        """
        size, drawn = self.options.batch_size, []
        for number, start in enumerate(range(0, self.images, size)):
            plans = [self.plan(i) for i in range(start, min(start + size, self.images))]
            try:
                drawn += self._drawn(plans, kept(number, partial(self._batch, plans, progress)))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fewer = f"; try --batch-size {len(plans) // 2}" if len(plans) > 1 else ""
                raise OutOfMemory(
                    f"out of memory with {len(plans)} images of {pixels(self.size)} at once{fewer}"
                ) from error
        return drawn

    @torch.inference_mode()
    def _batch(self, plans: list[Plan], progress: Progress | None) -> Batch:
        """Write a batch."""
        device, options = self.opened.device, self.options

        def stepped() -> None:
            if progress is not None:
                progress.advance(len(plans))

        with autocast(device, options.amp):
            labels = None
            if self.classes:
                chosen = [
                    self._likeliest[image] if label is None else label for image, _, label in plans
                ]
                labels = torch.tensor(chosen, device=device)
            given = torch.zeros(len(plans), 0, dtype=torch.int64)
            if self.prompts:
                parts = [self.prompts[image].pixels[:, : self.rows] for image, _, _ in plans]
                given = rearrange(torch.stack(parts), "b c h w -> b (h w c)").long()
            numbers = tuple((image, copy) for image, copy, _ in plans)
            values, nats = write_values(
                self.model,
                Asked(self.size, numbers, labels, given.to(device)),
                temperature=options.temperature,
                seed=options.seed,
                stepped=stepped,
            )
        found = {"values": values.to(torch.int32), "nats": nats}
        found |= {} if labels is None else {"labels": labels}
        return {name: value.cpu() for name, value in found.items()}

    @cached_property
    def _likeliest(self) -> list[int]:
        """The class of each prompt under which its given rows are the most likely."""
        return [
            likeliest_class(
                self.model, prompt.pixels.to(self.opened.device), self.rows, self.classes
            )
            for prompt in self.prompts
        ]

    def _drawn(self, plans: list[Plan], batch: Batch) -> list[Drawn]:
        values, (height, width) = batch["values"].to(torch.uint8), self.size
        images = rearrange(values, "b (h w c) -> b c h w", h=height, w=width)
        labels = batch["labels"].tolist() if "labels" in batch else [None] * len(plans)
        given = self.rows * width * self.model.in_chans
        bits = (batch["nats"] / math.log(2)).tolist()
        return [
            Drawn(
                *plan[:2],
                image.clone(),
                label,
                new / (self.values - given),
                old / given if given else None,
            )
            for plan, image, label, (old, new) in zip(plans, images, labels, bits, strict=True)
        ]
