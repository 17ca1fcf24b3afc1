"""Lines of values that ``Joint`` relative position reads in its forward and backward pass.

A line has one value per column of the grid and stands for all keys of one class of rows. For a
query in row y, each row y + dy of the values with |dy| < Ry is a line. The two other lines are the
mean of all rows up to y - Ry, and the mean of all rows from y + Ry on. This module computes the
means. It also computes the remainders: the sums of a line before and after the window of a tile of
T queries.

    columns      0 ..              x0 - halo ..  x0 .. x0 + T  .. x0 + T + halo           .. W
    one line     |<-- before: sum -->|<-- the window, key by key ----->|<-- after: sum ---->|

Outside the window every key is in the outermost class of columns, since halo >= Rx. Each sum runs
from one end of the grid, as a product with a triangle of ones; none is a difference.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import head, kernel, read
from visionattn.ops.position.kernels.grid_classes import TILE, GridClasses


@triton.jit
def axis_keys(o_class, o_place, length, HORIZON: tl.constexpr):
    """Count the keys of a class along one axis of ``length`` places, for a query at ``o_place``;
    float32.
    """
    o_key = o_place + o_class - HORIZON
    # Within the horizon, a class has the key at ``o_key``; the outermost classes have all keys from
    # there to the end of the axis.
    window = ((o_key >= 0) & (o_key < length)).to(tl.int32)
    count = tl.where(o_class == 0, tl.maximum(o_key + 1, 0), window)
    return tl.where(o_class == 2 * HORIZON, tl.maximum(length - o_key, 0), count).to(tl.float32)


@triton.jit
def line_at(
    p_v,
    p_means,
    i_class,
    y_keys,
    prefix,
    width,
    v_token,
    means_below,
    E: tl.constexpr,
    HORIZON_Y: tl.constexpr,
):
    """Return the address of the line for class of rows ``i_class``, and its stride per column in
    octets.

    ``y_keys`` is the row of the query plus ``i_class - Ry``: the row of the values, or the last or
    first row of a mean. ``p_v`` and ``p_means`` are the addresses of row 0 of one head;
    ``means_below`` is the distance from the means above to the means below.
    """
    is_above, is_below = i_class == 0, i_class == 2 * HORIZON_Y
    i_row = y_keys.to(tl.int64)
    p_mean = p_means + tl.where(is_below, means_below, 0) + i_row * width * E
    # A mean of rows is contiguous, [W, E]; a row of v has the stride of the input v.
    p_line = tl.where(is_above | is_below, p_mean, p_v + (prefix + i_row * width) * v_token * 8)
    return p_line, tl.where(is_above | is_below, E // 8, v_token)


@triton.jit
def _means_of_rows(
    p_x,
    p_out,
    m_n,
    i_side,
    height,
    x_row,
    out_row,
    BLOCK_Y: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write for each row y the mean of rows 0 to y (side 0), or of rows y to the last (side 1).

    ``p_x [C]`` and ``p_out [C]`` are the addresses of C columns in row 0; strides between rows are
    in elements.
    """
    # Running sums by products, with rows counted from this side: first add rows 0 to i of a block
    # to sum i, and after writing the means add the other rows of the block.
    o_i = tl.arange(0, BLOCK_Y)
    b_ones = tl.where(o_i[None, :] <= o_i[:, None], 1.0, 0.0).to(p_x.dtype.element_ty)
    b_others = tl.where(o_i[None, :] > o_i[:, None], 1.0, 0.0).to(p_x.dtype.element_ty)
    b_sums = tl.zeros([BLOCK_Y, BLOCK_C], tl.float32)
    for start in tl.range(0, height, BLOCK_Y, num_stages=1):
        o_step = start + o_i
        y = tl.where(i_side == 0, o_step, height - 1 - o_step).to(tl.int64)
        m_x = (o_step < height)[:, None] & m_n[None, :]
        b_x = tl.load(p_x[None, :] + y[:, None] * x_row, mask=m_x, other=0)  # [Y, C]
        b_sums = tl.dot(b_ones, b_x, acc=b_sums, input_precision=PRECISION)
        b_means = b_sums * (1.0 / (o_step + 1))[:, None]
        tl.store(
            p_out[None, :] + y[:, None] * out_row, b_means.to(p_out.dtype.element_ty), mask=m_x
        )
        # Now every row of the sums has added all rows of the block, as the start of the next block.
        b_sums = tl.dot(b_others, b_x, acc=b_sums, input_precision=PRECISION)


