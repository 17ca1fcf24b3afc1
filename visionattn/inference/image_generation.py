"""Image generation and completion with a pixel decoder: model, prompts, classes and batches; and
``visionattn.generate``. It writes no files.
"""

import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from visionattn.cli.exit_codes import OutOfMemory, is_out_of_memory
from visionattn.cli.progress import Progress
from visionattn.data.geometry import Geometry, Size, pixels, sides
from visionattn.inference.generate_options import GenerateOptions, check
from visionattn.inference.image_attribution import class_number
from visionattn.inference.image_listing import Listing, listing_of
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.inference_options import options_of_call
from visionattn.inference.model_opening import Opened
from visionattn.inference.value_sampling import sample_values
from visionattn.models.devices import autocast, pick_device
from visionattn.models.patches import in_eval
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import check_finite, described, load_model, read_metadata

LEVELS = 256
"""Number of levels of a picture."""
COUNT, KEEP = 64, 0.5
"""Default number of generated images, and default share of given rows."""
MOST = 2**24
"""Maximum number of images per call, and of values per image."""
CLASSES_AT_ONCE = 16
"""Number of classes for which the likelihood of a prompt is computed at once."""
Batch = dict[str, Tensor]
"""``values`` uint8 ``[B, N]`` and ``nats`` float64 ``[B, 2]``, as in ``sample_values``."""


class Generated(NamedTuple):
    """Generated images, in order; for each completed image all of its completions."""

    images: Tensor
    """uint8 ``[images, C, H, W]`` on the CPU."""
    classes: list[str]
    """The class of each image, as number if the model has no class names; empty for a model without
    classes.
    """
    bits_per_dim: Tensor
    """float64 ``[images]``: negative log2-probability of the generated values under the model at
    temperature 1, per value.
    """
    paths: list[str]
    """Path of the image that each completes, as in ``predict``; empty without completions."""


def generate(model: nn.Module | str | Path, count: int | None = None, **options: Any) -> Generated:
    """Generate images with a pixel decoder, as ``visionattn generate`` does: value by value, with
    constant time and memory per value.

    Every value of an image is drawn with a random number that depends only on the seed, the index
    of the image and the place of the value. Batches, other images and devices change an image only
    if rounding differs and the number falls that close to the border between two levels.

    Args:
        model: a ``PixelDecoder`` with ``data_spec``, as ``load_model`` returns it, which stays on
            its device and unchanged; or a checkpoint of a training with ``data.task: generate``.
        count: see ``GenerateOptions``.
        options: further fields of ``visionattn.inference.generate_options.GenerateOptions``;
            ``classes`` may be numbers, and ``complete`` accepts images like ``predict``.

    Raises:
        ValueError, FileNotFoundError: the model generates no images, or an option or an image is
            wrong; one line.
        TypeError: there is no such option.
        OutOfMemory: a batch does not fit into memory; defined in ``visionattn.cli.exit_codes``.
    """
    images, seed = options.pop("complete", None), options.pop("seed", 0)
    if not isinstance(options.get("classes"), (str, int, NoneType)):
        options["classes"] = [str(each) for each in options["classes"]]
    complete = None if images is None else ["images"]
    asked = options_of_call(GenerateOptions, options, count=count, seed=seed, complete=complete)
    check(asked)
    listing = None if images is None else listing_of(images)
    opened = open_decoder(model, asked.device)
    with in_eval(opened.model):
        return Generation(opened, asked, listing).run()[0]


def open_decoder(given: nn.Module | str | Path, device: str) -> Opened:
    """Load the pixel decoder of a checkpoint onto a device, or take a module unchanged.

    Raises:
        ValueError, FileNotFoundError: there is no checkpoint, it is not a pixel decoder, its
            weights are not finite, its images are not specified, or there is no such device; one
            line.
    """
    if isinstance(given, nn.Module):
        if device != "auto":
            raise ValueError("a module keeps its device; remove device, or move the module")
        model, name, args = given, type(given).__name__, {}
        spec, place, notes = getattr(model, "data_spec", None), next(model.parameters()).device, ()
    else:
        place, model = pick_device(device), load_model(given)
        name, args, spec = described(read_metadata(given), given)
        check_finite(model.state_dict(), given)
        notes = (f"{name} of {os.fspath(given)}",)
    if not isinstance(model, PixelDecoder):
        raise ValueError(
            f"{(*notes, name)[0]} is not a pixel decoder; train one with --data.task generate"
        )
    if model.levels > LEVELS:
        raise ValueError(
            f"expected at most {LEVELS} levels for images, got {model.levels} ({name})"
        )
    if spec is None:
        raise ValueError(
            f"the preprocessing of {name} is unknown; set its data_spec to a visionattn.DataSpec"
        )
    geometry = Geometry(spec.fit, sides(spec.img_size), spec.max_patches)
    return Opened(model.to(place), name, args, spec, geometry, place, notes)


