"""How far from 0 queries and keys may lie: results stay among the values where weights are tiny or
features cancel.
"""

from functools import partial

import pytest
import torch

from tests.helpers.oracles import assert_agree, draw, draw_mask, draw_qkv, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, reference, taylorshift_attention
from visionattn.ops.attention_rows import kernelized_rows
from visionattn.ops.taylorshift import taylorshift_attention as taylorshift_room
from visionattn.ops.taylorshift.taylorshift_features import MOST_CANCELLATION

TOLERANCE = {torch.float32: 2.5e-4, torch.float64: 1.5e-8}


def orthogonal(norm, tokens=300, d=16, dtype=torch.float32):
    """q and k of that length, each query orthogonal to each key, and values."""
    basis = torch.linalg.qr(draw(d, d, seed=1))[0]
    q, k = (
        torch.nn.functional.normalize(draw(1, 2, tokens, d // 2, seed=seed), dim=3) @ half * norm
        for seed, half in ((2, basis[: d // 2]), (3, basis[d // 2 :]))
    )
    return {"q": q.to(dtype), "k": k.to(dtype), "v": draw(1, 2, tokens, 8, seed=4, dtype=dtype)}


@pytest.fixture
def forms_taken(monkeypatch):
    """What "auto" stood for in each call, where by size alone it is the efficient form."""
    taken, right = [], taylorshift_room.linear_form

    def call(*asked):
        found = right(*asked)
        taken.extend([found] if asked[0] == "auto" else [])
        return found

    monkeypatch.setattr(
        "visionattn.ops.taylorshift.taylorshift_eager.form_of_shapes", lambda *_: "efficient"
    )
    monkeypatch.setattr(taylorshift_room, "linear_form", call)
    monkeypatch.setattr(taylorshift_room, "takes_pairs", lambda *_: False)
    return taken


def assert_among(out, v, room):
    """No result lies outside of the values by more than ``room``."""
    assert (out <= v.amax(2, keepdim=True) + room).all()
    assert (out >= v.amin(2, keepdim=True) - room).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_taylorshift_of_orthogonal_queries_and_keys_stays_among_the_values(dtype, forms_taken):
    longest, norms = (2 * MOST_CANCELLATION[dtype]) ** 0.25, (4.0, 11.0, 40.0, 1e3, 1e5)
    for norm in norms:
        tensors = orthogonal(norm, dtype=dtype)
        out, room = taylorshift_attention(**tensors), TOLERANCE[dtype] * tensors["v"].abs().max()
        assert_among(out, tensors["v"], room)
        if norm**2 < 1e-4 / torch.finfo(dtype).eps:  # scores themselves are rounded
            exact = {name: x.double() for name, x in tensors.items()}
            assert (out - reference.taylorshift_attention(**exact)).abs().max() <= room
    assert forms_taken == ["efficient" if norm < longest else "direct" for norm in norms]


def test_gradients_are_those_of_the_form_that_keeps_its_digits(forms_taken):
    tensors = orthogonal(20.0)
    got = run(taylorshift_attention, tensors)
    exact = {name: x.double() for name, x in tensors.items()}
    assert_agree(got, run(reference.taylorshift_attention, exact), 1e-4)
    assert forms_taken == ["direct"]


def test_usual_tokens_and_those_with_a_temperature_take_the_faster_form(forms_taken):
    q, k, v = (3 * draw(2, 2, 200, 64, seed=seed, dtype=torch.float32) for seed in range(3))
    taylorshift_attention(q, k, v)
    long = orthogonal(1e5)
    taylorshift_attention(**long, temperature=torch.tensor([4.0, 9.0]))
    with torch.no_grad():
        taylorshift_attention(q, k.fill_(1e6), v, key_mask=torch.zeros(2, 200, dtype=torch.bool))
    assert forms_taken == ["efficient"] * 3


def test_masked_keys_neither_choose_the_form_nor_have_a_weight(forms_taken):
    mask, tensors = draw_mask(1, 300), orthogonal(4.0)
    exact = {name: x.double() for name, x in tensors.items()}
    wanted = run(partial(reference.taylorshift_attention, key_mask=mask), exact)
    for fill in (0.0, 1e9, float("nan")):
        tensors["k"] = tensors["k"].masked_fill(~mask[:, None, :, None], fill)
        assert_agree(run(partial(taylorshift_attention, key_mask=mask), tensors), wanted, 1e-4)
    assert forms_taken == ["efficient"] * 3


def test_a_compiled_graph_takes_the_form_that_keeps_its_digits():
    torch._dynamo.reset()
    tensors = orthogonal(60.0, tokens=1500)
    compiled = torch.compile(taylorshift_attention, fullgraph=True, backend="aot_eager")
    exact = {name: x.double() for name, x in tensors.items()}
    wanted = taylorshift_attention(**exact, form="direct")
    assert (compiled(**tensors) - wanted).abs().max() <= TOLERANCE[torch.float32]
    named = taylorshift_attention(**tensors, form="efficient")
    assert (named - wanted).abs().max() > 1e-3  # as named, whatever it gives


# elu1


def log_elu1(x):
    return torch.where(x > 0, x.clamp(min=0).log1p(), x)


def mean_by_logarithms(q, k, v, mask=None, causal=False):
    """The mean under elu1's weights, which are formed as logarithms and compared with the largest
    of each query.
    """
    weights = (log_elu1(q).unsqueeze(3) + log_elu1(k).unsqueeze(2)).logsumexp(4)
    if mask is not None:
        weights = weights.masked_fill(~mask[:, None, None], -torch.inf)
    if causal:
        later = torch.ones(weights.shape[2:], dtype=torch.bool).triu(1)
        weights = weights.masked_fill(later, -torch.inf)
    return weights.softmax(3) @ v


LOW_TENSORS = {
    "queries": (-1e3, 0.0),
    "keys": (0.0, -1e3),
    "both": (-3e3, -1e3),
    "near the end": (-80.0, -75.0),
}


@pytest.mark.parametrize("form", ["direct", "efficient"])
@pytest.mark.parametrize("low", LOW_TENSORS)
def test_elu1_of_low_activations_is_a_mean_of_the_values(low, form):
    for mask in (None, draw_mask(2, 45)):
        tensors = draw_qkv(queries=31, keys=45, d=7, e=5)
        for name, shift in zip("qk", LOW_TENSORS[low], strict=True):
            tensors[name] += shift
        if mask is not None:  # what masked keys hold raises no others
            tensors["k"] = tensors["k"].masked_fill(~mask[:, None, :, None], 5.0)
        tensors = {name: x.float() for name, x in tensors.items()}
        exact = {name: x.double() for name, x in tensors.items()}
        got = run(partial(kernelized_attention, form=form, key_mask=mask), tensors)
        assert_agree(got, run(partial(mean_by_logarithms, mask=mask), exact), 1e-5)


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_causal_elu1_of_low_queries_is_a_mean_of_the_values(form):
    tensors = {name: x.float() for name, x in draw_qkv(queries=80, d=7, e=5).items()}
    tensors["q"] -= 1e3
    exact = {name: x.double() for name, x in tensors.items()}
    wanted = run(partial(mean_by_logarithms, causal=True), exact)
    assert_agree(run(partial(kernelized_attention, form=form, causal=True), tensors), wanted, 1e-5)


@pytest.mark.parametrize("form, normalization", [("direct", "mean"), ("efficient", "sum")])
def test_low_queries_weigh_relative_position_by_the_same_factor(form, normalization):
    tensors = draw_qkv(queries=15, d=7, e=5)
    tensors["table"] = draw(3, 3, 3, 7, seed=3).abs()

    def call(function, shift):
        def shifted(q, k, v, table):
            own = Joint(table, TokenLayout(0, Grid(3, 5)), normalization)
            return function(q + shift, k, v, relative=own)

        return shifted

    tensors["q"] -= 20  # where float64 needs no help: of single precision, far below
    wanted = run(call(reference.kernelized_attention, 0), tensors)
    low = {name: x.float() for name, x in tensors.items()}
    got = run(call(lambda *x, **o: kernelized_attention(*x, form=form, **o), -1000), low)
    assert_agree(got, wanted, 2e-4)


def test_of_wide_activations_each_result_stays_among_the_values():
    q, k, v = (draw(2, 3, 300, 4, seed=seed, dtype=torch.float32) for seed in range(3))
    out = kernelized_attention(1e3 * q, 1e3 * k, v)
    assert_among(out, v, 1e-5)
    assert out.ne(0).any(-1).all()


# Zero vectors, no weight at all, large scores


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_zero_vectors_weigh_c_and_have_finite_gradients(form):
    tensors = draw_qkv(queries=23, keys=31, d=7, e=5)
    tensors |= {"temperature": torch.tensor([0.7, 1.9, 3.1], dtype=torch.float64)}
    tensors["q"][:, :, 4] = tensors["k"][:, :, 9] = 0
    results = run(partial(taylorshift_attention, form=form), tensors)
    assert_agree(results, run(reference.taylorshift_attention, tensors))
    torch.testing.assert_close(results["out"][:, :, 4], tensors["v"].mean(2))
    tensors["k"][:] = 0
    results = run(partial(taylorshift_attention, form=form), tensors)
    assert all(result.isfinite().all() for result in results.values())


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_a_query_that_relu_gives_no_weight_gets_zero_and_large_scores_stay_right(form):
    tensors = draw_qkv(queries=23, keys=31, d=7, e=5)
    tensors["q"][:, :, 7] = -1.0
    for name, factor in (("relu", 1), ("softmax", 300), ("elu1", 300)):
        given = {key: factor * x for key, x in tensors.items()}
        results = run(partial(kernelized_attention, feature_map=name, form=form), given)
        assert_agree(results, run(partial(reference.kernelized_attention, feature_map=name), given))
        if name == "relu":
            assert results["out"][:, :, 7].eq(0).all() and results["q"][:, :, 7].eq(0).all()


@pytest.mark.parametrize("low", [-60.0, -300.0])
def test_rows_of_features_that_underflow_are_those_of_float64(low):
    q, k = (draw(1, 2, 9, 6, seed=i, dtype=torch.float32) for i in (1, 2))
    found = kernelized_rows(q + low, k, torch.arange(9)).total.double()
    unit = torch.eye(9, dtype=torch.float64).expand(1, 2, -1, -1)
    wanted = reference.kernelized_attention((q + low).double(), k.double(), unit)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
