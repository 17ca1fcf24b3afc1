"""Images through timm's readers: tars, shards of webdataset, tables of Hugging Face."""

import json

import pytest
import torch

from tests.helpers.geometry import square
from tests.helpers.image_files import (
    COUNTS,
    LEVELS,
    VAL_COUNTS,
    config_of,
    encoded,
    expected,
    levels_and_labels,
    refused,
    write_classes,
    write_tar,
)
from visionattn.data.batches import SampleKey, Unreadable, batch_geometry
from visionattn.data.splits import build_splits, eval_batches, train_batches

# webdataset leaves the tars that it reads to the garbage collector to close
unclosed = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def labelled(images):
    """Members of a shard: number, gray level and class of each image."""
    members = []
    for number, level, label in images:
        members.append((f"{number:04d}.png", encoded(level) if level else b"broken"))
        members.append((f"{number:04d}.cls", str(label).encode()))
    return members


@pytest.fixture
def shard_root(tmp_path):
    """Shards of 5 and 4 images to train on, and of 3 to validate on; classes 0, 1, 2 in turn."""
    splits = {}
    for split, lengths, level in (("train", (5, 4), 100), ("validation", (3,), 50)):
        names, done = [f"{split}-{number}.tar" for number in range(len(lengths))], 0
        for name, length in zip(names, lengths, strict=True):
            numbers = range(done, done := done + length)
            write_tar(tmp_path / name, labelled((n, level + n, n % 3) for n in numbers))
        splits[split] = dict(name=split, num_samples=done, filenames=names, shard_lengths=lengths)
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    return tmp_path


def shards_of(folder, **changes):
    options = {"args": {"num_classes": 3}, "on_error": "skip"} | changes
    return config_of(f"wds/{folder}", **options)


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_streamed_through_the_reader_of_timm(shard_root, workers):
    pytest.importorskip("webdataset")
    config = shards_of(shard_root, workers=workers, img_size_choices=[16, 24])
    splits = build_splits(config, 3)
    assert splits.spec.num_classes == 3 and splits.test is None
    batches = train_batches(splits, config, batch_size=2, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        images, labels, *_ = zip(*batches.epoch(epoch), strict=True)
        assert len(labels) == len(batches) and all(len(part) == 2 for part in labels)
        levels = torch.cat([part[:, 0, 0, 0] for part in images]).tolist()
        assert set(levels) == set(range(100, 109))
        assert [(level - 100) % 3 for level in levels] == torch.cat(labels).tolist()
        choices = [square(16), square(24)]
        for number, part in enumerate(images):
            side = batch_geometry(tuple(choices), 3, epoch, number).img_size[0]
            assert part.shape[-1] == side
        epochs.append(levels)
    assert epochs[0] == epochs[2] and epochs[0] != epochs[1]

    validation = eval_batches(splits.validation, config, batch_size=2, geometry=square(16))
    levels = torch.cat([images[:, 0, 0, 0] for images, *_ in validation]).tolist()
    assert levels == [50, 51, 52] and len(validation) == 2 and validation.left_out == 0


@unclosed
def test_evaluation_on_shards_says_how_many_images_were_left_out(shard_root):
    pytest.importorskip("webdataset")
    images = labelled([(0, 50, 0), (1, None, 1), (2, 52, 2)])
    write_tar(shard_root / "validation-0.tar", images)
    config = shards_of(shard_root)
    held_out = build_splits(config, 3).validation
    validation = eval_batches(held_out, config, batch_size=2, geometry=square(16))
    with pytest.warns(UserWarning, match="skipped 1 unreadable images of"):
        assert [labels.tolist() for _, labels, *_ in validation] == [[0, 2]]
    assert validation.left_out == 1


def test_what_shards_lack_is_said_in_one_line(shard_root, tmp_path_factory):
    pytest.importorskip("webdataset")
    root = f"wds/{shard_root}"
    assert refused(ValueError, shards_of(shard_root, args={})) == (
        f"the number of classes of data root {root} is unknown; pass --data.args.num_classes"
    )
    assert refused(ValueError, shards_of(shard_root, on_error="fail")) == (
        f"timm's reader of {root} skips unreadable images; pass --data.on_error skip"
    )
    empty = tmp_path_factory.mktemp("empty")
    line = refused(FileNotFoundError, shards_of(empty))
    assert line.startswith(f"no _info.json in {empty}; expected timm's list")
    info = json.loads((shard_root / "_info.json").read_text())
    info["splits"]["extra"] = info["splits"].pop("validation")
    (shard_root / "_info.json").write_text(json.dumps(info))
    with pytest.warns(UserWarning, match=f"ignored in {root}: extra"):
        assert refused(ValueError, shards_of(shard_root)) == (
            f"expected a validation split in _info.json of {shard_root}, got train, extra"
        )


@unclosed
def test_a_label_beyond_the_number_of_classes_is_refused_in_one_line(shard_root):
    pytest.importorskip("webdataset")
    config = shards_of(shard_root, args={"num_classes": 2})
    batches = train_batches(build_splits(config, 3), config, batch_size=8, seed=3)
    said = r"expected labels 0 to 1 \(num_classes 2\), got 2 in "
    with pytest.raises(ValueError, match=said):
        list(batches.epoch(0))


def test_a_hugging_face_table_is_read_by_the_reader_of_timm(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_classes(tmp_path / "train", COUNTS)
    write_classes(tmp_path / "val", VAL_COUNTS)
    config = config_of(f"hfds/{tmp_path}", workers=2)
    splits = build_splits(config, 3)
    names, known = splits.spec.class_names, list(LEVELS)
    found = [(level, names[label]) for level, label in levels_and_labels(splits.train, config)]
    assert sorted(found) == sorted((level, known[label]) for level, label in expected(COUNTS))
    assert len(splits.validation) == sum(VAL_COUNTS.values())
    line = refused(FileNotFoundError, config_of(f"hfds/{tmp_path}/gone"))
    assert line.startswith("cannot open hfds/")


def test_splits_of_a_table_without_labels_are_left_out_and_a_table_needs_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["bird", "cat"])}
    for split, labels in {"train": [1, 0, 1, 0], "validation": [0, 1], "test": [-1] * 3}.items():
        rows = {"image": [{"bytes": encoded(40), "path": None}] * len(labels), "label": labels}
        rows["image"][:1] = [None]
        table = datasets.Dataset.from_dict(rows, datasets.Features(kinds))
        table.to_parquet(str(tmp_path / f"{split}.parquet"))
    root = f"hfds/{tmp_path}"
    said = rf"^ignored in {root}: test \(images without labels\)$"
    with pytest.warns(UserWarning, match=said):
        splits = build_splits(config_of(root), 3)
    assert splits.test is None and splits.train.labels.tolist() == [1, 0, 1, 0]
    seen = [splits.train[SampleKey(index, 0, square(16))] for index in (0, 1)]
    assert [isinstance(each, Unreadable) for each in seen] == [True, False]
    for path in tmp_path.glob("*.parquet"):
        datasets.Dataset.from_parquet(str(path)).remove_columns("label").to_parquet(str(path))
    line = refused(ValueError, config_of(root))
    assert line.startswith("expected a split train, val or test with named labels in hfds/")
