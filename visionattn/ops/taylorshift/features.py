"""The second-order features of TaylorShift, packed, and what each pass over one chunk of heads
needs: queries, keys and values as it works on them, features, and the sums of the weights.

All products of a vector of width d with itself are ``d * d``, but ``x_i x_j = x_j x_i``: half are
enough. Here d is cut into tiles of four and of each pair of tiles ``I <= J`` all products are kept,
which needs few operations on long runs of memory:

    tile I   x_i * x_j  for i in I and all j from the start of I on

Products within one tile occur in both orders and weigh a, the others 2a. Tokens are contiguous:
``x [g, d, T]`` gives ``[g, F, T]``.

Tensors come as the caller has them: ``[B, h, tokens, width]`` of any strides and any floating
dtype. A chunk of tokens is cast, normalised, masked and laid out with tokens contiguous, in float32
or float64; gradients go the same way back. Sums of weights need neither weights nor features:
``sum_j (a x_ij^2 + b x_ij + c) = a q^T (K^T K) q + b q . sum k + c M``.
"""

from collections.abc import Iterator

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
from visionattn.ops.operator import without_autocast
from visionattn.ops.sums import accumulation_dtype, wide

EPS = 1e-6
TILE = 4
BUFFER_ELEMENTS = 1 << 20
CHUNK_TOKENS = (128, 1024)
MOST_CANCELLATION = {torch.float32: 2.0**13, torch.float64: 2.0**28}
"""How many times a query's mass the terms of its sums may be in the efficient form that "auto"
takes, by the dtype of the sums. The error of the result is up to a quarter of eps times as many of
the largest value: 2.5e-4 in float32, 1.5e-8 in float64."""


def unit(x: Tensor) -> Tensor:
    """Return ``x / max(|x|, 1e-6)`` over the last axis, with finite gradients at 0 too."""
    return x * x.square().sum(-1, keepdim=True).clamp(min=EPS * EPS).rsqrt()


def _tiles(d: int) -> list[tuple[slice, int, int]]:
    """Return for each tile its entries of x, how many entries it is multiplied by, and where its
    products begin.
    """
    tiles, begin = [], 0
    for rows in chunks(d, TILE):
        tiles.append((rows, d - rows.start, begin))
        begin += (rows.stop - rows.start) * (d - rows.start)
    return tiles


def num_features(d: int) -> int:
    """Count the products that are kept of a vector of width d: ``d (d + 4) / 2`` where d is a
    multiple of four.
    """
    rows, width, begin = _tiles(d)[-1]
    return begin + (rows.stop - rows.start) * width


def feature_weights(d: int, a: float, like: Tensor) -> Tensor:
    """Return weights ``[F, 1]`` that make the products kept count like all ``d * d``: a within a
    tile, 2a across.
    """
    weights = like.new_full((num_features(d), 1), 2 * a)
    for rows, width, begin in _tiles(d):
        size = rows.stop - rows.start
        weights[begin : begin + size * width].view(size, width)[:, :size] = a
    return weights


