"""Kernels of ``Joint`` relative position, backward: the gradient of the values from queries whose
columns are outside the window of a tile of keys.

``values_backward.py`` processes the queries within the window of a tile of T keys one by one. For
all queries before the window, and for all queries after it, the keys of the tile are in the same
outermost class of columns. So these queries contribute equally to every key of the tile: one vector
per row of keys, tile and side, which is a sum over tiles of queries.

The first launch computes the contribution of each tile of queries to a chunk of CHUNK rows of keys,
with one product per row of queries. The rows of the product are

    0 .. CHUNK - 1    contributions to each row of keys in the chunk, by class of rows
    CHUNK             contribution to all keys below the chunk, from rows of queries that the next
                      chunk does not read; each row of queries counts in one chunk only
    CHUNK + 1         contribution to all keys above the chunk, from rows of queries that the
                      previous chunk does not read

The second launch sums the tiles from either side, and adds rows CHUNK and CHUNK + 1 of the chunks
above and below.
"""

import torch
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import head, kernel
from visionattn.ops.position.kernels.grid_classes import TILE, GridClasses
from visionattn.ops.position.kernels.query_key_pairs import as_operand, pairs

ROWS = tl.constexpr(16)
CHUNK = tl.constexpr(ROWS.value - 2)
"""Number of rows of keys among the ROWS rows of one product."""


