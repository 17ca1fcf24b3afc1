"""Images through timm's readers: tars, shards of webdataset, tables of Hugging Face."""

import gzip
import importlib.util
import io
import json
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.geometry import square
from tests.helpers.image_files import (
    COUNTS,
    LEVELS,
    VAL_COUNTS,
    config_of,
    encoded,
    expected,
    levels_and_labels,
    members_of,
    refused,
    write_classes,
    write_tar,
)
from visionattn.data.batches import batch_geometry
from visionattn.data.sources import PartOfFile
from visionattn.data.splits import SampleKey, build_splits, eval_batches, train_batches


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tar_of_class_folders_is_read_by_several_workers(tmp_path, workers):
    root = tmp_path / "images.tar"
    write_tar(root, members_of(COUNTS))
    config = config_of(root, workers=workers, val_fraction=0.3)
    splits = build_splits(config, 3)
    splits.train[SampleKey(0, 0, square(16))]
    assert splits.spec.class_names == tuple(LEVELS)
    train = levels_and_labels(splits.train, config, 2)
    validation = levels_and_labels(splits.validation, config, 2)
    assert sorted(train + validation) == expected(COUNTS) and len(validation) == 7
    assert (
        pickle.loads(pickle.dumps(splits.train))[SampleKey(1, 0, square(16))][0][0, 0, 0]
        == train[1][0]
    )


def test_a_tar_is_known_by_what_it_holds_and_one_of_another_name_comes_with_the_way_out(tmp_path):
    write_tar(tmp_path / "images.TAR", members_of(COUNTS))
    config = config_of(tmp_path / "images.TAR", val_fraction=0.3)
    splits = build_splits(config, 3)
    found = [levels_and_labels(part, config) for part in (splits.train, splits.validation)]
    assert sorted(found[0] + found[1]) == expected(COUNTS)
    plain = (tmp_path / "images.TAR").read_bytes()
    for name, content in (
        ("images", plain),
        ("images.zip", plain),
        ("images.tar.gz", gzip.compress(plain)),
        ("images.txt", b"no tar"),
    ):
        (tmp_path / name).write_bytes(content)
        line = refused(ValueError, config_of(tmp_path / name))
        wanted = f"data root {tmp_path / name} is neither a folder nor a .tar file; decompress a "
        assert line.startswith(wanted) and line.endswith("and name it .tar")
    (tmp_path / "images.tar").write_bytes(gzip.compress(plain))
    assert refused(ValueError, config_of(tmp_path / "images.tar")).startswith(
        f"cannot read {tmp_path / 'images.tar'} as a tar"
    )


def test_a_tar_holds_what_the_folder_does_that_it_was_made_of(tmp_path):
    """Deep images, hidden ones, files of other kinds, a folder around all; and tars in the tar."""
    folder = tmp_path / "photos"
    write_classes(folder / "TRAIN", COUNTS)
    write_classes(folder / "Valid", VAL_COUNTS)
    for name in (
        "TRAIN/cat/kittens/9.webp",
        "TRAIN/cat/._0.png",
        "__MACOSX/cat/1.png",
        "a.heic",
        "b.webp",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(LEVELS["cat"] + 9, image_format="webp"))
    write_classes(folder / "unlabelled", {"many": 2})
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(folder, "./photos")
    found = []
    for root in (folder, tmp_path / "photos.tar"):
        with pytest.warns(UserWarning) as caught:
            splits = build_splits(config_of(root), 3)
        assert [str(each.message) for each in caught] == [
            f"left out of {root}: unlabelled; images in no class or split folder: 1; files of "
            "other kinds: 1 .heic"
        ]
        parts = [
            levels_and_labels(part, config_of(root)) for part in (splits.train, splits.validation)
        ]
        found.append([sorted(part) for part in parts] + [splits.spec])
    assert found[0] == found[1] and len(found[0][0]) == sum(COUNTS.values()) + 1
    for name in ("cat", "bird"):
        write_tar(
            tmp_path / f"{name}.tar", [(f"{i}.png", encoded(LEVELS[name] + i)) for i in range(3)]
        )
    inner = [
        (f"dev/{name}.tar", (tmp_path / f"{name}.tar").read_bytes()) for name in ("cat", "bird")
    ]
    write_tar(tmp_path / "tars.tar", [*members_of({"bird": 2, "cat": 2}, "train/"), *inner])
    config = config_of(tmp_path / "tars.tar")
    splits = build_splits(config, 3)
    assert sorted(levels_and_labels(splits.validation, config)) == expected({"bird": 3, "cat": 3})


