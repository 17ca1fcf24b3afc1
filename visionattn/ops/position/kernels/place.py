"""The grid and the classes of ``Joint`` relative position as its kernels count them. No Triton in
here.
"""

from typing import NamedTuple

from visionattn.ops.gpu import launch

TILE = 16
"""Queries of a tile."""


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
        """Elements from the weights of one query to those of the next: the classes, in whole
        octets.
        """
        return -(-self.classes // launch.OCTET) * launch.OCTET

    @property
    def unit(self) -> float:
        """What sums of weighted lines are multiplied with at the end; with "sum" H / M."""
        return 1.0 if self.mean else self.height / max(1, self.prefix + self.height * self.width)

    @property
    def row_scale(self) -> float:
        """With "sum", the weight of one key of a row in those units."""
        return 1 / max(1, self.height)

    @property
    def far_unit(self) -> float:
        """With "sum", what weights of all keys of a row that a tile does not read are multiplied
        with at the end.
        """
        return 1.0 if self.mean else float(1 << max(0, self.width - 1).bit_length())

    @property
    def beside(self) -> int:
        """Keys that a tile of queries reads one by one on either side: no less than the horizon
        along rows.
        """
        return 8 if self.horizon_x <= 8 else 24

    @property
    def slots(self) -> int:
        """Places for the classes of columns of one class of rows, one of which at least is free."""
        return max(8, 1 << (2 * self.horizon_x + 1).bit_length())

    @property
    def lines_at_once(self) -> int:
        """Classes of rows whose weights are made in one product, of some 64 columns."""
        return min(
            1 << (2 * self.horizon_y).bit_length(),
            max(1, (64 if self.slots == 8 else 32) // self.slots),
        )

    def horizons(self) -> dict[str, int]:
        """What kernels have to know when they are compiled."""
        return dict(HORIZON_Y=self.horizon_y, HORIZON_X=self.horizon_x, PADDED=self.padded_classes)
