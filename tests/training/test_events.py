"""What TensorBoard and trackers get of a run, read with TensorBoard's reader and with stand-ins of
the trackers: predictions, curves, the configuration with the result, each step once.
"""

import sys
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from tests.helpers.event_files import Events, decoded
from tests.helpers.geometry import square
from tests.helpers.resumed_runs import config_of, on_small_data, run, status_of, stop_after
from tests.helpers.small_runs import SPEC, lines, quadrants, small_config
from tests.helpers.vector_labels import NAMES, write_table
from tests.helpers.vector_labels import config_of as config_of_labels
from visionattn.data.batches import SampleKey
from visionattn.data.splits import build_splits
from visionattn.models.weights import load_model
from visionattn.training import picture_sheet
from visionattn.training.config import TrainConfig, check
from visionattn.training.evaluate import MASKED_EXAMPLES, Example, Tally
from visionattn.training.picture_sheet import (
    BLUE,
    CELL_PX,
    HEAD_PX,
    draw_confusion,
    with_masks,
    with_outputs,
)
from visionattn.training.run_folder import clear
from visionattn.training.trainer import Trainer

THRESHOLDS = np.arange(127) / 126


def outputs_of(folder, dataset, spec):
    """Labels and outputs of the best weights."""
    items = [dataset[SampleKey(i, 0, square(16))] for i in range(len(dataset))]
    images = torch.stack([torch.from_numpy(item.pixels).permute(2, 0, 1) for item in items])
    with torch.no_grad():
        found = load_model(folder / "best.safetensors").eval()(spec.prepare(images))
    return np.array([item.label for item in items]), found


def assert_curve(curve, known, found):
    """Precision and recall at each threshold are scikit-learn's."""
    for number in range(0, 127, 21):
        said = found >= THRESHOLDS[number] - 1e-9
        wanted = precision_recall_fscore_support(known, said, average="binary", zero_division=0)
        np.testing.assert_allclose(curve[4:, number], wanted[:2], atol=1e-6)


def test_a_run_has_curves_of_each_class_and_its_configuration_with_the_result(whole):
    events, status = Events(whole), status_of(whole)
    last = max(step for step, _ in events.scalars["train/loss"])
    figures = {f"result/{k}": v for k, v in status["result"].items() if v is not None}
    assert {tag: events.scalars[tag] for tag in figures} == {
        tag: [(last + 1, pytest.approx(value))] for tag, value in figures.items()
    }
    labels, logits = outputs_of(whole, quadrants().test, SPEC)
    for number, name in enumerate(SPEC.class_names):
        [(step, curve)] = events.curves[f"precision_recall_test/{name}"]
        assert step == last + 1
        assert_curve(curve, labels == number, logits.softmax(1)[:, number].numpy())
    better = {line["step"] for line in lines(whole) if line["kind"] == "epoch"}
    for tag in ("validation/examples", "validation/confusion"):
        steps = {step for step, _ in events.pictures[tag]}
        assert steps and steps <= better
    assert decoded(events.pictures["test/examples"][0][1]).shape[2] == 3
    options, metrics = events.hparams()
    assert options["model.args.embed_dim"] == 16 and options["data.augment"] == "none"
    assert set(metrics) == set(figures)


def test_several_classes_have_curves_of_known_labels(tmp_path):
    config = config_of_labels(write_table(tmp_path), tmp_path, "multilabel", epochs=1)
    with on_small_data(build_splits):
        run(config)
    events, splits = Events(tmp_path / "small"), build_splits(config.data, 0)
    assert set(events.pictures) == {"validation/examples", "test/examples"}
    labels, logits = outputs_of(tmp_path / "small", splits.test, splits.spec)
    counted, found = np.isfinite(labels), logits.sigmoid().numpy()
    assert len(events.curves) == 6 and not counted.all()
    for number, name in enumerate(NAMES):
        [(_, curve)] = events.curves[f"precision_recall_test/{name}"]
        known = counted[:, number]
        assert_curve(curve, labels[known, number] > 0, found[known, number])


