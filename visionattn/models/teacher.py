"""A timm ViT with its weights: by timm's name, or from a file of weights.

This module owns where a teacher comes from. ``conversion.py`` makes one of our models of it.
"""

import math
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.models.body import body_of
from visionattn.models.convert import checkpoint_filter_fn
from visionattn.models.listing import shape
from visionattn.models.registration import is_ours
from visionattn.models.weights import (
    FORMAT,
    UNBUILDABLE,
    describe_args,
    describe_misfit,
    existing,
    load_model,
    read_metadata,
    read_state_dict,
)

HUBS = ("hf-hub:", "hf_hub:")
SOURCES = (*HUBS, "local-dir:")
"""What names of models begin with that timm reads from elsewhere than its registry."""


def open_teacher(
    source: str,
    *,
    body: str | None = None,
    pretrained: bool = False,
    args: dict[str, Any] | None = None,
) -> tuple[nn.Module, list[str]]:
    """Return a model of timm in eval mode, and lines about its weights.

    Args:
        source: a file of weights; timm's name of a model, with or without a tag; or what timm takes
            besides, ``hf-hub:...`` and ``local-dir:...``. A file at that path counts first.
        body: timm's name of the model that a file has the weights of; None where the file says it,
            as those of ``visionattn train`` do.
        pretrained: take the weights that timm has of a name, which it may have to download;
            otherwise they are random.
        args: keyword arguments of the model. Of a file of weights, numbers of classes and channels,
            patch and size of a square image are read off its tensors unless given.

    Raises:
        FileNotFoundError, PermissionError: the file cannot be read.
        ValueError: timm has no such model, it does not take these arguments, or the weights are not
            its own; before weights are fetched also that the model cannot be converted; one line.
    """
    args = dict(args or {})
    if source.startswith(SOURCES):
        _refuse_body(source, body)
        return _created(source, True, args).eval(), [f"{source}, timm's weights"]
    if Path(source).exists() or (not timm.is_model(source) and _looks_like_a_file(source)):
        return _from_file(existing(source), body, args)
    _refuse_body(source, body)
    check_name(source)
    if pretrained:  # what is refused is refused before its weights are fetched
        with torch.device("meta"):
            body_of(_created(source, False, args))
    said = "timm's weights" if pretrained else "random weights, as --pretrained is not given"
    return _created(source, pretrained, args).eval(), [f"{source}, {said}"]


def _looks_like_a_file(source: str) -> bool:
    return "/" in source or Path(source).suffix in (".safetensors", ".pth", ".pt", ".bin", ".tar")


def _refuse_body(source: str, body: str | None) -> None:
    if body is not None:
        raise ValueError(f"{source} names its own body; leave {body} out, which is for files")


def check_name(name: str) -> None:
    """Raise ValueError for a name that timm does not know, with the nearest one."""
    if not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), n=1, cutoff=0)[0]
        raise ValueError(
            f"there is no file {name:.80}, and timm knows no model of that name; the nearest is "
            f"{near}"
        )


def _created(name: str, pretrained: bool, args: dict[str, Any]) -> nn.Module:
    """Make a model by timm, in one line where it cannot."""
    try:
        return timm.create_model(name, pretrained=pretrained, **args)
    except (*UNBUILDABLE, OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        what = f"timm cannot build {name}"
        if args:
            what += f" with {describe_args(args)}"
        raise ValueError(f"{what}: {first_line(error)}") from error


def _from_file(path: Path, body: str | None, args: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """Return the model that a file has the weights of."""
    try:
        of_ours = read_metadata(path).get("format") == FORMAT
    except ValueError:
        of_ours = False
    if of_ours:
        if body is not None or args:
            raise ValueError(f"{path} says what its model is; leave the body and its args out")
        return load_model(path), [f"{path}"]
    state = read_state_dict(path)
    if body is None:
        raise ValueError(
            f"{path} does not say whose weights these are; name the body with --model, e.g. "
            "vit_small_patch16_224"
        )
    check_name(body)
    vit = _created(body, False, _shaped(state, body, args))
    fitted = filter_checkpoint(state, vit, body)
    if misfit := describe_misfit(fitted, vit.state_dict()):
        raise ValueError(f"{path} does not fit {body}: {misfit}")
    vit.load_state_dict(fitted)
    resampled = [
        f"{name} {shape(state[name])} -> {shape(value)}"
        for name, value in fitted.items()
        if name in state and state[name].shape != value.shape
    ]
    lines = [f"{path}, weights of {body}"]
    if resampled:
        lines.append(f"  resampled ({len(resampled)}): {', '.join(resampled)}")
    return vit.eval(), lines


def _shaped(state: dict[str, Tensor], body: str, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which a body has the classes, channels, patch and size that a state
    dict of timm shows; those that are given stay.
    """
    shown: dict[str, Any] = {}
    head, patches = state.get("head.weight"), state.get("patch_embed.proj.weight")
    if patches is None or patches.ndim != 4:  # the names of another project, which timm may know
        return args
    if head is None or head.ndim == 2:
        shown["num_classes"] = 0 if head is None else len(head)
    shown["in_chans"], shown["patch_size"] = patches.shape[1], tuple(patches.shape[2:])
    with torch.device("meta"):
        vit = _created(body, False, shown | args)
    own, position = getattr(vit, "pos_embed", None), state.get("pos_embed")
    if own is not None and position is not None and own.shape != position.shape:
        places = position.shape[1] - (own.shape[1] - vit.patch_embed.num_patches)
        side = math.isqrt(max(0, places))
        if side * side == places:
            shown["img_size"] = tuple(side * patch for patch in patches.shape[2:])
    return shown | args


def filter_checkpoint(given: dict[str, Tensor], model: nn.Module, name: str) -> dict[str, Tensor]:
    """Rename and resample a state dict for a model by its module's ``checkpoint_filter_fn``.

    Raises:
        ValueError: the filter fails on it; one line.
    """
    if is_ours(name):
        adapt = checkpoint_filter_fn
    else:
        module = sys.modules[timm.model_entrypoint(name).__module__]
        adapt = getattr(module, "checkpoint_filter_fn", None)
    if adapt is None:
        return dict(given)
    try:
        return dict(adapt(dict(given), model))
    except (RuntimeError, KeyError, AssertionError) as error:
        raise ValueError(
            f"the weights do not suit the model {name}: {first_line(error)}"
        ) from error