@kernel
def _joint_far_queries(
    p_shares,
    p_grad,
    p_parts,
    heads,
    groups,
    height,
    width,
    prefix,
    tiles,
    blocks,
    chunks,
    inverse_unit,
    grad_batch,
    grad_head,
    grad_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_X: tl.constexpr,
    HALO: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the contribution of BLOCK_X queries of each row to a chunk of rows of keys, in columns
    far after them (side 0) or far before them (side 1).
    """
    A: tl.constexpr = 2 * HORIZON_Y + 1
    TILES: tl.constexpr = BLOCK_X // BLOCK_T
    i_side, i_block = tl.program_id(0) % 2, tl.program_id(0) // 2 % blocks
    i_chunk = tl.program_id(0) // 2 // blocks % chunks
    i_group = tl.program_id(0) // 2 // blocks // chunks
    top, shift = i_chunk * CHUNK, tl.where(i_side == 0, -HALO, HALO)
    p_grad = head(p_grad, i_group // heads, i_group % heads, grad_batch, grad_head)
    p_grad += prefix.to(tl.int64) * grad_token * 8
    p_shares += i_group.to(tl.int64) * height * A * width * SLOTS
    # A pair is a row of keys and a query; its share is of the outermost class of columns.
    o_k, o_i = pairs(ROWS, BLOCK_T, TILES)
    o_x = (i_block * TILES + o_k // ROWS) * BLOCK_T + shift + o_i
    o_k = o_k % ROWS
    # A query outside the grid is replaced by the nearest one inside, with a share of 0.
    o_class = tl.where(
        (o_x >= 0) & (o_x < width), tl.where(i_side == 0, 2 * HORIZON_X, 0), 2 * HORIZON_X + 1
    )
    o_share = tl.minimum(tl.maximum(o_x, 0), width - 1) * SLOTS + o_class
    o_tile = i_block * TILES + tl.arange(0, TILES)
    o_e, o_row = tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    o_query = o_tile[:, None] * BLOCK_T + shift + tl.arange(0, BLOCK_T)[None, :]  # [TILES, T]
    o_query = tl.minimum(tl.maximum(o_query, 0), width - 1)
    o_query = o_query[:, :, None] * (grad_token * 8) + o_e[None, None, :]
    b_sum = tl.zeros([TILES, ROWS, BLOCK_E], tl.float32)
    # Loop over the rows of queries within the horizon of a row of the chunk.
    first, end = tl.maximum(top - HORIZON_Y + 1, 0), tl.minimum(top + CHUNK + HORIZON_Y - 1, height)
    for step in range(0, end - first):
        y = first + step
        # The class of rows of each row of the product; the last two are the outermost classes.
        o_a = tl.minimum(tl.maximum(top + o_k - y, -HORIZON_Y), HORIZON_Y) + HORIZON_Y
        o_a = tl.where(o_k == CHUNK, 2 * HORIZON_Y, tl.where(o_k == CHUNK + 1, 0, o_a))
        # A row of queries counts for all keys below, or above, in one chunk only.
        m_a = (o_k != CHUNK) | (o_k < tl.where(y < top + CHUNK - HORIZON_Y + 1, ROWS, 0))
        m_a = m_a & ((o_k != CHUNK + 1) | (o_k < tl.where(y >= top + HORIZON_Y - 1, ROWS, 0)))
        p_row = p_shares + y.to(tl.int64) * (A * SLOTS) * width
        b_pairs = tl.load(p_row + (o_share + o_a * (width * SLOTS)), mask=m_a, other=0)
        p_queries = p_grad + y.to(tl.int64) * width * grad_token * 8 + o_query
        # The gradient is read unmodified, because shares include the division by the mass.
        b_grad = (
            tl.load(p_queries)
            if E == BLOCK_E
            else tl.load(p_queries, mask=(o_e < E)[None, None, :], other=0)
        )
        b_sum = tl.dot(
            as_operand(b_pairs, ROWS, BLOCK_T, TILES), b_grad, b_sum, input_precision=PRECISION
        )
    p_parts += ((i_side.to(tl.int64) * groups + i_group) * chunks + i_chunk) * tiles * ROWS * E
    p_parts = (
        p_parts + (o_tile[:, None] * ROWS + o_row[None, :])[:, :, None] * E + o_e[None, None, :]
    )
    tl.store(
        p_parts,
        b_sum * inverse_unit,
        mask=(o_tile < tiles)[:, None, None] & (o_e < E)[None, None, :],
    )


@kernel
def _joint_far_sums(
    p_parts,
    p_sums,
    groups,
    height,
    tiles,
    chunks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Write, for each tile of keys in a chunk of rows, the sum of the tiles of queries before it
    (side 0) or after it (side 1).
    """
    i_side, i_chunk = tl.program_id(0) % 2, tl.program_id(0) // 2 % chunks
    i_group = tl.program_id(0) // 2 // chunks
    i_sided = i_side.to(tl.int64) * groups + i_group
    o_k, o_e = tl.arange(0, ROWS), tl.arange(0, BLOCK_E)
    m_e, o_y = o_e < E, i_chunk * CHUNK + o_k
    m_sums = ((o_k < CHUNK) & (o_y < height))[:, None] & m_e[None, :]
    p_sums += i_sided * height * tiles * E
    p_parts += i_sided * chunks * tiles * ROWS * E
    b_sum = tl.zeros([ROWS, BLOCK_E], tl.float32)
    # Start at the end without far queries, and write each sum before adding the tile itself.
    for step in range(0, tiles):
        i_tile = tl.where(i_side == 0, step, tiles - 1 - step)
        tl.store(p_sums + (o_y * tiles + i_tile)[:, None] * E + o_e[None, :], b_sum, mask=m_sums)
        p_rows = p_parts + (i_chunk * tiles + i_tile) * ROWS * E
        b_sum += tl.load(
            p_rows + o_k[:, None] * E + o_e[None, :],
            mask=(o_k < CHUNK)[:, None] & m_e[None, :],
            other=0,
        )
        # Other chunks: add row CHUNK of the chunks above, and row CHUNK + 1 of the chunks below.
        for start in range(0, chunks, ROWS):
            o_c = start + o_k
            o_other = (o_c * tiles + i_tile) * ROWS + tl.where(o_c < i_chunk, CHUNK, CHUNK + 1)
            m_other = (o_c < chunks) & (o_c != i_chunk)
            b_others = tl.load(
                p_parts + o_other[:, None] * E + o_e[None, :],
                mask=m_other[:, None] & m_e[None, :],
                other=0,
            )
            b_sum += tl.sum(b_others, 0)[None, :]


def far_queries(shares: Tensor, grad: Tensor, grid: GridClasses, inverse_unit: float) -> Tensor:
    """Return the contribution of queries before and after the window of each tile of each row of
    keys, ``[2, B, h, H, tiles, e]``, float32.

    It is empty if a row is a single tile.

    Args:
        shares: the result of ``shares_of_classes``.
        grad: ``[B, h, N, e]``, the gradient of the mean, readable by kernels.
        inverse_unit: 1 over the unit of the shares.
    """
    (batch, heads, _, e), height, tiles = grad.shape, grid.height, launch.cdiv(grid.width, TILE)
    if tiles == 1:
        return grad.new_empty(2, batch, heads, height, 0, e, dtype=torch.float32)
    chunks = launch.cdiv(height, CHUNK.value)
    row = launch.launch_row("joint far queries", 0, e, grad.dtype, grad.device)
    blocks = launch.cdiv(grid.width, row["BLOCK_X"])
    parts = grad.new_empty(2, batch, heads, chunks, tiles, ROWS.value, e, dtype=torch.float32)
    sums = grad.new_empty(2, batch, heads, height, tiles, e, dtype=torch.float32)
    widths = dict(E=e, BLOCK_E=launch.block(e))
    launch.run(
        _joint_far_queries,
        (2 * blocks * chunks * batch * heads,),
        *(shares, grad, parts, heads, batch * heads, height, grid.width, grid.prefix),
        *(tiles, blocks, chunks, inverse_unit, *launch.octets(grad)),
        **row,
        **widths,
        BLOCK_T=TILE,
        HALO=grid.halo,
        SLOTS=grid.slots,
        HORIZON_Y=grid.horizon_y,
        HORIZON_X=grid.horizon_x,
        PRECISION=launch.precision(grad.dtype),
    )
    row = launch.launch_row("joint far sums", 0, e, torch.float32, grad.device)
    launch.run(
        _joint_far_sums,
        (2 * chunks * batch * heads,),
        parts,
        sums,
        batch * heads,
        height,
        tiles,
        chunks,
        **row,
        **widths,
    )
    return sums
