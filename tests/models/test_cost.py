"""What steps and forwards take, counted and on a GPU; what fits, and how long the work takes."""

import math
import subprocess
import sys
from contextlib import nullcontext

import pytest
import timm
import torch

import visionattn  # noqa: F401  registers the models
from tests.helpers.oracles import peak_bytes
from tests.helpers.stand_in_gpu import GPU, Card, OnProcessor
from visionattn.cli.exit_codes import DoesNotFit
from visionattn.models import cost
from visionattn.models.cost import (
    LARGE_BYTES,
    SHARE,
    Expected,
    Footprint,
    ForwardMemory,
    Passes,
    counting,
    seconds_of,
)
from visionattn.models.weights import DataSpec

CPU, MIB = torch.device("cpu"), 2**20
SPEC = DataSpec(3, 4, (), (0.5,) * 3, (0.25,) * 3, None, 32)


def test_a_tensor_counts_until_nobody_holds_it_and_small_ones_apart():
    with counting() as (count, _):
        a = torch.empty(3, MIB, dtype=torch.uint8)
        b = torch.cat([a, a])
        assert count.live_bytes == 9 * MIB
        view = b[2:]
        del a, b
        assert count.live_bytes == 6 * MIB
        del view
        assert count.live_bytes == 0 and count.peak_bytes == 9 * MIB
        torch.empty(LARGE_BYTES + MIB, dtype=torch.uint8)
        small = torch.empty(MIB, dtype=torch.uint8)
        large = torch.empty(LARGE_BYTES + 3 * MIB, dtype=torch.uint8)
        assert count.peak_bytes - count.small_bytes == large.numel()
        assert count.small_bytes == small.numel()


@pytest.mark.parametrize(
    "name, checkpointing, options",
    [
        ("scaleformer_vit_t", False, {"attention": ["window", "kernelized"]}),
        ("taylorshift_vit_t", True, {}),
    ],
)
def test_a_step_is_counted_as_the_allocator_gives_memory_out(name, checkpointing, options):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, depth=2, **options)
    model.set_grad_checkpointing(checkpointing)

    def step(model):
        model(torch.ones(7, 3, 160, 160)).sum().backward()

    def real():
        step(model)
        model.zero_grad(set_to_none=True)

    with counting() as (count, copied):
        step(copied(model))
    real()
    assert count.peak_bytes == pytest.approx(peak_bytes(real), rel=0.05)


def step_on(model, rows, columns):
    with counting() as (count, copied):
        copied(model)(torch.ones(3, 3, rows, columns)).sum().backward()
    return count


def test_a_few_pieces_of_a_loop_hold_as_much_as_all_and_take_less_counting(monkeypatch):
    model = timm.create_model("taylorshift_vit_t", depth=1, embed_dim=48, num_heads=3, patch_size=2)
    ran, run = [], Footprint.__torch_dispatch__
    monkeypatch.setattr(
        Footprint, "__torch_dispatch__", lambda *args, **given: ran.append(0) or run(*args, **given)
    )
    few = step_on(model, 60, 66)
    operators = len(ran)
    step_on(model, 120, 132)
    assert len(ran) - operators < 2 * operators  # of four times the pixels
    monkeypatch.setattr(cost, "only_few", nullcontext)
    every = step_on(model, 60, 66)
    assert (few.peak_bytes, few.small_bytes) == (every.peak_bytes, every.small_bytes)


def test_an_operator_counts_at_each_call_and_no_fake_tensor_stays_behind():
    torch.manual_seed(0)
    model = timm.create_model("scaleformer_vit_t", depth=1, horizon=2).eval()
    images, peaks = torch.rand(1, 3, 48, 80), []
    with torch.inference_mode():
        before = model(images)
        with counting() as (count, copied):
            fake = copied(model)
            for _ in range(2):
                count.peak_bytes = 0
                fake(torch.ones(1, 3, 160, 160))
                peaks.append(count.peak_bytes)
        assert torch.equal(model(images), before)
    assert peaks[0] == peaks[1] > 0


