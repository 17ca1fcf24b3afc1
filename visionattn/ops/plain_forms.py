"""Each operator in plain tensor operations, for exporters.

ONNX programs, and programs that run without this package, contain these operations in place of the
operators. The numbers of tokens, rows and columns may be symbolic: no code branches on them or
loops over them. Loops run only over classes of relative position and tiles of a head's width.
Operators with linear memory are linear here too, unless the caller requests a quadratic form by
name. The functions have no gradients, and may leave out results that only a gradient needs.
``reference.py`` defines each result.

Sums over keys are divided by the number of keys that the query sees. Both terms of an attention are
divided by the same number, so their mean is unchanged. Each factor of a product is divided by a
root of the number before the products are summed. So a program converted to float16 neither
overflows nor loses the contribution of a single key, for any number of tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.library import CustomOpDef

from visionattn.ops.attention_sums import (
    accumulation_dtype,
    divisor_of,
    product,
    weighted_mean,
    wide,
)
from visionattn.ops.feature_maps import elu1
from visionattn.ops.kernelized.kernelized_eager import kernel_sums
from visionattn.ops.position.axial_position import axis_sums
from visionattn.ops.position.joint_position import class_sums
from visionattn.ops.position.position_scores import relative_scores
from visionattn.ops.position.relative_position import key_counts
from visionattn.ops.taylorshift.taylorshift_eager import taylor_sums
from visionattn.ops.taylorshift.taylorshift_features import EPS, num_features
from visionattn.ops.window import windows

TILES = 4
"""Number of tiles of a head's width; TaylorShift's products are formed for pairs of tiles."""


def plain_product(x: Tensor, y: Tensor) -> Tensor:
    """Compute ``product``."""
    return torch.matmul(x, y)


def plain_weighted_mean(
    values: Tensor,
    mass: Tensor,
    more_values: Tensor | None = None,
    more_mass: Tensor | None = None,
    skip: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute ``weighted_mean``."""
    if more_values is not None and more_mass is not None:
        # The other term adds zeros to the tokens before ``skip``.
        values = values + F.pad(more_values, (0, 0, skip, 0))
        mass = mass + F.pad(more_mass, (skip, 0))
    return _tokens_first(values / divisor_of(mass)), mass


def _tokens_first(x: Tensor) -> Tensor:
    """Lay ``[B, h, N, e]`` out in memory as ``[B, N, h, e]``, as the operator does: callers take
    views of this order.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _masked(x: Tensor, key_mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return ``x [B, h, M, c]`` in ``dtype``, 0 where masked."""
    x = x.to(dtype)
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def plain_kernel_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    feature_map: str,
    causal: bool,
    form: str,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute ``kernel_sums``, divided by the number of keys.

    Every ``form`` runs the linear form, which loses no precision here: all products of features are
    non-negative.
    """
    dtype = accumulation_dtype(q, k, v)
    phi: Callable[[Tensor], Tensor] = {"elu1": elu1, "relu": torch.relu}.get(
        feature_map, lambda x: x
    )
    queries, keys = phi(q.to(dtype)), _masked(phi(k.to(dtype)), key_mask, dtype)
    values = _masked(v, key_mask, dtype)
    # A last column of ones turns the sums of values into the mass.
    ones = torch.ones_like(values[..., :1])
    with_mass = torch.cat([values, ones], 3)
    count = key_counts(k, key_mask, causal, q.shape[2], torch.float64).unsqueeze(3)
    if not causal:
        root = _root_divisor(count, 2, dtype)
        keys, with_mass = keys * root, with_mass * root
    state = torch.matmul(keys.mT, with_mass)
    if causal:
        # One state per key; query i reads the state after key i, or the last state.
        states = (keys.unsqueeze(4) * with_mass.unsqueeze(3)).cumsum(2)
        last = torch.arange(q.shape[2], device=q.device).clamp(max=k.shape[2] - 1)
        out = torch.matmul(queries.unsqueeze(3), states[:, :, last]).squeeze(3)
        out = out * _root_divisor(count, 1, dtype)
    else:
        out = torch.matmul(queries, state)
    values = out[..., :-1].to(v.dtype if narrow else dtype)
    return values, out[..., -1], state[..., :-1], state[..., -1]


def _root_divisor(count: Tensor, root: int, dtype: torch.dtype) -> Tensor:
    """Return ``count ** (-1 / root)``: ``root`` such factors together divide by ``count``."""
    return count.clamp(min=1).pow(-1 / root).to(dtype)


def _of_length(x: Tensor, length: Tensor | float) -> Tensor:
    """Scale vectors along the last axis to a length; vectors shorter than ``EPS`` stay shorter.

    Entries are divided by their largest magnitude first, so that squares stay in range.
    """
    x = x / x.abs().amax(-1, keepdim=True).clamp(min=EPS)
    return x * x.square().sum(-1, keepdim=True).clamp(min=1).rsqrt() * length


def plain_taylor_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    a: float,
    b: float,
    c: float,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute ``taylor_sums``, divided by the number of keys.

    "auto" is the linear form with a temperature; without one it is the direct form, which keeps
    precision. The state is not computed.
    """
    dtype = accumulation_dtype(q, k, v)
    queries, keys, values = q.to(dtype), _masked(k, key_mask, dtype), _masked(v, key_mask, dtype)
    if temperature is not None:
        queries = _of_length(queries, temperature.to(dtype)[:, None, None])
        keys = _of_length(keys, 1.0)
    present = torch.ones_like(values[:, :1, :, :1])
    if key_mask is not None:
        present = key_mask[:, None, :, None].to(dtype)
    root = _root_divisor(key_counts(k, key_mask, dtype=torch.float64).unsqueeze(3), 2, dtype)
    parts, values, present = keys * root, values * root, present * root
    first, second = parts.sum(2) * root[..., 0], torch.matmul(parts.mT, parts)
    if form == "direct" or (form == "auto" and temperature is None):
        scores = torch.matmul(queries, keys.mT)
        weights = ((a * scores + b) * scores + c) * present.mT
        out, mass = torch.matmul(weights, values), weights.sum(3) * root[..., 0]
    else:
        out = _sums_of_squares(queries, keys * root.sqrt(), values) * a
        out = out + b * torch.matmul(queries, torch.matmul(parts.mT, values))
        out = out + c * (values.sum(2, keepdim=True) * root)
        slope = a * torch.matmul(queries, second) + b * first.unsqueeze(2)
        mass = (slope * queries).sum(3) + c * (present.sum(2) * root[..., 0])
    rows = num_features(q.shape[3]) + q.shape[3] + 1 if form == "efficient" else 0
    state = out.new_zeros(*q.shape[:2], rows, v.shape[3])
    return out, mass, state, second, first


