"""Augmentation by presets and by files of albumentations."""

import math

import albumentations as A
import numpy as np
import pytest

from visionattn.data.augment import Augment
from visionattn.data.data_config import PRESETS, DataConfig
from visionattn.data.splits import build_splits
from visionattn.models.segmentation import IGNORED


def picture(height=37, width=53, bands=3, dtype=np.uint8):
    pixels = np.random.default_rng(0).random((height, width, bands))
    return (pixels * 255).astype(dtype) if dtype == np.uint8 else pixels.astype(dtype)


def several(augment, image, count=8):
    return [augment(image, (3, 12, 1, index)) for index in range(count)]


def saved(tmp_path, *steps, name="mine.yaml"):
    A.save(A.Compose(steps), str(tmp_path / name), "yaml")
    return str(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "none"])
def test_every_preset_acts_keeps_size_and_range_and_depends_on_nothing_but_the_key(name):
    image = picture(dtype=np.float32)
    before = image.copy()
    made = several(Augment(name), image)
    assert all((each.shape, each.dtype) == (image.shape, image.dtype) for each in made)
    assert all(each.min() >= 0 and each.max() <= 1 for each in made)
    # A rectangle has four symmetries, and crop_flip two; everything else is drawn of many values.
    assert len({each.tobytes() for each in made}) > (1 if name == "crop_flip" else 3)
    again = Augment(name)
    for index in (5, 2, 7):
        np.testing.assert_array_equal(again(image, (3, 12, 1, index)), made[index])
    np.testing.assert_array_equal(image, before)


def test_presets_take_images_of_other_bands_or_say_that_they_do_not():
    for name, bands in (("documents", 1), ("three", 5), ("rand", 1), ("aerial", 5)):
        image = picture(bands=bands)
        assert all(each.shape == image.shape for each in several(Augment(name, bands=bands), image))
    for name, bands, line in (
        ("three", 1, "augment three needs color images, got one band; use another preset"),
        ("rand", 4, "augment rand needs images of 1 or 3 bands, got 4"),
    ):
        with pytest.raises(ValueError, match=f"^{line}$"):
            Augment(name, bands=bands)


def test_crop_flip_crops_and_mirrors_half_of_the_images_and_changes_no_color():
    augment, image = Augment("crop_flip", smallest_crop=0.4), picture()
    made = several(augment, image, 400)
    mirrored = [np.array_equal(each, image[:, ::-1]) for each in made]
    kept = [np.array_equal(each, image) for each in made]
    assert sum(mirrored) + sum(kept) == 400 and 160 < sum(mirrored) < 240
    shares = np.prod(boxes(augment, 500, 500, (32, 32))[:, 2:], axis=1) / 500**2
    assert 0.39 < shares.min() < 0.41 and 0.95 < shares.max() <= 1


def test_aerial_draws_each_symmetry_of_a_square_equally_often():
    """A corner lighter than the three others tells the symmetry, whatever the color."""
    image = np.zeros((8, 8, 3), np.uint8)
    image[:2, :3] = 200
    symmetries = [
        np.rot90(side, turns)[..., 0] > 60 for side in (image, image[:, ::-1]) for turns in range(4)
    ]
    found = [
        next(i for i, each in enumerate(symmetries) if np.array_equal(each, made[..., 0] > 60))
        for made in several(Augment("aerial"), image, 800)
    ]
    assert np.bincount(found, minlength=8).min() > 65


