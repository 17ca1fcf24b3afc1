"""Rows of attention against the dense weights of the definitions."""

from functools import partial

import pytest
import torch

from tests.helpers.oracles import draw, draw_qkv, peak_bytes
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Joint,
    RandomFeatures,
    kernelized_attention,
    reference,
    softmax_attention,
    taylorshift_attention,
    window_attention,
)
from visionattn.ops.attentions import ATTENTIONS
from visionattn.ops.rows import (
    ROWS,
    kernelized_rows,
    taylorshift_rows,
    window_rows,
)

TAU = torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)


def dense(definition, q, k, **options):
    """All weights ``[B, h, N, M]``: the means of values that are the unit vectors."""
    unit = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return definition(q, k, unit, **options)


def assert_close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def some(tokens):
    """The first, the last and a few other queries, out of order, one twice."""
    return torch.tensor([tokens - 1, 0, tokens // 3, tokens // 2, 0])


def test_each_attention_has_rows():
    assert set(ROWS) == set(ATTENTIONS)


def test_rows_of_random_features_are_those_of_the_definition():
    features = RandomFeatures(16, 20, torch.Generator().manual_seed(3)).double()
    qkv = draw_qkv(queries=23)
    found = kernelized_rows(qkv["q"], qkv["k"], some(23), feature_map=features)
    wanted = dense(reference.kernelized_attention, qkv["q"], qkv["k"], feature_map=features)
    assert_close(found.total, wanted[:, :, some(23)])


OPERATIONS = {
    "taylorshift": (taylorshift_attention, {"temperature": TAU.float()}),
    "kernelized": (kernelized_attention, {}),
    "softmax": (softmax_attention, {}),
    "window": (window_attention, {}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_in_float32_rows_are_the_weights_that_the_operation_takes(name):
    layout = TokenLayout(1, Grid(5, 9))
    q, k = (draw(2, 3, 46, 16, seed=i, dtype=torch.float32) for i in (1, 2))
    function, options = OPERATIONS[name]
    signed = ATTENTIONS[name].signed
    table = draw(3, 5, 5, 16, seed=3, dtype=torch.float32)
    relative = Joint(table if signed else table.abs(), layout, "sum" if signed else "mean")
    found = ROWS[name](q, k, some(46), relative=relative, **options)
    assert found.total.dtype == torch.float32
    wanted = dense(function, q, k, relative=relative, **options)
    assert_close(found.total, wanted[:, :, some(46)], 1e-6)


@pytest.mark.parametrize("low", [-60.0, -300.0])
def test_features_that_underflow_give_the_rows_of_float64(low):
    q, k = (draw(1, 2, 9, 6, seed=i, dtype=torch.float32) for i in (1, 2))
    q = q + low
    rows = torch.arange(9)
    found = kernelized_rows(q, k, rows)
    assert_close(found.total.sum(-1), torch.ones(1, 2, 9), 1e-5)
    wanted = dense(reference.kernelized_attention, q.double(), k.double())
    assert_close(found.total.double(), wanted, 1e-4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_of_rows_is_linear_in_the_keys(name):
    """Pairs of all tokens would take four times as much for twice the tokens."""

    def peak(height):
        layout = TokenLayout(0, Grid(height, 49))
        q, k = (draw(1, 3, layout.num_tokens, 16, seed=i, dtype=torch.float32) for i in (1, 2))
        signed = ATTENTIONS[name].signed
        table = draw(3, 7, 7, 16, seed=3, dtype=torch.float32).abs()
        relative = Joint(table, layout, "sum" if signed else "mean")
        rows = torch.tensor([0, 77])
        return peak_bytes(partial(ROWS[name], q, k, rows, relative=relative))

    first, second = peak(20), peak(40)
    assert second < 2.1 * first
    assert second / (40 * 49) < 1500  # bytes per token; all pairs of one head would take 7,840


@pytest.mark.parametrize("name", OPERATIONS)
def test_wrong_rows_are_one_line(name):
    options = {"layout": TokenLayout(0, Grid(3, 5))} if name == "window" else {}
    q = draw(1, 3, 15, 16, seed=1)
    for rows, said in (
        (torch.tensor([0, 15]), "wanted numbers of queries from 0 to 14, got 0 to 15"),
        (torch.tensor([-1]), "from 0 to 14, got -1 to -1"),
        (torch.tensor([1.0]), r"wanted int64 \[Q\], numbers of queries, got torch.float32"),
        (torch.tensor(1), r"wanted int64 \[Q\]"),
    ):
        with pytest.raises(ValueError, match=said):
            ROWS[name](q, q, rows, **options)
    assert ROWS[name](q, q, torch.tensor([], dtype=torch.int64), **options).total.shape == (
        1,
        3,
        0,
        15,
    )


def test_wrong_options_are_refused_as_the_operation_refuses_them():
    q = draw(1, 3, 15, 16, seed=1)
    with pytest.raises(ValueError, match="coefficients"):
        taylorshift_rows(q, q, some(15), coefficients=(-1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="temperature"):
        taylorshift_rows(q, q, some(15), temperature=torch.ones(2))
    with pytest.raises(ValueError, match="feature_map 'x'"):
        kernelized_rows(q, q, some(15), feature_map="x")
    with pytest.raises(ValueError, match="pass layout"):
        window_rows(q, q, some(15))
