"""What the user asked of a data set, checked and made whole by the data set's name.

``ranges.py`` checks ranges of numbers, and ``presets.py`` augmentation.
"""

from dataclasses import asdict, replace

from visionattn.cli.untrusted import checked
from visionattn.data.data_config import DataConfig
from visionattn.data.documents import LARGEST_PIECE_PX, SMALLEST_SIZE_PX
from visionattn.data.drawn_images import SHORTEST, DrawnArgs
from visionattn.data.embedded import CanvasArgs
from visionattn.data.formats import check_reading
from visionattn.data.geometry import Size, check_geometry, sides
from visionattn.data.ranges import check_ranges
from visionattn.models.segmentation import IGNORED as MOST_CLASSES

EMBEDDED = ("digits", "digits_pixel", "canvas", "documents", "copy")
"""Data sets that need no files."""
DRAWN = frozenset({"canvas", "documents"})
"""Data sets of pictures that are drawn, and their masks."""
ARGS: dict[str, type[DrawnArgs]] = {
    "canvas": CanvasArgs,
    "documents": DrawnArgs,
    "copy": DrawnArgs,
}
"""What ``data.args`` may say, of data sets of as many images as the user asks for."""
MASKED = ("mask_classes", "mask_colours", "mask_ignored")
"""Options of masks in files."""
WHOLE = frozenset({"folder", "documents"})
"""Data sets whose images are seen whole unless the user says otherwise."""
USUAL_PX: dict[str, int | list[int]] = {
    "digits": 32,
    "digits_pixel": 32,
    "canvas": 128,
    "documents": 512,
    "copy": [1, 128],
    "cifar10": 32,
    "cifar10_pixel": 32,
}
"""Sizes in pixels where the user names none."""
WRITTEN_PX = USUAL_PX | {"canvas": 48, "documents": 32, "folder": 32}
"""Those of images that are written value by value."""
LEVELS = ("digits", "canvas", "documents", "copy", "cifar10", "folder")
"""Data sets whose values can be written."""


def resolved(config: DataConfig) -> DataConfig:
    """Return the options with those of the geometry that the data set's name decides, checked.

    Raises:
        ValueError: they are out of range or contradict each other; one line.
    """
    written = config.task == "generate"
    whole = config.name in WHOLE and not written
    fit = config.fit or ("native" if whole else "crop")
    usual = (WRITTEN_PX if written else USUAL_PX).get(config.name)
    usual = usual if config.max_patches is None else None
    img_size = usual if config.img_size is None else config.img_size
    check_geometry(fit, img_size, config.max_patches, prefix="data.")
    if config.batch_patches is not None and fit != "native":
        raise ValueError(
            f"data.batch_patches is for fit native; with fit {fit} images have one size, and "
            "batch_size says how many make a batch"
        )
    if config.img_size_choices is not None and config.max_patches is not None:
        raise ValueError(
            "data.img_size_choices are sizes in pixels, and data.max_patches limits images "
            "otherwise; give one of them"
        )
    args = asdict(args_of(config)) if config.name in ARGS else config.args
    return replace(config, fit=fit, img_size=img_size, args=args)


def check_data(config: DataConfig) -> None:
    """Check the values and what depends on the data set's name."""
    check_ranges(config)
    args_of(config)
    for size in (config.img_size, *(config.img_size_choices or ())):
        if size is not None:
            check_size(config, sides(size))
    if config.task == "segmentation" and config.name not in (*DRAWN, "folder"):
        raise ValueError(
            f"{config.name} has no masks; data.task segmentation is for "
            f"{', '.join(sorted(DRAWN))} and folder"
        )
    if config.task == "generate":
        check_writing(config)
    elif config.name == "copy":
        raise ValueError("copy has no classes, only values to write; wanted data.task generate")
    check_masks(config)
    check_reading(config.bands, config.value_range, config.page, config.max_pixels)
    if config.range_found and config.value_range is None:
        raise ValueError("data.range_found is said of data.value_range, which is missing")
    _check_acts(config)


def _check_acts(config: DataConfig) -> None:
    """Raise ValueError for an option that would do nothing for the data set."""
    folder, drawn = config.name == "folder", config.name in ARGS
    masked = folder and config.task == "segmentation"
    stream = folder and (config.root or "").startswith("wds/")
    rules = [
        (("bands", "value_range", "page", "max_pixels", "mean", "std"), folder, "folder alone"),
        (MASKED, masked, "folder with data.task segmentation alone"),
        (("num_classes",), stream, "wds/... alone (other data say it themselves)"),
        (("root",), config.name not in EMBEDDED, "images in files (--data.name folder)"),
        (("download",), config.name.startswith("cifar10"), "cifar10 and cifar10_pixel alone"),
        (("max_patches", "aug"), not drawn, "images that are read, and not drawn at data.img_size"),
        (("mean", "std"), config.task != "generate", "other tasks than generate"),
    ]
    usual = DataConfig()
    for keys, acts, whose in rules:
        for key in keys:
            if not acts and getattr(config, key) != getattr(usual, key):
                raise ValueError(f"data.{key} is for {whose}; leave it out for {config.name}")


