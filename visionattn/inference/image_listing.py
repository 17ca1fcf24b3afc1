"""Listings of images: folders, single files, lists of paths, and pictures in memory.

This module defines the order of the images, and the accepted types and shapes of pictures. A
listing is a ``Source`` with a length. It opens no image.
"""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from einops import rearrange
from PIL import Image, ImageOps
from torch import Tensor, bfloat16

from visionattn.data.folder_walk import TEXTS, LeftOut, images_below, suffix_of
from visionattn.data.formats import Source, check_file, extensions, is_folder_format
from visionattn.data.sources import Files
from visionattn.models.weights import digest_of

Picture = Image.Image | np.ndarray | Tensor
Images = str | Path | Picture | Sequence[str | Path] | Sequence[Picture]
WANTED = (
    "numbers, [H, W], [H, W, C] or [B, H, W, C] as an array, [C, H, W] or [B, C, H, W] as a tensor"
)


class Listing(Source, Protocol):
    """Encoded images by index, in order."""

    def __len__(self) -> int: ...

    def digest(self) -> str:
        """Return a text that differs for different images."""


class ListedFiles(Files):
    """Images that are files.

    Args:
        paths: one per image.
        cells: for images from a table, the other columns of the row of each path.
    """

    def __init__(self, paths: Sequence[str], cells: dict[str, dict[str, str]] | None = None):
        super().__init__(paths)
        self.cells = cells or {}

    @property
    def columns(self) -> list[str]:
        """Return the names of ``cells``, which begin with ``table_``."""
        return list(self.cells[self.paths[0]]) if self.cells else []

    def __len__(self) -> int:
        return len(self.paths)

    def digest(self) -> str:
        """Return a digest of names, sizes in bytes and modification times; no file is read."""
        return digest_of((path, *_state_of(path)) for path in self.paths)


class HeldImages:
    """Pictures, or bytes of files, in memory; named by index, ``image 0``."""

    def __init__(self, pictures: Sequence[Picture | bytes]):
        """Store pictures; raise ValueError for the first that is not a picture."""
        self.pictures = [as_held(picture, i) for i, picture in enumerate(pictures)]

    def __len__(self) -> int:
        return len(self.pictures)

    def open(self, index: int) -> BinaryIO:
        """Return the picture as an uncompressed file in memory, so that it is read like a file."""
        return as_file(self.pictures[index])

    def array(self, index: int) -> np.ndarray | None:
        """Return the picture as the array that reading it gives; None if its file holds more."""
        picture = self.pictures[index]
        if isinstance(picture, Image.Image) and picture.mode in ("L", "RGB"):
            return np.asarray(picture)
        return picture if isinstance(picture, np.ndarray) else None

    def name(self, index: int) -> str:
        """Return the picture's index as a name, ``image 0``."""
        return f"image {index}"

    def digest(self) -> str:
        """Return a digest of the content."""
        return digest_of(self.open(index).read() for index in range(len(self)))


def as_held(picture: Picture | bytes, index: int = 0) -> Image.Image | np.ndarray | bytes:
    """Return a picture in the form used here.

    A Pillow picture is rotated upright; arrays or tensors of gray levels or colors become Pillow
    pictures, and other bands or values an array ``[H, W, C]``.

    Raises:
        ValueError: another type, not numbers, or the shape is not a picture's.
    """
    if isinstance(picture, bytes):
        return picture
    if isinstance(picture, Image.Image):
        return ImageOps.exif_transpose(picture)
    if not isinstance(picture, (np.ndarray, Tensor)):
        raise ValueError(
            f"image {index}: expected a path, a picture of Pillow, an array or a tensor, got "
            f"{type(picture).__name__}"
        )
    array, what = picture, f"{picture.dtype} {list(picture.shape)}"
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = array.float() if array.dtype == bfloat16 else array  # unknown to NumPy
        array = (rearrange(array, "c h w -> h w c") if array.ndim == 3 else array).numpy()
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.dtype.kind not in "buif" or array.ndim not in (2, 3) or not array.size:
        raise ValueError(
            f"image {index}: expected {WANTED}, got {what}; pass normalized inputs directly to "
            "the model"
        )
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] in (3, 4)):
        return Image.fromarray(array)
    return array


