"""Data sets of images in memory and of images in files, tars and Hugging Face tables.

This module owns reading and resizing one image. It knows nothing of how images are split or
batched.
"""

import io
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, Protocol

import numpy as np
from torch.utils.data import Dataset

from visionattn.cli.progress import Progress
from visionattn.data.batches import AUGMENT_STREAM, Item, SampleKey, Unreadable
from visionattn.data.buckets import canvases
from visionattn.data.formats import (
    COLOURED,
    DAMAGED_IMAGE,
    Openable,
    ReadOptions,
    check_file,
    is_folder_format,
    open_image,
    read_image,
    read_size,
    resize,
)
from visionattn.data.geometry import Box, Geometry, Size, View

SIZE_THREADS = 8
"""Threads that read the sizes of images; they wait for the disk most of the time."""
WELL_KNOWN, KNOWN_BYTES = 20_000, 8192
"""Of so many images, so many bytes at either end tell whether an image is still the same."""


class Augmentation(Protocol):
    """What ``augment.Augment`` does; it draws from ``entropy`` alone."""

    crops: bool

    def box(self, height: int, width: int, canvas: Size, entropy: tuple[int, ...]) -> Box:
        """Draw which part of an image is seen, which is to be resized to ``canvas``."""
        ...

    def __call__(self, image: np.ndarray, entropy: tuple[int, ...]) -> np.ndarray:
        """Do the rest; the image ``[H, W, C]`` keeps its size and dtype."""
        ...


def fill(image: np.ndarray, view: View) -> np.ndarray:
    """Put the content of a view ``[h, w, C]`` at the top left of the model's input ``[H, W, C]``:
    the last row and column are repeated as far as the input counts, and the rest is 0.
    """
    for size, mode in ((view.present, "edge"), (view.canvas, "constant")):
        missing = [(0, wanted - got) for wanted, got in zip(size, image.shape[:2], strict=True)]
        if any(after for _, after in missing):
            image = np.pad(image, (*missing, (0, 0)), mode=mode)
    return image


def see(
    size: Size,
    read: Callable[[View], np.ndarray],
    label: int,
    key: SampleKey,
    seed: int,
    augment: Augmentation | None,
) -> Item:
    """Bring an image to the size that the model sees, augmented.

    Args:
        size: height and width of the image in pixels.
        read: reads what a view shows, at the size of its content.
        label: the class of the image.
        key: which image it is, and its geometry.
        seed: of the augmentation.
        augment: what changes the image; None: nothing does.

    Raises:
        ValueError: the image is smaller than a patch.
    """
    view = key.geometry.view(*size)
    if augment is None:
        return Item(fill(read(view), view), label, view.present)
    entropy = (seed, AUGMENT_STREAM, key.epoch, key.index)
    if augment.crops:
        # Whatever part of the image is drawn fills what the model sees.
        part = augment.box(*size, view.present, entropy)
        view = view._replace(box=part, content=view.present)
    return Item(fill(augment(read(view), entropy), view), label, view.present)


def see_array(
    image: np.ndarray, label: int, key: SampleKey, seed: int, augment: Augmentation | None = None
) -> Item:
    """Bring an image in memory, uint8 ``[H, W, C]``, to the size that the model sees."""

    def read(view: View) -> np.ndarray:
        top, left, rows, columns = view.box
        return resize(image[top : top + rows, left : left + columns], *view.content)

    return see(image.shape[:2], read, label, key, seed, augment)


class ArrayDataset(Dataset):
    """Images of one size in memory: an ``Item`` per key."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, seed: int, augment: Augmentation | None = None
    ):
        """Take ``images`` uint8 ``[n, H, W, C]`` and ``labels [n]``; without ``augment`` images are
        only resized.
        """
        self.images, self.labels = images, labels
        self.seed, self.augment = seed, augment

    def __len__(self):
        return len(self.labels)

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size of the model's input for each image, ``[n, 2]``."""
        return canvases(np.tile(self.images.shape[1:3], (len(self), 1)), geometry)

    def __getitem__(self, key: SampleKey) -> Item:
        image, label = self.images[key.index], int(self.labels[key.index])
        return see_array(image, label, key, self.seed, self.augment)


class Source(Protocol):
    """Encoded images by number."""

    def open(self, index: int) -> Openable:
        """Return what ``open_image`` takes, which closes it; raises one of ``DAMAGED_IMAGE`` where
        there is no image.
        """
        ...

    def name(self, index: int) -> str:
        """Return what messages call the image: its path, or its file and the place within it."""
        ...

    def part(self, index: int, size: int) -> bytes:
        """Return what tells the image from another one of its name: how many bytes it has, and the
        first and the last ``size`` of these. Empty where there is none.
        """
        ...


class Files:
    """Images that are files."""

    def __init__(self, paths: Sequence[str]):
        """Take ``paths``, one for each image."""
        self.paths = paths

    def open(self, index: int) -> Openable:
        """Open the file; of a folder that is an image, such as zarr, return the path."""
        path = self.paths[index]
        check_file(path)
        return path if is_folder_format(path) else open(path, "rb")

    def name(self, index: int) -> str:
        """Return its path."""
        return self.paths[index]

    def part(self, index: int, size: int) -> bytes:
        """Return the number of its bytes, the first and the last ones; nothing of a folder."""
        path = self.paths[index]
        try:
            check_file(path)
            if os.path.isdir(path):
                return b""
            with open(path, "rb") as file:
                return ends_of(file, 0, os.fstat(file.fileno()).st_size, size)
        except (OSError, ValueError):
            return b""


