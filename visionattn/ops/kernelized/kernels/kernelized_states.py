"""The state of bidirectional kernelized attention: partial states of segments of keys, and their
sum.

The state is ``S = sum_j phi(k_j) v_j^T / M`` and ``Z = sum_j phi(k_j) / M``, in units of the number
of keys M (see ``ops/gpu``). One float32 buffer holds S ``[B, h, d, e]``, then Z ``[B, h, d]``; each
segment has its own buffer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.partial_sums import sums_of_parts
from visionattn.ops.gpu.triton_helpers import (
    head,
    in_units,
    kernel,
    operand,
    phi,
    phi_slope,
    present_rows,
    program_of,
    read,
)


@triton.jit
def state_at(p_state, i_part, i_group, groups, D: tl.constexpr, E: tl.constexpr):
    """Return the addresses of S and Z of one head in the state of one segment."""
    p_part = p_state + i_part * groups.to(tl.int64) * (D * E + D)
    return p_part + i_group.to(tl.int64) * (D * E), p_part + groups.to(tl.int64) * (
        D * E
    ) + i_group.to(tl.int64) * D


@kernel
def _kernelized_state(
    p_k,
    p_v,
    p_present,
    p_state,
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
    """Write the sums of ``phi(k) v^T`` and ``phi(k)`` over one segment of a head's keys, times
    ``scale``.

    Features of masked keys are set to 0. Values of masked keys, which may hold NaN, are read as 0,
    because v is the left operand of the product, which is fastest unmodified.
    """
    i_segment, i_group, i_batch, i_head = program_of(segments, heads)
    p_present += i_batch.to(tl.int64) * tokens
    p_k = head(p_k, i_batch, i_head, k_batch, k_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    o_d, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    # S is summed transposed, [E, D], with v as the left operand; Z is kept per token of the block.
    b_s = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    b_z = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        b_k = read(p_k, o_n, k_token, o_d, m_n, D)  # [N, D]
        m_n = present_rows(p_present, o_n, m_n, MASKED)
        b_v = read(p_v, o_n, v_token, o_e, m_n, E)  # [N, E]
        b_left = tl.trans(b_v)
        # phi(0) may be 1: set features beyond the segment and the width, and of masked keys, to 0.
        m_k = m_n[:, None] & (o_d < D)[None, :]
        if MAP == "elu1" and tl.float32 != b_v.dtype:
            # Multiply the two terms of phi(k) = max(k, 0) + exp(min(k, 0)) separately: the first is
            # exact in half precision, and the second is at most 1.
            b_above = tl.maximum(b_k.to(tl.float32), 0)
            b_below = tl.where(m_k, phi_slope(b_k, MAP), 0)
            if MASKED:
                b_above = tl.where(m_k, b_above, 0)
            b_right, b_unit = operand(b_below, b_v.dtype, False)
            b_s += in_units(tl.dot(b_left, b_right, input_precision=PRECISION), b_unit, b_v.dtype)
            b_right, b_phi = b_above.to(b_v.dtype), b_above + b_below
        else:
            b_phi = tl.where(m_k, phi(b_k, MAP), 0)
            b_right = b_phi.to(b_v.dtype)
        b_s = tl.dot(b_left, b_right, acc=b_s, input_precision=PRECISION)
        # The sum over tokens comes once, at the end: in each step, threads would wait for each
        # other.
        b_z += b_phi
    p_s, p_z = state_at(p_state, i_segment, i_group, groups, D, E)
    m_s = (o_d < D)[None, :] & (o_e < E)[:, None]
    tl.store(p_s + o_d[None, :] * E + o_e[:, None], b_s * scale, mask=m_s)
    tl.store(p_z + o_d, tl.sum(b_z, 0) * scale, mask=o_d < D)


def parts_of(kernel_name: str, q: Tensor, v: Tensor) -> int:
    """Return the number of segments into which a kernel cuts the tokens of ``q [B, h, N, d]``, for
    values of the width of ``v``.
    """
    batch, heads, tokens, d = q.shape
    launch_key = kernel_name, d, v.shape[3], q.dtype, q.device
    return launch.segments(
        tokens,
        batch * heads,
        launch.launch_row(*launch_key)["BLOCK_N"],
        launch.resident_programs(*launch_key),
    )


def state_of_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> Tensor:
    """Return the state of ``k [B, h, M, d]`` and ``v [B, h, M, e]`` as one float32 axis: S
    ``[B, h, d, e]``, then Z ``[B, h, d]``.
    """
    (batch, heads, tokens, d), e = k.shape, v.shape[3]
    parts = parts_of("kernelized state", k, v)
    states = k.new_empty(parts, batch * heads * d * (e + 1), dtype=torch.float32)
    k, v = launch.readable(k), launch.readable(v)
    launch.run(
        _kernelized_state,
        (parts * batch * heads,),
        *(k, v, k if key_mask is None else key_mask.contiguous(), states),
        *(heads, batch * heads, tokens, launch.cdiv(tokens, parts), parts, 1 / max(1, tokens)),
        *(*launch.octets(k), *launch.octets(v)),
        **launch.options("kernelized state", k, v),
        MAP=feature_map,
        MASKED=key_mask is not None,
    )
    return sums_of_parts(states)
