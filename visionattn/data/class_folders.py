"""The images of a folder or a tar, with splits, classes and masks from the folder structure.

A tar is treated like the folder from which it was made, except that links in it are not followed.
"""

import os
import posixpath
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from visionattn.cli.untrusted import refuse
from visionattn.data.folder_walk import (
    LeftOut,
    below,
    by_kind,
    by_split,
    composed,
    in_order,
    is_hidden,
    listed,
    split_of,
    suffix_of,
)
from visionattn.data.formats.known_formats import RASTER, ZARR, Source
from visionattn.data.mask_values import MASK_SUFFIXES
from visionattn.data.sources import Files, Member, TarMembers

LAYOUT = "expected train/<class>/* and val/<class>/*, or <class>/*"
MASKED_LAYOUT = (
    "expected images/* and masks/*, or train/images/*, train/masks/*, val/images/* and val/masks/*"
)
IMAGES, MASKS = "images", "masks"
"""Names of the folders of images and masks, in any case."""
BY_PATH = frozenset(RASTER.suffixes + ZARR.suffixes)
"""Suffixes of files that cannot be read inside another file."""

Place = tuple[str, str]
"""Split and class of an image; the class is an empty text for images without classes."""
Folders = tuple[str, ...]
"""Folder names of a file, below the root."""


class Placed(NamedTuple):
    """Images with their splits and classes."""

    source: Source
    places: list[Place | None]
    """One entry per image; None: not used."""
    left_out: LeftOut


def open_tree(root: str, labelled: bool, known: Sequence[str] | None) -> Placed:
    """Open a folder or a tar of class folders, or of splits with class folders.

    A single folder around everything is ignored; tars within a tar count as folders.

    Args:
        root: the folder or the file.
        labelled: whether images must be in class folders, see ``own_images.find_images``.
        known: for an evaluation, the class names of the weights; None: a training.

    Raises:
        ValueError: there are no images, or they are not in class folders; one line.
    """
    source, inside, visited, left_out = list_images(root)
    folders = [parts[:-1] for parts in inside]
    return Placed(source, _places(folders, visited, labelled, known, root, left_out), left_out)


def list_images(root: str) -> tuple[Source, list[Folders], list[Folders], LeftOut]:
    """List the images of a folder or a tar in order, at any depth, with the parts of their paths
    below ``root``; then all folders (none for a tar), and the ignored files.

    Raises:
        ValueError: there are no images; one line.
    """
    left_out, visited = LeftOut(), list[Folders]()
    source: Source
    if Path(root).is_dir():
        paths, visited = _list_folder(root, left_out)
        source, inside = Files(paths), [_parts(path, root) for path in paths]
    else:
        members = _list_tar(root, left_out)
        source, inside = TarMembers(members, root), [_parts(member.path) for member in members]
    if not inside:
        raise ValueError(f"no images in {root}{left_out.files_there()}; {LAYOUT}")
    return source, inside, visited, left_out


def path_in(root: str, source: Source, index: int) -> str:
    """Return the path of an image of a folder or a tar below ``root``."""
    if isinstance(source, TarMembers):
        return "/".join(_parts(source.members[index].path))
    return "/".join(_parts(source.name(index), root))


