"""Labels, splits, groups, weights and folds of images: from tables, folders and paths."""

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from tests.data.test_mask_files import NUMBERS
from tests.data.test_mask_files import write as write_masks
from tests.helpers.image_files import config_of, refused, write_classes, write_tar
from visionattn.data.splits import build_splits, images_to_judge

COUNTS = {"bird": 7, "cat": 4, "dog 2": 11}
PATHS = [f"{name}/{index}.png" for name, count in COUNTS.items() for index in range(count)]
LABELS = [path.split("/")[0] for path in PATHS]


@pytest.fixture
def root(tmp_path):
    write_classes(tmp_path / "data", COUNTS)
    return tmp_path / "data"


@pytest.fixture
def table(root):
    """Write a table of all images, with the given columns, from the last image to the first; return
    options that name it.
    """

    def write(suffix=".csv", paths=PATHS, **columns):
        frame = pd.DataFrame({"path": paths} | columns)[::-1]
        file = root.parent / f"labels{suffix}"
        if suffix == ".parquet":
            frame.to_parquet(file)
        elif suffix == ".jsonl":
            frame.to_json(file, orient="records", lines=True)
        else:
            frame.to_csv(file, sep="\t" if suffix == ".tsv" else ",", index=False)
        return {"labels": str(file)}

    return write


def names(part):
    places = [part.source.name(index).rpartition("data")[2] for index in part.indices]
    return [place.removeprefix(".tar").lstrip("/:") for place in places]


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".jsonl", ".parquet", "absolute", ".tar"])
def test_a_table_of_class_folders_gives_the_same_images(root, table, tmp_path, kind):
    folders, place, suffix, paths = build_splits(config_of(root), 3), root, kind, PATHS
    if kind == "absolute":
        suffix, paths = ".csv", [str(root / path) for path in PATHS]
    if kind == ".tar":
        suffix, place = ".csv", tmp_path / "data.tar"
        write_tar(place, [(path, (root / path).read_bytes()) for path in PATHS])
    tables = build_splits(config_of(place, **table(suffix, paths, label=LABELS)), 3)
    assert tables.spec == folders.spec
    for part, other in ((tables.train, folders.train), (tables.validation, folders.validation)):
        assert names(part) == names(other) and part.labels.tolist() == other.labels.tolist()
        if kind != ".tar":
            assert part.digests().tolist() == other.digests().tolist()


def test_numbers_as_text_are_classes_in_natural_order(root, table):
    found = build_splits(config_of(root, **table(label=[11, 2] * 11)), 0)
    assert found.spec.class_names == ("2", "11")


def test_images_without_a_row_are_left_out_with_a_warning(root, table):
    with pytest.warns(UserWarning, match="^skipped 2 of 22 images in .*; first: dog 2/9.png$"):
        found = build_splits(config_of(root, **table(paths=PATHS[:-2], label=LABELS[:-2])), 0)
    assert len(found.train) + len(found.validation) == 20


@pytest.mark.parametrize(
    ("columns", "options", "line"),
    [
        ({"label": [""] * 22}, {}, "22 of 22 rows have no label; first: dog 2/10.png, label '"),
        ({"labels": LABELS}, {}, "expected the column label, got path, labels"),
        ({"paths": ["a.png", *PATHS[1:]], "label": LABELS}, {}, "1 of 22 rows name no image in "),
        (
            {"paths": [PATHS[1], *PATHS[1:]], "label": LABELS},
            {},
            "1 of 22 rows repeat the path of ",
        ),
        ({"paths": ["", *PATHS[1:]], "label": LABELS}, {}, "1 of 22 rows have no path; first: (no"),
        ({"paths": [], "label": []}, {}, "has no rows"),
        (
            {"label": LABELS, "split": ["x", "y", *["val"] * 20]},
            {},
            "2 of 22 rows have a split other ",
        ),
        ({"label": LABELS, "group": ["", *"a" * 21]}, {}, "1 of 22 rows have no group; first: bir"),
        (
            {"label": LABELS, "weight": [-1.5] * 22},
            {},
            "22 of 22 rows do not have a number of 0 or more in w",
        ),
        (
            {"label": LABELS, "weight": ["", *[1] * 21]},
            {},
            "1 of 22 rows do not have a number of 0 or more in ",
        ),
        (
            {"label": LABELS, "weight": ["x"] * 22},
            {},
            "22 of 22 rows do not have a number of 0 or more in ",
        ),
        (
            {"a": [2] * 22},
            {"task": "multilabel"},
            "rows do not have 0, 1 or an empty cell in a; first",
        ),
        ({}, {"task": "multilabel"}, "expected the column label, got path"),
        (
            {"label": [None, *[1.0] * 21]},
            {"task": "regression"},
            "1 of 22 rows do not have a number in label",
        ),
        (
            {"label": ["inf"] * 22},
            {"task": "regression"},
            "22 of 22 rows do not have a number in label; first",
        ),
        (
            {"a": [1] * 22},
            {"task": "regression", "columns": ["b"]},
            "expected the column b, got path, a",
        ),
        (None, {"labels": "missing.csv"}, "no label table at missing.csv"),
        (
            None,
            {"labels": "labels.xls"},
            "expected a label table that ends in .csv, .tsv, .jsonl, .parquet, got l",
        ),
        (
            None,
            {"fold": "1/60"},
            "too few images for 60 folds: 22 images, 11 images in the largest class",
        ),
        (
            None,
            {"group_from": "cat"},
            "data.group_from cat has no match in 18 of 22 paths; first: b",
        ),
        (None, {"group_from": "png"}, "too few images in "),
        (
            None,
            {"group_from": "png", "fold": "1/2"},
            "too few images for 2 folds: 1 groups, 11 images in the largest class",
        ),
        (None, {"group_from": "^[^/]*"}, "classes of "),
    ],
)
def test_rows_and_options_that_do_not_fit_are_one_line(root, table, columns, options, line):
    given = {} if columns is None else table(**columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        error = refused((ValueError, FileNotFoundError), config_of(root, **given | options))
    assert line in error


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", b"path,label\ncat/9.png,B\xe4r\n", "is not UTF-8 text; save the table as UTF-8"),
        ("t.csv", b"path,label\ncat/9.png,a,b\ncat/8.png,a\n", "cannot read "),
        ("t.jsonl", b'[{"path": "cat/9.png", "label": "a"}]\n', "expected the column path, got 0"),
    ],
)
def test_texts_that_are_no_table_are_refused(root, tmp_path, name, text, said):
    (tmp_path / name).write_bytes(text)
    assert said in refused(ValueError, config_of(root, labels=str(tmp_path / name)))


