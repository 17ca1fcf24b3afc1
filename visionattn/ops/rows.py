"""The weights with which chosen queries see all keys: rows of attention, which the operations
themselves never form.

A row takes time and memory linear in the keys, so that a few of them can be looked at on images of
any size. A row is that of the mean which the operation of the same name takes: the sum over its
keys is 1, and the mean of the values under it is the operation's output. Rows have no gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.checks import (
    check_attention,
    check_coefficients,
    check_layout,
    check_temperature,
    described,
)
from visionattn.ops.feature_maps import (
    get_feature_map,
    key_features,
    map_name,
    query_features,
    raised,
)
from visionattn.ops.nonfinite import masked
from visionattn.ops.position.kinds import Axial, Flat, RelativePosition, mask_absent, tables_of
from visionattn.ops.sums import accumulation_dtype, divisor_of
from visionattn.ops.window import WINDOW_SIZE


class Rows(NamedTuple):
    """Rows of attention; float32, float64 for float64 inputs."""

    content: Tensor
    """``[B, h, Q, M]``: the share of each key that comes of its content; under a softmax all of its
    weight, as a bias is no summand of it.
    """
    relative: Tensor | None
    """``[B, h, Q, M]``: the share that comes of its place; None where there is no such summand."""

    @property
    def total(self) -> Tensor:
        """Return the weights ``[B, h, Q, M]``; each row sums to 1, or to 0 where a query has no
        weight at all.
        """
        return self.content if self.relative is None else self.content + self.relative


@torch.no_grad()
def taylorshift_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    temperature: Tensor | None = None,
    coefficients: tuple[float, float, float] = (0.5, 1.0, 1.0),
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> Rows:
    """Return rows of ``taylorshift_attention``, which has the arguments.

    Args:
        rows: int64 ``[Q]``, which queries, from 0 to N - 1.

    Raises:
        ValueError: what the operation raises, and rows that are none.
    """
    check_coefficients(coefficients)
    check_temperature(temperature, q)
    seen = _Seen(q, k, rows, relative, key_mask)
    a, b, c = coefficients
    queries, keys = seen.queries, seen.keys
    if temperature is not None:
        tau = temperature.to(queries.dtype)[:, None, None]
        queries, keys = tau * _unit_length(queries), _unit_length(keys)
    x = queries @ keys.mT
    return seen.shares((a * x + b) * x + c)


@torch.no_grad()
def kernelized_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    feature_map="elu1",
    causal: bool = False,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> Rows:
    """Return rows of ``kernelized_attention``, which has the arguments.

    Args:
        rows: int64 ``[Q]``, which queries, from 0 to N - 1.

    Raises:
        ValueError: what the operation raises, and rows that are none.
    """
    seen = _Seen(q, k, rows, relative, key_mask, causal)
    feature_map = get_feature_map(feature_map)
    queries, keys = seen.queries, seen.keys
    if map_name(feature_map) == "elu1":  # what all features share is no part of the weights
        queries = seen.queries = raised(queries, (3,))
        if relative is None and not causal:
            keys = raised(keys, (2, 3), seen.mask)
    phi_q = query_features(feature_map, queries)
    phi_k = key_features(feature_map, keys, seen.mask, phi_q.shape[3])
    return seen.shares(phi_q @ phi_k.mT)


@torch.no_grad()
def softmax_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    causal: bool = False,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> Rows:
    """Return rows of ``softmax_attention``, which has the arguments.

    Args:
        rows: int64 ``[Q]``, which queries, from 0 to N - 1.

    Raises:
        ValueError: what the operation raises, and rows that are none.
    """
    seen = _Seen(q, k, rows, relative, key_mask, causal, signed=True)
    return seen.softmax(seen.visible())


@torch.no_grad()
def window_rows(
    q: Tensor,
    k: Tensor,
    rows: Tensor,
    *,
    window_size: int = WINDOW_SIZE,
    shifted: bool = False,
    layout: TokenLayout | None = None,
    relative: RelativePosition | None = None,
    key_mask: Tensor | None = None,
) -> Rows:
    """Return rows of ``window_attention``, which has the arguments.

    Args:
        rows: int64 ``[Q]``, which queries, from 0 to N - 1.

    Raises:
        ValueError: what the operation raises, and rows that are none.
    """
    given = layout if relative is None else relative.layout
    if given is None:
        raise ValueError("windows need to know where the tokens lie: pass layout")
    check_layout(given, q, k)
    if relative is None:
        key_mask = given.key_mask(key_mask)
    seen = _Seen(q, k, rows, relative, key_mask, signed=True)
    places = _Places(given, k, rows)
    together = ~places.pairs()  # prefix tokens lie in all windows
    first = window_size // 2 if shifted else 0
    same = torch.ones_like(together)
    for own, all_of in places.axes():
        same = same & (
            (own - first).div(window_size, rounding_mode="floor")
            == (all_of - first).div(window_size, rounding_mode="floor")
        )
    return seen.softmax(seen.visible() & (same | together))


ROWS: dict[str, Callable[..., Rows]] = {
    "taylorshift": taylorshift_rows,
    "kernelized": kernelized_rows,
    "softmax": softmax_rows,
    "window": window_rows,
}
"""Rows by the name of the attention, as ``attentions.py`` has it."""


class _Seen:
    """Chosen queries and all keys of one call, and who sees whom."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        rows: Tensor,
        relative: RelativePosition | None,
        key_mask: Tensor | None,
        causal: bool = False,
        *,
        signed: bool = False,
    ):
        check_attention(q, k, k, key_mask, relative, signed=signed)
        _check_rows(rows, q)
        relative, mask = mask_absent(relative, key_mask)
        dtype = accumulation_dtype(q, k)
        self.relative, self.mask, self.rows, self.causal = relative, mask, rows, causal
        self.queries = q[:, :, rows].to(dtype)
        self.keys = masked(k, mask).to(dtype)

    def visible(self) -> Tensor:
        """Return which keys each of the queries sees, bool ``[B or 1, Q or 1, M]``."""
        keys = self.keys.shape[2]
        seen = torch.ones(1, 1, keys, dtype=torch.bool, device=self.keys.device)
        if self.mask is not None:
            seen = self.mask[:, None]
        if self.causal:
            seen = seen & (torch.arange(keys, device=seen.device) <= self.rows[:, None])
        return seen

    def shares(self, content: Tensor) -> Rows:
        """Return the rows for weights of the content ``[B, h, Q, M]``."""
        visible = self.visible()
        content = content.masked_fill(~visible[:, None], 0)
        if self.relative is None:
            return Rows(content / divisor_of(content.sum(-1)), None)
        mean = self.relative.normalization == "mean"
        if mean:
            content = content / visible.sum(-1).clamp(min=1)[:, None, :, None]
        places = _Places(self.relative.layout, self.keys, self.rows)
        pairs = places.pairs() & visible
        features = query_features(get_feature_map("elu1"), self.queries)
        of_places = torch.zeros_like(content)
        for table, classes in places.classes(self.relative):
            weights = _scores(features, table, classes).masked_fill(~pairs[:, None], 0)
            if mean:
                weights = weights / _class_sizes(classes, pairs, table.shape[1])[:, None]
            of_places = of_places + weights
        mass = divisor_of(content.sum(-1) + of_places.sum(-1))
        return Rows(content / mass, of_places / mass)

    def softmax(self, visible: Tensor) -> Rows:
        """Return the rows of a softmax over the keys that are ``visible [B or 1, Q or 1, M]``."""
        scale = self.queries.shape[3] ** -0.5
        scores = self.queries @ self.keys.mT * scale
        if self.relative is not None:
            places = _Places(self.relative.layout, self.keys, self.rows)
            pairs = places.pairs()[:, None]
            for table, classes in places.classes(self.relative):
                bias = _scores(self.queries, table, classes) * scale
                scores = scores + bias.masked_fill(~pairs, 0)
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        empty = ~visible.any(-1, keepdim=True)[:, None]
        weights = scores.masked_fill(empty, 0).softmax(-1)
        return Rows(weights.masked_fill(empty, 0), None)


