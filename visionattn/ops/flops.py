"""What ``torch.utils.flop_counter`` shall count for our operators: multiply-adds of products, times
2, from shapes alone.

A file of its own because importing torch's counter without Triton prints a warning; the package
imports this one where Triton is present, and ``import visionattn.ops.flops`` registers the formulas
anywhere.
"""

from math import prod

import torch
from torch.utils.flop_counter import register_flop_formula

from visionattn.ops import (
    softmax,  # noqa: F401  operators exist once their modules are imported
    states,  # noqa: F401  operators exist once their modules are imported
)
from visionattn.ops.choice import choose_form
from visionattn.ops.kernelized import gpu as kernel_mean  # noqa: F401  operators exist once their modules are imported
from visionattn.ops.kernelized.eager import BLOCK_TOKENS, form_taken
from visionattn.ops.position.joint import direct_is_faster
from visionattn.ops.taylorshift import gpu as taylor_mean  # noqa: F401  operators exist once their modules are imported
from visionattn.ops.taylorshift.features import num_features


def _class_sums_sizes(q, table, v, horizon_y: int) -> tuple[int, int]:
    """Queries of all heads, and the multiply-adds of one query's sum of values in the form that
    runs.
    """
    batch, heads, height, width, _ = q
    keys, e = v[2] * v[3], v[4]
    terms = keys if direct_is_faster(keys, 2 * horizon_y + 1) else table[1]
    return batch * heads * height * width, terms * e


@register_flop_formula(torch.ops.visionattn.class_sums)
def _(q, table, v, counts, total, horizon_y, *args, out_shape=None, **kwargs) -> int:
    queries, per_query = _class_sums_sizes(q, table, v, horizon_y)
    return 2 * queries * (table[1] * table[2] + per_query)


@register_flop_formula(torch.ops.visionattn.class_sums_backward)
def _(
    d_values, d_mass, q, table, v, counts, total, horizon_y, *args, out_shape=None, **kwargs
) -> int:
    queries, per_query = _class_sums_sizes(q, table, v, horizon_y)
    return 2 * queries * (3 * table[1] * table[2] + 2 * per_query)


@register_flop_formula(torch.ops.visionattn.product)
def _(x, y, *args, out_shape=None, **kwargs) -> int:
    return 2 * prod(x) * y[-1]


