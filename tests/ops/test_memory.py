"""How much memory operations take, and where; that they read none that nobody wrote is tested in
``test_definitions.py``.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.helpers.operations import (
    NOT_SOFTMAX,
    OPERATIONS,
    RELATIVE,
    TOKENS,
    every_linear_operation,
    every_operation,
)
from tests.helpers.oracles import (
    assert_agree,
    draw,
    draw_mask,
    draw_table,
    peak_bytes,
    run,
)
from visionattn.lab.measure import bytes_kept
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, all_pairs, window, window_attention
from visionattn.ops.attention_rows import ROWS
from visionattn.ops.position import tiled_position
from visionattn.ops.position.axial_position import axis_sums
from visionattn.ops.softmax import relative_bias


@every_operation
def test_values_that_broadcast_and_a_gradient_that_broadcasts_are_right(name):
    operation = OPERATIONS[name]
    tensors = operation.tensors(batch=1, e=5)

    def repeated(function):
        def call(q, k, v, **inputs):
            qkv = {x: t.expand(2, -1, -1, -1) for x, t in dict(q=q, k=k, v=v).items()}
            return function(**qkv, **inputs).sum((0, 2, 3))

        return call

    assert_agree(run(repeated(operation.fast), tensors), run(repeated(operation.slow), tensors))


def peak_of_passes(name: str, tokens: int) -> int:
    """Of a forward and a backward pass."""
    inputs = OPERATIONS[name].tensors(torch.float32, batch=1, heads=3, queries=tokens)
    inputs = {key: x.requires_grad_() for key, x in inputs.items()}
    OPERATIONS[name].fast(**inputs)  # classes of pairs are remembered
    return peak_bytes(lambda: OPERATIONS[name].fast(**inputs).sum().backward())


@pytest.mark.parametrize("name", [*NOT_SOFTMAX, "softmax in windows"])
def test_no_pair_of_tokens_and_no_features_of_all_tokens_are_in_memory_at_once(name, monkeypatch):
    monkeypatch.setattr(all_pairs, "MOST_PAIRS", 0)
    # Weights of a band do not grow beyond its size: make that small.
    monkeypatch.setattr(tiled_position, "BAND_ELEMENTS", 1 << 13)
    first, second = 49 * 40, 49 * 80
    growth = peak_of_passes(name, second) - peak_of_passes(name, first)
    floats = growth / (second - first) / 4 / 3
    # A matrix of pairs would add 5,880 floats per token and head, packed features 136, a state per
    # token 384. A joint table lays out values with their sums of rows, for several heads as long as
    # these are few elements.
    assert floats < (450 if "joint" in name else 180 if " efficient" in name else 320)


def test_all_pairs_of_a_small_grid_are_in_memory_block_by_block(monkeypatch):
    monkeypatch.setattr(all_pairs, "MOST_PAIRS", 1 << 22)
    name, first, second = "taylorshift direct, joint mean", 49 * 14, 49 * 28
    growth = peak_of_passes(name, second) - peak_of_passes(name, first)
    # A matrix of pairs would add 2,058 for each token and head.
    assert growth / (second - first) / 4 / 3 < 450


D, E, HEADS = 16, 24, 3
# Floats per token and head more, of maps that autograd sees.
MAPPED = {"kernelized efficient, softmax": D, "kernelized random features": 2 * 2 * 20}


def kept_storages(name: str, tokens: int) -> tuple[int, dict[str, int]]:
    """Bytes of the storages that autograd keeps and that are no input, and bytes of the inputs
    among them, by name; under a mask of keys.
    """
    inputs = OPERATIONS[name].tensors(torch.float32, batch=1, heads=HEADS, queries=tokens, d=D, e=E)
    inputs, kept = {key: x.requires_grad_() for key, x in inputs.items()}, {}

    def remember(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        out = OPERATIONS[name].fast(**inputs, key_mask=draw_mask(1, tokens))
    assert out.requires_grad
    pointers = {key: x.untyped_storage().data_ptr() for key, x in inputs.items()}
    own = {key: kept.pop(pointer) for key, pointer in pointers.items() if pointer in kept}
    return sum(kept.values()), own


@every_linear_operation
def test_what_autograd_keeps_is_the_inputs_themselves_output_mass_counts_and_a_state(name):
    once, twice = 49 * 11, 49 * 22
    others, own = kept_storages(name, once)
    more_others, more_own = kept_storages(name, twice)
    per_token = (more_others - others) / (twice - once) / HEADS / 4
    # Keys of each class, and causal of all; axial keeps a number for each row and column.
    counts = 3 if "flat" in name else 25 if "joint" in name else 0
    counts += "kernelized causal, flat" in name
    bound = E + 1 + counts / HEADS + 0.05
    bound += 2 / 4 / HEADS  # a byte for each key in the mask, and in its negative
    bound += E if name in RELATIVE else 0  # values that are 0 where masked are others than v
    bound += 2 * D + MAPPED[name] if name in MAPPED else 0
    assert per_token <= bound and own.keys() >= ({"v"} if name in MAPPED else {"q", "k", "v"})
    assert 1.8 < (more_others + sum(more_own.values())) / (others + sum(own.values())) < 2.1


@every_operation
def test_what_an_operation_makes_itself_is_on_the_device_of_its_inputs(name):
    """Shapes, dtypes and devices alone: on a GPU that is not there, and on meta."""
    inputs, shape = OPERATIONS[name].tensors(torch.float16), (2, 3, TOKENS, 24)
    out = OPERATIONS[name].fast(**{key: x.to("meta") for key, x in inputs.items()})
    assert (out.device.type, out.dtype, out.shape) == ("meta", torch.float16, shape)
    # The rows of random features are numbers, and cast as they are.
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = {
            key: torch.empty(x.shape, dtype=x.dtype, device="cuda") for key, x in inputs.items()
        }
        mask = torch.ones(2, TOKENS, dtype=torch.bool, device="cuda")
        out = OPERATIONS[name].fast(**inputs, key_mask=mask)
        assert (out.device.type, out.dtype, out.shape) == ("cuda", torch.float16, shape)


def test_the_whole_grid_as_horizon_takes_no_memory_for_each_pair_of_a_query_and_a_class():
    sizes, c = (1, 2, 160, 120), 2 * 160 + 1
    q, v = torch.ones(*sizes, 4, requires_grad=True), torch.ones(*sizes, 5, requires_grad=True)
    table, keys = torch.ones(1, c, 4, requires_grad=True), torch.full((1, 160), 120.0)

    def both_ways():
        values, mass = axis_sums(q, table, v, keys, None)
        torch.autograd.grad(values.sum() + mass.sum(), (q, table, v))

    assert peak_bytes(both_ways) < 2 * 160 * 120 * c * 4 / 2


def test_a_horizon_as_long_as_the_sequence_does_not_lengthen_the_tiles():
    found = tiled_position.QueryTiles(1, 2048, (0, 1500), torch.device("cpu"))
    assert found.columns.size == tiled_position.LONGEST_TILE < 1500


GRID = TokenLayout(0, Grid(23, 41))
BIASES = {
    "flat": lambda table: Flat(table[:, :, 0]),
    "axial": lambda table: Axial(table[:, :, 0], table[:, :, 1], GRID),
    "joint": lambda table: Joint(table, GRID),
}


@pytest.mark.parametrize("kind", BIASES)
def test_a_bias_takes_little_more_memory_than_itself_and_keeps_its_inputs_alone(kind):
    tensors = {"q": draw(1, 2, 943, 4, seed=1).float(), "table": draw(2, 45, 81, 4, seed=2).float()}

    def bias(q, table):
        return relative_bias(q, BIASES[kind](table), 943)

    own, inputs = 4 * 2 * 943**2, sum(x.nbytes for x in tensors.values())
    assert peak_bytes(lambda: bias(**tensors)) < 1.5 * own
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    # q of both axes and scaled tables
    assert bytes_kept(lambda: bias(**leaves)) <= 2.1 * inputs
    out, upstream = bias(**leaves), torch.ones(2, 943, 943).expand(1, -1, -1, -1)
    backward = lambda: torch.autograd.grad(out, list(leaves.values()), upstream)  # noqa: E731
    assert peak_bytes(backward) < 0.7 * own + 3 * inputs


@pytest.mark.parametrize("name", ROWS)
def test_memory_of_rows_is_linear_in_the_keys(name):
    """Pairs of all tokens would take four times as much for twice the tokens."""

    def peak(height):
        layout = TokenLayout(0, Grid(height, 49))
        q, k = (draw(1, 3, layout.num_tokens, 16, seed=i).float() for i in (1, 2))
        relative = Joint(draw_table(3, 7, 7, 16, seed=3).float(), layout, "sum")
        return peak_bytes(lambda: ROWS[name](q, k, torch.tensor([0, 77]), relative=relative))

    first, second = peak(20), peak(40)
    assert second < 2.1 * first
    assert second / (40 * 49) < 1500  # bytes per token; all pairs of one head would take 7,840


def test_weights_of_a_few_windows_are_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(window, "CACHED_ELEMENTS", 1 << 17)
    layout = TokenLayout(1, Grid(42, 56))
    q, k, v = (draw(1, 4, layout.num_tokens, 4, seed=i).float() for i in range(3))
    relative = Joint(draw(4, 13, 13, 4, seed=1).float(), layout)
    peak = peak_bytes(lambda: window_attention(q, k, v, relative=relative))
    # Two copies of such a piece at most, where those of all windows have 1.9 MB each.
    assert peak < 4 * q.numel() + 2 * 4 * (1 << 17)