def test_documents_moves_no_mark_by_more_than_it_says_and_never_flips():
    """A mark near a corner moves furthest. In a flipped image it would be elsewhere."""
    height, width = 283, 400
    augment = Augment("documents", bands=1)
    moved = []
    for row, column in ((24, 24), (24, width - 25), (height - 25, 24), (height // 2, width // 2)):
        image, mask = np.zeros((height, width, 1), np.uint8), np.zeros((height, width), np.uint8)
        mask[row - 2 : row + 3, column - 2 : column + 3] = 1
        for index in range(60):
            _, made = augment.both(image, mask, (3, 12, 1, index))
            moved.append(math.dist(np.argwhere(made).mean(0), (row, column)))
    assert 0.02 * max(height, width) < max(moved) <= 0.045 * max(height, width)


def boxes(augment, height, width, canvas, count=2000):
    return np.array([augment.box(height, width, canvas, (3, index)) for index in range(count)])


def test_a_first_random_crop_of_a_file_is_taken_before_resizing(tmp_path):
    crop = A.RandomResizedCrop((9, 9), scale=(0.2, 0.5), ratio=(0.5, 2.0))
    augment = Augment(saved(tmp_path, crop, A.HorizontalFlip(p=1)), smallest_crop=0.9)
    height, width, canvas = 3000, 3600, (100, 120)
    top, left, rows, columns = boxes(augment, height, width, canvas).T
    shares = rows * columns / (height * width)
    assert 0.2 <= shares.min() < 0.21 and 0.49 < shares.max() <= 0.501
    ratios = np.log2((columns / rows) / (canvas[1] / canvas[0]))
    assert -1.01 < ratios.min() < -0.95 and 0.95 < ratios.max() < 1.01
    assert top.min() >= 0 and (top + rows).max() <= height and (top + rows).max() > 0.99 * height
    assert left.min() >= 0 and (left + columns).max() <= width
    np.testing.assert_array_equal(augment(picture(), (1,)), picture()[:, ::-1])
    # Of a strip, an area above a half cannot have the shape of a square.
    square = A.RandomResizedCrop((9, 9), scale=(0.9, 0.9), ratio=(1.0, 1.0))
    augment = Augment(saved(tmp_path, square))
    assert set(map(tuple, boxes(augment, 50, 501, (32, 32), 5))) == {(0, 225, 50, 50)}


@pytest.mark.parametrize("name", ["rand", "documents", "aerial", "file"])
def test_masks_move_as_their_images_do(tmp_path, name):
    """The class of a pixel is whether it is light; what stays light or dark tells it again."""
    if name == "file":
        steps = [A.Affine(rotate=(-40, 40), fill_mask=IGNORED, p=1), A.RandomGamma(p=0.5)]
        name = saved(tmp_path, A.OneOf([A.Sequential(steps, p=1), A.VerticalFlip(p=0.2)], p=1))
    mask = np.zeros((64, 64), np.uint8)
    mask[8:40, 12:30], mask[50:60, 30:60] = 1, 1
    image = np.where(mask, 250, 5).astype(np.uint8)[..., None].repeat(3, 2)
    agree, moved = [], 0
    for number in range(12):
        pixels, label = Augment(name).both(image, mask, (0, number))
        np.testing.assert_array_equal(pixels, Augment(name)(image, (0, number)))
        same = ((pixels[..., 0] > 127) == (label == 1))[label != IGNORED].mean()
        agree.append(max(same, 1 - same) if name == "rand" else same)
        moved += not np.array_equal(label, mask)
    assert moved >= 6 and np.median(agree) > 0.95
    assert min(agree) > (0.5 if name == "rand" else 0.9)


WRONG = {
    "[1, 2": "is not a YAML file",
    "a: 1": "expected an albumentations pipeline for 3 bands",
    "transform: {__class_fullname__: os.system, p: 1.0}": "expected an albumentations pipeline",
}


def test_other_files_and_pipelines_for_other_bands_or_sizes_are_refused_in_one_line(tmp_path):
    for text, said in WRONG.items():
        (tmp_path / "wrong.yaml").write_text(text)
        with pytest.raises(ValueError, match=said) as caught:
            Augment(str(tmp_path / "wrong.yaml"))
        assert "wrong.yaml" in str(caught.value) and "\n" not in str(caught.value)
    path = saved(tmp_path, A.CLAHE(p=1))
    with pytest.raises(ValueError, match="pipeline for 5 bands"):
        Augment(path, bands=5)
    augment = Augment(saved(tmp_path, A.CenterCrop(20, 20, p=1)))
    with pytest.raises(ValueError, match=r"expected images of \[37, 53, 3\] .* got \[20, 20, 3\]"):
        augment(picture(), (1,))


def test_a_file_augments_only_training_images(tmp_path):
    path = saved(tmp_path, A.InvertImg(p=1))
    splits = build_splits(DataConfig(name="digits", img_size=16, augment=path), 3)
    assert splits.train.augment is not None and splits.validation.augment is None
    with pytest.raises(
        FileNotFoundError, match="^expected a file or one of .* for data.augment, got other.yaml"
    ):
        build_splits(DataConfig(name="digits", augment="other.yaml"), 3)
