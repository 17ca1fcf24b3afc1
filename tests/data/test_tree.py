"""The user's own images in folders and tars: splits, classes, order and errors."""

import gzip
import os
import tarfile
import unicodedata
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.geometry import square
from tests.helpers.image_files import config_of, encoded, levels_and_labels, refused, write_tar
from visionattn.data.folder_walk import images_below
from visionattn.data.splits import SampleKey, build_splits
from visionattn.inference.image_listing import find_images as list_images

TIES = ("01", "1", "2", "10", "DOG", "Dog", "dog", "²")
"""Names in their order; some differ only in case or leading zeros."""
ACCENT = [unicodedata.normalize(form, "é") for form in ("NFC", "NFD")]


def write(root, text, kind):
    """Write ``folder:count`` images, each of its own level, and files without a count."""
    level = 0
    for word in text.split():
        name, _, count = word.partition(":")
        if not count:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"")
        for index in range(int(count or 0)):
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name / f"{index}.png").write_bytes(encoded(level := level + 1))
    if kind == "folder":
        return root
    with tarfile.open(f"{root}.tar", "w") as tar:
        tar.add(root, "./around")
    return f"{root}.tar"


LAYOUTS = {
    "train/a:3 train/b:4 val/a:1 test/b:2": ("a b", (7, 1, 2), ""),
    "photos/TRAIN/a:3 photos/dev/a:1 photos/Testing/a:2": ("a", (3, 1, 2), ""),
    "a/x:3 a/y/z:5 b:4": ("a b", (9, 3, 0), ""),
    "bus:4 car:4 train:4": ("bus car train", (9, 3, 0), ""),
    "bus:4 train/a:8": ("bus train", (9, 3, 0), "classes of {}: train, bus; if train are"),
    "train/a:4 val/a:1 0:1 .git/a:2 __MACOSX/a:3 film.MOV a.heic README.md": (
        "a",
        (4, 1, 0),
        "ignored in {}: 0; files of other kinds: 1 .heic, 1 .mov",
    ),
    "train:2 train/a:4 val/a:1": ("a", (4, 1, 0), "ignored in {}: images in no class or split"),
    " ".join(f"{name}:4" for name in TIES[::-1]): (" ".join(TIES), (24, 8, 0), ""),
    f"train/{ACCENT[0]}:2 train/a:2 val/{ACCENT[1]}:1": (f"a {ACCENT[0]}", (4, 1, 0), ""),
}


