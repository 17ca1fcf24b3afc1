"""Several labels and numbers per image: losses, metrics, and runs on a table of labels."""

import io
import json
from dataclasses import replace
from itertools import compress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score

import visionattn
from tests.helpers.resumed_runs import assert_same_end, on_small_data, status_of, stop
from tests.helpers.several_processes import train_on
from tests.helpers.small_runs import lines
from tests.helpers.tools import assert_one_error, read_csv
from tests.helpers.vector_labels import (
    NAMES,
    columns,
    config_of,
    rows_of,
    write_csv,
    write_table,
)
from visionattn.command import main
from visionattn.data.splits import build_splits
from visionattn.models.weights import DataSpec, load_model, read_spec
from visionattn.training import engine
from visionattn.training.config import LossConfig
from visionattn.training.label_statistics import with_class_weights
from visionattn.training.losses import label_losses
from visionattn.training.output_scores import read_by_output, scores_of

TASKS = ("multilabel", "regression")
OPTIM = {"lr": 1e-2, "ema_decay": 0.9}
SPEC = DataSpec(1, 3, NAMES, (0.3,), (0.2,), None, 16)


@pytest.fixture(scope="module", autouse=True)
def small_runs():
    with on_small_data(build_splits):
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_table(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def runs(images, tmp_path_factory):
    """The folder of a finished run of each task."""
    found = {}
    for task in TASKS:
        output = tmp_path_factory.mktemp(task)
        engine.train(config_of(images, output, task, optim=OPTIM), stream=io.StringIO())
        found[task] = output / "small"
    return found


def by_hand(logits, targets, weights, smoothing, focal):
    p = 1 / (1 + np.exp(-logits))
    y = targets * (1 - smoothing) + smoothing / 2
    losses = -weights * y * np.log(p) - (1 - y) * np.log(1 - p)
    if focal:
        losses *= np.where(targets == 1, 1 - p, p) ** 2
    return np.nan_to_num(losses).sum(1) / np.maximum((~np.isnan(targets)).sum(1), 1)


@pytest.mark.parametrize(
    ("weights", "smoothing", "focal"),
    [(None, 0, False), ([2, 0.5, 7], 0.2, False), (None, 0, True), ([2, 0.5, 7], 0, True)],
)
def test_the_loss_of_labels_is_the_mean_over_labels_that_count(weights, smoothing, focal):
    rng = np.random.default_rng(1)
    logits, targets = 2 * rng.normal(size=(5, 3)), rng.integers(0, 2, (5, 3)).astype(float)
    targets[0, 1] = targets[2, 0] = targets[3] = np.nan
    given = torch.tensor(logits, requires_grad=True)
    how = {"weights": weights and torch.tensor(weights), "smoothing": smoothing, "focal": focal}
    found = label_losses(given, torch.tensor(targets), **how)
    wanted = by_hand(logits, targets, np.array(weights or 1.0), smoothing, focal)
    np.testing.assert_allclose(found.detach(), wanted, rtol=1e-6)
    [gradient] = torch.autograd.grad(found.sum(), given)
    assert (gradient.numpy()[np.isnan(targets)] == 0).all() and gradient.isfinite().all()


def test_balanced_weights_of_labels_are_negatives_over_positives():
    labels = np.array([[1, 0], [0, 1], [0, np.nan], [np.nan, 1], [0, 1.0]])
    splits = SimpleNamespace(
        train=SimpleNamespace(labels=labels), spec=replace(SPEC, task="multilabel")
    )
    found = with_class_weights(LossConfig("focal", "balanced"), splits)
    assert found == LossConfig("focal", [3.0, 1 / 3])


def f1_of(known, found):
    return 2 * (known * found).sum() / (known.sum() + found.sum())


def test_metrics_of_labels_count_only_known_ones_and_choose_the_threshold_with_the_best_f1():
    rng = np.random.default_rng(2)
    labels, values = rng.integers(0, 2, (40, 3)).astype(float), rng.random((40, 3))
    labels[rng.random((40, 3)) < 0.2], labels[:, 2] = np.nan, 0
    found = scores_of(replace(SPEC, task="multilabel"), labels, values)
    aps, bests = [], []
    for known, own, limit in zip(labels.T[:2], values.T, found.columns["threshold"], strict=False):
        own, known = own[~np.isnan(known)], known[~np.isnan(known)]
        aps.append(average_precision_score(known, own))
        bests.append(max(f1_of(known, own >= x) for x in own))
        assert limit not in own and f1_of(known, own >= limit) == bests[-1]
    assert found.columns["AP"] == [*map(pytest.approx, aps), None]
    assert found.columns["F1"] == [*map(pytest.approx, bests), None]
    assert found.columns["threshold"][2] == 0.5
    assert found.means == {"mAP": pytest.approx(np.mean(aps)), "F1": pytest.approx(np.mean(bests))}
    fixed = scores_of(replace(SPEC, task="multilabel", thresholds=(0, 0, 0)), labels, values)
    share = np.nanmean(labels[:, 0])
    assert fixed.columns["F1"][0] == pytest.approx(2 * share / (1 + share))


def predictions(folder: Path, images: Path, split: str) -> tuple[np.ndarray, np.ndarray, DataSpec]:
    """The labels of a split, and what the weights of a run say of each image."""
    model = load_model(folder / "best.safetensors")
    spec, rows = model.data_spec, rows_of(images)
    rows = [row for row in rows if row["split"] == split]
    pixels = [np.array(Image.open(images / row["path"]).convert("RGB")) for row in rows]
    with torch.inference_mode():
        batch = torch.tensor(np.stack(pixels)).permute(0, 3, 1, 2)
        values = spec.values_of(model(spec.prepare(batch))).numpy()
    labels = [[float(row[name] or "nan") for name in columns(spec.task)] for row in rows]
    return np.array(labels, np.float32).astype(float), values, spec


def test_a_run_keeps_thresholds_of_the_validation_images_and_tests_with_them(runs, images):
    folder = runs["multilabel"]
    labels, values, spec = predictions(folder, images, "val")
    kept = read_by_output(folder / "validation.json")
    assert list(spec.thresholds) == kept.columns["threshold"] and kept.names == list(NAMES)
    wanted = scores_of(replace(spec, thresholds=None), labels, values)
    assert kept.columns["AP"] == pytest.approx(wanted.columns["AP"])
    labels, values, _ = predictions(folder, images, "test")
    tested, test = read_by_output(folder / "test.json"), lines_of_kind(folder, "test")[0]
    wanted = scores_of(spec, labels, values)  # with the thresholds of the validation images
    assert tested.columns["F1"] == pytest.approx(wanted.columns["F1"])
    assert [test["map"], test["f1"]] == pytest.approx(list(wanted.means.values()))
    assert test["map"] > 0.6
    entropy = by_hand(np.log(values / (1 - values)), labels, 1.0, 0, False).mean()
    assert test["loss"] == pytest.approx(entropy, rel=1e-4)


def test_a_run_predicts_numbers_in_the_units_of_the_table(runs, images):
    folder = runs["regression"]
    labels, values, spec = predictions(folder, images, "test")
    trained = predictions(folder, images, "train")[0]
    wanted = [trained.mean(0), trained.std(0)]
    np.testing.assert_allclose([spec.target_mean, spec.target_std], wanted)
    tested, test = read_by_output(folder / "test.json"), lines_of_kind(folder, "test")[0]
    errors = values - labels
    r2 = 1 - (errors**2).sum(0) / ((labels - labels.mean(0)) ** 2).sum(0)
    wanted = {"R2": r2, "MAE": abs(errors).mean(0), "RMSE": np.sqrt((errors**2).mean(0))}
    for name, each in wanted.items():
        assert tested.columns[name] == pytest.approx(each.tolist(), rel=1e-4), name
        assert test[name.lower()] == pytest.approx(each.mean(), rel=1e-4)
    assert test["loss"] == pytest.approx(((errors / spec.target_std) ** 2).mean(), rel=1e-4)
    assert test["r2"] > 0 and len(tested.points) == 3
    np.testing.assert_allclose(tested.points[1], np.stack([labels, values], 2)[:, 1], rtol=1e-5)
    lowest = min(lines_of_kind(folder, "epoch"), key=lambda line: line["val_mae"])
    result = status_of(folder)["result"]
    assert result["best_epoch"] == lowest["epoch"] == tested.epoch
    assert result["validation_mae"] == lowest["val_mae"] and result["test_mae"] == test["mae"]


def lines_of_kind(folder: Path, kind: str) -> list[dict]:
    return [line for line in lines(folder) if line["kind"] == kind]


@pytest.mark.parametrize("task", ["regression", pytest.param("multilabel", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_amid_an_epoch_and_resumed_ends_in_the_same_bits(
    images, runs, tmp_path, task
):
    config = config_of(images, tmp_path, task, optim=OPTIM)
    stop(config, 10)
    engine.train(replace(config, resume=True), stream=io.StringIO())
    assert_same_end(runs[task], tmp_path / "small")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("task", TASKS)
def test_two_processes_get_the_metrics_of_one(images, runs, tmp_path, task):
    train_on(2, config_of(images, tmp_path, task, optim=OPTIM))
    folders = [runs[task], tmp_path / "small"]
    [one], [two] = (lines_of_kind(each, "test") for each in folders)
    assert two == pytest.approx(one, abs=1e-4)
    points = [np.array(read_by_output(each / "test.json").points) for each in folders]
    assert points[1] == pytest.approx(points[0], abs=1e-3)


@pytest.mark.parametrize(
    ("task", "cell", "line"),
    [
        ("multilabel", "0", "data.task multilabel: no training image has class ne; add some"),
        ("regression", "3", "data.task regression: target light ne is the same for all training"),
    ],
)
def test_labels_without_information_are_refused(tmp_path, task, cell, line):
    images = write_table(tmp_path)
    rows = rows_of(images)
    for row in rows:
        row[columns(task)[0]] = cell
    write_csv(images / "labels.csv", rows)
    with pytest.raises(ValueError, match=line):
        engine.train(config_of(images, tmp_path / "out", task))
    assert not (tmp_path / "out").exists()


def paths_of(images: Path) -> list[str]:
    return [row["path"] for row in rows_of(images) if row["split"] == "test"]


@pytest.mark.parametrize("task", TASKS)
def test_validate_and_predict_name_every_output(runs, images, tmp_path, capsys, monkeypatch, task):
    monkeypatch.chdir(images)
    best = str(runs[task] / "best.safetensors")
    names, paths = columns(task), paths_of(images)
    values, spec = predictions(runs[task], images, "test")[1:]
    tested = read_by_output(runs[task] / "test.json").columns
    # validate: the means, and a line for each output
    assert main(["validate", "--checkpoint", best, "--split", "test"]) == 0
    shown = capsys.readouterr().out.splitlines()
    key = "AP" if task == "multilabel" else "R2"
    for name, value in zip(names, tested[key], strict=True):
        [line] = [line for line in shown if line.startswith(f"{name} ")]
        assert (f"{100 * value:.2f} %" if task == "multilabel" else f"{value:.4g}") in line
    # predict: CSV, a table, and Python
    options = ("predict", "--checkpoint", best, "--workers", "0", "--images", *paths)
    assert main([*options, "--output", str(tmp_path / "found.csv")]) == 0
    found = read_csv(tmp_path / "found.csv")
    prefix = "probability_" if task == "multilabel" else "value_"
    table = [[float(row[prefix + name]) for name in names] for row in found]
    np.testing.assert_allclose(table, values, atol=1e-4)
    held = [";".join(compress(names, own >= spec.thresholds)) if task == "multilabel" else None
            for own in values]  # fmt: skip
    assert [row.get("label") for row in found] == held
    capsys.readouterr()
    assert main([*options]) == 0
    cell = held[0].split(";")[0] or "none" if held[0] is not None else f"{values[0, 0]:.5g}"
    assert f"| {paths[0]} | {cell}" in capsys.readouterr().out
    classes, numbers, _ = visionattn.predict(best, paths)
    np.testing.assert_allclose(numbers, values, atol=1e-4)
    assert [";".join(each) for each in classes] == (held if held[0] is not None else
                                                    [";".join(names)] * len(paths))  # fmt: skip
    assert main([*options, "--top_k", "2"]) == 2
    assert_one_error(capsys, "top_k needs one class per image")
    assert main(["share", best, "--to", str(tmp_path / "shared")]) == 2
    assert_one_error(capsys, "gives several classes" if task == "multilabel" else "gives numbers")


def test_look_explains_one_class_of_several(runs, images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(images)
    best, path = str(runs["multilabel"] / "best.safetensors"), paths_of(images)[0]
    values = predictions(runs["multilabel"], images, "test")[1]
    target = ("--target", NAMES[1], "--show", "gradient")
    assert main(["look", best, path, *target, "--output", str(tmp_path / "look")]) == 0
    [look] = json.loads((tmp_path / "look" / "look.json").read_text())["images"]
    assert look["probability"] == pytest.approx(values[0, 1], rel=1e-4)
    assert look["margin"] == pytest.approx(look["logits"][1])
    assert f"{path}: {NAMES[1]}, " in capsys.readouterr().out


@pytest.mark.parametrize(("task", "plots"), [("multilabel", 0), ("regression", 3)])
def test_the_report_names_every_output(runs, tmp_path, task, plots):
    page, tested = tmp_path / "page.html", read_by_output(runs[task] / "test.json")
    assert main(["report", str(runs[task]), "--images", "2", "--output", str(page)]) == 0
    text = page.read_text()
    assert all(f">{name}" in text for name in (*columns(task), *tested.columns))
    assert "no images, since" not in text and text.count('aria-label="light') == plots


def test_show_batch_names_the_labels(images, tmp_path):
    for task, wanted in (("multilabel", "nw; se"), ("regression", "10")):
        config = config_of(images, tmp_path, task)
        for part in engine.first_batches(config):
            names = [picture.captions[0] for picture in part.pictures]
            assert any(wanted in name for name in names), names


@pytest.mark.parametrize(
    ("task", "fields", "key"),
    [
        ("multilabel", {"thresholds": (0.1, 0.2, 1.5)}, "thresholds"),
        ("classification", {"thresholds": (0.1, 0.2, 0.5)}, "thresholds"),
        ("regression", {}, "target_mean"),
        ("regression", {"target_mean": (0, 0, 0), "target_std": (1, 0, 1)}, "target_std"),
    ],
)
def test_a_damaged_specification_is_refused_and_others_lack_the_new_fields(task, fields, key):
    assert not {"thresholds", "target_mean", "target_std"} & SPEC.stored().keys()
    assert read_spec(json.dumps(SPEC.stored())) == SPEC
    with pytest.raises(ValueError, match=f"data.{key} .* does not fit "):
        read_spec(json.dumps(replace(SPEC, task=task, **fields).stored()))
