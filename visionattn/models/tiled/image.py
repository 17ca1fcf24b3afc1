"""Pixels of a source as the tokens that a model's patches make of them, band by band."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import Grid
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.patches import axis_weights
from visionattn.models.rowwise import weight_like
from visionattn.models.tiled.ahead import Ahead
from visionattn.models.tiled.bands import Bands
from visionattn.models.tiled.ends import Source
from visionattn.ops.sums import product

Prepare = Callable[[np.ndarray], Tensor]
"""Turns pixels ``[h, w, C]`` into a model's input, float ``[1, C, h, w]``."""


class PatchedImage:
    """An image as a model's patches; ``grid`` is theirs, whole patches and a part of one."""

    def __init__(self, body: VisionAttnTransformer, source: Source, prepare: Prepare | None):
        self.body, self.source, self.prepare = body, source, prepare or as_fractions
        self.patch = body.patch_embed.patch_size
        if not all(hasattr(source, name) for name in ("height", "width", "read")):
            raise ValueError(
                f"wanted a source, got {type(source).__name__}: visionattn.forward_tiled opens "
                "paths, arrays and tensors"
            )
        if source.height < self.patch[0] or source.width < self.patch[1]:
            raise ValueError(
                f"image of {source.height} x {source.width} pixels is smaller than a patch of "
                f"{self.patch[0]} x {self.patch[1]}"
            )
        self.grid = Grid(-(-source.height // self.patch[0]), -(-source.width // self.patch[1]))
        if not body.dynamic_img_size:
            size = self.grid[0] * self.patch[0], self.grid[1] * self.patch[1]
            if size != tuple(body.patch_embed.img_size):
                raise ValueError(
                    f"image of {source.height} x {source.width} pixels, but dynamic_img_size=False "
                    f"fixes {body.patch_embed.img_size}"
                )
        self.position = None if body.pos_embed is None else self._rows_of_position()

    def ahead(self, bands: Bands) -> Ahead:
        """Return what reads the pixels of bands of rows of patches."""
        down, height = self.patch[0], self.source.height
        rows = [slice(first * down, min(last * down, height)) for first, last in bands]
        return Ahead(self.source, rows, self.prepare, weight_like(self.body).device)

    def embed(self, first: int, x: Tensor) -> Tensor:
        """Return the tokens ``[1, n, D]`` of rows of patches with the pixels ``[1, C, h, w]``."""
        body, (down, across) = self.body, self.patch
        weight = weight_like(body)
        if x.shape[1] != body.in_chans:
            raise ValueError(
                f"the image has {x.shape[1]} channels, and the model takes {body.in_chans}"
            )
        if x.is_floating_point() and not torch.is_autocast_enabled(weight.device.type):
            x = x.to(weight.dtype)
        x = _repeated(x, -x.shape[2] % down, -x.shape[3] % across)
        embed = body.patch_embed
        x = embed.norm(embed.proj(x).permute(0, 2, 3, 1))
        if self.position is not None:
            x = x + self._position(first, x.shape[1]).to(x.dtype)
        return body.norm_pre(body.pos_drop(x.flatten(1, 2)))

    def prefix(self) -> Tensor | None:
        """Return the prefix tokens ``[1, P, D]``."""
        body = self.body
        tokens = [token for token in (body.cls_token, body.reg_token) if token is not None]
        if not tokens:
            return None
        x = torch.cat(tokens, 1)
        if body.pos_embed is not None and not body.no_embed_class:
            x = x + body.pos_embed[:, : x.shape[1]]
        return body.norm_pre(body.pos_drop(x))

    def _rows_of_position(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the learned position ``[h, w, D]``, and by which weights its rows and its columns
        become those of the grid: timm's resampling, one axis after the other.
        """
        body = self.body
        prefix = 0 if body.no_embed_class else body.num_prefix_tokens
        own = body.patch_embed.grid_size
        patches = body.pos_embed[0, prefix:].float().unflatten(0, own)
        sizes = torch.tensor([self.grid], device=patches.device)
        down, across = (
            axis_weights(sizes[:, axis], self.grid[axis], own[axis])[0] for axis in (0, 1)
        )
        return patches, down, across

    def _position(self, first: int, rows: int) -> Tensor:
        assert self.position is not None
        patches, down, across = self.position
        own = product(down[first : first + rows], patches.flatten(1))
        return product(across, own.unflatten(1, patches.shape[1:]))[None]


def _repeated(x: Tensor, rows: int, columns: int) -> Tensor:
    """Repeat the last row and column of ``[1, C, h, w]``."""
    return F.pad(x, (0, columns, 0, rows), mode="replicate") if rows or columns else x


def as_fractions(pixels: np.ndarray) -> Tensor:
    """Return pixels ``[h, w, C]`` as ``[1, C, h, w]``: floating values as they are, whole numbers
    divided by the largest of their type.
    """
    x = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
    if x.is_floating_point():
        return x
    return x.float() / float(np.iinfo(pixels.dtype).max)
