"""The body of a timm ``VisionTransformer``: whether ours can have it, and by which arguments.

This module reads a model and knows nothing of weights.
"""

from typing import Any

from timm.layers import (
    Attention,
    AttentionPoolLatent,
    AttentionPoolPrr,
    GluMlp,
    LayerNorm,
    Mlp,
    PatchEmbed,
    SwiGLU,
    get_act_layer,
    get_norm_layer,
)
from timm.models import VisionTransformer
from timm.models.vision_transformer import Block
from torch import nn

from visionattn.layers.changed import has_hooks
from visionattn.models.backbone import VisionAttnTransformer

NOT_TAKEN = {
    "Eva": "it is timm's Eva; models with rotary position are not taken",
    "VisionTransformerRelPos": "its softmax has a relative position of its own",
    "VisionTransformerDistilled": "it has a second class token with a head of its own",
    "NaFlexVit": "it takes packed patches; build it as timm's VisionTransformer",
    "VisionTransformerSAM": "it attends in windows with a relative position of its own",
    "HybridEmbed": "its patches come of a convolutional network",
    "ResPostBlock": "its blocks normalise after attention and MLP, not before",
    "ParallelScalingBlock": "its blocks run attention and MLP side by side, in one projection",
    "DiffParallelScalingBlock": "its attention is the difference of two softmaxes",
    "ParallelThingsBlock": "its blocks have several attentions side by side",
    "DiffAttention": "its attention is the difference of two softmaxes",
}
"""Why models with these parts are not taken."""
TAKEN_AS_THEY_ARE = ("forward", "forward_features", "forward_head", "pool", "_pos_embed")
"""Methods of ``VisionTransformer`` that a class derived from it must not change."""
NORMS = ("rmsnorm", "simplenorm", "layernormfp32", "rmsnormfp32", "simplenormfp32")
"""timm's names of norms of tokens, besides the default."""
ACTIVATIONS = ("gelu_tanh", "quick_gelu", "relu", "silu", "mish", "leaky_relu", "elu", "tanh")
"""timm's names of activations that a teacher may have, besides the default GELU."""
MERGE = "merge adapters, and remove hooks, whose effect weights do not hold"
"""What to do with a teacher that does more than its weights say."""
IGNORED = (nn.Dropout, nn.Identity)
"""Modules that do nothing when a teacher is evaluated, by which models may differ."""


