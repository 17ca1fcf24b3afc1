"""Kernels of ``Joint`` relative position, backward: the gradient of the values.

The kernels mirror the forward pass with queries and keys exchanged. A program goes down a strip of
the grid, some tiles of T keys wide. For each row of keys it reads the rows of queries within the
horizon one after another. For each of them it multiplies the shares of all pairs
(``class_shares.py``) by the gradient of the mean on the matrix units. Queries in columns outside
the window of a tile add one vector per tile (``far_queries.py``). Rows of queries beyond the
horizon add running sums over rows:

    from above    accumulated on the way down: row y - Ry of queries counts for all rows of keys
                  from y on
    from below    accumulated in a first pass up the same strip, and stored for each row
    other strips  a total per strip and direction

No sum is a difference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import head, kernel, write
from visionattn.ops.position.kernels.class_shares import UNIT, shares_of_classes
from visionattn.ops.position.kernels.far_queries import far_queries
from visionattn.ops.position.kernels.grid_classes import TILE, GridClasses
from visionattn.ops.position.kernels.query_key_pairs import as_operand, class_of, pairs


@triton.jit
def _pairs_and_queries(
    start,
    width,
    token_octets,
    o_e,
    BLOCK_T: tl.constexpr,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_X: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Return two offsets for each pair, for the keys from ``start`` on.

    The first is the offset of the share, within one row of queries and class of rows. The second is
    the offset of the query in a row of the gradient.

    A query outside the grid is replaced by the nearest one inside, with a share of 0 from the slot
    after the last class.
    """
    HALO: tl.constexpr = (QUERIES - BLOCK_T) // 2
    o_j, o_i = pairs(BLOCK_T, QUERIES, TILES)
    o_x = start + o_j // BLOCK_T * BLOCK_T - HALO + o_i
    o_class = tl.where(
        (o_x >= 0) & (o_x < width),
        class_of(o_j % BLOCK_T + HALO - o_i, HORIZON_X),
        2 * HORIZON_X + 1,
    )
    o_pairs = tl.minimum(tl.maximum(o_x, 0), width - 1) * SLOTS + o_class
    o_x = (
        start + tl.arange(0, TILES)[:, None] * BLOCK_T - HALO + tl.arange(0, QUERIES)[None, :]
    )  # [TILES, QUERIES]
    o_x = tl.minimum(tl.maximum(o_x, 0), width - 1)
    # Offsets of shares are in bytes and unsigned: they stay in one register each for all rows.
    o_pairs = (o_pairs * BYTES).to(tl.uint32)
    return o_pairs, o_x[:, :, None] * (token_octets * 8) + o_e[None, None, :]