class _Places:
    """Where chosen queries and all keys lie; without a layout along the sequence."""

    def __init__(self, layout: TokenLayout | None, k: Tensor, rows: Tensor):
        prefix, width, index = 0, k.shape[2], None
        if layout is not None:
            prefix, width, index = layout.num_prefix, layout.grid.width, layout.kept
        if index is None:
            index = torch.arange(k.shape[2] - prefix, device=k.device)[None]
        # Prefix tokens lie nowhere; they get a place that no pair of patches reads.
        self.index = torch.nn.functional.pad(index, (prefix, 0))
        self.width, self.rows = width, rows
        self.patch = torch.arange(k.shape[2], device=k.device) >= prefix

    def pairs(self) -> Tensor:
        """Return which pairs of query and key are of patches, bool ``[1, Q, M]``."""
        return (self.patch[self.rows][:, None] & self.patch)[None]

    def axes(self) -> list[tuple[Tensor, Tensor]]:
        """Return rows and columns of the grid, of the queries ``[B or 1, Q, 1]`` and of the keys
        ``[B or 1, 1, M]``.
        """
        both = self.index.div(self.width, rounding_mode="floor"), self.index % self.width
        return [self._pair(each) for each in both]

    def _pair(self, places: Tensor) -> tuple[Tensor, Tensor]:
        return places[:, self.rows, None], places[:, None]

    def classes(self, relative: RelativePosition) -> list[tuple[Tensor, Tensor]]:
        """Return each table ``[h or 1, C, d]`` with the class of every pair
        ``[B or 1, Q, M]``.
        """
        tables = tables_of(relative)
        if isinstance(relative, Flat):
            along = self._pair(self.index)
            return [(relative.table, _clipped(along, relative.table.shape[1]))]
        rows, columns = self.axes()
        if isinstance(relative, Axial):
            ways = zip(tables.values(), (rows, columns), strict=True)
            return [(table, _clipped(axis, table.shape[1])) for table, axis in ways]
        height, width = relative.table.shape[1:3]
        classes = _clipped(rows, height) * width + _clipped(columns, width)
        return [(relative.table.flatten(1, 2), classes)]


