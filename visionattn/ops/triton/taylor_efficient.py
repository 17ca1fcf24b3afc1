"""The efficient form of TaylorShift, forward: a state of the keys, and what each query reads of it.

``w_ij = a x^2 + b x + c`` with ``x = q_i . k_j`` is linear in the features ``[phi2(q), q, 1]``, so sums over keys are formed
once. phi2 keeps products of tiles of 16 columns (``taylor_efficient_states.py``). The mass needs no features. There are launches
for d of 8 to 64 and e of 8 to 128, in float32 of 8 to 32 for both, in multiples of 8.

In units of the number of keys M (see ``__init__.py``). Source: TaylorShift, "Efficient TaylorShift"; tiles and mass are ours.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.language import head, kernel, rows
from visionattn.ops.triton.taylor_efficient_states import (
    PAIR,
    columns,
    feature_sums,
    in_half_range,
    moments,
    num_moments,
    num_pairs,
    num_tiles,
    present_rows,
    tiles_of_pair,
    unit_of,
)


class State(NamedTuple):
    """What queries need of the keys and values: features ``[B, h, F, e]`` in the dtype of v, and moments, float32.

    Features are ``W phi2(K)^T V / M`` with W = a on pairs of equal tiles and 2a on the others; moments ``b K^T V / M``,
    ``c sum v / M``, ``K^T K / M``, ``sum k / M`` and the share of keys present, in one row (``taylor_efficient_states.py``). In
    float16 both are in units of the largest number of each head.
    """

    features: Tensor
    moments: Tensor


def state_shapes(batch: int, heads: int, d: int, e: int, dtype: torch.dtype) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Shape and dtype of each tensor of a state; ``dtype`` is that of v."""
    return ((batch, heads, num_pairs(d) * PAIR, e), dtype), ((batch, heads, num_moments(d, e)), torch.float32)


