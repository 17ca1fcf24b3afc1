"""Images whose upper rows are given: which are taken, and the class that they are likely to have.

A prompt is read as the model's training reads images, by ``inference/reading.py``; here is what
that reading would change and writing may not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from visionattn.data.formats import DAMAGED_IMAGE, open_image, options_of
from visionattn.data.geometry import Geometry, Size, pixels
from visionattn.inference.listing import Listing
from visionattn.inference.opening import Opened
from visionattn.inference.reading import ReadImages
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import DataSpec

TOGETHER = 16
"""Classes under which a prompt is judged at once."""


@dataclass(frozen=True)
class Prompt:
    """An image of which the upper rows are given."""

    path: str
    pixels: Tensor
    """uint8 ``[C, H, W]``, the whole image as the model sees it."""


def read_prompts(listing: Listing, opened: Opened, size: Size | None) -> list[Prompt]:
    """Read images at the size at which a model was trained, or at another.

    Args:
        listing: the images.
        opened: the model, and how it saw images in training.
        size: the height and width that are asked for; None: those of the training.

    Raises:
        ValueError: an image cannot be read, is of another depth, or larger than the size that is
            asked for, or they are not of one size; one line.
    """
    for index in range(len(listing)):
        _check(listing, index, opened.spec, size)
    geometry = opened.geometry if size is None else Geometry(opened.geometry.fit, size)
    images, found = ReadImages(listing, opened.spec, geometry), []
    for index in range(len(images)):
        sample, path = images[index], listing.name(index)
        if sample.pixels is None:
            raise ValueError(f"{path}: {sample.reason}")
        seen, wanted = tuple(sample.pixels.shape[1:]), size
        if wanted is None and found:
            wanted = tuple(found[0].pixels.shape[1:])
        if wanted is not None and seen != wanted:
            raise ValueError(
                f"{path} is seen as {pixels(seen)}, and images of {pixels(wanted)} are written; "
                "complete images of one size at a time, and leave img_size out"
            )
        levels, largest = opened.model.levels, int(sample.pixels.max())
        if largest >= levels:
            raise ValueError(
                f"{path} is of another depth: it has values up to {largest}, and the model knows "
                f"levels 0 to {levels - 1}"
            )
        found.append(Prompt(path, sample.pixels))
    return found


def _check(listing: Listing, index: int, spec: DataSpec, size: Size | None) -> None:
    """Raise ValueError for an image that would be changed before it is completed. One that cannot
    be opened is left to its reading, which says why.
    """
    path = listing.name(index)
    try:
        with open_image(listing.open(index), options_of(spec)) as reader:
            colours = reader.bands - reader.alpha
            kind, own = (reader.dtype, reader.bits), (reader.height, reader.width)
    except (*DAMAGED_IMAGE, MemoryError, cv2.error):
        return
    if spec.bands is None and colours != spec.in_chans:
        raise ValueError(
            f"{path} is of another depth: it has {_channels(colours)}, and the model writes "
            f"{spec.in_chans}; convert it first"
        )
    if kind[0] != np.uint8 or kind[1] not in (8, None):
        what = f"values of {kind[1]} bits" if kind[1] else f"{kind[0]} values"
        raise ValueError(
            f"{path} is of another depth: it has {what}, and the model writes 8 bits; convert it "
            "first"
        )
    if size is not None and (own[0] > size[0] or own[1] > size[1]):
        raise ValueError(
            f"{path} of {pixels(own)} is larger than the image of {pixels(size)} that it is to be "
            "part of; name a larger img_size, or leave it out to see it as in training"
        )


def _channels(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


def likeliest_class(model: PixelDecoder, prompt: Tensor, rows: int, classes: Sequence[int]) -> int:
    """Return the class under which the upper rows of an image are the most likely.

    Args:
        model: conditioned, in eval mode.
        prompt: uint8 ``[C, H, W]`` on its device; what is below the rows does not count.
        rows: how many are given.
        classes: those to choose from; of equals the first.
    """
    found = []
    for start in range(0, len(classes), TOGETHER):
        labels = torch.tensor(classes[start : start + TOGETHER], device=prompt.device)
        likelihoods = model(prompt.expand(len(labels), -1, -1, -1), labels)
        found.append(likelihoods[:, :, :rows].double().sum((1, 2, 3)))
    return classes[int(torch.cat(found).argmax())]
