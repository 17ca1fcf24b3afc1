"""Where kernels are launched: block sizes from one table, and limits checked before a GPU is asked.
No Triton in here.

``launches.json`` beside this file has, for each kernel, one row for each range of widths and size
of the elements; a section named as a compute capability serves its GPUs, and "default" all
others. ``python -m visionattn.lab.gpu.tune`` measures other rows on the GPU at hand.
"""

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from math import gcd
from pathlib import Path

import torch
from torch import Tensor

from visionattn.ops.sums import tokens_first  # noqa: F401  kernels take it from here

TABLE = Path(__file__).with_name("launches.json")
GRID_LIMITS = (2**31 - 1, 65_535, 65_535)
OCTET = 8
NOT_OF_KERNELS = frozenset({"d", "e", "bits", "ctas"})
"""Entries of a row that say when it is taken and how many of its programs a multiprocessor holds.
"""
ROUNDS = 8
"""In how many rounds at most the programs of a launch shall run."""


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, dict[str, list[dict[str, int]]]], dict[tuple, object]]:
    """Return the table, and what was made of its rows so far: each launch asks for its own."""
    return json.loads(TABLE.read_text()), {}


def forget() -> None:
    """Let the next launch read the table anew, as it was rewritten or ``launch_row`` gives other
    rows.
    """
    _table.cache_clear()


@contextmanager
def launching_with(
    *,
    run: Callable[..., None] | None = None,
    rows: Callable[..., dict[str, int]] | None = None,
) -> Iterator[None]:
    """Make the launches of the whole process otherwise within the context: it serves what
    counts, compiles or tunes them. Contexts may be nested.

    Args:
        run: called as ``run(launch, kernel, grid, *args, **meta)`` in place of each launch, where
            ``launch(kernel, grid, *args, **meta)`` makes it; None: launches are made.
        rows: called as ``rows(row_of, kernel, d, e, dtype, device)`` for the row of a launch, where
            ``row_of(kernel, d, e, dtype, device)`` is that of the table; None: that one.
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
    """Return the compute capability, such as "9.0"; None where the device is no GPU, or one that
    only a fake tensor is on.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def launch_row(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Return block sizes, warps and stages of a kernel: the row of the least widths that hold ``d``
    and ``e``. The caller must not change it.

    Raises:
        ValueError: no row holds these widths.
    """
    return _row_of(kernel, d, e, dtype, device)


def _row_of_table(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    return remembered(_given_row, kernel, d, e, dtype, device)  # type: ignore[return-value]


def _given_row(*asked) -> dict[str, int]:
    return given_of(table_row(*asked))


def resident_programs(kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return how many programs of a kernel the GPU holds at once: ``ctas`` of its row for each
    multiprocessor, or 2 where the row has none.

    Raises:
        ValueError: no row holds these widths.
    """
    row: dict[str, int] = remembered(table_row, kernel, d, e, dtype, device)
    return row.get("ctas", 2) * _multiprocessors(device)


def table_row(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Return the row as the table has it: that of the GPU's own section, or of the default one,
    with the least widths that hold ``d`` and ``e``.

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
    """Return what a kernel is given of a row of the table."""
    return {name: value for name, value in row.items() if name not in NOT_OF_KERNELS}


def run(kernel, grid: Sequence[int], *args: object, **meta: object) -> None:
    """Launch ``kernel[grid](*args, **meta)``; an empty grid launches nothing.

    Raises:
        ValueError: a grid beyond what CUDA launches.
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
"""What ``run`` and ``launch_row`` call; ``launching_with`` replaces them for a while."""


def _on_device_of(args: Sequence[object]) -> AbstractContextManager:
    """Switch to the GPU of the tensors, as Triton launches on the current one."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def check_grid(name: str, grid: Sequence[int]) -> None:
    """Raise ValueError for a grid beyond 2^31 - 1 programs on the first axis or 65,535 on
    another.
    """
    if any(size > limit for size, limit in zip(grid, GRID_LIMITS, strict=False)):
        raise ValueError(
            f"{name}: a grid of {tuple(grid)} programs is beyond {GRID_LIMITS[: len(grid)]}"
        )


def cdiv(size: int, block: int) -> int:
    """Return how many blocks hold ``size``. Triton's own works in kernels too, and takes four
    microseconds a call.
    """
    return -(-size // block)


def block(width: int) -> int:
    """Return the block that holds a width: a power of two from 16, as products of matrices want."""
    return max(16, 1 << (width - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """Return how products of this dtype are formed: float32 in three passes of tf32, which err by
    about 1e-6.
    """
    return "tf32x3" if dtype == torch.float32 else "ieee"


def remembered(make: Callable[..., object], *asked: Hashable) -> object:
    """Return ``make(*asked)``, made once for each reading of the table: for what follows from rows
    and sizes alone.
    """
    known = _table()[1]
    place = make, asked
    if place not in known:
        known[place] = make(*asked)
    return known[place]


def options(kernel: str, q: Tensor, v: Tensor) -> dict[str, object]:
    """Return the compile-time values for ``q [B, h, N, d]`` and ``v [B, h, M, e]``: the row of the
    table, widths and their blocks, and the precision. The caller must not change them.
    """
    return remembered(_options, kernel, q.shape[3], v.shape[3], q.dtype, q.device)  # type: ignore[return-value]


def _options(
    kernel: str, d: int, e: int, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    sizes = dict(D=d, E=e, BLOCK_D=block(d), BLOCK_E=block(e), PRECISION=precision(dtype))
    return launch_row(kernel, d, e, dtype, device) | sizes


def octets(x: Tensor) -> tuple[int, ...]:
    """Return the strides of all axes but the last in units of 8 elements, so that kernels know how
    addresses are aligned.
    """
    return tuple([stride // OCTET for stride in x.stride()[:-1]])  # noqa: C409  half the time of a generator


def readable(x: Tensor) -> Tensor:
    """Return ``x`` itself where kernels can read it as it lies, else a copy.

    They can where the last axis is contiguous and all other strides are whole octets.
    """
    *outer, last = x.stride()
    if last == 1 and gcd(OCTET, *outer) == OCTET:
        return x
    apart = (stride for stride, size in zip(outer, x.shape[:-1], strict=True) if size > 1)
    contiguous = last == 1 or x.shape[-1] == 1
    return x if contiguous and not any(stride % OCTET for stride in apart) else x.contiguous()


@lru_cache(maxsize=1024)
def segments(tokens: int, programs: int, block_tokens: int, resident: int, least: int = 2) -> int:
    """Return into how many parts to cut the tokens, each of which a program of its own handles.

    Programs run in rounds of ``resident``, and a last round that is not full takes as long as the
    others. Of the numbers of parts that fill one to eight rounds, this takes the one with the
    fewest blocks of tokens in all rounds together. A part counts as two blocks more than it holds,
    for what a program does only once, so that no part is cut for next to nothing.

    Args:
        tokens: those of each program, before cutting.
        programs: how many there would be without cutting.
        block_tokens: tokens of one step of a program.
        resident: how many programs the GPU holds at once (``resident_programs``).
        least: steps of each part at least.
    """
    most = max(1, tokens // (least * block_tokens))
    full = (rounds * resident // max(1, programs) for rounds in range(1, ROUNDS + 1))
    candidates = {min(max(1, parts), most) for parts in full}

    def blocks_in_turn(parts: int) -> int:
        return -(-programs * parts // resident) * (-(-tokens // (parts * block_tokens)) + 2)

    return min(sorted(candidates), key=blocks_in_turn)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 2
    )
