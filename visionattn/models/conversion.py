"""``from_softmax`` and ``visionattn convert``: conversion of a timm ViT with its weights to one of
our models.

``docs/conversion.md`` describes what happens to each part and how useful copied weights are.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import GluMlp, get_act_layer, resample_patch_embed, to_2tuple
from timm.models import VisionTransformer, generate_default_cfgs
from timm.models._manipulate import adapt_input_conv
from torch import Tensor, nn

from visionattn.cli.commands import typed
from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.files import check_free, first_line
from visionattn.cli.untrusted import brief
from visionattn.layers.hook_detection import has_hooks
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.entry_points import model_cfg, register
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.patch_heads import PatchModel
from visionattn.models.registration import is_ours
from visionattn.models.segmentation import Segmenter, classifier_of
from visionattn.models.state_dicts import Placement, checkpoint_filter_fn, fit_position, shape
from visionattn.models.weights import (
    FORMAT,
    KEPT,
    UNBUILDABLE,
    DataSpec,
    check_finite,
    describe_args,
    describe_misfit,
    described,
    existing,
    load_model,
    read_metadata,
    read_state_dict,
    save_model,
)
from visionattn.ops.attentions import get_attention

NAME = "converted_vit"
"""timm's name of converted models; their arguments define the rest."""
default_cfgs = generate_default_cfgs({f"{NAME}.untrained": model_cfg()})
register(__name__, NAME, {})

ACCEPTED = "supported are timm's plain ViT, DeiT, DeiT III, DINOv2, SigLIP and CLIP"
ACTIVATIONS = {get_act_layer(name): name for name in ("gelu", "gelu_tanh", "quick_gelu", "silu")}
"""Activations other than the default, by class."""
IDLE = ("Dropout", "DropPath", "Identity", "PatchDropout")
"""Classes of modules that do nothing in eval mode; models may differ in them."""
TOLD_BY = ("num_heads", "head_dim", "gate_last")
"""Attributes that distinguish modules with equal parameters."""
RATES = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")
OF_ATTENTION = ("relative", "horizon", "normalization", "temperature_init", "feature_map")
OF_ATTENTION += ("random_features", "value_conv", "centre_keys", "form", "window_size")
OF_INPUT = ("img_size", "patch_size", "in_chans", "num_classes", "global_pool")
OF_INPUT += ("dynamic_img_size", "dynamic_img_pad", "pos_antialias")
OPTIONS = (*OF_ATTENTION, *OF_INPUT, *RATES, "drop_path_rate")
"""Options that a caller may set; the teacher determines the rest."""
HUBS, LOCAL = ("hf-hub:", "hf_hub:"), "local-dir:"
SOURCES = (*HUBS, LOCAL)
"""Prefixes of model names that timm loads from outside its registry."""
WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".tar")
EXAMPLE = "vit_tiny_patch16_224 --softmax-blocks 9 11 --output converted.safetensors --overwrite"


