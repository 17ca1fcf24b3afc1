"""Every operation that has kernels, both passes, against its definition in float64."""

from functools import partial

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import numpy as np
import torch

from tests.helpers.kernel_cases import CASES, FUNCTIONS, LEARNED, Case, with_kernels
from tests.helpers.kernel_checks import (
    assert_within_budget,
    beyond_budget,
    both_passes,
    every_place,
    guarded,
    interpreted,
    on_gpu,
    once,
    poisoned_memory,  # noqa: F401
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")
PARTS = 3
"""Into how many parts the tokens are cut, so that parts are added too."""
IN_FLOAT16 = ("kernelized, elu1", "direct, plain", "efficient, learned, masked", "direct, joint")
"""Operations that have all code of float16 between them."""
MASKED = ["kernelized, relu, masked", "direct, learned, masked", "efficient, learned, masked"]


@every_place
@pytest.mark.parametrize("name", CASES)
def test_mean_and_every_gradient_are_those_of_the_definition(name, device, dtype, monkeypatch):
    """And a fault of one key, one query or one class would be seen."""
    if device == "cpu" and dtype == torch.float16 and name not in IN_FLOAT16:
        pytest.skip("the interpreter takes its time, and float32 runs")
    case = CASES[name]
    monkeypatch.setattr("visionattn.ops.gpu.launch.segments", lambda *args: PARTS)
    tensors, grad, mask = case.tensors()
    given = {
        x: guarded(t.to(device, dtype)) if x in "qkv" else t.to(device, torch.float32)
        for x, t in tensors.items()
    }
    grad = guarded(grad.to(device, dtype))
    mask = None if mask is None else mask.to(device)
    expected = case.defined(given, grad, mask)
    actual = with_kernels(name, given, grad, mask)
    assert_within_budget(actual, expected, dtype)
    assert all(
        x.dtype == (given["v"] if key == "out" else given[key]).dtype for key, x in actual.items()
    )
    # The last key's value, the last query's upstream gradient, the class of a query's own place.
    y, x = case.horizons
    for lost, place in {"v": (..., -1, slice(None)), "table": (..., y, x, slice(None))}.items():
        if lost in given:
            other = given | {lost: given[lost].clone()}
            other[lost][place] = 0
            assert beyond_budget(actual, case.defined(other, grad, mask), dtype), lost
    grad = grad.clone()
    grad[:, :, -1] = 0
    assert beyond_budget(actual, case.defined(given, grad, mask), dtype)


@once
@pytest.mark.parametrize("name", MASKED)
def test_masked_keys_hold_anything_and_get_no_gradient(name, device, dtype):
    tensors, grad, mask = CASES[name].tensors()
    # Of one head, as masks are of images.
    given = {x: t[:, :1].to(device, dtype) for x, t in tensors.items() if x in "qkv"}
    if "temperature" in tensors:
        given["temperature"] = tensors["temperature"][:1].to(device, torch.float32)
    mask, grad = mask.to(device), grad[:, :1].to(device, dtype)
    mask[1] = False
    absent, results = ~mask[:, None, :, None], []
    with np.errstate(all="ignore"):  # the interpreter warns of what it makes of masked rows
        odd = torch.arange(mask.shape[1], device=device)[:, None] % 2 == 1
        for even in (0.0, torch.nan):
            number = torch.where(odd & (even != 0), torch.inf, even).to(dtype)
            held = {x: torch.where(absent, number, given[x]) for x in "kv"}
            results.append(with_kernels(name, given | held, grad, mask))
    for x, wanted in results[0].items():
        assert all(torch.equal(found[x], wanted) for found in results[1:]), x
    assert all(not results[0][x].masked_select(absent).any() for x in "kv")
    assert not results[0]["out"][1].any()


SMALL = {"keys -12": ("k", -12), "keys -16": ("k", -16), "queries -16": ("q", -16)}


@interpreted
@pytest.mark.parametrize("shift", SMALL)
def test_features_near_the_end_of_float16_keep_their_digits(shift):
    """elu1(-12) is 6e-6 and elu1(-16) 1e-7: as float16 they have six bits and one."""
    tensors, grad, _ = Case("kernelized", d=16, e=16).tensors()
    name, by = SMALL[shift]
    tensors[name] += by
    given = {x: t.half() for x, t in tensors.items()}
    with np.errstate(all="ignore"):  # the interpreter warns of rows past the last key
        found = with_kernels("kernelized, elu1", given, grad.half(), None)
    wanted = Case("kernelized").defined(given, grad.half(), None)
    assert_within_budget(found, wanted, torch.float16)


@interpreted
@pytest.mark.parametrize("name", ["direct, plain", "efficient, plain"])
def test_scores_of_hundreds_and_small_gradients_stay_within_float16(name):
    tensors, grad, _ = Case("taylorshift", queries=17, keys=20, d=64, e=16).tensors()
    given = {x: (t if x == "v" else 6 * t).half() for x, t in tensors.items()}
    found = with_kernels(name, given, (grad / 1024).half(), None)
    wanted = CASES[name].defined(given, (grad / 1024).half(), None)
    assert_within_budget(found, wanted, torch.float16)


@interpreted
@pytest.mark.parametrize("name", ["direct, learned, masked", "efficient, learned, masked"])
def test_a_zero_vector_and_a_temperature_of_zero_have_finite_gradients(name):
    tensors, grad, _ = Case("taylorshift", LEARNED, d=16, e=8).tensors()
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


ANY_LENGTH = (1, 17, 63, 64, 65, 1000, 70_001)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["kernelized, elu1", "direct, learned, masked", "efficient, plain"]
)
@pytest.mark.parametrize("tokens", ANY_LENGTH)
def test_on_a_gpu_any_length_is_right(tokens, name, dtype):
    """Against PyTorch's operations in float64, which other tests hold to the definition."""
    tokens = min(tokens, 4000) if name.startswith("direct") else tokens
    case = Case(CASES[name].name, CASES[name].options, queries=tokens, keys=tokens, d=32, e=32)
    tensors, grad, _ = case.tensors()
    wide = {
        x: t.cuda().to(dtype if x in "qkv" else torch.float32).double() for x, t in tensors.items()
    }
    grad = grad.cuda().to(dtype).double()
    given = {x: t.to(dtype if x in "qkv" else torch.float32) for x, t in wide.items()}
    function = partial(FUNCTIONS[case.name], impl="eager")
    expected = both_passes(partial(case.call, function, None), wide, grad)
    assert_within_budget(with_kernels(name, given, grad, None), expected, dtype)


for mark in on_gpu:
    test_on_a_gpu_any_length_is_right = mark(test_on_a_gpu_any_length_is_right)
