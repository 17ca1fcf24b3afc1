"""Images in a tar and in a table of Hugging Face, with their splits and classes.

A tar holds what the folder that it was made of holds.
"""

import importlib.util
import posixpath
import tarfile
from collections.abc import Iterator, Sequence

import numpy as np
from timm.data.readers import create_reader

from visionattn.data.formats.table import TABLE
from visionattn.data.parts import LAYOUT, Found, Part, Place
from visionattn.data.sources import Member, TableRows, TarMembers
from visionattn.data.split_names import LeftOut, are_splits, by_split, listed, split_of
from visionattn.data.walk import by_kind, in_order, is_hidden, suffix_of

BY_PATH = frozenset(suffix for row in TABLE if row.by_path for suffix in row.suffixes)
"""Suffixes of files that cannot be read inside another file."""


def open_tar(root: str, labelled: bool, known: Sequence[str]) -> Found:
    """Open a tar of class folders, or of splits with these; a folder around all of them, and tars
    within it, count as folders.

    Args:
        root: the file.
        labelled: whether images must lie in class folders, see ``folder.open_images``.
        known: the classes of weights that are to be judged on the images; empty for a training.
    """
    left_out = LeftOut()
    try:
        with tarfile.open(root, "r:") as tar:
            members = list(_members(tar))
    except tarfile.TarError as error:
        raise ValueError(f"cannot read {root} as a tar: {error}") from error
    images, left_out.suffixes = by_kind((member.path for member in members), BY_PATH)
    if not images:
        raise ValueError(f"no images in {root}{left_out.files_there()}; {LAYOUT}")
    chosen = set(images)
    members = [member for member in members if member.path in chosen]
    members.sort(key=lambda member: in_order(member.path))
    folders = [tuple(_parts(member.path)[:-1]) for member in members]
    places = _places(folders, labelled, known, root, left_out)
    if not any(places):
        raise ValueError(f"{root} has images outside of class folders; {LAYOUT}")
    return Found.placed(TarMembers(members, root), places, left_out)


def _members(tar: tarfile.TarFile, within: str = "", start: int = 0) -> Iterator[Member]:
    """Yield the files of a tar, and of tars in it, that are not hidden."""
    for info in tar:
        path = posixpath.join(within, info.name)
        if not info.isfile() or any(map(is_hidden, _parts(path))):
            continue
        at = start + info.offset_data
        if suffix_of(path) == ".tar" and not within:
            with tarfile.open(fileobj=tar.extractfile(info), mode="r:") as inner:
                yield from _members(inner, path[: -len(".tar")], at)
        else:
            yield Member(path, at, info.size)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _places(
    folders: Sequence[tuple[str, ...]],
    labelled: bool,
    known: Sequence[str],
    root: str,
    left_out: LeftOut,
) -> list[Place | None]:
    """Return split and class of images by the folders that they lie in."""
    # A folder around everything says nothing.
    while any(len(each) > 1 for each in folders) and len(tops := _tops(folders)) == 1:
        if split_of(tops[0]) or tops[0] in known:
            break
        folders = [each[1:] for each in folders]
    tops = _tops(folders)
    direct = {each[0] for each in folders if len(each) == 1}
    named = [name for name in tops if split_of(name) and not (name in known and name in direct)]
    others = [name for name in tops if name not in named]

    def classes_of(name: str) -> set[str]:
        return {each[1] for each in folders if each[:1] == (name,) and len(each) > 1}

    # The split of each image, empty for none, and the folders within it; None: left out.
    below: list[tuple[str, tuple[str, ...]] | None] = [("train", each) for each in folders]
    if are_splits(named, others, root, classes_of=classes_of if labelled else None):
        splits = {name: split for split, name in by_split(named, root).items()}
        below = [
            (splits[each[0]], each[1:])
            if each and each[0] in splits
            else None
            if each
            else ("", ())
            for each in folders
        ]
        left_out.folders = others
    if not labelled and any(each and each[0] and not each[1] for each in below):
        places = [(each[0], "") if each and each[0] else None for each in below]
    else:
        places = [(each[0], each[1][0]) if each and all(each) else None for each in below]
    left_out.outside = places.count(None) - below.count(None)
    return places


def _tops(folders: Sequence[tuple[str, ...]]) -> list[str]:
    return sorted({each[0] for each in folders if each}, key=in_order)


def require(package: str, root: str) -> None:
    """Raise ValueError where the package that reads ``root`` is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"data root {root} needs the package {package}: pip install {package}")


def open_table(root: str) -> Found:
    """Open a Hugging Face data set with timm's reader, by the columns ``image`` and ``label``."""
    require("datasets", root)
    import datasets

    try:
        available = datasets.get_dataset_split_names(root.removeprefix("hfds/"))
        splits = by_split(available, root)
        readers = {name: create_reader(root, split=name) for name in splits.values()}
        labels = [np.array(reader.dataset[reader.label_key]) for reader in readers.values()]
    except OSError as error:  # a missing data set and the network are of this kind
        raise FileNotFoundError(f"cannot open {root}: {' '.join(str(error).split())}") from error
    names = next((tuple(reader.class_to_idx) for reader in readers.values()), ())
    if not names:
        raise ValueError(
            f"{root} has no split train, val or test whose labels have names; there are: "
            f"{listed(available)}"
        )
    source = TableRows(readers, root)
    ends = np.cumsum([len(each) for each in labels])
    indices = np.split(np.arange(ends[-1]), ends[:-1])
    parts = {
        split: Part(source, *each) for split, *each in zip(splits, indices, labels, strict=True)
    }
    return Found(parts, names, LeftOut([name for name in available if name not in readers]))
