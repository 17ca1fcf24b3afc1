"""Sums over tokens for the efficient form of TaylorShift: products of features with values, and
moments.

Columns of x are cut into tiles of 16. Pair ``p = i (i + 1) / 2 + j`` of tiles ``i >= j`` has the
256 features ``x_i x_j^T``. One launch sums products of features and y over segments of the tokens:
each program takes some pairs, or the moments. A second launch adds the segments. The same kernels
sum over keys (``x = k, y = v``) and, in the backward pass, over queries
(``x = q, y = grad / mass``).

x is not scaled to its length in advance: since ``phi2(s x) = s^2 phi2(x)``, the squared factor of a
token multiplies its y. In float16 the tiles are also multiplied by the power of two next to the
factor, which is exact and keeps their products in range.

The moments of one head are one row of float32:

    X^T Y [d, e] | sum y [e] | X^T diag(w) X [d, d] | sum w x [d] | 8 elements

The 8 elements, an octet for alignment, hold the number of tokens present; in float16 the second of
them holds the unit of the head.

Source: Nauen et al. 2024, "Efficient TaylorShift"; tiles and mass without features are ours.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    inverse_length,
    inverse_mass,
    kernel,
    parts,
    present_rows,
    read,
    sum_of_parts,
)

TILE = 16
PAIR = TILE * TILE
PLAIN, OF_LENGTH_ONE, OF_GIVEN_LENGTH = 0, 1, 2
"""Values of the kernel option ``LENGTH``: keep x, scale it to length 1, or scale it to the length
of its head.
"""


def num_tiles(d: int) -> int:
    """Return the number of tiles of 16 columns that hold a width."""
    return -(-d // TILE)


def num_pairs(d: int) -> int:
    """Return the number of pairs of tiles ``i >= j``."""
    return num_tiles(d) * (num_tiles(d) + 1) // 2


def num_moments(d: int, e: int) -> int:
    """Return the length of a row of moments."""
    return d * e + e + d * d + d + launch.OCTET


@dataclass(frozen=True)
class Divided:
    """Divisors and weights of the tokens, float32 ``[B, h, N]``.

    y is divided by ``mass`` (0 gives 0); ``weights`` are w in the moments.
    """

    mass: Tensor
    weights: Tensor


@triton.jit
def tiles_of_pair(pair):
    """Return i and j of pair ``p``, for at most four tiles: i grows at pairs 1, 3 and 6 of ten."""
    i = (pair + 9) // 10 + (pair + 5) // 8 + pair // 6
    return i, pair - i * (i + 1) // 2


@triton.jit
def power_above(b):
    """Return the smallest power of two above each ``b >= 0``, float32, by adding 1 to the
    exponent.
    """
    bits = b.to(tl.int32, bitcast=True) & 0x7F800000
    return (bits + 0x00800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(b_power):
    """Return ``1 / power`` of powers of two, exactly: the biased exponent becomes 254 minus it."""
    return (0x7F000000 - b_power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def times_power(b_x, b_power):
    """Multiply rows of float16 by powers of two, exactly; return other dtypes unchanged."""
    if b_x.dtype == tl.float16:
        return (b_x.to(tl.float32) * b_power[:, None]).to(tl.float16)
    else:
        return b_x


@triton.jit
def _factors(b_x, p_length, i_head, LENGTH: tl.constexpr):
    """Return two factors for each row, float32 ``[N]``, which together scale it to its length: a
    power of two, applied only in float16, and the remaining factor.
    """
    b_factor = inverse_length(b_x)
    b_power = power_above(b_factor)
    # Only the remaining factor rounds.
    if b_x.dtype == tl.float16:
        b_factor *= inverse_power(b_power)
    if LENGTH == 2:
        b_factor *= tl.load(p_length + i_head)
    return b_power, b_factor


@triton.jit
def _sum_features(
    p_x,
    p_y,
    p_mass,
    p_length,
    p_present,
    p_part,
    i_head,
    i_share,
    first,
    last,
    x_token,
    y_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr,
    LENGTH: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum features of ``PAIRS`` pairs of tiles, times y, over the tokens of one segment."""
    o_d, o_e, o_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, 16)
    # Tuples with one sum and two tiles per pair; the number of pairs is a compile-time constant.
    b_sums, b_tiles = (), ()
    for _ in tl.static_range(PAIRS):
        b_sums = b_sums + (tl.zeros([256, BLOCK_E], tl.float32),)
        b_tiles = b_tiles + (
            tl.zeros([BLOCK_N, 16], p_x.dtype.element_ty),
            tl.zeros([BLOCK_N, 16], p_x.dtype.element_ty),
        )
    b_y = tl.zeros([BLOCK_N, BLOCK_E], p_y.dtype.element_ty)
    # Each step multiplies the data loaded by the previous step, so that memory reads overlap with
    # products.
    for start in range(first - BLOCK_N, last, BLOCK_N):
        o_n = start + BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = present_rows(p_present, o_n, o_n < last, MASKED)
        b_next_y = read(p_y, o_n, y_token, o_e, m_n, E)  # [N, E]
        if LENGTH:
            b_x = read(p_x, o_n, x_token, o_d, m_n, D)  # [N, D], only for the length
        if DIVIDED:
            b_inverse = inverse_mass(p_mass, o_n, m_n)
        b_loaded, b_next_tiles, b_next_sums = (), (), ()
        for p in tl.static_range(PAIRS):
            # Loads of all pairs come first, so that the products below hide their latency.
            i, j = tiles_of_pair(i_share * PAIRS + p)
            b_i = read(p_x, o_n, x_token, 16 * i + o_t, m_n, D)  # [N, 16]
            b_loaded = b_loaded + (b_i, read(p_x, o_n, x_token, 16 * j + o_t, m_n, D))
        for p in tl.static_range(PAIRS):
            # The features of the previously loaded tokens, as a left operand: [256, N].
            b_i, b_j = tl.trans(b_tiles[2 * p]), tl.trans(b_tiles[2 * p + 1])
            b_features = tl.reshape(b_i[:, None, :] * b_j[None, :, :], [256, BLOCK_N])
            b_next_sums = b_next_sums + (
                b_sums[p] + tl.dot(b_features, b_y, input_precision=PRECISION),
            )
        # Multiply y by the squared factor, which the features lack.
        if LENGTH:
            b_power, b_factor = _factors(b_x, p_length, i_head, LENGTH)
            b_factor *= b_factor
            if DIVIDED:
                b_factor *= b_inverse
            b_next_y = (b_next_y.to(tl.float32) * b_factor[:, None]).to(b_y.dtype)
            for p in tl.static_range(2 * PAIRS):
                b_next_tiles = b_next_tiles + (times_power(b_loaded[p], b_power),)
        else:
            b_next_tiles = b_loaded
            if DIVIDED:
                b_next_y = (b_next_y.to(tl.float32) * b_inverse[:, None]).to(b_y.dtype)
        b_y, b_tiles, b_sums = b_next_y, b_next_tiles, b_next_sums
    # Write all 256 rows of each pair; the second launch drops columns beyond D.
    o_f = tl.arange(0, 256)
    for p in tl.static_range(PAIRS):
        p_pair = p_part + (i_share * PAIRS + p) * (256 * E)
        tl.store(p_pair + o_f[:, None] * E + o_e[None, :], b_sums[p], mask=(o_e < E)[None, :])


