"""Loaders of all datasets: order, sizes, keys, workers, and images that cannot be read."""

import gc
import pickle
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.helpers.geometry import square
from tests.helpers.image_files import (
    COUNTS,
    VAL_COUNTS,
    config_of,
    encoded,
    write_classes,
)
from visionattn.data.batches import start_worker
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import SampleKey, build_splits, eval_batches, train_batches

DIGITS = DataConfig(name="digits", img_size=24, augment="light", workers=0)


def test_no_digit_is_in_two_splits_and_all_are_in_one():
    splits = build_splits(DataConfig(name="digits", val_fraction=0.125), seed=1)
    parts = splits.train, splits.validation, splits.test
    sizes = [len(part) for part in parts]
    np.testing.assert_allclose(sizes, [0.7 * 1797, 0.1 * 1797, 0.2 * 1797], rtol=0.03)
    # scikit-learn's digits are all different as images, so bytes identify them
    different = {image.tobytes() for part in parts for image in part.images}
    assert len(different) == sum(sizes) == 1797


def test_batches_are_the_same_with_workers_and_after_an_epoch_that_was_given_up():
    sizes, args = dict(img_size=64, img_size_choices=[64, 72]), {"train_images": 330}
    runs = []
    for workers in (0, 2):
        config = DataConfig(name="canvas", augment="light", workers=workers, **sizes, args=args)
        splits = build_splits(config, seed=3)
        batches = train_batches(splits, config, batch_size=100, seed=3)
        torch.manual_seed(7)
        before = torch.get_rng_state()
        next(batches.epoch(2))
        runs.append([batch for epoch in (0, 1) for batch in batches.epoch(epoch)])
        assert torch.equal(torch.get_rng_state(), before)
    for (images, labels, *_), (other_images, other_labels, *_) in zip(*runs, strict=True):
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels)


def test_data_sets_can_be_sent_to_workers_that_are_not_forks():
    train = build_splits(DIGITS, 3).train
    key = SampleKey(11, 1, square(24))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(train))[key][0], train[key][0])


def test_augmentation_differs_when_any_part_of_the_key_differs():
    train = build_splits(DIGITS, seed=3).train
    train.images[42] = train.images[41]
    image, *others = (
        train[SampleKey(index, epoch, square(24))].pixels
        for index, epoch in ((41, 2), (42, 2), (41, 3))
    )
    train.seed = 4
    others.append(train[SampleKey(41, 2, square(24))].pixels)
    assert all(np.mean(image != other) > 0.1 for other in others)


def test_each_epoch_has_every_training_image_once_in_another_order():
    config = DataConfig(name="digits", img_size=8, workers=0)
    splits = build_splits(config, 3)
    batches = train_batches(splits, config, batch_size=77, seed=3)
    pairs = zip(splits.train.images, splits.train.labels, strict=True)
    known = {image.tobytes(): label for image, label in pairs}
    orders = []
    for epoch in (0, 1):
        images, labels, *_ = zip(*batches.epoch(epoch), strict=True)
        orders.append([image.numpy().tobytes() for image in torch.cat(images)])
        assert sorted(orders[-1]) == sorted(image.tobytes() for image in splits.train.images)
        assert [known[image] for image in orders[-1]] == torch.cat(labels).tolist()
    assert orders[0] != orders[1]
    whole, rest = divmod(len(splits.train), 77)
    assert [len(part) for part in labels] == [77] * whole + [rest] and len(batches) == whole + 1


def test_evaluation_gives_every_image_once_in_the_order_of_the_data():
    splits = build_splits(DIGITS, 3)
    for workers in (0, 2):
        config = DataConfig(name="digits", workers=workers)
        batches = eval_batches(splits.test, config, batch_size=50, geometry=square(8))
        images, labels = (torch.cat(parts) for parts in list(zip(*batches, strict=True))[:2])
        np.testing.assert_array_equal(images[:, 0].numpy(), splits.test.images[..., 0])
        np.testing.assert_array_equal(labels.numpy(), splits.test.labels)
        assert len(batches) == 8 and batches.left_out == 0


