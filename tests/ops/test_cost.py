"""Published costs against the papers' tables and independent counts; the choice of form against
data it must follow.
"""

import itertools
import re
from fractions import Fraction

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.oracles import draw_qkv
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, form_choice, kernelized_attention, published_costs
from visionattn.ops.all_pairs import _remembered_classes, takes_pairs
from visionattn.ops.kernelized import kernelized_attention as kernelized_room
from visionattn.ops.operator import count_operations, function_of
from visionattn.ops.position import joint_position
from visionattn.ops.taylorshift import taylorshift_attention as taylorshift_room

WIDTHS = (8, 16, 32, 64, 128)
ODD_WIDTHS = (1, 3, 7, 24, 77)
ROOMS = {"taylorshift": taylorshift_room, "kernelized": kernelized_room}


def test_crossovers_are_those_of_the_published_table():
    assert [published_costs.N0(d) for d in WIDTHS] == [73, 273, 1057, 4161, 16513]
    assert [published_costs.N1(d) for d in WIDTHS] == [47, 159, 574, 2174, 8446]


def test_web_page_shows_the_upper_bound_of_the_crossover_of_memory():
    assert (published_costs.N0(32), published_costs.N1_bound(32)) == (1057, 577)
    for d in WIDTHS:
        assert published_costs.N1(d) <= published_costs.N1_bound(d)
        assert published_costs.N1_bound(d) - 1 < Fraction(d * d, 2) + 2 * d + Fraction(1, 2)


def test_published_counts_are_the_sums_of_their_steps():
    n = 91
    for d in ODD_WIDTHS:
        features = 2 * n * d * d
        products = 2 * (2 * n * d * d * (d + 1)) + 4 * n * d * (d + 1)
        steps = features + products + n * (d + 1) + 3 * n * (d + 1) + n * d
        assert published_costs.ops_efficient(n, d) == steps
        assert (
            published_costs.ops_direct(n, d)
            == 2 * n * n * d + 4 * n * n + 2 * n * n + 2 * n * n * d
        )
        assert published_costs.entries_direct(n, d) == n * d + n * n + n * n
        entries = 2 * n * d + n * (d + 1) + n * d * d + d * d * (d + 1)
        assert published_costs.entries_efficient(n, d) == entries


CROSSOVERS = [
    (published_costs.N0, published_costs.ops_direct, published_costs.ops_efficient),
    (published_costs.N1, published_costs.entries_direct, published_costs.entries_efficient),
    (published_costs.N0_packed, published_costs.ops_direct, published_costs.ops_efficient_packed),
    (
        published_costs.N1_packed,
        published_costs.entries_direct,
        published_costs.entries_efficient_packed,
    ),
]


@pytest.mark.parametrize("crossover, direct, efficient", CROSSOVERS)
def test_crossover_is_the_first_length_at_which_the_efficient_form_costs_no_more(
    crossover, direct, efficient
):
    for d in WIDTHS + ODD_WIDTHS:
        n = crossover(d)
        assert direct(n, d) >= efficient(n, d)
        assert n == 1 or direct(n - 1, d) < efficient(n - 1, d)


def test_packed_crossover_of_memory_follows_the_chunk():
    for chunk_tokens in (5, 50, 5000):
        n = published_costs.N1_packed(32, chunk_tokens=chunk_tokens)
        entries = [
            published_costs.entries_efficient_packed(tokens, 32, chunk_tokens=chunk_tokens)
            for tokens in (n, n - 1)
        ]
        assert published_costs.entries_direct(n, 32) >= entries[0]
        assert published_costs.entries_direct(n - 1, 32) < entries[1]


def test_heads_multiply_the_cost_of_one_and_follow_the_published_polynomials():
    n, dim, heads = 77, 48, 3
    h, width = Fraction(heads), Fraction(dim)
    assert published_costs.ops_efficient_heads(n, dim, heads) == n * (
        4 * width**3 / h**2 + 10 * width**2 / h + 9 * width + 4 * h
    )
    assert (
        published_costs.entries_efficient_heads(n, dim, heads)
        == width**3 / h**2 + (n + 1) * width**2 / h + 3 * n * width + n * h
    )
    assert published_costs.ops_direct_heads(n, dim, heads) == 4 * n * n * dim + 6 * n * n * heads
    assert published_costs.entries_direct_heads(n, dim, heads) == dim * n + 2 * heads * n * n


def test_more_heads_make_the_efficient_form_cheaper_and_must_divide_the_width():
    for count in (published_costs.ops_efficient_heads, published_costs.entries_efficient_heads):
        costs = [count(1024, 256, heads) for heads in (4, 8, 16, 32, 64, 128, 256)]
        assert costs == sorted(costs, reverse=True) and len(set(costs)) == 7
    with pytest.raises(
        ValueError, match="^width 50: expected a multiple of the number of heads, 3$"
    ):
        published_costs.ops_efficient_heads(77, 50, 3)


