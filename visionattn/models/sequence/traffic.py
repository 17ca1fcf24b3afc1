"""How many bytes the processes that share an image send for each layer, and how many a ring of
softmax attention would.

These are counts by formula, of what the collectives of ``attention.py`` are given, forward. A
backward pass sends as many again.
"""

from dataclasses import dataclass

from torch import nn

from visionattn.layers import Attention
from visionattn.layout import Grid
from visionattn.models.sequence.share import cut_rows
from visionattn.ops.taylorshift.features import num_features

FLOAT32 = 4


@dataclass(frozen=True)
class Traffic:
    """What one rank sends for a layer.

    Args:
        summed_bytes: what it gives to the sum over all ranks: state, and sums of lines.
        exchanged_bytes: what it sends the other ranks: halo rows and sums of far rows.
        ranks: n.
    """

    summed_bytes: int
    exchanged_bytes: int
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """Return what leaves the rank, where a sum over n ranks passes 2 (n - 1) / n of a tensor
        on, as rings of NCCL and gloo do.
        """
        return 2 * self.summed_bytes * (self.ranks - 1) // self.ranks + self.exchanged_bytes


def ring_bytes(tokens: int, dim: int, ranks: int, element_bytes: int = FLOAT32) -> int:
    """Return what a rank sends for a layer of ring attention, in which the keys and values of all
    others pass through each rank: 2 N D (n - 1) / n numbers.

    Source: Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers".
    """
    return 2 * tokens * dim * element_bytes * (ranks - 1) // ranks


def state_numbers(layer: Attention) -> int:
    """Return how many numbers the state of a layer has, for one image; 0 for windows."""
    d, heads = layer.head_dim, layer.num_heads
    if layer.attention == "kernelized":
        projection = getattr(layer.feature_map, "projection", None)
        features = d if projection is None else projection.shape[0]
        return heads * (features * d + features)
    if layer.attention == "taylorshift":
        # Products, plain and packed, with values; the matrix of the mass; sums of keys and values.
        return heads * (num_features(d) * d + 2 * d * d + 2 * d)
    return 0


def traffic_of(
    layer: Attention, grid: Grid, ranks: int, *, rank: int = 0, num_prefix: int = 1, images: int = 1
) -> Traffic:
    """Return what a rank sends for a layer of one of this package's linear attentions, in float32.

    Args:
        layer: of kernelized attention or TaylorShift; of a model, ``model.blocks[0].attn``.
        grid: patches of the image.
        ranks: n, the processes that share it.
        rank: which of them.
        num_prefix: P.
        images: of a batch.

    Raises:
        ValueError: a layer of windows, which sends rows by where its windows begin; fewer rows than
            ranks.
    """
    if not layer.kind.states:
        raise ValueError(f"attention={layer.attention!r} has no state; wanted a linear attention")
    cuts, dim = cut_rows(grid.height, ranks), layer.num_heads * layer.head_dim
    own = range(cuts[rank], cuts[rank + 1])
    kind = None if layer.relative is None else layer.relative.kind
    summed, exchanged = state_numbers(layer), 0
    if layer.centre_keys:
        summed += dim
    if kind == "axial":
        summed += (grid.height + grid.width) * dim
    # Halo rows that come one by one, and beyond which rows or patches come as a sum.
    side = 0 if layer.value_conv is None else layer.value_conv.reach
    reach = 0 if kind in (None, "axial") else max(0, layer.relative.horizon - 1)
    halo = max(side, -(-reach // grid.width) if kind == "flat" else reach)
    for other in range(ranks):
        if other == rank:
            continue
        first, last = cuts[other], cuts[other + 1]
        near = [row for row in own if first - halo <= row < last + halo]
        exchanged += len(near) * grid.width * dim
        if kind == "joint" and any(not first - reach <= row < last + reach for row in own):
            exchanged += grid.width * dim
        if kind == "flat":
            before = own.start * grid.width < first * grid.width - reach
            behind = own.stop * grid.width > last * grid.width + reach
            exchanged += dim if before or behind else 0
    scale = images * FLOAT32 if ranks > 1 else 0
    return Traffic(summed * scale, exchanged * scale, ranks)


def table(model: nn.Module, sides_px: list[int], ranks: list[int]) -> list[dict[str, int]]:
    """Return rows that compare a layer of a model with one of ring attention, for square images:
    bytes that the rank which sends most sends forward, for one image in float32.
    """
    rows = []
    layer, patch = model.blocks[0].attn, model.patch_embed.patch_size
    for side in sides_px:
        grid = Grid(side // patch[0], side // patch[1])
        tokens = model.num_prefix_tokens + grid.num_patches
        for number in ranks:
            each = [traffic_of(layer, grid, number, rank=rank) for rank in range(number)]
            most = max(each, key=lambda of: of.sent_bytes)
            ring = ring_bytes(tokens, layer.num_heads * layer.head_dim, number)
            rows.append(
                dict(
                    side_px=side,
                    ranks=number,
                    summed_bytes=most.summed_bytes,
                    exchanged_bytes=most.exchanged_bytes,
                    sent_bytes=most.sent_bytes,
                    ring_bytes=ring,
                )
            )
    return rows
