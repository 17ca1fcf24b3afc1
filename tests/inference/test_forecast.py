"""What features and predictions say before the first image: memory, time, and what would fit."""

import math
import re

import numpy as np
import pytest
from PIL import Image

from visionattn.cli.ends import DoesNotFit
from visionattn.inference import forecast
from visionattn.inference.forecast import Memory, batch_for, further, outlook, scaled
from visionattn.inference.listing import find_images
from visionattn.inference.opening import open_model
from visionattn.inference.options import InferenceOptions
from visionattn.inference.reading import ReadImages
from visionattn.models.filled import pooled
from visionattn.training import passes

MODEL = {"embed_dim": 32, "depth": 1, "num_heads": 2}


@pytest.fixture
def alone(monkeypatch):
    """What a process takes beside its tensors, which is far more than small models, is nothing."""
    monkeypatch.setattr(forecast, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(passes, "LIBRARIES_BYTES", 0)


def given(tmp_path, sizes, **options):
    folder = tmp_path / "images"
    folder.mkdir()
    for number, (rows, columns) in enumerate(sizes):
        pixels = np.full((rows, columns, 3), number, np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03d}.png")
    asked = InferenceOptions(images=[str(folder)], model="taylorshift_vit_t", args=MODEL, **options)
    opened = open_model(asked, classifies=False)
    return opened, ReadImages(find_images([str(folder)]), opened.spec, opened.geometry)


def told(opened, images, **options):
    asked = {"batch_size": 4, "workers": 0, "amp": "none"} | options
    return outlook(opened, images, pooled, **asked)


def test_a_line_says_sizes_patches_memory_and_seconds(tmp_path):
    opened, images = given(tmp_path, [(640, 960), (800, 320), (1600, 640)], img_size="native")
    found = told(opened, images, batch_size=1)
    pattern = (
        r"3 images of 800 x 320 to 1600 x 640 px, 1000 to 4000 patches; memory: [\d.]+ [MG]iB "
        r"expected, [\d.]+ [MG]iB there; [\d.]+ s per image, [\d.]+ s in all"
    )
    assert found.batch_size == 1 and re.fullmatch(pattern, found.lines[0])


def test_what_is_done_at_once_has_no_line_and_no_trial(tmp_path, monkeypatch):
    opened, images = given(tmp_path, [(64, 48)] * 3, img_size=32)
    monkeypatch.setattr(forecast, "one_pass", lambda *given: pytest.fail("a trial"))
    assert told(opened, images).lines == ()


def test_a_batch_that_does_not_fit_is_refused_with_the_one_that_does(tmp_path, monkeypatch, alone):
    opened, images = given(tmp_path, [(512, 512)] * 12, img_size=512)
    memory = Memory(opened, pooled, "none", (512, 512), 0, 0)
    there = int(0.8 * memory.bytes_of(12))
    monkeypatch.setattr(forecast, "memory_there_is", lambda device: there)
    with pytest.raises(DoesNotFit, match=r"12 images of 512 x 512 pixels would take") as refused:
        told(opened, images, batch_size=12)
    fit = int(re.search(r"--batch-size (\d+) would fit", str(refused.value))[1])
    assert 1 <= fit < 12 and memory.bytes_of(fit) <= there
    assert told(opened, images, batch_size=fit).batch_size == fit


def test_auto_takes_the_most_that_fit_and_no_more_than_there_are(tmp_path, monkeypatch, alone):
    opened, images = given(tmp_path, [(512, 512)] * 12, img_size=512)
    memory = Memory(opened, pooled, "none", (512, 512), 0, 0)
    there = int(memory.bytes_of(7) / forecast.SHARE) + 1
    monkeypatch.setattr(forecast, "memory_there_is", lambda device: there)
    found = told(opened, images, batch_size="auto")
    assert found.batch_size == 4  # of 7, a power of two
    assert found.lines[0] == "batch_size auto: 4 images fit, of 512 x 512 pixels"
    assert batch_for(opened, images, pooled, "auto", workers=0, amp="none") == 4
    assert batch_for(opened, images, pooled, 3, workers=0, amp="none") == 3
    monkeypatch.setattr(forecast, "memory_there_is", lambda device: 1 << 50)
    assert told(opened, images, batch_size="auto").batch_size == 8
    monkeypatch.setattr(forecast, "memory_there_is", lambda device: None)
    with pytest.raises(ValueError, match="name a number"):
        told(opened, images, batch_size="auto")


def test_where_one_image_does_not_fit_the_patches_that_do_are_named(tmp_path, monkeypatch, alone):
    opened, images = given(tmp_path, [(1024, 2048)], img_size="native")
    memory = Memory(opened, pooled, "none", (1024, 2048), 0, 0)
    there = int(memory.bytes_of(1) / 2)
    monkeypatch.setattr(forecast, "memory_there_is", lambda device: there)
    with pytest.raises(DoesNotFit) as refused:
        told(opened, images, batch_size=1)
    patches = int(re.search(r"--max-patches (\d+) would fit", str(refused.value))[1])
    limited = tmp_path / "limited"
    limited.mkdir()
    opened, images = given(limited, [(1024, 2048)], fit="native", max_patches=patches)
    assert told(opened, images, batch_size=1).batch_size == 1
    assert patches > 1000


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_a_large_image_is_told_by_smaller_ones(tmp_path, monkeypatch, power):
    opened, _ = given(tmp_path, [(16, 16)], img_size="native")
    tried = []

    def one_pass(opened, compute, size, amp, clock):
        tried.append(math.prod(size))
        return 1.0 * (math.prod(size) / 1e6) ** power

    monkeypatch.setattr(forecast, "one_pass", one_pass)
    size = (12000, 12000)
    found = forecast.trial_seconds(opened, pooled, size, "none", lambda: 0.0)
    assert found == pytest.approx((math.prod(size) / 1e6) ** power, rel=0.02)
    assert max(tried) < math.prod(size) and 1.0 * (max(tried) / 1e6) ** power <= 10.1


def test_seconds_grow_at_least_evenly_and_at_most_with_the_square():
    assert further([(100, 2.0)], 400) == 8
    assert further([(100, 2.0), (200, 3.0)], 400) == 6
    assert further([(100, 1.0), (200, 9.0)], 400) == 36
    assert scaled((640, 320), 1 / 4, (16, 16)) == (320, 160) and scaled(
        (16, 16), 0.1, (16, 16)
    ) == (
        16,
        16,
    )


def test_a_wrong_batch_size_is_refused():
    from visionattn.inference.options import check

    with pytest.raises(ValueError, match="batch_size must be at least 1, got most"):
        check(InferenceOptions(model="taylorshift_vit_t", batch_size="most"))
    check(InferenceOptions(model="taylorshift_vit_t", batch_size="auto"))
