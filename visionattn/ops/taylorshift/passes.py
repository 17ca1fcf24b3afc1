"""What each pass of TaylorShift over one chunk of heads needs: queries, keys and values as it works
on them, and features.

Tensors come as the caller has them: ``[B, h, tokens, width]`` of any strides and any floating
dtype. A chunk of tokens is cast, normalised, masked and laid out with tokens contiguous; gradients
go the same way back. The features of a token are ``[phi2(x), x, 1]``: what they are summed with,
and why, ``eager.py`` knows.
"""

import torch
from torch import Tensor

from visionattn.ops.chunking import (
    HeadChunk,
    chunks,
    head_chunks,
    in_turn,
    part_of,
    part_of_shared,
)
from visionattn.ops.sums import wide
from visionattn.ops.taylorshift.features import (
    BUFFER_ELEMENTS,
    EPS,
    add_features_backward,
    chunk_tokens,
    fill_features,
    num_features,
)


class Vectors:
    """Queries or keys of one chunk of heads, token chunk by token chunk as ``[g, d, T]``, and the
    way back for gradients.

    With ``length [g]`` they are brought to that length (``x / max(|x|, 1e-6)`` times it); those of
    ``absent [g, tokens]`` are 0.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, length: Tensor | None, absent: Tensor | None):
        self.x, self.dtype, self.absent = x, dtype, absent
        self.length = None if length is None else length[:, None, None]

    def load(self, t: slice) -> Tensor:
        """Cast, normalised and masked, ``[g, d, T]``."""
        x = self.x[:, t].mT.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        if self.absent is not None:  # before anything else: NaN would pass through products with 0
            x.masked_fill_(self.absent[:, None, t], 0)
        if self.length is not None:
            squares = x.square().sum(1, keepdim=True)
            self.free = squares > EPS * EPS
            self.inverse = squares.clamp_(min=EPS * EPS).rsqrt_()
            self.unit = x.mul_(self.inverse)
            x = self.unit * self.length
        return x

    def store(self, grad: Tensor, t: slice, out: Tensor) -> Tensor | None:
        """Write the gradient to ``out[:, t]``, for that of what was loaded last; returns that of
        the length, ``[g]``.
        """
        if self.absent is not None:
            grad = grad.masked_fill_(self.absent[:, None, t], 0)
        if self.length is None:
            out[:, t] = grad.mT
            return None
        along = (grad * self.unit).sum(1, keepdim=True)
        d_length = along.sum((1, 2))
        grad = grad.addcmul_(self.unit, along.mul_(self.free), value=-1)
        out[:, t] = grad.mul_(self.inverse * self.length).mT
        return d_length


class Values:
    """Values, or gradients, of one chunk of heads as ``[g, T, e]``; those of ``absent [g, tokens]``
    are 0.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, absent: Tensor | None = None):
        self.x, self.dtype, self.absent = x, dtype, absent

    def load(self, t: slice) -> Tensor:
        x = self.x[:, t].to(self.dtype)
        return x if self.absent is None else x.masked_fill(self.absent[:, t, None], 0)


class Pass:
    """What one chunk of heads needs in either direction: its operands, a buffer of features, and
    the slices of tokens.
    """

    def __init__(self, chunk: HeadChunk, operands: tuple, dtype: torch.dtype):
        """Vectors are in the dtype of sums, values and features in ``dtype``, that of products."""
        q, k, v, temperature, key_mask = operands
        self.chunk, (images, heads) = chunk, chunk
        absent = None if key_mask is None else part_of_shared(~key_mask, chunk)
        length = one = None
        if temperature is not None:
            length = temperature[heads].to(wide(dtype)).repeat(images.stop - images.start)
            one = torch.ones_like(length)
        self.q = Vectors(part_of(q, chunk), wide(dtype), length, None)
        self.k = Vectors(part_of(k, chunk), wide(dtype), one, absent)
        self.v = Values(part_of(v, chunk), dtype, absent)
        self.absent, self.d = absent, q.shape[3]
        self.count = k.shape[2] if absent is None else (~absent).sum(1, dtype=wide(dtype))[:, None]
        self.dtype = dtype
        self.buffer = None

    def slices(self, x: Tensor) -> list[slice]:
        return in_turn(chunks(x.shape[-2], chunk_tokens(self.d)))

    def features(self, x: Tensor, absent: Tensor | None = None) -> Tensor:
        """Return ``[phi2(x), x, 1]`` of ``x [g, d, T]``, in a buffer that the next call uses again:
        ``[g, F + d + 1, T]``.
        """
        size, f = (x.shape[0], num_features(self.d) + self.d + 1, x.shape[2]), num_features(self.d)
        if self.buffer is None or self.buffer.shape != size:
            self.buffer = x.new_empty(size, dtype=self.dtype)
        x = x.to(self.dtype)
        fill_features(x, self.buffer)
        self.buffer[:, f:-1] = x
        self.buffer[:, -1] = 1 if absent is None else ~absent
        return self.buffer  # type: ignore[return-value]

    def features_backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of ``x [g, d, T]`` for that of its features."""
        out = grad[:, num_features(self.d) : -1].to(x.dtype, copy=True)
        add_features_backward(x.to(grad.dtype), grad, out)
        return out


def heads_at_once(device: str) -> int:
    """Return how many heads, or groups of them that fit one buffer, are worked on together: one for
    each thread of a processor, up to 8.
    """
    return min(torch.get_num_threads(), 8) if device == "cpu" else 1


def passes(operands: tuple, dtype: torch.dtype):
    q, k = operands[:2]
    tokens = max(1, min(max(q.shape[2], k.shape[2]), chunk_tokens(q.shape[3])))
    heads = max(1, BUFFER_ELEMENTS // ((num_features(q.shape[3]) + q.shape[3] + 1) * tokens))
    heads *= heads_at_once(q.device.type)
    for chunk in in_turn(head_chunks(q.shape[0], q.shape[1], heads)):
        yield Pass(chunk, operands, dtype)