def args_of(config: DataConfig) -> DrawnArgs:
    """Return what ``data.args`` says, whole and checked.

    Raises:
        ValueError: it is for other data, or a name or a value is wrong; one line.
    """
    if config.args and config.name not in ARGS:
        raise ValueError(
            f"data.args is for {', '.join(ARGS)} alone; leave it out for {config.name}"
        )
    return checked(ARGS.get(config.name, DrawnArgs), config.args, "data.args")


def check_writing(config: DataConfig) -> None:
    """Raise ValueError for data whose values cannot be written one after the other."""
    if config.name not in LEVELS:
        other = config.name.removesuffix("_pixel")
        raise ValueError(
            f"the grey levels of {config.name} are one-hot, for models that tell classes; "
            f"data.task generate takes {other}"
        )
    if config.name == "documents" and config.fit != "crop":
        raise ValueError(
            f"data.task generate takes pieces of documents at their own scale, not fit "
            f"{config.fit}; leave data.fit out"
        )


def check_masks(config: DataConfig) -> None:
    """Check what is said of masks in files.

    Raises:
        ValueError: it is for other data, out of range, or contradicts itself; one line.
    """
    names, colours = config.mask_classes, config.mask_colours
    ignored = config.mask_ignored
    most = MOST_CLASSES
    for key, given in (("mask_classes", names), ("mask_colours", colours)):
        if given is not None and not 2 <= len(given) <= most:
            raise ValueError(f"data.{key} must name 2 to {most} classes, got {len(given)}")
    if names is not None and (len(set(names)) < len(names) or not all(names)):
        raise ValueError(f"data.mask_classes must be names, each once, got {names}")
    for colour in colours or []:
        if len(colour) != 3 or not all(0 <= level <= 255 for level in colour):
            raise ValueError(
                f"data.mask_colours wants red, green and blue of each class, 0 to 255, got {colour}"
            )
    if colours is not None and len(set(map(tuple, colours))) < len(colours):
        raise ValueError("data.mask_colours has a colour twice; each class has its own")
    if names is not None and colours is not None and len(names) != len(colours):
        raise ValueError(
            f"data.mask_classes names {len(names)} classes and data.mask_colours {len(colours)}"
        )
    if ignored is None:
        return
    wanted = 1 if colours is None else 3
    if len(ignored) != wanted or min(ignored) < 0 or max(ignored) > (65535 if wanted == 1 else 255):
        what = "one value from 0 to 65535" if wanted == 1 else "red, green and blue, 0 to 255"
        raise ValueError(f"data.mask_ignored must be {what}, got {ignored}")
    if ignored in (colours or []) or (
        names is not None and wanted == 1 and ignored[0] < len(names)
    ):
        raise ValueError(f"data.mask_ignored {ignored} is that of a class; name another one")


def check_size(config: DataConfig, both: Size) -> None:
    """Raise ValueError where images are drawn, and height and width are not for what is drawn."""
    size = min(both)
    if config.name == "copy" and (both[0] != 1 or both[1] < SHORTEST):
        raise ValueError(
            f"copy has sequences of one row and {SHORTEST} values at least; wanted an img_size "
            f"such as 1 128, got {both[0]} {both[1]}"
        )
    if config.task == "generate" and config.name == "documents":
        if size > LARGEST_PIECE_PX:
            raise ValueError(
                f"pieces of documents of {size} pixels are too large to be written; wanted "
                f"{LARGEST_PIECE_PX} at most"
            )
        return
    if config.name == "documents" and size < SMALLEST_SIZE_PX:
        raise ValueError(
            f"documents of {size} pixels are too small for their marks; wanted {SMALLEST_SIZE_PX} "
            "or more"
        )
    args = args_of(config)
    if isinstance(args, CanvasArgs) and size < args.smallest_px:
        raise ValueError(
            f"canvas of {size} pixels is too small for its digits; wanted {args.smallest_px} or "
            "more"
        )


def allow_augment(config: DataConfig, *allowed: str) -> None:
    """Raise ValueError for an augmentation that is not made for this data set."""
    if config.augment not in ("none", *allowed):
        raise ValueError(
            f"augment {config.augment} is not made for {config.name}; choose "
            f"{', '.join(('none', *allowed))}"
        )