def open_masked_tree(root: str) -> tuple[Placed, list[str]]:
    """Open a folder of images and masks, and return the mask path of each image; both share their
    name except for the suffix.

    Raises:
        ValueError, FileNotFoundError: there are no images, an image has no mask, or two masks have
            one name; one line.
    """
    left_out = LeftOut()
    paths, visited = _list_folder(root, left_out)
    known = {path: _kind_of(_parts(path, root)) for path in paths}
    images = {path: name for path, (kind, name) in known.items() if kind == IMAGES}
    if not images:
        raise ValueError(f"no folder images with images in data root {root}; {MASKED_LAYOUT}")
    left_out.folders = [
        each[0]
        for each in visited
        if len(each) == 1 and each[0].lower() not in (IMAGES, MASKS) and not split_of(each[0])
    ]
    folders = [name[:-1] for name in images.values()]
    places = _places(folders, [], False, None, root, left_out)
    masks: dict[Folders, str] = {}
    for path, (kind, name) in known.items():
        if kind != MASKS or suffix_of(path) not in MASK_SUFFIXES:
            continue
        if (other := masks.setdefault(_stem(name), path)) != path:
            raise ValueError(f"expected one mask per image, got {other} and {path}; keep one")
    found = [masks.get(_stem(name), "") for name in images.values()]
    wanted = zip(images, found, places, strict=True)
    if missing := [path for path, mask, place in wanted if place and not mask]:
        swapped = [MASKS if name.lower() == IMAGES else name for name in _parts(missing[0], root)]
        raise FileNotFoundError(
            f"{len(missing)} of {len(images)} images of {root} have no mask; first: {missing[0]}, "
            f"expected {Path(root, *swapped).with_suffix(MASK_SUFFIXES[0])}"
        )
    return Placed(Files(list(images)), places, left_out), found


def _kind_of(parts: Folders) -> tuple[str, Folders]:
    """Return ``images`` or ``masks`` if a path is in this folder (else an empty text), and its
    other parts, which may begin with a split.
    """
    for at in (0, 1) if split_of(parts[0]) else (0,):
        kind = parts[at].lower() if at < len(parts) - 1 else ""
        if kind in (IMAGES, MASKS):
            return kind, parts[:at] + parts[at + 1 :]
    return "", parts


def _stem(name: Folders) -> Folders:
    """Return the common part of the names of an image and its mask."""
    *folders, last = map(composed, name)
    folders[:1] = [split_of(each) or each for each in folders[:1]]
    return (*folders, os.path.splitext(last)[0])


def _list_folder(root: str, left_out: LeftOut) -> tuple[list[str], list[Folders]]:
    """Return the paths of the images below a folder, in order, and all folders below it."""
    found = list(below(root, split_of))
    paths, left_out.suffixes = by_kind(path for path, is_folder in found if not is_folder)
    return sorted(paths, key=in_order), [_parts(path, root) for path, folder in found if folder]


def _list_tar(root: str, left_out: LeftOut) -> list[Member]:
    """Return the images of a tar, in order."""
    try:
        with tarfile.open(root, "r:") as tar:
            members = {member.path: member for member in _members(tar, left_out.suffixes)}
    except tarfile.TarError as error:
        raise ValueError(f"cannot read {root} as a tar: {error}") from error
    paths, others = by_kind(members, BY_PATH)
    left_out.suffixes += others
    return [members[path] for path in sorted(paths, key=in_order)]


def _members(
    tar: tarfile.TarFile, others: Counter[str], within: str = "", start: int = 0
) -> Iterator[Member]:
    """Yield the files of a tar, and of tars in it, that are not hidden; ``others`` counts links."""
    for info in tar:
        path = posixpath.join(within, info.name)
        if any(map(is_hidden, _parts(path))):
            continue
        if info.issym() or info.islnk():
            others["links"] += 1
        at = start + info.offset_data
        if suffix_of(path) == ".tar" and info.isfile() and not within:
            with tarfile.open(fileobj=tar.extractfile(info), mode="r:") as inner:
                yield from _members(inner, others, path[: -len(".tar")], at)
        elif info.isfile():
            yield Member(path, at, info.size)


def _parts(path: str, root: str = "") -> Folders:
    """Return the folder names of a path below ``root``, and its own name."""
    path = os.path.relpath(path, root) if root else path
    return tuple(part for part in path.split("/") if part not in ("", "."))