def test_packed_operations_are_the_sums_of_their_steps():
    n = 91
    for d in ODD_WIDTHS:
        f = d * (d + 1) // 2
        values = 2 * n * f + 2 * (2 * n * f * d) + 2 * (2 * n * d * d) + n * d + 2 * n * d
        mass = 2 * n * d * d + n * d + (2 * n * d * d + 2 * n * d) + 2 * n * d + 4 * n
        assert published_costs.ops_efficient_packed(n, d) == values + mass + n * d


def test_scaleformer_rules_take_the_smaller_memory_and_the_quadratic_form_when_equal():
    wanted = ["direct", "direct", "efficient"]
    # n m against d^2 max(n, m): the shorter sequence against d^2 = 25.
    assert [published_costs.scaleformer_causal_form(n, 77, 5) for n in (24, 25, 26)] == wanted
    assert [published_costs.scaleformer_causal_form(77, m, 5) for m in (24, 25, 26)] == wanted
    # n m against d^2 = 144.
    assert [
        published_costs.scaleformer_bidirectional_form(9, m, 12) for m in (15, 16, 17)
    ] == wanted
    # n m against n (2 * 3 + 5) = 11 n, whatever n is.
    for n in (2, 77):
        assert [published_costs.scaleformer_relative_form(n, m, 3) for m in (10, 11, 12)] == wanted


@pytest.mark.parametrize("operation", form_choice.OPERATIONS)
def test_once_efficient_stays_efficient_as_tokens_grow(operation):
    lengths = [*range(1, 300, 7), *range(300, 3000, 91), *range(3000, 60000, 1999)]
    for d, heads, batch in ((16, 3, 2), (32, 6, 1), (64, 12, 1), (128, 1, 1)):
        options = dict(heads=heads, batch=batch)
        forms = [form_choice.choose_form(operation, n, n, d, d, **options) for n in lengths]
        assert forms == sorted(forms), f"d={d}, heads={heads}"  # "direct" sorts before "efficient"
        assert forms[-1] == "efficient"
        first = form_choice.crossover(operation, d, **options)
        assert [form == "efficient" for form in forms] == [n >= first for n in lengths]
        assert (
            first == 1
            or form_choice.choose_form(operation, first - 1, first - 1, d, d, **options) == "direct"
        )
        assert form_choice.choose_form(operation, first, first, d, d, **options) == "efficient"


def test_sizes_that_are_none_are_refused_in_one_line():
    functions = [
        *((name, dict(n=7, d=7)) for name in ("ops_direct", "entries_efficient_packed")),
        *(
            (f"{name}_heads", dict(n=7, dim=24, heads=3))
            for name in ("ops_direct", "ops_efficient")
        ),
        *((name, dict(d=7)) for name in ("N0", "N1", "N1_bound", "N0_packed", "N1_packed")),
    ]
    for name, sizes in functions:
        for which, size in itertools.product(sizes, (0, -3, 2.0, True, "7")):
            wanted = re.escape(f"{size!r}: expected an integer of at least 1") + "$"
            with pytest.raises(ValueError, match=wanted):
                getattr(published_costs, name)(**sizes | {which: size})
    for bad in ({"d": 0}, {"n": -3}, {"m": 2.5}, {"heads": "7"}, {"batch": True}):
        sizes = {"n": 5, "m": 7, "d": 3, "e": 4} | bad
        with pytest.raises(
            ValueError, match=f"^{next(iter(bad))}=.*: expected an integer of at least"
        ):
            form_choice.choose_form(operation="taylorshift", **sizes)


def test_the_form_of_less_work_is_taken():
    # n^2 (d + e + 8) against 2 n d (e + 24) and a call of 1e6, with d = e = 16.
    assert form_choice.crossover("kernelized", 16) == 175
    assert form_choice.crossover("kernelized", 16, heads=6, batch=2) == 65
    # Half the pairs are seen.
    assert form_choice.crossover("kernelized causal", 16) == 258
    # d (d + 4) / 2 = 160 features.
    assert form_choice.crossover("taylorshift", 16) == 385
    assert (
        form_choice.form_of_shapes("taylorshift", (1, 3, 500, 16), (1, 3, 500, 16)) == "efficient"
    )
    beside = form_choice.form_of_shapes(
        "taylorshift", (1, 3, 500, 16), (1, 3, 500, 16), class_rows=7
    )
    assert beside == "direct"
    with pytest.raises(ValueError, match="^operation 'softmax': expected one of taylorshift, kern"):
        form_choice.choose_form("softmax", 5, 7, 3, 4)


def form_on(operation: str, form: str, side: int, horizon: int = 3, kept: bool = False) -> str:
    """The form that an attention takes on a grid of ``side`` patches with a joint position."""
    size, patches = 2 * horizon + 1, torch.arange(side * side)[None] if kept else None
    layout = TokenLayout(1, Grid(side, side), patches)
    relative, x = Joint(torch.ones(6, size, size, 64), layout), torch.empty(1, 6, side**2 + 1, 64)
    options = dict(name="elu1", causal=False)
    if operation == "taylorshift":
        options = dict(temperature=torch.ones(6), coefficients=(0.5, 1.0, 1.0))
    given = dict(q=x, k=x, v=x, key_mask=None, relative=relative)
    return ROOMS[operation]._form_taken(form, "auto", **given, **options)


