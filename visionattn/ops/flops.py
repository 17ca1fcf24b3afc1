"""What ``torch.utils.flop_counter`` shall count for our operators: multiply-adds of products, times 2, from shapes alone.

A file of its own because importing torch's counter without Triton prints a warning; the package imports this one where Triton
is present, and ``import visionattn.ops.flops`` registers the formulas anywhere.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from visionattn.ops import kernelized  # noqa: F401  the operators exist once their modules are imported
from visionattn.ops.class_sums import direct_is_faster
from visionattn.ops.taylor_values import efficient_is_faster, num_features


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


def _taylor_flops(q, k, v, form: str, backward: bool) -> int:
    """Multiply-adds of the matrix products, times 2; shapes are ``[G, N, d]``, ``[G, M, d]``, ``[G, M, e]``."""
    (groups, n, d), m, e = q, k[1], v[2]
    if form == "direct" or (form == "auto" and not efficient_is_faster(n, m, d)):
        return 2 * groups * n * m * (d + e) if not backward else 2 * groups * n * m * (3 * d + 2 * e)
    state = (num_features(d) + d) * e
    return 2 * groups * (n + m) * state if not backward else 2 * groups * (2 * n + 3 * m) * state


@register_flop_formula(torch.ops.visionattn.taylor_values)
def _(q, k, v, a, b, c, form, *args, out_shape=None, **kwargs) -> int:
    return _taylor_flops(q, k, v, form, backward=False)


@register_flop_formula(torch.ops.visionattn.taylor_values_backward)
def _(grad, q, k, v, a, b, c, form, *args, out_shape=None, **kwargs) -> int:
    return _taylor_flops(q, k, v, form, backward=True)


@register_flop_formula(torch.ops.visionattn.direct_values)
def _(q, k, v, *args, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] * k[1] * (q[2] + v[2])


@register_flop_formula(torch.ops.visionattn.direct_values_backward)
def _(grad, q, k, v, *args, out_shape=None, **kwargs) -> int:
    return 2 * q[0] * q[1] * k[1] * (3 * q[2] + 2 * v[2])
