"""Sums over the partial results of programs, in a fixed order, so that results are
deterministic.
"""

import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import kernel, sum_of_parts


@kernel
def _sums_of_parts(p_x, p_y, parts, size, BLOCK_P: tl.constexpr, BLOCK_X: tl.constexpr):
    """Write the sums over parts for one block of columns of ``[parts, size]``."""
    o_x = tl.program_id(0).to(tl.int64) * BLOCK_X + tl.arange(0, BLOCK_X)
    tl.store(p_y + o_x, sum_of_parts(p_x + o_x, size, parts, o_x < size, BLOCK_P), mask=o_x < size)


def sums_of_parts(x: Tensor) -> Tensor:
    """Return the sum ``[size]`` of ``x [parts, size]``, float32."""
    parts, size = x.shape
    if parts == 1:
        return x[0]
    y = x.new_empty(size)
    row = launch.launch_row("sums of parts", 0, 0, x.dtype, x.device)
    launch.run(_sums_of_parts, (launch.cdiv(size, row["BLOCK_X"]),), x, y, parts, size, **row)
    return y
