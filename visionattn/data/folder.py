"""The user's own images: which of them ``data.root`` means, with which classes or masks.

This module owns folders, and the one line that says what is wrong with a root. Tars and tables are
in ``archives.py``, streams in ``streams.py``.
"""

import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from visionattn.data.archives import open_table, open_tar
from visionattn.data.formats import COLOURED, ReadOptions, extensions, settle
from visionattn.data.images import ImageDataset
from visionattn.data.mask_files import MASKS, MaskFiles, masks_of, settle_classes
from visionattn.data.mask_values import MaskClasses
from visionattn.data.parts import LAYOUT, MASKED_LAYOUT, Found, Part
from visionattn.data.sources import Files
from visionattn.data.split_names import LeftOut, are_splits, by_split, listed, split_of
from visionattn.data.walk import (
    holds_images,
    identity,
    images_below,
    subfolders,
)

if TYPE_CHECKING:
    from visionattn.data.augment import Augment

IMAGES = "images"
"""The folder of the images that have masks."""

Datasets = dict[str, ImageDataset]
"""By split: ``train``, ``validation`` and, where there is one, ``test``. Images to judge weights on
have the splits that the root has, and ``all``.
"""


def open_images(
    root: str,
    *,
    val_fraction: float,
    seed: int,
    augment: "Augment | None",
    options: ReadOptions | None = COLOURED,
    labelled: bool = True,
    levels: bool = False,
    known: Sequence[str] | None = None,
) -> tuple[Datasets, tuple[str, ...]]:
    """Find the images under ``root`` and divide them.

    Args:
        root: a folder, a ``.tar`` file, or ``hfds/<name or folder>``.
        val_fraction: share of the training images held out, class by class, where there is no split
            for validation.
        seed: the seed of that division and of ``augment``.
        augment: what augments the training images; None: nothing does.
        options: how the files are read. What is not said of their values is found by looking at a
            few of them, with a warning that tells it. None: the files are only listed.
        labelled: whether a folder must have class folders. Otherwise one in which an image lies
            outside of them, or which has none, holds images without classes, at any depth.
        levels: whether images must be of 8 bits, as their values are to be written.
        known: the class names of weights that are to be judged on the images, empty where they have
            none: these number the classes, and splits and classes may lack. None: a training.

    Returns:
        The images of each split, and the class names; none where images have no classes, whose
        labels are all 0.

    Raises:
        ValueError, FileNotFoundError: one line that says what is wrong.
    """
    check_there(root)
    if root.startswith("hfds/"):
        found = open_table(root)
    elif Path(root).is_dir():
        found = _open_folder(Path(root), labelled, known)
    elif Path(root).suffix.lower() == ".tar":
        found = open_tar(root, labelled, known or ())
    else:
        raise ValueError(
            f"data root {root} is neither a folder nor a .tar file; decompress a compressed tar, "
            "in which single images cannot be found, and name it .tar"
        )
    found.left_out.warn(root)
    if known is None:
        parts, names = found.to_train(root, val_fraction, seed), found.names
    else:
        parts, names = found.to_judge(root, known, val_fraction, seed), tuple(known) or found.names
        missing = np.setdiff1d(np.arange(len(names)), parts["all"].labels)
        if len(missing):
            without = listed(names[label] for label in missing)
            warnings.warn(f"{root} has no images of the classes {without}", stacklevel=2)
    return _datasets(parts, seed, augment, options, levels=levels), names


