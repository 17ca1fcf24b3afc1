"""The efficient form of TaylorShift, backward: the gradient of the state from the queries, then that of keys and values.

With ``g = dO / mass`` and ``z = -<g, O>`` per query, the gradient of the features' state is again a sum of features
(``feature_sums`` of q and g), the gradients of the moments are moments of q, g and z, and that of v is an expansion of k
(``expand``). Gradients of q and k go through the products of tiles in ``_gradient``: gradients of the features are made for one
pair of tiles at a time and contracted with either tile at once.

Gradients of the state are divided by the number of keys, as the state is, and in float16 by the largest gradient of each head.
Source: the forward pass differentiated by hand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.language import head, kernel, rows
from visionattn.ops.triton.taylor_efficient import State, expand
from visionattn.ops.triton.taylor_efficient_states import (
    columns,
    feature_sums,
    in_half_range,
    inverse_mass,
    moments,
    num_tiles,
    present_rows,
    tiles_of_pair,
    unit_of,
)


@kernel
def _gradient(
    p_x,
    p_y,
    p_out,
    p_mass,
    p_present,
    p_features,
    p_moments,
    p_dx,
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
    TILES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    DIVIDED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of one block of x through ``<y, [phi2(x), x, 1] state>``, ``x^T (X^T X) x`` and ``x . sum x``.

    ``DIVIDED`` takes ``g = y / mass`` for y, and weights the latter two with ``-<g, out>``, else 1. Rows are divided after the
    products of matrices, whose operands then lie in memory as they are.
    """
    i_block, i_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_group // heads, i_group % heads
    o_n, o_d, o_c = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D)
    o_f = tl.arange(0, BLOCK_F)
    m_n = present_rows(p_present, i_batch, tokens, o_n, o_n < tokens, MASKED)
    p_x, p_y = head(p_x, i_batch, i_head, x_batch, x_head), head(p_y, i_batch, i_head, y_batch, y_head)
    p_features += i_group.to(tl.int64) * (TILES * (TILES + 1) // 2 * 256 * E)
    p_moments += i_group.to(tl.int64) * (D * E + E + D * D + D + 8)
    PARTS: tl.constexpr = (E + BLOCK_K - 1) // BLOCK_K
    b_ys = ()
    b_dx = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for part in tl.static_range(PARTS):
        o_k = BLOCK_K * part + tl.arange(0, BLOCK_K)
        b_y = columns(p_y, o_n, y_token, BLOCK_K * part, m_n, E, BLOCK_K)  # [N, K]
        m_xy = (o_d < D)[None, :] & (o_k < E)[:, None]
        b_xy = tl.load(p_moments + o_d[None, :] * E + o_k[:, None], mask=m_xy, other=0)  # [K, D]
        b_dx += tl.dot(b_y, b_xy.to(b_y.dtype), input_precision=PRECISION)
        b_ys = b_ys + (b_y,)
    ROWS: tl.constexpr = BLOCK_F // 16
    STEPS: tl.constexpr = 16 // ROWS
    b_dx = tl.reshape(b_dx, [BLOCK_N, BLOCK_D // 16, STEPS, ROWS])
    o_tile, o_step = tl.arange(0, BLOCK_D // 16)[None, :, None, None], tl.arange(0, STEPS)[None, None, :, None]
    for step in tl.range(TILES * (TILES + 1) // 2 * STEPS, num_stages=1):
        i, j = tiles_of_pair(step // STEPS)
        b_df = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
        for part in tl.static_range(PARTS):
            o_k = BLOCK_K * part + tl.arange(0, BLOCK_K)
            b_state = tl.load(p_features + o_f[None, :] * E + o_k[:, None], mask=(o_k < E)[:, None], other=0)  # [K, F]
            b_df += tl.dot(b_ys[part], b_state, input_precision=PRECISION)
        p_features += BLOCK_F * E
        b_df = tl.reshape(b_df, [BLOCK_N, ROWS, 16])
        b_i = columns(p_x, o_n, x_token, 16 * i + ROWS * (step % STEPS), m_n, D, ROWS)
        b_j = columns(p_x, o_n, x_token, 16 * j, m_n, D, 16)
        b_di, b_dj = tl.sum(b_df * b_j[:, None, :], 2), tl.sum(b_df * b_i[:, :, None], 1)
        m_i = (o_tile == i) & (o_step == step % STEPS)
        b_dx += tl.where(m_i, b_di[:, None, None, :], 0)
        b_dx += tl.where(o_tile == j, tl.reshape(b_dj, [BLOCK_N, 1, STEPS, ROWS]), 0)
    b_dx = tl.reshape(b_dx, [BLOCK_N, BLOCK_D])
    p_xx = p_moments + D * E + E
    b_x = columns(p_x, o_n, x_token, 0, m_n, D, BLOCK_D)  # [N, D]
    b_xx = tl.load(p_xx + o_c[:, None] * D + o_d[None, :], mask=(o_c < D)[:, None] & (o_d < D)[None, :], other=0)  # [D, D]
    b_dmass = tl.dot(b_x, b_xx.to(b_x.dtype), input_precision=PRECISION) * xx_weight
    b_dmass += tl.load(p_xx + D * D + o_d, mask=o_d < D, other=0)[None, :] * x_weight
    if DIVIDED:
        p_out = head(p_out, i_batch, i_head, out_batch, out_head)
        b_z = tl.zeros([BLOCK_N], tl.float32)
        for part in tl.static_range(PARTS):
            b_y = columns(p_y, o_n, y_token, BLOCK_K * part, m_n, E, BLOCK_K)  # [N, K], read again to spare registers
            b_out = columns(p_out, o_n, out_token, BLOCK_K * part, m_n, E, BLOCK_K)
            b_z -= tl.sum(b_y.to(tl.float32) * b_out.to(tl.float32), 1)
        b_dmass *= b_z[:, None]
        b_dx = (b_dx + b_dmass) * inverse_mass(p_mass, i_group, tokens, o_n, m_n)[:, None]
    else:
        b_dx += b_dmass
    b_dx *= unit_of(p_features, p_moments, D, E)
    if MASKED:
        b_dx = tl.where(m_n[:, None], b_dx, 0)
    m_dx = (o_n < tokens)[:, None] & (o_d < D)[None, :]
    p_dx = head(p_dx, i_batch, i_head, dx_batch, dx_head)
    tl.store(rows(p_dx, o_n, dx_token, o_d), b_dx.to(p_dx.dtype.element_ty), mask=m_dx)


def _gradient_of(
    x: Tensor,
    y: Tensor,
    out: Tensor | None,
    mass: Tensor | None,
    key_mask: Tensor | None,
    features: Tensor,
    moments: Tensor,
    weights: tuple[float, float],
) -> Tensor:
    """Gradient of ``x [B, h, N, d]`` for ``y [B, h, N, e]``; rows outside ``key_mask [B, N]`` get 0.

    ``weights`` are those of ``(X^T X) x`` and of ``sum x`` in the gradient.
    """
    (batch, heads, tokens, d), e = x.shape, y.shape[3]
    options = launch.launch_row("taylor efficient gradient", d, e, x.dtype, x.device)
    dx, blocks = launch.tokens_first(x, batch, heads, tokens, d), triton.cdiv(tokens, options["BLOCK_N"])
    x, y = launch.readable(x), launch.readable(y)
    out = y if out is None else launch.readable(out)
    pointers = x, y, out, x if mass is None else mass, x if key_mask is None else key_mask.contiguous()
    launch.run(
        _gradient,
        (blocks * batch * heads,),
        *(*pointers, features, moments, dx, heads, tokens, blocks, *map(float, weights)),
        *(octet for tensor in (x, y, out, dx) for octet in launch.octets(tensor)),
        **options,
        **dict(D=d, E=e, TILES=num_tiles(d), BLOCK_D=launch.block(d), PRECISION=launch.precision(x.dtype)),
        DIVIDED=mass is not None,
        MASKED=key_mask is not None,
    )
    return dx


def _largest(grad: Tensor, mass: Tensor) -> Tensor:
    """The largest of ``|grad| / mass`` of each head, by which it is divided where float16 is to hold it, float32 ``[B, h]``."""
    shares = torch.where(mass == 0, 0, grad.abs().amax(3).float() / mass)
    return torch.nn.functional.pad(shares, (0, 1), value=1e-30).amax(2)


def backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    state: State,
    coefficients: tuple[float, float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for ``grad [B, h, N, e]`` of the mean ``out`` under weights that add up to ``mass [B, h, N]``.

    ``mass`` is float32 in units of the number of keys; out and mass may hold other terms than this one.
    """
    (a, b, c), scale = coefficients, 1 / max(1, k.shape[2])
    dq = _gradient_of(q, grad, out, mass, None, *state, (2 * a, b))
    half = q.dtype == torch.float16
    if half:
        unit = _largest(grad, mass)
        mass = mass * unit[..., None]
    d_features = feature_sums(q, grad, mass, None, a * scale)
    d_moments = moments(q, grad, out, mass, None, (b * scale, c * scale, a * scale, b * scale, 0.0))
    if half:
        d_features = in_half_range(d_features, d_moments, unit)
    dk = _gradient_of(k, v, None, None, key_mask, d_features, d_moments, (2.0, 1.0))
    dv = launch.tokens_first(v, *v.shape)
    expand(k, d_features, d_moments, key_mask, dv, None, coefficients, False)
    return dq, dk, dv
