"""The layout of tokens: where each token of a sequence is on the grid of the image.

This module defines the letters of the whole package: ``B`` images, ``h`` heads, ``N`` queries,
``M`` keys, ``d`` width of queries and keys per head, ``e`` width of values per head, ``D = h * d``
model width, ``(H, W)`` grid of patches, ``P`` prefix tokens, ``R`` horizon of relative position.
Height comes before width, rows before columns.

Layouts are named tuples: they are immutable, and gradient checkpointing, FX, export and wrappers
handle them as plain tuples.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Grid(NamedTuple):
    """A grid of ``height`` x ``width`` patches (patches, not pixels)."""

    height: int
    width: int

    @property
    def num_patches(self) -> int:
        """The number of patches, ``H * W``."""
        return self.height * self.width


class TokenLayout(NamedTuple):
    """A sequence of ``num_prefix`` prefix tokens (class, registers) followed by patches of
    ``grid``.

    Args:
        num_prefix: P, leading tokens without a position on the grid.
        grid: the whole grid, including patches that are not in the sequence.
        kept: int64 ``[B, n]``, row-major indices in ``0..H*W-1`` of the patches in the sequence, in
            token order; None: all patches, row by row from the top left.
        counts: number of keys in each class of relative position, for each patch.
            ``visionattn.ops.count_classes`` computes them once per forward pass; None: each call
            computes them again.
        present: bool ``[B, H*W]``, row by row: True for grid positions with content; None: all. A
            token at another position is absent: no token attends to it, and its output is
            undefined. ``Flat`` offsets count present positions only.
    """

    num_prefix: int
    grid: Grid
    kept: Tensor | None = None
    counts: Tensor | None = None
    present: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the sequence: prefix tokens and patches."""
        patches = self.grid.num_patches if self.kept is None else self.kept.shape[1]
        return self.num_prefix + patches

    def check_sizes(self) -> None:
        """Raise ValueError for a negative number of rows, columns or prefix tokens."""
        if self.num_prefix < 0 or self.grid.height < 0 or self.grid.width < 0:
            raise ValueError(
                f"layout: expected no negative number, got {self.num_prefix} prefix tokens and "
                f"{self.grid.height} x {self.grid.width} patches"
            )

    def patch_mask(self) -> Tensor | None:
        """Return which patches are present, in token order, bool ``[B, n]``; None if all are."""
        if self.present is None or self.kept is None:
            return self.present
        return self.present.gather(1, self.kept)

    def key_mask(self, mask: Tensor | None = None) -> Tensor | None:
        """Return which tokens take part as keys, bool ``[B, P + n]``: present, and True in
        ``mask``. None if all take part.
        """
        patches = self.patch_mask()
        if patches is None:
            return mask
        keys = F.pad(patches, (self.num_prefix, 0), value=True)
        return keys if mask is None else keys & mask

    def on_grid(self, x: Tensor) -> Tensor:
        """Lay the patches of tokens ``[B, h, P + n, c]`` out on the grid, ``[B, h, H, W, c]``.

        Grid positions without a patch are 0.
        """
        x = x[:, :, self.num_prefix :]
        if self.kept is not None:
            whole = x.new_zeros(*x.shape[:2], self.grid.num_patches, x.shape[3])
            x = whole.scatter(2, self._index(x), x)
        return x.unflatten(2, self.grid)

    def off_grid(self, x: Tensor) -> Tensor:
        """Return the patches of ``x [B, h, H, W, c]`` in token order, ``[B, h, n, c]``."""
        x = x.flatten(2, 3)
        return x if self.kept is None else x.gather(2, self._index(x))

    def _index(self, x: Tensor) -> Tensor:
        return self.kept[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3])
