"""What symmetry, order and independence demand of every operation, with no definition beside it."""

from functools import partial

import pytest
import torch

from tests.helpers.operations import OPERATIONS, RELATIVE, TOKENS
from tests.helpers.oracles import (
    assert_agree,
    draw,
    draw_kept,
    draw_mask,
    draw_qkv,
    draw_table,
    run,
)
from visionattn.ops import Flat, kernelized_attention, taylorshift_attention

CAUSAL = [name for name in OPERATIONS if " causal" in name]
WITHOUT_ORDER = [
    name
    for name in OPERATIONS
    if name not in RELATIVE + CAUSAL and name not in ("softmax twin", "softmax in windows")
]


@pytest.mark.parametrize("name", WITHOUT_ORDER)
def test_without_position_permuting_the_tokens_permutes_output_and_gradients(name):
    tensors, order = OPERATIONS[name].tensors(e=5), draw_kept(1, TOKENS, TOKENS)[0]
    tensors |= {"weight": draw(2, 3, TOKENS, 5, seed=8)}

    def weighed(weight, **inputs):
        return (OPERATIONS[name].fast(**inputs) * weight).sum((0, 1, 2))

    shuffled = {key: x[:, :, order] if x.ndim == 4 else x for key, x in tensors.items()}
    expected = {
        key: x[:, :, order] if x.ndim == 4 else x for key, x in run(weighed, tensors).items()
    }
    assert_agree(run(weighed, shuffled), expected)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("masked", [False, True])
def test_a_later_token_has_a_gradient_of_exactly_zero_and_changes_no_digit(name, masked):
    operation, tokens = OPERATIONS[name], 49 * 3
    tensors = operation.tensors(batch=1, queries=tokens, e=3)
    inputs = {key: x.requires_grad_() for key, x in tensors.items()}
    function = partial(operation.fast, key_mask=draw_mask(1, tokens) if masked else None)
    out = function(**inputs)
    for i in (0, 1, 2, 3, 63, 64, 127, 128, tokens - 2):
        gradients = torch.autograd.grad(
            out[:, :, i].sum(), [inputs[part] for part in "qkv"], retain_graph=True
        )
        assert all(gradient[:, :, i + 1 :].eq(0).all() for gradient in gradients)
        later = torch.arange(tokens)[:, None] > i
        others = {part: torch.where(later, 7 - 3 * inputs[part], inputs[part]) for part in "qkv"}
        assert torch.equal(function(**inputs | others)[:, :, : i + 1], out[:, :, : i + 1])


@pytest.mark.parametrize("normalization", ["sum", "mean"])
@pytest.mark.parametrize(
    "function",
    [kernelized_attention, partial(kernelized_attention, causal=True), taylorshift_attention],
)
def test_moving_a_sequence_between_absent_tokens_changes_nothing_under_flat_position(
    function, normalization
):
    tensors = draw_qkv(queries=23, d=5, e=4)
    relative = Flat(draw_table(3, 7, 5, seed=3), normalization=normalization)
    out = function(**tensors, relative=relative)
    for before, after in ((0, 9), (5, 0), (70, 3)):
        padded = {
            name: torch.cat(
                [draw(2, 3, before, x.shape[3], seed=1), x, draw(2, 3, after, x.shape[3], seed=2)],
                2,
            )
            for name, x in tensors.items()
        }
        mask = torch.zeros(2, before + 23 + after, dtype=torch.bool)
        mask[:, before : before + 23] = True
        moved = function(**padded, relative=relative, key_mask=mask)[:, :, before : before + 23]
        torch.testing.assert_close(moved, out, rtol=1e-12, atol=1e-13)
