"""The launches that are recorded and compiled of causal kernelized attention."""

from functools import partial

import torch


def both_passes(
    tokens: int,
    d: int,
    e: int,
    dtype: torch.dtype,
    masked: bool = False,
    batch: int = 1,
    heads: int = 1,
) -> None:
    """Every launch of one forward and backward pass, of q, k and v that lie in one projection of
    width ``heads * d``.
    """
    from visionattn.ops.kernelized.kernels import causal

    on = dict(device="meta")
    q, k = torch.empty(batch, tokens, 2, heads, d, dtype=dtype, **on).permute(2, 0, 3, 1, 4)
    v, grad, out = (
        torch.empty(batch, tokens, heads, e, dtype=dtype, **on).transpose(1, 2) for _ in range(3)
    )
    mask = torch.empty(batch, tokens, dtype=torch.bool, **on) if masked else None
    _, mass = causal.causal_means(q, k, v, mask, "elu1")
    causal.causal_backward(grad, out, mass, q, k, v, mask, "elu1")


CASES = {
    "bfloat16": partial(both_passes, 4096, 64, 64, torch.bfloat16),
    "masked float16": partial(both_passes, 4096, 64, 64, torch.float16, masked=True),
    "masked float32": partial(both_passes, 4096, 16, 16, torch.float32, masked=True),
}
SIZES = {
    "bfloat16": (
        lambda n: both_passes(n, 64, 64, torch.bfloat16),
        [260, 272, 300, 319, 320, 321, 400, *range(513, 1500, 73)],
    ),
}
