"""How far from 0 queries and keys may lie: results stay among the values where weights are tiny or
features cancel.
"""

import pytest
import torch

from tests.helpers.oracles import assert_agree, draw, draw_mask, draw_qkv, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, reference, taylorshift_attention
from visionattn.ops.feature_maps import raised
from visionattn.ops.taylorshift import attention as taylorshift_room
from visionattn.ops.taylorshift.features import MOST_CANCELLATION

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

    monkeypatch.setattr("visionattn.ops.taylorshift.eager.form_of_shapes", lambda *_: "efficient")
    monkeypatch.setattr(taylorshift_room, "linear_form", call)
    monkeypatch.setattr(taylorshift_room, "takes_pairs", lambda *_: False)
    return taken


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norm", [4.0, 11.0, 40.0, 150.0, 1e3, 1e5])
def test_taylorshift_of_orthogonal_queries_and_keys_stays_among_the_values(
    norm, dtype, forms_taken
):
    tensors = orthogonal(norm, dtype=dtype)
    tensors["v"][..., 0] = 1
    out, v = taylorshift_attention(**tensors), tensors["v"]
    room = TOLERANCE[dtype] * v.abs().max()
    assert (out <= v.amax(2, keepdim=True) + room).all()
    assert (out >= v.amin(2, keepdim=True) - room).all()
    if norm**2 < 1e-4 / torch.finfo(dtype).eps:  # scores themselves are rounded
        exact = {name: x.double() for name, x in tensors.items()}
        assert (out - reference.taylorshift_attention(**exact)).abs().max() <= room
    longest = (2 * MOST_CANCELLATION[dtype]) ** 0.25
    assert forms_taken == ["efficient" if norm < longest else "direct"]


def test_gradients_are_those_of_the_form_that_keeps_its_digits(forms_taken):
    tensors = orthogonal(20.0)
    got = run(taylorshift_attention, tensors)
    exact = {name: x.double() for name, x in tensors.items()}
    assert_agree(got, run(reference.taylorshift_attention, exact), 1e-4)
    assert forms_taken == ["direct"]


@pytest.mark.parametrize("width", [16, 64])
def test_usual_tokens_and_those_with_a_temperature_take_the_faster_form(width, forms_taken):
    q, k, v = (3 * draw(2, 2, 200, width, seed=seed, dtype=torch.float32) for seed in range(3))
    taylorshift_attention(q, k, v)
    long = orthogonal(1e5)
    taylorshift_attention(**long, temperature=torch.tensor([4.0, 9.0]))
    with torch.no_grad():
        taylorshift_attention(q, k.fill_(1e6), v, key_mask=torch.zeros(2, 200, dtype=torch.bool))
    assert forms_taken == ["efficient"] * 3


@pytest.mark.parametrize("form", ["auto", "direct"])
@pytest.mark.parametrize("images", [1, 2])
def test_masked_keys_neither_choose_the_form_nor_have_a_weight(images, form, forms_taken):
    mask = draw_mask(images, 300)
    tensors = {name: x.repeat(images, 1, 1, 1) for name, x in orthogonal(4.0).items()}
    exact = {name: x.double() for name, x in tensors.items()}
    wanted = run(lambda **x: reference.taylorshift_attention(**x, key_mask=mask), exact)
    for fill in (0.0, 1e9, float("nan")):
        tensors["k"] = tensors["k"].masked_fill(~mask[:, None, :, None], fill)
        got = run(lambda **x: taylorshift_attention(**x, key_mask=mask, form=form), tensors)
        assert_agree(got, wanted, 1e-4)
    assert forms_taken == (["efficient"] * 3 if form == "auto" else [])


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("low", LOW_TENSORS)
@pytest.mark.parametrize("form", ["direct", "efficient", "auto"])
def test_elu1_of_low_activations_is_a_mean_of_the_values(form, low, masked):
    tensors, mask = draw_qkv(queries=31, keys=45, d=7, e=5), draw_mask(2, 45) if masked else None
    for name, shift in zip("qk", LOW_TENSORS[low], strict=True):
        tensors[name] = (tensors[name] + shift).float()
    tensors["v"] = tensors["v"].float()
    if masked:  # what masked keys hold raises no others
        tensors["k"] = tensors["k"].masked_fill(~mask[:, None, :, None], 5.0)
    got = run(lambda **x: kernelized_attention(**x, form=form, key_mask=mask), tensors)
    exact = {name: x.double() for name, x in tensors.items()}
    assert_agree(got, run(lambda **x: mean_by_logarithms(**x, mask=mask), exact), 1e-5)


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_causal_elu1_of_low_queries_is_a_mean_of_the_values(form):
    tensors = {name: x.float() for name, x in draw_qkv(queries=80, d=7, e=5).items()}
    tensors["q"] -= 1e3
    got = run(lambda **x: kernelized_attention(**x, form=form, causal=True), tensors)
    exact = {name: x.double() for name, x in tensors.items()}
    assert_agree(got, run(lambda **x: mean_by_logarithms(**x, causal=True), exact), 1e-5)


@pytest.mark.parametrize("normalization", ["mean", "sum"])
@pytest.mark.parametrize("form", ["direct", "efficient"])
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
    assert (out <= v.amax(2, keepdim=True) + 1e-5).all()
    assert (out >= v.amin(2, keepdim=True) - 1e-5).all()
    assert out.ne(0).any(-1).all()


def test_tokens_that_are_not_low_stay_as_they_are():
    q = draw(2, 3, 9, 4, seed=1)
    q[0, 1, 2] = -30
    got = raised(q, (3,))
    others = torch.ones(2, 3, 9, dtype=torch.bool)
    others[0, 1, 2] = False
    assert torch.equal(got[others], q[others]) and got[0, 1, 2].eq(0).all()
    assert raised(q[1:], (3,)) is not None and torch.equal(raised(q[1:], (3,)), q[1:])
    assert raised(q[:, :, :0], (3,)).numel() == 0
