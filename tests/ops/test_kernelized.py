"""Kernelized attention: its reference against loops and numbers by hand, its forms against the
reference.
"""

import math

import pytest
import torch

from tests.helpers.oracles import assert_agree, dot, draw_mask, draw_qkv, elu1, loop_mean, run
from visionattn.ops import kernelized_attention, reference

FORMS = ("direct", "efficient")
MAPS = ("elu1", "relu", "softmax")


def agree(tensors, form, floor=0.0, **options):
    """Compare the form with the reference, values and every gradient; ``options`` go to both."""
    actual = run(lambda **inputs: kernelized_attention(**inputs, form=form, **options), tensors)
    expected = run(lambda **inputs: reference.kernelized_attention(**inputs, **options), tensors)
    assert_agree(actual, expected, floor=floor)


# The reference itself


def test_the_reference_gives_the_numbers_worked_out_by_hand():
    rows = ([[1.0, 0.0]], [[0.0, 2.0], [1.0, -3.0]], [[10.0], [20.0]])
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in rows)
    # elu1: q becomes (2, 1), the keys (1, 3) and (2, e^-3): weights 5 and 4 + e^-3.
    weights = {"elu1": (5, 4 + math.exp(-3)), "relu": (0, 1)}
    # softmax: over the features of q, and along each feature of the two keys, times 2.
    high, low = math.e / (math.e + 1), 1 / (math.e + 1)
    first, second = 1 / (1 + math.e), 1 / (1 + math.exp(-5))
    weights["softmax"] = (
        2 * (high * first + low * second),
        2 * (high * (1 - first) + low * (1 - second)),
    )
    for feature_map, (w0, w1) in weights.items():
        out = reference.kernelized_attention(q, k, v, feature_map=feature_map)
        assert out.item() == pytest.approx((10 * w0 + 20 * w1) / (w0 + w1), rel=1e-15), feature_map


@pytest.mark.parametrize("feature_map", MAPS)
def test_the_reference_is_the_mean_over_pairs_one_at_a_time(feature_map):
    tensors, mask = draw_qkv(batch=2, heads=2, queries=3, keys=5, d=4, e=3), draw_mask(2, 5)
    q, k = tensors["q"], tensors["k"]

    def weight(b, head, i, j):
        if not mask[b, j]:
            return 0.0
        if feature_map == "elu1":
            return dot(elu1(q[b, head, i]), elu1(k[b, head, j]))
        if feature_map == "relu":
            return dot(q[b, head, i].clamp(min=0), k[b, head, j].clamp(min=0))
        keys = [k[b, head, other].tolist() for other in range(5) if mask[b, other]]
        total = 0.0
        for f in range(4):
            of_query = math.exp(q[b, head, i, f]) / sum(math.exp(x) for x in q[b, head, i].tolist())
            total += (
                of_query
                * len(keys)
                * math.exp(k[b, head, j, f])
                / sum(math.exp(key[f]) for key in keys)
            )
        return total

    out = reference.kernelized_attention(**tensors, feature_map=feature_map, key_mask=mask)
    assert_agree({"out": out}, {"out": loop_mean(weight, tensors["v"], queries=3)}, tolerance=1e-14)


# Agreement of the forms with it


# Properties


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_relu_gives_no_weight_gets_zero_and_zero_gradient(form):
    tensors = draw_qkv(queries=23, keys=31, d=5, e=4)
    tensors["q"][:, :, 7] = -1.0
    results = run(
        lambda **inputs: kernelized_attention(**inputs, feature_map="relu", form=form), tensors
    )
    assert_agree(
        results,
        run(lambda **inputs: reference.kernelized_attention(**inputs, feature_map="relu"), tensors),
    )
    assert results["out"][:, :, 7].eq(0).all() and results["q"][:, :, 7].eq(0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("feature_map", MAPS)
def test_large_scores_stay_finite_and_right(form, feature_map):
    tensors = draw_qkv(queries=23, keys=31, d=5, e=4)
    agree({name: tensor * 300 for name, tensor in tensors.items()}, form, feature_map=feature_map)
