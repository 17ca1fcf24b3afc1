"""Documents: pages of any shape whose classes differ in one mark, and where the mark is."""

import zlib
from itertools import product

import numpy as np
import pytest

from visionattn.data import drawn_images
from visionattn.data.data_config import DataConfig
from visionattn.data.documents import (
    CLASS_NAMES,
    DocumentsDataset,
    PagePieces,
    draw_page,
)
from visionattn.data.geometry import Geometry
from visionattn.data.splits import SampleKey, build_splits, eval_batches, train_batches

SHAPES = [(40, 40), (64, 41), (103, 512), (300, 97), (211, 389)]


def generator(seed):
    return np.random.default_rng(seed)


def difference(first, second):
    """Where two pages differ."""
    return first.image[:, :, 0] != second.image[:, :, 0]


def inside(box, shape):
    area = np.zeros(shape, bool)
    area[box.top : box.top + box.height, box.left : box.left + box.width] = True
    return area


def part(page):
    top, left, height, width = page.mark
    return page.image[top : top + height, left : left + width, 0].astype(float)


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_page_differs_from_the_one_without_its_mark_in_the_box_of_the_mark_alone(height, width):
    for seed in range(12):
        without = draw_page(generator(seed), height, width, None)
        page = draw_page(generator(seed), height, width, seed % 4)
        assert page.image.shape == (height, width, 1) and page.image.dtype == np.uint8
        assert page.label == seed % 4 and without.label is None and page.mark == without.mark
        changed = difference(page, without)
        assert not changed[~inside(page.mark, (height, width))].any()
        # The ring touches each side of its box.
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        assert rows[0] - page.mark.top <= 2 and columns[0] - page.mark.left <= 2
        assert page.mark.top + page.mark.height - 1 - rows[-1] <= 2
        assert page.mark.left + page.mark.width - 1 - columns[-1] <= 2


def test_classes_differ_in_the_symbol_of_the_mark_and_in_nothing_else():
    for seed in range(12):
        pages = [draw_page(generator(seed), 150, 221, label) for label in range(4)]
        for first in range(4):
            for second in range(first):
                changed = difference(pages[first], pages[second])
                assert changed.sum() > 15
                # What is inside of the ring, whose inner edge is at four tenths of its side.
                top, left, side, _ = pages[0].mark
                rows, columns = np.nonzero(changed)
                middle = np.array([[top + (side - 1) / 2], [left + (side - 1) / 2]])
                assert np.hypot(*(np.stack([rows, columns]) - middle)).max() < 0.38 * side + 0.5


def test_the_symbols_are_what_the_names_of_the_classes_say():
    """Read off the page: how dark the mark is at its middle, beside it, above it and aslant."""
    right = 0
    for seed in range(100):
        label = seed % 4
        cut = part(draw_page(generator(seed), 120, 160, label))
        side = len(cut)
        middle, reach = (side - 1) / 2, 0.21 * side

        def dark(down, across, cut=cut, middle=middle, reach=reach):
            row, column = round(middle + down * reach), round(middle + across * reach)
            return -cut[row - 1 : row + 2, column - 1 : column + 2].mean()

        found = {
            "bar": [dark(0, 1), dark(0, -1)],
            "pillar": [dark(1, 0), dark(-1, 0)],
            "cross": [dark(*corner) for corner in product((0.7, -0.7), repeat=2)],
        }
        strengths = {name: np.mean(points) for name, points in found.items()}
        # A dot is as dark all around; the others are dark along their strokes alone.
        best, least = max(strengths, key=strengths.get), min(strengths.values())
        contrast = cut.max() + strengths[best]
        read = "dot" if strengths[best] - least < contrast / 3 else best
        right += read == CLASS_NAMES[label]
    assert right >= 95


def test_the_shape_of_a_page_depends_on_the_index_and_its_content_on_the_epoch_too():
    data = DocumentsDataset("train", 50, seed=5)
    shapes = data.shapes(128)
    for index in (3, 17):
        pages = [data.page(index, epoch, 128) for epoch in (0, 1)]
        assert {page.image.shape[:2] for page in pages} == {tuple(shapes[index])}
        assert not np.array_equal(pages[0].image, pages[1].image)
    longer = DocumentsDataset("train", 90, seed=5).shapes(128)
    assert len(longer) == 90 and len(np.unique(longer, axis=0)) > 50


