"""Kernels of ``Joint`` relative position on a full grid, forward, fused with the division by the
mass of all terms.

A program goes down a strip of the grid, some tiles of T queries wide. For each row of queries, it
computes the weights of all classes in one product. Then it reads one line of values (see
``key_lines.py``) after another. For each line, a tile gathers the weights of its pairs of queries
and keys from the weights of the classes. It multiplies them by the values on the matrix units.
Values outside the window of the tile are in the outermost classes. They enter as one sum per line
and side, for all lines in one product. The buffer of weights has the size that the programs of the
launch need; nothing of size N x C is in memory.

Weights are stored in units that half precision holds on any grid. For a query at (y, x), class
c = (a, b) has keys in ``rows(a, y)`` rows, with ``columns(b, x)`` keys in each. The line of an
outermost class is the mean of its rows. So the weight of an element of a line is the weight of one
key times ``rows``:

    "mean"    w_c rows / (rows columns) = w_c / columns(b, x)        in units of 1
    "sum"     w_c rows / M, stored as w_c rows / H                   in units of H/M

Source: Scaleformer (Favier and Dal'Maz Silva 2021), section 4, for one dimension; two dimensions
and the means are ours.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import (
    head,
    kernel,
    parts,
    phi,
    read,
    reciprocal,
    unit_of,
    write,
)
from visionattn.ops.position.kernels.grid_classes import TILE, GridClasses
from visionattn.ops.position.kernels.key_lines import (
    axis_keys,
    far_keys,
    line_at,
    lines_of,
    power_of_two,
)
from visionattn.ops.position.kernels.query_key_pairs import as_operand, class_of, pairs


class FromState(NamedTuple):
    """The content term as a state of kernelized attention: S ``[B, h, d, e]`` and Z ``[B, h, d]``,
    float32, divided by M, contiguous.
    """

    s: Tensor
    z: Tensor
    feature_map: str


class FromSums(NamedTuple):
    """The content term as sums of values ``[B, h, N, e]`` and of weights ``[B, h, N]`` for all
    tokens, float32, divided by M.
    """

    values: Tensor
    mass: Tensor


@triton.jit
def table_of_lines(
    p_table,
    b_z,
    i_chunk,
    DTYPE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
):
    """Return the table of LINES classes of rows, from ``i_chunk * LINES`` on, transposed:
    ``[D, LINES * SLOTS]`` in DTYPE.

    ``b_z [D]`` is put in free slots, after the last class of columns: rounded to DTYPE in class of
    rows 0, and its rounding error in class of rows 1. So the product that gives the weights of the
    classes also gives the mass of the content, from the same rounded features.
    """
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, LINES * SLOTS)
    o_a, o_b = i_chunk * LINES + o_c // SLOTS, o_c % SLOTS
    m_table = ((o_a <= 2 * HORIZON_Y) & (o_b <= 2 * HORIZON_X))[None, :] & (o_d < D)[:, None]
    p_classes = p_table + (o_a * (2 * HORIZON_X + 1) + o_b)[None, :] * D + o_d[:, None]
    b_table = tl.load(p_classes, mask=m_table, other=0).to(DTYPE)
    # The slot after the last class of columns is free in each class of rows; there are at least
    # two.
    m_z = o_b == 2 * HORIZON_X + 1
    b_high, b_low = parts(b_z, DTYPE)
    b_table = tl.where((m_z & (o_a == 0))[None, :], b_high[:, None], b_table)
    return tl.where((m_z & (o_a == 1))[None, :], b_low[:, None], b_table)


@triton.jit
def _put_weights(
    b_phi,
    b_table,
    i_chunk,
    p_weights,
    b_columns,
    b_content,
    y,
    height,
    row_scale,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    MEAN: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the weights of LINES classes of rows for the features ``b_phi [BLOCK_Q, D]`` of row
    ``y``, and return their mass ``[BLOCK_Q]``.

    ``b_columns [BLOCK_Q, SLOTS]`` depends on the number n of keys of a class in one row: with
    "mean" it is 1 / n (0 for n = 0), else n times ``GridClasses.unit``. ``b_content [1, SLOTS]`` is
    the unit of Z in the slot of Z, else 0.
    """
    BLOCK_Q: tl.constexpr = b_phi.shape[0]
    o_b, o_i = tl.arange(0, SLOTS), tl.arange(0, BLOCK_Q)
    o_a = i_chunk * LINES + tl.arange(0, LINES)
    # Weights of all queries and classes, including the slots of Z.
    b_w = tl.reshape(tl.dot(b_phi, b_table, input_precision=PRECISION), [BLOCK_Q, LINES, SLOTS])
    b_part = tl.zeros([BLOCK_Q, SLOTS], tl.float32)
    # The mass of the content, from the slots of Z in classes of rows 0 and 1.
    if MAP == "elu1":
        b_part += tl.sum(tl.where((o_a < 2)[None, :, None], b_w, 0), 1) * b_content
    # The number of rows of each class for row y.
    b_rows = tl.where(o_a <= 2 * HORIZON_Y, axis_keys(o_a, y, height, HORIZON_Y), 0)
    # "mean" counts each class with a key once, "sum" counts all of its keys.
    if MEAN:
        b_some = tl.sum(tl.where((b_rows > 0)[None, :, None], b_w, 0), 1)  # [BLOCK_Q, SLOTS]
        b_part += tl.where(b_columns > 0, b_some, 0)
        b_w *= b_columns[:, None, :]
    else:
        b_w *= (b_rows * row_scale)[None, :, None]
        b_part += tl.sum(b_w, 1) * b_columns
    # [lines, BLOCK_Q, SLOTS], in the dtype of the product that reads them.
    o_weight = (
        (o_a * BLOCK_Q)[None, :, None] * SLOTS + o_i[:, None, None] * SLOTS + o_b[None, None, :]
    )
    tl.store(p_weights + o_weight, b_w.to(p_weights.dtype.element_ty))
    return tl.sum(b_part, 1)