@pytest.mark.parametrize("operation", ROOMS)
def test_small_grids_take_the_matrix_of_all_pairs_and_never_again_larger_ones(operation):
    for horizon in (0, 3):
        taken = [form_on(operation, "auto", side, horizon) == "pairs" for side in range(1, 60)]
        assert taken[0] and not taken[-1] and taken == sorted(taken, reverse=True)
    assert form_on(operation, "auto", 14) == form_on(operation, "direct", 28) == "pairs"
    # Sums over classes cost less on larger grids, and know patches that are missing.
    others = (("direct", 32, False), ("efficient", 3, False), ("direct", 5, True))
    assert all(form_on(operation, form, n, kept=kept) != "pairs" for form, n, kept in others)


def test_choices_are_made_as_for_other_tokens_within_a_context_alone():
    def chosen():
        x = torch.empty(1, 1, 5000, 4)
        forms = form_choice.choose_form("taylorshift", 77, 77, 16, 16)
        return forms, joint_position.direct_is_faster(700, 7), takes_pairs(x, x, None)

    before = chosen()
    assert before == ("direct", True, False)
    with form_choice.choosing_as(tokens=720):
        assert chosen() == ("direct", False, True)
    assert chosen() == before


def test_what_a_forward_pass_without_gradients_remembers_serves_a_backward_pass():
    _remembered_classes.cache_clear()
    q = draw_qkv(batch=1, queries=12, d=7, e=7)["q"]
    relative = Joint(torch.ones(1, 3, 3, 7), TokenLayout(0, Grid(3, 4)))
    with torch.inference_mode():
        kernelized_attention(q, q, q, relative=relative)
    kernelized_attention(q.requires_grad_(), q, q, relative=relative).sum().backward()
    assert q.grad.isfinite().all()


def operations_counted(operator, args):
    """Compare what the formula of an operator counts with the products that run; the results."""
    count_operations()
    with FlopCounterMode(display=False) as formula:
        results = operator(*args)

    def in_place(out, left, right, *scalars, out_shape=None, **options):
        return 2 * left[0] * left[1] * left[2] * right[2]

    mapping = {torch.ops.aten.baddbmm_: in_place}
    with FlopCounterMode(display=False, custom_mapping=mapping) as products:
        function_of(operator)(*args)
    assert formula.get_total_flops() == products.get_total_flops() > 0
    return results


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_the_operations_that_are_counted_are_those_of_the_products_that_run(form):
    q, k, v = draw_qkv(queries=37, keys=29).values()
    operators, options = torch.ops.visionattn, (0.5, 1.0, 1.0, form)
    for temperature in (None, torch.ones(3, dtype=q.dtype)):
        inputs = q, k, v, temperature, None
        values, mass, *state = operations_counted(
            operators.taylor_sums.default, (*inputs, *options)
        )
        given = (torch.ones_like(values), torch.ones_like(mass), *inputs, *state, *options)
        operations_counted(operators.taylor_sums_backward.default, given)


def test_calculator_prints_the_published_crossovers_beside_ours(capsys):
    published_costs.main(["--dim", "32", "--heads", "3", "--tokens", "1000"])
    printed = capsys.readouterr().out
    rows = {line[:24].strip(): line[24:].split() for line in printed.splitlines()}
    assert rows["published"] == ["1,057", "574"]
    assert rows["packed features"] == [
        f"{published_costs.N0_packed(32):,}",
        f"{published_costs.N1_packed(32):,}",
    ]
    assert rows["efficient"] == [
        f"{published_costs.ops_efficient_heads(1000, 96, 3):,}",
        f"{published_costs.entries_efficient_heads(1000, 96, 3):,}",
    ]
    assert rows["direct"] == ["402,000,000", "6,096,000"]
    assert "577" in printed


@pytest.mark.parametrize(
    "args, message",
    [
        (["--dim", "-3"], "expected whole numbers from 1"),
        (["--dim", "many"], "argument --dim: invalid int value: 'many'"),
        ([], "the following arguments are required: --dim"),
        (["--dim", "32", "--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_arguments_of_the_calculator_end_with_exit_code_2(args, message, capsys):
    with pytest.raises(SystemExit) as end:
        published_costs.main(args)
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f"visionattn.ops.published_costs: error: {message}\n")


def test_help_ends_with_a_command_that_works_as_pasted(capsys):
    with pytest.raises(SystemExit):
        published_costs.main(["--help"])
    command = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "visionattn.ops.published_costs"]
    published_costs.main(command[3:])
    assert "4,096 tokens of width 384, heads=12" in capsys.readouterr().out
