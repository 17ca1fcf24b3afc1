"""TaylorShift as one operator of GPU kernels: normalization, either form, joint relative position
and division, with its gradient.

It replaces the operators ``taylor_sums``, ``class_sums`` and ``weighted_mean`` of the eager code.
Autograd saves q, k, v, the mean, the mass and, for an explicit efficient form, the state. The
backward pass recomputes normalized queries and keys. ``why_not`` decides which inputs are
supported.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from visionattn.ops.attention_sums import tokens_first
from visionattn.ops.gpu import gpu_requirements
from visionattn.ops.operator import contiguous_like, differentiate, form_ran, operator
from visionattn.ops.position import position_triton as position
from visionattn.ops.position.relative_position import RelativePosition
from visionattn.ops.taylorshift.taylorshift_eager import flops

WIDEST: gpu_requirements.Widest = {16: (64, 128), 32: (32, 32)}
"""The largest widths for which the kernels compile without spilled registers."""
TILE = 16
WITH_EACH_PAIR = 16
FORWARD_COSTS = 1.45, 2e8
BOTH_COST = 1.15, 2e7
"""Constants of the choice between forms, in multiply-adds of the direct kernels.

``WITH_EACH_PAIR`` is the work per pair of query and key in addition to the products.
``FORWARD_COSTS`` and ``BOTH_COST`` (forward and backward) are for the efficient kernels: the time
of a multiply-add relative to the direct kernels, and a fixed cost, because few heads do not fill a
GPU. They were fitted to counts of machine code and have not been measured on a GPU.
"""


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    relative: RelativePosition | None = None,
) -> str | None:
    """Return the reason why the kernels do not support these inputs, which are already checked;
    None if they do.
    """
    return gpu_requirements.why_not("taylorshift", WIDEST, q, k, v) or position.why_not(
        relative, q, v, key_mask
    )


def tile_features(d: int) -> int:
    """Count the features of the kernels, in whole pairs of tiles: 256, 768, 2560 for d = 16, 32,
    64.
    """
    tiles = -(-d // TILE)
    return tiles * (tiles + 1) // 2 * TILE**2


def takes_efficient_kernels(
    form: str, q: Tensor, k: Tensor, v: Tensor, gradients: bool = False
) -> bool:
    """Return whether the efficient form runs: requested, or expected to be faster under "auto".

    Args:
        gradients: whether a backward pass follows, or this is one.
    """
    if form != "auto":
        return form == "efficient"
    (batch, heads, n, d), m, e = q.shape, k.shape[2], v.shape[3]
    direct = batch * heads * n * m * (d + e + WITH_EACH_PAIR)
    efficient = batch * heads * (n + m) * (tile_features(d) * e + d * (d + e))
    relative_time, fixed_cost = BOTH_COST if gradients else FORWARD_COSTS
    return relative_time * efficient + fixed_cost < direct


def _of_unit_length(q: Tensor, k: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    if temperature is None:
        return q, k
    from visionattn.ops.taylorshift.kernels.unit_rows import unit

    return unit(q, temperature.float()), unit(k, None)


def _flops(q, k, v, table, form: str, grid: Sequence[int]) -> int:
    content = flops(q, k, v, form, backward=False, columns=v[3])  # the mass is a plain sum
    return content + position.flops(q, v, table, grid, backward=False)


def _flops_backward(q, k, v, table, features, form: str, grid: Sequence[int]) -> int:
    content = flops(q, k, v, form, backward=True, columns=v[3], state_kept=features[0] > 0)
    return content + position.flops(q, v, table, grid, backward=True)


def _empty_mean(q: Tensor, v: Tensor, form: str) -> tuple[Tensor, ...]:
    (batch, heads, n, d), e = q.shape, v.shape[3]
    mass = q.new_empty(batch, heads, n, dtype=torch.float32)
    shapes = [((0,), v.dtype), ((0,), mass.dtype)]
    if form == "efficient":
        from visionattn.ops.taylorshift.kernels.efficient import state_shapes

        shapes = state_shapes(batch, heads, d, e, v.dtype)
    state = [v.new_empty(shape, dtype=dtype) for shape, dtype in shapes]
    return tokens_first(v, batch, heads, n, e), mass, *state


@operator(fake=_empty_mean, flops=_flops)
def taylor_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    table: Tensor | None,
    a: float,
    b: float,
    c: float,
    form: str,
    grid: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the weighted mean under ``a x^2 + b x + c`` and, with a table, the joint relative
    position.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]`` of one dtype and any strides.
        temperature: ``[h]``, length to which q is scaled; k is scaled to unit length. None: both
            are unchanged.
        key_mask: bool ``[B, M]``, True takes part; not with a table.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``.
        a, b, c: coefficients, ``a > 0``.
        form: "direct", "efficient" or "auto"; "auto" saves no state, so that the saved tensors do
            not depend on N.
        grid: with a table, the result of ``place_of``; else empty.

    Returns:
        the mean ``[B, h, N, e]`` in the dtype of v, in the memory order of ``tokens_first``. For
        the gradient, also the mass ``[B, h, N]``, float32 and divided by M, and the two tensors of
        the state (empty unless the form is "efficient").
    """
    classes, options = position.place_from(grid), dict(coefficients=(a, b, c), divide=not grid)
    taken = "efficient" if takes_efficient_kernels(form, q, k, v) else "direct"
    with form_ran("taylorshift", f"{taken} triton"):
        if taken == "efficient":
            from visionattn.ops.taylorshift.kernels import efficient

            length = None if temperature is None else temperature.float()
            state = efficient.state_of_keys(
                k, v, key_mask, (a, b, c), normalised=temperature is not None
            )
            out, mass = efficient.forward(q, length, state, **options)
        else:
            from visionattn.ops.taylorshift.kernels import direct

            query, key = _of_unit_length(q, k, temperature)
            out, mass = direct.forward(query, key, v, key_mask, **options)
        # With relative position, ``out`` holds sums up to here; this adds the relative term and
        # divides.
        if classes is not None:
            out, mass = position.mean_from_sums(q, table, v, out, mass, classes)
    if form != "efficient":
        state = v.new_empty(0), mass.new_empty(0)
    return out, mass, *state