def test_splits_come_from_the_column_or_else_from_the_folders(root, table):
    parts = ["Training", "", "dev", "test"]
    splits = build_splits(
        config_of(root, **table(label=["a", "b"] * 11, split=(parts * 6)[:22])), 0
    )
    assert sorted(names(splits.validation)) == sorted(PATHS[2::4])
    assert sorted(names(splits.test)) == sorted(PATHS[3::4]) and len(splits.train) == 12
    moved = PATHS
    for old, new in (("bird", "train"), ("cat", "val"), ("dog 2", "test")):
        (root / old).rename(root / new)
        moved = [path.replace(old, new) for path in moved]
    splits = build_splits(config_of(root, **table(paths=moved, label=["a", "b"] * 11)), 0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [7, 4, 11]


def test_several_labels_are_listed_or_in_columns_with_gaps(root, table):
    listed = ["b; a", "", "c"] * 8
    options = table(label=listed[:22], split=["train"] * 21 + ["val"])
    splits = build_splits(config_of(root, task="multilabel", **options), 0)
    assert splits.spec.class_names == ("a", "b", "c") and splits.train.labels.dtype == np.float32
    assert splits.train.labels[:4].tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 1, 0]]
    columns = table(b=[1, 0] * 11, a=[None, 1] * 11, split=["train"] * 21 + ["val"])
    splits = build_splits(config_of(root, task="multilabel", **columns), 0)
    assert splits.spec.class_names == ("b", "a")
    np.testing.assert_array_equal(splits.train.labels[:2], [[1, np.nan], [0, 1]])
    # Weights define the order, also of classes that the images lack.
    for given in (options, table(a=[1] * 22, b=[0] * 22, c=[0] * 22, d=[0] * 22)):
        config = config_of(root, task="multilabel", **given)
        found, spec = images_to_judge(config, 0, ["d", "c", "b", "a"])
        assert spec.class_names == ("d", "c", "b", "a")
        assert found["all"].labels[0, [0, 3]].tolist() == [0, 1]
    config = config_of(root, task="multilabel", **table(label=listed[:22]))
    with pytest.raises(ValueError, match=r"got c \("):
        images_to_judge(config, 0, ["a", "b"])


def test_numbers_are_the_columns_that_are_named(root, table):
    values = np.linspace(-3, 4, 22)
    options = table(label=LABELS, age=values, size=values**2)
    config = config_of(root, task="regression", columns=["size", "age"], **options)
    splits = build_splits(config, 0)
    rows = [PATHS.index(name) for name in names(splits.train)]
    wanted = np.stack([values[rows] ** 2, values[rows]], 1)
    np.testing.assert_allclose(splits.train.labels, wanted, rtol=1e-6)
    assert splits.spec.class_names == ("size", "age") and len(splits.validation) == 2


def test_weights_have_mean_1_and_are_a_part_of_the_fingerprint(root, table):
    weights = np.arange(22.0)
    made = [
        build_splits(config_of(root, **table(label=LABELS, weight=given)), 0)
        for given in (weights, 3 * weights, weights[::-1])
    ]
    train = made[0].train
    kept = weights[[PATHS.index(name) for name in names(train)]]
    np.testing.assert_allclose(train.weights, kept / kept.mean(), rtol=1e-6)
    assert made[0].validation.weights is None
    assert made[1].train.digests().tolist() == train.digests().tolist()
    assert (made[2].train.digests() != train.digests()).mean() > 0.9
    assert "all training images of" in refused(
        ValueError, config_of(root, **table(label=LABELS, weight=[0] * 22))
    )


