"""The efficient form of TaylorShift, backward: the gradient of the state from the queries, then the
gradients of keys and values.

With ``g = dO / mass`` and ``z = -<g, O>`` for each query, the gradient of the state is a state of
the queries: its features are ``sums`` of q and g, its moments are moments of q, g and z. The
gradient of v is the product of this state and the features of k (``expand``). The gradients of q
and k through their features are ``sum_c x_c (y . S_cr)`` with the symmetric state S. The kernel
multiplies the products of x and y by S, so that the matrix unit sums over the columns of both. The
gradients of the normalization and of the temperature are computed in registers.

Gradients of the state are divided by the number of keys, as the state is, and in float16 by the
largest gradient of each head.

Source: the forward pass, differentiated by hand.
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
from visionattn.ops.taylorshift.kernels.efficient import (
    State,
    expand,
    left_features,
    row_factors,
    times_moments,
)
from visionattn.ops.taylorshift.kernels.efficient_states import (
    Divided,
    in_half_range,
    inverse_power,
    length_kind,
    length_pointer,
    power_above,
    sums,
    times_power,
    unit_of,
)


@kernel
def taylor_efficient_gradient(
    p_x,
    p_length,
    p_y,
    p_out,
    p_mass,
    p_present,
    p_features,
    p_moments,
    p_dx,
    p_z,
    p_dlength,
    heads,
    tokens,
    blocks,
    xx_weight,
    x_weight,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    out_batch,
    out_head,
    out_token,
    dx_batch,
    dx_head,
    dx_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
    LENGTH: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of one block of x through ``<y, [phi2(x), x, 1] state>``,
    ``x^T (X^T X) x`` and ``x . sum x``.

    With ``DIVIDED``, ``g = y / mass`` replaces y, the last two terms have the weight
    ``z = -<g, out>`` instead of 1, and z is written. Rows are scaled after the matrix products, so
    that operands enter them unmodified.
    """
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_c = tl.arange(0, BLOCK_D)
    o_e = tl.arange(0, BLOCK_E)
    m_d, m_c, m_e = o_d < D, o_c < D, o_e < E
    p_present += i_batch.to(tl.int64) * tokens
    m_n = present_rows(p_present, o_n, o_n < tokens, MASKED)
    p_x = head(p_x, i_batch, i_head, x_batch, x_head)
    p_y = head(p_y, i_batch, i_head, y_batch, y_head)
    p_features += i_group.to(tl.int64) * (D * D * E)
    p_moments += i_group.to(tl.int64) * (D * E + E + D * D + D + 8)
    b_y = read(p_y, o_n, y_token, o_e, m_n, E)  # [N, E]
    b_scale = tl.full([BLOCK_N], 1.0, tl.float32)
    if b_y.dtype == tl.float16:  # keeps products with small gradients in range
        b_scale = power_above(1 / tl.maximum(tl.max(tl.abs(b_y), 1).to(tl.float32), 1e-30))
        b_y = times_power(b_y, b_scale)
    # The weight of the gradient through the mass, and the final factor; absent rows get 0.
    b_mass_weight = b_scale
    b_scale = tl.where(m_n, inverse_power(b_scale), 0)
    # <y, out> uses the scaled y, so z is multiplied by ``b_scale``.
    if DIVIDED:
        p_out = head(p_out, i_batch, i_head, out_batch, out_head)
        b_out = read(p_out, o_n, out_token, o_e, m_n, E)  # [N, E]
        b_mass_weight = -tl.sum(b_y.to(tl.float32) * b_out.to(tl.float32), 1)
        b_scale *= inverse_mass(p_mass + i_group.to(tl.int64) * tokens, o_n, m_n)
        tl.store(
            p_z + i_group.to(tl.int64) * tokens + o_n, b_mass_weight * b_scale, mask=o_n < tokens
        )
    # The gradients through the mass and the linear term.
    b_x = read(p_x, o_n, x_token, o_d, m_n, D)  # [N, D]
    b_power, b_factor, length = row_factors(b_x, p_length, i_head, LENGTH)
    p_xx = p_moments + D * E + E
    b_start = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_left, m_xx = times_power(b_x, b_power), m_c[:, None] & m_d[None, :]
    # xx_weight (X^T X) x + x_weight sum x, with x scaled to its length, times the weight above.
    b_dx = (
        times_moments(b_left, p_xx, o_c, D, o_d, 1, m_xx, b_start, PRECISION)
        * (xx_weight * length * b_factor)[:, None]
    )
    b_dx += tl.load(p_xx + D * D + o_d, mask=m_d, other=0)[None, :] * x_weight
    b_dx *= b_mass_weight[:, None]
    # Add the linear term, and divide by the factor of the squares, which is applied at the end. For
    # the squares, a step takes COLUMNS columns of x, and so BLOCK_F products of x with y.
    b_dx = times_moments(
        b_y, p_moments, o_e, 1, o_d, E, m_e[:, None] & m_d[None, :], b_dx, PRECISION
    )
    b_dx *= (0.5 / (length * b_factor))[:, None]
    COLUMNS: tl.constexpr = BLOCK_F // BLOCK_E
    o_x = tl.arange(0, COLUMNS)
    o_fc = tl.arange(0, BLOCK_F) // BLOCK_E
    o_fe = tl.arange(0, BLOCK_F) % BLOCK_E
    p_state = p_features + (o_fc * (D * E) + o_fe)[:, None] + (o_d * E)[None, :]
    b_column = columns_of(p_x, o_n, x_token, o_x, m_n, b_power, D, COLUMNS)  # [N, COLUMNS], or [N]
    b_state = state_of(p_state, o_fc, o_fe, o_d, D, E, BLOCK_D, BLOCK_E, BLOCK_F)  # [F, D]
    # Each step multiplies the data loaded by the previous step, so that memory reads overlap with
    # products.
    for first in tl.range(0, D, COLUMNS, num_stages=1):
        following = tl.minimum(first + COLUMNS, D - 1) // COLUMNS * COLUMNS
        b_next_column = columns_of(p_x, o_n, x_token, following + o_x, m_n, b_power, D, COLUMNS)
        p_next = p_state + following * (D * E)
        b_next = state_of(p_next, following + o_fc, o_fe, o_d, D, E, BLOCK_D, BLOCK_E, BLOCK_F)
        b_dx += tl.dot(left_features(b_column, b_y), b_state, input_precision=PRECISION)
        if LENGTH == 0 and b_y.dtype != tl.float32:
            # Add the rounding errors of the products; with a length they matter less.
            b_low = left_features(b_column.to(tl.float32), b_y.to(tl.float32))
            b_low -= left_features(b_column, b_y).to(tl.float32)
            b_dx += tl.dot(b_low.to(b_y.dtype), b_state)
        b_column, b_state = b_next_column, b_next
    # Read rows and factors again, relative to the first row of the block, so that the loop needs no
    # registers for them.
    i_first, o_r = (i_block * BLOCK_N).to(tl.int64), tl.arange(0, BLOCK_N)
    m_dx = o_r < tokens - i_block * BLOCK_N
    m_r = present_rows(p_present + i_first, o_r, m_dx, MASKED)
    b_x = read(p_x + i_first * (x_token * 8), o_r, x_token, o_d, m_r, D, AGAIN=True)
    b_power, b_factor, length = row_factors(b_x, p_length, i_head, LENGTH)
    b_dx *= (2 * length * b_factor * b_scale)[:, None] * unit_of(p_features, p_moments, D, E)
    if LENGTH:
        b_x, b_inverse = b_x.to(tl.float32), b_power * b_factor
        b_along = tl.sum(b_dx * b_x, 1) * b_inverse
        if LENGTH == 2:
            tl.store(p_dlength + i_group.to(tl.int64) * tokens + i_first + o_r, b_along, mask=m_r)
        b_along = tl.where(
            b_inverse < 0.9999e6, b_along, 0
        )  # shorter vectors are multiplied by a constant
        b_dx = (b_dx - b_x * (b_along * b_inverse)[:, None]) * (b_inverse * length)[:, None]
    p_dx = head(p_dx, i_batch, i_head, dx_batch, dx_head) + i_first * (dx_token * 8)
    write(p_dx, o_r, dx_token, o_d, b_dx, m_dx, D)


