"""The lines that a training says before its first step, the times in them, and the step that is
tried for them and leaves everything as it was.
"""

import io
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.small_runs import (
    batch,
    lines_of,
    quadrants,
    same,
    small_config,
)
from tests.helpers.small_runs import small_trainer as trainer_of
from visionattn.models.cost import Expected
from visionattn.models.machine import random_state
from visionattn.training import engine
from visionattn.training import forecast as forecast_module
from visionattn.training.run_folder import BEST, LAST
from visionattn.training.training_cost import Forecast, batch_of, forecast, step_seconds, undone

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


@pytest.fixture
def tried(monkeypatch):
    """The shapes that are tried, where a pixel takes a millisecond in a step."""
    shapes = []

    def step_seconds(learner, shape):
        shapes.append(shape)
        return math.prod(shape) / 1000

    monkeypatch.setattr(forecast_module, "step_seconds", step_seconds)
    return shapes


def test_an_epoch_computes_its_steps_and_its_evaluation(tmp_path, tried):
    trainer = trainer_of(small_config(tmp_path, epochs=5, optim={"accumulate": 2}), quadrants(64))
    trainer.position.epoch = 2
    told = forecast(trainer, Expected(1, 2))
    assert tried == [(8, 16, 16)] and told.images == "64 images of 16 x 16 px, 16 patches"
    assert told.seconds_per_step == pytest.approx(2 * 8 * 0.256)
    steps, forward = 64 * 0.256, 23 * 0.256
    assert told.seconds_per_epoch == pytest.approx(steps + forward / 3)
    assert (told.epochs, told.memory) == (3, Expected(1, 2))
    trainer.config.model.grad_checkpointing = True
    told = forecast(trainer, Expected(1, 2))
    assert told.seconds_per_epoch == pytest.approx(steps + forward / 4)


def test_of_batches_of_several_shapes_the_median_is_tried(tmp_path, monkeypatch, tried):
    trainer = trainer_of(small_config(tmp_path))
    shapes = np.array([[4, 8 * n, 8] for n in range(20, 0, -1)])
    monkeypatch.setattr(type(trainer.batches), "shapes", lambda own: shapes)
    forecast(trainer, Expected(1, 2))
    trainer.config.compile = True
    forecast(trainer, Expected(1, 2))
    assert tried == [(4, 88, 8), (4, 160, 8)]  # a compiled model sees the first one first
    shapes = np.zeros((3, 3), np.int64)
    assert forecast(trainer, Expected(1, 2)) is None and len(tried) == 2


def test_a_line_says_memory_that_may_not_do(tmp_path):
    told = Forecast("3 images", Expected(2 * MIB, MIB), 61.0, 7200.0, 2)
    assert told.line() == (
        "3 images; memory: 2 MiB expected, 1 MiB there, which may not do; computing takes 1 min "
        "1 s per step, 2 h per epoch, 4 h in all"
    )


@pytest.mark.parametrize("name, amp", [("adamw", "none"), ("lamb", "bf16")])
def test_a_trial_leaves_weights_optimiser_average_and_generators_bit_for_bit(tmp_path, name, amp):
    options = {"optim": EVERYTHING | {"name": name}, "amp": amp}
    tried, other = (
        trainer_of(small_config(tmp_path, **options, model={"drop_path_rate": 0.2}))
        for _ in range(2)
    )
    for trainer in (tried, other):  # amid a run, where the optimiser has moments
        trainer.model.train()
        trainer.step([batch(8)])
        trainer.position.step += 1
    for seed in (torch.manual_seed, np.random.seed, random.seed):  # a step seeds them anew
        seed(99)
    before = random_state()
    step_seconds(tried, (8, 16, 16))
    same(random_state(), before)
    same(tried.weights(), other.weights())
    assert [group["lr"] for group in tried.optimizer.param_groups] == [
        group["lr"] for group in other.optimizer.param_groups
    ]
    for trainer in (tried, other):
        trainer.step([batch(8, start=8)])
    same(tried.weights(), other.weights())
    assert tried.model.training and all(p.grad is not None for p in tried.model.parameters())


def test_a_trial_before_any_step_leaves_an_optimiser_without_moments(tmp_path):
    trainer = trainer_of(small_config(tmp_path, optim=EVERYTHING))
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    rate, shape = trainer.learning_rate(), trainer.input_shape
    trainer.model.eval().blocks[1].train()
    with undone(trainer):
        trainer.model.train()
        trainer.step([batch(5)])
        assert any(
            not torch.equal(value, weights[name])
            for name, value in trainer.model.state_dict().items()
        )
    same(trainer.model.state_dict(), weights)
    assert not trainer.optimizer.state and trainer.learning_rate() == rate
    assert trainer.input_shape == shape
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    modes = trainer.model.training, *(block.training for block in trainer.model.blocks)
    assert modes == (False, False, True)


def test_a_trial_puts_buffers_and_the_scale_of_fp16_back(tmp_path, monkeypatch):
    real = torch.amp.grad_scaler.GradScaler
    often = lambda *given, **asked: real(*given, **asked | {"growth_interval": 1})  # noqa: E731
    monkeypatch.setattr(torch.amp, "GradScaler", often)
    trainer = trainer_of(small_config(tmp_path, amp="fp16"))
    trainer.model.register_buffer("calls", torch.zeros(()))

    def count(model, given):
        model.calls += 1

    trainer.model.register_forward_pre_hook(count)
    scaler = trainer.optimizer_step.scaler
    before = scaler.state_dict()
    with undone(trainer):
        for _ in range(2):
            trainer.step([batch(5)])
        assert trainer.model.calls == 2 and scaler.state_dict() != before
    assert trainer.model.calls == 0 and scaler.state_dict() == before


def test_a_step_is_tried_on_a_few_images_and_then_on_all(tmp_path, monkeypatch):
    now, seen = [0.0], []

    def step(learner, group):
        seen.append((len(group[0].labels), learner.model.training))
        now[0] += 1.5 * len(group[0].labels)

    monkeypatch.setattr(forecast_module.Learner, "step", step)
    trainer = trainer_of(small_config(tmp_path))
    assert step_seconds(trainer, (9, 16, 16), lambda: now[0]) == 1.5 * 9
    trainer.config.compile = True
    assert step_seconds(trainer, (9, 16, 16), lambda: now[0]) == 1.5 * 9
    assert seen == [(2, True), (6, True), (9, True)]


def test_trials_see_every_class_and_what_pad_leaves_empty(tmp_path):
    trainer = trainer_of(small_config(tmp_path))
    given = batch_of(trainer, (6, 16, 24))
    assert given.images.shape == (6, 1, 16, 24) and given.images.dtype == torch.uint8
    assert given.labels.tolist() == [0, 1, 2, 3, 0, 1] and given.sizes is None
    trainer.geometry = replace(trainer.geometry, fit="pad")
    assert batch_of(trainer, (2, 16, 24)).sizes.tolist() == [[16, 24]] * 2
