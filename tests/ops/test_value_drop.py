"""Dropout of whole rows of the values: one meaning in every operation, form and dtype, and in
training alone.
"""

import pytest
import torch

from tests.helpers.operations import OPERATIONS, TOKENS, some_operations
from tests.helpers.oracles import assert_agree, draw, draw_mask, run
from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import kernelized_attention, taylorshift_attention
from visionattn.ops.sums import drop_values

P = 0.3


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def factors(*shape: int) -> torch.Tensor:
    """What the rows of v are multiplied with for this seed, ``[B, h, M, 1]``."""
    return drop_values(torch.ones(*shape, 1, dtype=torch.float64), P, seeded())


def dropping(name: str, **options):
    return lambda **inputs: OPERATIONS[name].fast(
        **inputs, value_drop=P, generator=seeded(), **options
    )


def test_a_row_is_dropped_whole_or_scaled_up_and_the_share_of_the_dropped_is_p():
    v = draw(5, 7, 211, 3, seed=1)
    out = drop_values(v, P, seeded())
    zero = out == 0
    dropped = zero.all(3)
    assert torch.equal(dropped, zero.any(3))  # [0, 1.43, 1.43] is no row
    torch.testing.assert_close(out[~dropped], v[~dropped] / (1 - P), rtol=1e-12, atol=0)
    assert abs(dropped.double().mean() - P) < 5 * (P * (1 - P) / dropped.numel()) ** 0.5
    for a, b in (
        (dropped[0], dropped[1]),
        (dropped[:, 0], dropped[:, 1]),
    ):  # every image and head draws for itself
        assert (a != b).any()


@some_operations
@pytest.mark.parametrize("masked", [False, True])
def test_some_operations_is_its_definition_applied_to_values_with_rows_dropped(name, masked):
    operation, options = OPERATIONS[name], {"key_mask": draw_mask(2, TOKENS)} if masked else {}
    factor = factors(2, 3, TOKENS)

    def dropped(v, **inputs):
        return operation.slow(v=factor * v, **inputs, **options)

    assert_agree(
        run(dropping(name, **options), operation.tensors()), run(dropped, operation.tensors())
    )


@some_operations
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_the_gradient_is_zero_for_dropped_rows_and_for_no_others_in_any_dtype(name, dtype):
    gradient = run(dropping(name), OPERATIONS[name].tensors(dtype))["v"]
    assert torch.equal(gradient.eq(0).all(3, keepdim=True), factors(2, 3, TOKENS) == 0)


@some_operations
def test_a_probability_of_zero_draws_nothing_and_is_the_operation_without_dropout(name):
    operation = OPERATIONS[name]
    tensors, before = operation.tensors(torch.float32), torch.get_rng_state()
    plain = run(operation.fast, tensors)
    undropped = run(lambda **i: operation.fast(**i, value_drop=0.0), tensors)
    assert torch.equal(torch.get_rng_state(), before)
    for key, x in plain.items():
        assert torch.equal(undropped[key], x), key


@pytest.mark.parametrize("function", [kernelized_attention, taylorshift_attention])
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_the_mass_is_that_of_all_keys(function, form):
    # With k = 0 all 11 keys weigh the same; of values that are 1 what is left is the share of the
    # kept, scaled up.
    tensors = dict(
        q=draw(1, 2, 3, 5, seed=1), k=torch.zeros(1, 2, 11, 5), v=torch.ones(1, 2, 11, 4)
    )
    tensors = {name: x.double() for name, x in tensors.items()}
    out = function(**tensors, value_drop=P, generator=seeded(), form=form)
    kept = (factors(1, 2, 11) > 0).double().sum(2, keepdim=True)
    assert kept.min() < 11
    torch.testing.assert_close(out, (kept / (1 - P) / 11).expand(1, 2, 3, 4), rtol=1e-12, atol=0)


def test_without_a_generator_the_draws_are_those_of_torch_itself():
    tensors = OPERATIONS["kernelized efficient, elu1"].tensors()
    torch.manual_seed(4)
    out = kernelized_attention(**tensors, value_drop=P)
    torch.testing.assert_close(
        out, dropping("kernelized efficient, elu1")(**tensors), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("attention", ["kernelized", "taylorshift", "softmax"])
def test_a_layer_drops_in_training_and_not_in_evaluation(attention):
    torch.manual_seed(1)
    layer, plain = (Attention(48, 3, attention=attention, attn_drop=p) for p in (P, 0.0))
    plain.load_state_dict(layer.state_dict())
    x, layout = draw(2, 22, 48, seed=2, dtype=torch.float32), TokenLayout(1, Grid(3, 7))
    expected = plain.eval()(x, layout)
    assert torch.equal(layer.eval()(x, layout), expected)
    first, second = (layer.train()(x, layout) for _ in range(2))
    assert not torch.equal(first, second) and not torch.equal(first, expected)
    assert torch.equal(plain.train()(x, layout), expected)
    torch.manual_seed(7)
    again = layer(x, layout)
    torch.manual_seed(7)
    assert torch.equal(layer(x, layout), again)
