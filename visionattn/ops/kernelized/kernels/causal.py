"""Kernels of causal kernelized attention, where query i sees keys ``j <= i``, and how they are
launched.

Tokens are cut into segments, one program each. A program goes over its segment in chunks. Within a
chunk it takes the masked quadratic product; between chunks it keeps a running state
``S = sum phi(k) v^T``, ``Z = sum phi(k)`` in registers, which starts from the sum of the segments
before. One state for each segment is all that passes through memory.

The backward pass is two sweeps. One goes to the right over queries; its state is that of the keys
to the left. The other goes to the left over keys; its state is that of the queries to the right,
``dS = sum phi(q) g^T`` and ``dZ = sum z phi(q)`` with ``g = grad / mass`` and ``z = -<g, out>``,
where 1 / mass multiplies the features.

The mass is divided by the number of tokens (see ``ops/gpu``). Sums grow from left to right: what
enters products in half precision is divided by the number of tokens in it, and multiplied back in
float32. Float16, which has less range, has units besides (``language.operand``). Registers hold
widths up to 64 in half precision and 16 in float32; wider ones spill.

Source: Katharopoulos et al. 2020, eq. 8 to 15; segments, chunks and the gradient of the mass are
ours.
"""

import torch
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.language import (
    head,
    high_and_low,
    in_units,
    kernel,
    operand,
    phi_slope,
    product_of_both,
    read,
    rows,
)
from visionattn.ops.gpu.sums import sums_of_parts
from visionattn.ops.kernelized.kernels.causal_states import (
    features_of,
    keys_of,
    options_of,
    reciprocal_of,
    segments_of,
    states_before,
)
from visionattn.ops.kernelized.kernels.state import program_of, state_at


