"""Compilation: one graph serves every size, and gives what eager gives."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.helpers.operations import OPERATIONS, Operation
from tests.helpers.oracles import assert_agree, draw, draw_qkv, draw_table, run
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    kernelized_attention,
    reference,
    taylorshift_attention,
)


def compiled_and_eager(
    function: Callable[..., Tensor], inputs_of_each_call: list[dict[str, Tensor]]
) -> int:
    """Check a function against its compiled self for inputs of several sizes; return the number of
    graphs.
    """
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for inputs in inputs_of_each_call:
        assert_agree(run(compiled, inputs), run(function, inputs), tolerance=1e-13)
    return counter.frame_count


@pytest.mark.parametrize(
    "name",
    [
        "taylorshift direct",
        "taylorshift efficient",
        "taylorshift auto",
        "kernelized efficient, elu1",
    ],
)
def test_one_graph_serves_every_length(name):
    if name == "taylorshift auto":  # both of its forms are met: N0 of d = 5 is about 50
        operation = Operation(taylorshift_attention, reference.taylorshift_attention, {})
        lengths = (13, 700, 64, 300)
    else:
        operation, lengths = OPERATIONS[name], (77, 300, 64, 513)
    inputs = [operation.tensors(batch=1, queries=n, keys=n // 2 + 7, d=5, e=3) for n in lengths]
    assert compiled_and_eager(operation.fast, inputs) <= 2


class SquareAndExp:
    """A feature map that is an object."""

    query = staticmethod(torch.square)
    key = staticmethod(torch.exp)


def masked(function: Callable[..., Tensor], **options) -> Callable[..., Tensor]:
    """``function`` under a key mask that is drawn from the keys, so that it has their length."""
    return lambda q, k, v, **inputs: function(
        q, k, v, key_mask=k.detach()[:, 0, :, 0] > -0.7, **inputs, **options
    )


def flat(function: Callable[..., Tensor], **options) -> Callable[..., Tensor]:
    """``function`` with the table of a Flat position among its tensors."""
    return lambda table, **inputs: function(
        **inputs, relative=Flat(table, normalization="mean"), **options
    )


TABLE = {"table": draw_table(3, 7, 5, seed=3)}
OPTIONS = {
    "taylorshift, masked and scaled": (
        masked(taylorshift_attention, form="efficient", output_scale=True),
        {},
    ),
    "taylorshift direct, masked": (masked(taylorshift_attention, form="direct"), {}),
    "taylorshift, flat": (flat(taylorshift_attention), TABLE),
    "kernelized direct, relu": (
        partial(kernelized_attention, form="direct", feature_map="relu"),
        {},
    ),
    "kernelized object, masked": (masked(kernelized_attention, feature_map=SquareAndExp), {}),
    "kernelized, causal and masked": (masked(kernelized_attention, causal=True), {}),
    "kernelized, causal and flat": (flat(kernelized_attention, causal=True), TABLE),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_serves_every_length_with_options(name):
    function, learned = OPTIONS[name]
    inputs = [
        draw_qkv(batch=2, queries=n, keys=n // 2 + 7, d=5, e=3) | learned for n in (77, 300, 64)
    ]
    assert compiled_and_eager(function, inputs) <= 2


@pytest.mark.parametrize("function", [taylorshift_attention, kernelized_attention])
def test_a_compiled_graph_drops_values_as_eager_does(function):
    torch._dynamo.reset()
    compiled = torch.compile(partial(function, value_drop=0.3), fullgraph=True, backend="aot_eager")
    for n in (77, 300):
        tensors = draw_qkv(batch=2, queries=n, d=5, e=3)
        results = []
        for operation in (compiled, partial(function, value_drop=0.3)):
            torch.manual_seed(4)
            results.append(run(operation, tensors))
        assert_agree(*results, tolerance=1e-13)
        assert 0.1 < results[0]["v"].eq(0).all(3).double().mean() < 0.5


@pytest.mark.parametrize(
    ("kind", "missing", "form"),
    [
        (Flat, True, "auto"),
        (Axial, False, "direct"),
        (Joint, False, "auto"),
        (Joint, True, "direct"),
    ],
)
def test_one_graph_serves_every_grid(kind, missing, form):
    side = {Flat: (3,), Axial: (3,), Joint: (3, 3)}[kind]
    names = ("rows", "columns") if kind is Axial else ("table",)

    def attend(image: Tensor, **tables: Tensor) -> Tensor:
        """A head of width 5 from an image ``[B, 15, H, W]``, as a model makes it, with a prefix
        token.
        """
        layout = TokenLayout(1, Grid(image.shape[2], image.shape[3]))
        tokens = torch.cat([image.mean((2, 3))[:, None], image.flatten(2).mT], dim=1)
        if missing:
            kept = image[:, 0].flatten(1).argsort(1)[:, : layout.grid.num_patches // 2]
            layout = TokenLayout(1, layout.grid, kept)
            tokens = torch.cat(
                [tokens[:, :1], tokens[:, 1:].gather(1, kept[:, :, None].expand(-1, -1, 15))], dim=1
            )
        q, k, v = tokens.unflatten(2, (3, 1, 5)).permute(2, 0, 3, 1, 4)
        return kernelized_attention(
            q, k, v, relative=kind(**tables, layout=layout, normalization="mean"), form=form
        )

    inputs = [
        {"image": draw(2, 15, height, width, seed=height)}
        | {n: draw_table(1, *side, 5, seed=3) for n in names}
        for height, width in ((5, 9), (6, 8), (11, 4), (7, 7))
    ]
    assert compiled_and_eager(attend, inputs) <= 2
