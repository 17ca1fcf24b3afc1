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
from visionattn.models.weights import check_finite, described, load_model, read_metadata

LEVELS = 256
"""Values of a picture."""
MOST_VALUES = 2**26
"""Values of an image, each of which takes a step."""


def open_decoder(given: nn.Module | str | Path, device: str) -> Opened:
    """Build the pixel decoder of a checkpoint and put it on a device, or take a module as it is and
    where it is.

    Raises:
        ValueError, FileNotFoundError: there is none, it is no pixel decoder, its weights are not
            finite, nothing says what its images are, or there is no such device; one line.
    """
    if isinstance(given, nn.Module):
        if device != "auto":
            raise ValueError("a module stays where it is; leave device out, or move the module")
        model, name, args = given, type(given).__name__, {}
        check_decoder(model, name)
        spec, place, notes = getattr(model, "data_spec", None), next(model.parameters()).device, ()
        if spec is None:
            raise ValueError(
                f"{name} does not say what its images are; set its data_spec to a "
                "visionattn.DataSpec"
            )
    else:
        place = pick_device(device)
        model = load_model(given)
        name, args, spec = described(read_metadata(given), given)
        check_decoder(model, f"{name} of {given}")
        check_finite(model.state_dict(), given)
        notes = (f"{name} of {os.fspath(given)}",)
    geometry = Geometry(spec.fit, sides(spec.img_size), spec.max_patches)
    return Opened(model.to(place), name, args, spec, geometry, place, notes)


def check_decoder(model: nn.Module, name: str) -> None:
    """Raise ValueError where a model writes no images, with the reason; one line."""
    if isinstance(model, PixelDecoder):
        if model.levels > LEVELS:
            raise ValueError(
                f"{name} writes values of {model.levels} levels, and those of pictures have "
                f"{LEVELS} at most; step it yourself"
            )
        return
    for block in getattr(getattr(model, "backbone", model), "blocks", ()):
        kind = getattr(getattr(block, "attn", None), "kind", None)
        if kind is not None and not kind.causal:
            raise ValueError(
                f"{name} cannot write images: attention={kind.name!r} has no causal form "
                f"({kind.why_not_causal})"
            )
    raise ValueError(
        f"{name} is no pixel decoder and writes no images: each of its tokens sees all others; "
        "train one with --data.task generate"
    )


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

    def held(thing: Any) -> int:
        found = () if thing is None else vars(thing).values()
        return sum(x.nbytes for x in found if isinstance(x, Tensor))

    shape = copy.deepcopy(model).to("meta")
    labels = torch.zeros(1, dtype=torch.int64, device="meta") if model.conditioned else None
    state = shape.begin(1, size, labels)
    together = sum(x.nbytes for x in state.places) + sum(held(table) for _, table in state.blocks)
    return together, 3 * 8 * state.values + sum(held(past) for past, _ in state.blocks)
