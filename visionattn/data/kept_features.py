"""Datasets whose images are feature maps that ``visionattn features --dense --blocks`` has written.

This module finds the map of each image by its path. It knows the files of a folder of features, and
no model.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from safetensors import SafetensorError, safe_open
from torch import Tensor

from visionattn.cli.files import first_line
from visionattn.cli.tables import read_rows
from visionattn.data.batches import AUGMENT_STREAM, Item, SampleKey, Unreadable
from visionattn.data.formats import DAMAGED_IMAGE
from visionattn.data.geometry import Geometry, Size
from visionattn.data.images import ImageDataset, fill_mask, unreadable
from visionattn.models.segmentation import IGNORED

INDEX, BACKBONE = "index.csv", "backbone.safetensors"
"""The index of a folder of features, and the model whose maps it has."""
SAMPLED, OBJECTS = 80, 16
"""Number of patches in a sample of a map, and how many of them show an object if there is one."""
OBJECT_SHARE, BACKGROUND_SHARE = 0.5, 0.9
"""A patch has a class if the class covers more than this share of it; the second is for the
background.
"""


class FeatureFolder:
    """The feature maps in a folder, by the paths of their images.

    Raises:
        FileNotFoundError: there are no such features; one line.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        for name in (INDEX, BACKBONE):
            if not (self.folder / name).is_file():
                raise FileNotFoundError(
                    f"no {name} in data.features {folder}; write it with visionattn features "
                    f"--dense --blocks 5 --output {folder}"
                )
        with open(
            self.folder / INDEX, encoding="utf-8", errors="surrogateescape", newline=""
        ) as file:
            self.rows = list(read_rows(file))
        self.by_path = {os.path.realpath(row["path"]): row for row in self.rows}
        self.shard = cache(open_shard)

    def of(self, names: Sequence[str], root: str) -> list[dict[str, str]]:
        """Return the row of the index for each image.

        An image is found by its path or, if the features were written elsewhere, by the end of its
        path below ``root``.

        Raises:
            ValueError: an image has no row; one line.
        """
        places = [os.path.relpath(name, root).split(os.sep) for name in names]
        ends = dict[str, dict[str, str]]()
        for length in {len(place) for place in places}:
            found = {self.end_of(row, length): row for row in self.rows}
            counts = Counter(self.end_of(row, length) for row in self.rows)
            ends |= {end: row for end, row in found.items() if counts[end] == 1}
        rows = []
        for name, place in zip(names, places, strict=True):
            row = self.by_path.get(os.path.realpath(name)) or ends.get("/".join(place))
            if row is None:
                raise ValueError(
                    f"no features of {name} in data.features {self.folder}; run visionattn "
                    "features on all images"
                )
            rows.append(row)
        return rows

    @staticmethod
    def end_of(row: dict[str, str], length: int) -> str:
        """Return the last parts of the path of an image."""
        return "/".join(row["path"].split(os.sep)[-length:])

    def read(self, row: dict[str, str]) -> Tensor:
        """Return a map ``[D, H, W]``; errors as in ``open_shard``."""
        return self.shard(self.folder / row["shard"]).get_tensor(row["key"])

    def shape(self, row: dict[str, str]) -> tuple[int, int, int]:
        """Return the shape of a map; zeros without a map."""
        if row["status"] != "ok":
            return (0, 0, 0)
        return tuple(self.shard(self.folder / row["shard"]).get_slice(row["key"]).get_shape())


