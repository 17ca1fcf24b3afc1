"""The lines that a training says before its first step, and the times in them."""

import io
import math
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.small_runs import (
    lines_of,
    quadrants,
    same,
    small_config,
)
from tests.helpers.small_runs import small_trainer as trainer_of
from visionattn.models.cost import Expected
from visionattn.training import engine
from visionattn.training import forecast as forecast_module
from visionattn.training.forecast import Forecast, forecast, seconds_at
from visionattn.training.record import BEST, LAST
from visionattn.training.trial import (
    Trial,
)

EVERYTHING = {"ema_decay": 0.9, "mixup": 0.4, "clip_grad": 0.5, "label_smoothing": 0.1}
MIB = 2**20


def test_a_run_is_bit_for_bit_that_without_a_trial(tmp_path, monkeypatch, small):
    options = {"optim": EVERYTHING, "model": {"drop_path_rate": 0.2}}
    lines_of(small_config(tmp_path / "tried", **options))
    monkeypatch.setattr(engine, "forecast", lambda trainer, memory: None)
    lines_of(small_config(tmp_path / "not", **options))
    states = [
        torch.load(tmp_path / name / "small" / LAST, weights_only=True) for name in ("tried", "not")
    ]
    for state in states:
        state.pop("config")
    same(*states)
    same(*(load_file(tmp_path / name / "small" / BEST) for name in ("tried", "not")))


def test_the_first_line_comes_before_any_image_is_looked_at(tmp_path, monkeypatch, small):
    stream = io.StringIO()

    def look(*given):
        said = "small: 61 training and 23 validation images, looking at their sizes\n"
        assert stream.getvalue() == said
        raise ValueError("looked")

    monkeypatch.setattr(engine, "TrainingMemory", look)
    monkeypatch.setattr(engine, "Trainer", look)
    with pytest.raises(ValueError, match="looked"):
        engine.train(small_config(tmp_path), stream=stream)


def test_one_line_says_images_patches_memory_and_seconds(tmp_path, small):
    said = lines_of(small_config(tmp_path, epochs=1))[3]
    pattern = (
        r"61 images of 16 x 16 px, 16 patches; memory: [\d.]+ [MG]iB expected, [\d.]+ [MG]iB there"
        r"; computing takes [\d.]+ s per step, [\d.]+ s per epoch, [\d.]+ s in all"
    )
    assert re.fullmatch(pattern, said)
    assert not any(
        "per epoch" in line for line in lines_of(small_config(tmp_path, epochs=1, resume=True))
    )  # nothing is left to train


class Paces:
    """Stands in for the trials of a run: a pixel takes a millisecond in a step and a tenth of it in
    an evaluation.
    """

    def __init__(self, monkeypatch, most=10**9):
        self.tried, self.evaluated, self.most = [], [], most
        monkeypatch.setattr(forecast_module, "try_steps", self.steps)
        monkeypatch.setattr(forecast_module, "try_evaluation", self.evaluation)

    def steps(self, learner, shapes):
        self.tried.append(shapes)
        shapes = [(min(images, self.most), *size) for images, *size in shapes]
        return [Trial(shape, math.prod(shape) / 1000) for shape in shapes]

    def evaluation(self, learner, model, shape, step):
        self.evaluated.append((shape, step.shape))
        return Trial((2, 16, 16), 2 * 256 / 10_000)


def test_an_epoch_computes_its_steps_and_its_evaluation(tmp_path, monkeypatch):
    trainer = trainer_of(small_config(tmp_path, epochs=5, optim={"accumulate": 2}), quadrants(64))
    trainer.position.epoch = 2
    paces = Paces(monkeypatch)
    told = forecast(trainer, Expected(1, 2))
    assert paces.tried == [[(8, 16, 16)]] and paces.evaluated == [((8, 16, 16), (8, 16, 16))]
    assert told.images == "64 images of 16 x 16 px, 16 patches"
    assert told.seconds_per_step == pytest.approx(2 * 8 * 0.256)
    steps, evaluation = 64 * 0.256, 23 * 0.0256
    assert told.seconds_per_epoch == pytest.approx(steps + evaluation)
    assert (told.epochs, told.part) == (3, "")
    assert told.memory == Expected(1, 2)
    Paces(monkeypatch, most=3)
    told = forecast(trainer, Expected(1, 2))
    assert told.part == "3 of 8 images tried"
    assert told.seconds_per_epoch == pytest.approx(steps + evaluation)


def test_between_the_shapes_that_are_tried_most_batches_lie(tmp_path, monkeypatch):
    trainer, paces = trainer_of(small_config(tmp_path)), Paces(monkeypatch)
    shapes = np.array([[4, 8 * n, 8] for n in range(20, 0, -1)])
    monkeypatch.setattr(type(trainer.batches), "shapes", lambda own: shapes)
    forecast(trainer, Expected(1, 2))
    assert paces.tried.pop() == [(4, 24, 8), (4, 152, 8)]
    assert paces.evaluated.pop()[1] == (4, 152, 8)
    shapes = np.array([[4, 80 + n, 8] for n in range(20)])
    forecast(trainer, Expected(1, 2))
    assert paces.tried.pop() == [(4, 98, 8)]  # as good as alike
    trainer.config.compile = True
    shapes = np.array([[4, 16, 8], [4, 160, 8], [4, 320, 8]])
    forecast(trainer, Expected(1, 2))
    assert paces.tried.pop() == [(4, 16, 8)]  # which a compiled model sees first
    shapes = np.zeros((3, 3), np.int64)
    assert forecast(trainer, Expected(1, 2)) is None and not paces.tried


def test_seconds_lie_on_the_line_through_the_trials():
    pixels = np.array([100, 400, 1000])
    one = [Trial((1, 10, 40), 2.0)]
    assert seconds_at(one, pixels).tolist() == [0.5, 2.0, 5.0]
    two = [Trial((1, 10, 10), 1.0), Trial((1, 10, 40), 2.5)]
    assert seconds_at(two, pixels) == pytest.approx([1.0, 2.5, 5.5])
    falling = [Trial((1, 10, 10), 3.0), Trial((1, 10, 40), 2.0)]
    assert seconds_at(falling, pixels).tolist() == [0.5, 2.0, 5.0]


def test_a_line_says_what_was_tried_where_that_was_less_than_a_step():
    told = Forecast("3 images", Expected(2 * MIB, MIB), 61.0, 7200.0, 2, "1 of 4 images tried")
    assert told.line() == (
        "3 images; memory: 2 MiB expected, 1 MiB there, which may not do; computing takes 1 min "
        "1 s per step (1 of 4 images tried), 2 h per epoch, 4 h in all"
    )
