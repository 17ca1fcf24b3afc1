"""Datasets by name, and their splits into training, validation and test.

This module owns the splits and the interface of the data: it makes the loaders of ``batches.py``.
``data_checks.py`` checks the user's options.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch.utils.data import Dataset

from visionattn.data.batches import EvalBatches, SampleKey, TrainBatches, Unreadable
from visionattn.data.buckets import cell_px
from visionattn.data.class_folders import LAYOUT, MASKED_LAYOUT
from visionattn.data.data_checks import (
    USUAL_PX,
    args_of,
    check_augment,
    check_data,
    check_size,
    resolved,
)
from visionattn.data.data_config import DataConfig
from visionattn.data.digits_and_canvas import (
    CanvasDataset,
    digit_splits,
    stratified_split,
)
from visionattn.data.documents import CLASS_NAMES, DocumentsDataset, PagePieces
from visionattn.data.folder_walk import composed
from visionattn.data.formats import COLOURED, LARGEST_IMAGE_PX, ReadOptions
from visionattn.data.formats.reader import one_line
from visionattn.data.geometry import Geometry, Size, geometry_of, sides
from visionattn.data.images import ArrayDataset, ImageDataset
from visionattn.data.label_table import read_labels
from visionattn.data.mask_values import said_of_masks
from visionattn.data.option_ranges import fold_of
from visionattn.data.own_images import check_there, find_images, find_in_table, find_masked
from visionattn.data.pixel_cache import PixelCache
from visionattn.data.streams import Shards, StreamEvalBatches, StreamTrainBatches, open_shards
from visionattn.data.synthetic_images import CopyingDataset, DrawnDataset, Split, value_names
from visionattn.models.weights import DataSpec

if TYPE_CHECKING:
    from visionattn.data.augment import Augment

__all__ = [
    "EvalBatches",
    "SampleKey",
    "Splits",
    "TrainBatches",
    "build_splits",
    "eval_batches",
    "train_batches",
]

DIGIT_NAMES = tuple("0123456789")
CIFAR10_SPLITS = ("train", "test")
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

ImagesAndLabels = tuple[np.ndarray, np.ndarray]
"""Images uint8 ``[n, H, W, 3]`` and their classes int64 ``[n]``."""


@dataclass(frozen=True)
class Splits:
    """Disjoint sets of images; indexed by ``SampleKey``, they return an ``Item``."""

    train: Dataset
    validation: Dataset
    test: Dataset | None
    spec: DataSpec

    def lists(self) -> dict[str, list[str]]:
        """Return the lists on which all training processes must agree, by name."""
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        return {"classes": list(self.spec.class_names)} | {
            f"{name} images": part.names()
            for name, part in parts.items()
            if isinstance(part, ImageDataset)
        }


def check_root(config: DataConfig) -> None:
    """Raise FileNotFoundError if the folder or file of the user's images does not exist, before
    checks of the output.
    """
    if config.name == "folder" and config.root is not None:
        check_there(config.root, *([MASKED_LAYOUT] if config.task == "segmentation" else []))


def build_splits(config: DataConfig, seed: int, *, labelled: bool = True) -> Splits:
    """Find the images of ``config.name`` and split them.

    The test split is the same for every seed. If the data has no validation split,
    ``config.val_fraction`` of the training images is held out, class by class, by ``seed``; later
    evaluations on it need the same seed.

    Args:
        config: which images, at which size, with which augmentation.
        seed: seed of the validation split, of generated images and of augmentation; at least 0.
        labelled: whether a folder of the user must have class folders; see
            ``own_images.find_images``.

    Raises:
        ValueError, FileNotFoundError: one line with the reason and a way out.
    """
    config = resolved(config)
    check_data(config)
    if config.name != "folder":
        return _BUILDERS[config.name](config, seed)
    datasets, spec = _open_root(config, seed, labelled=labelled)
    return Splits(datasets["train"], datasets["validation"], datasets.get("test"), spec)


def images_to_judge(
    config: DataConfig, seed: int, class_names: Sequence[str]
) -> tuple[dict[str, Dataset], DataSpec]:
    """Find the images of ``config.name`` for evaluating weights.

    Args:
        config: which images, at which size.
        seed: as for ``build_splits``.
        class_names: class names of the weights, which number the classes of a folder; empty if the
            weights have no names.

    Returns:
        The images by split: ``train``, ``validation`` and ``test`` as far as they exist, and
        ``all`` for the user's own files; and their specification.

    Raises:
        ValueError, FileNotFoundError: one line with the reason, or with the classes that the
            weights do not have.
    """
    if config.name == "folder":
        config = resolved(config)
        check_data(config)
        return _open_root(config, seed, known=class_names)
    splits = build_splits(config, seed)
    found = {name: getattr(splits, name) for name in ("train", "validation", "test")}
    return {name: part for name, part in found.items() if part is not None}, splits.spec


def train_batches(
    splits: Splits, config: DataConfig, *, batch_size: int, seed: int, patch_px: Size = (1, 1)
) -> TrainBatches | StreamTrainBatches:
    """Return the loader of ``splits.train``: shuffled, augmented, including the last incomplete
    batches.

    Each batch has images of one size, by ``splits.spec``, with one of ``config.img_size_choices``
    drawn by seed, epoch and batch number, or crops of ``config.crop``. With ``config.sampler``,
    classes are drawn equally often.
    ``config.workers`` processes load them and stay from epoch to epoch; with 0 the main process
    does.

    Args:
        splits: the images.
        config: the loading options.
        batch_size: images per batch, on average if they differ in size.
        seed: seed of order, sizes and augmentation.
        patch_px: height and width of the model's patches in pixels.

    Raises:
        ValueError: the images are a stream, whose sizes are unknown in advance.
    """
    choices = geometry_choices(splits.spec, config, patch_px)
    if isinstance(splits.train, Shards):
        return StreamTrainBatches(
            splits.train, config.workers, batch_size=batch_size, choices=choices
        )
    labels = splits.train.labels if config.sampler else None  # type: ignore[attr-defined]
    batches = TrainBatches(
        splits.train,
        config,
        batch_size=batch_size,
        choices=choices,
        seed=seed,
        labels=labels,
        crops=config.crops,
    )
    weights = getattr(splits.train, "weights", None)
    batches.weights = None if weights is None else torch.from_numpy(weights)
    return batches


def training_geometry(spec: DataSpec, config: DataConfig, patch_px: Size = (1, 1)) -> Geometry:
    """Return the geometry of the training images at ``config.img_size``."""
    geometry = geometry_of(spec, patch_px)
    return replace(geometry, crop=sides(config.crop), crop_around=config.crop_around)


def geometry_choices(
    spec: DataSpec, config: DataConfig, patch_px: Size = (1, 1)
) -> tuple[Geometry, ...]:
    """Return the geometries to choose from for each training batch."""
    geometry = training_geometry(spec, config, patch_px)
    if not config.img_size_choices:
        return (geometry,)
    return tuple(replace(geometry, img_size=sides(size)) for size in config.img_size_choices)


def eval_batches(
    dataset: Dataset, config: DataConfig, *, batch_size: int, geometry: Geometry
) -> EvalBatches | StreamEvalBatches:
    """Return the loader of ``dataset`` (a validation or test split): whole images, no augmentation,
    fixed order. If training has crops, a batch has as many pixels as ``batch_size`` crops, or one
    image.

    Raises:
        ValueError: the images are synthetic, and the size is too small for them.
    """
    if geometry.img_size is not None:
        check_size(config, geometry.img_size)
    if config.crop is not None:
        crops_px = batch_size * math.prod(sides(config.crop))
        patches = config.batch_patches or max(1, crops_px // cell_px(geometry))
        config = replace(config, batch_patches=patches)
        if geometry.canvas is not None:
            batch_size = max(1, crops_px // math.prod(geometry.canvas))
    if isinstance(dataset, Shards):
        return StreamEvalBatches(
            dataset, config.workers, batch_size=batch_size, choices=(geometry,)
        )
    return EvalBatches(dataset, config, batch_size=batch_size, choices=(geometry,))


def _augment(config: DataConfig, *allowed: str, **options) -> "Augment | None":
    """Return the augmentation of ``config``, which must be a file or one of ``allowed``."""
    check_augment(config, *allowed)
    if config.augment == "none":
        return None
    # Importing albumentations takes seconds.
    from visionattn.data.augment import Augment

    return Augment(config.augment, **options)


def _spec(
    config: DataConfig,
    channels: int,
    names: tuple[str, ...],
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
) -> DataSpec:
    """Return the specification of images for the task: classification (possibly one-hot),
    segmentation or generation.
    """
    if config.task == "segmentation":
        names = value_names(names)
    one_hot = config.name.endswith("_pixel")
    plain = one_hot or config.task == "generate"
    return DataSpec(
        256 if one_hot else channels,
        len(names),
        names,
        () if plain else mean,
        () if plain else std,
        "grey_one_hot" if one_hot else None,
        *_seen_as(config),
        task=config.task,
    )


def _seen_as(config: DataConfig) -> tuple:
    """Return the preprocessing as the fields of ``DataSpec`` after its encoding."""
    size = tuple(config.img_size) if isinstance(config.img_size, list) else config.img_size
    return size, config.fit, config.max_patches


def _build_digits(config: DataConfig, seed: int) -> Splits:
    augment = _augment(config, "light", border="black", bands=1)
    train, validation, test = (
        ArrayDataset(part.images[..., None], part.labels, seed, augment if i == 0 else None)
        for i, part in enumerate(digit_splits(config.val_fraction, seed).values())
    )
    return Splits(train, validation, test, _spec(config, 1, DIGIT_NAMES, (0.306,), (0.324,)))


def _build_drawn(config: DataConfig, seed: int) -> Splits:
    canvas, masked = config.name == "canvas", config.task == "segmentation"
    check_augment(config, *(["light"] if canvas else []), files=False)
    args = args_of(config)
    make: Callable[..., DrawnDataset] = CopyingDataset
    spec = _spec(config, 1, ())
    if canvas:
        digits = digit_splits(config.val_fraction, seed)
        spec = _spec(config, 1, DIGIT_NAMES, (0.25,), (0.10,))
    elif config.name == "documents" and config.task == "generate":
        make = PagePieces
    elif config.name == "documents":
        make, spec = DocumentsDataset, _spec(config, 1, CLASS_NAMES, (0.8,), (0.2,))

    def dataset(split: Split) -> DrawnDataset:
        length = args.train_images if split == "train" else args.eval_images
        if not canvas:
            return make(split, length, seed, masked=masked)
        vary = split == "train" and config.augment == "light"
        how = dict(vary=vary, task=args, masked=masked)
        return CanvasDataset(digits[split], split, length, seed, **how)

    return Splits(dataset("train"), dataset("validation"), dataset("test"), spec)


def _build_cifar10(config: DataConfig, seed: int) -> Splits:
    grey = config.name == "cifar10_pixel"
    allowed = ("light", "crop_flip") if grey else ("light", "crop_flip", "three", "rand")
    augment = _augment(config, *allowed, bands=1 if grey else 3, smallest_crop=0.4)
    parts, names = _read_cifar10(config)

    def dataset(split: str, chosen: np.ndarray | slice, augment=None) -> ArrayDataset:
        images, labels = (each[chosen] for each in parts[split])
        if grey:
            images = np.stack([cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) for image in images])
            images = images[..., None]
        return ArrayDataset(images, labels, seed, augment)

    kept, held_out = stratified_split(parts["train"][1], config.val_fraction, seed)
    return Splits(
        dataset("train", kept, augment),
        dataset("train", held_out),
        dataset("test", slice(None)),
        _spec(config, 3, names, CIFAR10_MEAN, CIFAR10_STD),
    )


def _read_cifar10(config: DataConfig) -> tuple[dict[str, ImagesAndLabels], tuple[str, ...]]:
    """Return the training and the test images of CIFAR-10, and the names of its classes.

    The root holds the official binary files, or image files in ``train/<class>`` and
    ``test/<class>``.
    """
    from torchvision.datasets import CIFAR10

    if config.root is None:
        raise ValueError(
            f"{config.name} needs data.root: a folder with cifar-10-batches-py, or for its "
            "download; or a folder with train/<class>/* and test/<class>/*"
        )
    if Path(config.root, "train").is_dir():
        return _read_class_folders(config.root)
    download = args_of(config).download
    try:
        found = {n: CIFAR10(config.root, n == "train", download=download) for n in CIFAR10_SPLITS}
    except (RuntimeError, OSError) as error:  # torchvision's missing or damaged files; network
        if download:
            raise FileNotFoundError(
                f"cannot download CIFAR-10 to {config.root}: {one_line(error)}"
            ) from error
        raise FileNotFoundError(
            f"no complete CIFAR-10 in {config.root}; pass --data.args.download true to download it"
        ) from error
    arrays = {name: (part.data, np.array(part.targets)) for name, part in found.items()}
    return arrays, tuple(found["train"].classes)


def _read_class_folders(root: str) -> tuple[dict[str, ImagesAndLabels], tuple[str, ...]]:
    """Decode the images of ``train/<class>`` and ``test/<class>`` into memory, at 32 x 32 px."""
    found = find_images(root)
    if found.parts.keys() != set(CIFAR10_SPLITS):
        raise ValueError(
            f"expected images of cifar10 in train/<class>/* and test/<class>/* of {root}, got "
            f"{' and '.join(found.parts)}"
        )
    arrays, geometry = {}, Geometry("crop", sides(USUAL_PX["cifar10"]))
    for name in CIFAR10_SPLITS:
        indices, labels, _ = found.parts[name]
        dataset = ImageDataset(found.source, indices, labels, 0)
        items = [dataset[SampleKey(index, 0, geometry)] for index in range(len(dataset))]
        for item in items:
            if isinstance(item, Unreadable):
                raise ValueError(f"cannot read image {item.path}: {item.reason}")
        arrays[name] = np.stack([item.pixels for item in items]), labels
    return arrays, found.names


def _open_root(
    config: DataConfig,
    seed: int,
    *,
    labelled: bool = True,
    known: Sequence[str] | None = None,
) -> tuple[dict[str, Dataset], DataSpec]:
    """Open the user's own images; ``known`` are the class names of weights to evaluate on them, see
    ``own_images.find_images``.
    """
    datasets: Mapping[str, Dataset]
    if config.root is None:
        raise ValueError(
            f"data.name folder needs data.root; {LAYOUT}, a .tar file, wds/... or hfds/..."
        )
    options = ReadOptions(
        3,
        config.bands,
        config.value_range,
        config.page,
        max_pixels=config.max_pixels or LARGEST_IMAGE_PX,
    )
    presets = ("light", "crop_flip", "three", "rand", "documents", "aerial")
    augment = _augment(config, *presets, bands=options.channels)
    colours = None
    # A stream does not state its classes; every other source names them.
    if config.root.startswith("wds/") and config.task != "segmentation":
        if options != COLOURED:
            raise ValueError(
                f"timm's reader of {config.root} reads only RGB of the first page; remove bands, "
                "value_range, page and max_pixels, or unpack the images to a folder"
            )
        names, num_classes = (), args_of(config).num_classes
        datasets = open_shards(
            config.root,
            num_classes=num_classes,
            on_error=config.on_error,
            seed=seed,
            augment=augment,
            judged=known is not None,
        )
    else:
        generate = config.task == "generate"
        table = None if config.labels is None else read_labels(config.labels, config.root)
        if config.task == "segmentation":
            found = find_masked(config.root, said_of_masks(config), options.max_pixels, table)
            names, colours = found.masks.classes.names, found.masks.classes.colours
        else:
            if table is not None:
                found = find_in_table(config.root, table, config.task, config.columns, known or ())
            else:
                found = find_images(config.root, labelled=labelled and not generate, known=known)
            names = tuple(known or ()) or found.names
        num_classes = len(names)
        if config.group_from is not None:
            found = found.by_group(config.group_from)
        how = (config.val_fraction, seed, fold_of(config.fold))
        if known is None:
            parts = found.to_train(*how)
        else:
            parts = found.to_judge(() if found.masks else known, *how)
        cache = None if config.cache is None else PixelCache(config.cache)
        opened = found.datasets(parts, seed, augment, options, levels=generate, cache=cache)
        datasets, options = opened, next(iter(opened.values())).options
    values = config.task != "generate"
    return dict(datasets), DataSpec(
        options.channels,
        num_classes,
        tuple(map(composed, names)),
        _per_channel(config, "mean", IMAGENET_DEFAULT_MEAN, options.channels) if values else (),
        _per_channel(config, "std", IMAGENET_DEFAULT_STD, options.channels) if values else (),
        None,
        *_seen_as(config),
        bands=options.bands,
        value_range=options.value_range,
        range_found=options.found,
        page=options.page,
        task=config.task,
        colours=colours,
    )


def _per_channel(
    config: DataConfig, key: str, usual: tuple[float, ...], channels: int
) -> tuple[float, ...]:
    """Return the means or standard deviations of the channels: the given ones, else ImageNet's, or
    their average for channels other than red, green and blue.
    """
    given = getattr(config, key)
    if given is None:
        return usual if channels == 3 else (sum(usual) / len(usual),) * channels
    if len(given) != channels:
        raise ValueError(
            f"expected {channels} numbers for data.{key}, one per channel, got {len(given)}"
        )
    if not all(map(isfinite, given)) or (key == "std" and min(given) <= 0):
        wanted = "finite" + (" and above 0" if key == "std" else "")
        raise ValueError(f"expected data.{key} to be {wanted}, got {given}")
    return tuple(given)


_BUILDERS = {
    "digits": _build_digits,
    "digits_pixel": _build_digits,
    "canvas": _build_drawn,
    "documents": _build_drawn,
    "copy": _build_drawn,
    "cifar10": _build_cifar10,
    "cifar10_pixel": _build_cifar10,
}
