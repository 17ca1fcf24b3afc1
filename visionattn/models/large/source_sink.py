"""Where pixels come from and where maps go to, a few rows at a time."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Prepare = Callable[[np.ndarray], Tensor]
"""Turns pixels ``[h, w, C]`` into a model's input, float ``[1, C, h, w]``."""


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


class MapWriter:
    """Rows of a map ``[C, H, W]``, which go to a sink or stay in memory, on the CPU.

    Args:
        shape: C, H and W.
        dtype: of the map; bfloat16, which numpy does not know, is written as float32.
        sink: None: the map stays in memory.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, sink: Sink | None):
        self.shape, self.sink = shape, sink
        self.dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.whole = torch.empty(shape if sink is None else 0, dtype=self.dtype)
        self.first, self.waiting = 0, list[Tensor]()
        if sink is not None:
            sink.begin(shape, self.whole.numpy().dtype)

    def take(self, first: int, rows: Tensor) -> None:
        """Take rows ``[C, h, W]`` from ``first`` on, the next ones until ``flush``."""
        rows = rows.to("cpu", self.dtype)
        if self.sink is None:
            self.whole[:, first : first + rows.shape[1]] = rows
            return
        self.first = self.first if self.waiting else first
        self.waiting.append(rows)

    def flush(self) -> None:
        """Write the rows that came, in one piece."""
        if self.sink is not None and self.waiting:
            self.sink.write(self.first, torch.cat(self.waiting, 1).contiguous().numpy())
            self.waiting = []

    def finish(self) -> Tensor | None:
        """Finish the sink, or return the map ``[C, H, W]``."""
        if self.sink is None:
            return self.whole
        self.sink.finish()
        return None


def as_fractions(pixels: np.ndarray) -> Tensor:
    """Return pixels ``[h, w, C]`` as ``[1, C, h, w]``: floating values as they are, whole numbers
    divided by the largest of their type.
    """
    x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
    if x.is_floating_point():
        return x
    return x.float() / float(np.iinfo(pixels.dtype).max)