def name_of(vit: nn.Module) -> str:
    """Return timm's name of a model, or its class if it has none."""
    cfg = getattr(vit, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(vit).__name__


def _refused(vit: nn.Module, reason: str) -> ValueError:
    return ValueError(f"{name_of(vit)} cannot be converted: {reason}; {ACCEPTED}")


def body_of(vit: nn.Module) -> dict[str, Any]:
    """Return the arguments of ``VisionAttnTransformer`` that build the body of a ViT.

    They exclude ``in_chans``, ``num_classes`` and arguments of the attention. Values are JSON
    types, None if not needed.

    Args:
        vit: timm's ``VisionTransformer``, of any size.

    Raises:
        ValueError: it is another model, or has parts that these arguments do not build; one line.
    """
    if type(vit) is not VisionTransformer:
        raise _refused(vit, f"its class is {type(vit).__name__}")
    state, modules, width = vit.state_dict(), dict(vit.named_modules()), vit.embed_dim
    pre, post = (f"{norm}.weight" in state for norm in ("norm", "fc_norm"))
    try:
        ratio = (hidden := len(state["blocks.0.mlp.fc1.weight"])) / width
        body = dict(
            img_size=list(vit.patch_embed.img_size),
            patch_size=list(vit.patch_embed.patch_size),
            global_pool=vit.global_pool,
            embed_dim=width,
            depth=len(vit.blocks),
            num_heads=modules["blocks.0.attn"].num_heads,
            mlp_ratio=ratio if int(width * ratio) == hidden else (hidden + 0.5) / width,
            pos_embed="learn" if "pos_embed" in state else "none",
            dynamic_img_pad=vit.patch_embed.dynamic_img_pad,
            qkv_bias="blocks.0.attn.qkv.bias" in state,
            qk_norm="blocks.0.attn.q_norm.weight" in state,
            scale_attn_norm="blocks.0.attn.norm.weight" in state,
            scale_mlp_norm="blocks.0.mlp.norm.weight" in state,
            proj_bias="blocks.0.attn.proj.bias" in state,
            # Any number creates the factors; their values are copied.
            init_values=1e-5 if "blocks.0.ls1.gamma" in state else None,
            class_token="cls_token" in state,
            no_embed_class=vit.no_embed_class,
            reg_tokens=vit.num_reg_tokens,
            pre_norm="norm_pre.weight" in state,
            final_norm=pre or post,
            fc_norm=post,
            pool_include_prefix=vit.pool_include_prefix,
            norm_layer=None,
            norm_eps=getattr(modules["blocks.0.norm1"], "eps", None),
            act_layer=ACTIVATIONS.get(type(modules["blocks.0.mlp.act"])),
            mlp_layer="swiglu_packed" if type(modules["blocks.0.mlp"]) is GluMlp else "mlp",
        )
    except KeyError as error:
        raise _refused(vit, f"it has no {error.args[0]}") from error
    _check_same(vit, body)
    return body


def _check_same(vit: VisionTransformer, body: dict[str, Any]) -> None:
    """Check that a ViT matches, module by module, the all-softmax model built from these arguments.

    Raise ValueError if it does not, or if it has adapters or hooks.
    """
    classes = getattr(vit.head, "out_features", 0)
    sizes = dict(in_chans=vit.in_chans, num_classes=classes)
    with torch.device("meta"):
        built = VisionAttnTransformer(
            **body, **sizes, relative="none", softmax_blocks=range(body["depth"])
        )
    own, wanted = _parts(vit), _parts(built)
    for name in own | wanted:
        if own.get(name) != wanted.get(name):
            kind = f"{own[name][0]}({own[name][1]})" if name in own else "missing"
            raise _refused(vit, f"its {name} is {kind}")
    for name, module in vit.named_modules():
        if has_hooks(module) or "forward" in vars(module):
            raise _refused(vit, f"{name or 'it'} has hooks or another forward; remove them")


def _parts(model: nn.Module) -> dict[str, tuple]:
    """Return the properties that distinguish the modules of a model, by name: class, arguments,
    parameters.
    """
    return {
        name: (
            type(module).__name__.removeprefix("Dynamic") if name else "VisionTransformer",
            module.extra_repr(),
            [key for key, value in module._parameters.items() if value is not None],
            [getattr(module, key, None) for key in TOLD_BY],
        )
        for name, module in model.named_modules()
        if type(module).__name__ not in IDLE
    }


@dataclass(frozen=True)
class Converted(Placement):
    """A model with the weights of another, and a record of where each tensor came from."""

    model: VisionAttnTransformer
    """On the teacher's device, in its dtype and mode."""
    name: str
    """timm's name that builds the model."""
    args: dict[str, Any]
    """The arguments that build it, without ``num_classes`` and ``in_chans``; JSON types."""
    spec: DataSpec
    """Specification of the teacher's images."""

    def save(self, path: str | Path) -> None:
        """Write the model to a file in the format of ``save_model``, which ``load_model`` reads.

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
    """Convert a timm ``VisionTransformer`` with its weights to one of our models.

    The body is the teacher's: tokens, norms, MLPs, position and pooling. Its absolute position is
    resampled to each image. All weights are copied unchanged. New parts start with little effect:
    keys are centered, value convolutions and the relative tables of windows are zero, the relative
    tables of linear blocks have their local start, and TaylorShift's temperatures are 4. There is
    no output gate, because its start near zero would erase the effect of the weights. With all
    blocks in ``softmax_blocks``, the model computes the same as the teacher.

    Args:
        vit: the teacher: a plain ViT, DeiT, DeiT III, DINOv2, SigLIP or CLIP of timm, of any size,
            patch and width. It is not changed.
        attention: "kernelized", "taylorshift" or "window", or a list with one name per block, which
            may include "softmax".
        softmax_blocks: indices of blocks (negative: from the end) that keep the teacher's softmax,
            exact and quadratic.
        num_heads: number of heads; None: the teacher's. Another number splits the same weights
            differently and computes another function.
        options: arguments of ``VisionAttnTransformer`` named in ``OPTIONS``: of the attention
            (``relative``, ``value_conv``, ...), of images (``img_size``, ``patch_size``,
            ``in_chans``, ``num_classes``, ``global_pool``, ...) and dropout rates (default 0).
            ``pos_antialias=False`` resamples the position as the original DINOv2 does.
            ``value_conv`` is 3 and ``centre_keys`` True by default. Other arguments are accepted
            only with the teacher's value.

    Returns:
        ``Converted``: the model, and lists of copied, resampled, new and unused tensors.

    Raises:
        ValueError: a teacher with an unsupported body, heads that do not divide the width, blocks
            that do not exist, or options of the teacher's body; one line.
    """
    body = body_of(vit)
    for name, value in options.items():
        if name not in OPTIONS and (name not in body or body[name] != value):
            has = f", {brief(body[name])}" if name in body else ""
            raise ValueError(
                f"expected options among {', '.join(OPTIONS)}, got {brief(name)}; others are the "
                f"teacher's{has}"
            )
    options = {name: value for name, value in options.items() if name in OPTIONS}
    if num_heads not in (None, body["num_heads"]):
        if body["qk_norm"] or vit.attn_pool is not None:
            raise _refused(vit, "its norms or its pooling have heads too; remove num_heads")
        body["num_heads"] = num_heads
    spec = _spec(vit, options)
    args = {**body, **_attending(attention, softmax_blocks, body["depth"]), **options}
    args = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in args.items()
        if value is not None and key not in ("in_chans", "num_classes")
    }
    try:
        model = timm.create_model(
            NAME,
            in_chans=spec.in_chans,
            num_classes=spec.num_classes,
            pretrained_cfg_overlay=_cfg(vit, spec, to_2tuple(args["img_size"])),
            device=vit.patch_embed.proj.weight.device,
            dtype=vit.patch_embed.proj.weight.dtype,
            **args,
        )
    except UNBUILDABLE as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{name_of(vit)} cannot be converted with these options: {describe_args(options)} "
            f"({first_line(error)})"
        ) from error
    return _placed(vit, model.train(vit.training), args, spec)


def _attending(
    attention: str | Sequence[str], softmax_blocks: Sequence[int], depth: int
) -> dict[str, Any]:
    """Return the arguments for the attention of the blocks, with defaults if a block can use them.

    A softmax in a list counts as one of ``softmax_blocks``.
    """
    exact = set(places_of_blocks(softmax_blocks, depth))
    names = [attention] * depth if isinstance(attention, str) else list(attention)
    if len(names) == depth:
        exact |= {i for i, name in enumerate(names) if name == "softmax"}
    others = [get_attention(name) for i, name in enumerate(names) if i not in exact]
    args: dict[str, Any] = {"value_conv": 3} if others else {"relative": "none"}
    if others and not all(kind.signed for kind in others):
        args["centre_keys"] = True
    args["attention"] = attention if isinstance(attention, str) else names
    return args | {"softmax_blocks": sorted(exact) or None}


def _spec(vit: nn.Module, options: dict[str, Any]) -> DataSpec:
    """Return the specification of a teacher's images, with the requested channels and classes."""
    cfg, spec = getattr(vit, "pretrained_cfg", None) or {}, getattr(vit, "data_spec", None)
    channels, size = options.get("in_chans", vit.in_chans), options.get("img_size")
    classes = options.get("num_classes", getattr(vit.head, "out_features", 0))
    if spec is None:
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
    if channels != spec.in_chans:
        mean, std = (_per_channel(values, channels) for values in (spec.mean, spec.std))
        spec = replace(spec, in_chans=channels, mean=mean, std=std, bands=None)
    if classes != spec.num_classes:
        spec = replace(spec, num_classes=classes, class_names=())
    if size is not None:
        spec = replace(spec, img_size=size if isinstance(size, int) else tuple(size))
    return spec


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """Return a mean or standard deviation per channel: their average if the numbers differ."""
    if len(values) == channels:
        return tuple(float(value) for value in values)
    return (math.fsum(values) / len(values),) * channels


def _cfg(vit: nn.Module, spec: DataSpec, size: tuple[int, int]) -> dict[str, Any]:
    """Return the part of the teacher's timm configuration that holds for the model too."""
    cfg = getattr(vit, "pretrained_cfg", None) or {}
    kept = {key: cfg[key] for key in KEPT if cfg.get(key) is not None}
    kept |= dict(mean=spec.mean, std=spec.std, num_classes=spec.num_classes)
    return kept | dict(input_size=(spec.in_chans, *size))


def _placed(vit: nn.Module, model: nn.Module, args: dict[str, Any], spec: DataSpec) -> Converted:
    """Copy the teacher's weights into the model."""
    given, own = vit.state_dict(), model.state_dict()
    fitted: dict[str, Tensor] = {}
    for name, value in given.items():
        if name == "patch_embed.proj.weight":
            value = _fit_patches(value, own[name].shape)
        elif name == "pos_embed":
            value = fit_position(value, model, tuple(vit.patch_embed.grid_size))
        if name in own and value.shape == own[name].shape:
            fitted[name] = value
            own[name].copy_(value)
    for block in model.blocks:
        tables = block.attn.relative
        if tables is not None and tables.signed:
            for table in tables.parameters():
                table.zero_()
    return Converted(
        model=model,
        name=NAME,
        args=args,
        spec=spec,
        source=name_of(vit),
        taken=[name for name in own if name in fitted],
        resampled=[
            f"{name} {shape(given[name])} -> {shape(value)}"
            for name, value in fitted.items()
            if value is not given[name]
        ],
        new=[name for name in own if name not in fitted],
        left_out=[name for name in given if name not in fitted],
    )


def _fit_patches(weight: Tensor, wanted: torch.Size) -> Tensor:
    """Convert the filters of the patch embedding to another patch size and number of channels."""
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


# Teachers: a timm ViT with its weights, by timm's name or from a file


def open_teacher(
    source: str,
    *,
    body: str | None = None,
    pretrained: bool = False,
    args: dict[str, Any] | None = None,
) -> tuple[nn.Module, list[str]]:
    """Return a timm model in eval mode, and lines about its weights.

    Args:
        source: a file of weights; a timm model name, with or without a tag; or ``hf-hub:...`` or
            ``local-dir:...`` as in timm. A file at that path has priority.
        body: timm's name of the model that a file's weights belong to; None if the file states it,
            as files of ``visionattn train`` do.
        pretrained: use timm's weights for a name, which may need a download; otherwise weights are
            random.
        args: keyword arguments of the model. For a file of weights, missing numbers of classes and
            channels, patch size and size of a square image are read from its tensors.

    Raises:
        FileNotFoundError, PermissionError: the file cannot be read.
        ValueError: timm has no such model, the model does not accept these arguments or cannot be
            converted, or the weights do not fit, are not finite or not available; one line.
    """
    args, elsewhere = args or {}, source.startswith(SOURCES)
    if is_file(source):
        vit, lines = _from_file(existing(source), body, args)
    else:
        if body is not None:
            raise ValueError(
                f"--model {body} needs a file of weights, got the name {source}; remove it"
            )
        if not elsewhere:
            check_name(source)
        if pretrained and not elsewhere:  # refuse before the download
            with torch.device("meta"):
                body_of(created(source, False, args))
        vit = created(source, pretrained or elsewhere, args)
        said = "timm's weights" if pretrained or elsewhere else "random weights, no --pretrained"
        lines = [f"{source}, {said}"]
    check_finite(vit.state_dict(), source)
    return vit.eval(), lines


def is_file(source: str) -> bool:
    """Return whether a teacher is a file of weights, existing or not, rather than a name."""
    if source.startswith(SOURCES):
        return False
    named = "/" not in source and Path(source).suffix not in WEIGHTS
    return Path(source).exists() or not (named or timm.is_model(source))


def check_name(name: str) -> None:
    """Raise ValueError for a name that timm does not have, with the nearest one."""
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=1, cutoff=0)[0]
        raise ValueError(f"expected a file or a timm model, got {name:.80}; did you mean {near}?")


