"""Canvases: what lies where, at every size of the canvas, and that the answer is there to be
read.
"""

import sys
import tracemalloc
import zlib

import numpy as np
import pytest

from tests.helpers.geometry import square
from visionattn.data.config import DataConfig
from visionattn.data.embedded import (
    CanvasArgs,
    CanvasDataset,
    Digits,
    digit_splits,
    draw_canvas,
)
from visionattn.data.splits import SampleKey, build_splits, eval_batches

SIZES = [(96, 96), (128, 128), (104, 176), (384, 384)]


def sides(box):
    return box.height, box.width


def overlap(first, second):
    rows = min(first.top + first.height, second.top + second.height) - max(first.top, second.top)
    columns = min(first.left + first.width, second.left + second.width) - max(
        first.left, second.left
    )
    return max(0, rows) * max(0, columns)


@pytest.fixture(scope="module")
def held_out():
    return CanvasDataset(digit_splits(0.1, 5)["test"], "test", 400, seed=5)


@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize(("height", "width"), [(48, 48), (56, 64), *SIZES])
def test_the_whole_digit_lies_inside_the_canvas_and_nothing_overlaps_it(height, width, vary):
    data = CanvasDataset(digit_splits(0.1, 5)["train"], "train", 100, seed=5, vary=vary)
    for index in range(60):
        canvas = data.canvas(index, 0, height, width)
        assert canvas.image.shape == (height, width, 1) and canvas.image.dtype == np.uint8
        assert canvas.digit.height == canvas.digit.width and 16 <= canvas.digit.height <= 40
        for box in (canvas.digit, *canvas.distractors):
            assert box.top >= 0 and box.top + box.height <= height
            assert box.left >= 0 and box.left + box.width <= width
        assert all(overlap(canvas.digit, box) == 0 for box in canvas.distractors)


@pytest.mark.parametrize(
    ("size", "count"),
    [((96, 96), 2), ((128, 128), 4), ((104, 176), 4), ((256, 256), 16), ((384, 384), 36)],
)
def test_distractors_are_four_per_128_pixels_squared(held_out, size, count):
    assert {len(held_out.canvas(index, 0, *size).distractors) for index in range(40)} == {count}


def test_a_digit_keeps_its_class_and_its_pixels_at_every_size_of_the_canvas(held_out):
    for index in range(50):
        canvases = [held_out.canvas(index, 0, *size) for size in SIZES]
        assert len({canvas.label for canvas in canvases}) == 1
        assert len({sides(canvas.digit) for canvas in canvases}) == 1
        cuts = []
        for canvas in canvases:
            box = canvas.digit
            cuts.append(
                canvas.image[
                    box.top : box.top + box.height, box.left : box.left + box.width, 0
                ].astype(float)
            )
        # the noise, uniform over 0.15 * 255 grey levels, is all that differs; it has a standard
        # deviation of 11
        for cut in cuts[1:]:
            assert 11 < (cut - cuts[0]).std() < 19


def test_sizes_of_whole_digits_are_drawn_evenly_from_16_to_40_pixels(held_out):
    heights = [held_out.canvas(index, 0, 96, 96).digit.height for index in range(400)]
    assert min(heights) == 16 and max(heights) == 40
    assert abs(np.mean(heights) - 28) < 1.2


def test_fragments_are_parts_from_the_same_range_of_sizes(held_out):
    boxes = [box for index in range(100) for box in held_out.canvas(index, 0, 256, 256).distractors]
    longer = np.array([max(sides(box)) for box in boxes])
    assert longer.max() == 40 and 16 in longer
    # a whole digit is square; about half of one is not
    ratios = np.array([min(sides(box)) / max(sides(box)) for box in boxes])
    assert ratios.max() < 0.75 and 0.35 < ratios.mean() < 0.6


def test_places_are_drawn_from_the_whole_canvas(held_out):
    boxes = [held_out.canvas(index, 0, 104, 176).digit for index in range(400)]
    down = np.array([box.top / (104 - box.height) for box in boxes])
    right = np.array([box.left / (176 - box.width) for box in boxes])
    for place in (down, right):
        assert place.min() < 0.02 and place.max() > 0.98 and abs(place.mean() - 0.5) < 0.06


def test_the_label_is_that_of_the_digit_that_is_whole():
    """Digits of one grey level each: the brightness of a box tells which digit is in it."""
    images = np.zeros((3, 8, 8), np.uint8)
    images[:, 1:7, 1:7] = np.array([90, 170, 255])[:, None, None]
    digits = Digits(images, np.array([4, 7, 9]))
    for index in range(3):
        canvas = draw_canvas(digits, index, 96, 160, np.random.default_rng(index), vary=False)
        assert canvas.label == digits.labels[index]
        box = canvas.digit
        middle = canvas.image[box.top + box.height // 2 - 2 :][:4, box.left + box.width // 2 - 2 :][
            :, :4
        ].mean()
        background = np.median(canvas.image)
        assert 0.5 * images[index, 4, 4] - 8 < middle - background < 0.7 * images[index, 4, 4] + 8