@pytest.mark.parametrize("text", LAYOUTS)
def test_folders_and_tars_say_splits_and_classes(tmp_path, text):
    classes, counts, told = LAYOUTS[text]
    folder = write(tmp_path / "a", text, "folder")
    for root in (folder, write(folder, "", "tar")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            splits = build_splits(config_of(root, val_fraction=0.25), 3)
        said = [str(each.message) for each in caught]
        assert len(said) == bool(told) and all(each.startswith(told.format(root)) for each in said)
        assert splits.spec.class_names == tuple(classes.split())
        parts = [part for part in (splits.train, splits.validation, splits.test) if part]
        assert [len(part) for part in parts] == list(counts[: len(parts)])
        for part in parts:
            assert part.labels.tolist() == sorted(part.labels)
            for index, label in enumerate(part.labels):
                folders = unicodedata.normalize("NFC", part.name(index)).split("/")
                assert splits.spec.class_names[label] in folders


REFUSED = {
    "train/a:3 Training/a:3 val/a:1": "expected one train split in data root {}, got train and ",
    "train/a:3 val/b:2 val/c:1": "classes of {} in validation but not in train: b, c",
    "val/a:3": "no training images in data root {}, only validation; expected train/<class>/*",
    "a:1 b:1": "too few images in {} to hold out a validation split; expected at",
    "train:3 val:2": "{} has images outside of class folders; expected train/<class>/*",
    "notes.txt a.heic": "no images in {}; it holds 1 .heic; expected train/<class>/*",
    "images:2 masks:2": "data folder {} has the folders images and masks; pass --data.task seg",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_trained_on_is_one_line(tmp_path, text):
    root = write(tmp_path / "a", text, "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = refused(ValueError, config_of(root))
    assert line.startswith(REFUSED[text].format(root))


def test_roots_that_are_no_folder_of_images_are_one_line(tmp_path):
    write(tmp_path / "a", "x:2 y:2 y/notes.txt", "folder")
    (tmp_path / "a" / "empty").mkdir()
    plain = Path(write(tmp_path / "b", "x:2", "tar")).read_bytes()
    (tmp_path / "a.zip").write_bytes(plain)
    (tmp_path / "a.TAR").write_bytes(gzip.compress(plain))
    for name, error, said in (
        ("a", ValueError, "class folder {}/empty has no images; add some or delete the folder"),
        ("gone", FileNotFoundError, "data root {} does not exist; expected train/<class>/*"),
        ("a.zip", ValueError, "expected a folder or a .tar file, got data root {}; decompress a "),
        ("a.TAR", ValueError, "cannot read {} as a tar"),
    ):
        line = refused(error, config_of(tmp_path / name))
        assert line.startswith(said.format(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "kind", "counts"),
    [("0:3 0/a:3 2024:2", "tar", (6, 2)), ("train:4 train/more:4 val:2", "folder", (8, 2))],
)
def test_images_without_classes_are_found_wherever_they_lie(tmp_path, text, kind, counts):
    root = write(tmp_path / "a", text, "folder")
    if kind == "tar":
        (root / "beside.png").write_bytes(encoded(99))
        (root / "0" / "0.png").unlink()
        root = write(root, "", kind)
    splits = build_splits(config_of(root, val_fraction=0.25), 3, labelled=False)
    assert (splits.spec.num_classes, splits.spec.class_names) == (0, ())
    assert (len(splits.train), len(splits.validation)) == counts
    assert set(splits.train.labels) == {0}


def test_the_seed_holds_out_a_share_of_each_class(tmp_path):
    config = config_of(write(tmp_path / "a", "a:7 b:4 c:12", "folder"), val_fraction=0.3)
    splits = [build_splits(config, seed) for seed in (3, 3, 4)]
    assert np.bincount(splits[0].validation.labels).tolist() == [2, 1, 4]
    names = [each.validation.names() for each in splits]
    assert names[0] == names[1] != names[2]


def test_links_in_a_tar_are_not_followed_and_told(tmp_path):
    root = write(tmp_path / "a", "train/a:2 val/a:1", "folder")
    os.link(root / "train/a/0.png", root / "train/a/2.png")
    (root / "train/a/3.png").symlink_to("0.png")
    tar = write(root, "", "tar")
    with pytest.warns(UserWarning, match=f"^ignored in {tar}: files of other kinds: 2 links$"):
        assert len(build_splits(config_of(tar), 3).train) == 2


def test_a_tar_is_read_by_several_workers_and_holds_tars(tmp_path):
    for name, first in (("cat", 40), ("bird", 80)):
        write_tar(tmp_path / f"{name}.tar", [(f"{i}.png", encoded(first + i)) for i in range(4)])
    inner = [(f"{name}.tar", (tmp_path / f"{name}.tar").read_bytes()) for name in ("cat", "bird")]
    write_tar(tmp_path / "all.tar", inner)
    config = config_of(tmp_path / "all.tar", workers=2, val_fraction=0.25)
    splits = build_splits(config, 3)
    _ = splits.train[SampleKey(0, 0, square(16))]  # before there are workers
    parts = splits.train, splits.validation
    seen = [pair for part in parts for pair in levels_and_labels(part, config, 2)]
    assert sorted(seen) == [(40 + i, 1) for i in range(4)] + [(80 + i, 0) for i in range(4)]


@pytest.mark.parametrize("image_format", ["png", "jpeg", "tiff"])
def test_members_of_a_tar_have_the_size_of_their_content_whatever_their_names(
    tmp_path, image_format
):
    content = encoded(40, (31, 53), image_format)
    write_tar(tmp_path / "a.tar", [(f"cat/{index}.img.png", content) for index in range(3)])
    split = build_splits(config_of(tmp_path / "a.tar", val_fraction=0.4), 3).train
    assert split.sizes().tolist() == [[31, 53]] * 2
    with split.source.open(1) as member:
        assert member.read() == content


@pytest.fixture
def pictures(tmp_path):
    return write(tmp_path / "pictures", "a/2.png a/10.png b/deep/1.JPG b/n.txt b/.h.png .c/1.png",
                 "folder")  # fmt: skip


FOUND = ["a/2.png", "a/10.png", "b/deep/1.JPG"]


def below(folder):
    return [os.path.relpath(path, folder) for path in images_below(folder)]


def test_links_are_followed_and_each_real_folder_counts_once(pictures, tmp_path):
    (pictures / "a" / "up").symlink_to(pictures)
    (pictures / "0 first").symlink_to(pictures / "b")
    write(tmp_path / "elsewhere", "more:1", "folder")
    (pictures / "c").symlink_to(tmp_path / "elsewhere")
    (pictures / "c1").symlink_to(tmp_path / "elsewhere" / "more")
    (pictures / "gone.png").symlink_to(pictures / "nowhere.png")
    assert below(pictures) == [*FOUND, "c/more/0.png", "gone.png"]


def test_a_class_and_a_split_may_be_links_and_take_no_images_of_others(tmp_path):
    write(tmp_path / "elsewhere", "bird:4", "folder")
    root = write(tmp_path / "root", "train/cat:3 test/cat:2", "folder")
    (root / "train" / "bird").symlink_to(tmp_path / "elsewhere" / "bird")
    (root / "train" / "cat" / "birds").symlink_to(root / "train" / "bird")
    (root / "val").symlink_to("test")
    (root / "Test").symlink_to("test")
    splits = build_splits(config_of(root), 3)
    assert splits.spec.class_names == ("bird", "cat")
    assert np.bincount(splits.train.labels).tolist() == [4, 3]
    assert (len(splits.validation), len(splits.test)) == (2, 2)


def test_a_pipe_is_no_image_and_a_zarr_folder_is_one(pictures):
    os.mkfifo(pictures / "pipe.png")
    with pytest.raises(ValueError, match="is a pipe, a socket or a device, not an image"):
        list_images([str(pictures / "pipe.png")])
    zarr = pictures / "b" / "x.zarr"
    write(zarr, "0/1.png", "folder")
    assert below(pictures) == [*FOUND, "b/x.zarr"] and list_images([str(zarr)]).paths == [str(zarr)]


def test_a_folder_that_cannot_be_read_is_an_error(pictures, monkeypatch):
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="deep"):
        images_below(pictures)
