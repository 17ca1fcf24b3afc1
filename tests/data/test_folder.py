"""The user's own images in folders, and what is said when something is wrong with them."""

import gc
import shutil
import unicodedata
from contextlib import nullcontext

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


def test_train_and_val_folders_are_the_splits(split_root):
    config = config_of(split_root)
    splits = build_splits(config, 3)
    assert splits.spec.class_names == tuple(LEVELS) and splits.spec.num_classes == 4
    assert splits.test is None
    assert sorted(levels_and_labels(splits.train, config)) == expected(COUNTS)
    assert sorted(levels_and_labels(splits.validation, config)) == expected(VAL_COUNTS)


@pytest.mark.parametrize("tar", [False, True])
@pytest.mark.parametrize(
    "names", [("Train", "Val", "Test"), ("training", "VALIDATION", "testing"), ("TRAIN", "dev", "")]
)
def test_splits_are_known_by_their_names_in_any_case(tmp_path, names, tar):
    counts = {names[0]: COUNTS, names[1]: VAL_COUNTS} | ({names[2]: VAL_COUNTS} if names[2] else {})
    root = tmp_path / ("a.tar" if tar else "a")
    if tar:
        write_tar(root, sum((members_of(each, f"./{name}/") for name, each in counts.items()), []))
    for name, each in () if tar else counts.items():
        write_classes(root / name, each)
    splits, config = build_splits(config_of(root), 3), config_of(root)
    assert splits.spec.class_names == tuple(LEVELS)
    assert sorted(levels_and_labels(splits.train, config)) == expected(COUNTS)
    assert sorted(levels_and_labels(splits.validation, config)) == expected(VAL_COUNTS)
    assert (splits.test is not None) == bool(names[2])


@pytest.mark.parametrize("tar", [False, True])
def test_two_names_for_one_split_are_refused(tmp_path, tar):
    names, root = ("train", "valid", "Val"), tmp_path / ("a.tar" if tar else "a")
    if tar:
        write_tar(root, sum((members_of(VAL_COUNTS, f"{name}/") for name in names), []))
    for name in () if tar else names:
        write_classes(root / name, VAL_COUNTS)
    assert refused(ValueError, config_of(root)) == (
        f"data root {root} has two validation splits, Val and valid; wanted one: join them, or "
        "rename one"
    )
    if not tar:  # of a folder and a link to it, one counts
        shutil.rmtree(root / "Val")
        (root / "Val").symlink_to("valid")
        assert len(build_splits(config_of(root), 3).validation) == sum(VAL_COUNTS.values())


@pytest.mark.parametrize("tar", [False, True])
@pytest.mark.parametrize("deep", [False, True])
def test_a_folder_named_train_next_to_classes_is_a_class(tmp_path, deep, tar):
    places = ["bus", "car", *(["train/steam", "train/diesel"] if deep else ["train"])]
    root = tmp_path / ("a.tar" if tar else "a")
    if tar:
        write_tar(root, [(f"{place}/{i}.png", encoded(i)) for place in places for i in range(2)])
    else:
        write_classes(root, dict.fromkeys(places, 2))
    words = pytest.warns(UserWarning, match="train, bus, car; if train are splits, move bus, car")
    with words if deep else nullcontext():
        splits = build_splits(config_of(root), 3)
    assert splits.spec.class_names == ("bus", "car", "train")
    assert len(splits.train) + len(splits.validation) == 2 * len(places)


def test_what_is_left_out_of_a_folder_is_told_in_one_line(split_root):
    write_classes(split_root, {"unlabelled": 2, "annotations": 0, ".git": 1, "__MACOSX": 1})
    write_classes(split_root / "train" / "cat", {".ipynb_checkpoints": 1})
    for name in ("stray.png", "film.MOV", "README.md", "train/cat/9.heic", "val/cat/notes.txt"):
        (split_root / name).write_bytes(b"")
    with pytest.warns(UserWarning) as caught:
        splits = build_splits(config_of(split_root), 3)
    assert [str(each.message) for each in caught] == [
        f"left out of {split_root}: annotations, unlabelled; images in no class or split folder: 1"
        "; files of other kinds: 1 .heic, 1 .mov"
    ]
    assert len(splits.train) == sum(COUNTS.values())


TIES = ("01", "1", "DOG", "DOg", "DoG", "Dog", "dOG", "dOg", "doG", "dog")
"""Names that are equal but for case or leading zeros, in their order."""


@pytest.mark.parametrize("tar", [False, True])
def test_the_order_of_classes_depends_on_their_names_only(tmp_path, tar):
    root = tmp_path / ("a.tar" if tar else "a")
    if tar:
        write_tar(root, [(f"{name}/{i}.png", encoded(i)) for name in TIES for i in range(2)])
    else:
        write_classes(root, dict.fromkeys(TIES, 2))
    assert build_splits(config_of(root), 3).spec.class_names == TIES


def test_a_name_is_the_same_in_both_forms_of_unicode(tmp_path):
    composed, apart = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    write_classes(tmp_path / "train", {composed: 2, "a": 2})
    write_classes(tmp_path / "val", {apart: 1, "a": 1})
    splits = build_splits(config_of(tmp_path), 3)
    assert splits.spec.class_names == ("a", composed)
    assert splits.validation.labels.tolist() == [0, 1]


