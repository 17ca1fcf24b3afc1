"""What every operation owes in every dtype: the dtype it returns, and no more error than its
definition.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.helpers.operations import (
    LINEAR,
    OPERATIONS,
    every_operation,
)
from tests.helpers.oracles import draw, draw_qkv, draw_table, relative_error, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    attention_sums,
    kernelized_attention,
    taylorshift_attention,
    window,
    window_attention,
)
from visionattn.ops.position import relative_position
from visionattn.ops.position.position_scores import relative_scores
from visionattn.ops.position.relative_position import relative_sums

LOW = (torch.float16, torch.bfloat16)


def under_autocast(function):
    """The forward pass alone in autocast."""

    def call(**inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(**inputs)

    return call


@every_operation
def test_an_operation_errs_at_most_twice_as_much_as_the_definition_in_its_dtype(name, monkeypatch):
    """Also where a processor multiplies bfloat16; in float32 by two millionths of float64."""
    operation = OPERATIONS[name]
    for dtype, products in (
        (torch.float32, False),
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        monkeypatch.setattr(attention_sums, "has_bfloat16_products", lambda: products)  # noqa: B023
        tensors = operation.tensors(dtype)
        expected = run(operation.slow, {key: x.double() for key, x in tensors.items()})
        actual = run(operation.fast, tensors)
        in_dtype = run(operation.slow, {key: x.to(dtype) for key, x in tensors.items()})
        for key, x in actual.items():
            assert x.dtype == (tensors[key].dtype if key != "out" else dtype)
            # Rounding the result once is owed to nobody: without this a lucky definition would set
            # no budget at all.
            budget = 2 * relative_error(in_dtype[key], expected[key]) + torch.finfo(dtype).eps / 2
            budget = 2e-6 if dtype == torch.float32 else budget
            assert relative_error(x, expected[key]) < budget, (dtype, key)


@every_operation
def test_the_result_has_the_dtype_of_v_and_gradients_that_of_their_inputs(name):
    for dtype in (torch.float64, torch.bfloat16):
        tensors = OPERATIONS[name].tensors(dtype, batch=1)
        tensors["v"] = tensors["v"].to(torch.float32)
        for function in (OPERATIONS[name].fast, under_autocast(OPERATIONS[name].fast)):
            found = run(function, tensors)
            wanted = {"out": torch.float32} | {key: x.dtype for key, x in tensors.items()}
            assert {key: x.dtype for key, x in found.items()} == wanted


@pytest.mark.parametrize("name", [*LINEAR, "softmax in windows"])
def test_autocast_around_one_pass_or_both_changes_no_precision(name):
    operation = OPERATIONS[name]
    for dtype in (torch.float32, torch.float16):
        tensors = operation.tensors(dtype)
        expected = run(operation.fast, tensors)
        actual = run(under_autocast(operation.fast), tensors)
        assert all(torch.equal(actual[key], x) for key, x in expected.items())
    tensors = operation.tensors(torch.float32)
    expected = run(operation.fast, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(operation.fast, tensors)
    for key, x in expected.items():
        assert relative_error(actual[key], x) < 1e-6, key


@pytest.mark.parametrize("kind, normalization", [(Joint, "sum"), (Axial, "mean"), (Flat, "sum")])
def test_sums_over_a_grid_of_512_x_512_lose_nothing_in_float32(kind, normalization):
    """Differences of running sums over the grid would lose three digits here."""
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

    def sums_in(dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = {name: x.to(dtype) for name, x in tensors.items()}
        q, v = inputs.pop("q"), inputs.pop("v").requires_grad_()
        layout = TokenLayout(0, Grid(512, 512))
        position = kind(**inputs, layout=layout, normalization=normalization)
        got = relative_sums(position, q, v, None, total.to(dtype))
        (dv,) = torch.autograd.grad(got.values, v, upstream.to(dtype))
        return {"values": got.values.detach(), "mass": got.mass.detach(), "v": dv}

    expected = sums_in(torch.float64)
    for name, x in sums_in(torch.float32).items():
        assert ((x - expected[name]).abs() / expected[name]).max() < 4e-6, name


LONG = [
    ("taylorshift efficient", torch.float16, False),
    ("taylorshift efficient, plain", torch.float16, False),
    ("kernelized efficient, elu1", torch.float16, False),
    ("kernelized efficient, softmax", torch.float16, False),
    ("kernelized causal efficient, relu", torch.float16, False),
    ("taylorshift efficient", torch.bfloat16, True),
    ("kernelized efficient, elu1", torch.bfloat16, True),
    ("taylorshift efficient, joint sum", torch.bfloat16, False),
    ("kernelized efficient, joint mean", torch.bfloat16, True),
]
"""Operation, dtype, and whether the processor multiplies bfloat16."""


@pytest.mark.parametrize("name, dtype, products", LONG)
def test_65562_tokens_sixteen_times_too_large_stay_within_rounding_in_half_precision(
    name, dtype, products, monkeypatch
):
    """Summed in float16 the mass overflows, and every result is 0."""
    monkeypatch.setattr(attention_sums, "has_bfloat16_products", lambda: products)
    operation = OPERATIONS[name]
    tensors = operation.tensors(dtype, scale=16, batch=1, heads=1, queries=49 * 1338, e=4)
    tensors |= {learned: tensors[learned][-1:] for learned in operation.learned}  # of one head
    actual = run(operation.fast, tensors)
    expected = run(operation.fast, {key: x.double() for key, x in tensors.items()})
    with torch.no_grad():
        actual["without gradients"] = operation.fast(**tensors)
    expected["without gradients"] = expected["out"]
    if products:  # the gradient of a temperature is one number, whose terms cancel
        actual.pop("temperature", None)
    for key, x in actual.items():
        # A gradient of 1e-7 is subnormal.
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        floor = smallest * expected[key].numel() ** 0.5 / expected[key].norm().item()
        assert relative_error(x, expected[key]) < torch.finfo(dtype).eps + floor, key


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_causal_sums_of_thousands_of_tokens_far_from_zero_lose_no_more_than_rounding(form):
    tensors = draw_qkv(batch=1, heads=1, queries=4096, d=16, e=4)
    attend = partial(kernelized_attention, causal=True, form=form)
    for dtype in (torch.float32, torch.float16):
        given = {name: (x + 3).to(dtype) for name, x in tensors.items()}
        expected = attend(**{name: x.double() for name, x in given.items()})
        assert relative_error(attend(**given), expected) < max(2e-6, torch.finfo(dtype).eps)


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


@pytest.mark.parametrize("dtype", LOW)
def test_a_table_of_scores_gets_the_gradient_that_its_dtype_can_hold(dtype):
    # Thousands of queries add to the outermost class; a sum of theirs in half precision would
    # stall.
    q = draw(1, 1, 1, 9001, 3, seed=1, dtype=dtype).abs()
    table = draw(1, 1, 3, 3, seed=2, dtype=torch.float32)
    actual = run(lambda table: relative_scores(q, table, 1, 5).sum(3).float(), {"table": table})
    wide = {"table": table.double()}
    expected = run(lambda table: relative_scores(q.double(), table, 1, 5).sum(3), wide)["table"]
    assert actual["table"].dtype == torch.float32
    error = (actual["table"] - expected).abs().max() / expected.abs().max()
    assert error < torch.finfo(dtype).eps


def test_class_sums_are_of_bfloat16_products_without_gradients_alone(monkeypatch):
    """Under recorded gradients, which nearly cancel, tables are float32."""
    monkeypatch.setattr(attention_sums, "has_bfloat16_products", lambda: True)
    seen, own = [], relative_position.class_sums
    monkeypatch.setattr(
        relative_position,
        "class_sums",
        lambda q, table, *more: seen.append(table.dtype) or own(q, table, *more),
    )
    q, k, v = (x.bfloat16() for x in draw_qkv(queries=35, d=12, e=12).values())
    table, layout = draw_table(3, 7, 7, 12, seed=4).bfloat16(), TokenLayout(0, Grid(5, 7))
    for given in (Joint(table, layout), Flat(table[:, 0], layout)):
        kernelized_attention(q, k, v, relative=given, form="efficient")
        with torch.no_grad():
            kernelized_attention(q, k, v, relative=given, form="efficient")
    assert seen == [torch.float32, torch.bfloat16] * 2


def test_gradients_of_prefix_tokens_of_windows_are_summed_in_float32(monkeypatch):
    """Of the sum of all results, in which all terms of the gradient of a value are positive."""
    monkeypatch.setattr(window, "CACHED_ELEMENTS", 1)  # a row of windows at a time
    layout = TokenLayout(1, Grid(84, 14))
    tensors = {name: x.bfloat16() for name, x in draw_qkv(1, 2, layout.num_tokens).items()}
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in tensors.values()]
        results = window_attention(*inputs, layout=layout)
        found.append(torch.autograd.grad(results.sum(), inputs[2])[0][:, :, 0])
    assert relative_error(*found) < 2**-8
