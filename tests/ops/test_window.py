"""Window attention: its definition against loops over single pairs, and the operation against its
definition, on any grid.
"""

import math

import pytest
import torch
import torch._dynamo.testing
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers.layout_cases import make_relative
from tests.helpers.oracles import (
    assert_agree,
    dot,
    draw,
    draw_kept,
    draw_mask,
    draw_qkv,
    loop_mean,
    peak_bytes,
    relative_error,
    run,
    saved_bytes,
)
from tests.ops.test_masked import (
    assert_nothing_changes,
    everything,
    results,
)
from visionattn.layout import Grid, TokenLayout
from visionattn.ops import (
    Axial,
    Flat,
    Joint,
    nonfinite,
    reference,
    window,
    window_attention,
)


def of_tables(function, kind, layout, **options):
    """``function`` with the tables among its tensors, or none."""

    def call(**inputs):
        if kind == "none":
            return function(**inputs, layout=layout, **options)
        relative = make_relative(kind, inputs, layout, "sum")
        return function(**inputs, relative=relative, **options)

    return call


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("window_size", [3, 4])
def test_operation_and_definition_are_the_mean_over_pairs_one_at_a_time(window_size, shifted):
    layout = TokenLayout(1, Grid(7, 5), draw_kept(2, 35, 17))
    present = torch.rand(2, 35, generator=torch.Generator().manual_seed(4)) < 0.8
    layout, mask = layout._replace(present=present), draw_mask(2, 18)
    tensors = draw_qkv(2, 2, 18, d=4, e=3) | {"table": draw(2, 5, 5, 4, seed=31)}
    q, k, table = tensors["q"], tensors["k"], tensors["table"]
    starts = {3: [0, 1, 4, 7] if shifted else [0, 3, 6], 4: [0, 2, 6] if shifted else [0, 4]}

    def place(b, token):
        return None if token == 0 else divmod(int(layout.kept[b, token - 1]), 5)

    def window_of(y):
        return max(start for start in starts[window_size] if start <= y)

    def weight(b, head, i, j):
        here, there = place(b, i), place(b, j)
        if not mask[b, j] or (there and not present[b, there[0] * 5 + there[1]]):
            return 0.0
        score = dot(q[b, head, i], k[b, head, j])
        if here and there:
            if [window_of(y) for y in here] != [window_of(y) for y in there]:
                return 0.0
            dy, dx = (max(-2, min(2, b - a)) + 2 for a, b in zip(here, there, strict=True))
            score += dot(q[b, head, i], table[head, dy, dx])
        return math.exp(score / 2)

    expected = {"out": loop_mean(weight, tensors["v"], 18)}
    for function in (window_attention, reference.window_attention):
        call = of_tables(
            function, "joint", layout, window_size=window_size, shifted=shifted, key_mask=mask
        )
        assert_agree({"out": call(**tensors)}, expected, tolerance=1e-14)


def test_weights_of_a_few_windows_are_in_memory_at_a_time(monkeypatch):
    monkeypatch.setattr(window, "CACHED_ELEMENTS", 1 << 17)
    layout = TokenLayout(1, Grid(42, 56))
    q, k, v = (x.float() for x in draw_qkv(1, 4, layout.num_tokens, d=4, e=4).values())
    table, outputs = draw(4, 13, 13, 4, seed=1).float(), 4 * q.numel()
    relative = Joint(table, layout)
    peak = peak_bytes(lambda: window_attention(q, k, v, relative=relative))
    # Two copies of such a piece at most, where those of all windows have 1.9 MB each.
    assert peak < outputs + 2 * 4 * (1 << 17)


# What tokens hold that do not count


def test_windows_that_nobody_looks_at_hold_anything():
    layout, counts = TokenLayout(0, Grid(5, 9)), torch.zeros(2, 5, 9, dtype=torch.bool)
    counts[:, :, :4] = True
    counts, tensors = counts.flatten(1), draw_qkv(queries=45, d=7, e=5)
    tensors |= {"table": draw(3, 5, 5, 7, seed=3)}
    call = of_tables(window_attention, "joint", layout, window_size=4)
    assert_nothing_changes(call, tensors, ~counts, counts)


def test_where_sums_are_not_read_queries_without_gradient_are_left_out(monkeypatch):
    """As on an accelerator, whose results nobody looks at."""
    layout, counts = TokenLayout(1, Grid(4, 11)), draw_mask(2, 45)
    call = of_tables(window_attention, "none", layout, window_size=4)
    tensors = draw_qkv(queries=45, d=7, e=5)
    wanted = results(call, tensors, counts)
    monkeypatch.setattr(nonfinite, "is_known_finite", lambda *tensors: False)
    monkeypatch.setattr(window, "is_known_finite", lambda *tensors: False)
    assert_agree(results(call, tensors, counts), wanted)


