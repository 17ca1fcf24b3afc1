"""What names of models stand for: the arguments of ours, now and in older files, and the model of a
task by its name.
"""

import inspect
from typing import Any, Literal

import timm
from timm.models import (
    is_model,
    model_entrypoint,
    register_model,
)
from torch import nn

from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.pyramid import PyramidTransformer
from visionattn.models.segmentation import HEAD_ARGS, Segmenter

Task = Literal["classification", "segmentation", "generate"]
"""What has an output: an image, each of its pixels, or, value by value, what comes next in it."""

PYRAMID = dict(pyramid_channels=256)
"""What a name of a pyramid adds to the arguments of the model without one."""
DEFAULTS: dict[str, dict[str, Any]] = {}
"""The arguments that each name of ours stands for."""
WRITERS: dict[str, type[nn.Module]] = {}
"""The models that write images value by value, by their names: no vision transformers."""
FORMER: dict[str, dict[str, Any]] = {}
"""Those that it stood for when files did not state them: in formats 1 and 2 of weights and states.
"""
STATED_ELSEWHERE = ("img_size", "in_chans", "num_classes", "device", "dtype")


def is_ours(name: str) -> bool:
    """Tell whether timm has the vision transformer of this name from this package."""
    return model_entrypoint(name).__module__.startswith("visionattn.") and name not in WRITERS


def class_of(args: dict[str, Any]) -> type[VisionAttnTransformer]:
    """Return the class of the models that are built with such arguments."""
    return PyramidTransformer if "pyramid_channels" in args else VisionAttnTransformer


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
