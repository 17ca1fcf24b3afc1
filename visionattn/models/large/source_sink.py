"""Sources of pixels and sinks of maps, read and written a few rows at a time."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Prepare = Callable[[np.ndarray], Tensor]
"""Turns pixels ``[h, w, C]`` into a model's input, float ``[1, C, h, w]``."""


class PartSource(Protocol):
    """An image that is read in parts."""

    height: int
    """In pixels."""
    width: int
    """In pixels."""
    channels: int
    dtype: np.dtype
    """Dtype of the result of ``read``."""

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """Return a part of the image, ``[h, w, channels]``; the slices lie within the image."""


class Sink(Protocol):
    """A map that is written a few rows at a time, completely or not at all."""

    def begin(self, shape: tuple[int, int, int], dtype: np.dtype) -> None:
        """Create a map ``[C, H, W]``, or resume an unfinished one of the same shape and dtype.

        Raises:
            ValueError: a file is in the way, or there is no space.
        """

    def write(self, first_row: int, band: np.ndarray) -> None:
        """Write rows ``[C, h, W]``; the same rows may be written again, with the same values."""

    def finish(self) -> None:
        """Give the map its final name."""

    def close(self) -> None:
        """Close the map; without ``finish``, it stays for another pass to resume."""


class MapWriter:
    """Rows of a map ``[C, H, W]`` that go to a sink or stay in memory, on the CPU.

    Args:
        shape: C, H and W.
        dtype: dtype of the map; bfloat16, which numpy lacks, is written as float32.
        sink: None: the map stays in memory.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, sink: Sink | None):
        self.shape, self.sink = shape, sink
        self.dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.whole = torch.empty(shape if sink is None else 0, dtype=self.dtype)
        if sink is not None:
            sink.begin(shape, self.whole.numpy().dtype)

    def write(self, first: int, rows: Tensor) -> None:
        """Write rows ``[C, h, W]`` from ``first`` on."""
        rows = rows.to("cpu", self.dtype)
        if self.sink is None:
            self.whole[:, first : first + rows.shape[1]] = rows
        else:
            self.sink.write(first, rows.contiguous().numpy())

    def finish(self) -> Tensor | None:
        """Finish the sink, or return the map ``[C, H, W]``."""
        if self.sink is None:
            return self.whole
        self.sink.finish()
        return None


def as_fractions(pixels: np.ndarray) -> Tensor:
    """Return pixels ``[h, w, C]`` as ``[1, C, h, w]``: floating point values unchanged, integers
    divided by the maximum of their type.
    """
    x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
    if x.is_floating_point():
        return x
    return x.float() / float(np.iinfo(pixels.dtype).max)
