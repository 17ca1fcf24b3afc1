"""The convolution of values and centred keys: against their definitions on every layout, against
torch's own convolution where all patches are there, and what absent tokens hold.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.layout_cases import CASES
from tests.helpers.oracles import assert_agree, draw, draw_kept, draw_mask, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    centred_keys,
    kernelized_attention,
    softmax_attention,
    taylorshift_attention,
    value_convolution,
)


def taking_part(case, out):
    """What tokens that take part get; what others get means nothing."""
    return out * torch.tensor(case.takes_part()).to(out.dtype)[:, None, :, None]


def tensors_of(case, side, heads=3):
    v = draw(case.batch, heads, case.layout().num_tokens, case.e, seed=3)
    return {"v": v, "weight": draw(heads * case.e, 1, side, side, seed=4)}


def test_with_all_patches_it_is_the_depth_wise_convolution_of_torch():
    v, weight = draw(2, 3, 2 + 35, 4, seed=1), draw(12, 1, 3, 3, seed=2)
    out = value_convolution(v, weight, TokenLayout(2, Grid(5, 7)))
    image = v[:, :, 2:].transpose(2, 3).reshape(2, 12, 5, 7)
    expected = F.conv2d(image, weight, padding=1, groups=12).reshape(2, 3, 4, 35).transpose(2, 3)
    assert_agree({"out": out[:, :, 2:]}, {"out": expected}, 1e-12)
    assert not out[:, :, :2].any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_absent_tokens_hold_reaches_no_other(garbage):
    case = CASES["absent and missing patches and masked keys"]
    layout, mask = case.layout(), case.mask()
    counts = torch.tensor(case.takes_part())
    tensors = tensors_of(case, 3)
    spoilt = tensors | {"v": tensors["v"].masked_fill(~counts[:, None, :, None], garbage)}

    def call(v, weight):
        out = value_convolution(v, weight, layout, key_mask=mask)
        return out.masked_fill(~counts[:, None, :, None], 0)

    assert_agree(run(call, spoilt), run(call, tensors), 0)
    k = {"k": spoilt["v"]}

    def centre(k):
        return centred_keys(k, counts).masked_fill(~counts[:, None, :, None], 0)

    assert_agree(run(centre, k), run(centre, {"k": tensors["v"]}), 0)


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


def test_an_image_without_keys_has_nothing_to_centre():
    k, mask = draw(2, 1, 3, 2, seed=1), torch.tensor([[False] * 3, [True] * 3])
    assert centred_keys(k, mask).isfinite().all()


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


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (dict(weight=torch.ones(5, 1, 3, 3)), r"weight: wanted \[6, 1, K, K\] of an odd K, got"),
        (dict(weight=torch.ones(6, 1, 2, 2)), "of an odd K"),
        (dict(weight=torch.ones(6, 1, 3, 5)), "of an odd K"),
        (dict(v=torch.ones(2, 25, 2)), r"v: wanted \[B, h, tokens, width\]"),
        (dict(layout=TokenLayout(0, Grid(4, 6))), "layout has 24 tokens, got 25"),
        (dict(layout=None), "layout: wanted TokenLayout"),
        (dict(key_mask=torch.ones(2, 24).bool()), r"key_mask: wanted bool \[2, 25\]"),
        (dict(key_mask=torch.ones(2, 25)), r"key_mask: wanted bool \[2, 25\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_one_line(change, line):
    given = dict(v=torch.ones(2, 3, 25, 2), weight=torch.ones(6, 1, 3, 3), key_mask=None)
    given |= dict(layout=TokenLayout(1, Grid(4, 6)))
    with pytest.raises(ValueError, match=line) as error:
        value_convolution(**given | change)
    assert "\n" not in str(error.value)


def test_they_compile_without_a_break():
    layout = TokenLayout(1, Grid(4, 6), draw_kept(2, 24, 17))

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def call(k, v, weight, mask):
        return value_convolution(v, weight, layout, key_mask=mask) + centred_keys(k, mask)

    k, v, mask = draw(2, 3, 18, 2, seed=1), draw(2, 3, 18, 2, seed=2), draw_mask(2, 18)
    weight = draw(6, 1, 3, 3, seed=3)
    plain = value_convolution(v, weight, layout, key_mask=mask) + centred_keys(k, mask)
    assert_agree({"out": call(k, v, weight, mask)}, {"out": plain}, 1e-12)
