"""The user's own images: class folders, a tar, a table of Hugging Face, and their division into
splits.

This module owns what ``data.root`` may be, and the one line that says what is wrong with it.
Streams are in ``streams.py``.
"""

import importlib.util
import tarfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from timm.data.readers import create_reader
from timm.data.readers.reader_image_in_tar import ReaderImageInTar

from visionattn.data.embedded import stratified_split
from visionattn.data.formats import COLOURED, ReadOptions, extensions, settle
from visionattn.data.images import Augmentation, ImageDataset
from visionattn.data.mask_files import MASKS, MaskFiles, masks_of, settle_classes
from visionattn.data.mask_values import MaskClasses
from visionattn.data.sources import Files, Source, TableRows, TarMembers
from visionattn.data.walk import identity, images_below, natural_key

LAYOUT = "wanted train/<class>/* and val/<class>/*, or <class>/*"
MASKED_LAYOUT = (
    "wanted images/* and masks/*, or train/images/*, train/masks/*, val/images/* and val/masks/*"
)
SPLIT_NAMES = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}

Datasets = tuple[ImageDataset, ImageDataset, ImageDataset | None]


@dataclass(frozen=True)
class _Part:
    """The images of one split: their numbers in ``source`` and their classes, ``[n]`` each; of all
    images of the source, the masks where there are some.
    """

    source: Source
    indices: np.ndarray
    labels: np.ndarray
    masks: MaskFiles | None = None

    def take(self, chosen: np.ndarray) -> "_Part":
        return replace(self, indices=self.indices[chosen], labels=self.labels[chosen])


