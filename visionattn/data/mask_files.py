"""Masks in files beside images: index PNGs, or colours that stand for classes.

This module owns where the mask of an image is, and how its values become classes. ``folder.py``
divides the images, and ``images.py`` brings masks to the size that the model sees.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visionattn.cli.progress import Progress
from visionattn.data.config import DataConfig
from visionattn.data.formats import DAMAGED_IMAGE, LARGEST_IMAGE_PX, large_images_allowed
from visionattn.data.formats.reader import NotAsAsked, damage
from visionattn.data.geometry import Size
from visionattn.data.sources import Files
from visionattn.data.walk import composed, images_below
from visionattn.models.segmentation import IGNORED

MASKS = "masks"
"""The folder of the masks, beside that of the images."""
SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".gif")
"""What files of masks end in; JPEG changes values."""
INDEXED = ("1", "L", "P", "I", "I;16", "I;16B")
"""Modes of Pillow in which a value is an index; that of ``P`` is the place in its palette."""
GREY = ("LA", "RGB", "RGBA", "RGBX")
"""Those in which an index is a level of grey."""
READ_THREADS = 4


@dataclass(frozen=True)
class MaskClasses:
    """What the values of masks mean."""

    names: tuple[str, ...] = ()
    """Of the classes, from value 0 on; empty where they are still to be found."""
    colours: tuple[tuple[int, int, int], ...] | None = None
    """Red, green and blue of each class; None: values are indices."""
    ignored: int | tuple[int, int, int] | None = IGNORED
    """The index or the colour of pixels that do not count; None: all count."""

    @classmethod
    def of(cls, config: DataConfig) -> "MaskClasses":
        """Return what the options say; ``check_masks`` has checked them."""
        colours = None
        if config.mask_colours is not None:
            colours = tuple((red, green, blue) for red, green, blue in config.mask_colours)
        given = config.mask_ignored
        ignored: int | tuple[int, int, int] | None = None if colours else IGNORED
        if given is not None:
            ignored = (given[0], given[1], given[2]) if len(given) == 3 else given[0]
        names = tuple(config.mask_classes or map(str, range(len(colours or ()))))
        return cls(names, colours, ignored)

    def classes(self, mask: Image.Image) -> np.ndarray:
        """Return the class of each pixel of a mask, uint8 ``[height, width]``, ``IGNORED`` where it
        does not count.

        Raises:
            NotAsAsked: a value or a colour stands for no class, or the mask is of another kind.
        """
        if self.colours is not None:
            return self._of_colours(mask)
        values = _indices(mask)
        ignored = values == self.ignored if isinstance(self.ignored, int) else None
        count = len(self.names) or IGNORED
        wrong = values >= count if ignored is None else (values >= count) & ~ignored
        if values.dtype.kind == "i":
            wrong |= values < 0
        if wrong.any():
            not_counted = "" if ignored is None else f" or {self.ignored}, which does not count"
            known = f"with {count} classes " if self.names else ""
            raise NotAsAsked(
                f"it has the value {values[wrong][0]}; {known}wanted 0 to {count - 1}{not_counted}"
            )
        found = values.astype(np.uint8)
        if ignored is not None:
            found[ignored] = IGNORED
        return found

    def _of_colours(self, mask: Image.Image) -> np.ndarray:
        known = [*(self.colours or ()), *([self.ignored] if self.ignored is not None else ())]
        classes = [*range(len(self.colours or ())), IGNORED][: len(known)]
        numbers = _packed(np.array(known, np.uint8))
        order = np.argsort(numbers)
        pixels = _packed(np.asarray(mask.convert("RGB")))
        places = np.searchsorted(numbers[order], pixels).clip(max=len(known) - 1)
        wrong = numbers[order][places] != pixels
        if wrong.any():
            value = int(pixels[wrong][0])
            raise NotAsAsked(
                f"it has the colour {value >> 16} {value >> 8 & 255} {value & 255}, which is none "
                "of data.mask_colours and not data.mask_ignored"
            )
        return np.array(classes, np.uint8)[order][places]


def _packed(colours: np.ndarray) -> np.ndarray:
    """Return colours ``[..., 3]`` as one number each."""
    red, green, blue = np.moveaxis(colours.astype(np.uint32), -1, 0)
    return red << 16 | green << 8 | blue


def _step(mask: Image.Image) -> int:
    """Return by what Pillow multiplies levels of grey of 2 or 4 bits, so that the largest is 255;
    1 where it does not. It must not have read the pixels yet.
    """
    tiles: Any = getattr(mask, "tile", None)
    how = tiles[0].args if tiles else ""
    found = re.match("L;([24])", str(how if isinstance(how, str) else how[0]))
    return 255 // (2 ** int(found[1]) - 1) if found else 1


def _indices(mask: Image.Image) -> np.ndarray:
    """Return the values of an index mask ``[height, width]``; colours that are all grey are their
    level.
    """
    if mask.mode in INDEXED:
        step = _step(mask)
        values = np.asarray(mask) // step if step > 1 else np.asarray(mask)
        return values.astype(np.uint8) if values.dtype == bool else values
    if mask.mode not in GREY:
        raise NotAsAsked(
            f"it has pixels of the kind {mask.mode}; wanted the number of a class for each"
        )
    colours = np.asarray(mask.convert("RGB"))
    if (colours != colours[..., :1]).any():
        raise NotAsAsked(
            "it has colours, and nothing says what they stand for: name that of each class with "
            "data.mask_colours"
        )
    return colours[..., 0]


@dataclass(frozen=True)
class MaskFiles:
    """A mask for each image, by the number that the image has in its source."""

    files: Files
    classes: MaskClasses
    max_pixels: int = LARGEST_IMAGE_PX

    def read(self, index: int, size: Size | None = None) -> np.ndarray:
        """Return the class of each pixel, uint8 ``[height, width]``.

        Args:
            index: which mask.
            size: height and width in pixels of its image; None: not compared.

        Raises:
            ValueError: one of ``DAMAGED_IMAGE``, whose text names the mask: it cannot be read, is
                of another size, or has values that stand for no class.
        """
        name = self.files.name(index)
        try:
            with (
                damage("a file"),
                large_images_allowed(),
                open(name, "rb") as file,
                Image.open(file) as mask,
            ):
                own = (mask.height, mask.width)
                if size is not None and own != size:
                    raise NotAsAsked(
                        f"it has {own[0]} x {own[1]} pixels, its image {size[0]} x {size[1]}"
                    )
                if own[0] * own[1] > self.max_pixels:
                    raise NotAsAsked(
                        f"it has {own[0]} x {own[1]} pixels, more than data.max_pixels "
                        f"{self.max_pixels:,}"
                    )
                return self.classes.classes(mask)
        except NotAsAsked as error:
            raise NotAsAsked(f"the mask {name}: {error}") from error
        except DAMAGED_IMAGE as error:
            raise ValueError(f"the mask {name} cannot be read: {error}") from error

    def largest(self, indices: Sequence[int]) -> int:
        """Return the largest class of some masks; those that cannot be read are left to their turn.

        Raises:
            NotAsAsked: a mask has a value that can be no class.
        """

        def of(index: int) -> int:
            try:
                found = self.read(index)
            except NotAsAsked:
                raise
            except ValueError:
                return 0
            return int(found[found != IGNORED].max(initial=0))

        largest = 0
        with ThreadPoolExecutor(READ_THREADS) as pool, Progress(len(indices)) as progress:
            for found in pool.map(of, indices):
                largest = max(largest, found)
                progress.advance(1)
        return largest


def masks_of(paths: Sequence[str], images: Path, masks: Path) -> list[str]:
    """Return the mask of each image: the file that has its path, but for the ending.

    Args:
        paths: of the images, below ``images``.
        masks: the folder of the masks.

    Raises:
        FileNotFoundError, ValueError: there is no such folder, an image has no mask, or two.
    """
    if not masks.is_dir():
        raise FileNotFoundError(
            f"no folder {masks} with the masks of {images}; wanted one of the same names, with "
            f"files that end in {', '.join(SUFFIXES)}"
        )
    found: dict[str, str] = {}
    for path in images_below(masks):
        stem, suffix = os.path.splitext(composed(os.path.relpath(path, masks)))
        if suffix.lower() not in SUFFIXES:
            continue
        if stem in found:
            raise ValueError(f"{found[stem]} and {path} are masks of one image; keep one of them")
        found[stem] = path
    stems = [os.path.splitext(composed(os.path.relpath(path, images)))[0] for path in paths]
    missing = [path for path, stem in zip(paths, stems, strict=True) if stem not in found]
    if missing:
        wanted = masks / Path(os.path.relpath(missing[0], images)).with_suffix(SUFFIXES[0])
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} images of {images} have no mask; the first: "
            f"{missing[0]}, wanted {wanted}"
        )
    return [found[stem] for stem in stems]


def with_names(masks: Sequence[MaskFiles]) -> list[MaskFiles]:
    """Return the masks of all splits with the names of the classes, found by their values where
    nobody has named them.

    Raises:
        NotAsAsked: a value can be no class.
    """
    if masks[0].classes.names:
        return list(masks)
    largest = max(each.largest(range(len(each.files.paths))) for each in masks)
    names = tuple(map(str, range(max(2, largest + 1))))
    return [replace(each, classes=replace(each.classes, names=names)) for each in masks]
