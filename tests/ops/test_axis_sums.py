"""The operator of Axial: against single pairs, across bands and chunks, and what it may hold."""

import pytest
import torch

from tests.helpers.oracles import draw, draw_table, peak_bytes, run
from visionattn.ops.position.axial import axis_sums


def draw_operands(grid, horizon, batch=2, heads=3, d=4, e=6, tables=3):
    """q, table and v by name, with some patches absent from v, and the number present in each
    row.
    """
    present = torch.rand(batch, *grid, generator=torch.Generator().manual_seed(6)) < 0.7
    present[0, 0] = False  # a whole row
    tensors = {
        "q": draw(batch, heads, *grid, d, seed=1),
        "table": draw_table(tables, 2 * horizon + 1, d, seed=2),
        "v": draw(batch, heads, *grid, e, seed=3) * present[:, None, :, :, None],
    }
    return tensors, present


def joined(present, mean, transposed=False):
    """The operator as a function of q, table and v, with the mass behind the values."""
    keys = present.sum(2).double()
    total = torch.full((1, 1, 1, 1), 13.0, dtype=torch.float64) if mean else None

    def call(q, table, v):
        if transposed:  # strides of a transposed grid
            q, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, v))
        values, mass = axis_sums(q, table, v, keys, total)
        return torch.cat([values, mass.unsqueeze(4)], dim=4)

    return call


def test_entries_for_distances_that_do_not_occur_get_a_gradient_of_zero():
    tensors, present = draw_operands((5, 9), 7)
    gradient = run(joined(present, False), tensors)["table"]
    assert gradient[:, :3].eq(0).all() and gradient[:, 12:].eq(0).all()
    assert gradient[:, 3:12].ne(0).all()


def test_half_precision_operands_are_summed_in_the_dtype_of_the_table():
    tensors, present = draw_operands((5, 9), 2)
    halves = {name: x.half() for name, x in tensors.items()} | {"table": tensors["table"]}
    actual = run(joined(present, False), halves)
    expected = run(joined(present, False), {name: x.double() for name, x in halves.items()})
    torch.testing.assert_close(actual["out"], expected["out"], rtol=1e-12, atol=1e-13)
    for name in ("q", "v"):
        assert torch.equal(actual[name], expected[name].half())


# PyTorch's own check asks copies of the operands for their gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("mean", [False, True])
def test_the_operator_is_registered_as_pytorch_wants_it(dtype, mean):
    tensors, present = draw_operands((3, 4), 2)
    q, v = (tensors[name].to(dtype).requires_grad_() for name in "qv")
    total = torch.full((1, 1, 1, 1), 13.0, dtype=torch.float64) if mean else None
    arguments = (q, tensors["table"].requires_grad_(), v, present.sum(2).double(), total)
    torch.library.opcheck(axis_sums, arguments)


def test_the_whole_grid_as_horizon_takes_no_memory_for_each_pair_of_a_query_and_a_class():
    sizes, c = (1, 2, 160, 120), 2 * 160 + 1
    q, v = torch.ones(*sizes, 4, requires_grad=True), torch.ones(*sizes, 5, requires_grad=True)
    table, keys = torch.ones(1, c, 4, requires_grad=True), torch.full((1, 160), 120.0)

    def both_ways():
        values, mass = axis_sums(q, table, v, keys, None)
        torch.autograd.grad(values.sum() + mass.sum(), (q, table, v))

    pairs_bytes = 2 * 160 * 120 * c * 4
    assert peak_bytes(both_ways) < pairs_bytes / 2
