"""``from_softmax``: a timm ViT becomes one of ours, with its weights.

Copied weights are a start. ``docs/conversion.md`` says what becomes of each part and what copying
alone is worth.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from timm.layers import resample_patch_embed, to_2tuple
from timm.models import create_model
from timm.models._manipulate import adapt_input_conv
from torch import Tensor, nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.cli.untrusted import brief
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.body import body_of, check_same, name_of, refused
from visionattn.models.convert import fit_position
from visionattn.models.hybrid import places_of_blocks
from visionattn.models.listing import shape, shorten
from visionattn.models.registration import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from visionattn.models.weights import KEPT, UNBUILDABLE, DataSpec, describe_args, save_model
from visionattn.ops.attentions import get_attention

NAME = "converted_vit"
"""timm's name of converted models; their arguments say the rest."""
RATES = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")
OF_ATTENTION = ("relative", "horizon", "normalization", "temperature_init", "feature_map")
OF_ATTENTION += ("random_features", "value_conv", "centre_keys", "form", "window_size")
OF_INPUT = ("img_size", "patch_size", "in_chans", "num_classes", "global_pool")
OF_INPUT += ("dynamic_img_size", "dynamic_img_pad")
LEAST = {"img_size": 1, "patch_size": 1, "in_chans": 1, "num_classes": 0}
LEAST |= {"horizon": 0, "random_features": 1, "value_conv": 0, "window_size": 1}
"""Options that are whole numbers, and what they are at least."""
SWITCHES = ("centre_keys", "dynamic_img_size", "dynamic_img_pad")
TEXTS = ("relative", "normalization", "feature_map", "form", "global_pool")
SIDES = ("img_size", "patch_size")
"""Those in pixels, which may be height and width."""
OPTIONS = (*OF_ATTENTION, *OF_INPUT, *RATES, "drop_path_rate")
"""What a caller may choose; the rest is the teacher's."""


@dataclass(frozen=True)
class Converted:
    """A model with the weights of another, and where each came from."""

    model: VisionAttnTransformer
    """On the teacher's device, in its dtype and mode."""
    name: str
    """timm's name that builds the model."""
    args: dict[str, Any]
    """The arguments that build it, besides ``num_classes`` and ``in_chans``; JSON types."""
    spec: DataSpec
    """What the teacher's images are."""
    source: str
    """The teacher's name."""
    taken: list[str]
    """Names in the model that have the teacher's values, resampled ones included."""
    resampled: list[str]
    """Names among those, with shapes, whose values were interpolated."""
    new: list[str]
    """Names in the model that the teacher has not, at their start."""
    left_out: list[str]
    """Names in the teacher that found no place."""

    def lines(self) -> list[str]:
        """Put where the weights came from into a compact list for people."""
        several = len(self.taken) + len(self.new)
        parts = (
            ("resampled", self.resampled),
            ("new", self.new),
            ("left out", self.left_out),
        )
        return [
            f"{len(self.taken)} of {several} tensors are those of {self.source}",
            *(f"  {what} ({len(names)}): {shorten(names)}" for what, names in parts if names),
        ]

    def save(self, path: str | Path) -> None:
        """Write the model to a file of ``save_model``, which ``load_model`` reads.

        Raises:
            OSError: it cannot be written.
        """
        cfg = self.model.pretrained_cfg
        kept = {key: cfg[key] for key in KEPT if cfg.get(key) is not None}
        notes = {"converted_from": self.source, "pretrained_cfg": json.dumps(kept)}
        save_model(path, self.model, self.name, self.args, self.spec, notes=notes)


@torch.no_grad()
def from_softmax(
    vit: nn.Module,
    attention: str | Sequence[str] = "kernelized",
    *,
    softmax_blocks: Sequence[int] = (),
    num_heads: int | None = None,
    **options: Any,
) -> Converted:
    """Make one of our models from a timm ``VisionTransformer``, with its weights.

    The body is the teacher's: tokens, norms, MLPs, position and pooling, and its absolute position
    is resampled to each image. Its weights are copied, none is changed. What attention with bounded
    weights needs beside them starts so that it changes little: keys are centred, the convolution of
    the values and the relative tables of windows are zero, those of linear blocks have their local
    start, and TaylorShift's temperatures are 4. There is no output gate, whose start near zero
    would erase what the weights give. A model whose blocks are all ``softmax_blocks`` computes what
    the teacher does.

    Args:
        vit: the teacher, with class token or none, registers, norm of queries and keys, LayerScale,
            gated MLP, norm before the blocks, and any size, patch and width. It stays as it is.
        attention: "kernelized", "taylorshift" or "window", or a list, one for each block, where
            "softmax" may be as well.
        softmax_blocks: indices of blocks that stay the teacher's softmax, exact and quadratic; from
            the end where negative.
        num_heads: heads of the blocks; None: the teacher's. Others share the same weights out anew,
            which is another function.
        options: arguments of ``VisionAttnTransformer`` named in ``OPTIONS``: of the attention
            (``relative``, ``value_conv``, ...), of images (``img_size``, ``patch_size``,
            ``in_chans``, ``num_classes``, ``global_pool``, ...) and rates of dropout, which are 0
            unless given. ``value_conv`` is 3, ``centre_keys`` True unless given. Others are taken
            if they are what the teacher has.

    Returns:
        ``Converted``: the model, and lists of what was taken, resampled, new and left out.

    Raises:
        ValueError: the teacher is no such model, or has parts that ours has not; heads that do not
            divide the width, blocks that do not exist, options of the teacher's body; one line.
    """
    body = body_of(vit)
    _check_options(options, body)
    options = {key: value for key, value in options.items() if key in OPTIONS}
    if num_heads is not None and num_heads != body["num_heads"]:
        _check_regrouping(vit, body, num_heads)
        body["num_heads"] = num_heads
    _check_grid(body, options)
    attending = _attending(attention, softmax_blocks, body["depth"], options)
    spec = _spec(vit, options)
    args = {**body, **attending, **options}
    args = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in args.items()
        if value is not None and key not in ("in_chans", "num_classes")
    }
    model = _built(vit, args, spec)
    check_same(vit, model)
    converted = _placed(vit, model, args, spec)
    model.train(vit.training)
    return converted


