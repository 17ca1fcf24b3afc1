"""The base class of all image readers: size after EXIF rotation, bands, and regions.

This module is independent of formats. A format is a subclass of ``Reader`` and a row of
``known_formats.py``.
"""

import importlib.util
import os
import struct
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from visionattn.data.formats.read_options import LARGEST_IMAGE_PX
from visionattn.data.formats.value_meaning import Meaning
from visionattn.data.geometry import Box

DAMAGED_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""Exceptions of reading an image that is missing, truncated, malformed, not an image, too large, or
has values without a known range.
"""


class NotAsAsked(ValueError):
    """An intact file lacks the requested page, bands or value range, or has another kind; the
    message names the request.
    """


class MissingPackage(NotAsAsked):
    """A format needs a package that is not installed; the message says how to install it."""


def require(extra: str, *packages: str, what: str) -> None:
    """Raise ``MissingPackage`` if a package needed for a format is not installed.

    Args:
        extra: the extra of ``pyproject.toml`` that installs them.
        packages: their import names.
        what: the feature that needs them, for the message.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackage(
            f"{what} needs {' and '.join(missing)}: pip install 'visionattn[{extra}]'"
        )


BROKEN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)
"""Unexpected exceptions of libraries for malformed files, in addition to ``DAMAGED_IMAGE``."""


def path_of(file: object) -> str:
    """Return the path of an open file; an empty text if it has none."""
    name = getattr(file, "name", "")
    return name if isinstance(name, str) and os.path.isfile(name) else ""


