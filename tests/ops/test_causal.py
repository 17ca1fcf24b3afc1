"""Causal kernelized attention: each form against the reference, no leak from later tokens, memory,
precision, compilation.
"""

import itertools
from functools import partial

import pytest
import torch
import torch._dynamo.testing

from tests.helpers.layout_cases import Case
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
    saved_bytes,
)
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, kernelized_attention, reference
from visionattn.ops.kernelized.eager import kernel_sums
from visionattn.ops.kernelized.operands import CHUNK_ELEMENTS
from visionattn.ops.position import joint

FORMS = ("direct", "efficient")
LENGTHS = {
    "N = M": (77, 77),
    "N < M": (53, 177),
    "N > M": (177, 53),
    "one query": (1, 77),
    "one key": (77, 1),
}
causal_attention = partial(kernelized_attention, causal=True)
causal_reference = partial(reference.kernelized_attention, causal=True)


class SquareAndExp:
    """A feature map that is an object, another one for queries than for keys."""

    query = staticmethod(torch.square)
    key = staticmethod(torch.exp)


MAPS = {"elu1": "elu1", "relu": "relu", "object": SquareAndExp}


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of two blocks for the sizes of these tests, so that a few hundred tokens cross
    several.
    """
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 128 * 8)


def agree(tensors, form, floor=0.0, **options):
    """Compare the form with the reference, values and every gradient; ``options`` go to both."""
    actual = run(lambda **inputs: causal_attention(**inputs, form=form, **options), tensors)
    assert_agree(
        actual, run(lambda **inputs: causal_reference(**inputs, **options), tensors), floor=floor
    )


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


@pytest.mark.parametrize("form", [*FORMS, "auto"])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_form_agrees_with_the_reference_for_any_lengths(form, feature_map, lengths):
    queries, keys = LENGTHS[lengths]
    tensors = draw_qkv(queries=queries, keys=keys)
    floor = 1.0 if 1 in (queries, keys) else 0.0  # a gradient of rounding
    agree(tensors, form, floor, feature_map=MAPS[feature_map])
    agree(tensors, form, floor, feature_map=MAPS[feature_map], key_mask=draw_mask(2, keys))


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize(
    "lengths",
    [(63, 63), (64, 64), (65, 65), (128, 129), (300, 259), (259, 400), (400, 129), (40, 300)],
)
def test_blocks_and_segments_join_without_a_seam(feature_map, lengths, short_segments):
    tensors = draw_qkv(batch=1, heads=1, queries=lengths[0], keys=lengths[1], d=5, e=3)
    agree(tensors, "efficient", feature_map=MAPS[feature_map], key_mask=draw_mask(1, lengths[1]))


@pytest.mark.parametrize("lengths", [(300, 259), (259, 600), (600, 129)])
def test_blocks_of_scores_join_without_a_seam(lengths):
    tensors = draw_qkv(batch=1, heads=2, queries=lengths[0], keys=lengths[1], d=5, e=3)
    agree(tensors, "direct", key_mask=draw_mask(1, lengths[1]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("horizon", [0, 1, 3, 80, 177])
@pytest.mark.parametrize("lengths", ["N = M", "N < M", "N > M"])
@pytest.mark.parametrize("pairs", [False, True])
def test_flat_relative_position_agrees_with_the_reference(
    form, horizon, lengths, pairs, monkeypatch
):
    monkeypatch.setattr(joint, "direct_is_faster", lambda *sizes: pairs)
    queries, keys = LENGTHS[lengths]
    tensors = draw_qkv(queries=queries, keys=keys, d=7, e=5) | {
        "table": draw_table(3, 2 * horizon + 1, 7, seed=3)
    }
    for normalization, mask in itertools.product(("sum", "mean"), (None, draw_mask(2, keys))):
        options = {"normalization": normalization, "key_mask": mask}
        actual = run(with_table(causal_attention, form=form, **options), tensors)
        expected = run(with_table(causal_reference, **options), tensors)
        if horizon:
            assert actual["table"][:, horizon + 1 :].eq(0).all()  # entries of later keys
        assert_agree(actual, expected)


@pytest.mark.parametrize("normalization", ["sum", "mean"])
def test_flat_relative_position_may_skip_a_prefix(normalization):
    tensors = draw_qkv(queries=47, d=7, e=5) | {"table": draw_table(3, 7, 7, seed=3)}
    options = dict(
        normalization=normalization, layout=TokenLayout(2, Grid(5, 9)), key_mask=draw_mask(2, 47)
    )
    actual, expected = (
        run(with_table(function, **options), tensors)
        for function in (causal_attention, causal_reference)
    )
    assert_agree(actual, expected)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("horizon", [0, 3])
@pytest.mark.parametrize("normalization", ["sum", "mean"])
def test_flat_relative_position_passes_over_absent_patches(normalization, horizon, masked):
    case = Case((5, 9), horizon, prefix=2, masked=masked, filled=((3, 7), (5, 4)))
    tensors = case.tensors("flat")
    options = dict(normalization=normalization, layout=case.layout(), key_mask=case.mask())
    holds = torch.tensor(Case((5, 9), 0, prefix=2, filled=case.filled).takes_part())

    def of_those_that_hold_something(function):
        attend = with_table(function, **options)
        return lambda **inputs: attend(**inputs) * holds[:, None, :, None]

    actual, expected = (
        run(of_those_that_hold_something(function), tensors)
        for function in (causal_attention, causal_reference)
    )
    assert_agree(actual, expected)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("horizon", [None, 0, 3])
def test_later_tokens_have_a_gradient_of_exactly_zero(form, horizon, short_segments):
    tensors = draw_qkv(batch=1, heads=1, queries=300, d=5, e=3)
    inputs = {name: x.requires_grad_() for name, x in tensors.items()}
    options = {}
    if horizon is not None:
        options = {
            "relative": Flat(draw_table(1, 2 * horizon + 1, 5, seed=3), normalization="mean")
        }
    out = causal_attention(**inputs, form=form, **options)
    for i in (0, 1, 62, 63, 64, 127, 128, 255, 256, 298):
        gradients = torch.autograd.grad(
            out[:, :, i].sum(), list(inputs.values()), retain_graph=True
        )
        for gradient in gradients:
            assert gradient[:, :, i + 1 :].eq(0).all()
        assert gradients[2][:, :, : i + 1].ne(0).all()  # and each earlier value has one


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("horizon", [None, 0, 3])
def test_later_tokens_change_no_digit_of_what_came_before(form, horizon, short_segments):
    tensors, options = draw_qkv(batch=1, heads=1, queries=300, d=5, e=3), {}
    if horizon is not None:
        options = {
            "relative": Flat(draw_table(1, 2 * horizon + 1, 5, seed=3), normalization="mean")
        }
    out = causal_attention(**tensors, form=form, **options)
    for i in (0, 1, 62, 63, 64, 127, 128, 255, 256, 298):
        others = {
            name: torch.cat([x[:, :, : i + 1], 7 - 3 * x[:, :, i + 1 :]], 2)
            for name, x in tensors.items()
        }
        assert torch.equal(
            causal_attention(**others, form=form, **options)[:, :, : i + 1], out[:, :, : i + 1]
        )


@pytest.mark.parametrize("form", FORMS)
def test_queries_past_the_last_key_see_all_keys_and_keys_past_the_last_query_are_seen_by_nobody(
    form,
):
    tensors = draw_qkv(queries=90, keys=41, d=5, e=4)
    out = causal_attention(**tensors, form=form)
    later = {name: x[:, :, 40:] if name == "q" else x for name, x in tensors.items()}
    torch.testing.assert_close(
        out[:, :, 40:], kernelized_attention(**later), rtol=1e-12, atol=1e-13
    )
    tensors = draw_qkv(queries=41, keys=90, d=5, e=4)
    seen = {name: x[:, :, :41] for name, x in tensors.items()}
    torch.testing.assert_close(
        causal_attention(**tensors, form=form),
        causal_attention(**seen, form=form),
        rtol=1e-12,
        atol=1e-13,
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_query_that_sees_masked_keys_only_gets_zero_and_zero_gradient(form):
    tensors, mask = draw_qkv(queries=77, d=5, e=4), torch.ones(2, 77, dtype=torch.bool)
    mask[1, :70] = False
    actual = run(partial(causal_attention, key_mask=mask, form=form), tensors)
    assert_agree(actual, run(partial(causal_reference, key_mask=mask), tensors))
    assert actual["out"][1, :, :70].eq(0).all() and actual["q"][1, :, :70].eq(0).all()


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
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_kept_for_the_backward_pass_are_those_of_inputs_output_mass_and_state(
    form, causal, dtype
):
    d, e, heads = 32, 24, 2
    size = torch.finfo(dtype).bits // 8

    def kept_with(tokens: int) -> int:
        tensors = draw_qkv(batch=1, heads=heads, queries=tokens, d=d, e=e)
        function = partial(kernelized_attention, causal=causal, form=form)
        return saved_bytes(function, {name: x.to(dtype) for name, x in tensors.items()})

    once, twice = kept_with(700), kept_with(1400)
    per_token = (2 * d + e) * size + (e + 1) * 4  # output and mass as they were divided: float32
    assert twice - once == heads * 700 * per_token
    assert twice <= heads * (1400 * per_token + d * (e + 1) * 4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_thousands_of_tokens_far_from_zero_mean_lose_no_more_than_rounding(form, dtype):
    tensors = draw_qkv(batch=1, heads=1, queries=4096, d=16, e=4)
    tensors = {name: (x + 3).to(dtype) for name, x in tensors.items()}
    out = causal_attention(**tensors, form=form)
    expected = causal_attention(**{name: x.double() for name, x in tensors.items()})
    assert relative_error(out, expected) < max(2e-6, torch.finfo(dtype).eps)


# Autograd and compilation


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_second_derivative_is_refused_clearly(causal, form):
    inputs = [x.requires_grad_() for x in draw_qkv(queries=7, d=5, e=4).values()]
    out = kernelized_attention(*inputs, causal=causal, form=form)
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_agree_with_finite_differences(form):
    inputs = [
        x.requires_grad_() for x in draw_qkv(batch=1, heads=2, queries=4, keys=3, d=3, e=2).values()
    ]
    mask = torch.tensor([[True, False, True]])
    assert torch.autograd.gradcheck(
        lambda q, k, v: causal_attention(q, k, v, key_mask=mask, form=form), inputs
    )


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("form", [*FORMS, "auto"])
def test_one_compiled_graph_serves_every_length(form, relative):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = partial(causal_attention, form=form)
    function = with_table(function, "mean") if relative else function
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for n in (77, 300, 64, 513):
        tensors = draw_qkv(batch=1, queries=n, keys=n // 2 + 7, d=5, e=3)
        tensors |= {"table": draw_table(3, 7, 5, seed=3)} if relative else {}
        assert_agree(run(compiled, tensors), run(function, tensors), tolerance=1e-13)
    assert counter.frame_count <= 2
