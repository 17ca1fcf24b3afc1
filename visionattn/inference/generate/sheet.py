"""Many small pictures on one: side by side in rows, each pixel enlarged to a square."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

TILE_PX = 64
"""Pictures of shorter sides are enlarged by the largest whole number that keeps them within."""
GAP_PX = 6
"""Between pictures, and around all of them."""
GROUND = 200
"""The grey level of the gaps."""
MARK, MARK_PX = (213, 94, 0), 2
"""The colour and the width of the line to the left of rows that were given."""
MOST_PX = 2**28


def enlargement(height: int, width: int) -> int:
    """Return how many pixels a side each pixel of a picture becomes."""
    return max(1, TILE_PX // max(height, width))


def sheet_size(count: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Return height and width in pixels of a sheet.

    Args:
        count: pictures.
        columns: pictures in a row.
        height, width: of a picture, in pixels.

    Raises:
        ValueError: it would have more than ``MOST_PX`` pixels.
    """
    times = enlargement(height, width)
    rows = math.ceil(count / columns)
    size = tuple(
        number * (side * times + GAP_PX) + GAP_PX
        for number, side in ((rows, height), (min(columns, count), width))
    )
    if size[0] * size[1] > MOST_PX:
        raise ValueError(
            f"a grid of {count:,} images of {height} x {width} pixels would have {size[0]:,} x "
            f"{size[1]:,}; name a folder as --output, or fewer images"
        )
    return size[0], size[1]


def sheet(
    pictures: Sequence[np.ndarray], columns: int, given: Sequence[int] | None = None
) -> Image.Image:
    """Put pictures on a sheet, row by row, the first one at the top left.

    Args:
        pictures: uint8 ``[H, W, 1]`` or ``[H, W, 3]``, all of one shape.
        columns: pictures in a row.
        given: of each picture how many of its rows were given, which a line to its left marks;
            None: there are no marks. With marks the sheet is coloured.

    Raises:
        ValueError: as ``sheet_size``.
    """
    height, width, channels = pictures[0].shape
    times = enlargement(height, width)
    kinds = channels if given is None else 3
    size = sheet_size(len(pictures), columns, height, width)
    canvas = np.full((*size, kinds), GROUND, np.uint8)
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        top = GAP_PX + row * (height * times + GAP_PX)
        left = GAP_PX + column * (width * times + GAP_PX)
        large = picture.repeat(times, 0).repeat(times, 1)
        canvas[top : top + height * times, left : left + width * times] = large
        if given is not None:
            line = left - 2 * MARK_PX
            canvas[top : top + given[number] * times, line : line + MARK_PX] = MARK
    return Image.fromarray(canvas[..., 0] if kinds == 1 else canvas)


def columns_for(count: int, group: int) -> int:
    """Return how many pictures go into a row, so that the sheet is about as wide as high.

    Args:
        count: pictures.
        group: pictures that belong together; a row has whole groups.
    """
    return min(count, group * max(1, round(math.sqrt(count) / group)))
