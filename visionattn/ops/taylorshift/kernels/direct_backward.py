"""Kernels for the gradients of direct TaylorShift and their launches.

The weights are ``w = a (y^2 + r)``, see ``direct.py``. The gradients of the sums of values and of
weights are ``g = grad / mass`` and ``z = -<g, out>``. The gradient of a score is
``a (g_i.v_j + z_i) 2 y_ij / M``.

Programs of the first launch hold queries and loop over keys, for dq. They also write ``1 / mass``
and z of each query. Programs of the second launch hold keys and loop over queries, for dk and dv.
Absent keys are read as 0, and queries past the last have ``1 / mass = z = 0``, so neither
contributes. The factors a and 1 / M are applied at the end, in float32.

Source: the passes follow Dao et al. 2022, "FlashAttention", algorithm 4; the gradients are ours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    inverse_mass,
    kernel,
    present_rows,
    program_of,
    read,
    write,
)
from visionattn.ops.taylorshift.kernels.direct import completed_square, shifted_scores


@triton.jit
def _add_keys(
    b_dq,
    b_q,
    b_grad,
    b_inverse,
    b_z,
    p_k,
    p_v,
    p_present,
    start,
    keys,
    shift,
    k_token,
    v_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the gradient of a block of queries, divided by 2a / M, plus the contribution of one
    block of keys.
    """
    o_m = start + tl.arange(0, BLOCK_M)
    m_m = present_rows(p_present, o_m, o_m < keys, MASKED)
    b_k = read(p_k, o_m, k_token, tl.arange(0, BLOCK_D), m_m, D, RAGGED or MASKED)  # [M, D]
    b_v = read(p_v, o_m, v_token, tl.arange(0, BLOCK_E), m_m, E, RAGGED or MASKED)  # [M, E]
    # The derivative of the weight a (y^2 + r) is 2 a y.
    b_y = shifted_scores(b_q, b_k, shift, PRECISION)
    # g . v + z, with 1 / mass applied after the product, so that grad enters it unrounded.
    b_dp = tl.dot(b_grad, tl.trans(b_v), input_precision=PRECISION)
    b_dx = (b_dp * b_inverse[:, None] + b_z[:, None]) * b_y
    b_dq += tl.dot(b_dx.to(b_k.dtype), b_k, input_precision=PRECISION)
    return b_dq


