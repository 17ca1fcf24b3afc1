"""The matrix of all pairs of content and joint position: against the definition at every edge of
its blocks, and when it runs.
"""

from functools import partial

import pytest
import torch

from tests.helpers.operations import OPERATIONS
from tests.helpers.oracles import assert_agree, draw_mask, draw_qkv, draw_table, peak_bytes, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Flat,
    Joint,
    count_classes,
    kernelized_attention,
    reference,
    taylorshift_attention,
)
from visionattn.ops import pairs
from visionattn.ops.pairs import _classes, block_size, pair_mean

ATTENTIONS = {
    "taylorshift": (taylorshift_attention, reference.taylorshift_attention),
    "kernelized": (kernelized_attention, reference.kernelized_attention),
}
BLOCKS = {  # elements, queries of a block, pairs up to which their classes are remembered
    "one block": (1 << 17, (64, 256), 1 << 21),
    "a head and 5 queries": (40, (5, 5), 0),
    "two heads and 16 queries": (2 * 16 * 47, (16, 16), 0),
    "both images": (1 << 20, (64, 256), 0),
}


@pytest.fixture(params=BLOCKS)
def blocks(request, monkeypatch):
    for name, value in zip(
        ("BLOCK_ELEMENTS", "BLOCK_QUERIES", "REMEMBERED_PAIRS"), BLOCKS[request.param], strict=True
    ):
        monkeypatch.setattr(pair_weights, name, value)


def attend(operation, layout, normalization, **options):
    """The operation with its table among the tensors."""
    return lambda table, **inputs: operation(
        **inputs, relative=Joint(table, layout, normalization), **options
    )