def open_shard(path: Path) -> Any:
    """Open a file of maps; raise OSError or ValueError if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {first_line(error)}") from error


class KeptDataset(ImageDataset):
    """Images with their labels or masks, as feature maps: an ``Item`` per key whose pixels are
    float16 ``[H, W, D]``, or ``Unreadable``.

    Args:
        pictures: the images.
        kept: their maps.
        root: the folder of the images.
        geometry: the preprocessing before the model of the maps.
        leaves_out: whether that model skips the padding.

    Raises:
        ValueError: an image has no map, or a map of another size; one line.
    """

    def __init__(
        self,
        pictures: ImageDataset,
        kept: FeatureFolder,
        root: str,
        geometry: Geometry,
        *,
        leaves_out: bool,
    ):
        self.__dict__ |= pictures.__dict__
        self.pictures, self.kept, self.geometry = pictures, kept, geometry
        self.leaves_out = leaves_out
        names = [self.source.name(index) for index in self.indices.tolist()]
        self.rows = kept.of(names, root)
        self.shapes = np.array([kept.shape(row) for row in self.rows], np.int64).reshape(-1, 3)

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size in pixels of the patches of each map, ``[n, 2]``; 0 without a map."""
        return self.shapes[:, 1:] * self.geometry.patch_px

    @property
    def bytes_per_pixel(self) -> float:
        """Return the bytes of a map for each pixel of its image."""
        return 2 * int(self.shapes[:, 0].max()) / math.prod(self.geometry.patch_px)

    def view(self, number: int) -> Any:
        """Return the view of an image that its map describes."""
        row = self.rows[number]
        return self.geometry.view(int(row["height"]), int(row["width"]))

    def filled(self, number: int) -> Size:
        """Return the rows and columns of patches that an image fills."""
        if not self.leaves_out:
            return tuple(self.shapes[number, 1:].tolist())
        present = zip(self.view(number).present, self.geometry.patch_px, strict=True)
        rows, columns = (-(-of // patch) for of, patch in present)
        return rows, columns

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and standard deviation of each channel over the patches, ``[D]`` each.

        The deviation is at least the rounding of float16, because the model has float32 features.
        """
        width = int(self.shapes[:, 0].max())
        count, total, square = 0, *torch.zeros(2, width, dtype=torch.float64)
        for number, row in enumerate(self.rows):
            if row["status"] == "ok":
                rows, columns = self.filled(number)
                x = self.kept.read(row)[:, :rows, :columns].flatten(1).double()
                count, total = count + x.shape[1], total + x.sum(1)
                square = square + x.square().sum(1)
        mean = total / max(count, 1)
        deviation = (square / max(count, 1) - mean.square()).clamp(min=0).sqrt()
        return mean.numpy(), deviation.maximum(mean.abs() * 2**-10).clamp(min=1e-6).numpy()

    def __getitem__(self, key: SampleKey) -> Item | Unreadable:
        row = self.rows[key.index]
        if row["status"] != "ok":
            return Unreadable(row["path"], row["reason"])
        try:
            maps = rearrange(self.kept.read(row).to(torch.float16).numpy(), "d h w -> h w d")
            label = self.labels[key.index]
            if self.masks is not None:
                label = self._mask(key.index)
        except DAMAGED_IMAGE as error:
            return unreadable(row["path"], error)
        return Item(maps, int(label) if label.ndim == 0 else label, self.filled(key.index))

    def _mask(self, number: int) -> np.ndarray:
        """Return the classes of the pixels of whole patches."""
        row, view = self.rows[number], self.view(number)
        size = int(row["height"]), int(row["width"])
        mask = fill_mask(self.mask_of(int(self.indices[number]), size, view), view)
        whole = (self.shapes[number, 1:] * self.geometry.patch_px).tolist()
        missing = [(0, px - got) for px, got in zip(whole, mask.shape, strict=True)]
        return np.pad(mask, missing, constant_values=IGNORED)


class PatchSamples(KeptDataset):
    """Random patches of feature maps with their classes: an ``Item`` per key whose pixels are
    float16 ``[1, SAMPLED, D]`` and whose label is uint8 ``[1, SAMPLED]``, or ``Unreadable``.

    Objects fill a small part of a picture. Each sample has a fixed share of patches with objects,
    which replaces class weights. Many small samples train faster than whole maps.

    Args:
        maps: the maps, with masks. The classes of their patches stay in memory.
        seed: decides the patches, with the key.
    """

    def __init__(self, maps: KeptDataset, seed: int):
        self.__dict__ |= maps.__dict__
        self.seed = seed
        self._classes = dict[int, np.ndarray]()

    def __getitem__(self, key: SampleKey) -> Item | Unreadable:
        item = super().__getitem__(key)
        if isinstance(item, Unreadable):
            return item
        rng = np.random.default_rng(
            (self.seed, AUGMENT_STREAM, key.epoch, key.index, key.draw or 0)
        )
        known = item.label.ravel()
        objects = np.flatnonzero((known > 0) & (known < IGNORED))
        background = np.flatnonzero(known == 0)
        groups = [each for each in (objects, background) if len(each)] or [np.arange(known.size)]
        counts = (OBJECTS, SAMPLED - OBJECTS) if len(groups) == 2 else (SAMPLED,)
        drawn = [rng.choice(group, count) for group, count in zip(groups, counts, strict=True)]
        places = np.concatenate(drawn)
        pixels = item.pixels[np.divmod(places, item.label.shape[1])]
        return Item(pixels[None], known[places][None], (1, SAMPLED))

    def _mask(self, number: int) -> np.ndarray:
        """Return the classes of the patches, uint8 ``[rows, columns]``."""
        if number not in self._classes:
            self._classes[number] = patch_classes(super()._mask(number), self.geometry.patch_px)
        return self._classes[number]

    def canvases(self, geometry: Geometry) -> np.ndarray:
        """Return the size in pixels of the sampled patches, ``[n, 2]``; 0 without a map."""
        return np.where(self.shapes[:, 1:] > 0, np.multiply((1, SAMPLED), geometry.patch_px), 0)


def patch_classes(mask: np.ndarray, patch_px: Size) -> np.ndarray:
    """Return the class of each patch of a mask, uint8 ``[rows, columns]``: the class that covers
    more than ``OBJECT_SHARE`` of it, or more of it than of other patches; class 0, the background,
    if it covers ``BACKGROUND_SHARE``; else ``IGNORED``.
    """
    down, across = patch_px
    patches = rearrange(mask, "(h p) (w q) -> h w (p q)", p=down, q=across)
    classes = np.full(patches.shape[:2], IGNORED, np.uint8)
    for number in np.flatnonzero(np.bincount(mask.ravel(), minlength=IGNORED)[:IGNORED]):
        share = (patches == number).mean(2)
        # An object smaller than half a patch gets its most covered patch.
        enough = (share > OBJECT_SHARE) | (share == share.max())
        classes[enough if number else share >= BACKGROUND_SHARE] = number
    return classes
