"""Softmax attention: its reference against loops and numbers by hand, the operation against the reference."""

import math
from functools import partial

import pytest
import torch
from layout_cases import CASES, make_relative
from oracles import assert_agree, dot, draw, draw_mask, draw_qkv, loop_mean, run

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Flat, Joint, reference, softmax_attention

LENGTHS = {"N = M": (77, 77), "N < M": (53, 77), "N > M": (77, 53), "one query": (1, 77), "one key": (77, 1)}


def test_the_reference_gives_the_numbers_worked_out_by_hand():
    rows = ([[1.0, 0.0]], [[0.0, 2.0], [1.0, -3.0]], [[10.0], [20.0]])
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in rows)
    w0, w1 = 1, math.exp(1 / math.sqrt(2))  # the scores are 0 and 1, over sqrt(2)
    assert reference.softmax_attention(q, k, v).item() == pytest.approx((10 * w0 + 20 * w1) / (w0 + w1), rel=1e-15)


def test_the_reference_of_the_bias_puts_rows_first_past_first_and_leaves_out_the_prefix():
    # A grid of 2 x 2 after a prefix token; entry (dy, dx) of the table is 10 * (dy + 1) + (dx + 1), times q = 2.
    table = (10 * torch.arange(3)[:, None] + torch.arange(3)).to(torch.float64).reshape(1, 3, 3, 1)
    q = torch.full((1, 1, 5, 1), 2.0, dtype=torch.float64)
    bias = reference.relative_bias(Joint(table, TokenLayout(1, Grid(2, 2))), q)[0, 0]
    expected = [[0, 0, 0, 0, 0], [0, 11, 12, 21, 22], [0, 10, 11, 20, 21], [0, 1, 2, 11, 12], [0, 0, 1, 10, 11]]
    assert torch.equal(bias, 2 * torch.tensor(expected, dtype=torch.float64))


def test_the_reference_is_the_mean_over_pairs_one_at_a_time():
    tensors, mask = draw_qkv(batch=2, heads=2, queries=3, keys=5, d=4, e=3), draw_mask(2, 5)
    bias = draw(2, 2, 3, 5, seed=3)

    def weight(b, head, i, j):
        score = dot(tensors["q"][b, head, i], tensors["k"][b, head, j]) / 2 + bias[b, head, i, j].item()
        return math.exp(score) if mask[b, j] else 0.0

    out = reference.softmax_attention(**tensors, key_mask=mask, bias=bias)
    assert_agree({"out": out}, {"out": loop_mean(weight, tensors["v"], queries=3)}, tolerance=1e-14)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_softmax_attention_agrees_with_the_reference_for_any_lengths(masked, lengths):
    queries, keys = LENGTHS[lengths]
    tensors, mask = draw_qkv(queries=queries, keys=keys), draw_mask(2, keys) if masked else None
    actual = run(partial(softmax_attention, key_mask=mask), tensors)
    expected = run(partial(reference.softmax_attention, key_mask=mask), tensors)
    # With one key the gradients of q and k are rounding.
    assert_agree(actual, expected, floor=1.0 if keys == 1 else 0.0)


@pytest.mark.parametrize("kind", ["flat", "axial", "joint"])
@pytest.mark.parametrize("case", CASES)
def test_signed_tables_agree_with_their_dense_bias(kind, case):
    case = CASES[case]
    layout, mask, tensors = case.layout(), case.mask(), case.tensors(kind)
    for seed, name in enumerate(tensors.keys() - set("qkv")):
        tensors[name] = draw(*tensors[name].shape, seed=seed)

    def fast(**inputs):
        relative = make_relative(kind, inputs, layout, "sum")
        return softmax_attention(**inputs, relative=relative, key_mask=mask)

    def slow(**inputs):
        relative = make_relative(kind, inputs, layout, "sum")
        return reference.softmax_attention(**inputs, bias=reference.relative_bias(relative, inputs["q"]), key_mask=mask)

    # A bias that is the same for all keys has no gradient: what remains is rounding.
    assert_agree(run(fast, tensors), run(slow, tensors), floor=1.0)


@pytest.mark.parametrize("horizon", [0, 3, 30])
def test_a_signed_flat_table_needs_no_layout(horizon):
    tensors = draw_qkv(queries=23, d=5, e=4) | {"table": draw(3, 2 * horizon + 1, 5, seed=1)}

    def slow(table, **inputs):
        return reference.softmax_attention(**inputs, bias=reference.relative_bias(Flat(table), inputs["q"]))

    actual = run(lambda table, **inputs: softmax_attention(**inputs, relative=Flat(table)), tensors)
    assert_agree(actual, run(slow, tensors), floor=1.0)


def test_what_a_softmax_cannot_use_is_refused():
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table, layout = draw(3, 3, 3, 5, seed=0), TokenLayout(2, Grid(3, 5))
    with pytest.raises(ValueError, match="mean"):
        softmax_attention(q, k, v, relative=Joint(table, layout, normalization="mean"))
    with pytest.raises(NotImplementedError, match="17.*16"):
        softmax_attention(q, k[:, :, 1:], v[:, :, 1:], relative=Flat(table[:, 0]))
    for option in ({"causal": True}, {"value_drop": 0.1}):
        with pytest.raises(NotImplementedError, match=next(iter(option))):
            softmax_attention(q, k, v, **option)