def _places(
    folders: Sequence[Folders],
    visited: Sequence[Folders],
    labelled: bool,
    known: Sequence[str] | None,
    root: str,
    left_out: LeftOut,
) -> list[Place | None]:
    """Return split and class of images from their folders.

    Args:
        folders: folders of each image.
        visited: all folders, including those without images; empty for a tar.
        labeled, known, root: as for ``open_tree``.
        left_out: receives unused files and folders.
    """
    around = _around(folders, visited, known or ())
    folders = [each[len(around) :] for each in folders]
    visited = [each[len(around) :] for each in visited]
    direct = {each[0] for each in folders if len(each) == 1 and each[0] in (known or ())}
    named = [name for name in _tops(folders) if split_of(name) and name not in direct]
    splits = {}
    if _are_splits(named, folders, labelled, root):
        splits = {name: split for split, name in by_split(named, root).items()}
        left_out.folders += [name for name in _tops([*folders, *visited]) if name not in splits]
    # The split of each image (empty: none), and its folders inside the split.
    within = [
        (splits.get("".join(each[:1]), ""), each[1:]) if splits else ("train", each)
        for each in folders
    ]
    flat = not labelled and any(split and not inner for split, inner in within)
    places = [
        (split, "" if flat else inner[0]) if split and (flat or inner) else None
        for split, inner in within
    ]
    left_out.outside = sum(
        place is None and (not splits or not each or each[0] in splits)
        for place, each in zip(places, folders, strict=True)
    )
    refuse(
        (
            {*(splits.values() or ["train"])} - {place[0] for place in places if place},
            f"{root} has images outside of class folders; {LAYOUT}",
        ),
        (
            {place[1].lower() for place in places if place} == {IMAGES, MASKS},
            f"data folder {root} has the folders images and masks; pass --data.task segmentation, "
            "or rename them if they are classes",
        ),
    )
    empty = [] if flat else _without_images(folders, visited, splits)
    if empty and labelled and known is None:
        raise ValueError(
            f"class folder {os.path.join(root, *around, *empty[0])} has no images; add some or "
            "delete the folder"
        )
    left_out.folders += [each[-1] for each in empty if each[-1] not in (known or ())]
    return places


def _around(
    folders: Sequence[Folders], visited: Sequence[Folders], known: Sequence[str]
) -> Folders:
    """Return the folders around everything, which have no meaning.

    In a folder on disk only folders around splits count, because a single folder may be the only
    class.
    """
    around: Folders = ()
    while len(tops := _tops(folders)) == 1 and any(len(each) > 1 for each in folders):
        inner = any(split_of(each[1]) for each in folders if len(each) > 1)
        if split_of(tops[0]) or tops[0] in known or (visited and not inner):
            break
        around = (*around, tops[0])
        folders = [each[1:] for each in folders]
    return around


def _without_images(
    folders: Sequence[Folders], visited: Sequence[Folders], splits: dict[str, str]
) -> list[Folders]:
    """Return the class folders without images."""
    depth = 2 if splits else 1
    held = {each[:depth] for each in folders}
    return [
        each
        for each in visited
        if len(each) == depth and each not in held and (not splits or each[0] in splits)
    ]


def _are_splits(
    named: Sequence[str], folders: Sequence[Folders], labelled: bool, root: str
) -> bool:
    """Return whether folders with names of splits are splits, or classes like their neighbors.

    They are splits unless other folders next to them hold images too (``bus/ car/ train/``). Then
    at least two splits are needed and, for images with classes, a class in both.
    """
    others = [name for name in _tops(folders) if name not in named]
    if not others or not named:
        return bool(named)
    inside = {(split_of(each[0]), each[1]) for each in folders if each[1:] and each[0] in named}
    shared = Counter(name for _, name in inside).values()
    if len(set(map(split_of, named))) > 1 and (not labelled or max(shared, default=0) > 1):
        return True
    if labelled and shared:
        warnings.warn(
            f"classes of {root}: {listed([*named, *others])}; if {listed(named)} are splits, move "
            f"{listed(others)} elsewhere",
            stacklevel=2,
        )
    return False


def _tops(folders: Sequence[Folders]) -> list[str]:
    return sorted({each[0] for each in folders if each}, key=in_order)