def _sums_of_squares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``sum_j (q_i . k_j)^2 v_j`` from the products of entries.

    Each tile of the width is multiplied by itself and by all later tiles; products with later tiles
    count twice.
    """
    d, out = q.shape[3], None
    tile = -(-d // TILES)
    for start in range(0, d, tile):
        stop = min(start + tile, d)
        of_q, of_k = (
            (x[..., start:stop].unsqueeze(4) * x[..., start:].unsqueeze(3)).flatten(3)
            for x in (q, k)
        )
        size = stop - start
        once, twice = q.new_full((size, size), 1.0), q.new_full((size, d - stop), 2.0)
        times = torch.cat([once, twice], 1).flatten().unsqueeze(1)
        state = torch.matmul(of_k.mT, v) * times
        term = torch.matmul(of_q, state)
        out = term if out is None else out + term
    assert out is not None
    return out


class _Axis:
    """The sum of each class along one axis of a grid, for each query.

    For R = 1 or more all sums are entries of one tensor (``lines``), which joins three pieces along
    the axis: the running sums from the beginning, the entries themselves padded with zeros, and the
    running sums from the end. For R = 0 it holds the sum of all entries for each query.
    """

    def __init__(self, dim: int, num_queries: int, num_keys: int, horizon: int):
        self.dim, self.length, self.horizon = dim, num_queries, horizon
        self.num_classes = 2 * horizon + 1
        # Queries after the last key read zeros.
        self.tail: Any = horizon + torch.sym_max(num_queries - num_keys, 0)
        self.inner = num_keys + horizon + self.tail

    def lines(self, x: Tensor) -> Tensor:
        """Return the running sums from the beginning, the padded entries and the running sums from
        the end of ``x``, joined along the axis.
        """
        dim, horizon = self.dim, self.horizon
        if horizon == 0:
            total = x.sum(dim, keepdim=True)
            return total.expand([self.length if i == dim else n for i, n in enumerate(x.shape)])
        padded = F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [horizon, self.tail])
        before = padded.cumsum(dim).narrow(dim, 0, self.length)
        after = padded.flip(dim).cumsum(dim).flip(dim).narrow(dim, 2 * horizon, self.length)
        return torch.cat([before, padded, after], dim)

    def begin(self, number: int) -> Any:
        """Return the index in ``lines`` of a class's sum for query 0; query i reads i entries
        further.
        """
        if self.horizon == 0 or number == 0:
            return 0
        inside = number < 2 * self.horizon
        return self.length + (number if inside else self.inner)

    def places(self, device: torch.device) -> Tensor:
        """Return the index in ``lines`` of each query and class, ``[N * (2R+1)]``."""
        begins = [torch.full((), self.begin(i), device=device) for i in range(self.num_classes)]
        queries = torch.arange(self.length, device=device)
        return (queries[:, None] + torch.stack(begins)).flatten()

    def look_up(self, lines: Tensor, places: Tensor) -> Tensor:
        """Return the sums of all classes: the axis of ``lines`` becomes two axes, ``N`` and
        ``2R+1``.
        """
        found = lines.index_select(self.dim, places)
        return found.unflatten(self.dim, (self.length, self.num_classes))


def plain_class_sums(
    q: Tensor,
    table: Tensor,
    v: Tensor,
    counts: Tensor,
    total: Tensor | None,
    horizon_y: int,
    horizon_x: int,
    later: int = 0,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute ``class_sums``, divided by the number of keys, one row of classes at a time."""
    v, table = F.pad(v, (0, 0, later, 0)) if later else v, table.to(wide(table.dtype))
    root, per_key, per_class = _class_factors(counts.unsqueeze(1), total, mean, table.dtype)
    v = v.to(table.dtype) * root
    rows = _Axis(2, q.shape[2], v.shape[2], horizon_y)
    columns = _Axis(3, q.shape[3], v.shape[3], horizon_x)
    # ``[B, h, H, W, C]``: one weight per class.
    weights = torch.matmul(elu1(q.to(table.dtype)), table.mT.unsqueeze(1))
    of_rows = (weights * per_key).unflatten(4, (rows.num_classes, columns.num_classes))
    of_rows = of_rows.unsqueeze(4)
    lines, values = rows.lines(columns.lines(v)), None
    places = columns.places(v.device)
    for number in range(rows.num_classes):
        row = lines.narrow(2, rows.begin(number), rows.length)
        term = torch.matmul(of_rows[..., number, :], columns.look_up(row, places))
        values = term if values is None else values + term
    assert values is not None
    return values.squeeze(4), (weights * per_class).sum(4)


