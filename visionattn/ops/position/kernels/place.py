"""The grid and the classes of ``Joint`` relative position as its kernels count them, without
Triton.
"""

from typing import NamedTuple

from visionattn.ops.gpu import launch

TILE = 16
"""How many queries a tile has."""


class Place(NamedTuple):
    """Where the patches lie, and which of them are one class of a query.

    Args:
        height, width: H and W of the grid; all of its patches are present.
        prefix: P, the tokens in front of the patches, which take no part.
        horizon_y, horizon_x: Ry and Rx, at least 1 each: patches this far away or further, up or
            down, left or right, are of the outermost class.
        mean: whether the normalization is "mean"; else it is "sum".
    """

    height: int
    width: int
    prefix: int
    horizon_y: int
    horizon_x: int
    mean: bool

    @property
    def classes(self) -> int:
        """The number of classes, ``(2Ry+1) * (2Rx+1)``."""
        return (2 * self.horizon_y + 1) * (2 * self.horizon_x + 1)

    @property
    def padded_classes(self) -> int:
        """Elements from the weights of one query to those of the next: whole octets that hold all
        classes.
        """
        return -(-self.classes // launch.OCTET) * launch.OCTET

    @property
    def unit(self) -> float:
        """What sums of weighted lines are multiplied by at the end: 1, or H / M with "sum"."""
        return 1.0 if self.mean else self.height / max(1, self.prefix + self.height * self.width)

    @property
    def row_scale(self) -> float:
        """With "sum", the weight of one key of a row in units of ``unit``."""
        return 1 / max(1, self.height)

    @property
    def far_unit(self) -> float:
        """With "sum", what the weight of all keys of a row that a tile does not read is multiplied
        by at the end.
        """
        return 1.0 if self.mean else float(1 << max(0, self.width - 1).bit_length())

    @property
    def beside(self) -> int:
        """Keys that a tile of queries reads one by one on either side: at least as many as the
        horizon along rows.
        """
        return 8 if self.horizon_x <= 8 else 24

    @property
    def slots(self) -> int:
        """Places for the classes of columns in one class of rows; at least one place is free."""
        return max(8, 1 << (2 * self.horizon_x + 1).bit_length())

    @property
    def lines_at_once(self) -> int:
        """Classes of rows whose weights one product of some 64 columns makes."""
        return min(
            1 << (2 * self.horizon_y).bit_length(),
            max(1, (64 if self.slots == 8 else 32) // self.slots),
        )

    def horizons(self) -> dict[str, int]:
        """Return what kernels have to know of the horizons when they are compiled."""
        return dict(HORIZON_Y=self.horizon_y, HORIZON_X=self.horizon_x, PADDED=self.padded_classes)
