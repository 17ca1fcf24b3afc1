"""Where kernels are launched: block sizes from one table, and limits checked before a GPU is asked. No Triton in here.

``launches.json`` beside this file has, for each kernel, one row for each range of widths and size of the elements;
``tools/benchmark.py --tune`` measures and writes the section of the GPU at hand, and the section "default" serves all others.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from visionattn.ops.sums import tokens_first  # noqa: F401  kernels take it from here

TABLE = Path(__file__).with_name("launches.json")
GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
OCTET = 8


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, dict[str, list[dict[str, int]]]], dict[tuple, dict[str, int]]]:
    """The table, and the rows that were found in it: each launch asks for its own."""
    return json.loads(TABLE.read_text()), {}


@lru_cache(maxsize=64)
def capability(device: torch.device) -> str | None:
    """Compute capability as "9.0"; None where the device is no GPU, or one that a fake tensor alone is on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def launch_row(kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Block sizes, warps and stages of a kernel: the row of the least widths that hold ``d`` and ``e``; not to be changed.

    Raises:
        ValueError: no row holds these widths.
    """
    (sections, found), asked = _table(), (kernel, d, e, dtype, device)
    if asked in found:
        return found[asked]
    bits = 8 * dtype.itemsize
    for section in (capability(device), "default"):
        rows = sections.get(section, {}).get(kernel, ())
        fit = [row for row in rows if row["d"] >= d and row["e"] >= e and row["bits"] == bits]
        if fit:
            row = min(fit, key=lambda row: (row["d"], row["e"]))
            found[asked] = {name: value for name, value in row.items() if name not in ("d", "e", "bits")}
            return found[asked]
    raise ValueError(f"{kernel}: no launch of d = {d}, e = {e} in {bits} bits in {TABLE.name}")


def run(kernel, grid: Sequence[int], *args: object, **meta: object) -> None:
    """Launch ``kernel[grid](*args, **meta)``. Nothing to do for an empty grid.

    Raises:
        ValueError: a grid beyond what CUDA launches.
    """
    check_grid(kernel.__name__, grid)
    if not all(grid):
        return
    device = next(x.device for x in args if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton launches on the current GPU
        kernel[tuple(grid)](*args, **meta)


def check_grid(name: str, grid: Sequence[int]) -> None:
    """Raise ValueError for a grid beyond 2^31 - 1 programs on the first axis or 65,535 on another."""
    if any(size > limit for size, limit in zip(grid, GRID_LIMITS, strict=False)):
        raise ValueError(f"{name}: a grid of {tuple(grid)} programs is beyond {GRID_LIMITS[: len(grid)]}")


def block(width: int) -> int:
    """The block that holds a width: a power of two, 16 at least, as products of matrices want."""
    return max(16, 1 << (width - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How products of this dtype are formed: float32 in three passes of tf32, which keeps it to about 1e-6."""
    return "tf32x3" if dtype == torch.float32 else "ieee"


def options(kernel: str, q: Tensor, v: Tensor) -> dict[str, object]:
    """Compile-time values for ``q [B, h, N, d]`` and ``v [B, h, M, e]``: the row, widths and their blocks, and the precision."""
    d, e = q.shape[3], v.shape[3]
    sizes = dict(D=d, E=e, BLOCK_D=block(d), BLOCK_E=block(e), PRECISION=precision(q.dtype))
    return launch_row(kernel, d, e, q.dtype, q.device) | sizes


def octets(x: Tensor) -> tuple[int, ...]:
    """Strides of all axes but the last, in units of 8 elements, so that kernels know how addresses are aligned."""
    return tuple(stride // OCTET for stride in x.stride()[:-1])


def readable(x: Tensor) -> Tensor:
    """``x`` itself where kernels can read it as it lies: contiguous last axis, other strides in octets; else a copy."""
    apart = (stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    return x if (x.stride(-1) == 1 or x.shape[-1] == 1) and not any(s % OCTET for s in apart) else x.contiguous()


def segments(tokens: int, programs: int, block_tokens: int, device: torch.device) -> int:
    """Into how many parts to cut the tokens, each handled by a program of its own, where ``programs`` run without cutting.

    As many as give no more than four programs to each multiprocessor, and at least two blocks of tokens to each part.
    """
    wanted = 4 * _multiprocessors(device) // max(1, programs)
    return max(1, min(wanted, tokens // (2 * block_tokens)))


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


