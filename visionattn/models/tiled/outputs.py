"""What becomes of the tokens behind the last block, as they come in pieces: pooled features and
logits, maps, classes of pixels, evidence.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from visionattn.layout import Grid
from visionattn.models.attribution import Attribution, contrast, described, divides, shares_of
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.rowwise import weight_like
from visionattn.models.segmentation import IGNORED, Segmenter, enlarged
from visionattn.models.tiled.ends import Sink
from visionattn.models.tiled.softmax import RunningSoftmax
from visionattn.models.tiled.stores import Store

Pieces = Callable[[], Iterable[tuple[int, Tensor]]]
"""Gives all tokens behind the last block once more: rows and tokens ``[1, n, D]``."""
STREAMED = ("max", "avg", "avgmax", "token")
STRIP_PIXELS = 1 << 22
"""Pixels that have logits at once."""


class Output:
    """Something that is made of tokens ``[1, n, D]`` as they leave blocks."""

    def taps(self) -> set[int]:
        """Return the numbers of the blocks whose tokens are taken."""
        raise NotImplementedError

    def take_prefix(self, number: int, x: Tensor) -> None:
        """Take the prefix tokens ``[1, P, D]`` behind a block."""

    def take(self, number: int, first: int, x: Tensor) -> None:
        """Take the tokens of rows from ``first`` on, behind a block."""
        raise NotImplementedError

    def end_band(self, number: int) -> None:
        """Hear that the tokens so far are those of a whole band."""

    def replay(self, number: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Take tokens behind a block that an earlier pass had taken before it was stopped: a map
        may have lost their rows since.
        """

    def result(self, again: Pieces) -> Any:
        """Return what came of it."""
        raise NotImplementedError

    def sums(self) -> dict[str, Tensor]:
        """Return what was gathered, by name, to be kept in a file."""
        return {}

    def restore(self, sums: dict[str, Tensor]) -> None:
        """Take up what ``sums`` returned."""


