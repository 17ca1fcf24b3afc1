"""Documents: pages of any shape whose classes differ in one mark, and where the mark is."""

import zlib
from itertools import product

import numpy as np
import pytest

from visionattn.data import drawn_images
from visionattn.data.documents import (
    DocumentsDataset,
    PagePieces,
    draw_page,
)
from visionattn.data.geometry import Geometry
from visionattn.data.splits import SampleKey

SHAPES = [(40, 40), (103, 512), (300, 97)]


def generator(seed):
    return np.random.default_rng(seed)


def test_a_page_differs_from_the_one_without_its_mark_in_the_box_of_the_mark_alone():
    for seed, (height, width) in product(range(8), SHAPES):
        without = draw_page(generator(seed), height, width, None)
        page = draw_page(generator(seed), height, width, seed % 4)
        assert page.image.shape == (height, width, 1) and page.image.dtype == np.uint8
        assert page.label == seed % 4 and without.label is None and page.mark == without.mark
        changed = page.image[:, :, 0] != without.image[:, :, 0]
        # The ring touches each side of its box.
        for places, first, size in (
            (np.flatnonzero(changed.any(1)), page.mark.top, page.mark.height),
            (np.flatnonzero(changed.any(0)), page.mark.left, page.mark.width),
        ):
            assert first <= places[0] <= first + 2
            assert first + size - 3 <= places[-1] <= first + size - 1


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


@pytest.mark.parametrize(
    ("fit", "size_px"), [("native", 192), ("pad", 64), ("stretch", 64), ("crop", 64)]
)
def test_a_page_is_drawn_for_the_size_asked_and_seen_as_a_file_of_its_size_would_be(fit, size_px):
    data = DocumentsDataset("train", 20, seed=5)
    geometry = Geometry(fit, (size_px, size_px), None, (16, 16))
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
