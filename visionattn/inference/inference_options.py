"""Common options of the commands for image files: which images, which weights, which size.

This module owns the flags and the checks that need no model and no image. A docstring under each
field is its help text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from visionattn.cli.untrusted import checked
from visionattn.data.option_ranges import check_least, check_workers
from visionattn.model_config import Fit

NATIVE = "native"
MOST_GIB = 2**20
OF_COMMANDS = {"images", "checkpoint", "model", "args", "pretrained", "threads", "output"}
OF_COMMANDS |= {"overwrite", "max_pixels", "seed", "labels", "save", "map_format", "outline"}
"""Options of commands that Python calls do not have."""
Saved = Literal["masks", "probabilities", "geojson", "coco"]
MAP_SUFFIXES = (".npy", ".zarr", ".tif", ".tiff")


@dataclass
class OpenOptions:
    """Images, weights and preprocessing, for one image at a time."""

    images: list[str] | None = None
    """Folders (searched to any depth), image files, and ``.txt`` files with a path per line."""
    checkpoint: str | None = None
    """Weights: the ``best.safetensors`` of a run, or, together with ``model``, other weights such
    as a timm state dict.
    """
    model: str | None = None
    """A timm name, of this package or any other; not with a ``best.safetensors``, which states its
    model.
    """
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``model``, e.g. ``{num_heads: 6}``."""
    pretrained: bool = False
    """Use the pretrained weights of ``model`` from timm or visionattn."""
    img_size: int | list[int] | Literal["native"] | None = None
    """Image size in pixels: height and width, or one number for both; with ``fit native`` the
    maximum. ``native``: each image at its own size, without a limit. None: as in training.
    """
    fit: Fit | None = None
    """Preprocessing of images of any size: ``native`` (own size, shrunk to a limit if given),
    ``pad`` (letterbox), ``stretch``, or ``crop`` (center crop). None: as in training.
    """
    max_patches: int | None = None
    """Only for ``fit native``, instead of ``img_size``: maximum number of patches per image."""
    bands: list[int] | None = None
    """Bands of the files that become the model's channels, from 1; None: as in training."""
    value_range: list[float] | None = None
    """Values that map to 0 and 1, in files of more than 8 bits; None: as in training."""
    page: int | None = None
    """Page of the files that is read, from 1; None: as in training."""
    max_pixels: int | None = None
    """Maximum number of pixels of a file to decode at once; a file that needs more is unreadable.
    None: 2^30, about 1.07 billion.
    """
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: the GPU if available."""
    threads: int | None = None
    """CPU threads; None: chosen by torch."""
    seed: int = 0
    """Seed of random weights."""
    output: str | None = None
    """File or folder for the results."""
    overwrite: bool = False
    """Replace existing results."""

    @property
    def seed_divides(self) -> bool:
        """Return whether the seed also splits images, so that it has an effect even if a file
        provides all weights.
        """
        return False

    @property
    def needs_model(self) -> bool:
        """Return whether there is something to run, so that a model must be named."""
        return True


@dataclass
class InferenceOptions(OpenOptions):
    """Images, weights and preprocessing, in batches."""

    batch_size: int | Literal["auto"] | None = None
    """Images per batch; with ``native`` only consecutive images of one size. None: 16, with
    ``native`` 1. ``auto``: as many as fit into memory.
    """
    workers: int = 2
    """Data loader processes; 0: load in the main process."""
    amp: Literal["none", "bf16", "fp16", "auto"] = "none"
    """Automatic mixed precision. ``auto``: bf16 if the CPU or GPU supports it."""
    tiles: int | None = None
    """Cut images into overlapping tiles with this side in pixels. Images keep their own sizes
    unless a size is given; ``batch_size`` counts tiles and defaults to 1. None: whole images.
    """
    overlap: int | None = None
    """Only for ``tiles``: minimum overlap of neighbors in pixels. None: an eighth of ``tiles``."""
    combine: Literal["mean", "max"] | None = None
    """Only for ``tiles`` and vectors: ``mean`` or ``max`` over tiles; None: ``mean``. Maps are
    blended.
    """
    level: int = 0
    """Level to read from files that hold several sizes (slides, OME-NGFF, overviews), from 0, the
    largest.
    """
    memory_gib: float | None = None
    """Memory limit in GiB of a forward pass, without the model. An image at its own size that needs
    more is computed band by band, with the same result. None: the available memory, and
    80 % of it in bands.
    """

    @property
    def memory_bytes(self) -> int | None:
        """Return the limit in bytes."""
        return None if self.memory_gib is None else int(self.memory_gib * 2**30)


@dataclass
class PredictOptions(InferenceOptions):
    """Classes of images."""

    MOST_USED = ("images", "checkpoint", "output", "img_size", "batch_size", "top_k", "save")
    """Flags at the top of the help."""

    labels: str | None = None
    """Label table as for training (``--data.labels``), with paths relative to the only folder in
    ``images``. Its rows are the images, and the results get its columns as ``table_...``.
    """
    top_k: int | None = None
    """Number of classes per image, the most probable first. None: 5, in a table on standard output
    3, or fewer if the model has fewer.
    """
    save: list[Saved] | None = None
    """Only for segmentation models, the outputs to write: ``masks`` (PNG), ``probabilities``
    (float16, a band per class), ``geojson`` (polygons of classes), ``coco`` (objects of all images
    in ``coco.json``). None: ``masks``.
    """
    map_format: Literal["npy", "zarr", "tif"] | None = None
    """Only for ``save probabilities`` in a folder: format of the files. None: ``npy``."""
    outline: list[str] | None = None
    """Only for ``save geojson`` and ``coco``: names of the classes that are written. None: all."""

    @property
    def saved(self) -> list[Saved]:
        """Return the outputs that a segmentation model writes."""
        return self.save or ["masks"]


@dataclass
class DenseOptions(InferenceOptions):
    """Features of images in memory."""

    dense: bool = False
    """Compute the last feature map of each image, ``[C, H, W]``, after the final norm, instead of
    one vector per image.
    """


Options = TypeVar("Options", bound=OpenOptions)


def parse_options(options_class: type[Options], argv: Sequence[str], **about: Any) -> Options:
    """Read and check the flags of a command.

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


