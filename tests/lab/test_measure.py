"""Measurements: counts against arithmetic by hand, memory against what was allocated, and growth
with the image.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from timm.models import create_model

from visionattn.lab.measure import (
    attention_backends,
    bytes_kept,
    count_flops,
    flops_of,
    interleaved_seconds,
    model_table,
    warm_up,
)
from visionattn.ops.position.axial import axis_sums
from visionattn.ops.position.scores import relative_scores
from visionattn.ops.sums import product

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory of a CPU is measured under Linux only"
)


def test_flops_of_a_block_are_those_worked_out_by_hand():
    args = dict(
        embed_dim=24,
        num_heads=3,
        num_classes=5,
        img_size=64,
        patch_size=16,
        class_token=False,
        relative="none",
    )
    counted = [
        count_flops(create_model("scaleformer_vit_t", depth=depth, **args), 64, 96)
        for depth in (1, 2)
    ]
    n, width, d, heads = 24, 24, 8, 3
    linear = n * width * (3 * width + width + width + 8 * width)
    convolution = n * width * 9
    attention = heads * 2 * n * n * d  # all pairs, which take less time for few tokens
    assert counted[1] - counted[0] == 2 * (linear + convolution + attention)


def test_relative_position_adds_its_classes_to_the_count():
    args = dict(embed_dim=24, num_heads=3, depth=1, class_token=False)
    without = create_model("taylorshift_vit_t", relative="none", **args)
    with_it = create_model("taylorshift_vit_t", horizon=2, **args)
    # 24 patches add their weights to those of the pairs, 672 sum values over the 25 classes.
    assert count_flops(with_it, 64, 96) - count_flops(without, 64, 96) == 2 * 24 * 3 * 25 * 8
    assert count_flops(with_it, 384, 448) - count_flops(without, 384, 448) == 2 * 672 * 3 * (
        25 * 8 + 25 * 8
    )


def test_counting_leaves_the_model_as_it_is():
    model = create_model("scaleformer_vit_t", depth=1).train()
    count_flops(model, 64, 96)
    assert model.training and not model.head.weight.is_meta


def test_table_has_a_row_per_model_and_grows_linearly():
    (row,) = model_table(["scaleformer_vit_t"], [1024, 2048])
    assert row["model"] == "scaleformer_vit_t"
    assert row["parameters (M)"] == pytest.approx(6.3, abs=0.1)
    assert row["GFLOP at 2048"] / row["GFLOP at 1024"] == pytest.approx(4, rel=0.01)


class FakeClock:
    """A clock that only its works advance; it writes down who ran."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def __call__(self):
        return self.now

    def work(self, name, *seconds):
        """A callable that takes the first of ``seconds`` the first time, and so on; the last one
        from then on.
        """
        left = list(seconds)

        def run():
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_works_take_turns_in_an_order_that_rotates():
    clock = FakeClock()
    works = [clock.work(name, seconds) for name, seconds in (("a", 2.0), ("b", 3.0), ("c", 5.0))]
    samples = interleaved_seconds(works, [2.0, 3.0, 5.0], rounds=4, seconds_per_work=0, clock=clock)
    assert "".join(clock.calls) == "abc" + "bca" + "cab" + "abc"
    assert samples == [[2.0] * 4, [3.0] * 4, [5.0] * 4]


def test_a_sample_is_the_mean_of_as_many_calls_as_fill_it():
    clock = FakeClock()
    works = [clock.work("a", 0.25, 0.25, 0.5, 1.0), clock.work("b", 8.0)]
    samples = interleaved_seconds(
        works, [0.25, 8.0], rounds=1, seconds_per_work=0, sample_seconds=1.0, clock=clock
    )
    assert "".join(clock.calls) == "aaaab" and samples == [[0.5], [8.0]]


@pytest.mark.parametrize("seconds, rounds", [(0.0, 3), (8.0, 4), (1000.0, 7)])
def test_rounds_fill_the_time_for_each_work_between_the_two_bounds(seconds, rounds):
    clock = FakeClock()
    works = [clock.work("a", 1.0), clock.work("b", 3.0)]
    options = dict(rounds=3, max_rounds=7, clock=clock)
    samples = interleaved_seconds(works, [1.0, 3.0], seconds_per_work=seconds, **options)
    assert [len(times) for times in samples] == [rounds, rounds]


def test_warming_up_gives_the_second_call_of_a_short_work_and_the_first_of_a_long_one():
    clock = FakeClock()
    assert warm_up(clock.work("a", 0.25, 0.125), clock=clock) == 0.125
    assert warm_up(clock.work("b", 0.5, 0.125), clock=clock) == 0.5
    assert "".join(clock.calls) == "aab"


def test_bytes_kept_count_each_storage_once_and_leave_out_what_is_named():
    x, weight = torch.randn(7, 11, requires_grad=True), torch.randn(11, 13, requires_grad=True)
    assert bytes_kept(lambda: x.exp()) == 4 * 7 * 11  # its result alone
    assert bytes_kept(lambda: x @ weight) == 4 * (7 * 11 + 11 * 13)
    assert bytes_kept(lambda: x @ weight, without=[weight]) == 4 * 7 * 11
    assert bytes_kept(lambda: (x @ weight, x * x)) == 4 * (7 * 11 + 11 * 13)
    assert bytes_kept(lambda: x[:2] @ weight) == 4 * (
        7 * 11 + 11 * 13
    )  # a view keeps its whole storage
    assert bytes_kept(lambda: x + x) == 0


def test_flops_of_a_callable_are_those_of_its_products():
    a, b = torch.empty(7, 11, device="meta"), torch.empty(11, 13, device="meta")
    assert flops_of(lambda: a @ b + 1) == 2 * 7 * 11 * 13