class Generation:
    """All images of a call, after all checks.

    Args:
        opened: the model.
        options: checked by ``generate_options.check``.
        listing: the images of ``complete``; None: there are none.

    Attributes:
        classes: indices of the classes, assigned to images in rotation; empty for a model without
            classes.
        paths: path of each prompt, an image whose upper rows are given.
        prompts: uint8 ``[prompts, C, H, W]``; None without prompts.
        copies: number of completions per prompt; 1 without prompts.
        images: number of generated images.
        size: their height and width in pixels.
        rows: number of given rows: at least one, at most one less than the image has.
        values: number of values per image.

    Raises:
        ValueError: classes, sizes or prompts are incompatible; one line.
    """

    def __init__(self, opened: Opened, options: GenerateOptions, listing: Listing | None):
        assert isinstance(opened.model, PixelDecoder)
        self.opened, self.options, self.model = opened, options, opened.model
        self.classes = self._classes()
        size, self.paths, self.prompts = sides(options.img_size), list[str](), None
        self.copies, self.images, self.rows = 1, options.count or COUNT, 0
        if listing is not None:
            self.paths, self.prompts = read_prompts(listing, opened, size)
            self.copies = options.count or 1
            self.images = len(self.paths) * self.copies
            height, width = self.prompts.shape[2:]
            size, keep = (height, width), KEEP if options.keep is None else options.keep
            self.rows = min(max(1, round(keep * height)), height - 1)
        size = size or sides(opened.spec.img_size)
        if size is None:
            raise ValueError(
                "expected img_size, because the model was trained on images of many sizes"
            )
        self.size, self.values = size, math.prod(size) * self.model.in_chans
        if max(self.values, self.images) > MOST:
            raise ValueError(
                f"expected at most {MOST:,} images of at most {MOST:,} values, got {self.images:,} "
                f"of {pixels(size)}; lower count or img_size"
            )

    def _classes(self) -> list[int]:
        spec, given = self.opened.spec, self.options.classes
        if not self.model.conditioned:
            if given is not None:
                raise ValueError(
                    f"classes need a model trained with classes, got {self.opened.name}; remove "
                    "them"
                )
            return []
        if given is None:
            return list(range(self.model.num_classes))
        if not given:
            raise ValueError("classes is empty; remove it")
        return [class_number(word, spec) for word in given]

    def run(
        self,
        progress: Progress | None = None,
        kept: Callable[[int, Callable[[], Batch]], Batch] = lambda number, make: make(),
    ) -> tuple[Generated, Tensor]:
        """Generate all images; also return the bits per dimension of the given values, float64
        ``[images]``, NaN without given values.

        Args:
            progress: counts values.
            kept: returns a batch by its index: the batch stored by an earlier run, or the result of
                the given function.

        Raises:
            ValueError: outputs of the model are not finite; one line.
            OutOfMemory: a batch does not fit into memory.
        """
        batches, numbers, most = [], range(self.images), self.options.batch_size
        try:
            with torch.inference_mode(), autocast(self.opened.device, self.options.amp):
                labels = self._labels()
                for first in range(0, self.images, most):
                    make = partial(self._batch, numbers[first : first + most], labels, progress)
                    batches.append(kept(first // most, make))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            count = min(most, self.images)
            fewer = f"; try --batch-size {count // 2}" if count > 1 else ""
            raise OutOfMemory(
                f"out of memory with {count} images of {pixels(self.size)} at once{fewer}"
            ) from error
        values = torch.cat([batch["values"] for batch in batches])
        nats = torch.cat([batch["nats"] for batch in batches])
        names, given = self.opened.spec.class_names, self.rows * self.values // self.size[0]
        found = Generated(
            rearrange(values, "b (h w c) -> b c h w", h=self.size[0], w=self.size[1]),
            [names[i] if names else str(i) for i in ([] if labels is None else labels.tolist())],
            nats[:, 1] / (math.log(2) * (self.values - given)),
            [path for path in self.paths for _ in range(self.copies)],
        )
        return found, nats[:, 0] / (math.log(2) * given)

    def _batch(self, numbers: range, labels: Tensor | None, progress: Progress | None) -> Batch:
        """Generate the images with these indices."""
        device, given = self.opened.device, torch.zeros(len(numbers), 0, dtype=torch.int64)
        if self.prompts is not None:
            parts = self.prompts[[number // self.copies for number in numbers], :, : self.rows]
            given = rearrange(parts, "b c h w -> b (h w c)").long()
        values, nats = sample_values(
            self.model,
            self.size,
            [divmod(number, self.copies) for number in numbers],
            None if labels is None else labels[numbers.start : numbers.stop],
            given.to(device),
            temperature=self.options.temperature,
            seed=self.options.seed,
            stepped=partial(progress.advance, len(numbers)) if progress else lambda: None,
        )
        return {"values": values.to("cpu", torch.uint8), "nats": nats.cpu()}

    def _labels(self) -> Tensor | None:
        """Return the class of each image, int64 ``[images]``; None for a model without classes."""
        if not self.classes:
            return None
        device, numbers = self.opened.device, torch.arange(self.images)
        classes = torch.tensor(self.classes, device=device)
        if self.prompts is None:
            return classes[numbers % len(classes)]
        if self.options.classes is not None:
            return classes[numbers % self.copies % len(classes)]
        found = [
            likeliest_class(self.model, prompt.to(device), self.rows, classes)
            for prompt in self.prompts
        ]
        return torch.stack(found).repeat_interleave(self.copies)


def read_prompts(listing: Listing, opened: Opened, size: Size | None) -> tuple[list[str], Tensor]:
    """Read images to complete, as training reads images.

    Args:
        listing: the images.
        opened: the model, and how it saw images in training.
        size: height and width in pixels; None: as in training.

    Returns:
        Their paths, and uint8 ``[images, C, H, W]``.

    Raises:
        ValueError: an image cannot be read, has values outside the model's levels, or differs in
            size from the others; one line.
    """
    geometry = opened.geometry if size is None else Geometry(opened.geometry.fit, size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values of more than 8 bits raise below
        images = ReadImages(listing, opened.spec, geometry)
    paths, found = [], []
    for index in range(len(listing)):
        sample, path = images[index], listing.name(index)
        if sample.pixels is None:
            raise ValueError(f"{path}: {sample.reason}")
        seen, wanted = sample.pixels.shape[1:], size or (found or [sample.pixels])[0].shape[-2:]
        if tuple(seen) != tuple(wanted):
            raise ValueError(
                f"expected images of {pixels(wanted)}, got {pixels(seen)} ({path}); complete "
                "images of one size at a time, without img_size"
            )
        largest, levels = int(sample.pixels.max()), opened.model.levels
        if sample.pixels.dtype != torch.uint8 or largest >= levels:
            what = f"values up to {largest}" if sample.pixels.dtype == torch.uint8 else "no bytes"
            raise ValueError(
                f"expected levels 0 to {levels - 1}, got {what} ({path}); convert its bit depth "
                "first"
            )
        paths.append(path)
        found.append(sample.pixels)
    return paths, torch.stack(found)


def likeliest_class(model: PixelDecoder, prompt: Tensor, rows: int, classes: Tensor) -> Tensor:
    """Return the most likely class, int64 ``[]``, given the upper rows of an image.

    Args:
        model: conditioned, in eval mode.
        prompt: uint8 ``[C, H, W]``; pixels below the rows do not count.
        rows: number of given rows.
        classes: int64 ``[n]``, the candidates; ties go to the first.
    """
    likelihoods = [
        model(prompt.expand(len(part), -1, -1, -1), part)[:, :, :rows].double().sum((1, 2, 3))
        for part in classes.split(CLASSES_AT_ONCE)
    ]
    return classes[torch.cat(likelihoods).argmax()]
