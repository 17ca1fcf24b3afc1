"""Kernels of ``Joint`` relative position on a full grid, forward, fused with the division by the mass of all terms.

A program takes a tile of T queries of one row, makes the weights of their classes, and reads one line of keys (see
``joint_lines.py``) after another: the weights of its pairs are gathered from those of the classes, window and tails alike, and
multiplied with the keys on the matrix units; what lies further away is of the outermost classes and comes as one sum. Nothing of
size N x C x e exists.

Weights are kept in units in which half precision holds them on any grid. A line of several rows is their mean, so the weight of a
key of a line is ``w_c rows(a, y)`` times that of one key of the class:

    "mean"    w_c rows / (rows columns) = w_c / columns(b, x)        in units of 1
    "sum"     w_c rows / M, kept as w_c rows / H                     in units of H/M

Source: Scaleformer (Favier and Dal'Maz Silva 2021), section 4, for one dimension; two dimensions and the means are ours.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.triton import launch
from visionattn.ops.triton.joint_lines import axis_keys, line_at, lines_of, pair_weights
from visionattn.ops.triton.joint_place import Place
from visionattn.ops.triton.language import head, kernel, phi, rows


class FromState(NamedTuple):
    """Content of kernelized attention: S ``[B, h, d, e]`` and Z ``[B, h, d]``, float32, divided by M."""

    s: Tensor
    z: Tensor
    feature_map: str


class FromSums(NamedTuple):
    """Content as sums of values ``[B, h, N, e]`` and of weights ``[B, h, N]`` of all tokens, float32, divided by M."""

    values: Tensor
    mass: Tensor


@triton.jit
def _weights_of_classes(
    b_q,
    p_table,
    o_y,
    o_x,
    height,
    width,
    row_scale,
    unit,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights ``[N, C]`` of all classes and their mass ``[N]``, float32, of queries ``b_q [N, D]``.

    ``o_y`` is their row, a number or ``[N, 1]``, and ``o_x [N, 1]`` their column.
    """
    COLUMNS: tl.constexpr = 2 * HORIZON_X + 1
    o_d, o_c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    m_d, m_c = o_d < D, o_c < (2 * HORIZON_Y + 1) * COLUMNS
    b_table = tl.load(p_table + o_c[None, :] * D + o_d[:, None], mask=m_c[None, :] & m_d[:, None], other=0)  # [D, C]
    b_phi = tl.where(m_d[None, :], phi(b_q, "elu1"), 0)
    b_w = tl.dot(b_phi.to(b_q.dtype), b_table.to(b_q.dtype), input_precision=PRECISION)
    b_rows = axis_keys((o_c // COLUMNS)[None, :], o_y, height, HORIZON_Y)
    b_columns = axis_keys((o_c % COLUMNS)[None, :], o_x, width, HORIZON_X)
    m_w = m_c[None, :] & (b_rows * b_columns > 0)
    if MEAN:
        b_mass = tl.sum(tl.where(m_w, b_w, 0), 1)
        b_w = tl.where(m_w, b_w / tl.where(m_w, b_columns, 1), 0)
    else:
        b_w = tl.where(m_w, b_w * b_rows * row_scale, 0)
        b_mass = tl.sum(b_w * b_columns, 1) * unit
    return b_w, b_mass


@kernel
def _class_weights(
    p_q,
    p_table,
    p_weights,
    heads,
    height,
    width,
    prefix,
    blocks,
    table_octets,
    row_scale,
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
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Weights of all classes for one block of patches."""
    i_block, i_group = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    i_batch, i_head = i_group // heads, i_group % heads
    o_n, o_d, o_c = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_C)
    m_n = o_n < height * width
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    b_q = tl.load(rows(p_q, prefix + o_n, q_token, o_d), mask=m_n[:, None] & (o_d < D)[None, :], other=0)  # [N, D]
    b_w, _ = _weights_of_classes(
        b_q, p_table + i_head * table_octets * 8, (o_n // width)[:, None], (o_n % width)[:, None], height, width, row_scale, 1.0,
        D, BLOCK_D, BLOCK_C, HORIZON_Y, HORIZON_X, MEAN, PRECISION,
    )  # fmt: skip
    p_weights += (i_group.to(tl.int64) * height * width + o_n)[:, None] * PADDED + o_c[None, :]
    tl.store(p_weights, b_w.to(p_weights.dtype.element_ty), mask=m_n[:, None] & (o_c < PADDED)[None, :])


@triton.jit
def _add_line(
    b_sum,
    p_line,
    token_octets,
    p_weights,
    p_remainders,
    start,
    width,
    tiles,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one line of keys to ``b_sum [T, E]`` of the queries from column ``start`` on; all addresses of column 0 of the row."""
    o_i = start + tl.arange(0, BLOCK_T)
    o_j = start - BLOCK_T // 2 + tl.arange(0, 2 * BLOCK_T)
    o_e = tl.arange(0, BLOCK_E)
    m_i, m_e = o_i < width, o_e < E
    b_weights = pair_weights(p_weights, o_i, m_i, o_j, PADDED, HORIZON_X)  # [T, 2T]
    m_keys = ((o_j >= 0) & (o_j < width))[:, None] & m_e[None, :]
    b_keys = tl.load(rows(p_line, o_j, token_octets, o_e), mask=m_keys, other=0)  # [2T, E]
    b_sum += tl.dot(b_weights, b_keys, input_precision=PRECISION)
    if tiles > 1:
        b_before = tl.load(p_weights + o_i * PADDED, mask=m_i, other=0).to(tl.float32)
        b_after = tl.load(p_weights + o_i * PADDED + 2 * HORIZON_X, mask=m_i, other=0).to(tl.float32)
        b_sum += b_before[:, None] * tl.load(p_remainders + o_e, mask=m_e, other=0)[None, :]
        b_sum += b_after[:, None] * tl.load(p_remainders + E + o_e, mask=m_e, other=0)[None, :]
    return b_sum


@kernel
def _means(
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
    tiles,
    table_octets,
    row_scale,
    unit,
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
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HORIZON_Y: tl.constexpr,
    HORIZON_X: tl.constexpr,
    PADDED: tl.constexpr,
    MEAN: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Mean and mass under content and relative term of one tile of queries; ``MAP`` "" reads sums instead of a state.

    The weights of the tile's classes go through ``p_weights``: to gather them again from there is to read the first cache.
    """
    i_tile, i_row = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    y, i_group = i_row % height, i_row // height
    i_batch, i_head = i_group // heads, i_group % heads
    start = i_tile * BLOCK_T
    o_x, o_d, o_e, o_c = start + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    m_x, m_d, m_e = o_x < width, o_d < D, o_e < E
    o_token = prefix + y * width + o_x
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    b_q = tl.load(rows(p_q, o_token, q_token, o_d), mask=m_x[:, None] & m_d[None, :], other=0)  # [T, D]
    b_w, b_mass = _weights_of_classes(
        b_q, p_table + i_head * table_octets * 8, y, o_x[:, None], height, width, row_scale, unit,
        D, BLOCK_D, BLOCK_C, HORIZON_Y, HORIZON_X, MEAN, PRECISION,
    )  # fmt: skip
    p_row = p_weights + i_row.to(tl.int64) * width * PADDED
    p_tile = p_row + o_x[:, None] * PADDED + o_c[None, :]
    tl.store(p_tile, b_w.to(p_weights.dtype.element_ty), mask=m_x[:, None] & (o_c < PADDED)[None, :])
    tl.debug_barrier()  # the threads read what others have written
    m_out = m_x[:, None] & m_e[None, :]
    if MAP == "":
        p_content = head(p_content, i_batch, i_head, content_batch, content_head)
        b_sum = tl.load(rows(p_content, o_token, content_token, o_e), mask=m_out, other=0)  # [T, E]
        b_mass += tl.load(p_content_mass + i_group.to(tl.int64) * tokens + o_token, mask=m_x, other=0)
    else:
        p_s = p_content + i_group.to(tl.int64) * D * E + o_d[:, None] * E + o_e[None, :]
        b_s = tl.load(p_s, mask=m_d[:, None] & m_e[None, :], other=0)  # [D, E]
        b_z = tl.load(p_content_mass + i_group.to(tl.int64) * D + o_d, mask=m_d, other=0)
        b_phi = tl.where(m_d[None, :], phi(b_q, MAP), 0)
        b_sum = tl.dot(b_phi.to(b_q.dtype), b_s.to(b_q.dtype), input_precision=PRECISION)
        b_mass += tl.sum(b_phi * b_z[None, :], 1)
    b_sum /= unit
    p_v = head(p_v, i_batch, i_head, v_batch, v_head)
    p_means += i_group.to(tl.int64) * height * width * E
    p_remainders += (i_group.to(tl.int64) * height * tiles + i_tile) * 2 * E
    means_below = groups.to(tl.int64) * height * width * E
    remainders_of_means = groups.to(tl.int64) * height * tiles * 2 * E
    first, end = tl.maximum(HORIZON_Y - y, 0), tl.minimum(height + HORIZON_Y - y, 2 * HORIZON_Y + 1)
    for step in range(0, end - first):
        i_class = first + step
        p_line, line_token, p_line_remainders = line_at(
            p_v, p_means, p_remainders, i_class, y + i_class - HORIZON_Y, prefix, width, v_token,
            tiles * 2 * E, means_below, remainders_of_means, E, HORIZON_Y,
        )  # fmt: skip
        b_sum = _add_line(
            b_sum, p_line, line_token, p_row + i_class * (2 * HORIZON_X + 1), p_line_remainders, start, width, tiles,
            E, BLOCK_E, BLOCK_T, HORIZON_X, PADDED, PRECISION,
        )  # fmt: skip
    b_out = tl.where(b_mass == 0, 0.0, unit / tl.where(b_mass == 0, 1.0, b_mass))[:, None] * b_sum
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    tl.store(rows(p_out, o_token, out_token, o_e), b_out.to(p_out.dtype.element_ty), mask=m_out)
    tl.store(p_mass + i_group.to(tl.int64) * tokens + o_token, b_mass, mask=m_x)


def class_weights(q: Tensor, table: Tensor, place: Place) -> Tensor:
    """Weights ``[B, h, H*W, C padded]`` in the dtype of q, row by row of the table.

    They are in the units above, for ``joint_backward`` alone; the padding holds nothing of meaning.

    Args:
        q: ``[B, h, N, d]`` as given to the attention, the prefix in front.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32, non-negative.
    """
    batch, heads, _, d = q.shape
    patches, row = place.height * place.width, launch.launch_row("joint weights", d, place.padded_classes, q.dtype, q.device)
    weights = q.new_empty(batch, heads, patches, place.padded_classes)
    q, table, blocks = launch.readable(q), table.contiguous(), triton.cdiv(patches, row["BLOCK_N"])
    launch.run(
        _class_weights,
        (blocks * batch * heads,),
        *(q, table, weights, heads, place.height, place.width, place.prefix, blocks),
        *(table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0, place.row_scale, *launch.octets(q)),
        **row,
        **place.horizons(),
        D=d,
        BLOCK_D=launch.block(d),
        BLOCK_C=launch.block(place.padded_classes),
        MEAN=place.mean,
        PRECISION=launch.precision(q.dtype),
    )
    return weights


def joint_means(
    q: Tensor, table: Tensor, v: Tensor, content: FromState | FromSums, place: Place, out: Tensor, mass: Tensor
) -> None:
    """Write the patches' part of ``out [B, h, N, e]`` and of ``mass [B, h, N]``: the mean under content and relative term.

    Args:
        q: ``[B, h, N, d]`` as given to the attention, the prefix in front.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]``, float32, non-negative.
        v: ``[B, h, N, e]``, in the dtype of q.
        content: the content term's state or sums.
        out, mass: rows of prefix tokens are left as they are; float32 mass, contiguous, in the unit of the package.
    """
    (batch, heads, tokens, e), d = v.shape, q.shape[3]
    q, v, table = launch.readable(q), launch.readable(v), table.contiguous()
    if isinstance(content, FromState):
        sums, content_mass, feature_map, strides = content.s, content.z, content.feature_map, (0, 0, 0)
    else:
        sums, content_mass, feature_map = launch.readable(content.values), content.mass.contiguous(), ""
        strides = launch.octets(sums)
    row = launch.launch_row("joint means", d, e, v.dtype, v.device)
    lines, tiles = lines_of(v, place, row["BLOCK_T"]), triton.cdiv(place.width, row["BLOCK_T"])
    weights = q.new_empty(batch, heads, place.height * place.width, place.padded_classes)
    launch.run(
        _means,
        (tiles * place.height * batch * heads,),
        *(q, table, weights, v, *lines, sums, content_mass, out, mass),
        *(heads, batch * heads, tokens, place.height, place.width, place.prefix, tiles),
        *(table.stride(0) // launch.OCTET if table.shape[0] > 1 else 0, place.row_scale, place.unit),
        *(*launch.octets(q), *launch.octets(v), *strides, *launch.octets(out)),
        **row,
        **place.horizons(),
        D=d,
        E=e,
        BLOCK_D=launch.block(d),
        BLOCK_E=launch.block(e),
        BLOCK_C=launch.block(place.padded_classes),
        MEAN=place.mean,
        MAP=feature_map,
        PRECISION=launch.precision(v.dtype),
    )