def both_ways(function, **shapes):
    """Operations of ``function`` of tensors of these shapes, which are not computed: of the
    forward, and of the backward pass.
    """
    tensors = {
        name: torch.empty(shape, device="meta", requires_grad=True)
        for name, shape in shapes.items()
    }
    forward = flops_of(lambda: function(**tensors))
    return forward, flops_of(lambda: function(**tensors).sum().backward()) - forward


def test_flops_of_the_sums_over_rows_are_those_worked_out_by_hand():
    keys = torch.empty(2, 5, device="meta")
    for horizon, classes in (
        (0, 1),
        (2, 5),
        (7, 11),
    ):  # of 15 classes 11 occur on 5 rows, one more on each side
        shapes = {"q": (2, 3, 5, 9, 7), "table": (3, 2 * horizon + 1, 7), "v": (2, 3, 5, 9, 4)}
        forward, backward = both_ways(
            lambda q, table, v: axis_sums(q, table, v, keys, None)[0], **shapes
        )
        queries = 2 * 3 * 5 * 9
        assert forward == 2 * queries * classes * (
            7 + 4 + 1
        )  # the weight, the values and the mass of each class
        assert backward == 2 * queries * classes * (3 * 7 + 2 * 4 + 1)


def test_flops_of_relative_scores_are_those_of_the_classes_that_can_be_reached():
    for horizons, classes in (
        ((1, 2), 3 * 5),
        ((9, 1), 9 * 3),
        ((2, 40), 5 * 17),
    ):  # on 5 x 9: 9 rows, 17 columns at most
        shapes = {"q": (2, 3, 5, 9, 7), "table": (3, 2 * horizons[0] + 1, 2 * horizons[1] + 1, 7)}
        forward, backward = both_ways(lambda q, table: relative_scores(q, table, 5, 9), **shapes)
        assert forward == 2 * 2 * 3 * 45 * classes * 7
        assert backward == 2 * forward


def test_flops_of_a_product_outside_autocast_are_those_of_the_product():
    forward, backward = both_ways(product, x=(2, 3, 11, 7), y=(2, 3, 7, 5))
    assert (forward, backward) == (2 * 6 * 11 * 7 * 5, 4 * 6 * 11 * 7 * 5)
    assert both_ways(product, x=(2, 3, 11, 7), y=(7, 5)) == (forward, backward)


def printed_by(code):
    """The integer that a fresh process prints, each of whose tensors has pages of its own: what is
    freed is seen to be.
    """
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=True
    )
    return int(result.stdout)


@linux
def test_peak_is_what_was_allocated_above_the_level_before(started_quickly):
    peak = printed_by(
        "import torch\n"
        "from visionattn.lab.measure import peak_bytes\n"
        "work = lambda: torch.ones(1 << 24).sum()\n"
        "work()\n"
        "print(peak_bytes(work))"
    )
    assert peak == pytest.approx(4 << 24, abs=8 << 20)  # the kernel counts pages in batches


GROWTH = """
import timm, torch, visionattn
from visionattn.lab.measure import peak_bytes
torch.set_num_threads(1)
model = timm.create_model({name!r}, num_heads={heads}, depth=1).eval()
image = torch.randn(1, 3, {size}, {size})
with torch.inference_mode():
    model(image)
    print(peak_bytes(lambda: model(image)))
"""


@linux
@pytest.mark.parametrize("name, heads", [("scaleformer_vit_s", 6), ("taylorshift_vit_s", 12)])
def test_memory_of_a_forward_grows_with_the_patches(name, heads, started_quickly):
    """From 1024 to 2048 px, four times the patches; depth 1 has the peak of depth 12, whose blocks
    come one by one.
    """
    peaks = [printed_by(GROWTH.format(name=name, heads=heads, size=size)) for size in (1024, 2048)]
    assert peaks[1] / peaks[0] <= 4.4


@pytest.mark.parametrize("form", ["direct", "efficient"])
@pytest.mark.parametrize("family", ["scaleformer", "taylorshift"])
def test_the_backend_that_ran_is_the_form_that_was_named(family, form):
    """As a profiler sees it, so also where a compiler built the graph."""
    model = create_model(f"{family}_vit_t", depth=1, form=form).eval()
    image = torch.zeros(1, 3, 32, 48)
    name = {"scaleformer": "kernelized", "taylorshift": "taylorshift"}[family]
    with torch.no_grad():
        assert attention_backends(lambda: model(image)) == (f"{name} {form}",)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(image)
        assert attention_backends(lambda: compiled(image)) == (f"{name} {form}",)


def test_an_automatic_form_is_reported_as_what_it_became():
    model = create_model("taylorshift_vit_t", depth=1, relative="none").eval()
    with torch.no_grad():
        small, large = (
            attention_backends(lambda size=size: model(torch.zeros(1, 3, size, size)))
            for size in (32, 1024)
        )
    assert (small, large) == (("taylorshift direct",), ("taylorshift efficient",))


def test_attention_of_pytorch_is_reported_by_its_backend():
    vit = create_model("vit_tiny_patch16_224", depth=1).eval()
    image = torch.zeros(1, 3, 224, 224)
    q = torch.randn(1, 2, 7, 16)
    with torch.no_grad():
        assert attention_backends(lambda: vit(image)) == ("sdpa flash",)
        vit.blocks[0].attn.fused_attn = False
        assert attention_backends(lambda: vit(image)) == ("eager softmax",)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert attention_backends(
                lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)
            ) == ("sdpa math",)
        assert attention_backends(lambda: q + 1) == ()
