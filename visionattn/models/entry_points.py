"""timm entry points of our models, for each family and size, and the ``pretrained_cfg`` that
describes the images of a model with weights.

timm's configuration has fewer fields for images than ``DataSpec``. Its transform pads ``native``
and ``pad`` images to a square around their center, and has no bands or value ranges. So the whole
specification is attached as a note, and a model of ours built with weights has it again as
``data_spec``.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model_pretrained,
    resolve_pretrained_cfg,
)
from torch import nn

from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.patch_heads import HEAD_ARGS
from visionattn.models.pyramid import STRIDES
from visionattn.models.registration import (
    DEFAULTS,
    PYRAMID,
    args_of_name,
    class_of,
    is_ours,
    register_as,
)
from visionattn.models.state_dicts import FeatureMaps, filter_pretrained
from visionattn.models.weights import (
    FORMAT,
    DataSpec,
    check_hash,
    described,
    read_metadata,
    read_spec,
)

SIZES = {
    "t": ("tiny", dict(embed_dim=192, depth=12)),
    "s": ("small", dict(embed_dim=384, depth=12)),
    "b": ("base", dict(embed_dim=768, depth=12)),
    "l": ("large", dict(embed_dim=1024, depth=24)),
}
WEIGHT_SOURCES = ("url", "file", "hf_hub_id", "state_dict")
PIXEL = dict(
    img_size=32,
    patch_size=1,
    in_chans=256,
    num_classes=10,
    embed_dim=256,
    depth=1,
    num_heads=4,
    mlp_ratio=1.0,
)
PIXEL |= dict(init_values=1e-4, global_pool="token")
"""A model whose patches are the pixels of gray 32 x 32 images, one-hot ``[B, 256, 32, 32]``.

Source: TaylorShift, section 5 (class token, LayerScale from 1e-4, MLP ratio 1).
"""
LOCAL = dict(value_conv=3, output_gate=True)
"""Options of the models with relative position that bounded attention lacks compared with softmax:
the finalists of ``docs/quality.md``.
"""
FREE = ("form", "img_size", "dynamic_img_size", "dynamic_img_pad", "global_pool", "weight_init")
FREE += ("fix_init", "device", "dtype", "features_only", "out_indices", "output_stride")
"""Arguments that may differ from the file's, in addition to dropout rates: no weight depends on
them.
"""
FITTED = ("patch_size", "horizon", "in_chans", "num_classes")
"""Arguments to which ``pretrained=True`` adapts the loaded weights."""

NOTE = "visionattn.DataSpec "
"""Prefix of the note that holds a specification as JSON."""

CROP_MODES = {"crop": "center", "stretch": "squash", "pad": "border", "native": "border"}
"""timm's names for the ways of fitting images of any size to a model."""
USUAL_PX = 224
"""Image side if neither a size nor a number of patches is given."""


