"""Attribution of an output: the contribution of each patch through the pooling, the gradient at
each pixel, attention weights, and principal components of the features.

Everything works on one image at a time, in time and memory linear in its patches. The module reads
no files and draws nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from timm.layers import RmsNorm
from torch import Tensor, nn

from visionattn.layers import Attention
from visionattn.layout import Grid
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.patch_heads import PatchClassifier
from visionattn.models.patches import grid_of
from visionattn.models.segmentation import Segmenter
from visionattn.ops.attention_rows import AttentionRows

POOLED = {
    "max": "each channel of the pooled features comes from the patch where it is largest, "
    "the winner",
    "avg": "the pooled features are the mean of all patches",
    "avgmax": "the pooled features are half the mean of all patches, and half the maximum over "
    "patches",
}
"""Poolings whose result can be divided among patches, and a description of how."""
NORMS = (nn.Identity, nn.LayerNorm, nn.RMSNorm, RmsNorm)
"""Norms between pooling and head that are sums over channels, for a fixed mean and standard
deviation.
"""


@dataclass(frozen=True)
class Attribution:
    """The attribution of a class in one image.

    The margin of a class is its output minus the mean output of all classes; with a single class,
    and for ``VECTOR_TASKS``, its output.
    """

    logits: Tensor
    """The outputs of all classes, float32 ``[num_classes]``."""
    target: int
    """Index of the class."""
    margin: float
    patches: Tensor | None
    """Contribution of each patch to the margin, float64 ``[H, W]``; 0 for absent patches. None if
    the pooling cannot be divided among patches.
    """
    channels: Tensor | None
    """Number of channels of the pooled features that each patch wins, int64 ``[H, W]``; None
    without a maximum.
    """
    rest: float | None
    """The rest of the margin: biases, and pooled prefix tokens. None if ``patches`` is None."""
    gradient: Tensor | None
    """The input times the gradient of the margin, summed over channels, float32 ``[H_px, W_px]``;
    None if not requested.
    """
    how: str
    """Description of how patches enter the output, for people."""


def check_model(model: nn.Module) -> VisionAttnTransformer | PatchClassifier:
    """Return the model if it supports attribution.

    Raises:
        ValueError: it is not one of our models, or it has no classes.
    """
    if isinstance(model, Segmenter):
        raise ValueError(
            "expected an image classifier for look, got a segmentation model; write its masks "
            "with visionattn predict"
        )
    if not isinstance(model, VisionAttnTransformer | PatchClassifier):
        raise ValueError(f"expected a model of visionattn for look, got {type(model).__name__}")
    if model.num_classes < 1:
        raise ValueError("expected a model with classes, got one without a classifier")
    return model


def block_number(model: VisionAttnTransformer, index: int) -> int:
    """Return the index of a block from 0; the given index may count from the end as in Python.

    Raises:
        ValueError: there is no such block.
    """
    return places_of_blocks([index], len(model.blocks), "block")[0]


def find_attribution(
    model: VisionAttnTransformer,
    inputs: Tensor,
    *,
    sizes: Tensor | None = None,
    target: int | None = None,
    gradient: bool = True,
) -> Attribution:
    """Compute the attribution of a class.

    Args:
        model: in eval mode; unchanged afterwards.
        inputs: one image as the model's input, ``[1, C, H_px, W_px]``.
        sizes: filled size of the image, int64 ``[1, 2]``.
        target: index of the class; None: the class with the largest output.
        gradient: also compute the gradient. Blocks are recomputed in the backward pass, so memory
            holds one block and the tokens between blocks.

    Raises:
        ValueError: the outputs are not finite, or the class does not exist.
    """
    if isinstance(model, PatchClassifier):
        return _of_largest(model, inputs, sizes, target)
    with torch.inference_mode(False), _frozen(model), torch.set_grad_enabled(gradient):
        inputs = inputs.clone().requires_grad_(gradient)  # clone also works for an inference tensor
        tokens = model.forward_features(inputs, sizes=sizes)
        present = model.present_patches(inputs, sizes)
        logits = model.forward_head(tokens, present=present)[0]
        target = checked_target(logits, target)
        margin = logits @ contrast(model, logits, target)
        if gradient:
            margin.backward()
            found = (inputs.grad * inputs.detach()).sum(1)[0].cpu()
    part = _pooled_tokens(model, tokens.detach(), present)
    grid = grid_of(inputs.shape[2:], model.patch_embed.patch_size)
    known = logits.detach(), target, float(margin.detach()), grid
    return attributed(model, lambda: [part], *known, found if gradient else None)


def checked_target(logits: Tensor, target: int | None) -> int:
    """Return the index of the class, by default of the largest output, after checking both."""
    if not logits.isfinite().all():
        raise ValueError("the outputs are not finite; check the weights and the image")
    if target is None:
        target = int(logits.argmax())
    if not 0 <= target < len(logits):
        raise ValueError(f"expected class 0 to {len(logits) - 1}, got {target}")
    return target


@torch.no_grad()
def _of_largest(
    model: PatchClassifier, inputs: Tensor, sizes: Tensor | None, target: int | None
) -> Attribution:
    """Return the attribution of a mean of the largest outputs: each of them adds its share."""
    scores = model.head(model.forward_patches(inputs, sizes))[0]
    logits = model(inputs, sizes)[0]
    target, present = checked_target(logits, target), model.present_patches(inputs, sizes)
    there = torch.full(scores[0].shape, True) if present is None else present[0].cpu()
    each = scores.flatten(1).double().cpu().masked_fill(~there.flatten(), float("-inf"))
    count = min(model.top or each.shape[1], int(there.sum()))
    best = each.topk(count, 1)
    shares = best.values * contrast(model, logits, target).double().cpu()[:, None] / count
    patches = torch.zeros(each.shape[1], dtype=torch.float64)
    patches.index_add_(0, best.indices.flatten(), shares.flatten())
    how = f"the output is the mean of the {count} largest outputs of patches"
    grid = tuple(scores.shape[1:])
    margin = float(patches.sum())
    found = logits.float().cpu(), target, margin, patches.unflatten(0, grid)
    return Attribution(*found, None, 0.0, None, how)


def watch(
    model: VisionAttnTransformer,
    inputs: Tensor,
    rows: Mapping[int, Sequence[int]],
    *,
    sizes: Tensor | None = None,
    features: int | None = None,
) -> tuple[dict[int, AttentionRows], Tensor | None]:
    """Return attention weights of chosen blocks and tokens, and the feature map of one block.

    Args:
        model: in eval mode.
        inputs: one image as the model's input, ``[1, C, H_px, W_px]``.
        rows: indices of tokens by index of the block: prefix tokens first, then patches row by row.
        sizes: as for ``find_attribution``.
        features: the block whose map is returned, after the final norm; None: no map.

    Returns:
        ``AttentionRows`` by index of the block, ``[1, h, Q, N]``; and the map, ``[D, H, W]`` or
        None.

    Raises:
        ValueError: there is no such block or token.
    """
    found: dict[int, AttentionRows] = {}
    asked = {block_number(model, index): list(tokens) for index, tokens in rows.items()}
    last = None if features is None else block_number(model, features)
    wanted = sorted({*asked} | ({last} if last is not None else set()))
    if not wanted:
        return {}, None

    def hook_of(number: int):
        def hook(module: Attention, args: tuple, kwargs: dict[str, Any]) -> None:
            x, *others = args
            chosen = torch.tensor(asked[number], dtype=torch.int64, device=x.device)
            found[number] = module.weights(x, chosen, *others, **kwargs)

        return hook

    hooks = [
        model.blocks[number].attn.register_forward_pre_hook(hook_of(number), with_kwargs=True)
        for number in asked
    ]
    try:
        with torch.no_grad():
            # Maps of blocks: a pyramid's own ``forward_intermediates`` returns its maps.
            maps = VisionAttnTransformer.forward_intermediates(
                model,
                inputs,
                indices=wanted,
                norm=True,
                stop_early=True,
                intermediates_only=True,
                sizes=sizes,
            )
    finally:
        for hook in hooks:
            hook.remove()
    return found, None if last is None else maps[wanted.index(last)][0]


def principal(
    features: Tensor, present: Tensor | None = None, count: int = 3
) -> tuple[Tensor, Tensor]:
    """Return the principal components of patches: their coordinates along the directions of largest
    variance.

    Args:
        features: ``[D, H, W]``.
        present: bool ``[H, W]``, the patches to use; None: all.
        count: number of directions, at most D.

    Returns:
        Coordinates, float64 ``[count, H, W]`` on the CPU, 0 for absent patches; and the share of
        the variance along each direction. The largest entry of a direction is positive.
    """
    width, grid = features.shape[0], features.shape[1:]
    x = features.detach().flatten(1).double().cpu()
    there = torch.ones(x.shape[1], dtype=torch.bool)
    if present is not None:
        there = present.flatten().cpu()
    own = x[:, there]
    own = own - own.mean(1, keepdim=True)
    values, directions = torch.linalg.eigh(own @ own.mT)
    values = values.clamp(min=0).flip(0)
    directions = directions.flip(1)[:, : min(count, width)]
    largest = directions.gather(0, directions.abs().argmax(0, keepdim=True))
    directions = directions * torch.where(largest < 0, -1.0, 1.0)
    coordinates = torch.zeros(directions.shape[1], x.shape[1], dtype=torch.float64)
    coordinates[:, there] = directions.mT @ own
    total = values.sum()
    shares = values[: directions.shape[1]] / total if total > 0 else torch.zeros(len(coordinates))
    return coordinates.unflatten(1, tuple(grid)), shares


@torch.no_grad()
def offset_weights(attention: Attention) -> Tensor | None:
    """Return the weight of each offset for a query of zeros, ``[h, 2R+1, 2R+1]``, rows first
    (``flat``: ``[h, 1, 2R+1]``).

    It is the sum of each entry of the relative table. For softmax tables, with which a zero query
    has no position, it is the norm of each entry. None without relative position.
    """
    tables = getattr(attention, "relative", None)  # none in timm's
    if tables is None:
        return None
    position: Any = tables(attention.native_layout)

    def told(table: Tensor) -> Tensor:
        return table.norm(dim=-1) if tables.signed else table.sum(-1)

    if tables.kind == "axial":
        if tables.signed:
            return (position.rows[:, :, None] + position.columns[:, None]).norm(dim=-1).cpu()
        return (told(position.rows)[:, :, None] + told(position.columns)[:, None]).cpu()
    weights = told(position.table).cpu()
    return weights[:, None] if tables.kind == "flat" else weights


def contrast(model: nn.Module, logits: Tensor, target: int) -> Tensor:
    """Return the weights of the outputs whose sum is the margin of a class."""
    weights = torch.zeros_like(logits)
    spec = getattr(model, "data_spec", None)
    if len(logits) > 1 and not (spec and spec.task in VECTOR_TASKS):
        weights -= 1 / len(logits)
    weights[target] += 1
    return weights


def divides(model: VisionAttnTransformer) -> bool:
    """Return whether the pooling can be divided among patches."""
    if isinstance(model, PatchClassifier):
        return True
    linear = isinstance(model.head, nn.Linear) and isinstance(model.fc_norm, NORMS)
    return linear and model.attn_pool is None and model.global_pool in POOLED


def described(model: VisionAttnTransformer) -> str:
    """Describe how patches enter the output, for people."""
    if divides(model):
        return POOLED[model.global_pool]
    if model.attn_pool is None and model.global_pool == "token":
        return (
            "only the class token is pooled, so the output has no contributions of patches; its "
            "row of attention is shown instead"
        )
    return (
        f"the output has no contributions of patches with pooling {model.global_pool!r}, norm and "
        "head; gradient and rows of attention are shown"
    )


def _pooled_tokens(
    model: VisionAttnTransformer, tokens: Tensor, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return places and tokens of an image, as ``pools_of`` needs them.

    Args:
        tokens: ``[1, P + H*W, D]``.
        present: bool ``[1, H*W]``; None: all.
    """
    x, prefix = tokens[0].double(), model.num_prefix_tokens
    places = torch.arange(-prefix, len(x) - prefix, device=x.device)
    there = places >= (-prefix if model.pool_include_prefix else 0)
    if present is not None:
        there[prefix:] &= present[0]
    return places[there], x[there]


