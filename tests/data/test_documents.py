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

SHAPES = [(40, 40), (103, 512), (300, 97)]


def generator(seed):
    return np.random.default_rng(seed)


def inside(box, shape):
    area = np.zeros(shape, bool)
    area[box.top : box.top + box.height, box.left : box.left + box.width] = True
    return area


@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_a_page_differs_from_the_one_without_its_mark_in_the_box_of_the_mark_alone(height, width):
    for seed in range(12):
        without = draw_page(generator(seed), height, width, None)
        page = draw_page(generator(seed), height, width, seed % 4)
        assert page.image.shape == (height, width, 1) and page.image.dtype == np.uint8
        assert page.label == seed % 4 and without.label is None and page.mark == without.mark
        changed = page.image[:, :, 0] != without.image[:, :, 0]
        assert not changed[~inside(page.mark, (height, width))].any()
        # The ring touches each side of its box.
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        assert rows[0] - page.mark.top <= 2 and columns[0] - page.mark.left <= 2
        assert page.mark.top + page.mark.height - 1 - rows[-1] <= 2
        assert page.mark.left + page.mark.width - 1 - columns[-1] <= 2


def test_the_symbols_are_what_the_names_of_the_classes_say():
    """Read off the page: how dark the mark is at its middle, beside it, above it and aslant."""
    right = 0
    for seed in range(100):
        label = seed % 4
        page = draw_page(generator(seed), 120, 160, label)
        top, left, side, _ = page.mark
        cut = page.image[top : top + side, left : left + side, 0].astype(float)
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


def test_splits_share_no_page_and_the_test_pages_are_those_of_every_seed():
    def pages(split, seed):
        data = DocumentsDataset(split, 8, seed)
        return [data.page(index, 0, 100).image.tobytes() for index in range(8)]

    assert pages("test", 5) == pages("test", 6)
    seeds = (5, 6, drawn_images.TEST_SEED)
    drawn = [
        page for split in ("train", "validation") for seed in seeds for page in pages(split, seed)
    ]
    drawn += pages("test", 5)
    assert len(set(drawn)) == len(drawn) == 7 * 8


def seen_as(fit, size_px):
    return Geometry(fit, (size_px, size_px), None, (16, 16))


@pytest.mark.parametrize(
    ("fit", "size_px"), [("native", 192), ("pad", 64), ("stretch", 64), ("crop", 64)]
)
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
            assert (item.pixels[:, width:] == item.pixels[:, width - 1 : width]).all()


def test_batches_of_native_pages_have_one_size_each_and_as_many_patches_at_most_as_asked():
    sizes = dict(img_size=192, img_size_choices=[64, 192], batch_patches=160, workers=0)
    config = DataConfig(name="documents", args={"train_images": 90, "eval_images": 40}, **sizes)
    splits = build_splits(config, seed=5)
    assert (splits.spec.fit, splits.spec.class_names) == ("native", CLASS_NAMES)
    batches = train_batches(splits, config, batch_size=4, seed=5, patch_px=(16, 16))
    found = list(batches.epoch(1))
    assert len(found) == len(batches) and sum(len(batch.labels) for batch in found) == 90
    shapes = {tuple(batch.images.shape[2:]) for batch in found}
    assert len(shapes) > 8 and min(map(max, shapes)) <= 64 and max(map(max, shapes)) == 192
    for batch in found:
        assert batch.sizes is None
        assert len(batch.labels) * np.prod(batch.images.shape[2:]) <= 160 * 256
    test = eval_batches(splits.test, config, batch_size=4, geometry=seen_as("native", 256))
    assert sum(len(batch.labels) for batch in test) == 40


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
