"""A ``DataSpec`` in the words of timm's ``pretrained_cfg``, for whoever loads a model through timm.

timm's words are fewer: its transform pads an image that is seen ``native`` or ``pad`` to a square,
around its centre, and knows nothing of bands and ranges of values. So the whole specification goes
along as a note, and a model of ours that is built with weights has it as ``data_spec`` again.
"""

import json
import math
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from visionattn.cli.untrusted import from_json
from visionattn.models.weights import DataSpec, check_spec

NOTE = "visionattn.DataSpec "
"""How the note begins that has a specification, as JSON."""

CROP_MODES = {"crop": "center", "stretch": "squash", "pad": "border", "native": "border"}
"""What timm calls the ways in which images of any size come to a model."""
USUAL_PX = 224
"""The side of images where neither a size nor a number of patches was given."""


def images_cfg(spec: DataSpec, patch_px: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """Return the fields of timm's ``pretrained_cfg`` that say what a model's images and outputs
    are.

    Args:
        spec: what they are.
        patch_px: height and width of the model's patches in pixels, of which ``input_size`` is a
            whole number.
    """
    one_hot = spec.encoding is not None
    fields = {
        "input_size": (spec.in_chans, *nominal_size(spec, patch_px)),
        "mean": (0.0,) * spec.in_chans if one_hot else spec.mean,
        "std": (1.0,) * spec.in_chans if one_hot else spec.std,
        "num_classes": spec.num_classes,
        "crop_pct": 1.0,
        "crop_mode": CROP_MODES[spec.fit],
        "interpolation": "bilinear",
        "notes": (NOTE + json.dumps(asdict(spec)),),
    }
    return fields | ({"label_names": spec.class_names} if spec.class_names else {})


def nominal_size(spec: DataSpec, patch_px: tuple[int, int]) -> tuple[int, int]:
    """Return height and width in pixels of images as in training, in whole patches: with ``native``
    the largest ones.
    """
    if spec.img_size is not None:
        sides = spec.img_size if isinstance(spec.img_size, tuple) else (spec.img_size,) * 2
    elif spec.max_patches is not None:
        side = math.isqrt(spec.max_patches)
        sides = (side * patch_px[0], side * patch_px[1])
    else:
        sides = (USUAL_PX, USUAL_PX)
    height, width = (max(1, px // patch) * patch for px, patch in zip(sides, patch_px, strict=True))
    return height, width


def say_images(model: nn.Module) -> None:
    """Say as ``model.data_spec`` what the images of a model with weights are, as ``load_model``
    does, where a note of its ``pretrained_cfg`` does. Outputs of a new head have no names; a model
    of other channels has no specification.

    Raises:
        ValueError: the note is garbled; one line.
    """
    notes = model.pretrained_cfg.get("notes") or ()
    said = [note for note in notes if isinstance(note, str) and note.startswith(NOTE)]
    if not said:
        return
    spec = from_json(DataSpec, said[0].removeprefix(NOTE), "the note about images")
    check_spec(spec)
    if getattr(model, "in_chans", None) != spec.in_chans:
        return
    outputs = getattr(model, "num_classes", 0)  # a wrapper of features has none
    if outputs != spec.num_classes:
        spec = replace(spec, num_classes=outputs, class_names=())
    model.data_spec = spec
