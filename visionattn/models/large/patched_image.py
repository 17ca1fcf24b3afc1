"""Embedding of a source's pixels into tokens, band by band."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.large.band_plan import Bands
from visionattn.models.large.source_sink import PartSource, Prepare, as_fractions
from visionattn.models.patches import axis_weights, check_image_size, grid_of
from visionattn.models.rowwise_support import weight_like
from visionattn.ops.attention_sums import product


class PatchedImage:
    """An image as the patches of a model; incomplete patches repeat its last row and column.

    Args:
        body: the model.
        source: the image; not read by others at the same time.
        prepare: turns pixels into the model's input; None: ``as_fractions``.

    Attributes:
        grid: grid of patches.
        waited_s: seconds that ``bands`` has waited for the source.

    Raises:
        ValueError: not a source, or the model does not accept an image of its size.
    """

    def __init__(self, body: VisionAttnTransformer, source: PartSource, prepare: Prepare | None):
        self.body, self.source, self.prepare = body, source, prepare or as_fractions
        self.patch = body.patch_embed.patch_size
        self.waited_s = 0.0
        if source.height < self.patch[0] or source.width < self.patch[1]:
            raise ValueError(
                f"image of {source.height} x {source.width} pixels is smaller than a patch of "
                f"{self.patch[0]} x {self.patch[1]}"
            )
        self.grid = grid_of((source.height, source.width), self.patch)
        whole = self.grid.height * self.patch[0], self.grid.width * self.patch[1]
        check_image_size(body.patch_embed, *whole)
        self.position = None if body.pos_embed is None else self._rows_of_position()

    def bands(self, bands: Bands) -> Iterator[Tensor]:
        """Yield the tokens ``[1, n, D]`` of bands of rows of patches.

        While the caller computes with one band, a thread reads and prepares the next, and no more.
        """
        device = weight_like(self.body).device

        def read(band: tuple[int, int]) -> Tensor:
            rows = slice(band[0] * self.patch[0], min(band[1] * self.patch[0], self.source.height))
            x = self.prepare(self.source.read(rows, slice(0, self.source.width)))
            return x.pin_memory() if device.type == "cuda" else x

        with ThreadPoolExecutor(1, "reading ahead") as pool:
            following = pool.submit(read, bands[0]) if bands else None
            for number, (first, _) in enumerate(bands, 1):
                assert following is not None
                begun = perf_counter()
                pixels = following.result().to(device, non_blocking=True)
                self.waited_s += perf_counter() - begun
                if number < len(bands):
                    following = pool.submit(read, bands[number])
                yield self._embed(first, pixels)

    def prefix(self) -> Tensor | None:
        """Return the prefix tokens ``[1, P, D]``; None: none."""
        x = self.body.prefix_tokens()
        return None if x is None else self.body.norm_pre(self.body.pos_drop(x))

    def _embed(self, first: int, x: Tensor) -> Tensor:
        """Return the tokens of rows of patches with the pixels ``[1, C, h, w]``."""
        body, weight = self.body, weight_like(self.body)
        if x.shape[1] != body.in_chans:
            raise ValueError(f"expected {body.in_chans} channels, as the model's, got {x.shape[1]}")
        if x.is_floating_point() and not torch.is_autocast_enabled(weight.device.type):
            x = x.to(weight.dtype)
        x = filled(x, -x.shape[2] % self.patch[0], -x.shape[3] % self.patch[1])
        x = body.patch_embed.embed(x)
        if self.position is not None:
            patches, down, across = self.position
            own = product(down[first : first + x.shape[1]], patches.flatten(1))
            own = product(across, own.unflatten(1, patches.shape[1:]))
            x = x + own[None].to(x.dtype)
        return body.norm_pre(body.pos_drop(x.flatten(1, 2)))

    def _rows_of_position(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the learned position ``[h, w, D]``, and the weights that resample its rows and
        columns to the grid.

        This is timm's resampling, one axis after the other.
        """
        body, own = self.body, self.body.patch_embed.grid_size
        prefix = 0 if body.no_embed_class else body.num_prefix_tokens
        patches = body.pos_embed[0, prefix:].float().unflatten(0, own)
        sizes = torch.tensor([self.grid], device=patches.device)
        down, across = (
            axis_weights(sizes[:, axis], self.grid[axis], own[axis], body.pos_antialias)[0]
            for axis in (0, 1)
        )
        return patches, down, across


def filled(x: Tensor, below: int, right: int) -> Tensor:
    """Repeat the last row and column of ``[B, C, h, w]``."""
    return F.pad(x, (0, right, 0, below), mode="replicate") if below or right else x
