"""Outputs from tokens that leave the blocks in pieces: pooled features and logits, feature maps,
masks, attributions.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from visionattn.layout import Grid
from visionattn.models.attribution import (
    Attribution,
    Pools,
    attributed,
    checked_target,
    contrast,
    pools_of,
)
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.large.attention_of_strips import softmax_of, softmax_part
from visionattn.models.large.band_plan import Bands
from visionattn.models.large.source_sink import MapWriter, Sink
from visionattn.models.large.token_store import TokenStore
from visionattn.models.rowwise_support import weight_like
from visionattn.models.segmentation import Segmenter, classes_of, probabilities_of

STREAMED = ("max", "avg", "avgmax", "token")
STRIP_PIXELS = 1 << 22
"""Number of pixels whose logits are in memory at once."""


class Output:
    """An output computed from tokens after some blocks."""

    taps: set[int] = set()
    """Indices of the blocks whose tokens ``take`` needs."""

    def take(self, number: int, tokens: TokenStore, first: int, last: int) -> None:
        """Take rows ``first`` to ``last - 1`` after a block, which has mapped all of them; rows
        come in order, from the top.
        """

    def result(self, tokens: TokenStore, bands: Bands) -> Any:
        """Return the output, from the tokens after the last block if needed."""
        raise NotImplementedError


class Pooled(Output):
    """Pooled features, and the logits of a classifier on them."""

    def __init__(self, model: VisionAttnTransformer, *, logits: bool):
        self.model, self.logits = model, logits
        pool = model.attn_pool
        if pool is None and model.global_pool not in STREAMED:
            raise ValueError(
                f"expected global_pool {', '.join(STREAMED)} or map, got {model.global_pool!r}"
            )
        if pool is not None and (
            type(pool) is not AttentionPoolLatent or pool.pos_embed is not None
        ):
            raise ValueError(
                f"{type(pool).__name__} cannot be computed in bands: it pools by a softmax over "
                "all tokens, or with a position for one grid"
            )

    def result(self, tokens: TokenStore, bands: Bands) -> Any:
        """Return features ``[1, D]`` or logits ``[1, num_classes]``."""
        model = self.model
        if model.attn_pool is not None:
            return self._head(self._attended(tokens, bands))
        if model.global_pool == "token":
            return self._head(model.norm(tokens.prefix)[:, 0])
        return self._head(self._features(pools_of(self._parts(tokens, bands))))

    def _head(self, x: Tensor) -> Tensor:
        x = self.model.head_drop(self.model.fc_norm(x))
        return self.model.head(x) if self.logits else x

    def _parts(self, tokens: TokenStore, bands: Bands) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield places and tokens after the final norm of each piece, as ``pools_of`` needs them:
        of patches, and of prefix tokens if they are pooled.
        """
        width, prefix = tokens.layout.grid.width, tokens.layout.num_prefix
        for first, x in tokens.pieces(bands):
            if first is not None or self.model.pool_include_prefix:
                begin = -prefix if first is None else first * width
                places = torch.arange(begin, begin + x.shape[1], device=x.device)
                yield places, self.model.norm(x)[0]

    def _features(self, pools: Pools) -> Tensor:
        """Return the pooled features before their norm, ``[1, D]``."""
        mean = (pools.total / pools.count).to(pools.largest.dtype)
        both = 0.5 * (mean + pools.largest)
        return {"max": pools.largest, "avg": mean, "avgmax": both}[self.model.global_pool][None]

    def _attended(self, tokens: TokenStore, bands: Bands) -> Tensor:
        """Return the features of attention pooling, ``[1, D]``."""
        pool, heads = self.model.attn_pool, (self.model.attn_pool.num_heads, -1)
        q = pool.q_norm(pool.q(pool.latent).unflatten(2, heads).transpose(1, 2))
        found: Tensor | None = None
        for _, y in self._parts(tokens, bands):
            k, v = pool.kv(y[None]).unflatten(2, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
            part = softmax_part(q, pool.k_norm(k), v)
            found = part if found is None else softmax_of([found, part])
        assert found is not None
        x = found[..., :-1].to(pool.latent.dtype).transpose(1, 2).flatten(2)
        x = pool.proj_drop(pool.proj(x))
        if pool.mlp is not None:
            x = x + pool.mlp(pool.norm(x))
        return x[:, 0] if pool.pool == "token" else x.mean(1) if pool.pool == "avg" else x


class Evidenced(Pooled):
    """The attribution of a class, as in ``find_attribution``, without the gradient."""

    def __init__(self, model: VisionAttnTransformer, target: int | None):
        super().__init__(model, logits=True)
        self.target = target

    def result(self, tokens: TokenStore, bands: Bands) -> Attribution:
        """Return the attribution."""
        logits: Tensor = super().result(tokens, bands)[0]
        target = checked_target(logits, self.target)
        weights = contrast(self.model, logits, target).double()
        margin = float((logits.double() @ weights).detach())
        known, parts = (logits, target, margin), partial(self._parts, tokens, bands)
        return attributed(self.model, parts, *known, tokens.layout.grid)


class Dense(Output):
    """The last feature map, after the final norm."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, sink: Sink | None):
        self.model, self.grid, self.taps = model, grid, {len(model.blocks) - 1}
        self.writer = MapWriter((model.embed_dim, *grid), weight_like(model).dtype, sink)

    def take(self, number: int, tokens: TokenStore, first: int, last: int) -> None:
        """Write rows of the map."""
        rows = self.model.norm(tokens.read(first, last))[0].unflatten(0, (-1, self.grid.width))
        self.writer.write(first, rows.permute(2, 0, 1))

    def result(self, tokens: TokenStore, bands: Bands) -> Tensor | None:
        """Return the map ``[1, D, H, W]``, or None if it was written to a sink."""
        found = self.writer.finish()
        return None if found is None else found[None]


class Masked(Output):
    """The class of each pixel, or the probabilities of its classes.

    Args:
        model: the segmentation model.
        grid: grid of patches.
        size: height and width of the image in pixels.
        sink: see ``forward_tiled``.
        cells: with several ``head_blocks``, two stores for the logits of cells: each block reads
            the sum of earlier blocks from one and writes its own sum to the other.
        probable: return probabilities.
    """

    def __init__(
        self,
        model: Segmenter,
        grid: Grid,
        size: tuple[int, int],
        sink: Sink | None,
        cells: list[TokenStore] | None,
        *,
        probable: bool,
    ):
        self.model, self.grid, self.cells, self.taps = model, grid, cells, set(model.taken)
        self.convert = probabilities_of if probable else classes_of
        channels, dtype = (model.num_classes, torch.float16) if probable else (1, torch.uint8)
        self.writer = MapWriter((channels, *size), dtype, sink)

    def take(self, number: int, tokens: TokenStore, first: int, last: int) -> None:
        """Add a block's features to the logits of cells; after the last one, write pixels."""
        model, place = self.model, self.model.taken.index(number)
        if self.cells is not None and number != model.taken[-1]:
            store = self.cells[place % 2]
            store.write(first, self._logits(place, tokens, first, last).flatten(2).mT)
            store.flush()
            return
        # The interpolation needs one row on either side.
        above, below = max(0, first - 1), min(self.grid.height, last + 1)
        cells = model.cells_of(self._logits(place, tokens, above, below)).float()
        down, across = model.cells
        height, width = self.writer.shape[1:]
        step = STRIP_PIXELS // (model.num_classes * model.stride**2 * cells.shape[3])
        rows = slice((first - above) * down, (last - above) * down)
        parts = model.strips(cells, rows, max(1, step))
        pixels = torch.cat([self.convert(part[0, :, :, :width]) for part in parts], 1)
        top = first * model.patch_px[0]
        self.writer.write(top, pixels[:, : height - top])

    def _logits(self, place: int, tokens: TokenStore, first: int, last: int) -> Tensor:
        """Return the logits of rows of patches, ``[1, cell_logits, h, W]``, summed over the blocks
        so far, so that no features are kept until the next block.
        """
        model, size = self.model, (last - first, self.grid.width)
        maps = model.backbone.norm(tokens.read(first, last)).mT.unflatten(2, size)
        normed = model.norms[place](maps)
        if self.cells is None:
            return model.head(normed)
        width, last_block = model.backbone.embed_dim, place + 1 == len(model.taken)
        weight = model.head.weight[:, place * width : (place + 1) * width]
        found = nn.functional.conv2d(normed, weight, model.head.bias if last_block else None)
        if place:
            found = found + self.cells[1 - place % 2].read(first, last).mT.unflatten(2, size)
        return found

    def result(self, tokens: TokenStore, bands: Bands) -> Tensor | None:
        """Return the classes, uint8 ``[1, H_px, W_px]``, or the probabilities, float16
        ``[C, H_px, W_px]``; None if they were written to a sink.
        """
        return self.writer.finish()
