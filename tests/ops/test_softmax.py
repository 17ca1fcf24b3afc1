"""Softmax attention: its reference against loops and numbers by hand, the operation against the
reference.
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.helpers.layout_cases import make_relative
from tests.helpers.oracles import (
    assert_agree,
    dot,
    draw,
    draw_kept,
    draw_mask,
    draw_qkv,
    loop_mean,
    run,
)
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Axial, Flat, Joint, reference, softmax_attention


def softmax_of_tables(
    kind: str, layout: TokenLayout | None = None, **options
) -> Callable[..., Tensor]:
    """The operation, its tables among its tensors."""

    def call(**inputs: Tensor) -> Tensor:
        relative = make_relative(kind, inputs, layout, "sum")
        return softmax_attention(**inputs, relative=relative, **options)

    return call


def reference_of_tables(
    kind: str, layout: TokenLayout | None = None, **options
) -> Callable[..., Tensor]:
    """Its definition, called in the same way."""

    def call(**inputs: Tensor) -> Tensor:
        relative = make_relative(kind, inputs, layout, "sum")
        bias = reference.relative_bias(relative, inputs["q"], inputs["k"].shape[2])
        return reference.softmax_attention(**inputs, bias=bias, **options)

    return call


def test_the_reference_gives_the_numbers_worked_out_by_hand():
    rows = ([[1.0, 0.0]], [[0.0, 2.0], [1.0, -3.0]], [[10.0], [20.0]])
    q, k, v = (torch.tensor(x, dtype=torch.float64)[None, None] for x in rows)
    w0, w1 = 1, math.exp(1 / math.sqrt(2))  # the scores are 0 and 1, over sqrt(2)
    assert reference.softmax_attention(q, k, v).item() == pytest.approx(
        (10 * w0 + 20 * w1) / (w0 + w1), rel=1e-15
    )
    assert reference.softmax_attention(q, k, v, causal=True).item() == 10


def test_the_reference_of_the_bias_puts_rows_first_past_first_and_leaves_out_the_prefix():
    # A grid of 2 x 2 after a prefix token; entry (dy, dx) of the table is 10 * (dy + 1) + (dx + 1),
    # times q = 2.
    table = (10 * torch.arange(3)[:, None] + torch.arange(3)).to(torch.float64).reshape(1, 3, 3, 1)
    q = torch.full((1, 1, 5, 1), 2.0, dtype=torch.float64)
    bias = reference.relative_bias(Joint(table, TokenLayout(1, Grid(2, 2))), q)[0, 0]
    expected = [
        [0, 0, 0, 0, 0],
        [0, 11, 12, 21, 22],
        [0, 10, 11, 20, 21],
        [0, 1, 2, 11, 12],
        [0, 0, 1, 10, 11],
    ]
    assert torch.equal(bias, 2 * torch.tensor(expected, dtype=torch.float64))


def loop_scores(
    kind: str, tensors: dict[str, Tensor], layout: TokenLayout | None
) -> Callable[..., float]:
    """``score(b, head, i, j)`` of one pair, from the places of its two tokens."""
    q, k = tensors["q"], tensors["k"]

    def place(b: int, token: int) -> tuple[int, int] | None:
        if layout is None:
            return 0, token
        if token < layout.num_prefix:
            return None
        patch = token - layout.num_prefix
        return divmod(
            patch if layout.kept is None else int(layout.kept[b, patch]), layout.grid.width
        )

    def entry(name: str, head: int, *offsets: int) -> Tensor:
        table = tensors[name][head]
        for offset in offsets:
            horizon = table.shape[0] // 2
            table = table[max(-horizon, min(horizon, offset)) + horizon]
        return table

    def score(b: int, head: int, i: int, j: int) -> float:
        total, here, there = dot(q[b, head, i], k[b, head, j]), place(b, i), place(b, j)
        if here and there:
            dy, dx = there[0] - here[0], there[1] - here[1]
            if kind == "axial":
                rows = [entry("rows", head, dy), entry("columns", head, dx)]
            elif kind == "joint":
                rows = [entry("table", head, dy, dx)]
            else:
                rows = [entry("table", head, dy * (layout.grid.width if layout else 0) + dx)]
            total += sum(dot(q[b, head, i], row) for row in rows)
        return total / math.sqrt(q.shape[3])

    return score


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["sequence", "flat", "axial", "joint"])
def test_operation_and_reference_are_the_mean_over_pairs_one_at_a_time(kind, causal):
    queries, keys, layout = (
        (6, 8, None)
        if kind == "sequence"
        else (8, 8, TokenLayout(1, Grid(3, 5), draw_kept(2, 15, 7)))
    )
    side, mask = {"flat": (7,), "sequence": (7,), "joint": (3, 5)}, draw_mask(2, keys)
    shapes = {"rows": (3,), "columns": (5,)} if kind == "axial" else {"table": side[kind]}
    tensors = draw_qkv(2, 2, queries, keys, d=4, e=3)
    tensors |= {
        name: draw(2, *shape, 4, seed=31 + i) for i, (name, shape) in enumerate(shapes.items())
    }
    score, kind = loop_scores(kind, tensors, layout), "flat" if kind == "sequence" else kind

    def weight(b, head, i, j):
        return math.exp(score(b, head, i, j)) if mask[b, j] and (j <= i or not causal) else 0.0

    expected = {"out": loop_mean(weight, tensors["v"], queries)}
    for function in (softmax_of_tables, reference_of_tables):
        out = function(kind, layout, causal=causal, key_mask=mask)(**tensors)
        assert_agree({"out": out}, expected, tolerance=1e-14)


@pytest.mark.parametrize("kind", ["sequence", "joint"])
def test_one_graph_serves_every_size(kind):
    def attend(image: Tensor, **tables: Tensor) -> Tensor:
        """A head of width 5 from an image ``[B, 15, H, W]``, with a prefix token; or of its rows
        and columns as a sequence.
        """
        tokens = torch.cat([image.mean((2, 3))[:, None], image.flatten(2).mT], dim=1)
        q, k, v = tokens.unflatten(2, (3, 1, 5)).permute(2, 0, 3, 1, 4)
        if kind == "sequence":
            keys = image.shape[3] + 3
            return softmax_attention(
                q, k[:, :, :keys], v[:, :, :keys], relative=Flat(**tables), causal=True
            )
        layout = TokenLayout(1, Grid(image.shape[2], image.shape[3]))
        return softmax_attention(
            q, k, v, relative=(Joint if kind == "joint" else Axial)(**tables, layout=layout)
        )

    shapes = (
        {"rows": (3,), "columns": (7,)}
        if kind == "axial"
        else {"table": (3, 7) if kind == "joint" else (9,)}
    )
    tables = {name: draw(1, *shape, 5, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for height, width in ((5, 9), (6, 8), (11, 4), (17, 19)):
        inputs = {"image": draw(2, 15, height, width, seed=height)} | tables
        assert_agree(run(compiled, inputs), run(attend, inputs), tolerance=1e-13)
    assert counter.frame_count <= 2


def test_what_a_softmax_cannot_use_is_refused():
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table, layout = draw(3, 3, 3, 5, seed=0), TokenLayout(2, Grid(3, 5))
    with pytest.raises(ValueError, match="mean"):
        softmax_attention(q, k, v, relative=Joint(table, layout, normalization="mean"))
    for kind in (
        Flat(table[:, 0], layout),
        Axial(table[:, 0], table[:, 1], layout),
        Joint(table, layout),
    ):
        with pytest.raises(ValueError, match="layout has 17 tokens, got 17 queries and 16 keys"):
            softmax_attention(q, k[:, :, 1:], v[:, :, 1:], relative=kind)
    with pytest.raises(ValueError, match="value_drop.*1.5"):
        softmax_attention(q, k, v, value_drop=1.5)
