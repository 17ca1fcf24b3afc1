"""The packed second-order features of TaylorShift, and the operands of each pass over one chunk of
heads: queries, keys, values, features, and the sums of the weights.

The second-order features phi2 of a vector are the products ``x_i x_j`` of its entries. Because
``x_i x_j = x_j x_i``, about half of the ``d * d`` products are enough. The width d is cut into
tiles of four, and for each pair of tiles ``I <= J`` all products are kept, which takes few
operations on contiguous memory:

    tile I   x_i * x_j  for i in I and all j from the start of I on

Products within one tile occur in both orders and have weight a, the others 2a. Tokens are
contiguous: ``x [g, d, T]`` gives ``[g, F, T]``.

Inputs are ``[B, h, tokens, width]`` of any strides and any floating point dtype. A chunk of tokens
is cast, normalized, masked and laid out with contiguous tokens, in float32 or float64. The sums of
weights need neither weights nor features:
``sum_j (a x_ij^2 + b x_ij + c) = a q^T (K^T K) q + b q . sum k + c M``.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from visionattn.ops.attention_sums import accumulation_dtype, wide
from visionattn.ops.chunking import (
    HeadChunk,
    chunks,
    head_chunks,
    in_turn,
    part_of,
    part_of_shared,
)
from visionattn.ops.operator import without_autocast

EPS = 1e-6
TILE = 4
BUFFER_BYTES = 1 << 23
CHUNK_TOKENS = (128, 512)
MOST_CANCELLATION = {torch.float32: 2.0**13, torch.float64: 2.0**28}
"""The largest ratio of the efficient form's terms to the mass of a query, by the dtype of sums.

Above it "auto" chooses the direct form. The error of the result, relative to the largest value, is
up to ``eps / 4`` times this limit: 2.5e-4 in float32, 1.5e-8 in float64.
"""


def unit(x: Tensor) -> Tensor:
    """Return ``x / max(|x|, 1e-6)`` over the last axis, with finite gradients at 0 too."""
    return x * x.square().sum(-1, keepdim=True).clamp(min=EPS * EPS).rsqrt()


def _tiles(packed: Tensor, d: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield for each tile its entries ``first .. last`` of x as a slice, and its products in
    ``packed [g, >= F, ...]`` as a view ``[g, last - first, d - first, ...]``.
    """
    begin = 0
    for rows in chunks(d, TILE):
        shape = rows.stop - rows.start, d - rows.start
        end = begin + shape[0] * shape[1]
        yield rows, packed[:, begin:end].unflatten(1, shape)
        begin = end


def num_features(d: int) -> int:
    """Return the number of products kept for a vector of width d: ``d (d + 4) / 2`` if d is a
    multiple of four.
    """
    return sum((rows.stop - rows.start) * (d - rows.start) for rows in chunks(d, TILE))


def feature_weights(d: int, a: float, like: Tensor) -> Tensor:
    """Return the weights ``[F, 1]`` of the kept products: a within a tile, 2a across tiles. They
    make up for the products that are left out.
    """
    weights = like.new_full((1, num_features(d), 1), 2 * a)
    for _, products in _tiles(weights, d):
        products[:, :, : products.shape[1]] = a
    return weights[0]