@pytest.mark.parametrize("layout", ["train alone", "classes alone"])
def test_without_a_validation_folder_a_share_of_each_class_is_held_out_by_the_seed(
    tmp_path, layout
):
    write_classes(tmp_path / "train" if layout == "train alone" else tmp_path, COUNTS)
    config = config_of(tmp_path, val_fraction=0.3)
    splits = build_splits(config, 3)
    train = levels_and_labels(splits.train, config)
    validation = levels_and_labels(splits.validation, config)
    assert sorted(train + validation) == expected(COUNTS)
    assert np.bincount([label for _, label, *_ in validation]).tolist() == [2, 1, 3, 1]
    assert splits.test is None
    assert levels_and_labels(build_splits(config, 3).validation, config) == validation
    assert levels_and_labels(build_splits(config, 4).validation, config) != validation


def test_classes_may_have_any_name_also_digits_that_are_no_numbers(tmp_path):
    names = ["2", "10", "²", "½", "٣", "=cmd", "a²b", "-1"]
    write_classes(tmp_path, dict.fromkeys(names, 2))
    (tmp_path / "²" / "③²10.png").write_bytes(encoded(9))
    splits = build_splits(config_of(tmp_path, val_fraction=0.5), 3)
    found = splits.spec.class_names
    assert sorted(found) == sorted(names) and found.index("2") < found.index("10")
    assert len(splits.train) + len(splits.validation) == 17


def test_images_are_found_at_any_depth_below_a_class_folder_and_by_their_extension(tmp_path):
    write_classes(tmp_path, {"bird": 2, "cat": 2})
    deep = tmp_path / "cat" / "kittens" / "grey"
    deep.mkdir(parents=True)
    (deep / "9.JPG").write_bytes(encoded(129, image_format="jpeg"))
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    splits = build_splits(config_of(tmp_path, val_fraction=0.5), 3)
    assert len(splits.train) + len(splits.validation) == 5


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


def test_a_missing_root_is_named(tmp_path):
    assert refused(FileNotFoundError, config_of(tmp_path / "gone")).startswith(
        f"data root {tmp_path / 'gone'} does not exist; wanted train/<class>/* and val/<class>/*, "
        f"or <class>/*"
    )


def test_an_empty_root_is_named(tmp_path):
    assert refused(ValueError, config_of(tmp_path)).startswith(
        f"data folder {tmp_path} has no class folders; wanted"
    )


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_class_folder_without_images_is_named(split_root, split):
    empty = split_root / split / "yak"
    empty.mkdir()
    (empty / "notes.txt").write_text("not an image")
    line = refused(ValueError, config_of(split_root))
    assert line.startswith(f"class folder {empty} holds no images, which end in .avif, .bif, ")
    assert " .jpg, " in line and line.endswith("; add some or delete the folder")


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
    assert (
        line
        == f"too few images in {tmp_path} to hold some out for validation; wanted two of some class"
    )


def test_a_root_that_is_another_file_is_refused(tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK")
    line = refused(ValueError, config_of(tmp_path / "data.zip"))
    assert line.startswith(f"data root {tmp_path / 'data.zip'} is neither a folder nor a .tar file")


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


@pytest.mark.parametrize("layout", ["flat", "deep", "splits", "beside folders", "an empty folder"])
def test_images_without_classes_are_found_wherever_they_lie(tmp_path, layout):
    """Where labels are asked for, what has no class folders is refused."""
    counts = {"": 5}
    if layout == "deep":
        counts = {"": 1, "2024": 3, "2024/a": 2}
    if layout == "splits":
        counts = {"train": 4, "train/more": 3, "val": 2}
    if layout == "beside folders":
        counts = {"": 2, "cat": 3, "dog": 3}
    if layout == "an empty folder":
        counts = {"cat": 3, "dog": 3, "empty": 0}
    for place, count in counts.items():
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (tmp_path / place / f"{number}.png").write_bytes(encoded(20 * number))
    config = config_of(tmp_path, val_fraction=0.3)
    splits = build_splits(config, 3, labelled=False)
    assert (splits.spec.num_classes, splits.spec.class_names) == (0, ())
    assert len(splits.train) + len(splits.validation) == sum(counts.values())
    if layout == "splits":
        assert (len(splits.train), len(splits.validation)) == (7, 2)
    assert {label for _, label, *_ in levels_and_labels(splits.train, config)} == {0}
    if layout in ("flat", "splits", "an empty folder"):
        with pytest.raises(ValueError, match="folder"):
            build_splits(config, 3)


def test_images_beside_masks_are_no_two_classes(tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / name / "a.png")
    with pytest.raises(ValueError, match="has the folders images and masks: --data.task segm"):
        build_splits(config_of(tmp_path), 0)


def test_class_folders_keep_their_classes_where_none_are_needed(split_root):
    config = config_of(split_root)
    with_labels, without = (build_splits(config, 3, labelled=kind) for kind in (True, False))
    assert with_labels.spec == without.spec
    assert levels_and_labels(without.train, config) == levels_and_labels(with_labels.train, config)


def test_a_folder_without_images_is_refused_in_one_line(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ValueError, match=r"data folder \S+ holds no images, which end in"):
        build_splits(config_of(tmp_path), 3, labelled=False)
