"""What kernelized attention with ``Joint`` relative position launches before its means: two
launches, of several kinds each.

The first launch makes a state of each segment of the keys, and of v the lines of ``position``:
means of its rows, and the remainders of each row. The second adds up the states, makes the means of
the tokens in front of the grid, which have content alone, and the remainders of the means of rows.
Jobs that do not need each other's results share a launch, so that on small grids they run side by
side.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.language import head, kernel, phi, read, reciprocal, rows
from visionattn.ops.kernelized.kernels.state import parts_of, state_at, state_of_segment
from visionattn.ops.position.kernels.lines import (
    Lines,
    empty_lines,
    means_of_remainders,
    means_of_values,
    remainders_of_values,
)
from visionattn.ops.position.kernels.place import TILE, Place


@kernel
def _kernelized_state_and_lines(
    p_k,
    p_v,
    p_present,
    p_state,
    p_means,
    p_remainders,
    heads,
    groups,
    tokens,
    segment_tokens,
    segments,
    scale,
    height,
    width,
    prefix,
    tiles,
    blocks,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BESIDE: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Do one of three jobs: a segment of the keys, a block of columns of the means of rows, or the
    remainders of a row on one side.

    ``p_present``, the keys that take part where MASKED, concerns the segments alone.
    """
    # Programs are counted through the three jobs: segments, then means, then remainders.
    i_program, of_state, of_means = tl.program_id(0), segments * groups, 2 * blocks * groups
    if i_program < of_state:
        state_of_segment(
            i_program, p_k, p_v, p_present, p_state, heads, groups, tokens, segment_tokens,
            segments, scale, k_batch, k_head, k_token, v_batch, v_head, v_token, D, E, BLOCK_D,
            BLOCK_E, BLOCK_N, MAP, MASKED, PRECISION,
        )  # fmt: skip
    elif i_program < of_state + of_means:
        means_of_values(
            i_program - of_state, p_v, p_means, heads, groups, height, width, prefix, blocks,
            v_batch, v_head, v_token, E, BLOCK_Y, BLOCK_C, PRECISION,
        )  # fmt: skip
    else:
        remainders_of_values(
            i_program - of_state - of_means, p_v, p_remainders, heads, height, width, prefix,
            tiles, v_batch, v_head, v_token, E, BLOCK_E, BLOCK_T, BESIDE, BLOCK_X, PRECISION,
        )  # fmt: skip


