"""One image on several processes: each computes the tokens of some rows of patches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.models import checkpoint
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from visionattn.layers import Attention, Block
from visionattn.layout import TokenLayout
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.large.attention_of_strips import (
    Around,
    StripAttention,
    softmax_of,
    softmax_part,
)
from visionattn.models.large.collectives import exchanged, largest, summed
from visionattn.models.patches import check_image_size, grid_of
from visionattn.models.pyramid import PyramidTransformer
from visionattn.models.rowwise_support import check_rowwise
from visionattn.ops.attention_sums import accumulation_dtype, drop_values
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.relative_position import Flat, RelativePosition
from visionattn.ops.strips import Strip, seen_span


def cut_rows(height: int, ranks: int) -> tuple[int, ...]:
    """Return the first row of each rank, and the end of the last; parts are as equal as whole rows
    allow.

    Raises:
        ValueError: there are fewer rows than ranks.
    """
    if height < ranks:
        raise ValueError(
            f"expected at least {ranks} rows of patches, one per process, got {height} "
            f"row{'s' if height > 1 else ''}; use fewer processes per image, or larger images"
        )
    return tuple(rank * height // ranks for rank in range(ranks + 1))


@dataclass(frozen=True)
class Share:
    """The rows of one rank of a group, and the rows of all others.

    Args:
        layout: layout of the whole image; every rank has the prefix tokens before its own patches.
        cuts: where the rows of each rank begin, and the end of the last.
        rank: index in the group.
        group: the group of processes with the other rows.
    """

    layout: TokenLayout
    cuts: tuple[int, ...]
    rank: int
    group: ProcessGroup

    @property
    def strips(self) -> list[Strip]:
        """The rows of each rank."""
        ends = zip(self.cuts[:-1], self.cuts[1:], strict=True)
        return [Strip(self.layout.grid, first, last) for first, last in ends]

    @property
    def own(self) -> Strip:
        """The rank's own rows."""
        return self.strips[self.rank]

    def counted(self, x: Tensor) -> Tensor:
        """Return the rank's tokens ``[B, h, P + n, c]`` that count in sums over the group: prefix
        tokens count only on the first rank.
        """
        return x[:, :, self.layout.num_prefix :] if self.rank else x

    def rows(self, x: Tensor) -> Tensor:
        """Return the patches of tokens ``[B, h, P + n, c]`` as ``[B, h, rows, W, c]``."""
        return x[:, :, self.layout.num_prefix :].unflatten(2, (-1, self.layout.grid.width))


def rows_around(
    x: Tensor, share: Share, wanted: Sequence[Strip], relative: RelativePosition | None = None
) -> Around:
    """Return a rank's rows with the requested rows around them, in one exchange among all ranks.

    Args:
        x: ``[B, h, rows, W, c]``, the rank's own rows.
        share: the rows of each rank.
        wanted: the rows that each rank requests, including its own.
        relative: for ``Joint`` or ``Flat``, also return the sums of the values beyond the rows that
            a rank sees individually, each from one side.
    """
    me, own, ranks = share.rank, share.own, range(len(wanted))
    places, width = (x.flatten(2, 3), own.grid.width) if isinstance(relative, Flat) else (x, 1)

    def common(asked: Strip, there: Strip) -> tuple[int, int]:
        first = max(asked.first, there.first)
        return first, max(first, min(asked.last, there.last))

    sent: list[list[Tensor]] = [[] for _ in ranks]
    shapes: list[list[Sequence[int]]] = [[] for _ in ranks]
    for rank, there in enumerate(share.strips):
        if rank == me:
            continue
        first, last = common(wanted[rank], own)
        sent[rank].append(x[:, :, first - own.first : last - own.first])
        first, last = common(wanted[me], there)
        shapes[rank].append((*x.shape[:2], last - first, *x.shape[3:]))
        if relative is not None:
            span, begin = seen_span(relative, there), own.first * width
            before, behind = (max(0, end - begin) for end in (span.start, span.stop))
            far = places[:, :, :before] if rank > me else places[:, :, behind:]
            sent[rank].append(far.sum(2))
            shapes[rank].append((*x.shape[:2], *places.shape[3:]))
    found = exchanged(sent, shapes, share.group) if len(ranks) > 1 else [[]]
    values = torch.cat([x if rank == me else found[rank][0] for rank in ranks], 2)
    sums = [
        torch.stack([y for _, y in part]).sum(0) if part and relative is not None else None
        for part in (found[:me], found[me + 1 :])
    ]
    return Around(wanted[me], values, None, *sums)