@triton.jit
def far_means(
    p_remainders,
    o_f,
    o_tile,
    y,
    i_group,
    groups,
    height,
    width,
    tiles,
    o_e,
    E: tl.constexpr,
    HORIZON_Y: tl.constexpr,
):
    """Read the remainders (``key_lines.Lines``) of the lines of row ``y`` for each tile,
    ``[TILES, 16, E]``.

    ``o_f`` is twice the class of rows, plus 0 for the sum before the window or 1 for the sum after
    it.
    """
    i_class, i_side = o_f // 2, o_f % 2
    i_row = y + i_class - HORIZON_Y
    # The outermost classes of rows have the remainders of means, above (1) or below (2); the other
    # classes have the remainders of rows (0).
    i_kind = tl.where(i_class == 0, 1, tl.where(i_class == 2 * HORIZON_Y, 2, 0))
    m_some = (i_class <= 2 * HORIZON_Y) & (i_row >= 0) & (i_row < height) & (o_tile < tiles)
    o_head = (i_kind.to(tl.int64) * groups + i_group) * height
    p_far = p_remainders + (((o_head + i_row) * tiles + o_tile) * 2 + i_side) * E
    return tl.load(
        p_far[:, :, None] + o_e[None, None, :],
        mask=m_some[:, :, None] & (o_e < E)[None, None, :],
        other=0,
    )


