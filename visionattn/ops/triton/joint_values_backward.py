"""Kernels of ``Joint`` relative position, backward: what the values receive.

The same pairs as in the forward pass with the roles exchanged: a tile of T keys of one row and one row of queries at a time. The
queries around the tile come one by one, those further away see all its keys in their outermost column classes: one sum. Keys
beyond the horizon of rows receive the gradients of means of rows, which one scan of each column adds up.

Weights and units are those of ``joint.py``; g is the gradient of the mean divided by the mass, made in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.joint_lines import pair_weights, sums_of_rows
from visionattn.ops.triton.joint_place import Place
from visionattn.ops.triton.language import head, kernel, rows


@triton.jit
def per_mass(p_grad, p_mass, o_x, m_x, grad_token, o_e, m_e):
    """g ``[queries, E]``, float32, of columns ``o_x`` of a row, from the addresses of its first query; 0 where masked."""
    b_grad = tl.load(rows(p_grad, o_x, grad_token, o_e), mask=m_x[:, None] & m_e[None, :], other=0).to(tl.float32)
    b_mass = tl.load(p_mass + o_x, mask=m_x, other=0)
    return tl.where(b_mass == 0, 0.0, 1 / tl.where(b_mass == 0, 1.0, b_mass))[:, None] * b_grad


@kernel
def _query_remainders(
    p_weights,
    p_grad,
    p_mass,
    p_sums,
    heads,
    tokens,
    height,
    width,
    prefix,
    tiles,
    grad_batch,
    grad_head,
    grad_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_A: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """For each tile of one row and class of rows, the weighted g of the queries before its own (side 0) or after (side 1)."""
    A: tl.constexpr = 2 * HORIZON_Y + 1
    i_side, i_row = tl.program_id(0) % 2, tl.program_id(0) // 2
    y, i_group = i_row % height, i_row // height
    p_grad = head(p_grad, i_group // heads, i_group % heads, grad_batch, grad_head)
    p_grad += (prefix + y * width).to(tl.int64) * grad_token * 8
    p_mass += i_group.to(tl.int64) * tokens + prefix + y * width
    o_a, o_e = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_E)
    m_a, m_e = o_a < A, o_e < E
    p_weights += i_row.to(tl.int64) * width * PADDED + tl.where(i_side == 0, 2 * HORIZON_X, 0)
    p_sums += (i_row.to(tl.int64) * tiles * 2 + i_side) * A * E
    b_sum = tl.zeros([BLOCK_A, BLOCK_E], tl.float32)
    for step in range(0, tiles):
        i_tile = tl.where(i_side == 0, step, tiles - 1 - step)
        p_tile = p_sums + i_tile * 2 * A * E + o_a[:, None] * E + o_e[None, :]
        tl.store(p_tile, b_sum, mask=m_a[:, None] & m_e[None, :])
        o_x = i_tile * BLOCK_T + tl.where(i_side == 0, -BLOCK_T // 2, BLOCK_T // 2) + tl.arange(0, BLOCK_T)
        m_x = (o_x >= 0) & (o_x < width)
        p_classes = p_weights + o_a[:, None] * (2 * HORIZON_X + 1) + o_x[None, :] * PADDED
        b_weights = tl.load(p_classes, mask=m_a[:, None] & m_x[None, :], other=0)  # [A, T]
        b_g = per_mass(p_grad, p_mass, o_x, m_x, grad_token, o_e, m_e).to(b_weights.dtype)  # [T, E]
        b_sum += tl.dot(b_weights, b_g, input_precision=PRECISION)


@triton.jit
def _add_queries(
    b_sum,
    p_weights,
    p_grad,
    p_mass,
    p_remainders,
    start,
    width,
    tiles,
    grad_token,
    A: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add to ``b_sum [T, E]`` of the keys from column ``start`` on the weighted g of one row of queries in one class of rows."""
    o_j = start + tl.arange(0, BLOCK_T)
    o_i = start - BLOCK_T // 2 + tl.arange(0, 2 * BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_i, m_e = (o_i >= 0) & (o_i < width), o_e < E
    b_weights = pair_weights(p_weights, o_i, m_i, o_j, PADDED, HORIZON_X)  # [2T, T]
    b_g = per_mass(p_grad, p_mass, o_i, m_i, grad_token, o_e, m_e)  # [2T, E]
    b_sum += tl.dot(tl.trans(b_weights), b_g.to(b_weights.dtype), input_precision=PRECISION)
    if tiles > 1:
        b_sum += tl.load(p_remainders + o_e, mask=m_e, other=0)[None, :]
        b_sum += tl.load(p_remainders + A * E + o_e, mask=m_e, other=0)[None, :]
    return b_sum


