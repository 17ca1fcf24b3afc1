"""The launches that are recorded and compiled of the normalising prologue."""

from functools import partial

import torch


def both_passes(
    tokens: int,
    d: int,
    dtype: torch.dtype,
    grad_dtype: torch.dtype | None = None,
    length: bool = True,
    heads: int = 6,
) -> None:
    """Every launch of one forward and backward pass, of vectors that lie in one projection of width
    ``3 * heads * d``.
    """
    from visionattn.ops.taylorshift.kernels import unit

    x = torch.empty(1, tokens, 3, heads, d, dtype=dtype, device="meta").select(2, 1).transpose(1, 2)
    grad = torch.empty(1, heads, tokens, d, dtype=grad_dtype or dtype, device="meta")
    lengths = torch.empty(heads, device="meta") if length else None
    unit.unit(x, lengths)
    unit.unit_backward(x, lengths, grad)


CASES = {f"d={d} bfloat16": partial(both_passes, 4096, d, torch.bfloat16) for d in (8, 40, 64)}
CASES |= {f"d={d} float32": partial(both_passes, 4096, d, torch.float32) for d in (16, 32)}
CASES["gradient in float32"] = partial(
    both_passes, 4096, 64, torch.float16, torch.float32, length=False
)
SIZES = {
    "bfloat16": (
        lambda n: both_passes(n, 64, torch.bfloat16),
        [1, 2, 15, 16, 17, 48, 64, 100, *range(196, 1072, 73)],
    ),
}
