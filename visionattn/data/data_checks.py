"""Check the options of a dataset, and complete them by its name.

``option_ranges.py`` checks ranges of numbers, and ``mask_values.py`` the options of masks.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from visionattn.cli.untrusted import checked, refuse
from visionattn.data.data_config import PRESETS, DataConfig
from visionattn.data.digits_and_canvas import CanvasArgs
from visionattn.data.documents import LARGEST_PIECE_PX, SMALLEST_SIZE_PX
from visionattn.data.formats import check_reading
from visionattn.data.geometry import Size, check_geometry, check_sides, pixels, sides
from visionattn.data.option_ranges import check_ranges
from visionattn.data.synthetic_images import SHORTEST, DrawnArgs
from visionattn.model_config import VECTOR_TASKS

EMBEDDED = ("digits", "digits_pixel", "canvas", "documents", "copy")
"""Datasets that need no files."""
DRAWN = frozenset({"canvas", "documents"})
"""Datasets of drawn images with masks."""


@dataclass(frozen=True)
class Cifar10Args:
    """``data.args`` of CIFAR-10."""

    download: bool = False
    """Fetch missing data into ``data.root``."""


@dataclass(frozen=True)
class FolderArgs:
    """``data.args`` of images in files."""

    num_classes: int | None = None
    """Number of classes of a stream."""


ARGS: dict[str, type] = {
    "canvas": CanvasArgs,
    "documents": DrawnArgs,
    "copy": DrawnArgs,
    "cifar10": Cifar10Args,
    "cifar10_pixel": Cifar10Args,
    "folder": FolderArgs,
}
"""Options in ``data.args`` by dataset."""
WHOLE = frozenset({"folder", "documents"})
"""Datasets whose images are not cropped by default."""
USUAL_PX: dict[str, int | list[int]] = {
    "digits": 32,
    "digits_pixel": 32,
    "canvas": 128,
    "documents": 512,
    "copy": [1, 128],
    "cifar10": 32,
    "cifar10_pixel": 32,
}
"""Default sizes in pixels."""
WRITTEN_PX = USUAL_PX | {"canvas": 48, "documents": 32, "folder": 32}
"""Default sizes in pixels for ``data.task generate``."""
LEVELS = ("digits", "canvas", "documents", "copy", "cifar10", "folder")
"""Datasets whose values can be generated."""


def resolved(config: DataConfig) -> DataConfig:
    """Return the checked options, with the default geometry of this dataset.

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
    refuse(
        (
            config.batch_patches is not None and fit != "native",
            f"data.batch_patches needs fit native, got {fit}; use batch_size",
        ),
        (
            config.img_size_choices is not None and config.max_patches is not None,
            "pass either data.img_size_choices or data.max_patches, not both",
        ),
    )
    args = asdict(args_of(config)) if config.name in ARGS else config.args
    return replace(config, fit=fit, img_size=img_size, args=args)


def check_data(config: DataConfig) -> None:
    """Check the values, and the options that depend on the dataset."""
    check_ranges(config)
    args_of(config)
    for size in (config.img_size, *(config.img_size_choices or ())):
        if size is not None:
            check_size(config, sides(size))
    name, task, written = config.name, config.task, config.task == "generate"
    refuse(
        (
            task == "segmentation" and name not in (*DRAWN, "folder"),
            f"{name} has no masks; data.task segmentation needs {', '.join(sorted(DRAWN))} or "
            "folder",
        ),
        (
            task in VECTOR_TASKS and (name != "folder" or config.labels is None),
            f"data.task {task} needs a label table; pass --data.name folder and --data.labels",
        ),
        (
            written and name not in LEVELS,
            f"{name} has one-hot gray levels; for data.task generate use "
            f"{name.removesuffix('_pixel')}",
        ),
        (
            written and name == "documents" and config.fit != "crop",
            "data.task generate uses crops of documents at their own scale, got fit "
            f"{config.fit}; remove data.fit",
        ),
        (name == "copy" and not written, "copy has no classes; expected data.task generate"),
        (config.features is not None, "data.features works only with visionattn train; remove it"),
    )
    check_crops(config)
    check_reading(config.bands, config.value_range, config.page, config.max_pixels)
    _check_acts(config)