@kernel
def _row_means_backward(
    p_weights,
    p_grad,
    p_mass,
    p_remainders,
    p_d_means,
    heads,
    groups,
    tokens,
    height,
    width,
    prefix,
    tiles,
    unit,
    grad_batch,
    grad_head,
    grad_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What each row of a mean of rows receives from one row of queries: a tile of the rows below (side 0) or above (side 1)."""
    A: tl.constexpr = 2 * HORIZON_Y + 1
    i_side, i_tile = tl.program_id(0) % 2, tl.program_id(0) // 2 % tiles
    i_row = tl.program_id(0) // 2 // tiles
    y, i_group = i_row % height, i_row // height
    start, i_class = i_tile * BLOCK_T, tl.where(i_side == 0, 2 * HORIZON_Y, 0)
    num_rows = tl.where(i_side == 0, height - HORIZON_Y - y, y - HORIZON_Y + 1)
    b_sum = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if num_rows > 0:
        p_grad = head(p_grad, i_group // heads, i_group % heads, grad_batch, grad_head)
        p_grad += (prefix + y * width).to(tl.int64) * grad_token * 8
        p_mass += i_group.to(tl.int64) * tokens + prefix + y * width
        p_weights += i_row.to(tl.int64) * width * PADDED + i_class * (2 * HORIZON_X + 1)
        p_remainders += ((i_row.to(tl.int64) * tiles + i_tile) * 2 * A + i_class) * E
        b_sum = _add_queries(
            b_sum, p_weights, p_grad, p_mass, p_remainders, start, width, tiles, grad_token,
            A, E, BLOCK_E, BLOCK_T, HORIZON_X, PADDED, PRECISION,
        )  # fmt: skip
        b_sum *= unit / num_rows.to(tl.float32)
    o_x, o_e = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    i_first = ((i_side.to(tl.int64) * groups + i_group) * height + y) * width
    p_d_means += (i_first + o_x)[:, None] * E + o_e[None, :]
    tl.store(p_d_means, b_sum.to(p_d_means.dtype.element_ty), mask=(o_x < width)[:, None] & (o_e < E)[None, :])


@kernel
def _values_backward(
    p_weights,
    p_grad,
    p_mass,
    p_remainders,
    p_scans,
    p_dv,
    heads,
    groups,
    tokens,
    height,
    width,
    prefix,
    tiles,
    unit,
    grad_batch,
    grad_head,
    grad_token,
    dv_batch,
    dv_head,
    dv_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the gradient of one tile of values: from the rows of queries within the horizon, and from the scans."""
    A: tl.constexpr = 2 * HORIZON_Y + 1
    i_tile, i_row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    y, i_group = i_row % height, i_row // height
    start = i_tile * BLOCK_T
    p_grad = head(p_grad, i_group // heads, i_group % heads, grad_batch, grad_head)
    p_mass += i_group.to(tl.int64) * tokens + prefix
    i_top = i_group.to(tl.int64) * height
    b_sum = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    first, end = tl.maximum(y - HORIZON_Y + 1, 0), tl.minimum(y + HORIZON_Y, height)
    for step in range(0, end - first):
        y_queries = first + step
        i_class = y - y_queries + HORIZON_Y
        p_row = p_weights + (i_top + y_queries) * width * PADDED + i_class * (2 * HORIZON_X + 1)
        p_row_grad = p_grad + (prefix + y_queries * width).to(tl.int64) * grad_token * 8
        p_row_remainders = p_remainders + (((i_top + y_queries) * tiles + i_tile) * 2 * A + i_class) * E
        b_sum = _add_queries(
            b_sum, p_row, p_row_grad, p_mass + y_queries * width, p_row_remainders, start, width, tiles, grad_token,
            A, E, BLOCK_E, BLOCK_T, HORIZON_X, PADDED, PRECISION,
        )  # fmt: skip
    o_x, o_e = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    m_x = (o_x < width)[:, None] & (o_e < E)[None, :]
    p_dv = rows(head(p_dv, i_group // heads, i_group % heads, dv_batch, dv_head), prefix + y * width + o_x, dv_token, o_e)
    b_sum = b_sum * unit + tl.load(p_dv, mask=m_x, other=0).to(tl.float32)
    o_column = o_x[:, None] * E + o_e[None, :]
    p_above = p_scans + (i_top + y - HORIZON_Y) * width * E + o_column
    m_above = m_x & (o_x < tl.where(y >= HORIZON_Y, width, 0))[:, None]
    b_sum += tl.load(p_above, mask=m_above, other=0).to(tl.float32)
    p_below = p_scans + ((groups.to(tl.int64) + i_group) * height + y + HORIZON_Y) * width * E + o_column
    m_below = m_x & (o_x < tl.where(y + HORIZON_Y < height, width, 0))[:, None]
    b_sum += tl.load(p_below, mask=m_below, other=0).to(tl.float32)
    tl.store(p_dv, b_sum.to(p_dv.dtype.element_ty), mask=m_x)


def values_backward(weights: Tensor, grad: Tensor, mass: Tensor, place: Place, dv: Tensor) -> None:
    """Add to ``dv [B, h, N, e]`` what the relative term gives, for ``grad [B, h, N, e]`` of the mean, both readable."""
    batch, heads, tokens, e = grad.shape
    groups, height, width = batch * heads, place.height, place.width
    row = launch.launch_row("joint values backward", 0, e, grad.dtype, grad.device)
    tiles, num_rows = triton.cdiv(width, row["BLOCK_T"]), 2 * place.horizon_y + 1
    options = dict(E=e, BLOCK_E=launch.block(e), PRECISION=launch.precision(grad.dtype)) | place.horizons() | row
    remainders = grad.new_empty(batch, heads, height, tiles if tiles > 1 else 0, 2, num_rows, e, dtype=mass.dtype)
    if tiles > 1:
        launch.run(
            _query_remainders,
            (2 * height * groups,),
            *(weights, grad, mass, remainders, heads, tokens, height, width, place.prefix, tiles, *launch.octets(grad)),
            **options,
            BLOCK_A=launch.block(num_rows),
        )
    d_means = grad.new_empty(2, batch, heads, height, width, e)
    sizes = (heads, groups, tokens, height, width, place.prefix, tiles, place.unit, *launch.octets(grad))
    programs = tiles * height * groups
    launch.run(_row_means_backward, (2 * programs,), weights, grad, mass, remainders, d_means, *sizes, **options)
    scans = sums_of_rows(d_means)
    arguments = (weights, grad, mass, remainders, scans, dv, *sizes, *launch.octets(dv))
    launch.run(_values_backward, (programs,), *arguments, **options)
