"""The launches that are recorded and compiled of kernelized attention."""

from functools import partial

import torch


def both_passes(
    tokens: int,
    d: int,
    e: int,
    dtype: torch.dtype,
    masked: bool = False,
    batch: int = 1,
    heads: int = 6,
) -> None:
    """Every launch of one forward and backward pass, of q, k and v that lie in one projection of
    width ``heads * d``.
    """
    from visionattn.ops.kernelized.kernels import bidirectional
    from visionattn.ops.kernelized.kernels.state import state_of_keys

    on = dict(device="meta")
    q, k = torch.empty(batch, tokens, 2, heads, d, dtype=dtype, **on).permute(2, 0, 3, 1, 4)
    v, grad, out = (
        torch.empty(batch, tokens, heads, e, dtype=dtype, **on).transpose(1, 2) for _ in range(3)
    )
    mask = torch.empty(batch, tokens, dtype=torch.bool, **on) if masked else None
    mass = torch.empty(batch, heads, tokens, **on)
    state = state_of_keys(k, v, mask, "elu1")
    bidirectional.means(q, state, "elu1", out, mass)
    for alone in (True, False):
        *_, d_state = bidirectional.queries_backward(
            grad, out, mass, q, state, "elu1", tokens, alone
        )
    bidirectional.keys_backward(k, v, mask, d_state, "elu1")


WIDTHS = [(16, 16), (32, 32), (64, 64), (40, 24), (128, 128)]
CASES = {
    f"d={d} e={e} bfloat16": partial(both_passes, 4096, d, e, torch.bfloat16) for d, e in WIDTHS
}
CASES |= {
    f"d={d} e={d} float32": partial(both_passes, 4096, d, d, torch.float32) for d in (16, 32, 64)
}
CASES |= {
    f"masked d={d} e={d} float16": partial(both_passes, 4096, d, d, torch.float16, masked=True)
    for d in (64, 128)
}
TOKENS = [1000, 4096, 16, 17, 48, 64, 100, *range(196, 1000, 73), 5001]
SIZES = {
    "bfloat16": (lambda n: both_passes(n, 64, 64, torch.bfloat16), TOKENS),
    "float32": (lambda n: both_passes(n, 32, 16, torch.float32), TOKENS),
}
