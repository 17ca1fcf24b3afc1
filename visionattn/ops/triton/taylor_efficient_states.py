"""Sums over tokens that the efficient form of TaylorShift needs: products of features with values, and moments.

Columns are cut into tiles of 16. Pair ``p = i (i + 1) / 2 + j`` of tiles ``i >= j`` has the 256 features ``x_i x_j^T``, row by
row. The same kernels sum over keys (x = k, y = v) and, in the backward pass, over queries (x = q, y = grad / mass).

Moments of one head lie in one row of float32: ``X^T Y [d, e]``, ``sum y [e]``, ``X^T diag(w) X [d, d]``, ``sum w x [d]`` and 8
times the number of tokens present; the second of the 8 is the unit of the head in float16. Source: TaylorShift, "Efficient
TaylorShift"; tiles and mass without features are ours.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.language import head, kernel, rows

TILE = 16
PAIR = TILE * TILE


def num_tiles(d: int) -> int:
    """Tiles of 16 columns that hold a width."""
    return -(-d // TILE)


def num_pairs(d: int) -> int:
    """Pairs of tiles ``i >= j``."""
    return num_tiles(d) * (num_tiles(d) + 1) // 2


def num_moments(d: int, e: int) -> int:
    """Length of a row of moments."""
    return d * e + e + d * d + d + launch.OCTET


@triton.jit
def columns(p_x, o_n, x_token, first, m_n, D: tl.constexpr, WIDTH: tl.constexpr):
    """``WIDTH`` columns of x from ``first`` on, ``[N, WIDTH]``; 0 beyond column D and where ``m_n`` is false."""
    o_d = first + tl.arange(0, WIDTH)
    return tl.load(rows(p_x, o_n, x_token, o_d), mask=m_n[:, None] & (o_d < D)[None, :], other=0)


@triton.jit
def present_rows(p_present, i_batch, tokens, o_n, m_n, MASKED: tl.constexpr):
    """``m_n``, without the tokens that the mask of the image leaves out."""
    if MASKED:
        return m_n & (tl.load(p_present + i_batch.to(tl.int64) * tokens + o_n, mask=m_n, other=0) != 0)
    else:
        return m_n


@triton.jit
def inverse_mass(p_mass, i_group, tokens, o_n, m_n):
    """``1 / mass``, 0 where the mass is 0, float32 ``[N]``."""
    b_mass = tl.load(p_mass + i_group.to(tl.int64) * tokens + o_n, mask=m_n, other=0)
    return tl.where(b_mass == 0, 0.0, 1 / tl.where(b_mass == 0, 1.0, b_mass))


@triton.jit
def tiles_of_pair(pair):
    """i and j of a pair of at most four tiles: i grows by one at pairs 1, 3 and 6 of the ten."""
    i = (pair + 9) // 10 + (pair + 5) // 8 + pair // 6
    return i, pair - i * (i + 1) // 2


@kernel
def _partial_features(
    p_x,
    p_y,
    p_mass,
    p_present,
    p_parts,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    weight,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAIRS: tl.constexpr,
    SHARES: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Features of ``PAIRS`` pairs of tiles times y over one segment of one head, times ``weight``, twice that where i > j.

    ``DIVIDED`` takes ``y / mass`` for y.
    """
    i_share, i_rest = tl.program_id(0) % SHARES, tl.program_id(0) // SHARES
    i_segment, i_group = i_rest % segments, i_rest // segments
    i_batch, i_head = i_group // heads, i_group % heads
    p_x, p_y = head(p_x, i_batch, i_head, x_batch, x_head), head(p_y, i_batch, i_head, y_batch, y_head)
    o_e = tl.arange(0, BLOCK_E)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    b_sums, b_tiles = (), ()
    for _ in tl.static_range(PAIRS):
        b_sums = b_sums + (tl.zeros([256, BLOCK_E], tl.float32),)
        b_tiles = b_tiles + (tl.zeros([BLOCK_N, 16], p_x.dtype.element_ty), tl.zeros([BLOCK_N, 16], p_x.dtype.element_ty))
    b_y = tl.zeros([BLOCK_N, BLOCK_E], p_y.dtype.element_ty)
    # Each step multiplies what the step before has loaded, so that memory is read while the matrix unit works.
    for start in range(i_segment * segment_tokens - BLOCK_N, last, BLOCK_N):
        o_n = start + BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = present_rows(p_present, i_batch, tokens, o_n, o_n < last, MASKED)
        b_next_y = columns(p_y, o_n, y_token, 0, m_n, E, BLOCK_E)  # [N, E]
        if DIVIDED:
            b_inverse = inverse_mass(p_mass, i_group, tokens, o_n, m_n)
        b_next_tiles, b_next_sums = (), ()
        for p in tl.static_range(PAIRS):
            i, j = tiles_of_pair(i_share * PAIRS + p)
            b_i = columns(p_x, o_n, x_token, 16 * i, m_n, D, 16)  # [N, 16]
            b_next_tiles = b_next_tiles + (b_i, columns(p_x, o_n, x_token, 16 * j, m_n, D, 16))
        for p in tl.static_range(PAIRS):
            b_i, b_j = tl.trans(b_tiles[2 * p]), tl.trans(b_tiles[2 * p + 1])
            b_features = tl.reshape(b_i[:, None, :] * b_j[None, :, :], [256, BLOCK_N])
            b_next_sums = b_next_sums + (b_sums[p] + tl.dot(b_features, b_y, input_precision=PRECISION),)
        if DIVIDED:
            b_next_y = (b_next_y.to(tl.float32) * b_inverse[:, None]).to(b_y.dtype)
        b_y, b_tiles, b_sums = b_next_y, b_next_tiles, b_next_sums
    i_part = i_segment.to(tl.int64) * groups + i_group
    for p in tl.static_range(PAIRS):
        i_pair = i_share * PAIRS + p
        i, j = tiles_of_pair(i_pair)
        p_pair = p_parts + (i_part * (PAIRS * SHARES) + i_pair) * (256 * E)
        b_sum = b_sums[p] * tl.where(i == j, weight, 2 * weight)
        tl.store(p_pair + tl.arange(0, 256)[:, None] * E + o_e[None, :], b_sum, mask=(o_e < E)[None, :])