def options_of_call(
    kind: type[Options], given: dict[str, Any], *, only: Sequence[str] = (), **more: Any
) -> Options:
    """Return the keyword arguments of a Python call as the options of its command.

    Args:
        kind: their dataclass.
        given: by name; sequences may be tuples, and None for ``device`` means ``auto``.
        only: names of the options that the call has; empty: all except ``OF_COMMANDS``.
        more: options set by the call.

    Raises:
        TypeError: there is no such option.
        ValueError: a value has the wrong type; one line.
    """
    known = only or [each.name for each in fields(kind) if each.name not in OF_COMMANDS]
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
    """Check the options that need neither model nor image.

    Raises:
        ValueError: one line with the option, the allowed values and the given value.
    """
    # Import readers of images, which takes a second, after the check of option names.
    from visionattn.data.formats import check_reading
    from visionattn.data.geometry import check_geometry

    check_least(1, threads=options.threads)
    check_least(0, seed=options.seed)
    if isinstance(options, InferenceOptions):
        check_least(1, batch_size=None if options.batch_size == "auto" else options.batch_size)
        check_least(0, level=options.level)
        check_workers(options.workers, "workers")
        memory_gib = options.memory_gib
        if memory_gib is not None and not 0 < memory_gib < MOST_GIB:
            raise ValueError(f"memory_gib must be above 0 and below {MOST_GIB:,}, got {memory_gib}")
        _check_tiles(options)
    if isinstance(options, PredictOptions):
        _check_saved(options)
    fit, native = options.fit, options.img_size == NATIVE
    if native and (fit not in (None, NATIVE) or options.max_patches):
        other = "max_patches" if fit in (None, NATIVE) else f"fit {fit}"
        raise ValueError(f"img_size native conflicts with {other}; remove one of them")
    check_reading(options.bands, options.value_range, options.page, options.max_pixels, prefix="")
    if not native and (options.img_size is not None or options.max_patches is not None):
        check_geometry(fit or NATIVE, options.img_size, options.max_patches)
    if options.pretrained and options.checkpoint:
        raise ValueError("pass either pretrained (timm's weights) or checkpoint (a file)")
    if options.needs_model and not (options.model or options.checkpoint):
        raise ValueError(
            "expected --checkpoint (the best.safetensors of a run) or --model (a timm name)"
        )
    if options.args and not options.model:
        raise ValueError("args need --model; a best.safetensors stores its own")


def _check_tiles(options: InferenceOptions) -> None:
    """Raise ValueError if options of tiles contradict others, or have no effect."""
    for key in ("overlap", "combine") if options.tiles is None else ():
        if getattr(options, key) is not None:
            raise ValueError(f"{key} needs --tiles; pass it, or remove {key}")
    if options.tiles is not None and options.batch_size == "auto":
        raise ValueError("expected a number as batch_size with --tiles, got auto")


def _check_saved(options: PredictOptions) -> None:
    """Raise ValueError if options of saved files contradict each other, or have no effect."""
    outlines = {"geojson", "coco"} & {*options.saved}
    one_file = Path(options.output or "").suffix.lower() in MAP_SUFFIXES
    if options.outline is not None and not outlines:
        raise ValueError("outline needs --save geojson or coco")
    if one_file and (outlines or len(options.saved) > 1):
        raise ValueError(
            f"expected a folder as --output for --save {' '.join(options.saved)}, got "
            f"{options.output}"
        )
    if options.map_format and (one_file or "probabilities" not in options.saved):
        raise ValueError("map_format needs --save probabilities and a folder")


def in_tiles(options: OpenOptions) -> bool:
    """Return whether images are cut into tiles."""
    return getattr(options, "tiles", None) is not None
