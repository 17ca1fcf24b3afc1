"""The flags of ``visionattn look``, what they must be, and which queries they mean.

A docstring under each field is its help text.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import timm

from visionattn.cli.files import check_new
from visionattn.cli.parsing import split_options
from visionattn.cli.untrusted import brief
from visionattn.inference.options import OpenOptions, parse_options
from visionattn.models.registration import is_ours

SUMMARY = "look.json"
"""The file by which a folder is known as one of ``visionattn look``."""
Shown = Literal["winners", "gradient", "rows", "features", "tables"]
SHOWN: tuple[Shown, ...] = ("winners", "gradient", "rows", "features", "tables")
Term = Literal["both", "content", "place"]
CLASS, TOP = "class", "top"
"""Queries by a word: the class token, and the patch of the highest evidence."""
MOST_QUERIES = 64
EXAMPLE = "scaleformer_vit_digits docs/figures --output checkpoints/look"


@dataclass
class LookOptions(OpenOptions):
    """Where the evidence for a class lies."""

    target: str | None = None
    """The class whose evidence is shown, by its name or number; None: the most probable of each
    image.
    """
    show: list[str] = field(default_factory=lambda: list(SHOWN))
    """What is drawn: ``winners`` (what patches add to the class through the pooling), ``gradient``
    (times the input), ``rows`` (of attention), ``features`` (their three main components),
    ``tables`` (weights of relative position).
    """
    queries: list[str] | None = None
    """Tokens whose rows of attention are drawn: a place in the image, down and right in pixels as
    ``120,88``; ``class``, the class token; ``top``, the patch that adds most to the class. None:
    ``top``, or ``class`` where the class token alone is pooled.
    """
    blocks: list[int] = field(default_factory=lambda: [-1])
    """Blocks whose rows of attention are drawn, from 0, or from the end where negative."""
    head: int | None = None
    """The head whose rows are drawn, from 0; None: the mean of all."""
    term: Term = "both"
    """What of the rows is drawn: the whole weight, or the share of ``content`` or of ``place``."""
    features_block: int = -1
    """The block whose features are drawn."""


@dataclass(frozen=True)
class Asked:
    """What is to be found in each image."""

    target: int | None
    show: frozenset[str]
    queries: tuple[str | tuple[int, int], ...] | None
    """``CLASS``, ``TOP``, or a place: down and right in pixels of the file."""
    blocks: tuple[int, ...]
    head: int | None
    term: Term
    features_block: int


def parse_look(argv: Sequence[str]) -> LookOptions:
    """Read and check the flags, before which stand the checkpoint and the images.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong or missing, or the folder is there; one line.
    """
    count = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    first, rest = list(argv[:count]), list(argv[count:])
    given = {flag.replace("-", "_") for flag, _ in split_options(rest)}
    words = rest
    if first and given & {"checkpoint", "model"} == {"model"} and _is_weights(first[0]):
        words = ["--checkpoint", first.pop(0), *rest]
    elif first and not given & {"checkpoint", "model"}:
        model, *first = first
        # A file goes first; the name of a model that comes with weights may stand in its place.
        known = not os.path.exists(model) and timm.is_model(model)
        words = [*(["--model", model, "--pretrained"] if known else ["--checkpoint", model]), *rest]
    if first:
        if "images" in given:
            raise ValueError("images stand first or behind --images, not both")
        words = ["--images", *first, *words]
    options = parse_options(
        LookOptions,
        words,
        command="look",
        description="Draw where the evidence for a class lies, over each image. The checkpoint, or "
        "the name of a model that comes with weights, and the images may stand first, without "
        "their flags.",
        example=EXAMPLE,
    )
    check(options)
    return options


def _is_weights(word: str) -> bool:
    return Path(word).suffix in (".safetensors", ".pth", ".pt", ".bin", ".npz")


def check(options: LookOptions) -> None:
    """Check what needs neither model nor image.

    Raises:
        ValueError: one line with the option, what it may be, and what it is.
    """
    if options.model and timm.is_model(options.model) and not is_ours(options.model):
        raise ValueError(
            f"{options.model} is no model of visionattn, whose blocks and pooling look reads"
        )
    check_asked(options)
    check_folder(options)


def check_asked(options: LookOptions) -> None:
    """Check what is asked for; raises ValueError as ``check`` does."""
    for key in ("show", "blocks"):
        if not getattr(options, key):
            raise ValueError(f"{key} is empty; leave it out")
    for word in options.show:
        if word not in SHOWN:
            raise ValueError(f"show must be some of {', '.join(SHOWN)}, got {brief(word)}")
    if options.head is not None and options.head < 0:
        raise ValueError(f"head must be at least 0, got {options.head}")
    asked = parse_queries(options.queries)
    rows = {"queries": asked, "head": options.head}
    rows["term"] = None if options.term == "both" else options.term
    for key, value in rows.items():
        if value is not None and "rows" not in options.show:
            raise ValueError(f"{key} is for rows of attention, which show leaves out")


def check_folder(options: LookOptions) -> None:
    """Check the folder of the pictures; raises ValueError as ``check`` does."""
    if not options.output:
        raise ValueError("--output is missing: a folder for the pictures")
    folder = Path(options.output)
    replaced = SUMMARY if options.overwrite else None
    if options.overwrite and folder.is_dir() and not (folder / SUMMARY).is_file():
        raise ValueError(
            f"{folder} is no folder of visionattn look, which --overwrite replaces; name another"
        )
    if not options.overwrite and (folder / SUMMARY).is_file():
        raise ValueError(f"{folder} exists; --overwrite replaces it")
    check_new(folder, replaces=replaced)


def parse_queries(
    given: Sequence[str] | None,
) -> tuple[str | tuple[int, int], ...] | None:
    """Return the queries that words mean; None for None.

    Raises:
        ValueError: a word means none, or there are too many; one line.
    """
    if given is None:
        return None
    if not 1 <= len(given) <= MOST_QUERIES:
        raise ValueError(f"queries must be 1 to {MOST_QUERIES}, got {len(given)}")
    found: list[str | tuple[int, int]] = []
    for word in given:
        place = re.fullmatch(r"(\d{1,9}),(\d{1,9})", word)
        if not place and word not in (CLASS, TOP):
            raise ValueError(
                "queries must be places such as 120,88, down and right in pixels, class or top, "
                f"got {brief(word)}"
            )
        found.append((int(place[1]), int(place[2])) if place else word)
    return tuple(dict.fromkeys(found))
