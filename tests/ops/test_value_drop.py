"""Dropout of whole rows of the values: one meaning in every operation, form and dtype, and in
training alone.
"""

import pytest
import torch

from tests.helpers.operations import OPERATIONS, TOKENS, every_operation
from tests.helpers.oracles import assert_agree, draw, draw_mask, run
from visionattn.layers import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import kernelized_attention, softmax_attention, taylorshift_attention
from visionattn.ops.attention_sums import drop_values

P = 0.3


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def factors(*shape: int) -> torch.Tensor:
    """What the rows of v are multiplied with for this seed, ``[B, h, M, 1]``."""
    return drop_values(torch.ones(*shape, 1, dtype=torch.float64), P, seeded())


def test_a_row_is_dropped_whole_or_scaled_up_and_the_share_of_the_dropped_is_p():
    v = draw(5, 7, 211, 3, seed=1)
    out = drop_values(v, P, seeded())
    zero = out == 0
    dropped = zero.all(3)
    assert torch.equal(dropped, zero.any(3))  # [0, 1.43, 1.43] is no row
    torch.testing.assert_close(out[~dropped], v[~dropped] / (1 - P), rtol=1e-12, atol=0)
    assert abs(dropped.double().mean() - P) < 5 * (P * (1 - P) / dropped.numel()) ** 0.5
    # Every image and head draws for itself.
    assert (dropped[0] != dropped[1]).any() and (dropped[:, 0] != dropped[:, 1]).any()


@every_operation
def test_an_operation_is_its_definition_applied_to_values_with_rows_dropped(name):
    """The mass is that of all keys; in half precision too the gradient is zero for dropped rows and
    for no others.
    """
    operation, factor = OPERATIONS[name], factors(2, 3, TOKENS)

    def dropping(**inputs):
        return operation.fast(**inputs, value_drop=P, generator=seeded())

    def masked(**inputs):
        return dropping(**inputs, key_mask=draw_mask(2, TOKENS))

    def defined(v, **inputs):
        return operation.slow(v=factor * v, **inputs, key_mask=draw_mask(2, TOKENS))

    assert_agree(run(masked, operation.tensors()), run(defined, operation.tensors()))
    gradient = run(dropping, operation.tensors(torch.float16))["v"]
    assert torch.equal(gradient.eq(0).all(3, keepdim=True), factor == 0)


def test_a_probability_of_zero_draws_nothing_and_without_a_generator_torch_draws():
    tensors, before = OPERATIONS["kernelized direct, relu"].tensors(), torch.get_rng_state()
    for function in (taylorshift_attention, kernelized_attention, softmax_attention):
        assert torch.equal(function(**tensors, value_drop=0.0), function(**tensors))
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    out = kernelized_attention(**tensors, value_drop=P)
    again = kernelized_attention(**tensors, value_drop=P, generator=seeded())
    torch.testing.assert_close(out, again, rtol=1e-12, atol=1e-13)


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
