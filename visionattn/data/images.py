"""Datasets of images in memory and of encoded images from any source.

This module reads and resizes single images. Splits and batches are elsewhere.
"""

import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import cv2
import numpy as np
from torch.utils.data import Dataset

from visionattn.cli.progress import Progress
from visionattn.data.batches import AUGMENT_STREAM, Item, SampleKey, Unreadable
from visionattn.data.buckets import canvases
from visionattn.data.formats import (
    COLOURED,
    DAMAGED_IMAGE,
    NotAsAsked,
    ReadOptions,
    Source,
    open_image,
    read_image,
    read_size,
    resize,
)
from visionattn.data.formats.reader import Keep, Reader, not_kept, one_line
from visionattn.data.geometry import Box, Geometry, Size, TooSmall, View
from visionattn.data.sources import KNOWN_BYTES, known_part
from visionattn.models.segmentation import IGNORED

if TYPE_CHECKING:
    from visionattn.data.augment import Augment
    from visionattn.data.mask_files import MaskFiles
    from visionattn.data.pixel_cache import PixelCache

REFUSED = (NotAsAsked, TooSmall)
"""Exceptions for an intact file that does not match the options and the model."""
_CROP_STREAM = 3
"""Random stream after the key of a sample; ``augment.py`` uses 1 and 2."""
SIZE_THREADS = 8
"""Number of threads that read image sizes; they mostly wait for the disk."""
WELL_KNOWN = 20_000
"""Up to this number of images, their fingerprints use ``KNOWN_BYTES`` at either end."""


def fill(image: np.ndarray, view: View) -> np.ndarray:
    """Place the content of a view ``[h, w, C]`` at the top left of the model's input ``[H, W, C]``.

    The last row and column are repeated over the part that counts, and the rest is 0.
    """
    for size, mode in ((view.present, "edge"), (view.canvas, "constant")):
        missing = [(0, wanted - got) for wanted, got in zip(size, image.shape[:2], strict=True)]
        if any(after for _, after in missing):
            image = np.pad(image, (*missing, (0, 0)), mode=mode)
    return image


def cut_mask(mask: np.ndarray, view: View) -> np.ndarray:
    """Return the part of a mask ``[height, width]`` that a view shows, at the size of its content,
    with nearest values.
    """
    top, left, height, width = view.box
    part = mask[top : top + height, left : left + width]
    rows, columns = view.content
    if part.shape == view.content:
        return part
    return cv2.resize(part, (columns, rows), interpolation=cv2.INTER_NEAREST_EXACT)


def fill_mask(mask: np.ndarray, view: View) -> np.ndarray:
    """Place the content of a mask's view at the top left of the input; the rest is ignored."""
    missing = [(0, wanted - got) for wanted, got in zip(view.canvas, mask.shape, strict=True)]
    return np.pad(mask, missing, constant_values=IGNORED)


def see(
    size: Size,
    read: Callable[[View], np.ndarray],
    label: int | np.ndarray | Callable[[View], np.ndarray],
    key: SampleKey,
    seed: int,
    augment: "Augment | None",
) -> Item:
    """Bring an image to the model's input size, with augmentation.

    Args:
        size: height and width of the image in pixels.
        read: reads the part of a view, at the size of its content.
        label: the class or labels of the image; the class of each of its pixels, uint8
            ``[height, width]``; or a function that reads the classes of a view's pixels, at the
            size of its content.
        key: identifies the image, and holds its geometry.
        seed: seed of the augmentation.
        augment: augmentation; None: none.

    Raises:
        TooSmall: the image is smaller than a patch.
    """
    view = key.geometry.view(*size)
    entropy: tuple[int, ...] = (seed, AUGMENT_STREAM, key.epoch, key.index)
    if key.draw is not None:
        entropy += (key.draw,)
    whole = Box(0, 0, *size)
    if key.geometry.crop is not None:
        from visionattn.data.training_crops import random_crop  # not for predictions

        rng = np.random.default_rng((*entropy, _CROP_STREAM))
        mask = label if isinstance(label, np.ndarray) else None
        view = random_crop(view, key.geometry, mask, rng)
        whole = view.box
    if augment is not None and augment.crops:
        # The randomly cropped part fills the model's view.
        part = augment.box(whole.height, whole.width, view.present, entropy)
        part = part._replace(top=whole.top + part.top, left=whole.left + part.left)
        view = view._replace(box=part, content=view.present)
    image = read(view)
    if callable(label) or (isinstance(label, np.ndarray) and label.ndim == 2):
        mask = label(view) if callable(label) else cut_mask(label, view)
        if augment is not None:
            image, mask = augment.both(image, mask, entropy)
        return Item(fill(image, view), fill_mask(mask, view), view.present)
    if augment is not None:
        image = augment(image, entropy)
    return Item(fill(image, view), label, view.present)


