"""Options for reading image files: which bands, which values are black and white, which page.

This module owns the options and their checks. It opens no file.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from visionattn.cli.untrusted import refuse
from visionattn.models.weights import DataSpec

LARGEST_IMAGE_PX = 2**30
"""Default limit on pixels decoded at once: larger images are read in parts or at reduced size."""


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading files for a model.

    Args:
        channels: 1 converts images to gray and 3 to color; with ``bands``, their number applies.
        bands: bands of the file that become the channels, in order; numbers from 1.
        value_range: values that map to 0 and 1; values beyond are clipped. 8-bit images are
            unchanged.
        page: the page, frame or picture, from 1; None: the first.
        found: ``value_range`` was measured on a few files: a range stated in a file has priority,
            and values above the range are an error.
        max_pixels: maximum number of pixels of a file that are decoded at once.
        level: level to read from files that hold several sizes, from 0, the largest.
    """

    channels: int = 3
    bands: tuple[int, ...] | None = None
    value_range: tuple[float, float] | None = None
    page: int | None = None
    found: bool = False
    max_pixels: int = LARGEST_IMAGE_PX
    level: int = 0

    def __post_init__(self) -> None:
        check_reading(self.bands, self.value_range, self.page, self.max_pixels)
        if self.bands is not None:
            object.__setattr__(self, "bands", tuple(self.bands))
            object.__setattr__(self, "channels", len(self.bands))
        elif self.channels not in (1, 3):
            raise ValueError(
                f"expected 1 or 3 channels for image files, got a model of {self.channels}; pass "
                "data.bands"
            )
        if self.value_range is not None:
            object.__setattr__(self, "value_range", tuple(self.value_range))


def options_of(spec: DataSpec, max_pixels: int | None = None) -> ReadOptions:
    """Return the reading options for a model: gray, color, or bands.

    Args:
        spec: the model's specification of images.
        max_pixels: maximum number of pixels of a file that are decoded at once; None:
            ``LARGEST_IMAGE_PX``.

    Raises:
        ValueError: the model's channels are neither gray, colored nor named.
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
    """Return a message with training options renamed to the options of inference commands and
    calls, which have no group.
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
    """Check the reading options before any file is opened.

    Raises:
        ValueError: one line with the option, the allowed values and the given value.
    """
    refuse(
        (
            bands is not None and (not bands or min(bands) < 1),
            f"{prefix}bands must be numbers from 1, got {list(bands or ())}",
        ),
        (page is not None and page < 1, f"{prefix}page must be at least 1, got {page}"),
        (
            max_pixels is not None and max_pixels < 1,
            f"{prefix}max_pixels must be at least 1, got {max_pixels}",
        ),
        (
            value_range is not None
            and (
                len(value_range) != 2
                or not all(map(math.isfinite, value_range))
                or value_range[0] >= value_range[1]
            ),
            f"{prefix}value_range must be two finite numbers, the lower one first, got "
            f"{list(value_range or ())}",
        ),
    )


COLOURED = ReadOptions()
"""Red, green and blue of the first page."""
