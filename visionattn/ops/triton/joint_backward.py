"""Kernels of ``Joint`` relative position, backward: what queries and table receive.

Tiles and lines are those of the forward pass: g of a tile of queries, the gradient of the mean,
times the keys of a line gives a score for each pair, and scores are added up by class; what lies
further away is one product for each outermost class. With "mean" the score s_c of a class is that
of the mean of its keys, with "sum" that of the sum of them, in the units of ``joint.py``.

The gradient of a weight is ``(s_c - n_c <g, out>) / mass`` with n_c the score of keys that are 1:
where a query looks at one class, a small difference of large numbers, for which the mean as it was
written is too coarse. With a state as content ``<g, out>`` and the mass are added up again, of
weights that nothing rounds: what phi(q) is multiplied with for either, the products of scores and of
n_c with the table, are needed for dq anyway. Of other content they are corrected by what rounding
took from the weights. The table comes in two parts, and dq is rounded once, with the content's
part, which comes in float32. What the values receive is in ``joint_values_backward.py``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.joint import far_means
from visionattn.ops.triton.joint_lines import axis_keys, far_keys, line_at, lines_of, power_of_two
from visionattn.ops.triton.joint_place import TILE, Place
from visionattn.ops.triton.joint_values_backward import values_backward
from visionattn.ops.triton.language import head, kernel, parts, phi, phi_slope, reciprocal, rows


class OfContent(NamedTuple):
    """What the content's backward pass leaves to that of the relative term.

    Args:
        dq: its part of the gradient of q, ``[B, h, N, d]``, float32, readable by kernels.
        along: ``[B, h, N]``, float32: its part of ``<g, out>``, to which the classes add theirs, and then dq is that of
            the features, without what the mass receives; None: dq is complete.
        z: of ``[B, h, d]``, contiguous, the sum of the features of keys divided by M, where there is ``along``.
        feature_map: of the content, where there is ``along``.
    """

    dq: Tensor
    along: Tensor | None = None
    z: Tensor | None = None
    feature_map: str = ""


@triton.jit
def _tiles_of(
    p_x, o_n, x_token, o_e, width, TILES: tl.constexpr, BLOCK_T: tl.constexpr, E: tl.constexpr
):
    """Rows ``o_n`` of x, in tiles ``[TILES, T, E]``."""
    m_x = (o_n < width)[:, None] & (o_e < E)[None, :]
    b_x = tl.load(rows(p_x, o_n, x_token, o_e), mask=m_x, other=0)
    return tl.reshape(b_x, [TILES, BLOCK_T, o_e.shape[0]])


@kernel
def _joint_scores(
    p_grad,
    p_v,
    p_means,
    p_remainders,
    p_scores,
    heads,
    groups,
    height,
    width,
    prefix,
    blocks,
    tiles,
    row_scale,
    grad_batch,
    grad_head,
    grad_token,
    v_batch,
    v_head,
    v_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of all classes for ``BLOCK_Q`` queries of one row, in tiles of ``BLOCK_T``."""
    TILES: tl.constexpr = BLOCK_Q // BLOCK_T
    BESIDE: tl.constexpr = (KEYS - BLOCK_T) // 2
    SHARES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    COLUMNS: tl.constexpr = 2 * HORIZON_X + 1
    i_block, i_row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    y, i_group = i_row % height, i_row // height
    i_batch, i_head = i_group // heads, i_group % heads
    start = i_block * BLOCK_Q
    o_e = tl.arange(0, BLOCK_E)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_grad += (prefix + y * width).to(tl.int64) * grad_token * 8
    o_q = start + tl.arange(0, BLOCK_Q)
    b_grad = _tiles_of(p_grad, o_q, grad_token, o_e, width, TILES, BLOCK_T, E)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_means += i_group.to(tl.int64) * height * width * E
    means_below = groups.to(tl.int64) * height * width * E
    # Queries and keys of the tiles, and how many keys of a row the outermost classes of columns have.
    o_tile, o_i = i_block * TILES + tl.arange(0, TILES), tl.arange(0, BLOCK_T)
    o_x = o_tile[:, None] * BLOCK_T + o_i[None, :]  # [TILES, T]
    o_keys = o_tile[:, None] * BLOCK_T - BESIDE + tl.arange(0, KEYS)[None, :]  # [TILES, KEYS]
    o_apart = (tl.arange(0, KEYS) - BESIDE)[None, :] - o_i[:, None]  # [T, KEYS]
    b_before = axis_keys(0, o_x, width, HORIZON_X)
    b_after = axis_keys(2 * HORIZON_X, o_x, width, HORIZON_X)
    p_scores += i_row.to(tl.int64) * width * PADDED
    p_first = p_scores + o_x * PADDED
    p_window = p_first[:, :, None] + (o_apart + HORIZON_X)[None, :, :]
    m_window = (o_apart > -HORIZON_X) & (o_apart < HORIZON_X)
    m_window = m_window[None, :, :] & (o_x < width)[:, :, None]
    for i_class in range(0, 2 * HORIZON_Y + 1):
        num_rows = axis_keys(i_class, y, height, HORIZON_Y)
        p_line, line_token = line_at(
            *(p_v, p_means, i_class, y + i_class - HORIZON_Y, prefix, width, v_token, means_below),
            *(E, HORIZON_Y),
        )
        p_line += start.to(tl.int64) * line_token * 8
        p_keys = p_line + (o_keys - start)[:, :, None] * (line_token * 8) + o_e[None, None, :]
        m_keys = (o_keys >= 0) & (o_keys < tl.where(num_rows > 0, width, 0))
        b_s = tl.zeros([TILES, BLOCK_T, KEYS], tl.float32)
        for i_share in tl.static_range(SHARES):
            if SHARES > 1:
                b_grad = _tiles_of(
                    p_grad, o_q, grad_token, i_share * BLOCK_E + o_e, width, TILES, BLOCK_T, E
                )
            m_line = m_keys[:, :, None] & (i_share * BLOCK_E + o_e < E)[None, None, :]
            b_keys = tl.load(p_keys + i_share * BLOCK_E, mask=m_line, other=0)  # [TILES, KEYS, E]
            b_s = tl.dot(b_grad, tl.permute(b_keys, [0, 2, 1]), b_s, input_precision=PRECISION)
        b_first = tl.sum(tl.where((o_apart <= -HORIZON_X)[None, :, :], b_s, 0), 2)  # [TILES, T]
        b_last = tl.sum(tl.where((o_apart >= HORIZON_X)[None, :, :], b_s, 0), 2)
        if MEAN:
            b_s = tl.where(m_keys[:, None, :], b_s, float("-inf"))
            b_first = tl.where(
                b_before * num_rows > 0, b_first / tl.maximum(b_before, 1), float("-inf")
            )
            b_last = tl.where(
                b_after * num_rows > 0, b_last / tl.maximum(b_after, 1), float("-inf")
            )
        else:
            b_s *= num_rows * row_scale
            b_first *= num_rows * row_scale
            b_last *= num_rows * row_scale
        tl.store(p_window + i_class * COLUMNS, b_s, mask=m_window)
        tl.store(p_first + i_class * COLUMNS, b_first, mask=o_x < width)
        tl.store(p_first + i_class * COLUMNS + 2 * HORIZON_X, b_last, mask=o_x < width)
    # Of all lines at once, what lies further away: a key before the tile's and one after them each.
    if tiles > 1:
        tl.debug_barrier()  # the threads add to what others have written
        for first in range(0, 2 * (2 * HORIZON_Y + 1), 16):
            o_f = first + tl.arange(0, 16)[None, :]
            b_far = tl.zeros([TILES, BLOCK_T, 16], tl.float32)
            for i_share in tl.static_range(SHARES):
                o_share = i_share * BLOCK_E + o_e
                if SHARES > 1:
                    b_grad = _tiles_of(p_grad, o_q, grad_token, o_share, width, TILES, BLOCK_T, E)
                b_keys = far_means(
                    *(
                        p_remainders,
                        o_f,
                        o_tile[:, None],
                        y,
                        i_group,
                        groups,
                        height,
                        width,
                        tiles,
                        o_share,
                    ),
                    *(E, HORIZON_Y),
                )  # [TILES, 16, E]
                b_far = tl.dot(
                    b_grad, tl.permute(b_keys, [0, 2, 1]), b_far, input_precision=PRECISION
                )
            b_scale = power_of_two(far_keys(o_tile[:, None], o_f % 2, width, BLOCK_T, BESIDE))[
                :, None, :
            ]
            if MEAN:
                b_columns = tl.where(
                    (o_f % 2 == 0)[:, None, :], b_before[:, :, None], b_after[:, :, None]
                )
                b_far *= b_scale / tl.maximum(b_columns, 1)
            else:
                b_far *= (
                    b_scale * (axis_keys(o_f // 2, y, height, HORIZON_Y) * row_scale)[:, None, :]
                )
            p_far = (
                p_first[:, :, None] + (o_f // 2 * COLUMNS + o_f % 2 * (2 * HORIZON_X))[:, None, :]
            )
            m_far = (o_x < width)[:, :, None] & (o_f < 2 * (2 * HORIZON_Y + 1))[:, None, :]
            tl.store(p_far, tl.load(p_far, mask=m_far, other=0) + b_far, mask=m_far)


@triton.jit
def _scores_and_keys(
    p_scores,
    o_n,
    o_c,
    m_n,
    height,
    width,
    row_scale,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    MEAN: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Scores of classes ``o_c``, those of keys that are 1, and, where SHARE, what of a weight is one key's; ``[N, C]``."""
    COLUMNS: tl.constexpr = 2 * HORIZON_X + 1
    m_c = m_n[:, None] & (o_c < (2 * HORIZON_Y + 1) * COLUMNS)[None, :]
    b_s = tl.load(
        p_scores + o_n.to(tl.int64)[:, None] * PADDED + o_c[None, :],
        mask=m_c,
        other=float("-inf") if MEAN else 0,
    )
    b_share = tl.full(b_s.shape, 1.0, tl.float32)
    if SHARE or not MEAN:
        b_rows = tl.where(
            m_c, axis_keys((o_c // COLUMNS)[None, :], (o_n // width)[:, None], height, HORIZON_Y), 0
        )
        b_columns = axis_keys((o_c % COLUMNS)[None, :], (o_n % width)[:, None], width, HORIZON_X)
    if MEAN:
        b_keys = tl.where(b_s > float("-inf"), 1.0, 0.0)
        b_s = tl.where(b_s > float("-inf"), b_s, 0)
        if SHARE:
            b_share = 1 / tl.maximum(b_columns, 1)
    else:
        b_keys = b_rows * b_columns * row_scale
        b_share = tl.maximum(b_rows, 1) * row_scale
    return b_s, b_keys, b_share


@triton.jit
def _add_times_table(
    b_sum, x, b_high, b_low, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LOW: tl.constexpr
):
    """``b_sum [N, D]`` and ``x [N, C]``, in two parts where LOW, times the table ``[C, D]`` in two parts."""
    x_high, x_low = parts(x, DTYPE)
    b_sum = tl.dot(x_high, b_high, b_sum, input_precision=PRECISION)
    if tl.float32 != DTYPE:
        b_sum = tl.dot(x_high, b_low, b_sum, input_precision=PRECISION)
        if LOW:
            b_sum = tl.dot(x_low, b_high, b_sum, input_precision=PRECISION)
    return b_sum


@kernel
def _joint_queries_backward(
    p_q,
    p_table,
    p_scores,
    p_grad,
    p_out,
    p_mass,
    p_content_dq,
    p_along,
    p_z,
    p_dq,
    p_d_weights,
    p_units,
    heads,
    tokens,
    height,
    width,
    prefix,
    blocks,
    table_octets,
    row_scale,
    unit,
    q_batch,
    q_head,
    q_token,
    grad_batch,
    grad_head,
    grad_token,
    out_batch,
    out_head,
    out_token,
    content_batch,
    content_head,
    content_token,
    dq_batch,
    dq_head,
    dq_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    MEAN: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of one block of queries, and of the weights of their classes in the units ``p_units``, which only float16 has.

    ``MAP`` "" takes the content's part as it is and ``<g, out>`` of the mean that was written.
    """
    CLASSES: tl.constexpr = (2 * HORIZON_Y + 1) * (2 * HORIZON_X + 1)
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    i_block, i_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_group // heads, i_group % heads
    o_d, o_c, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E)
    m_d = o_d < D
    p_table += i_head * table_octets * 8
    p_q, p_dq = (
        head(p_q, i_batch, i_head, q_batch, q_head),
        head(p_dq, i_batch, i_head, dq_batch, dq_head),
    )
    p_grad, p_out = (
        head(p_grad, i_batch, i_head, grad_batch, grad_head),
        head(p_out, i_batch, i_head, out_batch, out_head),
    )
    p_content_dq = head(p_content_dq, i_batch, i_head, content_batch, content_head)
    p_mass += i_group.to(tl.int64) * tokens
    p_along += i_group.to(tl.int64) * tokens
    p_scores += i_group.to(tl.int64) * height * width * PADDED
    # Tokens of the prefix have content alone.
    for start in range(0, tl.where(i_block == 0, prefix, 0), BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_q = (o_n < prefix)[:, None] & m_d[None, :]
        b_dq = tl.load(rows(p_content_dq, o_n, content_token, o_d), mask=m_q, other=0)
        if MAP != "":
            b_q = tl.load(rows(p_q, o_n, q_token, o_d), mask=m_q, other=0)
            b_z = tl.load(p_z + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
            b_along = tl.load(p_along + o_n, mask=o_n < prefix, other=0)
            b_along *= reciprocal(tl.load(p_mass + o_n, mask=o_n < prefix, other=0))
            b_dq = (b_dq - b_along[:, None] * b_z[None, :]) * phi_slope(b_q, MAP)
        tl.store(rows(p_dq, o_n, dq_token, o_d), b_dq.to(p_dq.dtype.element_ty), mask=m_q)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < height * width
    m_q = m_n[:, None] & m_d[None, :]
    b_q = tl.load(rows(p_q, prefix + o_n, q_token, o_d), mask=m_q, other=0)  # [N, D]
    # Float16 holds the scores of a query divided by the largest.
    b_unit = tl.full([BLOCK_N], 1.0, tl.float32)
    if tl.float16 == DTYPE:
        b_most = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, CLASSES, BLOCK_C):
            b_s, _, _ = _scores_and_keys(
                p_scores,
                o_n,
                first + o_c,
                m_n,
                height,
                width,
                row_scale,
                HORIZON_Y,
                HORIZON_X,
                PADDED,
                MEAN,
                False,
            )
            b_most = tl.maximum(b_most, tl.max(tl.abs(b_s), 1))
        b_unit = tl.maximum(b_most / 16, 1e-30)
    # What phi receives for the sum of weighted values and for the mass, and what rounding of weights took from both.
    b_to_values, b_to_mass = (
        tl.zeros([BLOCK_N, BLOCK_D], tl.float32),
        tl.zeros([BLOCK_N, BLOCK_D], tl.float32),
    )
    b_values, b_masses = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, CLASSES, BLOCK_C):
        b_s, b_keys, b_share = _scores_and_keys(
            p_scores,
            o_n,
            first + o_c,
            m_n,
            height,
            width,
            row_scale,
            HORIZON_Y,
            HORIZON_X,
            PADDED,
            MEAN,
            MAP == "",
        )
        m_table = (first + o_c < CLASSES)[:, None] & m_d[None, :]
        b_table = tl.load(
            p_table + (first + o_c)[:, None] * D + o_d[None, :], mask=m_table, other=0
        )  # [C, D]
        b_high, b_low = parts(b_table, DTYPE)
        b_to_mass = _add_times_table(b_to_mass, b_keys, b_high, b_low, DTYPE, PRECISION, not MEAN)
        if MAP == "":
            b_phi = tl.where(m_d[None, :], phi(b_q, "elu1"), 0).to(DTYPE)
            b_w = tl.dot(b_phi, tl.trans(b_high), input_precision=PRECISION)
            b_masses -= tl.sum(b_w * b_keys, 1)
            b_values -= tl.sum((b_w * b_share).to(DTYPE).to(tl.float32) / b_share * b_s, 1)
        b_left = b_s / b_unit[:, None] if tl.float16 == DTYPE else b_s
        b_to_values = _add_times_table(b_to_values, b_left, b_high, b_low, DTYPE, PRECISION, True)
    # <g, out>, the mass, and dq.
    b_phi, b_slope = phi(b_q, "elu1"), phi_slope(b_q, "elu1")
    b_values += tl.sum(b_phi * b_to_values, 1) * b_unit
    b_masses += tl.sum(b_phi * b_to_mass, 1)
    b_mass = tl.load(p_mass + prefix + o_n, mask=m_n, other=0)
    b_dq = tl.load(rows(p_content_dq, prefix + o_n, content_token, o_d), mask=m_q, other=0)
    if MAP == "":
        m_e = m_n[:, None] & (o_e < E)[None, :]
        b_grad = tl.load(rows(p_grad, prefix + o_n, grad_token, o_e), mask=m_e, other=0).to(
            tl.float32
        )
        b_out = tl.load(rows(p_out, prefix + o_n, out_token, o_e), mask=m_e, other=0).to(tl.float32)
        b_inverse = reciprocal(b_mass + b_masses * unit)
        b_along = (tl.sum(b_grad * b_out, 1) * b_mass + b_values * unit) * b_inverse
    else:
        b_z = tl.load(p_z + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
        b_inverse = reciprocal(tl.sum(phi(b_q, MAP) * b_z[None, :], 1) + b_masses * unit)
        b_along = (
            tl.load(p_along + prefix + o_n, mask=m_n, other=0) * b_mass + b_values * unit
        ) * b_inverse
        b_dq = b_dq * (b_mass * b_inverse)[:, None] - (b_along * b_inverse)[:, None] * b_z[None, :]
    b_inverse *= unit
    b_to_phi = (
        b_to_values * (b_unit * b_inverse)[:, None] - b_to_mass * (b_along * b_inverse)[:, None]
    )
    if MAP == "elu1":
        b_dq = (b_dq + b_to_phi) * b_slope
    elif MAP == "":
        b_dq += b_to_phi * b_slope
    else:
        b_dq = b_dq * phi_slope(b_q, MAP) + b_to_phi * b_slope
    tl.store(rows(p_dq, prefix + o_n, dq_token, o_d), b_dq.to(p_dq.dtype.element_ty), mask=m_q)
    # Gradients of the weights, which float16 holds divided by no less than the largest.
    i_first = i_group.to(tl.int64) * height * width
    if tl.float16 == DTYPE:
        b_unit = tl.maximum(
            (b_unit + tl.abs(b_along) * (1 / 16 if MEAN else 1.0)) * b_inverse, 1e-30
        )
        tl.store(p_units + i_first + o_n, b_unit, mask=m_n)
        b_inverse /= b_unit
    for first in range(0, CLASSES, BLOCK_C):
        b_s, b_keys, _ = _scores_and_keys(
            p_scores,
            o_n,
            first + o_c,
            m_n,
            height,
            width,
            row_scale,
            HORIZON_Y,
            HORIZON_X,
            PADDED,
            MEAN,
            False,
        )
        b_d = (b_s - b_keys * b_along[:, None]) * b_inverse[:, None]
        p_rows = p_d_weights + (i_first + o_n)[:, None] * PADDED + (first + o_c)[None, :]
        tl.store(p_rows, b_d.to(DTYPE), mask=m_n[:, None] & (first + o_c < PADDED)[None, :])


@kernel
def _joint_table_backward(
    p_q,
    p_d_weights,
    p_units,
    p_d_table,
    heads,
    groups,
    patches,
    prefix,
    segment_patches,
    segments,
    q_batch,
    q_head,
    q_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The part of one segment of the queries of one head in the gradient of the table."""
    CLASSES: tl.constexpr = (2 * HORIZON_Y + 1) * (2 * HORIZON_X + 1)
    i_segment, i_group = tl.program_id(0) % segments, tl.program_id(0) // segments
    p_q = head(p_q, i_group // heads, i_group % heads, q_batch, q_head)
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    b_d_table, b_unit = tl.zeros([BLOCK_D, BLOCK_C], tl.float32), tl.cast(1e-30, tl.float32)
    last = tl.minimum(patches, (i_segment + 1) * segment_patches)
    for start in range(i_segment * segment_patches, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        m_q = m_n[:, None] & (o_d < D)[None, :]
        p_rows = (
            p_d_weights + (i_group.to(tl.int64) * patches + o_n)[:, None] * PADDED + o_c[None, :]
        )
        b_d = tl.load(p_rows, mask=m_n[:, None] & (o_c < PADDED)[None, :], other=0)  # [N, C]
        b_q = tl.load(rows(p_q, prefix + o_n, q_token, o_d), mask=m_q, other=0)  # [N, D]
        b_phi = tl.where(m_q, phi(b_q, "elu1"), 0)
        if (
            tl.float16 == b_q.dtype
        ):  # the unit of the sum grows, as there are no registers for a product beside the sum
            b_phi *= tl.load(p_units + i_group.to(tl.int64) * patches + o_n, mask=m_n, other=0)[
                :, None
            ]
            b_larger = tl.maximum(b_unit, tl.max(tl.max(tl.abs(b_phi), 1), 0) / 16)
            b_d_table *= b_unit / b_larger
            b_unit = b_larger
            b_phi *= 1 / b_larger
        b_d_table += tl.dot(tl.trans(b_phi.to(b_q.dtype)), b_d, input_precision=PRECISION)
    if tl.float16 == p_q.dtype.element_ty:
        b_d_table *= b_unit
    p_d_table += (
        (i_segment.to(tl.int64) * groups + i_group) * CLASSES * D + o_c[None, :] * D + o_d[:, None]
    )
    tl.store(p_d_table, b_d_table, mask=(o_c < CLASSES)[None, :] & (o_d < D)[:, None])


def _scores(grad: Tensor, v: Tensor, place: Place) -> Tensor:
    """Scores of classes, ``[B, h, H*W, C padded]``, float32; with "mean" minus infinity without a key."""
    (batch, heads, _, e), groups = v.shape, v.shape[0] * v.shape[1]
    row = launch.launch_row("joint scores", 0, e, v.dtype, v.device)
    if place.beside > 8:  # of as many more pairs
        row = row | dict(BLOCK_Q=row["BLOCK_Q"] // 2)
    lines, patches = lines_of(v, place, TILE, place.beside), place.height * place.width
    scores = v.new_empty(batch, heads, patches, place.padded_classes, dtype=torch.float32)
    blocks, tiles = launch.cdiv(place.width, row["BLOCK_Q"]), launch.cdiv(place.width, TILE)
    sizes = heads, groups, place.height, place.width, place.prefix, blocks, tiles, place.row_scale
    launch.run(
        _joint_scores,
        (blocks * place.height * groups,),
        *(grad, v, *lines, scores, *sizes, *launch.octets(grad), *launch.octets(v)),
        **dict(BLOCK_E=launch.block(e)) | row,
        **place.horizons(),
        E=e,
        BLOCK_T=TILE,
        KEYS=TILE + 2 * place.beside,
        MEAN=place.mean,
        PRECISION=launch.precision(v.dtype),
    )
    return scores


def _to_queries(
    scores: Tensor,
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    table: Tensor,
    content: OfContent,
    place: Place,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and of the weights of classes, ``[B, h, H*W, C padded]`` in units ``[B, h, H*W]``."""
    (batch, heads, tokens, d), e = q.shape, grad.shape[3]
    row = launch.launch_row("joint queries backward", d, place.padded_classes, q.dtype, q.device)
    if content.along is None:  # gradients and means are read too, for which there are no registers
        row = row | dict(BLOCK_N=row["BLOCK_N"] // 2)
    d_weights = torch.empty_like(scores, dtype=q.dtype)
    units = scores.new_empty(scores.shape[:3] if q.dtype == torch.float16 else 0)
    dq, blocks = (
        launch.tokens_first(q, batch, heads, tokens, d),
        launch.cdiv(place.height * place.width, row["BLOCK_N"]),
    )
    along, z = (mass, mass) if content.along is None else (content.along, content.z)
    launch.run(
        _joint_queries_backward,
        (blocks * batch * heads,),
        *(q, table, scores, grad, out, mass, content.dq, along, z, dq, d_weights, units),
        *(heads, tokens, place.height, place.width, place.prefix, blocks),
        *(
            table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0,
            place.row_scale,
            place.unit,
        ),
        *(octet for x in (q, grad, out, content.dq, dq) for octet in launch.octets(x)),
        **row,
        **place.horizons(),
        D=d,
        E=e,
        BLOCK_D=launch.block(d),
        BLOCK_E=launch.block(e),
        MEAN=place.mean,
        MAP=content.feature_map,
        PRECISION=launch.precision(q.dtype),
    )
    return dq, d_weights, units


def _to_table(d_weights: Tensor, units: Tensor, q: Tensor, place: Place) -> Tensor:
    """Gradient of a table for each head, ``[h, 2Ry+1, 2Rx+1, d]``, float32."""
    (batch, heads, patches), d = d_weights.shape[:3], q.shape[3]
    asked = "joint table backward", d, place.padded_classes, q.dtype, q.device
    row = launch.launch_row(*asked)
    segments = launch.segments(
        patches, batch * heads, row["BLOCK_N"], launch.resident_programs(*asked)
    )
    sizes = 2 * place.horizon_y + 1, 2 * place.horizon_x + 1, d
    d_table = q.new_empty(segments * batch, heads, *sizes, dtype=torch.float32)
    launch.run(
        _joint_table_backward,
        (segments * batch * heads,),
        *(q, d_weights, units, d_table, heads, batch * heads, patches, place.prefix),
        *(launch.cdiv(patches, segments), segments, *launch.octets(q)),
        **row,
        **place.horizons(),
        D=d,
        BLOCK_D=launch.block(d),
        BLOCK_C=launch.block(place.padded_classes),
        PRECISION=launch.precision(q.dtype),
    )
    return d_table.sum(0)


def joint_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    table: Tensor,
    v: Tensor,
    place: Place,
    content: OfContent,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of q and, float32, of the table; that of the values is added to ``dv`` in place.

    Args:
        grad, out: ``[B, h, N, e]``, the gradient of the mean under all terms, and that mean.
        mass: ``[B, h, N]``, float32, contiguous, as ``joint_means`` writes it.
        q, v: ``[B, h, N, d]`` and ``[B, h, N, e]`` as given to the attention.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32.
        content: what the content's backward pass leaves to do.
        dv: like v, readable by kernels, filled by the content's backward pass.
    """
    grad, out, q, v = (launch.readable(x) for x in (grad, out, q, v))
    table = table.contiguous()
    dq, d_weights, units = _to_queries(
        _scores(grad, v, place), grad, out, mass, q, table, content, place
    )
    d_table = _to_table(d_weights, units, q, place)
    d_table = d_table if table.shape[0] > 1 else d_table.sum(0, keepdim=True)
    values_backward(q, table, grad, mass, place, dv)
    return dq, d_table
