"""Classes of pixels as colours, and their names."""

import numpy as np

from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec


def class_names(spec: DataSpec) -> tuple[str, ...]:
    """Return the names of the classes, numbers where they have none."""
    return spec.class_names or tuple(map(str, range(spec.num_classes)))


def palette(spec: DataSpec) -> list[int]:
    """Return red, green and blue of each value of a mask, 256 times: those of the data, or those of
    PASCAL VOC, which differ as far as numbers do. Pixels without a class are white, or of the
    lightest grey that no class has.
    """
    colours = list(spec.colours or ())
    for number in range(len(colours), IGNORED):
        levels = [0, 0, 0]
        for bit in range(8):
            for channel in range(3):
                levels[channel] |= (number >> (3 * bit + channel) & 1) << (7 - bit)
        colours.append((levels[0], levels[1], levels[2]))
    greys = ((level, level, level) for level in range(255, -1, -1))
    colours.append(next(grey for grey in greys if grey not in colours))
    return [level for colour in colours for level in colour]


def painted(mask: np.ndarray, spec: DataSpec) -> np.ndarray:
    """Return a mask ``[H, W]`` in colours, uint8 ``[H, W, 3]``."""
    return np.array(palette(spec), np.uint8).reshape(-1, 3)[mask]