def as_file(picture: Image.Image | np.ndarray | bytes) -> BinaryIO:
    """Return a picture of ``as_held`` as an uncompressed file in memory."""
    stream = io.BytesIO(picture if isinstance(picture, bytes) else b"")
    if isinstance(picture, np.ndarray):
        np.save(stream, picture)
    elif isinstance(picture, Image.Image):
        picture.save(stream, "tiff", compression="raw")
    stream.seek(0)
    return stream


def listing_of(images: Images) -> ListedFiles | HeldImages:
    """Return a listing of the images given by a caller.

    Args:
        images: one or several paths, as for ``find_images``; a picture, a batch or several
            pictures.

    Raises:
        ValueError, FileNotFoundError: there are none, both kinds are mixed, or one is not a
            picture.
    """
    if isinstance(images, (np.ndarray, Tensor)) and images.ndim == 4:
        images = list(images)
    if isinstance(images, (str, os.PathLike, Image.Image, np.ndarray, Tensor)):
        images = [images]
    given = list(images)
    paths = [image for image in given if isinstance(image, (str, os.PathLike))]
    if not given or 0 < len(paths) < len(given):
        raise ValueError(
            "expected either paths or pictures in memory, " + ("got both" if given else "got none")
        )
    return find_images([os.fspath(path) for path in paths]) if paths else HeldImages(given)


def find_images(given: Sequence[str], labels: str | None = None) -> ListedFiles:
    """List the images at the given paths: files in a folder in natural order, the rest in the given
    order.

    A missing image named in a list is listed too, and reported as unreadable later.

    Args:
        given: folders, files and lists.
        labels: a table for the only folder ``given``, whose rows are the images, in order.

    Raises:
        ValueError, FileNotFoundError: nothing is given, a path does not exist, or there are no
            images; one line.
    """
    if not given:
        raise ValueError(
            "expected --images: a folder, image files, or a .txt file with a path per line"
        )
    if labels is not None:
        return _in_table(given, labels)
    paths: list[str] = []
    for path in given:
        if not os.path.exists(path):
            raise FileNotFoundError(f"no image, folder or list at {path}")
        check_file(path)
        if os.path.isdir(path) and not is_folder_format(path):
            paths += _in_folder(path)
        elif suffix_of(path) == ".txt":
            paths += _in_list(path)
        elif suffix_of(path) in TEXTS:
            raise ValueError(
                "expected an image, or a .txt file with a path per line, relative to the current "
                f"folder, got {path}"
            )
        else:
            paths.append(path)
    return ListedFiles(paths)


def _in_folder(folder: str) -> list[str]:
    left_out = LeftOut()
    paths = images_below(Path(folder), others=left_out.suffixes)
    if not paths:
        wanted = ", ".join(sorted(extensions()))
        raise ValueError(
            f"no images in {folder}{left_out.files_there()}; expected files that end in {wanted}"
        )
    left_out.warn(folder)
    return paths


def _in_table(given: Sequence[str], labels: str) -> ListedFiles:
    if len(given) != 1 or not os.path.isdir(given[0]):
        raise ValueError(
            "--labels needs one folder as --images, for the relative paths in the table"
        )
    from visionattn.data.label_table import read_labels

    table = read_labels(labels, given[0])
    images = images_below(given[0])
    numbers = table.rows_of([os.path.relpath(path, given[0]) for path in images], given[0])
    rows = table.rows.drop(columns="path").add_prefix("table_").to_dict("records")
    found = sorted((row, path) for row, path in zip(numbers, images, strict=True) if row >= 0)
    return ListedFiles([path for _, path in found], {path: rows[row] for row, path in found})


def _in_list(path: str) -> list[str]:
    """Return the paths in a list file, one per non-empty line, relative to the current folder."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a UTF-8 text file with a path per line") from error
    paths = [line.strip() for line in lines if line.strip()]
    if not paths:
        raise ValueError(f"expected a path per line in {path}, got none")
    return paths


def _state_of(path: str) -> tuple[int, ...]:
    """Return the size and modification time of a file; empty if there is no file."""
    try:
        state = os.stat(path)
    except OSError:
        return ()
    return state.st_size, state.st_mtime_ns
