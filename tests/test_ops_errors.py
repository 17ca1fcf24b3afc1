"""What is wrong with the arguments is said in one line: what was wanted, and what came."""

import contextlib

import pytest
import torch
from oracles import draw, draw_qkv, draw_table

from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, kernelized_attention, softmax_attention, taylorshift_attention


def wrong(match: str, kind: type[Exception] = ValueError):
    """The error has one line, and all words of ``match`` are in it."""

    @contextlib.contextmanager
    def check():
        with pytest.raises(kind) as caught:
            yield
        message = str(caught.value)
        assert "\n" not in message
        assert all(word in message for word in match.split()), f"{message!r} lacks one of {match!r}"

    return check()


EVERY_ATTENTION = (taylorshift_attention, kernelized_attention, softmax_attention)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_shapes_that_do_not_fit_are_named_with_what_was_wanted(function):
    q, k, v = draw_qkv(queries=7, keys=11, d=5, e=4).values()
    with wrong("k 5 6"):
        function(q, draw(2, 3, 11, 6, seed=0), v)
    with wrong("k 3 4"):
        function(q, draw(2, 4, 11, 5, seed=0), draw(2, 4, 11, 4, seed=0))
    with wrong("v 11 12"):
        function(q, k, draw(2, 3, 12, 4, seed=0))
    with wrong("q (3, 7, 5)"):
        function(q[0], k, v)
    with wrong("key_mask 11 7"):
        function(q, k, v, key_mask=torch.ones(2, 7, dtype=torch.bool))
    with wrong("key_mask bool float32"):
        function(q, k, v, key_mask=torch.ones(2, 11))
    with wrong("q floating int64"):
        function(q.long(), k, v)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_tables_and_layouts_that_do_not_fit_are_named_with_what_was_wanted(function):
    layout, kept = TokenLayout(2, Grid(3, 5)), torch.arange(15).expand(3, 15)
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    with wrong("layout 17 16"):
        function(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], relative=Joint(table, layout))
    with wrong("layout 17 16"):
        function(q, k[:, :, 1:], v[:, :, 1:], relative=Joint(table, layout))
    with wrong("table 2R+1 (3, 4, 3, 5)"):
        function(q, k, v, relative=Joint(draw_table(3, 4, 3, 5, seed=0), layout))
    with wrong("table 5 (3, 3, 3, 6)"):
        function(q, k, v, relative=Joint(draw_table(3, 3, 3, 6, seed=0), layout))
    with wrong("table h 3 (2, 3, 3, 5)"):
        function(q, k, v, relative=Joint(table[:2], layout))
    with wrong("table (3, 3, 3, 5)"):
        function(q, k, v, relative=Flat(table, layout=layout))
    with wrong("rows (3, 4, 5)"):
        function(q, k, v, relative=Axial(draw_table(3, 4, 5, seed=0), table[:, 0], layout))
    with wrong("columns (3, 3, 6)"):
        function(q, k, v, relative=Axial(table[:, 0], draw_table(3, 3, 6, seed=0), layout))
    with wrong("normalization 'max' sum mean"):
        function(q, k, v, relative=Joint(table, layout, normalization="max"))
    with wrong("relative Flat Axial Joint Tensor"):
        function(q, k, v, relative=table)
    with wrong("kept 2 (3, 15)"):
        function(q, k, v, relative=Joint(table, TokenLayout(2, Grid(3, 5), kept)))


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_a_negative_table_is_refused_where_weights_must_be_positive(function):
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    table[1, 2, 0, 3] = -0.25
    layout = TokenLayout(2, Grid(3, 5))
    with wrong("table non-negative -0.25"):
        function(q, k, v, relative=Joint(table, layout))
    with wrong("columns non-negative -0.25"):
        function(q, k, v, relative=Axial(table[:, 0].abs(), table[:, 2], layout))
    assert softmax_attention(q, k, v, relative=Joint(table, layout)).isfinite().all()


@pytest.mark.parametrize(
    "coefficients", [(0.5, 1.0, 0.5), (0.0, 1.0, 1.0), (-1.0, 0.0, 1.0), (0.5, 2.0, 1.0), (float("nan"), 1.0, 1.0)]
)
def test_coefficients_that_allow_a_weight_of_zero_are_refused(coefficients):
    with wrong(f"coefficients {coefficients[0]} b^2"):
        taylorshift_attention(*draw_qkv(queries=7).values(), coefficients=coefficients)


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_names_that_do_not_exist_are_refused_and_kernels_that_are_not_built_say_so(function):
    q, k, v = draw_qkv(queries=7).values()
    with wrong("form 'linear' auto direct efficient"):
        function(q, k, v, form="linear")
    with wrong("impl 'cuda' auto eager triton"):
        function(q, k, v, impl="cuda")
    with wrong("triton", (NotImplementedError, ValueError)):
        function(q, k, v, impl="triton")
    assert torch.equal(function(q, k, v, impl="eager"), function(q, k, v))


def test_options_of_one_operation_are_checked_too():
    q, k, v = draw_qkv(queries=7).values()
    with wrong("temperature 3 (2,)"):
        taylorshift_attention(q, k, v, temperature=torch.ones(2))
    with wrong("feature_map 'exp' elu1 relu softmax"):
        kernelized_attention(q, k, v, feature_map="exp")
    with wrong("causal Flat"):
        kernelized_attention(q, k, v, causal=True, relative=Joint(draw_table(3, 3, 3, 16, seed=0), TokenLayout(0, Grid(1, 7))))
    with wrong("causal kept"):
        layout = TokenLayout(0, Grid(2, 5), torch.arange(7).expand(2, 7))
        kernelized_attention(q, k, v, causal=True, relative=Flat(draw_table(3, 3, 16, seed=0), layout))


@pytest.mark.parametrize("function", EVERY_ATTENTION)
@pytest.mark.parametrize("value_drop", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_its_range_is_refused(function, value_drop):
    with wrong(f"value_drop [0, 1) {value_drop}"):
        function(*draw_qkv(queries=7).values(), value_drop=value_drop)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_a_generator_with_nothing_to_draw_is_refused(function):
    with wrong("generator value_drop 0"):
        function(*draw_qkv(queries=7).values(), generator=torch.Generator())


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_a_second_derivative_is_refused_in_words(function):
    inputs = [x.requires_grad_() for x in draw_qkv(queries=7).values()]
    gradients = torch.autograd.grad(function(*inputs).square().sum(), inputs, create_graph=True)
    with wrong("second derivative create_graph", NotImplementedError):
        gradients[0].sum().backward()


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_no_tokens_are_no_error(function):
    q, k, v = draw_qkv(queries=7, keys=11, d=5, e=4).values()
    assert function(q[:, :, :0], k, v).shape == (2, 3, 0, 4)
    assert torch.equal(function(q, k[:, :, :0], v[:, :, :0]), torch.zeros(2, 3, 7, 4, dtype=torch.float64))
    assert function(q[:0], k[:0], v[:0]).shape == (0, 3, 7, 4)