@pytest.mark.parametrize("masked", ["no key", "keys", "absent patches"])
@pytest.mark.parametrize("normalization", ["sum", "mean"])
@pytest.mark.parametrize(
    ("grid", "prefix", "sides", "heads"),
    [((5, 9), 2, (5, 7), 3), ((7, 3), 0, (1, 3), 1), ((1, 19), 6, (3, 41), 3)],
)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_block_agrees_with_the_definition(
    blocks, name, grid, prefix, sides, heads, normalization, masked
):
    layout = TokenLayout(prefix, Grid(*grid))
    tensors = draw_qkv(queries=layout.num_tokens, d=7, e=6) | {
        "table": draw_table(heads, *sides, 7, seed=5)
    }
    if name == "taylorshift":
        tensors["temperature"] = torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)
    key_mask = draw_mask(2, layout.num_tokens) if masked == "keys" else None
    if masked == "absent patches":
        layout = layout._replace(present=draw_mask(2, grid[0] * grid[1]))
    # What is counted for the layout holds until a mask takes more keys away.
    layout = layout._replace(counts=count_classes(layout, (sides[0] // 2, sides[1] // 2)))
    fast, slow = (attend(of, layout, normalization, key_mask=key_mask) for of in ATTENTIONS[name])
    assert_agree(run(partial(fast, form="direct"), tensors), run(slow, tensors))


@pytest.mark.parametrize("coefficients", [(0.5, 1.0, 1.0), (2.0, -0.7, 0.3)])
@pytest.mark.parametrize("temperature", [False, True])
def test_blocks_without_position_agree_with_the_definition(blocks, coefficients, temperature):
    tensors = draw_qkv(queries=31, keys=47, d=7, e=6)
    if temperature:
        tensors["temperature"] = torch.tensor([0.7, 1.9, 4.0], dtype=torch.float64)
    options = {"coefficients": coefficients, "key_mask": draw_mask(2, 47)}
    expected = run(partial(reference.taylorshift_attention, **options), tensors)
    assert_agree(run(partial(taylorshift_attention, form="direct", **options), tensors), expected)


@pytest.mark.parametrize("prefix", [0, 3])
def test_classes_of_pairs_are_those_of_their_places(prefix):
    grid, horizons = (4, 5), (1, 2)
    tokens = prefix + 20
    for start, stop in ((0, tokens), (1, 2), (2, 9), (tokens - 1, tokens)):
        found = _pair_classes(grid, horizons, prefix, start, stop, torch.device("cpu"))
        for i in range(start, stop):
            for j in range(tokens):
                wanted = 15
                if i >= prefix and j >= prefix:
                    (y, x), (u, w) = divmod(i - prefix, 5), divmod(j - prefix, 5)
                    wanted = (max(-1, min(1, u - y)) + 1) * 5 + max(-2, min(2, w - x)) + 2
                assert found[i - start, j] == wanted


def test_what_is_remembered_of_grids_stays_small():
    assert _remembered_classes.cache_info().maxsize * pair_weights.REMEMBERED_PAIRS * 8 <= 1 << 26


@pytest.mark.parametrize(
    ("n", "m"), [(1, 1), (197, 197), (257, 9), (1025, 1025), (5000, 5000), (3, 1 << 20)]
)
def test_a_block_stays_in_cache_or_is_of_one_head_and_few_queries(n, m):
    queries, heads = block_size(n, m)
    assert queries * m * heads <= 2 * pair_weights.BLOCK_ELEMENTS or (queries <= 128 and heads == 1)
    assert -(-n // queries) * queries - n < -(
        -n // queries
    )  # the last block lacks less than one query for each block


def position(horizon: int, side: int, kept: bool = False) -> Joint:
    size, patches = 2 * horizon + 1, torch.arange(side * side)[None] if kept else None
    return Joint(torch.ones(6, size, size, 64), TokenLayout(1, Grid(side, side), patches))


def taken(operation: str, form: str, side: int, horizon: int = 3, **options) -> bool:
    relative = position(horizon, side, **options)
    x = torch.empty(1, 6, relative.layout.num_tokens, 64)
    return takes_pairs(operation, form, x, x, relative)


@pytest.mark.parametrize("operation", ATTENTIONS)
def test_auto_takes_all_pairs_on_small_grids_alone_and_never_again_on_larger_ones(operation):
    for horizon in (0, 1, 3, 7):
        choices = [taken(operation, "auto", side, horizon) for side in range(1, 100)]
        assert choices[0] and not choices[-1]
        assert choices == sorted(choices, reverse=True)
    assert taken(operation, "auto", 14)  # 224 px


@pytest.mark.parametrize("operation", ATTENTIONS)
def test_a_named_form_is_what_runs(operation):
    assert taken(operation, "direct", 40)
    assert not taken(operation, "direct", 99)  # the sums over classes cost less there
    assert not taken(operation, "efficient", 3)
    assert not taken(
        operation, "direct", 5, kept=True
    )  # sums over classes know patches that are missing
    x = torch.empty(1, 6, 2048, 64)
    assert takes_pairs(operation, "direct", x, x, None)
    assert not takes_pairs(operation, "direct", x, x, Flat(torch.ones(1, 7, 64)))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_small_grids_give_what_the_efficient_form_gives_in_single_precision(name):
    layout = TokenLayout(1, Grid(14, 14))
    tensors = {part: x.float() for part, x in draw_qkv(batch=1, queries=197, d=32, e=32).items()}
    tensors["table"] = draw_table(3, 7, 7, 32, seed=5).float()
    fast = attend(ATTENTIONS[name][0], layout, "mean")
    assert_agree(run(fast, tensors), run(partial(fast, form="efficient"), tensors), tolerance=1e-4)


@pytest.mark.parametrize("name", ["taylorshift direct", "taylorshift direct, joint mean"])
def test_no_matrix_of_all_pairs_is_in_memory_at_once(name):
    def peak(tokens: int) -> int:
        """Of one forward and backward pass."""
        inputs = OPERATIONS[name].tensors(torch.float32, batch=1, heads=3, queries=tokens)
        inputs = {key: x.requires_grad_() for key, x in inputs.items()}
        return peak_bytes(lambda: OPERATIONS[name].fast(**inputs).sum().backward())

    first, second = 49 * 20, 49 * 40
    floats = (peak(second) - peak(first)) / (second - first) / 4 / 3
    assert floats < 450  # a matrix of pairs would add 2,940 for each token and head


def test_the_gradient_has_no_derivative():
    q = draw_qkv(queries=9, d=7, e=7)["q"].requires_grad_()
    out = pair_mean(q, q, q, None, None, None, None, None, "elu1", ())[0]
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
