"""What forwards over many images take: memory, seconds, and what would fit; on a GPU too."""

import math
import re

import numpy as np
import pytest
import torch

from tests.helpers.stand_in_gpu import GPU, Card, OnProcessor
from visionattn.cli.ends import DoesNotFit
from visionattn.data import outlook
from visionattn.data.geometry import Geometry
from visionattn.data.outlook import (
    BATCH_SECONDS,
    FEW_PIXELS,
    TRIAL_SECONDS,
    ForwardMemory,
    Forwards,
    describe,
    further,
    images_of,
    scaled,
    trial_seconds,
)
from visionattn.models import cost
from visionattn.models.cost import SHARE, Expected
from visionattn.models.weights import DataSpec

CPU, MIB = torch.device("cpu"), 2**20
SPEC = DataSpec(3, 4, (), (0.5,) * 3, (0.25,) * 3, None, 32)


class Means(torch.nn.Module):
    """A model of any size whose memory grows with images and pixels."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 4)

    def forward(self, images):
        return self.head(images.mean((2, 3)))


@pytest.fixture
def memory(monkeypatch):
    """Makes the memory of ``Means``, in which nothing but tensors counts."""
    monkeypatch.setattr(outlook, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)

    def make(geometry=None, there=None, model=None):
        monkeypatch.setattr(outlook, "memory_there_is", lambda device: there)
        geometry = geometry or Geometry("stretch", (32, 48), None, (16, 16))
        work = Forwards(model or Means(), SPEC, CPU, "none")
        return ForwardMemory(work, geometry, lambda shape: shape[0])

    return make


def test_what_is_taken_already_and_what_is_beside_count(monkeypatch, memory):
    plain = memory().bytes_of((5, 32, 48))
    assert plain == memory().passes.forward_bytes((5, 32, 48)) + 5
    monkeypatch.setattr(outlook, "taken_bytes", lambda device: 1000)
    work = Forwards(Means(), SPEC, CPU, "none")
    geometry = Geometry("stretch", (32, 48))
    assert ForwardMemory(work, geometry, lambda shape: 5).bytes_of((5, 32, 48)) == plain + 1000
    assert ForwardMemory(work, geometry, lambda shape: 0).base_bytes == 1000


def test_a_batch_that_does_not_fit_is_refused_with_the_flag_for_one_that_does(memory):
    there = int(memory().bytes_of((6, 32, 48)) / SHARE) + 1
    with pytest.raises(DoesNotFit) as refused:
        memory(there=there).check((9, 32, 48))
    assert re.fullmatch(
        r"9 images of 32 x 48 pixels would take about 0 MiB of memory, and there are 0 MiB; "
        "--batch-size 4 would fit; --batch-size auto takes the most that fits",
        str(refused.value),
    )
    native = Geometry("native", None, 100, (16, 16))
    with pytest.raises(DoesNotFit, match="; --data.batch_patches 24 would fit; --batch-size auto"):
        memory(native, there).check((9, 32, 48), "--data.batch_patches {patches}")
    # What may just not do is tried, and said.
    tight = memory(there=int(memory().bytes_of((9, 32, 48)) / 1.1)).check((9, 32, 48))
    assert str(tight).endswith(" there, which may not do")
    assert memory(there=1 << 50).check((9, 32, 48)).needed_bytes == memory().bytes_of((9, 32, 48))


def test_where_not_one_image_fits_a_size_or_patches_are_named(memory):
    there = int(memory().bytes_of((1, 64, 96)) / SHARE) + 1
    for geometry, part in (
        (Geometry("stretch", (128, 192), None, (16, 16)), "; --img-size 64 96 would fit"),
        (
            Geometry("native", None, 999, (16, 16)),
            "; --fit native --max-patches 24 would fit, images of up to about 64 x 96 pixels",
        ),
    ):
        with pytest.raises(DoesNotFit) as refused:
            memory(geometry, there).check((1, 128, 192))
        assert str(refused.value).endswith(part)
    with pytest.raises(DoesNotFit, match="; --img-size 64 would fit"):
        memory(Geometry("crop", (128, 128), None, (16, 16)), there).check((1, 128, 128))
    with pytest.raises(DoesNotFit, match="not even an image of one patch would fit"):
        memory(there=1).check((1, 128, 192))
    fixed = Means()
    fixed.patch_embed = torch.nn.Module()
    fixed.patch_embed.img_size, fixed.patch_embed.strict_img_size = (32, 48), True
    with pytest.raises(DoesNotFit, match="the model takes this size alone"):
        memory(there=1, model=fixed).check((1, 32, 48))


def test_auto_is_a_power_of_two_or_of_eights_no_more_than_there_are_images_nor_512(memory):
    size = (32, 48)
    for fit, count, taken in ((7, 99, 4), (27, 99, 24), (99, 21, 16), (9999, 9999, 512)):
        there = int(memory().bytes_of((fit, *size)) / SHARE) + 1
        found, line = memory(there=there).auto(size, count)
        assert 0.8 * taken <= found <= taken, (fit, count)
        assert line == f"batch_size auto: {found} images fit, of 32 x 48 pixels"
    assert memory(there=1).auto(size, 9) == (
        1,
        "batch_size auto: 1 image fits, of 32 x 48 pixels",
    )
    for model, there in ((None, None), (Looks(), 1 << 50)):
        with pytest.raises(ValueError, match="nobody can tell the memory of this model here; name"):
            memory(there=there, model=model).auto(size, 9)


class Looks(Means):
    """A model that cannot be counted."""

    def forward(self, images):
        return super().forward(images) * float(images.sum())


def on_card(card):
    work = Forwards(card.runs(Means()), SPEC, GPU, "none")
    beside = lambda shape: pytest.fail("beside a GPU's memory")  # noqa: E731
    return ForwardMemory(work, Geometry("stretch", (32, 48), None, (16, 16)), beside)


def test_on_a_gpu_the_peak_of_a_pass_counts_against_what_is_free(monkeypatch):
    card = Card(monkeypatch, 1000 + 20 * 10 * 32 * 48)
    with OnProcessor():
        memory = on_card(card)
        assert memory.there_bytes == card.size and memory.base_bytes == 1000
        assert memory.bytes_of((3, 32, 48)) == 1000 + 3 * 10 * 32 * 48
        assert memory.bytes_of((21, 32, 48)) == math.inf
        expected = memory.check((20, 32, 48))
        assert expected == Expected(card.size, card.size)
        assert memory.auto((32, 48), 99)[0] == 16  # of 17, in 85 %


def test_what_is_too_much_for_a_gpu_is_refused_in_the_same_words(monkeypatch):
    card = Card(monkeypatch, 1000 + 20 * 10 * 32 * 48)
    with OnProcessor(), pytest.raises(DoesNotFit) as refused:
        on_card(card).check((64, 32, 48))
    assert str(refused.value) == (
        "64 images of 32 x 48 pixels would take more than the 0 MiB of memory that there are; "
        "--batch-size 16 would fit; --batch-size auto takes the most that fits"
    )
    with OnProcessor(), pytest.raises(DoesNotFit, match="; --img-size 128 192 would fit"):
        on_card(card).check((1, 256, 384))


def test_a_pass_that_fails_on_a_gpu_for_another_reason_tells_nothing_and_all_is_put_back(
    monkeypatch,
):
    card = Card(monkeypatch, 1 << 40)
    with OnProcessor():
        memory = on_card(card)
        model = memory.work.model.train()
        assert memory.bytes_of((2, 32, 48)) is not None and model.training and card.emptied == 1

        def wrong(images):
            model.head.weight.grad = torch.ones(4, 3)
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        monkeypatch.setattr(model, "forward", wrong)
        assert memory.bytes_of((5, 32, 48)) is None
    assert model.training and model.head.weight.grad is None and card.emptied == 2


class Clock:
    """A forward takes as long as ``seconds`` says of its shape."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.tried, self.seconds = 0.0, [], seconds
        monkeypatch.setattr(outlook, "one_pass", self.one_pass)

    def one_pass(self, work, shape, clock):
        self.tried.append(shape)
        return self.seconds(*shape)

    def trial(self, size, batch=1, model=None):
        work = Forwards(model or Means(), SPEC, CPU, "none")
        return trial_seconds(work, size, batch, (16, 16), lambda: self.now)


