"""What the user asked of a data set, checked and made whole by the data set's name.

``ranges.py`` checks what values alone can be wrong, and ``presets.py`` those of augmentation.
"""

import math
from dataclasses import replace

from visionattn.data.config import AugmentConfig, DataConfig
from visionattn.data.copying import SHORTEST
from visionattn.data.crops import LARGEST_PIECE_PX
from visionattn.data.documents import SMALLEST_SIZE_PX
from visionattn.data.embedded import LARGER, USUAL, CanvasTask
from visionattn.data.formats import check_reading
from visionattn.data.geometry import Size, check_geometry, sides
from visionattn.data.ranges import check_ranges
from visionattn.models.segmentation import IGNORED as MOST_CLASSES

EMBEDDED = ("digits", "digits_pixel", "canvas", "documents", "copy")
"""Data sets that need no files."""
DRAWN = frozenset({"canvas", "documents"})
"""Data sets of pictures that are drawn, and their masks."""
COUNTED = DRAWN | {"copy"}
"""Data sets of as many images as the user asks for."""
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
    return replace(config, fit=fit, img_size=img_size)


def check_data(config: DataConfig) -> None:
    """Check the values and what depends on the data set's name."""
    check_ranges(config)
    if config.name == "canvas":
        canvas_task(config)
    for size in (config.img_size, *(config.img_size_choices or ())):
        if size is not None:
            check_size(config, sides(size))
    if config.num_classes is not None and not (
        config.name == "folder" and (config.root or "").startswith("wds/")
    ):
        raise ValueError(
            "num_classes is for wds/... alone; other data say themselves how many classes they have"
        )
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
    for key in ("bands", "value_range", "page", "max_pixels", "mean", "std"):
        if config.name != "folder" and getattr(config, key) is not None:
            raise ValueError(f"{key} is for folder alone, not for {config.name}; leave it out")
    if config.name in COUNTED and config.max_patches is not None:
        raise ValueError(f"{config.name} is drawn at data.img_size; leave data.max_patches out")
    if config.name in COUNTED and config.aug != AugmentConfig():
        raise ValueError(
            f"data.aug changes images that are read, and {config.name} draws its own; leave it out"
        )
    if config.download and not config.name.startswith("cifar10"):
        raise ValueError(f"{config.name} cannot be downloaded; leave download out")
    for key in ("distractors", "digit_px", "whole_digits"):
        if config.name != "canvas" and getattr(config, key) != getattr(DataConfig(), key):
            raise ValueError(f"{key} is for canvas alone, not for {config.name}; leave it out")
    for key in ("train_images", "eval_images"):
        if config.name not in COUNTED and getattr(config, key) != getattr(DataConfig(), key):
            raise ValueError(
                f"{key} is for canvas, documents and copy alone, {config.name} has the images "
                "it has; leave it out"
            )
    if config.root is not None and config.name in EMBEDDED:
        raise ValueError(
            f"{config.name} is embedded and reads no data.root; for images in a folder give "
            "--data.name folder"
        )


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
    for key in ("mean", "std"):
        if getattr(config, key) is not None:
            raise ValueError(
                f"data.{key} would do nothing: data.task generate takes values as they are"
            )


def check_masks(config: DataConfig) -> None:
    """Check what is said of masks in files.

    Raises:
        ValueError: it is for other data, out of range, or contradicts itself; one line.
    """
    names, colours = config.mask_classes, config.mask_colours
    ignored = config.mask_ignored
    masked = config.name == "folder" and config.task == "segmentation"
    for key in ("mask_classes", "mask_colours", "mask_ignored"):
        if not masked and getattr(config, key) is not None:
            raise ValueError(
                f"data.{key} is for folder with data.task segmentation alone; leave it out"
            )
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


def canvas_task(config: DataConfig) -> CanvasTask:
    """Return how hard the canvases are that the user asked for.

    Raises:
        ValueError: a number is out of range.
    """
    if config.distractors is not None and config.distractors < 0:
        raise ValueError(f"data.distractors must be at least 0, got {config.distractors}")
    if config.whole_digits not in (1, 2):
        raise ValueError(f"data.whole_digits must be 1 or 2, got {config.whole_digits}")
    given = USUAL.digit_px if config.digit_px is None else config.digit_px
    if len(given) != 2 or not 8 <= given[0] <= given[1]:
        raise ValueError(
            "data.digit_px wants the smallest and the largest side of digits, 8 pixels or more, "
            f"got {given}"
        )
    if config.whole_digits == 2 and given[1] < math.ceil(LARGER * given[0]):
        raise ValueError(
            f"data.digit_px {given[0]} {given[1]}: of two whole digits the larger is {LARGER} "
            "times as large or more; wanted a wider range"
        )
    return CanvasTask(config.distractors, (given[0], given[1]), config.whole_digits)


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
    if config.name == "canvas" and size < (smallest := canvas_task(config).smallest_px):
        raise ValueError(
            f"canvas of {size} pixels is too small for its digits; wanted {smallest} or more"
        )


def allow_augment(config: DataConfig, *allowed: str) -> None:
    """Raise ValueError for an augmentation that is not made for this data set."""
    if config.augment not in ("none", *allowed):
        raise ValueError(
            f"augment {config.augment} is not made for {config.name}; choose "
            f"{', '.join(('none', *allowed))}"
        )
