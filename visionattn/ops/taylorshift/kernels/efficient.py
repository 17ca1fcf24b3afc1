"""The efficient form of TaylorShift, forward: a state of the keys, and its product with the
features of each query.

``w_ij = a x^2 + b x + c`` with ``x = q_i . k_j`` is linear in the features ``[phi2(q), q, 1]``, so
sums over keys are computed once. phi2 has the products of tiles of 16 columns
(``efficient_states.py``). The mass needs no features. Queries are not scaled to their length in
advance; their factor multiplies the rows of each product with the state. Widths are multiples of 8:
d from 8 to 64 and e from 8 to 128, in float32 both from 8 to 32.

Sums are in units of the number of keys M (see ``ops/gpu``).

Source: Nauen et al. 2024, "Efficient TaylorShift"; tiles and mass are ours.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    inverse_length,
    kernel,
    parts,
    present_rows,
    program_of,
    read,
    reciprocal,
    write,
)
from visionattn.ops.taylorshift.kernels.efficient_states import (
    in_half_range,
    inverse_power,
    length_kind,
    length_pointer,
    num_moments,
    num_tiles,
    power_above,
    sums,
    tiles_of_pair,
    times_power,
    unit_of,
)


class State(NamedTuple):
    """The sums over keys and values that queries need: features ``[B, h, d * d, e]`` in the dtype
    of v, and moments, float32.

    Features are ``a sum_j k_j k_j^T v_j^T / M``, symmetric in the first two axes. Moments are
    ``b K^T V / M``, ``c sum v / M``, ``K^T K / M``, ``sum k / M`` and the fraction of keys present,
    in one row (``efficient_states.py``). In float16 both are divided by the largest magnitude of
    each head.
    """

    features: Tensor
    moments: Tensor


def state_shapes(
    batch: int, heads: int, d: int, e: int, dtype: torch.dtype
) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of each tensor of a state; ``dtype`` is the dtype of v."""
    return ((batch, heads, d * d, e), dtype), ((batch, heads, num_moments(d, e)), torch.float32)


@triton.jit
def row_factors(b_x, p_length, i_head, LENGTH: tl.constexpr):
    """Return a power of two and the remaining factor to length 1 for each row, float32 ``[N]``, and
    the length.

    Rows in float16 are multiplied by the power (``times_power``), so that products of their
    elements stay in range; in other dtypes the power is 1. Without ``LENGTH`` the remaining factor
    is the inverse of the power.
    """
    # Factors of 1 cost nothing.
    b_one = tl.full([b_x.shape[0]], 1.0, tl.float32)
    b_power, b_factor, length = b_one, b_one, 1.0
    if LENGTH or b_x.dtype == tl.float16:
        b_inverse = inverse_length(b_x)
        if b_x.dtype == tl.float16:
            b_power = power_above(b_inverse)
        b_factor = b_inverse if LENGTH else b_one
        if b_x.dtype == tl.float16:
            b_factor *= inverse_power(b_power)
    if LENGTH == 2:
        length = tl.load(p_length + i_head)
        length = tl.where(tl.abs(length) < 1e-12, 1e-12, length)  # divides unsquared terms
    return b_power, b_factor, length


@triton.jit
def times_moments(b_left, p, o_rows, row, o_columns, column, m, b_start, PRECISION: tl.constexpr):
    """Return ``b_start`` plus the product of ``b_left`` and the float32 matrix at ``p`` with
    strides ``row`` and ``column`` and mask ``m``.

    In half precision the matrix is split into two parts.
    """
    b_right = tl.load(p + o_rows[:, None] * row + o_columns[None, :] * column, mask=m, other=0)
    # Moments sum many tokens: in half precision they would lose the contribution of a few tokens.
    if b_left.dtype == tl.float32:
        return tl.dot(b_left, b_right, acc=b_start, input_precision=PRECISION)
    else:
        b_high, b_low = parts(b_right, b_left.dtype)
        return tl.dot(b_left, b_low, acc=tl.dot(b_left, b_high, acc=b_start))


