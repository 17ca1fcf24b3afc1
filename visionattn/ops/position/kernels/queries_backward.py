"""Kernel of ``Joint`` relative position, backward: the gradients of queries and of weights of
classes.

The gradient of the weight of class c is ``(s_c - n_c <g, out>) / mass``. Here s_c is the score of
the class (``class_scores.py``), and n_c is the score if the product of g and every value were 1. If
a query attends mostly to one class, this is a small difference of large numbers, for which the
rounded mean is too coarse.

So with a state as content, ``<g, out>`` and the mass are summed again from unrounded weights: from
phi(q) and the products of s_c and n_c with the table, which dq needs anyway. With sums as content,
they are corrected by the rounding errors of the weights. The table enters in two parts, high and
low. dq is rounded once, after the content's part has been added in float32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    inverse_mass,
    kernel,
    parts,
    phi,
    phi_slope,
    program_of,
    read,
    reciprocal,
    write,
)
from visionattn.ops.position.kernels.grid_classes import GridClasses
from visionattn.ops.position.kernels.key_lines import axis_keys


class OfContent(NamedTuple):
    """Partial results of the content's backward pass, which the relative term completes.

    Args:
        dq: gradient of q from the content, ``[B, h, N, d]``, float32, readable by kernels. With
            ``along`` it is the gradient of the features instead, without the part from the mass.
        along: contribution of the content to ``<g, out>``, ``[B, h, N]``, float32; None: ``dq`` is
            complete.
        z: sum of the features of keys divided by M, ``[B, h, d]``, contiguous; needed with
            ``along``.
        feature_map: feature map of the content; needed with ``along``.
    """

    dq: Tensor
    along: Tensor | None = None
    z: Tensor | None = None
    feature_map: str = ""


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
    WITH_FACTOR: tl.constexpr,
):
    """Return for the classes ``o_c`` the scores s_c, the numbers n_c and, with WITH_FACTOR, the
    factor by which the forward pass multiplies a weight before rounding it; ``[N, C]`` each.
    """
    COLUMNS: tl.constexpr = 2 * HORIZON_X + 1
    m_c = m_n[:, None] & (o_c < (2 * HORIZON_Y + 1) * COLUMNS)[None, :]
    b_s = tl.load(
        p_scores + o_n.to(tl.int64)[:, None] * PADDED + o_c[None, :],
        mask=m_c,
        other=float("-inf") if MEAN else 0,
    )
    b_factor = tl.full(b_s.shape, 1.0, tl.float32)
    if WITH_FACTOR or not MEAN:
        b_rows = tl.where(
            m_c, axis_keys((o_c // COLUMNS)[None, :], (o_n // width)[:, None], height, HORIZON_Y), 0
        )
        b_columns = axis_keys((o_c % COLUMNS)[None, :], (o_n % width)[:, None], width, HORIZON_X)
    # With "mean", n_c is 1 for every class with a key. Classes without keys have a score of minus
    # infinity.
    if MEAN:
        b_keys = tl.where(b_s > float("-inf"), 1.0, 0.0)
        b_s = tl.where(b_s > float("-inf"), b_s, 0)
        if WITH_FACTOR:
            b_factor = 1 / tl.maximum(b_columns, 1)
    else:
        b_keys = b_rows * b_columns * row_scale
        b_factor = tl.maximum(b_rows, 1) * row_scale
    return b_s, b_keys, b_factor


@triton.jit
def _add_times_table(
    b_sum, x, b_high, b_low, DTYPE: tl.constexpr, PRECISION: tl.constexpr, LOW: tl.constexpr
):
    """Return ``b_sum [N, D]`` plus the product of ``x [N, C]`` and the table ``[C, D]``, which is
    given in two parts. With LOW, x is split into two parts too.
    """
    # The product of both low parts is negligible and left out.
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
    """Write the gradients of one block of queries, and of the weights of their classes, in float16
    divided by the units that are written to ``p_units``.

    With ``MAP`` "" the content is given by sums: its part of dq is complete, and ``<g, out>`` comes
    from the mean.
    """
    CLASSES: tl.constexpr = (2 * HORIZON_Y + 1) * (2 * HORIZON_X + 1)
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    i_block, i_group, i_batch, i_head = program_of(blocks, heads)
    o_d, o_c, o_e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E)
    m_d = o_d < D
    p_table += i_head * table_octets * 8
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_dq = head(p_dq, i_batch, i_head, dq_batch, dq_head)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    p_content_dq = head(p_content_dq, i_batch, i_head, content_batch, content_head)
    p_mass += i_group.to(tl.int64) * tokens
    p_along += i_group.to(tl.int64) * tokens
    p_scores += i_group.to(tl.int64) * height * width * PADDED
    # Prefix tokens have only the content term.
    for start in range(0, tl.where(i_block == 0, prefix, 0), BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < prefix
        b_dq = read(p_content_dq, o_n, content_token, o_d, m_n, D)
        if MAP != "":
            b_q = read(p_q, o_n, q_token, o_d, m_n, D)
            b_z = tl.load(p_z + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
            b_along = tl.load(p_along + o_n, mask=m_n, other=0) * inverse_mass(p_mass, o_n, m_n)
            b_dq = (b_dq - b_along[:, None] * b_z[None, :]) * phi_slope(b_q, MAP)
        write(p_dq, o_n, dq_token, o_d, b_dq, m_n, D)
    o_n = i_block * BLOCK_N + tl.arange(0, BLOCK_N)
    m_n = o_n < height * width
    b_q = read(p_q, prefix + o_n, q_token, o_d, m_n, D)  # [N, D]
    # In float16 the scores of a query have a unit that scales the largest to 16.
    b_unit = tl.full([BLOCK_N], 1.0, tl.float32)
    if tl.float16 == DTYPE:
        b_most = tl.zeros([BLOCK_N], tl.float32)
        for first in range(0, CLASSES, BLOCK_C):
            b_s, _, _ = _scores_and_keys(
                p_scores, o_n, first + o_c, m_n, height, width, row_scale, HORIZON_Y, HORIZON_X,
                PADDED, MEAN, False,
            )  # fmt: skip
            b_most = tl.maximum(b_most, tl.max(tl.abs(b_s), 1))
        b_unit = tl.maximum(b_most / 16, 1e-30)
    # Gradients of phi through the sum of values and through the mass, and, for ``MAP`` "", the
    # rounding errors of the weights in both sums.
    b_to_values = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_to_mass = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_values, b_masses = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, CLASSES, BLOCK_C):
        b_s, b_keys, b_factor = _scores_and_keys(
            p_scores, o_n, first + o_c, m_n, height, width, row_scale, HORIZON_Y, HORIZON_X, PADDED,
            MEAN, MAP == "",
        )  # fmt: skip
        m_table = (first + o_c < CLASSES)[:, None] & m_d[None, :]
        b_table = tl.load(
            p_table + (first + o_c)[:, None] * D + o_d[None, :], mask=m_table, other=0
        )  # [C, D]
        b_high, b_low = parts(b_table, DTYPE)
        b_to_mass = _add_times_table(b_to_mass, b_keys, b_high, b_low, DTYPE, PRECISION, not MEAN)
        # Rounding errors: subtract the weights as the forward pass rounded them.
        if MAP == "":
            b_phi = tl.where(m_d[None, :], phi(b_q, "elu1"), 0).to(DTYPE)
            b_w = tl.dot(b_phi, tl.trans(b_high), input_precision=PRECISION)
            b_masses -= tl.sum(b_w * b_keys, 1)
            b_values -= tl.sum((b_w * b_factor).to(DTYPE).to(tl.float32) / b_factor * b_s, 1)
        b_left = b_s / b_unit[:, None] if tl.float16 == DTYPE else b_s
        b_to_values = _add_times_table(b_to_values, b_left, b_high, b_low, DTYPE, PRECISION, True)
    # <g, out>, the mass, and dq.
    b_phi, b_slope = phi(b_q, "elu1"), phi_slope(b_q, "elu1")
    b_values += tl.sum(b_phi * b_to_values, 1) * b_unit
    b_masses += tl.sum(b_phi * b_to_mass, 1)
    b_mass = tl.load(p_mass + prefix + o_n, mask=m_n, other=0)
    b_dq = read(p_content_dq, prefix + o_n, content_token, o_d, m_n, D)
    # <g, out> and the mass: corrected by the rounding errors or, with a state, summed again.
    if MAP == "":
        b_grad = read(p_grad, prefix + o_n, grad_token, o_e, m_n, E).to(tl.float32)
        b_out = read(p_out, prefix + o_n, out_token, o_e, m_n, E).to(tl.float32)
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
    # The gradient of elu1(q) through the weights of all classes. Content and relative term may have
    # different feature maps, and so different slopes.
    b_to_phi = (
        b_to_values * (b_unit * b_inverse)[:, None] - b_to_mass * (b_along * b_inverse)[:, None]
    )
    if MAP == "elu1":
        b_dq = (b_dq + b_to_phi) * b_slope
    elif MAP == "":
        b_dq += b_to_phi * b_slope
    else:
        b_dq = b_dq * phi_slope(b_q, MAP) + b_to_phi * b_slope
    write(p_dq, prefix + o_n, dq_token, o_d, b_dq, m_n, D)
    # Gradients of the weights; in float16 they are divided by a bound on the largest.
    i_first = i_group.to(tl.int64) * height * width
    if tl.float16 == DTYPE:
        b_unit = tl.maximum(
            (b_unit + tl.abs(b_along) * (1 / 16 if MEAN else 1.0)) * b_inverse, 1e-30
        )
        tl.store(p_units + i_first + o_n, b_unit, mask=m_n)
        b_inverse /= b_unit
    for first in range(0, CLASSES, BLOCK_C):
        b_s, b_keys, _ = _scores_and_keys(
            p_scores, o_n, first + o_c, m_n, height, width, row_scale, HORIZON_Y, HORIZON_X, PADDED,
            MEAN, False,
        )  # fmt: skip
        b_d = (b_s - b_keys * b_along[:, None]) * b_inverse[:, None]
        p_rows = p_d_weights + (i_first + o_n)[:, None] * PADDED + (first + o_c)[None, :]
        tl.store(p_rows, b_d.to(DTYPE), mask=m_n[:, None] & (first + o_c < PADDED)[None, :])


def queries_backward(
    scores: Tensor,
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    table: Tensor,
    content: OfContent,
    grid: GridClasses,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of q, the gradient of the weights of classes ``[B, h, H*W, C padded]``,
    and the units of the second, ``[B, h, H*W]`` (empty except in float16).

    Args:
        scores: the result of ``scores_of_classes``.

    The other arguments are as for ``joint_backward``.
    """
    (batch, heads, tokens, d), e = q.shape, grad.shape[3]
    row = launch.launch_row("joint queries backward", d, grid.padded_classes, q.dtype, q.device)
    if content.along is None:  # the gradient and the mean are read too and take registers
        row = row | dict(BLOCK_N=row["BLOCK_N"] // 2)
    d_weights = torch.empty_like(scores, dtype=q.dtype)
    units = scores.new_empty(scores.shape[:3] if q.dtype == torch.float16 else 0)
    dq = launch.tokens_first(q, batch, heads, tokens, d)
    blocks = launch.cdiv(grid.height * grid.width, row["BLOCK_N"])
    along, z = (mass, mass) if content.along is None else (content.along, content.z)
    launch.run(
        _joint_queries_backward,
        (blocks * batch * heads,),
        *(q, table, scores, grad, out, mass, content.dq, along, z, dq, d_weights, units),
        *(heads, tokens, grid.height, grid.width, grid.prefix, blocks),
        *(
            table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0,
            grid.row_scale,
            grid.unit,
        ),
        *(octet for x in (q, grad, out, content.dq, dq) for octet in launch.octets(x)),
        **row,
        **grid.horizons(),
        D=d,
        E=e,
        BLOCK_D=launch.block(d),
        BLOCK_E=launch.block(e),
        MEAN=grid.mean,
        MAP=content.feature_map,
        PRECISION=launch.precision(q.dtype),
    )
    return dq, d_weights, units