def test_distractors_are_never_parts_of_the_whole_digit_itself():
    images = np.zeros((2, 8, 8), np.uint8)
    images[0, 1:7, 1:7] = 255
    images[1, 1:7, 1:7] = 80
    digits = Digits(images, np.array([0, 1]))
    for seed in range(20):
        canvas = draw_canvas(digits, 0, 128, 128, np.random.default_rng(seed), vary=False)
        for box in canvas.distractors:
            part = canvas.image[box.top : box.top + box.height, box.left : box.left + box.width]
            assert part.max() < np.median(canvas.image) + 0.5 * 255 - 25


def test_a_digit_stands_out_of_the_noise(held_out):
    for index in range(100):
        canvas = held_out.canvas(index, 0, 128, 128)
        empty = np.ones((128, 128), bool)
        for box in (canvas.digit, *canvas.distractors):
            empty[box.top : box.top + box.height, box.left : box.left + box.width] = False
        noise = canvas.image[empty]
        box = canvas.digit
        digit = canvas.image[box.top : box.top + box.height, box.left : box.left + box.width]
        assert np.percentile(digit, 95) > noise.mean() + 5 * noise.std()


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


def test_training_draws_every_digit_about_equally_often():
    digits = Digits(digit_splits(0.1, 5)["train"].images[:40], np.arange(40))
    train = CanvasDataset(digits, "train", 2000, seed=5)
    counts = np.bincount(
        [train[SampleKey(index, 0, square(48))][1] for index in range(2000)], minlength=40
    )
    assert counts.min() > 25 and counts.max() < 80


def test_the_canvases_of_validation_and_test_are_drawn_from_streams_of_their_own():
    digits = digit_splits(0.1, 5)["train"]
    images = [
        CanvasDataset(digits, name, 50, seed=5)[SampleKey(3, 0, square(96))][0]
        for name in ("validation", "test")
    ]
    assert not np.array_equal(*images)
    splits = build_splits(DataConfig(name="canvas", img_size=96), seed=5)
    assert [part.split for part in (splits.train, splits.validation, splits.test)] == [
        "train",
        "validation",
        "test",
    ]


def test_the_splits_of_canvases_are_drawn_from_disjoint_digits():
    splits = build_splits(
        DataConfig(name="canvas", img_size=96, args={"train_images": 11, "eval_images": 7}), seed=5
    )
    parts = (splits.train, splits.validation, splits.test)
    assert [len(part) for part in parts] == [11, 7, 7]
    digits = [{image.tobytes() for image in part.digits.images} for part in parts]
    assert not digits[0] & digits[1] and not digits[0] & digits[2] and not digits[1] & digits[2]


def test_the_specification_of_the_canvases_normalises_them():
    config = DataConfig(
        name="canvas", img_size=128, augment="light", workers=0, args={"train_images": 200}
    )
    splits = build_splits(config, seed=5)
    images, *_ = next(
        iter(eval_batches(splits.train, config, batch_size=200, geometry=square(128)))
    )
    prepared = splits.spec.prepare(images)
    assert abs(prepared.mean()) < 0.1 and abs(prepared.std() - 1) < 0.1


def test_small_canvases_are_refused_in_one_line(held_out):
    line = "canvas of 40 pixels is too small for its digits; wanted 48 or more"
    config = DataConfig(name="canvas", img_size=48)
    with pytest.raises(ValueError, match=line):
        build_splits(DataConfig(name="canvas", img_size=40), seed=5)
    with pytest.raises(ValueError, match=line):
        build_splits(DataConfig(name="canvas", img_size=64, img_size_choices=[64, 40]), seed=5)
    with pytest.raises(ValueError, match=line):
        eval_batches(build_splits(config, seed=5).test, config, batch_size=8, geometry=square(40))
    with pytest.raises(
        ValueError, match="canvas of 96 x 47 pixels is too small for digits of up to 40"
    ):
        held_out.canvas(0, 0, 96, 47)


@pytest.mark.parametrize(("px", "most_calls"), [(128, 300), (256, 900)])
def test_a_canvas_takes_few_calls_and_three_bytes_a_pixel(px, most_calls):
    """What makes it 0.2 to 0.4 ms of an idle core at 128 pixels, counted: nothing is done pixel by
    pixel.
    """
    train = CanvasDataset(digit_splits(0.1, 5)["train"], "train", 1000, seed=5, vary=True)
    counts = []

    def count(frame, event, argument):
        counts[-1] += event in ("call", "c_call")

    for index in range(40):
        counts.append(0)
        sys.setprofile(count)
        train[SampleKey(index, 0, square(px))]
        sys.setprofile(None)
    assert np.median(counts) < most_calls
    tracemalloc.start()
    for index in range(40):
        train[SampleKey(index, 0, square(px))]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 3 * px * px


