"""NaN in tokens that count is not hidden. In graphs tokens that play no part hold
anything, as ``test_definitions.py`` tests for operations.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.helpers.oracles import draw_qkv
from tests.ops.drawn_cases import Drawn, compare, paired
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    RandomFeatures,
    kernelized_attention,
    softmax_attention,
    taylorshift_attention,
    window_attention,
)

NAN = float("nan")
FEATURES = RandomFeatures(7, 6, torch.Generator().manual_seed(2), dtype=torch.float64)
BOTH = {
    "taylorshift direct": partial(taylorshift_attention, form="direct"),
    "taylorshift efficient": partial(taylorshift_attention, form="efficient"),
    "kernelized softmax": partial(kernelized_attention, feature_map="softmax"),
}
CAUSAL = {
    "kernelized direct": partial(kernelized_attention, form="direct"),
    "kernelized efficient": partial(kernelized_attention, form="efficient"),
    "kernelized random": partial(kernelized_attention, feature_map=FEATURES),
    "softmax": softmax_attention,
}


@pytest.mark.parametrize("name", CAUSAL)
def test_from_the_token_that_holds_nan_on_causal_results_are_nan(name):
    """In the columns of v that do, if it is v."""
    for tensor in "qkv":
        tensors = draw_qkv(queries=130, d=7, e=5)
        tensors[tensor][:, :, 70, 2] = NAN
        out = CAUSAL[name](**tensors, causal=True)
        assert out[:, :, :70].isfinite().all()
        assert out[:, :, 70].isnan().any(-1).all()
        if tensor != "q":
            assert out[:, :, 70:].isnan().any(-1).all()


@pytest.mark.parametrize("name", BOTH | CAUSAL)
def test_of_keys_that_count_nan_is_not_hidden(name):
    for tensor in "kv":
        tensors = draw_qkv(queries=45, d=7, e=5)
        tensors[tensor][:, :, 12, 2] = NAN
        assert (BOTH | CAUSAL)[name](**tensors).isnan().any(-1).all()


def test_nan_stays_in_its_window():
    layout, inside = TokenLayout(0, Grid(5, 9)), torch.zeros(5, 9, dtype=torch.bool)
    inside[:4, 4:8] = True
    for name in "kv":
        tensors = draw_qkv(queries=45, d=7, e=5)
        tensors[name][:, :, 1 * 9 + 6, 2] = NAN
        out = window_attention(**tensors, layout=layout, window_size=4)
        assert torch.equal(out.isnan().any(-1), inside.flatten().expand(2, 3, -1))


@pytest.mark.parametrize("form", ["direct", "efficient"])
def test_later_tokens_hold_anything_in_a_compiled_graph(form):
    """A graph looks at no numbers."""
    torch._dynamo.reset()
    case = Drawn(lengths=(45, 45), kind="flat", later=16)
    fast, slow, tensors = paired(case, "kernelized", causal=True)
    compiled = torch.compile(partial(fast, form=form), fullgraph=True, backend="aot_eager")
    for garbage in (NAN, 1e30):
        compare(replace(case, garbage=garbage), compiled, slow, tensors)
