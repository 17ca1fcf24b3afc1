"""Kernels of bidirectional kernelized attention, and how they are launched.

Forward: keys and values of each segment of tokens become a partial state, the partial states are added, and each block of
queries reads the sum once, multiplies and divides. Backward: one pass over the queries for their gradients and that of the
state, one over the keys. Features are made in registers in each pass; nothing of size N x d is written but results.

In units of the number of keys M (see ``__init__.py``): S is ``sum_j phi(k_j) v_j^T / M``, Z ``sum_j phi(k_j) / M``, the mass
``phi(q_i) . Z``. Source: Katharopoulos et al. 2020, eq. 4 to 6; the gradient of the mass is ours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.language import head, in_units, kernel, operand, phi, phi_slope, rows


@kernel
def _partial_states(
    p_k,
    p_v,
    p_present,
    p_s,
    p_z,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    scale,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One segment of the keys of one head: ``sum phi(k) v^T`` and ``sum phi(k)``, times ``scale``.

    The features of masked keys become 0 and their values, which are to be finite, stay: a left operand is best as it was loaded,
    and to load it by the mask holds up the pipeline.
    """
    i_segment, i_group = tl.program_id(0) % segments, tl.program_id(0) // segments
    i_batch, i_head = i_group // heads, i_group % heads
    p_k, p_v = head(p_k, i_batch, i_head, k_batch, k_head), head(p_v, i_batch, i_head, v_batch, v_head)
    o_d, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    b_s = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    b_z = tl.zeros([BLOCK_D], tl.float32)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        b_k = tl.load(rows(p_k, o_n, k_token, o_d), mask=m_n[:, None] & (o_d < D)[None, :], other=0)  # [N, D]
        b_v = tl.load(rows(p_v, o_n, v_token, o_e), mask=m_n[:, None] & (o_e < E)[None, :], other=0)  # [N, E]
        if MASKED:
            m_n = m_n & (tl.load(p_present + i_batch.to(tl.int64) * tokens + o_n, mask=m_n, other=0) != 0)
        b_phi = tl.where(m_n[:, None] & (o_d < D)[None, :], phi(b_k, MAP), 0)
        b_left = tl.trans(b_v)
        b_right, b_unit = operand(b_phi, b_v.dtype, False)
        b_s += in_units(tl.dot(b_left, b_right, input_precision=PRECISION), b_unit, b_v.dtype)
        b_z += tl.sum(b_phi, 0)
    i_part = i_segment.to(tl.int64) * groups + i_group
    m_s = (o_d < D)[None, :] & (o_e < E)[:, None]
    tl.store(p_s + i_part * D * E + o_d[None, :] * E + o_e[:, None], b_s * scale, mask=m_s)
    tl.store(p_z + i_part * D + o_d, b_z * scale, mask=o_d < D)


