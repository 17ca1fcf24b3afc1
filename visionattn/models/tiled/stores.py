"""Tokens and values of a whole image: in memory, or in a file that is mapped into it."""

import os
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from visionattn.cli.files import reserve_bytes
from visionattn.cli.tables import sized


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
            reserve(path, prod(shape) * dtype.itemsize)
            mapped = torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype)
            self.rows = mapped.view(shape)

    def read(self, first: int, last: int) -> Tensor:
        """Return rows ``[last - first, W, width]`` to compute with; they may be a view."""
        return self.rows[first:last].to(self.device)

    def write(self, first: int, rows: Tensor) -> None:
        """Keep rows ``[n, W, width]`` in place of those from ``first`` on."""
        self.rows[first : first + len(rows)] = rows


def reserve(path: Path, size: int) -> None:
    """Make a file of so many bytes that are the disk's already: a mapped file that the disk has no
    room for would end the process without a word.

    Raises:
        OSError: there is no room; the file is gone.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        reserve_bytes(descriptor, size)
    except OSError as error:
        path.unlink()
        raise OSError(
            error.errno,
            f"no room for {sized(size)} of tokens: {os.strerror(error.errno)}",
            str(path.parent),
        ) from error
    finally:
        os.close(descriptor)
