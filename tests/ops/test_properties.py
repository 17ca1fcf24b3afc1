"""What symmetry, order and independence demand of every operation, with no definition beside it."""

from functools import partial

import pytest
import torch

from tests.helpers.operations import OPERATIONS, RELATIVE, TOKENS
from tests.helpers.oracles import (
    assert_agree,
    draw,
    draw_kept,
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
