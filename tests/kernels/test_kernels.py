"""Every operation that has kernels, both passes, against its definition in float64."""

from functools import partial

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import numpy as np
import torch

from tests.helpers.kernel_cases import CASES, FUNCTIONS, LEARNED, Case, with_kernels
from tests.helpers.kernel_checks import (
    BUDGET,
    assert_within_budget,
    beyond_budget,
    both_passes,
    guarded,
    interpreted,
    place,
    poisoned_memory,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PARTS = 3
"""Into how many parts the tokens are cut, so that parts are added too."""
IN_FLOAT16 = ("kernelized, elu1", "direct, plain", "efficient, learned, masked", "direct, joint")
"""Operations that have all code of float16 between them."""
PLACES = [
    *(place("cpu", torch.float32, name) for name in CASES),
    *(place("cpu", torch.float16, name) for name in IN_FLOAT16),
    *(place("cuda", dtype, name) for dtype in BUDGET for name in CASES),
]


@pytest.mark.parametrize("device, dtype, name", PLACES)
def test_mean_and_every_gradient_are_those_of_the_definition(name, device, dtype, monkeypatch):
    """And a fault of one key, one query or one class would be seen. Masked keys hold NaN and
    infinity and get no gradient; one image has no others.
    """
    case = CASES[name]
    monkeypatch.setattr("visionattn.ops.gpu.launch.segments", lambda *args: PARTS)
    tensors, grad, mask = case.tensors()
    given = {x: t.to(device, dtype if x in "qkv" else torch.float32) for x, t in tensors.items()}
    grad, held = guarded(grad.to(device, dtype)), dict(given)
    if mask is not None:
        mask[1] = False
        mask = mask.to(device)
        odd = torch.arange(mask.shape[1], device=device)[:, None] % 2 == 1
        garbage = torch.where(odd, torch.inf, torch.nan).to(dtype)
        held |= {x: torch.where(mask[:, None, :, None], given[x], garbage) for x in "kv"}
    held |= {x: guarded(held[x]) for x in "qkv"}
    expected = case.defined(given, grad, mask)
    with np.errstate(all="ignore"):  # the interpreter warns of what it makes of masked rows
        actual = with_kernels(name, held, grad, mask)
    assert_within_budget(actual, expected, dtype)
    dtypes = {x: t.dtype for x, t in (given | {"out": given["v"]}).items()}
    assert {x: t.dtype for x, t in actual.items()} == dtypes
    if mask is not None:
        assert not any(actual[x].masked_select(~mask[:, None, :, None]).any() for x in "kv")
        assert not actual["out"][1].any()
    # The last value that counts, the last query's upstream gradient, the class of a query's own
    # place.
    last = -1 if mask is None else int(mask[0].nonzero()[-1])
    y, x = case.horizons
    for lost, where in {"v": (..., last, slice(None)), "table": (..., y, x, slice(None))}.items():
        if lost in given:
            other = given | {lost: given[lost].clone()}
            other[lost][where] = 0
            assert beyond_budget(actual, case.defined(other, grad, mask), dtype), lost
    grad = grad.clone()
    grad[:, :, -1] = 0
    assert beyond_budget(actual, case.defined(given, grad, mask), dtype)


@interpreted
def test_features_near_the_end_of_float16_keep_their_digits():
    """elu1(-12) is 6e-6 and elu1(-16) 1e-7: as float16 they have six bits and one."""
    for name, by in (("k", -12), ("k", -16), ("q", -16)):
        tensors, grad, _ = Case("kernelized", d=16, e=16).tensors()
        given = {x: (t + by if x == name else t).half() for x, t in tensors.items()}
        with np.errstate(all="ignore"):  # the interpreter warns of rows past the last key
            found = with_kernels("kernelized, elu1", given, grad.half(), None)
        wanted = Case("kernelized").defined(given, grad.half(), None)
        assert_within_budget(found, wanted, torch.float16)


@interpreted
@pytest.mark.parametrize("name", ["direct, plain", "efficient, plain"])
def test_scores_of_hundreds_and_small_gradients_stay_within_float16(name):
    tensors, grad, _ = Case("taylorshift", queries=17, keys=20, d=32, e=16).tensors()
    given = {x: (t if x == "v" else 8 * t).half() for x, t in tensors.items()}
    found = with_kernels(name, given, (grad / 1024).half(), None)
    wanted = CASES[name].defined(given, (grad / 1024).half(), None)
    assert_within_budget(found, wanted, torch.float16)


@interpreted
@pytest.mark.parametrize("name", ["direct, learned, masked", "efficient, learned, masked"])
def test_a_zero_vector_and_a_temperature_of_zero_have_finite_gradients(name):
    tensors, grad, _ = Case("taylorshift", LEARNED, d=16, e=8, queries=17, keys=20).tensors()
    given = {x: t.float() for x, t in tensors.items()}
    given["q"][:, :, 2] = given["k"][:, :, 7] = given["temperature"][0] = 0
    found = with_kernels(name, given, 1e-3 * grad.float(), None)
    wanted = CASES[name].defined(given, 1e-3 * grad.float(), None)
    assert all(x.isfinite().all() for x in found.values())
    assert_within_budget(
        {x: found[x] for x in ("out", "v", "temperature")},
        {x: wanted[x] for x in ("out", "v", "temperature")},
        torch.float32,
    )


LONG = ("kernelized, elu1", "direct, learned, masked", "efficient, plain")


@pytest.mark.parametrize(
    "device, dtype, name", [place("cuda", dtype, name) for dtype in BUDGET for name in LONG]
)
def test_on_a_gpu_any_length_is_right(device, dtype, name):
    """Against PyTorch's operations in float64, which other tests hold to the definition."""
    for tokens in (1, 17, 63, 64, 65, 1000, 4000 if name.startswith("direct") else 70_001):
        case = Case(CASES[name].name, CASES[name].options, queries=tokens, keys=tokens, d=32, e=32)
        tensors, grad, _ = case.tensors()
        given = {
            x: t.to(device, dtype if x in "qkv" else torch.float32) for x, t in tensors.items()
        }
        grad = grad.to(device, dtype)
        function = partial(FUNCTIONS[case.name], impl="eager")
        wide = {x: t.double() for x, t in given.items()}
        expected = both_passes(partial(case.call, function, None), wide, grad.double())
        assert_within_budget(with_kernels(name, given, grad, None), expected, dtype)
