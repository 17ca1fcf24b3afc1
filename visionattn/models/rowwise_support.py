"""Check whether a model can be computed from some rows of tokens at a time (``large``).

The computation runs the parts of blocks and attention layers separately, so these must be
unmodified. The modules inside are called with some of the tokens, so their output for a token must
not depend on other tokens.
"""

from collections.abc import Callable
from itertools import chain

import torch
from timm.layers import AttentionPoolLatent
from torch import Tensor, nn

from visionattn.layers import Attention, Block
from visionattn.layers.hook_detection import check_unchanged
from visionattn.layers.position_tables import RelativeTables
from visionattn.layers.value_convolution import ValueConvolution
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.patches import DynamicPatchEmbed, in_eval
from visionattn.models.segmentation import Segmenter
from visionattn.ops import OPERATIONS
from visionattn.ops.feature_maps import get_feature_map, is_per_token

TOKENS = 4
"""Number of tokens for testing modules."""


def weight_like(body: VisionAttnTransformer) -> Tensor:
    """Return a floating point parameter of the patch embedding; the tokens have its device and
    dtype.
    """
    parameters = chain(body.patch_embed.parameters(), body.parameters())
    return next(each for each in parameters if each.is_floating_point())


def check_rowwise(model: VisionAttnTransformer | Segmenter) -> None:
    """Check that a model can be computed from some rows of tokens at a time.

    Raises:
        ValueError: a module whose call is bypassed is replaced or has hooks, an attention needs all
            tokens at once, or the output of a module for a token depends on other tokens; one line.
    """
    body = model.backbone if isinstance(model, Segmenter) else model
    lead = ""
    if body is not model:
        check_unchanged("", model, Segmenter)
        lead = "backbone."
    check_unchanged(lead.removesuffix("."), body, VisionAttnTransformer)
    check_unchanged(f"{lead}patch_embed", body.patch_embed, DynamicPatchEmbed)
    if isinstance(body.attn_pool, AttentionPoolLatent):
        check_unchanged(f"{lead}attn_pool", body.attn_pool, AttentionPoolLatent)
    for number, block in enumerate(body.blocks):
        name = f"{lead}blocks.{number}"
        check_unchanged(name, block, Block)
        check_unchanged(f"{name}.attn", block.attn, Attention)
        _check_attention(f"block {number}", block.attn)
    if weight_like(body).device.type != "meta":
        with torch.no_grad(), in_eval(model):
            _check_tokens(model, body)


def _check_attention(name: str, layer: Attention) -> None:
    for part, kind in (("relative", RelativeTables), ("value_conv", ValueConvolution)):
        if not isinstance(module := getattr(layer, part), kind | None):
            raise ValueError(f"{name} has a {type(module).__name__} as {part}")
    if layer.operation is not OPERATIONS[layer.kind.name]:
        raise ValueError(f"{name} has an operation of another attention")
    if not layer.kind.states and not layer.kind.windows:
        raise ValueError(
            "expected attention kernelized, taylorshift or window, got softmax over all tokens "
            f"in {name}"
        )
    if layer.feature_map is not None and not is_per_token(get_feature_map(layer.feature_map)):
        raise ValueError(
            "expected feature_map elu1, relu or random, got softmax, whose keys depend on each "
            f"other, in {name}"
        )


def _check_tokens(model: nn.Module, body: VisionAttnTransformer) -> None:
    """Raise ValueError if the output of a module for a token depends on other tokens."""
    like, (down, across) = weight_like(body), body.patch_embed.patch_size

    def embed(x: Tensor) -> list[Tensor]:
        pixels = x.unflatten(2, (body.in_chans, down, across)).transpose(1, 2).flatten(2, 3)
        return [body.norm_pre(body.pos_drop(body.patch_embed.embed(pixels).flatten(1, 2)))]

    def last(x: Tensor) -> list[Tensor]:
        x = body.norm(x)
        if isinstance(body.attn_pool, AttentionPoolLatent):
            return [body.attn_pool.kv(x)]
        if not isinstance(model, Segmenter):
            return [x]
        maps = x.transpose(1, 2).unsqueeze(3)
        return [model.head(torch.cat([norm(maps) for norm in model.norms], 1)).flatten(2).mT]

    dtype = _tried("patch_embed", embed, body.in_chans * down * across, like, like.dtype)
    for number, block in enumerate(body.blocks):
        name = f"blocks.{number}"
        found = _tried(name, _parts_of(block), body.embed_dim, like, dtype)
        if found != dtype and not torch.is_autocast_enabled(like.device.type):
            raise ValueError(f"{name} turns tokens of {dtype} into {found}; use one dtype")
    _tried("norm, head or pooling", last, body.embed_dim, like, dtype)


def _parts_of(block: Block) -> Callable[[Tensor], list[Tensor]]:
    """Return a function with a block's token-wise output (without attention to other tokens),
    followed by queries, keys and values.
    """

    def run(x: Tensor) -> list[Tensor]:
        layer, normed = block.attn, block.norm1(x)
        q, k, v = (each.transpose(1, 2).flatten(2) for each in layer.heads(normed))
        return [block.added(x, layer.project(v, normed)), q, k, v]

    return run


def _tried(
    name: str,
    run: Callable[[Tensor], list[Tensor]],
    width: int,
    like: Tensor,
    dtype: torch.dtype,
) -> torch.dtype:
    """Run a module on a token among some tokens and, at another place, among others; return the
    dtype of the result.

    Raises:
        ValueError: the results differ, or a module does not accept so few tokens.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2 * TOKENS - 1, width, generator=draw).to(like.device, dtype)
    try:
        found = run(x[:, :TOKENS]), run(x[:, TOKENS - 1 :])
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{name} fails with {TOKENS} tokens: {why}") from error
    exact = dtype.itemsize > 2 and not torch.is_autocast_enabled(like.device.type)
    for first, second in zip(*found, strict=True):
        one, other = first[:, -1].double().nan_to_num(), second[:, 0].double().nan_to_num()
        if (one - other).abs().max() > (1e-4 if exact else 0.05) * one.abs().max():
            raise ValueError(f"{name} has a module whose output for a token depends on others")
    return found[0][0].dtype