def _axis_flops(q, table, v, backward: bool) -> int:
    """Products of each query with the classes of rows that occur, and of those with the sums of
    rows, the mass being a column.
    """
    (batch, heads, height, width, d), e = q, v[4]
    classes = 2 * min(table[1] // 2, height) + 1
    return (
        2
        * batch
        * heads
        * height
        * width
        * classes
        * (3 * d + 2 * e + 1 if backward else d + e + 1)
    )


@register_flop_formula(torch.ops.visionattn.axis_sums)
def _(q, table, v, *args, out_shape=None, **kwargs) -> int:
    return _axis_flops(q, table, v, backward=False)


@register_flop_formula(torch.ops.visionattn.axis_sums_backward)
def _(d_values, d_mass, q, table, v, *args, out_shape=None, **kwargs) -> int:
    return _axis_flops(q, table, v, backward=True)


def _taylor_flops(q, k, v, form: str, backward: bool, state_kept: bool = False) -> int:
    """Multiply-adds of the matrix products, times 2; shapes are ``[B, h, N, d]``, ``[B, h, M, d]``,
    ``[B, h, M, e]``.

    "auto" counts the form of fewer operations, whatever machine runs it.
    """
    (batch, heads, n, d), m, e = q, k[2], v[3]
    groups = batch * heads
    if form == "auto":
        form = choose_form("taylorshift", n, m, d, e, heads=groups, device="meta")
    mass = groups * (n + m) * d * d * (3 if backward else 1)
    if form == "direct":
        return 2 * (groups * n * m * ((3 * d + 2 * e) if backward else (d + e)) + mass)
    passes = (n + m) if not backward else 2 * (n + m) + (0 if state_kept else m)
    return 2 * (groups * passes * (num_features(d) + d + 1) * e + mass)


@register_flop_formula(torch.ops.visionattn.taylor_sums)
def _(q, k, v, temperature, key_mask, a, b, c, form, *args, out_shape=None, **kwargs) -> int:
    return _taylor_flops(q, k, v, form, backward=False)


@register_flop_formula(torch.ops.visionattn.taylor_sums_backward)
def _(
    d_values, d_mass, q, k, v, temperature, key_mask, state, *args, out_shape=None, **kwargs
) -> int:
    return _taylor_flops(q, k, v, args[-1], backward=True, state_kept=state[2] > 0)


def _kernel_flops(q, v, causal: bool, form: str, backward: bool) -> int:
    """Multiply-adds of the matrix products, times 2, for ``[B, h, N, f]`` and ``[B, h, M, e]``; the
    mass is a column.
    """
    (batch, heads, n, f), m, e1 = q, v[2], v[3] + 1
    if form_taken(form, causal, q, v, device="meta") == "direct":
        first = min(n, m)
        pairs = first * (first + 1) // 2 + (n - first) * m if causal else n * m
        total = pairs * (3 * f + 2 * e1 if backward else f + e1) + m * f * e1 * (
            2 if backward else 1
        )
    elif not causal:
        total = (n + m) * f * e1 * (2 if backward else 1)
    elif not backward:
        total = (n + m) * f * e1 + n * BLOCK_TOKENS * (f + e1)
    else:
        total = (2 * n + 3 * m) * f * e1 + (n + 2 * m) * BLOCK_TOKENS * (f + e1)
    return 2 * batch * heads * total


@register_flop_formula(torch.ops.visionattn.kernel_sums)
def _(q, k, v, key_mask, feature_map, causal, form, *args, out_shape=None, **kwargs) -> int:
    return _kernel_flops(q, v, causal, form, backward=False)


@register_flop_formula(torch.ops.visionattn.kernel_sums_backward)
def _(
    d_values,
    d_mass,
    d_s,
    d_z,
    q,
    k,
    v,
    key_mask,
    s,
    z,
    feature_map,
    causal,
    form,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    return _kernel_flops(q, v, causal, form, backward=True)


def _pair_flops(q, k, v, table, backward: bool) -> int:
    """Products of each query with keys and values, and of each with the classes of joint relative
    position.
    """
    (batch, heads, n, d), m, e = q, k[2], v[3]
    per_query = m * (3 * d + 2 * e if backward else d + e)
    if table is not None:
        per_query += table[1] * table[2] * (3 * d if backward else d)
    return 2 * batch * heads * n * per_query


@register_flop_formula(torch.ops.visionattn.pair_mean)
def _(q, k, v, temperature, key_mask, table, *args, out_shape=None, **kwargs) -> int:
    return _pair_flops(q, k, v, table, backward=False)


@register_flop_formula(torch.ops.visionattn.pair_mean_backward)
def _(
    grad, out, mass, q, k, v, temperature, key_mask, table, *args, out_shape=None, **kwargs
) -> int:
    return _pair_flops(q, k, v, table, backward=True)


def _position_flops(q, v, table, place, backward: bool) -> int:
    """Products of joint relative position for each patch: as many as ``class_sums`` counts in its
    tiled form.
    """
    if table is None:
        return 0
    (batch, heads, n, d), classes = q, table[1] * table[2]
    per_query = classes * ((3 * d + 2 * v[3]) if backward else (d + v[3]))
    return 2 * batch * heads * (n - place[2]) * per_query


@register_flop_formula(torch.ops.visionattn.kernel_mean)
def _(q, k, v, key_mask, table, feature_map, causal, place, *args, out_shape=None, **kwargs) -> int:
    return _kernel_flops(q, v, causal, "efficient", backward=False) + _position_flops(
        q, v, table, place, backward=False
    )


@register_flop_formula(torch.ops.visionattn.kernel_mean_backward)
def _(
    grad,
    out,
    mass,
    q,
    k,
    v,
    key_mask,
    table,
    state,
    feature_map,
    causal,
    place,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    return _kernel_flops(q, v, causal, "efficient", backward=True) + _position_flops(
        q, v, table, place, backward=True
    )


@register_flop_formula(torch.ops.visionattn.taylor_mean)
def _(
    q, k, v, temperature, key_mask, table, a, b, c, form, place, *args, out_shape=None, **kwargs
) -> int:
    return _taylor_flops(q, k, v, form, backward=False) + _position_flops(
        q, v, table, place, backward=False
    )


@register_flop_formula(torch.ops.visionattn.taylor_mean_backward)
def _(
    grad,
    out,
    mass,
    q,
    k,
    v,
    temperature,
    key_mask,
    table,
    features,
    *args,
    out_shape=None,
    **kwargs,
) -> int:
    form, place, kept = args[-2], args[-1], features[0] > 0
    own = _taylor_flops(q, k, v, form, backward=True, state_kept=kept)
    return own + _position_flops(q, v, table, place, backward=True)


def _state_flops(x, e: int, backward: bool) -> int:
    """Products of features with a state, for ``x [G, N, d]``."""
    return 2 * x[0] * x[1] * num_features(x[2]) * e * (2 if backward else 1)


@register_flop_formula(torch.ops.visionattn.feature_state)
def _(k, v, *args, out_shape=None, **kwargs) -> int:
    return _state_flops(k, v[2], backward=False)


@register_flop_formula(torch.ops.visionattn.feature_state_backward)
def _(grad, k, v, *args, out_shape=None, **kwargs) -> int:
    return _state_flops(k, v[2], backward=True)


@register_flop_formula(torch.ops.visionattn.expand_state)
def _(q, state, *args, out_shape=None, **kwargs) -> int:
    return _state_flops(q, state[2], backward=False)


@register_flop_formula(torch.ops.visionattn.expand_state_backward)
def _(grad, q, state, *args, out_shape=None, **kwargs) -> int:
    return _state_flops(q, state[2], backward=True)


def _relative_scores_flops(q, table, height: int, width: int, backward: bool) -> int:
    """Products of each query with the entries that its block of queries reaches, counted as if it
    reached them all.
    """
    batch, heads, rows, columns, d = q
    classes = min(table[1], rows + height - 1) * min(table[2], columns + width - 1)
    return 2 * batch * heads * rows * columns * classes * d * (2 if backward else 1)


@register_flop_formula(torch.ops.visionattn.relative_scores)
def _(q, table, height, width, *args, out_shape=None, **kwargs) -> int:
    return _relative_scores_flops(q, table, height, width, backward=False)


@register_flop_formula(torch.ops.visionattn.relative_scores_backward)
def _(grad, q, table, height, width, *args, out_shape=None, **kwargs) -> int:
    return _relative_scores_flops(q, table, height, width, backward=True)
