"""TaylorShift: its reference against loops and numbers by hand, its forms against the reference,
and properties.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.oracles import (
    assert_agree,
    draw_mask,
    draw_qkv,
    loop_mean,
    loop_taylor_weight,
    run,
)
from visionattn.ops import reference, taylorshift_attention
from visionattn.ops.operator import count_operations, function_of

FORMS = ("direct", "efficient")


def temperature(heads: int) -> torch.Tensor:
    """Another temperature for each head, from 0.7 upwards."""
    return torch.linspace(0.7, 3.1, heads, dtype=torch.float64)


def agree(tensors, form, tolerance=1e-12, floor=0.0, **options):
    """Compare the form with the reference, values and every gradient; ``options`` go to both."""
    actual = run(lambda **inputs: taylorshift_attention(**inputs, form=form, **options), tensors)
    expected = run(lambda **inputs: reference.taylorshift_attention(**inputs, **options), tensors)
    assert_agree(actual, expected, tolerance, floor)


# The reference itself


def test_the_reference_gives_the_numbers_worked_out_by_hand():
    q, k, v = torch.tensor(
        [[[[1.0], [2.0]]], [[[0.0], [1.0]]], [[[10.0], [20.0]]]], dtype=torch.float64
    ).unbind()
    # Scores 0 and 1 weigh 1 and 1 + 1 + 1/2, scores 0 and 2 weigh 1 and 1 + 2 + 2.
    expected = torch.tensor([[[[(10 + 2.5 * 20) / 3.5], [(10 + 5 * 20) / 6]]]], dtype=torch.float64)
    out = reference.taylorshift_attention(q[None], k[None], v[None])
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=0)
    # Of unit length the scores are tau = 3 and, for the zero key, 0.
    tau = torch.tensor([3.0], dtype=torch.float64)
    out = reference.taylorshift_attention(
        q[None], k[None], v[None], temperature=tau, coefficients=(1.0, -1.0, 2.0)
    )
    torch.testing.assert_close(
        out, torch.full_like(out, (2 * 10 + 8 * 20) / 10), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("coefficients", [(0.5, 1.0, 1.0), (1.3, -0.7, 0.4)])
def test_the_reference_is_the_mean_over_pairs_one_at_a_time(normalised, coefficients):
    tensors = draw_qkv(batch=2, heads=2, queries=3, keys=5, d=4, e=3)
    tau = temperature(2) if normalised else None
    mask = draw_mask(2, 5)
    taylor = loop_taylor_weight(tensors["q"], tensors["k"], tau, coefficients)
    expected = loop_mean(
        lambda b, head, i, j: taylor(b, head, i, j) * mask[b, j].item(), tensors["v"], queries=3
    )
    options = {"temperature": tau, "coefficients": coefficients, "key_mask": mask}
    out = reference.taylorshift_attention(**tensors, **options)
    assert_agree({"out": out}, {"out": expected}, tolerance=1e-14)
    scaled = reference.taylorshift_attention(**tensors, **options, output_scale=True)
    factor = (mask.sum(-1).double() / 4).sqrt()[:, None, None, None]
    assert_agree({"out": scaled}, {"out": expected * factor}, tolerance=1e-14)


# Agreement of the forms with it


# Properties


@pytest.mark.parametrize("form", FORMS)
def test_zero_vectors_weigh_c_and_have_finite_gradients(form):
    tensors = draw_qkv(queries=23, keys=31, d=7, e=5) | {"temperature": temperature(3)}
    tensors["q"][:, :, 4] = 0
    tensors["k"][:, :, 9] = 0
    agree(tensors, form, coefficients=(1.0, -1.0, 2.0))
    out = taylorshift_attention(**tensors, form=form)
    torch.testing.assert_close(out[:, :, 4], tensors["v"].mean(2), rtol=1e-12, atol=1e-14)
    tensors["k"][:] = 0
    results = run(lambda **inputs: taylorshift_attention(**inputs, form=form), tensors)
    assert all(result.isfinite().all() for result in results.values())
    torch.testing.assert_close(
        results["out"], tensors["v"].mean(2, keepdim=True).expand_as(results["out"])
    )


@pytest.mark.parametrize("form", FORMS)
def test_with_a_temperature_only_the_direction_of_q_and_k_counts(form):
    tensors = draw_qkv(queries=23, keys=31, d=7, e=5) | {"temperature": temperature(3)}
    out = taylorshift_attention(**tensors, form=form)
    longer = taylorshift_attention(
        **tensors | {"q": 5e4 * tensors["q"], "k": tensors["k"] / 3e4}, form=form
    )
    torch.testing.assert_close(longer, out, rtol=1e-12, atol=1e-13)


def products_counted(operator, args):
    """The operations that the formula of an operator counts, and those of the products that run."""
    count_operations()
    with FlopCounterMode(display=False) as formula:
        results = operator(*args)

    def in_place(out, left, right, *scalars, out_shape=None, **options):
        return 2 * left[0] * left[1] * left[2] * right[2]

    mapping = {torch.ops.aten.baddbmm_: in_place}
    with FlopCounterMode(display=False, custom_mapping=mapping) as products:
        function_of(operator)(*args)
    return formula.get_total_flops(), products.get_total_flops(), results


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_the_operations_that_are_counted_are_those_of_the_products_that_run(form, normalised):
    batch, heads, n, m, d, e = 2, 3, 37, 29, 16, 24
    q, k, v = draw_qkv(batch=batch, heads=heads, queries=n, keys=m, d=d, e=e).values()
    inputs = q, k, v, torch.ones(heads, dtype=q.dtype) if normalised else None, None
    options = 0.5, 1.0, 1.0, form
    counted, ran, kept = products_counted(
        torch.ops.visionattn.taylor_sums.default, (*inputs, *options)
    )
    assert counted == ran
    values, mass, *state = kept
    grads = torch.ones_like(values), torch.ones_like(mass)
    counted, ran, _ = products_counted(
        torch.ops.visionattn.taylor_sums_backward.default, (*grads, *inputs, *state, *options)
    )
    assert counted == ran