@triton.jit
def _sum_moments(
    p_x,
    p_y,
    p_mass,
    p_weights,
    p_length,
    p_present,
    p_part,
    i_head,
    first,
    last,
    x_token,
    y_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LENGTH: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum the moments over the tokens of one segment.

    In half precision, scaled operands are split into two parts, which keep 16 bits or more.
    """
    o_d, o_e, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_D)
    m_d, m_e, m_c = o_d < D, o_e < E, o_c < D
    HALF: tl.constexpr = p_x.dtype.element_ty != tl.float32
    b_xy, b_xx = tl.zeros([BLOCK_D, BLOCK_E], tl.float32), tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    b_low_xy = tl.zeros([BLOCK_D, BLOCK_E], tl.float32)
    b_low_xx = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    # Plain sums stay separate for each token of the block; one reduction follows at the end.
    b_y_sums = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    b_x_sums = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_count = tl.zeros([BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = present_rows(p_present, o_n, o_n < last, MASKED)
        b_x = read(p_x, o_n, x_token, o_d, m_n, D)  # [N, D]
        b_y = read(p_y, o_n, y_token, o_e, m_n, E)  # [N, E]
        # Right operands: y, divided by its mass, for X^T Y, and weighted x for X^T diag(w) X.
        b_right, b_weighted = b_y.to(tl.float32), b_x.to(tl.float32)
        if DIVIDED:
            b_right *= inverse_mass(p_mass, o_n, m_n)[:, None]
        b_y_sums += b_right
        # Only the exact power of two multiplies x. The remaining factor multiplies the right
        # operand, which keeps more bits: once for X^T Y and the sum of x, twice for X^T X.
        if LENGTH:
            b_power, b_factor = _factors(b_x, p_length, i_head, LENGTH)
            b_x = times_power(b_x, b_power)
            b_right *= b_factor[:, None]
            b_weighted = b_x.to(tl.float32) * b_factor[:, None]
        if DIVIDED:
            b_weighted *= tl.load(p_weights + o_n, mask=m_n, other=0)[:, None]
        b_x_sums += b_weighted
        if LENGTH:
            b_weighted *= b_factor[:, None]
        # Both products share their left operand.
        b_left = tl.trans(b_x)
        # Sum high and low parts separately if registers hold both sums.
        if HALF and (LENGTH or DIVIDED):
            b_high, b_low = parts(b_right, b_x.dtype)
            b_high_x, b_low_x = parts(b_weighted, b_x.dtype)
            b_xy += tl.dot(b_left, b_high)
            b_xx += tl.dot(b_left, b_high_x)
            if BLOCK_E > 64:  # wide values: registers hold only one sum for both parts
                b_xy += tl.dot(b_left, b_low)
            else:
                b_low_xy += tl.dot(b_left, b_low)
            b_low_xx += tl.dot(b_left, b_low_x)
        else:
            b_xy += tl.dot(b_left, b_right.to(b_x.dtype), input_precision=PRECISION)
            b_xx += tl.dot(b_left, b_weighted.to(b_x.dtype), input_precision=PRECISION)
        b_count += m_n.to(tl.float32)
    # Store the row of moments in the order that the module docstring gives.
    tl.store(
        p_part + o_d[:, None] * E + o_e[None, :], b_xy + b_low_xy, mask=m_d[:, None] & m_e[None, :]
    )
    tl.store(p_part + D * E + o_e, tl.sum(b_y_sums, 0), mask=m_e)
    p_part += D * E + E
    tl.store(
        p_part + o_d[:, None] * D + o_c[None, :], b_xx + b_low_xx, mask=m_d[:, None] & m_c[None, :]
    )
    tl.store(p_part + D * D + o_d, tl.sum(b_x_sums, 0), mask=m_d)
    tl.store(p_part + D * D + D + tl.arange(0, 8), tl.zeros([8], tl.float32) + tl.sum(b_count, 0))


@kernel
def taylor_efficient_sums(
    p_x,
    p_y,
    p_mass,
    p_weights,
    p_length,
    p_present,
    p_parts,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARES: tl.constexpr,
    LENGTH: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute one share of the sums over one segment of one head: ``PAIRS`` pairs of tiles or, in
    the last share, the moments.

    With ``DIVIDED``, y is divided by the mass, and the moments of x have weights. With ``LENGTH``,
    x is scaled to a length.
    """
    # Programs of the same tokens are consecutive, so that they read the tokens from cache.
    i_share, i_rest = tl.program_id(0) % (SHARES + 1), tl.program_id(0) // (SHARES + 1)
    i_segment, i_group = i_rest % segments, i_rest // segments
    i_batch, i_head = i_group // heads, i_group % heads
    p_x = head(p_x, i_batch, i_head, x_batch, x_head)
    p_y = head(p_y, i_batch, i_head, y_batch, y_head)
    p_present += i_batch.to(tl.int64) * tokens
    p_mass += i_group.to(tl.int64) * tokens
    p_weights += i_group.to(tl.int64) * tokens
    SIZE: tl.constexpr = PAIRS * SHARES * 256 * E
    p_part = p_parts + (i_segment.to(tl.int64) * groups + i_group) * (
        SIZE + D * E + E + D * D + D + 8
    )
    first = i_segment * segment_tokens
    last = tl.minimum(tokens, first + segment_tokens)
    # The moments are an extra share, so that no other launch reads the tokens again.
    if i_share < SHARES:
        _sum_features(
            p_x, p_y, p_mass, p_length, p_present, p_part, i_head, i_share, first, last, x_token,
            y_token, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PAIRS, LENGTH, DIVIDED, MASKED, PRECISION,
        )  # fmt: skip
    else:
        _sum_moments(
            p_x, p_y, p_mass, p_weights, p_length, p_present, p_part + SIZE, i_head, first, last,
            x_token, y_token, D, E, BLOCK_D, BLOCK_E, BLOCK_N, LENGTH, DIVIDED, MASKED, PRECISION,
        )  # fmt: skip


@kernel
def taylor_efficient_state(
    p_parts,
    p_features,
    p_moments,
    groups,
    blocks,
    segments,
    pair_weight,
    xy_weight,
    y_weight,
    xx_weight,
    x_weight,
    count_weight,
    D: tl.constexpr,
    E: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the sums of all segments and multiply them by their weights, for one block of the sums of
    one head.

    Sums of a pair of tiles ``i > j`` are written for ``x_j x_i^T`` too, so the result ``[D, D, E]``
    is complete and symmetric.
    """
    i_group = tl.program_id(0) // blocks
    SIZE: tl.constexpr = PAIRS * 256 * E
    ROW: tl.constexpr = D * E + E + D * D + D + 8
    o = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    p_parts += i_group.to(tl.int64) * (SIZE + ROW) + o
    b_sum = sum_of_parts(p_parts, groups.to(tl.int64) * (SIZE + ROW), segments, o < SIZE + ROW, 8)
    # Features: the two columns of x and the column of y of each sum.
    o_f, o_e = o // E, o % E
    i, j = tiles_of_pair(o_f // 256)
    o_i, o_j = 16 * i + o_f // 16 % 16, 16 * j + o_f % 16
    m_f = (o < SIZE) & (o_i < D) & (o_j < D)
    b_feature = (b_sum * pair_weight).to(p_features.dtype.element_ty)
    p_features += i_group.to(tl.int64) * (D * D * E)
    tl.store(p_features + (o_i * D + o_j) * E + o_e, b_feature, mask=m_f)
    tl.store(p_features + (o_j * D + o_i) * E + o_e, b_feature, mask=m_f & (i > j))
    # Moments follow, each kind with its weight.
    o -= SIZE
    b_weight = tl.where(o < D * E, xy_weight, tl.where(o < D * E + E, y_weight, xx_weight))
    b_weight = tl.where(
        o < D * E + E + D * D, b_weight, tl.where(o < ROW - 8, x_weight, count_weight)
    )
    tl.store(
        p_moments + i_group.to(tl.int64) * ROW + o, b_sum * b_weight, mask=(o >= 0) & (o < ROW)
    )


def sums(
    x: Tensor,
    y: Tensor,
    length: Tensor | int,
    divided: Divided | None,
    key_mask: Tensor | None,
    weights: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """Return the sums over the tokens of ``x [B, h, N, d]`` and ``y [B, h, N, e]``.

    Args:
        length: length to which x is scaled: float32 ``[h]`` or 1; 0: x is unchanged.
        divided: divisors of y and weights of x; None: y is unchanged and w = 1.
        key_mask: bool ``[B, N]``, True takes part.
        weights: factors of the features and of the moments ``X^T Y``, ``sum y``, ``X^T diag(w) X``,
            ``sum w x`` and the count.

    Returns:
        ``sum_n x_n x_n^T y_n^T``, ``[B, h, d * d, e]`` in the dtype of y (float32 for float16, see
        ``in_half_range``), and moments, float32 ``[B, h, num_moments(d, e)]``.
    """
    (batch, heads, tokens, d), e = x.shape, y.shape[3]
    pairs, groups = num_pairs(d), batch * heads
    options = launch.options("taylor efficient sums", x, y)
    shares = pairs // options["PAIRS"]
    assert shares * options["PAIRS"] == pairs, "programs share the pairs evenly"
    # A partial sum takes as much memory as some hundreds of tokens, so segments are longer than in
    # other kernels.
    resident = launch.resident_programs("taylor efficient sums", d, e, x.dtype, x.device)
    segments = launch.segments(tokens, (shares + 1) * groups, 4 * options["BLOCK_N"], resident)
    size = pairs * PAIR * e + num_moments(d, e)
    partial = x.new_empty(segments, groups, size, dtype=torch.float32)
    x, y = launch.readable(x), launch.readable(y)
    launch.run(
        taylor_efficient_sums,
        ((shares + 1) * segments * groups,),
        *(x, y, *((x, x) if divided is None else (divided.mass, divided.weights))),
        *(length_pointer(x, length), x if key_mask is None else key_mask.contiguous(), partial),
        *(heads, groups, tokens, launch.cdiv(tokens, segments), segments),
        *(*launch.octets(x), *launch.octets(y)),
        **options,
        SHARES=shares,
        LENGTH=length_kind(length),
        DIVIDED=divided is not None,
        MASKED=key_mask is not None,
    )
    # Float16 features stay in float32 until ``in_half_range`` has found their unit.
    features = y.new_empty(
        batch, heads, d * d, e, dtype=torch.float32 if y.dtype == torch.float16 else y.dtype
    )
    moments = partial.new_empty(batch, heads, num_moments(d, e))
    row = launch.launch_row("taylor efficient state", 0, 0, torch.float32, x.device)
    blocks = launch.cdiv(size, row["BLOCK"])
    launch.run(
        taylor_efficient_state,
        (blocks * groups,),
        *(partial, features, moments, groups, blocks, segments, *map(float, weights)),
        D=d,
        E=e,
        PAIRS=pairs,
        **row,
    )
    return features, moments


def length_kind(length: Tensor | int) -> int:
    """Return the kernel option ``LENGTH`` for a length: a tensor ``[h]``, 1, or 0."""
    return OF_GIVEN_LENGTH if isinstance(length, Tensor) else length


def length_pointer(x: Tensor, length: Tensor | int) -> Tensor:
    """Return the pointer argument for lengths; ``x`` as placeholder if the kernel reads none."""
    return length.contiguous() if isinstance(length, Tensor) else x


def in_half_range(features: Tensor, moments: Tensor, unit: Tensor | None = None) -> Tensor:
    """Return the features in float16, divided by the largest magnitude of each head; divide the
    moments by the same unit in place.

    This keeps small sums above the minimum of float16, 6e-8. The unit, times ``unit [B, h]``, is
    stored in the row of moments.
    """
    # A common unit of features and moments cancels in the mean, their quotient.
    own = (
        moments[..., : -launch.OCTET]
        .abs()
        .amax(2)
        .maximum(features.abs().amax((2, 3)))
        .clamp(min=1e-30)
    )
    moments /= own[..., None]
    moments[..., 1 - launch.OCTET] = own if unit is None else own * unit
    return (features / own[..., None, None]).half()


@triton.jit
def unit_of(p_features, p_moments, D: tl.constexpr, E: tl.constexpr):
    """Read the unit of a state; it is 1 except in float16."""
    if p_features.dtype.element_ty == tl.float16:
        return tl.load(p_moments + D * E + E + D * D + D + 1)
    else:
        return 1.0
