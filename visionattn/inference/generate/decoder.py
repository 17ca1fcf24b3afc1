"""A pixel decoder ready to write, from a checkpoint or a module, or the reason why a model is none.

This module owns which size images have and what a batch of them takes of memory.
"""

import copy
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visionattn.data.geometry import Geometry, Size, pixels, sides
from visionattn.inference.opening import Opened
from visionattn.models.machine import pick_device
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.weights import (
    DataSpec,
    check_finite,
    described,
    load_model,
    read_metadata,
)

LEVELS = 256
"""Values of a picture."""
MOST_VALUES = 2**26
"""Values of an image, each of which takes a step."""


def open_decoder(path: str | Path, device: str) -> Opened:
    """Build the pixel decoder of a checkpoint and put it on a device.

    Raises:
        ValueError, FileNotFoundError: there is none, its weights are not finite, or there is no
            such device; one line.
    """
    place = pick_device(device)
    model = load_model(path)
    name, args, spec = described(read_metadata(path), path)
    check_decoder(model, f"{name} of {path}")
    check_finite(model.state_dict(), path)
    notes = (f"{name} of {os.fspath(path)}",)
    return Opened(model.to(place), name, args, spec, _geometry(spec), place, notes)


def open_decoder_module(model: nn.Module) -> Opened:
    """Take a module as it is and where it is.

    Raises:
        ValueError: it is no pixel decoder, or does not say what its images are; one line.
    """
    name = type(model).__name__
    check_decoder(model, name)
    spec = getattr(model, "data_spec", None)
    if spec is None:
        raise ValueError(
            f"{name} does not say what its images are; set its data_spec to a visionattn.DataSpec"
        )
    place = next(model.parameters()).device
    return Opened(model, name, {}, spec, _geometry(spec), place, ())


def _geometry(spec: DataSpec) -> Geometry:
    return Geometry(spec.fit, sides(spec.img_size), spec.max_patches)


def check_decoder(model: nn.Module, name: str) -> None:
    """Raise ValueError where a model writes no images, with the reason; one line."""
    if isinstance(model, PixelDecoder):
        if model.levels > LEVELS:
            raise ValueError(
                f"{name} writes values of {model.levels} levels, and those of pictures have "
                f"{LEVELS} at most; step it yourself"
            )
        return
    body = getattr(model, "backbone", model)
    kinds = [getattr(getattr(block, "attn", None), "kind", None) for block in _blocks(body)]
    for kind in kinds:
        if kind is not None and not kind.causal:
            raise ValueError(
                f"{name} cannot write images: attention={kind.name!r} has no causal form "
                f"({kind.why_not_causal})"
            )
    raise ValueError(
        f"{name} is no pixel decoder and writes no images: each of its tokens sees all others; "
        "train one with --data.task generate"
    )


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = getattr(model, "blocks", ())
    return list(blocks) if isinstance(blocks, (nn.Sequential, nn.ModuleList)) else []


def check_size(size: Size, channels: int) -> None:
    """Raise ValueError for images of more values than anybody waits for; one line."""
    values = math.prod(size) * channels
    if values > MOST_VALUES:
        raise ValueError(
            f"img_size {pixels(size)} is {values:,} values for each image, written one after the "
            f"other; at most {MOST_VALUES:,} are"
        )


def memory_of(model: PixelDecoder, size: Size) -> tuple[int, int]:
    """Return how many bytes writing takes whatever the batch, and for each of its images, without
    taking them.
    """
    shape = copy.deepcopy(model).to("meta")
    labels = torch.zeros(1, dtype=torch.int64, device="meta") if model.conditioned else None
    state = shape.begin(1, size, labels)
    each = 3 * 8 * state.values
    together = sum(x.nbytes for x in state.places)
    for past, table in state.blocks:
        each += sum(x.nbytes for x in _tensors_of(past))
        together += 0 if table is None else sum(x.nbytes for x in _tensors_of(table))
    return together, each


def _tensors_of(thing: Any) -> list[Tensor]:
    return [value for value in vars(thing).values() if isinstance(value, Tensor)]
