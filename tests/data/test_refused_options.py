"""Options that are out of range, contradict each other or would do nothing are one line each."""

import json
import math

import pytest

from tests.helpers.image_files import config_of, refused, write_classes
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import build_splits

FOLDER = dict(name="folder", root="pictures")
MASKED = FOLDER | dict(task="segmentation")
COPY = dict(name="copy", task="generate")
RED = {"red": "{name}_R.tif"}
THREE = [[0, 0, 0], [200, 30, 30], [0, 90, 255]]

CASES = [
    # Options that are for other data.
    (dict(bands=[1]), "data.bands needs folder, got digits; remove it"),
    (dict(cache="x"), "data.cache needs images in files that are not streamed, got digits"),
    (FOLDER | dict(root="wds/x", cache="x"), "data.cache needs images in files that are not"),
    (FOLDER | dict(args={"num_classes": 3}), "data.args.num_classes needs data.root wds/..."),
    (dict(root="x"), "data.root needs images in files (--data.name folder), got digits; "),
    (dict(name="cifar10", args={"download": 3}), "data.args.download must be true or false, got"),
    (
        dict(masks={"classes": ["a", "b"]}),
        "data.masks needs folder with data.task segmentation",
    ),
    (dict(task="segmentation"), "digits has no masks; data.task segmentation needs canvas, doc"),
    (dict(args={"train_images": 7}), "data.args needs one of canvas, documents, copy, cifar10"),
    (
        dict(name="canvas", augment="a.yaml"),
        "augment a.yaml is not available for canvas; use none,",
    ),
    (dict(name="documents", max_patches=9), "data.max_patches needs images that are read"),
    (
        dict(name="digits", augment="three"),
        "augment three is not available for digits; use none, l",
    ),
    # Missing roots.
    (
        dict(name="folder"),
        "data.name folder needs data.root; expected train/<class>/* and val/<class>/*, or",
    ),
    (dict(name="cifar10"), "cifar10 needs data.root: a folder with cifar-10-"),
    # Numbers.
    (dict(workers=-1), "data.workers must be at least 0, got -1"),
    (dict(workers=10**6), "data.workers must be at most "),
    (dict(val_fraction=0.0), "data.val_fraction must be in (0, 1), got 0.0"),
    (dict(img_size_choices=[8, 0]), "data.img_size_choices[1] must be above 0, got 0"),
    # Sizes.
    (
        dict(img_size=[64]),
        "data.img_size: expected one number of pixels, or height and width, got [",
    ),
    (dict(img_size=2**21), "data.img_size must be at most 1,048,576, got 2,097,152"),
    (dict(batch_patches=4), "data.batch_patches needs fit native, got crop; use"),
    (dict(max_patches=4), "data.max_patches needs fit native, got"),
    (FOLDER | dict(max_patches=0), "data.max_patches must be above 0, got 0"),
    (FOLDER | dict(max_patches=9, img_size=9), "data.img_size and data.max_patches both limit the"),
    (FOLDER | dict(max_patches=9, img_size_choices=[9]), "pass either data.img_size_choices or "),
    (FOLDER | dict(fit="pad"), "data.fit pad needs data.img_size"),
    (
        dict(name="canvas", img_size=40),
        "canvas of 40 pixels is too small for its digits; use at least 4",
    ),
    (dict(name="documents", img_size=32), "documents of 32 pixels are too small for their marks; "),
    # Sequences and other values that are written one after the other.
    (dict(name="copy"), "copy has no classes; expected data.task generate"),
    (
        COPY | dict(img_size=[1, 3]),
        "copy needs one row of at least 4 values, got",
    ),
    (
        dict(name="digits_pixel", task="generate"),
        "digits_pixel has one-hot gray levels; for data.task",
    ),
    (dict(name="documents", task="generate", img_size=300), "expected pieces of documents of at m"),
    (dict(name="documents", task="generate", fit="pad"), "data.task generate uses crops of docu"),
    (
        FOLDER | dict(task="generate", mean=[0.5] * 3),
        "data.mean needs other tasks than generate,",
    ),
    # Drawn data.
    (dict(name="canvas", args={"distractors": -1}), "data.args.distractors must be at least 0, go"),
    (dict(name="canvas", args={"whole_digits": 3}), "data.args.whole_digits must be 1 or 2, got 3"),
    (
        dict(name="canvas", args={"digit_px": [4, 12]}),
        "data.args.digit_px: expected the smallest and",
    ),
    (dict(name="canvas", args={"digit_px": [16, 200]}), "canvas of 128 pixels is too small for it"),
    (dict(name="canvas", args={"fragments": 4}), "data.args has an unknown key fragments"),
    (
        dict(name="canvas", args={"digit_px": [20, 24], "whole_digits": 2}),
        "expected data.args.digit_px with a largest side of at least 1.25 times",
    ),
    # How files are read.
    (FOLDER | dict(bands=[0, 2]), "data.bands must be numbers from 1, got [0, 2]"),
    (FOLDER | dict(page=0), "data.page must be at least 1, got 0"),
    (FOLDER | dict(value_range=[0, math.inf]), "data.value_range must be two finite numbers, the "),
    (FOLDER | dict(root="wds/x", bands=[1]), "timm's reader of wds/x reads only RGB of the fir"),
    # Tables of labels.
    (FOLDER | dict(labels="a.csv", task="generate"), "data.labels needs tasks with"),
    (FOLDER | dict(labels="a.csv", root="hfds/x"), "data.labels needs folders and tars"),
    (FOLDER | dict(columns=["a"]), "data.columns needs data.labels"),
    (FOLDER | dict(labels="a.csv", columns=["a"]), "data.columns needs data.labels with data.task"),
    (
        FOLDER | dict(task="regression"),
        "data.task regression needs a label table; pass --data",
    ),
    (
        FOLDER | dict(fold="0/5"),
        "data.fold must be k/n with k from 1 to n and n at least 2, e.g. 1",
    ),
    (FOLDER | dict(group_from="("), "data.group_from ( is no regular expression: "),
    # Masks.
    (
        MASKED | dict(masks={"layers": RED | {"dots": "{name}_D.tif"}, "classes": ["a", "b"]}),
        "data.masks.layers names all classes; remove all other keys except images",
    ),
    (
        MASKED | dict(masks={"layers": {"red": "truth/red.tif"}}),
        "expected paths with {name} in data.masks.layers, got truth/red.tif",
    ),
    (
        MASKED | dict(masks={"layers": RED | {"dots": "truth/{name}_D.jpg"}}),
        "expected data.masks.layers to end in .png, .tif, .tiff, .bmp, .gif, got truth/{name}_D.j",
    ),
    (
        MASKED | dict(masks={"layers": {}}),
        "expected 2 to 255 classes in data.masks.classes, got 1",
    ),
    (MASKED | dict(masks={"images": "pictures"}), "data.masks.images needs data.masks.layers"),
    (MASKED | dict(root=__file__), f"data root {__file__} is not a folder; expected images/*"),
]
MEANINGS = [
    (dict(classes=["a"]), "expected 2 to 255 classes in {}.classes, got 1"),
    (dict(classes=["a", "a"]), "expected distinct names in {}.classes, got ['a', 'a']"),
    (dict(colours=[[0, 0], [1, 1]]), "expected red, green and blue of each class, 0 to 255, in {}"),
    (dict(colours=[[0] * 3] * 2), "expected distinct colors in {}.colours, one per class"),
    (dict(colours=THREE, classes=["a", "b"]), "expected as many {0}.classes as {0}.colours, got 2"),
    (dict(ignored=-1), "{}.ignored must be one value from 0 to 65535, got -1"),
    (dict(ignored=[255]), "{}.ignored must be one value from 0 to 65535, got [255]"),
    (dict(colours=THREE, ignored=255), "{}.ignored must be red, green and blue, 0 to 255, got 255"),
    (dict(colours=THREE, ignored=THREE[1]), "{}.ignored [200, 30, 30] is the value of a class"),
    (
        dict(classes=["a", "b"], ignored=1),
        "{}.ignored 1 is the value of a class; pass another value",
    ),
    (dict(names=["a", "b"]), "{} has an unknown key names"),
]