def _built(vit: nn.Module, args: dict[str, Any], spec: DataSpec) -> VisionAttnTransformer:
    """Make the model that weights are then copied to."""
    weight = vit.patch_embed.proj.weight
    try:
        model = create_model(
            NAME,
            in_chans=spec.in_chans,
            num_classes=spec.num_classes,
            pretrained_cfg_overlay=_cfg(vit, spec, to_2tuple(args["img_size"])),
            device=weight.device,
            dtype=weight.dtype,
            **args,
        )
    except UNBUILDABLE as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{name_of(vit)} cannot be converted with these options: {describe_args(args)} "
            f"({first_line(error)})"
        ) from error
    assert isinstance(model, VisionAttnTransformer)
    return model


def _check_options(options: dict[str, Any], body: dict[str, Any]) -> None:
    """Raise ValueError for an option that is not the caller's, unless it is as the teacher is."""
    for name in options:
        if name == "output_gate" and options[name]:
            raise ValueError(
                "output_gate: a gate starts near 0, which would erase what copied weights give; "
                "converted models have none"
            )
        if name in body and name not in OPTIONS and options[name] != body[name]:
            raise ValueError(
                f"{name} is the teacher's, {brief(body[name])}, and cannot be "
                f"{brief(options[name])}"
            )
        _check_value(name, options[name])
        if name not in (*body, *OPTIONS, "output_gate"):
            raise ValueError(
                f"from_softmax takes no {brief(name)}; besides attention it takes "
                f"{', '.join(OPTIONS)}"
            )


