"""Causal attention one token at a time gives the rows of its definition."""

import pytest
import torch

from tests.helpers.oracles import draw, draw_qkv, draw_table, relative_error
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Flat, RandomFeatures, reference
from visionattn.ops.recurrence import KeyValueCache, PastTable, RecurrentState

TOKENS = 23


def stepped(inputs, state, *options):
    q, k, v = (inputs[name] for name in "qkv")
    rows = (slice(i, i + 1) for i in range(q.shape[2]))
    return torch.cat([state.step(*(x[:, :, t] for x in (q, k, v)), *options) for t in rows], 2)


def begin(inputs, horizon=0, features=None, dtype=torch.float64):
    q, v = inputs["q"], inputs["v"]
    shape = (*q.shape[:2], features or q.shape[3], v.shape[3])
    return RecurrentState.begin(shape, horizon, dtype=dtype)


@pytest.mark.parametrize("normalization", ["mean", "sum"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("horizon", [0, 1, 5, TOKENS - 1, TOKENS, TOKENS + 4])
def test_steps_with_relative_position_are_the_rows_of_the_definition(horizon, heads, normalization):
    inputs = draw_qkv(queries=TOKENS, d=6, e=5)
    relative = Flat(draw_table(heads, 2 * horizon + 1, 6, seed=3), None, normalization)
    table = PastTable(relative, TOKENS)
    wanted = reference.kernelized_attention(**inputs, causal=True, relative=relative)
    found = stepped(inputs, begin(inputs, table.horizon), "elu1", table)
    assert relative_error(found, wanted) < 1e-12


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "random"])
def test_steps_without_relative_position_are_the_rows_of_the_definition(feature_map):
    inputs, features = draw_qkv(queries=TOKENS, d=6, e=5), 6
    if feature_map == "random":
        generator, features = torch.Generator().manual_seed(0), 11
        feature_map = RandomFeatures(6, features, generator, dtype=torch.float64)
    wanted = reference.kernelized_attention(**inputs, causal=True, feature_map=feature_map)
    found = stepped(inputs, begin(inputs, 0, features), feature_map)
    assert relative_error(found, wanted) < 1e-12


@pytest.mark.parametrize("horizon", [0, 4, TOKENS + 2])
def test_steps_with_a_cache_are_the_rows_of_softmax_attention(horizon):
    inputs = draw_qkv(queries=TOKENS, d=6, e=5)
    relative = Flat(draw(3, 2 * horizon + 1, 6, seed=3))
    bias = reference.relative_bias(relative, inputs["q"], TOKENS)
    wanted = reference.softmax_attention(**inputs, causal=True, bias=bias)
    cache = KeyValueCache.begin((2, 3, 6, 5), TOKENS, dtype=torch.float64)
    assert relative_error(stepped(inputs, cache, PastTable(relative, TOKENS)), wanted) < 1e-12
    plain = KeyValueCache.begin((2, 3, 6, 5), TOKENS, dtype=torch.float64)
    wanted = reference.softmax_attention(**inputs, causal=True)
    assert relative_error(stepped(inputs, plain), wanted) < 1e-12
    with pytest.raises(ValueError, match="the cache is full: it has room for 23 tokens"):
        plain.step(*(inputs[name][:, :, :1] for name in "qkv"))


def test_a_state_keeps_its_size_and_a_cache_does_not():
    inputs = draw_qkv(queries=TOKENS, d=6, e=5)
    table = PastTable(Flat(draw_table(3, 9, 6, seed=3)), TOKENS)
    state, sizes = begin(inputs, table.horizon), set()
    cache, cached = KeyValueCache.begin((2, 3, 6, 5), TOKENS, dtype=torch.float64), set()
    for i in range(TOKENS):
        token = [inputs[name][:, :, i : i + 1] for name in "qkv"]
        state.step(*token, "elu1", table)
        cache.step(*token)
        sizes.add(sum(x.numel() for x in state.tensors().values()))
        cached.add(sum(x.numel() for x in cache.tensors().values()))
    assert len(sizes) == 1 and len(cached) == TOKENS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_stay_in_float32_where_tokens_are_short(dtype):
    inputs = {name: x.to(dtype) for name, x in draw_qkv(queries=TOKENS, d=6, e=5).items()}
    wide = {name: x.double() for name, x in inputs.items()}
    relative = Flat(draw_table(3, 9, 6, seed=3).float(), None, "mean")
    wanted = reference.kernelized_attention(
        **wide, causal=True, relative=Flat(relative.table.double(), None, "mean")
    )
    table = PastTable(relative, TOKENS)
    found = stepped(inputs, begin(inputs, table.horizon, dtype=torch.float32), "elu1", table)
    assert found.dtype == dtype
    # One rounding of the result is all that the short type does.
    assert relative_error(found.double(), wanted.to(dtype).double()) < 2 * torch.finfo(dtype).eps


def test_a_map_over_positions_has_no_steps_and_a_layout_no_table():
    inputs = draw_qkv(queries=1, d=6, e=5)
    with pytest.raises(ValueError, match="has no steps: its keys depend on each other"):
        stepped(inputs, begin(inputs), "softmax")
    with pytest.raises(ValueError, match="wanted Flat without a layout"):
        PastTable(Flat(draw_table(1, 3, 6, seed=1), TokenLayout(0, Grid(2, 2))), 4)