def test_small_images_are_tried_several_at_once_as_they_will_be_computed(monkeypatch):
    clock = Clock(monkeypatch, lambda images, *size: 0.01 + 0.002 * images)
    assert clock.trial((32, 32), 8) == pytest.approx((0.01 + 8 * 0.002) / 8)
    assert clock.tried == [(1, 32, 32), (1, 32, 32), (8, 32, 32)]
    clock.tried.clear()
    assert clock.trial((32, 32), 999) == pytest.approx(0.002, rel=0.15)
    assert clock.tried[-1][0] == int(BATCH_SECONDS / 0.012)
    clock = Clock(monkeypatch, lambda *shape: 1.5)
    assert clock.trial((32, 32), 8) == 1.5 and clock.tried == [(1, 32, 32)]
    clock = Clock(monkeypatch, lambda *shape: 0.4)
    assert clock.trial((32, 32), 8) == 0.4 and clock.tried == [(1, 32, 32)] * 2


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_a_large_image_is_told_by_smaller_ones(monkeypatch, power):
    clock = Clock(monkeypatch, lambda images, *size: (math.prod(size) / 1e6) ** power)
    size = (12000, 12000)
    assert clock.trial(size, 8) == pytest.approx((math.prod(size) / 1e6) ** power, rel=0.02)
    largest = max(rows * columns for _, rows, columns in clock.tried)
    assert largest < math.prod(size) and (largest / 1e6) ** power <= TRIAL_SECONDS + 0.1
    # What is quick is tried twice, as libraries start in a first pass, and large ones once.
    assert clock.tried.count(clock.tried[0]) == 2 and clock.tried.count(clock.tried[-1]) == 1
    assert {images for images, _, _ in clock.tried} == {1}


