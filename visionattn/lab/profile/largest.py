"""The largest square image that fits, by doubling and then halving, over whole patches. It measures
through a function.
"""

from collections.abc import Callable
from dataclasses import replace

from visionattn.cli.memory import largest_fit
from visionattn.lab.cases import Case
from visionattn.lab.profile.rows import Largest, Row
from visionattn.lab.profile.shape import Shape


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
