"""Sums of the parts that programs leave: of all parts or, for each part, of those before or after
it.

Parts are added in a fixed order, so that a result does not depend on which program ended first, and
nothing is subtracted from a total.
"""

import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.language import kernel


@kernel
def _sums_of_parts(
    p_x,
    p_y,
    parts,
    size,
    BLOCK_P: tl.constexpr,
    BLOCK_X: tl.constexpr,
    WHICH: tl.constexpr,
):
    """Add one block of columns of ``[parts, size]``: write their sum, or to ``y[i]`` the sum of
    ``x[j]`` over ``j < i`` or over ``j > i``.
    """
    o_x = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    m_x = o_x < size
    b_all = tl.zeros([BLOCK_P, BLOCK_X], tl.float32)
    b_before = tl.zeros([BLOCK_X], tl.float32)
    for start in range(0, parts, BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        # Row i of a running sum takes part i - 1, and "after" counts parts from the last one: the
        # first row it writes gets 0.
        if WHICH == "all":
            m_from, i_from = o_p < parts, o_p
        else:
            m_from, i_from = (o_p < parts) & (o_p > 0), o_p - 1
        if WHICH == "after":
            i_from = parts - o_p
        p_from = p_x + i_from.to(tl.int64)[:, None] * size + o_x[None, :]
        b_x = tl.load(p_from, mask=m_from[:, None] & m_x[None, :], other=0)
        if WHICH == "all":
            b_all += b_x
        else:
            i_to = o_p
            if WHICH == "after":
                i_to = parts - 1 - o_p
            p_to = p_y + i_to.to(tl.int64)[:, None] * size + o_x[None, :]
            # BLOCK_P parts are summed at once, on top of the sum of all blocks before.
            tl.store(
                p_to,
                b_before[None, :] + tl.cumsum(b_x, 0),
                mask=(o_p < parts)[:, None] & m_x[None, :],
            )
            b_before += tl.sum(b_x, 0)
    if WHICH == "all":
        tl.store(p_y + o_x, tl.sum(b_all, 0), mask=m_x)


def sums_of_parts(x: Tensor, which: str) -> Tensor:
    """Return sums of ``x [parts, size]``, float32.

    Args:
        which: "all" gives the sum of all parts, ``[1, size]``; "before" and "after" give for each
            part the sum of those before it, or after it, ``[parts, size]``.
    """
    parts, size = x.shape
    if which == "all" and parts == 1:
        return x
    y = x.new_empty(1 if which == "all" else parts, size)
    row = launch.launch_row("sums of parts", 0, 0, x.dtype, x.device)
    launch.run(
        _sums_of_parts, (launch.cdiv(size, row["BLOCK_X"]),), x, y, parts, size, **row, WHICH=which
    )
    return y