def _family_names(family: str, head_dim: int = 64) -> dict[str, dict[str, Any]]:
    """Return the short name, long name and pyramid name of each size, with the arguments of the
    size.
    """
    names = {}
    for letter, (word, size) in SIZES.items():
        size = size | {"num_heads": size["embed_dim"] // head_dim}
        names[f"{family}_{letter}"] = names[f"{family}_{word}_patch16_224"] = size
        names[f"{family}_{letter}_pyramid"] = size | PYRAMID
    return names


def model_cfg(**fields) -> dict[str, Any]:
    """Return timm's configuration of a model, without weights unless ``fields`` names some."""
    cfg = dict(
        input_size=(3, 224, 224),
        num_classes=1000,
        fixed_input_size=False,
        pool_size=None,
        crop_pct=0.9,
        interpolation="bicubic",
        mean=IMAGENET_DEFAULT_MEAN,
        std=IMAGENET_DEFAULT_STD,
        first_conv="patch_embed.proj",
        classifier="head",
        license="apache-2.0",
    )
    return cfg | fields


def family_cfgs(family: str, pixel: str | None = None, **fields):
    """Return the default configurations of a family: one per name, untrained, and one for its pixel
    model if it has one.
    """
    cfgs = {f"{name}.untrained": model_cfg(**fields) for name in _family_names(family)}
    if pixel is not None:
        size = dict(
            input_size=(256, 32, 32),
            num_classes=10,
            crop_pct=1.0,
            mean=(0.0,) * 256,
            std=(1.0,) * 256,
        )
        cfgs[f"{pixel}.untrained"] = model_cfg(**size, **fields)
    return generate_default_cfgs(cfgs)


def register_family(module: str, family: str, *, head_dim: int = 64, **options) -> None:
    """Register the names of each size (short, long and pyramid) as entry points of ``module``.

    Args:
        module: ``__name__`` of the module that holds the family's ``default_cfgs``.
        family: prefix of the names.
        head_dim: width of a head.
        options: arguments of ``VisionAttnTransformer`` that define the family.
    """
    for name, size in _family_names(family, head_dim).items():
        register(module, name, size | options)


def register(module: str, name: str, args: dict[str, Any]) -> None:
    """Register a name as an entry point of ``module``.

    Args:
        module: ``__name__`` of the module whose ``default_cfgs`` have the name.
        name: the name.
        args: the arguments of ``VisionAttnTransformer`` for this name.
    """
    DEFAULTS[name] = args

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        overlay = kwargs.get("pretrained_cfg_overlay") or {}
        path = overlay.get("file") if pretrained else _checkpoint_of_caller()
        stated, spec = {}, None
        if path:
            if Path(path).is_file():  # timm reports a missing file
                check_hash(Path(path))
            stated, spec = _args_of_file(path, name, DEFAULTS[name], kwargs, fitted=pretrained)
        args = args_of_name(name, stated | kwargs) | stated | kwargs
        if not pretrained:
            return _build(name, pretrained, args)
        if spec is not None:
            said = images_cfg(spec, to_2tuple(args.get("patch_size", 16)))
            args["pretrained_cfg_overlay"] = said | overlay
        model = _build(name, pretrained, args)
        say_images(model)
        return model

    doc = f"{name}: " + ", ".join(f"{key} {value}" for key, value in args.items())
    register_as(create, module, name, doc)


def _checkpoint_of_caller() -> Any:
    """Return the ``checkpoint_path`` of the ``timm.create_model`` call behind the calling entry
    point, or None.

    timm does not pass it on; it loads the file into the finished model.
    """
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") != "timm.models._factory":
        return None
    return frame.f_locals.get("checkpoint_path")


def _args_of_file(
    path: str | Path,
    name: str,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    *,
    fitted: bool,
) -> tuple[dict[str, Any], Any]:
    """Return the arguments in one of our files that are missing in ``given``, and the ``DataSpec``
    of its images.

    For other files return no arguments and None.

    Args:
        path: the file.
        name: the requested model, which may be a pyramid over the file's model.
        defaults: the arguments of ``name``.
        given: arguments of the call.
        fitted: whether weights are adapted to ``FITTED``.

    Raises:
        ValueError: the file has another attention, or ``given`` contradicts it; one line.
    """
    try:
        metadata = read_metadata(path)
    except (ValueError, OSError):  # timm reads the file or reports the error
        return {}, None
    if metadata.get("format") != FORMAT:
        return {}, None
    source, stated, spec = described(metadata, path)
    if not is_ours(source):
        return {}, None
    own = DEFAULTS[source.partition(".")[0]].get("attention")
    if own != defaults.get("attention") and "attention" not in given:
        raise ValueError(
            f"expected attention {defaults.get('attention')} for {name}, got a {source} with "
            f"attention {own} ({path}); create {source}, or the pyramid of its family"
        )
    stated = _of_body(stated) | {"in_chans": spec.in_chans}
    if spec.task != "segmentation":
        stated["num_classes"] = spec.num_classes
    if "pyramid_channels" not in defaults:
        stated.pop("pyramid_channels", None)
    free = FREE + FITTED if fitted else FREE
    for key, value in given.items():
        if key in free or "drop" in key or key not in stated:
            continue
        if _comparable(key, value) != _comparable(key, stated[key]):
            raise ValueError(
                f"expected {key} {stated[key]!r} as in {path}, got {value!r}; remove it"
            )
    return {key: value for key, value in stated.items() if key not in given}, spec


def _of_body(stated: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the body of a segmentation model; arguments of other models are
    unchanged.

    Blocks above the last one that the head reads are not in the file.
    """
    body = {key: value for key, value in stated.items() if key not in HEAD_ARGS}
    if stated.get("head_blocks") is None:
        return body
    depth = body["depth"]
    body["depth"] = last = places_of_blocks(stated["head_blocks"], depth)[-1] + 1
    if not isinstance(body["attention"], str):
        body["attention"] = body["attention"][:last]
    if body.get("softmax_blocks"):
        body["softmax_blocks"] = [n % depth for n in body["softmax_blocks"] if n % depth < last]
    return body


def _comparable(key: str, value: Any) -> Any:
    if key == "patch_size":
        return tuple(to_2tuple(value))
    return tuple(value) if isinstance(value, list) else value


def _build(name: str, pretrained: bool, args: dict[str, Any]) -> nn.Module:
    """Build through timm, which handles ``features_only``, weights and configurations.

    Raises:
        ValueError: ``pretrained=True`` without available weights.
    """
    if pretrained:
        given = [args.get(key) for key in ("pretrained_cfg", "pretrained_cfg_overlay")]
        cfg = resolve_pretrained_cfg(name, *given)
        if not any(getattr(cfg, key) for key in WEIGHT_SOURCES):
            known = [each for each in DEFAULTS if is_model_pretrained(each)]
            others = f"; visionattn has some of {', '.join(known)}" if known else ""
            raise ValueError(
                f"no pretrained weights of {name}{others}; build it with pretrained=False, or pass "
                'pretrained_cfg_overlay=dict(file="...")'
            )
    args.pop("output_stride", None)
    indices = len(STRIDES) if "pyramid_channels" in args else 3
    return build_model_with_cfg(
        class_of(args),
        name,
        pretrained,
        pretrained_filter_fn=filter_pretrained,
        feature_cfg=dict(out_indices=args.pop("out_indices", indices), feature_cls=FeatureMaps),
        **args,
    )


def images_cfg(spec: DataSpec, patch_px: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Return the fields of timm's ``pretrained_cfg`` that describe a model's images and outputs.

    Args:
        spec: their specification.
        patch_px: height and width of the model's patches in pixels; ``input_size`` is a whole
            number of patches.
    """
    one_hot = spec.encoding is not None
    fields = {
        "input_size": (spec.in_chans, *nominal_size(spec, patch_px)),
        "mean": (0.0,) * spec.in_chans if one_hot else spec.mean,
        "std": (1.0,) * spec.in_chans if one_hot else spec.std,
        "num_classes": spec.num_classes,
        "crop_pct": 1.0,
        "crop_mode": CROP_MODES[spec.fit],
        "interpolation": "bilinear",
        "notes": (NOTE + json.dumps(spec.stored()),),
    }
    return fields | ({"label_names": spec.class_names} if spec.class_names else {})


def nominal_size(spec: DataSpec, patch_px: tuple[int, int]) -> tuple[int, int]:
    """Return height and width in pixels of training images, in whole patches; with ``native``, of
    the largest ones.
    """
    if spec.img_size is not None:
        sides = spec.img_size if isinstance(spec.img_size, tuple) else (spec.img_size,) * 2
    elif spec.max_patches is not None:
        side = math.isqrt(spec.max_patches)
        sides = (side * patch_px[0], side * patch_px[1])
    else:
        sides = (USUAL_PX, USUAL_PX)
    height, width = (max(1, px // patch) * patch for px, patch in zip(sides, patch_px, strict=True))
    return height, width


def say_images(model: nn.Module) -> None:
    """Set ``model.data_spec`` from the note of the model's ``pretrained_cfg``, if it has one, as
    ``load_model`` does.

    Outputs of a new head have no names; a model with other channels gets no specification.

    Raises:
        ValueError: the note is malformed; one line.
    """
    notes = model.pretrained_cfg.get("notes") or ()
    said = [note for note in notes if isinstance(note, str) and note.startswith(NOTE)]
    if not said:
        return
    spec = read_spec(said[0].removeprefix(NOTE))
    if getattr(model, "in_chans", None) != spec.in_chans:
        return
    outputs = getattr(model, "num_classes", 0)  # a wrapper of features has none
    if outputs != spec.num_classes:
        spec = replace(spec, num_classes=outputs, class_names=())
    model.data_spec = spec
