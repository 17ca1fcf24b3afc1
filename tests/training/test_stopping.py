"""Early stopping, the metric that selects the best weights, and the advice after an epoch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from tests.helpers.resumed_runs import state_of
from tests.helpers.small_runs import SPEC, lines_of, rows, same, script, small_config, timeless
from visionattn.data.batches import Batch
from visionattn.models.weights import load_model
from visionattn.training.distil.imitation import Imitating
from visionattn.training.epoch_advice import one_class, overfitting
from visionattn.training.evaluate import Evaluation, evaluate
from visionattn.training.objectives import Objective

CPU = torch.device("cpu")
SCORES = [(0.9, 0.5, 0.2), (0.8, 0.6, 0.1), (0.7, 0.5, 0.7), (0.95, 0.6, 0.3), (1.0, 0.4, 0.6)]
SCORES += [(0.6, 0.3, 0.1)]
EPOCHS = [Evaluation(23, loss, score, None, 1.0, f1=f1) for loss, score, f1 in SCORES]
"""Loss, accuracy and F1 of each epoch."""


@pytest.mark.parametrize(
    ("monitor", "best", "epochs", "metric"),
    [
        (None, 2, 4, "accuracy"),
        ("accuracy", 2, 4, "accuracy"),
        ("loss", 3, 5, "validation loss"),
        ("f1", 3, 5, "F1"),
    ],
)
def test_a_run_stops_after_epochs_without_a_better_metric(
    small, tmp_path, monkeypatch, monitor, best, epochs, metric
):
    script(monkeypatch, *EPOCHS)
    config = small_config(tmp_path, epochs=6, patience=2, monitor=monitor)
    said = lines_of(config)
    assert f"stopped early: no better {metric} for 2 epochs; best epoch {best}" in said
    assert [row["epoch"] for row in rows(tmp_path / "small")] == list("12345")[:epochs]
    # Without patience the same epochs have the same metrics and learning rates.
    script(monkeypatch, *EPOCHS)
    lines_of(replace(config, run="whole", patience=None))
    assert timeless(rows(tmp_path / "whole"))[:epochs] == timeless(rows(tmp_path / "small"))


def test_a_stopped_run_stays_stopped_and_a_larger_patience_trains_on(small, tmp_path, monkeypatch):
    script(monkeypatch, *EPOCHS)
    config = small_config(tmp_path, epochs=5, patience=2, monitor="loss")
    whole = replace(config, run="whole", patience=None)
    lines_of(whole)
    script(monkeypatch, *EPOCHS)
    short = replace(config, patience=1)
    lines_of(short)
    assert len(rows(tmp_path / "small")) == 4
    assert any("best epoch 3" in line for line in lines_of(replace(short, resume=True)))
    with pytest.raises(ValueError, match="the run has monitor loss, not f1; resume with the same"):
        lines_of(replace(short, resume=True, monitor="f1"))
    script(monkeypatch, *EPOCHS[4:])
    lines_of(replace(config, resume=True))
    folders = [tmp_path / name for name in ("whole", "small")]
    assert timeless(rows(folders[1])) == timeless(rows(folders[0]))
    same(*(state_of(folder) | {"config": None} for folder in folders))
    same(*(load_model(folder / "best.safetensors").state_dict() for folder in folders))


class Fixed(torch.nn.Module):
    """Predicts given classes."""

    def __init__(self, said):
        super().__init__()
        self.said = said

    def forward(self, x):
        return 9.0 * torch.nn.functional.one_hot(self.said[: len(x)], 4).movedim(-1, 1)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_macro_f1_and_a_single_predicted_class(task):
    def evaluated(said, labels):
        masks = labels if task == "classification" else labels.to(torch.uint8)
        return evaluate(Fixed(said), [Batch(images, masks)], spec, device=CPU)

    rng = np.random.default_rng(0)
    size = (7,) if task == "classification" else (7, 8, 8)
    labels, said = (torch.from_numpy(rng.integers(0, 3, size)) for _ in range(2))
    spec, images = replace(SPEC, img_size=8, task=task), torch.zeros(7, 1, 8, 8, dtype=torch.uint8)
    result = evaluated(said, labels)
    wanted = f1_score(labels.flatten(), said.flatten(), average="macro", zero_division=0)
    assert result.f1 == pytest.approx(wanted) and result.only is None
    assert evaluated(torch.full(size, 2), labels).only == 2
    what = "pixel" if task == "segmentation" else "image"
    assert one_class(2, spec).startswith(f"every validation {what} is predicted as se; ")
    equal = evaluated(0 * said, 0 * labels)
    assert (equal.f1, equal.only) == (1.0, None)


@pytest.mark.parametrize("learns_labels", [True, Imitating.learns_labels])
def test_one_class_everywhere_is_said_once_in_a_row(learns_labels, small, tmp_path, monkeypatch):
    monkeypatch.setattr(Objective, "learns_labels", learns_labels)
    epochs = [Evaluation(23, 1.0, 0.5, None, 1.0, only=only) for only in (2, 2, None, 2)]
    script(monkeypatch, *epochs)
    said = lines_of(small_config(tmp_path, epochs=4))
    told = [line for line in said if "every validation image is predicted as se; " in line]
    assert len(told) == 2 * learns_labels


def test_overfitting_is_said_in_the_first_epoch_that_shows_it():
    training = [9, 8, 7, 6, 5, 5, 4, 3, 2, 1]
    validation = [5, 6, 7, 6, 7, 8, 9, 10, 11, 12]
    history = [{"train_loss": a, "val_loss": b} for a, b in zip(training, validation, strict=True)]
    said = [end for end in range(11) if overfitting(history[:end])]
    assert said == [9]
    assert "rose for 3 epochs" in overfitting(history[:9])
