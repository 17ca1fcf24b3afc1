"""What centering keys is for, and half precision of it and of the convolution of values;
``test_definitions.py`` has their values on every layout.
"""

from functools import partial

import pytest
import torch

from tests.helpers.oracles import draw
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    centred_keys,
    kernelized_attention,
    softmax_attention,
    taylorshift_attention,
    value_convolution,
)


def test_a_softmax_does_not_notice_what_all_keys_share_and_bounded_weights_do():
    q, v = draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=3)
    k = draw(1, 2, 9, 4, seed=2)
    shared = k + draw(1, 2, 1, 4, seed=4)
    temperature = torch.full((2,), 4.0, dtype=torch.float64)
    for attention, notices in (
        (softmax_attention, False),
        (partial(taylorshift_attention, temperature=temperature), True),
        (kernelized_attention, True),
    ):
        apart = (attention(q, k, v) - attention(q, shared, v)).abs().max()
        assert (apart > 1e-3) == notices
        again = attention(q, centred_keys(k), v) - attention(q, centred_keys(shared), v)
        assert again.abs().max() < 1e-12


def test_in_half_precision_sums_are_taken_in_float32():
    """Their sum is 120,000, above the largest number of float16."""
    k = (draw(1, 1, 4000, 2, seed=1) * 0.1 + 30).to(torch.float16)
    for mask in (None, torch.ones(1, 4000, dtype=torch.bool)):
        assert (centred_keys(k, mask).double().mean(2).abs() < 5e-3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_kept_and_autocast_computes_in_its_own(dtype):
    layout, weight = TokenLayout(1, Grid(4, 6)), draw(6, 1, 3, 3, seed=2).float()
    v = draw(2, 3, 25, 2, seed=1).to(dtype)
    assert value_convolution(v, weight, layout).dtype == dtype
    assert centred_keys(v).dtype == dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert value_convolution(v, weight, layout).dtype == dtype