def see_array(
    image: np.ndarray,
    label: int | np.ndarray,
    key: SampleKey,
    seed: int,
    augment: "Augment | None" = None,
) -> Item:
    """Bring an image in memory, uint8 ``[H, W, C]``, to the model's input size."""

    def read(view: View) -> np.ndarray:
        top, left, rows, columns = view.box
        return resize(image[top : top + rows, left : left + columns], *view.content)

    return see(image.shape[:2], read, label, key, seed, augment)


class ArrayDataset(Dataset):
    """Images of one size in memory: an ``Item`` per key."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, seed: int, augment: "Augment | None" = None
    ):
        """Store ``images`` uint8 ``[n, H, W, C]`` and ``labels [n]``; without ``augment`` images
        are only resized.
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


class ImageDataset(Dataset):
    """Images read on request: an ``Item`` per key, or ``Unreadable``."""

    def __init__(
        self,
        source: Source,
        indices: np.ndarray,
        labels: np.ndarray,
        seed: int,
        augment: "Augment | None" = None,
        options: ReadOptions = COLOURED,
        *,
        masks: "MaskFiles | None" = None,
        levels: bool = False,
        held_out: bool = False,
        weights: np.ndarray | None = None,
        cache: "PixelCache | None" = None,
    ):
        """Store the settings of the dataset.

        Args:
            source: the encoded images.
            indices: indices of this dataset's images in ``source``, ``[n]``.
            labels: their classes, int64 ``[n]``, or other labels, float32 ``[n, outputs]``.
            seed: seed of the augmentation.
            augment: augmentation; None: none.
            options: how files are read.
            masks: masks with the classes of pixels, in place of ``labels``.
            levels: images of more than 8 bits are ``Unreadable``.
            held_out: whether the images were randomly split off the training images.
            weights: their weights in the training loss, ``[n]``, with mean 1; None: equal.
            cache: keeps decoded images and masks; None: each epoch decodes the files.
        """
        self.weights = weights
        self.options, self.masks = options, masks
        self.levels, self.held_out, self.cache = levels, held_out, cache
        self.source, self.indices = source, indices
        self.labels, self.seed = labels, seed
        self.augment = augment
        self.known_sizes: np.ndarray | None = None
        """The result of ``sizes`` once it is known."""

    def __len__(self):
        return len(self.labels)

    def sizes(self) -> np.ndarray:
        """Return height and width of each image in pixels, ``[n, 2]``, from the file headers; 0 for
        an unreadable image.
        """
        if self.known_sizes is None:
            found = []
            with ThreadPoolExecutor(SIZE_THREADS) as pool, Progress(len(self)) as progress:
                for size in pool.map(self._size, self.indices.tolist()):
                    found.append(size)
                    progress.advance(1, size == (0, 0))
            self.known_sizes = np.array(found, dtype=np.int64).reshape(-1, 2)
        return self.known_sizes

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size of the model's input for each image, ``[n, 2]``."""
        return canvases(self.sizes(), geometry)

    def names(self) -> list[str]:
        """Return the path of each image relative to the folder that holds them all, however the
        root is spelled.
        """
        names = [os.path.normpath(self.source.name(index)) for index in self.indices.tolist()]
        shared = len(os.path.commonpath(map(os.path.dirname, names)))
        return [name[shared:] for name in names]

    def digests(self) -> np.ndarray:
        """Return a fingerprint per image, uint32 ``[n]``: of its relative path, its label, its
        weight, and its content.

        The content counts by its number of bytes and, for up to ``WELL_KNOWN`` images, by
        ``KNOWN_BYTES`` at either end.
        """
        names = self.names()
        size = KNOWN_BYTES if len(names) <= WELL_KNOWN else 0

        def digest(place: int) -> int:
            name = os.fsencode(names[place])
            label = self.labels[place]
            about = label.tobytes() if label.ndim else b"%d" % label
            if self.weights is not None:
                about += self.weights[place].tobytes()
            known = zlib.crc32(about + b" %s " % name)
            index = int(self.indices[place])
            for source in (self.source, *([self.masks.files] if self.masks else [])):
                known = zlib.crc32(known_part(source, index, size), known)
            return known

        with ThreadPoolExecutor(SIZE_THREADS) as pool:
            return np.fromiter(pool.map(digest, range(len(names))), np.uint32, len(names))

    def name(self, index: int) -> str:
        """Return the name of an image in messages."""
        return self.source.name(int(self.indices[index]))

    def _size(self, index: int) -> Size:
        try:
            return read_size(self.source.open(index), self.options)
        except DAMAGED_IMAGE:
            return (0, 0)

    def _item(self, reader: Reader, index: int, key: SampleKey, keep: Keep) -> Item:
        """Return an image as the model sees it, with its class or its mask."""
        size = (reader.height, reader.width)
        # If each view occurs only once, whole pictures are kept.
        cropped = key.geometry.crop is not None or (self.augment is not None and self.augment.crops)
        whole = self.cache is None or cropped
        if whole:
            reader.keep, keep = keep, not_kept

        def read(view: View) -> np.ndarray:
            return keep((view.box, view.content), partial(read_image, reader, view, self.options))

        label = self.labels[key.index]
        if self.masks is None:
            label = int(label) if label.ndim == 0 else label
            return see(size, read, label, key, self.seed, self.augment)
        mask = self.mask_of(index, size) if whole else partial(self.mask_of, index, size)
        return see(size, read, mask, key, self.seed, self.augment)

    def mask_of(self, index: int, size: Size, view: View | None = None) -> np.ndarray:
        """Return the classes of an image's pixels, or of a view's, at the size of its content."""
        masks, keep = self.masks, not_kept
        if self.cache is not None:
            keep = self.cache.keep(masks.files, index, masks.classes, masks.max_pixels, size)
        read = partial(masks.read, index, size)
        if view is None:
            return keep("whole", read)
        return keep((view.box, view.content), lambda: cut_mask(read(), view))

    def __getitem__(self, key: SampleKey) -> Item | Unreadable:
        index = int(self.indices[key.index])
        keep = not_kept
        if self.cache is not None:  # before the file is opened, as it may be replaced
            keep = self.cache.keep(self.source, index, self.options)
        try:
            with open_image(self.source.open(index), self.options) as reader:
                size = (reader.height, reader.width)
                if self.known_sizes is not None and size != tuple(self.known_sizes[key.index]):
                    raise ValueError(
                        "its size has changed since the start of the run"
                        if self.known_sizes[key.index].any()
                        else "it was unreadable at the start of the run, but is readable now"
                    )
                item = self._item(reader, index, key, keep if reader.single_file else not_kept)
        except DAMAGED_IMAGE as error:
            return unreadable(self.source.name(index), error)
        if self.levels and item.pixels.dtype != np.uint8:
            reason = "it has more than 8 bits; convert it to 8 bits for data.task generate"
            return Unreadable(self.source.name(index), reason, refused=True)
        return item


def unreadable(name: str, error: BaseException) -> Unreadable:
    """Return the reason, in one line, why an image cannot be read."""
    return Unreadable(name, one_line(error), isinstance(error, REFUSED))
