"""What features and predictions say before the first image: memory, time, and what would fit."""

import math
import re

import pytest

from tests.helpers.inference_files import write_folder
from visionattn.cli.exit_codes import DoesNotFit
from visionattn.inference import inference_estimate
from visionattn.inference.banded_inference import Banding
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.inference_estimate import memory_of, outlook, sizes_seen
from visionattn.inference.inference_options import InferenceOptions
from visionattn.inference.model_opening import open_model
from visionattn.models import cost
from visionattn.models.cost import SHARE, Passes
from visionattn.models.patches import pooled

MODEL = {"embed_dim": 16, "depth": 1, "num_heads": 2, "relative": "none"}


@pytest.fixture
def alone(monkeypatch):
    """A process takes nothing next to its tensors, and no image is too small for a word."""
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)
    monkeypatch.setattr(inference_estimate, "FEW_PIXELS", 0)


@pytest.fixture
def there(monkeypatch):
    """Sets the memory there is."""
    return lambda count: monkeypatch.setattr(cost, "memory_there_is", lambda *how: count)


def given(tmp_path, sizes, **options):
    folder = tmp_path / "images"
    write_folder(folder, sizes)
    asked = InferenceOptions(images=[str(folder)], model="taylorshift_vit_t", args=MODEL, **options)
    opened = open_model(asked, classifies=False)
    return opened, ReadImages(find_images([str(folder)]), opened.spec, opened.geometry)


def told(opened, images, batch_size=4, start=0, **options):
    """The batch size, and what is said."""
    lines, numbers = [], range(start, len(images))
    banding = Banding(opened, images, pooled)
    return outlook(banding, numbers, batch_size, lines.append, **options), lines


def bytes_of(opened, images, size):
    memory = memory_of(opened, pooled, InferenceOptions(workers=0))
    return memory.bytes_of((images, *size))


def test_a_line_says_sizes_patches_memory_and_the_seconds_of_all_that_is_left(
    tmp_path, monkeypatch, alone
):
    sizes = [(32, 32), (48, 64), (16, 32), (16, 16)]
    opened, images = given(tmp_path, sizes, img_size="native")
    pattern = (
        r"4 images of 16 x 16 to 48 x 64 px, 1 to 12 patches; peak memory: [\d.]+ "
        r"[MG]iB estimated, [\d.]+ [MG]iB available; "
        r"estimated time: [\d.]+ m?s per image, [\d.]+ m?s in total"
    )
    assert re.fullmatch(pattern, told(opened, images)[1][0])
    tried = []

    def forward_seconds(passes, shape, patch_px):
        tried.append(shape)
        return math.prod(shape[1:]) / 1000  # a millisecond per pixel

    monkeypatch.setattr(Passes, "forward_seconds", forward_seconds)
    for start in (0, 1):
        left, count = sum(map(math.prod, sizes[start:])) / 1000, 4 - start
        line = told(opened, images, start=start)[1][0]
        assert line.endswith(f" {left / count:.1f} s per image, {left:.1f} s in total")
        assert tried.pop() == (count, 48, 64)
    monkeypatch.setattr(Passes, "forward_seconds", lambda *given: None)
    assert told(opened, images)[1][0].endswith(" available")
    monkeypatch.setattr(inference_estimate, "FEW_PIXELS", 10_000)  # short runs have no line
    assert told(opened, images) == (4, [])


def test_a_batch_that_does_not_fit_is_refused_with_the_size_that_does(tmp_path, alone, there):
    opened, images = given(tmp_path, [(8, 8)] * 12, img_size=64)
    there(int(0.8 * bytes_of(opened, 12, (64, 64))))
    with pytest.raises(DoesNotFit, match=r"12 images of 64 x 64 pixels would need") as refused:
        told(opened, images, batch_size=500)
    fit = int(re.search(r"--batch-size (\d+) would fit", str(refused.value))[1])
    assert 1 <= fit < 12 and bytes_of(opened, fit, (64, 64)) <= cost.memory_there_is(None)
    assert told(opened, images, batch_size=fit)[0] == fit


def test_auto_takes_the_most_of_the_largest_images_that_fit(tmp_path, alone, there):
    opened, images = given(tmp_path, [(32, 32), (64, 96), (48, 32)] * 4, fit="native")
    there(int(bytes_of(opened, 7, (64, 96)) / SHARE) + 1)
    found, lines = told(opened, images, batch_size="auto")
    assert found == 4  # of 7, a power of two
    assert lines[0] == "batch_size auto: 4 images fit (64 x 96 pixels)"
    assert told(opened, images, "auto", trial=False)[0] == 4
    there(1 << 50)
    assert told(opened, images, batch_size="auto")[0] == 8  # of 12 images
    there(None)
    with pytest.raises(ValueError, match="pass a number"):
        told(opened, images, batch_size="auto")


def test_sizes_are_sampled_from_a_few_files_and_damaged_files_are_skipped(tmp_path, monkeypatch):
    opened, images = given(tmp_path, [(16 * n, 32) for n in range(1, 10)], fit="native")
    (tmp_path / "images" / "2.png").write_bytes(b"damaged")
    monkeypatch.setattr(inference_estimate, "HEADS", 3)
    for numbers, rows in ((range(1, 9), [32, 80, 128]), (range(2, 9), [96, 144])):
        assert sizes_seen(opened, images, numbers)[:, 0].tolist() == rows
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"damaged")
    assert told(opened, images, batch_size="auto") == (1, [])