def one_line(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def damage(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn a library's exceptions for a malformed file into one of ``DAMAGED_IMAGE``.

    Args:
        what: the kind of file, for the message.
        kinds: the library's own exceptions.
    """
    try:
        yield
    except UnidentifiedImageError as error:  # Pillow's text names a Python object
        raise ValueError("unknown image format") from error
    except DAMAGED_IMAGE:
        raise
    except (*kinds, *BROKEN) as error:
        raise ValueError(f"unreadable {what}: {one_line(error)[:200]}") from error


Keep = Callable[[object, Callable[[], np.ndarray]], np.ndarray]
"""Returns pixels by a key: from an earlier opening of the file, or from the given function."""


def not_kept(_: object, make: Callable[[], np.ndarray]) -> np.ndarray:
    """Decode at each opening: the ``Keep`` without a cache."""
    return make()


@dataclass(frozen=True)
class Georeference:
    """The place of a picture on the earth, in rasterio's types."""

    crs: Any
    """The coordinate system of ``transform``, or else of ``gcps``; None if there is none."""
    transform: Any
    """Maps columns and rows to coordinates; None if unknown."""
    gcps: tuple = ()
    """Ground control points with their rows and columns, in place of ``transform``."""

    def scaled(self, height: float, width: float) -> "Georeference":
        """Return the georeference of a map of the picture whose cells cover ``height`` x ``width``
        pixels.
        """
        from rasterio.control import GroundControlPoint

        transform = self.transform
        if transform is not None:
            transform = transform @ transform.scale(width, height)
        points = [
            point.asdict() | {"row": point.row / height, "col": point.col / width}
            for point in self.gcps
        ]
        return Georeference(self.crs, transform, tuple(GroundControlPoint(**x) for x in points))


class Turn(NamedTuple):
    """The conversion of stored pixels to the picture: flips first, then an exchange of rows and
    columns.
    """

    flip_rows: bool = False
    flip_columns: bool = False
    transpose: bool = False

    def stored(self, box: Box, height: int, width: int) -> Box:
        """Return the stored box of a part of the picture; ``height`` x ``width`` is the stored
        size.
        """
        if self.transpose:
            box = Box(box.left, box.top, box.width, box.height)
        top = height - box.top - box.height if self.flip_rows else box.top
        left = width - box.left - box.width if self.flip_columns else box.left
        return Box(top, left, box.height, box.width)

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Turn stored pixels ``[h, w, bands]`` into the picture; a view."""
        pixels = pixels[:: -1 if self.flip_rows else 1, :: -1 if self.flip_columns else 1]
        return pixels.swapaxes(0, 1) if self.transpose else pixels


TURNS = {
    1: Turn(),
    2: Turn(flip_columns=True),
    3: Turn(flip_rows=True, flip_columns=True),
    4: Turn(flip_rows=True),
    5: Turn(transpose=True),
    6: Turn(flip_rows=True, transpose=True),
    7: Turn(flip_rows=True, flip_columns=True, transpose=True),
    8: Turn(flip_columns=True, transpose=True),
}
"""Conversion for each EXIF and TIFF orientation, tag 274."""


class Closing(AbstractContextManager):
    """A context manager that calls ``close`` at its end."""

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close everything that is open."""


class Reader(Closing):
    """An open image that is read in parts; a context manager.

    A subclass sets all attributes, opens the file in its constructor and closes it in ``close``.
    """

    stored: tuple[int, int]
    """Height and width in pixels as stored, before ``turn``."""
    turn: Turn = TURNS[1]
    bands: int
    """Number of bands that ``read`` returns, transparency included. Palettes and CMYK are converted
    to RGB.
    """
    alpha: bool = False
    """Whether the last band is transparency."""
    dtype: np.dtype
    bits: int | None = None
    """Number of bits that the values fill, as stated in the file; None if not stated."""
    inverted: bool = False
    """Whether the smallest value is white."""
    meaning: Meaning = Meaning()
    """Meaning of the stored values; ``interpret`` sets it."""
    most_px: int = LARGEST_IMAGE_PX
    """Maximum number of pixels that are decoded at once."""
    georeference: "Georeference | None" = None
    """Place of the picture on the earth; None if the file does not state it."""
    single_file: bool = True
    """Whether the pixels depend on no other file."""
    keep: Keep | None = None
    """Keeps whole decoded pictures, in readers that decode no parts; None: they are not kept."""

    def interpret(self, meaning: Meaning) -> None:
        """Set the meaning of the stored values; ``dtype`` must be their type."""
        self.meaning = meaning
        if meaning.coloured:
            self.bands, self.alpha = 3, False
            self.dtype = np.dtype(np.uint8) if meaning.palette is not None else self.dtype
            self.bits = self.dtype.itemsize * 8
        elif meaning.scale is not None:
            self.dtype, self.bits = np.dtype(np.float32), None

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths in pixels of all sizes of the picture in the file, as stored, the
        largest first.
        """
        return [self.stored]

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns that are decoded at once: a tile, a strip, a chunk, or everything
        without parts.
        """
        return (1, 1)

    def take_level(self, level: int) -> None:
        """Select one of the sizes of the picture.

        Args:
            level: index in ``sizes``, from 0, the largest.

        Raises:
            NotAsAsked: there is no such level.
        """
        sizes = self.sizes
        if not 0 <= level < len(sizes):
            turned = [size[::-1] if self.turn.transpose else size for size in sizes]
            held = ", ".join(f"{height:,} x {width:,}" for height, width in turned)
            raise NotAsAsked(
                f"expected a level from 0 to {len(sizes) - 1}, got {level}; sizes: {held} pixels"
            )
        if level:
            self.stored = sizes[level]
            self._take_level(level)

    def _take_level(self, level: int) -> None:
        """Read an existing smaller size from now on."""
        raise AssertionError("a reader with several sizes overrides this")

    @property
    def pages(self) -> int:
        """Number of pages, frames or pictures in the file."""
        return 1

    @property
    def height(self) -> int:
        """Height in pixels of the picture, after EXIF rotation."""
        return self.stored[1] if self.turn.transpose else self.stored[0]

    @property
    def width(self) -> int:
        """Width in pixels of the picture, after EXIF rotation."""
        return self.stored[0] if self.turn.transpose else self.stored[1]

    def read(
        self, box: Box, height: int, width: int, bands: Sequence[int] | None = None
    ) -> np.ndarray:
        """Read a part of the picture: the file's values in their own type, or colors, or float32
        in physical units if the file states scale and offset.

        Args:
            box: the part, within the picture.
            height: minimum number of rows. If the format has the part in smaller sizes, the
                smallest that suffices is read; else it is read in full.
            width: minimum number of columns, likewise.
            bands: band numbers from 1, in the wanted order; None: all.

        Returns:
            ``[h, w, bands]``, exactly ``box``; a masked array if some pixels have no data.
        """
        turned = (width, height) if self.turn.transpose else (height, width)
        part = self.turn.stored(box, *self.stored), *turned
        chosen = None if bands is None else [band - 1 for band in bands]
        values = self.meaning.values(partial(self._read, *part), self._empty(*part), chosen)
        return self.turn.apply(values)

    @abstractmethod
    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        """Read a part of the stored image; ``bands`` count from 0, and -1 is the last."""

    def _empty(self, box: Box, height: int, width: int) -> np.ndarray | None:
        """Return the no-data mask of a stored part from the file's mask, bool ``[h, w]`` in the
        size of ``_read``; None if the file has no mask.
        """
        return None

    def check_decoded(self, rows: int, columns: int) -> None:
        """Raise ValueError if more pixels would be decoded at once than allowed: a small file can
        claim any size.
        """
        if rows * columns > self.most_px:
            raise ValueError(
                f"expected at most data.max_pixels {self.most_px:,}, got {rows:,} x {columns:,} "
                "pixels; raise it to read the image"
            )


def check_page(page: int | None, pages: int) -> int:
    """Return the index of the wanted page, from 0.

    Raises:
        NotAsAsked: there is no such page.
    """
    wanted = page or 1
    if wanted > pages:
        held = "1 page" if pages == 1 else f"{pages} pages"
        raise NotAsAsked(f"expected page {wanted}, the image has {held}")
    return wanted - 1


def pick(pixels: np.ndarray, bands: Sequence[int] | None) -> np.ndarray:
    """Return bands of ``[h, w, bands]`` by their indices from 0; None: all."""
    return pixels if bands is None else pixels[..., list(bands)]


def smaller_part(box: Box, scale: tuple[float, float], shape: Sequence[int]) -> tuple[slice, slice]:
    """Return the place of a part of an image in a reduced version of the image.

    Args:
        box: the part, in pixels of the large image.
        scale: height and width of a reduced pixel in pixels of the large image.
        shape: height and width of the reduced image, which bound the part.
    """
    ends = []
    for start, length, by, most in zip(box[:2], box[2:], scale, shape[:2], strict=True):
        first = min(round(start / by), most - 1)
        ends.append(slice(first, min(max(round((start + length) / by), first + 1), most)))
    return ends[0], ends[1]


def lengths(part: tuple[slice, slice]) -> tuple[int, int]:
    """Return height and width of a part."""
    return part[0].stop - part[0].start, part[1].stop - part[1].start


def choose_level(
    sizes: Sequence[tuple[int, int]], box: Box, height: int, width: int
) -> tuple[int, tuple[slice, slice]]:
    """Return the smallest of several sizes of an image in which a part is large enough.

    Args:
        sizes: heights and widths, the full size first, then smaller ones.
        box: the part, in pixels of the full size.
        height: minimum number of rows of the part.
        width: minimum number of columns.

    Returns:
        The index of the size, and the place of the part in it.
    """
    for number in range(len(sizes) - 1, -1, -1):
        scale = (sizes[0][0] / sizes[number][0], sizes[0][1] / sizes[number][1])
        part = smaller_part(box, scale, sizes[number])
        large = part[0].stop - part[0].start >= height and part[1].stop - part[1].start >= width
        if large or number == 0:
            break
    return number, part
