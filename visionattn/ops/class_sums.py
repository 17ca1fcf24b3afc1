"""Weighted sums of values over the classes of clipped relative position on a grid, forward and backward.

Each class (a, b) of the offset ``(clip(dy), clip(dx))`` has, for the query at (y, x), the sum ``U_ab(y, x)`` of the values
of its keys. Along an axis a class is the one key at ``y + a``, or all keys at and before ``y - R``, or all at and after
``y + R``: so U is one of nine arrays (the values themselves or one-sided running sums of them, per axis) read at a shift,
and the output is a sum of shifted multiply-adds. Running sums are never differenced: nothing is lost in float32. On small
grids a weight for each pair of places is cheaper; the operator takes that form there (``direct_is_faster``).

Order in memory: tokens contiguous. Rows of the grid stand in one line with R zeros after each row and R rows of zeros before and
after, so that every shift is an offset of a contiguous run:

    0 0 0 0 0 0 0 0 | v v v v v 0 0 0 | v v v v v 0 0 0 | 0 0 0 0 0 0 0 0
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.blocked import chunks
from visionattn.ops.sums import without_autocast

BAND_ELEMENTS = 1 << 17


def axis_classes(x: Tensor, horizon: int, num_queries: int) -> Tensor:
    """Sums of ``x [..., M]`` over the keys of each class of one axis: ``[..., 2R+1, N]``, past to future.

    Plain PyTorch, differentiable, any N and M. R = 0 is one class: all keys.
    """
    num_keys = x.shape[-1]
    if horizon == 0:
        return x.sum(-1, keepdim=True).unsqueeze(-1).expand(*x.shape[:-1], 1, num_queries)
    tail = torch.sym_max(num_queries - num_keys, 0)
    padded = F.pad(x, (horizon, horizon + tail))
    before = padded.cumsum(-1)[..., :num_queries]
    after = padded.flip(-1).cumsum(-1).flip(-1)[..., 2 * horizon : 2 * horizon + num_queries]
    window = [padded[..., horizon + a : horizon + a + num_queries] for a in range(1 - horizon, horizon)]
    return torch.stack([before, *window, after], dim=-2)


def _one_sided(x: Tensor, dim: int, kind: str) -> Tensor:
    """Along ``dim``: "before" sums each entry and those in front of it, "after" those behind, "all" everything."""
    if kind == "here":
        return x
    if kind == "before":
        return x.cumsum(dim)
    if kind == "after":
        return x.flip(dim).cumsum(dim).flip(dim)
    return x.sum(dim, keepdim=True).expand_as(x)


TRANSPOSED = {"here": "here", "before": "after", "after": "before", "all": "all"}


def _axis_kinds(horizon: int) -> list[tuple[str, int]]:
    """For each class of one axis, past to future: which running sum it reads, and at which shift."""
    if horizon == 0:
        return [("all", 0)]
    return [("before", -horizon), *(("here", a) for a in range(1 - horizon, horizon)), ("after", horizon)]


class _Line:
    """The line of memory in the module's picture, for one call: sizes, offsets and the way there and back."""

    def __init__(self, queries: tuple[int, int], keys: tuple[int, int], horizons: tuple[int, int]):
        self.queries, self.keys, self.horizons = queries, keys, horizons
        self.height, self.width = max(queries[0], keys[0]), max(queries[1], keys[1])
        self.pitch = self.width + horizons[1]
        self.length = queries[0] * self.pitch
        self.front = horizons[0] * self.pitch + horizons[1]
        rows, columns = _axis_kinds(horizons[0]), _axis_kinds(horizons[1])
        self.classes = [((ky, kx), self.front + a * self.pitch + b) for ky, a in rows for kx, b in columns]
        self.kinds = list(itertools.product(dict(rows), dict(columns)))

    def queries_to_line(self, x: Tensor) -> Tensor:
        """``[..., Hq, Wq]`` -> ``[..., length]``, zeros between the rows."""
        return F.pad(x, (0, self.pitch - self.queries[1])).flatten(-2)

    def line_to_queries(self, line: Tensor) -> Tensor:
        """``[..., length]`` -> ``[..., Hq, Wq]``."""
        return line.unflatten(-1, (self.queries[0], self.pitch))[..., : self.queries[1]]

    def sums(self, v: Tensor) -> dict[tuple[str, str], Tensor]:
        """The running sums of ``v [g, e, Hk, Wk]``, each ``[g, e, front + height * pitch + front]``."""
        v = F.pad(v, (0, self.width - self.keys[1], 0, self.height - self.keys[0]))
        lines = {}
        for kind_y in dict.fromkeys(ky for ky, _ in self.kinds):
            rows = _one_sided(v, -2, kind_y)
            for kind_x in dict.fromkeys(kx for _, kx in self.kinds):
                both = F.pad(_one_sided(rows, -1, kind_x), (0, self.horizons[1])).flatten(-2)
                lines[kind_y, kind_x] = F.pad(both, (self.front, self.front))
        return lines

    def sums_backward(self, grads: dict[tuple[str, str], Tensor]) -> Tensor:
        """The gradient ``[g, e, Hk, Wk]`` of ``sums`` for gradients of its lines."""
        total = 0
        for (kind_y, kind_x), line in grads.items():
            grad = line[..., self.front : self.front + self.height * self.pitch].unflatten(-1, (self.height, self.pitch))
            grad = _one_sided(grad[..., : self.width], -1, TRANSPOSED[kind_x])
            total = total + _one_sided(grad, -2, TRANSPOSED[kind_y])
        return total[..., : self.keys[0], : self.keys[1]]

    def bands(self, e: int) -> list[slice]:
        """Slices of the line whose ``e`` channels stay in cache."""
        return chunks(self.length, max(256, BAND_ELEMENTS // e))


class _Weights:
    """Weight per key and mass of the classes, made band by band from queries ``[g, d, L]`` and never held whole."""

    def __init__(self, query: Tensor, table: Tensor, counts: Tensor, mean: bool):
        self.query, self.table, self.counts, self.mean = query, table, counts, mean
        self.inverse = torch.where(self.counts > 0, 1 / self.counts.clamp(min=1), 0) if mean else None

    def per_mass(self, band: slice) -> Tensor:
        """What the weight of each class counts in the mass: its keys, or with "mean" 1 if it has any."""
        counts = self.counts[..., band]
        return (counts > 0).to(counts.dtype) if self.mean else counts

    def of(self, band: slice) -> Tensor:
        """``phi(q) . r`` of each class, ``[g, C, band]``."""
        return torch.bmm(self.table, self.query[..., band])

    def per_key(self, weights: Tensor, band: slice) -> Tensor:
        """``weights``, in place, as each single key has them; its own transpose."""
        return weights.mul_(self.inverse[..., band]) if self.mean else weights


def _chunks(phi_q: Tensor, table: Tensor, counts: Tensor, size: int):
    """For slices of ``size`` heads that are worked on together: the slice, its head of the tables, its table, its counts."""
    batch = counts.shape[0]
    for g in chunks(phi_q.shape[0], max(1, size)):
        index = torch.arange(g.start, g.stop, device=phi_q.device)
        head = index % table.shape[0]
        yield g, head, table[head], counts if batch == 1 else counts[index // (phi_q.shape[0] // batch)]


def _shifted_chunks(phi_q: Tensor, table: Tensor, v: Tensor, counts: Tensor, horizons: tuple[int, int], mean: bool):
    """Chunks of heads of the shifted form: the slice, its head of the tables, the line, the weights."""
    line = _Line(tuple(phi_q.shape[2:]), tuple(v.shape[2:]), horizons)
    for g, head, own_table, own_counts in _chunks(phi_q, table, counts, BAND_ELEMENTS // (v.shape[1] * line.length)):
        weights = _Weights(line.queries_to_line(phi_q[g]), own_table, line.queries_to_line(own_counts), mean)
        yield g, head, line, weights


def _direct_chunks(phi_q: Tensor, table: Tensor, v: Tensor, counts: Tensor, horizons: tuple[int, int], mean: bool):
    """Chunks of heads of the direct form: the slice, its head of the tables, the weights, the class of each key and query."""
    queries, keys = phi_q[0, 0].numel(), v[0, 0].numel()
    index = _class_index(tuple(phi_q.shape[2:]), tuple(v.shape[2:]), horizons, v.device)
    for g, head, own_table, own_counts in _chunks(phi_q, table, counts, BAND_ELEMENTS // (queries * keys)):
        weights = _Weights(phi_q[g].flatten(2), own_table, own_counts.flatten(2), mean)
        yield g, head, weights, index.expand(g.stop - g.start, -1, -1)


def _class_index(queries: tuple[int, int], keys: tuple[int, int], horizons: tuple[int, int], device) -> Tensor:
    """The class of each key as seen from each query, ``[Hk * Wk, Hq * Wq]``."""
    axes = []
    for n, m, horizon in zip(queries, keys, horizons, strict=True):
        delta = torch.arange(m, device=device)[:, None] - torch.arange(n, device=device)
        axes.append(delta.clamp(-horizon, horizon) + horizon)
    rows, columns = axes
    return (rows[:, None, :, None] * (2 * horizons[1] + 1) + columns[None, :, None, :]).flatten(2).flatten(0, 1)


def direct_is_faster(keys: int, classes: int, e: int) -> bool:
    """Whether a weight for each pair costs less than one for each class: few keys against C classes of width e.

    Measured on a CPU at e = 16 and 64, forward and backward: the two meet between ``C e / 3`` and ``C e / 5`` keys. The bound
    does not depend on the number of queries, so memory stays linear in it.
    """
    return 4 * keys < classes * e


def _takes_direct(table: Tensor, v: Tensor) -> bool:
    return direct_is_faster(v.shape[2] * v.shape[3], table.shape[1], v.shape[1])


@torch.library.custom_op("visionattn::class_sums", mutates_args=())
def class_sums(
    phi_q: Tensor, table: Tensor, v: Tensor, counts: Tensor, horizon_y: int, horizon_x: int, mean: bool
) -> tuple[Tensor, Tensor]:
    """``sum_ab w_ab(y, x) U_ab(y, x)`` with ``w_ab = phi(q) . r_ab``, and the sum of the weights of all keys.

    Args:
        phi_q: queries after the feature map, ``[G, d, Hq, Wq]`` with ``G = B * h``, float32 or float64.
        table: ``[h or 1, C, d]``, ``C = (2Ry+1) * (2Rx+1)`` classes row by row; the dtype of phi_q.
        v: values on the grid of keys, ``[G, e, Hk, Wk]``, zero where a patch is absent; the dtype of phi_q.
        counts: keys of each class as seen from each query, ``[1 or B, C, Hq, Wq]``; the dtype of phi_q.
        horizon_y, horizon_x: Ry and Rx.
        mean: divide the weight of a class by the number of its keys.

    Returns:
        values ``[G, e, Hq, Wq]`` and mass ``[G, Hq, Wq]``.

    Source: the linear relative position of Scaleformer (section 3.3) in one dimension; in two it is ours.
    """
    values = v.new_empty(v.shape[0], v.shape[1], *phi_q.shape[2:])
    mass = v.new_empty(v.shape[0], *phi_q.shape[2:])
    operands = (phi_q, table, v, counts, (horizon_y, horizon_x), mean)
    run = _direct_forward if _takes_direct(table, v) else _shifted_forward
    run(operands, values, mass)
    return values, mass


def _shifted_forward(operands: tuple, values: Tensor, mass: Tensor) -> None:
    v = operands[2]
    for g, _, line, weights in _shifted_chunks(*operands):
        sums = line.sums(v[g])
        values_line = v.new_zeros(*v[g].shape[:2], line.length)
        mass_line = v.new_empty(v[g].shape[0], line.length)
        for band in line.bands(v.shape[1]):
            w = weights.of(band)
            mass_line[:, band] = torch.linalg.vecdot(w, weights.per_mass(band), dim=1)
            w = weights.per_key(w, band).unsqueeze(2)
            for c, (kind, offset) in enumerate(line.classes):
                values_line[..., band].addcmul_(w[:, c], sums[kind][..., offset + band.start : offset + band.stop])
        values[g], mass[g] = line.line_to_queries(values_line), line.line_to_queries(mass_line)


def _direct_forward(operands: tuple, values: Tensor, mass: Tensor) -> None:
    v, everything = operands[2], slice(None)
    for g, _, weights, index in _direct_chunks(*operands):
        w = weights.of(everything)
        mass[g] = torch.linalg.vecdot(w, weights.per_mass(everything), dim=1).view_as(mass[g])
        pairs = weights.per_key(w, everything).gather(1, index)
        values[g] = torch.bmm(v[g].flatten(2), pairs).view_as(values[g])


@class_sums.register_fake
def _(phi_q, table, v, counts, horizon_y, horizon_x, mean):
    height, width = phi_q.shape[2:]
    return v.new_empty(v.shape[0], v.shape[1], height, width), v.new_empty(v.shape[0], height, width)


@torch.library.custom_op("visionattn::class_sums_backward", mutates_args=())
def class_sums_backward(
    d_values: Tensor,
    d_mass: Tensor,
    phi_q: Tensor,
    table: Tensor,
    v: Tensor,
    counts: Tensor,
    horizon_y: int,
    horizon_x: int,
    mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``class_sums`` with respect to phi_q, table and v; the weights are made anew, not kept."""
    grads = phi_q.new_empty(phi_q.shape), table.new_zeros(table.shape), v.new_empty(v.shape)
    operands = (phi_q, table, v, counts, (horizon_y, horizon_x), mean)
    run = _direct_backward if _takes_direct(table, v) else _shifted_backward
    run(operands, d_values, d_mass, *grads)
    return grads


def _shifted_backward(operands: tuple, d_values: Tensor, d_mass: Tensor, dq: Tensor, d_table: Tensor, dv: Tensor) -> None:
    v = operands[2]
    for g, head, line, weights in _shifted_chunks(*operands):
        sums = line.sums(v[g])
        d_sums = {kind: torch.zeros_like(x) for kind, x in sums.items()}
        values_line, mass_line = line.queries_to_line(d_values[g]), line.queries_to_line(d_mass[g])
        dq_line = torch.empty_like(weights.query)
        for band in line.bands(v.shape[1]):
            grad = values_line[..., band].contiguous()
            w = weights.per_key(weights.of(band), band).unsqueeze(2)
            dw, product = torch.empty_like(w[:, :, 0]), torch.empty_like(grad)
            for c, (kind, offset) in enumerate(line.classes):
                there = slice(offset + band.start, offset + band.stop)
                d_sums[kind][..., there].addcmul_(w[:, c], grad)
                torch.sum(torch.mul(grad, sums[kind][..., there], out=product), dim=1, out=dw[:, c])
            dw = weights.per_key(dw, band).addcmul_(mass_line[:, None, band], weights.per_mass(band))
            dq_line[..., band] = torch.bmm(weights.table.transpose(1, 2), dw)
            d_table.index_add_(0, head, torch.bmm(dw, weights.query[..., band].transpose(1, 2)))
        dq[g], dv[g] = line.line_to_queries(dq_line), line.sums_backward(d_sums)


def _direct_backward(operands: tuple, d_values: Tensor, d_mass: Tensor, dq: Tensor, d_table: Tensor, dv: Tensor) -> None:
    v, everything = operands[2], slice(None)
    for g, head, weights, index in _direct_chunks(*operands):
        grad, value = d_values[g].flatten(2), v[g].flatten(2)
        w = weights.per_key(weights.of(everything), everything)
        dv[g] = torch.bmm(grad, w.gather(1, index).transpose(1, 2)).view_as(dv[g])
        dw = torch.zeros_like(w).scatter_add_(1, index, torch.bmm(value.transpose(1, 2), grad))
        dw = weights.per_key(dw, everything).addcmul_(d_mass[g].flatten(1).unsqueeze(1), weights.per_mass(everything))
        dq[g] = torch.bmm(weights.table.transpose(1, 2), dw).view_as(dq[g])
        d_table.index_add_(0, head, torch.bmm(dw, weights.query.transpose(1, 2)))


@class_sums_backward.register_fake
def _(d_values, d_mass, phi_q, table, v, counts, horizon_y, horizon_x, mean):
    return phi_q.new_empty(phi_q.shape), table.new_empty(table.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    phi_q, table, v, counts, *ctx.options = inputs
    ctx.save_for_backward(phi_q, table, v, counts)


def _backward(ctx, d_values, d_mass):
    with without_autocast(d_values):
        dq, d_table, dv = class_sums_backward(d_values, d_mass, *ctx.saved_tensors, *ctx.options)
    return dq, d_table, dv, None, None, None, None


class_sums.register_autograd(_backward, setup_context=_setup_context)
