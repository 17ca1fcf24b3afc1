"""Folders as people have them: links in circles, pipes, hidden files, names in any encoding."""

import os
import socket

import pytest

from tests.helpers.image_files import config_of, encoded, levels_and_labels, write_classes
from visionattn.data.splits import build_splits
from visionattn.data.walk import images_below
from visionattn.inference.listing import find_images


@pytest.fixture
def pictures(tmp_path):
    for name in ("a/2.png", "a/10.png", "b/deep/1.JPG", "b/notes.txt", "b/.hidden.png", ".c/1.png"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(9))
    return tmp_path / "pictures"


def below(folder):
    return [os.path.relpath(path, folder) for path in images_below(folder)]


FOUND = ["a/2.png", "a/10.png", "b/deep/1.JPG"]


def test_images_are_found_at_any_depth_in_natural_order_without_hidden_ones(pictures):
    assert below(pictures) == FOUND


def test_each_real_folder_counts_once_under_its_path_without_a_link(pictures):
    (pictures / "a" / "up").symlink_to(pictures)
    (pictures / "a" / "self").symlink_to(".")
    (pictures / "0 first").symlink_to(pictures / "b")
    (pictures / "b" / "deep" / "round").symlink_to(pictures / "a" / "up" / "b")
    assert below(pictures) == FOUND


def test_links_to_folders_and_files_elsewhere_are_followed(pictures, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "more").mkdir(parents=True)
    (elsewhere / "more" / "3.png").write_bytes(encoded(9))
    (pictures / "c").symlink_to(elsewhere)
    (pictures / "c1").symlink_to(elsewhere / "more")
    (pictures / "file.png").symlink_to(elsewhere / "more" / "3.png")
    assert below(pictures) == [*FOUND, "c/more/3.png", "file.png"]


def test_a_link_to_nothing_is_listed_as_it_cannot_be_read_later(pictures):
    (pictures / "gone.png").symlink_to(pictures / "nowhere.png")
    assert below(pictures) == [*FOUND, "gone.png"]


def test_pipes_and_sockets_are_no_images(pictures, monkeypatch):
    os.mkfifo(pictures / "pipe.png")
    monkeypatch.chdir(pictures)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
        assert below(pictures) == FOUND
        for name in ("pipe.png", "socket.png", "/dev/null"):
            with pytest.raises(ValueError, match="is a pipe, a socket or a device and no image"):
                find_images([name])


def test_a_zarr_folder_is_one_image_and_not_a_folder_of_some(pictures):
    (pictures / "b" / "x.zarr" / "0").mkdir(parents=True)
    (pictures / "b" / "x.zarr" / "0" / "1.png").write_bytes(encoded(9))
    assert below(pictures) == [*FOUND, "b/x.zarr"]
    zarr = str(pictures / "b" / "x.zarr")
    assert find_images([zarr]).paths == [zarr]


def test_a_folder_that_cannot_be_read_is_an_error(pictures, monkeypatch):
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="deep"):
        images_below(pictures)


def test_a_class_may_be_a_link_and_takes_no_images_of_others(tmp_path):
    write_classes(tmp_path / "elsewhere", {"bird": 4})
    root = tmp_path / "root"
    write_classes(root, {"cat": 3})
    (root / "bird").symlink_to(tmp_path / "elsewhere" / "bird")
    (root / "all").symlink_to(root)
    (root / "cat" / "birds").symlink_to(root / "bird")
    (root / "cat" / "up").symlink_to(root)
    config = config_of(root, val_fraction=0.5)
    splits = build_splits(config, 3)
    assert splits.spec.class_names == ("bird", "cat")
    pairs = levels_and_labels(splits.train, config) + levels_and_labels(splits.validation, config)
    assert sorted(label for _, label in pairs) == [0] * 4 + [1] * 3
