"""What ``torch.utils.flop_counter`` shall count for our operators: multiply-adds of products, times 2, from shapes alone.

A file of its own because importing torch's counter without Triton prints a warning; the package imports this one where Triton
is present, and ``import visionattn.ops.flops`` registers the formulas anywhere.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from visionattn.ops import kernelized  # noqa: F401  the operators exist once their modules are imported
from visionattn.ops.choice import choose_form
from visionattn.ops.class_sums import direct_is_faster
from visionattn.ops.taylor_features import num_features


def _class_sums_sizes(q, table, v) -> tuple[int, int]:
    """Queries of all heads, and the multiply-adds of one query's sum of values in the form that runs."""
    batch, heads, height, width, _ = q
    keys, e = v[2] * v[3], v[4]
    terms = keys if direct_is_faster(keys, table[1], e) else table[1]
    return batch * heads * height * width, terms * e


@register_flop_formula(torch.ops.visionattn.class_sums)
def _(q, table, v, *args, out_shape=None, **kwargs) -> int:
    queries, per_query = _class_sums_sizes(q, table, v)
    return 2 * queries * (table[1] * table[2] + per_query)


@register_flop_formula(torch.ops.visionattn.class_sums_backward)
def _(d_values, d_mass, q, table, v, *args, out_shape=None, **kwargs) -> int:
    queries, per_query = _class_sums_sizes(q, table, v)
    return 2 * queries * (3 * table[1] * table[2] + 2 * per_query)


def _taylor_flops(q, k, v, form: str, backward: bool, state_kept: bool = False) -> int:
    """Multiply-adds of the matrix products, times 2; shapes are ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``.

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
def _(d_values, d_mass, q, k, v, temperature, key_mask, state, *args, out_shape=None, **kwargs) -> int:
    return _taylor_flops(q, k, v, args[-1], backward=True, state_kept=state[2] > 0)


@register_flop_formula(torch.ops.visionattn.direct_values)
def _(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] * k[1] * (q[2] + v[2])


@register_flop_formula(torch.ops.visionattn.direct_values_backward)
def _(grad, q, k, v, *args, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] * k[1] * (3 * q[2] + 2 * v[2])