def open_masked(
    root: str,
    *,
    val_fraction: float,
    seed: int,
    augment: "Augment | None",
    options: ReadOptions,
    classes: MaskClasses,
    judged: bool = False,
) -> tuple[Datasets, MaskClasses]:
    """Find images with masks beside them under ``root``, a folder, and divide them.

    Args:
        classes: what the values of masks mean, as far as somebody has said it.
        judged: weights are to be judged on the images, so that splits may lack.

    The other arguments are those of ``open_images``.

    Returns:
        Training, validation and test images (None where there are none), and the classes of their
        pixels.

    Raises:
        ValueError, FileNotFoundError: one line that says what is wrong.
    """
    if root.startswith(("hfds/", "wds/")) or (Path(root).exists() and not Path(root).is_dir()):
        raise ValueError(f"data root {root} is no folder, {MASKED_LAYOUT}")
    check_there(root, MASKED_LAYOUT)
    left_out = LeftOut()
    images, masks, places = [], [], []
    for split, folders in _image_folders(Path(root), left_out).items():
        paths = _without_classes(folders[0], left_out)
        images += paths
        masks += masks_of(paths, *folders)
        places += [(split, "")] * len(paths)
    left_out.warn(root)
    (files,) = settle_classes([MaskFiles(Files(masks), classes, options.max_pixels)], root)
    found = Found.placed(Files(images), places, left_out, files)
    if judged:
        parts = found.to_judge(root, (), val_fraction, seed)
    else:
        parts = found.to_train(root, val_fraction, seed)
    return _datasets(parts, seed, augment, options), files.classes


def check_there(root: str, wanted: str = f"{LAYOUT}, a .tar file, wds/... or hfds/...") -> None:
    """Raise FileNotFoundError where a folder or a file of images does not exist."""
    if not root.startswith(("hfds/", "wds/")) and not Path(root).exists():
        raise FileNotFoundError(f"data root {root} does not exist; {wanted}")


def _datasets(
    parts: dict[str, Part],
    seed: int,
    augment: "Augment | None",
    options: ReadOptions | None,
    *,
    levels: bool = False,
) -> Datasets:
    """Make the data sets of the splits, of which the training images alone are augmented."""
    first = parts.get("all") or parts["train"]
    if options is not None:
        options, lines = settle(first.source, first.indices, options)
        for line in lines:
            warnings.warn(line, stacklevel=3)
    return {
        split: ImageDataset(
            part.source,
            part.indices,
            part.labels,
            seed,
            augment if split == "train" else None,
            options or COLOURED,
            masks=part.masks,
            levels=levels,
            held_out=part.held_out,
        )
        for split, part in parts.items()
    }


def _image_folders(root: Path, left_out: LeftOut) -> dict[str, tuple[Path, Path]]:
    """Return for each split the folders of its images and of their masks: ``train/images`` and
    ``train/masks``, ``images/train`` and ``masks/train``, or all in ``images`` and ``masks``.
    """
    top = subfolders(root)
    images, masks = _images_and_masks(root)
    if not images.is_dir():
        splits = [
            name for name in top if split_of(name) and _images_and_masks(root / name)[0].is_dir()
        ]
        found = {
            split: _images_and_masks(root / name) for split, name in by_split(splits, root).items()
        }
        if not found:
            raise ValueError(f"data root {root} has no folder images; {MASKED_LAYOUT}")
        left_out.folders += [name for name in top if name not in splits]
        return found
    left_out.folders += [name for name in top if name not in (images.name, masks.name)]
    splits = [name for name in subfolders(images) if split_of(name)]
    others = [name for name in subfolders(images) if name not in splits]
    direct = images_below(images, deep=False)
    holding = [name for name in others if holds_images(images / name)] + direct
    if not are_splits(splits, holding, images):
        return {"train": (images, masks)}
    left_out.folders += [f"{images.name}/{name}" for name in others]
    left_out.outside += len(direct)
    of_masks = by_split(subfolders(masks), masks) if masks.is_dir() else {}
    return {
        split: (images / name, masks / of_masks.get(split, name))
        for split, name in by_split(splits, images).items()
    }


def _images_and_masks(folder: Path) -> tuple[Path, Path]:
    """Return the folders of images and of masks in a folder, whose names may be in any case."""
    there = subfolders(folder)
    named = {name.lower(): name for name in there} | {name: name for name in there}
    return folder / named.get(IMAGES, IMAGES), folder / named.get(MASKS, MASKS)


