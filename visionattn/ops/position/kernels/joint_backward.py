"""The backward pass of ``Joint`` relative position by kernels, and the kernel of the gradient of
the table.

Gradients of queries come from scores of classes (``class_scores.py``, ``queries_backward.py``),
gradients of values from shares (``class_shares.py``, ``values_backward.py``).
"""

import torch
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    in_larger_unit,
    in_units,
    kernel,
    phi,
    program_of,
    read,
)
from visionattn.ops.position.kernels.class_scores import scores_of_classes
from visionattn.ops.position.kernels.grid_classes import GridClasses
from visionattn.ops.position.kernels.queries_backward import OfContent, queries_backward
from visionattn.ops.position.kernels.values_backward import values_backward


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
    """Write the contribution of one segment of a head's queries to the gradient of the table."""
    CLASSES: tl.constexpr = (2 * HORIZON_Y + 1) * (2 * HORIZON_X + 1)
    i_segment, i_group, i_batch, i_head = program_of(segments, heads)
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    # The gradient of a table row is the sum over queries of phi(q) times the gradient of its
    # weight.
    b_d_table, b_unit = tl.zeros([BLOCK_D, BLOCK_C], tl.float32), tl.cast(1e-30, tl.float32)
    last = tl.minimum(patches, (i_segment + 1) * segment_patches)
    for start in range(i_segment * segment_patches, last, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < last
        # The gradients of weights have the dtype of operands; in float16 they have a unit per
        # query.
        p_rows = (
            p_d_weights + (i_group.to(tl.int64) * patches + o_n)[:, None] * PADDED + o_c[None, :]
        )
        b_d = tl.load(p_rows, mask=m_n[:, None] & (o_c < PADDED)[None, :], other=0)  # [N, C]
        b_q = read(p_q, prefix + o_n, q_token, o_d, m_n, D)  # [N, D]
        b_phi = tl.where(m_n[:, None] & (o_d < D)[None, :], phi(b_q, "elu1"), 0)
        if tl.float16 == b_q.dtype:
            p_unit = p_units + i_group.to(tl.int64) * patches + o_n
            b_phi *= tl.load(p_unit, mask=m_n, other=0)[:, None]
        b_d_table, b_unit, b_phi = in_larger_unit(b_d_table, b_unit, b_phi, b_q.dtype)
        b_d_table += tl.dot(tl.trans(b_phi.to(b_q.dtype)), b_d, input_precision=PRECISION)
    b_d_table = in_units(b_d_table, b_unit, p_q.dtype.element_ty)
    p_d_table += (
        (i_segment.to(tl.int64) * groups + i_group) * CLASSES * D + o_c[None, :] * D + o_d[:, None]
    )
    tl.store(p_d_table, b_d_table, mask=(o_c < CLASSES)[None, :] & (o_d < D)[:, None])


def _to_table(d_weights: Tensor, units: Tensor, q: Tensor, grid: GridClasses) -> Tensor:
    """Return the gradient of the table of each head, ``[h, 2Ry+1, 2Rx+1, d]``, float32."""
    (batch, heads, patches), d = d_weights.shape[:3], q.shape[3]
    launch_key = "joint table backward", d, grid.padded_classes, q.dtype, q.device
    row = launch.launch_row(*launch_key)
    segments = launch.segments(
        patches, batch * heads, row["BLOCK_N"], launch.resident_programs(*launch_key)
    )
    sizes = 2 * grid.horizon_y + 1, 2 * grid.horizon_x + 1, d
    # One gradient per segment and image; torch adds them.
    d_table = q.new_empty(segments * batch, heads, *sizes, dtype=torch.float32)
    launch.run(
        _joint_table_backward,
        (segments * batch * heads,),
        *(q, d_weights, units, d_table, heads, batch * heads, patches, grid.prefix),
        *(launch.cdiv(patches, segments), segments, *launch.octets(q)),
        **row,
        **grid.horizons(),
        D=d,
        BLOCK_D=launch.block(d),
        BLOCK_C=launch.block(grid.padded_classes),
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
    grid: GridClasses,
    content: OfContent,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and, in float32, of the table; add the gradient of the values to
    ``dv`` in place.

    Args:
        grad, out: ``[B, h, N, e]``, the gradient of the mean under all terms, and the mean itself.
        mass: ``[B, h, N]``, float32, contiguous, from ``joint_means``.
        q, v: ``[B, h, N, d]`` and ``[B, h, N, e]`` as passed to the attention.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32.
        content: partial results of the content's backward pass.
        dv: like v, readable by kernels; holds the gradient from the content.
    """
    grad, out, q, v = (launch.readable(x) for x in (grad, out, q, v))
    table = table.contiguous()
    dq, d_weights, units = queries_backward(
        scores_of_classes(grad, v, grid), grad, out, mass, q, table, content, grid
    )
    d_table = _to_table(d_weights, units, q, grid)
    d_table = d_table if table.shape[0] > 1 else d_table.sum(0, keepdim=True)
    values_backward(q, table, grad, mass, grid, dv)
    return dq, d_table
