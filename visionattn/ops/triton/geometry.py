"""Where the patches lie, as the kernels of relative position take it: plain numbers. No Triton in here."""

from collections.abc import Sequence
from typing import NamedTuple

from visionattn.ops.relative import Joint
from visionattn.ops.triton.launch import OCTET

MAX_CLASSES = 128
"""Most classes ``(2Ry+1) * (2Rx+1)`` of a table that the kernels take, after padding to octets."""
MAX_HORIZON_X = 16
"""Largest Rx: half of the shortest tile."""


class Place(NamedTuple):
    """Where the patches lie and which of them are one class.

    Args:
        height, width: H and W of the grid, all of whose patches are present.
        prefix: P, tokens in front of them, which take no part.
        horizon_y, horizon_x: Ry and Rx, at least 1 each.
        mean: normalization "mean"; else "sum".
    """

    height: int
    width: int
    prefix: int
    horizon_y: int
    horizon_x: int
    mean: bool

    @property
    def classes(self) -> int:
        """``(2Ry+1) * (2Rx+1)``."""
        return (2 * self.horizon_y + 1) * (2 * self.horizon_x + 1)

    @property
    def padded_classes(self) -> int:
        """Elements from the weights of one query to those of the next: the classes, in whole octets."""
        return -(-self.classes // OCTET) * OCTET

    @property
    def unit(self) -> float:
        """What sums of weighted lines are multiplied with at the end."""
        return 1.0 if self.mean else 1 / self.width

    @property
    def sum_scale(self) -> float:
        """With "sum", the weight of one key in those units: W / M."""
        return self.width / (self.prefix + self.height * self.width)

    def horizons(self) -> dict[str, int]:
        """What kernels have to know when they are compiled."""
        return dict(HORIZON_Y=self.horizon_y, HORIZON_X=self.horizon_x, PADDED=self.padded_classes)


def place_of(relative: Joint | None) -> list[int]:
    """The numbers of a ``Place`` as an operator takes them; empty without relative position."""
    if relative is None:
        return []
    grid, (_, rows, columns, _) = relative.layout.grid, relative.table.shape
    mean = 1 if relative.normalization == "mean" else 0
    return [grid.height, grid.width, relative.layout.num_prefix, rows // 2, columns // 2, mean]


def place_from(numbers: Sequence[int]) -> Place | None:
    """The ``Place`` that such a list stands for; None for an empty one."""
    if not numbers:
        return None
    *sizes, mean = numbers
    return Place(*sizes, bool(mean))