def test_a_tar_may_hold_images_without_classes_where_none_are_needed(tmp_path):
    write_tar(tmp_path / "a.tar", [(f"a/{name}.png", encoded(3)) for name in ("0", "b/1", "c/d/2")])
    splits = build_splits(config_of(tmp_path / "a.tar", val_fraction=0.4), 3, labelled=False)
    assert splits.spec.class_names == () and len(splits.train) + len(splits.validation) == 3


@pytest.mark.parametrize("image_format", ["png", "jpeg", "tiff", "bmp"])
def test_the_size_of_a_member_of_a_tar_is_read_from_its_head_alone(
    tmp_path, image_format, monkeypatch
):
    noise = np.random.default_rng(0).integers(0, 256, (301, 503, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, image_format)
    content = stream.getvalue()
    write_tar(tmp_path / "a.tar", [(f"cat/{index}.img.png", content) for index in range(3)])
    split = build_splits(config_of(tmp_path / "a.tar", val_fraction=0.4), 3).train
    counts = []
    read = PartOfFile.read

    def counted(self, n=-1):
        found = read(self, n)
        counts.append(len(found))
        return found

    monkeypatch.setattr(PartOfFile, "read", counted)
    assert split.sizes().tolist() == [[301, 503]] * 2
    # The end of a PNG is looked at too, as it may tell its turn.
    assert 0 < sum(counts) < 2 * len(content) / 5
    with split.source.open(1) as member:
        assert member.read() == content


@pytest.mark.parametrize(
    ("members", "start"),
    [
        (None, "cannot read {} as a tar: "),
        ([("readme.txt", b"none")], "no images in {}; wanted train/<class>/*"),
        (
            [("0.png", encoded(3)), ("./1.png", encoded(3))],
            "{} has images outside of class folders; wanted",
        ),
    ],
)
def test_a_tar_that_is_none_or_empty_or_without_classes_is_named(tmp_path, members, start):
    root = tmp_path / "images.tar"
    root.write_bytes(b"this is no tar") if members is None else write_tar(root, members)
    assert refused(ValueError, config_of(root)).startswith(start.format(root))


# webdataset leaves the tars that it reads to the garbage collector to close
unclosed = pytest.mark.filterwarnings(
    "ignore:unclosed file:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def shard_root(tmp_path):
    """Two shards to train on, of 5 and 4 images, and one of 3 to validate on; classes 0, 1, 2 in
    turn.
    """
    splits = {}
    for split, lengths, level in (("train", (5, 4), 100), ("validation", (3,), 50)):
        names = [f"{split}-{number}.tar" for number in range(len(lengths))]
        done = 0
        for name, length in zip(names, lengths, strict=True):
            members = []
            for index in range(done, done + length):
                members += [
                    (f"{index:04d}.png", encoded(level + index)),
                    (f"{index:04d}.cls", str(index % 3).encode()),
                ]
            write_tar(tmp_path / name, members)
            done += length
        splits[split] = dict(name=split, num_samples=done, filenames=names, shard_lengths=lengths)
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    return tmp_path


def test_shards_without_their_package_say_what_to_install(shard_root, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("webdataset", "datasets") else find(name),
    )
    for kind, package in (("wds", "webdataset"), ("hfds", "datasets")):
        line = refused(ValueError, config_of(f"{kind}/{shard_root}"))
        assert (
            line
            == f"data root {kind}/{shard_root} needs {package}: pip install 'visionattn[readers]'"
        )


@unclosed
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_are_streamed_through_the_reader_of_timm(shard_root, workers):
    pytest.importorskip("webdataset")
    config = config_of(
        f"wds/{shard_root}",
        num_classes=3,
        on_error="skip",
        workers=workers,
        img_size_choices=[16, 24],
    )
    splits = build_splits(config, 3)
    assert splits.spec.num_classes == 3 and splits.test is None
    batches = train_batches(splits, config, batch_size=2, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        images, labels, _ = zip(*batches.epoch(epoch), strict=True)
        assert len(labels) == len(batches) and all(len(part) == 2 for part in labels)
        levels = torch.cat([part[:, 0, 0, 0] for part in images]).tolist()
        assert set(levels) == set(range(100, 109))
        assert [(level - 100) % 3 for level in levels] == torch.cat(labels).tolist()
        sizes = [part.shape[-1] for part in images]
        assert sizes == [
            batch_geometry((square(16), square(24)), 3, epoch, number).img_size[0]
            for number in range(len(batches))
        ]
        epochs.append(levels)
    assert epochs[0] == epochs[2] and epochs[0] != epochs[1]

    validation = eval_batches(splits.validation, config, batch_size=2, geometry=square(16))
    levels = torch.cat([images[:, 0, 0, 0] for images, _, _ in validation]).tolist()
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
    validation = eval_batches(
        build_splits(config, 3).validation, config, batch_size=2, geometry=square(16)
    )
    with pytest.warns(UserWarning, match="left out 1 unreadable images of"):
        assert [labels.tolist() for _, labels, *_ in validation] == [[0, 2]]
    assert validation.left_out == 1


def test_what_shards_lack_is_said_in_one_line(shard_root, tmp_path_factory):
    pytest.importorskip("webdataset")
    root = f"wds/{shard_root}"
    assert refused(ValueError, config_of(root, on_error="skip")) == (
        f"data root {root} does not say how many classes there are; give num_classes"
    )
    assert refused(ValueError, config_of(root, num_classes=3)) == (
        f"timm's reader of {root} leaves unreadable images out; pass --data.on_error skip"
    )
    empty = tmp_path_factory.mktemp("empty")
    assert refused(
        FileNotFoundError, config_of(f"wds/{empty}", num_classes=3, on_error="skip")
    ).startswith(f"no _info.json in {empty}; wanted one")
    info = json.loads((shard_root / "_info.json").read_text())
    info["splits"]["extra"] = info["splits"].pop("validation")
    (shard_root / "_info.json").write_text(json.dumps(info))
    with pytest.warns(UserWarning, match=f"left out of {root}: extra"):
        assert refused(ValueError, config_of(root, num_classes=3, on_error="skip")) == (
            f"_info.json of {shard_root} has no validation split; it has train, extra"
        )


@unclosed
def test_a_label_beyond_the_number_of_classes_is_refused_in_one_line(shard_root):
    pytest.importorskip("webdataset")
    config = config_of(f"wds/{shard_root}", num_classes=2, on_error="skip")
    batches = train_batches(build_splits(config, 3), config, batch_size=8, seed=3)
    with pytest.raises(
        ValueError, match="an image of .* has label 2; with num_classes 2 wanted 0 to 1"
    ):
        list(batches.epoch(0))


def test_a_hugging_face_table_is_read_by_the_reader_of_timm(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_classes(tmp_path / "train", COUNTS)
    write_classes(tmp_path / "val", VAL_COUNTS)
    config = config_of(f"hfds/{tmp_path}", workers=2)
    splits = build_splits(config, 3)
    assert set(splits.spec.class_names) == set(LEVELS)
    names = splits.spec.class_names
    assert sorted(
        (level, names[label]) for level, label in levels_and_labels(splits.train, config)
    ) == sorted((level, list(LEVELS)[label]) for level, label in expected(COUNTS))
    assert len(splits.validation) == sum(VAL_COUNTS.values())
    assert refused(FileNotFoundError, config_of(f"hfds/{tmp_path}/gone")).startswith(
        "cannot open hfds/"
    )
