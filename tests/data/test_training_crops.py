"""Training crops: windows of images at the scale of evaluation, and their batches."""

from collections import Counter
from dataclasses import replace

import albumentations as A
import numpy as np
import pytest

from tests.helpers.image_files import config_of, write_classes
from visionattn.data.augment import Augment
from visionattn.data.batches import SampleKey
from visionattn.data.geometry import Geometry
from visionattn.data.images import see_array
from visionattn.data.splits import build_splits, train_batches
from visionattn.data.training_crops import foreground_pixel
from visionattn.models.segmentation import IGNORED

CROP = Geometry("native", None, None, (8, 8), (24, 16))


def positions(height: int, width: int) -> np.ndarray:
    """An image whose first two bands are the row and the column."""
    rows, columns = np.indices((height, width), np.uint8)
    return np.stack([rows, columns, rows], 2)


def seen(height, width, geometry, mask=None, **key):
    """Crop an image of positions; return the item, and its first row and column."""
    sample = SampleKey(3, 0, geometry)._replace(**key)
    item = see_array(positions(height, width), 0 if mask is None else mask, sample, 7)
    return item, item.pixels[0, 0, :2].tolist()


@pytest.mark.parametrize(
    ("size", "present"), [((93, 71), (24, 16)), ((24, 9), (24, 16)), ((17, 71), (24, 16))]
)
def test_a_crop_has_the_pixels_of_the_image(size, present):
    corners = set()
    for draw in range(60):
        item, (top, left) = seen(*size, CROP, draw=draw)
        assert item.present == present and item.pixels.shape == (24, 16, 3)
        wanted = positions(*size)[top : top + 24, left : left + 16]
        rows, columns = wanted.shape[:2]
        assert np.array_equal(item.pixels[:rows, :columns], wanted)
        corners.add((top, left))
    ends = np.array(sorted(corners)).T
    for found, side, crop in zip(ends, size, (24, 16), strict=True):
        room = max(0, side - crop)
        assert found.min() <= room // 5 and found.max() >= room - room // 5
    assert seen(*size, CROP, draw=5)[1] == seen(*size, CROP, draw=5)[1]


def test_a_small_image_is_padded_as_absent_and_ignored():
    mask = np.ones((17, 71), np.uint8)
    item, _ = seen(17, 9, replace(CROP, crop=(40, 32)), mask[:, :9])
    assert item.present == (24, 16)  # whole patches repeat the last row and column
    assert not item.pixels[24:].any() and not item.pixels[:, 16:].any()
    assert (item.label[:17, :9] == 1).all()
    assert (item.label == IGNORED).sum() == 40 * 32 - 17 * 9


@pytest.mark.parametrize("fit", ["native", "pad", "crop", "stretch"])
def test_a_crop_has_the_scale_of_evaluation(fit):
    whole = Geometry(fit, (48, 64), None, (8, 8))
    image = np.random.default_rng(0).integers(0, 255, (6, 10, 3), np.uint8)
    image = image.repeat(20, 0).repeat(20, 1)  # 120 x 200 px
    evaluated = see_array(image, 0, SampleKey(0, 0, whole), 0)
    for draw in range(5):
        key = SampleKey(0, 0, replace(whole, crop=(24, 32)), draw)
        crop = see_array(image, 0, key, 0).pixels.astype(int)
        rows, columns = evaluated.present
        windows = np.lib.stride_tricks.sliding_window_view(
            evaluated.pixels[:rows, :columns].astype(int), (24, 32, 3)
        )
        nearest = np.abs(windows[:, :, 0] - crop).mean((2, 3, 4)).min()
        assert nearest < 12  # resampling moves by less than a pixel


def test_random_crops_of_augmentation_are_taken_inside_the_crop(tmp_path):
    path = str(tmp_path / "crop.yaml")
    smallest = A.RandomResizedCrop((8, 8), scale=(0.2, 0.2), ratio=(1, 1))
    A.save(A.Compose([smallest]), path, "yaml")
    augment, image = Augment(path), positions(93, 71)
    for draw in range(20):
        key = SampleKey(3, 0, CROP, draw)
        top, left = see_array(image, 0, key, 7).pixels[0, 0, :2].tolist()
        inside = see_array(image, 0, key, 7, augment).pixels[..., :2].reshape(-1, 2)
        assert (inside.min(0) >= (top, left)).all() and (
            inside.max(0) < (top + 24, left + 16)
        ).all()
        assert np.ptp(inside, 0).max() < 12


def test_a_pixel_is_drawn_by_class_first():
    mask = np.zeros((40, 31), np.uint8)
    mask[3:30, 2:25], mask[35, 7], mask[:, 30] = 1, 4, IGNORED
    rng = np.random.default_rng(0)
    found = [foreground_pixel(mask, rng) for _ in range(2000)]
    classes = Counter(int(mask[place]) for place in found)
    assert set(classes) == {1, 4} and abs(classes[4] - 1000) < 100
    of_first = {place for place in found if mask[place] == 1}
    assert len(of_first) > 450 and {row for row, _ in of_first} == set(range(3, 30))
    assert foreground_pixel(mask[:3, 20:], rng) is None


@pytest.mark.parametrize("img_size", [None, (60, 80)])
def test_the_share_of_crops_around_objects_contains_one(img_size):
    mask = np.zeros((240, 250), np.uint8)
    mask[170:180, 11:17] = 2
    given = replace(CROP, img_size=img_size, crop_around=0.7)
    shares = {}
    for around in (0.0, 0.7, 1.0):
        geometry = replace(given, crop_around=around)
        items = [seen(240, 250, geometry, mask, draw=draw)[0] for draw in range(300)]
        shares[around] = np.mean([(item.label == 2).any() for item in items])
    assert shares[1.0] > (0.97 if img_size else 0.999)  # shrinking may drop the pixel
    assert shares[0.7] == pytest.approx(0.7 + 0.3 * shares[0.0], abs=0.07)
    # The object is anywhere in the crops, not only in the middle.
    places = {
        np.argwhere(seen(240, 250, given, mask, draw=d)[0].label == 2)[:1].tobytes()
        for d in range(99)
    }
    assert len(places) > 20


@pytest.mark.parametrize("sampler", [None, "balanced"])
def test_each_image_gives_several_crops_per_epoch(tmp_path, sampler):
    write_classes(tmp_path / "train", {"bird": 9, "cat": 3})
    write_classes(tmp_path / "val", {"bird": 2, "cat": 2})
    config = config_of(tmp_path, fit="native", img_size=None, crop=8, crops=3, sampler=sampler)
    splits = build_splits(config, 0)
    batches = train_batches(splits, config, batch_size=5, seed=2)
    batches._keys.epoch = 1
    parts = list(batches._keys)
    assert [len(part) for part in parts] == [5] * 7 + [1] and len(batches) == 8
    keys = [key for part in parts for key in part]
    counts = Counter(key.index for key in keys)
    labels = Counter(int(splits.train.labels[key.index]) for key in keys)
    assert set(counts.values()) == ({3} if sampler is None else {2, 6})
    assert labels == ({0: 27, 1: 9} if sampler is None else {0: 18, 1: 18})
    assert len({key.draw for key in keys}) == 36