@kernel
def _taylor_direct_queries_backward(
    p_grad,
    p_out,
    p_mass,
    p_q,
    p_k,
    p_v,
    p_present,
    p_dq,
    p_inverse,
    p_z,
    heads,
    queries,
    keys,
    blocks,
    shift,
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
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of one block of queries, ``1 / mass`` (0 for a mass of 0), and z."""
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    p_k = head(p_k, i_batch, i_head, k_batch, k_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_present += i_batch.to(tl.int64) * keys
    i_first, m_n = i_group.to(tl.int64) * queries, o_n < queries
    # Data of the queries stays in registers through the pass.
    b_q = read(head(p_q, i_batch, i_head, q_batch, q_head), o_n, q_token, o_d, m_n, D)  # [N, D]
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    b_grad = read(p_grad, o_n, grad_token, o_e, m_n, E)  # [N, E]
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    b_out = read(p_out, o_n, out_token, o_e, m_n, E)  # [N, E]
    b_inverse = inverse_mass(p_mass + i_first, o_n, m_n)
    b_z = -b_inverse * tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
    tl.store(p_inverse + i_first + o_n, b_inverse, mask=m_n)
    tl.store(p_z + i_first + o_n, b_z, mask=m_n)
    b_grad = b_grad.to(b_q.dtype)
    b_dq = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Whole blocks of keys, without a bounds mask; then the last, partial block.
    whole = keys - keys % BLOCK_M
    for start in range(0, whole, BLOCK_M):
        b_dq = _add_keys(
            b_dq, b_q, b_grad, b_inverse, b_z, p_k, p_v, p_present, start, keys, shift, k_token,
            v_token, D, E, BLOCK_D, BLOCK_E, BLOCK_M, False, MASKED, PRECISION,
        )  # fmt: skip
    if whole < keys:
        b_dq = _add_keys(
            b_dq, b_q, b_grad, b_inverse, b_z, p_k, p_v, p_present, whole, keys, shift, k_token,
            v_token, D, E, BLOCK_D, BLOCK_E, BLOCK_M, True, MASKED, PRECISION,
        )  # fmt: skip
    write(head(p_dq, i_batch, i_head, dq_batch, dq_head), o_n, dq_token, o_d, b_dq * scale, m_n, D)


@triton.jit
def _add_queries(
    b_dk,
    b_dv,
    b_k,
    b_v,
    p_q,
    p_grad,
    p_inverse,
    p_z,
    start,
    queries,
    shift,
    rest,
    q_token,
    grad_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RAGGED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the gradients of a block of keys (divided by 2a / M) and of its values (divided by
    a / M), plus the contributions of one block of queries.
    """
    o_n = start + tl.arange(0, BLOCK_N)
    m_n = o_n < queries
    b_q = read(p_q, o_n, q_token, tl.arange(0, BLOCK_D), m_n, D, RAGGED)  # [N, D]
    b_grad = read(p_grad, o_n, grad_token, tl.arange(0, BLOCK_E), m_n, E, RAGGED).to(
        b_v.dtype
    )  # [N, E]
    # Past the last query both are 0, so that the products below need no mask.
    if RAGGED:
        b_inverse = tl.load(p_inverse + o_n, mask=m_n, other=0)
        b_z = tl.load(p_z + o_n, mask=m_n, other=0)
    else:
        b_inverse, b_z = tl.load(p_inverse + o_n), tl.load(p_z + o_n)
    # Scores are transposed, keys by queries: both products over queries take them as left operand.
    b_y = shifted_scores(b_k, b_q, shift, PRECISION)  # [M, N]
    b_p = (b_y * b_y + rest) * b_inverse[None, :]
    b_dv += tl.dot(b_p.to(b_v.dtype), b_grad, input_precision=PRECISION)
    # The gradient of the scores, as in ``_add_keys``, transposed.
    b_dp = tl.dot(b_v, tl.trans(b_grad), input_precision=PRECISION)
    b_dx = (b_dp * b_inverse[None, :] + b_z[None, :]) * b_y
    b_dk += tl.dot(b_dx.to(b_k.dtype), b_q, input_precision=PRECISION)
    return b_dk, b_dv


@kernel
def _taylor_direct_keys_backward(
    p_grad,
    p_inverse,
    p_z,
    p_q,
    p_k,
    p_v,
    p_present,
    p_dk,
    p_dv,
    heads,
    queries,
    keys,
    blocks,
    shift,
    rest,
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
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of one block of keys and values; masked keys are read as 0 and get 0."""
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_m = i_block * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    p_present += i_batch.to(tl.int64) * keys
    m_m = present_rows(p_present, o_m, o_m < keys, MASKED)
    # Keys, values and both sums stay in registers.
    b_k = read(head(p_k, i_batch, i_head, k_batch, k_head), o_m, k_token, o_d, m_m, D)  # [M, D]
    b_v = read(head(p_v, i_batch, i_head, v_batch, v_head), o_m, v_token, o_e, m_m, E)  # [M, E]
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_inverse += i_group.to(tl.int64) * queries
    p_z += i_group.to(tl.int64) * queries
    b_dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    # Whole blocks of queries, then the last, partial block.
    whole = queries - queries % BLOCK_N
    for start in range(0, whole, BLOCK_N):
        b_dk, b_dv = _add_queries(
            b_dk, b_dv, b_k, b_v, p_q, p_grad, p_inverse, p_z, start, queries, shift, rest,
            q_token, grad_token, D, E, BLOCK_D, BLOCK_E, BLOCK_N, False, PRECISION,
        )  # fmt: skip
    if whole < queries:
        b_dk, b_dv = _add_queries(
            b_dk, b_dv, b_k, b_v, p_q, p_grad, p_inverse, p_z, whole, queries, shift, rest,
            q_token, grad_token, D, E, BLOCK_D, BLOCK_E, BLOCK_N, True, PRECISION,
        )  # fmt: skip
    # A masked key was read as 0, which gives y = b/2a and gradients: set them to 0.
    if MASKED:
        m_m = (
            tl.load(p_present + o_m, mask=o_m < keys, other=0, volatile=True) != 0
        )  # read again: no register is free to keep it
        b_dk, b_dv = tl.where(m_m[:, None], b_dk, 0), tl.where(m_m[:, None], b_dv, 0)
    m_m = o_m < keys
    p_dk = head(p_dk, i_batch, i_head, dk_batch, dk_head)
    p_dv = head(p_dv, i_batch, i_head, dv_batch, dv_head)
    write(p_dk, o_m, dk_token, o_d, b_dk * (2 * scale), m_m, D)
    write(p_dv, o_m, dv_token, o_e, b_dv * scale, m_m, E)


def backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    coefficients: tuple[float, float, float],
    dq_dtype: torch.dtype | None = None,
    dk_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for ``grad [B, h, N, e]`` of the mean under all terms.

    Args:
        out: ``[B, h, N, e]``, the mean.
        mass: ``[B, h, N]``, the sum of all weights in units of M, float32, contiguous.
        dq_dtype, dk_dtype: dtypes of the gradients of q and k; None: the dtypes of q and k. Float32
            is for callers that change the gradients further.

    The other arguments are as for ``direct.forward``.
    """
    (batch, heads, queries, d), (keys, e) = q.shape, v.shape[2:]
    grad, out, q, k, v = (launch.readable(x) for x in (grad, out, q, k, v))
    inverse, z = torch.empty_like(mass), torch.empty_like(mass)
    dq = launch.tokens_first(q, batch, heads, queries, d, dq_dtype)
    dk = launch.tokens_first(k, batch, heads, keys, d, dk_dtype)
    dv, scale = launch.tokens_first(v, batch, heads, keys, e), coefficients[0] / max(1, keys)
    present, masked = q if key_mask is None else key_mask.contiguous(), key_mask is not None
    shift, rest = completed_square(coefficients)

    # First launch: dq.
    options = launch.options("taylor direct queries backward", q, v)
    blocks = launch.cdiv(queries, options["BLOCK_N"])
    launch.run(
        _taylor_direct_queries_backward,
        (blocks * batch * heads,),
        *(grad, out, mass, q, k, v, present, dq, inverse, z),
        *(heads, queries, keys, blocks, shift, 2 * scale),
        *(octet for x in (grad, out, q, k, v, dq) for octet in launch.octets(x)),
        **options,
        MASKED=masked,
    )

    # Second launch: dk and dv.
    options = launch.options("taylor direct keys backward", q, v)
    blocks = launch.cdiv(keys, options["BLOCK_M"])
    launch.run(
        _taylor_direct_keys_backward,
        (blocks * batch * heads,),
        *(grad, inverse, z, q, k, v, present, dk, dv),
        *(heads, queries, keys, blocks, shift, rest, scale),
        *(octet for x in (grad, q, k, v, dk, dv) for octet in launch.octets(x)),
        **options,
        MASKED=masked,
    )
    return dq, dk, dv