def _empty_gradients(mass, q, k, v, temperature, table) -> tuple[Tensor, ...]:
    learned = contiguous_like(temperature, table, like=mass)
    return *(tokens_first(x, *x.shape) for x in (q, k, v)), *learned


@operator(fake=_empty_gradients, flops=_flops_backward)
def taylor_mean_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    table: Tensor | None,
    features: Tensor,
    moments: Tensor,
    a: float,
    b: float,
    c: float,
    form: str,
    grid: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``taylor_mean`` with respect to q, k and v, in their dtypes, and to
    temperature and table (empty if None).
    """
    coefficients, normalised = (a, b, c), temperature is not None
    length = temperature.float() if normalised else None
    # With a relative term, dq stays in float32 until the term is added.
    dtype = None if table is None else torch.float32
    if takes_efficient_kernels(form, q, k, v, gradients=True):
        from visionattn.ops.taylorshift.kernels import efficient, efficient_backward

        state = efficient.State(features, moments)
        if form == "auto":  # the state is not saved
            state = efficient.state_of_keys(k, v, key_mask, coefficients, normalised=normalised)
        grads = efficient_backward.backward(
            grad, out, mass, q, k, v, length, key_mask, state, coefficients, dtype
        )
        dq, dk, dv, d_temperature = grads
    else:
        from visionattn.ops.taylorshift.kernels import direct_backward

        query, key = _of_unit_length(q, k, temperature)
        # With a temperature, round once, after the gradient of the normalization.
        wide = torch.float32 if normalised else None
        grads = direct_backward.backward(
            grad, out, mass, query, key, v, key_mask, coefficients, wide or dtype, wide
        )
        dq, dk, dv = grads
        if normalised:
            from visionattn.ops.taylorshift.kernels.unit_rows import unit_backward

            dq, d_temperature = unit_backward(q, length, dq, dtype)
            dk, _ = unit_backward(k, None, dk)
            if key_mask is not None:  # a masked key may hold NaN
                dk.masked_fill_(~key_mask[:, None, :, None], 0)
    d_temperature = d_temperature.to(temperature.dtype) if normalised else mass.new_empty(0)
    d_table = mass.new_empty(0)
    if table is not None:
        classes = position.place_from(grid)
        dq, d_table = position.backward(grad, out, mass, q, table, v, classes, dv, dq)
    return dq, dk, dv, d_temperature, d_table


differentiate(
    taylor_mean,
    taylor_mean_backward,
    outputs="out mass features moments",
    gradients="q k v temperature table",
)
