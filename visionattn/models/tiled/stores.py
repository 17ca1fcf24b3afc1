"""Tokens and values of a whole image: in memory, or in a file that is mapped into it."""

from math import prod
from pathlib import Path

import torch
from torch import Tensor


class Store:
    """Rows of a grid of vectors.

    Args:
        grid: rows and columns.
        width: entries of a vector.
        dtype: of the entries.
        device: where the rows are computed with.
        path: a file to map into memory, made anew; None: all of it is in memory.
    """

    def __init__(
        self,
        grid: tuple[int, int],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        path: Path | None = None,
    ):
        shape, self.device = (*grid, width), device
        if path is None:
            self.rows = torch.empty(shape, dtype=dtype, device=device)
        else:
            mapped = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype)
            self.rows = mapped.view(shape)

    def read(self, first: int, last: int) -> Tensor:
        """Return rows ``[last - first, W, width]`` to compute with; they may be a view."""
        return self.rows[first:last].to(self.device)

    def write(self, first: int, rows: Tensor) -> None:
        """Keep rows ``[n, W, width]`` in place of those from ``first`` on."""
        self.rows[first : first + len(rows)] = rows
