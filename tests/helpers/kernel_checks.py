"""What the tests of GPU kernels share: where they run, inputs between rows of NaN, and errors by
name against float64.

Without a GPU the kernels run in Triton's interpreter, which knows float32 and float16; with one,
under the marker ``gpu``, the same tests run on it, in bfloat16 too.
"""

import os
from collections.abc import Iterable, Iterator

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GUARD_ROWS = 3
BUDGET = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (4e-3, 1e-2)}
"""Largest relative error of an output and of a gradient."""
ROW_BUDGET = {torch.float32: (2e-5, 2e-5)}
ROW_BUDGET |= {
    dtype: (torch.finfo(dtype).eps, 2.5 * torch.finfo(dtype).eps)
    for dtype in (torch.float16, torch.bfloat16)
}
"""The same of each row for itself: a row of an output errs by half an eps at most when it is
rounded, and as much before; of a gradient, a difference, by five such roundings. In units of eps,
since float16 and bfloat16 have the same ones.
"""

_on_processor = pytest.mark.skipif(
    not INTERPRETED, reason="Triton compiles for the GPU at hand, where the same test runs"
)
_on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def _place(device: str, dtype: torch.dtype):
    marks = _on_gpu if device == "cuda" else _on_processor
    return pytest.param(
        device, dtype, marks=marks, id=f"{device} {str(dtype).removeprefix('torch.')}"
    )


_interpreted = [_place("cpu", torch.float32), _place("cpu", torch.float16)]
every_place = pytest.mark.parametrize(
    ("device", "dtype"), [*_interpreted, _place("cuda", torch.bfloat16)]
)
"""For the kernels themselves: on a GPU in the one dtype that cannot be interpreted, since compiling
takes its time there.
"""
every_dtype_of_every_place = pytest.mark.parametrize(
    ("device", "dtype"),
    _interpreted
    + [_place("cuda", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)],
)


SHIFTS = {
    "keys -12": ("k", slice(None), -12),
    "keys -16": ("k", slice(None), -16),
    "queries -16": ("q", slice(None), -16),
}
SHIFTS |= {"one query -12": ("q", slice(5, 6), -12), "both -12": ("qk", slice(None), -12)}
"""Tokens whose features are to be near the end of float16: of which tensors, and by how much."""


def poisoned_memory() -> Iterator[None]:
    """As a fixture: memory that ``torch.empty`` gives holds NaN, so that an element nobody writes
    is seen.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def guarded(x: Tensor) -> Tensor:
    """``x [B, h, N, c]`` in memory whose tokens come before heads, with rows of NaN around the
    tokens of each image.

    A kernel that reads past the tokens of its image, or with the wrong stride, carries NaN into
    what it writes.
    """
    batch, heads, tokens, width = x.shape
    room = x.new_full((batch, tokens + 2 * GUARD_ROWS, heads, width), torch.nan)
    inside = room[:, GUARD_ROWS : GUARD_ROWS + tokens].transpose(1, 2)
    inside.copy_(x)
    return inside


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; NaN where anything is NaN. What should be 0
    is held against 1e-3.
    """
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape
    return (
        (actual - expected).norm() / expected.norm().clamp(min=1e-3 * expected.numel() ** 0.5)
    ).item()


def assert_within_budget(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Each entry by name, "out" as an output and all others as gradients, within the budget of the
    dtype.
    """
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    output, gradient = BUDGET[dtype]
    wrong = {
        name: error
        for name, error in errors.items()
        if not error <= (output if name == "out" else gradient)
    }
    assert not wrong, f"relative errors beyond {output:g} and {gradient:g}: {wrong}"


def assert_rows_within_budget(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, rows: Iterable[int]
) -> None:
    """Each of the rows of "out" and of the gradient of queries for itself, within its budget."""
    for name, budget in zip(("out", "q"), ROW_BUDGET[dtype], strict=True):
        for i in rows:
            error = relative_error(actual[name][:, :, i], expected[name][:, :, i])
            assert error <= budget, (name, i, error)