@pytest.mark.parametrize("count", [0, 4, 16])
def test_a_number_of_distractors_holds_on_canvases_of_any_size(count):
    data = CanvasDataset(
        digit_splits(0.1, 5)["test"], "test", 40, 5, task=CanvasArgs(distractors=count)
    )
    for size in (128, 256, 384):
        found = {len(data.canvas(index, 0, size, size).distractors) for index in range(20)}
        assert found == {count}
    # On a small canvas the digit stays free, and fragments overlap or are left out.
    for index in range(20):
        canvas = data.canvas(index, 0, 48, 48)
        assert len(canvas.distractors) <= count
        assert all(overlap(canvas.digit, box) == 0 for box in canvas.distractors)


def test_smaller_digits_are_of_the_sides_asked_for_on_canvases_that_may_be_smaller():
    task = CanvasArgs(digit_px=(12, 20))
    assert (task.smallest_px, CanvasArgs().smallest_px) == (24, 48)
    data = CanvasDataset(digit_splits(0.1, 5)["test"], "test", 200, 5, task=task)
    drawn = [data.canvas(index, 0, 128, 128) for index in range(200)]
    assert {canvas.digit.height for canvas in drawn} == set(range(12, 21))
    assert max(max(sides(box)) for canvas in drawn for box in canvas.distractors) == 20
    assert data.canvas(0, 0, 24, 24).image.shape == (24, 24, 1)


def test_of_two_whole_digits_the_larger_counts():
    """Digits of one grey level each: the brightness of a box tells which digit is in it."""
    images = np.zeros((3, 8, 8), np.uint8)
    images[:, 1:7, 1:7] = np.array([90, 90, 255])[:, None, None]
    digits, task = Digits(images, np.array([4, 4, 9])), CanvasArgs(distractors=0, whole_digits=2)
    seen = set()
    for seed in range(60):
        canvas = draw_canvas(
            digits, 2, 128, 128, np.random.default_rng(seed), vary=False, task=task
        )
        [second] = canvas.distractors
        assert canvas.label == 9 and second.height == second.width
        assert 16 <= second.height <= 0.8 * canvas.digit.height <= 32
        assert overlap(second, canvas.digit) == 0
        middle = canvas.image[second.top + second.height // 2, second.left + second.width // 2, 0]
        assert middle < 56 + 38 + 0.7 * 90 + 10
        seen.add(canvas.digit.height)
    assert min(seen) < 24 and max(seen) > 36


def test_a_task_as_it_was_draws_the_canvases_that_it_drew():
    """Recorded before there were other tasks: figures of models rest on these canvases."""
    data = CanvasDataset(digit_splits(0.1, 0)["test"], "test", 400, seed=0)
    found = [zlib.crc32(data.canvas(index, 0, 128, 96).image.tobytes()) for index in (0, 7)]
    assert found == [1282170199, 3176111324]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (dict(distractors=-1), "data.args.distractors must be at least 0, got -1"),
        (dict(whole_digits=3), "data.args.whole_digits must be 1 or 2, got 3"),
        (dict(train_images=0), "data.args.train_images must be above 0, got 0"),
        (dict(digit_px=[16]), "data.args.digit_px must have 2 values, got 1"),
        (dict(fragments=4), "data.args has an unknown key fragments"),
        (dict(digit_px=[20, 12]), "8 pixels or more, got"),
        (dict(digit_px=[4, 12]), "8 pixels or more, got"),
        (dict(digit_px=[20, 24], whole_digits=2), "1.25 times as large or more"),
        (dict(digit_px=[16, 200]), "canvas of 128 pixels is too small for its digits; wanted 240"),
        (dict(name="digits", distractors=4), "data.args is for canvas, documents, copy alone"),
        (dict(name="documents", whole_digits=2), "data.args has an unknown key whole_digits"),
    ],
)
def test_tasks_out_of_range_are_refused_in_one_line(values, line):
    with pytest.raises(ValueError, match=line) as error:
        name = values.pop("name", "canvas")
        build_splits(DataConfig(name=name, args=values), seed=5)
    assert "\n" not in str(error.value)


def test_the_splits_have_the_task_that_the_options_name():
    args = {"distractors": 3, "digit_px": [12, 30], "whole_digits": 2}
    config = DataConfig(name="canvas", args=args)
    splits = build_splits(config, seed=5)
    for part in (splits.train, splits.validation, splits.test):
        assert part.task == CanvasArgs(distractors=3, digit_px=(12, 30), whole_digits=2)
