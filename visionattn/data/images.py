"""Data sets of images in memory and of images in files, tars and Hugging Face tables.

This module owns reading and resizing one image. It knows nothing of how images are split or
batched.
"""

import io
from collections.abc import Sequence
from typing import BinaryIO, Protocol

import cv2
import numpy as np
from torch.utils.data import Dataset

from visionattn.data.batches import AUGMENT_STREAM, SampleKey, Unreadable
from visionattn.data.formats import (
    COLOURED,
    DAMAGED_IMAGE,
    Openable,
    ReadOptions,
    check_file,
    is_folder_format,
    open_image,
    read_image,
    resize,
)
from visionattn.data.geometry import Box, Geometry, Size


class Augmentation(Protocol):
    """What ``augment.Augment`` does; it draws from ``entropy`` alone."""

    crops: bool

    def box(self, height: int, width: int, canvas: Size, entropy: tuple[int, ...]) -> Box:
        """Draw which part of an image is seen, which is to be resized to ``canvas``."""
        ...

    def __call__(self, image: np.ndarray, entropy: tuple[int, ...]) -> np.ndarray:
        """Do the rest; the image ``[H, W, C]`` keeps its size and dtype."""
        ...


def fit(image: np.ndarray, img_size: int) -> np.ndarray:
    """Resize the shorter side to ``img_size`` and crop the centre: uint8 ``[H, W, C]`` to
    ``[img_size, img_size, C]``.

    Shrinking averages over areas; enlarging is bilinear.
    """
    height, width = image.shape[:2]
    shorter = min(height, width)
    if shorter != img_size:
        height, width = round(height * img_size / shorter), round(width * img_size / shorter)
        image = resize(image, height, width)
    top, left = (height - img_size) // 2, (width - img_size) // 2
    return image[top : top + img_size, left : left + img_size]


class ArrayDataset(Dataset):
    """Images of one size in memory: ``(uint8 [size, size, C], label)`` per key."""

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

    def __getitem__(self, key: SampleKey):
        return _finish(self.images[key.index], key, self.seed, self.augment), int(
            self.labels[key.index]
        )


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


class ImageDataset(Dataset):
    """Images read when they are asked for: ``([size, size, C], label)`` per key, uint8 or float32
    in [0, 1], or ``Unreadable``.
    """

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

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, key: SampleKey):
        index = int(self.indices[key.index])
        try:
            pixels = decode(self.source.open(index), self.options)
        except DAMAGED_IMAGE as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            return Unreadable(self.source.name(index), reason)
        return _finish(pixels, key, self.seed, self.augment), int(self.labels[key.index])


def decode(source: Openable, options: ReadOptions) -> np.ndarray:
    """Read a whole image at its own size: uint8 ``[H, W, C]``, or float32 in [0, 1] where the file
    has more than 8 bits.

    Raises:
        One of ``DAMAGED_IMAGE``: the image cannot be read.
    """
    with open_image(source, options) as reader:
        whole = Geometry("native", None).view(reader.height, reader.width)
        return read_image(reader, whole, options)


def _finish(
    image: np.ndarray, key: SampleKey, seed: int, augment: Augmentation | None
) -> np.ndarray:
    return augmented(image, key.img_size, augment, (seed, AUGMENT_STREAM, key.epoch, key.index))


def augmented(
    image: np.ndarray, img_size: int, augment: Augmentation | None, entropy: tuple[int, ...]
) -> np.ndarray:
    """Bring an image uint8 ``[H, W, C]`` to ``[img_size, img_size, C]``, augmented where
    ``augment`` is given.
    """
    if augment is None:
        return fit(image, img_size)
    if augment.crops:
        size = (img_size, img_size)
        box = augment.box(image.shape[0], image.shape[1], size, entropy)
        image = image[box.top : box.top + box.height, box.left : box.left + box.width]
        shrinks = min(box.height, box.width) > img_size
        interpolation = cv2.INTER_AREA if shrinks else cv2.INTER_CUBIC
        image = cv2.resize(image, size, interpolation=interpolation).reshape(*size, -1)
    else:
        image = fit(image, img_size)
    return augment(image, entropy)
