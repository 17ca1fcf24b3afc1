"""Cutting tensors ``[B, h, ...]`` into pieces that stay in cache."""

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
    """Let loops over ``in_turn`` do a few pieces alone, for whoever counts memory and reads no
    results.
    """
    before = _FEW.set(True)
    try:
        yield
    finally:
        _FEW.reset(before)


def in_turn(pieces: list[Piece]) -> list[Piece]:
    """Return the pieces that a loop works through, where each writes to what is there already and
    leaves nothing behind: all of them, or within ``only_few`` as many as hold as much memory. The
    second is made beside what is left of the first, and the last may be smaller.
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
    """Return the part ``[g, ...]`` of ``x [B, h, ...]``: a view where it is of one image or of
    contiguous memory, else a copy.
    """
    return x[chunk].flatten(0, 1)


def part_of_shared(x: Tensor, chunk: HeadChunk) -> Tensor:
    """Return the part of what all heads share, ``[1 or B, ...]``, as ``[1 or g, ...]``."""
    images, heads = chunk
    return x if x.shape[0] == 1 else x[images].repeat_interleave(heads.stop - heads.start, 0)


def add_of_heads(total: Tensor, part: Tensor, heads: slice) -> None:
    """Add ``part [g, ...]`` of some images and heads to ``total [h or 1, ...]``, which all images,
    or all heads too, share.
    """
    part = part.unflatten(0, (-1, heads.stop - heads.start)).sum(0)
    if total.shape[0] == 1:
        total += part.sum(0, keepdim=True)
    else:
        total[heads] += part
