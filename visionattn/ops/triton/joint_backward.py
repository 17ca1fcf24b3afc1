"""Kernels of ``Joint`` relative position, backward: what the weights of classes receive, and through them queries and table.

Tiles and lines are those of the forward pass: g of a tile of queries times the keys of a line gives a score for each pair, which
are added up by class; what lies further away is one product for each outermost class. What the values receive is in
``joint_values_backward.py``.

Gradients of the weights w_c = elu1(q) . r_c are kept in the units of ``joint.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.joint_lines import axis_keys, far_keys, line_and_remainders_at, lines_of, power_of_two
from visionattn.ops.triton.joint_place import Place
from visionattn.ops.triton.joint_values_backward import values_backward
from visionattn.ops.triton.language import head, kernel, phi, phi_slope, reciprocal, rows


@triton.jit
def _line_backward(
    b_grad,
    b_z,
    b_inverse,
    p_line,
    token_octets,
    p_remainders,
    p_d_weights,
    num_rows,
    start,
    width,
    tiles,
    row_scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of the weights of one line of ``num_rows`` rows (0: absent).

    ``b_grad [T, E]`` is the gradient of the mean as it was given, so that no product rounds it, ``b_z
    [T]`` less its product with the mean, and ``b_inverse [T]`` what both are multiplied with at last.
    """
    COLUMNS: tl.constexpr = 2 * HORIZON_X + 1
    o_i = start + tl.arange(0, BLOCK_T)
    o_j = start - BLOCK_T // 2 + tl.arange(0, 2 * BLOCK_T)
    o_e, o_b = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_B)[None, :]
    m_keys = ((o_j >= 0) & (o_j < tl.where(num_rows > 0, width, 0)))[:, None] & (o_e < E)[None, :]
    b_keys = tl.load(rows(p_line, o_j, token_octets, o_e), mask=m_keys, other=0)  # [2T, E]
    b_scores = tl.dot(b_grad, tl.trans(b_keys), input_precision=PRECISION)  # [T, 2T]
    o_apart = o_j[None, :] - o_i[:, None]
    b_first = tl.sum(tl.where(o_apart <= -HORIZON_X, b_scores, 0), 1)
    b_last = tl.sum(tl.where(o_apart >= HORIZON_X, b_scores, 0), 1)
    o_window = tl.arange(0, BLOCK_T)[:, None] + BLOCK_T // 2 - HORIZON_X + tl.minimum(o_b, 2 * HORIZON_X)
    b_classes = tl.gather(b_scores, o_window, 1)
    b_classes = tl.where(o_b == 0, b_first[:, None], tl.where(o_b == 2 * HORIZON_X, b_last[:, None], b_classes))
    if tiles > 1:
        m_far, b_wide = o_e < tl.where(num_rows > 0, E, 0), b_grad.to(tl.float32)
        num_before = power_of_two(far_keys(start // BLOCK_T, 0, width, BLOCK_T, BLOCK_T // 2))
        num_after = power_of_two(far_keys(start // BLOCK_T, 1, width, BLOCK_T, BLOCK_T // 2))
        b_before = tl.sum(b_wide * tl.load(p_remainders + o_e, mask=m_far, other=0)[None, :], 1) * num_before
        b_after = tl.sum(b_wide * tl.load(p_remainders + E + o_e, mask=m_far, other=0)[None, :], 1) * num_after
        b_classes += tl.where(o_b == 0, b_before[:, None], 0) + tl.where(o_b == 2 * HORIZON_X, b_after[:, None], 0)
    b_columns = axis_keys(o_b, o_i[:, None], width, HORIZON_X)
    if MEAN:
        m_some = b_columns * num_rows > 0
        b_d = tl.where(m_some, b_classes / tl.where(m_some, b_columns, 1) + b_z[:, None], 0)
    else:
        b_d = (b_classes + b_z[:, None] * b_columns) * (num_rows * row_scale)
    b_d *= b_inverse[:, None]
    p_d_weights += o_i[:, None] * PADDED + o_b
    tl.store(p_d_weights, b_d.to(p_d_weights.dtype.element_ty), mask=(o_i < width)[:, None] & (o_b < COLUMNS))


@kernel
def _weights_backward(
    p_grad,
    p_out,
    p_mass,
    p_v,
    p_means,
    p_remainders,
    p_d_weights,
    heads,
    groups,
    tokens,
    height,
    width,
    prefix,
    tiles,
    row_scale,
    grad_batch,
    grad_head,
    grad_token,
    out_batch,
    out_head,
    out_token,
    v_batch,
    v_head,
    v_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of the weights of all classes for one tile of queries."""
    i_tile, i_row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    y, i_group = i_row % height, i_row // height
    i_batch, i_head = i_group // heads, i_group % heads
    start = i_tile * BLOCK_T
    o_x, o_e = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_E)
    m_x, m_e = o_x < width, o_e < E
    i_first = (prefix + y * width).to(tl.int64)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head) + i_first * grad_token * 8
    p_out = head(p_out, i_batch, i_head, out_batch, out_head) + i_first * out_token * 8
    m_rows = m_x[:, None] & m_e[None, :]
    b_grad = tl.load(rows(p_grad, o_x, grad_token, o_e), mask=m_rows, other=0)  # [T, E]
    b_out = tl.load(rows(p_out, o_x, out_token, o_e), mask=m_rows, other=0)  # [T, E]
    b_z = -tl.sum(b_grad.to(tl.float32) * b_out.to(tl.float32), 1)
    p_mass += i_group.to(tl.int64) * tokens + i_first
    b_inverse = reciprocal(tl.load(p_mass + o_x, mask=m_x, other=0))
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_means += i_group.to(tl.int64) * height * width * E
    p_remainders += (i_group.to(tl.int64) * height * tiles + i_tile) * 2 * E
    means_below = groups.to(tl.int64) * height * width * E
    remainders_of_means = groups.to(tl.int64) * height * tiles * 2 * E
    p_row = p_d_weights + i_row.to(tl.int64) * width * PADDED
    for step in range(0, 2 * HORIZON_Y + 1):
        y_keys = y + step - HORIZON_Y
        i_class = y_keys - y + HORIZON_Y
        p_line, line_token, p_line_remainders = line_and_remainders_at(
            p_v, p_means, p_remainders, i_class, y_keys, prefix, width, v_token,
            tiles * 2 * E, means_below, remainders_of_means, E, HORIZON_Y,
        )  # fmt: skip
        num_rows = axis_keys(i_class, y, height, HORIZON_Y)
        _line_backward(
            b_grad, b_z, b_inverse, p_line, line_token, p_line_remainders, p_row + i_class * (2 * HORIZON_X + 1), num_rows,
            start, width, tiles, row_scale, E, BLOCK_E, BLOCK_T, BLOCK_B, HORIZON_X, PADDED, MEAN, PRECISION,
        )  # fmt: skip


@kernel
def _queries_and_table_backward(
    p_q,
    p_table,
    p_d_weights,
    p_dq,
    p_d_table,
    heads,
    groups,
    patches,
    prefix,
    segment_patches,
    segments,
    table_octets,
    unit,
    q_batch,
    q_head,
    q_token,
    dq_batch,
    dq_head,
    dq_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the gradients of one segment of the queries of one head, and make its part of that of the table."""
    CLASSES: tl.constexpr = (2 * HORIZON_Y + 1) * (2 * HORIZON_X + 1)
    i_segment, i_group = tl.program_id(0) % segments, tl.program_id(0) // segments
    i_batch, i_head = i_group // heads, i_group % heads
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    m_table = (o_c < CLASSES)[:, None] & (o_d < D)[None, :]
    p_table += i_head * table_octets * 8
    b_table = tl.load(p_table + o_c[:, None] * D + o_d[None, :], mask=m_table, other=0).to(p_q.dtype.element_ty)  # [C, D]
    p_q, p_dq = head(p_q, i_batch, i_head, q_batch, q_head), head(p_dq, i_batch, i_head, dq_batch, dq_head)
    p_d_weights += i_group.to(tl.int64) * patches * PADDED
    b_d_table = tl.zeros([BLOCK_C, BLOCK_D], tl.float32)
    last = tl.minimum(patches, (i_segment + 1) * segment_patches)
    for start in range(i_segment * segment_patches, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        m_q = m_n[:, None] & (o_d < D)[None, :]
        p_rows = p_d_weights + o_n.to(tl.int64)[:, None] * PADDED + o_c[None, :]
        b_d = tl.load(p_rows, mask=m_n[:, None] & (o_c < PADDED)[None, :], other=0)  # [N, C]
        b_d = tl.where((o_c < CLASSES)[None, :], b_d, 0)
        b_q = tl.load(rows(p_q, prefix + o_n, q_token, o_d), mask=m_q, other=0)  # [N, D]
        b_dq = tl.dot(b_d, b_table, input_precision=PRECISION) * (phi_slope(b_q, "elu1") * unit)
        p_to = rows(p_dq, prefix + o_n, dq_token, o_d)
        b_dq += tl.load(p_to, mask=m_q, other=0).to(tl.float32)
        tl.store(p_to, b_dq.to(p_dq.dtype.element_ty), mask=m_q)
        b_phi = tl.where(m_q, phi(b_q, "elu1"), 0)
        b_d_table += tl.dot(tl.trans(b_d), b_phi.to(b_q.dtype), input_precision=PRECISION)
    i_part = i_segment.to(tl.int64) * groups + i_group
    tl.store(p_d_table + i_part * CLASSES * D + o_c[:, None] * D + o_d[None, :], b_d_table * unit, mask=m_table)


def _weight_gradients(grad: Tensor, out: Tensor, mass: Tensor, v: Tensor, place: Place) -> Tensor:
    """Gradients of the weights of classes, ``[B, h, H*W, C padded]`` in the dtype of v."""
    batch, heads, tokens, e = v.shape
    row = launch.launch_row("joint weights backward", 0, e, v.dtype, v.device)
    lines, tiles = lines_of(v, place, row["BLOCK_T"], row["BLOCK_T"] // 2), triton.cdiv(place.width, row["BLOCK_T"])
    d_weights = v.new_empty(batch, heads, place.height * place.width, place.padded_classes)
    launch.run(
        _weights_backward,
        (tiles * place.height * batch * heads,),
        *(grad, out, mass, v, *lines, d_weights),
        *(heads, batch * heads, tokens, place.height, place.width, place.prefix, tiles, place.row_scale),
        *(octet for x in (grad, out, v) for octet in launch.octets(x)),
        **row,
        **place.horizons(),
        E=e,
        BLOCK_E=launch.block(e),
        BLOCK_B=triton.next_power_of_2(2 * place.horizon_x + 1),
        MEAN=place.mean,
        PRECISION=launch.precision(v.dtype),
    )
    return d_weights


def _to_queries_and_table(d_weights: Tensor, q: Tensor, table: Tensor, place: Place, dq: Tensor) -> Tensor:
    """Add to ``dq [B, h, N, d]`` and return the gradient of the table, for those of the weights of classes."""
    (batch, heads, patches), d = d_weights.shape[:3], q.shape[3]
    asked = "joint queries and table backward", d, place.padded_classes, q.dtype, q.device
    row = launch.launch_row(*asked)
    parts = launch.segments(patches, batch * heads, row["BLOCK_N"], launch.resident_programs(*asked))
    d_table = q.new_empty(parts * batch, heads, *table.shape[1:], dtype=torch.float32)
    launch.run(
        _queries_and_table_backward,
        (parts * batch * heads,),
        *(q, table, d_weights, dq, d_table),
        *(heads, batch * heads, patches, place.prefix, triton.cdiv(patches, parts), parts),
        *(table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0, place.unit, *launch.octets(q), *launch.octets(dq)),
        **row,
        **place.horizons(),
        D=d,
        BLOCK_D=launch.block(d),
        BLOCK_C=launch.block(place.padded_classes),
        PRECISION=launch.precision(q.dtype),
    )
    return d_table.sum(0) if table.shape[0] > 1 else d_table.sum((0, 1)).unsqueeze(0)


def joint_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    table: Tensor,
    v: Tensor,
    place: Place,
    dq: Tensor,
    dv: Tensor,
) -> Tensor:
    """Add the relative term's gradients to ``dq`` and ``dv`` in place, and return that of the table, float32.

    Args:
        grad, out: ``[B, h, N, e]``, the gradient of the mean under all terms, and that mean.
        mass: ``[B, h, N]``, float32, contiguous, as ``joint_means`` writes it.
        q, v: ``[B, h, N, d]`` and ``[B, h, N, e]`` as given to the attention.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32.
        dq, dv: like q and v, readable by kernels, filled by the content's backward pass.
    """
    grad, out, q, v = (launch.readable(x) for x in (grad, out, q, v))
    table = table.contiguous()
    d_table = _to_queries_and_table(_weight_gradients(grad, out, mass, v, place), q, table, place, dq)
    values_backward(q, table, grad, mass, place, dv)
    return d_table
