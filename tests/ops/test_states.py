"""States: they add, attend like the parallel forms, and take one token at a time; so do the states
and caches of ``recurrence.py``, with relative position.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.helpers.oracles import assert_agree, draw_qkv, draw_table, relative_error, run
from tests.ops.drawn_cases import Drawn, SquareAndSoftplus, cases, compare, drawn, paired
from visionattn.ops import (
    Flat,
    RandomFeatures,
    attend,
    kernelized_attention,
    reference,
    step,
    summarize,
)
from visionattn.ops.recurrence import KeyValueCache, PastTable, RecurrentState

COEFFICIENTS = (0.7, 0.4, 1.3)
TAU = {"temperature": torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)}


KINDS = {
    "elu1": ("kernelized", {"feature_map": "elu1"}),
    "relu": ("kernelized", {"feature_map": "relu"}),
    "object": ("kernelized", {"feature_map": SquareAndSoftplus}),
    "taylorshift": ("taylorshift", {"coefficients": COEFFICIENTS}),
    "tempered": ("taylorshift", {}),
}
every_kind = pytest.mark.parametrize("name", KINDS)


def learned(name: str) -> dict[str, torch.Tensor]:
    return TAU if name == "tempered" else {}


def in_pieces(q, k, v, *, kind, cuts, relative, key_mask, **options):
    """Attention to the state of three pieces of the keys, some with a mask."""
    first, second = sorted(cut * k.shape[2] // 100 for cut in cuts)
    states = []
    for piece in (slice(0, first), slice(first, second), slice(second, None)):
        mask = None if key_mask is None or key_mask[:, piece].all() else key_mask[:, piece]
        states.append(summarize(k[:, :, piece], v[:, :, piece], kind, key_mask=mask, **options))
    whole = states[2] + (states[0] + states[1])
    keys = k.shape[2] if key_mask is None else key_mask.sum(1)[:, None, None]
    assert (whole.count == keys).all()
    return attend(q, whole).divide()


@drawn
@given(
    cases(kinds=("none",)),
    st.sampled_from([*KINDS, "random"]),
    st.tuples(*[st.integers(0, 100)] * 2),
)
@example(Drawn(lengths=(1, 77), kind="none", masked=True), "taylorshift", (15, 16))
@example(Drawn(lengths=(5, 0), kind="none"), "elu1", (0, 0))
@example(Drawn(lengths=(0, 5), kind="none"), "tempered", (0, 50))
def test_attending_to_states_that_add_is_attention_to_all_keys(case, name, cuts):
    case = replace(case, absent=False, heads=3 if name == "tempered" else case.heads)
    features = RandomFeatures(case.d, 6, case.generator(6), dtype=torch.float64)
    kind, options = KINDS.get(name, ("kernelized", {"feature_map": features}))
    operation = partial(in_pieces, kind=kind, cuts=cuts)
    fast, slow, tensors = paired(case, kind, operation, **options)
    compare(case, fast, slow, tensors | learned(name))


def stepped(q, k, v, state=None, **options):
    """The outputs of one step for each token."""
    tokens = [[x[:, :, i : i + 1] for x in (q, k, v)] for i in range(q.shape[2])]
    out, state = step(*tokens[0], **options) if state is None else step(*tokens[0], state)
    outs = [out]
    for token in tokens[1:]:
        out, state = step(*token, state)
        outs.append(out)
    return torch.cat(outs, 2)


@every_kind
def test_one_step_after_another_is_the_causal_form_with_every_gradient(name):
    kind, options = KINDS[name]
    tensors = draw_qkv(queries=19, d=7, e=5) | learned(name)
    definition = getattr(reference, f"{kind}_attention")
    expected = run(partial(definition, causal=True, **options), tensors)
    assert_agree(run(partial(stepped, kind=kind, **options), tensors), expected)

    def after_a_prompt(q, k, v, **more):
        state = summarize(k[:, :, :13], v[:, :, :13], kind, **options, **more)
        return stepped(*(x[:, :, 13:] for x in (q, k, v)), state)

    assert_agree({"out": after_a_prompt(**tensors)}, {"out": expected["out"][:, :, 13:]})


@pytest.mark.parametrize("kind", ["kernelized", "taylorshift"])
def test_a_state_keeps_its_size_and_a_count_goes_on_where_float32_would_stand_still(kind):
    q, k, v = (x.float() for x in draw_qkv(queries=1, keys=1000, d=7, e=5).values())

    def numbers(state) -> int:
        return sum(x.numel() for x in vars(state).values() if isinstance(x, torch.Tensor))

    one = summarize(k[:, :, :1], v[:, :, :1], kind)
    assert numbers(one) == numbers(summarize(k, v, kind))
    many = replace(one, count=torch.full((1, 1, 1), 2**24))
    assert (many + one).count.item() == 2**24 + 1
    assert step(q, k[:, :, :1], v[:, :, :1], many)[1].count.item() == 2**24 + 1


def attended(q, k, v, *, kind, **options):
    """Attention to the state of all keys, in float32."""
    found = attend(q, summarize(k, v, kind, **options))
    assert found.values.dtype == found.mass.dtype == torch.float32
    return found.divide().float()


@every_kind
def test_states_are_float32_and_lose_no_more_than_rounding(name):
    kind, options = KINDS[name]
    definition = partial(getattr(reference, f"{kind}_attention"), causal=True, **options)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = {x: t.to(dtype) for x, t in draw_qkv(queries=29, d=7, e=5).items()}
        own = {x: t.float() for x, t in learned(name).items()}
        state = summarize(tensors["k"], tensors["v"], kind, **options, **own)
        sums = [x for x in vars(state).values() if isinstance(x, torch.Tensor)]
        assert {x.dtype for x in sums} == {torch.float32, torch.int64}
        through_state = partial(attended, kind=kind, **options)
        outside = run(through_state, tensors | own)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            within = run(through_state, tensors | own)
        assert all(relative_error(t, outside[x]) < 1e-6 for x, t in within.items())
        expected = run(definition, {x: t.double() for x, t in (tensors | own).items()})
        actual = run(partial(stepped, kind=kind, **options), tensors | own)
        assert actual["out"].dtype == dtype
        for x, t in actual.items():
            # One rounding, and one for each step that a gradient comes through.
            assert relative_error(t, expected[x]) < max(2e-6, torch.finfo(dtype).eps), (dtype, x)


# One token at a time with relative position

TOKENS = 23
SHAPE = (2, 3, 6, 5)


def recurrent(inputs, state, *options):
    q, k, v = (inputs[name] for name in "qkv")
    rows = (slice(i, i + 1) for i in range(q.shape[2]))
    return torch.cat([state.step(*(x[:, :, t] for x in (q, k, v)), *options) for t in rows], 2)


@drawn
@given(
    st.none() | st.integers(0, TOKENS + 4),
    st.sampled_from([1, 3]),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from(["elu1", "relu", "random"]),
)
@example(0, 1, "mean", "elu1")
@example(TOKENS - 1, 3, "mean", "elu1")
@example(TOKENS, 3, "sum", "elu1")
@example(TOKENS + 4, 1, "mean", "relu")
def test_steps_are_the_rows_of_the_definitions(horizon, heads, normalization, feature_map):
    inputs, features = draw_qkv(queries=TOKENS, d=6, e=5), 6
    if feature_map == "random":
        generator, features = torch.Generator().manual_seed(0), 11
        feature_map = RandomFeatures(6, features, generator, dtype=torch.float64)
    relative, bias, past = None, None, []
    if horizon is not None:
        relative = Flat(draw_table(heads, 2 * horizon + 1, 6, seed=3), None, normalization)
        bias, past = (
            reference.relative_bias(relative, inputs["q"], TOKENS),
            [PastTable(relative, TOKENS)],
        )
    shape = (2, 3, features, 5)
    state = RecurrentState.begin(shape, past[0].horizon if past else 0, dtype=torch.float64)
    options = dict(causal=True, relative=relative, feature_map=feature_map)
    wanted = reference.kernelized_attention(**inputs, **options)
    assert relative_error(recurrent(inputs, state, feature_map, *past), wanted) < 1e-12
    cache = KeyValueCache.begin(SHAPE, TOKENS, dtype=torch.float64)
    wanted = reference.softmax_attention(**inputs, causal=True, bias=bias)
    assert relative_error(recurrent(inputs, cache, *past), wanted) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_steps_stay_in_float32_where_tokens_are_short(dtype):
    inputs = {name: x.to(dtype) for name, x in draw_qkv(queries=TOKENS, d=6, e=5).items()}
    table = draw_table(3, 9, 6, seed=3).float()
    wanted = kernelized_attention(
        **{name: x.double() for name, x in inputs.items()},
        causal=True,
        relative=Flat(table.double(), None, "mean"),
    )
    past = PastTable(Flat(table, None, "mean"), TOKENS)
    state = RecurrentState.begin(SHAPE, past.horizon, dtype=torch.float32)
    found = recurrent(inputs, state, "elu1", past)
    assert found.dtype == dtype
    # One rounding of the result is all that the short type does.
    assert relative_error(found.double(), wanted.to(dtype).double()) < 2 * torch.finfo(dtype).eps
