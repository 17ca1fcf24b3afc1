"""What every operation owes in every dtype: the dtype it returns, and no more error than its
definition.
"""

import contextlib
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.helpers.operations import (
    OPERATIONS,
    RELATIVE,
    every_linear_operation,
    every_operation,
    some_operations,
)
from tests.helpers.oracles import draw, draw_qkv, draw_table, relative_error, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, kernelized_attention, sums, taylorshift_attention
from visionattn.ops.position.kinds import relative_sums

LOW = (torch.float16, torch.bfloat16)
CONTENT = [name for name in OPERATIONS if name not in RELATIVE]


@every_operation
def test_float32_is_within_two_millionths_of_float64(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(torch.float32)
    actual = run(operation.fast, tensors)
    expected = run(operation.slow, {key: x.double() for key, x in tensors.items()})
    for key, x in actual.items():
        assert x.dtype == torch.float32
        assert relative_error(x, expected[key]) < 2e-6, key


@every_operation
@pytest.mark.parametrize("dtype", LOW)
def test_half_precision_errs_at_most_twice_as_much_as_the_definition_in_it(name, dtype):
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype)
    expected = run(operation.slow, {key: x.double() for key, x in tensors.items()})
    actual = run(operation.fast, tensors)
    in_dtype = run(operation.slow, {key: x.to(dtype) for key, x in tensors.items()})
    for key, x in actual.items():
        assert x.dtype == (tensors[key].dtype if key != "out" else dtype)
        # Rounding the result once is owed to nobody: without this a lucky definition would set no
        # budget at all.
        budget = 2 * relative_error(in_dtype[key], expected[key]) + torch.finfo(dtype).eps / 2
        assert relative_error(x, expected[key]) < budget, key


