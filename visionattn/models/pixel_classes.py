"""Classes of pixels: colors, and agreement of masks."""

import numpy as np

from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec


def palette(spec: DataSpec) -> list[int]:
    """Return red, green and blue for all 256 values of a mask.

    The colors come from the data, or from PASCAL VOC, whose colors are distinct. Ignored pixels
    get the gray farthest from all class colors, usually white.
    """
    colours = list(spec.colours or ())
    for number in range(len(colours), IGNORED):
        levels = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                levels[channel] |= (number >> (3 * bit + channel) & 1) << (7 - bit)
        colours.append((levels[0], levels[1], levels[2]))
    known = np.array(colours[: spec.num_classes])

    def distance(grey: tuple[int, int, int]) -> int:
        return int(abs(known - grey).max(1).min())

    greys = [(level,) * 3 for level in range(255, -1, -1) if (level,) * 3 not in colours]
    colours.append(max(greys, key=distance))
    return [level for colour in colours for level in colour]


def painted(mask: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return a mask ``[H, W]`` in colors, uint8 ``[H, W, 3]``."""
    return np.array(palette(spec), np.uint8).reshape(-1, 3)[mask]


def striped(mask: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return a mask in colors as ``painted`` does, with stripes of two grays on ignored pixels."""
    colours = painted(mask, spec)
    rows, columns = np.indices(mask.shape)
    stripes = (mask == IGNORED) & ((rows + columns) % 4 < 2)
    return np.where(stripes[..., None], colours ^ 64, colours)


def ious_of(confusion: np.ndarray) -> np.ndarray:
    """Return the intersection over union of each class, float64 ``[classes]``; NaN if no known
    pixel has the class.

    ``confusion`` is the result of ``confusion_of``.
    """
    right, there = np.diag(confusion), confusion.sum(1)
    union = there + confusion.sum(0) - right
    return np.where(there > 0, right / np.maximum(union, 1), np.nan)


def average_precisions_of(counts: np.ndarray) -> np.ndarray:
    """Return the average precision of each class, as scikit-learn defines it for scores that are
    equal within a bin, float64 ``[classes]``; NaN for a class without pixels.

    Args:
        counts: pixels of other classes and of the class by bins of rising score, ``[classes, 2,
            bins]``.
    """
    wrong, right = counts[:, :, ::-1].cumsum(2).swapaxes(0, 1)
    precision, positives = right / np.maximum(right + wrong, 1), right[:, -1]
    found = (precision * counts[:, 1, ::-1]).sum(1)
    return np.where(positives > 0, found / np.maximum(positives, 1), np.nan)
