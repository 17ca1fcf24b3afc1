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
    draw_table,
    loop_mean,
    loop_taylor_weight,
    run,
)
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, reference, taylorshift_attention
from visionattn.ops.operator import count_operations, function_of

FORMS = ("direct", "efficient")
LENGTHS = {
    "N = M": (77, 77),
    "N < M": (53, 77),
    "N > M": (77, 53),
    "one query": (1, 77),
    "one key": (77, 1),
}


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


@pytest.mark.parametrize("form", [*FORMS, "auto"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("normalised", [False, True])
def test_each_form_agrees_with_the_reference_for_any_lengths(form, lengths, normalised):
    queries, keys = LENGTHS[lengths]
    tensors = draw_qkv(queries=queries, keys=keys) | (
        {"temperature": temperature(3)} if normalised else {}
    )
    agree(
        tensors, form, floor=1.0 if keys == 1 else 0.0
    )  # with one key the gradients of q, k and tau are rounding
    if keys > 1:
        agree(tensors, form, key_mask=draw_mask(2, keys))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("d", "e"), [(1, 3), (5, 2), (7, 9), (8, 8), (15, 1), (16, 16), (17, 5), (32, 20)]
)
def test_each_form_agrees_with_the_reference_for_any_widths(form, d, e):
    tensors = draw_qkv(batch=2, heads=3, queries=37, keys=41, d=d, e=e)
    agree(tensors, form)
    if d > 1:  # in one dimension a vector of unit length is a sign
        agree(tensors | {"temperature": temperature(3)}, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "coefficients", [(0.5, 1.0, 1.0), (1.3, -0.7, 0.4), (0.25, 0.0, 0.01), (2.0, 1.0, 3.0)]
)
@pytest.mark.parametrize("normalised", [False, True])
def test_each_form_agrees_with_the_reference_for_any_coefficients(form, coefficients, normalised):
    tensors = draw_qkv(queries=23, keys=31, d=7, e=5) | (
        {"temperature": temperature(3)} if normalised else {}
    )
    agree(tensors, form, coefficients=coefficients, key_mask=draw_mask(2, 31))


@pytest.mark.parametrize("form", FORMS)
def test_the_output_factor_counts_the_keys_that_take_part(form):
    tensors = draw_qkv(queries=23, keys=31) | {"temperature": temperature(3)}
    agree(tensors, form, output_scale=True)
    agree(tensors, form, output_scale=True, key_mask=draw_mask(2, 31))
    plain = taylorshift_attention(**tensors, form=form)
    v_before = tensors["v"].clone()
    scaled = taylorshift_attention(**tensors, form=form, output_scale=True)
    torch.testing.assert_close(scaled, plain * (31 / 16) ** 0.5, rtol=1e-14, atol=0)
    assert torch.equal(tensors["v"], v_before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [(300, 259), (127, 128), (129, 257), (513, 256)])
def test_each_form_agrees_on_both_sides_of_the_edge_of_a_block_of_queries(form, lengths):
    tensors = draw_qkv(batch=1, heads=2, queries=lengths[0], keys=lengths[1], d=5, e=3)
    agree(tensors | {"temperature": temperature(2)}, form, key_mask=draw_mask(1, lengths[1]))


@pytest.mark.parametrize("lengths", [(1100, 1100), (1100, 513), (511, 1025)])
def test_the_efficient_form_agrees_beyond_one_chunk(lengths):
    tensors = draw_qkv(batch=1, heads=2, queries=lengths[0], keys=lengths[1], d=11, e=6)
    agree(tensors, "efficient", key_mask=draw_mask(1, lengths[1]))
    agree(tensors | {"temperature": temperature(2)}, "efficient")


@pytest.mark.parametrize("form", FORMS)
def test_more_heads_than_one_block_holds_agree_with_the_reference(form):
    agree(draw_qkv(batch=3, heads=5, queries=530, keys=521, d=32, e=2), form)


@pytest.mark.parametrize("form", FORMS)
def test_one_head_of_one_image_agrees_with_the_reference(form):
    agree(
        draw_qkv(batch=1, heads=1, queries=19, keys=29, d=7, e=5) | {"temperature": temperature(1)},
        form,
    )


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


@pytest.mark.parametrize("form", FORMS)
def test_the_query_of_the_relative_term_is_q_as_given(form):
    layout, mask = TokenLayout(1, Grid(3, 5)), draw_mask(2, 16)
    tensors = draw_qkv(queries=16, d=7, e=5) | {
        "temperature": temperature(3),
        "table": draw_table(3, 3, 3, 7, seed=5),
    }
    tensors["q"] *= torch.linspace(0.2, 4, 16, dtype=torch.float64)[:, None]

    def relative(function, **chosen):
        def call(table, **inputs):
            return function(
                **inputs,
                relative=Joint(table, layout, normalization="mean"),
                key_mask=mask,
                **chosen,
            )

        return call

    options = {"coefficients": (1.3, -0.7, 0.4)}
    actual = run(relative(taylorshift_attention, form=form, **options), tensors)
    assert_agree(actual, run(relative(reference.taylorshift_attention, **options), tensors))
    shortened = tensors | {"q": reference.unit_length(tensors["q"])}
    without_length = run(relative(reference.taylorshift_attention, **options), shortened)
    assert (without_length["out"] - actual["out"]).abs().max() > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_a_masked_key_is_as_if_it_were_not_there(form):
    tensors = draw_qkv(batch=1, queries=33, keys=41, d=7, e=5) | {"temperature": temperature(3)}
    mask = draw_mask(1, 41)
    fewer = tensors | {name: tensors[name][:, :, mask[0]] for name in ("k", "v")}
    for scaled in (False, True):
        masked = taylorshift_attention(**tensors, key_mask=mask, form=form, output_scale=scaled)
        removed = taylorshift_attention(**fewer, form=form, output_scale=scaled)
        torch.testing.assert_close(masked, removed, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_agree_with_finite_differences(form):
    tensors = draw_qkv(batch=1, heads=2, queries=3, keys=4, d=3, e=2) | {
        "temperature": temperature(2)
    }
    inputs = [tensor.clone().requires_grad_() for tensor in tensors.values()]
    mask = torch.tensor([[True, True, False, True]])

    def function(q, k, v, tau):
        return taylorshift_attention(q, k, v, temperature=tau, key_mask=mask, form=form)

    assert torch.autograd.gradcheck(function, inputs)


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