def open_images(
    root: str,
    *,
    val_fraction: float,
    seed: int,
    augment: Augmentation | None,
    options: ReadOptions | None = COLOURED,
    labelled: bool = True,
    levels: bool = False,
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

    Returns:
        Training, validation and test images (None where there are none), and the class names; none
        where images have no classes, whose labels are all 0.

    Raises:
        ValueError, FileNotFoundError: one line that says what is wrong.
    """
    check_there(root)
    if root.startswith("hfds/"):
        parts, names = _open_table(root)
    elif Path(root).is_dir():
        parts, names = _open_folder(Path(root), labelled)
    elif not Path(root).is_file():
        raise ValueError(f"data root {root} is a pipe, a socket or a device; {LAYOUT}, or a tar")
    elif Path(root).suffix.lower() == ".tar":
        parts, names = _open_tar(root)
    elif tarfile.is_tarfile(root):
        raise ValueError(f"data root {root} is a tar {_way_out(root)}")
    else:
        raise ValueError(f"data root {root} is neither a folder nor a .tar file")
    parts = _complete(parts, names, root, val_fraction, seed)
    return _datasets(parts, seed, augment, options, levels=levels), tuple(names)


def open_masked(
    root: str,
    *,
    val_fraction: float,
    seed: int,
    augment: Augmentation | None,
    options: ReadOptions,
    classes: MaskClasses,
) -> tuple[Datasets, MaskClasses]:
    """Find images with masks beside them under ``root``, a folder, and divide them.

    Args:
        classes: what the values of masks mean, as far as somebody has said it.

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
    found = {split: _with_masks(*pair) for split, pair in _image_folders(Path(root)).items()}
    masks = settle_classes(
        [MaskFiles(files, classes, options.max_pixels) for _, files in found.values()], root
    )
    parts = {
        split: replace(part, masks=each)
        for (split, (part, _)), each in zip(found.items(), masks, strict=True)
    }
    parts = _complete(parts, [""], root, val_fraction, seed)
    return _datasets(parts, seed, augment, options), masks[0].classes


def _image_folders(root: Path) -> dict[str, tuple[Path, Path]]:
    """Return for each split the folders of its images and of their masks: ``train/images`` and
    ``train/masks``, ``images/train`` and ``masks/train``, or all in ``images`` and ``masks``.
    """
    images, masks = root / "images", root / MASKS
    within = images.is_dir()
    found = {}
    for split, names in SPLIT_NAMES.items():
        for name in names[::-1]:
            pair = (
                (images / name, masks / name)
                if within
                else (root / name / "images", root / name / MASKS)
            )
            if pair[0].is_dir():
                found[split] = pair
    if not found and not within:
        raise ValueError(f"data root {root} has no folder images; {MASKED_LAYOUT}")
    return found or {"train": (images, masks)}


def _with_masks(images: Path, masks: Path) -> tuple[_Part, Files]:
    part = _without_classes(images)
    assert isinstance(part.source, Files)
    return part, Files(masks_of(part.source.paths, images, masks))


def _datasets(
    parts: dict[str, _Part],
    seed: int,
    augment: Augmentation | None,
    options: ReadOptions | None,
    *,
    levels: bool = False,
) -> Datasets:
    """Make the data sets of the splits, of which the training images alone are augmented."""
    train = parts["train"]
    if options is not None:
        options, lines = settle(train.source, train.indices, options)
        for line in lines:
            warnings.warn(line, stacklevel=3)

    def dataset(split: str) -> ImageDataset | None:
        part = parts.get(split)
        if part is None:
            return None
        chosen = augment if split == "train" else None
        read = options or COLOURED
        kinds = {"masks": part.masks, "levels": levels}
        return ImageDataset(part.source, part.indices, part.labels, seed, chosen, read, **kinds)

    return dataset("train"), dataset("validation"), dataset("test")  # type: ignore[return-value]


def check_there(root: str, wanted: str = f"{LAYOUT}, a .tar file, wds/... or hfds/...") -> None:
    """Raise FileNotFoundError where a folder or a file of images does not exist."""
    if not root.startswith(("hfds/", "wds/")) and not Path(root).exists():
        raise FileNotFoundError(f"data root {root} does not exist; {wanted}")


def _complete(
    parts: dict[str, _Part], names: list[str], root: str, val_fraction: float, seed: int
) -> dict[str, _Part]:
    """Check that the classes of all splits are those of ``train``, and hold out a validation split
    where there is none.
    """
    train = parts.get("train")
    if train is None:
        raise ValueError(
            f"data root {root} has {' and '.join(parts)} images but none to train on; {LAYOUT}"
        )
    for split, part in parts.items():
        strange = np.setdiff1d(part.labels, train.labels)
        if len(strange):
            listed = ", ".join(names[label] for label in strange)
            raise ValueError(f"classes of {root} that are in {split} but not in train: {listed}")
    if "validation" in parts:
        return parts
    kept, held_out = stratified_split(train.labels, val_fraction, seed)
    if not len(held_out):
        raise ValueError(
            f"too few images in {root} to hold some out for validation; wanted two of some class"
        )
    return parts | {"train": train.take(kept), "validation": train.take(held_out)}


def _open_folder(root: Path, labelled: bool) -> tuple[dict[str, _Part], list[str]]:
    """Open class folders below the folder of each split, or below ``root`` itself."""
    folders = {
        split: root / name
        for split, names in SPLIT_NAMES.items()
        for name in names[::-1]
        if (root / name).is_dir()
    } or {"train": root}
    try:
        if not labelled and any(_has_images(folder) for folder in folders.values()):
            raise _NoClasses
        listed = {split: _list_classes(folder) for split, folder in folders.items()}
    except _NoClasses:
        if labelled:
            raise
        return {split: _without_classes(folder) for split, folder in folders.items()}, []
    names = sorted({name for classes in listed.values() for name in classes}, key=natural_key)
    parts = {}
    for split, classes in listed.items():
        paths = [path for images in classes.values() for path in images]
        labels = np.repeat(
            [names.index(name) for name in classes], [len(images) for images in classes.values()]
        )
        parts[split] = _Part(Files(paths), np.arange(len(paths)), labels)
    return parts, names


class _NoClasses(ValueError):
    """A folder is not one of class folders with images."""


def _has_images(folder: Path) -> bool:
    """Tell whether images lie in a folder itself."""
    known = extensions()
    return any(
        path.suffix.lower() in known and path.name[0] != "." and path.is_file()
        for path in folder.iterdir()
    )


def _without_classes(folder: Path) -> _Part:
    """List the images below a folder at any depth, all with label 0."""
    paths = images_below(folder)
    if not paths:
        wanted = ", ".join(sorted(extensions()))
        raise ValueError(f"data folder {folder} holds no images, which end in {wanted}")
    return _Part(Files(paths), np.arange(len(paths)), np.zeros(len(paths), np.int64))


def _list_classes(folder: Path) -> dict[str, list[str]]:
    """List the paths of the images of each class folder, at any depth; classes and paths stand in
    natural order. A link to the folder itself is no class, and no class has images of another.
    """
    own = identity(folder)
    classes = sorted(
        (
            path.name
            for path in folder.iterdir()
            if path.is_dir() and path.name[0] != "." and identity(path) != own
        ),
        key=natural_key,
    )
    if [name.lower() for name in classes] == ["images", "masks"]:
        raise ValueError(
            f"data folder {folder} has the folders images and masks: --data.task segmentation "
            "learns masks; rename the folders if they are classes of images"
        )
    if not classes:
        raise _NoClasses(f"data folder {folder} has no class folders; {LAYOUT}")
    apart = {own, *(identity(folder / name) for name in classes)}
    listed = {}
    for name in classes:
        listed[name] = images_below(folder / name, apart)
        if not listed[name]:
            wanted = ", ".join(sorted(extensions()))
            raise _NoClasses(
                f"class folder {folder / name} holds no images, which end in {wanted}; add some or "
                "delete the folder"
            )
    return listed


def _way_out(root: str) -> str:
    """Say what to do with a tar that timm's reader does not take, as it goes by the file's name."""
    try:
        tarfile.open(root, "r:").close()
    except tarfile.ReadError:
        return (
            "that is compressed, in which single images cannot be found; decompress it to a .tar "
            "file"
        )
    return "whose name does not end in .tar; rename it"


def _open_tar(root: str) -> tuple[dict[str, _Part], list[str]]:
    """Open a tar with timm's reader; a class is the folder that an image lies in, a split the first
    folder of its path.
    """
    try:
        reader = ReaderImageInTar(root)
    except tarfile.TarError as error:
        raise ValueError(f"cannot read {root} as a tar: {error}") from error
    except ValueError as error:  # timm unpacks an empty list
        if "invalid literal" in str(error):
            raise ValueError(
                f"{root} has names with digits that are no numbers, such as ²; rename them"
            ) from error
        raise ValueError(f"no images in {root}; {LAYOUT}") from error
    names = [reader.class_idx_to_name[label] for label in range(len(reader.class_idx_to_name))]
    if "" in names:
        raise ValueError(f"{root} has images outside of class folders; {LAYOUT}")
    source = TarMembers(reader, root)
    first = np.array([sample[0].path.removeprefix("./").split("/")[0] for sample in reader.samples])
    parts = {}
    for split, split_names in SPLIT_NAMES.items():
        indices = np.flatnonzero(np.isin(first, split_names))
        if len(indices):
            parts[split] = _Part(source, indices, reader.targets[indices])
    return parts or {"train": _Part(source, np.arange(len(reader)), reader.targets)}, names


def require(package: str, root: str) -> None:
    """Raise ValueError where the package that reads ``root`` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"data root {root} needs the package {package}: pip install {package}")


def _open_table(root: str) -> tuple[dict[str, _Part], list[str]]:
    """Open a Hugging Face data set with timm's reader, by the columns ``image`` and ``label``."""
    require("datasets", root)
    import datasets

    parts, names = {}, []
    try:
        available = datasets.get_dataset_split_names(root.removeprefix("hfds/"))
        for split, split_names in SPLIT_NAMES.items():
            for name in [name for name in split_names if name in available][:1]:
                reader = create_reader(root, split=name)
                labels = np.array(reader.dataset[reader.label_key])
                parts[split] = _Part(
                    TableRows(reader, f"{root}/{name}"), np.arange(len(labels)), labels
                )
                names = names or list(reader.class_to_idx)
    except (
        OSError
    ) as error:  # its own errors of a missing data set and of the network are of this kind
        raise FileNotFoundError(f"cannot open {root}: {' '.join(str(error).split())}") from error
    if not names:
        raise ValueError(
            f"{root} has no split train, val, validation or test whose labels have names"
        )
    return parts, names