@kernel
def _causal_means(
    p_q,
    p_k,
    p_v,
    p_present,
    p_state,
    p_out,
    p_mass,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    scale,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write means and masses of one segment of one head, from the state of the segments before."""
    i_segment, i_group, i_batch, i_head = program_of(segments, heads)
    o_d, o_e, o_chunk = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    p_k = head(p_k, i_batch, i_head, k_batch, k_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_present += i_batch.to(tl.int64) * tokens
    p_mass += i_group.to(tl.int64) * tokens
    m_s = (o_d < D)[:, None] & (o_e < E)[None, :]
    # The running state starts as the sum over all tokens before the segment.
    p_s, p_z = state_at(p_state, i_segment, i_group, groups, D, E)
    b_s = tl.load(p_s + o_d[:, None] * E + o_e[None, :], mask=m_s, other=0)  # [D, E]
    b_z = tl.load(p_z + o_d, mask=o_d < D, other=0)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + o_chunk
        m_n = o_n < last
        # Tokens that the state is a sum of, by which it is divided to be an operand.
        seen = tl.maximum(tl.cast(start, tl.float32), 1.0)
        b_q = read(p_q, o_n, q_token, o_d, m_n, D, True)  # [N, D]
        b_phi_q = features_of(b_q, m_n, o_d, D, MAP)
        b_k, b_phi, b_v = keys_of(
            p_k, p_v, p_present, o_n, m_n, k_token, v_token, o_d, o_e, D, E, MAP, MASKED
        )
        b_left, b_unit_q = operand(b_phi_q, b_v.dtype, True)
        b_phi_k, b_unit_k = operand(b_phi, b_v.dtype, False)
        # Within the chunk: all pairs, of which those whose key comes after the query get 0.
        b_w = tl.dot(b_left, tl.trans(b_phi_k), input_precision=PRECISION)  # [N, N]
        b_w = tl.where(o_chunk[:, None] >= o_chunk[None, :], b_w, 0)
        b_mass = in_units(tl.sum(b_w, 1), b_unit_q * b_unit_k, b_v.dtype) + tl.sum(
            b_phi_q * b_z[None, :], 1
        )
        # Before the chunk: the state, read once by all queries.
        b_state, b_unit_s = operand(b_s / seen, b_v.dtype, False)
        b_before = in_units(tl.dot(b_left, b_state, input_precision=PRECISION), b_unit_s, b_v.dtype)
        b_within = in_units(
            tl.dot(b_w.to(b_v.dtype), b_v, input_precision=PRECISION), b_unit_k, b_v.dtype
        )
        b_values = in_units(b_within + b_before * seen, b_unit_q[:, None], b_v.dtype)
        # A query that no key takes part for has values of 0, and keeps them.
        b_out = b_values / tl.where(b_mass == 0, 1.0, b_mass)[:, None]
        tl.store(
            rows(p_out, o_n, out_token, o_e),
            b_out.to(p_out.dtype.element_ty),
            mask=m_n[:, None] & (o_e < E)[None, :],
        )
        tl.store(p_mass + o_n, b_mass * scale, mask=m_n)
        # The chunk joins the state only now: its own queries have met its keys one by one.
        b_s += in_units(
            tl.dot(tl.trans(b_phi_k), b_v, input_precision=PRECISION), b_unit_k, b_v.dtype
        )
        b_z += tl.sum(b_phi, 0)


@kernel
def _causal_queries_backward(
    p_grad,
    p_out,
    p_mass,
    p_q,
    p_k,
    p_v,
    p_present,
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
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    dq_batch,
    dq_head,
    dq_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of the queries of one segment of one head, ``<g, out>``, and what the
    segment adds to dS and dZ.

    States are ``[E, D]``. Where registers suffice, EXACT takes operands in two parts, and
    ``<g, out>`` from products instead of the rounded mean.
    """
    i_segment, i_group, i_batch, i_head = program_of(segments, heads)
    o_d, o_e, o_chunk = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_dq = head(p_dq, i_batch, i_head, dq_batch, dq_head)
    p_k = head(p_k, i_batch, i_head, k_batch, k_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_present += i_batch.to(tl.int64) * tokens
    p_mass += i_group.to(tl.int64) * tokens
    p_along += i_group.to(tl.int64) * tokens
    # The state, transposed as the products with the gradient want it, and this segment's part of dS
    # and dZ.
    o_s, m_s = o_d[None, :] * E + o_e[:, None], (o_d < D)[None, :] & (o_e < E)[:, None]
    p_s, p_z = state_at(p_state, i_segment, i_group, groups, D, E)
    b_s = tl.load(p_s + o_s, mask=m_s, other=0)  # [E, D]
    b_z = tl.load(p_z + o_d, mask=o_d < D, other=0)
    b_ds = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    b_dz = tl.zeros([BLOCK_D], tl.float32)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + o_chunk
        m_n = o_n < last
        # Tokens before the chunk, which the state sums, and those up to its end, of which a mass is
        # made.
        seen = tl.maximum(tl.cast(start, tl.float32), 1.0)
        upto = tl.cast(start + BLOCK_N, tl.float32)
        b_q = read(p_q, o_n, q_token, o_d, m_n, D, True)  # [N, D]
        b_k, b_phi, b_v = keys_of(
            p_k, p_v, p_present, o_n, m_n, k_token, v_token, o_d, o_e, D, E, MAP, MASKED
        )
        b_grad = read(p_grad, o_n, grad_token, o_e, m_n, E, True)  # [N, E]
        # upto over the sum of weights: of one size wherever the chunk lies, so that features can
        # take it.
        b_inverse = reciprocal_of(p_mass, o_n, m_n, upto * scale)
        b_phi_k, b_low_k, b_unit_k = high_and_low(b_phi, b_v.dtype)
        b_high, b_low, b_unit_s = high_and_low(b_s / seen, b_v.dtype)
        # What g reads of the state before the chunk, and of each key within it.
        b_before = (
            in_units(product_of_both(b_grad, b_high, b_low, PRECISION, EXACT), b_unit_s, b_v.dtype)
            * seen
        )
        b_dw = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)  # [N, N]
        b_dw = tl.where(o_chunk[:, None] >= o_chunk[None, :], b_dw, 0)
        if (
            EXACT
        ):  # <g, out> as the mean of g . v_j, of the keys of the chunk and of those before it
            b_phi_q = features_of(b_q, m_n, o_d, D, MAP) * b_inverse[:, None]
            b_left, b_unit_q = operand(b_phi_q, b_v.dtype, True)
            b_w = tl.dot(b_left, tl.trans(b_phi_k), input_precision=PRECISION)  # [N, N]
            b_along = in_units(tl.sum(b_w * b_dw, 1), b_unit_q * b_unit_k, b_v.dtype)
            b_along = (b_along + tl.sum(b_phi_q * b_before, 1)) / upto
        else:
            p_mean = head(p_out, i_batch, i_head, out_batch, out_head)
            b_out = read(p_mean, o_n, out_token, o_e, m_n, E, True)  # [N, E]
            b_along = tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
        tl.store(p_along + o_n, b_along, mask=m_n)
        # The gradient of a weight is g . v_j - <g, out>, for the keys that the query sees.
        b_dw = tl.where(o_chunk[:, None] >= o_chunk[None, :], b_dw - b_along[:, None], 0)
        b_within = product_of_both(b_dw.to(b_v.dtype), b_phi_k, b_low_k, PRECISION, EXACT)
        b_within = in_units(b_within, b_unit_k, b_v.dtype)
        b_dq = b_within + (b_before - b_along[:, None] * b_z[None, :])
        b_dq *= phi_slope(b_q, MAP) * (b_inverse / upto)[:, None]
        tl.store(
            rows(p_dq, o_n, dq_token, o_d),
            b_dq.to(p_dq.dtype.element_ty),
            mask=m_n[:, None] & (o_d < D)[None, :],
        )
        # The chunk's keys join the state, and its queries the gradient of the state.
        b_z += tl.sum(b_phi, 0)
        b_s += in_units(
            product_of_both(tl.trans(b_v), b_phi_k, b_low_k, PRECISION, EXACT), b_unit_k, b_v.dtype
        )
        b_phi_q = (
            features_of(b_q, m_n, o_d, D, MAP) * b_inverse[:, None]
        )  # again: not to be kept in registers
        b_right, b_unit = operand(b_phi_q, b_v.dtype, False)
        b_ds += (
            in_units(
                tl.dot(tl.trans(b_grad), b_right, input_precision=PRECISION), b_unit, b_v.dtype
            )
            / upto
        )
        b_dz -= tl.sum(b_phi_q * b_along[:, None], 0) / upto
    p_ds, p_dz = state_at(p_d_state, i_segment, i_group, groups, D, E)
    tl.store(p_ds + o_s, b_ds, mask=m_s)
    tl.store(p_dz + o_d, b_dz, mask=o_d < D)


@kernel
def _causal_keys_backward(
    p_grad,
    p_along,
    p_mass,
    p_q,
    p_k,
    p_v,
    p_present,
    p_d_state,
    p_dk,
    p_dv,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    scale,
    grad_batch,
    grad_head,
    grad_token,
    q_batch,
    q_head,
    q_token,
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
    """Write the gradients of keys and values of one segment of one head from dS and dZ of the
    segments after, chunks from last to first.

    The state is ``[E, D]``, as the keys want it; the gradient of the values is therefore made
    transposed.
    """
    i_segment, i_group, i_batch, i_head = program_of(segments, heads)
    o_d, o_e, o_chunk = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_N)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_k = head(p_k, i_batch, i_head, k_batch, k_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_dk = head(p_dk, i_batch, i_head, dk_batch, dk_head)
    p_dv = head(p_dv, i_batch, i_head, dv_batch, dv_head)
    p_present += i_batch.to(tl.int64) * tokens
    p_mass += i_group.to(tl.int64) * tokens
    p_along += i_group.to(tl.int64) * tokens
    m_s = (o_d < D)[None, :] & (o_e < E)[:, None]
    # The running state here is the gradient that all queries after the segment leave.
    p_ds, p_dz = state_at(p_d_state, i_segment, i_group, groups, D, E)
    b_ds = tl.load(p_ds + o_d[None, :] * E + o_e[:, None], mask=m_s, other=0)  # [E, D]
    b_dz = tl.load(p_dz + o_d, mask=o_d < D, other=0)
    first = i_segment * segment_tokens
    last = tl.minimum(tokens, first + segment_tokens)
    chunks = tl.cdiv(last - first, BLOCK_N)
    # From the last chunk to the first: what is behind grows on the way.
    for i_done in range(0, chunks):
        start = first + (chunks - 1 - i_done) * BLOCK_N
        o_n = start + o_chunk
        m_n = o_n < last
        upto = tl.cast(start + BLOCK_N, tl.float32)
        share = (
            tl.maximum(tl.cast(tokens - start - BLOCK_N, tl.float32), 1.0) * scale
        )  # of the tokens after the chunk
        b_q = read(p_q, o_n, q_token, o_d, m_n, D, True)  # [N, D]
        b_phi_q = features_of(b_q, m_n, o_d, D, MAP)
        b_k, b_phi, b_v = keys_of(
            p_k, p_v, p_present, o_n, m_n, k_token, v_token, o_d, o_e, D, E, MAP, MASKED
        )
        b_grad = read(p_grad, o_n, grad_token, o_e, m_n, E, True)  # [N, E]
        b_inverse = reciprocal_of(p_mass, o_n, m_n, upto * scale)
        b_along = tl.load(p_along + o_n, mask=m_n, other=0)
        b_phi_k, b_unit_k = operand(b_phi, b_v.dtype, True)
        # What the queries after the chunk leave, before those of the chunk itself join it below.
        b_after, b_low, b_unit_after = high_and_low(b_ds / share, b_v.dtype)  # [E, D]
        # The same of dZ.
        b_mass_after = b_dz
        b_phi_q *= b_inverse[:, None]
        b_dz -= tl.sum(b_phi_q * b_along[:, None], 0) / upto
        b_divided, b_unit = operand(b_phi_q, b_v.dtype, False)
        b_ds += (
            in_units(
                tl.dot(tl.trans(b_grad), b_divided, input_precision=PRECISION), b_unit, b_v.dtype
            )
            / upto
        )
        # dv: from the queries of the chunk that see the key, and from all queries after it.
        b_w = tl.dot(b_divided, tl.trans(b_phi_k), input_precision=PRECISION)  # [queries, keys]
        b_w = tl.where(o_chunk[:, None] >= o_chunk[None, :], b_w, 0)
        b_dv = tl.dot(tl.trans(b_grad), b_w.to(b_v.dtype), input_precision=PRECISION)  # [E, N]
        b_dv = in_units(b_dv, b_unit, b_v.dtype) / upto
        b_dv += (
            in_units(
                tl.dot(b_after, tl.trans(b_phi_k), input_precision=PRECISION),
                b_unit_after,
                b_v.dtype,
            )
            * share
        )
        b_dv = in_units(b_dv, b_unit_k[None, :], b_v.dtype)
        # [E, N], so rows and columns change places in the address.
        p_columns = p_dv + o_n.to(tl.int64)[None, :] * (dv_token * 8) + o_e[:, None]
        tl.store(p_columns, b_dv.to(p_dv.dtype.element_ty), mask=m_n[None, :] & (o_e < E)[:, None])
        # dk: g . v - <g, out> of those queries of the chunk times their features, and the state
        # after it.
        b_dw = (
            tl.dot(b_v, tl.trans(b_grad), input_precision=PRECISION) - b_along[None, :]
        )  # [keys, queries]
        b_dw = tl.where(o_chunk[:, None] <= o_chunk[None, :], b_dw, 0)
        b_dk = (
            in_units(
                tl.dot(b_dw.to(b_v.dtype), b_divided, input_precision=PRECISION), b_unit, b_v.dtype
            )
            / upto
        )
        b_after_v = in_units(
            product_of_both(b_v, b_after, b_low, PRECISION), b_unit_after, b_v.dtype
        )
        b_dk += b_after_v * share + b_mass_after[None, :]
        b_dk *= phi_slope(b_k, MAP)
        if MASKED:
            m_k = (
                tl.load(p_present + o_n, mask=m_n, other=0, volatile=True) != 0
            )  # again: there is no register to keep it
            b_dk = tl.where(m_k[:, None], b_dk, 0)
        tl.store(
            rows(p_dk, o_n, dk_token, o_d),
            b_dk.to(p_dk.dtype.element_ty),
            mask=m_n[:, None] & (o_d < D)[None, :],
        )


def causal_means(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str
) -> tuple[Tensor, Tensor]:
    """Return the mean of the values of keys ``j <= i`` under ``phi(q_i) . phi(k_j)``, and its mass.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, N, d]``, ``[B, h, N, e]`` of one dtype.
        key_mask: bool ``[B, N]``, True takes part.
        feature_map: "elu1", "relu" or "given".

    Returns:
        out ``[B, h, N, e]`` in the dtype of v, 0 where the mass is 0; mass ``[B, h, N]``, divided
        by N, float32.
    """
    (batch, heads, tokens, _), e = q.shape, v.shape[3]
    out = launch.tokens_first(v, batch, heads, tokens, e)
    mass = q.new_empty(batch, heads, tokens, dtype=torch.float32)
    if not tokens:
        return out, mass
    q, k, v = (launch.readable(x) for x in (q, k, v))
    key_mask = None if key_mask is None else key_mask.contiguous()
    parts, segment_tokens = segments_of(q, v)
    states = states_before(k, v, key_mask, feature_map)
    launch.run(
        _causal_means,
        (parts * batch * heads,),
        *(q, k, v, q if key_mask is None else key_mask, states, out, mass),
        *(heads, batch * heads, tokens, segment_tokens, parts, 1 / tokens),
        *(octet for x in (q, k, v, out) for octet in launch.octets(x)),
        **options_of("causal means", q, v),
        MAP=feature_map,
        MASKED=key_mask is not None,
    )
    return out, mass


def causal_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    feature_map: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for ``grad [B, h, N, e]`` of the mean ``out``; ``mass`` is
    as ``causal_means`` gives it.
    """
    (batch, heads, tokens, d), e = q.shape, v.shape[3]
    dq = launch.tokens_first(q, batch, heads, tokens, d)
    dk = launch.tokens_first(k, batch, heads, tokens, d)
    dv = launch.tokens_first(v, batch, heads, tokens, e)
    if not tokens:
        return dq, dk, dv
    grad, out, q, k, v = (launch.readable(x) for x in (grad, out, q, k, v))
    key_mask = None if key_mask is None else key_mask.contiguous()
    parts, segment_tokens = segments_of(q, v)
    # The states are made again rather than kept: they are one pass over the keys.
    states = states_before(k, v, key_mask, feature_map)
    d_states, along = torch.empty_like(states), torch.empty_like(mass)
    inputs, grid = (mass, q, k, v, q if key_mask is None else key_mask), (parts * batch * heads,)
    sizes = (heads, batch * heads, tokens, segment_tokens, parts, 1 / tokens)
    strides = [octet for x in (q, k, v) for octet in launch.octets(x)]
    meta = dict(MAP=feature_map, MASKED=key_mask is not None)

    options = options_of("causal queries backward", q, v)
    # EXACT does not read the mean.
    mean = grad if options["EXACT"] else out
    sizes_of_queries = (
        *sizes,
        *launch.octets(grad),
        *launch.octets(mean),
        *strides,
        *launch.octets(dq),
    )
    arguments = (grad, mean, *inputs, states, dq, along, d_states, *sizes_of_queries)
    launch.run(_causal_queries_backward, grid, *arguments, **options, **meta)

    # What each segment added becomes, for each, the sum of all after it.
    d_states = sums_of_parts(d_states, "after")
    sizes_of_keys = (*sizes, *launch.octets(grad), *strides, *launch.octets(dk), *launch.octets(dv))
    options = options_of("causal keys backward", q, v)
    launch.run(
        _causal_keys_backward,
        grid,
        grad,
        along,
        *inputs,
        d_states,
        dk,
        dv,
        *sizes_of_keys,
        **options,
        **meta,
    )
    return dq, dk, dv
