"""Options of ``visionattn look`` and ``visionattn.look``, and the checks that need neither model
nor image.

A docstring under each field is its help text.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import timm

from visionattn.cli.parsing import split_options
from visionattn.cli.untrusted import brief
from visionattn.inference.inference_options import OpenOptions, parse_options
from visionattn.inference.picture_folder import check_picture_folder
from visionattn.models.registration import is_ours

SUMMARY = "look.json"
"""The file that marks a folder as output of ``visionattn look``."""
Shown = Literal["winners", "gradient", "rows", "features", "tables", "boxes"]
SHOWN: tuple[Shown, ...] = ("winners", "gradient", "rows", "features", "tables")
CLASS, TOP = "class", "top"
"""Query words: the class token, and the patch of the highest attribution."""
OF_PICTURES = dict.fromkeys(("queries", "blocks", "head", "term"), "rows")
OF_PICTURES |= {"features_block": "features"}
"""Options of a picture, which need its word in ``show``."""
EXAMPLE = "scaleformer_vit_digits docs/figures --output checkpoints/look"


@dataclass
class LookOptions(OpenOptions):
    """The attribution of a class, drawn over images."""

    target: str | None = None
    """Class to attribute, by name or number; None: the most probable class of each image."""
    show: list[Shown] = field(default_factory=lambda: list(SHOWN))
    """Pictures to draw: ``winners`` (contribution of patches through the pooling), ``gradient``
    (times the input), ``rows`` (attention weights), ``features`` (their first three principal
    components), ``tables`` (weights of relative position). ``boxes``, not drawn by default: the
    winning patches as GeoJSON.
    """
    queries: list[str] | None = None
    """Tokens whose attention rows are drawn: a place in the image such as ``120,88`` (down and
    right in pixels); ``class``, the class token; ``top``, the patch with the highest attribution.
    None: ``top``, or ``class`` if only the class token is pooled.
    """
    blocks: list[int] = field(default_factory=lambda: [-1])
    """Blocks whose attention rows are drawn, from 0 (negative: from the end)."""
    head: int | None = None
    """Head whose rows are drawn, from 0; None: the mean of all heads."""
    term: Literal["both", "content", "place"] = "both"
    """Part of the attention rows to draw: ``both`` (the weight), or the share of ``content`` or of
    ``place`` (position).
    """
    features_block: int = -1
    """Block whose features are drawn."""


def parse_look(argv: Sequence[str]) -> LookOptions:
    """Read and check the flags; the checkpoint and the images may come first.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong or missing, or the folder exists; one line.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    first, words = list(argv[:count]), list(argv[count:])
    given = {flag.replace("-", "_") for flag, _ in split_options(words)}
    if first and not given & {"checkpoint", "model"}:
        model = first.pop(0)
        # A file has priority over the name of a model with pretrained weights.
        is_name = not os.path.exists(model) and timm.is_model(model)
        words += ["--model", model, "--pretrained"] if is_name else ["--checkpoint", model]
    if first and "images" in given:
        raise ValueError("expected images either first or with --images, got both")
    options = parse_options(
        LookOptions,
        ["--images", *first, *words] if first else words,
        command="look",
        description="Draw the attribution of a class over each image. The first words may be the "
        "checkpoint (or the name of a model with weights) and the images, without their "
        "flags.",
        example=EXAMPLE,
    )
    if options.model and timm.is_model(options.model) and not is_ours(options.model):
        raise ValueError(f"look needs a model of visionattn, got {options.model}")
    if not options.output:
        raise ValueError("expected --output: a folder for the pictures")
    check_picture_folder(Path(options.output), SUMMARY, options.overwrite)
    return options


def check_asked(options: LookOptions) -> None:
    """Raise ValueError if an option of a picture has no effect; one line."""
    usual = LookOptions()
    for key, shown in OF_PICTURES.items():
        if getattr(options, key) != getattr(usual, key) and shown not in options.show:
            raise ValueError(f"{key} needs --show {shown}")


def parse_queries(given: Sequence[str] | None) -> list[str | tuple[int, int]] | None:
    """Return each query as ``CLASS``, ``TOP``, or a place, down and right in pixels; None for None.

    Raises:
        ValueError: a word is none of these; one line.
    """
    if given is None:
        return None
    found: list[str | tuple[int, int]] = []
    for word in given:
        place = re.fullmatch(r"(\d{1,9}),(\d{1,9})", word)
        if not place and word not in (CLASS, TOP):
            raise ValueError(
                "expected queries class, top, or places such as 120,88 (down and right in "
                f"pixels), got {brief(word)}"
            )
        found.append((int(place[1]), int(place[2])) if place else word)
    return found
