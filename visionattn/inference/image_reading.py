"""Read one image file as the model's input, as in validation.

An unreadable image becomes a sample with a reason.
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
from visionattn.data.formats.reader import Reader
from visionattn.data.geometry import Box, Geometry, Size, TooSmall, View
from visionattn.data.images import REFUSED, fill
from visionattn.inference.image_listing import Listing
from visionattn.models.weights import DataSpec

UNREADABLE = (*DAMAGED_IMAGE, MemoryError, cv2.error)
"""Exceptions for an image that cannot be read."""


@dataclass
class Sample:
    """An image as the model's input, or the reason why there is none."""

    height: int | None = None
    """Height of the image in its file, in pixels."""
    width: int | None = None
    pixels: Tensor | None = None
    """``[C, H, W]``, uint8 or float32 in [0, 1]; None if the image cannot be read."""
    present: Size | None = None
    """Filled height and width of ``pixels``, from the top left."""
    reason: str | None = None
    """Why it cannot be read, in one line."""
    refused: bool = False
    """Whether its file is intact, but does not match options and model."""
    banded: bool = False
    """Whether it was not read because it is computed band by band."""


class ReadImages(Dataset):
    """Images read on request: a ``Sample`` per index.

    Attributes:
        listing: the images.
        most_px: images that the model sees at their own size, with more pixels than this in whole
            patches, are not read but computed band by band; None: no limit.
    """

    def __init__(
        self,
        listing: Listing,
        spec: DataSpec,
        geometry: Geometry,
        max_pixels: int | None = None,
        level: int = 0,
    ):
        """Read images as ``spec`` asks, for any files: gray, colored, or by their bands.

        If the range of values is not given, it is measured on a few files, with a warning.

        Args:
            listing: the images.
            spec: the model's specification of images.
            geometry: how images are fitted to the model.
            max_pixels: maximum number of pixels decoded from a file at once; None:
                ``LARGEST_IMAGE_PX``.
            level: the level to read from files that hold several sizes.

        Raises:
            ValueError: the model's channels are neither gray, colored nor named.
        """
        options = replace(options_of(spec, max_pixels), level=level)
        self.most_px: int | None = None
        self.listing, self.geometry = listing, geometry
        self.one_hot = spec.encoding == "grey_one_hot"
        self.options, lines = settle(listing, range(len(listing)), options, strict=False)
        for line in lines:
            warnings.warn(as_flags(line), stacklevel=2)
        self._checked: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self.listing)

    def __getitem__(self, index: int) -> Sample:
        return self._checked.pop(index, None) or self._read(index)

    def opened(self, index: int) -> Reader:
        """Open the file of an image; a context manager.

        Raises:
            One of ``UNREADABLE``: it cannot be read.
        """
        return open_image(self.listing.open(index), self.options)

    def own_canvas(self, height: int, width: int) -> Size | None:
        """Return the size of the model's input for an image seen at its own size; None for other
        images.
        """
        with suppress(TooSmall):
            view = self.geometry.view(height, width)
            if (view.content, view.box) == ((height, width), Box(0, 0, height, width)):
                return view.canvas
        return None

    def is_banded(self, height: int, width: int) -> bool:
        """Return whether an image is computed band by band."""
        if self.most_px is None:
            return False
        seen = self.own_canvas(height, width)
        return seen is not None and seen[0] * seen[1] > self.most_px

    def _read(self, index: int) -> Sample:
        sample = Sample()
        try:
            with self.opened(index) as reader:
                sample.height, sample.width = reader.height, reader.width
                view = self.geometry.view(reader.height, reader.width)
                if self.is_banded(reader.height, reader.width):
                    bands_of(reader, self.options)  # raises if bands are missing
                    sample.banded = True
                    return sample
                image = read_image(reader, view, self.options)
            if self.one_hot and image.dtype != np.uint8:
                image = np.rint(image * 255).astype(np.uint8)
            pixels = rearrange(fill(image, view), "h w c -> c h w")
        except UNREADABLE as error:
            sample.reason, sample.refused = reason_of(error), isinstance(error, REFUSED)
            return sample
        sample.present = view.present
        sample.pixels = torch.from_numpy(np.array(pixels, order="C"))
        return sample

    def reduced(self, index: int, most_px: int | None = None) -> np.ndarray:
        """Read an image at its own size, or reduced to at most about ``most_px`` pixels, a few rows
        at a time: ``[h, w, C]``, uint8 or float32 in [0, 1].

        Raises:
            ValueError: it cannot be read, or is too large; one line.
        """
        try:
            with self.opened(index) as reader:
                height, width = reader.height, reader.width
                by = max(1, math.ceil(math.sqrt(height * width / (most_px or height * width))))
                columns, parts = -(-width // by), []
                rows = height if most_px is None else by * -(-256 // by)
                for top in range(0, height, rows):
                    box = Box(top, 0, min(rows, height - top), width)
                    size = -(-box.height // by), columns
                    parts.append(read_image(reader, View(box, size, size, size), self.options))
                return np.concatenate(parts)
        except UNREADABLE as error:
            raise ValueError(f"{self.listing.name(index)}: {reason_of(error)}") from error

    def check_asked(self, numbers: range | None = None) -> None:
        """Read images up to the first that is not refused, usually the very first, so that a run
        does not start with options that suit no image.

        That image is kept for its later use, so that a large image is not read twice.

        Args:
            numbers: indices of the images; None: all.

        Raises:
            ValueError: all are refused; one line with the first.
        """
        first, numbers = None, range(len(self)) if numbers is None else numbers
        for index in numbers:
            sample = self._read(index)
            if not sample.refused:
                self._checked = {index: sample}
                return
            first = first or f"{self.listing.name(index)}: {sample.reason}"
        count = len(numbers)
        those = f"none of the {count} images is readable; first: " if count > 1 else ""
        raise ValueError(f"{those}{first}")


def reason_of(error: BaseException) -> str:
    """Return the reason why an image cannot be read, in one line."""
    text = error.err if isinstance(error, cv2.error) else str(error)  # without OpenCV's source line
    return as_flags(" ".join(text.split()) or type(error).__name__)