@kernel
def _expand(
    p_x,
    p_features,
    p_moments,
    p_present,
    p_out,
    p_mass,
    heads,
    tokens,
    blocks,
    a,
    b,
    c,
    x_batch,
    x_head,
    x_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    MASS: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``[phi2(x), x, 1]`` of one block of tokens times the state; ``MASS``: sums of weights too, ``DIVIDED``: divide by them."""
    i_block, i_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_group // heads, i_group % heads
    o_n, o_d, o_e = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_n, m_d, m_e = o_n < tokens, o_d < D, o_e < E
    m_x = present_rows(p_present, i_batch, tokens, o_n, m_n, MASKED)
    p_x = head(p_x, i_batch, i_head, x_batch, x_head)
    p_features += i_group.to(tl.int64) * (TILES * (TILES + 1) // 2 * 256 * E)
    p_moments += i_group.to(tl.int64) * (D * E + E + D * D + D + 8)
    b_x = columns(p_x, o_n, x_token, 0, m_x, D, BLOCK_D)  # [N, D]
    if MASS:
        b_mass = mass_of_rows(b_x, p_moments + D * E + E, a, b, c, D, BLOCK_D, PRECISION)
        tl.store(p_mass + i_group.to(tl.int64) * tokens + o_n, b_mass * unit_of(p_features, p_moments, D, E), mask=m_n)
    b_xy = tl.load(p_moments + o_d[:, None] * E + o_e[None, :], mask=m_d[:, None] & m_e[None, :], other=0)  # [D, E]
    b_values = tl.dot(b_x, b_xy.to(b_x.dtype), input_precision=PRECISION)
    b_values += tl.load(p_moments + D * E + o_e, mask=m_e, other=0)[None, :]
    ROWS: tl.constexpr = BLOCK_F // 16
    STEPS: tl.constexpr = TILES * (TILES + 1) // 2 * (16 // ROWS)
    o_f = tl.arange(0, BLOCK_F)
    b_state = tl.load(p_features + o_f[:, None] * E + o_e[None, :], mask=m_e[None, :], other=0)  # [F, E]
    # Each step multiplies what the step before has loaded, so that memory is read while the matrix unit works.
    for step in tl.range(STEPS, num_stages=1):
        i, j = tiles_of_pair(step // (16 // ROWS))
        b_i = columns(p_x, o_n, x_token, 16 * i + ROWS * (step % (16 // ROWS)), m_x, D, ROWS)
        b_j = columns(p_x, o_n, x_token, 16 * j, m_x, D, 16)
        b_features = tl.reshape(b_i[:, :, None] * b_j[:, None, :], [BLOCK_N, BLOCK_F])
        p_features += BLOCK_F * E
        m_next = m_e & (step + 1 < STEPS)
        b_next = tl.load(p_features + o_f[:, None] * E + o_e[None, :], mask=m_next[None, :], other=0)
        b_values += tl.dot(b_features, b_state, input_precision=PRECISION)
        b_state = b_next
    if DIVIDED:
        b_values /= tl.where(b_mass == 0, 1.0, b_mass)[:, None]
    else:
        b_values *= unit_of(p_features, p_moments, D, E)
    if MASKED:
        b_values = tl.where(m_x[:, None], b_values, 0)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    tl.store(rows(p_out, o_n, out_token, o_e), b_values.to(p_out.dtype.element_ty), mask=m_n[:, None] & m_e[None, :])


@triton.jit
def mass_of_rows(b_x, p_xx, a, b, c, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """``a x^T (K^T K) x + b x . sum k + c count`` of ``b_x [N, D]``, float32; ``p_xx``: the moments from ``K^T K`` on.

    In half precision ``K^T K`` is split into two terms, so that the mass keeps 16 bits.
    """
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D)
    m_xx = (o_d < D)[:, None] & (o_c < D)[None, :]
    b_xx = tl.load(p_xx + o_d[:, None] * D + o_c[None, :], mask=m_xx, other=0)  # [D, D]
    b_high = b_xx.to(b_x.dtype)
    b_score = tl.dot(b_x, b_high, input_precision=PRECISION)
    if b_x.dtype != tl.float32:
        b_score += tl.dot(b_x, (b_xx - b_high.to(tl.float32)).to(b_x.dtype))
    b_x_sum = tl.load(p_xx + D * D + o_c, mask=o_c < D, other=0)
    return tl.sum((a * b_score + b * b_x_sum[None, :]) * b_x.to(tl.float32), 1) + c * tl.load(p_xx + D * D + D)


def expand(
    x: Tensor,
    features: Tensor,
    moments: Tensor,
    key_mask: Tensor | None,
    out: Tensor,
    mass: Tensor | None,
    coefficients: tuple[float, float, float],
    divide: bool,
) -> None:
    """Write ``out [B, h, N, e]`` and, unless None, ``mass [B, h, N]`` of ``x [B, h, N, d]``; rows outside the mask get 0."""
    (batch, heads, tokens, d), e = x.shape, out.shape[3]
    options, x = launch.launch_row("taylor efficient expand", d, e, x.dtype, x.device), launch.readable(x)
    blocks = triton.cdiv(tokens, options["BLOCK_N"])
    launch.run(
        _expand,
        (blocks * batch * heads,),
        *(x, features, moments, x if key_mask is None else key_mask.contiguous(), out, moments if mass is None else mass),
        *(heads, tokens, blocks, *map(float, coefficients), *launch.octets(x), *launch.octets(out)),
        **options,
        **dict(D=d, E=e, TILES=num_tiles(d), BLOCK_D=launch.block(d), BLOCK_E=launch.block(e)),
        **dict(MASS=mass is not None, DIVIDED=divide, MASKED=key_mask is not None, PRECISION=launch.precision(x.dtype)),
    )


def state_of_keys(k: Tensor, v: Tensor, key_mask: Tensor | None, coefficients: tuple[float, float, float]) -> State:
    """The state of ``k [B, h, M, d]`` and ``v [B, h, M, e]``; key_mask bool ``[B, M]``, True takes part."""
    (a, b, c), scale = coefficients, 1 / max(1, k.shape[2])
    weights = (b * scale, c * scale, scale, scale, scale)
    features, row = feature_sums(k, v, None, key_mask, a * scale), moments(k, v, None, None, key_mask, weights)
    return State(in_half_range(features, row) if v.dtype == torch.float16 else features, row)


def forward(
    q: Tensor, state: State, coefficients: tuple[float, float, float], *, divide: bool
) -> tuple[Tensor, Tensor]:
    """What ``q [B, h, N, d]`` read of the state: out ``[B, h, N, e]`` and mass, float32 ``[B, h, N]``.

    Divided, out is the mean in the dtype of v, 0 where the mass is 0; else the sums of weighted values in float32. In float16
    products of two elements of q, or of k, are to be in range: elements up to 255, which those of unit length are.
    """
    (batch, heads, tokens, _), e = q.shape, state.features.shape[3]
    dtype = state.features.dtype if divide else torch.float32
    out = launch.tokens_first(q, batch, heads, tokens, e, dtype)
    mass = q.new_empty(batch, heads, tokens, dtype=torch.float32)
    expand(q, state.features, state.moments, None, out, mass, coefficients, divide)
    return out, mass