@triton.jit
def _add_line(
    b_sum,
    p_shares,
    o_pairs,
    p_grad,
    o_queries,
    o_e,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    QUERIES: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return ``b_sum [TILES, T, E]`` of keys plus the contribution of one row of queries, whose
    shares in the right class of rows begin at ``p_shares``.
    """
    BYTE: tl.constexpr = tl.pointer_type(tl.uint8)
    # Only the start address changes from row to row; the offsets of pairs stay in registers.
    p_pairs = (p_shares.to(BYTE, bitcast=True) + o_pairs).to(p_shares.dtype, bitcast=True)
    b_pairs = as_operand(tl.load(p_pairs), BLOCK_T, QUERIES, TILES)
    if E % BLOCK_E == 0:
        b_grad = tl.load(p_grad + o_queries)  # [TILES, QUERIES, E]
    else:
        b_grad = tl.load(p_grad + o_queries, mask=(o_e < E)[None, None, :], other=0)
    return tl.dot(b_pairs, b_grad, b_sum, input_precision=PRECISION)


@kernel
def _joint_rows_below_backward(
    p_shares,
    p_grad,
    p_below,
    p_totals,
    heads,
    groups,
    height,
    width,
    prefix,
    blocks,
    strips,
    strip_rows,
    inverse_unit,
    grad_batch,
    grad_head,
    grad_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go up a strip, and write for each row the contribution of rows of queries beyond the horizon
    below.

    The contribution is a running sum from the last row of the strip. Also write two totals, which
    complete the sums of other strips: for strips below (0), and for strips above (1).
    """
    A: tl.constexpr = 2 * HORIZON_Y + 1
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    TILES: tl.constexpr = BLOCK_K // BLOCK_T
    BYTES: tl.constexpr = p_shares.dtype.element_ty.primitive_bitwidth // 8
    i_e, i_strip = tl.program_id(0) % E_BLOCKS, tl.program_id(0) // E_BLOCKS // blocks
    start = tl.program_id(0) // E_BLOCKS % blocks * BLOCK_K
    i_group, i_strip = i_strip // strips, i_strip % strips
    o_x, o_e = start + tl.arange(0, BLOCK_K), i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    m_out = (o_x < width)[:, None] & (o_e < E)[None, :]
    o_pairs, o_queries = _pairs_and_queries(
        start, width, grad_token, o_e, BLOCK_T, QUERIES, TILES, SLOTS, HORIZON_X, BYTES
    )
    p_grad = head(p_grad, i_group // heads, i_group % heads, grad_batch, grad_head)
    p_grad += prefix.to(tl.int64) * grad_token * 8
    p_shares += i_group.to(tl.int64) * height * A * width * SLOTS
    p_below += i_group.to(tl.int64) * height * width * E
    b_from_above = tl.zeros([TILES, BLOCK_T, BLOCK_E], tl.float32)
    b_from_below = tl.zeros([TILES, BLOCK_T, BLOCK_E], tl.float32)
    first_row = i_strip * strip_rows
    num_rows = tl.minimum(strip_rows, height - first_row)
    shares_row, grad_row = width.to(tl.int64) * A * SLOTS, width.to(tl.int64) * grad_token * 8
    # From the last row of the strip up. Row y + Ry of queries counts for row y and all rows above,
    # so it is added before row y is written.
    for step in range(0, num_rows):
        y = first_row + num_rows - 1 - step
        if y + HORIZON_Y < height:
            b_from_below = _add_line(
                b_from_below, p_shares + (y + HORIZON_Y) * shares_row, o_pairs,
                p_grad + (y + HORIZON_Y) * grad_row, o_queries, o_e, E, BLOCK_E, BLOCK_T, QUERIES,
                TILES, PRECISION,
            )  # fmt: skip
        b_out = tl.reshape(b_from_below, [BLOCK_K, BLOCK_E]) * inverse_unit
        p_out = p_below + (y * width + o_x).to(tl.int64)[:, None] * E + o_e[None, :]
        tl.store(p_out, b_out.to(p_below.dtype.element_ty), mask=m_out)
        # Row y - Ry of queries counts for all rows from y on: add it to the total for the strips
        # below.
        if y >= HORIZON_Y:
            p_line = p_shares + (y - HORIZON_Y) * shares_row + 2 * HORIZON_Y * width * SLOTS
            b_from_above = _add_line(
                b_from_above, p_line, o_pairs, p_grad + (y - HORIZON_Y) * grad_row, o_queries, o_e,
                E, BLOCK_E, BLOCK_T, QUERIES, TILES, PRECISION,
            )  # fmt: skip
    # Totals are stored as [2, B, h, strips, W, E]: first from above, then from below.
    p_totals += (
        (i_group.to(tl.int64) * strips + i_strip) * width * E + o_x[:, None] * E + o_e[None, :]
    )
    tl.store(p_totals, tl.reshape(b_from_above, [BLOCK_K, BLOCK_E]), mask=m_out)
    p_totals += groups.to(tl.int64) * strips * width * E
    tl.store(p_totals, tl.reshape(b_from_below, [BLOCK_K, BLOCK_E]), mask=m_out)


@kernel
def _joint_values_backward(
    p_shares,
    p_grad,
    p_below,
    p_totals,
    p_far,
    p_content,
    p_dv,
    heads,
    groups,
    height,
    width,
    prefix,
    tiles,
    blocks,
    strips,
    strip_rows,
    inverse_unit,
    grad_batch,
    grad_head,
    grad_token,
    content_batch,
    content_head,
    content_token,
    dv_batch,
    dv_head,
    dv_token,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go down a strip, and write the gradient of its values from content and relative term."""
    A: tl.constexpr = 2 * HORIZON_Y + 1
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    TILES: tl.constexpr = BLOCK_K // BLOCK_T
    BYTES: tl.constexpr = p_shares.dtype.element_ty.primitive_bitwidth // 8
    i_e, i_strip = tl.program_id(0) % E_BLOCKS, tl.program_id(0) // E_BLOCKS // blocks
    i_block = tl.program_id(0) // E_BLOCKS % blocks
    i_group, i_strip = i_strip // strips, i_strip % strips
    i_batch, i_head, start = i_group // heads, i_group % heads, i_block * BLOCK_K
    o_x, o_e = start + tl.arange(0, BLOCK_K), i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    m_x, m_e = o_x < width, o_e < E
    m_out = m_x[:, None] & m_e[None, :]
    o_pairs, o_queries = _pairs_and_queries(
        start, width, grad_token, o_e, BLOCK_T, QUERIES, TILES, SLOTS, HORIZON_X, BYTES
    )
    p_grad = (
        head(p_grad, i_batch, i_head, grad_batch, grad_head) + prefix.to(tl.int64) * grad_token * 8
    )
    p_content = head(p_content, i_batch, i_head, content_batch, content_head)
    p_dv = head(p_dv, i_batch, i_head, dv_batch, dv_head)
    p_shares += i_group.to(tl.int64) * height * A * width * SLOTS
    p_below += i_group.to(tl.int64) * height * width * E
    o_tile = i_block * TILES + tl.arange(0, TILES)
    m_far = (o_tile < tl.where(tiles > 1, tiles, 0))[:, None] & m_e[
        None, :
    ]  # one tile has no far queries
    p_far += i_group.to(tl.int64) * height * tiles * E + o_tile[:, None] * E + o_e[None, :]
    far_after = groups.to(tl.int64) * height * tiles * E
    # Contributions of the strips above and below to all rows of this strip.
    b_beyond = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    p_totals += i_group.to(tl.int64) * strips * width * E + o_x[:, None] * E + o_e[None, :]
    # Add the first total of each strip above and the second of each strip below, in a fixed order.
    for other in range(0, strips):
        i_other = tl.where(other > i_strip, groups, 0).to(tl.int64) * strips + other
        m_other = m_out & (o_e < tl.where(other != i_strip, E, 0))[None, :]
        b_beyond += tl.load(p_totals + i_other * width * E, mask=m_other, other=0)
    b_beyond = tl.reshape(b_beyond, [TILES, BLOCK_T, BLOCK_E])
    o_t = tl.arange(0, BLOCK_T)
    o_keys = start + tl.arange(0, TILES)[:, None] * BLOCK_T + o_t[None, :]
    m_keys = (o_keys < width)[:, :, None] & m_e[None, None, :]
    b_unit = tl.where(o_t[:, None] == o_t[None, :], 1 / inverse_unit, 0.0).to(p_dv.dtype.element_ty)
    b_unit = tl.broadcast_to(b_unit[None, :, :], [TILES, BLOCK_T, BLOCK_T])
    # From one row of queries to the next, the class of rows of the same row of keys decreases by 1.
    line_step, grad_row = width.to(tl.int64) * (A - 1) * SLOTS, width.to(tl.int64) * grad_token * 8
    first_row = i_strip * strip_rows
    for step in range(0, tl.minimum(strip_rows, height - first_row)):
        y = first_row + step
        # Row y - Ry of queries counts for this row and all rows below.
        if y >= HORIZON_Y:
            p_line = p_shares + (y - HORIZON_Y) * line_step + (y + HORIZON_Y) * width * SLOTS
            b_beyond = _add_line(
                b_beyond, p_line, o_pairs, p_grad + (y - HORIZON_Y) * grad_row, o_queries, o_e, E,
                BLOCK_E, BLOCK_T, QUERIES, TILES, PRECISION,
            )  # fmt: skip
        # The gradient from the content, and the contribution from rows beyond the horizon below.
        o_place = y * width + o_keys
        p_keys = (
            p_content
            + (prefix + o_place).to(tl.int64)[:, :, None] * (content_token * 8)
            + o_e[None, None, :]
        )
        b_content = tl.load(p_keys, mask=m_keys, other=0)  # [TILES, T, E]
        b_below = tl.load(
            p_below + o_place.to(tl.int64)[:, :, None] * E + o_e[None, None, :],
            mask=m_keys,
            other=0,
        )
        if tl.float32 == p_dv.dtype.element_ty:
            b_sum = b_beyond + (b_content + b_below) * (1 / inverse_unit)
        else:
            # Products with a scaled identity matrix add them with fewer instructions than a
            # conversion to float32.
            b_sum = tl.dot(b_unit, b_content, b_beyond, input_precision=PRECISION)
            b_sum = tl.dot(b_unit, b_below, b_sum, input_precision=PRECISION)
        # The rows of queries within the horizon.
        first, end = tl.maximum(y - HORIZON_Y + 1, 0), tl.minimum(y + HORIZON_Y, height)
        p_line = p_shares + first * line_step + (y + HORIZON_Y) * width * SLOTS
        p_row = p_grad + first * grad_row
        for _ in range(0, end - first):
            b_sum = _add_line(
                b_sum, p_line, o_pairs, p_row, o_queries, o_e, E, BLOCK_E, BLOCK_T, QUERIES, TILES,
                PRECISION
            )  # fmt: skip
            p_line += line_step
            p_row += grad_row
        # Queries before and after the window: the same vector for each key of the tile.
        p_vectors = p_far + y.to(tl.int64) * tiles * E
        b_far = tl.load(p_vectors, mask=m_far, other=0) + tl.load(
            p_vectors + far_after, mask=m_far, other=0
        )
        b_dv = b_sum * inverse_unit + b_far[:, None, :]
        o_token = prefix + y * width + o_x
        write(p_dv, o_token, dv_token, o_e, tl.reshape(b_dv, [BLOCK_K, BLOCK_E]), m_x, E)


def _row_of_values(
    e: int, dtype: torch.dtype, device: torch.device, grid: GridClasses
) -> dict[str, int]:
    """Return the row of ``launches.json``, with narrower blocks of columns for wide horizons, where
    a program holds more pairs.
    """
    row = dict(BLOCK_E=launch.block(e)) | launch.launch_row(
        "joint values backward", 0, e, dtype, device
    )
    if grid.halo > 8:
        row |= dict(BLOCK_E=min(row["BLOCK_E"], 32))
    return row


def values_backward(
    q: Tensor, table: Tensor, grad: Tensor, mass: Tensor, grid: GridClasses, dv: Tensor
) -> None:
    """Add the relative term's gradient of the values to ``dv [B, h, N, e]``, for
    ``grad [B, h, N, e]`` of the mean.

    ``q``, ``table`` and ``mass`` are as for ``shares_of_classes``; kernels must be able to read all
    of them.
    """
    batch, heads, tokens, e = grad.shape
    groups, height, width = batch * heads, grid.height, grid.width
    row = _row_of_values(e, grad.dtype, grad.device, grid)
    blocks, e_blocks = launch.cdiv(width, row["BLOCK_K"]), launch.cdiv(e, row["BLOCK_E"])
    resident = launch.resident_programs("joint values backward", 0, e, grad.dtype, grad.device)
    strips = launch.segments(height, blocks * e_blocks * groups, 1, resident, 1)
    strip_rows = max(1, launch.cdiv(height, strips))
    strips = launch.cdiv(height, strip_rows)  # none without rows
    options = row | dict(E=e, BLOCK_T=TILE, QUERIES=TILE + 2 * grid.halo, SLOTS=grid.slots)
    options |= dict(
        HORIZON_Y=grid.horizon_y, HORIZON_X=grid.horizon_x, PRECISION=launch.precision(grad.dtype)
    )
    # First the shares, then the sums of far queries, then the strips: up, and down into dv.
    shares = shares_of_classes(q, table, mass, grid)
    far = far_queries(shares, grad, grid, 1 / UNIT)
    below = grad.new_empty(batch, heads, height, width, e)
    totals = grad.new_empty(2, batch, heads, strips, width, e, dtype=torch.float32)
    strip = blocks, strips, strip_rows, 1 / UNIT
    programs = (e_blocks * blocks * strips * groups,)
    launch.run(
        _joint_rows_below_backward,
        programs,
        *(shares, grad, below, totals, heads, groups, height, width, grid.prefix, *strip),
        *launch.octets(grad),
        **options,
    )
    launch.run(
        _joint_values_backward,
        programs,
        *(shares, grad, below, totals, far, dv, dv, heads, groups, height, width, grid.prefix),
        *(launch.cdiv(width, TILE), *strip),
        *(*launch.octets(grad), *launch.octets(dv), *launch.octets(dv)),
        **options,
    )
