"""Images read in parts: arrays, memory maps, zarr, and files in every format.

This module owns parts of images, the conversion of a band of rows to a model's input, and the
errors of unreadable parts. ``visionattn.data.formats`` reads the files.
"""

import hashlib
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from visionattn.data.formats import (
    DAMAGED_IMAGE,
    NotAsAsked,
    Openable,
    Reader,
    ReadOptions,
    as_flags,
    bands_of,
    channels_of,
    open_image,
    options_of,
    settle_one,
)
from visionattn.data.formats.arrays import ArrayImage, with_axes
from visionattn.data.formats.pillow import PillowImage
from visionattn.data.formats.reader import Closing, one_line, path_of, pick
from visionattn.data.formats.value_meaning import join
from visionattn.data.geometry import Box
from visionattn.data.sources import KNOWN_BYTES, ends_of
from visionattn.models.weights import DataSpec

MUCH = 2**30
"""Size in bytes of a row of tiles, strips or chunks above which a warning is given."""


class UnreadablePart(ValueError):
    """A part of an image cannot be read; the message names its rows and the file."""


class ImageSource(Closing):
    """An open image that is read in parts, a context manager; ``open_source`` makes it.

    Only one thread may read at a time; it may be any thread.

    Attributes:
        name: name of the image in messages.
        height: in pixels.
        width: in pixels.
        channels: number of bands that ``read`` returns.
        dtype: dtype of the result of ``read``.
        level: level of a pyramid; 0 is the largest.
        georeference: place on the earth, at this level; None if the file does not state it.
        whole: whether its format has no parts.
        held_bytes: memory that reading keeps in addition to the result of ``read``: the whole image
            if its format has no parts, else the row of tiles, strips or chunks in which a band
            ends.
    """

    def __init__(
        self,
        reader: Reader,
        name: str,
        level: int,
        options: ReadOptions | None,
        path: str,
    ):
        """Store an open reader, whose level is already set, and the path of its file, if any."""
        self._reader, self._options, self._path = reader, options, path
        self._bands = None if options is None else bands_of(reader, options)
        self.name, self.level = name, level
        self.height, self.width = reader.height, reader.width
        self.channels = reader.bands if self._bands is None else len(self._bands)
        self.dtype, self.georeference = reader.dtype, reader.georeference
        # Number of picture rows per tile, strip or chunk, and the first row of the first whole one.
        side = 1 if reader.turn.transpose else 0
        flipped = reader.turn.flip_columns if side else reader.turn.flip_rows
        self._piece_rows = max(1, min(reader.piece[side], self.height))
        self._first_piece = self.height % self._piece_rows if flipped else 0
        self._kept: tuple[int, slice, np.ndarray] | None = None
        self.whole = isinstance(reader, PillowImage)
        rows = self.height if self.whole else self._piece_rows
        row_bytes = self.width * reader.bands * self.dtype.itemsize
        self.held_bytes = rows * row_bytes if rows > 1 else 0

    def read(self, rows: slice, columns: slice) -> np.ndarray:
        """Read a part: the file's values in their own type, or colors, or float32 in physical
        units.

        Consecutive bands decode each tile, strip or chunk once, wherever they end.

        Args:
            rows: ``slice(start, stop)`` within the image.
            columns: likewise.

        Returns:
            ``[h, w, channels]``; a masked array if some pixels have no data.

        Raises:
            UnreadablePart: it cannot be read; one line with the rows and the file.
            ValueError: there are no such rows or columns.
        """
        sides = (rows, self.height, "rows"), (columns, self.width, "columns")
        for part, most, what in sides:
            if part.step not in (None, 1) or not 0 <= part.start < part.stop <= most:
                raise ValueError(
                    f"expected {what} within 0 to {most} of {self.name}, got {part.start} to "
                    f"{part.stop}"
                )
        try:
            return self._read(rows, columns)
        except DAMAGED_IMAGE as error:
            columns_too = "" if columns == slice(0, self.width) else f", {_said(columns)} across,"
            raise UnreadablePart(
                f"rows {_said(rows)}{columns_too} of {self.name} cannot be read: "
                f"{as_flags(one_line(error))}"
            ) from error

    def _read(self, rows: slice, columns: slice) -> np.ndarray:
        start, parts = rows.start, []
        if self._kept is not None:
            first, across, pixels = self._kept
            if across == columns and first <= start < first + len(pixels):
                stop = min(rows.stop, first + len(pixels))
                parts.append(pixels[start - first : stop - first])
                start = stop
        if start < rows.stop:
            last = min(self._piece_start(rows.stop - 1) + self._piece_rows, self.height)
            box = Box(start, columns.start, last - start, columns.stop - columns.start)
            pixels = self._reader.read(box, box.height, box.width, self._bands)
            parts.append(pixels[: rows.stop - start])
            self._kept = None
            if last > rows.stop:
                first = max(start, self._piece_start(rows.stop - 1))
                rest = pixels[first - start :]
                # A view would keep the whole band in memory.
                rest = rest.copy() if 2 * len(rest) < len(pixels) else rest
                self._kept = first, columns, rest
        return join(parts)

    def _piece_start(self, row: int) -> int:
        """Return the first row of the tile, strip or chunk that contains a row; the first one may
        start above the image.
        """
        return row - (row - self._first_piece) % self._piece_rows

    def prepare(self, spec: DataSpec) -> Callable[[np.ndarray], Tensor]:
        """Return a function that turns pixels into a model's input, with the bands, value range and
        normalization used for reading files at their own size.

        If the value range is unknown, the whole image is read once, here, for its largest value,
        with a warning.

        Args:
            spec: the model's specification of images.

        Returns:
            A function of pixels ``[h, w, channels]`` that returns float32 ``[1, in_chans, h, w]``.
            It raises ``NotAsAsked`` for values without a known range, or above it.

        Raises:
            ValueError: the model needs other bands or another number of bands; one line.
            UnreadablePart, or one of ``DAMAGED_IMAGE``: the image cannot be read.
        """
        options = self._options or options_of(spec)
        try:
            wanted = bands_of(self._reader, options)
            options, lines = settle_one(self._reader, self.name, options)
        except DAMAGED_IMAGE as error:
            raise _renamed(self.name, error) from error
        channels = 1 if spec.encoding == "grey_one_hot" else spec.in_chans
        if options.channels != channels:
            raise NotAsAsked(
                f"{self.name}: expected {channels} channels, as the model's, got {options.channels}"
            )
        for line in lines:
            warnings.warn(as_flags(line), stacklevel=2)
        chosen = [band - 1 for band in wanted] if self._options is None and wanted else None

        def prepare(pixels: np.ndarray) -> Tensor:
            try:
                image = channels_of(pick(pixels, chosen), self._reader, options)
            except NotAsAsked as error:
                raise _renamed(self.name, error) from error
            if spec.encoding == "grey_one_hot" and image.dtype != np.uint8:
                image = np.rint(image * 255).astype(np.uint8)
            planes = np.array(rearrange(image, "h w c -> 1 c h w"), order="C")
            return spec.prepare(torch.from_numpy(planes))

        return prepare

    def identity(self) -> dict[str, Any]:
        """Return a fingerprint of the image and how it is read, as JSON types.

        It has the file name, the number of bytes, and a digest of the first and last bytes. For
        arrays and folders it has a digest of the first, the middle and the last row instead.
        """
        found = {"name": os.path.basename(self.name), "height": self.height, "width": self.width}
        found |= {"level": self.level, "bands": self._bands, "dtype": self.dtype.str}
        found |= {"page": None if self._options is None else self._options.page}
        if os.path.isfile(self._path):
            with open(self._path, "rb") as file:
                known = ends_of(file, KNOWN_BYTES)
            size = os.path.getsize(self._path)
            return found | {"bytes": size, "digest": hashlib.sha256(known).hexdigest()}
        digest = hashlib.sha256()
        for row in (0, self.height // 2, self.height - 1):
            box = Box(row, 0, 1, self.width)
            digest.update(self._reader.read(box, 1, self.width, self._bands).tobytes())
        return found | {"bytes": None, "digest": digest.hexdigest()}

    def close(self) -> None:
        """Close the file; an array stays."""
        self._kept = None
        self._reader.close()


def open_source(
    image: Openable | np.ndarray | Tensor | Any,
    *,
    level: int | None = None,
    options: ReadOptions | None = None,
    name: str | None = None,
) -> ImageSource:
    """Open an image of any size for reading in parts.

    JPEG, PNG and other formats without parts are decoded completely when the first part is read,
    and kept; a warning gives the memory.

    Args:
        image: an array or memory map ``[H, W]`` or ``[H, W, C]``, or any object that can be sliced
            like one; a zarr array, whose axes may also be named y, x and c, in any order; a tensor
            ``[H, W]`` or ``[C, H, W]``; a path of a file in any format of ``docs/files.md``, or an
            open file.
        level: level of a pyramid (a slide, OME-NGFF, a TIFF with smaller copies, a raster with
            overviews), from 0, the largest; None: 0.
        options: bands, page, value range; ``options_of(spec)`` gives a model's. None: all bands;
            ``prepare`` then selects the model's.
        name: name in messages; None: its path, or "the array".

    Raises:
        ValueError, OSError: there is no such image, level, band or page, or it cannot be read; one
            line with its name.
    """
    with ExitStack() as failed:
        path = os.fspath(image) if isinstance(image, (str, os.PathLike)) else path_of(image)
        stated = getattr(image, "name", "") if hasattr(image, "read") else ""
        name = name or path or (stated if isinstance(stated, str) else "")
        name = name or f"the {'array' if hasattr(image, 'shape') else 'image'}"
        try:
            reader = _open(image, options or ReadOptions())
            failed.callback(reader.close)
            reader.take_level(level or 0)
            source = ImageSource(reader, name, level or 0, options, path)
        except DAMAGED_IMAGE as error:
            raise _renamed(name, error) from error
        failed.pop_all()
    if source.whole or source.held_bytes > MUCH:
        how = "cannot be read in parts; it is decoded completely and"
        if not source.whole:
            how = f"is stored in parts of {source._piece_rows:,} rows, which are"
        warnings.warn(f"{name} {how} kept, {source.held_bytes:,} bytes", stacklevel=2)
    return source


def _open(image: Any, options: ReadOptions) -> Reader:
    if isinstance(image, Tensor):
        # numpy has no bfloat16
        image = (image.float() if image.dtype == torch.bfloat16 else image).detach().cpu().numpy()
        image = image.transpose(1, 2, 0) if image.ndim == 3 else image
    if hasattr(image, "shape") and hasattr(image, "dtype") and hasattr(image, "__getitem__"):
        reader = ArrayImage([with_axes(image)], None, options.page)
        reader.most_px = options.max_pixels
        return reader
    if not isinstance(image, (str, os.PathLike)) and not hasattr(image, "read"):
        raise ValueError(f"expected a path, an array or a tensor, got {type(image).__name__}")
    return open_image(image, options)


def _said(part: slice) -> str:
    return f"{part.start:,} to {part.stop:,}"


def _renamed(name: str, error: BaseException) -> Exception:
    """Return an error with the name of the image in its message."""
    if isinstance(error, OSError) and error.filename:
        return error
    kind = type(error) if isinstance(error, NotAsAsked) else ValueError
    return kind(f"{name}: {as_flags(one_line(error))}")
