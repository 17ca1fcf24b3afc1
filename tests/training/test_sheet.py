"""Sheets of pictures: how large each is shown, and what stands below it."""

import numpy as np
import pytest

from visionattn.training.sheet import MOST_PX, Part, Picture, draw_sheet

COLOUR = (250, 3, 120)
"""A colour that nothing else on a sheet has."""


def plain(height, width, captions=("bird", "a size")):
    pixels = np.broadcast_to(np.array(COLOUR, np.uint8), (height, width, 3))
    return Picture(pixels, (height, width), captions)


def drawn(*groups, most_px=MOST_PX):
    """The sheet of some groups of pictures as an array, and where it has ``COLOUR``."""
    parts = [Part(f"part {number}", "a note", group) for number, group in enumerate(groups)]
    sheet = np.asarray(draw_sheet(parts, most_px=most_px))
    return sheet, (sheet == COLOUR).all(2)


def extent(mask):
    """Height and width of the part of a mask that is set."""
    return tuple(np.ptp(np.nonzero(mask.any(axis))[0]) + 1 for axis in (1, 0))


@pytest.mark.parametrize(
    ("size", "shown"), [((24, 18), (96, 72)), ((100, 60), (200, 120)), ((200, 300), (200, 300))]
)
def test_small_pictures_are_enlarged_by_a_whole_number_at_most_four_and_others_are_not(size, shown):
    _, mask = drawn([plain(*size)])
    assert extent(mask) == shown and mask.sum() == shown[0] * shown[1]


def test_each_pixel_of_a_small_picture_is_a_square():
    pixels = np.random.default_rng(0).integers(0, 255, (7, 5, 3), dtype=np.uint8)
    pixels[0, 0] = COLOUR
    sheet, mask = drawn([Picture(pixels, (7, 5), ("x",))])
    top, left = (places.min() for places in np.nonzero(mask))
    shown = sheet[top : top + 28, left : left + 20]
    np.testing.assert_array_equal(shown, pixels.repeat(4, 0).repeat(4, 1))


@pytest.mark.parametrize("size", [(3000, 2000), (700, 2900), (1024, 1024)])
@pytest.mark.parametrize("counts", [(16, 16), (3, 1)])
def test_large_pictures_are_shrunk_as_little_as_the_sheet_allows(size, counts):
    pictures = plain(*size)
    sheet, _ = drawn(*([pictures] * count for count in counts))
    assert max(sheet.shape[:2]) <= MOST_PX
    # One more column or row of pixels for each picture in a row would not fit.
    assert max(sheet.shape[:2]) > MOST_PX - 100


def test_pictures_keep_their_aspect_ratios_side_by_side():
    high, wide = plain(300, 100), Picture(np.full((50, 400, 3), 9, np.uint8), (50, 400), ("x",))
    sheet, mask = drawn([high, wide], most_px=1000)
    assert extent(mask) == (300, 100)
    assert extent((sheet == 9).all(2)) == (50, 400)


def test_what_is_absent_is_hatched():
    pixels = np.zeros((320, 400, 3), np.uint8)
    pixels[:, :240] = COLOUR
    sheet, mask = drawn([Picture(pixels, (320, 240), ("x",))])
    assert extent(mask) == (320, 240)
    top, left = (places.min() for places in np.nonzero(mask))
    absent = sheet[top : top + 320, left + 240 : left + 400]
    colours = {tuple(colour) for colour in absent.reshape(-1, 3)}
    assert len(colours) == 2 and COLOUR not in colours
    lines = (absent != 255).any(2)
    assert 0.05 < lines.mean() < 0.3 and lines[0].any() and lines[:, -1].any()


def test_names_that_are_too_long_are_cut_and_letters_that_cannot_be_printed_do_no_harm():
    long = "a very long name of a class " * 9
    sheet, _ = drawn([plain(40, 40, captions=(f"{long}\udcff\n", "\udcff\n"))])
    assert sheet.shape[1] < 250
    other, _ = drawn([plain(40, 40, captions=(f"{long}x", "\ufffd\ufffd"))])
    np.testing.assert_array_equal(sheet, other)
