"""Causal kernelized attention: each form against the reference, no leak from later tokens, memory,
precision, compilation.
"""

from functools import partial

import pytest
import torch
import torch._dynamo.testing

from tests.helpers.oracles import (
    assert_agree,
    dot,
    draw,
    draw_mask,
    draw_qkv,
    draw_table,
    elu1,
    loop_mean,
    relative_error,
    run,
)
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, kernelized_attention, reference
from visionattn.ops.kernelized.eager import kernel_sums
from visionattn.ops.kernelized.operands import CHUNK_ELEMENTS

FORMS = ("direct", "efficient")
causal_attention = partial(kernelized_attention, causal=True)
causal_reference = partial(reference.kernelized_attention, causal=True)


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of two blocks for the sizes of these tests, so that a few hundred tokens cross
    several.
    """
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 128 * 8)


def with_table(function, normalization="sum", layout=None, **options):
    """``function`` with the table of Flat among its tensors."""

    def call(table, **inputs):
        return function(**inputs, relative=Flat(table, layout, normalization), **options)

    return call


# Values and gradients


def test_the_reference_is_the_mean_over_the_keys_up_to_the_query():
    tensors, mask = draw_qkv(batch=2, heads=2, queries=5, keys=4, d=4, e=3), draw_mask(2, 4)

    def weight(b, head, i, j):
        return (
            dot(elu1(tensors["q"][b, head, i]), elu1(tensors["k"][b, head, j]))
            if mask[b, j] and j <= i
            else 0.0
        )

    out = causal_reference(**tensors, key_mask=mask)
    assert_agree({"out": out}, {"out": loop_mean(weight, tensors["v"], queries=5)}, tolerance=1e-14)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature_map", ["elu1", "relu", "given"])
def test_gradients_of_sums_mass_and_state_add(causal, form, feature_map, short_segments):
    tensors, mask = draw_qkv(queries=37, keys=141, d=5, e=4), draw_mask(2, 141)
    phi = {"elu1": reference.elu1, "relu": torch.relu, "given": lambda x: x}[feature_map]

    def defined(q, k, v):
        keys = phi(k) * mask[:, None, :, None]
        weights = phi(q) @ keys.mT
        weights = weights.tril() if causal else weights
        return weights @ v, weights.sum(3), keys.mT @ v, keys.sum(2)

    def operator(q, k, v):
        return kernel_sums(q, k, v, mask, feature_map, causal, form)

    for chosen in ([0], [1], [2], [3], [0, 1, 2, 3]):

        def together(function, chosen=chosen, **inputs):
            results = function(**inputs)
            return torch.cat([results[index].flatten() for index in chosen])

        expected = {name: torch.zeros_like(x) for name, x in tensors.items()}
        inputs = {name: x.clone().requires_grad_() for name, x in tensors.items()}
        out = together(defined, **inputs)
        upstream = draw(*out.shape, seed=99, dtype=torch.bfloat16).to(out.dtype)
        gradients = torch.autograd.grad(
            out, list(inputs.values()), upstream, materialize_grads=True
        )
        expected = {"out": out.detach()} | dict(zip(inputs, gradients, strict=True))
        assert_agree(run(partial(together, operator), tensors), expected, floor=1e-3)


# Order


def test_what_has_no_order_of_tokens_is_refused():
    tensors, layout = draw_qkv(queries=17, d=5, e=4), TokenLayout(2, Grid(3, 5))
    table = draw_table(3, 3, 3, 5, seed=0)
    with pytest.raises(ValueError, match=r"causal.*softmax"):
        causal_attention(**tensors, feature_map="softmax")
    with pytest.raises(ValueError, match=r"causal.*Flat.*Joint"):
        causal_attention(**tensors, relative=Joint(table, layout))
    with pytest.raises(ValueError, match=r"causal.*Flat.*Axial"):
        causal_attention(**tensors, relative=Axial(table[:, 0], table[:, 1], layout))


# Memory, strides, dtypes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_thousands_of_tokens_far_from_zero_mean_lose_no_more_than_rounding(form, dtype):
    tensors = draw_qkv(batch=1, heads=1, queries=4096, d=16, e=4)
    tensors = {name: (x + 3).to(dtype) for name, x in tensors.items()}
    out = causal_attention(**tensors, form=form)
    expected = causal_attention(**{name: x.double() for name, x in tensors.items()})
    assert relative_error(out, expected) < max(2e-6, torch.finfo(dtype).eps)


# Autograd and compilation
