"""The launches of kernelized attention with ``Joint`` before its means: states, sums, prefix and
lines against float64, and what the compiler says of them.
"""

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch

from tests.helpers.kernel_checks import (
    assert_within_budget,
    every_place,
    guarded,
    poisoned_memory,
    relative_error,
)
from tests.helpers.oracles import draw
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, kernelized_attention, reference

poisoned = pytest.fixture(autouse=True)(poisoned_memory)
KERNELS = ("_kernelized_state_and_lines", "_kernelized_sum_and_remainders")


def drawn(device, dtype, tokens, d=24, e=40, batch=2, heads=3):
    """q, k, v between rows of NaN, and empty memory for the mean and its mass, full of sevens."""
    from visionattn.ops.gpu import launch

    shapes = ((tokens, d), (tokens, d), (tokens, e))
    q, k, v = (
        guarded(draw(batch, heads, *shape, seed=i).to(device, dtype))
        for i, shape in enumerate(shapes)
    )
    out = launch.tokens_first(v, batch, heads, tokens, e).fill_(7)
    return q, k, v, out, q.new_full((batch, heads, tokens), 7, dtype=torch.float32)


@every_place
@pytest.mark.parametrize("parts", [1, 19])
@pytest.mark.parametrize("prefix", [1, 5])
def test_the_prefix_has_its_means_from_the_launch_that_adds_the_parts(
    device, dtype, prefix, parts, monkeypatch
):
    from visionattn.ops.gpu import launch
    from visionattn.ops.kernelized.kernels.with_joint import state_and_lines
    from visionattn.ops.position.kernels.place import Place

    q, k, v, out, mass = drawn(device, dtype, prefix + 72)
    monkeypatch.setattr(launch, "segments", lambda *args: parts)
    place = Place(4, 18, prefix, 3, 3, True)
    state, _ = state_and_lines(q, k, v, "elu1", place, out, mass)
    wanted = reference.kernelized_attention(*(x.double().cpu() for x in (q, k, v)))[:, :, :prefix]
    assert_within_budget({"out": out[:, :, :prefix]}, {"out": wanted}, dtype)
    phi_q, phi_k = (reference.elu1(x.double().cpu()) for x in (q[:, :, :prefix], k))
    assert relative_error(mass[:, :, :prefix], (phi_q @ phi_k.mT).mean(3)) < 1e-6
    s = phi_k.mT @ v.double().cpu() / k.shape[2]
    found = torch.cat((s.flatten(), phi_k.mean(2).flatten()))
    assert relative_error(state, found) < (1e-5 if dtype == torch.float32 else 2e-3)
    assert (out[:, :, prefix:] == 7).all() and (mass[:, :, prefix:] == 7).all()


@every_place
@pytest.mark.parametrize("grid", [(1, 16), (1, 17), (33, 18), (70, 40)])
def test_lines_are_means_of_rows_and_sums_beyond_the_keys_of_a_tile(device, dtype, grid):
    from visionattn.ops.kernelized.kernels.with_joint import state_and_lines
    from visionattn.ops.position.kernels.place import TILE, Place

    (height, width), prefix = grid, 2
    place = Place(height, width, prefix, 3, 3, True)
    q, k, v, out, mass = drawn(device, dtype, prefix + height * width, 8, 24, 1, 2)
    _, lines = state_and_lines(q, k, v, "elu1", place, out, mass)
    rows = v[:, :, prefix:].double().cpu().unflatten(2, grid)
    above = torch.stack([rows[:, :, : y + 1].mean(2) for y in range(height)], 2)
    below = torch.stack([rows[:, :, y:].mean(2) for y in range(height)], 2)
    budget = 1e-5 if dtype == torch.float32 else 1e-3
    assert relative_error(lines.means, torch.stack((above, below))) < budget
    if width <= TILE:
        assert not lines.remainders.numel()
        return
    for kind, values in enumerate((rows, above, below)):
        for tile in range(-(-width // TILE)):
            first = tile * TILE
            before = values[..., : max(0, first - place.beside), :]
            after = values[..., first + TILE + place.beside :, :]
            for side, far in enumerate((before, after)):
                power = 2 ** (max(1, far.shape[3]).bit_length() - 1)
                wanted = far.sum(3) / power
                got = lines.remainders[kind, :, :, :, tile, side].double().cpu()
                assert (got - wanted).abs().max() <= 2 * budget * values.abs().max()


@pytest.mark.parametrize("grid", [(5, 9), (5, 17)])
def test_a_layer_with_joint_takes_three_launches(grid, monkeypatch):
    from visionattn.ops.gpu import launch

    names = []
    monkeypatch.setattr(launch, "segments", lambda *args: 4)
    monkeypatch.setattr(launch, "run", lambda kernel, *args, **meta: names.append(kernel.__name__))
    q, k, v = (torch.empty(1, 2, 1 + grid[0] * grid[1], 16) for _ in range(3))
    relative = Joint(torch.ones(2, 3, 3, 16), TokenLayout(1, Grid(*grid)))
    kernelized_attention(q, k, v, relative=relative, impl="triton")
    assert names == [*KERNELS, "_joint_means"]


def test_one_tile_and_one_part_without_a_prefix_need_no_sum(monkeypatch):
    from visionattn.ops.gpu import launch

    names = []
    monkeypatch.setattr(launch, "segments", lambda *args: 1)
    monkeypatch.setattr(launch, "run", lambda kernel, *args, **meta: names.append(kernel.__name__))
    q, k, v = (torch.empty(1, 2, 45, 16) for _ in range(3))
    relative = Joint(torch.ones(2, 3, 3, 16), TokenLayout(0, Grid(5, 9)))
    kernelized_attention(q, k, v, relative=relative, impl="triton")
    assert names == [KERNELS[0], "_joint_means"]