@kernel
def _joint_means(
    p_q,
    p_table,
    p_weights,
    p_v,
    p_means,
    p_remainders,
    p_content,
    p_content_mass,
    p_out,
    p_mass,
    heads,
    groups,
    tokens,
    height,
    width,
    prefix,
    blocks,
    tiles,
    strips,
    strip_rows,
    table_octets,
    row_scale,
    unit,
    far_unit,
    q_batch,
    q_head,
    q_token,
    v_batch,
    v_head,
    v_token,
    content_batch,
    content_head,
    content_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    LINES: tl.constexpr,
    SLOTS: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    MEAN: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the mean and the mass under content and relative term for a strip: ``strip_rows`` rows
    of ``BLOCK_Q`` queries, and ``BLOCK_E`` columns of the values.

    With ``MAP`` "" the content is given by sums instead of a state. Each program writes the weights
    of the classes of a row to its own part of ``p_weights``, ``[lines, BLOCK_Q, SLOTS]``, and
    gathers from it. This part is small enough for the L1 cache.
    """
    DTYPE: tl.constexpr = p_q.dtype.element_ty
    TILES: tl.constexpr = BLOCK_Q // BLOCK_T
    HALO: tl.constexpr = (KEYS - BLOCK_T) // 2
    CHUNKS: tl.constexpr = (2 * HORIZON_Y + LINES) // LINES
    FAR: tl.constexpr = 2 * (2 * HORIZON_Y + 1)
    # Position of the strip.
    E_BLOCKS: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    i_e, i_strip = tl.program_id(0) % E_BLOCKS, tl.program_id(0) // E_BLOCKS // blocks
    i_block = tl.program_id(0) // E_BLOCKS % blocks
    i_group, i_strip = i_strip // strips, i_strip % strips
    i_batch, i_head = i_group // heads, i_group % heads
    start = i_block * BLOCK_Q
    o_x = start + tl.arange(0, BLOCK_Q)
    o_d = tl.arange(0, BLOCK_D)
    o_e = i_e * BLOCK_E + tl.arange(0, BLOCK_E)
    m_x, m_d, m_e = o_x < width, o_d < D, o_e < E
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    p_table += i_head * table_octets * 8
    p_mass += i_group.to(tl.int64) * tokens
    # State and table are read once and serve all rows of the strip.
    b_z, b_unit_z = tl.zeros([BLOCK_D], tl.float32), 1.0
    if MAP == "":
        p_content = head(p_content, i_batch, i_head, content_batch, content_head)
        p_content_mass += i_group.to(tl.int64) * tokens
    else:
        p_s = p_content + i_group.to(tl.int64) * D * E + o_d[:, None] * E + o_e[None, :]
        b_s = tl.load(p_s, mask=m_d[:, None] & m_e[None, :], other=0)  # [D, E]
        b_z = tl.load(p_content_mass + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
        b_unit_s, b_unit_z = unit_of(b_s, DTYPE), unit_of(b_z[None, :], DTYPE)
        b_high, b_low = parts(b_s / b_unit_s, DTYPE)
        b_z /= b_unit_z
    b_table = table_of_lines(
        p_table, b_z if MAP == "elu1" else tl.zeros_like(b_z), 0, DTYPE, D, BLOCK_D, LINES, SLOTS,
        HORIZON_Y, HORIZON_X
    )  # fmt: skip
    # ``b_columns`` of ``_put_weights``, from the number of keys of each class in one row.
    o_b = tl.arange(0, SLOTS)[None, :]
    b_columns = tl.where(
        o_b <= 2 * HORIZON_X, axis_keys(o_b, o_x[:, None], width, HORIZON_X), 0
    )  # [BLOCK_Q, SLOTS]
    if MEAN:
        b_columns = tl.where(b_columns > 0, 1 / tl.maximum(b_columns, 1), 0)
    else:
        b_columns *= unit
    b_content = tl.where(o_b == 2 * HORIZON_X + 1, b_unit_z, 0.0)  # [1, SLOTS]
    # Addresses in the buffer of weights: its start, the weights of pairs in the window, and the
    # weights of the sums before and after the window.
    p_weights += tl.program_id(0).to(tl.int64) * CHUNKS * LINES * BLOCK_Q * SLOTS
    o_i, o_j = pairs(BLOCK_T, KEYS, TILES)
    p_pairs = p_weights + (o_i % 8 + o_i // BLOCK_T * BLOCK_T) * SLOTS
    p_pairs += class_of(o_j - HALO - o_i % BLOCK_T, HORIZON_X)
    p_pairs += o_i % BLOCK_T // 8 * 8 * SLOTS  # added separately: a compile-time constant
    o_i, o_f = pairs(BLOCK_T, 16, TILES)
    b_far_keys = far_keys(i_block * TILES + o_i // BLOCK_T, o_f % 2, width, BLOCK_T, HALO)
    b_far_scale = power_of_two(b_far_keys) / far_unit
    o_far = o_f // 2 * (BLOCK_Q * SLOTS) + o_i * SLOTS + o_f % 2 * (2 * HORIZON_X)
    o_tile = i_block * TILES + tl.arange(0, TILES)[:, None]  # [TILES, 1]
    o_keys = o_tile * BLOCK_T - HALO + tl.arange(0, KEYS)[None, :]  # [TILES, KEYS]
    m_keys = ((o_keys >= 0) & (o_keys < width))[:, :, None] & m_e[None, None, :]
    p_means += i_group.to(tl.int64) * height * width * E
    means_below = groups.to(tl.int64) * height * width * E
    # Loop over the rows of the strip, downwards.
    first_row = i_strip * strip_rows
    for step in range(0, tl.minimum(strip_rows, height - first_row)):
        y = first_row + step
        o_token = prefix + y * width + o_x
        # Compute the features of the row's queries and write the weights of all classes.
        b_q = read(p_q, o_token, q_token, o_d, m_x, D)  # [BLOCK_Q, D]
        b_phi = tl.where(m_d[None, :], phi(b_q, "elu1"), 0).to(DTYPE)
        tl.debug_barrier()  # all threads have read the weights of the previous row
        b_mass = _put_weights(
            b_phi, b_table, 0, p_weights, b_columns, b_content, y, height, row_scale,
            LINES, SLOTS, HORIZON_Y, MEAN, MAP, PRECISION,
        )  # fmt: skip
        # Classes beyond the first product: their table is read again for each row, for lack of
        # registers.
        for i_chunk in range(1, CHUNKS):
            b_more = table_of_lines(
                p_table, b_z, i_chunk, DTYPE, D, BLOCK_D, LINES, SLOTS, HORIZON_Y, HORIZON_X
            )
            b_mass += _put_weights(
                b_phi, b_more, i_chunk, p_weights, b_columns, b_content, y, height, row_scale,
                LINES, SLOTS, HORIZON_Y, MEAN, MAP, PRECISION,
            )  # fmt: skip
        tl.debug_barrier()  # threads read weights that other threads have written
        # The content: precomputed sums, or features times the state.
        if MAP == "":
            b_sum = read(p_content, o_token, content_token, o_e, m_x, E)  # [BLOCK_Q, E]
            b_mass += tl.load(p_content_mass + o_token, mask=m_x, other=0)
        else:
            if MAP != "elu1":
                b_features = tl.where(m_d[None, :], phi(b_q, MAP), 0)
                b_mass += tl.sum(b_features * b_z[None, :], 1) * b_unit_z
                b_phi = b_features.to(DTYPE)
            b_sum = tl.dot(b_phi, b_high, input_precision=PRECISION)
            if tl.float32 != DTYPE:
                b_sum = tl.dot(b_phi, b_low, b_sum, input_precision=PRECISION)
            b_sum *= b_unit_s
        # With "sum" all terms are added in units of H / M (see the module docstring).
        if not MEAN:
            b_sum *= 1 / unit
        b_sum = tl.reshape(b_sum, [TILES, BLOCK_T, BLOCK_E])
        # The windows of the tiles, line by line.
        first_class = tl.maximum(HORIZON_Y - y, 0)
        end_class = tl.minimum(height + HORIZON_Y - y, 2 * HORIZON_Y + 1)
        for i_line in range(0, end_class - first_class):
            i_class = first_class + i_line
            p_line, line_token = line_at(
                p_v, p_means, i_class, y + i_class - HORIZON_Y, prefix, width, v_token,
                means_below, E, HORIZON_Y,
            )  # fmt: skip
            # One weight per pair of query and key, gathered in the order of a left operand.
            b_pairs = as_operand(
                tl.load(p_pairs + i_class * (BLOCK_Q * SLOTS)), BLOCK_T, KEYS, TILES
            )
            p_line += start.to(tl.int64) * line_token * 8
            p_keys = p_line + (o_keys - start)[:, :, None] * (line_token * 8) + o_e[None, None, :]
            b_keys = tl.load(p_keys, mask=m_keys, other=0)  # [TILES, KEYS, E]
            b_sum = tl.dot(b_pairs, b_keys, b_sum, input_precision=PRECISION)
        # Outside the windows, for all lines at once: one sum before and one after each window.
        if tiles > 1:
            for first in range(0, FAR, 16):
                m_far = o_f < FAR - first
                b_pairs = tl.load(
                    p_weights + first // 2 * (BLOCK_Q * SLOTS) + o_far, mask=m_far, other=0
                ).to(tl.float32)
                b_pairs = as_operand((b_pairs * b_far_scale).to(DTYPE), BLOCK_T, 16, TILES)
                b_keys = far_means(
                    p_remainders, first + tl.arange(0, 16)[None, :], o_tile, y, i_group, groups,
                    height, width, tiles, o_e, E, HORIZON_Y,
                )  # fmt: skip
                b_far = tl.dot(b_pairs, b_keys, input_precision=PRECISION)
                b_sum += b_far if MEAN else b_far * far_unit
        # Divide by the mass of all terms; only the first block of columns writes the mass.
        b_inverse = reciprocal(b_mass) if MEAN else reciprocal(b_mass) * unit
        b_out = tl.reshape(b_sum, [BLOCK_Q, BLOCK_E]) * b_inverse[:, None]
        write(p_out, o_token, out_token, o_e, b_out, m_x, E)
        tl.store(p_mass + o_token, b_mass, mask=o_x < tl.where(i_e == 0, width, 0))


def _options_of_means(
    d: int, e: int, dtype: torch.dtype, device: torch.device, grid: GridClasses, feature_map: str
) -> dict[str, object]:
    """Return all compile-time values of ``_joint_means``: the row of ``launches.json``, with
    smaller blocks for wide horizons, and the other values.

    With a wider horizon a program holds more weights and more addresses per query.
    """
    row = dict(BLOCK_E=launch.block(e)) | launch.launch_row("joint means", d, e, dtype, device)
    if grid.slots > 8:
        row |= dict(BLOCK_E=min(row["BLOCK_E"], 32), BLOCK_Q=32, num_stages=1)
    if grid.halo > 8:
        row |= dict(num_warps=8)
    if grid.slots > 16 and dtype == torch.float32:
        row |= dict(BLOCK_E=16, BLOCK_Q=16, num_warps=8)
    return row | dict(
        HORIZON_Y=grid.horizon_y,
        HORIZON_X=grid.horizon_x,
        D=d,
        E=e,
        BLOCK_D=launch.block(d),
        BLOCK_T=TILE,
        KEYS=TILE + 2 * grid.halo,
        LINES=grid.lines_at_once,
        SLOTS=grid.slots,
        MEAN=grid.mean,
        MAP=feature_map,
        PRECISION=launch.precision(dtype),
    )


def joint_means(
    q: Tensor,
    table: Tensor,
    v: Tensor,
    content: FromState | FromSums,
    grid: GridClasses,
    out: Tensor,
    mass: Tensor,
) -> None:
    """Write the mean under content and relative term to ``out [B, h, N, e]``, and the mass to
    ``mass [B, h, N]``, for all patches.

    Args:
        q: ``[B, h, N, d]`` as passed to the attention, prefix first.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32, non-negative.
        v: ``[B, h, N, e]``, in the dtype of q.
        content: the content term's state or sums.
        out, mass: written in place; rows of prefix tokens are unchanged. The mass is float32,
            contiguous, in units of the number of keys M.
    """
    (batch, heads, tokens, e), d = v.shape, q.shape[3]
    q, v, table = launch.readable(q), launch.readable(v), table.contiguous()
    if isinstance(content, FromState):
        sums = content.s
        content_mass = content.z
        feature_map = content.feature_map
        strides = (0, 0, 0)
    else:
        sums = launch.readable(content.values)
        content_mass = content.mass.contiguous()
        feature_map = ""
        strides = launch.octets(sums)
    options = launch.remembered(_options_of_means, d, e, v.dtype, v.device, grid, feature_map)
    blocks = launch.cdiv(grid.width, options["BLOCK_Q"])
    e_blocks = launch.cdiv(e, options["BLOCK_E"])
    tiles = launch.cdiv(grid.width, TILE)
    resident = launch.resident_programs("joint means", d, e, v.dtype, v.device)
    # State and table are read once per strip: cut as few strips as keep the whole device busy.
    strips = launch.segments(grid.height, blocks * e_blocks * batch * heads, 1, resident, 1)
    strip_rows = max(1, launch.cdiv(grid.height, strips))
    strips = launch.cdiv(grid.height, strip_rows)  # none without rows
    programs, num_lines = e_blocks * blocks * strips * batch * heads, options["LINES"]
    chunks = launch.cdiv(2 * grid.horizon_y + 1, num_lines)
    # The buffer of weights has one part per program.
    weights = q.new_empty(programs, chunks * num_lines, options["BLOCK_Q"], options["SLOTS"])
    launch.run(
        _joint_means,
        (programs,),
        *(q, table, weights, v, *lines_of(v, grid), sums, content_mass, out, mass),
        *(heads, batch * heads, tokens, grid.height, grid.width, grid.prefix, blocks, tiles),
        *(strips, strip_rows, table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0),
        *(grid.row_scale, grid.unit, grid.far_unit),
        *(*launch.octets(q), *launch.octets(v), *strides, *launch.octets(out)),
        **options,
    )
