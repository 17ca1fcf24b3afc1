"""What the tools for images in files have in common: which images, which weights, at which size.

This module owns the flags and the checks that need no model and no image. A docstring under each
field is its help text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from visionattn.cli.untrusted import checked
from visionattn.data.formats import check_reading
from visionattn.data.geometry import check_geometry
from visionattn.data.ranges import check_workers
from visionattn.models.weights import Fit

NATIVE = "native"
MOST_GIB = 2**20
OF_COMMANDS = {"images", "checkpoint", "model", "args", "pretrained", "threads", "output"}
OF_COMMANDS |= {"overwrite", "max_pixels", "seed"}
"""Options of commands that Python calls do not take."""


@dataclass
class OpenOptions:
    """Images, weights and how they meet, one image at a time."""

    images: list[str] | None = None
    """Folders (searched to any depth), image files, and ``.txt`` files with a path per line."""
    checkpoint: str | None = None
    """The ``best.safetensors`` of a run, or with ``model`` weights of another kind, e.g. a state
    dict of timm.
    """
    model: str | None = None
    """A timm name, ours or any other; not beside a ``best.safetensors``, which knows its model."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``model``, e.g. ``{num_heads: 6}``."""
    pretrained: bool = False
    """Take the weights that timm has of ``model``, or that come with visionattn."""
    img_size: int | list[int] | Literal["native"] | None = None
    """Size in pixels: height and width, or one number for both; with ``fit native`` the most that
    they may be. ``native``: each image at its own size, without a limit. None: as in training.
    """
    fit: Fit | None = None
    """How images of any size come to the model: ``native`` (whole, shrunk where a limit is given),
    ``pad`` (whole, the rest absent), ``stretch``, or ``crop`` (the centre). None: as in training.
    """
    max_patches: int | None = None
    """``fit native`` alone, instead of ``img_size``: the most patches of an image."""
    bands: list[int] | None = None
    """Which bands of the files are the model's channels, from 1; None: as in training."""
    value_range: list[float] | None = None
    """Values that become 0 and 1, in files of more than 8 bits; None: as in training."""
    page: int | None = None
    """Which page of the files is read, from 1; None: as in training."""
    max_pixels: int | None = None
    """The most pixels of a file that are decoded at once; a file that would take more counts as
    unreadable. None: 2^30, about 1.07 billion.
    """
    device: str = "auto"
    """``auto`` takes a GPU where there is one."""
    threads: int | None = None
    """CPU threads of torch; None: torch's own choice."""
    seed: int = 0
    """Seed of weights that no file gives."""
    output: str | None = None
    """Where the results go."""
    overwrite: bool = False
    """Replace results that are there."""

    @property
    def seed_divides(self) -> bool:
        """Tell whether the seed divides images too, so that it acts even where a file gives all
        weights.
        """
        return False

    @property
    def needs_model(self) -> bool:
        """Tell whether there is something to run, so that a model is to be named."""
        return True


