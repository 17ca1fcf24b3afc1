"""Classes of pixels: their names, their colours, and how well two masks agree."""

import numpy as np

from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec


def class_names(spec: DataSpec) -> tuple[str, ...]:
    """Return the names of the classes, numbers where they have none."""
    return spec.class_names or tuple(map(str, range(spec.num_classes)))


def palette(spec: DataSpec) -> list[int]:
    """Return red, green and blue of each value of a mask, 256 times: those of the data, or those of
    PASCAL VOC, which differ as far as numbers do. Pixels without a class are of the grey that is
    farthest from the colours of all classes, white in most cases.
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
    """Return a mask ``[H, W]`` in colours, uint8 ``[H, W, 3]``."""
    return np.array(palette(spec), np.uint8).reshape(-1, 3)[mask]


def striped(mask: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return a mask as ``painted`` does, with stripes of two greys where pixels do not count."""
    colours = painted(mask, spec)
    rows, columns = np.indices(mask.shape)
    stripes = (mask == IGNORED) & ((rows + columns) % 4 < 2)
    return np.where(stripes[..., None], colours ^ 64, colours)


def ious_of(confusion: np.ndarray) -> np.ndarray:
    """Return the intersection over union of each class, float64 ``[classes]``; NaN where nothing
    known has it. ``confusion`` is as ``confusion_of`` gives it.
    """
    right, there = np.diag(confusion), confusion.sum(1)
    union = there + confusion.sum(0) - right
    return np.where(there > 0, right / np.maximum(union, 1), np.nan)
