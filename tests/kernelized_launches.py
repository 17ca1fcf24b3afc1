"""What ``kernel_launches.py`` records and compiles of kernelized attention."""

from functools import partial

import torch


def both_passes(tokens: int, d: int, e: int, dtype: torch.dtype, masked: bool = False, batch: int = 1, heads: int = 6) -> None:
    """Every launch of one forward and backward pass, of q, k and v that lie in one projection of width ``heads * d``."""
    from visionattn.ops.triton import kernelized

    on = dict(device="meta")
    q, k = torch.empty(batch, tokens, 2, heads, d, dtype=dtype, **on).permute(2, 0, 3, 1, 4)
    v, grad, out = (torch.empty(batch, tokens, heads, e, dtype=dtype, **on).transpose(1, 2) for _ in range(3))
    mask = torch.empty(batch, tokens, dtype=torch.bool, **on) if masked else None
    s, z = kernelized.state_of_keys(k, v, mask, "elu1")
    mass = torch.empty(batch, heads, tokens, **on)
    kernelized.means(q, s, z, "elu1", out, mass, tokens)
    _, ds, dz = kernelized.queries_backward(grad, out, mass, q, s, z, "elu1", tokens)
    kernelized.keys_backward(k, v, mask, ds, dz, "elu1")


WIDTHS = [(16, 16), (32, 32), (64, 64), (40, 24), (128, 128)]
CASES = {f"d={d} e={e} bfloat16": partial(both_passes, 4096, d, e, torch.bfloat16) for d, e in WIDTHS}
CASES |= {f"d={d} e={d} float32": partial(both_passes, 4096, d, d, torch.float32) for d in (16, 32, 64)}
CASES |= {f"masked d={d} e={d} float16": partial(both_passes, 4096, d, d, torch.float16, masked=True) for d in (64, 128)}
SIZES = {
    "bfloat16": (lambda n: both_passes(n, 64, 64, torch.bfloat16), [1, 2, 15, 16, 17, 48, 64, 100, *range(196, 1000, 73)]),
    "float32": (lambda n: both_passes(n, 32, 16, torch.float32), [1, 2, 15, 16, 17, 48, 64, 100, *range(196, 1000, 73)]),
}
