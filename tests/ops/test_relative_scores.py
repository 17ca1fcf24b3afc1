"""Scores of relative position for every pair: strides, memory, dtype. Their values are tested under
the softmax.
"""

import pytest
import torch
from torch import Tensor

from tests.helpers.layout_cases import make_relative
from tests.helpers.oracles import assert_agree, draw, peak_bytes, run, saved_bytes
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Flat, reference
from visionattn.ops.position.scores import relative_scores
from visionattn.ops.softmax import relative_bias


@pytest.mark.parametrize("horizon", [2, 40])
def test_any_strides_of_queries_and_gradient_and_no_memory_that_nobody_wrote(horizon):
    x, table = draw(2, 31, 3, 8, seed=4), draw(3, 2 * horizon + 1, 8, seed=5)

    def call(function):
        def transposed(x, table):
            q = x[:1].transpose(1, 2).expand(2, -1, -1, -1)
            return function(Flat(table), q).transpose(1, 3).sum((0, 1))

        return transposed

    expected = run(
        call(lambda relative, q: reference.relative_bias(relative, q, 37)), {"x": x, "table": table}
    )
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised tensors with NaN
    try:
        actual = run(
            call(lambda relative, q: relative_bias(q, relative, 37)), {"x": x, "table": table}
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert_agree(actual, expected)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("kind", ["flat", "axial", "joint"])
def test_the_bias_takes_little_more_memory_than_itself_and_keeps_its_inputs_alone(kind, clipped):
    layout = None if kind == "flat" else TokenLayout(0, Grid(23, 41))
    side = {"flat": (1885,), "axial": (45,), "joint": (45, 81)}[kind]
    side = tuple(7 for _ in side) if clipped else side
    tensors = {"q": draw(1, 2, 943, 4, seed=1, dtype=torch.float32)}
    for name in ("rows", "columns") if kind == "axial" else ("table",):
        tensors[name] = draw(2, *side, 4, seed=2, dtype=torch.float32)

    def bias(q: Tensor, **tables: Tensor) -> Tensor:
        return relative_bias(q, make_relative(kind, tables, layout, "sum"), 943)

    own = 4 * 2 * 943**2
    inputs = sum(x.nbytes for x in tensors.values())
    assert peak_bytes(lambda: bias(**tensors)) < 1.5 * own
    assert saved_bytes(bias, tensors) <= 2.1 * inputs  # q of both axes and scaled tables
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    out, upstream = bias(**leaves), torch.ones(2, 943, 943).expand(1, -1, -1, -1)
    assert (
        peak_bytes(lambda: torch.autograd.grad(out, list(leaves.values()), upstream))
        < 0.7 * own + 3 * inputs
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_table_of_float32_gets_the_gradient_that_its_dtype_can_hold(dtype):
    # Thousands of queries add to the outermost class; a sum of theirs in half precision would
    # stall.
    q = draw(1, 1, 1, 9001, 3, seed=1, dtype=dtype).abs()
    table = draw(1, 1, 3, 3, seed=2, dtype=torch.float32)
    actual = run(lambda table: relative_scores(q, table, 1, 5).sum(3).float(), {"table": table})
    expected = run(
        lambda table: relative_scores(q.double(), table, 1, 5).sum(3), {"table": table.double()}
    )
    assert actual["table"].dtype == torch.float32
    error = (actual["table"] - expected["table"]).abs().max() / expected["table"].abs().max()
    assert error < torch.finfo(dtype).eps


def test_a_second_derivative_is_refused_in_words():
    q, table = draw(2, 3, 5, 4, seed=1).requires_grad_(), draw(3, 5, 4, seed=2).requires_grad_()
    out = relative_bias(q, Flat(table), 7)
    (gradient,) = torch.autograd.grad(out.square().sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("queries", [1, 7])
def test_no_keys_give_no_scores_and_zero_gradients(queries):
    inputs = {"q": draw(2, 3, queries, 4, seed=1), "table": draw(3, 5, 4, seed=2)}
    scores = run(lambda q, table: relative_bias(q, Flat(table), 0), inputs)
    assert scores["out"].shape == (2, 3, queries, 0)
    assert scores["q"].eq(0).all() and scores["table"].eq(0).all()