@pytest.mark.usefixtures("small_data")
@pytest.mark.parametrize("at", ["after the events of an epoch", "amid an epoch"])
def test_a_resumed_run_has_each_step_once(tmp_path, monkeypatch, whole, at):
    def fail():
        raise RuntimeError("dead")

    def save(self, record):
        if self.position.epoch == 2:
            fail()
        real(self, record)

    real, config = Trainer.save, config_of(tmp_path, save_every=None)
    with monkeypatch.context() as patch:
        if at == "amid an epoch":
            stop_after(patch, 8, fail)
        else:
            patch.setattr(Trainer, "save", save)
        with pytest.raises(RuntimeError, match="dead"):
            run(config)
    for _ in range(2):  # the second time it only tests again
        run(replace(config, resume=True))
        assert Events(tmp_path / "small").steps == Events(whole).steps


def test_examples_are_cut_to_their_images_and_are_of_all_classes():
    tally, images = Tally(), torch.arange(2 * 12 * 9 * 8).view(12, 2, 9, 8)
    labels, outputs = torch.tensor([0] * 7 + [2, 1, 1, 1, 0]), torch.eye(12, 3)
    sizes = torch.tensor([[9, 8]] * 7 + [[5, 4]] * 5)
    for part in (slice(0, 6), slice(6, 12)):
        tally.show(images[part], labels[part], sizes[part], outputs[part])
    for i, each in zip([0, 1, 2, 7, 8, 9, 10], tally.examples, strict=True):
        height, width = sizes[i].tolist()
        assert torch.equal(each.image, images[i, :, :height, :width])
        assert int(each.label) == labels[i] and torch.equal(each.output, outputs[i])
    masks, tally = torch.randint(0, 3, (12, 9, 8)), Tally()
    tally.show(images, masks, sizes, masks)
    assert len(tally.examples) == MASKED_EXAMPLES


def test_the_confusion_of_images_is_scikit_learns(monkeypatch):
    rng, drawn = np.random.default_rng(1), []
    rows = np.column_stack([*rng.integers(0, 4, (2, 83)), *rng.normal(size=(3, 83))])
    monkeypatch.setattr(picture_sheet, "draw_confusion", lambda found, _: drawn.append(found))
    found = Tally(), rows, np.full((83, 4), 0.25)
    picture_sheet.add_predictions(mock.Mock(), "test", 7, SPEC, *found)
    np.testing.assert_array_equal(drawn[0], confusion_matrix(rows[:, 0], rows[:, 1]))


IMAGE = torch.full((3, 6, 5), 0.5)
CAPTIONS = [
    ({}, torch.tensor(2), [0.0, 2.0, 0.0, 0.0], ("true: se", "predicted: nw, 71%")),
    (
        {"task": "multilabel", "thresholds": (0.9, 0.1, 0.5, 0.5)},
        torch.tensor([1, np.nan, 0, 1]),
        [0.8, 0.2, 0.6, 0.4],
        ("true: ne; sw", "predicted: nw; se"),
    ),
    (
        {"task": "multilabel"},
        torch.zeros(4),
        [0.1] * 4,
        ("true: none", "predicted: none"),
    ),
    (
        {"task": "regression", "num_classes": 2, "class_names": ("a", "b")},
        torch.tensor([12.3456, 7.0]),
        [11.0, -0.5],
        ("true: a 12.35, b 7", "predicted: a 11, b -0.5"),
    ),
]


@pytest.mark.parametrize(("options", "label", "outputs", "captions"), CAPTIONS)
def test_examples_name_label_and_prediction(options, label, outputs, captions):
    picture = with_outputs(Example(IMAGE, label, torch.tensor(outputs)), replace(SPEC, **options))
    assert picture.captions == captions
    assert picture.pixels.shape == (6, 5, 3) and (picture.pixels == 128).all()


def test_masks_are_drawn_in_the_colours_of_their_values():
    colours = ((10, 20, 30), (200, 100, 0), (0, 0, 255))
    spec = replace(SPEC, task="segmentation", num_classes=3, class_names=(), colours=colours)
    masks = torch.randint(0, 3, (2, 600, 9))
    pictures = with_masks(Example(IMAGE, *masks), spec)
    assert [each.captions[0] for each in pictures] == ["image", "mask", "prediction"]
    for picture, mask in zip(pictures[1:], masks, strict=True):
        assert picture.pixels.tolist() == np.array(colours)[mask[::3, ::3]].tolist()


