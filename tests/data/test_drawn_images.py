"""Documents, canvases, sequences to copy and their masks: what lies where, and what decides it."""

import zlib
from itertools import product

import numpy as np
import pytest
import torch

from tests.helpers.geometry import square
from visionattn.data import synthetic_images
from visionattn.data.data_config import DataConfig
from visionattn.data.digits_and_canvas import (
    CanvasArgs,
    CanvasDataset,
    digit_splits,
)
from visionattn.data.documents import (
    DocumentsDataset,
    PagePieces,
    draw_page,
)
from visionattn.data.geometry import Geometry
from visionattn.data.splits import SampleKey, build_splits, train_batches
from visionattn.data.synthetic_images import (
    CopyingDataset,
    draw_sequence,
    patch_labels,
)


def key_of(index, epoch, height, width):
    return SampleKey(index, epoch, Geometry("crop", (height, width)))


def generator(seed):
    return np.random.default_rng(seed)


def test_a_page_with_and_without_its_mark_differ_only_in_the_box_of_the_mark():
    for seed, (height, width) in product(range(8), [(40, 40), (103, 512), (300, 97)]):
        without = draw_page(generator(seed), height, width, None)
        page = draw_page(generator(seed), height, width, seed % 4)
        assert page.image.shape == (height, width, 1) and page.image.dtype == np.uint8
        assert page.label == seed % 4 and without.label is None and page.box == without.box
        changed = page.image[:, :, 0] != without.image[:, :, 0]
        # The ring touches each side of its box.
        for places, first, size in (
            (np.flatnonzero(changed.any(1)), page.box.top, page.box.height),
            (np.flatnonzero(changed.any(0)), page.box.left, page.box.width),
        ):
            assert first <= places[0] <= first + 2
            assert first + size - 3 <= places[-1] <= first + size - 1


@pytest.mark.parametrize(("fit", "size_px"), [("native", 192), ("pad", 64)])
def test_a_page_is_drawn_for_the_size_asked_and_seen_as_a_file_of_its_size_would_be(fit, size_px):
    data = DocumentsDataset("train", 20, seed=5)
    geometry = Geometry(fit, (size_px, size_px), None, (16, 16))
    for index in range(20):
        item = data[SampleKey(index, 3, geometry)]
        page = data.draw(SampleKey(index, 3, geometry))
        view = geometry.view(*page.image.shape[:2])
        assert item.label == page.label and item.pixels.shape == (*view.canvas, 1)
        assert tuple(data.canvases(geometry)[index]) == view.canvas
        if fit == "native":
            height, width = page.image.shape[:2]
            np.testing.assert_array_equal(item.pixels[:height, :width], page.image)


def test_pages_are_those_that_were_drawn_before():
    """Recorded: figures of models rest on these pages, and on the places of their marks."""
    data, found = DocumentsDataset("test", 40, seed=0), []
    for index, px in ((0, 320), (7, 512), (12, 200)):
        page = data.draw(key_of(index, 0, px, px), masked=True)
        np.testing.assert_array_equal(data.draw(key_of(index, 0, px, px)).image, page.image)
        told = page.image.tobytes(), page.mask.tobytes(), repr(page.box).encode()
        found.append(zlib.crc32(b"".join(told)))
    for index in (0, 5):
        page = DocumentsDataset("train", 40, seed=3).draw(key_of(index, 2, 256, 256))
        piece = PagePieces("train", 40, 3)[SampleKey(index, 1, Geometry("crop", (32, 24)))]
        found.append(zlib.crc32(page.image.tobytes() + piece.pixels.tobytes()))
    assert found == [3625883580, 3650784675, 1095769232, 864543810, 2812777546]


@pytest.fixture(scope="module")
def held_out():
    return CanvasDataset(digit_splits(0.1, 5)["test"], "test", 400, seed=5)


@pytest.mark.parametrize(("height", "width"), [(48, 48), (56, 64), (104, 176)])
def test_the_whole_digit_lies_inside_the_canvas_and_nothing_overlaps_it(height, width):
    data = CanvasDataset(digit_splits(0.1, 5)["train"], "train", 100, seed=5, vary=height != 56)
    for index in range(60):
        canvas = data.draw(key_of(index, 0, height, width), masked=True)
        assert canvas.image.shape == (height, width, 1) and canvas.image.dtype == np.uint8
        top, left, rows, columns = canvas.box
        assert rows == columns and 16 <= rows <= 40
        assert 0 <= top <= height - rows and 0 <= left <= width - columns
        inside = canvas.mask[top : top + rows, left : left + columns]
        assert set(np.unique(inside)) == {0, 2 + canvas.label}
        assert (inside > 1).sum() == (canvas.mask > 1).sum()


