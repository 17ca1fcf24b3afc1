"""Content and joint relative position of all pairs in one matrix: the fastest form for few tokens
on a CPU.

With few tokens, sums over classes and features cost more than the weights of all pairs. The weights
are computed in blocks of some queries and all keys, which stay in cache: time is quadratic, memory
linear. The backward pass recomputes each block; with plain autograd, a training step took 1.3 to
1.7 times as long. Compiled graphs use the separate operators of content and relative position
instead, because sizes may be symbolic there.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from visionattn.ops.attention_sums import (
    accumulation_dtype,
    divisor_of,
    tokens_first,
    weighted_mean_gradients,
)
from visionattn.ops.chunking import add_of_heads, chunks, in_turn
from visionattn.ops.form_choice import tokens_asked
from visionattn.ops.nonfinite import skips_idle_rows
from visionattn.ops.operator import contiguous_like, differentiate, form_ran, operator
from visionattn.ops.position.relative_position import (
    Joint,
    RelativePosition,
    joint_classes,
    key_counts,
)
from visionattn.ops.taylorshift.taylorshift_features import EPS

MOST_PAIRS = 900**2
"""Number of pairs above which the tiled sums over classes of relative position are faster.

Measured on an Intel Xeon with AMX, one thread, torch 2.14, 26 November 2026: both forms break even
at 850 to 1,000 tokens (forward and with gradients, head widths 32 and 64, float32), and at 780 in
bfloat16.
"""
BLOCK_ELEMENTS, BLOCK_QUERIES = 1 << 17, (128, 256)
REMEMBERED_BLOCKS = 8


def takes_pairs(q: Tensor, v: Tensor, relative: RelativePosition | None) -> bool:
    """Return whether ``mean_of_pairs`` takes these tensors: few tokens of a whole grid, on CPU."""
    if torch.compiler.is_compiling() or q.device.type not in ("cpu", "meta"):
        return False
    if tokens_asked(q.shape[2]) * tokens_asked(v.shape[2]) > MOST_PAIRS:
        return False
    return relative is None or (isinstance(relative, Joint) and relative.layout.kept is None)


def mean_of_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    relative: Joint | None,
    *,
    temperature: Tensor | None = None,
    feature_map: str = "given",
    coefficients: Sequence[float] = (),
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean under content and relative position, and the sum of the weights.

    The arguments are as for ``pair_mean``, with ``relative`` in place of table, counts and total.
    """
    position: tuple[Tensor | None, ...] = (None, None, None)
    if relative is not None:
        count = key_counts(k, key_mask, dtype=accumulation_dtype(q, k, v))
        position = joint_classes(relative, key_mask, count)
    return pair_mean(q, k, v, temperature, key_mask, *position, feature_map, coefficients)


def _flops(q, k, v, table, *, backward: bool) -> int:
    """Count the products of each query with keys and values, and with the classes of joint relative
    position.
    """
    (batch, heads, n, d), m, e = q, k[2], v[3]
    per_query = m * (3 * d + 2 * e if backward else d + e)
    if table is not None:
        per_query += table[1] * table[2] * (3 * d if backward else d)
    return 2 * batch * heads * n * per_query


