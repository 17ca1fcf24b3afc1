"""The meaning of mask values: a class number, or a color that stands for a class.

This module turns the pixels of one mask into classes. ``mask_files.py`` finds masks.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from visionattn.cli.untrusted import checked, read_yaml
from visionattn.data.data_config import DataConfig
from visionattn.data.folder_walk import suffix_of
from visionattn.data.formats.reader import NotAsAsked
from visionattn.data.formats.tiff_pages import MIN_IS_WHITE, PHOTOMETRIC
from visionattn.models.segmentation import IGNORED

INDEXED = ("1", "L", "P", "I", "I;16", "I;16B")
"""Pillow modes whose values are indices; for ``P`` the index in its palette."""
GREY = ("LA", "RGB", "RGBA", "RGBX")
"""Pillow modes in which an index is a gray level."""
WHITE, GREY_STEP = 0xFFFFFF, 0x010101
"""Packed colors: white, and the difference between two gray levels."""

Pairs = frozenset[tuple[int, int]]
"""Values of a mask, each with the packed color (red << 16 | green << 8 | blue) that viewers show;
-1 for a value of more than 8 bits that is not white.
"""
BLACK_AND_WHITE = ((0, 0, 0), (255, 255, 255))
"""Class colors of black and white masks."""
NUMBERS: Pairs = frozenset({(0, 0), (1, GREY_STEP)})
"""The classes 0 and 1 as plain numbers, in a mask without palette."""
BACKGROUND = "background"
"""Name of class 0 of masks with one file per class."""
MASK_SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".gif")
"""Suffixes of mask files; JPEG changes values."""
CLASS_FILES = ("classes.yaml", "classes.json")
"""Files in the folder of images and masks with the content of ``data.masks``."""


@dataclass(frozen=True)
class MasksSaid:
    """The user's description of masks."""

    classes: list[str] | None = None
    """Names, in the order of their values from 0 on, or of ``colours``."""
    colours: list[list[int]] | None = None
    """Red, green and blue of each class; None: the values of masks are indices."""
    ignored: int | list[int] | None = None
    """The value or color of pixels that do not count."""
    images: str | None = None
    """Only with ``layers``: the folder of the images below ``data.root``; None: ``images``."""
    layers: dict[str, str] | None = None
    """The path below ``data.root`` of each class's own mask files, from class 1 on, with
    ``{folder}`` and ``{name}`` of the image; class 0 is the background.
    """


def said_of_masks(config: DataConfig) -> MasksSaid:
    """Return the content of ``data.masks``, or else of a file of ``CLASS_FILES`` in ``data.root``.

    Raises:
        ValueError: a name or a value is wrong, out of range, or contradicts another; one line.
    """
    source, values = "data.masks", config.masks
    paths = [Path(config.root or "", name) for name in CLASS_FILES]
    if not values and (found := [path for path in paths if path.is_file()]):
        source, values = str(found[0]), read_yaml(found[0])
    said = checked(MasksSaid, values, source)
    _check_said(said, source)
    return said


def _check_said(said: MasksSaid, source: str) -> None:
    """Raise ValueError for values that contradict each other or are out of range."""
    names, colours, ignored = said.classes, said.colours, said.ignored
    if said.layers is None and said.images is not None:
        raise ValueError(f"{source}.images needs {source}.layers; remove it")
    if said.layers is not None:
        if (names, colours, ignored) != (None, None, None):
            raise ValueError(
                f"{source}.layers names all classes; remove all other keys except images"
            )
        if wrong := [path for path in said.layers.values() if "{name}" not in path]:
            raise ValueError(f"expected paths with {{name}} in {source}.layers, got {wrong[0]}")
        if wrong := [path for path in said.layers.values() if suffix_of(path) not in MASK_SUFFIXES]:
            raise ValueError(
                f"expected {source}.layers to end in {', '.join(MASK_SUFFIXES)}, got {wrong[0]}"
            )
        names = [BACKGROUND, *said.layers]
    for key, given in (("classes", names), ("colours", colours)):
        if given is not None and not 2 <= len(given) <= IGNORED:
            raise ValueError(f"expected 2 to {IGNORED} classes in {source}.{key}, got {len(given)}")
    if names is not None and (len(set(names)) < len(names) or not all(names)):
        raise ValueError(f"expected distinct names in {source}.classes, got {names}")
    for colour in colours or []:
        if not _is_colour(colour):
            raise ValueError(
                f"expected red, green and blue of each class, 0 to 255, in {source}.colours, got "
                f"{colour}"
            )
    if colours is not None and len(set(map(tuple, colours))) < len(colours):
        raise ValueError(f"expected distinct colors in {source}.colours, one per class")
    if names is not None and colours is not None and len(names) != len(colours):
        raise ValueError(
            f"expected as many {source}.classes as {source}.colours, got {len(names)} and "
            f"{len(colours)}"
        )
    if ignored is None:
        return
    if colours is not None and not _is_colour(ignored):
        raise ValueError(f"{source}.ignored must be red, green and blue, 0 to 255, got {ignored}")
    if colours is None and not (isinstance(ignored, int) and 0 <= ignored <= 65535):
        raise ValueError(f"{source}.ignored must be one value from 0 to 65535, got {ignored}")
    if ignored in (colours or range(len(names or []))):
        raise ValueError(f"{source}.ignored {ignored} is the value of a class; pass another value")


