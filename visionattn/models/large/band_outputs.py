"""Outputs from tokens that leave the blocks in pieces: pooled features and logits, feature maps,
masks, attributions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from visionattn.layout import Grid
from visionattn.models.attribution import (
    Attribution,
    checked_target,
    contrast,
    described,
    divides,
    shares_of,
)
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.large.attention_of_strips import softmax_of, softmax_part
from visionattn.models.large.source_sink import MapWriter, Sink
from visionattn.models.large.token_store import TokenStore
from visionattn.models.rowwise_support import weight_like
from visionattn.models.segmentation import Segmenter, classes_of, enlarged, probabilities_of

Pieces = Callable[[], Iterable[tuple[int, Tensor]]]
"""Yields all tokens after the last block once more: first row and tokens ``[1, n, D]``."""
STREAMED = ("max", "avg", "avgmax", "token")
STRIP_PIXELS = 1 << 22
"""Number of pixels whose logits are in memory at once."""


class Output:
    """An output computed from tokens as they leave blocks."""

    taps: set[int]
    """Indices of the blocks whose tokens are used."""

    def take(self, number: int, first: int | None, x: Tensor) -> None:
        """Take tokens ``[1, n, D]`` after a block, of rows from ``first`` on; None: the prefix
        tokens, which come first.
        """
        raise NotImplementedError

    def end_band(self) -> None:
        """Handle the end of a band: the tokens so far form whole bands."""

    def result(self, again: Pieces) -> Any:
        """Return the output; ``again`` yields the last tokens once more."""
        raise NotImplementedError


class Pooled(Output):
    """Pooled features, and the logits of a classifier on them."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, *, logits: bool):
        self.model, self.grid, self.logits = model, grid, logits
        self.taps, self.count = {len(model.blocks) - 1}, 0
        self.token = self.largest = self.places = self.total = self.softmax = torch.empty(0)
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

    def take(self, number: int, first: int | None, x: Tensor) -> None:
        """Pool patches, and prefix tokens if requested; keep the first prefix token."""
        y, pool = self.model.norm(x), self.model.attn_pool
        if first is None:
            self.token = y[:, 0]
            if not self.model.pool_include_prefix:
                return
        if pool is not None:
            heads = (-1, pool.num_heads, pool.head_dim)
            k, v = pool.kv(y).unflatten(2, (2, *heads[1:])).permute(2, 0, 3, 1, 4).unbind(0)
            q = pool.q(pool.latent).unflatten(2, heads[1:]).transpose(1, 2)
            part = softmax_part(pool.q_norm(q), pool.k_norm(k), v)
            self.softmax = softmax_of([self.softmax, part]) if self.count else part
        else:
            self._pool(y, -1 if first is None else first * self.grid.width)
        self.count += y.shape[1]

    def _pool(self, y: Tensor, place: int) -> None:
        """Update maximum and sum with tokens; maxima from prefix tokens have place -1."""
        largest, places = y.max(1)
        places = torch.full_like(places, -1) if place < 0 else places + place
        total = y.sum(1, dtype=torch.float64)
        if self.count:
            total = total + self.total
            # The first of equal entries wins, and NaN counts as the largest.
            later = ~(self.largest >= largest) & ~self.largest.isnan()
            largest = torch.where(later, largest, self.largest)
            places = torch.where(later, places, self.places)
        self.largest, self.places, self.total = largest, places, total

    def features(self) -> Tensor:
        """Return the pooled features before their norm, ``[1, D]``."""
        model, pool = self.model, self.model.attn_pool
        if pool is not None:
            x = self.softmax[..., :-1].to(pool.latent.dtype).transpose(1, 2).flatten(2)
            x = pool.proj_drop(pool.proj(x))
            if pool.mlp is not None:
                x = x + pool.mlp(pool.norm(x))
            return x[:, 0] if pool.pool == "token" else x.mean(1) if pool.pool == "avg" else x
        if model.global_pool in ("token", "max"):
            return self.token if model.global_pool == "token" else self.largest
        mean = (self.total / self.count).to(self.largest.dtype)
        return mean if model.global_pool == "avg" else 0.5 * (mean + self.largest)

    def result(self, again: Pieces) -> Any:
        """Return features ``[1, D]`` or logits ``[1, num_classes]``."""
        x = self.model.head_drop(self.model.fc_norm(self.features()))
        return self.model.head(x) if self.logits else x


