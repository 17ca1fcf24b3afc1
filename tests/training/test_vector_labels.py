"""Several labels and numbers per image: losses, metrics, and runs on a table of labels."""

import csv
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

import visionattn
from tests.helpers.event_files import Events
from tests.helpers.resumed_runs import assert_same_end, interrupt, on_small_data, stop_after
from tests.helpers.several_processes import run_processes
from tests.helpers.tools import assert_one_error
from tests.helpers.vector_labels import NAMES, columns, config_of, rows_of, write_table
from visionattn.cli.exit_codes import Stopped, run_tool
from visionattn.command import main
from visionattn.data.splits import build_splits
from visionattn.models.weights import DataSpec, load_model, read_spec
from visionattn.training import engine
from visionattn.training.config import LossConfig, TrainConfig, check
from visionattn.training.distributed import joined
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


def precision_at_positives(known, found):
    """Average precision without equal probabilities, from its definition."""
    order = known[np.argsort(-found)]
    return (order.cumsum() / np.arange(1, len(order) + 1))[order > 0].mean()


def test_metrics_of_labels_count_only_known_ones_and_choose_the_threshold_with_the_best_f1():
    rng = np.random.default_rng(2)
    labels, values = rng.integers(0, 2, (40, 3)).astype(float), rng.random((40, 3))
    labels[rng.random((40, 3)) < 0.2], labels[:, 2] = np.nan, 0
    found = scores_of(replace(SPEC, task="multilabel"), labels, values)
    aps, bests = [], []
    for known, own, limit in zip(labels.T[:2], values.T, found.columns["threshold"], strict=False):
        own, known = own[~np.isnan(known)], known[~np.isnan(known)]
        f1 = [2 * (known * (own >= x)).sum() / (known.sum() + (own >= x).sum()) for x in own]
        aps.append(precision_at_positives(known, own))
        bests.append(max(f1))
        assert limit not in own
        assert 2 * (known * (own >= limit)).sum() / (known.sum() + (own >= limit).sum()) == max(f1)
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
    np.testing.assert_allclose(
        [spec.target_mean, spec.target_std], [trained.mean(0), trained.std(0)]
    )
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
    assert "name: mse" in (folder / "config.yaml").read_text()  # the default loss
    assert not Events(folder).curves
    lowest = min(lines_of_kind(folder, "epoch"), key=lambda line: line["val_mae"])
    status = json.loads((folder / "status.json").read_text())["result"]
    assert status["best_epoch"] == lowest["epoch"] == tested.epoch
    assert status["validation_mae"] == lowest["val_mae"] and status["test_mae"] == test["mae"]


def lines_of_kind(folder: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("task", ["regression", pytest.param("multilabel", marks=pytest.mark.slow)])
def test_a_run_that_is_stopped_amid_an_epoch_and_resumed_ends_in_the_same_bits(
    images, runs, tmp_path, task
):
    config = config_of(images, tmp_path, task, optim=OPTIM)
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 10, interrupt)
        with pytest.raises(Stopped):
            engine.train(config, stream=io.StringIO())
    engine.train(replace(config, resume=True), stream=io.StringIO())
    assert_same_end(runs[task], tmp_path / "small")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("task", TASKS)
def test_two_processes_get_the_metrics_of_one(images, runs, tmp_path, task):
    config = config_of(images, tmp_path, task, optim=OPTIM)

    def work(rank):
        def tool():
            with joined() as processes:
                engine.train(config, processes=processes)

        return run_tool(tool, several=True)

    ended = run_processes(2, work, tmp_path / "streams")
    assert [each.code for each in ended] == [0, 0], ended[0].err
    [one], [two] = (lines_of_kind(each, "test") for each in (runs[task], tmp_path / "small"))
    assert two == pytest.approx(one, abs=1e-4)
    files = [read_by_output(each / "test.json") for each in (runs[task], tmp_path / "small")]
    assert np.array(files[0].points) == pytest.approx(np.array(files[1].points), abs=1e-3)


