"""Grid and classes of ``Joint`` relative position for its kernels, without Triton."""

from typing import NamedTuple

from visionattn.ops.gpu import launch

TILE = 16
"""Number of queries per tile."""


class GridClasses(NamedTuple):
    """The grid of patches, and the horizons that define the classes of a query.

    Args:
        height, width: H and W of the grid; all patches are present.
        prefix: P, the tokens in front of the patches, which take no part.
        horizon_y, horizon_x: Ry and Rx, at least 1 each: patches at this distance or further, up or
            down, left or right, belong to the outermost class.
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
        """Elements from one query's weights to the next: whole octets that hold all classes."""
        return -(-self.classes // launch.OCTET) * launch.OCTET

    @property
    def unit(self) -> float:
        """Final factor of sums of weighted lines: 1, or H / M with "sum"."""
        return 1.0 if self.mean else self.height / max(1, self.prefix + self.height * self.width)

    @property
    def row_scale(self) -> float:
        """With "sum", the weight of one key of a row in units of ``unit``."""
        return 1 / max(1, self.height)

    @property
    def far_unit(self) -> float:
        """With "sum", the final factor of the weight of a row's keys outside a tile's window."""
        return 1.0 if self.mean else float(1 << max(0, self.width - 1).bit_length())

    @property
    def beside(self) -> int:
        """Keys that a tile of queries reads individually on either side: at least the horizon along
        rows.
        """
        return 8 if self.horizon_x <= 8 else 24

    @property
    def slots(self) -> int:
        """Slots for the classes of columns in one class of rows; at least one slot is free."""
        return max(8, 1 << (2 * self.horizon_x + 1).bit_length())

    @property
    def lines_at_once(self) -> int:
        """Classes of rows whose weights one product of about 64 columns computes."""
        return min(
            1 << (2 * self.horizon_y).bit_length(),
            max(1, (64 if self.slots == 8 else 32) // self.slots),
        )

    def horizons(self) -> dict[str, int]:
        """Return the compile-time values that depend on the horizons."""
        return dict(HORIZON_Y=self.horizon_y, HORIZON_X=self.horizon_x, PADDED=self.padded_classes)