def attention_of_rows(attn: Attention, x: Tensor, share: Share) -> Tensor:
    """Return a layer's output for the tokens of a rank, ``[B, P + n, D]``, as ``Attention``
    computes it for the whole image.
    """
    strips, own, group = StripAttention(attn, share.layout), share.own, share.group
    prefix, wide = share.layout.num_prefix, accumulation_dtype(x)
    q, k, v = attn.heads(x)
    dtype = v.dtype
    if attn.centre_keys:
        total = share.counted(k).sum(2, keepdim=True, dtype=wide)
        k = k - (summed([total], group)[0] / share.layout.num_tokens).to(k.dtype)
    dropped = _dropped(v, attn.attn_drop.p if attn.training else 0.0, share)
    of_prefix, counted = [y[:, :, :prefix] for y in (q, k, dropped)], share.counted(dropped)
    with without_autocast(q):
        rows = share.rows(dropped) if strips.windows else share.rows(dropped).to(wide)
        sums = strips.sums(share.counted(k), counted, rows, own.first)
        sums = dict(zip(sums, summed(list(sums.values()), group), strict=True))
        if strips.windows and prefix:
            part = softmax_part(of_prefix[0], share.counted(k), counted)
            # One slot per rank, and one sum over all ranks: every rank gets the parts of the
            # others.
            parts = [part * (rank == share.rank) for rank in range(len(share.strips))]
            sums["softmax"] = softmax_of(summed([torch.stack(parts)], group)[0].unbind(0))
        around = None
        wanted = [strips.rows_around(strip) for strip in share.strips]
        if strips.windows:
            both = rows_around(torch.cat([share.rows(k), rows], 4), share, wanted)
            keys, values = both.values.split(k.shape[3], 4)
            around = both._replace(keys=keys, values=values)
        elif strips.sees_rows:
            around = rows_around(rows, share, wanted, strips.relative if strips.has_far else None)
    out = strips.of_patches(q[:, :, prefix:], own, sums, around, of_prefix).to(dtype)
    if strips.reach:
        if dropped is not v:
            wanted = [strip.with_halo(strips.reach) for strip in share.strips]
            around = rows_around(share.rows(v), share, wanted)
        out = out + strips.convolved(own, around, dtype)
    if prefix:
        out = torch.cat([strips.of_prefix(of_prefix[0], sums).to(dtype), out], 2)
    return attn.project(out.transpose(1, 2).reshape(x.shape), x)


def _dropped(v: Tensor, value_drop: float, share: Share) -> Tensor:
    """Drop rows of values as ``drop_values`` does: the same prefix tokens on all ranks, different
    patches on each.

    The generators of all ranks must be in the same state.
    """
    if not value_drop:
        return v
    seed = int(torch.randint(2**62, ()))
    own = torch.Generator(v.device).manual_seed(seed + share.rank)
    prefix, patches = v.tensor_split([share.layout.num_prefix], 2)
    return torch.cat([drop_values(prefix, value_drop), drop_values(patches, value_drop, own)], 2)


