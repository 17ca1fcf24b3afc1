"""Training crops: random windows of an image at the scale of evaluation."""

import cv2
import numpy as np

from visionattn.data.geometry import Geometry, View
from visionattn.models.segmentation import IGNORED


def random_crop(
    view: View, geometry: Geometry, mask: np.ndarray | None, rng: np.random.Generator
) -> View:
    """Draw a window of ``geometry.crop`` from a view.

    Args:
        view: the whole image at the scale of evaluation.
        geometry: size of the window, and the share of windows around the foreground.
        mask: classes of the pixels, uint8 ``[height, width]``; None: all windows are anywhere.
        rng: decides the window.
    """
    around = rng.random() < geometry.crop_around
    window = geometry.window(view.content)
    room = np.subtract(view.content, window)
    corner = rng.integers(room + 1)
    if mask is not None and around:
        top, left, height, width = view.box
        found = foreground_pixel(mask[top : top + height, left : left + width], rng)
        if found is not None:
            # The pixel in the view, at a random place of the window.
            pixel = (np.array(found) + 0.5) * view.content / (height, width)
            corner = np.clip(pixel.astype(np.int64) - rng.integers(window), 0, room)
    return geometry.cropped(view, *corner.tolist())


def foreground_pixel(mask: np.ndarray, rng: np.random.Generator) -> tuple[int, int] | None:
    """Draw a class of a mask other than the first, then row and column of one of its pixels; None
    if all pixels have the first class or are ignored.
    """
    # Only rows that are not all background: a mask may have millions of pixels, and few of objects.
    rows = np.flatnonzero(cv2.reduce(mask, 1, cv2.REDUCE_SUM, dtype=cv2.CV_32S))
    mask = mask[rows]
    counts = cv2.calcHist([mask], [0], None, [IGNORED], [0, IGNORED])
    classes = 1 + np.flatnonzero(counts[1:])
    if not len(classes):
        return None
    wanted = int(rng.choice(classes))
    # Count by row: the indices of all pixels of the class would take much memory.
    hits = cv2.compare(mask, wanted, cv2.CMP_EQ)
    ends = np.cumsum(cv2.reduce(hits, 1, cv2.REDUCE_SUM, dtype=cv2.CV_32S).ravel() // 255)
    number = int(rng.integers(ends[-1]))
    row = int(np.searchsorted(ends, number, side="right"))
    column = rng.choice(np.flatnonzero(hits[row]))
    return int(rows[row]), int(column)
