"""The user's own images: folders, tars, Hugging Face tables, shards; and what is said when they are wrong."""

import importlib.util
import io
import json
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from visionattn.training.config import DataConfig
from visionattn.training.data import SampleKey, build_splits, eval_batches, train_batches

LEVELS = {"bird": 40, "cat": 120, "dog 2": 180, "dog 10": 220}
"""Grey level of the images of each class, in the order that the classes are to have."""


def encoded(level, shape=(20, 28), image_format="png"):
    stream = io.BytesIO()
    Image.fromarray(np.full((*shape, 3), level, np.uint8)).save(stream, image_format)
    return stream.getvalue()


def write_classes(folder, counts):
    """``counts`` images per class; image i of a class is i levels brighter."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for index in range(count):
            (folder / name / f"{index}.png").write_bytes(encoded(LEVELS.get(name, 0) + index))


def config_of(root, **changes):
    return DataConfig(**({"name": "folder", "root": str(root), "img_size": 16, "workers": 0} | changes))


def levels_and_labels(split, config, batch_size=5):
    """The grey level and the label of each image, as evaluation gives them."""
    pairs = []
    for images, labels in eval_batches(split, config, batch_size=batch_size, img_size=config.img_size):
        assert images.shape[1:] == (3, config.img_size, config.img_size)
        pairs += zip(images[:, 0, 0, 0].tolist(), labels.tolist(), strict=True)
    return pairs


def expected(counts):
    names = list(LEVELS)
    return sorted((LEVELS[name] + index, names.index(name)) for name, count in counts.items() for index in range(count))


COUNTS = {"bird": 7, "cat": 4, "dog 2": 11, "dog 10": 3}
VAL_COUNTS = {"bird": 2, "cat": 1, "dog 2": 3, "dog 10": 1}


@pytest.fixture
def split_root(tmp_path):
    write_classes(tmp_path / "train", COUNTS)
    write_classes(tmp_path / "val", VAL_COUNTS)
    return tmp_path


def test_train_and_val_folders_are_the_splits(split_root):
    config = config_of(split_root)
    splits = build_splits(config, 3)
    assert splits.spec.class_names == tuple(LEVELS) and splits.spec.num_classes == 4
    assert splits.test is None
    assert sorted(levels_and_labels(splits.train, config)) == expected(COUNTS)
    assert sorted(levels_and_labels(splits.validation, config)) == expected(VAL_COUNTS)


def test_a_test_folder_is_the_test_split(split_root):
    write_classes(split_root / "test", {"cat": 2, "bird": 1})
    config = config_of(split_root)
    assert sorted(levels_and_labels(build_splits(config, 3).test, config)) == expected({"cat": 2, "bird": 1})


@pytest.mark.parametrize("layout", ["train alone", "classes alone"])
def test_without_a_validation_folder_a_share_of_each_class_is_held_out_by_the_seed(tmp_path, layout):
    write_classes(tmp_path / "train" if layout == "train alone" else tmp_path, COUNTS)
    config = config_of(tmp_path, val_fraction=0.3)
    splits = build_splits(config, 3)
    train, validation = levels_and_labels(splits.train, config), levels_and_labels(splits.validation, config)
    assert sorted(train + validation) == expected(COUNTS)
    assert np.bincount([label for _, label in validation]).tolist() == [2, 1, 3, 1]
    assert splits.test is None
    assert levels_and_labels(build_splits(config, 3).validation, config) == validation
    assert levels_and_labels(build_splits(config, 4).validation, config) != validation


def test_images_are_found_at_any_depth_below_a_class_folder_and_by_their_extension(tmp_path):
    write_classes(tmp_path, {"bird": 2, "cat": 2})
    deep = tmp_path / "cat" / "kittens" / "grey"
    deep.mkdir(parents=True)
    (deep / "9.JPG").write_bytes(encoded(129, image_format="jpeg"))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    splits = build_splits(config_of(tmp_path, val_fraction=0.5), 3)
    assert len(splits.train) + len(splits.validation) == 5


def test_evaluation_resizes_the_shorter_side_and_crops_the_centre(tmp_path):
    """Three stripes of 40 columns: of 120 x 40 pixels, the middle square is the middle stripe, at any size."""
    stripes = np.repeat(np.array([10, 120, 240], np.uint8), 40)[None, :, None].repeat(40, 0).repeat(3, 2)
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.fromarray(stripes).save(tmp_path / name / f"{index}.png")
    config = config_of(tmp_path)
    validation = build_splits(config, 3).validation
    for size in (13, 40, 90):
        image, _ = validation[SampleKey(0, 0, size)]
        assert image.shape == (size, size, 3)
        assert np.all(image[:, 2:-2] == 120)


def test_grey_and_transparent_images_become_rgb(tmp_path):
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((20, 20), 77, np.uint8)).save(tmp_path / name / "0.png")
        Image.fromarray(np.full((20, 20, 4), 77, np.uint8)).save(tmp_path / name / "1.png")
    config = config_of(tmp_path, val_fraction=0.5)
    splits = build_splits(config, 3)
    pairs = levels_and_labels(splits.train, config) + levels_and_labels(splits.validation, config)
    assert [level for level, _ in pairs] == [77] * 4


@pytest.mark.parametrize("augment", ["light", "three", "rand"])
def test_augmented_batches_are_a_function_of_seed_epoch_and_index_alone(tmp_path, augment):
    rng = np.random.default_rng(0)
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        for index in range(8):
            picture = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize((70, 90), Image.BILINEAR)
            picture.save(tmp_path / name / f"{index}.png")
    runs = []
    for workers in (0, 2):
        config = config_of(tmp_path, augment=augment, workers=workers, img_size=24, img_size_choices=[24, 40])
        batches = train_batches(build_splits(config, 3), config, batch_size=3, seed=3)
        runs.append([batches.epoch(epoch) for epoch in (0, 1)])
        runs[-1] = [list(epoch) for epoch in runs[-1]]
    for first, second in zip(*runs, strict=True):
        for (images, labels), (other_images, other_labels) in zip(first, second, strict=True):
            assert torch.equal(images, other_images) and torch.equal(labels, other_labels)

    config = config_of(tmp_path, augment=augment)
    splits = build_splits(config, 3)
    keys = [SampleKey(2, epoch, 32) for epoch in range(6)]
    images = [splits.train[key][0] for key in keys]
    assert len({image.tobytes() for image in images}) == 6
    for key, image in zip(reversed(keys), reversed(images), strict=True):
        np.testing.assert_array_equal(splits.train[key][0], image)
    # evaluation is left as it is
    held_out = splits.validation[SampleKey(0, 0, 32)][0]
    np.testing.assert_array_equal(splits.validation[SampleKey(0, 5, 32)][0], held_out)


def test_three_augment_makes_greyscale_solarised_and_blurred_images_about_equally_often(tmp_path):
    """On a plain bright red, greyscale makes the channels equal and solarise turns red to its complement."""
    for name in ("bird", "cat"):
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.fromarray(np.full((32, 32, 3), (230, 20, 20), np.uint8)).save(tmp_path / name / f"{index}.png")
    train = build_splits(config_of(tmp_path, augment="three"), 3).train
    kinds = []
    for epoch in range(300):
        red, green, blue = train[SampleKey(0, epoch, 16)][0][8, 8].astype(int)
        kinds.append("grey" if red == green == blue else "red" if red > 90 else "solarised")
    assert all(70 < kinds.count(kind) < 130 for kind in ("grey", "red", "solarised"))


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def members_of(counts, prefix=""):
    return [
        (f"{prefix}{name}/{index}.png", encoded(LEVELS[name] + index))
        for name, count in counts.items()
        for index in range(count)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tar_of_class_folders_is_read_by_several_workers(tmp_path, workers):
    root = tmp_path / "images.tar"
    write_tar(root, members_of(COUNTS))
    config = config_of(root, workers=workers, val_fraction=0.3)
    splits = build_splits(config, 3)
    splits.train[SampleKey(0, 0, 16)]
    assert splits.spec.class_names == tuple(LEVELS)
    train, validation = levels_and_labels(splits.train, config, 2), levels_and_labels(splits.validation, config, 2)
    assert sorted(train + validation) == expected(COUNTS) and len(validation) == 7
    assert pickle.loads(pickle.dumps(splits.train))[SampleKey(1, 0, 16)][0][0, 0, 0] == train[1][0]


def test_a_tar_with_train_and_val_folders_is_divided_as_they_say(tmp_path):
    root = tmp_path / "images.tar"
    write_tar(root, members_of(COUNTS, "./train/") + members_of(VAL_COUNTS, "./val/"))
    config = config_of(root)
    splits = build_splits(config, 3)
    assert sorted(levels_and_labels(splits.train, config)) == expected(COUNTS)
    assert sorted(levels_and_labels(splits.validation, config)) == expected(VAL_COUNTS)


def refused(error, config):
    with pytest.raises(error) as caught:
        build_splits(config, 3)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_root_is_named(tmp_path):
    assert refused(FileNotFoundError, config_of(tmp_path / "gone")).startswith(
        f"data root {tmp_path / 'gone'} does not exist; wanted train/<class>/* and val/<class>/*, or <class>/*"
    )


def test_an_empty_root_is_named(tmp_path):
    assert refused(ValueError, config_of(tmp_path)).startswith(f"data folder {tmp_path} has no class folders; wanted")


def test_an_empty_train_folder_is_named(tmp_path):
    (tmp_path / "train").mkdir()
    line = refused(ValueError, config_of(tmp_path))
    assert line.startswith(f"data folder {tmp_path / 'train'} has no class folders; wanted")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_folder_without_images_is_named(split_root, split):
    empty = split_root / split / "yak"
    empty.mkdir()
    (empty / "notes.txt").write_text("not an image")
    line = refused(ValueError, config_of(split_root))
    assert line == f"class folder {empty} holds no images; add some or delete the folder"


def test_classes_to_validate_on_that_training_lacks_are_named(split_root):
    write_classes(split_root / "val", {"yak": 1, "wolf": 1})
    line = refused(ValueError, config_of(split_root))
    assert line == f"classes of {split_root} that are in validation but not in train: wolf, yak"


def test_a_root_without_training_images_is_refused(tmp_path):
    write_classes(tmp_path / "val", VAL_COUNTS)
    assert refused(ValueError, config_of(tmp_path)).startswith(
        f"data root {tmp_path} has validation images but none to train on; wanted train/<class>/*"
    )


def test_a_single_image_per_class_is_too_few_to_hold_one_out(tmp_path):
    write_classes(tmp_path, {"bird": 1, "cat": 1})
    line = refused(ValueError, config_of(tmp_path))
    assert line == f"too few images in {tmp_path} to hold some out for validation; wanted two of some class"


def test_a_root_that_is_another_file_is_refused(tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK")
    line = refused(ValueError, config_of(tmp_path / "data.zip"))
    assert line == f"data root {tmp_path / 'data.zip'} is neither a folder nor a .tar file"


@pytest.mark.parametrize(
    ("members", "start"),
    [
        (None, "cannot read {} as a tar: "),
        ([("readme.txt", b"none")], "no images in {}; wanted train/<class>/*"),
        ([("0.png", encoded(3)), ("cat/1.png", encoded(3))], "{} has images outside of class folders; wanted"),
    ],
)
def test_a_tar_that_is_none_or_empty_or_without_classes_is_named(tmp_path, members, start):
    root = tmp_path / "images.tar"
    root.write_bytes(b"this is no tar") if members is None else write_tar(root, members)
    assert refused(ValueError, config_of(root)).startswith(start.format(root))


BROKEN = {
    "cut off": encoded(120, (200, 200), "jpeg")[:-200],
    "no image": b"not an image at all",
    "empty": b"",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BROKEN)
def test_an_unreadable_image_stops_with_its_path_in_one_line(split_root, workers, kind):
    path = split_root / "train" / "cat" / "2.png"
    path.write_bytes(BROKEN[kind])
    config = config_of(split_root, workers=workers)
    batches = train_batches(build_splits(config, 3), config, batch_size=4, seed=3)
    with pytest.raises(ValueError) as caught:
        list(batches.epoch(0))
    assert str(caught.value).startswith(f"cannot read image {path}: ") and "\n" not in str(caught.value)
    assert str(caught.value).endswith("; repair or delete it, or use on_error skip to leave it out")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_left_out_with_one_warning_and_evaluation_counts_it(split_root, workers):
    path = split_root / "train" / "cat" / "2.png"
    path.write_bytes(BROKEN["no image"])
    (split_root / "val" / "bird" / "1.png").write_bytes(BROKEN["cut off"])
    config = config_of(split_root, workers=workers, on_error="skip")
    splits = build_splits(config, 3)
    batches = train_batches(splits, config, batch_size=4, seed=3)
    with pytest.warns(UserWarning, match="left out unreadable image") as caught:
        counts = [sum(len(labels) for _, labels in batches.epoch(epoch)) for epoch in (0, 1)]
    assert counts == [sum(COUNTS.values()) - 1] * 2
    assert [str(warning.message) for warning in caught] == [str(caught[0].message)]
    assert str(caught[0].message).startswith(f"left out unreadable image {path}: ")
    assert batches.left_out == 1

    validation = eval_batches(splits.validation, config, batch_size=3, img_size=16)
    with pytest.warns(UserWarning, match="val/bird/1.png"):
        assert sum(len(labels) for _, labels in validation) == sum(VAL_COUNTS.values()) - 1
    assert validation.left_out == 1


def test_a_batch_of_unreadable_images_alone_is_left_out_as_a_whole(tmp_path):
    write_classes(tmp_path, {"bird": 4, "cat": 4})
    config = config_of(tmp_path, on_error="skip", val_fraction=0.5)
    splits = build_splits(config, 3)
    for index in (0, 1):
        (
            tmp_path / "bird" / splits.validation.source.name(splits.validation.indices[index]).split("/")[-1]
        ).write_bytes(b"")
    with pytest.warns(UserWarning, match="left out"):
        labels = [labels.tolist() for _, labels in eval_batches(splits.validation, config, batch_size=2, img_size=16)]
    assert labels == [[1, 1]]


def test_an_image_that_disappears_is_unreadable(split_root):
    config = config_of(split_root)
    splits = build_splits(config, 3)
    (split_root / "val" / "cat" / "0.png").unlink()
    with pytest.raises(ValueError, match="cannot read image .*val/cat/0.png: .*No such file"):
        levels_and_labels(splits.validation, config)


# webdataset leaves the tars that it reads to the garbage collector to close
unclosed = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def shard_root(tmp_path):
    """Two shards to train on, of 5 and 4 images, and one of 3 to validate on; classes 0, 1, 2 in turn."""
    splits = {}
    for split, lengths, level in (("train", (5, 4), 100), ("validation", (3,), 50)):
        names = [f"{split}-{number}.tar" for number in range(len(lengths))]
        done = 0
        for name, length in zip(names, lengths, strict=True):
            members = []
            for index in range(done, done + length):
                members += [(f"{index:04d}.png", encoded(level + index)), (f"{index:04d}.cls", str(index % 3).encode())]
            write_tar(tmp_path / name, members)
            done += length
        splits[split] = {"name": split, "num_samples": done, "filenames": names, "shard_lengths": lengths}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    return tmp_path


def test_shards_without_their_package_say_what_to_install(shard_root, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("webdataset", "datasets") else find(name)
    )
    for kind, package in (("wds", "webdataset"), ("hfds", "datasets")):
        line = refused(ValueError, config_of(f"{kind}/{shard_root}"))
        assert line == f"data root {kind}/{shard_root} needs the package {package}: pip install {package}"


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_streamed_through_the_reader_of_timm(shard_root, workers):
    pytest.importorskip("webdataset")
    config = config_of(f"wds/{shard_root}", num_classes=3, on_error="skip", workers=workers, img_size_choices=[16, 24])
    splits = build_splits(config, 3)
    assert splits.spec.num_classes == 3 and splits.test is None
    batches = train_batches(splits, config, batch_size=2, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        images, labels = zip(*batches.epoch(epoch), strict=True)
        assert len(labels) == len(batches) and all(len(part) == 2 for part in labels)
        levels = torch.cat([part[:, 0, 0, 0] for part in images]).tolist()
        assert set(levels) == set(range(100, 109))
        assert [(level - 100) % 3 for level in levels] == torch.cat(labels).tolist()
        epochs.append((levels, [part.shape[-1] for part in images]))
    assert epochs[0] == epochs[2] and epochs[0] != epochs[1]

    validation = eval_batches(splits.validation, config, batch_size=2, img_size=16)
    levels = torch.cat([images[:, 0, 0, 0] for images, _ in validation]).tolist()
    assert levels == [50, 51, 52] and len(validation) == 2 and validation.left_out == 0


@unclosed
def test_evaluation_on_shards_says_how_many_images_were_left_out(shard_root):
    pytest.importorskip("webdataset")
    write_tar(
        shard_root / "validation-0.tar",
        [
            ("0.png", encoded(50)),
            ("0.cls", b"0"),
            ("1.png", b"broken"),
            ("1.cls", b"1"),
            ("2.png", encoded(52)),
            ("2.cls", b"2"),
        ],
    )
    config = config_of(f"wds/{shard_root}", num_classes=3, on_error="skip")
    validation = eval_batches(build_splits(config, 3).validation, config, batch_size=2, img_size=16)
    with pytest.warns(UserWarning, match="left out 1 unreadable images of"):
        assert [labels.tolist() for _, labels in validation] == [[0, 2]]
    assert validation.left_out == 1


def test_what_shards_lack_is_said_in_one_line(shard_root, tmp_path_factory):
    pytest.importorskip("webdataset")
    root = f"wds/{shard_root}"
    assert refused(ValueError, config_of(root, on_error="skip")) == (
        f"data root {root} does not say how many classes there are; give num_classes"
    )
    assert refused(ValueError, config_of(root, num_classes=3)) == (
        f"timm's reader of {root} leaves unreadable images out; say so with on_error skip"
    )
    empty = tmp_path_factory.mktemp("empty")
    assert refused(FileNotFoundError, config_of(f"wds/{empty}", num_classes=3, on_error="skip")).startswith(
        f"no _info.json in {empty}; wanted one"
    )
    info = json.loads((shard_root / "_info.json").read_text())
    del info["splits"]["validation"]
    (shard_root / "_info.json").write_text(json.dumps(info))
    assert refused(ValueError, config_of(root, num_classes=3, on_error="skip")) == (
        f"_info.json of {shard_root} has no split named val or validation"
    )


@unclosed
def test_a_label_beyond_the_number_of_classes_is_refused_in_one_line(shard_root):
    pytest.importorskip("webdataset")
    config = config_of(f"wds/{shard_root}", num_classes=2, on_error="skip")
    batches = train_batches(build_splits(config, 3), config, batch_size=8, seed=3)
    with pytest.raises(ValueError, match="an image of .* has label 2; with num_classes 2 wanted 0 to 1"):
        list(batches.epoch(0))


def test_a_hugging_face_table_is_read_by_the_reader_of_timm(split_root, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = config_of(f"hfds/{split_root}", workers=2)
    splits = build_splits(config, 3)
    assert set(splits.spec.class_names) == set(LEVELS)
    names = splits.spec.class_names
    assert sorted((level, names[label]) for level, label in levels_and_labels(splits.train, config)) == sorted(
        (level, list(LEVELS)[label]) for level, label in expected(COUNTS)
    )
    assert len(splits.validation) == sum(VAL_COUNTS.values())
    assert refused(FileNotFoundError, config_of(f"hfds/{split_root}/gone")).startswith("cannot open hfds/")
