"""The launches that are recorded and compiled of ``Joint`` relative position."""

from functools import partial

import torch


def both_passes(
    grid: tuple[int, int],
    d: int,
    e: int,
    dtype: torch.dtype,
    *,
    horizons=(3, 3),
    state=True,
    mean=True,
    backward=True,
) -> None:
    """Every launch of one forward and backward pass of 1 image of 6 heads with 5 prefix tokens."""
    from visionattn.ops.position.kernels import joint
    from visionattn.ops.position.kernels.backward import joint_backward
    from visionattn.ops.position.kernels.place import Place
    from visionattn.ops.position.kernels.queries_backward import OfContent

    heads, place = 6, Place(*grid, 5, *horizons, mean)
    tokens, on = 5 + grid[0] * grid[1], dict(device="meta")
    q = torch.empty(1, tokens, 3, heads, d, dtype=dtype, **on)[:, :, 0].transpose(1, 2)
    v, out, grad = (
        torch.empty(1, tokens, heads, e, dtype=dtype, **on).transpose(1, 2) for _ in range(3)
    )
    table = torch.empty(heads, 2 * horizons[0] + 1, 2 * horizons[1] + 1, d, **on)
    mass = torch.empty(1, heads, tokens, **on)
    if state:
        content = joint.FromState(
            torch.empty(1, heads, d, e, **on), torch.empty(1, heads, d, **on), "elu1"
        )
    else:
        content = joint.FromSums(
            torch.empty(1, heads, tokens, e, **on), torch.empty(1, heads, tokens, **on)
        )
    joint.joint_means(q, table, v, content, place, out, mass)
    if backward:
        dq, dv = torch.empty(1, tokens, heads, d, **on).transpose(1, 2), torch.empty_like(v)
        content = OfContent(dq, mass, content.z, "elu1") if state else OfContent(dq)
        joint_backward(grad, out, mass, q, table, v, place, content, dv)


CASES = {
    "d=64 bfloat16": partial(both_passes, (64, 64), 64, 64, torch.bfloat16),
    "d=40 e=24 float16, content as sums": partial(
        both_passes, (64, 64), 40, 24, torch.float16, horizons=(4, 4), state=False
    ),
}
for name, width, dtype, horizons in (
    ("horizon 16 along rows", 64, torch.bfloat16, (1, 16)),
    ("d=128, horizon 10 along rows", 128, torch.bfloat16, (1, 10)),
    ("d=64 float32, horizons 3 x 4", 64, torch.float32, (3, 4)),
    ("d=64 float32, horizon 8 along rows", 64, torch.float32, (1, 8)),
):
    CASES[f"means alone, {name}"] = partial(
        both_passes, (64, 64), width, width, dtype, horizons=horizons, mean=False, backward=False
    )
GRIDS = [
    (1, 1),
    (1, 2),
    (2, 1),
    (3, 16),
    (16, 3),
    (15, 17),
    (1, 48),
    (8, 8),
    *((20 + 7 * n, 31 + 11 * n) for n in range(12)),
]
SIZES = {"bfloat16": (lambda grid: both_passes(grid, 64, 64, torch.bfloat16), GRIDS)}
