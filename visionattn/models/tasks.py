"""What a model's outputs are of, its task, and the model of a task by its timm name."""

from typing import Any, Literal

import timm
from torch import nn

from visionattn.models.registration import DEFAULTS, WRITERS
from visionattn.models.segmentation import HEAD_ARGS, Segmenter
from visionattn.ops.attentions import ATTENTIONS

Task = Literal["classification", "segmentation", "generate"]
"""What has an output: an image, each of its pixels, or, value by value, what comes next in it."""


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
        raise ValueError(_not_for(name, task, args))
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


def _not_for(name: str, task: str, args: dict[str, Any]) -> str:
    """Say why a model is not for a task: where it could not write images, for which reason."""
    if name in WRITERS:
        return f"{name} writes images and gives no classes; it is for data.task generate"
    line = f"{name} gives classes and writes no images; data.task generate is for pixel_decoder"
    family = DEFAULTS.get(name.partition(".")[0], {})
    kind = ATTENTIONS.get(args.get("attention", family.get("attention", "")))
    if kind is not None and not kind.causal:
        line += f", and attention={kind.name!r} has no causal form for one ({kind.why_not_causal})"
    return line