CHECKED = [
    ("multilabel", {"optim.mixup": 0.2}, "optim.mixup and optim.cutmix need one class per image"),
    ("regression", {"optim.cutmix": 1.0}, "optim.mixup and optim.cutmix need one class per image"),
    ("regression", {"optim.label_smoothing": 0.1}, "optim.label_smoothing needs classes, got"),
    ("regression", {"loss.class_weights": "balanced"}, "loss.class_weights needs classes, got"),
    ("regression", {"loss.name": "focal"}, "loss.name focal needs classes, got"),
    ("multilabel", {"loss.name": "l1"}, "loss.name l1 needs data.task regression, got multilabel"),
    ("multilabel", {"loss.name": "dice"}, "loss.name dice needs data.task segmentation"),
    ("multilabel", {"monitor": "r2"}, "monitor r2 needs data.task regression, got multilabel; "
     "use one of map, f1, loss"),
    ("classification", {"monitor": "map"}, "monitor map needs data.task multilabel"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "options", "line"), CHECKED)
def test_options_of_other_tasks_are_refused_in_one_line(task, options, line):
    config = TrainConfig()
    config.data.task = task
    for key, value in options.items():
        group, _, leaf = key.rpartition(".")
        setattr(getattr(config, group) if group else config, leaf, value)
    with pytest.raises(ValueError) as error:
        check(config)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("task", "cell", "line"),
    [
        ("multilabel", "0", "data.task multilabel: no training image has class ne; add some"),
        ("regression", "3", "data.task regression: target light ne is the same for all training"),
    ],
)
def test_labels_without_information_are_refused(images, tmp_path, task, cell, line):
    rows = rows_of(images)
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        changed = {columns(task)[0]: cell}
        writer.writerows(row | (changed if row["split"] == "train" else {}) for row in rows)
    config = config_of(images, tmp_path / "out", task)
    config.data.labels = str(tmp_path / "labels.csv")
    with pytest.raises(ValueError, match=line):
        engine.train(config)
    assert not (tmp_path / "out").exists()


def paths_of(images: Path) -> list[str]:
    return [row["path"] for row in rows_of(images) if row["split"] == "test"]


def said(capsys, *words: str) -> list[str]:
    """Run a command, and return the lines that it printed."""
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("task", TASKS)
def test_validate_and_predict_name_every_output(runs, images, tmp_path, capsys, monkeypatch, task):
    monkeypatch.chdir(images)
    best = str(runs[task] / "best.safetensors")
    names, paths = columns(task), paths_of(images)
    values, spec = predictions(runs[task], images, "test")[1:]
    tested = read_by_output(runs[task] / "test.json").columns
    # validate: the means, and a line for each output
    lines = said(capsys, "validate", "--checkpoint", best, "--split", "test")
    key = "AP" if task == "multilabel" else "R2"
    for name, value in zip(names, tested[key], strict=True):
        [line] = [line for line in lines if line.startswith(f"{name} ")]
        assert (f"{100 * value:.2f} %" if task == "multilabel" else f"{value:.4g}") in line
    # predict: CSV, JSON, a table, and Python
    options = ("predict", "--checkpoint", best, "--workers", "0", "--images", *paths)
    for suffix in ("csv", "json"):
        said(capsys, *options, "--output", str(tmp_path / f"{task}.{suffix}"))
    found = list(csv.DictReader((tmp_path / f"{task}.csv").read_text().splitlines()))
    prefix = "probability_" if task == "multilabel" else "value_"
    table = [[float(row[prefix + name]) for name in names] for row in found]
    np.testing.assert_allclose(table, values, atol=1e-4)
    held = [";".join(compress(names, own >= spec.thresholds)) if task == "multilabel" else None
            for own in values]  # fmt: skip
    assert [row.get("label") for row in found] == held
    told = json.loads((tmp_path / f"{task}.json").read_text())["rows"]
    assert [[row[prefix + name] for name in names] for row in told] == table
    shown = said(capsys, *options)
    cell = held[0].split(";")[0] or "none" if held[0] is not None else f"{values[0, 0]:.5g}"
    assert f"| {paths[0]} | {cell}" in "\n".join(shown)
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
    lines = said(capsys, "look", best, path, *target, "--output", str(tmp_path / "look"))
    [look] = json.loads((tmp_path / "look" / "look.json").read_text())["images"]
    assert look["probability"] == pytest.approx(values[0, 1], rel=1e-4)
    assert look["margin"] == pytest.approx(look["logits"][1])
    assert f"{path}: {NAMES[1]}, " in "\n".join(lines)


@pytest.mark.parametrize(("task", "plots"), [("multilabel", 0), ("regression", 3)])
def test_the_report_names_every_output(runs, tmp_path, capsys, task, plots):
    page, tested = tmp_path / "page.html", read_by_output(runs[task] / "test.json")
    said(capsys, "report", str(runs[task]), "--images", "2", "--output", str(page))
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
