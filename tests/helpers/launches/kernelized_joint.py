"""The launches that are recorded and compiled of kernelized attention with ``Joint``."""

from functools import partial

import torch


def states_and_lines(
    grid: tuple[int, int], d: int, e: int, dtype: torch.dtype, horizon_x: int = 3
) -> None:
    """The launches before the means, of 1 image of 6 heads with 5 tokens in front of its grid."""
    from visionattn.ops.kernelized.kernels.with_joint import state_and_lines
    from visionattn.ops.position.kernels.place import Place

    tokens, on = 5 + grid[0] * grid[1], dict(device="meta")
    q, k = torch.empty(1, tokens, 2, 6, d, dtype=dtype, **on).permute(2, 0, 3, 1, 4)
    v, out = (torch.empty(1, tokens, 6, e, dtype=dtype, **on).transpose(1, 2) for _ in range(2))
    mass = torch.empty(1, 6, tokens, **on)
    state_and_lines(q, k, v, "elu1", Place(*grid, 5, 3, horizon_x, True), out, mass)


WIDTHS = [(16, 16), (32, 32), (64, 64), (40, 24), (64, 128), (128, 128)]
CASES = {
    f"d={d} e={e} {dtype}": partial(states_and_lines, (64, 64), d, e, getattr(torch, dtype))
    for dtype, widths in (
        ("bfloat16", WIDTHS),
        ("float16", WIDTHS),
        ("float32", ((16, 16), (32, 32), (64, 64))),
    )
    for d, e in widths
}
CASES["horizon 16 along rows"] = partial(
    states_and_lines, (64, 64), 64, 64, torch.bfloat16, horizon_x=16
)
GRIDS = [(1, 17), (3, 18), (16, 33), (8, 80), *((20 + 7 * n, 31 + 11 * n) for n in range(12))]
SIZES = {"bfloat16": (lambda grid: states_and_lines(grid, 64, 64, torch.bfloat16), GRIDS)}
