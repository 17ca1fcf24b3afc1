"""The layout of tokens: the one value that gives attention the geometry of the image.

The letters of the whole package are defined here: ``B`` images, ``h`` heads, ``N`` queries, ``M``
keys, ``d`` width of queries and keys per head, ``e`` width of values per head, ``D = h * d`` model
width, ``(H, W)`` grid of patches, ``P`` prefix tokens, ``R`` horizon of relative position. Height
comes before width, rows before columns.

The values are named tuples: immutable, and handled as plain tuples by checkpointing, FX, export and
wrappers.
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
        num_prefix: P, leading tokens without a place on the grid.
        grid: the whole grid, including patches that are not present.
        kept: int64 ``[B, n]``, row-major indices in ``0..H*W-1`` of the patches in the sequence, in
            the order of the tokens; None: all patches, row by row from the top left.
        counts: keys per class of relative position for each patch. ``visionattn.ops.count_classes``
            computes them once per forward pass; None: each call computes its own.
        present: bool ``[B, H*W]``, row by row: places of the grid with content; None: all. Tokens
            at other places are absent: no token attends to them, and their outputs are undefined.
            ``Flat`` counts along the present places only.
    """

    num_prefix: int
    grid: Grid
    kept: Tensor | None = None
    counts: Tensor | None = None
    present: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the sequence: P and the patches in it."""
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
        """Return True for each patch that is not absent, in token order, bool ``[B, n]``; None if
        all are present.
        """
        if self.present is None or self.kept is None:
            return self.present
        return self.present.gather(1, self.kept)

    def key_mask(self, mask: Tensor | None = None) -> Tensor | None:
        """Return the tokens that take part as keys, bool ``[B, P + n]``: not absent and True in
        ``mask``. None if all take part.
        """
        patches = self.patch_mask()
        if patches is None:
            return mask
        keys = F.pad(patches, (self.num_prefix, 0), value=True)
        return keys if mask is None else keys & mask

    def on_grid(self, x: Tensor) -> Tensor:
        """Lay the patches of tokens ``[B, h, P + n, c]`` out on the grid, ``[B, h, H, W, c]``.

        Places without a patch hold 0.
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