@kernel
def taylor_efficient_expand(
    p_x,
    p_length,
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
    LENGTH: tl.constexpr,
    MASS: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply ``[phi2(x), x, 1]`` of one block of tokens by the state.

    With ``MASS`` write the sums of weights too; with ``DIVIDED`` divide by them.
    """
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    m_n, m_d, m_e = o_n < tokens, o_d < D, o_e < E
    m_x = present_rows(p_present + i_batch.to(tl.int64) * tokens, o_n, m_n, MASKED)
    p_x = head(p_x, i_batch, i_head, x_batch, x_head)
    p_features += i_group.to(tl.int64) * (D * D * E)
    # The row of moments: X^T Y, sum y, X^T X, sum x, and an octet for the count.
    p_moments += i_group.to(tl.int64) * (D * E + E + D * D + D + 8)
    b_x = read(p_x, o_n, x_token, o_d, m_x, D)  # [N, D]
    b_power, b_factor, length = row_factors(b_x, p_length, i_head, LENGTH)
    b_factor *= length
    b_x = times_power(b_x, b_power)
    # The mass is a quadratic form of x, without features.
    if MASS:
        b_mass = mass_of_rows(b_x, b_factor, p_moments + D * E + E, a, b, c, D, BLOCK_D, PRECISION)
        unit = unit_of(p_features, p_moments, D, E)
        tl.store(p_mass + i_group.to(tl.int64) * tokens + o_n, b_mass * unit, mask=m_n)
    # A step takes BLOCK_F features: ROWS columns of tile i times the 16 columns of tile j.
    ROWS: tl.constexpr = BLOCK_F // 16
    STEPS: tl.constexpr = TILES * (TILES + 1) // 2 * (16 // ROWS)
    o_i, o_j = tl.arange(0, ROWS), tl.arange(0, 16)
    o_fi, o_fj = tl.arange(0, BLOCK_F) // 16, tl.arange(0, BLOCK_F) % 16
    b_i = times_power(read(p_x, o_n, x_token, o_i, m_x, D), b_power)  # [N, ROWS]
    b_j = times_power(read(p_x, o_n, x_token, o_j, m_x, D), b_power)  # [N, 16]
    b_state = features_of(p_features, o_fi, o_fj, D, E, BLOCK_E)  # [F, E]
    # Start with the linear term, divided by the factor once: at the end all sums are multiplied by
    # the factor twice.
    m_xy, b_start = m_d[:, None] & m_e[None, :], tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    b_values = (
        times_moments(b_x, p_moments, o_d, E, o_e, 1, m_xy, b_start, PRECISION)
        * (1 / b_factor)[:, None]
    )
    # Each step multiplies the data loaded by the previous step, so that memory reads overlap with
    # products.
    for step in tl.range(STEPS, num_stages=1):
        i, j = tiles_of_pair(step // (16 // ROWS))
        following = tl.minimum(step + 1, STEPS - 1)
        next_i, next_j = tiles_of_pair(following // (16 // ROWS))
        next_i_column, next_j_column = 16 * next_i + ROWS * (following % (16 // ROWS)), 16 * next_j
        b_next_i = times_power(read(p_x, o_n, x_token, next_i_column + o_i, m_x, D), b_power)
        b_next_j = times_power(read(p_x, o_n, x_token, next_j_column + o_j, m_x, D), b_power)
        b_next = features_of(p_features, next_i_column + o_fi, next_j_column + o_fj, D, E, BLOCK_E)
        # Pairs of unequal tiles count twice, for both orders.
        b_features = left_features(b_i * tl.where(i == j, 1.0, 2.0).to(b_i.dtype), b_j)
        b_values += tl.dot(b_features, b_state, input_precision=PRECISION)
        b_i, b_j, b_state = b_next_i, b_next_j, b_next
    # Apply the factor twice to the squares, and so once to the linear term. Then add the constant
    # term, which has no factor.
    b_values *= (b_factor * b_factor)[:, None]
    b_values += tl.load(p_moments + D * E + o_e, mask=m_e, other=0)[None, :]
    if DIVIDED:
        b_values *= reciprocal(b_mass)[:, None]
    else:
        b_values *= unit_of(p_features, p_moments, D, E)
    if MASKED:
        b_values = tl.where(m_x[:, None], b_values, 0)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    write(p_out, o_n, out_token, o_e, b_values, m_n, E)


@triton.jit
def features_of(p_features, o_i, o_j, D: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """Read the sums of products of columns ``o_i`` and ``o_j``, both ``[F]``, with all columns of
    y, ``[F, E]``; 0 beyond the widths.
    """
    o_e = tl.arange(0, BLOCK_E)
    p = p_features + ((o_i * D + o_j) * E)[:, None] + o_e[None, :]
    if D % 16 == 0 and E == BLOCK_E:
        return tl.load(p)
    else:
        return tl.load(p, mask=((o_i < D) & (o_j < D))[:, None] & (o_e < E)[None, :], other=0)


@triton.jit
def left_features(b_i, b_j):
    """Multiply each column of ``b_i [N, I]``, or the single column ``b_i [N]``, by each column of
    ``b_j [N, J]``; return ``[N, I * J]``, a left operand.
    """
    if len(b_i.shape) == 1:
        return b_i[:, None] * b_j
    else:
        shape: tl.constexpr = [b_i.shape[0], b_i.shape[1] * b_j.shape[1]]
        return tl.reshape(b_i[:, :, None] * b_j[:, None, :], shape)


@triton.jit
def mass_of_rows(
    b_x, b_factor, p_xx, a, b, c, D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr
):
    """Return ``a y^T (K^T K) y + b y . sum k + c count`` for the rows ``y = factor x`` of
    ``b_x [N, D]``, float32 ``[N]``.

    ``p_xx`` points to ``K^T K`` in the row of moments.
    """
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D)
    m_xx = (o_d < D)[:, None] & (o_c < D)[None, :]
    b_start = tl.zeros([b_x.shape[0], BLOCK_D], tl.float32)
    b_score = times_moments(b_x, p_xx, o_d, D, o_c, 1, m_xx, b_start, PRECISION)
    b_x_sum = tl.load(p_xx + D * D + o_c, mask=o_c < D, other=0)
    # The product of y and a (K^T K) y + b sum k gives all but the constant term.
    b_weights = a * b_score * b_factor[:, None] + b * b_x_sum[None, :]
    return tl.sum(b_weights * b_x.to(tl.float32), 1) * b_factor + c * tl.load(p_xx + D * D + D)


def expand(
    x: Tensor,
    length: Tensor | int,
    state: State,
    key_mask: Tensor | None,
    out: Tensor,
    mass: Tensor | None,
    coefficients: tuple[float, float, float],
    divide: bool,
) -> None:
    """Write the product of the state and the features of ``x [B, h, N, d]`` to
    ``out [B, h, N, e]`` and, unless it is None, the sums of weights to ``mass [B, h, N]``.

    Args:
        length: length to which x is scaled: float32 ``[h]`` or 1; 0: x is unchanged.
        key_mask: bool ``[B, N]``; other rows of ``out`` are 0. None: all.
        divide: whether to divide ``out`` by the mass.
    """
    batch, heads, tokens, d = x.shape
    options, x = launch.options("taylor efficient expand", x, out), launch.readable(x)
    blocks = launch.cdiv(tokens, options["BLOCK_N"])
    launch.run(
        taylor_efficient_expand,
        (blocks * batch * heads,),
        *(x, length_pointer(x, length), *state),
        *(x if key_mask is None else key_mask.contiguous(), out),
        state.moments if mass is None else mass,
        *(heads, tokens, blocks, *map(float, coefficients), *launch.octets(x), *launch.octets(out)),
        **options,
        TILES=num_tiles(d),
        LENGTH=length_kind(length),
        MASS=mass is not None,
        DIVIDED=divide,
        MASKED=key_mask is not None,
    )


def state_of_keys(
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    coefficients: tuple[float, float, float],
    *,
    normalised: bool,
) -> State:
    """Return the state of ``k [B, h, M, d]``, scaled to length 1 if ``normalised``, and
    ``v [B, h, M, e]``.

    Args:
        key_mask: bool ``[B, M]``, True takes part.
    """
    (a, b, c), scale = coefficients, 1 / max(1, k.shape[2])
    # Weights of the features and of each moment; ``mass_of_rows`` applies a, b and c to the
    # moments of the mass.
    weights = a * scale, b * scale, c * scale, scale, scale, scale
    features, row = sums(k, v, int(normalised), None, key_mask, weights)
    return State(in_half_range(features, row) if v.dtype == torch.float16 else features, row)


def forward(
    q: Tensor,
    temperature: Tensor | None,
    state: State,
    coefficients: tuple[float, float, float],
    *,
    divide: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output for ``q [B, h, N, d]`` from the state of the keys.

    Args:
        temperature: float32 ``[h]``, the length to which q is scaled; None: q is unchanged.
        divide: whether to divide by the mass.

    Returns:
        out ``[B, h, N, e]`` and mass, float32 ``[B, h, N]``. With ``divide``, out is the mean in
        the dtype of v, 0 for a mass of 0; else the sums of weighted values in float32.
    """
    (batch, heads, tokens, _), e = q.shape, state.features.shape[3]
    dtype = state.features.dtype if divide else torch.float32
    out = launch.tokens_first(q, batch, heads, tokens, e, dtype)
    mass = q.new_empty(batch, heads, tokens, dtype=torch.float32)
    expand(
        q, 0 if temperature is None else temperature, state, None, out, mass, coefficients, divide
    )
    return out, mass