class Pools(NamedTuple):
    """Tokens pooled over an image, for each of D channels."""

    largest: Tensor
    """``[D]``, in the dtype of the tokens."""
    winners: Tensor
    """Places of the largest entries, int64 ``[D]``."""
    total: Tensor
    """float64 ``[D]``."""
    count: int
    """Number of tokens."""


def pools_of(parts: Iterable[tuple[Tensor, Tensor]]) -> Pools:
    """Pool the tokens of an image part by part: places ``[n]``, row by row from 0 for patches and
    below 0 for prefix tokens, and tokens after the final norm, ``[n, D]``.
    """
    found: Pools | None = None
    for places, x in parts:
        largest, at = x.max(0)
        winners, total, count = places[at], x.sum(0, dtype=torch.float64), len(x)
        if found is not None:
            # The first of equal entries wins, and NaN counts as the largest.
            later = ~(found.largest >= largest) & ~found.largest.isnan()
            largest = torch.where(later, largest, found.largest)
            winners = torch.where(later, winners, found.winners)
            total, count = total + found.total, count + found.count
        found = Pools(largest, winners, total, count)
    assert found is not None
    return found


def attributed(
    model: VisionAttnTransformer,
    parts: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    logits: Tensor,
    target: int,
    margin: float,
    grid: Grid,
    gradient: Tensor | None = None,
) -> Attribution:
    """Return the attribution of a class, with the contribution of each patch to the margin if the
    pooling can be divided among patches.

    The norm maps the pooled features m to ``scale * (m - centre) + bias``, with the mean and
    standard deviation of this image. The margin is then a sum over channels, and each channel is
    assigned to its patch.

    Args:
        model: in eval mode.
        parts: yields the tokens, as ``pools_of`` needs them.
        logits: ``[num_classes]``.
        target: the class.
        margin: of the class.
        grid: H and W.
        gradient: see ``Attribution``.
    """
    known, how = (logits.float().cpu(), target, margin), described(model)
    if not divides(model):
        return Attribution(*known, None, None, None, gradient, how)
    pools = pools_of(parts())
    largest, mean = pools.largest.double(), pools.total / pools.count
    of_largest, of_mean = {"max": (1.0, 0.0), "avg": (0.0, 1.0), "avgmax": (0.5, 0.5)}[
        model.global_pool
    ]
    scale, centre = _affine(model.fc_norm, of_largest * largest + of_mean * mean)
    weights = contrast(model, logits, target).double() @ model.head.weight.detach().double() * scale
    added, channels = torch.zeros(grid.num_patches, dtype=torch.float64), None
    if of_largest:
        patch = pools.winners >= 0
        winners, won = pools.winners[patch].cpu(), of_largest * weights * (largest - centre)
        added.index_add_(0, winners, won[patch].cpu())
        channels = torch.bincount(winners, minlength=len(added)).unflatten(0, grid)
    if of_mean:
        for places, x in parts():
            patch = places >= 0
            own = (x[patch].double() - centre) @ (of_mean * weights) / pools.count
            added.index_add_(0, places[patch].cpu(), own.cpu())
    rest = margin - float(added.sum())
    return Attribution(*known, added.unflatten(0, grid), channels, rest, gradient, how)


def _affine(norm: nn.Module, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of a norm for pooled features ``[D]``, and the value subtracted before."""
    one, zero = torch.ones_like(pooled), pooled.new_zeros(())
    if isinstance(norm, nn.Identity):
        return one, zero
    gain = getattr(norm, "weight", None)
    gain = one if gain is None else gain.detach().double()
    if isinstance(norm, nn.LayerNorm):
        spread = (pooled.var(unbiased=False) + norm.eps).sqrt()
        return gain / spread, pooled.mean()
    return gain / (pooled.square().mean() + norm.eps).sqrt(), zero


@contextmanager
def _frozen(model: VisionAttnTransformer) -> Iterator[None]:
    """Disable the gradients of parameters and checkpoint the blocks in the context."""
    trained = [each for each in model.parameters() if each.requires_grad]
    before = model.grad_checkpointing
    try:
        for each in trained:
            each.requires_grad_(False)
        model.grad_checkpointing = True
        yield
    finally:
        model.grad_checkpointing = before
        for each in trained:
            each.requires_grad_(True)
