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
        mean: whether the normalization is "mean" instead of "sum".
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
        """The number of classes, rounded up to whole octets."""
        return -(-self.classes // launch.OCTET) * launch.OCTET

    @property
    def unit(self) -> float:
        """The factor that is applied last to sums of weighted lines: 1, or H / M with "sum"."""
        return 1.0 if self.mean else self.height / max(1, self.prefix + self.height * self.width)

    @property
    def row_scale(self) -> float:
        """With "sum", 1 / M in units of ``unit``: 1 / H."""
        return 1 / max(1, self.height)

    @property
    def far_unit(self) -> float:
        """With "sum", the factor that is applied last to weights of keys outside the window of a
        tile: a power of two of at least W.
        """
        return 1.0 if self.mean else float(1 << max(0, self.width - 1).bit_length())

    @property
    def halo(self) -> int:
        """The number of keys that the window of a tile of queries has on either side of the tile:
        at least Rx.
        """
        return 8 if self.horizon_x <= 8 else 24

    @property
    def slots(self) -> int:
        """The number of classes of columns, padded to a power of two with at least one free
        slot.
        """
        return max(8, 1 << (2 * self.horizon_x + 1).bit_length())

    @property
    def lines_at_once(self) -> int:
        """The number of classes of rows whose weights are computed in one product, of about 64
        columns.
        """
        return min(
            1 << (2 * self.horizon_y).bit_length(),
            max(1, (64 if self.slots == 8 else 32) // self.slots),
        )

    def horizons(self) -> dict[str, int]:
        """Return the compile-time values that depend on the horizons."""
        return dict(HORIZON_Y=self.horizon_y, HORIZON_X=self.horizon_x, PADDED=self.padded_classes)
