"""What a trial before the first step looks at, and that it leaves everything as it was."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.small_runs import (
    batch,
    same,
    small_config,
)
from tests.helpers.small_runs import small_trainer as trainer_of
from visionattn.models.machine import random_state
from visionattn.training.trial import (
    LONG_SECONDS,
    Trial,
    batch_of,
    try_evaluation,
    try_steps,
    undone,
)

EVERYTHING = {"ema_decay": 0.9, "mixup": 0.4, "clip_grad": 0.5, "label_smoothing": 0.1}


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("amp", ["none", "bf16"])
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
    try_steps(tried, [(3, 16, 16), (8, 16, 16)])
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


class Clock:
    """Each step takes as long as ``seconds`` says of its images."""

    def __init__(self, seconds):
        self.now, self.seconds, self.tried = 0.0, seconds, []

    def step(self, learner, group):
        self.tried.append(len(group[0].labels))
        self.now += self.seconds(len(group[0].labels))


@pytest.mark.parametrize(
    "each, shapes, tried, images",
    [
        (0.001, [4, 8], [2, 4, 4, 8, 8], [4, 8]),  # short: each shape twice
        (1.0, [8], [2, 8], [8]),  # long: the first time counts
        (3.0, [64], [2, 3], [3]),  # too long whole: as much as ten seconds take
        (30.0, [8], [2], [2]),  # too long even so
    ],
)
def test_how_much_is_tried_depends_on_how_long_it_takes(
    tmp_path, monkeypatch, each, shapes, tried, images
):
    trainer = trainer_of(small_config(tmp_path))
    clock = Clock(lambda n: n * each)
    monkeypatch.setattr("visionattn.training.trial.Learner.step", clock.step)
    found = try_steps(trainer, [(n, 16, 16) for n in shapes], lambda: clock.now)
    assert clock.tried == tried and [trial.shape[0] for trial in found] == images
    assert all(trial.seconds == pytest.approx(each * trial.shape[0]) for trial in found)
    assert sum(n * each for n in clock.tried[1:]) <= 2 * max(LONG_SECONDS, each)


def test_an_evaluation_is_tried_on_as_many_images_as_half_a_second_takes(tmp_path):
    trainer = trainer_of(small_config(tmp_path))
    trainer.model.train()
    trainer.model.blocks[0].eval()
    ticks = iter((1.0, 3.5) * 3)
    for seconds, images in ((8 * 0.1, 5), (8 * 9.0, 1), (8 * 0.001, 20)):
        step = Trial((8, 16, 16), seconds)
        found = try_evaluation(trainer, trainer.model, (20, 16, 16), step, lambda: next(ticks))
        assert found == Trial((images, 16, 16), 2.5)
    assert trainer.model.training and not trainer.model.blocks[0].training


def test_trials_see_every_class_and_what_pad_leaves_empty(tmp_path):
    trainer = trainer_of(small_config(tmp_path))
    given = batch_of(trainer, (6, 16, 24))
    assert given.images.shape == (6, 1, 16, 24) and given.images.dtype == torch.uint8
    assert given.labels.tolist() == [0, 1, 2, 3, 0, 1] and given.sizes is None
    trainer.geometry = replace(trainer.geometry, fit="pad")
    assert batch_of(trainer, (2, 16, 24)).sizes.tolist() == [[16, 24]] * 2