def test_splits_share_no_page_and_the_test_pages_are_those_of_every_seed():
    pages = {
        (split, seed): [DocumentsDataset(split, 8, seed).page(i, 0, 100) for i in range(8)]
        for split in ("train", "validation", "test")
        for seed in (5, 6, drawn_images.TEST_SEED)
    }
    tests = [[page.image.tobytes() for page in pages["test", seed]] for seed in (5, 6)]
    assert tests[0] == tests[1]
    pages = {key: drawn for key, drawn in pages.items() if key[0] != "test"} | {
        "test": pages["test", 5]
    }
    images = [page.image.tobytes() for drawn in pages.values() for page in drawn]
    assert len(set(images)) == len(images) == 7 * 8
    places = [page.mark for drawn in pages.values() for page in drawn]
    assert len(set(places)) == len(places)


def seen_as(fit, size_px):
    return Geometry(fit, (size_px, size_px), None, (16, 16))


@pytest.mark.parametrize("fit", ["native", "pad", "stretch", "crop"])
@pytest.mark.parametrize("size_px", [64, 192])
def test_a_page_is_drawn_for_the_size_asked_and_seen_as_a_file_of_its_size_would_be(fit, size_px):
    data = DocumentsDataset("train", 20, seed=5)
    geometry = seen_as(fit, size_px)
    for index in range(20):
        item = data[SampleKey(index, 3, geometry)]
        page = data.page(index, 3, size_px)
        view = geometry.view(*page.image.shape[:2])
        assert item.label == page.label and item.pixels.shape == (*view.canvas, 1)
        assert tuple(data.canvases(geometry)[index]) == view.canvas
        if fit == "native":
            height, width = page.image.shape[:2]
            np.testing.assert_array_equal(item.pixels[:height, :width], page.image)
            assert (item.pixels[height:] == item.pixels[height - 1]).all()


def test_batches_of_native_pages_have_one_size_each_and_as_many_patches_at_most_as_asked():
    config = DataConfig(
        name="documents",
        img_size=192,
        img_size_choices=[64, 192],
        batch_patches=160,
        args={"train_images": 90, "eval_images": 40},
        workers=0,
    )
    splits = build_splits(config, seed=5)
    assert (splits.spec.fit, splits.spec.class_names) == ("native", CLASS_NAMES)
    batches = train_batches(splits, config, batch_size=4, seed=5, patch_px=(16, 16))
    for epoch in (0, 1):
        found = list(batches.epoch(epoch))
        assert len(found) == len(batches) and sum(len(batch.labels) for batch in found) == 90
        shapes = {tuple(batch.images.shape[2:]) for batch in found}
        assert len(shapes) > 8 and max(max(shape) for shape in shapes) == 192
        assert min(max(shape) for shape in shapes) <= 64
        assert all(batch.sizes is None for batch in found)
        for batch in found:
            assert len(batch.labels) * np.prod(batch.images.shape[2:]) <= 160 * 256
    test = eval_batches(splits.test, config, batch_size=4, geometry=seen_as("native", 256))
    found = list(test)
    assert sum(len(batch.labels) for batch in found) == 40
    assert max(max(batch.images.shape[2:]) for batch in found) == 256


def test_pages_are_those_that_were_drawn_before():
    """Recorded: figures of models rest on these pages, and on the places of their marks."""
    data, found = DocumentsDataset("test", 40, seed=0), []
    for index, px in ((0, 320), (7, 512), (12, 200)):
        page = data.page(index, 0, px, masked=True)
        np.testing.assert_array_equal(data.page(index, 0, px).image, page.image)
        told = page.image.tobytes(), page.mask.tobytes(), repr(page.mark).encode()
        found.append(zlib.crc32(b"".join(told)))
    for index in (0, 5):
        page = DocumentsDataset("train", 40, seed=3).page(index, 2, 256)
        piece = PagePieces("train", 40, 3)[SampleKey(index, 1, Geometry("crop", (32, 24)))]
        found.append(zlib.crc32(page.image.tobytes() + piece.pixels.tobytes()))
    assert found == [3625883580, 3650784675, 1095769232, 864543810, 2812777546]
