"""Where pixels come from and where maps go to, a few rows at a time."""

from typing import Protocol

import numpy as np


class Source(Protocol):
    """An image of which parts are read."""

    height: int
    """In pixels."""
    width: int
    """In pixels."""
    channels: int
    dtype: np.dtype
    """Of what ``read`` returns."""

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """Return a part of the image, ``[h, w, channels]``; start and stop lie within the image."""
        ...


class Sink(Protocol):
    """A map that is written a few rows at a time, and that is there whole or not at all."""

    def begin(self, shape: tuple[int, int, int], dtype: np.dtype) -> None:
        """Make room for a map ``[C, H, W]``, or go on with an unfinished one of the same shape and
        dtype.

        Raises:
            ValueError: something is in the way, or there is no room for it.
        """
        ...

    def write(self, first_row: int, band: np.ndarray) -> None:
        """Write rows ``[C, h, W]``; the same rows may come again, with the same values."""
        ...

    def finish(self) -> None:
        """Give the map its name."""
        ...

    def close(self) -> None:
        """Let go of it; without ``finish``, what is unfinished stays, for another pass to go on
        with.
        """
        ...
