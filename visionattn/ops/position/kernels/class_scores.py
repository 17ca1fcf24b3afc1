"""Kernel of ``Joint`` relative position, backward: scores of classes.

Tiles and lines are as in the forward pass (``joint_forward.py``). For a tile of queries, the
product of g, the gradient of the mean, and the values of a line gives a score for each pair; scores
are summed by class. Values outside the window of the tile enter as one sum per line and side. The
score s_c of a class is the product of g and the mean of its values with "mean", or their sum with
"sum", in the units of ``joint_forward.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import head, kernel, read
from visionattn.ops.position.kernels.grid_classes import TILE, GridClasses
from visionattn.ops.position.kernels.joint_forward import far_means
from visionattn.ops.position.kernels.key_lines import (
    axis_keys,
    far_keys,
    line_at,
    lines_of,
    power_of_two,
)


@triton.jit
def _tiles_of(
    p_x, o_n, x_token, o_e, width, TILES: tl.constexpr, BLOCK_T: tl.constexpr, E: tl.constexpr
):
    """Read rows ``o_n`` of x, in tiles ``[TILES, T, E]``."""
    b_x = read(p_x, o_n, x_token, o_e, o_n < width, E)
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
    """Write the scores of all classes for ``BLOCK_Q`` queries of a row, in tiles of ``BLOCK_T``."""
    TILES: tl.constexpr = BLOCK_Q // BLOCK_T
    HALO: tl.constexpr = (KEYS - BLOCK_T) // 2
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    COLUMNS: tl.constexpr = 2 * HORIZON_X + 1
    i_block, i_row = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    y, i_group = i_row % height, i_row // height
    i_batch, i_head = i_group // heads, i_group % heads
    start = i_block * BLOCK_Q
    o_e = tl.arange(0, BLOCK_E)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    p_grad += (prefix + y * width).to(tl.int64) * grad_token * 8
    o_q = start + tl.arange(0, BLOCK_Q)
    # If one block covers all columns, the gradient stays in registers for all lines.
    b_grad = _tiles_of(p_grad, o_q, grad_token, o_e, width, TILES, BLOCK_T, E)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_means += i_group.to(tl.int64) * height * width * E
    means_below = groups.to(tl.int64) * height * width * E
    # Queries and keys of the tiles, and the number of keys per row in the outermost classes of
    # columns.
    o_tile, o_i = i_block * TILES + tl.arange(0, TILES), tl.arange(0, BLOCK_T)
    o_x = o_tile[:, None] * BLOCK_T + o_i[None, :]  # [TILES, T]
    o_keys = o_tile[:, None] * BLOCK_T - HALO + tl.arange(0, KEYS)[None, :]  # [TILES, KEYS]
    o_apart = (tl.arange(0, KEYS) - HALO)[None, :] - o_i[:, None]  # [T, KEYS]
    b_before = axis_keys(0, o_x, width, HORIZON_X)
    b_after = axis_keys(2 * HORIZON_X, o_x, width, HORIZON_X)
    p_scores += i_row.to(tl.int64) * width * PADDED
    p_first = p_scores + o_x * PADDED
    # Within the horizon, a class has a single key per line: its score is stored directly.
    p_window = p_first[:, :, None] + (o_apart + HORIZON_X)[None, :, :]
    m_window = (o_apart > -HORIZON_X) & (o_apart < HORIZON_X)
    m_window = m_window[None, :, :] & (o_x < width)[:, :, None]
    for i_class in range(0, 2 * HORIZON_Y + 1):
        num_rows = axis_keys(i_class, y, height, HORIZON_Y)
        p_line, line_token = line_at(
            p_v, p_means, i_class, y + i_class - HORIZON_Y, prefix, width, v_token, means_below, E,
            HORIZON_Y,
        )  # fmt: skip
        p_line += start.to(tl.int64) * line_token * 8
        p_keys = p_line + (o_keys - start)[:, :, None] * (line_token * 8) + o_e[None, None, :]
        m_keys = (o_keys >= 0) & (o_keys < tl.where(num_rows > 0, width, 0))
        # Scores of the keys in the tile's window, summed over blocks of columns.
        b_s = tl.zeros([TILES, BLOCK_T, KEYS], tl.float32)
        for i_e in tl.static_range(E_BLOCKS):
            if E_BLOCKS > 1:
                b_grad = _tiles_of(
                    p_grad, o_q, grad_token, i_e * BLOCK_E + o_e, width, TILES, BLOCK_T, E
                )
            m_line = m_keys[:, :, None] & (i_e * BLOCK_E + o_e < E)[None, None, :]
            b_keys = tl.load(p_keys + i_e * BLOCK_E, mask=m_line, other=0)  # [TILES, KEYS, E]
            b_s = tl.dot(b_grad, tl.permute(b_keys, [0, 2, 1]), b_s, input_precision=PRECISION)
        # Keys at or beyond the horizon on either side are in the outermost classes: sum their
        # scores.
        b_first = tl.sum(tl.where((o_apart <= -HORIZON_X)[None, :, :], b_s, 0), 2)  # [TILES, T]
        b_last = tl.sum(tl.where((o_apart >= HORIZON_X)[None, :, :], b_s, 0), 2)
        # "mean": divide by the number of keys of the class in a row, and mark classes without keys.
        # "sum": multiply by the number of rows whose mean the line is.
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
    # Outside the windows, for all lines at once: one sum before and one after each tile's window.
    if tiles > 1:
        tl.debug_barrier()  # threads add to scores that other threads have written
        for first in range(0, 2 * (2 * HORIZON_Y + 1), 16):
            o_f = first + tl.arange(0, 16)[None, :]
            b_far = tl.zeros([TILES, BLOCK_T, 16], tl.float32)
            for i_e in tl.static_range(E_BLOCKS):
                o_columns = i_e * BLOCK_E + o_e
                if E_BLOCKS > 1:
                    b_grad = _tiles_of(p_grad, o_q, grad_token, o_columns, width, TILES, BLOCK_T, E)
                b_keys = far_means(
                    p_remainders, o_f, o_tile[:, None], y, i_group, groups, height, width, tiles,
                    o_columns, E, HORIZON_Y,
                )  # fmt: skip
                b_far = tl.dot(
                    b_grad, tl.permute(b_keys, [0, 2, 1]), b_far, input_precision=PRECISION
                )
            # Undo the power of two by which the remainders were divided, in float32.
            b_scale = power_of_two(far_keys(o_tile[:, None], o_f % 2, width, BLOCK_T, HALO))[
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


def scores_of_classes(grad: Tensor, v: Tensor, grid: GridClasses) -> Tensor:
    """Return the scores of classes, ``[B, h, H*W, C padded]``, float32; with "mean", minus infinity
    for a class without keys.
    """
    (batch, heads, _, e), groups = v.shape, v.shape[0] * v.shape[1]
    row = launch.launch_row("joint scores", 0, e, v.dtype, v.device)
    if grid.halo > 8:  # a wider window has more pairs per query
        row = row | dict(BLOCK_Q=row["BLOCK_Q"] // 2)
    lines, patches = lines_of(v, grid), grid.height * grid.width
    scores = v.new_empty(batch, heads, patches, grid.padded_classes, dtype=torch.float32)
    blocks, tiles = launch.cdiv(grid.width, row["BLOCK_Q"]), launch.cdiv(grid.width, TILE)
    sizes = heads, groups, grid.height, grid.width, grid.prefix, blocks, tiles, grid.row_scale
    launch.run(
        _joint_scores,
        (blocks * grid.height * groups,),
        *(grad, v, *lines, scores, *sizes, *launch.octets(grad), *launch.octets(v)),
        **dict(BLOCK_E=launch.block(e)) | row,
        **grid.horizons(),
        E=e,
        BLOCK_T=TILE,
        KEYS=TILE + 2 * grid.halo,
        MEAN=grid.mean,
        PRECISION=launch.precision(v.dtype),
    )
    return scores
