"""Relative position as an operator takes it, a list of numbers, and back. No Triton in here."""

from collections.abc import Sequence

from visionattn.ops.position.kernels.place import Place
from visionattn.ops.position.kinds import Joint


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
