"""The second-order features of TaylorShift, packed: filling them in, reducing tokens to a state,
reading the state, and back.

All products of a vector of width d with itself are ``d * d``, but ``x_i x_j = x_j x_i``: half are
enough. Here d is cut into tiles of four and of each pair of tiles ``I <= J`` all products are kept,
which needs few operations on long runs of memory:

    tile I   x_i * x_j  for i in I and all j from the start of I on

Products within one tile occur in both orders and weigh a, the others 2a. Tokens are contiguous:
``x [g, d, T]`` gives ``[g, F, T]``. Everything is in float32 or float64, without masks and, but for
``unit``, without autograd.
"""

import torch
from torch import Tensor

from visionattn.ops.chunking import chunks

EPS = 1e-6
TILE = 4
BUFFER_ELEMENTS = 1 << 20
CHUNK_TOKENS = (128, 1024)


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


def _head_and_token_chunks(x: Tensor) -> list[tuple[slice, slice]]:
    """Return pairs of slices (heads, tokens) of ``x [G, N, d]`` whose features stay in cache."""
    tokens = max(1, min(x.shape[1], chunk_tokens(x.shape[2])))
    heads = max(1, BUFFER_ELEMENTS // (num_features(x.shape[2]) * tokens))
    return [(g, t) for g in chunks(x.shape[0], heads) for t in chunks(x.shape[1], tokens)]


def _features(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [g, T, d]`` as ``[g, d, T]``, and its products ``[g, F, T]``."""
    x = x.mT.contiguous()
    out = x.new_empty(x.shape[0], num_features(x.shape[1]), x.shape[2])
    fill_features(x, out)
    return x, out


def reduce_features(x: Tensor, y: Tensor) -> Tensor:
    """Return ``phi2(x)^T y``: ``[G, F, e]`` for ``x [G, N, d]`` and ``y [G, N, e]``."""
    state = y.new_zeros(x.shape[0], num_features(x.shape[2]), y.shape[2])
    for g, t in _head_and_token_chunks(x):
        state[g].baddbmm_(_features(x[g, t])[1], y[g, t])
    return state


def expand_features(x: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """Add ``phi2(x) state`` to ``out [G, N, e]`` in place, for ``x [G, N, d]`` and
    ``state [G, F, e]``.
    """
    for g, t in _head_and_token_chunks(x):
        out[g, t].baddbmm_(_features(x[g, t])[1].mT, state[g])
    return out


def expand_features_backward(x: Tensor, state: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Add to ``out [G, N, d]`` in place the gradient of ``sum(phi2(x) state * y)`` with respect to
    ``x``.
    """
    for g, t in _head_and_token_chunks(x):
        own = x[g, t].mT.contiguous()
        grad = torch.zeros_like(own)
        add_features_backward(own, torch.bmm(state[g], y[g, t].mT), grad)
        out[g, t] += grad.mT
    return out