def test_images_too_large_to_be_counted_are_told_from_smaller_ones(monkeypatch, memory):
    outlooks = memory(Geometry("native", None, None, (16, 16)), there=2**40)
    monkeypatch.setattr(outlook, "COUNTED_PIXELS", 1 << 25)
    counted = {size: outlooks.bytes_of((2, *size)) for size in ((4800, 3600), (480, 36000))}
    monkeypatch.setattr(outlook, "COUNTED_PIXELS", 1 << 22)
    monkeypatch.setattr(outlook, "ABOUT_PIXELS", 1 << 19)
    told = memory(Geometry("native", None, None, (16, 16)), there=2**40)
    real, shapes = told.passes.forward_bytes, []

    def forward_bytes(shape, compute):
        shapes.append(shape)
        return real(shape, compute)

    monkeypatch.setattr(told.passes, "forward_bytes", forward_bytes)
    for size, count in counted.items():
        assert told.bytes_of((2, *size)) == pytest.approx(count, rel=0.05)
    # A head may say anything.
    assert told.too_much((4_000_000, 4_000_000)) and told.too_much((16, 2**40))
    assert not told.too_much((4800, 3600))
    assert max(math.prod(shape[1:]) for shape in shapes) <= 1 << 22


def test_a_large_image_that_is_quick_is_tried_whole(monkeypatch):
    size = (2048, 1024)
    assert math.prod(size) > FEW_PIXELS
    clock = Clock(monkeypatch, lambda *shape: 0.01)
    assert clock.trial(size) == 0.01 and clock.tried[-1] == (1, *size)
    fixed = Means()
    fixed.patch_embed = torch.nn.Module()
    fixed.patch_embed.img_size, fixed.patch_embed.strict_img_size = size, True
    clock.tried.clear()
    clock.trial(size, model=fixed)
    assert set(clock.tried) == {(1, *size)}


def test_a_model_that_does_not_take_such_images_has_no_seconds(monkeypatch):
    def refuse(*shape):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    assert Clock(monkeypatch, refuse).trial((32, 32)) is None


def test_a_pass_is_timed_on_images_as_the_model_takes_them(monkeypatch):
    seen = []

    class Sees(Means):
        def forward(self, images):
            seen.append((tuple(images.shape), torch.is_inference(images), images.unique().tolist()))
            return super().forward(images)

    ticks = iter((3.0, 3.25))
    work = Forwards(Sees(), SPEC, CPU, "none")
    assert outlook.one_pass(work, (2, 16, 32), lambda: next(ticks)) == 0.25
    assert seen == [((2, 3, 16, 32), True, [-2.0])]


def test_seconds_grow_at_least_evenly_and_at_most_with_the_square():
    assert further([(100, 2.0)], 400) == 8
    assert further([(100, 2.0), (200, 3.0)], 400) == 6
    assert further([(100, 1.0), (200, 9.0)], 400) == 36
    assert scaled((640, 320), 1 / 4, (16, 16)) == (320, 160)
    assert scaled((16, 16), 0.1, (16, 16)) == (16, 16)


def test_a_line_says_images_sizes_patches_memory_and_seconds():
    seen = np.array([[64, 32], [32, 32], [64, 64]])
    told = Expected(3 * MIB, 9 * MIB)
    assert describe(seen, 10, 256, told, 50.0) == (
        "10 images of 32 x 32 to 64 x 64 px, 4 to 16 patches; memory: 3 MiB expected, 9 MiB there; "
        "computing takes 5.0 s per image, 50 s in all"
    )
    assert describe(seen[:1], 10, 256, told, 60.0, sizes=3) == (
        "10 images at 3 sizes of 64 x 32 px, 8 patches; memory: 3 MiB expected, 9 MiB there; "
        "computing takes 2.0 s per image, 1 min in all"
    )
    assert describe(seen[:1], 1, 256, Expected(None, 9), None) == (
        "1 images of 64 x 32 px, 8 patches; memory: not known beforehand for this model"
    )
    assert images_of(seen[:1], 7, 64) == "7 images of 64 x 32 px, 32 patches"
