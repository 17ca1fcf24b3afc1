"""Kernel launches: block sizes from one table, and a check of the grid. This module does not import
Triton.

``launches.json`` in this folder has, for each kernel, one row per range of widths and element size.
A section named after a compute capability applies to GPUs with this capability, and "default" to
all others. ``python -m visionattn.lab.gpu.launch_tuning`` measures other rows on the local GPU.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from visionattn.ops.attention_sums import tokens_first  # noqa: F401  kernels take it from here

TABLE = Path(__file__).with_name("launches.json")
GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
OCTET = 8
NOT_OF_KERNELS = frozenset({"d", "e", "bits", "ctas"})
"""Entries of a row that are not passed to the kernel: the first three select the row, and ``ctas``
is the number of programs that a multiprocessor holds at once.
"""
ROUNDS = 8
"""Maximum number of rounds in which the programs of a launch should run (see ``segments``)."""


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, dict[str, list[dict[str, int]]]], dict[tuple, object]]:
    """Return the table, and a cache of values derived from it."""
    return json.loads(TABLE.read_text()), {}


def forget() -> None:
    """Drop the table and all values derived from it; the next launch reads the table again."""
    _table.cache_clear()


@contextmanager
def launching_with(
    *,
    run: Callable[..., None] | None = None,
    rows: Callable[..., dict[str, int]] | None = None,
) -> Iterator[None]:
    """Within the context, change all launches of the process, to count, compile or tune them.

    Contexts may be nested.

    Args:
        run: called as ``run(launch, kernel, grid, *args, **meta)`` in place of each launch;
            ``launch(kernel, grid, *args, **meta)`` performs it. None: launch as usual.
        rows: called as ``rows(row_of, kernel, d, e, dtype, device)`` for the row of a launch;
            ``row_of(kernel, d, e, dtype, device)`` returns the row of the table. None: use the
            table.
    """
    global _launch, _row_of
    before = _launch, _row_of
    if run is not None:
        _launch = partial(run, _launch)
    if rows is not None:
        _row_of = partial(rows, _row_of)
    forget()
    try:
        yield
    finally:
        _launch, _row_of = before
        forget()


@lru_cache(maxsize=64)
def capability(device: torch.device) -> str | None:
    """Return the compute capability, such as "9.0"; None if the device is not a GPU, or if PyTorch
    has no GPU (a fake tensor may name one).
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def launch_row(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Return the block sizes, warps and stages of a kernel, from the row with the smallest widths
    of at least ``d`` and ``e``.

    The caller must not change the result.

    Raises:
        ValueError: no row holds these widths.
    """
    return _row_of(kernel, d, e, dtype, device)


def _row_of_table(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    return remembered(_kernel_options, kernel, d, e, dtype, device)  # type: ignore[return-value]


def _kernel_options(*key) -> dict[str, int]:
    return given_of(table_row(*key))


def resident_programs(kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many programs of a kernel the GPU holds at once: ``ctas`` of the kernel's row
    (default 2) times the number of multiprocessors.

    Raises:
        ValueError: no row holds these widths.
    """
    row: dict[str, int] = remembered(table_row, kernel, d, e, dtype, device)
    return row.get("ctas", 2) * _multiprocessors(device)


def table_row(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Return the row of the table with the smallest widths of at least ``d`` and ``e``.

    The section of the GPU has priority over the default section.

    Raises:
        ValueError: no row holds these widths.
    """
    sections, bits = _table()[0], 8 * dtype.itemsize
    for section in (capability(device), "default"):
        rows = sections.get(section, {}).get(kernel, ())
        fit = [row for row in rows if row["d"] >= d and row["e"] >= e and row["bits"] == bits]
        if fit:
            return min(fit, key=lambda row: (row["d"], row["e"]))
    raise ValueError(f"{kernel}: no launch of d = {d}, e = {e} in {bits} bits in {TABLE.name}")


def given_of(row: dict[str, int]) -> dict[str, int]:
    """Return the entries of a row that are passed to the kernel."""
    return {name: value for name, value in row.items() if name not in NOT_OF_KERNELS}


def run(kernel, grid: Sequence[int], *args: object, **meta: object) -> None:
    """Launch ``kernel[grid](*args, **meta)``; an empty grid launches nothing.

    Raises:
        ValueError: the grid exceeds CUDA's limits.
    """
    _launch(kernel, grid, *args, **meta)


def _launch_now(kernel, grid: Sequence[int], *args: object, **meta: object) -> None:
    check_grid(kernel.__name__, grid)
    if not all(grid):
        return
    with _on_device_of(args):
        kernel[tuple(grid)](*args, **meta)


_launch: Callable[..., None] = _launch_now
_row_of: Callable[..., dict[str, int]] = _row_of_table
"""The functions behind ``run`` and ``launch_row``; ``launching_with`` replaces them temporarily."""


def _on_device_of(args: Sequence[object]) -> AbstractContextManager:
    """Switch to the GPU of the tensors, because Triton launches on the current one."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def check_grid(name: str, grid: Sequence[int]) -> None:
    """Raise ValueError for a grid of more than 2^31 - 1 programs on the first axis, or more than
    65,535 on another.
    """
    if any(size > limit for size, limit in zip(grid, GRID_LIMITS, strict=False)):
        raise ValueError(
            f"{name}: expected a grid of at most {GRID_LIMITS[: len(grid)]} programs, got "
            f"{tuple(grid)}"
        )


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that hold ``size``.

    ``triton.cdiv`` takes four microseconds per call.
    """
    return -(-size // block)


def block(width: int) -> int:
    """Return the block size for a width: the next power of two, at least 16 for matrix products."""
    return max(16, 1 << (width - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """Return the ``input_precision`` of ``tl.dot``: for float32 three passes of tf32, with errors
    of about 1e-6.
    """
    return "tf32x3" if dtype == torch.float32 else "ieee"


def remembered(make: Callable[..., object], *arguments: Hashable) -> object:
    """Return ``make(*arguments)``, which must depend only on the table and the arguments.

    The value is cached until ``forget``.
    """
    cache = _table()[1]
    cache_key = make, arguments
    if cache_key not in cache:
        cache[cache_key] = make(*arguments)
    return cache[cache_key]


def options(kernel: str, q: Tensor, v: Tensor) -> dict[str, object]:
    """Return the compile-time values of a kernel for ``q [B, h, N, d]`` and ``v [B, h, M, e]``: its
    row of the table, the widths, their block sizes, and the precision.

    The caller must not change the result.
    """
    return remembered(_options, kernel, q.shape[3], v.shape[3], q.dtype, q.device)  # type: ignore[return-value]


def _options(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    sizes = dict(D=d, E=e, BLOCK_D=block(d), BLOCK_E=block(e), PRECISION=precision(dtype))
    return launch_row(kernel, d, e, dtype, device) | sizes


def octets(x: Tensor) -> tuple[int, ...]:
    """Return the strides of all axes but the last in octets, units of 8 elements, so that the
    compiler knows the alignment of addresses.
    """
    return tuple([stride // OCTET for stride in x.stride()[:-1]])  # noqa: C409  half the time of a generator


def readable(x: Tensor) -> Tensor:
    """Return ``x``, or a contiguous copy if kernels cannot read it directly.

    Kernels need a contiguous last axis, and all other strides in whole octets.
    """
    *outer, last = x.stride()
    if last == 1 and gcd(OCTET, *outer) == OCTET:
        return x
    strides = (stride for stride, size in zip(outer, x.shape[:-1], strict=True) if size > 1)
    contiguous = last == 1 or x.shape[-1] == 1
    return x if contiguous and not any(stride % OCTET for stride in strides) else x.contiguous()


@lru_cache(maxsize=1024)
def segments(tokens: int, programs: int, block_tokens: int, resident: int, least: int = 2) -> int:
    """Return the number of segments into which to cut the tokens, one program per segment.

    Programs run in rounds of ``resident``, and a partly filled last round takes as long as the
    others. Each candidate fills one to eight rounds; the result is the candidate with the fewest
    blocks of tokens over all rounds. Each segment counts two extra blocks for the fixed work of a
    program, so that segments do not become too small.

    Args:
        tokens: tokens of each program, before cutting.
        programs: number of programs without cutting.
        block_tokens: tokens in one step of a program.
        resident: number of programs that the GPU holds at once (``resident_programs``).
        least: minimum number of steps per segment.
    """
    largest = max(1, tokens // (least * block_tokens))
    filling = (rounds * resident // max(1, programs) for rounds in range(1, ROUNDS + 1))
    candidates = {min(max(1, parts), largest) for parts in filling}

    def total_blocks(parts: int) -> int:
        return -(-programs * parts // resident) * (-(-tokens // (parts * block_tokens)) + 2)

    return min(sorted(candidates), key=total_blocks)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )
