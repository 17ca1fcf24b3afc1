"""What is wrong with the arguments is said in one line: what was wanted, and what came."""

import contextlib
from functools import partial

import pytest
import torch

from tests.helpers.oracles import draw, draw_qkv, draw_table
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    RandomFeatures,
    count_classes,
    kernelized_attention,
    softmax_attention,
    taylorshift_attention,
)


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
    with wrong("width >= 1 (2, 3, 11, 0)"):
        function(q[..., :0], k[..., :0], v)


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


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_tensors_on_two_devices_are_refused_with_both_named(function):
    q, k, v = draw_qkv(queries=15, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    layout = TokenLayout(0, Grid(3, 5))
    kept = torch.arange(15).expand(2, 15)
    for name, arguments in {"k": (q, k.to("meta"), v), "v": (q, k, v.to("meta"))}.items():
        with wrong(f"q cpu {name} meta"):
            function(*arguments)
    with wrong("q cpu key_mask meta"):
        function(q, k, v, key_mask=torch.ones(2, 15, dtype=torch.bool, device="meta"))
    with wrong("q cpu table meta"):
        function(q, k, v, relative=Flat(table[0].to("meta")))
    with wrong("q cpu columns meta"):
        function(q, k, v, relative=Axial(table[:, 0], table[:, 1].to("meta"), layout))
    with wrong("q cpu layout.kept meta"):
        function(q, k, v, relative=Joint(table, layout._replace(kept=kept.to("meta"))))
    with wrong("q cpu layout.present meta"):
        present = kept.to("meta", torch.bool)
        function(q, k, v, relative=Joint(table, layout._replace(present=present)))
    with wrong("q cpu layout.counts meta"):
        function(
            q,
            k,
            v,
            relative=Joint(
                table, layout._replace(counts=count_classes(layout, (1, 1), device="meta"))
            ),
        )


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_a_generator_on_another_device_is_refused(function):
    with wrong("q meta generator cpu"):
        function(
            *(x.to("meta") for x in draw_qkv(queries=7).values()),
            value_drop=0.5,
            generator=torch.Generator(),
        )


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_tables_and_layouts_of_the_wrong_dtype_or_range_are_refused(function):
    q, k, v = draw_qkv(queries=15, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    layout = TokenLayout(0, Grid(3, 5))
    kept = torch.arange(15).expand(2, 15)
    for bad, came in (
        (table.long(), "int64"),
        (table.to(torch.complex64), "complex64"),
        (table.tolist(), "list"),
    ):
        with wrong(f"table floating {came}"):
            function(q, k, v, relative=Joint(bad, layout))
    with wrong("layout.kept int64 int32"):
        function(q, k, v, relative=Joint(table, layout._replace(kept=kept.int())))
    for present in (torch.ones(2, 15), torch.ones(2, 14, dtype=torch.bool), [[True] * 15] * 2):
        came = f"{present.dtype} {tuple(present.shape)}" if torch.is_tensor(present) else "list"
        with wrong(f"layout.present bool [2, 15] {came}"):
            function(q, k, v, relative=Joint(table, layout._replace(present=present)))
    for shift, came in ((1, "1 to 15"), (-1, "-1 to 13")):
        with wrong(f"layout.kept 0 to 14 {came}"):
            function(q, k, v, relative=Joint(table, layout._replace(kept=kept + shift)))
    twice = kept.clone()
    twice[1, 3] = 7
    with wrong("layout.kept each patch once twice"):
        function(q, k, v, relative=Joint(table, layout._replace(kept=twice)))
    for sides in ((0, Grid(-3, -5)), (16, Grid(-1, 1)), (-15, Grid(5, 6))):
        with wrong("layout no negative number"):
            function(q, k, v, relative=Joint(table, TokenLayout(*sides)))
        with wrong("layout no negative number"):
            count_classes(TokenLayout(*sides), (1, 1))
    for other, horizons in ((layout, (1, 2)), (TokenLayout(0, Grid(5, 3)), (1, 1))):
        counts = count_classes(other, horizons)
        with wrong(f"layout.counts 3 5 9 {tuple(counts.shape)}"):
            function(q, k, v, relative=Joint(table, layout._replace(counts=counts)))


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_a_table_that_holds_nan_is_refused(function):
    q, k, v = draw_qkv(queries=7, d=5, e=4).values()
    table = draw_table(3, 3, 5, seed=0)
    table[1, 2, 3] = float("nan")
    with wrong("table non-negative nan"):
        function(q, k, v, relative=Flat(table))


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
    "coefficients",
    [(0.5, 1.0, 0.5), (0.0, 1.0, 1.0), (-1.0, 0.0, 1.0), (0.5, 2.0, 1.0), (float("nan"), 1.0, 1.0)],
)
def test_coefficients_that_allow_a_weight_of_zero_are_refused(coefficients):
    with wrong(f"coefficients {coefficients[0]} b^2"):
        taylorshift_attention(*draw_qkv(queries=7).values(), coefficients=coefficients)


@pytest.mark.parametrize(
    "coefficients",
    [(1, 1), None, "abc", (0.5, 1.0, "1"), (0.5, 1.0, float("inf")), (1, 2, 3, 4), 0.5],
)
def test_coefficients_that_are_not_three_finite_numbers_are_refused(coefficients):
    with wrong("coefficients three finite numbers got"):
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
    with wrong("temperature floating tensor float 2.0"):
        taylorshift_attention(q, k, v, temperature=2.0)
    with wrong("temperature floating int64"):
        taylorshift_attention(q, k, v, temperature=torch.ones(3, dtype=torch.int64))
    with wrong("q cpu temperature meta"):
        taylorshift_attention(q, k, v, temperature=torch.ones(3, device="meta"))
    with wrong("feature_map 'exp' elu1 relu softmax"):
        kernelized_attention(q, k, v, feature_map="exp")
    with wrong("causal Flat"):
        kernelized_attention(
            q,
            k,
            v,
            causal=True,
            relative=Joint(draw_table(3, 3, 3, 16, seed=0), TokenLayout(0, Grid(1, 7))),
        )
    with wrong("causal kept"):
        layout = TokenLayout(0, Grid(2, 5), torch.arange(7).expand(2, 7))
        kernelized_attention(
            q, k, v, causal=True, relative=Flat(draw_table(3, 3, 16, seed=0), layout)
        )


@pytest.mark.parametrize("function", EVERY_ATTENTION)
@pytest.mark.parametrize("value_drop", [-0.1, 1.0, float("nan")])
def test_a_probability_outside_its_range_is_refused(function, value_drop):
    with wrong(f"value_drop [0, 1) {value_drop}"):
        function(*draw_qkv(queries=7).values(), value_drop=value_drop)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_options_and_layouts_of_another_type_are_named(function):
    q, k, v = draw_qkv(queries=15, d=5, e=4).values()
    table = draw_table(3, 3, 3, 5, seed=0)
    with wrong("value_drop [0, 1) 'a'"):
        function(q, k, v, value_drop="a")
    with wrong("generator torch.Generator int"):
        function(q, k, v, value_drop=0.5, generator=3)
    for layout in (None, (3, 5), TokenLayout(0, (3, 5))):
        with wrong("layout TokenLayout(num_prefix, Grid(height, width))"):
            function(q, k, v, relative=Joint(table, layout))
    with wrong("key_mask bool list [True"):
        function(q, k, v, key_mask=[[True] * 15] * 2)


@pytest.mark.parametrize("function", EVERY_ATTENTION)
def test_a_generator_with_nothing_to_draw_is_refused(function):
    with wrong("generator value_drop 0"):
        function(*draw_qkv(queries=7).values(), generator=torch.Generator())


def second_derivatives():
    """By name: an attention, and the tensors beside q, k and v whose second derivative is asked
    for.
    """
    layout = TokenLayout(0, Grid(3, 5))
    table = draw_table(3, 3, 5, 16, seed=0)
    rows = draw_table(3, 3, 16, seed=1)
    kinds = {
        "joint": (lambda table: Joint(table, layout), {"table": table}),
        "flat": (lambda table: Flat(table), {"table": rows}),
        "axial": (
            lambda rows, columns: Axial(rows, columns, layout),
            {"rows": rows, "columns": rows + 1},
        ),
    }
    for name, (kind, tables) in kinds.items():
        for function in (taylorshift_attention, kernelized_attention):
            yield (
                f"{function.__name__}, {name}",
                (lambda *x, f=function, k=kind, **t: f(*x, relative=k(**t)), tables),
            )
    yield "taylorshift", (taylorshift_attention, {})
    yield (
        "temperature",
        (taylorshift_attention, {"temperature": torch.ones(3, dtype=torch.float64)}),
    )
    for form in ("direct", "efficient"):
        for causal in (False, True):
            function = partial(kernelized_attention, form=form, causal=causal)
            yield f"kernelized {form}, causal {causal}", (function, {})
    features = RandomFeatures(16, 5, torch.Generator().manual_seed(1))
    yield "random features", (partial(kernelized_attention, feature_map=features), {})


SECOND = dict(second_derivatives())


@pytest.mark.parametrize("case", SECOND)
def test_a_second_derivative_is_refused_in_words(case):
    function, tensors = SECOND[case]
    inputs = [x.requires_grad_() for x in draw_qkv(queries=15).values()]
    learned = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    everything = [*inputs, *learned.values()]
    gradients = torch.autograd.grad(
        function(*inputs, **learned).square().sum(), everything, create_graph=True
    )
    for gradient in gradients:
        with wrong("second derivative create_graph", NotImplementedError):
            torch.autograd.grad(gradient.sum(), everything, retain_graph=True, allow_unused=True)
