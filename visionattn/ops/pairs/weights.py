"""Blocks of the weights of all pairs, of some queries and all keys at a time, so that they stay in
cache; and the way back.

The weight of a pair is that of the content plus that of the class of joint relative position in
which the pair lies, which is looked up. Pairs with a prefix token lie in a class of their own, the
last, whose weight is 0. TaylorShift's weight is a completed square,
``a x^2 + b x + c = (sqrt(a) x + b / (2 sqrt(a)))^2 + rest``, and the rest travels with the weights
of classes.

Tensors come as the caller has them, ``[B, h, tokens, width]`` of any strides and any floating
dtype. This file knows neither the sums over pairs nor autograd; ``mean.py`` does.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import sqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from visionattn.ops.chunking import chunks
from visionattn.ops.sums import accumulation_dtype
from visionattn.ops.taylorshift.features import EPS

BLOCK_ELEMENTS, BLOCK_QUERIES = 1 << 17, (128, 256)
REMEMBERED_PAIRS = 1 << 21


class Side:
    """Queries or keys of some images as the scores need them, ``rows [g, n, d]``, and the way back
    for their gradients.

    Where ``normalised``, they are ``x / max(|x|, 1e-6)``; otherwise the feature map is applied. All
    of them are multiplied by ``length [g, 1, 1]`` or a number; those of ``absent [g, n, 1]`` are
    0.
    """

    def __init__(
        self,
        x: Tensor,
        feature_map: str,
        normalised: bool,
        length: Tensor | float,
        absent: Tensor | None,
    ):
        self.x, self.feature_map, self.length, self.absent = x, feature_map, length, absent
        self.inverse = None
        if normalised:
            self.squares = x.square().sum(2, keepdim=True).clamp_(min=EPS * EPS)
            self.inverse = self.squares.rsqrt()
            self.rows = x * (self.inverse * length)
        elif feature_map == "elu1":
            self.rows = elu1_rows(x)
        else:
            self.rows = x.clamp(min=0) if feature_map == "relu" else x * length
        if absent is not None:
            self.rows = self.rows.masked_fill(absent, 0)

    def backward(self, grad: Tensor) -> Tensor | None:
        """Turn the gradient of ``rows`` into that of ``x`` where it is; returns that of the length,
        ``[g]``.
        """
        d_length = None
        if self.inverse is not None:
            unit = self.x * self.inverse
            along = (grad * unit).sum(2, keepdim=True)
            d_length = along.sum((1, 2))
            grad.addcmul_(unit, along.mul_(self.squares > EPS * EPS), value=-1).mul_(
                self.inverse * self.length
            )
        elif self.feature_map == "elu1":
            # The derivative is min(phi, 1): phi is exp(x) below 0 and 1 + x above.
            grad.mul_(self.rows.clamp(max=1))
        else:
            grad.mul_(self.rows.sign() if self.feature_map == "relu" else self.length)
        if self.absent is not None:
            grad.masked_fill_(self.absent, 0)
        return d_length


def elu1_rows(x: Tensor) -> Tensor:
    """Return ``elu1(x)`` with few passes over memory: ``exp(min(x, 0)) + max(x, 0)``."""
    return x.clamp(max=0).exp_().add_(x.clamp(min=0))


def _axis_classes(places: Tensor, length: int, horizon: int) -> Tensor:
    """Return the class of each of ``length`` keys on one axis as seen from queries at
    ``places [T]``: ``[T, length]``.
    """
    return (
        (torch.arange(length, device=places.device) - places[:, None])
        .clamp_(-horizon, horizon)
        .add_(horizon)
    )


def _pair_classes(
    grid: tuple[int, int],
    horizons: tuple[int, int],
    prefix: int,
    start: int,
    stop: int,
    device: torch.device,
) -> Tensor:
    """Return the class of each key as seen from the queries ``start .. stop``, ``[T, P + H*W]``; of
    a prefix token one past the last.
    """
    (height, width), (classes_y, classes_x) = grid, (2 * horizon + 1 for horizon in horizons)
    first = min(max(start, prefix), stop)
    places = torch.arange(first - prefix, stop - prefix, device=device)
    # Classes of rows and of columns are found apart, and meet in one sum.
    rows = _axis_classes(
        places.div(max(1, width), rounding_mode="floor"), height, horizons[0]
    ).mul_(classes_x)
    columns = _axis_classes(places % max(1, width), width, horizons[1])
    index = torch.empty(stop - start, prefix + height * width, dtype=torch.int64, device=device)
    index[: first - start] = index[:, :prefix] = classes_y * classes_x
    torch.add(
        rows[:, :, None],
        columns[:, None, :],
        out=index[first - start :, prefix:].unflatten(1, grid),
    )
    return index


_remembered_classes = lru_cache(maxsize=2)(_pair_classes)


class Position:
    """The weights of the classes of joint relative position for the queries of some images, and the
    way back.

    Args:
        features: ``elu1`` of the queries, ``[g, N, d]``.
        table: of each head of each image, ``[g, 2Ry+1, 2Rx+1, d]``.
        scale: ``[1 or g, H*W, C]``, what the weight of a class is multiplied with; None: nothing.
        rest: what is added to the weight of every pair.
        grid: where the tokens lie that follow the prefix.
    """

    def __init__(
        self,
        features: Tensor,
        table: Tensor,
        scale: Tensor | None,
        rest: float,
        grid: tuple[int, int],
    ):
        self.features, self.scale, self.grid = features, scale, grid
        self.horizons, self.made = (table.shape[1] // 2, table.shape[2] // 2), None
        self.prefix = features.shape[1] - grid[0] * grid[1]
        self.entries = F.pad(table.flatten(1, 2), (0, 0, 0, 1))
        self.weights = torch.bmm(features, self.entries.mT)
        if scale is not None:
            self.scale = F.pad(scale, (0, 1))
            self.weights[:, self.prefix :].mul_(self.scale)
        if rest:
            self.weights += rest

    def classes(self, t: slice) -> Tensor:
        """Return the class of each pair of the queries ``t``, ``[T, N]``."""
        tokens, where = self.weights.shape[1], (self.grid, self.horizons, self.prefix)
        if tokens**2 <= REMEMBERED_PAIRS and not isinstance(self.weights, FakeTensor):
            return _remembered_classes(*where, 0, tokens, self.weights.device)[t]
        if self.made != t:
            self.made, self.index = t, _pair_classes(*where, t.start, t.stop, self.weights.device)
        return self.index

    def backward(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the queries and, ``[g, 2Ry+1, 2Rx+1, d]``, of the table for that
        of the weights, which is used up.
        """
        if self.scale is not None:
            grad[:, self.prefix :].mul_(self.scale)
        d_table = torch.bmm(grad.mT, self.features)[:, :-1].unflatten(
            1, (2 * self.horizons[0] + 1, -1)
        )
        return torch.bmm(grad, self.entries).mul_(self.features.clamp(max=1)), d_table