@triton.jit
def _sum_and_prefix(
    i_program,
    p_parts,
    p_state,
    p_q,
    p_out,
    p_mass,
    heads,
    groups,
    tokens,
    parts,
    prefix,
    q_batch,
    q_head,
    q_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAP: tl.constexpr,
):
    """Add all parts for ``BLOCK_E`` columns of S of one head, and make these columns of the means
    of the prefix.
    """
    # Heads alone are few programs: the columns of S are cut into slices too.
    SLICES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    i_slice, i_group = i_program % SLICES, i_program // SLICES
    i_batch, i_head = i_group // heads, i_group % heads
    o_p = tl.arange(0, BLOCK_P)
    o_d = tl.arange(0, BLOCK_D)
    o_e = i_slice * BLOCK_E + tl.arange(0, BLOCK_E)
    m_d, m_e = o_d < D, o_e < E
    b_s = tl.zeros([BLOCK_P, BLOCK_D, BLOCK_E], tl.float32)
    b_z = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    o_s, m_s = o_d[:, None] * E + o_e[None, :], m_d[:, None] & m_e[None, :]
    # BLOCK_P parts at once, which are added across threads only at the end.
    for start in range(0, parts, BLOCK_P):
        m_p = start + o_p < parts
        p_s, p_z = state_at(p_parts, (start + o_p).to(tl.int64), i_group, groups, D, E)
        b_s += tl.load(
            p_s[:, None, None] + o_s[None, :, :], mask=m_p[:, None, None] & m_s[None, :, :], other=0
        )
        b_z += tl.load(p_z[:, None] + o_d[None, :], mask=m_p[:, None] & m_d[None, :], other=0)
    b_s, b_z = tl.sum(b_s, 0), tl.sum(b_z, 0)
    p_s, p_z = state_at(p_state, 0, i_group, groups, D, E)
    tl.store(p_s + o_s, b_s, mask=m_s)
    tl.store(
        p_z + o_d, b_z, mask=o_d < tl.where(i_slice == 0, D, 0)
    )  # each slice has the whole of Z

    # The prefix, which has content alone, reads the state while it is in registers; its few tokens
    # are multiplied and summed in float32, without the matrix unit.
    p_q = head(p_q, i_batch, i_head, q_batch, q_head)
    p_out = head(p_out, i_batch, i_head, out_batch, out_head)
    for start in range(0, prefix, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        m_n = o_n < prefix
        b_q = read(p_q, o_n, q_token, o_d, m_n, D, True)  # [N, D]
        b_phi = phi(b_q, MAP)  # what it is beyond D meets sums of 0
        b_mass = tl.sum(b_phi * b_z[None, :], 1)
        b_out = tl.sum(b_phi[:, :, None] * b_s[None, :, :], 1) * reciprocal(b_mass)[:, None]
        tl.store(
            rows(p_out, o_n, out_token, o_e),
            b_out.to(p_out.dtype.element_ty),
            mask=m_n[:, None] & m_e[None, :],
        )
        tl.store(
            p_mass + i_group.to(tl.int64) * tokens + o_n,
            b_mass,
            mask=o_n < tl.where(i_slice == 0, prefix, 0),
        )


@kernel
def _kernelized_sum_and_remainders(
    p_parts,
    p_state,
    p_q,
    p_out,
    p_mass,
    p_remainders,
    heads,
    groups,
    tokens,
    parts,
    prefix,
    height,
    tiles,
    blocks,
    q_batch,
    q_head,
    q_token,
    out_batch,
    out_head,
    out_token,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_C: tl.constexpr,
    MAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Do one of two jobs: add all parts of the state and make the means of the prefix, or make a
    block of columns of the means of remainders.
    """
    # Sums first, then blocks of columns of the remainders.
    i_program, of_sums = tl.program_id(0), (E + BLOCK_E - 1) // BLOCK_E * groups
    if i_program < of_sums:
        _sum_and_prefix(
            i_program, p_parts, p_state, p_q, p_out, p_mass, heads, groups, tokens, parts, prefix,
            q_batch, q_head, q_token, out_batch, out_head, out_token,
            D, E, BLOCK_D, BLOCK_E, BLOCK_P, BLOCK_N, MAP,
        )  # fmt: skip
    else:
        means_of_remainders(
            i_program - of_sums,
            p_remainders,
            groups,
            height,
            tiles,
            blocks,
            E,
            BLOCK_Y,
            BLOCK_C,
            PRECISION,
        )


def state_and_lines(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str, place: Place, out: Tensor, mass: Tensor
) -> tuple[Tensor, Lines]:
    """Return the state as ``state_of_keys`` does and the lines as ``lines_of`` does, and write the
    prefix's part of ``out`` and ``mass``.
    """
    (batch, heads, tokens, d), e = k.shape, v.shape[3]
    groups = batch * heads
    tiles = launch.cdiv(place.width, TILE)
    parts = parts_of("kernelized state and lines", k, v)
    states = k.new_empty(parts, groups * d * (e + 1), dtype=mass.dtype)
    k, v, lines = launch.readable(k), launch.readable(v), empty_lines(v, place, TILE)
    # Options follow from the sizes alone: they are made once and remembered.
    options = launch.remembered(
        _options_of_state_and_lines, d, e, v.dtype, v.device, place.beside, feature_map
    )
    blocks = launch.cdiv(place.width * e, options["BLOCK_C"])
    launch.run(
        _kernelized_state_and_lines,
        ((parts + 2 * blocks + (2 * place.height if tiles > 1 else 0)) * groups,),
        *(
            k,
            v,
            k,
            states,
            *lines,
            heads,
            groups,
            tokens,
            launch.cdiv(tokens, parts),
            parts,
            1 / max(1, tokens),
        ),
        *(
            place.height,
            place.width,
            place.prefix,
            tiles,
            blocks,
            *launch.octets(k),
            *launch.octets(v),
        ),
        **options,
    )
    # One part is its own sum, one tile has no remainders, and no prefix waits: nothing is left to
    # do.
    if parts == 1 and tiles == 1 and not place.prefix:
        return states[0], lines
    return _sum_and_remainders(states, q, feature_map, place, lines, out, mass), lines


def _options_of_state_and_lines(
    d: int, e: int, dtype: torch.dtype, device: torch.device, beside: int, feature_map: str
) -> dict[str, object]:
    row = launch.launch_row("kernelized state and lines", d, e, dtype, device)
    widths = dict(D=d, E=e, BLOCK_D=launch.block(d), BLOCK_E=launch.block(e))
    return (
        row
        | widths
        | dict(
            BLOCK_T=TILE,
            BESIDE=beside,
            MAP=feature_map,
            MASKED=False,
            PRECISION=launch.precision(dtype),
        )
    )


def _options_of_sum_and_remainders(
    d: int, e: int, dtype: torch.dtype, device: torch.device, feature_map: str
) -> dict[str, object]:
    row = launch.launch_row("kernelized sum and remainders", d, e, dtype, device)
    return row | dict(
        D=d, E=e, BLOCK_D=launch.block(d), MAP=feature_map, PRECISION=launch.precision(dtype)
    )


def _sum_and_remainders(
    states: Tensor,
    q: Tensor,
    feature_map: str,
    place: Place,
    lines: Lines,
    out: Tensor,
    mass: Tensor,
) -> Tensor:
    """Return the sum of ``states [parts, length of a state]``, and write the means of remainders
    and the means and masses of the prefix.
    """
    (batch, heads, tokens, d), e, tiles = q.shape, out.shape[3], launch.cdiv(place.width, TILE)
    q, state = launch.readable(q), states.new_empty(states.shape[1])
    options = launch.remembered(
        _options_of_sum_and_remainders, d, e, q.dtype, q.device, feature_map
    )
    blocks = launch.cdiv(2 * tiles * e, options["BLOCK_C"]) if tiles > 1 else 0
    prefix = (
        (q, out) if place.prefix else (lines.remainders, lines.remainders)
    )  # nothing of them is read or written then
    launch.run(
        _kernelized_sum_and_remainders,
        ((launch.cdiv(e, options["BLOCK_E"]) + 2 * blocks) * batch * heads,),
        *(
            states,
            state,
            *prefix,
            mass,
            lines.remainders,
            heads,
            batch * heads,
            tokens,
            states.shape[0],
        ),
        *(place.prefix, place.height, tiles, blocks, *launch.octets(q), *launch.octets(out)),
        **options,
    )
    return state