class Pooled(Output):
    """Pooled features, and the logits of a classifier on them."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, *, logits: bool):
        self.model, self.grid, self.logits = model, grid, logits
        pool = model.attn_pool
        if pool is None and model.global_pool not in STREAMED:
            raise ValueError(
                f"global_pool {model.global_pool!r} makes no features of an image; wanted "
                f"{', '.join(STREAMED)} or map"
            )
        if pool is not None and (
            type(pool) is not AttentionPoolLatent or pool.pos_embed is not None
        ):
            raise ValueError(
                f"{type(pool).__name__} pools by a softmax among all tokens, or with a position of "
                "one grid; it cannot be computed in bands"
            )
        self.gathered: dict[str, Tensor] = {}
        self.softmax: RunningSoftmax = RunningSoftmax()

    def taps(self) -> set[int]:
        """Return the last block."""
        return {len(self.model.blocks) - 1}

    def take_prefix(self, number: int, x: Tensor) -> None:
        """Pool the prefix tokens where that is asked for, and keep the first."""
        y = self.model.norm(x)
        self.gathered["token"] = y[:, 0]
        if self.model.pool_include_prefix:
            self._pool(y)

    def take(self, number: int, first: int, x: Tensor) -> None:
        """Pool the tokens of rows."""
        self._pool(self.model.norm(x), first * self.grid.width)

    def _pool(self, y: Tensor, place: int | None = None) -> None:
        pool = self.model.attn_pool
        if pool is not None:
            heads = (-1, pool.num_heads, pool.head_dim)
            k, v = pool.kv(y).unflatten(2, (2, *heads[1:])).permute(2, 0, 3, 1, 4).unbind(0)
            q = pool.q(pool.latent).unflatten(2, heads[1:]).transpose(1, 2)
            self.softmax.add(pool.q_norm(q), pool.k_norm(k), v)
            return
        largest, places = y.max(1)
        places = places + place if place is not None else torch.full_like(places, -1)
        total = y.sum(1, dtype=torch.float64)
        if "largest" in self.gathered:
            before = self.gathered["largest"]
            # Of equal entries the first counts, and NaN counts as the largest.
            later = ~(before >= largest) & ~before.isnan()
            largest = torch.where(later, largest, before)
            places = torch.where(later, places, self.gathered["places"])
            total = total + self.gathered["total"]
        self.gathered |= {"largest": largest, "places": places, "total": total}

    def features(self) -> Tensor:
        """Return the pooled features before their norm, ``[1, D]``."""
        model, got = self.model, self.gathered
        pool = model.attn_pool
        if pool is not None:
            x = self.softmax.mean().to(pool.latent.dtype).transpose(1, 2).flatten(2)
            x = pool.proj_drop(pool.proj(x))
            if pool.mlp is not None:
                x = x + pool.mlp(pool.norm(x))
            return x[:, 0] if pool.pool == "token" else x.mean(1) if pool.pool == "avg" else x
        if model.global_pool == "token":
            return got["token"]
        if model.global_pool == "max":
            return got["largest"]
        mean = (got["total"] / self.pooled_tokens).to(got["largest"].dtype)
        return mean if model.global_pool == "avg" else 0.5 * (mean + got["largest"])

    @property
    def pooled_tokens(self) -> int:
        """How many tokens are pooled."""
        prefix = self.model.num_prefix_tokens if self.model.pool_include_prefix else 0
        return self.grid.num_patches + prefix

    def result(self, again: Pieces) -> Any:
        """Return features ``[1, D]`` or logits ``[1, num_classes]``."""
        x = self.model.head_drop(self.model.fc_norm(self.features()))
        return self.model.head(x) if self.logits else x

    def sums(self) -> dict[str, Tensor]:
        """Return the poolings so far."""
        running = {f"softmax.{i}": x for i, x in enumerate(self.softmax.sums)}
        return self.gathered | running

    def restore(self, sums: dict[str, Tensor]) -> None:
        """Take them up."""
        self.softmax.sums = [sums.pop(f"softmax.{i}") for i in range(3) if f"softmax.{i}" in sums]
        self.gathered = sums


class Evidenced(Pooled):
    """What speaks for a class: what ``find_attribution`` finds, without the gradient."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, target: int | None):
        super().__init__(model, grid, logits=True)
        self.target = target

    def result(self, again: Pieces) -> Attribution:
        """Return the evidence."""
        logits: Tensor = super().result(again)[0]
        if not logits.isfinite().all():
            raise ValueError("outputs are not finite")
        target = int(logits.argmax()) if self.target is None else self.target
        if not 0 <= target < len(logits):
            raise ValueError(f"there is no class {target}; the classes are 0 to {len(logits) - 1}")
        margin = float((logits.double() @ contrast(logits, target).double()).detach())
        patches, channels, rest = None, None, None
        if divides(self.model):
            patches, channels = self._divided(logits, target, again)
            rest = margin - float(patches.sum())
        return Attribution(
            logits.float().cpu(),
            target,
            margin,
            patches,
            channels,
            rest,
            None,
            described(self.model),
        )

    def _divided(self, logits: Tensor, target: int, again: Pieces) -> tuple[Tensor, Tensor | None]:
        model, got = self.model, self.gathered
        largest, mean = got["largest"][0].double(), got["total"][0] / self.pooled_tokens
        shares = shares_of(model, largest, mean, logits, target)
        added = torch.zeros(self.grid.num_patches, dtype=torch.float64)
        channels = None
        if model.global_pool != "avg":
            places = got["places"][0].cpu()
            # What prefix tokens win, where they are pooled, is of no patch.
            patch = places >= 0
            added.index_add_(0, places[patch], shares.of_largest.cpu()[patch])
            channels = torch.bincount(places[patch], minlength=len(added)).unflatten(0, self.grid)
        if model.global_pool != "max":
            width = self.grid.width
            for first, x in again():
                own = (model.norm(x)[0].double() - shares.centre) @ shares.of_mean
                added[first * width : first * width + len(own)] += own.cpu() / self.pooled_tokens
        return added.unflatten(0, self.grid), channels


