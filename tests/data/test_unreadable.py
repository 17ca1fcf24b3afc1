"""The user's own images in folders, and what is said when something is wrong with them."""

import gc

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.geometry import square
from tests.helpers.image_files import (
    COUNTS,
    VAL_COUNTS,
    config_of,
    encoded,
    levels_and_labels,
    write_classes,
)
from visionattn.data.splits import SampleKey, build_splits, eval_batches, train_batches


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


def test_evaluation_resizes_the_shorter_side_and_crops_the_centre(tmp_path):
    """Three stripes of 40 columns: of 120 x 40 pixels, the middle square is the middle stripe, at
    any size.
    """
    stripes = (
        np.repeat(np.array([10, 120, 240], np.uint8), 40)[None, :, None].repeat(40, 0).repeat(3, 2)
    )
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.fromarray(stripes).save(tmp_path / name / f"{index}.png")
    config = config_of(tmp_path)
    validation = build_splits(config, 3).validation
    for size in (13, 40, 90):
        image, *_ = validation[SampleKey(0, 0, square(size))]
        assert image.shape == (size, size, 3)
        assert np.all(image[:, 2:-2] == 120)


@pytest.mark.parametrize("augment", ["light", "three", "rand"])
def test_augmented_batches_are_a_function_of_seed_epoch_and_index_alone(tmp_path, augment):
    rng = np.random.default_rng(0)
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        for index in range(8):
            picture = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize(
                (70, 90), Image.BILINEAR
            )
            picture.save(tmp_path / name / f"{index}.png")
    runs = []
    for workers in (0, 2):
        config = config_of(
            tmp_path, augment=augment, workers=workers, img_size=24, img_size_choices=[24, 40]
        )
        batches = train_batches(build_splits(config, 3), config, batch_size=3, seed=3)
        runs.append([batches.epoch(epoch) for epoch in (0, 1)])
        runs[-1] = [list(epoch) for epoch in runs[-1]]
    for first, second in zip(*runs, strict=True):
        for (images, labels, _), (other_images, other_labels, _) in zip(first, second, strict=True):
            assert torch.equal(images, other_images) and torch.equal(labels, other_labels)

    config = config_of(tmp_path, augment=augment)
    splits = build_splits(config, 3)
    keys = [SampleKey(2, epoch, square(32)) for epoch in range(6)]
    images = [splits.train[key][0] for key in keys]
    assert len({image.tobytes() for image in images}) == 6
    for key, image in zip(reversed(keys), reversed(images), strict=True):
        np.testing.assert_array_equal(splits.train[key][0], image)
    # evaluation is left as it is
    held_out = splits.validation[SampleKey(0, 0, square(32))][0]
    np.testing.assert_array_equal(splits.validation[SampleKey(0, 5, square(32))][0], held_out)


BROKEN = {
    "cut off": encoded(120, (200, 200), "jpeg")[:-200],
    "no image": b"not an image at all",
    "empty": b"",
}


@pytest.mark.usefixtures("workers_end")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BROKEN)
def test_an_unreadable_image_stops_with_its_path_in_one_line(split_root, workers, kind):
    path = split_root / "train" / "cat" / "2.png"
    path.write_bytes(BROKEN[kind])
    config = config_of(split_root, workers=workers)
    batches = train_batches(build_splits(config, 3), config, batch_size=4, seed=3)
    with pytest.raises(ValueError) as caught:
        list(batches.epoch(0))
    assert str(caught.value).startswith(f"cannot read image {path}: ")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(
        "; repair or delete it, or use --data.on_error skip to leave it out"
    )


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
    with pytest.warns(UserWarning, match="left out unreadable image") as caught:
        counts = [sum(len(labels) for _, labels, *_ in batches.epoch(epoch)) for epoch in (0, 1)]
    assert counts == [sum(COUNTS.values()) - 1] * 2
    told = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(told) == 1 and told[0].startswith(f"left out unreadable image {path}: ")
    assert batches.left_out == 1

    validation = eval_batches(splits.validation, config, batch_size=3, geometry=square(16))
    with pytest.warns(UserWarning, match="val/bird/1.png"):
        assert sum(len(labels) for _, labels, *_ in validation) == sum(VAL_COUNTS.values()) - 1
    assert validation.left_out == 1


def test_an_image_that_disappears_is_unreadable(split_root):
    config = config_of(split_root)
    splits = build_splits(config, 3)
    (split_root / "val" / "cat" / "0.png").unlink()
    with pytest.raises(ValueError, match="cannot read image .*val/cat/0.png: .*No such file"):
        levels_and_labels(splits.validation, config)