class Images:
    """What some images need in either direction, with ``g = images * heads``: operands, and blocks
    of weights.

    ``operands`` are the tensors of ``pair_mean`` in their order; ``b`` says which images.
    """

    def __init__(
        self,
        b: slice,
        operands: Sequence[Tensor | None],
        feature_map: str,
        coefficients: Sequence[float],
    ):
        q, k, v, temperature, key_mask, table, counts, total = operands
        dtype, images, heads = accumulation_dtype(q, k, v), b.stop - b.start, q.shape[1]
        query, key, self.v = (x[b].flatten(0, 1).to(dtype) for x in (q, k, v))
        self.square, self.shift, self.rest, self.factor = len(coefficients) > 0, 0.0, 0.0, 1.0
        if self.square:
            first, second, third = coefficients
            self.factor, feature_map = sqrt(first), "given"
            self.shift = second / (2 * self.factor)
            self.rest = third - second * second / (4 * first)
        absent, self.absent, length = None, None, self.factor
        if key_mask is not None:
            absent = (~key_mask[b]).repeat_interleave(heads, 0).unsqueeze(2)
            self.v, self.absent = self.v.masked_fill(absent, 0), absent
        if block_size(q.shape[2], k.shape[2])[0] < q.shape[2]:
            self.v = self.v.contiguous()  # every block reads all values
        if temperature is not None:
            length = _of_each_head(
                temperature.to(dtype)[:, None, None] * self.factor, images, heads
            )
        self.q = Side(query, feature_map, temperature is not None, length, None)
        self.k = Side(key, feature_map, temperature is not None, 1.0, absent)
        self.position, self.buffers = None, {}
        if table is not None:
            features = self.q.rows if feature_map == "elu1" else elu1_rows(query)
            scale = None if total is None else (total / counts.clamp(min=1)).flatten(1, 2)
            if scale is not None and len(scale) > 1:
                scale = scale[b].repeat_interleave(heads, 0)
            self.position = Position(
                features,
                _of_each_head(table, images, heads),
                scale,
                self.rest,
                tuple(counts.shape[1:3]),
            )

    def blocks(self, by_query: Sequence[Tensor], by_key: Sequence[Tensor]) -> Iterator["Block"]:
        """Yield the blocks, with their parts of tensors ``[g, N, ...]`` and ``[g, M, ...]``."""
        by_query, by_key = [self.q.rows, *by_query], [self.k.rows, self.v, *by_key]
        if self.position is not None:
            by_query.append(self.position.weights)
        if self.absent is not None:
            by_key.append(self.absent)
        queries, heads = block_size(self.q.rows.shape[1], self.v.shape[1])
        of_keys = list(zip(*(x.split(heads) for x in by_key), strict=True))
        for t in chunks(self.q.rows.shape[1], queries):
            index = None if self.position is None else self.position.classes(t)
            of_queries = zip(*(x[:, t].split(heads) for x in by_query), strict=True)
            for (q, *more), (k, v, *others) in zip(of_queries, of_keys, strict=True):
                class_weights = None if self.position is None else more.pop()
                absent = None if self.absent is None else others.pop()
                yield self._block(q, k, v, class_weights, index, absent, more, others)

    def _block(self, q, k, v, class_weights, index, absent, by_query, by_key) -> "Block":
        shape, scores = (len(q), q.shape[1], k.shape[1]), None
        weights = self.buffer("weights", shape)
        # The weights of classes first, then the content on top of them in place.
        if index is not None:
            index = index.expand(shape)
            torch.gather(class_weights, 2, index, out=weights)
        if self.square:
            scores = self.buffer("scores", shape).fill_(self.shift).baddbmm_(q, k.mT)
            rest = weights if index is not None else weights.new_full((1, 1, 1), self.rest)
            torch.addcmul(rest, scores, scores, out=weights)
        elif index is None:
            torch.bmm(q, k.mT, out=weights)
        else:
            weights.baddbmm_(q, k.mT)
        if absent is not None:
            weights.masked_fill_(absent.mT, 0)
        return Block(weights, scores, index, absent, q, k, v, by_query, by_key)

    def buffer(self, name: str, shape: tuple[int, int, int]) -> Tensor:
        """Return memory that the next block takes over."""
        if name not in self.buffers or self.buffers[name].shape != shape:
            self.buffers[name] = self.v.new_empty(shape)
        return self.buffers[name]


