"""What masked and later tokens hold, NaN and inf among it, changes neither the results nor the
gradients of those that count, and their own gradients are 0.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.oracles import assert_agree, draw, draw_mask, draw_qkv
from visionattn.layers.attention import Attention
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Flat,
    RandomFeatures,
    attend,
    kernelized_attention,
    nonfinite,
    softmax_attention,
    summarize,
    taylorshift_attention,
)
from visionattn.ops.kernelized.operands import CHUNK_ELEMENTS

NAN, INF = float("nan"), float("inf")
GARBAGE = {"anything": (NAN, INF, -INF, 1e30, -7.0), "large": (1e15, -1e15)}
"""What one token after another holds; large numbers by themselves, as nothing in them is NaN."""


class SquareAndSoftplus:
    """A feature map that is an object, another one for queries than for keys."""

    query = staticmethod(torch.square)
    key = staticmethod(F.softplus)


MAPS = {"elu1": "elu1", "relu": "relu", "softmax": "softmax", "object": SquareAndSoftplus}
MAPS["random"] = RandomFeatures(7, 6, torch.Generator().manual_seed(2), dtype=torch.float64)
ATTENTIONS = {
    f"taylorshift {form}{' with temperature' * with_temperature}": (
        partial(taylorshift_attention, form=form),
        with_temperature,
    )
    for form in ("direct", "efficient", "auto")
    for with_temperature in (False, True)
}
ATTENTIONS |= {
    f"kernelized {form} {name}": (
        partial(kernelized_attention, form=form, feature_map=feature_map),
        False,
    )
    for form in ("direct", "efficient", "auto")
    for name, feature_map in MAPS.items()
}
ATTENTIONS["softmax"] = softmax_attention, False
"""Few tokens take the matrix of all pairs and weights for each pair of places, many take tiles."""


def results(function, tensors, counts):
    """Results of queries that count and, under the names of tensors, gradients for an upstream
    gradient that is 0 elsewhere.
    """
    inputs = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    out = function(**inputs)
    counted = counts[:, None, :, None].expand_as(out)
    upstream = draw(*out.shape, seed=99).to(out.dtype).masked_fill(~counted, 0)
    gradients = torch.autograd.grad(out, list(inputs.values()), upstream)
    assert out.dtype == tensors["v"].dtype
    return {"out": out.detach()[counted]} | dict(zip(inputs, gradients, strict=True))


def holding(tensors, absent, garbage, names="qkv", columns=slice(None)):
    """The tensors with garbage in those of ``names``, at the tokens of ``absent``, bool
    ``[B, tokens]``, in some columns.
    """
    held = dict(tensors)
    for name in names:
        x = tensors[name]
        fill = torch.tensor(garbage, dtype=x.dtype)
        fill = fill[torch.arange(x[0, 0].numel()) % len(garbage)].view(x.shape[2:])
        filled = torch.where(absent[:, None, : x.shape[2], None], fill, x)
        held[name] = x.clone()
        held[name][..., columns] = filled[..., columns]
    return held


def assert_nothing_changes(function, tensors, absent, counts, names="qkv", tolerance=1e-12):
    """Compare garbage at the tokens of ``absent`` in the tensors of ``names`` with zeros there.

    Args:
        absent: bool ``[B, tokens]`` of tokens whose gradients are 0.
        counts: bool ``[B, N]`` of queries that count.
    """
    wanted = results(function, holding(tensors, absent, [0.0], names), counts)
    for garbage in GARBAGE.values():
        got = results(function, holding(tensors, absent, garbage, names), counts)
        for name in got:
            assert got[name].isfinite().all(), name
        assert_agree(got, wanted, tolerance, floor=1.0)
        for name in names:
            own = absent[:, : got[name].shape[2]]
            assert got[name].transpose(1, 2)[own].eq(0).all(), name


def assert_one_column_changes_nothing(function, tensors, absent, counts):
    """The same of NaN and of inf in one column of one tensor."""
    for name in "qkv":
        for garbage in (NAN, INF):
            column = slice(2, 3)
            wanted = results(function, holding(tensors, absent, [0.0], name, column), counts)
            got = results(function, holding(tensors, absent, [garbage], name, column), counts)
            assert_agree(got, wanted, floor=1.0)


def everything(batch, tokens):
    return torch.ones(batch, tokens, dtype=torch.bool)


def with_temperature(tensors, wanted):
    heads = tensors["q"].shape[1]
    return tensors | ({"temperature": 0.5 + draw(heads, seed=5).abs()} if wanted else {})


# Masks of keys


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_masked_keys_hold_anything(attention):
    function, temperature = ATTENTIONS[attention]
    mask = draw_mask(2, 45)
    mask[1, 20:] = False
    tensors = with_temperature(draw_qkv(queries=31, keys=45, d=7, e=5), temperature)
    call = partial(function, key_mask=mask)
    assert_nothing_changes(call, tensors, ~mask, everything(2, 31), "kv")


@pytest.mark.parametrize("kind", ["taylorshift", "kernelized"])
def test_masked_keys_of_a_state_hold_anything(kind):
    mask = draw_mask(2, 45)
    tensors = with_temperature(draw_qkv(queries=31, keys=45, d=7, e=5), kind == "taylorshift")

    def call(q, k, v, **options):
        return attend(q, summarize(k, v, kind, key_mask=mask, **options)).divide()

    assert_nothing_changes(call, tensors, ~mask, everything(2, 31), "kv")


# Later tokens

CAUSAL = {
    f"kernelized {form} {name}": partial(kernelized_attention, form=form, feature_map=MAPS[name])
    for form, names in (("direct", ("elu1", "object")), ("efficient", ("elu1", "relu", "random")))
    for name in names
}
CAUSAL["softmax"] = softmax_attention


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of two blocks, so that a few hundred tokens cross several."""
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 128 * 8)


