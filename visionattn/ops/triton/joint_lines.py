"""Lines of keys that ``Joint`` relative position reads, for its forward and its backward pass.

For a query in row y of the grid the keys of one row class form one line along x: the row y + dy of the values for |dy| < Ry, the
mean of all rows up to y - Ry, the mean of all rows from y + Ry on. The means are made here, by one scan of each column in each
direction, and so are the sums of the parts of a line that a tile of T queries does not read:

    columns      0 ..               x0 - T/2 ..   x0 .. x0 + T   .. x0 + 3T/2              .. W
    one line     |<-- before: sum -->|<-- keys of the tile, one by one -->|<-- after: sum -->|

Beyond the tile's keys every key is of the outermost column class, as T/2 >= Rx. All sums are one-sided: none is a difference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.joint_place import Place
from visionattn.ops.triton.language import head, kernel, rows


@triton.jit
def axis_keys(o_class, o_place, length, HORIZON: tl.constexpr):
    """Keys of a class of one axis of ``length`` places as seen from one of them, float32."""
    o_key = o_place + o_class - HORIZON
    window = ((o_key >= 0) & (o_key < length)).to(tl.int32)
    count = tl.where(o_class == 0, tl.maximum(o_key + 1, 0), window)
    return tl.where(o_class == 2 * HORIZON, tl.maximum(length - o_key, 0), count).to(tl.float32)


@triton.jit
def pair_weights(p_weights, o_i, m_i, o_j, PADDED: tl.constexpr, HORIZON_X: tl.constexpr):
    """Weights ``[queries, keys]`` of one line for columns ``o_i`` and ``o_j`` of a row; any key column, 0 for masked queries.

    ``p_weights`` is the address of the first class of the line, of the first query of the row.
    """
    o_class = tl.minimum(tl.maximum(o_j[None, :] - o_i[:, None], -HORIZON_X), HORIZON_X) + HORIZON_X
    return tl.load(p_weights + o_i[:, None] * PADDED + o_class, mask=m_i[:, None], other=0)


@triton.jit
def line_at(
    p_v,
    p_means,
    p_remainders,
    i_class,
    y_keys,
    prefix,
    width,
    v_token,
    remainder_row,
    means_below,
    remainders_of_means,
    E: tl.constexpr,
    HORIZON_Y: tl.constexpr,
):
    """Where the line of row class ``i_class`` begins, the stride of its tokens in octets, and where its remainders are.

    ``y_keys``, the row of the query plus ``i_class - Ry``, is that of the keys, and the last or first one of a mean of rows.
    The addresses given are those of row 0 of one head; ``means_below`` and ``remainders_of_means`` are the distances to the
    other half of the means, and from the remainders of v to those of the means above and from these to those below.
    """
    is_above, is_below = i_class == 0, i_class == 2 * HORIZON_Y
    i_row = y_keys.to(tl.int64)
    p_mean = p_means + tl.where(is_below, means_below, 0) + i_row * width * E
    p_line = tl.where(is_above | is_below, p_mean, p_v + (prefix + i_row * width) * v_token * 8)
    i_kind = tl.where(is_above, 1, tl.where(is_below, 2, 0))
    p_remainders += i_kind * remainders_of_means + i_row * remainder_row
    return p_line, tl.where(is_above | is_below, E // 8, v_token), p_remainders


@kernel
def _column_scans(
    p_x,
    p_out,
    heads,
    groups,
    height,
    width,
    prefix,
    x_side,
    x_batch,
    x_head,
    x_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    MEANS: tl.constexpr,
):
    """One column, from the top (side 0) or from the bottom (side 1): sums up to each row, or their means."""
    i_side, i_column = tl.program_id(0) % 2, tl.program_id(0) // 2 % width
    i_group = tl.program_id(0) // 2 // width
    p_x = head(p_x, i_group // heads, i_group % heads, x_batch, x_head) + i_side.to(tl.int64) * x_side * 8
    p_out += (i_side.to(tl.int64) * groups + i_group) * height * width * E
    o_e = tl.arange(0, BLOCK_E)
    b_carry = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, height, BLOCK_Y):
        o_step = start + tl.arange(0, BLOCK_Y)
        o_token = tl.where(i_side == 0, o_step, height - 1 - o_step) * width + i_column
        m_x = (o_step < height)[:, None] & (o_e < E)[None, :]
        b_x = tl.load(rows(p_x, prefix + o_token, x_token, o_e), mask=m_x, other=0).to(tl.float32)  # [Y, E]
        b_sums = tl.cumsum(b_x, 0) + b_carry[None, :]
        b_carry += tl.sum(b_x, 0)
        if MEANS:
            b_sums = b_sums / (o_step + 1).to(tl.float32)[:, None]
        p_rows = p_out + o_token.to(tl.int64)[:, None] * E + o_e[None, :]
        tl.store(p_rows, b_sums.to(p_out.dtype.element_ty), mask=m_x)


@kernel
def _row_remainders(
    p_v,
    p_sums,
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
):
    """For each tile of one row, the sums of the values before the keys that it reads and of those after them."""
    i_row = tl.program_id(0)
    y, i_group = i_row % height, i_row // height
    p_v = head(p_v, i_group // heads, i_group % heads, v_batch, v_head)
    p_v += (prefix + y * width).to(tl.int64) * v_token * 8
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < E
    p_before = p_sums + i_row.to(tl.int64) * tiles * 2 * E + o_e
    p_after = p_before + E
    b_sum, b_zero = tl.zeros([BLOCK_E], tl.float32), tl.zeros([BLOCK_E], tl.float32)
    tl.store(p_after + (tiles - 1) * 2 * E, b_zero, mask=m_e)
    for step in range(0, tiles + 1):
        o_x = step * BLOCK_T - BLOCK_T // 2 + tl.arange(0, BLOCK_T)
        m_x = ((o_x >= 0) & (o_x < width))[:, None] & m_e[None, :]
        b_part = tl.sum(tl.load(rows(p_v, o_x, v_token, o_e), mask=m_x, other=0).to(tl.float32), 0)
        tl.store(p_before + step * 2 * E, b_sum, mask=o_e < tl.where(step < tiles, E, 0))
        tl.store(p_after + (step - 2) * 2 * E, b_part, mask=o_e < tl.where(step >= 2, E, 0))
        b_sum += b_part
    tl.debug_barrier()  # threads read what others have written
    b_sum = b_zero
    for step in range(0, tiles):
        p_tile = p_after + (tiles - 1 - step) * 2 * E
        b_sum += tl.load(p_tile, mask=m_e, other=0)
        tl.debug_barrier()  # and have all read it before one of them overwrites it
        tl.store(p_tile, b_sum, mask=m_e)


def _scan(x: Tensor, out: Tensor, prefix: int, strides: tuple[int, ...], means: bool) -> None:
    """Scan the columns of ``x`` in both directions into ``out [2, B, h, H, W, e]``; ``strides``: octets, sides first."""
    _, batch, heads, height, width, e = out.shape
    launch.run(
        _column_scans,
        (2 * width * batch * heads,),
        *(x, out, heads, batch * heads, height, width, prefix, *strides),
        **launch.launch_row("joint scan", 0, e, x.dtype, x.device),
        E=e,
        BLOCK_E=launch.block(e),
        MEANS=means,
    )


def sums_of_rows(x: Tensor) -> Tensor:
    """Of ``x [2, B, h, H, W, e]``, contiguous: the sums of rows 0 to y of the first, and of rows y to H - 1 of the second."""
    out, octets = torch.empty_like(x), launch.octets(x)
    _scan(x, out, 0, (octets[0], octets[1], octets[2], octets[4]), means=False)
    return out


class Lines(NamedTuple):
    """What tiles read beside the values themselves.

    Args:
        means: ``[2, B, h, H, W, e]`` in the dtype of v: the mean of rows 0 to y, and of rows y to H - 1.
        remainders: float32 ``[3, B, h, H, tiles, 2, e]``: of row y of v, and of both means, the sums before and after the keys
            that each tile reads one by one; empty where one tile holds a row.
    """

    means: Tensor
    remainders: Tensor


def lines_of(v: Tensor, place: Place, tile: int) -> Lines:
    """The lines of ``v [B, h, N, e]``, readable by kernels, for tiles of ``tile`` queries."""
    batch, heads, _, e = v.shape
    height, width = place.height, place.width
    means = v.new_empty(2, batch, heads, height, width, e)
    _scan(v, means, place.prefix, (0, *launch.octets(v)), means=True)
    tiles = triton.cdiv(width, tile)
    if tiles == 1:
        return Lines(means, v.new_empty(0, dtype=torch.float32))
    remainders = v.new_empty(3, batch, heads, height, tiles, 2, e, dtype=torch.float32)
    launch.run(
        _row_remainders,
        (height * batch * heads,),
        *(v, remainders, heads, height, width, place.prefix, tiles, *launch.octets(v)),
        **launch.launch_row("joint remainders", 0, e, v.dtype, v.device),
        E=e,
        BLOCK_E=launch.block(e),
        BLOCK_T=tile,
    )
    rows_of_v = remainders[0].flatten(3, 4)
    strides = launch.octets(rows_of_v)
    _scan(rows_of_v, remainders[1:].flatten(4, 5), 0, (0, strides[0], strides[1], strides[3]), means=True)
    return Lines(means, remainders)
