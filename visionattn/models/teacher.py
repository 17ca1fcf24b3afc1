"""A timm ViT with its weights: by timm's name, or from a file of weights.

This module owns where a teacher comes from. ``conversion.py`` makes one of our models of it.
"""

import math
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import timm
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.cli.files import first_line
from visionattn.cli.untrusted import brief
from visionattn.models.body import body_of
from visionattn.models.convert import checkpoint_filter_fn
from visionattn.models.listing import shape
from visionattn.models.registration import is_ours
from visionattn.models.segmentation import Segmenter
from visionattn.models.weights import (
    FORMAT,
    UNBUILDABLE,
    check_finite,
    describe_args,
    describe_misfit,
    existing,
    load_model,
    read_metadata,
    read_state_dict,
)

HUBS, LOCAL = ("hf-hub:", "hf_hub:"), "local-dir:"
SOURCES = (*HUBS, LOCAL)
"""What names of models begin with that timm reads from elsewhere than its registry."""
SIZES = ("depth", "embed_dim", "num_heads")
"""Arguments of a body that are whole numbers above 0, or lists in models that are no ViT."""


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
            its own, not finite or not to be had; before weights are fetched also that the model
            cannot be converted; one line.
    """
    vit, lines = _opened(source, body, pretrained, dict(args or {}))
    check_finite(vit.state_dict(), source)
    return vit.eval(), lines


def is_file(source: str) -> bool:
    """Tell whether a teacher is a file of weights, be it there or not, and no name."""
    if source.startswith(SOURCES):
        return False
    known = timm.is_model(source) or not _looks_like_a_file(source)
    return Path(source).exists() or not known


def _opened(
    source: str, body: str | None, pretrained: bool, args: dict[str, Any]
) -> tuple[nn.Module, list[str]]:
    """Return a teacher as ``open_teacher`` does."""
    if source in SOURCES:
        raise ValueError(f"{source} names no model; wanted hf-hub:ORG/NAME or local-dir:FOLDER")
    if is_file(source):
        return _from_file(existing(source), body, args)
    _refuse_body(source, body)
    if source.startswith(SOURCES):
        return _created(source, True, args), [f"{source}, timm's weights"]
    check_name(source)
    if pretrained:  # what is refused is refused before its weights are fetched
        with torch.device("meta"):
            body_of(_created(source, False, args))
    said = "timm's weights" if pretrained else "random weights, as --pretrained is not given"
    return _created(source, pretrained, args), [f"{source}, {said}"]


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
    for key in SIZES:
        value = args.get(key, 1)
        if not isinstance(value, list) and (type(value) is not int or value < 1):
            raise ValueError(f"args.{key} must be a whole number from 1, got {brief(value)}")
    try:
        with _quiet_hub():
            return timm.create_model(name, pretrained=pretrained, **args)
    except (*UNBUILDABLE, OSError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        if _is_unreachable(error):
            raise ValueError(
                f"the weights of {name} could not be fetched: there is no connection to the Hub, "
                "and they are not in its cache; try again with one, or give a file of them: "
                "--teacher FILE --model NAME, in training --init-from FILE --init-model NAME"
            ) from error
        what = f"timm cannot build {name}"
        if args:
            what += f" with {describe_args(args)}"
        raise ValueError(f"{what}: {first_line(error)}{_nearest(error)}") from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keep back the lines in which the hub's library says that it tries again."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(max(before, logging.ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _is_unreachable(error: Exception) -> bool:
    """Tell whether an error is that weights are neither in a cache nor to be reached."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, HTTPError):  # an answer
        return False
    return isinstance(error, LocalEntryNotFoundError | URLError)


def _nearest(error: Exception) -> str:
    """Return the argument of timm's ViTs that is nearest to one that an error says is unknown."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    names = signature(VisionTransformer).parameters
    near = get_close_matches(unknown[1], names, n=1) if unknown else []
    return f"; the nearest is {near[0]}" if near else ""


def _from_file(path: Path, body: str | None, args: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """Return the model that a file has the weights of."""
    try:
        of_ours = read_metadata(path).get("format") == FORMAT
    except ValueError:
        of_ours = False
    if of_ours:
        if body is not None or args:
            raise ValueError(f"{path} says what its model is; leave the body and its args out")
        model = load_model(path)
        if isinstance(model, Segmenter):
            raise ValueError(f"{path} gives classes of pixels; a teacher gives those of images")
        return model, [f"{path}"]
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
        raise ValueError(f"{path} does not fit {body}: {misfit}{_other_size(fitted, vit)}")
    vit.load_state_dict(fitted)
    resampled = [
        f"{name} {shape(state[name])} -> {shape(value)}"
        for name, value in fitted.items()
        if name in state and state[name].shape != value.shape
    ]
    lines = [f"{path}, weights of {body}"]
    if resampled:
        lines.append(f"  resampled ({len(resampled)}): {', '.join(resampled)}")
    return vit, lines


def _other_size(state: dict[str, Tensor], vit: nn.Module) -> str:
    """Return the arguments by which a body would have the depth and width of a state dict; nothing
    where it has them.
    """
    has, wanted = _size(state), _size(vit.state_dict())
    other = ", ".join(
        f"{key}: {value}" for key, value in has.items() if value != wanted.get(key, value)
    )
    if not other:
        return ""
    return f"; give the body's own arguments to convert or distil, e.g. --args '{{{other}}}'"


def _size(state: dict[str, Tensor]) -> dict[str, int]:
    """Return depth and width as a state dict of a ViT shows them."""
    blocks = [int(found[1]) for name in state if (found := re.match(r"blocks\.(\d+)\.", name))]
    patches = state.get("patch_embed.proj.weight")
    shown = {"depth": max(blocks) + 1} if blocks else {}
    return shown | ({"embed_dim": len(patches)} if patches is not None and patches.ndim else {})


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
