"""Augmentation by name and by part."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from visionattn.data.augment import Augment
from visionattn.data.data_config import AugmentConfig, DataConfig
from visionattn.data.presets import PRESETS, whole_parts
from visionattn.data.splits import build_splits

ROOT = Path(__file__).parents[2]

SURE = ("flip_horizontal", "flip_vertical", "quarter_turns", "grey", "solarise", "blur", "shadow")
ACTING = dict.fromkeys([*SURE, "erase"], 1.0)
ACTING |= {"turn": 30.0, "shift": 0.2, "scale": [0.7, 0.8], "colour": 0.5, "noise": 0.3}


def picture(height=37, width=53, bands=3, dtype=np.uint8):
    pixels = np.random.default_rng(0).random((height, width, bands))
    return (pixels * 255).astype(dtype) if dtype == np.uint8 else pixels.astype(dtype)


def several(augment, image, count=8):
    return [augment(image, (3, 12, 1, index)) for index in range(count)]


def one_part(name, value, bands=3):
    return Augment("none", AugmentConfig(**{name: value}), bands=bands)


@pytest.mark.parametrize(("bands", "dtype"), [(1, np.uint8), (3, np.uint8), (5, np.float32)])
def test_every_part_acts_and_keeps_size_type_and_range(bands, dtype):
    image = picture(bands=bands, dtype=dtype)
    for name, value in ACTING.items():
        if (name, bands) == ("grey", 1):
            continue
        made = several(one_part(name, value, bands), image)
        assert any(not np.array_equal(image, each) for each in made), name
        for each in made:
            assert (each.shape, each.dtype) == (image.shape, image.dtype), name
            assert each.min() >= 0 and each.max() <= (255 if dtype == np.uint8 else 1), name


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
def test_every_preset_acts_and_depends_on_the_key_alone(name):
    image = picture(dtype=np.float32)
    before = image.copy()
    made = several(Augment(name), image)
    assert all((each.shape, each.dtype) == (image.shape, image.dtype) for each in made)
    # Four symmetries of a rectangle are few; everything else is drawn of many values.
    assert len({each.tobytes() for each in made}) > 3
    again = Augment(name)
    for index in (5, 2, 7):
        np.testing.assert_array_equal(again(image, (3, 12, 1, index)), made[index])
    np.testing.assert_array_equal(image, before)


def test_nothing_is_changed_where_no_part_acts():
    augment = Augment("none")
    np.testing.assert_array_equal(augment(picture(), (1,)), picture())
    assert not augment.crops and augment.box(37, 53, (16, 16), (1,)) == (0, 0, 37, 53)


def test_flips_and_turns_are_exact():
    image = picture()
    np.testing.assert_array_equal(one_part("flip_horizontal", 1.0)(image, (1,)), image[:, ::-1])
    np.testing.assert_array_equal(one_part("flip_vertical", 1.0)(image, (1,)), image[::-1])
    np.testing.assert_array_equal(one_part("quarter_turns", 1.0)(image, (1,)), image[::-1, ::-1])


def test_aerial_draws_each_symmetry_of_a_square_equally_often_and_moves_nothing_else():
    image = picture(8, 8)
    symmetries = [
        np.rot90(side, turns).tobytes() for side in (image, image[:, ::-1]) for turns in range(4)
    ]
    augment = Augment("aerial", AugmentConfig(colour=0.0))
    found = [symmetries.index(each.tobytes()) for each in several(augment, image, 800)]
    assert np.bincount(found, minlength=8).min() > 65
    assert not augment.crops


def marked(height, width, row, column):
    image = np.zeros((height, width, 1), np.uint8)
    image[row - 2 : row + 3, column - 2 : column + 3] = 255
    return image


def test_documents_moves_no_mark_by_more_than_it_says_and_never_flips():
    """A mark near a corner moves furthest. In a flipped image it would be elsewhere."""
    height, width = 283, 400
    still = AugmentConfig(colour=0.0, noise=0.0, shadow=0.0)
    augment = Augment("documents", still, bands=1)
    moved = []
    for row, column in ((24, 24), (24, width - 25), (height - 25, 24), (height // 2, width // 2)):
        for image in several(augment, marked(height, width, row, column), 60):
            rows, columns = np.nonzero(image[..., 0])
            weights = image[rows, columns, 0].astype(float)
            place = np.average(rows, weights=weights), np.average(columns, weights=weights)
            moved.append(math.dist(place, (row, column)))
    assert 0.02 * max(height, width) < max(moved) <= 0.045 * max(height, width)


def boxes(augment, height, width, canvas, count=2000):
    return np.array([augment.box(height, width, canvas, (3, index)) for index in range(count)])


def test_a_crop_has_uniform_shares_of_the_area_around_the_aspect_ratio_of_the_canvas():
    augment = Augment(
        "none", AugmentConfig(crop_scale=[0.2, 0.5], crop_ratio=[0.5, 2.0]), smallest_crop=0.9
    )
    height, width, canvas = 3000, 3600, (100, 120)
    top, left, rows, columns = boxes(augment, height, width, canvas).T
    shares = rows * columns / (height * width)
    assert 0.2 <= shares.min() < 0.21 and 0.49 < shares.max() <= 0.501
    assert abs(shares.mean() - 0.35) < 0.01
    ratios = np.log2((columns / rows) / (canvas[1] / canvas[0]))
    assert -1.01 < ratios.min() < -0.95 and 0.95 < ratios.max() < 1.01 and abs(ratios.mean()) < 0.05
    assert top.min() >= 0 and (top + rows).max() <= height and (top + rows).max() > 0.99 * height
    assert left.min() >= 0 and (left + columns).max() <= width


def test_a_crop_that_never_fits_is_the_largest_centred_part():
    """Of a strip, an area above a half cannot have the shape of a square."""
    augment = Augment("none", AugmentConfig(crop_scale=[0.9, 0.9], crop_ratio=[1.0, 1.0]))
    assert set(map(tuple, boxes(augment, 50, 501, (32, 32), 5))) == {(0, 225, 50, 50)}
    assert set(map(tuple, boxes(augment, 501, 50, (32, 64), 5))) == {(238, 0, 25, 50)}


def test_at_most_one_of_grey_solarise_and_blur_acts_as_often_as_is_said():
    """On a plain bright red, grey makes the channels equal and solarise turns red dark."""
    red = np.full((8, 8, 3), (230, 20, 20), np.uint8)
    augment = Augment("none", AugmentConfig(grey=0.2, solarise=0.5))
    kinds = []
    for r, g, b in (each[4, 4].astype(int) for each in several(augment, red, 500)):
        kinds.append("grey" if r == g == b else "red" if r > 90 else "solarised")
    assert 70 < kinds.count("grey") < 130 and 215 < kinds.count("solarised") < 285
    assert 115 < kinds.count("red") < 185


def test_given_parts_replace_those_of_the_preset():
    parts = whole_parts("three", AugmentConfig(flip_horizontal=0.0, turn=5.0), 3, 0.4)
    assert (parts.flip_horizontal, parts.turn, parts.colour) == (0.0, 5.0, 0.3)
    assert parts.crop_scale == [0.4, 1.0]
    own = whole_parts("three", AugmentConfig(crop_scale=[0.7, 0.9]), 3, 0.4)
    assert own.crop_scale == [0.7, 0.9]
    assert whole_parts("light", AugmentConfig(), 3, 0.4) == PRESETS["light"]


def test_the_table_of_the_documentation_is_that_of_the_presets():
    lines = (ROOT / "docs/training.md").read_text().split("| part | unit |")[1].splitlines()
    names = [name.strip(" `") for name in lines[0].strip(" |").split("|")]
    assert names == [name for name in PRESETS if name != "none"]
    for field, line in zip(fields(AugmentConfig), lines[2:], strict=False):
        part, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        assert part == f"`{field.name}`"
        for name, cell in zip(names, cells, strict=True):
            preset = PRESETS[name]
            value = getattr(preset, field.name)
            # How crops and blurs are drawn matters where there are any.
            needs = {"crop_ratio": "crop_scale", "blur_sigma": "blur"}.get(field.name, field.name)
            acts = getattr(preset, needs) != getattr(PRESETS["none"], needs)
            numbers = value if isinstance(value, list) else [value]
            assert cell == (" ".join(f"{number:.3g}" for number in numbers) if acts else "")


def test_the_embedded_data_take_parts_where_they_read_images():
    digits = DataConfig(name="digits", img_size=16, aug=AugmentConfig(turn=40.0))
    train = build_splits(digits, 3).train
    assert train.augment.parts.turn == 40.0
    with pytest.raises(ValueError, match="^data.aug.turn must be in"):
        build_splits(DataConfig(name="digits", aug=AugmentConfig(turn=400.0)), 3)
