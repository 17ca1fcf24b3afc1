"""The kernel of direct TaylorShift and its launch; its gradients are in ``direct_backward.py``.

With ``x = q.k`` and ``y = x + b/2a``, the weight is ``a x^2 + b x + c = a (y^2 + r)`` with
``r = c/a - (b/2a)^2 > 0``. The accumulator of the product of queries and keys starts at b/2a, and
one multiply-add then gives the weight, without exponential or maximum. One program holds a block of
queries and loops over all keys; weights stay in registers.

Sums are in units of the number of keys M (see ``ops/gpu``). Registers hold d up to 64 and e up to
128 in half precision, and up to 32 of both in float32.

Source: Nauen et al. 2024, "Direct TaylorShift"; the completed square is ours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    kernel,
    present_rows,
    program_of,
    read,
    reciprocal,
    write,
)


@triton.jit
def shifted_scores(b_left, b_right, shift, PRECISION: tl.constexpr):
    """Return ``left right^T + shift``, float32.

    The accumulator starts at the shift, which costs nothing.
    """
    b_start = tl.full([b_left.shape[0], b_right.shape[0]], shift, tl.float32)
    return tl.dot(b_left, tl.trans(b_right), acc=b_start, input_precision=PRECISION)


@triton.jit
def _add_keys(
    b_values,
    b_mass,
    b_q,
    p_k,
    p_v,
    p_present,
    start,
    keys,
    shift,
    rest,
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
    """Return the sums of values and of weights, divided by a, plus the contribution of one block of
    keys.

    In float16 the sum of values is also divided by 256, to keep its operands in range.
    """
    o_m = start + tl.arange(0, BLOCK_M)
    m_m = present_rows(p_present, o_m, o_m < keys, MASKED)
    b_k = read(p_k, o_m, k_token, tl.arange(0, BLOCK_D), m_m, D, RAGGED)  # [M, D]
    b_v = read(p_v, o_m, v_token, tl.arange(0, BLOCK_E), m_m, E, RAGGED)  # [M, E]
    # y = x + b/2a, then the weight divided by a, y^2 + r: one multiply-add per pair.
    b_y = shifted_scores(b_q, b_k, shift, PRECISION)
    b_p = b_y * b_y + rest
    # An absent key was read as 0, which gives y = b/2a and a positive weight: set the weight to 0.
    if RAGGED:
        b_p = tl.where(m_m[None, :], b_p, 0)
    b_mass += tl.sum(b_p, 1)
    # Scores above 256 give weights that float16 cannot hold. The mass is float32 and was summed
    # before.
    if b_v.dtype == tl.float16:
        b_p *= 1 / 256
    b_values += tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
    return b_values, b_mass


@kernel
def _taylor_direct_means(
    p_q,
    p_k,
    p_v,
    p_present,
    p_out,
    p_mass,
    heads,
    queries,
    keys,
    blocks,
    shift,
    rest,
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
    BLOCK_M: tl.constexpr,
    DIVIDE: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the mass of one block of queries, and the mean or, without DIVIDE, the sum of weighted
    values. Mass and sum are multiplied by ``scale``.
    """
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    p_k = head(p_k, i_batch, i_head, k_batch, k_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_present += i_batch.to(tl.int64) * keys
    m_n = o_n < queries
    # Queries stay in registers for the whole pass over the keys.
    b_q = read(head(p_q, i_batch, i_head, q_batch, q_head), o_n, q_token, o_d, m_n, D)  # [N, D]
    b_values = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    b_mass = tl.zeros([BLOCK_N], tl.float32)
    # Whole blocks of keys first, without a bounds mask; then the last, partial block. With a key
    # mask every block is processed like a partial block.
    whole = 0
    if not MASKED:
        whole = keys - keys % BLOCK_M
        for start in range(0, whole, BLOCK_M):
            b_values, b_mass = _add_keys(
                b_values, b_mass, b_q, p_k, p_v, p_present, start, keys, shift, rest, k_token,
                v_token, D, E, BLOCK_D, BLOCK_E, BLOCK_M, False, MASKED, PRECISION,
            )  # fmt: skip
    for start in range(whole, keys, BLOCK_M):
        b_values, b_mass = _add_keys(
            b_values, b_mass, b_q, p_k, p_v, p_present, start, keys, shift, rest, k_token,
            v_token, D, E, BLOCK_D, BLOCK_E, BLOCK_M, True, MASKED, PRECISION,
        )  # fmt: skip
    # Undo the factor 1 / 256 of ``_add_keys``.
    if p_v.dtype.element_ty == tl.float16:
        b_values *= 256
    # The factor a is common to values and mass and cancels in a mean.
    if DIVIDE:
        b_values *= reciprocal(b_mass)[:, None]
    else:
        b_values *= scale
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    write(p_out, o_n, out_token, o_e, b_values, m_n, E)
    tl.store(p_mass + i_group.to(tl.int64) * queries + o_n, b_mass * scale, mask=m_n)


def completed_square(coefficients: tuple[float, float, float]) -> tuple[float, float]:
    """Return ``b / 2a``, the shift of y, and ``r = c/a - (b/2a)^2`` for ``(a, b, c)``."""
    a, b, c = coefficients
    return b / (2 * a), c / a - (b / (2 * a)) ** 2


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    coefficients: tuple[float, float, float],
    *,
    divide: bool,
) -> tuple[Tensor, Tensor]:
    """Return the mean of the values under ``a x^2 + b x + c``, and the mass.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]`` of one dtype; q and k are
            already normalized, if at all.
        key_mask: bool ``[B, M]``, True takes part.
        coefficients: (a, b, c) with ``a > 0`` and ``c > b^2 / (4 a)``.
        divide: whether to return the mean; else return ``sum_j w_ij v_j / M`` in float32.

    Returns:
        out ``[B, h, N, e]``, the mean in the dtype of v or the sum in float32, and mass
        ``[B, h, N]``, ``sum_j w_ij / M``, float32. Both are 0 if no key takes part.
    """
    (batch, heads, queries, _), (keys, e) = q.shape, v.shape[2:]
    options = launch.options("taylor direct", q, v)
    # One program per block of queries of each head.
    blocks = launch.cdiv(queries, options["BLOCK_N"])
    out = launch.tokens_first(v, batch, heads, queries, e, None if divide else torch.float32)
    mass = q.new_empty(batch, heads, queries, dtype=torch.float32)
    q, k, v = launch.readable(q), launch.readable(k), launch.readable(v)
    launch.run(
        _taylor_direct_means,
        (blocks * batch * heads,),
        *(q, k, v, q if key_mask is None else key_mask.contiguous(), out, mass),
        *(
            heads,
            queries,
            keys,
            blocks,
            *completed_square(coefficients),
            coefficients[0] / max(1, keys),
        ),
        *(octet for x in (q, k, v, out) for octet in launch.octets(x)),
        **options,
        DIVIDE=divide,
        MASKED=key_mask is not None,
    )
    return out, mass