def created(name: str, pretrained: bool, args: dict[str, Any]) -> nn.Module:
    """Build a model with timm; errors are one line."""
    try:
        return timm.create_model(name, pretrained=pretrained, **args)
    except (*UNBUILDABLE, OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        way_out = ""
        if isinstance(error, OSError):
            way_out = (
                f"; without a connection, pass --teacher FILE --model {name} to convert or distil, "
                "and the file that convert writes to --init_from of train"
            )
        given = f" with {describe_args(args)}" if args else ""
        raise ValueError(
            f"timm cannot build {name}{given}: {first_line(error)}{way_out}"
        ) from error


def _from_file(path: Path, body: str | None, args: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """Return the model of a file of weights."""
    try:
        of_ours = read_metadata(path).get("format") == FORMAT
    except ValueError:
        of_ours = False
    if of_ours:
        if body is not None or args:
            raise ValueError(f"{path} states its own model; remove --model and --args")
        model = load_model(path)
        if isinstance(model, PatchModel):
            given = "classes of pixels" if isinstance(model, Segmenter) else "outputs of patches"
            raise ValueError(
                f"expected an image classifier as teacher, got a model with {given} ({path})"
            )
        return model, [f"{path}"]
    state = read_state_dict(path)
    if body is None:
        raise ValueError(
            f"{path} does not state the model of its weights; pass --model, e.g. "
            "vit_small_patch16_224"
        )
    check_name(body)
    vit = created(body, False, _shaped(state, body, args))
    fitted = filter_checkpoint(state, vit, body)
    if misfit := describe_misfit(fitted, vit.state_dict()):
        raise ValueError(
            f"{path} does not fit {body}: {misfit}; pass the model's arguments with --args, "
            "e.g. '{depth: 6}'"
        )
    vit.load_state_dict(fitted)
    resampled = [
        f"{name} {shape(state[name])} -> {shape(value)}"
        for name, value in fitted.items()
        if name in state and state[name].shape != value.shape
    ]
    lines = [f"  resampled ({len(resampled)}): {', '.join(resampled)}"] if resampled else []
    return vit, [f"{path}, weights of {body}", *lines]


def _shaped(state: dict[str, Tensor], body: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a body for the classes, channels, patch size and image size of a timm
    state dict.

    Given arguments have priority.
    """
    head, patches = state.get("head.weight"), state.get("patch_embed.proj.weight")
    if patches is None or patches.ndim != 4:  # another project's names, which timm may know
        return args
    shown: dict[str, Any] = {"num_classes": 0 if head is None else len(head)}
    shown |= {"in_chans": patches.shape[1], "patch_size": tuple(patches.shape[2:])}
    with torch.device("meta"):
        vit = created(body, False, shown | args)
    own, position = getattr(vit, "pos_embed", None), state.get("pos_embed")
    if own is not None and position is not None and own.shape != position.shape:
        places = position.shape[1] - (own.shape[1] - vit.patch_embed.num_patches)
        side = math.isqrt(max(0, places))
        if side * side == places:
            shown["img_size"] = tuple(side * patch for patch in patches.shape[2:])
    return shown | args


def filter_checkpoint(given: dict[str, Tensor], model: nn.Module, name: str) -> dict[str, Tensor]:
    """Rename and resample a state dict for a model with its module's ``checkpoint_filter_fn``.

    Raises:
        ValueError: the filter fails on it; one line.
    """
    module = sys.modules[timm.model_entrypoint(name).__module__]
    adapt = getattr(module, "checkpoint_filter_fn", lambda state, model: state)
    try:
        return dict((checkpoint_filter_fn if is_ours(name) else adapt)(dict(given), model))
    except (RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(f"the weights do not fit the model {name}: {first_line(error)}") from error


# ``visionattn convert``; a docstring under each field is its help text


@dataclass
class StudentOptions:
    """The source of the weights, and the attention of the new model."""

    teacher: str | None = None
    """Teacher: a timm name such as ``vit_small_patch14_dinov2.lvd142m``, ``hf-hub:...``,
    ``local-dir:...``, or a file of weights, e.g. of ``visionattn train`` with a ``vit_*`` model.
    """
    pretrained: bool = False
    """Use timm's weights of the name, downloaded if needed; otherwise weights are random."""
    model: str | None = None
    """For a file of weights: timm name of its model; files of ``visionattn train`` state it."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the teacher, e.g. ``{img_size: 518}``."""
    attention: list[str] = field(default_factory=lambda: ["kernelized"])
    """Attention of the new model: ``kernelized``, ``taylorshift`` or ``window`` for all blocks, or
    one name per block.
    """
    softmax_blocks: list[int] = field(default_factory=list)
    """Indices of blocks that keep the teacher's softmax; -1 is the last."""
    num_heads: int | None = None
    """Number of heads; None: the teacher's. Another number splits the same weights differently."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further attention arguments of ``visionattn.models.from_softmax``, e.g. ``{value_conv: 5,
    centre_keys: false}``; ``convert`` accepts all of its arguments.
    """


@dataclass
class ConvertOptions(StudentOptions):
    """A model with the weights of another."""

    seed: int = 0
    """Seed of random weights and of relative tables."""
    top_patches: int | None = None
    """Only for a segmentation model of ``visionattn train``, without the other options: write an
    image classifier. Its output for a class is the mean of this number of the largest patch outputs
    of the class, each minus the output of the background, the first class.
    """
    output: str | None = None
    """Safetensors file to write; ``visionattn.load_model`` and all commands read it."""
    overwrite: bool = False
    """Replace an existing file."""


def teacher_of(options: StudentOptions) -> tuple[nn.Module, list[str]]:
    """Open the teacher named by the options, as ``open_teacher`` does.

    Raises:
        ValueError: a file together with ``pretrained``, or as ``open_teacher``.
    """
    source = str(options.teacher)
    if options.pretrained and is_file(source):
        raise ValueError(f"pretrained needs a timm name, got the file {source}; remove it")
    body = dict(body=options.model, pretrained=options.pretrained, args=options.args)
    return open_teacher(source, **body)


def student_of(
    options: StudentOptions, vit: nn.Module, softmax_blocks: Sequence[int] | None = None
) -> Converted:
    """Build the model requested by the options, as ``from_softmax`` does.

    Args:
        softmax_blocks: replaces the value in the options; None: use the options.
    """
    names = options.attention
    asked = dict(
        attention=names[0] if len(names) == 1 else names,
        softmax_blocks=options.softmax_blocks if softmax_blocks is None else softmax_blocks,
        num_heads=options.num_heads,
    )
    return from_softmax(vit, **(asked | options.options))


def _write_classifier(options: ConvertOptions, output: Path) -> str:
    """Write the classifier of ``top_patches``, and return a line about it."""
    own = ("teacher", "output", "overwrite", "top_patches")
    for key, value in vars(ConvertOptions()).items():
        if key not in own and getattr(options, key) != value:
            raise ValueError(f"top_patches does not change the model; remove {key}")
    model = load_model(str(options.teacher))
    if not isinstance(model, Segmenter):
        raise ValueError(f"top_patches needs a segmentation model, got {options.teacher}")
    name, args, spec = described(read_metadata(str(options.teacher)), str(options.teacher))
    made, head = classifier_of(model, int(options.top_patches)), {"head_top": options.top_patches}
    args = {key: value for key, value in args.items() if key != "head_stride"} | head
    names = spec.class_names[1:]
    changed = dict(task="classification", num_classes=made.num_classes, class_names=names)
    save_model(output, made, name, args, replace(spec, **changed, colours=None))
    return f"{output}: classes of images, {', '.join(names) or made.num_classes}"


def convert(argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Convert as the flags of ``visionattn convert`` say, and report the origin of the weights.

    Raises:
        ValueError: a flag is wrong, or a file or a name is missing; one line.
    """
    from visionattn.cli.parsing import parse, with_first

    options = parse(
        ConvertOptions,
        with_first(argv, "teacher"),
        command="convert",
        description="Convert a timm ViT and its weights to a model of visionattn. The first word "
        "may be the teacher, without its flag.",
        example=EXAMPLE,
    )
    if options.teacher is None or options.output is None:
        raise ValueError(
            "expected a teacher, e.g. vit_small_patch16_224 or a file of weights, and --output FILE"
        )
    output, source = Path(options.output), Path(options.teacher.removeprefix(LOCAL))
    check_free(output, options.overwrite)
    if output.exists() and source.exists() and output.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{output} belongs to the teacher; pass another --output")
    if options.top_patches is not None:
        say(_write_classifier(options, output))
        return
    torch.manual_seed(options.seed)
    vit, lines = teacher_of(options)
    converted = student_of(options, vit)
    converted.save(output)
    parameters = sum(parameter.numel() for parameter in converted.model.parameters())
    kinds = [block.attn.attention for block in converted.model.blocks]
    several = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in dict.fromkeys(kinds))
    size = " x ".join(map(str, converted.model.patch_embed.img_size))
    train = typed("train", "--model.name", converted.name, "--init-from", str(output))
    lines += [
        *converted.lines(),
        f"{output}: {parameters:,} parameters, {len(kinds)} blocks ({several}), image size {size} "
        "px",
        "copied weights are only an initialization; to train on your own data:",
        f"  {train} --data.name folder --data.root FOLDER",
    ]
    say("\n".join(lines))
