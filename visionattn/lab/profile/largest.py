"""The largest square image that fits, by doubling and then halving, over whole patches. It measures
through a function.
"""

from collections.abc import Callable
from dataclasses import replace

from visionattn.lab.cases import Case
from visionattn.lab.profile.rows import Largest, Row
from visionattn.lab.profile.shape import Shape

START_PATCHES = 16


def largest_fit(fits: Callable[[int], bool], start: int = START_PATCHES) -> int:
    """Return the largest whole number from 1 for which ``fits`` holds; 0 where it holds for none.

    Args:
        fits: true up to some number and false beyond it; called some ``2 log2`` of the result
            times, never twice for a number.
        start: what is tried first, and then doubled while it fits.
    """
    low, high = 0, start
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def find_largest(
    case: Case, shape: Shape, measure: Callable[[Case, int], Row]
) -> tuple[Largest, list[Row]]:
    """Return the largest image of a series, and the rows that were measured on the way, sizes
    rising.

    Args:
        case: any case of the series.
        shape: of its model.
        measure: the row of a case with so many tokens.
    """
    rows: dict[int, Row] = {}

    def fits(patches: int) -> bool:
        px = patches * shape.patch_px
        rows[patches] = measure(replace(case, size=px), shape.tokens(px))
        return rows[patches].status == "ok"

    found = largest_fit(fits)
    return Largest(rows.get(found), rows[found + 1]), [rows[patches] for patches in sorted(rows)]