def test_of_tokens_that_count_nan_is_not_hidden_and_stays_in_its_window():
    layout, inside = TokenLayout(0, Grid(5, 9)), torch.zeros(5, 9, dtype=torch.bool)
    inside[:4, 4:8] = True
    for name in "kv":
        tensors = draw_qkv(queries=45, d=7, e=5)
        tensors[name][:, :, 1 * 9 + 6, 2] = math.nan
        out = window_attention(**tensors, layout=layout, window_size=4)
        assert torch.equal(out.isnan().any(-1), inside.flatten().expand(2, 3, -1))


# Costs, dtypes, compilers


def test_memory_and_operations_grow_with_the_patches():
    def cost(height):
        layout = TokenLayout(1, Grid(height, 14))
        tensors = draw_qkv(1, 2, layout.num_tokens, d=5, e=4) | {
            "table": draw(2, 13, 13, 5, seed=1)
        }
        call = of_tables(window_attention, "joint", layout)
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


def test_autocast_leaves_the_products_alone():
    layout = TokenLayout(1, Grid(9, 11))
    tensors = draw_qkv(queries=100) | {"table": draw(3, 13, 13, 16, seed=1)}
    tensors = {name: x.float() for name, x in tensors.items()}
    call = of_tables(window_attention, "joint", layout)
    wanted = run(call, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert_agree(run(call, tensors), wanted, tolerance=0)


def test_one_graph_serves_every_size():
    def attend(image, table):
        """A head of width 5 from an image ``[B, 15, H, W]``, with a prefix token."""
        tokens = torch.cat([image.mean((2, 3))[:, None], image.flatten(2).mT], dim=1)
        q, k, v = tokens.unflatten(2, (3, 1, 5)).permute(2, 0, 3, 1, 4)
        layout = TokenLayout(1, Grid(image.shape[2], image.shape[3]))
        relative = Joint(table, layout)
        return window_attention(q, k, v, window_size=4, shifted=True, relative=relative)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    table = draw(1, 7, 7, 5, seed=1)
    for height, width in ((5, 9), (3, 8), (11, 4), (17, 19)):
        inputs = {"image": draw(2, 15, height, width, seed=height), "table": table}
        assert_agree(run(compiled, inputs), run(attend, inputs), tolerance=1e-13)
    assert counter.frame_count <= 2


def test_no_patches_images_heads_or_widths_are_no_error():
    for layout, sizes in (
        (TokenLayout(2, Grid(0, 0)), (2, 3, 2, 2, 5, 4)),
        (TokenLayout(0, Grid(0, 5)), (2, 3, 0, 0, 5, 4)),
        (TokenLayout(2, Grid(3, 5)), (0, 3, 17, 17, 5, 4)),
        (TokenLayout(2, Grid(3, 5)), (2, 0, 17, 17, 5, 4)),
        (TokenLayout(2, Grid(3, 5)), (2, 3, 17, 17, 5, 0)),
    ):
        tensors = draw_qkv(*sizes) | {"table": draw(max(sizes[1], 1), 3, 3, 5, seed=1)}
        for mask in (None, everything(sizes[0], sizes[2])):
            found = run(of_tables(window_attention, "joint", layout, key_mask=mask), tensors)
            assert found["out"].shape == (*sizes[:3], sizes[5])
            assert all(found[name].shape == tensors[name].shape for name in tensors)


def test_what_windows_cannot_use_is_refused():
    q, k, v = draw_qkv(queries=17, d=5, e=4).values()
    table, layout = draw(3, 3, 3, 5, seed=0), TokenLayout(2, Grid(3, 5))
    refused = {
        "wanted layout, or relative, which has its own, got neither": {},
        "wanted layout, or relative, which has its own, got both": dict(
            layout=layout, relative=Joint(table, layout)
        ),
        "wanted Joint or Axial, got Flat": dict(relative=Flat(table[:, 0], layout)),
        "mean": dict(relative=Axial(table[:, 0], table[:, 0], layout, normalization="mean")),
        "window_size: wanted a whole number of patches from 1, got 0": dict(
            layout=layout, window_size=0
        ),
        "got 2.5": dict(layout=layout, window_size=2.5),
        "layout has 18 tokens, got 17 queries": dict(layout=layout._replace(num_prefix=3)),
        "value_drop.*1.5": dict(layout=layout, value_drop=1.5),
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            window_attention(q, k, v, **options)
