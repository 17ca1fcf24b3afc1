"""Compilation: one graph serves every size, and gives what eager gives."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from tests.helpers.operations import TAU
from tests.helpers.oracles import assert_agree, draw, draw_qkv, draw_table, run
from tests.ops.drawn_cases import SquareAndSoftplus
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    centred_keys,
    kernelized_attention,
    softmax_attention,
    step,
    summarize,
    taylorshift_attention,
    value_convolution,
    window_attention,
)
from visionattn.ops.position.axial_position import axis_sums


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
        results = []
        for each in (compiled, function):
            torch.manual_seed(4)
            results.append(run(each, inputs))
        assert_agree(*results, tolerance=1e-13)
    return counter.frame_count


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
    # Both forms of TaylorShift are met: N0 of d = 5 is about 50.
    "taylorshift, both forms": (taylorshift_attention, {}),
    "taylorshift, masked and scaled": (masked(taylorshift_attention, output_scale=True), TAU),
    "taylorshift direct, flat": (flat(taylorshift_attention, form="direct"), TABLE),
    "kernelized object, masked": (masked(kernelized_attention, feature_map=SquareAndSoftplus), {}),
    "kernelized, causal and flat": (flat(kernelized_attention, causal=True), TABLE),
    "softmax, causal and flat": (
        lambda table, **inputs: softmax_attention(**inputs, relative=Flat(table), causal=True),
        TABLE,
    ),
    "taylorshift, dropped": (partial(taylorshift_attention, value_drop=0.3), {}),
    "kernelized, dropped": (partial(kernelized_attention, value_drop=0.3), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_serves_every_length(name):
    function, learned = OPTIONS[name]
    lengths = (13, 300, 64)
    inputs = [draw_qkv(batch=2, queries=n, keys=n // 2 + 7, d=5, e=3) | learned for n in lengths]
    assert compiled_and_eager(function, inputs) <= 2


def heads_of(image: Tensor, layout: TokenLayout) -> list[Tensor]:
    """q, k and v of a head of width 5 from an image ``[B, 15, H, W]``, with a prefix token."""
    tokens = torch.cat([image.mean((2, 3))[:, None], image.flatten(2).mT], dim=1)
    if layout.kept is not None:
        index = torch.nn.functional.pad(layout.kept + 1, (1, 0))
        tokens = tokens.gather(1, index[:, :, None].expand(-1, -1, 15))
    return list(tokens.unflatten(2, (3, 1, 5)).permute(2, 0, 3, 1, 4))


def windows(q, k, v, table, layout):
    return window_attention(q, k, v, window_size=4, shifted=True, relative=Joint(table, layout))


def scores(q, k, v, table, layout):
    return softmax_attention(q, k, v, relative=Joint(table, layout))


def classes(q, k, v, table, layout):
    return kernelized_attention(q, k, v, relative=Joint(table, layout, "mean"), form="direct")


def lines(q, k, v, table, layout):
    return kernelized_attention(q, k, v, relative=Axial(table[:, 0], table[:, 1], layout))


TAPS = draw(5, 1, 3, 3, seed=4)


def convolved(q, k, v, table, layout):
    return value_convolution(v * table.mean(), TAPS, layout) + centred_keys(k)


GRIDS = {"windows": windows, "softmax": scores, "axial": lines, "convolution": convolved}
GRIDS |= {"missing patches": classes}


@pytest.mark.parametrize("name", GRIDS)
def test_one_graph_serves_every_grid(name):
    def attend(image: Tensor, table: Tensor) -> Tensor:
        layout, kept = TokenLayout(1, Grid(image.shape[2], image.shape[3])), None
        if name == "missing patches":
            kept = image[:, 0].flatten(1).argsort(1)[:, : layout.grid.num_patches // 2]
        layout = TokenLayout(1, layout.grid, kept)
        return GRIDS[name](*heads_of(image, layout), table, layout)

    inputs = [
        {"image": draw(2, 15, *size, seed=size[0]), "table": draw_table(1, 3, 3, 5, seed=3)}
        for size in ((5, 9), (6, 8), (11, 4))
    ]
    assert compiled_and_eager(attend, inputs) <= 2


def test_one_compiled_step_serves_every_token():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for kind in ("kernelized", "taylorshift"):
        q, k, v = draw_qkv(queries=7, d=5, e=3).values()
        state = expected_state = summarize(k[:, :, :2], v[:, :, :2], kind)
        for i in range(2, 7):
            token = [x[:, :, i : i + 1] for x in (q, k, v)]
            out, state = compiled(*token, state)
            expected, expected_state = step(*token, expected_state)
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)
    assert counter.frame_count <= 4  # two for each kind


# PyTorch's own check asks copies of the operands for their gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_an_operator_is_registered_as_pytorch_wants_it():
    shapes = (2, 3, 3, 4, 5), (3, 5, 5), (2, 3, 3, 4, 6)  # q, table and v
    tensors = (draw(*shape, seed=i).abs().requires_grad_() for i, shape in enumerate(shapes))
    keys, total = torch.full((2, 3), 4.0), torch.full((1, 1, 1, 1), 12.0)
    torch.library.opcheck(axis_sums, (*tensors, keys.double(), total.double()))