def test_a_training_batch_has_one_size_and_all_sizes_are_drawn_about_equally():
    config = DataConfig(name="digits", img_size=8, img_size_choices=[8, 11, 17], workers=0)
    splits = build_splits(config, 3)
    batches = train_batches(splits, config, batch_size=10, seed=3)
    drawn = [[images.shape[-2:] for images, _, *_ in batches.epoch(epoch)] for epoch in (0, 1)]
    assert drawn[0] != drawn[1]
    counts = [sum(drawn, []).count((side, side)) for side in (8, 11, 17)]
    assert sum(counts) == 2 * len(batches) and min(counts) > 2 * len(batches) / 5


def test_a_worker_that_cannot_hand_over_what_it_loaded_ends_with_a_line(capfd):
    def limited(number: int) -> None:
        start_worker(number)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    given = {"num_workers": 1, "worker_init_fn": limited, "timeout": 60}
    loader = DataLoader([torch.zeros(10_000)], None, collate_fn=lambda image: image, **given)
    with pytest.raises(RuntimeError, match="^DataLoader worker .* exited unexpectedly"):
        list(loader)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: a data loader process cannot pass on its images: ")
    assert "File too large" in line and line.endswith("(workers 0)")


@pytest.fixture
def workers_end():
    """End the workers of loaders that a caught error still holds, as other tests count them."""
    yield
    gc.collect()


@pytest.fixture
def split_root(tmp_path):
    write_classes(tmp_path / "train", COUNTS)
    write_classes(tmp_path / "val", VAL_COUNTS)
    return tmp_path


BROKEN = {
    "cut off": encoded(120, (200, 200), "jpeg")[:-200],
    "no image": b"not an image at all",
    "empty": b"",
}


@pytest.mark.usefixtures("workers_end")
@pytest.mark.parametrize(
    ("kind", "workers"), [("cut off", 0), ("no image", 2), ("empty", 0), ("gone", 0)]
)
def test_an_unreadable_image_stops_with_its_path_in_one_line(split_root, workers, kind):
    path = split_root / "train" / "cat" / "2.png"
    config = config_of(split_root, workers=workers)
    batches = train_batches(build_splits(config, 3), config, batch_size=4, seed=3)
    path.unlink()
    if kind != "gone":
        path.write_bytes(BROKEN[kind])
    advice = "; repair or delete it, or pass --data.on_error skip$"
    with pytest.raises(ValueError, match=f"^cannot read image {path}: [^\n]*{advice}"):
        list(batches.epoch(0))


def test_all_unreadable_images_are_named_before_the_first_step(split_root):
    for name in ("1.png", "2.png"):
        (split_root / "train" / "cat" / name).write_bytes(b"not an image at all")
    config = replace(config_of(split_root), fit="native", img_size=None)
    with pytest.raises(
        ValueError, match=r"cannot read image .*cat/1.png: .*; 1 more: .*cat/2.png$"
    ):
        train_batches(build_splits(config, 3), config, batch_size=4, seed=3)


def test_the_value_range_is_measured_on_validation_images_too(split_root):
    deep = np.full((20, 20), 60_000, np.uint16)
    Image.fromarray(deep).save(split_root / "val" / "cat" / "0.png")
    with pytest.warns(UserWarning, match="16-bit images hold values up to 60,000"):
        splits = build_splits(config_of(split_root), 3)
    assert splits.validation.options.value_range == (0.0, 65535.0)


@pytest.mark.usefixtures("workers_end")
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_left_out_with_one_warning_and_evaluation_counts_it(
    split_root, workers
):
    path = split_root / "train" / "cat" / "2.png"
    path.write_bytes(BROKEN["no image"])
    (split_root / "val" / "bird" / "1.png").write_bytes(BROKEN["cut off"])
    config = config_of(split_root, workers=workers, on_error="skip")
    splits = build_splits(config, 3)
    batches = train_batches(splits, config, batch_size=4, seed=3)
    with pytest.warns(UserWarning, match="skipped unreadable image") as caught:
        counts = [sum(len(labels) for _, labels, *_ in batches.epoch(epoch)) for epoch in (0, 1)]
    assert counts == [sum(COUNTS.values()) - 1] * 2
    (told,) = (str(warning.message) for warning in caught if warning.category is UserWarning)
    assert told.startswith(f"skipped unreadable image {path}: ")
    assert batches.left_out == 1

    validation = eval_batches(splits.validation, config, batch_size=3, geometry=square(16))
    with pytest.warns(UserWarning, match="val/bird/1.png"):
        assert sum(len(labels) for _, labels, *_ in validation) == sum(VAL_COUNTS.values()) - 1
    assert validation.left_out == 1