def test_masks_take_splits_groups_and_weights_from_a_table(tmp_path, table):
    root = write_masks(tmp_path / "masked", NUMBERS, splits=("",), layout="{kind}")
    paths, splits = [f"images/deep/{number}.png" for number in range(4)], ["val", *["train"] * 3]
    options = table(paths=paths, split=splits, group=[*"abbc"], weight=[2.5] * 4)
    masked = {"task": "segmentation", "masks": {"classes": ["a", "b", "c"]}}
    found = build_splits(config_of(root, **masked, **options), 0)
    assert [found.validation.name(0)[-17:]] == paths[: len(found.validation)]
    assert found.train.weights.tolist() == [1.0] * 3
    for path in sorted(root.rglob("[0-3].png")):  # two images of each patient
        path.rename(path.with_name(f"p{int(path.stem) // 2}_{path.name}"))
    found = build_splits(config_of(root, **masked, group_from=r"(p\d)_", fold="2/2"), 0)
    assert len(found.validation) == 2
    assert len({Path(name).name.split("_")[0] for name in found.validation.names()}) == 1
    paths = [f"images/deep/p{number // 2}_{number}.png" for number in range(4)]
    shared = table(paths=paths, split=splits, group=[*"xabx"])
    assert "1 of 3 groups of " in refused(ValueError, config_of(root, **masked, **shared))


def test_a_pattern_that_groups_no_images_is_a_warning(root):
    with pytest.warns(UserWarning, match="each of the 22 images a group of its own; .* bird/0.png"):
        build_splits(config_of(root, group_from="^[^_]+"), 0)


GROUPS = [f"g{i * 7 % 13}" for i in range(22)]


@pytest.mark.parametrize("source", ["table", "path", None])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_folds_are_those_of_scikit_learn_for_any_source_of_groups(root, table, source, task):
    options = {"task": task}
    if source == "table" or task == "regression":
        column = {"group": GROUPS} if source == "table" else {}
        options |= table(label=LABELS if task == "classification" else range(22), **column)
    groups = {"table": GROUPS, "path": [path.split("/")[1][0] for path in PATHS]}.get(source)
    options |= {"group_from": r"/(\d)"} if source == "path" else {}
    found = [build_splits(config_of(root, fold=f"{k}/3", **options), 5) for k in (1, 2, 3)]
    y = np.zeros(22) if task == "regression" else LABELS
    divide = (StratifiedKFold if groups is None else StratifiedGroupKFold)(
        3, shuffle=True, random_state=5
    )
    for splits, (kept, held) in zip(found, divide.split(y, y, groups), strict=True):
        assert sorted(names(splits.validation)) == sorted(PATHS[i] for i in held)
        assert sorted(names(splits.train)) == sorted(PATHS[i] for i in kept)
    assert Counter(name for each in found for name in names(each.validation)) == Counter(PATHS)
    judged, _ = images_to_judge(config_of(root, fold="2/3", **options), 5, [])
    assert names(judged["validation"]) == names(found[1].validation)


@pytest.mark.parametrize(("share", "held"), [(0.1, 1), (0.25, 3), (0.4, 5), (0.99, 5), (1e-3, 1)])
def test_groups_are_held_out_whole_by_about_the_share(root, table, share, held):
    groups = [path.split("/")[1] for path in PATHS[:11]] + [f"{i % 10}.png" for i in range(11)]
    options = table(label=["a", "b"] * 11, group=groups)
    splits = build_splits(config_of(root, val_fraction=share, **options), 1)
    group_of = dict(zip(PATHS, groups, strict=True))
    parts = [{group_of[name] for name in names(part)} for part in (splits.train, splits.validation)]
    assert not parts[0] & parts[1] and parts[0] | parts[1] == set(groups)
    assert abs(len(parts[1]) - held) <= 1


def test_a_fold_needs_images_without_a_validation_split(root, table):
    options = table(label=["a", "b"] * 11, split=["train"] * 16 + ["val"] * 4 + ["test"] * 2)
    error = refused(ValueError, config_of(root, fold="1/2", **options))
    assert error.startswith("data.fold needs training images without")
    options = table(label=["a", "b"] * 11, split=["train"] * 18 + ["test"] * 4)
    splits = build_splits(config_of(root, fold="1/2", **options), 0)
    assert [len(part) for part in (splits.train, splits.validation, splits.test)] == [9, 9, 4]
    both = config_of(root, group_from="/.", **table(label=LABELS, group=GROUPS))
    assert refused(ValueError, both).startswith("data.group_from and the column group of data.lab")
