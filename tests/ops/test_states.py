"""States: they add, attend like the parallel forms, and take one token at a time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo.testing

from tests.helpers.oracles import assert_agree, draw_mask, draw_qkv, relative_error, run
from visionattn.ops import (
    RandomFeatures,
    attend,
    kernelized_attention,
    reference,
    step,
    summarize,
)

COEFFICIENTS = (0.7, 0.4, 1.3)
TAU = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Square:
    """A feature map that is an object, another one for queries than for keys."""

    query = staticmethod(torch.square)
    key = staticmethod(torch.abs)


def cases():
    """By name: options of ``summarize``, the definition with the same options, tensors beside q, k
    and v.
    """
    kernel, taylor = reference.kernelized_attention, reference.taylorshift_attention
    for feature_map in ("elu1", "relu", Square):
        name = feature_map if isinstance(feature_map, str) else "object"
        yield (
            name,
            (
                {"kind": "kernelized", "feature_map": feature_map},
                partial(kernel, feature_map=feature_map),
                {},
            ),
        )
    options = {"kind": "taylorshift", "coefficients": COEFFICIENTS}
    yield "taylorshift", (options, partial(taylor, coefficients=COEFFICIENTS), TAU)
    yield "taylorshift, plain", ({"kind": "taylorshift"}, taylor, {})


CASES = dict(cases())
every_case = pytest.mark.parametrize("case", CASES)


def stepped(q, k, v, **options):
    """The outputs of one step for each token."""
    out, state = step(q[:, :, :1], k[:, :, :1], v[:, :, :1], **options)
    outs = [out]
    for i in range(1, q.shape[2]):
        out, state = step(*(x[:, :, i : i + 1] for x in (q, k, v)), state)
        outs.append(out)
    return torch.cat(outs, 2)


def draw_case(case, **sizes):
    options, definition, learned = CASES[case]
    return draw_qkv(**{"d": 7, "e": 5} | sizes) | learned, options, definition


@every_case
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [(77, 77), (53, 77), (77, 53), (1, 77)])
def test_attending_to_a_state_is_attention_to_its_keys(case, masked, lengths):
    tensors, options, definition = draw_case(case, queries=lengths[0], keys=lengths[1])
    mask = draw_mask(2, lengths[1]) if masked else None

    def through_state(q, k, v, **learned):
        return attend(q, summarize(k, v, **options, **learned, key_mask=mask)).divide()

    assert_agree(run(through_state, tensors), run(partial(definition, key_mask=mask), tensors))


@every_case
def test_states_of_disjoint_keys_add(case):
    tensors, options, definition = draw_case(case, queries=23, keys=61)
    mask = draw_mask(2, 61)

    def in_three_pieces(q, k, v, **learned):
        parts = [
            summarize(k[:, :, t], v[:, :, t], **options, **learned, key_mask=mask[:, t])
            for t in (slice(0, 11), slice(11, 12), slice(12, 61))
        ]
        return attend(q, parts[2] + (parts[0] + parts[1])).divide()

    assert_agree(run(in_three_pieces, tensors), run(partial(definition, key_mask=mask), tensors))


@every_case
def test_masked_and_unmasked_states_add_and_count_their_keys(case):
    tensors, options, _ = draw_case(case, queries=23, keys=61)
    q, k, v = (tensors.pop(name) for name in "qkv")
    mask = draw_mask(2, 61)
    mask[:, 30:] = True
    first = summarize(k[:, :, :30], v[:, :, :30], **options, **tensors, key_mask=mask[:, :30])
    both = first + summarize(k[:, :, 30:], v[:, :, 30:], **options, **tensors)
    whole = summarize(k, v, **options, **tensors, key_mask=mask)
    assert torch.equal(both.count, mask.sum(1)[:, None, None])
    torch.testing.assert_close(
        attend(q, both).divide(), attend(q, whole).divide(), rtol=1e-12, atol=1e-13
    )


@every_case
def test_one_step_after_another_is_the_causal_form_with_every_gradient(case):
    tensors, options, definition = draw_case(case, queries=19)
    expected = run(partial(definition, causal=True), tensors)
    assert_agree(run(partial(stepped, **options), tensors), expected)
    if options["kind"] == "kernelized":
        causal = partial(kernelized_attention, causal=True, feature_map=options["feature_map"])
        assert_agree(run(causal, tensors), expected)


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_steps_go_on_from_the_state_of_a_prompt(kind):
    q, k, v = draw_qkv(queries=40, d=7, e=5).values()
    state, outs = summarize(k[:, :, :33], v[:, :, :33], kind), []
    for i in range(33, 40):
        out, state = step(*(x[:, :, i : i + 1] for x in (q, k, v)), state)
        outs.append(out)
    definition = {
        "kernelized": reference.kernelized_attention,
        "taylorshift": reference.taylorshift_attention,
    }[kind]
    expected = definition(q, k, v, causal=True)[:, :, 33:]
    assert_agree({"out": torch.cat(outs, 2)}, {"out": expected})


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_a_state_is_as_large_after_a_thousand_tokens_as_after_one(kind):
    def numbers(keys: int) -> int:
        _, k, v = draw_qkv(queries=1, keys=keys, d=7, e=5).values()
        return sum(
            x.numel() for x in vars(summarize(k, v, kind)).values() if isinstance(x, torch.Tensor)
        )

    assert numbers(1) == numbers(1000)


def test_random_features_have_states_that_add():
    q, k, v = draw_qkv(queries=19, keys=31, d=7, e=5).values()
    features = RandomFeatures(7, 23, generator(1))
    state = summarize(k[:, :, :9], v[:, :, :9], feature_map=features)
    state = state + summarize(k[:, :, 9:], v[:, :, 9:], feature_map=features)
    assert state.S.shape == (2, 3, 23, 5)
    expected = reference.kernelized_attention(q, k, v, feature_map=features)
    assert_agree({"out": attend(q, state).divide()}, {"out": expected})


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states_are_float32_and_lose_no_more_than_rounding(case, dtype):
    tensors, options, definition = draw_case(case, queries=29)
    tensors = {name: x.to(dtype if name in "qkv" else torch.float32) for name, x in tensors.items()}
    learned = {name: x for name, x in tensors.items() if name not in "qkv"}
    state = summarize(tensors["k"], tensors["v"], **options, **learned)
    assert all(
        x.dtype == torch.float32
        for name, x in vars(state).items()
        if isinstance(x, torch.Tensor) and name != "count"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = summarize(tensors["k"], tensors["v"], **options, **learned)
        sums = attend(tensors["q"], again)
    assert sums.values.dtype == sums.mass.dtype == torch.float32
    assert torch.equal(sums.values, attend(tensors["q"], state).values)
    expected = run(
        partial(definition, causal=True), {name: x.double() for name, x in tensors.items()}
    )
    actual = run(partial(stepped, **options), tensors)
    assert actual["out"].dtype == dtype
    for name, x in actual.items():
        # One rounding, and one for each step that a gradient comes through.
        assert relative_error(x, expected[name]) < max(2e-6, torch.finfo(dtype).eps), name


@pytest.mark.parametrize("case", [*CASES, "random features"])
def test_gradients_of_states_under_autocast_are_those_outside(case):
    if case == "random features":
        tensors = draw_qkv(queries=29, d=7, e=5)
        options = {"feature_map": RandomFeatures(7, 23, generator(1))}
    else:
        tensors, options, _ = draw_case(case, queries=29)
    tensors = {name: x.float() for name, x in tensors.items()}

    def through_state(q, k, v, **learned):
        return attend(q, summarize(k, v, **options, **learned)).divide()

    expected = run(through_state, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(through_state, tensors)
    for name, x in actual.items():
        assert relative_error(x, expected[name]) < 1e-6, name


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_a_count_goes_on_where_float32_would_stand_still(kind):
    q, k, v = (x.float() for x in draw_qkv(queries=1, d=5, e=4).values())
    one = summarize(k, v, kind)
    many = replace(one, count=torch.full((1, 1, 1), 2**24))
    assert (many + one).count.item() == 2**24 + 1
    assert step(q, k, v, many)[1].count.item() == 2**24 + 1


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_strides_and_empty_pieces_do_no_harm(kind):
    q, k, v = draw_qkv(queries=31, d=7, e=7).values()
    packed = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    expected = attend(q, summarize(k, v, kind)).divide()
    state = summarize(packed[1], packed[2], kind) + summarize(k[:, :, :0], v[:, :, :0], kind)
    torch.testing.assert_close(attend(packed[0], state).divide(), expected, rtol=1e-12, atol=1e-13)
    assert attend(q, summarize(k[:, :, :0], v[:, :, :0], kind)).divide().eq(0).all()
    nothing = {"q": q[:, :, :0], "k": k[:, :, :0], "v": v[:, :, :0]}
    assert all(
        x.numel() == 0
        for x in run(lambda q, k, v: attend(q, summarize(k, v, kind)).divide(), nothing).values()
    )


def test_one_compiled_step_serves_every_token():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for kind in ("kernelized", "taylorshift"):
        q, k, v = draw_qkv(queries=7, d=5, e=3).values()
        state = expected_state = summarize(k[:, :, :2], v[:, :, :2], kind)
        for i in range(2, 7):
            token = [x[:, :, i : i + 1] for x in (q, k, v)]
            out, state = compiled(*token, state)
            expected, expected_state = step(*token, expected_state)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    assert counter.frame_count <= 4  # two for each kind


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_a_second_derivative_through_a_state_of_keys_is_refused_clearly(kind):
    q, k, v = (x.requires_grad_() for x in draw_qkv(queries=7, d=5, e=4).values())
    out = attend(q, summarize(k, v, kind)).divide()
    (grad,) = torch.autograd.grad(out.square().sum(), k, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.sum().backward()
