"""Published crossovers against the paper's table; the choice of form against
data it must follow.
"""

from bisect import bisect_left

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.oracles import draw_qkv
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Joint,
    form_choice,
    kernelized_attention,
    published_costs,
    window_attention,
)
from visionattn.ops.all_pairs import _remembered_classes, takes_pairs
from visionattn.ops.kernelized import kernelized_attention as kernelized_room
from visionattn.ops.operator import count_operations, function_of
from visionattn.ops.position import joint_position
from visionattn.ops.taylorshift import taylorshift_attention as taylorshift_room

WIDTHS = (8, 16, 32, 64, 128)
ROOMS = {"taylorshift": taylorshift_room, "kernelized": kernelized_room}


def test_crossovers_are_those_of_the_published_table():
    assert [published_costs.N0(d) for d in WIDTHS] == [73, 273, 1057, 4161, 16513]
    assert [published_costs.N1(d) for d in WIDTHS] == [47, 159, 574, 2174, 8446]


def crossover(operation: str, d: int, **options) -> int:
    """The smallest number of tokens for which the efficient form is taken."""

    def is_efficient(n: int) -> bool:
        return form_choice.choose_form(operation, n, n, d, d, **options) == "efficient"

    return bisect_left(range(1 << 24), True, lo=1, key=is_efficient)


def test_the_form_of_less_work_is_taken():
    # n^2 (d + e + 8) against 2 n d (e + 24) and a call of 1e6, with d = e = 16.
    assert crossover("kernelized", 16) == 175
    assert crossover("kernelized", 16, heads=6, batch=2) == 65
    # Half the pairs are seen.
    assert crossover("kernelized causal", 16) == 258
    # d (d + 4) / 2 = 160 features.
    assert crossover("taylorshift", 16) == 385
    assert (
        form_choice.form_of_shapes("taylorshift", (1, 3, 500, 16), (1, 3, 500, 16)) == "efficient"
    )
    beside = form_choice.form_of_shapes(
        "taylorshift", (1, 3, 500, 16), (1, 3, 500, 16), class_rows=7
    )
    assert beside == "direct"


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


def test_operations_of_windows_are_products_of_pairs_that_see_each_other():
    layout = TokenLayout(2, Grid(5, 9))
    q, k, v = draw_qkv(2, 3, 47, d=7, e=5).values()
    with FlopCounterMode(display=False) as counter:
        window_attention(q, k, v, layout=layout, window_size=4)
    places = torch.tensor([(y // 4, x // 4) for y in range(5) for x in range(9)])
    pairs = int((places[:, None] == places[None]).all(-1).sum()) + 2 * 2 * 45 + 2 * 2
    assert counter.get_total_flops() == 2 * 2 * 3 * pairs * (7 + 5)