class TarMembers:
    """Images that are members of a tar, as listed by timm's reader; each is read through a handle
    of its own.
    """

    def __init__(self, reader, root: str):
        """Take timm's ``ReaderImageInTar`` of the tar file ``root``."""
        self.samples, self.root = reader.samples, root

    def open(self, index: int) -> BinaryIO:
        """Read the member into memory; a tar within the tar is read through, one level deep."""
        member, _, tar_within = self.samples[index]
        with open(self.root, "rb") as file:
            file.seek(member.offset_data + (tar_within.offset_data if tar_within else 0))
            return io.BytesIO(file.read(member.size))

    def name(self, index: int) -> str:
        """Return ``tar:member``."""
        return f"{self.root}:{self.samples[index][0].path}"

    def part(self, index: int, size: int) -> bytes:
        """Return the number of its bytes, the first and the last ones."""
        member, _, within = self.samples[index]
        start = member.offset_data + (within.offset_data if within else 0)
        with open(self.root, "rb") as file:
            return ends_of(file, start, member.size, size)


class TableRows:
    """Images that are rows of a Hugging Face table, through timm's reader."""

    def __init__(self, reader, root: str):
        """Take timm's ``ReaderHfds`` of the table ``root``."""
        self.reader, self.root = reader, root

    def open(self, index: int) -> BinaryIO:
        """Read the row's image into memory."""
        return self.reader[index][0]

    def name(self, index: int) -> str:
        """Return ``table:file``, or ``table:number`` where the row names no file."""
        return f"{self.root}:{self.reader.filename(index) or index}"

    def part(self, index: int, size: int) -> bytes:
        """Return nothing: a row is decoded as a whole, and its table has a version."""
        return b""


def ends_of(file: BinaryIO, start: int, length: int, size: int) -> bytes:
    """Return how many bytes a part of a file has, and up to ``size`` of them at either end."""
    file.seek(start)
    head = file.read(min(size, length))
    file.seek(start + max(0, length - size))
    return b"%d" % length + head + file.read(min(size, length))


class ImageDataset(Dataset):
    """Images read when they are asked for: an ``Item`` per key, or ``Unreadable``."""

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        labels: np.ndarray,
        seed: int,
        augment: Augmentation | None = None,
        options: ReadOptions = COLOURED,
    ):
        """Take the numbers of this data set's images in ``source``, ``indices [n]``, and their
        classes, ``labels [n]``; ``options`` say how the files are read.
        """
        self.options = options
        self.source, self.indices = source, indices
        self.labels, self.seed = labels, seed
        self.augment = augment
        self._sizes: np.ndarray | None = None

    def __len__(self):
        return len(self.labels)

    def sizes(self) -> np.ndarray:
        """Return height and width of each image in pixels, ``[n, 2]``, from the heads of their
        files; 0 for an image that cannot be read.
        """
        if self._sizes is None:
            found = []
            with ThreadPoolExecutor(SIZE_THREADS) as pool, Progress(len(self)) as progress:
                for size in pool.map(self._size, self.indices.tolist()):
                    found.append(size)
                    progress.advance(1, size == (0, 0))
            self._sizes = np.array(found, dtype=np.int64).reshape(-1, 2)
        return self._sizes

    @property
    def known_sizes(self) -> np.ndarray | None:
        """Return ``sizes()`` where they were read before, else None."""
        return self._sizes

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size of the model's input for each image, ``[n, 2]``."""
        return canvases(self.sizes(), geometry)

    def digests(self) -> np.ndarray:
        """Return a number per image, uint32 ``[n]``, that tells whether it is still the same: of
        its path below all images, of its class, and of its content. Of the content count how many
        bytes there are and, up to ``WELL_KNOWN`` images, ``KNOWN_BYTES`` at either end.
        """
        names = [self.source.name(index) for index in self.indices.tolist()]
        shared = len(os.path.commonpath(names)) if len(names) > 1 else 0
        size = KNOWN_BYTES if len(names) <= WELL_KNOWN else 0

        def digest(place: int) -> int:
            name = os.fsencode(names[place][shared:])
            known = zlib.crc32(b"%d %s " % (self.labels[place], name))
            return zlib.crc32(self.source.part(int(self.indices[place]), size), known)

        with ThreadPoolExecutor(SIZE_THREADS) as pool:
            return np.fromiter(pool.map(digest, range(len(names))), np.uint32, len(names))

    def name(self, index: int) -> str:
        """Return what messages call an image."""
        return self.source.name(int(self.indices[index]))

    def _size(self, index: int) -> Size:
        try:
            return read_size(self.source.open(index), self.options)
        except DAMAGED_IMAGE:
            return (0, 0)

    def __getitem__(self, key: SampleKey) -> Item | Unreadable:
        index = int(self.indices[key.index])
        try:
            with open_image(self.source.open(index), self.options) as reader:
                size = (reader.height, reader.width)
                if self._sizes is not None and size != tuple(self._sizes[key.index]):
                    raise ValueError(
                        "its size is not the one that it had when the run began"
                        if self._sizes[key.index].any()
                        else "it could not be read when the run began, and now it can"
                    )
                label = int(self.labels[key.index])

                def read(view: View) -> np.ndarray:
                    return read_image(reader, view, self.options)

                return see(size, read, label, key, self.seed, self.augment)
        except DAMAGED_IMAGE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return Unreadable(self.source.name(index), reason)
