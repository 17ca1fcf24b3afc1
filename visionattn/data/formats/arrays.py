"""Arrays as images: ``.npy``, memory-mapped, and zarr, read by chunks. Axes are ``[H, W]`` or
``[H, W, C]``.
"""

import tokenize
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np

from visionattn.data.formats.reader import (
    Reader,
    check_page,
    choose_level,
    damage,
    lengths,
    path_of,
    pick,
)
from visionattn.data.geometry import Box


def open_reader(source: str | BinaryIO, page: int | None) -> Reader:
    """Open a zarr folder by its path, or the content of an ``.npy`` file."""
    if isinstance(source, str):
        with damage("zarr"):
            return ArrayImage(_open_zarr(source), None, page)
    path = path_of(source)
    with damage("array", tokenize.TokenError, MemoryError):
        # Objects would be unpickled, which may run any code.
        array = np.load(path or source, "r" if path else None, allow_pickle=False)
    return ArrayImage([array], source, page)


class ArrayImage(Reader):
    """An array, or the same image in several sizes, the largest first."""

    def __init__(self, levels: Sequence, file: BinaryIO | None, page: int | None):
        self._levels, self._file = levels, file
        check_page(page, 1)
        first = levels[0]
        if first.ndim not in (2, 3) or 0 in first.shape or first.dtype.kind not in "buif":
            raise ValueError(
                f"expected an array of numbers, [H, W] or [H, W, C], got {first.dtype} "
                f"{list(first.shape)}"
            )
        self.stored = first.shape[0], first.shape[1]
        self.bands = 1 if first.ndim == 2 else first.shape[2]
        self.dtype = np.dtype(first.dtype).newbyteorder("=")
        self.bits = 8 if self.dtype in (np.uint8, np.bool_) else None
        self._truth = self.dtype == np.bool_
        if self._truth:
            self.dtype = np.dtype(np.uint8)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Heights and widths of the levels."""
        return [tuple(level.shape[:2]) for level in self._levels]

    @property
    def piece(self) -> tuple[int, int]:
        """Rows and columns of a chunk; (1, 1) for an array in memory."""
        chunks = getattr(self._levels[0], "chunks", None)
        return (1, 1) if chunks is None else (int(chunks[0]), int(chunks[1]))

    def _take_level(self, level: int) -> None:
        self._levels = self._levels[level:]

    def _read(self, box: Box, height: int, width: int, bands: Sequence[int] | None) -> np.ndarray:
        number, (rows, columns) = choose_level(self.sizes, box, height, width)
        self.check_decoded(*lengths((rows, columns)))
        with damage("array"):
            pixels = np.asarray(self._levels[number][rows, columns])
        pixels = pick(pixels.reshape(*pixels.shape[:2], -1), bands).astype(self.dtype)
        return pixels * 255 if self._truth else pixels

    def close(self) -> None:
        """Close the file."""
        self._levels = []
        if self._file is not None:
            self._file.close()


def _open_zarr(path: str) -> list:
    """Return the array of a zarr folder, or the levels of a group with one image in several sizes
    (OME-NGFF), the largest first.
    """
    import zarr

    found = zarr.open(path, mode="r")
    if isinstance(found, zarr.Array):
        return [with_axes(found)]
    said = dict(found.attrs)
    images = said.get("ome", said).get("multiscales")
    if not images:
        raise ValueError("expected a zarr array, got a group; pass the folder of one of its arrays")
    axes = [axis["name"] if isinstance(axis, dict) else axis for axis in images[0].get("axes", ())]
    levels = [_Level(found[each["path"]], axes) for each in images[0]["datasets"]]
    return sorted(levels, key=lambda level: -level.shape[0])


def with_axes(array):
    """Return a zarr array unchanged or, if its axes are named y and x, as ``[H, W, C]``."""
    names = getattr(getattr(array, "metadata", None), "dimension_names", None) or ()
    return _Level(array, names) if {"y", "x"} <= set(names) else array


class _Level:
    """A zarr array with named axes, read as ``[H, W, C]``; time and depth must have length 1."""

    def __init__(self, array, axes: Sequence[str]):
        self._array, self._axes = array, [axis.lower() for axis in axes]
        lengths = dict(zip(self._axes, array.shape, strict=True))
        many = [axis for axis in self._axes if axis not in "yxc" and lengths[axis] > 1]
        if many or not {"y", "x"} <= lengths.keys():
            raise ValueError(f"expected zarr axes y, x, c, got {axes} of {list(array.shape)}")
        self.shape = lengths["y"], lengths["x"], lengths.get("c", 1)
        self.ndim, self.dtype = 3, array.dtype
        chunks = dict(zip(self._axes, array.chunks, strict=True))
        self.chunks = chunks["y"], chunks["x"]

    def __getitem__(self, part: tuple[slice, slice]) -> np.ndarray:
        chosen = {"y": part[0], "x": part[1], "c": slice(None)}
        pixels = np.asarray(self._array[tuple(chosen.get(axis, 0) for axis in self._axes)])
        order = [axis for axis in self._axes if axis in chosen]
        pixels = pixels.transpose([order.index(axis) for axis in "yxc" if axis in order])
        return pixels if pixels.ndim == 3 else pixels[..., None]
