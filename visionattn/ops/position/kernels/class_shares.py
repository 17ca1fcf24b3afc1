"""The kernel of ``Joint`` relative position that computes shares, for the gradient of the values.

The share of a class is the weight of one of its keys divided by the mass of all terms. The gradient
of a value is

    dv_j = sum over queries i of share[i, class of (i, j)] grad_i

with grad the gradient of the mean, which is an operand without further rounding. Shares lie between
0 and 1. They are stored times ``UNIT``, because float16 loses precision below 6e-5:

    shares [B, h, H, 2Ry+1, W, slots]    by row of queries, class of rows, column of queries, and
                                         class of columns (padded to ``GridClasses.slots``)
"""

import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import head, inverse_mass, kernel, phi, read
from visionattn.ops.position.kernels.grid_classes import GridClasses
from visionattn.ops.position.kernels.joint_forward import table_of_lines

UNIT = 2.0**14
"""Factor of the stored shares; the largest still fits float16."""


@kernel
def _joint_shares(
    p_q,
    p_table,
    p_mass,
    p_shares,
    heads,
    tokens,
    height,
    width,
    prefix,
    parts,
    part_blocks,
    table_octets,
    scale,
    q_batch,
    q_head,
    q_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the shares of LINES classes of rows for ``part_blocks`` blocks of BLOCK_N patches.

    Classes without keys get undefined but finite numbers.
    """
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    A: tl.constexpr = 2 * HORIZON_Y + 1
    CHUNKS: tl.constexpr = (A + LINES - 1) // LINES
    i_chunk, i_part = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS % parts
    i_group = tl.program_id(0) // CHUNKS // parts
    i_head, patches = i_group % heads, height * width
    o_i = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    o_b = tl.arange(0, SLOTS)
    o_lines = tl.arange(0, LINES)
    o_a = i_chunk * LINES + o_lines if CHUNKS > 1 else o_lines
    p_q = head(p_q, i_group // heads, i_head, q_batch, q_head)
    p_mass += i_group.to(tl.int64) * tokens + prefix
    p_shares += i_group.to(tl.int64) * patches * A * SLOTS
    # The table of these classes serves all patches of the program. Zeros go to the slots that hold
    # Z in the forward pass.
    b_table = table_of_lines(
        p_table + i_head * table_octets * 8, tl.zeros([BLOCK_D], tl.float32), i_chunk, DTYPE, D,
        BLOCK_D, LINES, SLOTS, HORIZON_Y, HORIZON_X,
    )  # fmt: skip
    first = i_part * part_blocks * BLOCK_N
    for start in range(first, tl.minimum(patches, first + part_blocks * BLOCK_N), BLOCK_N):
        o_n = start + o_i
        m_n, y = o_n < patches, o_n // width
        x = o_n - y * width
        b_q = read(p_q, prefix + o_n, q_token, o_d, m_n, D)  # [N, D]
        # A query without mass has shares of 0.
        b_inverse = inverse_mass(p_mass, o_n, m_n) * scale  # [N]
        b_phi = tl.where((o_d < D)[None, :], phi(b_q, "elu1"), 0).to(DTYPE)
        b_w = tl.reshape(tl.dot(b_phi, b_table, input_precision=PRECISION), [BLOCK_N, LINES, SLOTS])
        if MEAN:
            # The outermost classes have many keys: divide their weights by the number of keys.
            b_top = b_inverse / tl.maximum(y - HORIZON_Y + 1, 1).to(tl.float32)
            b_bottom = b_inverse / tl.maximum(height - HORIZON_Y - y, 1).to(tl.float32)
            b_left = 1 / tl.maximum(x - HORIZON_X + 1, 1).to(tl.float32)
            b_right = 1 / tl.maximum(width - HORIZON_X - x, 1).to(tl.float32)
            b_rows = tl.where(
                (o_a == 2 * HORIZON_Y)[None, :], b_bottom[:, None], b_inverse[:, None]
            )
            b_rows = tl.where((o_a == 0)[None, :], b_top[:, None], b_rows)
            b_columns = tl.where((o_b == 2 * HORIZON_X)[None, :], b_right[:, None], 1.0)
            b_columns = tl.where((o_b == 0)[None, :], b_left[:, None], b_columns)
            b_w *= b_rows[:, :, None] * b_columns[:, None, :]
        else:
            b_w *= b_inverse[:, None, None]
        # For each row of the grid and class of rows, the patches of the row are stored in order.
        p_rows = p_shares + (y * (A * width) + x) * SLOTS
        p_out = p_rows[:, None, None] + (o_a * width * SLOTS)[None, :, None] + o_b[None, None, :]
        tl.store(p_out, b_w.to(DTYPE), mask=m_n[:, None, None] & (o_a < A)[None, :, None])


def shares_of_classes(q: Tensor, table: Tensor, mass: Tensor, grid: GridClasses) -> Tensor:
    """Return the shares of all classes times ``UNIT``, ``[B, h, H, 2Ry+1, W, slots]`` in q's dtype.

    Args:
        q: ``[B, h, N, d]`` as passed to the attention, prefix first; readable by kernels.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32, non-negative, contiguous.
        mass: ``[B, h, N]`` of all terms, float32, contiguous, as ``joint_means`` writes it.
    """
    (batch, heads, tokens, d), num_rows = q.shape, 2 * grid.horizon_y + 1
    launch_key = "joint shares", d, grid.padded_classes, q.dtype, q.device
    row, patches = launch.launch_row(*launch_key), grid.height * grid.width
    shares = q.new_empty(batch, heads, grid.height, num_rows, grid.width, grid.slots)
    groups = batch * heads * launch.cdiv(num_rows, grid.lines_at_once)
    # About as many programs as the device holds at once, each with several blocks of patches.
    parts = launch.segments(patches, groups, row["BLOCK_N"], launch.resident_programs(*launch_key))
    launch.run(
        _joint_shares,
        (parts * groups,),
        *(q, table, mass, shares, heads, tokens, grid.height, grid.width, grid.prefix),
        *(parts, launch.cdiv(launch.cdiv(patches, parts), row["BLOCK_N"])),
        *(
            table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0,
            UNIT if grid.mean else UNIT / tokens,
        ),
        *launch.octets(q),
        **row,
        D=d,
        BLOCK_D=launch.block(d),
        LINES=grid.lines_at_once,
        SLOTS=grid.slots,
        HORIZON_Y=grid.horizon_y,
        HORIZON_X=grid.horizon_x,
        MEAN=grid.mean,
        PRECISION=launch.precision(q.dtype),
    )
    return shares
