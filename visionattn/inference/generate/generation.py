"""Which images are written, of which class and of which given rows, in which batches.

This module owns the order of the images and of their draws. It writes no files; what a run has
written so far goes to whoever keeps it.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from visionattn.cli.ends import OutOfMemory, is_out_of_memory
from visionattn.cli.memory import check_fits, largest_fit, memory_there_is, taken_bytes
from visionattn.cli.progress import Progress
from visionattn.data.geometry import Size, pixels, sides
from visionattn.inference.generate.decoder import check_size, memory_of
from visionattn.inference.generate.options import GenerateOptions
from visionattn.inference.generate.prompts import Prompt, likeliest_class, read_prompts
from visionattn.inference.generate.writing import Asked, Writing
from visionattn.inference.listing import Listing
from visionattn.inference.look.find import class_number
from visionattn.inference.opening import Opened
from visionattn.models.machine import autocast
from visionattn.models.pixel_decoder import PixelDecoder

COUNT, KEEP = 64, 0.5
"""Images that are written, and the share of rows that is given, where nobody says so."""


@dataclass(frozen=True)
class Planned:
    """An image that is to be written."""

    image: int
    """Its number; of a completion that of the prompt. Its draws depend on it."""
    copy: int
    """The number of the completion of a prompt."""
    label: int | None
    """Its class; None where there are none, or where the prompt decides."""


@dataclass(frozen=True)
class Drawn:
    """An image that was written."""

    planned: Planned
    pixels: Tensor
    """uint8 ``[C, H, W]`` on the CPU."""
    label: int | None
    bits_per_dim: float
    """Minus the binary logarithm of the probability that the model gives to the written values,
    whatever the temperature, over their number.
    """
    given_bits_per_dim: float | None
    """Likewise of given values; None where there are none."""


class Keeper(Protocol):
    """Keeps batches that are being written, so that another process goes on."""

    def load(self, batch: int) -> dict[str, Tensor] | None:
        """Return what was kept of a batch; None where nothing was."""
        ...

    def is_due(self) -> bool:
        """Tell whether it is time to keep a batch that is not whole."""
        ...

    def save(self, batch: int, tensors: dict[str, Tensor]) -> None:
        """Keep ``Writing.tensors`` of a batch."""
        ...


class Generation:
    """All images of a call, after all checks.

    Args:
        opened: the model.
        options: checked by ``options.check``.
        listing: the images of ``complete``; None: there are none.

    Raises:
        ValueError: classes, sizes or prompts do not go together; one line.
        DoesNotFit: a batch clearly takes more memory than there is.
    """

    def __init__(self, opened: Opened, options: GenerateOptions, listing: Listing | None):
        assert isinstance(opened.model, PixelDecoder)
        self.opened, self.options, self.model = opened, options, opened.model
        self.classes = self._classes()
        asked = sides(options.img_size)
        if asked is not None:
            check_size(asked, self.model.in_chans)
        self.prompts: list[Prompt] = []
        if listing is not None:
            self.prompts = read_prompts(listing, opened, asked)
        self.size = self._size(asked)
        check_size(self.size, self.model.in_chans)
        self.rows = self._rows()
        self._check_memory()

    def _classes(self) -> list[int]:
        """Return the numbers of the classes that images take in turn; none for a model without."""
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

    def _size(self, asked: Size | None) -> Size:
        """Return height and width of the images."""
        if self.prompts:
            height, width = self.prompts[0].pixels.shape[1:]
            return height, width
        size = asked or sides(self.opened.spec.img_size)
        if size is None:
            raise ValueError(
                "img_size is missing: the model was trained on images of their own sizes"
            )
        return size

    def _rows(self) -> int:
        """Return how many rows are given."""
        if not self.prompts:
            return 0
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

    @property
    def copies(self) -> int:
        """The number of completions of each prompt; 1 where there are no prompts."""
        return (self.options.count or 1) if self.prompts else 1

    @property
    def images(self) -> int:
        """The number of images that are written."""
        if self.prompts:
            return len(self.prompts) * self.copies
        return self.options.count or COUNT

    @property
    def values(self) -> int:
        """The number of values of an image."""
        return math.prod(self.size) * self.model.in_chans

    def plan(self, number: int) -> Planned:
        """Return what is to be written as the image of a number."""
        image, copy = divmod(number, self.copies)
        in_turn = copy if self.prompts else image
        if not self.classes or (self.prompts and self.options.classes is None):
            return Planned(image, copy, None)
        return Planned(image, copy, self.classes[in_turn % len(self.classes)])

    def run(self, progress: Progress | None = None, keeper: Keeper | None = None) -> list[Drawn]:
        """Write all images.

        Args:
            progress: counts values.
            keeper: keeps what there is of batches, and has what an earlier run wrote.

        Raises:
            ValueError: outputs of the model are not finite, or what was kept is garbled; one line.
            OutOfMemory: a batch does not fit into memory.
        """
        size = self.options.batch_size
        starts = range(0, self.images, size)
        before = {}
        if keeper is not None:
            loaded = ((number, keeper.load(number)) for number in range(len(starts)))
            before = {number: tensors for number, tensors in loaded if tensors is not None}
        drawn = []
        for number, start in enumerate(starts):
            planned = [self.plan(i) for i in range(start, min(start + size, self.images))]
            try:
                drawn += self._batch(number, planned, before.get(number), progress, keeper)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fewer = f"; try --batch-size {len(planned) // 2}" if len(planned) > 1 else ""
                raise OutOfMemory(
                    f"out of memory with {len(planned)} images of {pixels(self.size)} at "
                    f"once{fewer}"
                ) from error
        return drawn

    def _batch(
        self,
        number: int,
        planned: list[Planned],
        before: dict[str, Tensor] | None,
        progress: Progress | None,
        keeper: Keeper | None,
    ) -> list[Drawn]:
        """Write a batch from its start, or from where it was kept."""
        options = self.options
        with torch.inference_mode(), autocast(self.opened.device, options.amp):
            asked = self._asked(planned)
            writing = Writing(self.model, asked, temperature=options.temperature, seed=options.seed)
            if before is not None:
                writing.restore(before)
                if progress is not None:
                    progress.resume(len(planned) * writing.position)
            was_whole = writing.is_done
            while not writing.is_done:
                writing.step()
                if progress is not None:
                    progress.advance(len(planned))
                if keeper is not None and keeper.is_due() and not writing.is_done:
                    keeper.save(number, writing.tensors())
            if keeper is not None and not was_whole:
                keeper.save(number, writing.tensors())
        return self._drawn(planned, asked, writing)

    def _asked(self, planned: list[Planned]) -> Asked:
        """Return a batch as it is written, with the labels that prompts decide."""
        device = self.opened.device
        labels = None
        if self.classes:
            chosen = [
                self._likeliest[each.image] if each.label is None else each.label
                for each in planned
            ]
            labels = torch.tensor(chosen, device=device)
        given = torch.zeros(len(planned), 0, dtype=torch.int64)
        if self.prompts:
            parts = [self.prompts[each.image].pixels[:, : self.rows] for each in planned]
            given = rearrange(torch.stack(parts), "b c h w -> b (h w c)").long()
        numbers = tuple((each.image, each.copy) for each in planned)
        return Asked(self.size, numbers, labels, given.to(device))

    @cached_property
    def _likeliest(self) -> list[int]:
        """The class of each prompt under which its given rows are the most likely."""
        return [
            likeliest_class(
                self.model, prompt.pixels.to(self.opened.device), self.rows, self.classes
            )
            for prompt in self.prompts
        ]

    def _drawn(self, planned: list[Planned], asked: Asked, writing: Writing) -> list[Drawn]:
        height, width = self.size
        images = rearrange(
            writing.values.to(torch.uint8), "b (h w c) -> b c h w", h=height, w=width
        ).cpu()
        labels = [None] * len(planned) if asked.labels is None else asked.labels.tolist()
        bits = (writing.nats / math.log(2)).tolist()
        given = asked.given.shape[1]
        return [
            Drawn(
                each,
                image.clone(),
                label,
                new / (self.values - given),
                old / given if given else None,
            )
            for each, image, label, (old, new) in zip(planned, images, labels, bits, strict=True)
        ]
