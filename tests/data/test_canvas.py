"""Canvases: what lies where, at every size of the canvas."""

import zlib

import numpy as np
import pytest

from tests.helpers.geometry import square
from visionattn.data.data_config import DataConfig
from visionattn.data.embedded import (
    CanvasArgs,
    CanvasDataset,
    digit_splits,
)
from visionattn.data.splits import SampleKey, build_splits

SIZES = [(96, 96), (128, 128), (104, 176), (384, 384)]


def overlap(first, second):
    rows = min(first.top + first.height, second.top + second.height) - max(first.top, second.top)
    columns = min(first.left + first.width, second.left + second.width) - max(
        first.left, second.left
    )
    return max(0, rows) * max(0, columns)


@pytest.fixture(scope="module")
def held_out():
    return CanvasDataset(digit_splits(0.1, 5)["test"], "test", 400, seed=5)


@pytest.mark.parametrize(("height", "width"), [(48, 48), (56, 64), (104, 176)])
def test_the_whole_digit_lies_inside_the_canvas_and_nothing_overlaps_it(height, width):
    data = CanvasDataset(digit_splits(0.1, 5)["train"], "train", 100, seed=5, vary=height != 56)
    for index in range(60):
        canvas = data.canvas(index, 0, height, width)
        assert canvas.image.shape == (height, width, 1) and canvas.image.dtype == np.uint8
        assert canvas.digit.height == canvas.digit.width and 16 <= canvas.digit.height <= 40
        for box in (canvas.digit, *canvas.distractors):
            assert box.top >= 0 and box.top + box.height <= height
            assert box.left >= 0 and box.left + box.width <= width
        assert all(overlap(canvas.digit, box) == 0 for box in canvas.distractors)


def test_a_digit_keeps_its_class_and_its_pixels_at_every_size_of_the_canvas(held_out):
    for index in range(50):
        canvases = [held_out.canvas(index, 0, *size) for size in SIZES]
        assert len({canvas.label for canvas in canvases}) == 1
        cuts = []
        for canvas in canvases:
            top, left, height, width = canvas.digit
            cuts.append(canvas.image[top : top + height, left : left + width, 0].astype(float))
        # the noise, uniform over 0.15 * 255 grey levels, is all that differs
        for cut in cuts[1:]:
            assert 11 < (cut - cuts[0]).std() < 19


def test_training_draws_new_canvases_each_epoch_and_evaluation_goes_through_its_digits_in_turn(
    held_out,
):
    train = CanvasDataset(digit_splits(0.1, 5)["train"], "train", 50, seed=5)
    assert not np.array_equal(
        train[SampleKey(3, 0, square(96))][0], train[SampleKey(3, 1, square(96))][0]
    )
    labels = [held_out[SampleKey(index, 0, square(96))][1] for index in range(400)]
    test_labels = held_out.digits.labels
    assert labels == [*test_labels, *test_labels[: 400 - len(test_labels)]]


def test_the_splits_of_canvases_are_drawn_from_disjoint_digits():
    args = {"train_images": 11, "eval_images": 7}
    splits = build_splits(DataConfig(name="canvas", img_size=96, args=args), seed=5)
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part) for part in parts] == [11, 7, 7]
    digits = [{image.tobytes() for image in part.digits.images} for part in parts]
    assert not digits[0] & digits[1] and not digits[0] & digits[2] and not digits[1] & digits[2]


def test_canvases_are_those_that_were_drawn_before():
    """Recorded: figures of models rest on these canvases, and on the places of their parts."""
    two = CanvasArgs(distractors=9, digit_px=(12, 30), whole_digits=2)
    found = []
    for split, task, vary in (("test", CanvasArgs(), False), ("train", two, True)):
        data = CanvasDataset(digit_splits(0.1, 0)[split], split, 400, 0, task=task, vary=vary)
        for index in (0, 7):
            canvas = data.canvas(index, 0, 128, 96, masked=True)
            told = canvas.image.tobytes(), canvas.mask.tobytes(), repr(canvas[1:4]).encode()
            found.append(zlib.crc32(b"".join(told)))
    assert found == [2290779051, 2303929292, 1584080078, 2158011508]
