"""What is asked of image files: which bands, which values are black and white, which page.

This module owns the options and their checks. It opens no file.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from visionattn.models.weights import DataSpec

LARGEST_IMAGE_PX = 2**30
"""Pixels that are decoded at once where nobody allows more: of larger images parts are read alone,
or smaller copies.
"""


@dataclass(frozen=True)
class ReadOptions:
    """What a model wants of the files.

    Args:
        channels: 1 makes images grey and 3 coloured, whatever the files are; where ``bands`` are
            given, their number counts.
        bands: which bands of the file become the channels, and in which order; numbers from 1.
        value_range: the values that become 0 and 1; beyond them values are clipped. Images of 8
            bits stay as they are.
        page: the page, frame or picture, from 1; None: the first.
        found: ``value_range`` was found by looking at a few files: what a file states comes first,
            and values above the range are an error.
        max_pixels: the most pixels of a file that are decoded at once.
        whole: decode all of an image at its full size, whatever part and size of it is wanted, as
            one would without knowing its format; for comparisons.
        level: which size of files that hold several is the image, from 0, the largest.
    """

    channels: int = 3
    bands: tuple[int, ...] | None = None
    value_range: tuple[float, float] | None = None
    page: int | None = None
    found: bool = False
    max_pixels: int = LARGEST_IMAGE_PX
    whole: bool = False
    level: int = 0

    def __post_init__(self) -> None:
        check_reading(self.bands, self.value_range, self.page, self.max_pixels)
        if self.bands is not None:
            object.__setattr__(self, "bands", tuple(self.bands))
            object.__setattr__(self, "channels", len(self.bands))
        elif self.channels not in (1, 3):
            raise ValueError(
                f"the model takes {self.channels} channels; images in files are read with 1 or 3, "
                "or with as many as data.bands names"
            )
        if self.value_range is not None:
            object.__setattr__(self, "value_range", tuple(self.value_range))


def options_of(spec: DataSpec, max_pixels: int | None = None) -> ReadOptions:
    """Return how files are read for a model: grey, coloured, or by their bands.

    Args:
        spec: what the model expects.
        max_pixels: the most pixels of a file that are decoded at once; None:
            ``LARGEST_IMAGE_PX``.

    Raises:
        ValueError: the model's channels are neither grey nor coloured nor named.
    """
    channels = 1 if spec.encoding == "grey_one_hot" else spec.in_chans
    return ReadOptions(
        channels,
        spec.bands,
        spec.value_range,
        spec.page,
        found=spec.range_found,
        max_pixels=max_pixels or LARGEST_IMAGE_PX,
    )


def as_flags(text: str) -> str:
    """Name the options of training in a message as those of commands and calls for inference, which
    have no group.
    """
    return re.sub(r"\bdata\.(?=[a-z_]+\b)", "", text.replace("data.args", "data_args"))


def check_reading(
    bands: Sequence[int] | None,
    value_range: Sequence[float] | None,
    page: int | None,
    max_pixels: int | None = None,
    *,
    prefix: str = "data.",
) -> None:
    """Check what is asked of the files, before any is opened.

    Raises:
        ValueError: one line with the option, what it may be, and what it is.
    """
    if bands is not None and (not bands or min(bands) < 1):
        raise ValueError(f"{prefix}bands must be numbers from 1, got {list(bands)}")
    if page is not None and page < 1:
        raise ValueError(f"{prefix}page must be at least 1, got {page}")
    if max_pixels is not None and max_pixels < 1:
        raise ValueError(f"{prefix}max_pixels must be at least 1, got {max_pixels}")
    if value_range is None:
        return
    if (
        len(value_range) != 2
        or not all(map(math.isfinite, value_range))
        or value_range[0] >= value_range[1]
    ):
        raise ValueError(
            f"{prefix}value_range must be two finite numbers, the lower one first, got "
            f"{list(value_range)}"
        )


COLOURED = ReadOptions()
"""Red, green and blue of the first page."""