@kernel
def _means(
    p_q,
    p_s,
    p_z,
    p_out,
    p_mass,
    heads,
    queries,
    tokens,
    blocks,
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
    """Mean and mass of one block of the first ``queries`` of ``tokens`` tokens."""
    i_block, i_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_group // heads, i_group % heads
    o_n, o_d, o_e = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_n, m_d, m_e = o_n < queries, o_d < D, o_e < E
    p_q, p_out = head(p_q, i_batch, i_head, q_batch, q_head), head(p_out, i_batch, i_head, out_batch, out_head)
    b_q = tl.load(rows(p_q, o_n, q_token, o_d), mask=m_n[:, None] & m_d[None, :], other=0)  # [N, D]
    p_s += i_group.to(tl.int64) * D * E
    b_s = tl.load(p_s + o_d[:, None] * E + o_e[None, :], mask=m_d[:, None] & m_e[None, :], other=0)  # [D, E]
    b_z = tl.load(p_z + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
    b_phi = tl.where(m_d[None, :], phi(b_q, MAP), 0)
    b_left, b_unit = operand(b_phi, b_q.dtype, True)
    b_s, b_unit_s = operand(b_s, b_q.dtype, False)
    b_values = in_units(tl.dot(b_left, b_s, input_precision=PRECISION), (b_unit * b_unit_s)[:, None], b_q.dtype)
    b_mass = tl.sum(b_phi * b_z[None, :], 1)
    b_out = b_values / tl.where(b_mass == 0, 1.0, b_mass)[:, None]
    tl.store(rows(p_out, o_n, out_token, o_e), b_out.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_e[None, :])
    tl.store(p_mass + i_group.to(tl.int64) * tokens + o_n, b_mass, mask=m_n)


@kernel
def _queries_backward(
    p_grad,
    p_out,
    p_mass,
    p_q,
    p_s,
    p_z,
    p_dq,
    p_ds,
    p_dz,
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
    PRECISION: tl.constexpr,
):
    """Gradients of one segment of the queries of one head, and its part of those of S and Z, times ``scale``."""
    i_segment, i_group = tl.program_id(0) % segments, tl.program_id(0) // segments
    i_batch, i_head = i_group // heads, i_group % heads
    o_d, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_d, m_e = o_d < D, o_e < E
    p_grad, p_out = head(p_grad, i_batch, i_head, grad_batch, grad_head), head(p_out, i_batch, i_head, out_batch, out_head)
    p_q, p_dq = head(p_q, i_batch, i_head, q_batch, q_head), head(p_dq, i_batch, i_head, dq_batch, dq_head)
    p_s += i_group.to(tl.int64) * D * E
    b_s = tl.load(p_s + o_d[None, :] * E + o_e[:, None], mask=m_d[None, :] & m_e[:, None], other=0)  # [E, D]
    b_s, b_unit_s = operand(b_s, p_q.dtype.element_ty, False)
    b_z = tl.load(p_z + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
    b_ds, b_unit = tl.zeros([BLOCK_E, BLOCK_D], tl.float32), tl.cast(1e-30, tl.float32)
    b_dz = tl.zeros([BLOCK_D], tl.float32)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        b_q = tl.load(rows(p_q, o_n, q_token, o_d), mask=m_n[:, None] & m_d[None, :], other=0)  # [N, D]
        b_grad = tl.load(rows(p_grad, o_n, grad_token, o_e), mask=m_n[:, None] & m_e[None, :], other=0)  # [N, E]
        b_out = tl.load(rows(p_out, o_n, out_token, o_e), mask=m_n[:, None] & m_e[None, :], other=0)  # [N, E]
        b_mass = tl.load(p_mass + i_group.to(tl.int64) * tokens + o_n, mask=m_n, other=0)
        b_inverse = tl.where(b_mass == 0, 0.0, 1 / tl.where(b_mass == 0, 1.0, b_mass))
        b_dmass = -b_inverse * tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
        b_phi = tl.where(m_n[:, None] & m_d[None, :], phi(b_q, MAP), 0)
        b_dz += tl.sum(b_phi * b_dmass[:, None], 0)
        b_phi *= b_inverse[:, None]  # not the gradient, which half precision may not hold divided by a small mass
        b_left = tl.trans(b_grad)
        if tl.float16 == b_q.dtype:  # the unit of the sum grows, for there are no registers for a product beside the sum
            b_larger = tl.maximum(b_unit, tl.max(tl.max(tl.abs(b_phi), 1), 0) / 16)
            b_ds *= b_unit / b_larger
            b_unit = b_larger
            b_phi *= 1 / b_larger
        b_ds += tl.dot(b_left, b_phi.to(b_q.dtype), input_precision=PRECISION)
        b_inverse = in_units(b_inverse, b_unit_s, b_q.dtype)
        b_dq = tl.dot(b_grad, b_s, input_precision=PRECISION) * b_inverse[:, None] + b_dmass[:, None] * b_z[None, :]
        b_dq *= phi_slope(b_q, MAP)
        tl.store(rows(p_dq, o_n, dq_token, o_d), b_dq.to(p_dq.dtype.element_ty), mask=m_n[:, None] & m_d[None, :])
    b_ds = in_units(b_ds, b_unit, p_q.dtype.element_ty)
    i_part = i_segment.to(tl.int64) * groups + i_group
    tl.store(p_ds + i_part * D * E + o_d[None, :] * E + o_e[:, None], b_ds * scale, mask=m_d[None, :] & m_e[:, None])
    tl.store(p_dz + i_part * D + o_d, b_dz * scale, mask=m_d)


@kernel
def _keys_backward(
    p_k,
    p_v,
    p_present,
    p_ds,
    p_dz,
    p_dk,
    p_dv,
    heads,
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
    """Gradients of one block of keys and values."""
    i_block, i_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_group // heads, i_group % heads
    o_n, o_d, o_e = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_d, m_e = o_d < D, o_e < E
    m_k, m_v = (o_n < tokens)[:, None] & m_d[None, :], (o_n < tokens)[:, None] & m_e[None, :]
    b_k = tl.load(rows(head(p_k, i_batch, i_head, k_batch, k_head), o_n, k_token, o_d), mask=m_k, other=0)  # [N, D]
    b_v = tl.load(rows(head(p_v, i_batch, i_head, v_batch, v_head), o_n, v_token, o_e), mask=m_v, other=0)  # [N, E]
    p_ds += i_group.to(tl.int64) * D * E
    b_ds = tl.load(p_ds + o_d[:, None] * E + o_e[None, :], mask=m_d[:, None] & m_e[None, :], other=0)  # [D, E]
    b_most = tl.max(tl.max(tl.abs(b_ds), 1), 0)  # half precision holds parts of it, however small a gradient is
    b_ds = (b_ds / tl.where(b_most == 0, 1.0, b_most)).to(b_k.dtype)
    b_dz = tl.load(p_dz + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
    b_phi = tl.where(m_d[None, :], phi(b_k, MAP), 0)
    b_phi, b_unit = operand(b_phi, b_k.dtype, True)
    b_dv = in_units(tl.dot(b_phi, b_ds, input_precision=PRECISION) * b_most, b_unit[:, None], b_k.dtype)
    b_dk = (tl.dot(b_v, tl.trans(b_ds), input_precision=PRECISION) * b_most + b_dz[None, :]) * phi_slope(b_k, MAP)
    if MASKED:
        m_n = tl.load(p_present + i_batch.to(tl.int64) * tokens + o_n, mask=o_n < tokens, other=0) != 0
        b_dk, b_dv = tl.where(m_n[:, None], b_dk, 0), tl.where(m_n[:, None], b_dv, 0)
    p_dk, p_dv = head(p_dk, i_batch, i_head, dk_batch, dk_head), head(p_dv, i_batch, i_head, dv_batch, dv_head)
    tl.store(rows(p_dk, o_n, dk_token, o_d), b_dk.to(p_dk.dtype.element_ty), mask=m_k)
    tl.store(rows(p_dv, o_n, dv_token, o_e), b_dv.to(p_dv.dtype.element_ty), mask=m_v)


def state_of_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    """S ``[B, h, d, e]`` and Z ``[B, h, d]`` of ``k [B, h, M, d]`` and ``v [B, h, M, e]``, divided by M; float32."""
    batch, heads, tokens, d = k.shape
    asked = "kernelized state", d, v.shape[3], k.dtype, k.device
    block = launch.launch_row(*asked)["BLOCK_N"]
    parts = launch.segments(tokens, batch * heads, block, launch.resident_programs(*asked))
    s, z = states_of_segments(k, v, key_mask, feature_map, parts, triton.cdiv(tokens, parts), 1 / max(1, tokens))
    return (s[0], z[0]) if parts == 1 else (s.sum(0), z.sum(0))


def states_of_segments(
    k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str, parts: int, segment_tokens: int, scale: float
) -> tuple[Tensor, Tensor]:
    """S ``[parts, B, h, d, e]`` and Z ``[parts, B, h, d]`` of segments of ``segment_tokens`` keys, times ``scale``; float32."""
    (batch, heads, tokens, d), e = k.shape, v.shape[3]
    s = k.new_empty(parts, batch, heads, d, e, dtype=torch.float32)
    z = k.new_empty(parts, batch, heads, d, dtype=torch.float32)
    k, v = launch.readable(k), launch.readable(v)
    launch.run(
        _partial_states,
        (parts * batch * heads,),
        *(k, v, k if key_mask is None else key_mask.contiguous(), s, z),
        *(heads, batch * heads, tokens, segment_tokens, parts, scale),
        *(*launch.octets(k), *launch.octets(v)),
        **launch.options("kernelized state", k, v),
        MAP=feature_map,
        MASKED=key_mask is not None,
    )
    return s, z


def means(q: Tensor, s: Tensor, z: Tensor, feature_map: str, out: Tensor, mass: Tensor, queries: int) -> None:
    """Write ``out [B, h, N, e]`` and ``mass [B, h, N]`` of the first ``queries`` of ``q [B, h, N, d]``."""
    batch, heads, tokens, _ = q.shape
    options, q = launch.options("kernelized means", q, out), launch.readable(q)
    blocks = triton.cdiv(queries, options["BLOCK_N"])
    sizes = (heads, queries, tokens, blocks, *launch.octets(q), *launch.octets(out))
    launch.run(_means, (blocks * batch * heads,), q, s, z, out, mass, *sizes, **options, MAP=feature_map)


def queries_backward(
    grad: Tensor, out: Tensor, mass: Tensor, q: Tensor, s: Tensor, z: Tensor, feature_map: str, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, and of S and Z divided by the number of keys, for ``grad [B, h, N, e]`` of the mean."""
    (batch, heads, tokens, d), e = q.shape, out.shape[3]
    options = launch.options("kernelized queries backward", q, out)
    resident = launch.resident_programs("kernelized queries backward", d, e, q.dtype, q.device)
    parts = launch.segments(tokens, batch * heads, options["BLOCK_N"], resident)
    ds = q.new_empty(parts, batch, heads, d, e, dtype=torch.float32)
    dz = q.new_empty(parts, batch, heads, d, dtype=torch.float32)
    dq = launch.tokens_first(q, batch, heads, tokens, d)
    grad, out, q = launch.readable(grad), launch.readable(out), launch.readable(q)
    launch.run(
        _queries_backward,
        (parts * batch * heads,),
        *(grad, out, mass, q, s, z, dq, ds, dz),
        *(heads, batch * heads, tokens, triton.cdiv(tokens, parts), parts, 1 / max(1, keys)),
        *(octet for x in (grad, out, q, dq) for octet in launch.octets(x)),
        **options,
        MAP=feature_map,
    )
    return (dq, ds[0], dz[0]) if parts == 1 else (dq, ds.sum(0), dz.sum(0))


def keys_backward(
    k: Tensor, v: Tensor, key_mask: Tensor | None, ds: Tensor, dz: Tensor, feature_map: str
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v for those of S and Z as ``queries_backward`` gives them."""
    (batch, heads, tokens, d), e = k.shape, v.shape[3]
    options = launch.options("kernelized keys backward", k, v)
    blocks = triton.cdiv(tokens, options["BLOCK_N"])
    dk, dv = launch.tokens_first(k, batch, heads, tokens, d), launch.tokens_first(v, batch, heads, tokens, e)
    k, v = launch.readable(k), launch.readable(v)
    launch.run(
        _keys_backward,
        (blocks * batch * heads,),
        *(k, v, k if key_mask is None else key_mask.contiguous(), ds, dz, dk, dv),
        *(heads, tokens, blocks),
        *(octet for x in (k, v, dk, dv) for octet in launch.octets(x)),
        **options,
        MAP=feature_map,
        MASKED=key_mask is not None,
    )
    return dk, dv