def _open_folder(root: Path, labelled: bool, known: Sequence[str] | None) -> Found:
    """Open class folders below the folder of each split, or below ``root`` itself."""
    left_out = LeftOut()
    folders = _split_folders(root, labelled, known or (), left_out)
    if root not in folders.values():
        left_out.outside = len(images_below(root, others=left_out.suffixes, deep=False))
    around = deepcopy(left_out)
    try:
        if not labelled and any(images_below(folder, deep=False) for folder in folders.values()):
            raise _NoClasses
        paths = {split: _list_classes(folder, known, left_out) for split, folder in folders.items()}
    except _NoClasses:
        if labelled:
            raise
        left_out = around
        paths = {split: {"": _without_classes(each, left_out)} for split, each in folders.items()}
    flat = [
        (path, (split, name))
        for split, classes in paths.items()
        for name, images in classes.items()
        for path in images
    ]
    return Found.placed(Files([path for path, _ in flat]), [place for _, place in flat], left_out)


def _split_folders(
    root: Path, labelled: bool, known: Sequence[str], left_out: LeftOut
) -> dict[str, Path]:
    """Return the folder of each split; ``root`` for ``train`` where there are no splits."""
    names = subfolders(root)
    named = [
        name
        for name in names
        if split_of(name) and not (name in known and images_below(root / name, deep=False))
    ]
    # Of a folder and links to it, one counts.
    of_folder = {(split_of(name), identity(root / name)): name for name in named}
    named = list(of_folder.values())
    places = {place for _, place in of_folder}
    others = [name for name in names if identity(root / name) not in places]
    holding = [name for name in others if named and holds_images(root / name)]

    def classes_of(name: str) -> list[str]:
        return subfolders(root / name)

    if are_splits(named, holding, root, classes_of=classes_of if labelled else None):
        left_out.folders += others
        return {split: root / name for split, name in by_split(named, root).items()}
    # A folder around the splits says nothing.
    if (
        len(names) == 1
        and names[0] not in known
        and any(map(split_of, subfolders(root / names[0])))
    ):
        return _split_folders(root / names[0], labelled, known, left_out)
    return {"train": root}


class _NoClasses(ValueError):
    """A folder is not one of class folders with images."""


def _without_classes(folder: Path, left_out: LeftOut) -> list[str]:
    """List the images below a folder at any depth."""
    paths = images_below(folder, others=left_out.suffixes)
    if not paths:
        raise ValueError(f"data folder {folder} {_no_images(left_out)}")
    return paths


def _no_images(left_out: LeftOut) -> str:
    wanted = ", ".join(sorted(extensions()))
    return f"holds no images, which end in {wanted}{left_out.files_there()}"


def _list_classes(
    folder: Path, known: Sequence[str] | None, left_out: LeftOut
) -> dict[str, list[str]]:
    """List the paths of the images of each class folder, at any depth; classes and paths stand in
    natural order. A link to the folder itself is no class, and no class has images of another.
    """
    classes = subfolders(folder)
    if [name.lower() for name in classes] == [IMAGES, MASKS]:
        raise ValueError(
            f"data folder {folder} has the folders images and masks: --data.task segmentation "
            "learns masks; rename the folders if they are classes of images"
        )
    if not classes:
        raise _NoClasses(f"data folder {folder} has no class folders; {LAYOUT}")
    left_out.outside += len(images_below(folder, others=left_out.suffixes, deep=False))
    apart = {identity(folder), *(identity(folder / name) for name in classes)}
    paths: dict[str, list[str]] = {}
    for name in classes:
        own = LeftOut()
        found = images_below(folder / name, apart, own.suffixes)
        if not found and known is None:
            raise _NoClasses(
                f"class folder {folder / name} {_no_images(own)}; add some or delete the folder"
            )
        if not found and name not in (known or ()):
            left_out.folders.append(name)
        left_out.suffixes += own.suffixes
        paths[name] = found
    return paths