def test_a_process_forked_after_a_count_can_go_backward(started_quickly):
    code = """
import os, torch
from visionattn.models.cost import counting
def backward():
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
with counting():
    backward()
if os.fork() == 0:
    backward()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True)


class Means(torch.nn.Module):
    """A model of any size whose memory grows with images and pixels."""

    def __init__(self, img_size=None):
        super().__init__()
        self.head = torch.nn.Linear(3, 4)
        if img_size:  # the only one that it takes
            self.patch_embed = torch.nn.Module()
            self.patch_embed.img_size, self.patch_embed.strict_img_size = img_size, True

    def forward(self, images):
        return self.head(images.mean((2, 3)))


class Looks(Means):
    """A model that cannot be counted."""

    def forward(self, images):
        return super().forward(images) * float(images.sum())


@pytest.fixture
def memory(monkeypatch):
    """Makes the memory of ``Means``, in which nothing but tensors counts."""
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)

    def make(there=None, model=None, **options):
        monkeypatch.setattr(cost, "memory_there_is", lambda *how: there)
        passes = Passes(model or Means(), SPEC, CPU, "none")
        options = {"native": False} | options
        return ForwardMemory(passes, (16, 16), 256, lambda shape: shape[0], **options)

    return make


def check(memory, shape):
    return memory.check(shape, memory.bytes_of(shape))


def test_what_is_taken_already_beside_and_by_libraries_counts(monkeypatch, memory):
    plain = memory().bytes_of((5, 32, 48))
    assert plain == memory().passes.forward_bytes((5, 32, 48)) + 5
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 1000)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 7777)
    assert memory().bytes_of((5, 32, 48)) == plain + 8777
    bounded = memory(bound_bytes=3)
    assert (bounded.bounded, bounded.there_bytes) == (True, 3)
    assert bounded.bytes_of((5, 32, 48)) == plain + 7777 - 5


def test_a_batch_that_does_not_fit_is_refused_and_one_that_may_just_do_is_not(memory):
    needed = memory().bytes_of((9, 32, 48))
    tight = check(memory(int(needed / 1.1)), (9, 32, 48))
    assert str(tight).endswith(" available, which may not be enough")
    assert check(memory(1 << 50), (9, 32, 48)) == Expected(needed, 1 << 50)
    assert check(memory(bound_bytes=1 << 50), (9, 32, 48)).there_bytes is None
    there = int(memory().bytes_of((6, 32, 48)) / SHARE) + 1
    with pytest.raises(DoesNotFit) as refused:
        check(memory(there), (9, 32, 48))
    assert str(refused.value) == (
        "9 images of 32 x 48 pixels would need about 0 MiB of memory, but 0 MiB are available; "
        "--batch-size 4 would fit; --batch-size auto uses the largest batch that fits"
    )


FIXED = Means((128, 192))


WAYS_OUT = [
    ({}, (1, 128, 192), (1, 64, 96), "--img-size 64 96 would fit"),
    (
        {"native": True},
        (1, 128, 192),
        (1, 64, 96),
        "--fit native --max-patches 24 would fit, images of up to about 64 x 96 pixels",
    ),
    (
        {"batches": "--data.batch_patches {patches}"},
        (9, 32, 48),
        (6, 32, 48),
        "--data.batch_patches 24 would fit; --batch-size auto uses the largest batch that fits",
    ),
    ({}, (1, 128, 192), None, "not even an image of one patch would fit; use a smaller "),
    ({"model": FIXED}, (1, 128, 192), None, "the model accepts only this size; use a "),
]


def test_the_way_out_names_a_flag(memory):
    for options, shape, fit, way_out in WAYS_OUT:
        there = int(memory().bytes_of(fit) / SHARE) + 1 if fit else 1
        assert memory(there, **options).way_out(shape).startswith(way_out)


def test_auto_takes_the_largest_batch_up_to_the_images_there_are_and_512(memory):
    size = (32, 48)
    for fit, count, taken in ((27, 99, 24), (99, 21, 16), (9999, 9999, 512), (0, 9, 1)):
        there = int(memory().bytes_of((fit, *size)) / SHARE) + 1 if fit else 1
        assert memory(there).auto(size, count) == taken
    for model, there in ((None, None), (Looks(), 1 << 50)):
        with pytest.raises(ValueError, match="the peak memory of this model is unknown"):
            memory(there, model).auto(size, 9)


def test_images_too_large_to_be_counted_are_told_from_smaller_ones(monkeypatch, memory):
    monkeypatch.setattr(cost, "COUNTED_PIXELS", 1 << 25)
    counted = {size: memory().bytes_of((2, *size)) for size in ((4800, 3600), (480, 36000))}
    monkeypatch.setattr(cost, "COUNTED_PIXELS", 1 << 22)
    told, shapes = memory(2**40), []
    real = told.passes.forward_bytes
    told.passes.forward_bytes = lambda shape: (shapes.append(shape), real(shape))[1]
    for size, count in counted.items():
        assert told.bytes_of((2, *size)) == pytest.approx(count, rel=0.05)
    # A head of a file may say anything.
    assert told.too_much((4_000_000, 4_000_000)) and told.too_much((16, 2**40))
    assert not told.too_much((4800, 3600))
    assert max(math.prod(shape[1:]) for shape in shapes) <= 1 << 22


def on_card(card, model=None):
    beside = lambda shape: pytest.fail("beside a GPU's memory")  # noqa: E731
    passes = Passes(card.runs(model or Means()), SPEC, GPU, "none")
    return ForwardMemory(passes, (16, 16), 256, beside, native=False)


def test_on_a_gpu_the_peak_of_a_pass_counts_against_what_is_free(monkeypatch):
    card = Card(monkeypatch, 1000 + 20 * 10 * 32 * 48)
    with OnProcessor():
        memory = on_card(card)
        assert memory.there_bytes == card.size and memory.base_bytes == 1000
        assert memory.bytes_of((3, 32, 48)) == 1000 + 3 * 10 * 32 * 48
        assert memory.bytes_of((21, 32, 48)) == math.inf
        assert check(memory, (20, 32, 48)) == Expected(card.size, card.size)
        assert memory.auto((32, 48), 99) == 16  # of 17, in 85 %
        with pytest.raises(DoesNotFit) as refused:
            check(memory, (64, 32, 48))
        assert str(refused.value) == (
            "64 images of 32 x 48 pixels would need more than the available memory (0 MiB); "
            "--batch-size 16 would fit; --batch-size auto uses the largest batch that fits"
        )
        assert memory.way_out((1, 256, 384)) == "--img-size 128 192 would fit"


def test_a_pass_that_fails_on_a_gpu_for_another_reason_tells_nothing_and_all_is_put_back(
    monkeypatch,
):
    card = Card(monkeypatch, 1 << 40)
    with OnProcessor():
        memory = on_card(card)
        model = memory.passes.model.train()
        assert memory.bytes_of((2, 32, 48)) is not None and model.training and card.emptied == 1

        def wrong(images):
            model.head.weight.grad = torch.ones(4, 3)
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        monkeypatch.setattr(model, "forward", wrong)
        assert memory.bytes_of((5, 32, 48)) is None
    assert model.training and model.head.weight.grad is None and card.emptied == 2


@pytest.mark.parametrize(
    "each, images, tried",
    [
        (0.001, 8, [1, 8, 8]),  # short: twice
        (0.2, 64, [1, 2, 2]),  # as many images as fit into the time of the trial
        (1.0, 8, [1]),  # too long for more than one image
        (0.001, 1, [1, 1]),
    ],
)
def test_how_many_images_are_timed_depends_on_how_long_they_take(each, images, tried):
    seen = []

    def timed(shape):
        seen.append(shape[0])
        return each * shape[0]

    found = seconds_of(timed, (images, 16, 16))
    assert found == pytest.approx(each * images) and seen == tried


def test_a_forward_is_timed_on_images_as_the_model_takes_them_and_large_ones_by_smaller_ones(
    monkeypatch,
):
    seen, now = [], [0.0]
    monkeypatch.setattr("visionattn.models.cost.time.perf_counter", lambda: now[0])

    class Sees(Means):
        def forward(self, images):
            seen.append((tuple(images.shape), torch.is_inference(images), images.unique().tolist()))
            now[0] += images[:, 0].numel() / 1e6
            return super().forward(images)

    def seconds(shape, model):
        seen.clear()
        passes = Passes(model, SPEC, CPU, "none")
        return passes.forward_seconds(shape, (16, 16))

    assert seconds((2, 16, 32), Sees()) == pytest.approx(512e-6)
    assert seen[-1] == ((2, 3, 16, 32), True, [-2.0])
    assert seconds((1, 4096, 1024), Sees()) == pytest.approx(4096 * 1024 / 1e6)
    assert {shape for shape, *_ in seen} == {(1, 3, 1024, 256)}
    seconds((1, 2048, 1024), Sees((2048, 1024)))
    assert {shape for shape, *_ in seen} == {(1, 3, 2048, 1024)}
    assert seconds((1, 16, 16), torch.nn.Linear(3, 4)) is None