@triton.jit
def far_keys(i_tile, i_side, width, BLOCK_T: tl.constexpr, HALO: tl.constexpr):
    """Count the keys of a row before a tile's window (side 0), or after it (side 1)."""
    first = i_tile * BLOCK_T
    return tl.maximum(tl.where(i_side == 0, first - HALO, width - first - BLOCK_T - HALO), 0)


@triton.jit
def power_of_two(number):
    """Return the largest power of two up to ``number``, or 0 for 0: a float32 without mantissa."""
    return (number.to(tl.float32).to(tl.int32, bitcast=True) & 0x7F800000).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _means_of_values(
    i_program,
    p_v,
    p_means,
    heads,
    groups,
    height,
    width,
    prefix,
    blocks,
    v_batch,
    v_head,
    v_token,
    E: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the means of rows of v for BLOCK_C of the ``width * E`` elements of a row.

    ``i_program`` is one of ``2 * blocks * groups``.
    """
    i_side, i_block, i_group = i_program % 2, i_program // 2 % blocks, i_program // 2 // blocks
    o_n = i_block * BLOCK_C + tl.arange(0, BLOCK_C)
    p_v = head(p_v, i_group // heads, i_group % heads, v_batch, v_head)
    p_v += (prefix + o_n // E).to(tl.int64) * (v_token * 8) + o_n % E
    p_means += (i_side.to(tl.int64) * groups + i_group) * height * width * E + o_n
    _means_of_rows(
        p_v, p_means, o_n < width * E, i_side, height, width.to(tl.int64) * (v_token * 8),
        width * E, BLOCK_Y, BLOCK_C, PRECISION,
    )  # fmt: skip


@triton.jit
def _remainders_of_values(
    i_program,
    p_v,
    p_remainders,
    heads,
    height,
    width,
    prefix,
    tiles,
    v_batch,
    v_head,
    v_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write for each tile of a row the sum of the values before, or after, the window.

    ``i_program`` is one of ``2 * height * groups``.
    """
    TILES: tl.constexpr = BLOCK_X // BLOCK_T
    i_side, i_row = i_program % 2, i_program // 2
    y, i_group = i_row % height, i_row // height
    p_v = head(p_v, i_group // heads, i_group % heads, v_batch, v_head)
    p_v += (prefix + y * width).to(tl.int64) * v_token * 8
    o_e = tl.arange(0, BLOCK_E)
    p_remainders += (i_row.to(tl.int64) * tiles * 2 + i_side) * E
    # Sums by products, with columns counted from this side: row i of the left operand selects the
    # columns of the first i tiles.
    o_i, o_j = tl.arange(0, 16), tl.arange(0, BLOCK_X)
    b_ones = tl.where(o_j[None, :] < o_i[:, None] * BLOCK_T, 1.0, 0.0).to(p_v.dtype.element_ty)
    b_carry = tl.zeros([BLOCK_E], tl.float32)
    # TILES tiles at a time, from the end of the row where the remainder is 0.
    for start in tl.range(0, tiles, TILES, num_stages=1):
        o_column = start * BLOCK_T + o_j
        o_x = tl.where(i_side == 0, o_column - HALO, tiles * BLOCK_T + HALO - 1 - o_column)
        b_v = read(p_v, o_x, v_token, o_e, (o_x >= 0) & (o_x < width), E)  # [X, E]
        b_sums = tl.dot(b_ones, b_v, input_precision=PRECISION) + b_carry[None, :]
        # Row TILES of the product sums all columns of this block: the start of the next block.
        b_carry = tl.sum(tl.where((o_i == TILES)[:, None], b_sums, 0), 0)
        o_tile = tl.where(i_side == 0, start + o_i, tiles - 1 - start - o_i)
        # Divide by a power of two, which is exact, so that half precision holds the sum of a long
        # row.
        b_sums *= (
            1
            / tl.maximum(power_of_two(far_keys(o_tile, i_side, width, BLOCK_T, HALO)), 1.0)[:, None]
        )
        m_out = ((o_i < TILES) & (start + o_i < tiles))[:, None] & (o_e < E)[None, :]
        p_out = p_remainders + o_tile[:, None] * 2 * E + o_e[None, :]
        tl.store(p_out, b_sums.to(p_remainders.dtype.element_ty), mask=m_out)


@kernel
def _joint_lines(
    p_v,
    p_means,
    p_remainders,
    heads,
    groups,
    height,
    width,
    prefix,
    tiles,
    blocks,
    v_batch,
    v_head,
    v_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the means of rows of v and, if a row has several tiles, the remainders of the rows."""
    i_program, of_means = tl.program_id(0), 2 * blocks * groups
    if i_program < of_means:
        _means_of_values(
            i_program, p_v, p_means, heads, groups, height, width, prefix, blocks, v_batch, v_head,
            v_token, E, BLOCK_Y, BLOCK_C, PRECISION,
        )  # fmt: skip
    else:
        _remainders_of_values(
            i_program - of_means, p_v, p_remainders, heads, height, width, prefix, tiles, v_batch,
            v_head, v_token, E, BLOCK_E, BLOCK_T, HALO, BLOCK_X, PRECISION,
        )  # fmt: skip


@kernel
def _joint_means_of_remainders(
    p_remainders,
    groups,
    height,
    tiles,
    blocks,
    E: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the remainders of the means of rows, which are the means of the remainders of rows."""
    i_side, i_block = tl.program_id(0) % 2, tl.program_id(0) // 2 % blocks
    i_group, columns = tl.program_id(0) // 2 // blocks, 2 * tiles * E
    o_n = i_block * BLOCK_C + tl.arange(0, BLOCK_C)
    p_remainders += i_group.to(tl.int64) * height * columns + o_n
    p_out = p_remainders + (1 + i_side.to(tl.int64)) * groups * height * columns
    _means_of_rows(
        p_remainders, p_out, o_n < columns, i_side, height, columns, columns, BLOCK_Y, BLOCK_C,
        PRECISION,
    )  # fmt: skip


class Lines(NamedTuple):
    """The lines that tiles read in addition to the values.

    Args:
        means: ``[2, B, h, H, W, e]`` in the dtype of v: for row y, the mean of rows 0 to y and the
            mean of rows y to ``H - 1``.
        remainders: ``[3, B, h, H, tiles, 2, e]`` in the dtype of v: for row y of v and of both
            means, the sums before and after the window of each tile. Empty if a row is a single
            tile. Each sum is divided by the largest power of two up to its number of keys, so that
            half precision holds both the sum and the weight times this power.
    """

    means: Tensor
    remainders: Tensor


def lines_of(v: Tensor, grid: GridClasses) -> Lines:
    """Return the lines of ``v [B, h, N, e]``, which kernels must be able to read."""
    (batch, heads, _, e), height, width = v.shape, grid.height, grid.width
    tiles, groups = launch.cdiv(width, TILE), batch * heads
    lines = Lines(
        v.new_empty(2, batch, heads, height, width, e),
        v.new_empty(3, batch, heads, height, tiles if tiles > 1 else 0, 2, e),
    )
    row = launch.launch_row("joint lines", 0, e, v.dtype, v.device)
    blocks = launch.cdiv(width * e, row["BLOCK_C"])
    own = dict(E=e, PRECISION=launch.precision(v.dtype))
    launch.run(
        _joint_lines,
        (2 * groups * (blocks + (height if tiles > 1 else 0)),),
        *(v, *lines, heads, groups, height, width, grid.prefix, tiles, blocks, *launch.octets(v)),
        **row,
        **own,
        BLOCK_E=launch.block(e),
        BLOCK_T=TILE,
        HALO=grid.halo,
    )
    # The means of remainders need the remainders of all rows, and so a second launch.
    if tiles > 1:
        row = launch.launch_row("joint means of remainders", 0, e, v.dtype, v.device)
        blocks = launch.cdiv(2 * tiles * e, row["BLOCK_C"])
        launch.run(
            _joint_means_of_remainders,
            (2 * blocks * groups,),
            *(lines.remainders, groups, height, tiles, blocks),
            **row,
            **own,
        )
    return lines
