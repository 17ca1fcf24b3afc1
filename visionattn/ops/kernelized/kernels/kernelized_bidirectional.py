"""Kernels of bidirectional kernelized attention and their launches.

Forward: keys and values are reduced to a state (``kernelized_states.py``). Each block of queries
reads the state once, multiplies its features by it, and divides by the mass. Backward: one pass
over the queries computes dq and the gradient of the state; a pass over the keys then computes dk
and dv. Each pass computes features in registers. Results of size N x d are written, features are
not.

The gradient of a query's features is ``(A - <g, out> Z) / mass`` with ``A = S g`` and g the
gradient of the mean: for many keys, a small difference of large numbers. With content only, both
terms come from one product, because ``<g, out> = phi(q) . A / mass``, and the mean is not read. For
precision, S enters this product in two parts, high and low, and so does the gradient of S in the
pass over the keys. With ``Joint`` relative position, ``A / mass`` and ``phi(q) . A / mass`` are
passed to ``position/position_triton.py``, which adds the terms of relative position.

Source: Katharopoulos et al. 2020, eq. 4 to 6; the gradient of the mass is ours.
"""

import torch
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.partial_sums import sums_of_parts
from visionattn.ops.gpu.triton_helpers import (
    head,
    high_and_low,
    in_larger_unit,
    in_units,
    inverse_mass,
    kernel,
    operand,
    phi,
    phi_slope,
    present_rows,
    product_of_both,
    program_of,
    read,
    reciprocal,
    write,
)
from visionattn.ops.kernelized.kernels.kernelized_states import parts_of, state_at


@kernel
def _kernelized_means(
    p_q,
    p_state,
    p_out,
    p_mass,
    heads,
    groups,
    tokens,
    blocks,
    mass_head,
    q_batch,
    q_head,
    q_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the mean and the mass of one block of queries."""
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    m_n, m_d, m_e = o_n < tokens, o_d < D, o_e < E
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    p_s, p_z = state_at(p_state, 0, i_group, groups, D, E)
    # The whole state of the head stays in registers.
    b_q = read(p_q, o_n, q_token, o_d, m_n, D)  # [N, D]
    b_s = tl.load(
        p_s + o_d[:, None] * E + o_e[None, :], mask=m_d[:, None] & m_e[None, :], other=0
    )  # [D, E]
    b_z = tl.load(p_z + o_d, mask=m_d, other=0)
    # Set features beyond the width to 0, because phi(0) may not be 0.
    b_phi = tl.where(m_d[None, :], phi(b_q, MAP), 0)
    b_left, b_unit = operand(b_phi, b_q.dtype, True)
    b_s, b_unit_s = operand(b_s, b_q.dtype, False)
    # The mass stays in float32; only the product with S takes rounded operands.
    b_mass = tl.sum(b_phi * b_z[None, :], 1)
    b_scale = in_units(reciprocal(b_mass), b_unit * b_unit_s, b_q.dtype)
    b_out = tl.dot(b_left, b_s, input_precision=PRECISION) * b_scale[:, None]
    write(p_out, o_n, out_token, o_e, b_out, m_n, E)
    tl.store(p_mass + i_group.to(tl.int64) * mass_head + o_n, b_mass, mask=m_n)


@kernel
def _kernelized_queries_backward(
    p_grad,
    p_out,
    p_mass,
    p_q,
    p_state,
    p_dq,
    p_along,
    p_d_state,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    scale,
    grad_batch,
    grad_head,
    grad_token,
    out_batch,
    out_head,
    out_token,
    q_batch,
    q_head,
    q_token,
    dq_batch,
    dq_head,
    dq_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    CONTENT_ONLY: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of one segment of a head's queries, and its contribution to the gradient
    of the state, times ``scale``.

    With CONTENT_ONLY the mean is not read. Otherwise mean and mass include other terms, and
    ``phi(q) . A / mass`` is written to ``p_along`` instead of being subtracted.
    """
    i_segment, i_group, i_batch, i_head = program_of(segments, heads)
    o_d, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_d, m_s = o_d < D, (o_d < D)[None, :] & (o_e < E)[:, None]
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_dq = head(p_dq, i_batch, i_head, dq_batch, dq_head)
    p_mass += i_group.to(tl.int64) * tokens
    p_s, p_z = state_at(p_state, 0, i_group, groups, D, E)
    # S, transposed for the product with the gradient, in two parts.
    b_s = tl.load(p_s + o_d[None, :] * E + o_e[:, None], mask=m_s, other=0)  # [E, D]
    b_high, b_low, b_unit_s = high_and_low(b_s, p_q.dtype.element_ty)
    b_z = tl.load(p_z + o_d, mask=m_d, other=0)
    b_ds, b_unit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32), tl.cast(1e-30, tl.float32)
    b_dz = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # One pass over the segment: each query is read once, for dq and for the gradient of the state.
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        b_q = read(p_q, o_n, q_token, o_d, m_n, D)  # [N, D]
        b_grad = read(p_grad, o_n, grad_token, o_e, m_n, E)  # [N, E]
        b_inverse = inverse_mass(p_mass, o_n, m_n)
        # Multiply the features by 1 / mass: the gradient divided by a small mass may overflow half
        # precision.
        b_phi = tl.where(m_d[None, :], phi(b_q, MAP), 0) * b_inverse[:, None]
        b_ds, b_unit, b_right = in_larger_unit(b_ds, b_unit, b_phi, b_q.dtype)
        b_ds += tl.dot(tl.trans(b_grad), b_right.to(b_q.dtype), input_precision=PRECISION)
        # A = S g, with both parts of S, because differences of A are needed below.
        b_a = in_units(
            product_of_both(b_grad, b_high, b_low, PRECISION), b_unit_s, b_q.dtype
        )  # [N, D]
        # <g, out>: from A, or from the mean if it includes other terms.
        if CONTENT_ONLY:
            b_along = tl.sum(b_phi * b_a, 1)
        else:
            tl.store(
                p_along + i_group.to(tl.int64) * tokens + o_n, tl.sum(b_phi * b_a, 1), mask=m_n
            )
            b_out = read(p_out, o_n, out_token, o_e, m_n, E)  # [N, E]
            b_along = tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
        b_dz -= b_phi * b_along[:, None]  # summed over tokens once, at the end
        # With other terms, ``position/position_triton.py`` completes this gradient.
        b_dq = b_a * b_inverse[:, None]
        if CONTENT_ONLY:
            b_dq = (
                (b_a - b_along[:, None] * b_z[None, :]) * b_inverse[:, None] * phi_slope(b_q, MAP)
            )
        write(p_dq, o_n, dq_token, o_d, b_dq, m_n, D)
    b_ds = in_units(b_ds, b_unit, p_q.dtype.element_ty)
    p_ds, p_dz = state_at(p_d_state, i_segment, i_group, groups, D, E)
    tl.store(p_ds + o_d[None, :] * E + o_e[:, None], b_ds * scale, mask=m_s)
    tl.store(p_dz + o_d, tl.sum(b_dz, 0) * scale, mask=m_d)


