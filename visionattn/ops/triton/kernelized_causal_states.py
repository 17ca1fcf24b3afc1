"""What the sweeps of causal kernelized attention share: segments, the states they start from, and how chunks are read.

The state of a segment starts from the sum of the segments before it, or after it: partial sums of each segment are made first,
then summed in order, never as differences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.kernelized import states_of_segments
from visionattn.ops.triton.language import kernel, phi, rows

CHUNK = 64
"""Segments are whole multiples of it, and so are they of each BLOCK_N of the causal sweeps, which divides it."""


@kernel
def _exclusive_sums(
    p_x,
    p_y,
    parts,
    size,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """``y[i] = sum of x[j]`` over ``j < i``, or over ``j > i`` where REVERSE, for one block of columns of ``[parts, size]``."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    b_before = tl.zeros([BLOCK_X], tl.float32)
    for start in range(0, parts, BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        i_to = o_p
        i_from = o_p - 1
        if REVERSE:
            i_to, i_from = parts - 1 - o_p, parts - o_p
        m_from = (o_p < parts) & (o_p > 0)
        m_x = (o_x < size)[None, :]
        b_x = tl.load(p_x + i_from.to(tl.int64)[:, None] * size + o_x[None, :], mask=m_from[:, None] & m_x, other=0)
        b_y = b_before[None, :] + tl.cumsum(b_x, 0)
        tl.store(p_y + i_to.to(tl.int64)[:, None] * size + o_x[None, :], b_y, mask=(o_p < parts)[:, None] & m_x)
        b_before += tl.sum(b_x, 0)


@triton.jit
def read(p, o_n, m_n, token_octets, o_c, WIDTH: tl.constexpr):
    """Rows of tokens, 0 where there is none: ``[N, width]``."""
    return tl.load(rows(p, o_n, token_octets, o_c), mask=m_n[:, None] & (o_c < WIDTH)[None, :], other=0)


@triton.jit
def features_of(x, m_n, o_d, D: tl.constexpr, MAP: tl.constexpr):
    """``phi``, 0 outside the tokens of ``m_n`` and the width; float32."""
    return tl.where(m_n[:, None] & (o_d < D)[None, :], phi(x, MAP), 0)


@triton.jit
def keys_of(
    p_k,
    p_v,
    p_present,
    o_n,
    m_n,
    k_token,
    v_token,
    o_d,
    o_e,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys, their features and values of one chunk, 0 for those that take no part."""
    if MASKED:
        m_n = m_n & (tl.load(p_present + o_n, mask=m_n, other=0) != 0)
    b_k, b_v = read(p_k, o_n, m_n, k_token, o_d, D), read(p_v, o_n, m_n, v_token, o_e, E)
    return b_k, features_of(b_k, m_n, o_d, D, MAP), b_v


@triton.jit
def gradients_of(p_grad, p_out, p_mass, o_n, m_n, grad_token, out_token, o_e, factor, E: tl.constexpr):
    """``grad`` of one chunk, ``factor / mass``, 0 where the mass is 0, and ``-<grad, out>``; the latter two float32.

    Features of queries are multiplied with the second: half precision may not hold a gradient divided by a small mass.
    """
    b_grad, b_out = read(p_grad, o_n, m_n, grad_token, o_e, E), read(p_out, o_n, m_n, out_token, o_e, E)
    b_mass = tl.load(p_mass + o_n, mask=m_n, other=0)
    b_inverse = tl.where(b_mass == 0, 0.0, factor / tl.where(b_mass == 0, 1.0, b_mass))
    return b_grad, b_inverse, -tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)


def options_of(name: str, q: Tensor, v: Tensor) -> dict[str, object]:
    """Compile-time values of a kernel whose chunks fit segments."""
    options = launch.options(name, q, v)
    assert CHUNK % options["BLOCK_N"] == 0, f"{name}: BLOCK_N = {options['BLOCK_N']} does not divide {CHUNK}"
    return options


def segments_of(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Into how many segments to cut the tokens of ``q [B, h, N, d]``, and how many tokens each has: a multiple of ``CHUNK``."""
    batch, heads, tokens, d = q.shape
    resident = launch.resident_programs("causal means", d, v.shape[3], q.dtype, q.device)
    parts = launch.segments(tokens, batch * heads, CHUNK, resident)
    segment_tokens = max(1, triton.cdiv(tokens, parts * CHUNK)) * CHUNK
    return max(1, triton.cdiv(tokens, segment_tokens)), segment_tokens


def exclusive(x: Tensor, reverse: bool) -> Tensor:
    """Along the first axis, the sum of what comes before, or after, each entry; float32."""
    parts, size = x.shape[0], x[0].numel()
    row, y = launch.launch_row("causal sums", 1, 1, x.dtype, x.device), torch.empty_like(x)
    launch.run(_exclusive_sums, (triton.cdiv(size, row["BLOCK_X"]),), x, y, parts, size, **row, REVERSE=reverse)
    return y


def states_before(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> tuple[Tensor, Tensor]:
    """S ``[parts, B, h, d, e]`` and Z ``[parts, B, h, d]`` of all keys before each segment, float32."""
    (batch, heads, _, d), e = k.shape, v.shape[3]
    parts, segment_tokens = segments_of(k, v)
    if parts == 1:
        s = k.new_zeros(parts, batch, heads, d, e, dtype=torch.float32)
        return s, k.new_zeros(parts, batch, heads, d, dtype=torch.float32)
    s, z = states_of_segments(k, v, key_mask, feature_map, parts, segment_tokens, 1.0)
    return exclusive(s, reverse=False), exclusive(z, reverse=False)
