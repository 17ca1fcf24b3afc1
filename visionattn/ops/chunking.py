"""Chunks of tensors ``[B, h, ...]`` that stay in cache.

A chunk is a pair of slices (images, heads). Its part of a tensor is ``[g, ...]`` with
``g = images * heads``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

HeadChunk = tuple[slice, slice]
Piece = TypeVar("Piece")
_FEW: ContextVar[bool] = ContextVar("few", default=False)


@contextmanager
def only_few() -> Iterator[None]:
    """Let loops over ``in_turn`` skip most pieces: a fast way to measure peak memory.

    Results computed within this context are incomplete.
    """
    before = _FEW.set(True)
    try:
        yield
    finally:
        _FEW.reset(before)


def in_turn(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that a loop shall process: all of them, or a few within ``only_few``.

    The first two and the last piece reach the peak memory of all: the second is computed while the
    results of the first still exist, and the last may have another size. Each piece must write its
    result into existing memory.
    """
    return pieces[:2] + pieces[2:][-1:] if _FEW.get() else pieces


def chunks(length: int, size: int) -> list[slice]:
    """Return slices of at most ``size`` that cover ``0 .. length``."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def head_chunks(batch: int, heads: int, size: int) -> list[HeadChunk]:
    """Return chunks of about ``size`` heads: some heads of one image, or all heads of some
    images.
    """
    if not heads:
        return []
    if size < heads:
        return [(slice(b, b + 1), h) for b in range(batch) for h in chunks(heads, max(1, size))]
    return [(b, slice(0, heads)) for b in chunks(batch, size // heads)]


def part_of(x: Tensor, chunk: HeadChunk) -> Tensor:
    """Return the chunk's part ``[g, ...]`` of ``x [B, h, ...]``.

    It is a view for a chunk of one image or for contiguous memory, else a copy.
    """
    return x[chunk].flatten(0, 1)


def part_of_shared(x: Tensor, chunk: HeadChunk) -> Tensor:
    """Return the chunk's part ``[1 or g, ...]`` of ``x [1 or B, ...]``, which all heads share."""
    images, heads = chunk
    return x if x.shape[0] == 1 else x[images].repeat_interleave(heads.stop - heads.start, 0)


def add_of_heads(total: Tensor, part: Tensor, heads: slice) -> None:
    """Add ``part [g, ...]`` of some images and the given heads to ``total [h or 1, ...]``, the sum
    over all images (with 1, over all heads too).
    """
    part = part.unflatten(0, (-1, heads.stop - heads.start)).sum(0)
    if total.shape[0] == 1:
        total += part.sum(0, keepdim=True)
    else:
        total[heads] += part
