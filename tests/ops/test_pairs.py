"""The matrix of all pairs of content and joint position: against the definition at every edge of
its blocks, and when it runs.
"""

from functools import partial

import pytest
import torch

from tests.helpers.operations import OPERATIONS
from tests.helpers.oracles import assert_agree, draw_qkv, draw_table, peak_bytes, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Flat,
    Joint,
    kernelized_attention,
    pairs,
    reference,
    taylorshift_attention,
)
from visionattn.ops.kernelized import attention as kernelized_room
from visionattn.ops.pairs import _classes, _remembered_classes, block_size, pair_mean, takes_pairs
from visionattn.ops.taylorshift import attention as taylorshift_room

ATTENTIONS = {
    "taylorshift": (taylorshift_attention, reference.taylorshift_attention),
    "kernelized": (kernelized_attention, reference.kernelized_attention),
}


def attend(operation, layout, normalization, **options):
    """The operation with its table among the tensors."""
    return lambda table, **inputs: operation(
        **inputs, relative=Joint(table, layout, normalization), **options
    )


@pytest.mark.parametrize("prefix", [0, 3])
def test_classes_of_pairs_are_those_of_their_places(prefix):
    grid, horizons = (4, 5), (1, 2)
    tokens = prefix + 20
    for start, stop in ((0, tokens), (1, 2), (2, 9), (tokens - 1, tokens)):
        found = _classes(grid, horizons, prefix, start, stop, torch.device("cpu"))
        for i in range(start, stop):
            for j in range(tokens):
                wanted = 15
                if i >= prefix and j >= prefix:
                    (y, x), (u, w) = divmod(i - prefix, 5), divmod(j - prefix, 5)
                    wanted = (max(-1, min(1, u - y)) + 1) * 5 + max(-2, min(2, w - x)) + 2
                assert found[i - start, j] == wanted


@pytest.mark.parametrize(
    ("n", "m"), [(1, 1), (197, 197), (257, 9), (1025, 1025), (5000, 5000), (3, 1 << 20)]
)
def test_a_block_stays_in_cache_or_is_of_one_head_and_few_queries(n, m):
    queries, heads = block_size(n, m)
    assert queries * m * heads <= 2 * pairs.BLOCK_ELEMENTS or (queries <= 128 and heads == 1)
    assert -(-n // queries) * queries - n < -(
        -n // queries
    )  # the last block lacks less than one query for each block


def position(horizon: int, side: int, kept: bool = False) -> Joint:
    size, patches = 2 * horizon + 1, torch.arange(side * side)[None] if kept else None
    return Joint(torch.ones(6, size, size, 64), TokenLayout(1, Grid(side, side), patches))


def taken(operation: str, form: str, side: int, horizon: int = 3, **options) -> bool:
    relative = position(horizon, side, **options)
    x = torch.empty(1, 6, relative.layout.num_tokens, 64)
    rooms = {"taylorshift": taylorshift_room, "kernelized": kernelized_room}
    given = dict(temperature=torch.ones(6), coefficients=(0.5, 1.0, 1.0))
    given = given if operation == "taylorshift" else dict(name="elu1", causal=False)
    options = dict(q=x, k=x, v=x, key_mask=None, relative=relative, **given)
    return rooms[operation]._form_taken(form, "auto", **options) == "pairs"


@pytest.mark.parametrize("operation", ATTENTIONS)
def test_auto_takes_all_pairs_on_small_grids_alone_and_never_again_on_larger_ones(operation):
    for horizon in (0, 1, 3, 7):
        choices = [taken(operation, "auto", side, horizon) for side in range(1, 100)]
        assert choices[0] and not choices[-1]
        assert choices == sorted(choices, reverse=True)
    assert taken(operation, "auto", 14)  # 224 px


@pytest.mark.parametrize("operation", ATTENTIONS)
def test_a_named_form_is_what_runs(operation):
    assert taken(operation, "direct", 28)
    assert not taken(operation, "direct", 32)  # the sums over classes cost less there
    assert not taken(operation, "efficient", 3)
    assert not taken(
        operation, "direct", 5, kept=True
    )  # sums over classes know patches that are missing
    x = torch.empty(1, 6, 900, 64)
    assert takes_pairs(x, x, None)
    assert not takes_pairs(x, x, Flat(torch.ones(1, 7, 64)))


def test_what_a_forward_pass_without_gradients_remembers_serves_a_backward_pass():
    _remembered_classes.cache_clear()
    q = draw_qkv(batch=1, queries=12, d=7, e=7)["q"]
    relative = Joint(torch.ones(1, 3, 3, 7), TokenLayout(0, Grid(3, 4)))
    with torch.inference_mode():
        kernelized_attention(q, q, q, relative=relative)
    kernelized_attention(q.requires_grad_(), q, q, relative=relative).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_small_grids_give_what_the_efficient_form_gives_in_single_precision(name):
    layout = TokenLayout(1, Grid(14, 14))
    tensors = {part: x.float() for part, x in draw_qkv(batch=1, queries=197, d=32, e=32).items()}
    tensors["table"] = draw_table(3, 7, 7, 32, seed=5).float()
    fast = attend(ATTENTIONS[name][0], layout, "mean")
    assert_agree(run(fast, tensors), run(partial(fast, form="efficient"), tensors), tolerance=1e-4)


@pytest.mark.parametrize("name", ["taylorshift direct", "taylorshift direct, joint mean"])
def test_no_matrix_of_all_pairs_is_in_memory_at_once(name, monkeypatch):
    monkeypatch.setattr(pairs, "MOST_PAIRS", 1 << 22)

    def peak(tokens: int) -> int:
        """Of one forward and backward pass, whose classes of pairs are remembered."""
        inputs = OPERATIONS[name].tensors(torch.float32, batch=1, heads=3, queries=tokens)
        inputs = {key: x.requires_grad_() for key, x in inputs.items()}
        OPERATIONS[name].fast(**inputs)
        return peak_bytes(lambda: OPERATIONS[name].fast(**inputs).sum().backward())

    first, second = 49 * 14, 49 * 28
    floats = (peak(second) - peak(first)) / (second - first) / 4 / 3
    assert floats < 450  # a matrix of pairs would add 2,058 for each token and head


def test_the_gradient_has_no_derivative():
    q = draw_qkv(queries=9, d=7, e=7)["q"].requires_grad_()
    out = pair_mean(q, q, q, None, None, None, None, None, "elu1", ())[0]
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
