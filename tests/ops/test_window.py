"""What windows cost, and the precision of prefix tokens; values are in ``test_definitions.py``."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.oracles import draw, draw_qkv, relative_error, run, saved_bytes
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import Joint, window, window_attention


def test_memory_and_operations_grow_with_the_patches():
    def cost(height):
        layout = TokenLayout(1, Grid(height, 14))
        tensors = draw_qkv(1, 2, layout.num_tokens, d=5, e=4) | {
            "table": draw(2, 13, 13, 5, seed=1)
        }

        def call(q, k, v, table):
            return window_attention(q, k, v, relative=Joint(table, layout))

        with FlopCounterMode(display=False) as counter:
            run(call, tensors)
        return saved_bytes(call, tensors), counter.get_total_flops()

    costs = cost(14), cost(28), cost(56)
    for at_14, at_28, at_56 in zip(*costs, strict=True):
        assert at_28 > at_14 and at_56 - at_28 == 2 * (at_28 - at_14)


def test_operations_are_counted_as_products_of_pairs_that_see_each_other():
    layout = TokenLayout(2, Grid(5, 9))
    q, k, v = draw_qkv(2, 3, 47, d=7, e=5).values()
    with FlopCounterMode(display=False) as counter:
        window_attention(q, k, v, layout=layout, window_size=4)
    places = torch.tensor([(y // 4, x // 4) for y in range(5) for x in range(9)])
    pairs = int((places[:, None] == places[None]).all(-1).sum()) + 2 * 2 * 45 + 2 * 2
    assert counter.get_total_flops() == 2 * 2 * 3 * pairs * (7 + 5)


def test_gradients_of_prefix_tokens_in_half_precision_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(window, "CACHED_ELEMENTS", 1)  # a row of windows at a time
    layout = TokenLayout(1, Grid(84, 14))
    tensors = {name: x.bfloat16() for name, x in draw_qkv(1, 2, layout.num_tokens).items()}
    _, _, wanted = _gradients(tensors, layout, torch.float64)
    _, _, found = _gradients(tensors, layout, torch.bfloat16)
    assert relative_error(found[:, :, 0], wanted[:, :, 0]) < 2**-8


def _gradients(tensors, layout, dtype):
    """Of the sum of all results, in which all terms of the gradient of a value are positive."""
    inputs = [x.to(dtype).requires_grad_() for x in tensors.values()]
    return torch.autograd.grad(window_attention(*inputs, layout=layout).sum(), inputs)