def _is_colour(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(0 <= x <= 255 for x in value)


@dataclass(frozen=True)
class MaskClasses:
    """The meaning of mask values."""

    names: tuple[str, ...] = ()
    """Names of the classes, from value 0 on; empty if not known yet."""
    colours: tuple[tuple[int, int, int], ...] | None = None
    """Red, green and blue of each class; None: values are indices."""
    ignored: int | tuple[int, int, int] | None = IGNORED
    """Index or color of ignored pixels; None: no pixel is ignored."""
    stated: bool = False
    """Whether the user has defined the ignored pixels."""
    named: bool = False
    """Whether the user has defined the classes."""

    @classmethod
    def of(cls, said: MasksSaid) -> "MaskClasses":
        """Return the settings from what the user has defined."""
        if said.layers is not None:
            return cls((BACKGROUND, *said.layers), ignored=None, named=True)
        colours: Any = said.colours and tuple(map(tuple, said.colours))
        names = tuple(said.classes or map(str, range(len(colours or ()))))
        named = bool(said.classes or said.colours)
        ignored: Any = None if colours else IGNORED
        if said.ignored is not None:
            ignored = said.ignored if isinstance(said.ignored, int) else tuple(said.ignored)
        return cls(names, colours, ignored, said.ignored is not None, named)

    def classes(self, mask: Image.Image) -> np.ndarray:
        """Return the class of each pixel of a mask, uint8 ``[height, width]``; ``IGNORED`` for
        ignored pixels.

        Raises:
            NotAsAsked: a value or a color has no class, or the mask is of another kind.
        """
        values, colours = _values(mask, coloured=self.colours is not None)
        known = {_packed(each): number for number, each in enumerate(self.colours or ())}
        if isinstance(self.ignored, tuple):
            known[_packed(self.ignored)] = IGNORED
        before = list(colours)
        after = [
            self._of_index(value) if self.colours is None else self._of_colour(colour, known)
            for value, colour in colours.items()
        ]
        if before == after:
            return values.astype(np.uint8)
        if values.dtype != np.uint8:
            return np.array(after, np.uint8)[np.searchsorted(before, values)]
        table = np.zeros(256, np.uint8)
        table[before] = after
        return cv2.LUT(values, table)

    def _of_index(self, value: int) -> int:
        if value == self.ignored:
            return IGNORED
        count = len(self.names) or IGNORED
        if not 0 <= value < count:
            not_counted = "" if self.ignored is None else f" or {self.ignored}, which is ignored"
            known = f"with {count} classes " if self.names else ""
            raise NotAsAsked(f"{known}expected values 0 to {count - 1}{not_counted}, got {value}")
        return value

    def _of_colour(self, colour: int, known: dict[int, int]) -> int:
        if colour in known:
            return known[colour]
        wanted = ", ".join(" ".join(map(str, each)) for each in (self.colours or ())[:8])
        given = f"the color {colour >> 16} {colour >> 8 & 255} {colour & 255}"
        raise NotAsAsked(
            f"expected a color of data.masks.colours ({wanted}) or data.masks.ignored, got "
            f"{given if colour >= 0 else 'a value above 255'}"
        )

    def may_be_binary(self, pairs: Pairs) -> bool:
        """Return whether all values that count are shown black or white. 255 counts too, unless the
        user has set it as ignored.
        """
        level = self.ignored if self.stated else None
        if level is not None:
            if not isinstance(level, int) or not 0 < level < 255:
                return False
            if any(colour != level * GREY_STEP for value, colour in pairs if value == level):
                return False
        return {colour for value, colour in pairs if value != level} <= {0, WHITE}

    def as_binary(self, pairs: Pairs) -> "MaskClasses | None":
        """Return the classes for masks shown black (class 0) and white (class 1); None for other
        masks, or if their values already are 0 and 1.
        """
        binary = self.may_be_binary(pairs) and WHITE in {colour for _, colour in pairs}
        if not binary or pairs <= {(0, 0), (1, WHITE)}:
            return None
        level = self.ignored if self.stated else None
        ignored = (level, level, level) if isinstance(level, int) else None
        names = self.names or ("0", "1")
        return replace(self, names=names, colours=BLACK_AND_WHITE, ignored=ignored)


def pairs_of(mask: Image.Image) -> Pairs:
    """Return the values of a mask with their colors.

    Raises:
        NotAsAsked: it has colors that are not gray without a palette, or is of another kind.
    """
    return frozenset(_values(mask, coloured=False)[1].items())


def _packed(colour: tuple[int, int, int]) -> int:
    return colour[0] << 16 | colour[1] << 8 | colour[2]


def used_values(values: np.ndarray) -> list[int]:
    """Return the distinct values, sorted."""
    if values.dtype == np.uint8:
        return np.flatnonzero(cv2.calcHist([values], [0], None, [256], [0, 256])).tolist()
    if values.dtype == np.uint16:
        return np.flatnonzero(np.bincount(values.ravel())).tolist()
    return np.unique(values).tolist()


def _step(mask: Image.Image) -> int:
    """Return the factor by which Pillow scales 2-bit or 4-bit gray levels to 255; 1 if it does not.
    Call it before Pillow reads the pixels.
    """
    tiles: Any = getattr(mask, "tile", None)
    how = tiles[0].args if tiles else ""
    found = re.match("L;([24])", str(how if isinstance(how, str) else how[0]))
    return 255 // (2 ** int(found[1]) - 1) if found else 1


def _zero_is_white(mask: Image.Image) -> bool:
    """Return whether a mask is a TIFF that shows 0 as white and its largest value as black."""
    return getattr(mask, "tag_v2", {}).get(PHOTOMETRIC) == MIN_IS_WHITE


def _values(mask: Image.Image, *, coloured: bool) -> tuple[np.ndarray, dict[int, int]]:
    """Return the values of a mask ``[height, width]``, and the packed color of each, sorted.

    Colors that are all gray become their level. With ``coloured``, other colors are values too,
    packed.
    """
    if mask.mode == "P":
        values, palette = np.asarray(mask), _palette(mask)
        shown = {value: palette[value] for value in used_values(values)}
        if mask.format != "GIF" or any(colour % GREY_STEP for colour in shown.values()):
            return values, shown
        # The palette of a GIF contains the levels that occur.
        values = cv2.LUT(values, np.array([each & 255 for each in palette], np.uint8))
        return values, {value: _grey(value) for value in used_values(values)}
    if mask.mode in INDEXED:
        step, most = _step(mask), 65535 if mask.mode.startswith("I;16") else 255
        values, white = np.asarray(mask), _zero_is_white(mask)
        if mask.mode == "1":
            values, step = values.astype(np.uint8) * 255, 255
        if white and most == 255:  # Pillow has inverted these
            values = 255 - values
        values = values // step
        levels = {value: value * step for value in used_values(values)}
        return values, {
            value: _grey(most - level if white else level) for value, level in levels.items()
        }
    if mask.mode not in GREY and not coloured:
        kind = "float" if mask.mode == "F" else mask.mode
        raise NotAsAsked(f"expected a class number per pixel, got pixels of the kind {kind}")
    red, green, blue = (np.asarray(band) for band in mask.convert("RGB").split())
    if np.array_equal(red, green) and np.array_equal(red, blue):
        return red, {value: _grey(value) for value in used_values(red)}
    if not coloured:
        raise NotAsAsked(
            "it has colors of unknown classes; pass the color of each class in data.masks.colours"
        )
    values = red.astype(np.uint32) << 16 | green.astype(np.uint16) << 8 | blue
    return values, {value: value for value in used_values(values)}


def _grey(level: int) -> int:
    """Return the packed color of a gray level, of 8 bits or the largest of 16 bits."""
    if level == 65535:
        return WHITE
    return level * GREY_STEP if 0 <= level <= 255 else -1


def _palette(mask: Image.Image) -> list[int]:
    """Return the packed colors of 256 values; -1 for values outside the palette."""
    levels = mask.getpalette("RGB") or []
    colours = [_packed(tuple(levels[at : at + 3])) for at in range(0, len(levels), 3)]
    return colours + [-1] * (256 - len(colours))