def _check_acts(config: DataConfig) -> None:
    """Raise ValueError for an option without effect on the dataset."""
    folder, drawn = config.name == "folder", config.name in (*DRAWN, "copy")
    masked = folder and config.task == "segmentation"
    stream = folder and (config.root or "").startswith("wds/")
    table = folder and (config.root or "").startswith("hfds/")
    rules = [
        (("bands", "value_range", "page", "max_pixels", "mean", "std"), folder, "folder"),
        (("cache",), folder and not stream, "images in files that are not streamed"),
        (("masks",), masked, "folder with data.task segmentation"),
        (("labels", "columns", "group_from"), folder and not (stream or table), "folders and tars"),
        (("fold",), folder and not stream, "images in folders, tars and hfds/..."),
        (
            ("columns",),
            config.labels is not None and config.task in VECTOR_TASKS,
            "data.labels with data.task multilabel or regression",
        ),
        (("labels",), config.task != "generate", "tasks with labels"),
        (("root",), config.name not in EMBEDDED, "images in files (--data.name folder)"),
        (("max_patches",), not drawn, "images that are read, and not drawn at data.img_size"),
        (
            ("crop",),
            config.task != "generate" and not stream,
            "images that are neither streamed nor generated",
        ),
        (
            ("sampler",),
            config.task == "classification" and not stream and not drawn,
            "data.task classification of images that are neither drawn nor streamed",
        ),
        (("mean", "std"), config.task != "generate", "other tasks than generate"),
    ]
    usual = DataConfig()
    for keys, acts, whose in rules:
        for key in keys:
            if not acts and getattr(config, key) != getattr(usual, key):
                task = "" if config.task == DataConfig.task else f", data.task {config.task}"
                raise ValueError(f"data.{key} needs {whose}, got {config.name}{task}; remove it")
    if folder and not stream and args_of(config).num_classes is not None:
        raise ValueError("data.args.num_classes needs data.root wds/...; remove it")


def args_of(config: DataConfig) -> Any:
    """Return the options in ``data.args``, completed and checked.

    Raises:
        ValueError: it does not apply to the dataset, or a name or a value is wrong; one line.
    """
    if config.args and config.name not in ARGS:
        raise ValueError(f"data.args needs one of {', '.join(ARGS)}, got {config.name}; remove it")
    return checked(ARGS[config.name], config.args, "data.args") if config.name in ARGS else None


def check_size(config: DataConfig, both: Size) -> None:
    """Raise ValueError for a height and width that do not suit a data set of drawn images."""
    size, pages = min(both), config.name == "documents"
    pieces = pages and config.task == "generate"
    smallest = args_of(config).smallest_px if config.name == "canvas" else 0
    refuse(
        (
            config.name == "copy" and (both[0] != 1 or both[1] < SHORTEST),
            f"copy needs one row of at least {SHORTEST} values, got img_size {both[0]} {both[1]}; "
            "use e.g. 1 128",
        ),
        (
            pieces and size > LARGEST_PIECE_PX,
            f"expected pieces of documents of at most {LARGEST_PIECE_PX} pixels for data.task "
            f"generate, got {size}",
        ),
        (
            pages and not pieces and size < SMALLEST_SIZE_PX,
            f"documents of {size} pixels are too small for their marks; use at least "
            f"{SMALLEST_SIZE_PX}",
        ),
        (
            size < smallest,
            f"canvas of {size} pixels is too small for its digits; use at least {smallest}",
        ),
    )


def check_crops(config: DataConfig) -> None:
    """Raise ValueError for training crops that are no size, cut no image, or need masks."""
    if config.crop is not None:
        check_sides(config.crop, "data.crop")
    crop, limit = sides(config.crop) or (0, 0), sides(config.img_size) or (math.inf, math.inf)
    refuse(
        (
            config.crop is None and (config.crop_around or config.crops != 1),
            "data.crop_around and data.crops need --data.crop; pass it, or remove them",
        ),
        (
            crop[0] >= limit[0] and crop[1] >= limit[1],
            f"expected data.crop below data.img_size {pixels(limit)}, got {pixels(crop)}; use a "
            "smaller crop or a larger data.img_size",
        ),
        (
            config.crop_around and config.task != "segmentation",
            f"data.crop_around needs data.task segmentation, got {config.task}; remove it",
        ),
    )


def check_augment(config: DataConfig, *allowed: str, files: bool = True) -> None:
    """Check that an augmentation supports this dataset.

    Args:
        config: names the augmentation.
        allowed: presets.
        files: whether it may be a file.

    Raises:
        ValueError: it is not; one line.
        FileNotFoundError: it is no preset, and no file.
    """
    chosen = config.augment
    if chosen in ("none", *allowed):
        return
    if chosen in PRESETS or not files:
        raise ValueError(
            f"augment {chosen} is not available for {config.name}; use "
            f"{', '.join(('none', *allowed))}{', or a YAML file of albumentations' * files}"
        )
    if not Path(chosen).is_file():
        raise FileNotFoundError(
            f"expected a file or one of {', '.join(PRESETS)} for data.augment, got {chosen}; "
            "albumentations.save(transform, path, 'yaml') writes a file"
        )
