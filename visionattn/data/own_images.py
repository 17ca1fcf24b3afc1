"""The user's own images: the images of ``data.root``, their classes or masks, and the images for
training or evaluation.

``class_folders.py`` opens folders and tars, ``streams.py`` opens streams.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from timm.data.readers import create_reader

from visionattn.data.class_folders import (
    LAYOUT,
    MASKED_LAYOUT,
    Placed,
    list_images,
    open_masked_tree,
    open_tree,
    path_in,
)
from visionattn.data.folder_walk import (
    SPLIT_NAMES,
    LeftOut,
    by_split,
    composed,
    in_order,
    listed,
    split_of,
)
from visionattn.data.folds import groups_of, hold_out
from visionattn.data.formats import ReadOptions, Source, settle
from visionattn.data.formats.reader import one_line, require
from visionattn.data.images import ImageDataset
from visionattn.data.label_table import LabelTable
from visionattn.data.mask_files import MaskFiles, settle_classes
from visionattn.data.mask_layers import MaskLayers, open_layers
from visionattn.data.mask_values import MaskClasses, MasksSaid
from visionattn.data.sources import Files, TableRows
from visionattn.model_config import Task

if TYPE_CHECKING:
    from visionattn.data.augment import Augment
    from visionattn.data.pixel_cache import PixelCache

Datasets = dict[str, ImageDataset]
"""By split: ``train``, ``validation`` and, if there is one, ``test``. Images for evaluating weights
have the root's splits, and ``all``.
"""


class SplitImages(NamedTuple):
    """The images of one split: their indices in the source, ``[n]``, and their labels."""

    indices: np.ndarray
    labels: np.ndarray
    """Classes, int64 ``[n]``; for multilabel and regression float32 ``[n, outputs]``."""
    held_out: bool = False
    """Whether they were split off the training images at random."""

    def take(self, chosen: np.ndarray, *, held_out: bool = False) -> "SplitImages":
        """Return some of the images."""
        return SplitImages(self.indices[chosen], self.labels[chosen], held_out)


@dataclass(frozen=True)
class Found:
    """The contents of a root."""

    root: str
    source: Source
    parts: dict[str, SplitImages]
    """By split. Images without splits are in ``train``."""
    names: tuple[str, ...]
    """Names of the classes; empty for images without classes, whose labels are all 0."""
    masks: MaskFiles | None = None
    """One mask per image of the source."""
    groups: np.ndarray | None = None
    """Group of each image of the source, as text; images of one group stay in one split."""
    weights: np.ndarray | None = None
    """Weight of each image of the source in the training loss, at least 0."""

    @classmethod
    def placed(cls, root: str, found: Placed, masks: MaskFiles | None = None) -> "Found":
        """Number the classes of images in an order that depends only on their names; the images of
        a split are sorted by class. With masks, images have no classes.
        """
        places = [
            place and (place[0], "" if masks else composed(place[1])) for place in found.places
        ]
        names = tuple(sorted({place[1] for place in places if place}, key=in_order))
        numbers = {name: number for number, name in enumerate(names)}
        parts = {}
        for split in SPLIT_NAMES:
            of_split = [i for i, place in enumerate(places) if place and place[0] == split]
            labels = np.array(
                [numbers[place[1]] for place in places if place and place[0] == split]
            )
            if of_split:
                by_class = np.argsort(labels, kind="stable")
                parts[split] = SplitImages(np.array(of_split)[by_class], labels[by_class])
        return cls(root, found.source, parts, () if names == ("",) else names, masks)

    def by_group(self, pattern: str) -> "Found":
        """Return the images with groups from their paths, see ``groups_of``; warn if each image is
        a group of its own.

        Raises:
            ValueError: a path has no match, or groups are known already; one line.
        """
        if self.groups is not None:
            raise ValueError(
                "data.group_from and the column group of data.labels both define groups; remove one"
            )
        indices = np.concatenate([part.indices for part in self.parts.values()])
        paths = [path_in(self.root, self.source, index) for index in indices.tolist()]
        groups = np.full(indices.max() + 1, "", object)
        groups[indices] = groups_of(paths, pattern)
        if len(set(groups[indices])) == len(paths):
            warnings.warn(
                f"data.group_from {pattern} gives each of the {len(paths)} images a group of its "
                f"own; first: {groups[indices[0]]}",
                stacklevel=2,
            )
        return replace(self, groups=groups)

    def to_train(
        self, val_fraction: float, seed: int, fold: tuple[int, int] | None = None
    ) -> dict[str, SplitImages]:
        """Return the splits for training, after checking that ``train`` has the classes of all
        splits; hold out a validation split if there is none, or the images of a fold.
        """
        if "train" not in self.parts:
            raise ValueError(
                f"no training images in data root {self.root}, only {' and '.join(self.parts)}; "
                f"{MASKED_LAYOUT if self.masks else LAYOUT}"
            )
        parts = self._with_held_out(val_fraction, seed, fold)
        for split, part in parts.items() if parts["train"].labels.ndim == 1 else ():
            strange = np.setdiff1d(part.labels, parts["train"].labels)
            if len(strange):
                names = listed(self.names[label] for label in strange)
                raise ValueError(
                    f"classes of {self.root} in {split} but not in train: {names}; add training "
                    "images, or remove them"
                )
        if "validation" not in parts:
            raise ValueError(
                f"too few images in {self.root} to hold out a validation split; expected at least "
                f"two images of a class{'' if self.groups is None else ' and two groups'}"
            )
        return parts

    def to_judge(
        self,
        names: Sequence[str],
        val_fraction: float,
        seed: int,
        fold: tuple[int, int] | None = None,
    ) -> dict[str, SplitImages]:
        """Return the images to evaluate weights on: ``all``, and each split.

        Args:
            names: the class names of the weights, which define the labels; empty: unknown.
            val_fraction: splits training images, together with ``seed``, as training would.
            seed, fold: likewise.

        Raises:
            ValueError: the images have classes that the weights do not have.
        """
        if strange := [name for name in self.names if names and name not in names]:
            raise ValueError(
                f"classes of {self.root} unknown to the model: {listed(strange)}; expected "
                f"{listed(names)}, got {listed(self.names)}"
            )
        parts = self._with_held_out(val_fraction, seed, fold)
        parts["all"] = SplitImages(
            *(
                np.concatenate(each)
                for each in zip(
                    *((part.indices, part.labels) for part in self.parts.values()), strict=True
                )
            )
        )
        if not names or not self.names or parts["all"].labels.ndim > 1:
            return parts
        numbers = np.array([names.index(name) for name in self.names])
        missing = listed(name for name in names if name not in self.names)
        if missing:
            warnings.warn(f"{self.root} has no images of the classes {missing}", stacklevel=3)
        return {split: part._replace(labels=numbers[part.labels]) for split, part in parts.items()}

    def _with_held_out(
        self, val_fraction: float, seed: int, fold: tuple[int, int] | None
    ) -> dict[str, SplitImages]:
        self._check_groups()
        train = self.parts.get("train")
        if fold and "validation" in self.parts:
            raise ValueError(
                "data.fold needs training images without a validation split, got one in "
                f"{self.root}; remove data.fold, or merge the split into train"
            )
        if train is None or "validation" in self.parts:
            return dict(self.parts)
        groups = None if self.groups is None else self.groups[train.indices].astype(str)
        kept, held_out = hold_out(train.labels, groups, val_fraction, seed, fold)
        if not len(held_out):
            return dict(self.parts)
        validation = train.take(held_out, held_out=True)
        return self.parts | {"train": train.take(kept), "validation": validation}

    def _check_groups(self) -> None:
        """Raise ValueError if images of one group are in several splits."""
        if self.groups is None:
            return
        parts = self.parts.values()
        found = Counter(group for part in parts for group in set(self.groups[part.indices]))
        if shared := sorted(group for group, splits in found.items() if splits > 1):
            raise ValueError(
                f"{len(shared)} of {len(found)} groups of {self.root} have images in several "
                f"splits; first: {shared[0]}; move each group into one split"
            )

    def datasets(
        self,
        parts: dict[str, SplitImages],
        seed: int,
        augment: "Augment | None",
        options: ReadOptions,
        *,
        levels: bool = False,
        cache: "PixelCache | None" = None,
    ) -> Datasets:
        """Return the datasets of the splits; only training images are augmented.

        Args:
            parts: result of ``to_train`` or ``to_judge``.
            seed: seed of ``augment``.
            augment: augmentation of the training images; None: none.
            options: how the files are read. An unknown value range is measured on a few files, with
                a warning.
            levels: whether images must have 8 bits, because their values are to be generated.
            cache: keeps decoded images; None: they are not kept.
        """
        indices = np.concatenate([part.indices for part in parts.values()])
        options, lines = settle(self.source, indices, options)
        for line in lines:
            warnings.warn(line, stacklevel=3)
        return {
            split: ImageDataset(
                self.source,
                part.indices,
                part.labels,
                seed,
                augment if split == "train" else None,
                options,
                masks=self.masks,
                levels=levels,
                held_out=part.held_out,
                weights=self._weights(part) if split == "train" else None,
                cache=cache,
            )
            for split, part in parts.items()
        }

    def _weights(self, part: SplitImages) -> np.ndarray | None:
        """Return the weights of training images, divided by their mean, float32 ``[n]``."""
        if self.weights is None:
            return None
        weights = self.weights[part.indices]
        if not weights.any():
            raise ValueError(
                f"all training images of {self.root} have weight 0; use positive weights"
            )
        return (weights / weights.mean()).astype(np.float32)


def find_images(root: str, *, labelled: bool = True, known: Sequence[str] | None = None) -> Found:
    """Find the images under ``root``.

    Args:
        root: a folder, a ``.tar`` file, or ``hfds/<name or folder>``.
        labelled: whether images must be in class folders. Otherwise a root with an image outside of
            class folders holds images without classes, at any depth.
        known: for an evaluation, the class names of the weights (empty without names): splits and
            classes may be missing. None: a training.

    Raises:
        ValueError, FileNotFoundError: one line with the reason.
    """
    check_there(root)
    if root.startswith("hfds/"):
        return _open_table(root)
    if not Path(root).is_dir() and Path(root).suffix.lower() != ".tar":
        raise ValueError(
            f"expected a folder or a .tar file, got data root {root}; decompress a compressed tar "
            "and name it .tar"
        )
    found = open_tree(root, labelled, known)
    found.left_out.warn(root)
    return Found.placed(root, found)


def find_masked(
    root: str, said: MasksSaid, max_pixels: int, table: LabelTable | None = None
) -> Found:
    """Find images with their masks under ``root``, a folder.

    Args:
        root: the folder.
        said: the description of masks in the options.
        max_pixels: maximum number of pixels of a mask.
        table: splits, groups and weights of the images; None: splits of the folder.

    Raises:
        ValueError, FileNotFoundError: one line with the reason.
    """
    if root.startswith(("hfds/", "wds/")) or (Path(root).exists() and not Path(root).is_dir()):
        raise ValueError(f"data root {root} is not a folder; {MASKED_LAYOUT}")
    check_there(root, MASKED_LAYOUT)
    if said.layers is not None:
        found, layers = open_layers(root, said)
        files: MaskFiles = MaskLayers(layers, MaskClasses.of(said), max_pixels)
        found.left_out.warn(root)
    else:
        found, paths = open_masked_tree(root)
        found.left_out.warn(root)
        files = settle_classes(MaskFiles(Files(paths), MaskClasses.of(said), max_pixels), root)
    if table is not None:
        return _joined(root, found, table, "segmentation", masks=files)
    return Found.placed(root, found, files)


def find_in_table(
    root: str,
    table: LabelTable,
    task: Task,
    columns: Sequence[str] | None = None,
    known: Sequence[str] = (),
) -> Found:
    """Find the images of the rows of a table under ``root``, a folder or a tar.

    Args:
        root: the images, at any depth.
        table: the table; without the column ``split``, folders ``train``, ``val`` and ``test`` are
            splits.
        task: classification, multilabel or regression.
        columns, known: as for ``LabelTable.values``.

    Raises:
        ValueError, FileNotFoundError: one line with the reason.
    """
    check_there(root)
    source, inside, _, left_out = list_images(root)
    places = [(len(parts) > 1 and split_of(parts[0]) or "train", "") for parts in inside]
    return _joined(root, Placed(source, places, left_out), table, task, columns, known)


def _joined(
    root: str,
    placed: Placed,
    table: LabelTable,
    task: Task,
    columns: Sequence[str] | None = None,
    known: Sequence[str] = (),
    masks: MaskFiles | None = None,
) -> Found:
    """Return the placed images that have a row in the table, with its splits, labels, groups and
    weights; with masks, without its labels.
    """
    images = [path_in(root, placed.source, index) for index in range(len(placed.places))]
    numbers, given = table.rows_of(images, root), set(table.rows)
    splits = table.splits() if "split" in given else None
    groups = table.texts("group")[numbers] if "group" in given else None
    weights = table.numbers(["weight"], "weight")[numbers, 0] if "weight" in given else None
    classes = table.texts("label").tolist() if task == "classification" else [""] * len(table.rows)
    places = [
        place and (splits[row] if splits else place[0], classes[row]) if row >= 0 else None
        for place, row in zip(placed.places, numbers.tolist(), strict=True)
    ]
    found = Found.placed(root, placed._replace(places=places), masks)
    found = replace(found, groups=groups, weights=weights)
    if task in ("classification", "segmentation"):
        return found
    names, values = table.values(task, columns, known)
    parts = {
        split: part._replace(labels=values[numbers[part.indices]])
        for split, part in found.parts.items()
    }
    return replace(found, parts=parts, names=names)


def check_there(root: str, wanted: str = f"{LAYOUT}, a .tar file, wds/... or hfds/...") -> None:
    """Raise FileNotFoundError if a folder or a file of images does not exist."""
    if not root.startswith(("hfds/", "wds/")) and not Path(root).exists():
        raise FileNotFoundError(f"data root {root} does not exist; {wanted}")


def _open_table(root: str) -> Found:
    """Open a Hugging Face dataset with timm's reader, by the columns ``image`` and ``label``."""
    require("readers", "datasets", what=f"data root {root}")
    import datasets

    try:
        available = datasets.get_dataset_split_names(root.removeprefix("hfds/"))
        splits = by_split(available, root)
        readers = {name: create_reader(root, split=name) for name in splits.values()}
    except OSError as error:  # a missing dataset, or the network
        raise FileNotFoundError(f"cannot open {root}: {one_line(error)}") from error
    names = next((tuple(reader.class_to_idx) for reader in readers.values()), ())
    if not names:
        raise ValueError(
            f"expected a split train, val or test with named labels in {root}, got "
            f"{listed(available)}"
        )
    parts, first, left_out = {}, 0, [name for name in available if name not in readers]
    for split, name in splits.items():
        labels = np.array(readers[name].dataset[readers[name].label_key])
        if labels.min(initial=0) < 0:  # tables mark images without a label by -1
            left_out.append(f"{name} (images without labels)")
        else:
            parts[split] = SplitImages(first + np.arange(len(labels)), labels)
        first += len(labels)
    LeftOut(left_out).warn(root)
    return Found(root, TableRows(readers, root), parts, names)