@pytest.mark.parametrize("name", sorted({given.get("name", "digits") for given, _ in CASES}))
def test_options_of_data_are_refused(name):
    for given, line in CASES:
        if given.get("name", "digits") == name:
            error = refused(ValueError, DataConfig(**dict(name="digits") | given))
            assert error.startswith(line), (given, error)


def test_wrong_meanings_of_masks_are_refused_from_options_and_files(tmp_path):
    path = tmp_path / "classes.json"
    (tmp_path / "images").mkdir()
    for given, line in MEANINGS:
        error = refused(ValueError, DataConfig(**MASKED, masks=given))
        assert error.startswith(line.format("data.masks")), (given, error)
        path.write_text(json.dumps(given))
        error = refused(ValueError, DataConfig(**MASKED | dict(root=str(tmp_path))))
        assert error.startswith(line.format(path)), (given, error)


def test_means_are_as_many_as_channels(tmp_path):
    write_classes(tmp_path, {"bird": 2, "cat": 2})
    given = dict(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6], val_fraction=0.5)
    spec = build_splits(config_of(tmp_path, **given), 3).spec
    assert (spec.mean, spec.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    for changes, line in (
        (dict(mean=[0.1]), "expected 3 numbers for data.mean, one per channel, got 1"),
        (dict(std=[1, 1, 0]), "expected data.std to be finite and above 0, got [1, 1, 0]"),
        (dict(bands=[1]), "expected 1 numbers for data.mean, one per channel, got 3"),
    ):
        assert refused(ValueError, config_of(tmp_path, **given | changes)) == line
