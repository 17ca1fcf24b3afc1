"""Masks of drawn images: which pixels are ink of what an image is named after, and which are ink of
distractors.

A mask is uint8 ``[height, width]``, of the size of its image: ``BACKGROUND``, ``DISTRACTOR``, or
``FIRST_CLASS`` and the number of the class. This module owns these values, and how a mask comes to
the size at which a model sees the image, and to its patches. What draws an image paints its mask.
"""

import numpy as np

from visionattn.data.geometry import Size, View
from visionattn.data.images import cut_mask, fill

BACKGROUND, DISTRACTOR, FIRST_CLASS = 0, 1, 2
INK = 64
"""Pixels of a glyph or of a mark above this are ink: a quarter of 255."""
INKED_SHARE = 1 / 16
"""The least share of a patch that is inked where the patch is not background."""


def value_names(class_names: tuple[str, ...]) -> tuple[str, ...]:
    """Return what each value of a mask stands for, from 0 on."""
    return ("background", "distractor", *class_names)


def paint(
    mask: np.ndarray, top: int, left: int, ink: np.ndarray, value: int, cover: np.ndarray | None
) -> None:
    """Give the inked pixels of a part the value of what it is.

    Args:
        mask: of the whole image; changed in place.
        top, left: where the part begins.
        ink: of the part, uint8 ``[h, w]``.
        value: as the masks have it.
        cover: the area, uint8 ``[h, w]``, below which nothing is seen: where it is above half of
            255 and not inked there is background. None: the part covers nothing.
    """
    place = mask[top : top + ink.shape[0], left : left + ink.shape[1]]
    if cover is not None:
        place[cover > 127] = BACKGROUND
    place[ink > INK] = value


def see_mask(mask: np.ndarray, view: View) -> np.ndarray:
    """Bring a mask to the size at which a model sees the image, as ``images.fill`` brings the
    image: each pixel takes the nearest value, and what is absent is background.
    """
    return fill(cut_mask(mask, view)[:, :, None], view)[:, :, 0]


def patch_labels(mask: np.ndarray, grid: Size, values: int) -> np.ndarray:
    """Say what lies in each patch: where at least a sixteenth of its pixels is inked, the value
    that most of these have, the smallest of several; elsewhere background.

    Args:
        mask: ``[height, width]``, of whole patches.
        grid: how many rows and columns of patches there are.
        values: how many values the mask may have.

    Returns:
        int64 ``[rows, columns]``.

    Raises:
        ValueError: the mask is no whole number of patches.
    """
    (rows, columns), (height, width) = grid, mask.shape
    if height % rows or width % columns:
        raise ValueError(
            f"an image of {height} x {width} pixels is not a whole number of patches in a grid of "
            f"{rows} x {columns}; choose another size, or fit pad, crop or stretch"
        )
    patches = mask.reshape(rows, height // rows, columns, width // columns)
    counts = np.stack([(patches == value).sum((1, 3)) for value in range(1, values)])
    inked = counts.sum(0) >= INKED_SHARE * (height // rows) * (width // columns)
    return np.where(inked, 1 + counts.argmax(0), BACKGROUND)
