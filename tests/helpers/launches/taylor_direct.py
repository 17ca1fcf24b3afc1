"""The launches that are recorded and compiled of direct TaylorShift."""

from functools import partial

import torch


def both_passes(
    tokens: int,
    d: int,
    e: int,
    dtype: torch.dtype,
    masked: bool = False,
    divide: bool = True,
    batch: int = 1,
    heads: int = 6,
) -> None:
    """Every launch of one forward and backward pass, of v and a gradient that lie in projections of
    all heads.
    """
    from visionattn.ops.taylorshift.kernels import direct, direct_backward

    on = dict(device="meta")
    q, k = (
        torch.empty(batch, tokens, heads, d, dtype=dtype, **on).transpose(1, 2) for _ in range(2)
    )
    v, grad, out = (
        torch.empty(batch, tokens, heads, e, dtype=dtype, **on).transpose(1, 2) for _ in range(3)
    )
    mask = torch.empty(batch, tokens, dtype=torch.bool, **on) if masked else None
    _, mass = direct.forward(q, k, v, mask, (0.5, 1.0, 1.0), divide=divide)
    wide = torch.float32 if divide else None
    direct_backward.backward(grad, out, mass, q, k, v, mask, (0.5, 1.0, 1.0), wide, wide)


CASES = {
    "bfloat16": partial(both_passes, 4096, 64, 64, torch.bfloat16),
    "d=32 e=32 bfloat16": partial(both_passes, 4096, 32, 32, torch.bfloat16),
    "d=64 e=32 masked float16": partial(both_passes, 4096, 64, 32, torch.float16, masked=True),
    "masked float16": partial(both_passes, 4096, 64, 128, torch.float16, masked=True, divide=False),
    "float32": partial(both_passes, 4096, 32, 32, torch.float32),
}
SIZES = {
    "bfloat16": (
        lambda n: both_passes(n, 64, 64, torch.bfloat16),
        [1, 2, 15, 16, 17, 48, 64, 100, *range(196, 1072, 73)],
    ),
}