def name_of(vit: nn.Module) -> str:
    """Return timm's name of a model, or its class where it has none."""
    cfg = getattr(vit, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(vit).__name__


def refused(vit: nn.Module, part: str, reason: str | None = None) -> ValueError:
    """Make the error for a teacher that is not taken because of a part of it."""
    reason = reason or NOT_TAKEN.get(part, f"it has {part}")
    return ValueError(f"{name_of(vit)} cannot be converted: {reason}")


def body_of(vit: nn.Module) -> dict[str, Any]:
    """Return the arguments of ``VisionAttnTransformer`` that build the body of a ViT, besides
    ``in_chans``, ``num_classes`` and those of the attention: JSON types, None where not needed.

    Args:
        vit: timm's ``VisionTransformer``, of any size.

    Raises:
        ValueError: it is none, or has parts that ours has not; one line.
    """
    _check_kind(vit)
    embed, block = vit.patch_embed, vit.blocks[0]
    attn, width = block.attn, vit.embed_dim
    hidden = (block.mlp.fc1_g if isinstance(block.mlp, SwiGLU) else block.mlp.fc1).out_features
    pre, post = (not isinstance(norm, nn.Identity) for norm in (vit.norm, vit.fc_norm))
    return dict(
        img_size=list(embed.img_size),
        patch_size=list(embed.patch_size),
        global_pool=vit.global_pool,
        embed_dim=width,
        depth=len(vit.blocks),
        num_heads=attn.num_heads,
        mlp_ratio=_ratio(hidden, width),
        pos_embed="none" if vit.pos_embed is None else "learn",
        dynamic_img_pad=embed.dynamic_img_pad,
        qkv_bias=attn.qkv.bias is not None,
        qk_norm=not isinstance(attn.q_norm, nn.Identity),
        scale_attn_norm=not isinstance(attn.norm, nn.Identity),
        scale_mlp_norm=not isinstance(block.mlp.norm, nn.Identity),
        proj_bias=attn.proj.bias is not None,
        # Any number makes the factors, which are copied.
        init_values=None if isinstance(block.ls1, nn.Identity) else 1e-5,
        class_token=vit.cls_token is not None,
        no_embed_class=vit.no_embed_class,
        reg_tokens=vit.num_reg_tokens,
        pre_norm=not isinstance(vit.norm_pre, nn.Identity),
        final_norm=pre or post,
        fc_norm=post,
        pool_include_prefix=vit.pool_include_prefix,
        norm_layer=_norm(vit, block.norm1),
        norm_eps=getattr(block.norm1, "eps", None),
        act_layer=_activation(vit, block.mlp.act),
        mlp_layer={Mlp: "mlp", SwiGLU: "swiglu", GluMlp: "swiglu_packed"}[type(block.mlp)],
    )


def _check_kind(vit: nn.Module) -> None:
    """Raise ValueError unless a model is made of the parts that ours are made of."""
    if isinstance(vit, VisionAttnTransformer):
        raise refused(vit, "", "it is a model of visionattn already")
    if not isinstance(vit, VisionTransformer):
        kind = type(vit).__name__
        raise refused(vit, kind, NOT_TAKEN.get(kind, f"it is no VisionTransformer of timm: {kind}"))
    for name in TAKEN_AS_THEY_ARE:
        if getattr(type(vit), name) is not getattr(VisionTransformer, name):
            kind = type(vit).__name__
            raise refused(vit, kind, NOT_TAKEN.get(kind, f"{kind} has a {name} of its own"))
    if type(vit.patch_embed) is not PatchEmbed:
        raise refused(vit, type(vit.patch_embed).__name__)
    if not len(vit.blocks):
        raise refused(vit, "no blocks")
    layers = [vit.patch_embed.proj, vit.head]
    for block in vit.blocks:
        if type(block) is not Block:
            raise refused(vit, type(block).__name__)
        attn, mlp = block.attn, block.mlp
        if type(attn) is not Attention:
            raise refused(vit, type(attn).__name__)
        if getattr(attn, "gate", None) is not None:
            raise refused(vit, "", "its attention has a gate")
        if attn.num_heads * attn.head_dim != vit.embed_dim:
            heads = f"{attn.num_heads} heads of {attn.head_dim}"
            raise refused(vit, "", f"its {heads} are not as wide as its {vit.embed_dim} channels")
        if type(mlp) not in (Mlp, SwiGLU, GluMlp) or getattr(mlp, "gate_last", False):
            raise refused(vit, "", f"its MLP is a {type(mlp).__name__} that ours do not have")
        first = mlp.fc1_g if isinstance(mlp, SwiGLU) else mlp.fc1
        layers += [attn.qkv, attn.proj, first, mlp.fc2]
    for layer in layers:
        if not isinstance(layer, nn.Linear | nn.Conv2d | nn.Identity):
            kind = f"{type(layer).__module__}.{type(layer).__name__}"
            raise refused(vit, "", f"one of its layers is {kind}; {MERGE}")
    for name, module in vit.named_modules():
        if has_hooks(module) or "forward" in vars(module):
            raise refused(vit, "", f"{name or 'it'} has hooks or another forward; {MERGE}")


def _ratio(hidden: int, width: int) -> float:
    """Return the ratio by which ``int(width * ratio)`` is ``hidden``."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def _norm(vit: nn.Module, norm: nn.Module) -> str | None:
    """Return timm's name of a norm; None for the default."""
    if type(norm) in (LayerNorm, nn.LayerNorm):
        return None
    for name in NORMS:
        if type(norm) is get_norm_layer(name):
            return name
    raise refused(vit, "", f"its norms are {type(norm).__name__}")


def _activation(vit: nn.Module, act: nn.Module) -> str | None:
    """Return timm's name of an activation; None for the default."""
    if type(act) is nn.GELU:
        return None if act.approximate == "none" else "gelu_tanh"
    for name in ("gelu", *ACTIVATIONS):
        if type(act) is get_act_layer(name):
            return name
    raise refused(vit, "", f"its activations are {type(act).__name__}")


def check_same(vit: nn.Module, model: nn.Module) -> None:
    """Raise ValueError where a model does not have the modules of a ViT, one by one, apart from
    patch embedding, blocks and attention, which are ours, and from what does nothing at test time.

    The arguments are read off the first block; here the others come out if they differ.
    """
    own = dict(model.named_modules())
    ours = (VisionTransformer, PatchEmbed, Block, Attention, nn.Sequential)
    for name, module in vit.named_modules():
        if isinstance(module, (*IGNORED, *ours)) or name == "head" or _is_drop(module):
            continue
        other = own.get(name)
        if other is None:
            if name.startswith("attn_pool") and model.attn_pool is None:
                continue  # another pooling was asked for
            raise refused(vit, "", f"its {name} ({type(module).__name__}) has no place")
        alike = _described(module) == _described(other)
        if not alike and not (name == "patch_embed.proj" and _bias(module) == _bias(other)):
            kind = f"{type(module).__name__}({module.extra_repr()})"
            raise refused(vit, "", f"its {name} is {kind}, which ours cannot be")


def _is_drop(module: nn.Module) -> bool:
    return type(module).__name__ in ("DropPath", "PatchDropout")


def _bias(module: nn.Module) -> tuple[type, bool]:
    return type(module), getattr(module, "bias", None) is not None


def _described(module: nn.Module) -> tuple[str, str, Any]:
    """Return what tells modules of the same parameters apart."""
    kind = type(module)
    name = "LayerNorm" if kind in (LayerNorm, nn.LayerNorm) else kind.__name__
    if kind is nn.GELU or name == "GELUTanh":
        tanh = name == "GELUTanh" or getattr(module, "approximate", "none") == "tanh"
        return "GELU", str(tanh), None
    if name == "GELU":
        return "GELU", "False", None
    heads = module.num_heads if isinstance(module, AttentionPoolLatent | AttentionPoolPrr) else None
    return name, module.extra_repr(), heads