class Dense(Output):
    """The last feature map, after the final norm."""

    def __init__(self, model: VisionAttnTransformer, grid: Grid, sink: Sink | None):
        self.model, self.grid = model, grid
        self.writer = Writer((model.embed_dim, *grid), weight_like(model).dtype, sink)

    def taps(self) -> set[int]:
        """Return the last block."""
        return {len(self.model.blocks) - 1}

    def take(self, number: int, first: int, x: Tensor) -> None:
        """Take the tokens of rows."""
        rows = self.model.norm(x)[0].unflatten(0, (-1, self.grid.width))
        self.writer.take(first, rows.permute(2, 0, 1))

    def end_band(self, number: int) -> None:
        """Write a band."""
        self.writer.flush()

    def replay(self, number: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Write the rows once more."""
        for first, x in pieces:
            self.take(number, first, x)
            self.writer.flush()

    def result(self, again: Pieces) -> Tensor | None:
        """Return the map ``[1, D, H, W]``, or None where it was written."""
        return self.writer.finish()


class Masked(Output):
    """The class of each pixel."""

    def __init__(
        self, model: Segmenter, grid: Grid, size: tuple[int, int], sink: Sink | None, cells: Store
    ):
        self.model, self.grid, self.cells = model, grid, cells
        self.writer = Writer((1, *size), torch.uint8, sink)
        self.waiting: Tensor | None = None
        """Logits of rows of cells that are not all written, with one before them."""
        self.next = 0
        """The first row of cells that is not written."""

    def taps(self) -> set[int]:
        """Return the blocks whose features the head takes."""
        return set(self.model.taken)

    def take(self, number: int, first: int, x: Tensor) -> None:
        """Add what the features of a block give to the logits of cells."""
        place = self.model.taken.index(number)
        width = self.model.backbone.embed_dim
        rows = self.model.backbone.norm(x)[0].unflatten(0, (-1, self.grid.width))
        normed = self.model.norms[place](rows.permute(2, 0, 1)[None])
        if len(self.model.taken) == 1:
            logits = self.model.head(normed)[0].permute(1, 2, 0)
        else:
            # A sum over blocks, so that no features wait for those of the next block.
            head = self.model.head
            weight = head.weight[:, place * width : (place + 1) * width]
            last = number == self.model.taken[-1]
            bias = head.bias if last else None
            logits = nn.functional.conv2d(normed, weight, bias)[0].permute(1, 2, 0)
            if place:
                logits = logits + self.cells.read(first, first + len(logits))
            if not last:
                self.cells.write(first, logits)
                return
        down, across = self.model.cells
        # ``[r, W, classes * cells]`` to ``[classes, r * down, W * across]``.
        parts = logits.unflatten(2, (self.model.num_classes, down, across))
        rows = parts.permute(2, 0, 3, 1, 4).flatten(3, 4).flatten(1, 2).float()
        self._take_cells(rows)

    def _take_cells(self, rows: Tensor) -> None:
        self.waiting = rows if self.waiting is None else torch.cat([self.waiting, rows], 1)
        first = max(0, self.next - 1)
        total = self.grid.height * self.model.cells[0]
        known = first + self.waiting.shape[1]
        # A row of cells on either side has a part in the interpolation.
        until = known if known == total else known - 1
        self._write_pixels(first, until, total)
        self.waiting = self.waiting[:, max(0, until - 1) - first :].clone()
        self.next = max(self.next, until)

    def _write_pixels(self, first: int, until: int, total: int) -> None:
        assert self.waiting is not None
        stride, width = self.model.stride, self.waiting.shape[2]
        step = max(1, STRIP_PIXELS // max(1, stride * stride * width * self.model.num_classes))
        for begin in range(self.next, until, step):
            end = min(until, begin + step)
            above, below = max(0, begin - 1), min(total, end + 1)
            part = enlarged(self.waiting[None, :, above - first : below - first], stride)
            skip = (begin - above) * stride
            part = part[:, :, skip : skip + (end - begin) * stride]
            values = part.argmax(1).to(torch.uint8)
            values = values.masked_fill_(~part.isfinite().all(1), IGNORED)
            height, columns = self.writer.shape[1:]
            values = values[:, : max(0, height - begin * stride), :columns]
            self.writer.take(begin * stride, values)

    def end_band(self, number: int) -> None:
        """Write a band."""
        if number == self.model.taken[-1]:
            self.writer.flush()

    def replay(self, number: int, pieces: Iterable[tuple[int, Tensor]]) -> None:
        """Write the rows once more, from the first one on."""
        if number == self.model.taken[-1]:
            self.waiting, self.next = None, 0
            for first, x in pieces:
                self.take(number, first, x)
                self.writer.flush()

    def result(self, again: Pieces) -> Tensor | None:
        """Return the classes, uint8 ``[1, H_px, W_px]``, or None where they were written."""
        found = self.writer.finish()
        return None if found is None else found[0]

    def sums(self) -> dict[str, Tensor]:
        """Return what waits."""
        if self.waiting is None:
            return {}
        return {"waiting": self.waiting, "next": torch.tensor(self.next)}

    def restore(self, sums: dict[str, Tensor]) -> None:
        """Take it up."""
        if sums:
            self.waiting = sums["waiting"]
            self.next = int(sums["next"])


class Writer:
    """Rows of a map ``[C, H, W]`` that go to a sink band by band, or stay in memory."""

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype, sink: Sink | None):
        self.shape, self.sink = shape, sink
        # Half precisions that numpy does not know are written in float32.
        self.dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        self.whole = torch.empty(shape, dtype=self.dtype) if sink is None else None
        self.first, self.parts = 0, list[Tensor]()
        if sink is not None:
            sink.begin(shape, np.dtype(str(self.dtype).removeprefix("torch.")))

    def take(self, first: int, rows: Tensor) -> None:
        """Take rows ``[C, h, W]``, the next ones."""
        rows = rows.to("cpu", self.dtype)
        if self.whole is not None:
            self.whole[:, first : first + rows.shape[1]] = rows
            return
        if not self.parts:
            self.first = first
        self.parts.append(rows)

    def flush(self) -> None:
        """Write what came."""
        if self.sink is not None and self.parts:
            self.sink.write(self.first, torch.cat(self.parts, 1).contiguous().numpy())
            self.parts = []

    def finish(self) -> Tensor | None:
        """Return the map ``[1, C, H, W]``, or finish the sink."""
        if self.sink is None:
            assert self.whole is not None
            return self.whole[None]
        self.sink.finish()
        return None
