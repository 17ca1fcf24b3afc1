"""Weighted sums of values over the classes of clipped relative position on a grid, forward and backward.

Each class (a, b) of the offset ``(clip(dy), clip(dx))`` has, for the query at (y, x), the sum ``U_ab(y, x)`` of the values
of its keys. Along an axis a class is the one key at ``y + a``, or all keys at and before ``y - R``, or all at and after
``y + R``: so U is one of nine arrays (the values themselves or one-sided running sums of them, per axis) read at a shift,
and the output is a sum of shifted multiply-adds. Running sums are never differenced: nothing is lost in float32.

Order in memory: tokens contiguous. Rows of the grid stand in one line with R zeros after each row and R rows of zeros before and
after, so that every shift is an offset of a contiguous run:

    0 0 0 0 0 0 0 0 | v v v v v 0 0 0 | v v v v v 0 0 0 | 0 0 0 0 0 0 0 0
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.blocked import chunks

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


def _plan(w: Tensor, v: Tensor, horizons: tuple[int, int]) -> tuple[_Line, list[slice]]:
    """The line, and the slices of heads that are worked on together."""
    line = _Line(tuple(w.shape[2:]), tuple(v.shape[2:]), horizons)
    return line, chunks(w.shape[0], max(1, BAND_ELEMENTS // (v.shape[1] * line.length)))


@torch.library.custom_op("visionattn::class_sums", mutates_args=())
def class_sums(w: Tensor, v: Tensor, horizon_y: int, horizon_x: int) -> Tensor:
    """``sum_ab w_ab(y, x) U_ab(y, x)``: ``[G, e, Hq, Wq]``.

    Args:
        w: weight of each class as seen from each query, ``[G, (2Ry+1) * (2Rx+1), Hq, Wq]``, classes row by row.
        v: values on the grid of keys, ``[G, e, Hk, Wk]``, zero where a patch is absent; the dtype of w.
        horizon_y, horizon_x: Ry and Rx.

    Source: the linear relative position of Scaleformer (section 3.3) in one dimension; in two it is ours.
    """
    line, heads = _plan(w, v, (horizon_y, horizon_x))
    out = v.new_empty(v.shape[0], v.shape[1], *w.shape[2:])
    for g in heads:
        sums, weights = line.sums(v[g]), line.queries_to_line(w[g]).unsqueeze(2)
        total = v.new_zeros(*v[g].shape[:2], line.length)
        for band in line.bands(v.shape[1]):
            for c, (kind, offset) in enumerate(line.classes):
                total[..., band].addcmul_(weights[:, c, :, band], sums[kind][..., offset + band.start : offset + band.stop])
        out[g] = line.line_to_queries(total)
    return out


@class_sums.register_fake
def _(w, v, horizon_y, horizon_x):
    return v.new_empty(v.shape[0], v.shape[1], w.shape[2], w.shape[3])


@torch.library.custom_op("visionattn::class_sums_backward", mutates_args=())
def class_sums_backward(grad: Tensor, w: Tensor, v: Tensor, horizon_y: int, horizon_x: int) -> tuple[Tensor, Tensor]:
    """Gradients of ``class_sums`` with respect to w and v for ``grad [G, e, Hq, Wq]``."""
    line, heads = _plan(w, v, (horizon_y, horizon_x))
    dw, dv = w.new_empty(w.shape), v.new_empty(v.shape)
    for g in heads:
        sums, weights = line.sums(v[g]), line.queries_to_line(w[g]).unsqueeze(2)
        d_sums = {kind: torch.zeros_like(x) for kind, x in sums.items()}
        g_line = line.queries_to_line(grad[g])
        dw_line = w.new_empty(*w[g].shape[:2], line.length)
        for band in line.bands(v.shape[1]):
            g_band = g_line[..., band].contiguous()
            for c, (kind, offset) in enumerate(line.classes):
                there = slice(offset + band.start, offset + band.stop)
                d_sums[kind][..., there].addcmul_(weights[:, c, :, band], g_band)
                dw_line[:, c, band] = torch.linalg.vecdot(g_band, sums[kind][..., there], dim=1)
        dw[g] = line.line_to_queries(dw_line)
        dv[g] = line.sums_backward(d_sums)
    return dw, dv


@class_sums_backward.register_fake
def _(grad, w, v, horizon_y, horizon_x):
    return w.new_empty(w.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    w, v, *ctx.horizons = inputs
    ctx.save_for_backward(w, v)


def _backward(ctx, grad):
    return *class_sums_backward(grad, *ctx.saved_tensors, *ctx.horizons), None, None


class_sums.register_autograd(_backward, setup_context=_setup_context)