@kernel
def _kernelized_keys_backward(
    p_k,
    p_v,
    p_present,
    p_d_state,
    p_dk,
    p_dv,
    heads,
    groups,
    tokens,
    blocks,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    dk_batch,
    dk_head,
    dk_token,
    dv_batch,
    dv_head,
    dv_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of one block of keys and values."""
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    m_n, m_d, m_e = o_n < tokens, o_d < D, o_e < E
    b_k = read(head(p_k, i_batch, i_head, k_batch, k_head), o_n, k_token, o_d, m_n, D)  # [N, D]
    b_v = read(head(p_v, i_batch, i_head, v_batch, v_head), o_n, v_token, o_e, m_n, E)  # [N, E]
    p_ds, p_dz = state_at(p_d_state, 0, i_group, groups, D, E)
    # The gradient of S in two parts for dk; dv uses only the high part.
    b_ds = tl.load(
        p_ds + o_d[:, None] * E + o_e[None, :], mask=m_d[:, None] & m_e[None, :], other=0
    )  # [D, E]
    b_high, b_low, b_unit_ds = high_and_low(b_ds, b_k.dtype)
    b_dz = tl.load(p_dz + o_d, mask=m_d, other=0)
    b_phi, b_unit = operand(tl.where(m_d[None, :], phi(b_k, MAP), 0), b_k.dtype, True)
    # dv = phi(k) dS and d phi(k) = dS v + dZ.
    b_dv = tl.dot(b_phi, b_high, input_precision=PRECISION)
    b_dv = in_units(b_dv, (b_unit * b_unit_ds)[:, None], b_k.dtype)
    b_dk = in_units(
        product_of_both(b_v, tl.trans(b_high), tl.trans(b_low), PRECISION), b_unit_ds, b_k.dtype
    )
    b_dk = (b_dk + b_dz[None, :]) * phi_slope(b_k, MAP)
    # Masked keys are processed like all other keys; then their gradients are set to 0.
    if MASKED:
        m_some = present_rows(p_present + i_batch.to(tl.int64) * tokens, o_n, m_n, MASKED)
        b_dk, b_dv = tl.where(m_some[:, None], b_dk, 0), tl.where(m_some[:, None], b_dv, 0)
    p_dk = head(p_dk, i_batch, i_head, dk_batch, dk_head)
    p_dv = head(p_dv, i_batch, i_head, dv_batch, dv_head)
    write(p_dk, o_n, dk_token, o_d, b_dk, m_n, D)
    write(p_dv, o_n, dv_token, o_e, b_dv, m_n, E)


def means(q: Tensor, state: Tensor, feature_map: str, out: Tensor, mass: Tensor) -> None:
    """Write ``out [B, h, N, e]`` and ``mass [B, h, N]`` of ``q [B, h, N, d]`` for a result of
    ``state_of_keys``.

    If the mass has more tokens than q, its other entries are unchanged.
    """
    batch, heads, tokens, _ = q.shape
    options, q = launch.options("kernelized means", q, out), launch.readable(q)
    blocks = launch.cdiv(tokens, options["BLOCK_N"])
    sizes = heads, batch * heads, tokens, blocks, mass.shape[2]
    launch.run(
        _kernelized_means,
        (blocks * batch * heads,),
        q,
        state,
        out,
        mass,
        *(*sizes, *launch.octets(q), *launch.octets(out)),
        **options,
        MAP=feature_map,
    )


def queries_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    state: Tensor,
    feature_map: str,
    keys: int,
    content_only: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradient of q, and the gradient of the state divided by the number of keys, for
    ``grad [B, h, N, e]`` of the mean.

    Args:
        content_only: whether ``out`` and ``mass`` include no other term.

    Returns:
        (dq, along, d_state). With ``content_only``, dq is the gradient of q and along is None.
        Otherwise both are float32: dq is the gradient of the features of q without the part from
        the mass, and ``along [B, h, N]`` is the contribution of the state to ``<grad, out>``.
    """
    batch, heads, tokens, d = q.shape
    # Each program writes its contribution to the gradient of the state; another launch adds them.
    parts = parts_of("kernelized queries backward", q, out)
    d_states = state.new_empty(parts, state.shape[0])
    dq = launch.tokens_first(q, batch, heads, tokens, d, None if content_only else torch.float32)
    along = mass if content_only else torch.empty_like(mass)
    grad, out, q = launch.readable(grad), launch.readable(out), launch.readable(q)
    launch.run(
        _kernelized_queries_backward,
        (parts * batch * heads,),
        *(grad, grad if content_only else out, mass, q, state, dq, along, d_states),
        *(heads, batch * heads, tokens, launch.cdiv(tokens, parts), parts, 1 / max(1, keys)),
        *(octet for x in (grad, out, q, dq) for octet in launch.octets(x)),
        **launch.options("kernelized queries backward", q, out),
        MAP=feature_map,
        CONTENT_ONLY=content_only,
    )
    return dq, None if content_only else along, sums_of_parts(d_states)


def keys_backward(
    k: Tensor, v: Tensor, key_mask: Tensor | None, d_state: Tensor, feature_map: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v from ``d_state``, the third result of
    ``queries_backward``.
    """
    (batch, heads, tokens, d), e = k.shape, v.shape[3]
    options = launch.options("kernelized keys backward", k, v)
    blocks = launch.cdiv(tokens, options["BLOCK_N"])
    dk = launch.tokens_first(k, batch, heads, tokens, d)
    dv = launch.tokens_first(v, batch, heads, tokens, e)
    k, v = launch.readable(k), launch.readable(v)
    launch.run(
        _kernelized_keys_backward,
        (blocks * batch * heads,),
        *(k, v, k if key_mask is None else key_mask.contiguous(), d_state, dk, dv),
        *(heads, batch * heads, tokens, blocks),
        *(octet for x in (k, v, dk, dv) for octet in launch.octets(x)),
        **options,
        MAP=feature_map,
        MASKED=key_mask is not None,
    )
    return dk, dv
