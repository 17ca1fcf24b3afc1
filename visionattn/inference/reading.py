"""One image from its file to the pixels that a model takes, as in validation.

This module turns an image that cannot be read into a sample with a reason.
"""

import math
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from torch.utils.data import Dataset

from visionattn.data.formats import (
    DAMAGED_IMAGE,
    as_flags,
    bands_of,
    open_image,
    options_of,
    read_image,
    settle,
)
from visionattn.data.geometry import Box, Geometry, Size, TooSmall, View
from visionattn.data.images import REFUSED, fill
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
    present: Size | None = None
    """Height and width in pixels of what the image fills of ``pixels``, from the top left."""
    reason: str | None = None
    """Why it cannot be read, in one line."""
    refused: bool = False
    """Whether its file is whole, but is not what options and model ask for."""
    banded: bool = False
    """Whether it was not read, as it is to be computed band by band."""


class ReadImages(Dataset):
    """Images read when they are asked for: a ``Sample`` per number.

    Attributes:
        listing: all images, also where only a part of them is read.
        stop: the number of images, or that of the first one that is not read.
        most_px: images that the model sees at their own size, and of more pixels in whole patches,
            are not read but left to be computed band by band; None: there are none.
    """

    def __init__(
        self,
        listing: Listing,
        spec: DataSpec,
        geometry: Geometry,
        max_pixels: int | None = None,
        *,
        level: int = 0,
    ):
        """Read images as ``spec`` asks, whatever the files are: grey, coloured, or by their bands.
        What neither says of the values is found by looking at a few files, with a warning that
        tells it. ``max_pixels`` are decoded of a file at once; None: ``LARGEST_IMAGE_PX``.
        ``level`` is read of files that hold several sizes.

        Raises:
            ValueError: the model's channels are neither grey nor coloured nor named.
        """
        options = replace(options_of(spec, max_pixels), level=level)
        self.most_px: int | None = None
        self.listing, self.geometry = listing, geometry
        self.stop = len(listing)
        self.one_hot = spec.encoding == "grey_one_hot"
        self.options, lines = settle(listing, range(len(listing)), options, strict=False)
        for line in lines:
            warnings.warn(as_flags(line), stacklevel=2)
        self._checked: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self.stop

    def __getitem__(self, index: int) -> Sample:
        return self._checked.pop(index, None) or self._read(index)

    def own_canvas(self, height: int, width: int) -> Size | None:
        """Return the size of the model's input for an image that is seen at its own size; None for
        one that is not.
        """
        with suppress(TooSmall):
            view = self.geometry.view(height, width)
            if (view.content, view.box) == ((height, width), Box(0, 0, height, width)):
                return view.canvas
        return None

    def is_banded(self, height: int, width: int) -> bool:
        """Tell whether an image is left to be computed band by band."""
        if self.most_px is None:
            return False
        seen = self.own_canvas(height, width)
        return seen is not None and seen[0] * seen[1] > self.most_px

    def _read(self, index: int) -> Sample:
        sample = Sample()
        try:
            with open_image(self.listing.open(index), self.options) as reader:
                sample.height, sample.width = reader.height, reader.width
                view = self.geometry.view(reader.height, reader.width)
                if self.is_banded(reader.height, reader.width):
                    bands_of(reader, self.options)  # raises where there are no such bands
                    sample.banded = True
                    return sample
                image = read_image(reader, view, self.options)
            if self.one_hot and image.dtype != np.uint8:
                image = np.rint(image * 255).astype(np.uint8)
            pixels = rearrange(fill(image, view), "h w c -> c h w")
        except (*DAMAGED_IMAGE, MemoryError, cv2.error) as error:
            sample.reason = as_flags(" ".join(str(error).split()) or type(error).__name__)
            sample.refused = isinstance(error, REFUSED)
            return sample
        sample.present = view.present
        sample.pixels = torch.from_numpy(np.array(pixels, order="C"))
        return sample

    def whole(self, index: int) -> np.ndarray:
        """Read an image at its own size, ``[H, W, C]``, uint8 or float32 in [0, 1].

        Raises:
            ValueError: it cannot be read, or is too large; one line.
        """
        try:
            with open_image(self.listing.open(index), self.options) as reader:
                view = Geometry("native", None).view(reader.height, reader.width)
                return read_image(reader, view, self.options)
        except (*DAMAGED_IMAGE, MemoryError, cv2.error) as error:
            reason = as_flags(" ".join(str(error).split()) or type(error).__name__)
            raise ValueError(f"{self.listing.name(index)}: {reason}") from error

    def reduced(self, index: int, most_px: int) -> np.ndarray:
        """Read an image at a size of about ``most_px`` pixels at most, ``[h, w, C]``, a few rows at
        a time.

        Raises:
            ValueError: it cannot be read; one line.
        """
        try:
            with open_image(self.listing.open(index), self.options) as reader:
                height, width = reader.height, reader.width
                by = max(1, math.ceil(math.sqrt(height * width / most_px)))
                columns, rows, parts = -(-width // by), by * -(-256 // by), []
                for top in range(0, height, rows):
                    box = Box(top, 0, min(rows, height - top), width)
                    size = -(-box.height // by), columns
                    parts.append(read_image(reader, View(box, size, size, size), self.options))
                return np.concatenate(parts)
        except (*DAMAGED_IMAGE, MemoryError, cv2.error) as error:
            reason = as_flags(" ".join(str(error).split()) or type(error).__name__)
            raise ValueError(f"{self.listing.name(index)}: {reason}") from error

    def check_asked(self) -> None:
        """Read images up to the first one that is not refused, which most often is the first of
        all, so that nothing is begun with options that no image fits. That one is kept until it is
        asked for, as a large image is not read twice.

        Raises:
            ValueError: all are refused; one line with the first.
        """
        first, count = None, len(self.listing)
        for index in range(count):
            sample = self._read(index)
            if not sample.refused:
                self._checked = {index: sample}
                return
            first = first or f"{self.listing.name(index)}: {sample.reason}"
        those = f"none of the {count} images can be read so; the first: " if count > 1 else ""
        raise ValueError(f"{those}{first}")
