"""Measurements: counts against arithmetic by hand, memory against what was allocated, and growth
with the image.
"""

import pytest
import torch
from timm.models import create_model

from visionattn.lab.measure import (
    attention_backends,
    bytes_kept,
    count_flops,
    interleaved_seconds,
    warm_up,
)


def test_flops_of_a_block_are_those_worked_out_by_hand():
    args = dict(embed_dim=24, num_heads=3, class_token=False, num_classes=5, relative="none")
    models = [create_model("scaleformer_vit_t", depth=depth, **args).train() for depth in (1, 2)]
    counted = [count_flops(model, 64, 96) for model in models]
    n, width, d, heads = 24, 24, 8, 3
    linear = n * width * (3 * width + width + width + 8 * width)
    convolution = n * width * 9
    attention = heads * 2 * n * n * d  # all pairs, which take less time for few tokens
    assert counted[1] - counted[0] == 2 * (linear + convolution + attention)
    assert models[0].training and not models[0].head.weight.is_meta


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


def test_a_sample_is_the_mean_of_as_many_calls_as_fill_it_and_rounds_fill_the_time():
    clock = FakeClock()
    works = [clock.work("a", 0.25, 0.25, 0.5, 1.0), clock.work("b", 8.0)]
    given = dict(sample_seconds=1.0, clock=clock)
    samples = interleaved_seconds(works, [0.25, 8.0], rounds=1, seconds_per_work=0, **given)
    assert "".join(clock.calls) == "aaaab" and samples == [[0.5], [8.0]]
    for seconds, rounds in ((0.0, 3), (36.0, 4), (1000.0, 7)):
        given = dict(rounds=3, max_rounds=7, seconds_per_work=seconds, clock=clock)
        assert [len(x) for x in interleaved_seconds(works, [8.0, 8.0], **given)] == [rounds] * 2


def test_warming_up_gives_the_second_call_of_a_short_work_and_the_first_of_a_long_one():
    clock = FakeClock()
    assert warm_up(clock.work("a", 0.25, 0.125), clock=clock) == 0.125
    assert warm_up(clock.work("b", 0.5, 0.125), clock=clock) == 0.5


def test_bytes_kept_count_each_storage_once_and_leave_out_what_is_named():
    x, weight = torch.randn(7, 11, requires_grad=True), torch.randn(11, 13, requires_grad=True)
    both = 4 * (7 * 11 + 11 * 13)
    assert bytes_kept(lambda: x.exp()) == 4 * 7 * 11  # its result alone
    assert bytes_kept(lambda: x @ weight, without=[weight]) == 4 * 7 * 11
    assert bytes_kept(lambda: (x @ weight, x * x)) == both
    assert bytes_kept(lambda: x[:2] @ weight) == both  # a view keeps its whole storage


@pytest.mark.parametrize("name", ["scaleformer_vit_t", "taylorshift_vit_t"])
def test_the_backend_that_ran_is_the_form_that_was_named_or_chosen(name):
    """As a profiler sees it, so also where a compiler built the graph."""
    kind = {"s": "kernelized", "t": "taylorshift"}[name[0]]
    for form, px in (("direct", 32), ("efficient", 32), ("auto", 1024)):
        model = create_model(name, depth=1, form=form, relative="none").eval()
        image, ran = torch.zeros(1, 3, px, px), form.replace("auto", "efficient")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for work in (model, compiled) if px == 32 else (model,):
            with torch.no_grad():
                work(image)
                found = attention_backends(lambda work=work, image=image: work(image))
            assert found == (f"{kind} {ran}",)


def test_attention_of_pytorch_is_reported_by_its_backend():
    vit = create_model("vit_tiny_patch16_224", depth=1).eval()
    image = torch.zeros(1, 3, 224, 224)
    with torch.no_grad():
        assert attention_backends(lambda: vit(image)) == ("sdpa flash",)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            assert attention_backends(lambda: vit(image)) == ("sdpa math",)
        vit.blocks[0].attn.fused_attn = False
        assert attention_backends(lambda: vit(image)) == ("eager softmax",)
        assert attention_backends(lambda: image + 1) == ()
