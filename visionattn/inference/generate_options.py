"""Options of ``visionattn generate`` and ``visionattn.generate``, and the checks that need neither
model nor image.

A docstring under each field is its help text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from visionattn.cli.files import check_free
from visionattn.cli.parsing import parse, with_first
from visionattn.data.geometry import check_geometry
from visionattn.data.option_ranges import check_least
from visionattn.inference.picture_folder import check_picture_folder

SUMMARY = "generate.json"
"""The file that marks a folder as output of ``visionattn generate``."""
PICTURE, ARRAY = ".png", ".npy"
MOST_IN_PICTURE = 10_000
"""Maximum number of images in one picture."""
EXAMPLE = "checkpoints/digits_generate/best.safetensors --count 40 --output checkpoints/written.png"


@dataclass
class GenerateOptions:
    """Image generation with a pixel decoder."""

    checkpoint: str | None = None
    """The ``best.safetensors`` of a training with ``--data.task generate``."""
    count: int | None = None
    """Number of generated images; with ``complete`` the number per image. None: 64, with
    ``complete`` 1.
    """
    img_size: int | list[int] | None = None
    """Height and width in pixels, or one number for both; None: as in training."""
    classes: list[str] | None = None
    """Names or numbers of classes, assigned to images in rotation; only for a model with classes.
    None: all classes; with ``complete`` the most likely class of the given rows.
    """
    temperature: float = 1.0
    """Sampling temperature: log-probabilities are divided by it. Below 1, images are more typical;
    0: always the most likely level.
    """
    seed: int = 0
    """Seed; with the index of an image it determines the image."""
    complete: list[str] | None = None
    """Images to complete; their lower part is generated. Folders (searched to any depth), image
    files, and ``.txt`` files with a path per line; preprocessing is as in training.
    """
    keep: float | None = None
    """Only for ``complete``: share of the rows, from the top, that is kept, in (0, 1). None:
    0.5.
    """
    batch_size: int = 64
    """Images that are generated together."""
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if available."""
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    amp: Literal["none", "bf16"] = "none"
    """Automatic mixed precision."""
    output: str | None = None
    """Output: a ``.png`` with all images in a grid, an ``.npy`` with an array
    ``[images, height, width, channels]`` of uint8, or else a folder with a PNG per image and an
    ``index.csv``.
    """
    overwrite: bool = False
    """Replace an existing output."""

    @property
    def suffix(self) -> str:
        """The suffix of the output; empty for a folder."""
        return Path(self.output or "").suffix.lower()


def parse_generate(argv: Sequence[str]) -> GenerateOptions:
    """Read and check the flags; the checkpoint may come first.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong or missing; one line.
    """
    options = parse(
        GenerateOptions,
        with_first(argv, "checkpoint"),
        command="generate",
        description="Autoregressive image generation: generate images, or complete the lower part "
        "of images, with a pixel decoder. The first word may be the checkpoint, without its flag.",
        example=EXAMPLE,
    )
    check(options)
    return options


def check(options: GenerateOptions) -> None:
    """Check all options except the source and destination of images.

    Raises:
        ValueError: one line with the option, its limits and its value.
    """
    check_least(1, count=options.count, batch_size=options.batch_size, threads=options.threads)
    check_least(0, seed=options.seed)
    if not 0 <= options.temperature < math.inf:
        raise ValueError(
            f"temperature must be finite and at least 0, got {options.temperature}; 0 always "
            "chooses the most likely level"
        )
    if options.img_size is not None:
        check_geometry("stretch", options.img_size, None)
    if options.keep is not None and options.complete is None:
        raise ValueError("keep needs --complete")
    if options.keep is not None and not 0 < options.keep < 1:
        raise ValueError(f"keep must be above 0 and below 1, got {options.keep}")


def check_output(options: GenerateOptions) -> None:
    """Check the output, and that a model is given.

    Raises:
        ValueError: as ``check``.
    """
    if not options.checkpoint:
        raise ValueError(
            "expected --checkpoint: the best.safetensors of a training with --data.task generate"
        )
    if not options.output:
        raise ValueError(
            f"expected --output: a {PICTURE} for all images in a grid, an {ARRAY}, or a folder"
        )
    path = Path(options.output)
    if options.suffix == PICTURE and (options.count or 0) > MOST_IN_PICTURE:
        raise ValueError(
            f"expected count at most {MOST_IN_PICTURE:,} for a {PICTURE}, got {options.count:,}; "
            f"pass an {ARRAY} or a folder as --output"
        )
    if options.suffix in (PICTURE, ARRAY):
        check_free(path, options.overwrite)
    elif options.suffix:
        raise ValueError(
            f"expected --output to end in {PICTURE} or {ARRAY}, or a folder without suffix, got "
            f"{path}"
        )
    else:
        check_picture_folder(path, SUMMARY, options.overwrite)