@dataclass
class InferenceOptions(OpenOptions):
    """Images, weights and how they meet, in batches."""

    batch_size: int | Literal["auto"] | None = None
    """Images per batch; with ``native`` those of one size that follow each other. None: 16, with
    ``native`` 1. ``auto``: the most that fit into memory.
    """
    workers: int = 2
    """Processes that load images; 0 loads in the main process."""
    amp: Literal["none", "bf16", "fp16", "auto"] = "none"
    """Automatic mixed precision. ``auto``: bf16 where the processor or the GPU multiplies it."""
    tiles: int | None = None
    """Side in pixels of overlapping tiles that the model sees instead of whole images, which then
    come at their own sizes unless a size is named; ``batch_size`` counts tiles, and is 1. None:
    whole images.
    """
    overlap: int | None = None
    """``tiles`` alone: pixels that neighbours share at least. None: an eighth of ``tiles``."""
    combine: Literal["mean", "max"] | None = None
    """``tiles`` alone: what becomes of the vectors of all tiles; None: their mean. Maps are blended
    instead.
    """
    level: int = 0
    """Which size of files that hold several (slides, OME-NGFF, overviews), from 0, the largest."""
    memory_gib: float | None = None
    """GiB that a pass may take beside the model. Where one image alone would take more, and is seen
    at its own size, it is computed band by band, with the same result. None: the memory there is.
    """

    @property
    def memory_bytes(self) -> int | None:
        """Return the bound in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


@dataclass
class DenseOptions(InferenceOptions):
    """Features of images in memory."""

    dense: bool = False
    """The last feature map of each image, ``[C, H, W]``, after the final norm, instead of one
    vector per image.
    """


Options = TypeVar("Options", bound=OpenOptions)


def parse_options(options_class: type[Options], argv: Sequence[str], **about: Any) -> Options:
    """Read and check the flags of a tool.

    Args:
        options_class: their dataclass.
        argv: the flags, without the program's name.
        about: ``command``, ``description``, ``example`` and ``defaults`` of ``parse``.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong, or two exclude each other; one line.
    """
    from visionattn.cli.parsing import parse

    options = parse(options_class, argv, **about)
    check(options)
    return options


def options_of_call(kind: type[Options], given: dict[str, Any], **more: Any) -> Options:
    """Return the keyword arguments of a Python call as the options of its command.

    Args:
        kind: their dataclass.
        given: by name; sequences may be tuples, and None for ``device`` is ``auto``.
        more: options that the call decides.

    Raises:
        TypeError: there is no such option.
        ValueError: one has another type; one line.
    """
    known = [each.name for each in fields(kind) if each.name not in OF_COMMANDS]
    for key in given:
        if key not in known:
            raise TypeError(f"there is no option {key!r}; the options are {', '.join(known)}")
    values = more | {
        key: list(value) if isinstance(value, (tuple, range)) else value
        for key, value in given.items()
        if (key, value) != ("device", None)
    }
    return checked(kind, values, "options")


def check(options: OpenOptions) -> None:
    """Check what needs neither model nor image.

    Raises:
        ValueError: one line with the option, what it may be, and what it is.
    """
    for key, least in (
        ("batch_size", 1),
        ("threads", 1),
        ("workers", 0),
        ("seed", 0),
        ("level", 0),
    ):
        value = getattr(options, key, None)
        if value not in (None, "auto") and (isinstance(value, str) or value < least):
            raise ValueError(f"{key} must be at least {least}, got {value}")
    if isinstance(options, InferenceOptions):
        check_workers(options.workers, "workers")
        memory_gib = options.memory_gib
        if memory_gib is not None and not 0 < memory_gib < MOST_GIB:
            raise ValueError(f"memory_gib must be above 0 and below {MOST_GIB:,}, got {memory_gib}")
        _check_tiles(options)
    fit, native = options.fit, options.img_size == NATIVE
    if native and (fit not in (None, NATIVE) or options.max_patches):
        other = "max_patches" if fit in (None, NATIVE) else f"fit {fit}"
        raise ValueError(
            f"img_size native is each image at its own size, which {other} contradicts; name a "
            "size, or leave one of them out"
        )
    check_reading(options.bands, options.value_range, options.page, options.max_pixels, prefix="")
    if not native and (options.img_size is not None or options.max_patches is not None):
        check_geometry(fit or NATIVE, options.img_size, options.max_patches)
    if options.pretrained and options.checkpoint:
        raise ValueError(
            "pretrained fetches timm's weights and checkpoint names a file: give one of them"
        )
    if options.needs_model and not (options.model or options.checkpoint):
        raise ValueError(
            "name what to run: --checkpoint with the best.safetensors of a run, or --model with a "
            "timm name"
        )
    if options.args and not options.model:
        raise ValueError("args belong to model, which is missing; a best.safetensors has its own")


def _check_tiles(options: InferenceOptions) -> None:
    """Raise ValueError where options of tiles contradict others, or do nothing."""
    for key in ("overlap", "combine") if options.tiles is None else ():
        if getattr(options, key) is not None:
            raise ValueError(f"{key} is for --tiles alone; leave it out, or name their size")
    if options.tiles is not None and options.batch_size == "auto":
        raise ValueError("batch_size counts tiles beside --tiles: name a number instead of auto")
    if options.tiles is not None and options.fit == "pad":
        raise ValueError("fit pad adds to images what no tile should see; name another --fit")


def in_tiles(options: OpenOptions) -> bool:
    """Tell whether images are cut into tiles."""
    return getattr(options, "tiles", None) is not None