class Block(NamedTuple):
    """Some queries and all keys of some heads.

    Args:
        weights: ``[g, T, M]``, 0 where a key is absent.
        scores: what is squared; None where nothing is.
        index: the class of each pair; None without relative position.
        absent: ``[g, M, 1]``; None: no key.
        q, k, v: rows of queries and keys, and values.
        by_query, by_key: parts of the tensors that were given.
    """

    weights: Tensor
    scores: Tensor | None
    index: Tensor | None
    absent: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    by_query: list[Tensor]
    by_key: list[Tensor]


def _of_each_head(x: Tensor, images: int, heads: int) -> Tensor:
    """Repeat ``x [h or 1, ...]`` for all heads of all images, ``[g, ...]``: a view of one image."""
    return x.expand(images, heads, *x.shape[1:]).flatten(0, 1)


def block_size(n: int, m: int) -> tuple[int, int]:
    """Return how many queries and heads make a block of weights that stays in cache; a block of one
    head may have twice ``BLOCK_ELEMENTS``.
    """
    fewest, most = BLOCK_QUERIES
    queries = max(1, min(n, most, max(fewest, 2 * BLOCK_ELEMENTS // max(1, m))))
    queries = -(-n // -(-n // queries)) if n else 1  # no block is much smaller than the others
    return queries, max(1, BLOCK_ELEMENTS // max(1, queries * m))


def batches(q: Tensor, k: Tensor) -> list[slice]:
    """Return slices of the images whose weights make one block, each of one image at least."""
    heads = q.shape[1]
    return (
        chunks(q.shape[0], max(1, block_size(q.shape[2], k.shape[2])[1] // heads)) if heads else []
    )
