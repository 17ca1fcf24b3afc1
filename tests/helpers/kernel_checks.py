"""What the tests of GPU kernels share: where they run, inputs between rows of NaN, and errors by
name against float64.

Without a GPU the kernels run in Triton's interpreter, which knows float32 and float16; with one,
under the marker ``gpu``, the same tests run on it, in bfloat16 too.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

GUARD_ROWS = 3
BUDGET = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (4e-3, 1e-2)}
"""Largest relative error of an output and of a gradient."""


def why_not_interpreted() -> str | None:
    """Say why no kernel can be interpreted here; None where one can."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "on a GPU the tests marked gpu run instead"
    from triton.runtime.errors import InterpreterError

    from visionattn.ops.gpu.partial_sums import sums_of_parts

    try:
        sums_of_parts(torch.ones(2, 3))
    except InterpreterError as error:
        if "only 0-dimensional arrays" not in str(error):
            raise
        return "this Triton's interpreter wants an older numpy"
    return None


NOT_INTERPRETED = why_not_interpreted() if find_spec("triton") else "there is no Triton"
interpreted = pytest.mark.skipif(NOT_INTERPRETED is not None, reason=str(NOT_INTERPRETED))
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def place(device: str, dtype: torch.dtype, name: str):
    """A parameter: a case on the processor, interpreted, or on a GPU under the marker ``gpu``."""
    marks = on_gpu if device == "cuda" else interpreted
    names = device, str(dtype).removeprefix("torch."), name
    return pytest.param(device, dtype, name, marks=marks, id=" ".join(names))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that ``torch.empty`` gives holds NaN, so that an element nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


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


def both_passes(function, tensors: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """The result under "out", and the gradient of every tensor under its name."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = function(**leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out))
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in float64; NaN where anything is NaN. What should be 0
    is held against 1e-3.
    """
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape
    return (
        (actual - expected).norm() / expected.norm().clamp(min=1e-3 * expected.numel() ** 0.5)
    ).item()


def beyond_budget(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Relative errors beyond the budget of the dtype: "out" as an output, all others as
    gradients.
    """
    assert actual.keys() == expected.keys()
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    return {name: x for name, x in errors.items() if not x <= BUDGET[dtype][name != "out"]}


def assert_within_budget(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Each entry by name is within the budget of the dtype."""
    wrong = beyond_budget(actual, expected, dtype)
    assert not wrong, f"relative errors beyond {BUDGET[dtype]}: {wrong}"