def chunk_tokens(d: int) -> int:
    """Return how many tokens' features are held at once: a power of two for which a head's features
    stay in cache.
    """
    fewest, most = CHUNK_TOKENS
    return max(fewest, min(most, 1 << (BUFFER_ELEMENTS // num_features(d)).bit_length() - 1))


def fill_features(x: Tensor, out: Tensor) -> None:
    """Write the products of ``x [g, d, T]`` to ``out [g, >= F, T]``."""
    for rows, width, begin in _tiles(x.shape[1]):
        size = rows.stop - rows.start
        products = out[:, begin : begin + size * width].unflatten(1, (size, width))
        torch.mul(x[:, rows, None], x[:, None, rows.start :], out=products)


def add_features_backward(x: Tensor, grad: Tensor, out: Tensor) -> None:
    """Add to ``out [g, d, T]`` the gradient of ``x`` for that of its products,
    ``grad [g, >= F, T]``.
    """
    buffer = None
    for rows, width, begin in _tiles(x.shape[1]):
        size = rows.stop - rows.start
        products = grad[:, begin : begin + size * width].unflatten(1, (size, width))
        buffer = torch.empty_like(products) if buffer is None else buffer
        product = buffer[:, :size, :width]
        torch.mul(products, x[:, None, rows.start :], out=product)
        out[:, rows] += product.sum(2, dtype=out.dtype)
        torch.mul(products, x[:, rows, None], out=product)
        out[:, rows.start :] += product.sum(1, dtype=out.dtype)


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


def passes(operands: tuple, dtype: torch.dtype) -> Iterator[Pass]:
    """Yield what each chunk of heads needs."""
    q, k = operands[:2]
    tokens = max(1, min(max(q.shape[2], k.shape[2]), chunk_tokens(q.shape[3])))
    heads = max(1, BUFFER_ELEMENTS // ((num_features(q.shape[3]) + q.shape[3] + 1) * tokens))
    heads *= heads_at_once(q.device.type)
    for chunk in in_turn(head_chunks(q.shape[0], q.shape[1], heads)):
        yield Pass(chunk, operands, dtype)


def fill_mass(
    step: Pass,
    q: Tensor,
    k: Tensor,
    abc: tuple[float, float, float],
    moments: tuple[Tensor, Tensor],
    out: Tensor,
):
    """Fill the chunk's ``K^T K [g, d, d]``, ``sum k [g, d]`` and sums of weights ``out [g, N]``."""
    (a, b, c), (second, first) = abc, moments
    second.zero_(), first.zero_()
    for t in step.slices(k):
        key = step.k.load(t)
        second.baddbmm_(key, key.mT)
        first += key.sum(2)
    for t in step.slices(q):
        query = step.q.load(t)
        score = torch.baddbmm((b * first).unsqueeze(2), second, query, alpha=a)
        out[:, t] = (score * query).sum(1) + c * step.count


class MassGradient:
    """Gradients through ``a q^T (K^T K) q + b q . sum k`` of one chunk of heads, for
    ``d_mass [g, N]``.
    """

    def __init__(self, d_mass: Tensor, second: Tensor, first: Tensor, a: float, b: float):
        self.d_mass, self.a, self.b = d_mass, a, b
        self.second, self.slope = second, b * first.unsqueeze(2)
        self.d_second, self.d_first = torch.zeros_like(second), torch.zeros_like(first)

    def add_to_queries(self, query: Tensor, t: slice, out: Tensor) -> Tensor:
        """Add to ``out [g, d, T]``, and keep what the keys will need."""
        z = self.d_mass[:, None, t]
        self.d_second.baddbmm_(query * z, query.mT, alpha=self.a)
        self.d_first.add_((query * z).sum(2), alpha=self.b)
        return out.addcmul_(z, torch.baddbmm(self.slope, self.second, query, alpha=2 * self.a))

    def add_to_keys(self, key: Tensor, out: Tensor) -> Tensor:
        """Add to ``out [g, d, T]``; the queries come first."""
        return out.baddbmm_(self.d_second, key, alpha=2).add_(self.d_first.unsqueeze(2))


def cancels_little(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, abc: tuple[float, float, float]
) -> bool:
    """Tell whether for each query the terms of its sums, ``a |q|^2 |k|^2 + c`` of each key, are no
    more than ``MOST_CANCELLATION`` times its mass.

    Products of features have either sign. Where q is orthogonal to keys and both are long, large
    ones cancel, and their rounding stays.
    """
    (a, b, c), dtype = abc, accumulation_dtype(q, k, v)
    with torch.no_grad(), without_autocast(q):
        for step in passes((q, k, v, None, key_mask), dtype):
            of_queries, of_keys = (
                torch.linalg.vector_norm(x, dim=2, dtype=dtype).square_()
                for x in (step.q.x, step.k.x)
            )
            if step.absent is not None:
                of_keys.masked_fill_(step.absent, 0)
            count = torch.as_tensor(step.count, dtype=dtype)
            terms = a * of_queries * of_keys.sum(1, keepdim=True) + c * count
            # No mass is less than this: where it is enough, the masses themselves are not needed.
            least = (c - b * b / (4 * a)) * count
            if (terms <= MOST_CANCELLATION[dtype] * least).all():
                continue
            groups, n, d = step.q.x.shape
            moments = q.new_empty(groups, d, d, dtype=dtype), q.new_empty(groups, d, dtype=dtype)
            mass = torch.empty_like(terms)
            fill_mass(step, q, k, abc, moments, mass)
            if (terms > MOST_CANCELLATION[dtype] * mass.maximum(least)).any():
                return False
    return True