def _clipped(axis: tuple[Tensor, Tensor], num_classes: int) -> Tensor:
    """Return ``clip(key - query, -R, R) + R`` of each pair, for 2R+1 classes."""
    horizon = num_classes // 2
    return (axis[1] - axis[0]).clamp(-horizon, horizon) + horizon


def _scores(features: Tensor, table: Tensor, classes: Tensor) -> Tensor:
    """Return ``features . table_c`` of each pair's class c: ``[B, h, Q, d]`` to
    ``[B, h, Q, M]``.
    """
    of_classes = features @ table.to(features.dtype).mT
    classes = classes[:, None].expand(*of_classes.shape[:2], -1, -1)
    return of_classes.gather(3, classes)


def _class_sizes(classes: Tensor, pairs: Tensor, num_classes: int) -> Tensor:
    """Return for each pair how many of the pairs of its query are of its class, at least 1:
    ``[B or 1, Q, M]``.
    """
    classes, pairs = torch.broadcast_tensors(classes, pairs)
    counts = torch.zeros(*pairs.shape[:2], num_classes, dtype=torch.int64, device=pairs.device)
    counts.scatter_add_(2, classes, pairs.to(torch.int64))
    return counts.gather(2, classes).clamp(min=1)


def _unit_length(x: Tensor) -> Tensor:
    """Return ``x / max(|x|, 1e-6)`` along the last axis."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)


def _check_rows(rows: Tensor, q: Tensor) -> None:
    """Raise ValueError unless ``rows`` are int64 ``[Q]`` and number queries of ``q``."""
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.ndim != 1:
        raise ValueError(f"rows: wanted int64 [Q], numbers of queries, got {described(rows)}")
    most = q.shape[2] - 1
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) <= most):
        raise ValueError(
            f"rows: wanted numbers of queries from 0 to {most}, got {int(rows.min())} to "
            f"{int(rows.max())}"
        )
