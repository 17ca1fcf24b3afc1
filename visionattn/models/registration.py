"""Meaning of model names: the arguments of our models, now and in older files, and the model of a
task by its name.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import timm
from timm.models import (
    is_model,
    model_entrypoint,
    register_model,
)
from torch import nn

from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.patch_heads import HEAD_ARGS, PatchClassifier
from visionattn.models.pyramid import PyramidTransformer
from visionattn.models.segmentation import Segmenter

PYRAMID = dict(pyramid_channels=256)
"""Arguments that a pyramid name adds."""
DEFAULTS: dict[str, dict[str, Any]] = {}
"""The arguments of each of our names."""
WRITERS: dict[str, type[nn.Module]] = {}
"""Autoregressive image models by name; they are not vision transformers."""
MOST_BLOCKS = 10_000
"""Maximum number of blocks of a model."""
STATED_ELSEWHERE = ("img_size", "in_chans", "num_classes", "device", "dtype")


def is_ours(name: str) -> bool:
    """Return whether the vision transformer with this name in timm comes from this package."""
    return model_entrypoint(name).__module__.startswith("visionattn.") and name not in WRITERS


def class_of(args: dict[str, Any]) -> type[VisionAttnTransformer]:
    """Return the class of the models built with such arguments."""
    return PyramidTransformer if "pyramid_channels" in args else VisionAttnTransformer


def register_writer(module: str, name: str, kind: type[nn.Module]) -> None:
    """Register an autoregressive image model as an entry point of ``module``.

    It has neither features nor pretrained weights of timm's kind.

    Args:
        module: ``__name__`` of the calling module.
        name: its name.
        kind: its class, with the arguments ``in_chans``, ``num_classes`` and its options.
    """
    WRITERS[name] = kind

    def create(pretrained: bool = False, **kwargs) -> nn.Module:
        if pretrained:
            raise ValueError(f"no pretrained weights of {name}; build it with pretrained=False")
        timms = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
        return kind(**{key: value for key, value in kwargs.items() if key not in timms})

    register_as(create, module, name, kind.__doc__)


def register_as(create: Callable[..., nn.Module], module: str, name: str, doc: str | None) -> None:
    """Register a function with timm as the entry point ``name`` of ``module``."""
    create.__name__ = create.__qualname__ = name
    create.__module__, create.__doc__ = module, doc
    register_model(create)


def args_of_name(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one of our names, without its initial temperature if ``given``
    chooses an attention that has none.
    """
    args = DEFAULTS.get(name.partition(".")[0], {})
    if "taylorshift" in given.get("attention", "taylorshift"):
        return dict(args)
    return {key: value for key, value in args.items() if key != "temperature_init"}


def complete(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model completed with the defaults of its name and class.

    They build the same model even if defaults change later. Arguments of other models are
    unchanged. A default of None cannot be stated, because timm drops it; so no name may change an
    option that is None in the class.

    Args:
        name: a name of timm.
        args: the given arguments; ``STATED_ELSEWHERE`` is not completed.
    """
    if name not in WRITERS and not (is_model(name) and is_ours(name)):
        return args
    kind = WRITERS.get(name, VisionAttnTransformer)
    parameters = inspect.signature(kind).parameters.values()
    of_class = {p.name: p.default for p in parameters if p.default is not None}
    whole = of_class | args_of_name(name, args)
    rest = {key: value for key, value in whole.items() if key not in STATED_ELSEWHERE}
    return args | {key: value for key, value in rest.items() if key not in args}


def create(
    name: str, task: str, num_classes: int, in_chans: int, args: dict[str, Any]
) -> nn.Module:
    """Build the model of a task by its timm name.

    Args:
        name: a timm name, ours included; for segmentation the name of the body.
        task: one of ``Task``.
        num_classes: classes of images or of pixels.
        in_chans: channels of the images.
        args: arguments of the model. For ``segmentation`` also ``HEAD_ARGS``; with them, models of
            other tasks are ``PatchClassifier``.

    Raises:
        ValueError: the model does not support the task (see ``Segmenter``), has no or too
            many blocks, or refuses its arguments.
    """
    depth = args.get("depth")
    if isinstance(depth, int) and not 1 <= depth <= MOST_BLOCKS:  # more would take hours to build
        raise ValueError(f"depth must be from 1 to {MOST_BLOCKS:,}, got {depth:,}")
    if (task == "generate") != (name in WRITERS):
        wrong = "generates no images; pass --model.name pixel_decoder"
        if name in WRITERS:
            wrong = "gives no classes; pass --data.task generate"
        raise ValueError(f"expected a model for data.task {task}, got {name}, which {wrong}")
    head, rest = split_args(args)
    if task != "segmentation" and not head:
        return timm.create_model(name, num_classes=num_classes, in_chans=in_chans, **args)
    body = timm.create_model(name, num_classes=0, in_chans=in_chans, **rest)
    return with_head(body, task, num_classes, head)


def split_args(args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a head on patch features, and the arguments of the body."""
    head = {key: value for key, value in args.items() if key in HEAD_ARGS}
    return head, {key: value for key, value in args.items() if key not in HEAD_ARGS}


def with_head(
    body: nn.Module, task: str, num_classes: int, head: dict[str, Any]
) -> Segmenter | PatchClassifier:
    """Return the model of a task on the patch features of a body.

    Raises:
        ValueError: an argument of the head belongs to another task, or the model refuses its
            arguments.
    """
    kind, other = (
        (Segmenter, "head_top") if task == "segmentation" else (PatchClassifier, "head_stride")
    )
    if other in head:
        raise ValueError(f"{other} has no effect for data.task {task}; remove it")
    return kind(body, num_classes, **head)


def check_reads(model: nn.Module) -> None:
    """Raise ValueError for a model that generates images, where a model that reads images is
    needed.
    """
    name = next((name for name, kind in WRITERS.items() if isinstance(model, kind)), None)
    if name is not None:
        raise ValueError(
            f"expected a model with classes or features, got {name}, which generates images; use "
            "visionattn generate"
        )
