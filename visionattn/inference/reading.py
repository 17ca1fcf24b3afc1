"""One image from its file to the pixels that a model takes: channels, size, whole patches.

This module owns what "at its own size" means, and turns an image that cannot be read into a sample
with a reason. Images are resized to one size as in validation.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import Dataset

from visionattn.data.formats import DAMAGED_IMAGE, ReadOptions, settle
from visionattn.data.images import decode, fit
from visionattn.inference.listing import Listing
from visionattn.models.weights import DataSpec


@dataclass
class Sample:
    """An image as a model takes it, or why there is none."""

    height: int | None = None
    """Height of the image in its file, in pixels."""
    width: int | None = None
    pixels: Tensor | None = None
    """``[C, H, W]``, uint8 or float32 in [0, 1]; None where the image cannot be read."""
    reason: str | None = None
    """Why it cannot be read, in one line."""


@dataclass(frozen=True)
class Sizing:
    """What becomes of an image of any size."""

    img_size: int | None
    """Height and width in pixels: resized and cropped as in validation. None: the image's own size,
    in whole patches.
    """
    patch_px: tuple[int, int]
    """Height and width of a patch."""
    fit: Literal["pad", "crop"] = "pad"
    """To whole patches by repeating the last row and column, or by cropping the centre."""

    def apply(self, image: np.ndarray) -> np.ndarray:
        """Bring an image ``[H, W, C]`` to the size that a model takes.

        Raises:
            ValueError: nothing is left after cropping.
        """
        if self.img_size is not None:
            return fit(image, self.img_size)
        (height, width), patch = image.shape[:2], self.patch_px
        if self.fit == "pad":
            missing = (-height % patch[0], -width % patch[1])
            return (
                np.pad(image, ((0, missing[0]), (0, missing[1]), (0, 0)), mode="edge")
                if any(missing)
                else image
            )
        rows, columns = height // patch[0] * patch[0], width // patch[1] * patch[1]
        if not (rows and columns):
            raise ValueError(
                f"image of {height} x {width} pixels is smaller than a patch of {patch[0]} x "
                f"{patch[1]}; fit pad takes it"
            )
        top, left = (height - rows) // 2, (width - columns) // 2
        return image[top : top + rows, left : left + columns]


class ReadImages(Dataset):
    """Images read when they are asked for: a ``Sample`` per number."""

    def __init__(self, listing: Listing, spec: DataSpec, sizing: Sizing):
        """Read images as ``spec`` asks, whatever the files are: grey, coloured, or by their bands.
        What neither says of the values is found by looking at a few files, with a warning that
        tells it.

        Raises:
            ValueError: the model's channels are neither grey nor coloured nor named.
        """
        channels = 1 if spec.encoding == "grey_one_hot" else spec.in_chans
        options = ReadOptions(channels, spec.bands, spec.value_range, spec.page)
        self.listing, self.sizing = listing, sizing
        self.one_hot = spec.encoding == "grey_one_hot"
        self.options, lines = settle(listing, range(len(listing)), options, strict=False)
        for line in lines:
            warnings.warn(line, stacklevel=2)

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> Sample:
        sample = Sample()
        try:
            image = decode(self.listing.open(index), self.options)
            if self.one_hot and image.dtype != np.uint8:
                image = np.rint(image * 255).astype(np.uint8)
            sample.height, sample.width = image.shape[:2]
            pixels = rearrange(self.sizing.apply(image), "h w c -> c h w")
        except (*DAMAGED_IMAGE, MemoryError, cv2.error) as error:
            sample.reason = " ".join(str(error).split()) or type(error).__name__
            return sample
        sample.pixels = torch.from_numpy(np.array(pixels, order="C"))
        return sample
