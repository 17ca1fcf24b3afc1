"""The interpreter of these tests, where it is not Triton's own: what it refuses, as that one."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="GPU kernels need Triton")

from triton import language as tl  # noqa: E402
from triton.runtime.interpreter import InterpreterError  # noqa: E402

from tests.helpers.kernel_checks import INTERPRETED  # noqa: E402


@triton.jit
def _combine(x, y, out, OPERATION: tl.constexpr):
    at = tl.arange(0, 4)
    x, y = tl.load(x + at), tl.load(y + at)
    if OPERATION == "add":
        result = x + y
    elif OPERATION == "sub":
        result = x - y
    else:
        result = x * y
    tl.store(out + at, result)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU tells nobody")
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_whole_numbers_beyond_their_type_are_refused_and_the_largest_is_not(operation, dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x, y, wanted = {
        "add": ([most - 1, 3, least, 0], [1, -5, 0, 0], [most, -2, least, 0]),
        "sub": ([least + 1, 3, most, 0], [1, -5, 0, 0], [least, 8, most, 0]),
        "mul": ([most, 3, least, 0], [1, -5, 1, 9], [most, -15, least, 0]),
    }[operation]
    x, y, wanted = (torch.tensor(numbers, dtype=dtype) for numbers in (x, y, wanted))
    out = torch.zeros_like(x)
    _combine[(1,)](x, y, out, operation)
    assert torch.equal(out, wanted)
    y[0] = 2
    with pytest.raises(InterpreterError, match=f"overflow detected for operation {operation}"):
        _combine[(1,)](x, y, out, operation)
