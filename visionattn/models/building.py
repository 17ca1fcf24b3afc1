"""Model construction from a name and arguments, and checks of image sizes, with one-line errors."""

import json
import math
import re
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import timm
from timm.layers import to_2tuple
from torch import nn

import visionattn.models  # noqa: F401  registers the models
from visionattn.cli.exit_codes import is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.model_config import ModelConfig
from visionattn.models.patches import wrong_size
from visionattn.models.registration import complete, create, is_ours
from visionattn.models.weights import LOADING_ARGS, UNBUILDABLE, DataSpec, describe_args

Size = tuple[int, int]


def build_model(config: ModelConfig, spec: DataSpec) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model for the data.

    Models with one fixed image size are built for the size of the data, unless ``config.args`` sets
    another.

    Returns:
        The model, and the arguments that build it again, without ``num_classes`` and ``in_chans``.

    Raises:
        ValueError: timm has no such model, or the model does not accept these arguments.
        RuntimeError, MemoryError: not enough memory for its weights (``is_out_of_memory``).
    """
    if not timm.is_model(config.name):
        near = get_close_matches(config.name, timm.list_models(), n=1, cutoff=0)
        raise ValueError(
            f"model.name: expected a timm model, got {config.name!r}; did you mean {near[0]!r}?"
        )
    check_args(config)
    args = dict(config.args)
    ours = is_ours(config.name)
    sized = ours or timm.get_pretrained_cfg_value(config.name, "fixed_input_size")
    # A timm model with one fixed size does not accept native images; a later check reports that.
    if sized and spec.img_size is not None and (ours or spec.fit != "native"):
        args.setdefault("img_size", spec.img_size)
    try:
        json.dumps(args)  # checks that they can be saved with the weights
        with warnings.catch_warnings():
            # An error follows.
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            model = create(config.name, spec.task, spec.num_classes, spec.in_chans, args)
    except UNBUILDABLE as error:
        if is_out_of_memory(error):
            raise
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if ours and unknown:
            near = get_close_matches(unknown[1], complete(config.name, {}), n=1, cutoff=0)
            raise ValueError(
                f"model {config.name} has no argument {unknown[1]}; did you mean {near[0]}?"
            ) from error
        raise ValueError(
            f"model {config.name} does not accept these args: {describe_args(args)} "
            f"({first_line(error)})"
        ) from error
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ValueError(
                f"model {config.name} has no gradient checkpointing; remove "
                "model.grad_checkpointing"
            ) from error
    return model, {key: value for key, value in args.items() if key not in LOADING_ARGS}


def check_args(config: ModelConfig) -> None:
    """Raise ValueError for model arguments that come from elsewhere or have no effect."""
    for key, source in {
        "num_classes": "the data",
        "in_chans": "the data",
        "checkpoint_path": "init_from",
    }.items():
        if key in config.args:
            raise ValueError(f"model.args.{key} is set by {source}; remove it")
    for key, value in config.args.items():
        if value is None:  # timm drops it
            hint = " (0 for no LayerScale)" if key == "init_values" else ""
            raise ValueError(
                f"model.args.{key} null has no effect; remove it, or pass a value{hint}"
            )
    if config.args.get("features_only"):
        raise ValueError(
            "model.args.features_only removes the head, which training needs; remove it"
        )


def patch_size(model: nn.Module) -> Size:
    """Return height and width of a model's patches in pixels; 1 x 1 without patches."""
    return to_2tuple(getattr(getattr(model, "patch_embed", None), "patch_size", 1))


def fixed_size(model: nn.Module) -> Size | None:
    """Return the only image size in pixels (height, width) that a model accepts; None if it accepts
    several.
    """
    embed = getattr(model, "patch_embed", None)
    return tuple(embed.img_size) if getattr(embed, "strict_img_size", False) else None


def check_img_size(model: nn.Module, sizes: Iterable[int]) -> None:
    """Check that a model accepts square images of these sizes, as ``check_geometries`` does."""
    for size in sizes:
        _check_size(model, (size, size), (size, size))


def check_geometries(model: nn.Module, geometries: Iterable[Any]) -> None:
    """Check that a model accepts the images of these geometries (``data.geometry.Geometry``).

    Raises:
        ValueError: an image would not be a whole number of patches, or the model is built for
            another size.
    """
    for geometry in geometries:
        _check_size(model, geometry.canvas, geometry.img_size)


def _check_size(model: nn.Module, size: Size | None, limit: Size | None) -> None:
    """Check an image size (None: many sizes) and the maximum size."""
    padded = getattr(getattr(model, "patch_embed", None), "dynamic_img_pad", False)
    fixed, patch = fixed_size(model), patch_size(model)
    if limit is not None and any(px < of for px, of in zip(limit, patch, strict=True)):
        raise ValueError(
            f"expected img_size at least a patch of {patch[0]} x {patch[1]} pixels, got "
            f"{limit[0]} x {limit[1]}; use larger images or smaller patches"
        )
    if size is None:
        if fixed is not None:
            raise ValueError(
                f"the model accepts only {fixed[0]} x {fixed[1]} pixels, got fit native with many "
                f"sizes; use fit pad, stretch or crop with img_size {fixed[0]}, or build it with "
                "dynamic_img_size=true"
            )
        return
    if fixed is not None and size != fixed:
        raise ValueError(
            f"the model accepts only {fixed[0]} x {fixed[1]} pixels, got {size[0]} x {size[1]}; "
            "build it with dynamic_img_size=true"
        )
    if padded:
        return
    if size[0] == size[1] and size[0] % math.lcm(*patch):
        raise ValueError(wrong_size(*size, patch, square=True))
    if any(px % of for px, of in zip(size, patch, strict=True)):
        raise ValueError(wrong_size(*size, patch))
