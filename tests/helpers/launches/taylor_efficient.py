"""The launches that are recorded and compiled of the efficient form of TaylorShift."""

from functools import partial

import torch

COEFFICIENTS = (0.5, 1.0, 1.0)


def both_passes(
    tokens: int,
    d: int,
    e: int,
    dtype: torch.dtype,
    masked: bool = False,
    batch: int = 1,
    heads: int = 6,
    normalise: bool = False,
) -> None:
    """Every launch of one forward and backward pass, of q, k and v that lie in one projection of
    width ``heads * d``.
    """
    from visionattn.ops.taylorshift.kernels import efficient, efficient_backward

    on = dict(device="meta")
    q, k = torch.empty(batch, tokens, 2, heads, d, dtype=dtype, **on).permute(2, 0, 3, 1, 4)
    v, grad = (
        torch.empty(batch, tokens, heads, e, dtype=dtype, **on).transpose(1, 2) for _ in range(2)
    )
    mask = torch.empty(batch, tokens, dtype=torch.bool, **on) if masked else None
    length = torch.empty(heads, **on) if normalise else None
    state = efficient.state_of_keys(k, v, mask, COEFFICIENTS, normalised=normalise)
    out, mass = efficient.forward(q, length, state, COEFFICIENTS, divide=True)
    efficient_backward.backward(grad, out, mass, q, k, v, length, mask, state, COEFFICIENTS)


def forward_pass(tokens: int, d: int, e: int, dtype: torch.dtype) -> None:
    """Every launch of the sums that another term will be added to, without a gradient."""
    from visionattn.ops.taylorshift.kernels import efficient

    q, k, v = (torch.empty(1, 6, tokens, width, dtype=dtype, device="meta") for width in (d, d, e))
    state = efficient.state_of_keys(k, v, None, COEFFICIENTS, normalised=False)
    efficient.forward(q, None, state, COEFFICIENTS, divide=False)


CASES = {
    "d=64 e=128 bfloat16": partial(both_passes, 4096, 64, 128, torch.bfloat16, normalise=True),
    "d=64 e=64 float16": partial(
        both_passes, 4096, 64, 64, torch.float16, masked=True, normalise=True
    ),
    "d=16 e=128 bfloat16": partial(forward_pass, 4096, 16, 128, torch.bfloat16),
    "d=32 e=32 bfloat16": partial(both_passes, 4096, 32, 32, torch.bfloat16, masked=True),
    "d=32 e=32 masked float32": partial(
        both_passes, 4096, 32, 32, torch.float32, masked=True, normalise=True
    ),
}
LENGTHS = [1, 2, 15, 16, 17, 48, 64, 100, *range(196, 10_000, 800)]
SIZES = {
    "bfloat16": (lambda n: both_passes(n, 64, 64, torch.bfloat16, heads=1), LENGTHS),
    "float32": (lambda n: both_passes(n, 32, 16, torch.float32, heads=1), LENGTHS),
}
