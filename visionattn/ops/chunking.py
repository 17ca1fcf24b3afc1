"""Splitting of tensors ``[B, h, ...]`` into pieces that stay in cache."""

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
    """Let loops over ``in_turn`` process only a few pieces, for measuring memory without reading
    results.
    """
    before = _FEW.set(True)
    try:
        yield
    finally:
        _FEW.reset(before)


def in_turn(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that a loop processes, where each piece writes into existing memory.

    Normally all pieces. Within ``only_few``, only as many as reach the same peak memory: the second
    piece is made while the result of the first is still held, and the last may be smaller.
    """
    return pieces[:2] + pieces[2:][-1:] if _FEW.get() else pieces


def chunks(length: int, size: int) -> list[slice]:
    """Return slices of at most ``size`` that cover ``0 .. length``."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def head_chunks(batch: int, heads: int, size: int) -> list[HeadChunk]:
    """Return pairs of slices (images, heads) of about ``size`` heads: heads of one image, or whole
    images.
    """
    if not heads:
        return []
    if size < heads:
        return [(slice(b, b + 1), h) for b in range(batch) for h in chunks(heads, max(1, size))]
    return [(b, slice(0, heads)) for b in chunks(batch, size // heads)]


def part_of(x: Tensor, chunk: HeadChunk) -> Tensor:
    """Return the part ``[g, ...]`` of ``x [B, h, ...]``: a view if it is one image or contiguous
    memory, else a copy.
    """
    return x[chunk].flatten(0, 1)


def part_of_shared(x: Tensor, chunk: HeadChunk) -> Tensor:
    """Return the chunk's part ``[1 or g, ...]`` of a shared tensor ``[1 or B, ...]``."""
    images, heads = chunk
    return x if x.shape[0] == 1 else x[images].repeat_interleave(heads.stop - heads.start, 0)


def add_of_heads(total: Tensor, part: Tensor, heads: slice) -> None:
    """Add ``part [g, ...]`` of some images and heads to ``total [h or 1, ...]``, which all images
    share (with 1, all heads too).
    """
    part = part.unflatten(0, (-1, heads.stop - heads.start)).sum(0)
    if total.shape[0] == 1:
        total += part.sum(0, keepdim=True)
    else:
        total[heads] += part