def chunk_tokens(d: int) -> int:
    """Return the number of tokens per chunk: a power of two for which the features of a head stay
    in cache.
    """
    least, largest = CHUNK_TOKENS
    return max(least, min(largest, 1 << (BUFFER_BYTES // (4 * num_features(d))).bit_length() - 1))


def fill_features(x: Tensor, out: Tensor) -> None:
    """Write the products of ``x [g, d, T]`` to ``out [g, >= F, T]``."""
    for rows, products in _tiles(out, x.shape[1]):
        torch.mul(x[:, rows, None], x[:, None, rows.start :], out=products)


def slopes(state: Tensor, d: int) -> Tensor:
    """Return ``S [g, d, e, d]`` for ``state [g, F, e]``.

    ``sum_jc x_j y_c S_jci`` is the gradient of ``phi2(x) state y`` with respect to ``x_i``.
    """
    full = state.new_zeros(state.shape[0], d, d, state.shape[2])
    for rows, products in _tiles(state, d):
        full[:, rows, rows.start :] = products
    return (full + full.transpose(1, 2)).mT


def pack(full: Tensor, out: Tensor) -> None:
    """Write the sums ``full [g, d, e, d]`` of ``x_j y_c x_i`` to ``out [g, >= F, e]``, packed like
    the products of ``phi2(x) y^T``.
    """
    for rows, products in _tiles(out, full.shape[1]):
        products.copy_(full[:, rows.start :, :, rows].permute(0, 3, 1, 2))


class Vectors:
    """Queries or keys of one chunk of heads, loaded some tokens at a time, and their gradients.

    With ``length [g, 1, 1]``, or 1, each vector becomes ``length x / max(|x|, 1e-6)``; None: it is
    unchanged. Tokens in ``absent [g, tokens]`` are 0.
    """

    def __init__(
        self, x: Tensor, dtype: torch.dtype, length: Tensor | int | None, absent: Tensor | None
    ):
        self.x, self.dtype, self.length, self.absent = x, dtype, length, absent

    def load(self, t: slice) -> Tensor:
        """Return the tokens ``t`` cast, masked and normalized, ``[g, T, d]``."""
        x = self.x[:, t].to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        if self.absent is not None:  # before any product: 0 times NaN is NaN
            x.masked_fill_(self.absent[:, t, None], 0)
        if self.length is None:
            return x
        norm = torch.linalg.vector_norm(x, dim=2, keepdim=True)
        self.free, self.inverse = norm > EPS, norm.clamp_(min=EPS).reciprocal_()
        self.scale, self.loaded = self.inverse * self.length, x
        return x * self.scale

    def store(self, grad: Tensor, t: slice, out: Tensor) -> Tensor | None:
        """Write the gradient of x to ``out[:, t]``, for ``grad [g, T, d]`` of the result loaded
        last; return the gradient of the length, ``[g]``, or None without a length.
        """
        grad = grad.to(self.dtype)
        if self.absent is not None:
            grad.masked_fill_(self.absent[:, t, None], 0)
        d_length = None
        if self.length is not None:
            unit = self.loaded.mul_(self.inverse)
            along = (grad * unit).sum(2, keepdim=True)
            d_length = along.sum((1, 2))
            grad.addcmul_(unit, along.mul_(self.free), value=-1).mul_(self.scale)
        out[:, t] = grad
        return d_length


class Values:
    """Values of one chunk of heads, or gradients of values; tokens in ``absent [g, tokens]`` are
    0.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, absent: Tensor | None = None):
        self.x, self.dtype, self.absent = x, dtype, absent

    def load(self, t: slice) -> Tensor:
        """Return the tokens ``t``, contiguous, ``[g, T, e]``."""
        x = self.x[:, t].to(self.dtype).contiguous()
        return x if self.absent is None else x.masked_fill(self.absent[:, t, None], 0)


class Pass:
    """The operands of one chunk of heads in the forward or the backward pass, and a buffer for
    features.
    """

    def __init__(self, chunk: HeadChunk, operands: tuple, dtype: torch.dtype):
        """Prepare the operands ``q, k, v, temperature, key_mask``.

        Queries and keys are in the dtype of sums, values and features in ``dtype``, the dtype of
        products.
        """
        q, k, v, temperature, key_mask = operands
        self.chunk, (images, heads) = chunk, chunk
        absent = None if key_mask is None else part_of_shared(~key_mask, chunk)
        length = one = None
        if temperature is not None:
            length = temperature[heads].to(wide(dtype)).repeat(images.stop - images.start)
            length, one = length[:, None, None], 1
        self.q = Vectors(part_of(q, chunk), wide(dtype), length, None)
        self.k = Vectors(part_of(k, chunk), wide(dtype), one, absent)
        self.v = Values(part_of(v, chunk), dtype, absent)
        self.absent, self.d = absent, q.shape[3]
        self.count = k.shape[2] if absent is None else (~absent).sum(1, dtype=wide(dtype))[:, None]
        self.dtype = dtype
        self.buffer: Tensor | None = None

    def slices(self, x: Tensor) -> list[slice]:
        """Return the chunks of tokens of ``x [..., tokens, d]``."""
        return in_turn(chunks(x.shape[-2], chunk_tokens(self.d)))

    def _rows(self, count: int, x: Tensor) -> Tensor:
        """Return memory ``[g, count, T]`` for ``x [g, d, T]``; the next call reuses it."""
        shape = x.shape[0], count, x.shape[2]
        if self.buffer is None or self.buffer.numel() < prod(shape):
            self.buffer = x.new_empty(prod(shape))
        return self.buffer[: prod(shape)].view(shape)

    def across(self, x: Tensor) -> Tensor:
        """Return ``x [g, T, d]`` as ``[g, d, T]``, in the dtype of products."""
        return x.to(self.dtype).mT.contiguous()

    def features(self, x: Tensor) -> Tensor:
        """Return ``[phi2(x), x, 1]`` of ``x [g, d, T]``: ``[g, F + d + 1, T]``."""
        out = self._rows(num_features(self.d) + self.d + 1, x)
        fill_features(x, out)
        out[:, -self.d - 1 : -1] = x
        out[:, -1] = 1
        return out

    def outer(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the products of each entry of ``[x, 1]`` with each entry of y, for ``x [g, d, T]``
        and ``y [g, c, T]``: ``[g, (d + 1) c, T]``.
        """
        (d, c), out = (x.shape[1], y.shape[1]), self._rows((self.d + 1) * y.shape[1], x)
        torch.mul(x[:, :, None], y[:, None], out=out[:, : d * c].unflatten(1, (d, c)))
        out[:, d * c :] = y
        return out

    def add_moments(self, key: Tensor, second: Tensor, first: Tensor) -> None:
        """Add ``K^T K`` to ``second [g, d, d]`` and ``sum k`` to ``first [g, d]`` for
        ``key [g, T, d]``.

        All are in the dtype of sums, because an error here affects the masses of all queries.
        """
        second.baddbmm_(key.mT, key)
        first += key.sum(1)

    def mass(
        self, query: Tensor, abc: tuple[float, float, float], second: Tensor, first: Tensor
    ) -> Tensor:
        """Return the sums of weights ``[g, T]`` of ``query [g, T, d]``."""
        a, b, c = abc
        slope = torch.baddbmm(b * first.unsqueeze(1), query, second, alpha=a)
        return slope.mul_(query).sum(2) + c * self.count


def heads_at_once(device: str) -> int:
    """Return how many buffers of heads are processed together: one per CPU thread, up to 8."""
    return min(torch.get_num_threads(), 8) if device == "cpu" else 1


def passes(operands: tuple, dtype: torch.dtype) -> Iterator[Pass]:
    """Yield the operands of each chunk of heads."""
    q, k = operands[:2]
    tokens = max(1, min(max(q.shape[2], k.shape[2]), chunk_tokens(q.shape[3])))
    rows = num_features(q.shape[3]) + q.shape[3] + 1
    heads = max(1, BUFFER_BYTES // (dtype.itemsize * rows * tokens))
    heads *= heads_at_once(q.device.type)
    for chunk in in_turn(head_chunks(q.shape[0], q.shape[1], heads)):
        yield Pass(chunk, operands, dtype)


def cancels_little(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, abc: tuple[float, float, float]
) -> bool:
    """Return whether the efficient form keeps precision: for every query, the terms of its sums are
    at most ``MOST_CANCELLATION`` times its mass.

    The size of the terms is ``a |q|^2 |k|^2 + c`` for each key. They have either sign: if long q
    and k are orthogonal, large terms cancel and their rounding errors remain.
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
            # A lower bound of the mass: if it suffices, the masses are not computed.
            least = (c - b * b / (4 * a)) * count
            if (terms <= MOST_CANCELLATION[dtype] * least).all():
                continue
            groups, _, d = step.q.x.shape
            moments = terms.new_zeros(groups, d, d), terms.new_zeros(groups, d)
            step.add_moments(step.k.load(slice(None)), *moments)
            mass = step.mass(step.q.load(slice(None)), abc, *moments)
            if (terms > MOST_CANCELLATION[dtype] * mass.maximum(least)).any():
                return False
    return True
