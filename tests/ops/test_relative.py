"""Linear relative position: dense weights against loops, every kind against dense weights, what
geometry demands.
"""

import pytest
import torch

from tests.helpers.layout_cases import Case, make_relative
from tests.helpers.oracles import (
    assert_agree,
    dot,
    elu1,
    loop_mean,
    loop_relative_weight,
    loop_taylor_weight,
    run,
)
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Flat,
    Joint,
    count_classes,
    kernelized_attention,
    reference,
    taylorshift_attention,
)

KINDS = ("flat", "axial", "joint")
NORMALIZATIONS = ("sum", "mean")


def call(function, kind, layout, normalization, **options):
    """``function`` of the tensors by name, the tables among them."""
    return lambda **inputs: function(
        relative=make_relative(kind, inputs, layout, normalization), **inputs, **options
    )


# The dense weights themselves


def test_the_reference_gives_the_numbers_worked_out_by_hand():
    # One row of three patches after a prefix token. phi(q) is 1, 2, 4 and the table 1, 10, 100 from
    # past to future.
    q = torch.tensor([5.0, 0.0, 1.0, 3.0], dtype=torch.float64).reshape(1, 1, 4, 1)
    table = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64).reshape(1, 3, 1)
    layout, present = TokenLayout(1, Grid(1, 3)), torch.ones(1, 4, dtype=torch.bool)
    expected = torch.tensor(
        [[0, 0, 0, 0], [0, 10, 100, 100], [0, 2, 20, 200], [0, 4, 4, 40]], dtype=torch.float64
    )
    weights = reference.relative_weights(Flat(table, layout=layout), q, present)
    assert torch.equal(weights[0, 0], expected)
    expected[1, 2:] /= (
        2  # two keys lie to the right of the first patch, two to the left of the last
    )
    expected[3, 1:3] /= 2
    weights = reference.relative_weights(
        Flat(table, layout=layout, normalization="mean"), q, present
    )
    assert torch.equal(weights[0, 0], expected)


def test_the_reference_of_a_joint_table_puts_rows_first_and_past_first():
    # A grid of 2 x 3 seen from the patch at the top middle: entry (dy, dx) of the table is 10 * (dy
    # + 1) + (dx + 1).
    table = (10 * torch.arange(3)[:, None] + torch.arange(3)).to(torch.float64).reshape(1, 3, 3, 1)
    q = torch.zeros(1, 1, 6, 1, dtype=torch.float64)
    present = torch.ones(1, 6, dtype=torch.bool)
    weights = reference.relative_weights(Joint(table, TokenLayout(0, Grid(2, 3))), q, present)
    assert weights[0, 0, 1].tolist() == [10, 11, 12, 20, 21, 22]
    kept = torch.tensor([[4, 2, 1]])
    layout = TokenLayout(0, Grid(2, 3), kept)
    weights = reference.relative_weights(Joint(table, layout), q[:, :, :3], present[:, :3])
    assert weights[0, 0].tolist() == [[11, 2, 1], [20, 11, 10], [21, 12, 11]]


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        Case((2, 3), 1, prefix=1, masked=True, d=2, e=2),
        Case((3, 2), 1, prefix=2, present=4, d=2, e=2),
        Case((3, 3), 0, prefix=1, present=5, masked=True, d=2, e=2, shared=True),
        Case((1, 5), 4, prefix=0, d=2, e=2),
        Case((3, 3), 1, prefix=1, filled=((2, 3), (3, 2)), d=2, e=2),
        Case((3, 3), 2, prefix=2, present=7, masked=True, filled=((1, 2), (3, 2)), d=2, e=2),
    ],
)
def test_the_reference_is_the_mean_over_pairs_one_at_a_time(normalization, kind, case):
    tensors, layout, mask = case.tensors(kind, heads=2), case.layout(), case.mask()
    q, k, v = (tensors.pop(name) for name in "qkv")
    relative = make_relative(kind, tensors, layout, normalization)
    present = case.takes_part()
    tau = torch.tensor([0.8, 2.0], dtype=torch.float64)
    taylor = loop_taylor_weight(q, k, tau, (0.5, 1.0, 1.0))
    position = loop_relative_weight(relative, q, present)

    def mean_over(content):
        def weight(b, head, i, j):
            if not present[b][j]:
                return 0.0
            share = sum(present[b]) if normalization == "mean" else 1
            return content(b, head, i, j) / share + position(b, head, i, j)

        return {"out": loop_mean(weight, v, queries=q.shape[2])}

    options = {"relative": relative, "key_mask": mask}
    out = reference.taylorshift_attention(q, k, v, temperature=tau, **options)
    assert_agree({"out": out}, mean_over(taylor), tolerance=1e-14)
    out = reference.kernelized_attention(q, k, v, **options)
    expected = mean_over(lambda b, head, i, j: dot(elu1(q[b, head, i]), elu1(k[b, head, j])))
    assert_agree({"out": out}, expected, tolerance=1e-14)


# Agreement of the operations with them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("grid", "e", "horizon"), [((33, 37), 3, 3), ((3, 401), 70, 2), ((211, 5), 300, 4)]
)
def test_relative_position_agrees_on_grids_beyond_one_band(kind, grid, e, horizon):
    case = Case(grid, horizon, prefix=1, batch=1, d=3, e=e, present=grid[0] * grid[1] * 9 // 10)
    tensors = case.tensors(kind, heads=1)
    for normalization in NORMALIZATIONS:
        function = call(kernelized_attention, kind, case.layout(), normalization, form="efficient")
        expected = call(reference.kernelized_attention, kind, case.layout(), normalization)
        assert_agree(run(function, tensors), run(expected, tensors))


# What geometry demands


def attend(kind, tensors, layout, normalization="mean", **options):
    return call(taylorshift_attention, kind, layout, normalization, **options)(**tensors)


@pytest.mark.parametrize(("kind", "classes"), [("flat", 3), ("joint", 9), ("axial", 3 + 5)])
def test_under_mean_each_class_weighs_the_same_however_large_the_grid(kind, classes):
    # With k = 0 the content weighs 1 in all, phi(q).r is 2 * d = 14 for each class, and the only
    # value is the query's.
    for side in (9, 33):
        case = Case((side, side), 1, batch=1)
        tensors = {name: torch.ones_like(t) for name, t in case.tensors(kind, heads=1).items()}
        tensors["k"] = torch.zeros_like(tensors["k"])
        centre = side * side // 2
        tensors["v"] *= (torch.arange(side * side) == centre)[:, None]
        own = (
            14 / side + 14 / side if kind == "axial" else 14
        )  # a row, and a column, of patches share its class
        share = attend(kind, tensors, case.layout(), "mean")[0, 0, centre, 0].item()
        assert share == pytest.approx((1 / side**2 + own) / (1 + 14 * classes), rel=1e-12)


def test_counts_made_once_for_the_layout_give_the_same_result():
    for case in (
        Case((5, 9), 2, prefix=1),
        Case((5, 9), 2, prefix=1, present=31),
        Case((5, 9), 2, masked=True),
    ):
        tensors, layout, mask = case.tensors("joint"), case.layout(), case.mask()
        counts = count_classes(layout, (2, 2))
        with_counts = TokenLayout(layout.num_prefix, layout.grid, layout.kept, counts)
        for normalization in NORMALIZATIONS:
            actual = run(
                call(kernelized_attention, "joint", with_counts, normalization, key_mask=mask),
                tensors,
            )
            expected = run(
                call(reference.kernelized_attention, "joint", layout, normalization, key_mask=mask),
                tensors,
            )
            assert_agree(actual, expected)