@pytest.mark.parametrize(
    "position, n, m, first, masked",
    [
        ("none", 45, 45, 29, False),
        ("flat on a grid", 45, 45, 29, False),
        ("horizon 0", 45, 45, 29, False),
        ("none", 30, 45, 29, False),
        ("flat", 45, 38, 29, False),
        ("none", 260, 260, 64, False),
        ("flat", 260, 260, 200, False),
        ("flat mean", 45, 45, 29, True),
    ],
)
@pytest.mark.parametrize("attention", CAUSAL)
def test_later_tokens_hold_anything(attention, position, n, m, first, masked, short_segments):
    """Queries before ``first`` count, and all tokens from there on are garbage."""
    tensors = draw_qkv(queries=n, keys=m, d=7, e=5)
    relative = position != "none"
    layout = TokenLayout(0, Grid(5, 9)) if position == "flat on a grid" else None
    normalization = "mean" if position == "flat mean" and attention != "softmax" else "sum"
    mask = draw_mask(2, m) if masked else None
    if relative:
        tensors["table"] = draw(3, 1 if position == "horizon 0" else 5, 7, seed=3).abs()

    def call(table=None, **inputs):
        own = Flat(table, layout, normalization) if relative else None
        return CAUSAL[attention](**inputs, relative=own, key_mask=mask, causal=True)

    later = torch.arange(max(n, m)).expand(2, -1) >= first
    assert_nothing_changes(call, tensors, later, ~later[:, :n])
    if n == m == 45 and not masked:
        assert_one_column_changes_nothing(call, tensors, later, ~later)


@pytest.mark.parametrize("position", ["none", "flat"])
@pytest.mark.parametrize("attention", CAUSAL)
def test_masked_keys_before_a_query_hold_anything(attention, position):
    mask = torch.ones(2, 45, dtype=torch.bool)
    mask[0, 10], mask[1, 30:32] = False, False
    relative = Flat(draw(3, 5, 7, seed=3).abs(), None, "sum") if position == "flat" else None
    call = partial(CAUSAL[attention], key_mask=mask, causal=True, relative=relative)
    tensors = draw_qkv(queries=45, d=7, e=5)
    assert_nothing_changes(call, tensors, ~mask, everything(2, 45), "kv")


@pytest.mark.parametrize("attention", CAUSAL)
def test_of_tokens_that_count_nan_is_not_hidden(attention):
    """From the token that holds it on, results are NaN, in the columns of v that do if it is v."""
    for name in "qkv":
        tensors = draw_qkv(queries=130, d=7, e=5)
        tensors[name][:, :, 70, 2] = NAN
        out = CAUSAL[attention](**tensors, causal=True)
        assert out[:, :, :70].isfinite().all()
        assert out[:, :, 70].isnan().any(-1).all()
        if name != "q":
            assert out[:, :, 70:].isnan().any(-1).all()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_of_keys_that_count_nan_is_not_hidden(attention):
    function, temperature = ATTENTIONS[attention]
    for name in "kv":
        tensors = with_temperature(draw_qkv(queries=45, d=7, e=5), temperature)
        tensors[name][:, :, 12, 2] = NAN
        assert function(**tensors).isnan().any(-1).all()


# Layers


@pytest.mark.parametrize("relative", ["none", "joint", "flat"])
@pytest.mark.parametrize("attention", ["taylorshift", "kernelized", "softmax"])
def test_masked_tokens_of_a_layer_hold_anything(attention, relative):
    torch.manual_seed(0)
    layer = Attention(12, 3, attention=attention, relative=relative)
    x, mask = draw(2, 16, 12, seed=1, dtype=torch.float32), draw_mask(2, 16)
    layout = TokenLayout(1, Grid(3, 5))
    wanted = layer(x.masked_fill(~mask[..., None], 0), layout, attn_mask=mask)[mask]
    for garbage in (NAN, INF, 1e15):
        got = layer(x.masked_fill(~mask[..., None], garbage), layout, attn_mask=mask)[mask]
        torch.testing.assert_close(got, wanted)


# Graphs and other devices


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_later_tokens_hold_anything_in_a_compiled_graph(form, relative):
    torch._dynamo.reset()
    tensors = draw_qkv(queries=45, d=7, e=5)
    if relative:
        tensors["table"] = draw(3, 5, 7, seed=3).abs()

    def call(table=None, **inputs):
        own = Flat(table) if relative else None
        return kernelized_attention(**inputs, relative=own, causal=True, form=form)

    later = torch.arange(45).expand(2, -1) >= 29
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_nothing_changes(compiled, tensors, later, ~later)


@pytest.mark.parametrize("attention", ["taylorshift", "kernelized", "kernelized causal"])
@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_where_sums_are_not_read_all_queries_without_gradient_are_left_out(
    attention, form, monkeypatch
):
    """As on an accelerator, whose results nobody looks at."""
    name, *causal = attention.split()
    function = partial(ATTENTIONS[f"taylorshift {form}"][0])
    if name == "kernelized":
        function = partial(kernelized_attention, form=form, causal=bool(causal))
    tensors, counts = draw_qkv(queries=45, d=7, e=5), draw_mask(2, 45)
    wanted = results(function, tensors, counts)
    monkeypatch.setattr(nonfinite, "is_known_finite", lambda *tensors: False)
    assert_agree(results(function, tensors, counts), wanted)