def test_training_draws_new_canvases_each_epoch_and_evaluation_goes_through_its_digits_in_turn(
    held_out,
):
    train = CanvasDataset(digit_splits(0.1, 5)["train"], "train", 50, seed=5)
    assert not np.array_equal(
        train[SampleKey(3, 0, square(96))][0], train[SampleKey(3, 1, square(96))][0]
    )
    known = held_out.digits.labels
    for px in (96, 128):
        labels = [held_out[SampleKey(index, 0, square(px))][1] for index in range(400)]
        assert labels == [*known, *known[: 400 - len(known)]]


def test_canvases_are_those_that_were_drawn_before():
    """Recorded: figures of models rest on these canvases, and on the places of their digits."""
    two = CanvasArgs(distractors=9, digit_px=(12, 30), whole_digits=2)
    found = []
    for split, task, vary in (("test", CanvasArgs(), False), ("train", two, True)):
        data = CanvasDataset(digit_splits(0.1, 0)[split], split, 400, 0, task=task, vary=vary)
        for index in (0, 7):
            canvas = data.draw(key_of(index, 0, 128, 96), masked=True)
            told = canvas.image.tobytes(), canvas.mask.tobytes(), repr(canvas[1:3]).encode()
            found.append(zlib.crc32(b"".join(told)))
    assert found == [3203333941, 1893888273, 2458579917, 37610207]


TASK = {"name": "copy", "task": "generate", "workers": 0}


def words(values):
    """Read ``0 w 0 w 0 ...`` back from the separators: w, w again, and what follows."""
    before, first, second, *rest = bytes(values.tolist()).split(b"\0")
    return before, first, second, b"".join(rest)


@pytest.mark.parametrize("length", [4, 31])
def test_a_sequence_says_its_word_twice_and_the_second_one_counts(length):
    sizes = set()
    for seed in range(600):
        values, counted = draw_sequence(np.random.default_rng(seed), length)
        assert values.shape == counted.shape == (length,)
        assert values.dtype == counted.dtype == np.uint8 and values.max() <= 10
        before, first, second, rest = words(np.append(values, 0))
        assert before == rest == b"" and first == second != b""
        size = len(first)
        sizes.add(size)
        # The second word lies behind the first one and two separators.
        assert np.flatnonzero(counted).tolist() == list(range(size + 2, 2 * size + 2))
    # From a quarter of the sequence on, as long as both words and separators find room.
    assert sizes == {size for size in range(length // 4, length) if 2 * size + 2 <= length}


@pytest.mark.parametrize(
    ("kind", "size"), [(DocumentsDataset, (64, 64)), (CopyingDataset, (1, 41))]
)
def test_seed_split_epoch_and_index_decide_what_is_drawn_and_the_test_is_the_same_for_all(
    kind, size
):
    def told(split="train", index=0, epoch=0, seed=3):
        found = kind(split, 100, seed)[SampleKey(index, epoch, Geometry("crop", size))]
        return found.pixels.tobytes(), np.asarray(found.label).tobytes()

    changed = [{"index": 1}, {"epoch": 1}, {"seed": 4}, {"seed": synthetic_images.TEST_SEED}]
    changed += [{"split": "validation"}, {"split": "validation", "seed": 4}, {"split": "test"}]
    assert len({told(), *(told(**how) for how in changed)}) == 1 + len(changed)
    assert told() == told() and told(split="test", seed=4) == told(split="test")


def test_batches_have_one_row_of_levels_and_the_mask_of_those_that_count():
    config = DataConfig(**TASK, args={"train_images": 5, "eval_images": 3})
    splits = build_splits(config, seed=1)
    spec = splits.spec
    assert (spec.task, spec.in_chans, spec.num_classes, spec.img_size) == (
        "generate", 1, 0, (1, 128))  # fmt: skip
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [5, 3, 3]
    batches = train_batches(splits, config, batch_size=4, seed=1)
    found = list(batches.epoch(0))
    assert [tuple(batch.images.shape) for batch in found] == [(4, 1, 1, 128), (1, 1, 1, 128)]
    for batch in found:
        assert batch.images.dtype == batch.labels.dtype == torch.uint8 and batch.sizes is None
        assert batch.labels.shape == (len(batch.images), 1, 128)
        assert (spec.prepare(batch.images) == batch.images).all()


def test_a_patch_is_what_most_of_its_ink_is_where_a_sixteenth_is_inked():
    mask = np.zeros((8, 18), np.uint8)  # two rows of three patches of 4 x 6 pixels
    mask[0, :2] = 4  # 2 of 24 pixels
    mask[3, 6] = 4  # 1 of 24
    mask[0, 12:18], mask[1, 12:16] = 1, 3
    mask[4:8, 0:6] = 2
    mask[4, 6:8], mask[5, 6:8] = 3, 1
    labels = patch_labels(mask, (2, 3), 5)
    assert labels.tolist() == [[4, 0, 1], [2, 1, 0]] and labels.dtype == np.int64
    with pytest.raises(
        ValueError, match="expected whole patches in a grid of .*, got an image of 8 x 18 pixels"
    ):
        patch_labels(mask, (2, 4), 5)
