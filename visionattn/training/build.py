"""From a configuration to a model on a device; what stands against it is said in one line.

The checks that need a model are here: its name, its arguments, and image sizes against patches.
"""

import json
import math
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import timm
import torch
from timm.layers import to_2tuple
from torch import nn

import visionattn  # noqa: F401  registers the models
from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.data.geometry import Geometry, Size
from visionattn.models.patches import wrong_size
from visionattn.models.registration import create, is_ours
from visionattn.models.weights import LOADING_ARGS, UNBUILDABLE, DataSpec, describe_args
from visionattn.training.config import ModelConfig


def build_model(config: ModelConfig, spec: DataSpec) -> tuple[nn.Module, dict[str, Any]]:
    """Make the model for the data.

    Models that are built for one image size are built for that of the data, unless ``config.args``
    names another.

    Returns:
        The model, and the arguments besides ``num_classes`` and ``in_chans`` that build it again.

    Raises:
        ValueError: timm knows no such model, or it does not take its arguments.
        RuntimeError, MemoryError: there is too little memory for its weights
            (``is_out_of_memory``).
    """
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), n=1, cutoff=0)
        raise ValueError(
            f"model.name: timm knows no model {config.name!r}; the nearest is {near[0]!r}"
        )
    check_args(config)
    args = dict(config.args)
    ours = is_ours(config.name)
    sized = ours or timm.get_pretrained_cfg_value(config.name, "fixed_input_size")
    # A model of timm that is built for one size does not take native images, which is said later.
    if sized and spec.img_size is not None and (ours or spec.fit != "native"):
        args.setdefault("img_size", spec.img_size)
    try:
        json.dumps(args)  # as they are kept beside the weights
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Initializing zero-element tensors"
            )  # an error follows
            model = create(config.name, spec.task, spec.num_classes, spec.in_chans, args)
    except UNBUILDABLE as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"model {config.name} does not take these args: {describe_args(args)} "
            f"({first_line(error)})"
        ) from error
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ValueError(
                f"model {config.name} has no gradient checkpointing; leave "
                "model.grad_checkpointing out"
            ) from error
    return model, {key: value for key, value in args.items() if key not in LOADING_ARGS}


def check_args(config: ModelConfig) -> None:
    """Raise ValueError for arguments of a model that others give, or that do nothing."""
    for key, source in {
        "num_classes": "the data",
        "in_chans": "the data",
        "checkpoint_path": "init_from",
    }.items():
        if key in config.args:
            raise ValueError(f"model.args.{key} is given by {source}; leave it out")
    for key, value in config.args.items():
        if value is None:  # timm drops it
            raise ValueError(
                f"model.args.{key} null would do nothing; leave it out, or give a value (0 for no "
                "LayerScale)"
            )
    if config.args.get("features_only"):
        raise ValueError(
            "model.args.features_only gives a model without a head, which cannot be trained here"
        )


def patch_size(model: nn.Module) -> Size:
    """Return height and width of a model's patches in pixels; 1 x 1 where it has none."""
    return to_2tuple(getattr(getattr(model, "patch_embed", None), "patch_size", 1))


def fixed_size(model: nn.Module) -> Size | None:
    """Return height and width in pixels of the only images that a model takes; None where it takes
    others.
    """
    embed = getattr(model, "patch_embed", None)
    return tuple(embed.img_size) if getattr(embed, "strict_img_size", False) else None


def check_img_size(model: nn.Module, sizes: Iterable[int]) -> None:
    """Check that a model takes square images of these sizes in pixels, as ``check_geometries``."""
    check_geometries(model, [Geometry("crop", (size, size)) for size in sizes])


def check_geometries(model: nn.Module, geometries: Iterable[Geometry]) -> None:
    """Check that a model takes the images that come of geometries.

    Raises:
        ValueError: an image would not be a whole number of patches, or the model is built for
            another size.
    """
    padded = getattr(getattr(model, "patch_embed", None), "dynamic_img_pad", False)
    fixed, patch = fixed_size(model), patch_size(model)
    for geometry in geometries:
        size = geometry.canvas
        limit = geometry.img_size
        if limit is not None and any(px < of for px, of in zip(limit, patch, strict=True)):
            raise ValueError(
                f"img_size {limit[0]} x {limit[1]} is smaller than a patch of {patch[0]} x "
                f"{patch[1]} pixels; make it larger, or the model's patches smaller"
            )
        if size is None:
            if fixed is not None:
                raise ValueError(
                    f"fit native gives images of many sizes, but the model takes {fixed[0]} x "
                    f"{fixed[1]} alone; use fit pad, stretch or crop with img_size {fixed[0]}, or "
                    "build it with dynamic_img_size=true"
                )
            continue
        if fixed is not None and size != fixed:
            raise ValueError(
                f"image of {size[0]} x {size[1]} pixels, but the model takes {fixed[0]} x "
                f"{fixed[1]} alone; build it with dynamic_img_size=true"
            )
        if padded:
            continue
        if size[0] == size[1] and size[0] % math.lcm(*patch):
            raise ValueError(wrong_size(*size, patch, square=True))
        if any(px % of for px, of in zip(size, patch, strict=True)):
            raise ValueError(wrong_size(*size, patch))


def pick_device(name: str) -> torch.device:
    """Return the device of that name; ``auto`` takes a GPU where there is one.

    Raises:
        ValueError: this machine has no such device, or it computes nothing.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise ValueError(
                f"device {name!r} computes nothing: it knows shapes alone; use auto, cpu or cuda"
            )
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error).partition(". ")[0]  # what follows is advice about drivers
        raise ValueError(
            f"device {name!r} cannot be used here: {reason}; auto takes what there is"
        ) from error
    return device