class Evidenced(Pooled):
    """The attribution of a class, as in ``find_attribution``, without the gradient."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, target: int | None):
        super().__init__(model, grid, logits=True)
        self.target = target

    def result(self, again: Pieces) -> Attribution:
        """Return the attribution."""
        logits: Tensor = super().result(again)[0]
        target = checked_target(logits, self.target)
        weights = contrast(self.model, logits, target).double()
        margin = float((logits.double() @ weights).detach())
        patches, channels, rest = None, None, None
        if divides(self.model):
            patches, channels = self._divided(logits, target, again)
            rest = margin - float(patches.sum())
        known, how = logits.float().cpu(), described(self.model)
        return Attribution(known, target, margin, patches, channels, rest, None, how)

    def _divided(self, logits: Tensor, target: int, again: Pieces) -> tuple[Tensor, Tensor | None]:
        model, mean = self.model, self.total[0] / self.count
        shares = shares_of(model, self.largest[0].double(), mean, logits, target)
        added = torch.zeros(self.grid.num_patches, dtype=torch.float64)
        channels = None
        if model.global_pool != "avg":
            places = self.places[0].cpu()
            patch = places >= 0
            added.index_add_(0, places[patch], shares.of_largest.cpu()[patch])
            channels = torch.bincount(places[patch], minlength=len(added)).unflatten(0, self.grid)
        if model.global_pool != "max":
            width = self.grid.width
            for first, x in again():
                own = (model.norm(x)[0].double() - shares.centre) @ shares.of_mean
                added[first * width : first * width + len(own)] += own.cpu() / self.count
        return added.unflatten(0, self.grid), channels


class Dense(Output):
    """The last feature map, after the final norm."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, sink: Sink | None):
        self.model, self.grid, self.taps = model, grid, {len(model.blocks) - 1}
        self.writer = MapWriter((model.embed_dim, *grid), weight_like(model).dtype, sink)

    def take(self, number: int, first: int | None, x: Tensor) -> None:
        """Take the tokens of rows."""
        if first is not None:
            rows = self.model.norm(x)[0].unflatten(0, (-1, self.grid.width))
            self.writer.take(first, rows.permute(2, 0, 1))

    def end_band(self) -> None:
        """Write the rows taken so far."""
        self.writer.flush()

    def result(self, again: Pieces) -> Tensor | None:
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
        self.waiting: Tensor | None = None
        """Logits of rows of cells not yet completely written, with one row before them."""
        self.next = 0
        """Index of the first row of cells not yet written."""

    def take(self, number: int, first: int | None, x: Tensor) -> None:
        """Add a block's features to the logits of cells."""
        if first is None:
            return
        model, place = self.model, self.model.taken.index(number)
        rows = model.backbone.norm(x)[0].unflatten(0, (-1, self.grid.width))
        normed = model.norms[place](rows.permute(2, 0, 1)[None])
        if self.cells is None:
            logits = model.head(normed).permute(0, 2, 3, 1)
        else:
            # A sum over blocks, so that no features are kept until the next block.
            width, last = model.backbone.embed_dim, number == model.taken[-1]
            weight = model.head.weight[:, place * width : (place + 1) * width]
            found = nn.functional.conv2d(normed, weight, model.head.bias if last else None)
            logits = found.permute(0, 2, 3, 1)
            if place:
                before = self.cells[1 - place % 2].read(first, first + logits.shape[1])
                logits = logits + before.unflatten(1, logits.shape[1:3])
            if not last:
                self.cells[place % 2].write(first, logits.flatten(1, 2))
                return
        # ``[r, W, classes * cells]`` to ``[classes, r * down, W * across]``.
        parts = logits[0].unflatten(2, (model.num_classes, *model.cells))
        self._take_cells(parts.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).float())

    def _take_cells(self, rows: Tensor) -> None:
        self.waiting = rows if self.waiting is None else torch.cat([self.waiting, rows], 1)
        first = max(0, self.next - 1)
        total = self.grid.height * self.model.cells[0]
        known = first + self.waiting.shape[1]
        # The interpolation needs one row of cells on either side.
        until = known if known == total else known - 1
        stride, width = self.model.stride, self.waiting.shape[2]
        step = max(1, STRIP_PIXELS // max(1, stride * stride * width * self.model.num_classes))
        for begin in range(self.next, until, step):
            end = min(until, begin + step)
            above, below = max(0, begin - 1), min(total, end + 1)
            part = enlarged(self.waiting[None, :, above - first : below - first], stride)
            skip = (begin - above) * stride
            part = part[0, :, skip : skip + (end - begin) * stride]
            height, columns = self.writer.shape[1:]
            part = part[:, : max(0, height - begin * stride), :columns]
            self.writer.take(begin * stride, self.convert(part))
        self.waiting = self.waiting[:, max(0, until - 1) - first :].clone()
        self.next = max(self.next, until)

    def end_band(self) -> None:
        """Write the rows taken so far."""
        for cells in self.cells or ():
            cells.flush()
        self.writer.flush()

    def result(self, again: Pieces) -> Tensor | None:
        """Return the classes, uint8 ``[1, H_px, W_px]``, or the probabilities, float16
        ``[C, H_px, W_px]``; None if they were written to a sink.
        """
        return self.writer.finish()