@some_operations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_result_has_the_dtype_of_v_and_gradients_that_of_their_inputs(name, dtype, autocast):
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype, batch=1)
    tensors["v"] = tensors["v"].to(torch.float32)
    inputs = {key: x.requires_grad_() for key, x in tensors.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
        out = operation.fast(**inputs)
    assert out.dtype == torch.float32
    gradients = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert [g.dtype for g in gradients] == [x.dtype for x in inputs.values()]


@every_linear_operation
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_autocast_around_the_forward_pass_changes_nothing(name, dtype):
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype)

    def under_autocast(**inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return operation.fast(**inputs)

    expected, actual = run(operation.fast, tensors), run(under_autocast, tensors)
    for key, x in expected.items():
        assert torch.equal(actual[key], x), key


@every_linear_operation
def test_a_backward_pass_under_autocast_is_as_exact_as_outside(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(torch.float32)
    expected = run(operation.fast, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(operation.fast, tensors)
    for key, x in expected.items():
        assert relative_error(actual[key], x) < 1e-6, key


@pytest.mark.parametrize("name", [name for name in RELATIVE if name.startswith("kernelized, ")])
def test_float32_loses_nothing_on_a_large_grid(name):
    # Differences of running sums over the grid would lose three digits here; the values have a mean
    # far from 0.
    operation = OPERATIONS[name]
    tensors = operation.tensors(torch.float32, batch=1, queries=49 * 400, e=3)
    tensors["v"] += 10
    actual = run(operation.fast, tensors)
    expected = run(operation.fast, {key: x.double() for key, x in tensors.items()})
    for key in ("out", "v"):  # the others are small differences of large sums by their definition
        assert relative_error(actual[key], expected[key]) < 2e-6, key


@pytest.mark.parametrize("kind, normalization", [(Joint, "sum"), (Axial, "mean"), (Flat, "sum")])
def test_sums_over_a_grid_of_512_x_512_lose_nothing_in_float32(kind, normalization):
    # All numbers are positive, so that every single sum can be asked for, of the window and of
    # 200,000 keys alike.
    side, tokens, total = (7,), 512 * 512, torch.full((1, 1, 1), 512.0 * 512)
    shapes = {
        Joint: {"table": (7, 7)},
        Axial: {"rows": side, "columns": side},
        Flat: {"table": side},
    }[kind]
    tensors = {
        name: draw_table(1, *shape, 4, seed=i) for i, (name, shape) in enumerate(shapes.items())
    }
    tensors |= {"q": draw(1, 1, tokens, 4, seed=3), "v": 10 + draw(1, 1, tokens, 2, seed=4)}
    tensors = {name: x.float() for name, x in tensors.items()}
    upstream = 10 + draw(1, 1, tokens, 2, seed=5)

    def sums(dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = {name: x.to(dtype) for name, x in tensors.items()}
        q, v = inputs.pop("q"), inputs.pop("v").requires_grad_()
        position = kind(
            **inputs, layout=TokenLayout(0, Grid(512, 512)), normalization=normalization
        )
        got = relative_sums(position, q, v, None, total.to(dtype))
        (dv,) = torch.autograd.grad(got.values, v, upstream.to(dtype))
        return {"values": got.values.detach(), "mass": got.mass.detach(), "v": dv}

    expected = sums(torch.float64)
    for name, x in sums(torch.float32).items():
        assert ((x - expected[name]).abs() / expected[name]).max() < 4e-6, name


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("feature_map", ["elu1", "relu", "softmax"])
def test_sums_over_16384_tokens_do_not_overflow_in_half_precision(feature_map, dtype):
    # Summed in float16 the mass of elu1 overflows and every result is 0.
    tensors = {key: x.to(dtype) for key, x in draw_qkv(1, 1, 16384, d=16, e=4).items()}
    actual = run(partial(kernelized_attention, feature_map=feature_map), tensors)
    exact = run(
        partial(kernelized_attention, feature_map=feature_map),
        {key: x.double() for key, x in tensors.items()},
    )
    assert actual["out"].ne(0).float().mean() > 0.9
    for key, x in actual.items():
        assert relative_error(x, exact[key]) < torch.finfo(dtype).eps, key


@pytest.mark.parametrize("products", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, torch.float16) for name in CONTENT if "efficient" in name),
        ("taylorshift efficient", torch.bfloat16),
        ("kernelized efficient, elu1", torch.bfloat16),
        ("taylorshift efficient, joint sum", torch.bfloat16),
        ("kernelized, joint mean", torch.bfloat16),
    ],
)
def test_65562_tokens_sixteen_times_too_large_stay_within_rounding_in_half_precision(
    name, dtype, products, monkeypatch
):
    if products and dtype == torch.float16:
        pytest.skip("float16 is multiplied in float32 on every processor")
    monkeypatch.setattr(sums, "has_bfloat16_products", lambda: products)
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype, scale=16, batch=1, heads=1, queries=49 * 1338, e=4)
    tensors |= {
        learned: tensors[learned][-1:] for learned in operation.learned
    }  # those of one head
    actual = run(operation.fast, tensors)
    expected = run(operation.fast, {key: x.double() for key, x in tensors.items()})
    if products:  # the gradient of a temperature is one number, whose terms cancel
        actual.pop("temperature", None)  # test_bfloat16.py bounds it
    for key, x in actual.items():
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        floor = (
            smallest * expected[key].numel() ** 0.5 / expected[key].norm().item()
        )  # a gradient of 1e-7 is subnormal
        assert relative_error(x, expected[key]) < torch.finfo(dtype).eps + floor, key


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_the_form_that_is_named_is_the_form_that_runs(function):
    # The forms agree to rounding and round differently: were one run in place of the other, no
    # digit would differ.
    tensors = {key: x.float() for key, x in draw_qkv(queries=300, d=16, e=24).items()}
    direct, efficient = (
        run(partial(function, form=form), tensors) for form in ("direct", "efficient")
    )
    for key, x in direct.items():
        assert not torch.equal(x, efficient[key]), key
        assert relative_error(x, efficient[key]) < 5e-6, key
