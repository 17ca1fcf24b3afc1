"""Joint relative position by GPU kernels: supported inputs, and the calls for the operators of the
attentions.

Other packages use these kernels only through this module. Triton is imported when a kernel first
runs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from visionattn.ops.attention_sums import tokens_first
from visionattn.ops.gpu import launch
from visionattn.ops.position.kernels.grid_classes import GridClasses
from visionattn.ops.position.relative_position import Joint, RelativePosition

MAX_HORIZON_X = {2: 16, 4: 8}
"""Largest Rx, by the bytes of an element, for which kernels compile without spilled registers."""
MAX_WIDTH = {2: 128, 4: 64}
"""Largest d and e by the bytes of an element."""
MAX_CLASSES = 128
"""Maximum number of classes ``(2Ry+1) * (2Rx+1)`` for 2-byte elements and d up to 64."""
MAX_CLASSES_ELSEWHERE = 64
"""Maximum number of classes for larger d or 4-byte elements."""


def why_not(
    relative: RelativePosition | None, q: Tensor, v: Tensor, key_mask: Tensor | None
) -> str | None:
    """Return in one sentence why there are no kernels for a relative position with
    ``q [B, h, N, d]`` and ``v [B, h, M, e]``; None if there are.
    """
    if relative is None:
        return None
    if not isinstance(relative, Joint):
        return f"relative position {type(relative).__name__} has no kernel; Joint has"
    if key_mask is not None or relative.layout.present is not None:
        return "Joint with a key_mask or absent patches has no kernel"
    if relative.layout.kept is not None:
        return "Joint with dropped patches (layout.kept) has no kernel"
    _, rows, columns, _ = relative.table.shape
    return why_not_sizes(q.shape[3], v.shape[3], q.dtype, (rows // 2, columns // 2))


def why_not_sizes(d: int, e: int, dtype: torch.dtype, horizons: tuple[int, int]) -> str | None:
    """Return why there are no kernels for widths d and e, a dtype, and horizons (Ry, Rx); None if
    there are.
    """
    size = dtype.itemsize
    odd = d % launch.OCTET or e % launch.OCTET
    if size not in MAX_WIDTH or odd or max(d, e) > MAX_WIDTH[size]:
        return (
            "Joint has kernels for widths in multiples of 8 up to 128 (float32: 64), "
            f"not for {d} and {e} in {dtype}"
        )
    if min(horizons) < 1 or horizons[1] > MAX_HORIZON_X[size]:
        return (
            "Joint has kernels for horizons from 1 on and up to 16 (float32: 8) along rows, "
            f"not for {horizons} in {dtype}"
        )
    classes = (2 * horizons[0] + 1) * (2 * horizons[1] + 1)
    most = MAX_CLASSES if size == 2 and d <= 64 else MAX_CLASSES_ELSEWHERE
    if classes > most:
        return f"Joint has kernels for up to {most} classes at this width, not for {classes}"
    return None


def place_of(relative: Joint | None) -> list[int]:
    """Return the fields of ``GridClasses`` as a list, which operators accept; empty for None."""
    if relative is None:
        return []
    grid, (_, rows, columns, _) = relative.layout.grid, relative.table.shape
    mean = 1 if relative.normalization == "mean" else 0
    return [grid.height, grid.width, relative.layout.num_prefix, rows // 2, columns // 2, mean]


def place_from(numbers: Sequence[int]) -> GridClasses | None:
    """Return the ``GridClasses`` for a result of ``place_of``; None for an empty list."""
    if not numbers:
        return None
    *sizes, mean = numbers
    return GridClasses(*sizes, bool(mean))  # type: ignore[call-arg]


def flops(q, v, table, grid: Sequence[int], *, backward: bool) -> int:
    """Count the operations of joint relative position, as for the tiled form of ``class_sums``."""
    if table is None:
        return 0
    (batch, heads, n, d), classes = q, table[1] * table[2]
    per_query = classes * (3 * d + 2 * v[3] if backward else d + v[3])
    return 2 * batch * heads * (n - grid[2]) * per_query


def mean_from_sums(
    q: Tensor, table: Tensor, v: Tensor, values: Tensor, mass: Tensor, grid: GridClasses
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean under both terms, and the mass of both terms.

    ``values [B, h, N, e]`` and ``mass [B, h, N]`` are the sums of the content, divided by M. Prefix
    tokens have only the content term.
    """
    from visionattn.ops.position.kernels.joint_forward import FromSums, joint_means

    out, total = tokens_first(v, *values.shape), mass.new_empty(mass.shape)
    if grid.prefix:
        first = slice(0, grid.prefix)
        total[:, :, first] = mass[:, :, first]
        out[:, :, first] = values[:, :, first] / mass[:, :, first, None]
    joint_means(q, table, v, FromSums(values, mass), grid, out, total)
    return out, total


def write_means_from_state(
    q: Tensor,
    table: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor, str],
    grid: GridClasses,
    out: Tensor,
    mass: Tensor,
) -> None:
    """Write the weighted mean under both terms and the mass, for all patches.

    The content is a ``state`` of kernelized attention: S, Z and the name of the feature map.
    """
    from visionattn.ops.position.kernels.joint_forward import FromState, joint_means

    joint_means(q, table, v, FromState(*state), grid, out, mass)


def backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    table: Tensor,
    v: Tensor,
    grid: GridClasses,
    dv: Tensor,
    *of_content: Tensor | str,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of the table, in their dtypes; add the gradient of the values
    to ``dv``.

    ``of_content`` are the fields of ``OfContent``; the other arguments are as for
    ``joint_backward``.
    """
    from visionattn.ops.position.kernels.joint_backward import joint_backward
    from visionattn.ops.position.kernels.queries_backward import OfContent

    content = OfContent(*of_content)
    dq, d_table = joint_backward(grad, out, mass, q, table, v, grid, content, dv)
    return dq, d_table.to(table.dtype)
