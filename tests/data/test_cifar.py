"""CIFAR-10 through torchvision, on 5 training files of 8 images and a test file of 6."""

import hashlib
import pickle
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from tests.helpers.geometry import square
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import build_splits, eval_batches

CLASSES = ["plane", "car", "fowl", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A CIFAR-10 folder with its checksums; images of a file are of classes 0, 1, 2, 3 in turn."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)

    def write(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return name, hashlib.md5((folder / name).read_bytes()).hexdigest()

    def batch(count):
        return {
            "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            "labels": [index % 4 for index in range(count)],
        }

    train = [write(f"data_batch_{number}", batch(8)) for number in range(1, 6)]
    test = [write("test_batch", batch(6))]
    name, checksum = write("batches.meta", {"label_names": CLASSES})
    monkeypatch.setattr(CIFAR10, "train_list", train)
    monkeypatch.setattr(CIFAR10, "test_list", test)
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": checksum})
    return tmp_path


def config_of(root, name="cifar10", **changes):
    usual = {"name": name, "root": str(root), "img_size": 32, "workers": 0, "val_fraction": 0.3}
    return DataConfig(**usual | changes)


def all_of(split, config):
    batches = eval_batches(split, config, batch_size=7, geometry=square(32))
    images, labels, *_ = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def test_validation_is_held_out_of_train_and_the_test_split_is_cifars(root):
    config = config_of(root)
    splits = build_splits(config, 3)
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [28, 12, 6]
    original = CIFAR10(root, train=True)
    pairs = zip(original.data, original.targets, strict=True)
    known = {image.tobytes(): label for image, label in pairs}
    parts = [all_of(split, config) for split in (splits.train, splits.validation)]
    images, labels = map(torch.cat, zip(*parts, strict=True))
    seen = [image.tobytes() for image in images.permute(0, 2, 3, 1).contiguous().numpy()]
    assert dict(zip(seen, labels.tolist(), strict=True)) == known
    assert np.bincount(all_of(splits.validation, config)[1]).tolist() == [3, 3, 3, 3]
    images, labels = all_of(splits.test, config)
    np.testing.assert_array_equal(images.permute(0, 2, 3, 1), CIFAR10(root, train=False).data)
    assert labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert splits.spec.class_names == tuple(CLASSES) and splits.spec.in_chans == 3
    assert splits.spec.encoding is None


def test_pixel_images_are_grey_and_become_one_hot(root):
    config = config_of(root, "cifar10_pixel")
    splits = build_splits(config, 3)
    images, labels = all_of(splits.test, config)
    assert images.shape == (6, 1, 32, 32) and labels.tolist() == [0, 1, 2, 3, 0, 1]
    colours = CIFAR10(root, train=False).data.astype(np.float64)
    luma = colours @ np.array([0.299, 0.587, 0.114])
    assert np.abs(images[:, 0].numpy() - luma).max() < 0.51
    assert splits.spec.in_chans == 256 and splits.spec.encoding == "grey_one_hot"
    prepared = splits.spec.prepare(images)
    assert prepared.shape == (6, 256, 32, 32)
    torch.testing.assert_close(prepared.argmax(1), images[:, 0].long())
    torch.testing.assert_close(prepared.sum(1), torch.ones(6, 32, 32))


@pytest.fixture
def class_folders(root, tmp_path):
    """The same images as PNG files in ``train/<class>`` and ``test/<class>``."""
    folder = tmp_path / "files"
    for split in ("train", "test"):
        part = CIFAR10(root, train=split == "train")
        for number, (image, label) in enumerate(zip(part.data, part.targets, strict=True)):
            place = folder / split / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number:02}.png")
    return folder


@pytest.mark.parametrize("name", ["cifar10", "cifar10_pixel"])
def test_files_in_class_folders_give_the_same_images(root, class_folders, name):
    """Only their order differs, and the numbers of classes, which follow the names."""
    wanted, found = (build_splits(config_of(each, name), 3) for each in (root, class_folders))
    assert found.spec.class_names == ("car", "cat", "fowl", "plane")

    def content(splits, parts):
        names = splits.spec.class_names
        return sorted(
            (image.numpy().tobytes(), names[label])
            for part in parts
            for image, label in zip(*all_of(part, config_of(root, name)), strict=True)
        )

    assert content(found, [found.test]) == content(wanted, [wanted.test])
    learned = [[each.train, each.validation] for each in (found, wanted)]
    assert content(found, learned[0]) == content(wanted, learned[1])
    assert [len(part) for part in learned[0]] == [28, 12]


def test_class_folders_without_a_split_or_with_a_damaged_file_are_one_line(class_folders):
    damaged = class_folders / "test" / "car" / "01.png"
    damaged.write_bytes(b"else")
    with pytest.raises(ValueError, match=f"^cannot read image {damaged}: [^\n]*$"):
        build_splits(config_of(class_folders), 3)
    shutil.copytree(class_folders / "test", class_folders / "val")
    for got in ("train and validation and test", "train and validation"):
        with pytest.raises(ValueError, match=f"^expected images of cifar10 in .*, got {got}$"):
            build_splits(config_of(class_folders), 3)
        shutil.rmtree(class_folders / "test", ignore_errors=True)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_missing_or_damaged_files_say_how_to_fetch_them(root, damage):
    file = root / "cifar-10-batches-py" / "data_batch_3"
    file.unlink() if damage == "missing" else file.write_bytes(b"else")
    said = f"^no complete CIFAR-10 in {root}; pass --data.args.download true to download it$"
    with pytest.raises(FileNotFoundError, match=said):
        build_splits(config_of(root), 3)


def test_a_fetch_that_fails_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", f"file://{tmp_path}/nowhere/cifar.tar.gz")
    said = f"^cannot download CIFAR-10 to {tmp_path / 'data'}: [^\n]*$"
    with pytest.raises(FileNotFoundError, match=said):
        build_splits(config_of(tmp_path / "data", args={"download": True}), 3)