@kernel
def _partial_moments(
    p_x,
    p_y,
    p_out,
    p_mass,
    p_present,
    p_parts,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    xy_weight,
    y_weight,
    xx_weight,
    x_weight,
    count_weight,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Moments of one segment of one head, each times its weight.

    ``DIVIDED`` takes ``g = y / mass`` for y, and ``-<g, out>`` for the weights w of the tokens, else 1.
    """
    i_segment, i_group = tl.program_id(0) % segments, tl.program_id(0) // segments
    i_batch, i_head = i_group // heads, i_group % heads
    p_x, p_y = head(p_x, i_batch, i_head, x_batch, x_head), head(p_y, i_batch, i_head, y_batch, y_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    o_d, o_c, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    m_e = o_e < E
    b_yx, b_y_sum = tl.zeros([BLOCK_E, BLOCK_D], tl.float32), tl.zeros([BLOCK_E], tl.float32)
    b_xx, b_x_sum = tl.zeros([BLOCK_D, BLOCK_D], tl.float32), tl.zeros([BLOCK_D], tl.float32)
    b_count = tl.zeros([BLOCK_N], tl.float32)
    last = tl.minimum(tokens, (i_segment + 1) * segment_tokens)
    for start in range(i_segment * segment_tokens, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = present_rows(p_present, i_batch, tokens, o_n, o_n < last, MASKED)
        b_x = columns(p_x, o_n, x_token, 0, m_n, D, BLOCK_D)  # [N, D]
        b_y = columns(p_y, o_n, y_token, 0, m_n, E, BLOCK_E)  # [N, E]
        b_weighted = b_x.to(tl.float32)
        b_values = b_y.to(tl.float32)
        if DIVIDED:
            b_out = columns(p_out, o_n, out_token, 0, m_n, E, BLOCK_E)  # [N, E]
            b_values *= inverse_mass(p_mass, i_group, tokens, o_n, m_n)[:, None]
            b_weighted *= -tl.sum(b_values * b_out.to(tl.float32), 1)[:, None]
        b_yx += tl.dot(tl.trans(b_values).to(b_x.dtype), b_x, input_precision=PRECISION)
        b_xx += tl.dot(tl.trans(b_x), b_weighted.to(b_x.dtype), input_precision=PRECISION)
        b_y_sum += tl.sum(b_values, 0)
        b_x_sum += tl.sum(b_weighted, 0)
        b_count += m_n.to(tl.float32)
    p_parts += (i_segment.to(tl.int64) * groups + i_group) * (D * E + E + D * D + D + 8)
    m_d, m_c = o_d < D, o_c < D
    tl.store(p_parts + o_d[None, :] * E + o_e[:, None], b_yx * xy_weight, mask=m_d[None, :] & m_e[:, None])
    tl.store(p_parts + D * E + o_e, b_y_sum * y_weight, mask=m_e)
    p_parts += D * E + E
    tl.store(p_parts + o_d[:, None] * D + o_c[None, :], b_xx * xx_weight, mask=m_d[:, None] & m_c[None, :])
    tl.store(p_parts + D * D + o_d, b_x_sum * x_weight, mask=m_d)
    tl.store(p_parts + D * D + D + tl.arange(0, 8), tl.zeros([8], tl.float32) + tl.sum(b_count, 0) * count_weight)


@kernel
def _add_parts(p_parts, p_sum, octets, parts, BLOCK: tl.constexpr):
    """The sum of ``parts`` stretches of ``8 octets`` numbers, for one block of them."""
    size = octets.to(tl.int64) * 8
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for _ in range(parts):
        b_sum += tl.load(p_parts + o, mask=o < size, other=0)
        p_parts += size
    tl.store(p_sum + o, b_sum.to(p_sum.dtype.element_ty), mask=o < size)


def _added(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of ``parts [S, ...]``, whose other axes hold a multiple of 8 numbers, in ``dtype``."""
    total = parts.new_empty(parts.shape[1:], dtype=dtype)
    size, row = total.numel(), launch.launch_row("taylor efficient sum of parts", 0, 0, torch.float32, parts.device)
    grid = (triton.cdiv(size, row["BLOCK"]),)
    launch.run(_add_parts, grid, parts, total, size // launch.OCTET, parts.shape[0], **row)
    return total


def feature_sums(x: Tensor, y: Tensor, mass: Tensor | None, key_mask: Tensor | None, weight: float) -> Tensor:
    """``sum_n phi2(x_n) y_n^T`` of ``x [B, h, N, d]`` and ``y [B, h, N, e]``, ``[B, h, F, e]`` in the dtype of y, float32 for
    float16 (``in_half_range``).

    Args:
        mass: float32 ``[B, h, N]``, by which y is divided (0 where it is 0); None leaves y as it is.
        key_mask: bool ``[B, N]``, the tokens that count.
        weight: of pairs of equal tiles; the others get twice that.
    """
    (batch, heads, tokens, d), e = x.shape, y.shape[3]
    asked = "taylor efficient features", d, e, x.dtype, x.device
    options = launch.launch_row(*asked)
    shares = num_pairs(d) // options["PAIRS"]
    assert shares * options["PAIRS"] == num_pairs(d), "programs share the pairs evenly"
    # A partial sum is as large as what some hundreds of tokens are: segments have eight blocks at least.
    programs, resident = batch * heads * shares, launch.resident_programs(*asked)
    parts = launch.segments(tokens, programs, 4 * options["BLOCK_N"], resident)
    sums = x.new_empty(parts, batch, heads, num_pairs(d) * PAIR, e, dtype=torch.float32)
    x, y = launch.readable(x), launch.readable(y)
    launch.run(
        _partial_features,
        (shares * parts * batch * heads,),
        *(x, y, x if mass is None else mass, x if key_mask is None else key_mask.contiguous(), sums),
        *(heads, batch * heads, tokens, triton.cdiv(tokens, parts), parts, float(weight)),
        *(*launch.octets(x), *launch.octets(y)),
        **options,
        **dict(D=d, E=e, BLOCK_E=launch.block(e), SHARES=shares, PRECISION=launch.precision(x.dtype)),
        DIVIDED=mass is not None,
        MASKED=key_mask is not None,
    )
    return _added(sums, torch.float32 if y.dtype == torch.float16 else y.dtype)


def in_half_range(features: Tensor, moments: Tensor, unit: Tensor | None = None) -> Tensor:
    """Features in float16, where both they and the moments, in place, are put in units of the largest of each head.

    That keeps small sums above the end of float16 at 6e-8. The unit, times ``unit [B, h]``, is left in the row of moments.
    """
    own = moments[..., : -launch.OCTET].abs().amax(2).maximum(features.abs().amax((2, 3))).clamp(min=1e-30)
    moments /= own[..., None]
    moments[..., 1 - launch.OCTET] = own if unit is None else own * unit
    return (features / own[..., None, None]).half()


@triton.jit
def unit_of(p_features, p_moments, D: tl.constexpr, E: tl.constexpr):
    """The unit of a state; 1 but in float16."""
    if p_features.dtype.element_ty == tl.float16:
        return tl.load(p_moments + D * E + E + D * D + D + 1)
    else:
        return 1.0


def moments(
    x: Tensor, y: Tensor, out: Tensor | None, mass: Tensor | None, key_mask: Tensor | None, weights: tuple[float, ...]
) -> Tensor:
    """Moments of ``x [B, h, N, d]`` and ``y [B, h, N, e]`` over the tokens, float32 ``[B, h, num_moments(d, e)]``.

    Args:
        out, mass: ``[B, h, N, e]`` and float32 ``[B, h, N]``: y is divided by the mass, and w is ``-<y / mass, out>``.
            None leaves y as it is, with w = 1.
        key_mask: bool ``[B, N]``, the tokens that count.
        weights: factors of ``X^T Y``, ``sum y``, ``X^T diag(w) X``, ``sum w x`` and the number of tokens.
    """
    (batch, heads, tokens, d), e = x.shape, y.shape[3]
    asked = "taylor efficient moments", d, e, x.dtype, x.device
    options = launch.launch_row(*asked)
    parts = launch.segments(tokens, batch * heads, options["BLOCK_N"], launch.resident_programs(*asked))
    sums = x.new_empty(parts, batch, heads, num_moments(d, e), dtype=torch.float32)
    x, y = launch.readable(x), launch.readable(y)
    out = y if out is None else launch.readable(out)
    launch.run(
        _partial_moments,
        (parts * batch * heads,),
        *(x, y, out, x if mass is None else mass, x if key_mask is None else key_mask.contiguous(), sums),
        *(heads, batch * heads, tokens, triton.cdiv(tokens, parts), parts, *map(float, weights)),
        *(octet for tensor in (x, y, out) for octet in launch.octets(tensor)),
        **options,
        **dict(D=d, E=e, BLOCK_D=launch.block(d), BLOCK_E=launch.block(e), PRECISION=launch.precision(x.dtype)),
        DIVIDED=mass is not None,
        MASKED=key_mask is not None,
    )
    return sums[0] if parts == 1 else _added(sums, torch.float32)