def _class_factors(
    counts: Tensor, total: Tensor | None, mean: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors that divide sums over classes by the number of keys.

    Args:
        counts: number of keys in each class, ``[1 or B, 1, H, W, C]``.
        total: number of all keys that a query sees, ``[1 or B, 1 or H, 1 or W, 1]``; None: 1.
        mean: whether each class contributes its mean instead of its sum.

    Returns:
        The factor of the values, ``[1 or B, 1, 1, 1, 1]``; the factor of the weights in the sums of
        values; the factor of the weights in the mass. The last two are ``[1 or B, 1, H, W, C]``.
    """
    counts = counts.double()
    if total is None:
        total, mean = counts.new_ones(1, 1, 1, 1), False
    total = total.double().clamp(min=1).unsqueeze(1)
    most = total.amax((2, 3), keepdim=True)
    # Values take one third root, weights the other two: so a class with a single key loses no more
    # range than the values.
    root = most.pow(-1 / 3)
    if mean:
        per_key, per_class = 1 / (counts.clamp(min=1) * root), (counts > 0).to(dtype)
    else:
        per_key, per_class = 1 / (total * root), counts / total
    return root.to(dtype), per_key.to(dtype), per_class.to(dtype)


def plain_axis_sums(
    q: Tensor,
    table: Tensor,
    v: Tensor,
    keys: Tensor,
    total: Tensor | None,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute ``axis_sums``, divided by the number of keys."""
    dtype = table.dtype
    axis = _Axis(2, q.shape[2], v.shape[2], table.shape[1] // 2)
    places = axis.places(q.device)
    counts = axis.look_up(axis.lines(keys.double()[:, None, :, None]), places)
    root, per_key, per_class = _class_factors(counts.mT, total, mean, dtype)
    sums = axis.look_up(axis.lines((v.to(dtype) * root).sum(3)), places)
    weights = torch.matmul(elu1(q.to(dtype)), table.mT.unsqueeze(1))
    # A class without keys has a sum of 0.
    return torch.matmul(weights, sums * per_key.mT), (weights * per_class).sum(4)


def _classes_of_pairs(queries: int, keys: int, horizon: int, device) -> Tensor:
    """Return the class of each key for each query along one axis, ``[queries, keys]``."""
    places = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    return places.clamp(-horizon, horizon) + horizon


def plain_relative_scores(
    q: Tensor, table: Tensor, height: int, width: int, prefix: int = 0
) -> Tensor:
    """Compute ``relative_scores`` by a class lookup for each pair."""
    across = table.shape[2]
    rows = _classes_of_pairs(q.shape[2], height, table.shape[1] // 2, q.device)
    columns = _classes_of_pairs(q.shape[3], width, across // 2, q.device)
    index = rows[:, None, :, None] * across + columns[None, :, None, :]
    index = index.flatten(2).flatten(0, 1)
    scores = torch.matmul(q.flatten(2, 3), table.to(q.dtype).flatten(1, 2).mT)
    scores = scores.gather(3, index.expand(*scores.shape[:2], -1, -1))
    return F.pad(scores, (prefix, 0, prefix, 0))


def plain_windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    visible: Tensor | None,
    height: int,
    width: int,
    window: int,
    shifted: bool,
) -> Tensor:
    """Compute ``windows`` on a grid padded to whole windows; padding is masked."""
    prefix, first = q.shape[2] - height * width, window // 2 if shifted else 0
    before = (window - first) % window
    down, across = ((n + before + window - 1) // window for n in (height, width))
    pad = [before, across * window - width - before, before, down * window - height - before]
    if visible is None:
        visible = torch.ones_like(q[:, 0, :, 0], dtype=torch.bool)

    def in_windows(x: Tensor) -> Tensor:
        """Turn ``[B, h, P + H*W, c]`` into ``[B, down, across, h, window^2, c]``."""
        x = F.pad(x[:, :, prefix:].unflatten(2, (height, width)), [0, 0, *pad])
        x = x.unflatten(3, (across, window)).unflatten(2, (down, window))
        return _laid_out(x.permute(0, 2, 4, 1, 3, 5, 6)).flatten(4, 5)

    def with_prefix(x: Tensor) -> Tensor:
        window_tokens = in_windows(x)
        head = x[:, None, None, :, :prefix].expand(*window_tokens.shape[:3], -1, -1, -1)
        return torch.cat([head, window_tokens], 4)

    seen = with_prefix(visible[:, None, :, None].to(q.dtype)).mT > 0
    queries, bias = in_windows(q), None
    if table is not None:
        scaled = table.to(q.dtype) * q.shape[3] ** -0.5
        flat = queries.flatten(0, 2).unflatten(2, (window, window))
        bias = plain_relative_scores(flat, scaled, window, window, prefix)[:, :, prefix:]
        bias = bias.unflatten(0, queries.shape[:3])
    keep = visible[:, None, :, None]
    k, v = (x.masked_fill(~keep, 0) for x in (k, v))
    out = _softmax_sums(queries, with_prefix(k), with_prefix(v), bias, seen)
    # Undo the partition: put windows next to each other and remove the padding.
    out = _laid_out(out.unflatten(4, (window, window)).permute(0, 3, 1, 4, 2, 5, 6))
    out = out.flatten(4, 5).flatten(2, 3)
    out = _laid_out(out[:, :, before : before + height, before : before + width]).flatten(2, 3)
    of_prefix = _softmax_sums(q[:, :, :prefix], k, v, None, keep.mT)
    return _tokens_first(torch.cat([of_prefix, out], 2))


def _laid_out(x: Tensor) -> Tensor:
    """Copy x into contiguous memory, even if it is contiguous already.

    For a grid of one window, a reshape needs no copy. An exporter that traces such a grid would
    use a view for every grid.
    """
    return x.clone(memory_format=torch.contiguous_format)


def _softmax_sums(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
    """Return ``softmax(q k^T / sqrt(d) + bias) v`` over the visible keys, 0 without any."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.mT)
    if bias is not None:
        scores = scores + bias
    weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.matmul(weights * seen.to(weights.dtype), v)


PLAIN: dict[CustomOpDef, Callable] = {
    product: plain_product,
    weighted_mean: plain_weighted_mean,
    kernel_sums: plain_kernel_sums,
    taylor_sums: plain_taylor_sums,
    class_sums: plain_class_sums,
    axis_sums: plain_axis_sums,
    relative_scores: plain_relative_scores,
    windows: plain_windows,
}
"""The plain function of each operator that a forward pass on a CPU may call while an exporter
traces; ``pair_mean`` is never called then.
"""


def _decompose_in_exports(made: CustomOpDef) -> None:
    """Register the plain function for ``ExportedProgram.run_decompositions``, which
    ``torch.onnx.export`` uses.

    An exported program keeps the operator until then, and compilers always keep it. torch's own
    table of decompositions does not work here: ``torch.compile`` would take shapes from the plain
    functions, and would refuse our operators if the environment variable ``CI`` is set.
    """

    def dispatched(mode: FunctionalTensorMode, op, types, args, kwargs):
        if mode.pre_dispatch or not torch.compiler.is_exporting():
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return PLAIN[made](*args, **kwargs)

    made.register_torch_dispatch(FunctionalTensorMode, dispatched)


for _made in PLAIN:
    _decompose_in_exports(_made)