def _check_grid(body: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise ValueError where an image would be smaller than a patch."""
    size, patch = (to_2tuple(options.get(name, body[name])) for name in SIDES)
    if any(pixels < of for pixels, of in zip(size, patch, strict=True)):
        raise ValueError(
            f"img_size {size[0]} x {size[1]} is smaller than a patch of {patch[0]} x {patch[1]} "
            "pixels; give a larger one, or a smaller patch_size"
        )


def _check_value(name: str, value: Any) -> None:
    """Raise ValueError unless a value is of the kind that its option is; None is a default."""
    if name in LEAST and (value is not None or name in OF_INPUT):
        _check_sides(name, value)
    if value is None:
        return
    wanted = ""
    finite = type(value) in (int, float) and math.isfinite(value)
    if name == "temperature_init" and not (finite and value > 0):
        wanted = "a finite number above 0"
    if name in (*RATES, "drop_path_rate") and not (finite and 0 <= value < 1):
        wanted = "a number from 0 to below 1"
    if name in SWITCHES and type(value) is not bool:
        wanted = "true or false"
    if name in TEXTS and not isinstance(value, str):
        wanted = "a name"
    if wanted:
        raise ValueError(f"{name}: wanted {wanted}, got {brief(value)}")


def _check_sides(name: str, value: Any) -> None:
    """Raise ValueError unless an option is a whole number that is not too small, or where it has
    two sides a list of two.
    """
    several = list(value) if name in SIDES and isinstance(value, list | tuple) else [value]
    whole = all(type(number) is int and number >= LEAST[name] for number in several)
    if not whole or (len(several) != 2 and isinstance(value, list | tuple)):
        wanted = f"a whole number from {LEAST[name]}" + (", or two" if name in SIDES else "")
        raise ValueError(f"{name}: wanted {wanted}, got {brief(value)}")


def _check_regrouping(vit: nn.Module, body: dict[str, Any], num_heads: int) -> None:
    """Raise ValueError where the heads of a ViT are not to be changed."""
    if body["qk_norm"]:
        raise refused(
            vit,
            "",
            f"its queries and keys are normalised in heads of {vit.blocks[0].attn.head_dim}, which "
            f"cannot become {num_heads} heads; leave num_heads out",
        )
    if vit.attn_pool is not None:
        raise refused(
            vit, "", "its pooling has heads too, which stay as they are; leave num_heads out"
        )


def _attending(
    attention: str | Sequence[str],
    softmax_blocks: Sequence[int],
    depth: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments that say how the blocks attend: those that are given, and defaults where
    a block has a use for them. A softmax in a list is one of ``softmax_blocks``.
    """
    exact = set(places_of_blocks(softmax_blocks, depth))
    names = [attention] * depth if isinstance(attention, str) else list(attention)
    if len(names) == depth:
        exact |= {i for i, name in enumerate(names) if name == "softmax"}
    args: dict[str, Any] = {
        "attention": attention if isinstance(attention, str) else names,
        "softmax_blocks": sorted(exact) or None,
    }
    others = [get_attention(name) for i, name in enumerate(names) if i not in exact]
    if not others:
        args["relative"] = "none"
        return args
    args["value_conv"] = 3
    if not all(kind.signed for kind in others):
        args["centre_keys"] = True
    return args


def _spec(vit: nn.Module, options: dict[str, Any]) -> DataSpec:
    """Return what a teacher's images are, with the channels and classes that are asked for."""
    cfg = getattr(vit, "pretrained_cfg", None) or {}
    channels = options.get("in_chans", vit.patch_embed.proj.in_channels)
    classes = options.get("num_classes", getattr(vit.head, "out_features", 0))
    size = options.get("img_size")
    known = getattr(vit, "data_spec", None)
    if known is not None:
        return _changed(known, channels, classes, size)
    names = tuple(cfg.get("label_names") or ())
    height, width = to_2tuple(size or vit.patch_embed.img_size)
    return DataSpec(
        in_chans=channels,
        num_classes=classes,
        class_names=names if len(names) == classes else (),
        mean=_per_channel(cfg.get("mean") or IMAGENET_DEFAULT_MEAN, channels),
        std=_per_channel(cfg.get("std") or IMAGENET_DEFAULT_STD, channels),
        encoding=None,
        img_size=height if height == width else (height, width),
    )


def _changed(
    spec: DataSpec, channels: int, classes: int, size: int | Sequence[int] | None
) -> DataSpec:
    """Return what a file says of its images, with the channels, classes and size asked for."""
    if channels != spec.in_chans:
        spec = replace(
            spec,
            in_chans=channels,
            mean=_per_channel(spec.mean, channels),
            std=_per_channel(spec.std, channels),
            bands=None,
        )
    if classes != spec.num_classes:
        spec = replace(spec, num_classes=classes, class_names=())
    if size is not None:
        spec = replace(spec, img_size=size if isinstance(size, int) else tuple(size))
    return spec


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a mean or deviation for each channel: the same for all where there are others."""
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (math.fsum(values) / len(values),) * channels


def _cfg(vit: nn.Module, spec: DataSpec, size: tuple[int, int]) -> dict[str, Any]:
    """Return what timm says of the teacher and holds for the model too."""
    cfg = getattr(vit, "pretrained_cfg", None) or {}
    kept = {key: cfg[key] for key in KEPT if cfg.get(key) is not None}
    kept |= dict(mean=spec.mean, std=spec.std, num_classes=spec.num_classes)
    return kept | dict(input_size=(spec.in_chans, *size))


def _placed(
    vit: nn.Module, model: VisionAttnTransformer, args: dict[str, Any], spec: DataSpec
) -> Converted:
    """Copy the teacher's weights into the model."""
    given, own = vit.state_dict(), model.state_dict()
    fitted: dict[str, Tensor] = {}
    for name, value in given.items():
        if name not in own:
            continue
        wanted = own[name].shape
        if name == "patch_embed.proj.weight":
            value = _fit_patches(value, wanted)
        if name == "pos_embed":
            value = fit_position(value, model, tuple(vit.patch_embed.grid_size))
        if value.shape == wanted:
            fitted[name] = value
        elif not name.startswith("head."):
            raise refused(vit, "", f"its {name} is {shape(value)}, the model's {shape(own[name])}")
    for name, value in fitted.items():
        own[name].copy_(value)
    for block in model.blocks:
        tables = block.attn.relative
        if tables is not None and tables.signed:
            for table in tables.parameters():
                table.zero_()
    resampled = [
        f"{name} {shape(given[name])} -> {shape(value)}"
        for name, value in fitted.items()
        if value is not given[name]
    ]
    return Converted(
        model=model,
        name=NAME,
        args=args,
        spec=spec,
        source=name_of(vit),
        taken=[name for name in own if name in fitted],
        resampled=resampled,
        new=[name for name in own if name not in fitted],
        left_out=[name for name in given if name not in fitted],
    )


def _fit_patches(weight: Tensor, wanted: torch.Size) -> Tensor:
    """Bring the filters of the patch embedding to another patch and number of channels."""
    if weight.shape[1] != wanted[1]:
        weight = adapt_channels(weight, wanted[1])
    if weight.shape[2:] == wanted[2:]:
        return weight
    return resample_patch_embed(weight, list(wanted[2:]))


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt filters to another number of input channels: summed for one, repeated and rescaled for
    more than three.
    """
    if weight.shape[1] == 1:
        return weight.repeat(1, channels, 1, 1) / channels
    return adapt_input_conv(channels, weight)
