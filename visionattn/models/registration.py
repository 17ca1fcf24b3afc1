"""How a family of models reaches timm's registry: sizes, default configurations, entry points, and
which arguments a name stands for, now and in older files; and the model of a task by its name.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import to_2tuple
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model,
    is_model_pretrained,
    model_entrypoint,
    register_model,
    resolve_pretrained_cfg,
)
from torch import nn

from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.mixed_blocks import places_of_blocks
from visionattn.models.pyramid import STRIDES, PyramidTransformer
from visionattn.models.segmentation import HEAD_ARGS, Segmenter
from visionattn.models.state_dicts import FeatureMaps, filter_pretrained

Task = Literal["classification", "segmentation", "generate"]
"""What has an output: an image, each of its pixels, or, value by value, what comes next in it."""

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
"""A model whose patches are the pixels of grey 32 x 32 images, one-hot ``[B, 256, 32, 32]``.

Source: TaylorShift, section 5 (class token, LayerScale from 1e-4, MLP ratio 1).
"""
PYRAMID = dict(pyramid_channels=256)
"""What a name of a pyramid adds to the arguments of the model without one."""
LOCAL = dict(value_conv=3, output_gate=True)
"""What attention lacks beside a softmax and the models of relative position have: the finalists of
``docs/quality.md``.
"""
DEFAULTS: dict[str, dict[str, Any]] = {}
"""The arguments that each name of ours stands for."""
WRITERS: dict[str, type[nn.Module]] = {}
"""The models that write images value by value, by their names: no vision transformers."""
FORMER: dict[str, dict[str, Any]] = {}
"""Those that it stood for when files did not state them: in formats 1 and 2 of weights and states.
"""
STATED_ELSEWHERE = ("img_size", "in_chans", "num_classes", "device", "dtype")
FREE = ("form", "img_size", "dynamic_img_size", "dynamic_img_pad", "global_pool", "weight_init")
FREE += ("fix_init", "device", "dtype", "features_only", "out_indices", "output_stride")
"""Arguments that may differ from those of the file, besides rates of dropout: no weight depends on
them.
"""
FITTED = ("patch_size", "horizon", "in_chans", "num_classes")
"""Arguments to which weights are fitted that ``pretrained=True`` loads."""


def is_ours(name: str) -> bool:
    """Tell whether timm has the vision transformer of this name from this package."""
    return model_entrypoint(name).__module__.startswith("visionattn.") and name not in WRITERS


def _family_names(family: str, head_dim: int = 64) -> dict[str, dict[str, Any]]:
    """Return the short and the long name of each size, and that of its pyramid, with the arguments
    of the size.
    """
    names = {}
    for letter, (word, size) in SIZES.items():
        size = size | {"num_heads": size["embed_dim"] // head_dim}
        names[f"{family}_{letter}"] = names[f"{family}_{word}_patch16_224"] = size
        names[f"{family}_{letter}_pyramid"] = size | PYRAMID
    return names


def class_of(args: dict[str, Any]) -> type[VisionAttnTransformer]:
    """Return the class of the models that are built with such arguments."""
    return PyramidTransformer if "pyramid_channels" in args else VisionAttnTransformer


def model_cfg(**fields) -> dict[str, Any]:
    """Return timm's description of a model, without weights unless ``fields`` names some."""
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
    """Return the default configurations of a family: of each of its names, untrained, and of its
    pixel model if it has one.
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


def register_family(
    module: str,
    family: str,
    *,
    head_dim: int = 64,
    former: dict[str, Any] | None = None,
    **options,
) -> None:
    """Register the names of each size, short, long and of a pyramid, as entry points of
    ``module``.

    Args:
        module: ``__name__`` of the module that holds the family's ``default_cfgs``.
        family: what the names begin with.
        head_dim: width of a head.
        former: the options as they were when files did not state them, see ``FORMER``, with heads
            of width 64; None: the same.
        options: arguments of ``VisionAttnTransformer`` that make the family.
    """
    older = _family_names(family)
    for name, size in _family_names(family, head_dim).items():
        before = older[name] | (options if former is None else former)
        register(module, name, size | options, before)


def register(
    module: str, name: str, args: dict[str, Any], former: dict[str, Any] | None = None
) -> None:
    """Register a name as an entry point of ``module``.

    Args:
        module: ``__name__`` of the module that has ``default_cfgs`` of the name.
        name: the name.
        args: the arguments of ``VisionAttnTransformer`` that it stands for.
        former: see ``FORMER``; None: no older file names it.
    """
    register_model(_entry_point(module, name, args))
    if former is not None:
        FORMER[name] = former


def register_writer(module: str, name: str, kind: type[nn.Module]) -> None:
    """Register a model that writes images value by value, as an entry point of ``module``.

    It is built as it stands: it has neither features nor pretrained weights of timm's kind.

    Args:
        module: ``__name__`` of the module that calls this.
        name: its name.
        kind: its class, which takes ``in_chans``, ``num_classes`` and its options.
    """
    WRITERS[name] = kind

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        if pretrained:
            raise ValueError(
                f"there are no pretrained weights of {name}; build it with pretrained=False"
            )
        timms = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
        return kind(**{key: value for key, value in kwargs.items() if key not in timms})

    create.__name__ = create.__qualname__ = name
    create.__module__ = module
    create.__doc__ = kind.__doc__
    register_model(create)


def complete(
    name: str, args: dict[str, Any], defaults: dict[str, dict[str, Any]] = DEFAULTS
) -> dict[str, Any]:
    """Return the arguments of a model with all that its name or its class adds to them: they build
    the same model when other arguments are the defaults. Those of models that are not ours stay.

    A default of None cannot be stated, as timm drops it. So no name may change an option that is
    None in the class.

    Args:
        name: a name of timm.
        args: what was given, apart from ``STATED_ELSEWHERE``, which stays as it is.
        defaults: what names stand for.
    """
    if name not in WRITERS and not (is_model(name) and is_ours(name)):
        return args
    kind = WRITERS.get(name, VisionAttnTransformer)
    parameters = inspect.signature(kind).parameters.values()
    of_class = {p.name: p.default for p in parameters if p.default is not None}
    whole = of_class | defaults.get(name.partition(".")[0], {})
    rest = {key: value for key, value in whole.items() if key not in STATED_ELSEWHERE}
    return args | {key: value for key, value in rest.items() if key not in args}


def _entry_point(module: str, name: str, args: dict[str, Any]) -> Callable[..., nn.Module]:
    DEFAULTS[name] = args

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        overlay = kwargs.get("pretrained_cfg_overlay") or {}
        path = overlay.get("file") if pretrained else _checkpoint_of_caller()
        stated, spec = {}, None
        if path:
            stated, spec = _args_of_file(path, name, DEFAULTS[name], kwargs, fitted=pretrained)
        args = DEFAULTS[name] | stated | kwargs
        if not pretrained:
            return _build(name, pretrained, args)
        # It knows the format of weights, which knows the defaults here.
        from visionattn.models.images_cfg import images_cfg, say_images

        if spec is not None:
            said = images_cfg(spec, to_2tuple(args.get("patch_size", 16)))
            args["pretrained_cfg_overlay"] = said | overlay
        model = _build(name, pretrained, args)
        say_images(model)
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = module
    create.__doc__ = f"{name}: " + ", ".join(f"{key} {value}" for key, value in args.items())
    return create


def _checkpoint_of_caller() -> Any:
    """Return ``checkpoint_path`` of the ``timm.create_model`` that called the entry point which
    calls this, or None. timm keeps it to itself, and loads it into the finished model.
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
    """Return the arguments that a file of ours states and ``given`` does not, and the ``DataSpec``
    of its images; nothing and None for files of others.

    Args:
        path: the file.
        name: the model that is asked for, which may be a pyramid over that of the file.
        defaults: what the name stands for.
        given: arguments of the call.
        fitted: weights are fitted to ``FITTED``.

    Raises:
        ValueError: the file is of another attention, or ``given`` contradicts it; one line.
    """
    # It knows the format of weights, which knows the defaults here.
    from visionattn.models.weights import FORMAT, described, read_metadata

    try:
        metadata = read_metadata(path)
    except (ValueError, OSError):  # timm reads it, or says why not
        return {}, None
    if metadata.get("format") != FORMAT:
        return {}, None
    source, stated, spec = described(metadata, path)
    if not is_ours(source):
        return {}, None
    own = DEFAULTS[source.partition(".")[0]].get("attention")
    if own != defaults.get("attention") and "attention" not in given:
        raise ValueError(
            f"{path} holds a {source}, of attention {own}, and {name} is of "
            f"{defaults.get('attention')}; create {source}, or the pyramid of its family"
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
                f"expected {key} {stated[key]!r} as in {path}, got {value!r}; leave it out"
            )
    return {key: value for key, value in stated.items() if key not in given}, spec


