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


@pytest.mark.parametrize("augment", ["light", "three", "rand"])
def test_augmented_batches_are_a_function_of_seed_epoch_and_index_alone(tmp_path, augment):
    rng = np.random.default_rng(0)
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        for index in range(8):
            picture = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8))
            picture.resize((70, 90), Image.BILINEAR).save(tmp_path / name / f"{index}.png")
    runs = []
    for workers in (0, 2):
        config = config_of(tmp_path, augment=augment, workers=workers, img_size_choices=[24, 40])
        batches = train_batches(build_splits(config, 3), config, batch_size=3, seed=3)
        runs.append([batch for epoch in (0, 1) for batch in batches.epoch(epoch)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.labels, second.labels)
    splits = build_splits(config, 3)
    assert len({splits.train[SampleKey(2, n, square(32))][0].tobytes() for n in range(6)}) == 6
    # evaluation is left as it is
    held_out = [splits.validation[SampleKey(0, n, square(32))][0] for n in (0, 5)]
    np.testing.assert_array_equal(*held_out)


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
    advice = "; repair or delete it, or use --data.on_error skip to leave it out$"
    with pytest.raises(ValueError, match=f"^cannot read image {path}: [^\n]*{advice}"):
        list(batches.epoch(0))


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
