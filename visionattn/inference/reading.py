"""One image from its file to the pixels that a model takes: channels, size, whole patches.

This module owns what "at its own size" means, and turns an image that cannot be read into a sample
with a reason. Images are resized to one size as in validation.
"""

from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import Dataset

from visionattn.data.images import DAMAGED_IMAGE, decode, fit
from visionattn.inference.listing import Listing
from visionattn.models.weights import DataSpec


@dataclass
class Sample:
    """An image as a model takes it, or why there is none."""

    height: int | None = None
    """Height of the image in its file, in pixels."""
    width: int | None = None
    pixels: Tensor | None = None
    """uint8 ``[C, H, W]``; None where the image cannot be read."""
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
        """Bring an image, uint8 ``[H, W, C]``, to the size that a model takes.

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
        """Read images grey or coloured, as ``spec`` asks, whatever the files are.

        Raises:
            ValueError: the model's channels are neither grey nor coloured.
        """
        channels = 1 if spec.encoding == "grey_one_hot" else spec.in_chans
        if channels not in (1, 3):
            raise ValueError(
                f"the model takes {channels} channels; images in files are read with 1 or 3"
            )
        self.listing, self.sizing = listing, sizing
        self.mode = "L" if channels == 1 else "RGB"

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> Sample:
        sample = Sample()
        try:
            with self.listing.open(index) as file:
                image = decode(file, self.mode)
            sample.height, sample.width = image.shape[:2]
            pixels = rearrange(self.sizing.apply(image), "h w c -> c h w")
        except (*DAMAGED_IMAGE, MemoryError, cv2.error) as error:
            sample.reason = " ".join(str(error).split()) or type(error).__name__
            return sample
        sample.pixels = torch.from_numpy(np.array(pixels, order="C"))
        return sample