@triton.jit
def columns_of(p_x, o_n, x_token, o_x, m_n, b_power, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Read columns ``o_x`` of x, ``[N, COLUMNS]`` or for a single column ``[N]``; 0 beyond the
    width.

    In float16, rows are multiplied by ``b_power``.
    """
    if COLUMNS == 1:
        p_x += o_n.to(tl.int64) * (x_token * 8) + tl.max(o_x, 0)
        b_x = tl.load(p_x, mask=m_n, other=0)
        return (b_x.to(tl.float32) * b_power).to(b_x.dtype)
    else:
        return times_power(read(p_x, o_n, x_token, o_x, m_n, D), b_power)


@triton.jit
def state_of(
    p_state,
    o_column,
    o_e,
    o_d,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Read the sums of products of columns of x and y, both ``[F]``, with every column of x,
    ``[F, D]``; 0 beyond the widths.
    """
    if D == BLOCK_D and E == BLOCK_E and D % (BLOCK_F // BLOCK_E) == 0:
        return tl.load(p_state)
    else:
        return tl.load(
            p_state, mask=((o_column < D) & (o_e < E))[:, None] & (o_d < D)[None, :], other=0
        )


def _gradient_of(
    x: Tensor,
    length: Tensor | int,
    y: Tensor,
    divided: tuple[Tensor, Tensor] | None,
    key_mask: Tensor | None,
    state: State,
    weights: tuple[float, float],
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of ``x [B, h, N, d]`` for the upstream gradient ``y [B, h, N, e]``; rows
    outside ``key_mask [B, N]`` get 0.

    Args:
        length: length to which x is scaled: float32 ``[h]`` or 1; 0: x is unchanged.
        divided: ``out [B, h, N, e]`` and ``mass [B, h, N]``; None: y is unchanged.
        weights: weights of ``(X^T X) x`` and of ``sum x`` in the gradient.
        dtype: dtype of the gradient; None: the dtype of x.

    Returns:
        the gradient; ``z [B, h, N]`` (empty without ``divided``); the gradient of the length,
        ``[h]`` (empty unless ``length`` is a tensor).
    """
    (batch, heads, tokens, d), e = x.shape, y.shape[3]
    options, kind = launch.options("taylor efficient gradient", x, y), length_kind(length)
    if kind == 0 and x.dtype != torch.float32:  # the product of rounding errors takes registers
        smaller = dict(BLOCK_N=min(64, options["BLOCK_N"])) if e > 64 else dict(BLOCK_F=64)
        options = options | smaller
    x, y = launch.readable(x), launch.readable(y)
    out, mass = (y, state.moments) if divided is None else (launch.readable(divided[0]), divided[1])
    dx = launch.tokens_first(x, batch, heads, tokens, d, dtype)
    blocks = launch.cdiv(tokens, options["BLOCK_N"])
    z = mass.new_empty(0 if divided is None else mass.shape)
    d_length = mass.new_empty(batch, heads, tokens if kind == 2 else 0)
    launch.run(
        taylor_efficient_gradient,
        (blocks * batch * heads,),
        *(x, length_pointer(x, length), y, out, mass),
        *(x if key_mask is None else key_mask.contiguous(), *state, dx, z, d_length),
        *(heads, tokens, blocks, *map(float, weights)),
        *(octet for tensor in (x, y, out, dx) for octet in launch.octets(tensor)),
        **options,
        LENGTH=kind,
        DIVIDED=divided is not None,
        MASKED=key_mask is not None,
    )
    return dx, z, d_length.sum((0, 2)) if kind == 2 else d_length


def _largest(grad: Tensor, mass: Tensor) -> Tensor:
    """Return the largest ``|grad| / mass`` of each head, float32 ``[B, h]``, by which gradients are
    divided to fit float16.
    """
    shares = torch.where(mass == 0, 0, grad.abs().amax(3).float() / mass)
    return torch.nn.functional.pad(shares, (0, 1), value=1e-30).amax(2)


def backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    state: State,
    coefficients: tuple[float, float, float],
    dq_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the temperature for ``grad [B, h, N, e]`` of the mean.

    Args:
        out, mass: the mean ``[B, h, N, e]`` and the mass ``[B, h, N]``, float32 in units of M; both
            may include other terms.
        temperature: float32 ``[h]``; None: q and k are unchanged.
        state: the state of the keys.
        dq_dtype: dtype of the gradient of q; None: the dtype of q.
    """
    (a, b, c), scale = coefficients, 1 / max(1, k.shape[2])
    length, one = (0, 0) if temperature is None else (temperature, 1)
    divided = out, mass
    # Queries first: this launch writes z, which weights the moments of the state's gradient.
    dq, z, d_temperature = _gradient_of(q, length, grad, divided, None, state, (2 * a, b), dq_dtype)
    half = q.dtype == torch.float16
    if half:
        unit = _largest(grad, mass)
        mass, z = mass * unit[..., None], z / unit[..., None]
    # The gradient of the state is a state of the queries, weighted by the chain rule.
    weights = a * scale, b * scale, c * scale, a * scale, b * scale, 0.0
    d_features, d_moments = sums(q, grad, length, Divided(mass, z), None, weights)
    if half:
        d_features = in_half_range(d_features, d_moments, unit)
    d_state = State(d_features, d_moments)
    # dk and dv from the gradient of the state; keys have length 1, not the temperature.
    dk, _, _ = _gradient_of(k, one, v, None, key_mask, d_state, (2.0, 1.0))
    dv = launch.tokens_first(v, *v.shape)
    expand(k, one, d_state, key_mask, dv, None, coefficients, False)
    return dq, dk, dv, None if temperature is None else d_temperature