def _empty_mean(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized memory for the mean (``tokens_first``) and for the mass."""
    dtype = accumulation_dtype(q, k, v)
    out = tokens_first(q, *q.shape[:3], v.shape[3], dtype=dtype)  # type: ignore[call-arg]
    return out, q.new_empty(q.shape[:3], dtype=dtype)


@operator(fake=_empty_mean, flops=partial(_flops, backward=False))
def pair_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    table: Tensor | None,
    counts: Tensor | None,
    total: Tensor | None,
    feature_map: str,
    coefficients: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean and the sum of the weights, from content and (with a table) joint
    relative position.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``, any floating point dtype and
            strides.
        temperature: for TaylorShift, ``[h]``, the length to which q is scaled; k is scaled to unit
            length. None: both are unchanged.
        key_mask: bool ``[B, M]``, True takes part.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]`` in the dtype of the sums. With a table, the tokens are
            the prefix tokens and then the whole grid.
        counts: number of keys in each class for each patch, ``[1 or B, H, W, C]``; needed with a
            table.
        total: for "mean", the number of keys that take part, ``[1 or B, 1, 1, 1]``; None: "sum".
        feature_map: for kernelized attention: "elu1" or "relu". TaylorShift takes "given".
        coefficients: (a, b, c) of TaylorShift; empty: kernelized attention.

    Returns:
        the mean ``[B, h, N, e]``, 0 for a query whose weights are all 0, in the memory order of
        ``tokens_first``; and the mass ``[B, h, N]``. Both are float32 (float64 for float64 inputs).
    """
    options = temperature, key_mask, table, counts, total, feature_map, coefficients
    out, mass = _empty_mean(q, k, v)
    with form_ran("taylorshift" if coefficients else "kernelized", "direct"):
        for b in _images(q, k):
            chunk = _Chunk(b, q[b], k[b], v[b], *options)
            values = out.new_empty(*chunk.tensors[0].shape[:2], v.shape[3])
            masses = mass[b].flatten(0, 1)
            for g, t in chunk.blocks():
                weights = chunk.weights(g, t)[0]
                torch.bmm(weights, chunk.tensors[2][g], out=values[g, t])
                torch.sum(weights, 2, out=masses[g, t])
            torch.div(values.view(out[b].shape), divisor_of(mass[b]), out=out[b])
    return out, mass


def _empty_gradients(out, q, k, v, temperature, table) -> tuple[Tensor, ...]:
    return *contiguous_like(q, k, v), *contiguous_like(temperature, table, like=out)


@operator(fake=_empty_gradients, flops=partial(_flops, backward=True))
@skips_idle_rows("grad", rows="out mass q")
def pair_mean_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    table: Tensor | None,
    counts: Tensor | None,
    total: Tensor | None,
    feature_map: str,
    coefficients: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``pair_mean`` with respect to q, k and v, in their dtypes, and to
    temperature and table (empty if None).
    """
    dq, dk, dv = (mass.new_zeros(x.shape) for x in (q, k, v))
    parameter_grads = [mass.new_zeros(0 if x is None else x.shape) for x in (temperature, table)]
    options = temperature, key_mask, table, counts, total, feature_map, coefficients
    for b in _images(q, k):
        chunk = _Chunk(b, q[b], k[b], v[b], *options)
        d_values, d_mass = weighted_mean_gradients(grad[b], out[b], mass[b])
        upstream = d_values.flatten(0, 1), d_mass.flatten(0, 1).unsqueeze(2)
        head_grads = chunk.backward(*upstream, *(x[b].flatten(0, 1) for x in (dq, dk, dv)))
        for x, head_grad in zip(parameter_grads, head_grads, strict=True):
            if head_grad is not None:
                add_of_heads(x, head_grad, slice(0, q.shape[1]))
    d_temperature = (
        parameter_grads[0] if temperature is None else parameter_grads[0].to(temperature.dtype)
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_temperature, parameter_grads[1]


differentiate(
    pair_mean, pair_mean_backward, outputs="out mass", gradients="q k v temperature table"
)


class _Mapped:
    """Queries or keys ``x [g, n, d]``, mapped to the ``rows`` that enter the scores, with the
    backward step of the map.

    TaylorShift (``feature_map`` "given") scales x to unit length if ``normalised``, and then
    multiplies it by ``length [g, 1, 1]``. Rows in ``absent [g, n, 1]`` are 0.
    """

    def __init__(self, x: Tensor, feature_map: str, normalised: bool, length, absent):
        self.feature_map, self.length, self.absent, self.inverse = feature_map, length, absent, None
        self.x = x if absent is None else x.masked_fill(absent, 0)
        if normalised:
            squares = self.x.square().sum(2, keepdim=True)
            self.has_free_length = squares > EPS * EPS
            self.inverse = squares.clamp_(min=EPS * EPS).rsqrt_()
            self.rows = self.x * (self.inverse * length)
        elif feature_map == "given":
            self.rows = self.x * length
        else:
            self.rows = _elu1(self.x) if feature_map == "elu1" else self.x.clamp(min=0)

    def backward(self, grad: Tensor) -> Tensor | None:
        """Turn the gradient of ``rows`` into the gradient of ``x``, in place.

        Return the gradient of the length, ``[g]``, or None if x is not normalized.
        """
        d_length = None
        if self.feature_map == "elu1":
            grad.mul_(self.rows.clamp(max=1))  # phi is exp(x) below 0 and 1 + x above
        elif self.feature_map == "relu":
            grad.mul_(self.rows.sign())
        elif self.inverse is None:
            grad.mul_(self.length)
        else:
            unit = self.x * self.inverse
            along = (grad * unit).sum(2, keepdim=True)
            d_length = along.sum((1, 2))
            grad.addcmul_(unit, along.mul_(self.has_free_length), value=-1)
            grad.mul_(self.inverse * self.length)
        if self.absent is not None:
            grad.masked_fill_(self.absent, 0)
        return d_length


def _elu1(x: Tensor) -> Tensor:
    """Return ``elu1(x)`` with few passes over memory."""
    return x.clamp(max=0).exp_().add_(x.clamp(min=0))


class _Chunk:
    """The operands of the images ``b``, prepared for the blocks.

    ``tensors`` are, with ``g = images * heads``: rows of the queries ``[g, N, d]``, rows of the
    keys ``[g, M, d]``, values ``[g, M, e]`` and, with a table, the weight of each class for each
    query ``[g, N, C + 1]``. The last class is for pairs with a prefix token.

    TaylorShift's weight is a completed square, ``(sqrt(a) x + b / (2 sqrt(a)))^2 + rest``.
    """

    def __init__(
        self, b, q, k, v, temperature, key_mask, table, counts, total, feature_map, coefficients
    ):
        dtype, (images, heads) = accumulation_dtype(q, k, v), q.shape[:2]
        query, key, value = (x.flatten(0, 1).to(dtype) for x in (q, k, v))
        self.absent, self.square, self.shift, self.rest = None, len(coefficients) > 0, 0.0, 0.0
        self.buffers = {}

        def per_head(x: Tensor) -> Tensor:
            return x.to(dtype).expand(images, heads, *x.shape[1:]).flatten(0, 1)

        length = 1.0
        if self.square:
            first, second, third = coefficients
            length = self.factor = sqrt(first)
            self.shift, feature_map = second / (2 * length), "given"
            self.rest = third - second * second / (4 * first)
        if temperature is not None:
            length = per_head(temperature[:, None, None]) * length
        absent = None
        if key_mask is not None:
            absent = (~key_mask[b]).repeat_interleave(heads, 0).unsqueeze(2)
            value, self.absent = value.masked_fill(absent, 0), absent.mT
        self.q = _Mapped(query, feature_map, temperature is not None, length, None)
        self.k = _Mapped(key, feature_map, temperature is not None, 1.0, absent)
        if block_size(query.shape[1], key.shape[1])[0] < query.shape[1]:
            value = value.contiguous()  # every block reads all values
        self.tensors = [self.q.rows, self.k.rows, value]
        if table is None:
            return
        self.features = self.q.rows if feature_map == "elu1" else _elu1(query)
        self.table = F.pad(per_head(table).flatten(1, 2), (0, 0, 0, 1))
        self.where = tuple(counts.shape[1:3]), (table.shape[1] // 2, table.shape[2] // 2)
        self.prefix, self.scale = query.shape[1] - counts.shape[1] * counts.shape[2], None
        classes = torch.bmm(self.features, self.table.mT)
        if total is not None:
            scale = F.pad((total / counts.clamp(min=1)).flatten(1, 2), (0, 1))
            self.scale = scale if len(scale) == 1 else scale[b].repeat_interleave(heads, 0)
            classes[:, self.prefix :].mul_(self.scale)
        self.tensors.append(classes.add_(self.rest) if self.rest else classes)

    def blocks(self) -> list[tuple[slice, slice]]:
        """Return the heads and the queries of each block, as pairs of slices."""
        query, key = self.tensors[:2]
        queries, heads = block_size(query.shape[1], key.shape[1])
        query_slices = chunks(query.shape[1], queries)
        return in_turn([(g, t) for t in query_slices for g in chunks(len(query), heads)])

    def weights(self, g: slice, t: slice) -> tuple[Tensor, Tensor | None]:
        """Return the weights ``[g, T, M]`` of a block, and TaylorShift's scores before squaring
        (else None).

        Both are valid until the next call.
        """
        query, key, *classes = self.tensors[0][g, t], self.tensors[1][g], *self.tensors[3:]
        shape, scores = (*query.shape[:2], key.shape[1]), None
        weights = self._memory("weights", shape)
        # Write the weights of relative position first, then add the weights of the content.
        if classes:
            torch.gather(classes[0][g, t], 2, self.index(t).expand(shape), out=weights)
        if self.square:
            scores = self._memory("scores", shape).fill_(self.shift).baddbmm_(query, key.mT)
            rest = weights if classes else query.new_full((1, 1, 1), self.rest)
            torch.addcmul(rest, scores, scores, out=weights)
        elif classes:
            weights.baddbmm_(query, key.mT)
        else:
            torch.bmm(query, key.mT, out=weights)
        if self.absent is not None:
            weights.masked_fill_(self.absent[g], 0)
        return weights, scores

    def backward(
        self, d_values: Tensor, d_mass: Tensor, d_query: Tensor, d_key: Tensor, d_value: Tensor
    ) -> list[Tensor | None]:
        """Write the gradients of q, k and v to ``d_query``, ``d_key`` and ``d_value``, which must
        start at 0.

        The upstream gradients are ``d_values [g, N, e]`` of the sums of values and
        ``d_mass [g, N, 1]`` of the sums of weights. Return the gradients of temperature ``[g]`` and
        table ``[g, 2Ry+1, 2Rx+1, d]``; None for an input that is None.
        """
        query, key, value = self.tensors[:3]
        d_classes = [x.new_zeros(x.shape) for x in self.tensors[3:]]
        for g, t in self.blocks():
            weights, scores = self.weights(g, t)
            d_value[g].baddbmm_(weights.mT, d_values[g, t])
            d_weights = self._memory("gradient", weights.shape)
            d_weights.copy_(d_mass[g, t].expand_as(weights)).baddbmm_(d_values[g, t], value[g].mT)
            if self.absent is not None:
                d_weights.masked_fill_(self.absent[g], 0)
            if d_classes:
                d_classes[0][g, t].scatter_add_(2, self.index(t).expand_as(weights), d_weights)
            if scores is not None:
                d_weights.mul_(scores)
            torch.bmm(d_weights, key[g], out=d_query[g, t])
            d_key[g].baddbmm_(d_weights.mT, query[g, t])
        if self.square:  # the factor 2 of the derivative of a square
            d_query.mul_(2), d_key.mul_(2)
        if self.absent is not None:
            d_value.masked_fill_(self.absent.mT, 0)
        d_length, _ = self.q.backward(d_query), self.k.backward(d_key)
        d_length = None if d_length is None else d_length * self.factor
        if not d_classes:
            return [d_length, None]
        if self.scale is not None:
            d_classes[0][:, self.prefix :].mul_(self.scale)
        d_query += torch.bmm(d_classes[0], self.table).mul_(self.features.clamp(max=1))
        d_table = torch.bmm(d_classes[0].mT, self.features)[:, :-1]
        return [d_length, d_table.unflatten(1, (2 * self.where[1][0] + 1, -1))]

    def index(self, t: slice) -> Tensor:
        """Return the class of each pair of the queries ``t`` and all keys, ``[T, M]``."""
        query, make = self.tensors[0], _remembered_classes
        make = _classes if isinstance(query, FakeTensor) else make
        return make(*self.where, self.prefix, t.start, t.stop, query.device)

    def _memory(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a buffer that the next block reuses."""
        if name not in self.buffers or self.buffers[name].shape != shape:
            self.buffers[name] = self.tensors[0].new_empty(shape)
        return self.buffers[name]


@torch.inference_mode(False)  # a backward pass may need the cached tensor
def _classes(
    grid: tuple[int, int],
    horizons: tuple[int, int],
    prefix: int,
    start: int,
    stop: int,
    device: torch.device,
) -> Tensor:
    """Return the class of each key for the queries ``start .. stop``, ``[T, P + H*W]``.

    Pairs with a prefix token have the number after the last class.
    """
    width, place = max(1, grid[1]), torch.arange(start - prefix, stop - prefix, device=device)
    axes = []
    for places, length, horizon in zip(
        (place.div(width, rounding_mode="floor"), place % width), grid, horizons, strict=True
    ):
        offset = torch.arange(length, device=device) - places[:, None]
        axes.append(offset.clamp_(-horizon, horizon).add_(horizon))
    classes = (2 * horizons[0] + 1) * (2 * horizons[1] + 1)
    index = axes[0][:, :, None] * (2 * horizons[1] + 1) + axes[1][:, None]
    index = F.pad(index.flatten(1), (prefix, 0), value=classes)
    index[: max(0, prefix - start)] = classes
    return index


_remembered_classes = lru_cache(maxsize=REMEMBERED_BLOCKS)(_classes)


def block_size(n: int, m: int) -> tuple[int, int]:
    """Return the number of queries and heads in a block of weights that stays in cache.

    A block of one head may have twice ``BLOCK_ELEMENTS``.
    """
    least, largest = BLOCK_QUERIES
    queries = max(1, min(n, largest, max(least, 2 * BLOCK_ELEMENTS // max(1, m))))
    queries = -(-n // -(-n // queries)) if n else 1  # makes the blocks similar in size
    return queries, max(1, BLOCK_ELEMENTS // max(1, queries * m))


def _images(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Yield slices of at least one image whose weights fit one block."""
    size = block_size(q.shape[2], k.shape[2])[1] // max(1, q.shape[1])
    yield from in_turn(chunks(q.shape[0], max(1, size)) if q.shape[1] else [])
