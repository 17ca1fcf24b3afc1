"""The flags of ``visionattn generate``, and what they must be.

This module owns the checks that need no model and no image. A docstring under each field is its
help text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from visionattn.cli.files import check_free, check_new
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.untrusted import LARGEST_WHOLE
from visionattn.data.geometry import check_geometry

SUMMARY = "generate.json"
"""The file by which a folder is known as one of ``visionattn generate``."""
PICTURE, ARRAY = ".png", ".npy"
MOST_IMAGES = 2**24
EXAMPLE = "checkpoints/digits_generate/best.safetensors --count 40 --output checkpoints/written.png"


@dataclass
class GenerateOptions:
    """Images that a pixel decoder writes."""

    checkpoint: str | None = None
    """The ``best.safetensors`` of a training with ``--data.task generate``."""
    count: int | None = None
    """How many images are written; with ``complete`` how many for each image. None: 64, with
    ``complete`` 1.
    """
    img_size: int | list[int] | None = None
    """Height and width in pixels, or one number for both; None: as in training."""
    classes: list[str] | None = None
    """Names or numbers of classes, which images take in turn, for a model that was trained with
    classes. None: all in turn; with ``complete`` the class under which the given rows are the most
    likely.
    """
    temperature: float = 1.0
    """What log-probabilities are divided by before a level is drawn: below 1 images become more
    usual, 0 takes the most likely level always.
    """
    seed: int = 0
    """Seed of the draws: those of an image depend on it and on the number of the image alone."""
    complete: list[str] | None = None
    """Images whose lower part is written: folders (searched to any depth), image files, and
    ``.txt`` files with a path per line. They are seen as in training.
    """
    keep: float | None = None
    """The share of the rows of an image of ``complete`` that is given, from the top, above 0 and
    below 1; None: 0.5.
    """
    batch_size: int = 64
    """Images that are written together."""
    device: str = "auto"
    """``auto`` takes a GPU where there is one."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    amp: Literal["none", "bf16"] = "none"
    """Automatic mixed precision."""
    output: str | None = None
    """Where the images go: a ``.png`` with all of them side by side, an ``.npy`` with an array
    ``[images, height, width, channels]`` of uint8, or else a folder with a PNG of each and an
    ``index.csv``.
    """
    overwrite: bool = False
    """Replace an output that is there."""

    @property
    def kind(self) -> str:
        """The ending of the output; empty for a folder."""
        return Path(self.output or "").suffix.lower()


def parse_generate(argv: Sequence[str]) -> GenerateOptions:
    """Read and check the flags, before which the checkpoint may stand.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong or missing; one line.
    """
    options = parse(
        GenerateOptions,
        with_first(argv, "checkpoint"),
        command="generate",
        description="Write images with a pixel decoder, value by value, at the same cost for each "
        "value; or the lower part of images. The checkpoint may stand first, without its flag.",
        example=EXAMPLE,
    )
    check(options)
    return options


def check(options: GenerateOptions) -> None:
    """Check all but where the images come from and go.

    Raises:
        ValueError: one line with the option, what it may be, and what it is.
    """
    limits = {"count": (1, MOST_IMAGES), "batch_size": (1, MOST_IMAGES)}
    limits |= {"seed": (0, LARGEST_WHOLE - 1), "threads": (1, LARGEST_WHOLE)}
    for key, (least, most) in limits.items():
        value = getattr(options, key)
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most:,}"
            raise ValueError(f"{key} must be {limit}, got {value}")
    if not 0 <= options.temperature < math.inf:
        raise ValueError(
            f"temperature must be 0 or above, and finite, got {options.temperature}; 0 takes the "
            "most likely level"
        )
    if options.img_size is not None:
        check_geometry("stretch", options.img_size, None)
    if options.keep is not None and options.complete is None:
        raise ValueError("keep is a share of the images of --complete, which is missing")
    if options.keep is not None and not 0 < options.keep < 1:
        what = "larger than the image" if options.keep > 1 else "no part of an image"
        what = "the whole image" if options.keep == 1 else what
        raise ValueError(f"keep must be above 0 and below 1, got {options.keep}, which is {what}")
    for key in ("classes", "complete"):
        if getattr(options, key) is not None and not len(getattr(options, key)):
            raise ValueError(f"{key} is empty; leave it out")


def check_output(options: GenerateOptions) -> None:
    """Check where the images go, and that a model is named; raises ValueError as ``check`` does."""
    if not options.checkpoint:
        raise ValueError(
            "name the weights first: the best.safetensors of a training with --data.task generate"
        )
    if not options.output:
        raise ValueError(
            f"--output is missing: a {PICTURE} for all images side by side, an {ARRAY}, or a folder"
        )
    path = Path(options.output)
    if options.kind in (PICTURE, ARRAY):
        check_free(path, options.overwrite)
        return
    if options.kind:
        raise ValueError(
            f"--output {path} must end in {PICTURE} or {ARRAY}, or be a folder without an ending"
        )
    is_known = (path / SUMMARY).is_file()
    if is_known and not options.overwrite:
        raise ValueError(f"{path} exists; --overwrite replaces it")
    if options.overwrite and path.is_dir() and not is_known:
        raise ValueError(
            f"{path} is no folder of visionattn generate, which --overwrite replaces; name another"
        )
    check_new(path, replaces=SUMMARY if options.overwrite else None)
