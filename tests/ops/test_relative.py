"""Linear relative position: dense weights against loops, every kind against dense weights, what
geometry demands.
"""

import pytest
import torch

from tests.helpers.layout_cases import CASES, Case, make_relative
from tests.helpers.oracles import (
    assert_agree,
    dot,
    draw_kept,
    draw_mask,
    draw_qkv,
    draw_table,
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
from visionattn.ops.position import joint as class_sums

KINDS = ("flat", "axial", "joint")
NORMALIZATIONS = ("sum", "mean")


def call(function, kind, layout, normalization, **options):
    """``function`` of the tensors by name, the tables among them."""
    return lambda **inputs: function(
        relative=make_relative(kind, inputs, layout, normalization), **inputs, **options
    )


def agree(kind, tensors, layout, normalization, mask, form, floor=0.0):
    """Both attentions, one with and one without the square, agree with their references."""
    tau = torch.linspace(0.7, 3.1, tensors["q"].shape[1], dtype=torch.float64)
    for name in ("taylorshift_attention", "kernelized_attention"):
        extra = {"temperature": tau} if name == "taylorshift_attention" else {}
        operation, definition = globals()[name], getattr(reference, name)
        actual = run(
            call(operation, kind, layout, normalization, key_mask=mask, form=form), tensors | extra
        )
        expected = run(
            call(definition, kind, layout, normalization, key_mask=mask), tensors | extra
        )
        assert_agree(actual, expected, floor=floor)


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


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_relative_position_agrees_with_its_dense_weights(normalization, kind, case):
    case = CASES[case]
    agree(
        kind, case.tensors(kind), case.layout(), normalization, case.mask(), "efficient", case.floor
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", ["horizon 0", "missing patches and masked keys", "two by three, shared table"]
)
@pytest.mark.parametrize("form", ["direct", "auto"])
def test_the_form_of_the_content_does_not_matter_to_the_relative_term(
    normalization, kind, case, form
):
    case = CASES[case]
    agree(kind, case.tensors(kind), case.layout(), normalization, case.mask(), form)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("horizons", [(1, 3), (3, 0), (0, 2)])
def test_the_axes_of_a_joint_table_may_have_horizons_of_their_own(normalization, horizons):
    case = Case((5, 9), 1, prefix=1, present=31, masked=True)
    tensors = case.tensors("joint")
    tensors["table"] = draw_table(3, 2 * horizons[0] + 1, 2 * horizons[1] + 1, 7, seed=8)
    agree("joint", tensors, case.layout(), normalization, case.mask(), "efficient")


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("feature_map", ["relu", "softmax"])
@pytest.mark.parametrize("masked", [False, True])
def test_other_feature_maps_keep_their_balance_with_the_relative_term(
    normalization, feature_map, masked
):
    case = Case((5, 9), 2, prefix=1, present=31, masked=masked)
    options = {"feature_map": feature_map, "key_mask": case.mask()}
    actual = call(kernelized_attention, "joint", case.layout(), normalization, **options)
    expected = call(
        reference.kernelized_attention, "joint", case.layout(), normalization, **options
    )
    assert_agree(run(actual, case.tensors("joint")), run(expected, case.tensors("joint")))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("horizon", [0, 1, 3, 52, 53, 80])
@pytest.mark.parametrize("lengths", [(53, 53), (53, 77), (77, 53), (20, 77), (1, 9), (9, 1)])
def test_a_flat_table_without_layout_agrees_for_any_lengths(normalization, horizon, lengths):
    tensors = draw_qkv(queries=lengths[0], keys=lengths[1], d=5, e=4)
    tensors["table"] = draw_table(3, 2 * horizon + 1, 5, seed=4)
    agree(
        "flat",
        tensors,
        None,
        normalization,
        None,
        "efficient",
        floor=1.0 if min(lengths) == 1 else 0.0,
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("horizon", [0, 1, 3, 53, 77, 80])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("lengths", [(53, 77), (77, 53)])
def test_a_flat_table_without_layout_agrees_under_a_key_mask(
    normalization, horizon, pairs, lengths, monkeypatch
):
    monkeypatch.setattr(class_sums, "direct_is_faster", lambda *sizes: pairs)
    tensors = draw_qkv(queries=lengths[0], keys=lengths[1], d=5, e=4) | {
        "table": draw_table(1, 2 * horizon + 1, 5, seed=4)
    }
    agree("flat", tensors, None, normalization, draw_mask(2, lengths[1]), "direct")


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


def test_many_heads_and_images_agree_with_the_dense_weights():
    case = Case((9, 13), 2, prefix=1, batch=5, d=3, e=66)
    tensors, layout = case.tensors("joint", heads=4), case.layout()
    function = call(kernelized_attention, "joint", layout, "mean", form="efficient")
    assert_agree(
        run(function, tensors),
        run(call(reference.kernelized_attention, "joint", layout, "mean"), tensors),
    )


# What geometry demands


def attend(kind, tensors, layout, normalization="mean", **options):
    return call(taylorshift_attention, kind, layout, normalization, **options)(**tensors)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", ["axial", "joint"])
def test_moving_all_content_over_the_grid_changes_nothing(normalization, kind):
    case = Case((3, 4), 2)
    tensors = case.tensors(kind)
    out = attend(kind, tensors, TokenLayout(0, Grid(3, 4)), normalization)
    for top, left in ((0, 0), (2, 1), (4, 5)):
        kept = (
            ((torch.arange(3)[:, None] + top) * 9 + torch.arange(4) + left)
            .reshape(1, 12)
            .expand(2, 12)
        )
        moved = attend(kind, tensors, TokenLayout(0, Grid(7, 9), kept), normalization)
        torch.testing.assert_close(moved, out, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_tokens_does_not_matter_where_their_places_are_known(normalization, kind):
    case = Case((5, 9), 2, prefix=2, present=31)
    tensors, layout = case.tensors(kind), case.layout()
    out = attend(kind, tensors, layout, normalization)
    order = draw_kept(1, 31, 31, seed=1)[0]
    tokens = torch.cat([torch.arange(2), 2 + order])
    shuffled = tensors | {name: tensors[name][:, :, tokens] for name in "qkv"}
    out_shuffled = attend(
        kind, shuffled, TokenLayout(2, layout.grid, layout.kept[:, order]), normalization
    )
    torch.testing.assert_close(out_shuffled, out[:, :, tokens], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_patch_is_a_masked_one(normalization, kind):
    case = Case((5, 9), 2, prefix=1, batch=1)
    tensors = case.tensors(kind)
    kept = draw_kept(1, 45, 31)
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + kept[0]])
    mask = torch.zeros(1, 46, dtype=torch.bool)
    mask[:, tokens] = True
    masked = attend(kind, tensors, TokenLayout(1, Grid(5, 9)), normalization, key_mask=mask)
    present = tensors | {name: tensors[name][:, :, tokens] for name in "qkv"}
    missing = attend(kind, present, TokenLayout(1, Grid(5, 9), kept), normalization)
    torch.testing.assert_close(missing, masked[:, :, tokens], rtol=1e-12, atol=1e-13)


def test_turning_the_grid_and_the_table_turns_nothing_else():
    tensors = Case((5, 9), 2).tensors("joint")
    upright = attend("joint", tensors, TokenLayout(0, Grid(5, 9)))
    turned = {
        name: tensors[name].unflatten(2, (5, 9)).transpose(2, 3).flatten(2, 3) for name in "qkv"
    }
    turned["table"] = tensors["table"].transpose(1, 2)
    out = attend("joint", turned, TokenLayout(0, Grid(9, 5)))
    torch.testing.assert_close(
        out.unflatten(2, (9, 5)).transpose(2, 3).flatten(2, 3), upright, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_on_one_row_the_flat_and_the_joint_table_are_the_same(normalization):
    tensors = Case((1, 23), 3, prefix=2).tensors("flat")
    layout = TokenLayout(2, Grid(1, 23))
    # On one row only the middle row of the joint table is ever met.
    table = torch.stack(
        [100 + tensors["table"]] * 3 + [tensors["table"]] + [100 + tensors["table"]] * 3, dim=1
    )
    flat = attend("flat", tensors, layout, normalization)
    joint = attend("joint", tensors | {"table": table}, layout, normalization)
    torch.testing.assert_close(joint, flat, rtol=1e-12, atol=1e-13)


def test_a_joint_table_that_is_a_sum_of_rows_and_columns_is_the_axial_one():
    tensors = Case((5, 9), 3, prefix=1).tensors("joint")
    rows, columns = draw_table(3, 7, 7, seed=1), draw_table(3, 7, 7, seed=2)
    layout = TokenLayout(1, Grid(5, 9))
    joint = attend("joint", tensors | {"table": rows[:, :, None] + columns[:, None]}, layout, "sum")
    del tensors["table"]
    axial = attend("axial", tensors | {"rows": rows, "columns": columns}, layout, "sum")
    torch.testing.assert_close(axial, joint, rtol=1e-12, atol=1e-13)


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


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(normalization, kind):
    case = Case((2, 3), 1, prefix=1, present=4, d=3, e=2, batch=1)
    tensors, layout = case.tensors(kind, heads=2), case.layout()
    inputs = [tensor.clone().requires_grad_() for tensor in tensors.values()]
    operation = call(kernelized_attention, kind, layout, normalization)
    assert torch.autograd.gradcheck(
        lambda *values: operation(**dict(zip(tensors, values, strict=True))), inputs
    )


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