def test_a_confusion_is_drawn_by_its_shares():
    drawn = np.asarray(draw_confusion(np.array([[9, 3, 0], [0, 0, 0], [0, 20_000, 0]]), "abc"))
    edge = drawn.shape[0] - HEAD_PX - 3 * CELL_PX
    corner = drawn[HEAD_PX + 3 :: CELL_PX, edge + 3 :: CELL_PX][:3, :3]
    shares = np.array([[0.75, 0.25, 0], [0, 0, 0], [0, 1, 0]])[..., None]
    np.testing.assert_allclose(corner, 255 + shares * (np.array(BLUE) - 255), atol=0.51)


MLFLOW = """
from types import SimpleNamespace
calls = []
class MlflowException(Exception): pass
exceptions = SimpleNamespace(MlflowException=MlflowException)
def start_run(run_id, run_name, nested):
    calls.append(("start", run_id, run_name))
    return SimpleNamespace(info=SimpleNamespace(run_id="r1"))
def log_params(options):
    calls.append(("options", dict(options)))
def log_metrics(metrics, step):
    if metrics.get("epoch") == 5:
        raise MlflowException("the server is gone.\\nreally")
    calls.append(("log", step, dict(metrics)))
def end_run(status):
    calls.append(("end", status))
"""
WANDB = """
import mlflow
class Error(Exception): pass
class Run:
    id = "w1"
    calls = []
    config = property(lambda self: self)
    def update(self, options, allow_val_change):
        self.calls.append(("options", dict(options)))
    def log(self, metrics, step, commit):
        self.calls.append(("log", step, dict(metrics)))
    def finish(self, exit_code):
        self.calls.append(("end", ["FINISHED", "FAILED"][exit_code]))
calls = Run.calls
def init(id, resume, name):
    calls.append(("start", id, name))
    return Run()
"""


@pytest.fixture
def trackers(tmp_path, monkeypatch):
    """The calls of stand-ins for both packages."""
    monkeypatch.syspath_prepend(tmp_path / "packages")
    (tmp_path / "packages").mkdir()
    calls = {}
    for name, text in {"mlflow": MLFLOW, "wandb": WANDB}.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "packages" / f"{name}.py").write_text(text)
        calls[name] = __import__(name).calls
    yield calls
    for name in calls:
        del sys.modules[name]


def without_none(values):
    return {key: x for key, x in values.items() if x is not None and key != "kind"}


@pytest.mark.usefixtures("small_data")
def test_trackers_get_options_metrics_and_result_and_a_resumed_run_goes_on_there(
    tmp_path, trackers
):
    config, folder = small_config(tmp_path, log=["mlflow", "wandb"]), tmp_path / "small"
    run(config)
    first = {name: list(calls) for name, calls in trackers.items()}
    run(replace(config, epochs=3, resume=True))
    epochs = [line for line in lines(folder) if line["kind"] == "epoch"]
    metrics = [("log", line["step"], without_none(line)) for line in epochs]
    for name, calls in trackers.items():
        start, (_, options), *logged, result, end = first[name]
        assert start == ("start", None, "small") and end == ("end", "FINISHED")
        assert options["optim.lr"] == 3e-3 and options["model.args.embed_dim"] == 16
        assert logged == metrics[:2]
        assert result[1] == metrics[1][1] + 1 and "result/test_accuracy" in result[2]
        again = [each for each in calls[len(first[name]) :] if each[0] != "options"]
        assert again[0] == ("start", {"mlflow": "r1", "wandb": "w1"}[name], "small")
        assert again[1:-2] == metrics[2:] and again[-1] == end
        epochs = [each[1]["epochs"] for each in calls if each[0] == "options"]
        assert epochs == {"mlflow": [2], "wandb": [2, 3]}[name]  # MLflow lets none be changed
    with pytest.warns(UserWarning, match="^mlflow lacks step [0-9]+: the server is gone"):
        run(replace(config, epochs=5, resume=True))
    assert [trackers["mlflow"][-3][1], trackers["wandb"][-3][1]] == [4 * 8, 5 * 8]
    clear(folder)
    assert not list(folder.glob("*.id"))


def test_a_missing_tracker_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)  # of an earlier run, and no package
    with pytest.raises(ValueError, match="^log wandb needs the package wandb; pip install wandb$"):
        check(TrainConfig(log=["wandb"]))
