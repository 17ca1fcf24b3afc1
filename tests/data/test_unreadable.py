"""Images in folders that cannot be read stop a run with their path, or are left out and counted."""

import gc
import multiprocessing

import pytest

from tests.helpers.geometry import square
from tests.helpers.image_files import (
    COUNTS,
    VAL_COUNTS,
    config_of,
    encoded,
    write_classes,
)
from visionattn.data.splits import build_splits, eval_batches, train_batches


@pytest.fixture
def workers_end():
    """End the workers of loaders that a caught error still holds, as other tests count them."""
    yield
    if multiprocessing.active_children():
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