def _of_body(stated: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the body of a segmentation, whose blocks above the last one that its
    head reads are not in the file; those of other models as they are.
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
        ValueError: ``pretrained=True`` where there are no weights.
    """
    if pretrained:
        given = [args.get(key) for key in ("pretrained_cfg", "pretrained_cfg_overlay")]
        cfg = resolve_pretrained_cfg(name, *given)
        if not any(getattr(cfg, key) for key in WEIGHT_SOURCES):
            known = [each for each in DEFAULTS if is_model_pretrained(each)]
            others = f"; visionattn has some of {', '.join(known)}" if known else ""
            raise ValueError(
                f"there are no pretrained weights of {name}{others}; build it with "
                "pretrained=False, or name a file of weights with "
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


def create(
    name: str, task: str, num_classes: int, in_chans: int, args: dict[str, Any]
) -> nn.Module:
    """Make the model of a task by its timm name.

    Args:
        name: of a model of timm, ours included; that of the body where pixels have classes.
        task: one of ``Task``.
        num_classes: classes of images or of pixels.
        in_chans: channels of the images.
        args: of the model; for ``segmentation`` also ``HEAD_ARGS``.

    Raises:
        ValueError: the model is not for the task; see ``Segmenter``; and what the model raises for
            its arguments.
    """
    if (task == "generate") != (name in WRITERS):
        wrong = "gives classes and writes no images"
        if name in WRITERS:
            wrong = "writes images and gives no classes"
        raise ValueError(f"expected a model for data.task {task}, got {name}, which {wrong}")
    if task != "segmentation":
        return timm.create_model(name, num_classes=num_classes, in_chans=in_chans, **args)
    head = {key: value for key, value in args.items() if key in HEAD_ARGS}
    rest = {key: value for key, value in args.items() if key not in HEAD_ARGS}
    body = timm.create_model(name, num_classes=0, in_chans=in_chans, **rest)
    return Segmenter(body, num_classes, **head)


def check_reads(model: nn.Module) -> None:
    """Raise ValueError for a model that writes images, where one is wanted that reads them."""
    name = next((name for name, kind in WRITERS.items() if isinstance(model, kind)), None)
    if name is not None:
        raise ValueError(
            f"{name} writes images, and gives neither classes nor features of images; visionattn "
            "generate lets it write some"
        )
