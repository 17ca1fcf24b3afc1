"""Where the patches lie, as the kernels of relative position take it: plain numbers. No Triton in here."""

from collections.abc import Sequence
from typing import NamedTuple

from visionattn.ops.relative import Joint

MOST_CLASSES = 128
"""Classes of a joint table that the kernels hold, ``(2Ry+1) (2Rx+1)`` at most."""


class Place(NamedTuple):
    """A full grid of patches behind a prefix, the horizons of a joint table, and whether classes count as means."""

    height: int
    width: int
    prefix: int
    horizon_y: int
    horizon_x: int
    mean: bool


def place_of(relative: Joint | None) -> list[int]:
    """``Place`` as the list of numbers that an operator takes; empty without relative position."""
    if relative is None:
        return []
    grid, (_, rows, columns, _) = relative.layout.grid, relative.table.shape
    mean = relative.normalization == "mean"
    return list(Place(grid.height, grid.width, relative.layout.num_prefix, rows // 2, columns // 2, mean))


def place_from(numbers: Sequence[int]) -> Place | None:
    """The ``Place`` that such a list stands for; None for an empty one."""
    if not numbers:
        return None
    *sizes, mean = numbers
    return Place(*sizes, bool(mean))