class RowParallel(nn.Module):
    """A model that computes some rows of each image, in a group of processes with the other rows,
    and returns the logits of the whole image on every process.

    Values equal the model on one process, up to rounding. Gradients are of the sum of the losses of
    all ranks: if each has the loss of the whole image, the mean of the gradients over the ranks,
    which DDP computes, is the gradient of the image's loss.

    Prefix tokens are on all ranks. Random draws must be the same on all of them, because stochastic
    depth drops whole images: call ``torch.manual_seed`` with the same number before each step.
    Dropped values (``attn_drop_rate``) are drawn separately for each rank's patches.

    Args:
        model: the whole model on each rank, with the same weights; it keeps its parameters.
        group: the ranks.

    Raises:
        ValueError: see ``parallelize``.
    """

    def __init__(self, model: VisionAttnTransformer, group: ProcessGroup):
        super().__init__()
        check_model(model)
        self.model, self.group = model, group

    @property
    def _ranks(self) -> int:
        return distributed.get_world_size(self.group)

    def share(self, height: int, width: int, parts: Sequence[int] | None = None) -> Share:
        """Return the rows of patches of this rank for images of this size.

        Args:
            height, width: of the image, in pixels.
            parts: rows of pixels of each rank; None: divided as by ``own_rows``.

        Raises:
            ValueError: not a whole number of patches, fewer rows than ranks, or parts that do not
                begin and end at patches.
        """
        check_image_size(self.model.patch_embed, height, width)
        patch = self.model.patch_embed.patch_size
        grid = grid_of((height, width), patch)
        cuts = cut_rows(grid.height, self._ranks)
        if parts is not None:
            if min(parts) < 1 or any(part % patch[0] for part in parts[:-1]):
                raise ValueError(
                    f"expected whole patches of {patch[0]} rows on each process, got "
                    f"{', '.join(map(str, parts))} rows of pixels; use a height of whole patches "
                    "for each process"
                )
            cuts = tuple(-(-sum(parts[:i]) // patch[0]) for i in range(len(parts) + 1))
        layout = TokenLayout(self.model.num_prefix_tokens, grid)
        return Share(layout, cuts, distributed.get_rank(self.group), self.group)

    def own_rows(self, height: int) -> slice:
        """Return the rows of pixels that this rank needs of images of this height in pixels."""
        patch, rank = self.model.patch_embed.patch_size[0], distributed.get_rank(self.group)
        cuts = cut_rows(-(-height // patch), self._ranks)
        return slice(cuts[rank] * patch, min(height, cuts[rank + 1] * patch))

    def forward_features(self, x: Tensor, height: int | None = None) -> Tensor:
        """Return the normalized tokens of this rank, ``[B, P + n, D]``; see ``forward`` for the
        arguments.
        """
        if hasattr(x, "placements"):
            x, share = self._sharded(x)
        elif height is None:
            share = self.share(*x.shape[2:])
            x = x[:, :, self.own_rows(x.shape[2])]
        else:
            share, rows = self.share(height, x.shape[3]), self.own_rows(height)
            if x.shape[2] != rows.stop - rows.start:
                raise ValueError(
                    f"expected {rows.stop - rows.start} rows of pixels on rank {share.rank} (rows "
                    f"{rows.start} to {rows.stop - 1} of {height}), got {x.shape[2]}"
                )
        x = self._embedded(x, share)
        again = self.model.grad_checkpointing and torch.is_grad_enabled()
        for block in self.model.blocks:
            given = block, x, share
            x = checkpoint(block_of_rows, *given) if again else block_of_rows(*given)
        return self.model.norm(x)

    def _sharded(self, x: Any) -> tuple[Tensor, Share]:
        """Return this rank's rows of pixels of images that are already divided, and the shares of
        all ranks.
        """
        placed, ranks = tuple(x.placements), self._ranks
        if len(placed) != 1 or not placed[0].is_shard(2) or x.device_mesh.size() != ranks:
            raise ValueError(
                f"expected images divided by rows, Shard(2), among {ranks} processes, got "
                f"{list(placed)} among {x.device_mesh.size()}"
            )
        own = x.to_local()
        # Each kind of sharded tensor splits and reports its parts in its own way, so exchange the
        # heights.
        parts = [own.new_zeros(ranks, dtype=torch.float64)]
        parts[0][distributed.get_rank(self.group)] = own.shape[2]
        heights = [int(part) for part in summed(parts, self.group)[0].tolist()]
        return own, self.share(sum(heights), own.shape[3], heights)

    def _embedded(self, x: Tensor, share: Share) -> Tensor:
        """Return the tokens of this rank's rows of pixels ``[B, C, h_px, W_px]``."""
        model, embed, own = self.model, self.model.patch_embed, share.own
        x = embed.embed(x).flatten(1, 2)
        if model.pos_embed is not None:
            width = own.grid.width
            x = x + model.patch_position(own.grid)[:, own.first * width : own.last * width]
        return model.norm_pre(model.pos_drop(model.with_prefix(x)))

    def pooled(self, x: Tensor) -> Tensor:
        """Return the features of whole images, ``[B, D]``, from this rank's tokens."""
        model, how = self.model, self.model.global_pool
        if how == "token":
            return x[:, 0]
        number, prefix = distributed.get_rank(self.group), model.num_prefix_tokens
        # Pooled prefix tokens come from one rank only, so that they count once.
        own = x if model.pool_include_prefix and number == 0 else x[:, prefix:]
        found = []
        if how in ("max", "avgmax"):
            found.append(largest(own, self.group))
        if how in ("avg", "avgmax"):
            wide = accumulation_dtype(x)
            count = x.new_full((1,), own.shape[1], dtype=wide)
            total, count = summed([own.sum(1, dtype=wide), count], self.group)
            found.append((total / count.detach()).to(x.dtype))
        return found[0] if len(found) == 1 else 0.5 * (found[0] + found[1])

    def forward(
        self, x: Tensor, height: int | None = None, *, sizes: Tensor | None = None
    ) -> Tensor:
        """Turn images into logits ``[B, num_classes]``, the same on all ranks.

        Args:
            x: ``[B, C, H_px, W_px]``, the same on all ranks; or, with ``height``, only the rank's
                own rows of pixels (``own_rows``); or a ``DTensor`` divided among the ranks by rows
                (``Shard(2)``), in whole patches. Any object with its ``placements``,
                ``device_mesh`` and ``to_local`` works, such as the ``ShardTensor`` of PhysicsNeMo.
            height: H_px, if x holds the rank's own rows.
            sizes: None; images that do not fill their canvas are refused.

        Raises:
            ValueError: an image that is not a whole number of patches or has fewer rows of patches
                than ranks; ``sizes`` given; in training, dropout of single token entries
                (``pos_drop_rate``, ``proj_drop_rate``).
        """
        if sizes is not None:
            raise ValueError(
                "one image on several processes must fill its canvas, got padding; use fit "
                "native, stretch or crop"
            )
        model = self.model
        if self.training:
            check_dropout(model)
        x = model.fc_norm(self.pooled(self.forward_features(x, height)))
        return model.head(model.head_drop(x))


def block_of_rows(block: Block, x: Tensor, share: Share) -> Tensor:
    """Map the tokens of a rank, ``[B, P + rows * W, D]``, as ``Block`` does for an image."""
    return block.added(x, attention_of_rows(block.attn, block.norm1(x), share))


def parallelize(
    model: VisionAttnTransformer, mesh: DeviceMesh | ProcessGroup | None = None
) -> RowParallel:
    """Divide each image by rows of patches among the processes of a group.

    Args:
        model: a model of this package, whole on each process and with the same weights.
        mesh: the processes that share an image: a one-dimensional ``DeviceMesh``, such as
            ``mesh["sequence"]`` of a two-dimensional one, or a process group; None: all processes.

    Returns:
        A module with the model's parameters. It accepts whole images or a process's own rows, and
        returns the model's logits on each process. It supports training, under DDP over all
        processes of both dimensions, and ``torch.inference_mode()``.

    Raises:
        ValueError: there is no process group, the mesh has several dimensions, or the model has
            parts that need all tokens on one process: softmax blocks, ``feature_map="softmax"``,
            ``form="direct"``, dropped patches, attention pooling, a pyramid or a segmentation head.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        raise ValueError(
            "no process group; start the program with torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                "mesh: expected one dimension, the processes that share an image, got "
                f"{mesh.mesh_dim_names or mesh.ndim}; pass one of them, e.g. mesh['sequence']"
            )
        mesh = mesh.get_group()
    # DDP sums gradients among all processes while a backward pass exchanges rows: separate groups
    # keep these messages apart.
    apart = mesh is None or mesh is distributed.group.WORLD
    return RowParallel(model, distributed.new_group() if apart else mesh)


def refused(why: str) -> ValueError:
    """Return the error for a model that cannot be divided."""
    return ValueError(f"one image on several processes: {why}")


def check_model(model: nn.Module) -> None:
    """Raise ValueError if the tokens of a model cannot be divided by rows among processes."""
    if not isinstance(model, VisionAttnTransformer) or isinstance(model, PyramidTransformer):
        raise refused(
            f"expected a classification model of this package, got {type(model).__name__}; run "
            "segmentation models and pyramids on one process"
        )
    pool = model.global_pool
    if model.attn_pool is not None or pool not in ("max", "avg", "avgmax", "token"):
        raise refused(f"global_pool={pool!r} sees all tokens; expected max, avg, avgmax or token")
    if not isinstance(model.patch_drop, nn.Identity):
        raise refused("patch_drop_rate would drop parts of rows; remove it")
    try:
        check_rowwise(model)
    except ValueError as error:
        raise refused(str(error)) from error
    if any(block.attn.form == "direct" for block in model.blocks):
        raise refused('form="direct" needs all tokens; use "auto"')


def check_dropout(model: nn.Module) -> None:
    """Raise ValueError if a model in training would drop different entries of the prefix tokens on
    each process.
    """
    for name, module in model.named_modules():
        # The head's dropout applies to whole images, and values have their own draws.
        shared = name.endswith(("head_drop", "attn_drop"))
        if isinstance(module, nn.Dropout) and module.p and not shared:
            raise refused(
                f"{name} would drop different entries of prefix tokens on each process; set "
                "pos_drop_rate and proj_drop_rate to 0"
            )
