"""What a training says before its first step: memory, time, what would fit; and what it leaves as
it was.
"""

import io
import json
import math
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.small_runs import batch, quadrants, quadrants_for, same, small_config
from tests.helpers.small_runs import small_trainer as trainer_of
from visionattn.cli.ends import DoesNotFit, exit_code
from visionattn.data.batches import _BatchKeys
from visionattn.data.buckets import canvases
from visionattn.data.geometry import Geometry
from visionattn.training import engine, passes
from visionattn.training import memory as memory_module
from visionattn.training.build import build_model
from visionattn.training.checkpoint import random_state
from visionattn.training.distributed import Processes
from visionattn.training.forecast import Forecast, epoch_seconds, seconds_at
from visionattn.training.memory import (
    SHARE,
    Expected,
    TrainingMemory,
    fits,
    largest_batch,
    largest_shape,
    way_out,
    with_batch,
)
from visionattn.training.passes import Passes
from visionattn.training.record import BEST, CONFIG, LAST, STATUS
from visionattn.training.trial import LONG_SECONDS, Trial, try_steps, undone

CPU = torch.device("cpu")
EVERYTHING = {"ema_decay": 0.9, "mixup": 0.4, "clip_grad": 0.5, "label_smoothing": 0.1}
MIB = 2**20


@pytest.fixture
def alone(monkeypatch):
    """What a process takes beside its tensors, which is far more than small models, is nothing."""
    monkeypatch.setattr(memory_module, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(passes, "LIBRARIES_BYTES", 0)


@pytest.fixture
def small(monkeypatch):
    """Runs on images of quadrants."""
    monkeypatch.setattr(engine, "build_splits", quadrants_for)


def memory_of(config, there=None) -> TrainingMemory:
    splits = quadrants(img_size=config.data.img_size)
    model, _ = build_model(config.model, splits.spec)
    memory = TrainingMemory(config, model, splits, CPU, Processes())
    memory.there_bytes = there
    return memory


def run(config):
    stream = io.StringIO()
    engine.train(config, stream=stream)
    return stream.getvalue().splitlines()


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
    with undone(trainer):
        trainer.step([batch(5)])
        assert any(
            not torch.equal(value, weights[name])
            for name, value in trainer.model.state_dict().items()
        )
    same(trainer.model.state_dict(), weights)
    assert not trainer.optimizer.state and trainer.learning_rate() == rate
    assert trainer.input_shape == shape
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_a_run_is_bit_for_bit_that_without_a_trial(tmp_path, monkeypatch, small):
    options = {"optim": EVERYTHING, "model": {"drop_path_rate": 0.2}}
    run(small_config(tmp_path / "tried", **options))
    monkeypatch.setattr(engine, "forecast", lambda trainer, memory: None)
    run(small_config(tmp_path / "not", **options))
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
    said = run(small_config(tmp_path, epochs=1))[3]
    pattern = (
        r"61 images of 16 x 16 px, 16 patches; memory: [\d.]+ [MG]iB expected, [\d.]+ [MG]iB there"
        r"; [\d.]+ s per step, [\d.]+ s per epoch, [\d.]+ s in all"
    )
    assert re.fullmatch(pattern, said)
    assert not any(
        "per epoch" in line for line in run(small_config(tmp_path, epochs=1, resume=True))
    )  # nothing is left to train


def test_what_does_not_fit_is_refused_with_the_batch_that_would(
    tmp_path, monkeypatch, small, alone
):
    config = small_config(tmp_path, data={"img_size": 32}, batch_size=32)
    memory = memory_of(config)
    needed = memory.bytes_of((32, 32, 32))
    there = int(0.8 * needed)
    monkeypatch.setattr(memory_module, "memory_there_is", lambda *how: there)
    with pytest.raises(DoesNotFit) as refused:
        run(config)
    assert exit_code(refused.value) == 3
    text = str(refused.value)
    assert "a step on 32 images of 32 x 32 pixels would take about" in text
    batch_size = int(re.search(r"--batch-size (\d+) would fit", text)[1])
    assert memory.bytes_of((batch_size, 32, 32)) <= there
    assert f"--optim.accumulate {math.ceil(32 / batch_size)} " in text
    status = json.loads((tmp_path / "small" / STATUS).read_text())
    assert (status["status"], status["exit_code"]) == ("oom", 3)
    assert not (tmp_path / "small" / LAST).exists()
    run(replace(config, batch_size=batch_size, epochs=1, overwrite=True))


def test_where_not_one_image_fits_the_size_that_would_is_named(tmp_path, alone):
    config = small_config(tmp_path, data={"img_size": 48}, batch_size=1)
    memory = memory_of(config)
    memory.there_bytes = int((memory.bytes_of((1, 48, 48)) + memory.bytes_of((1, 24, 24))) / 2)
    memory.there_bytes = int(memory.there_bytes / SHARE)
    said = way_out(config, memory, (1, 48, 48))
    rows, columns = map(int, re.search(r"one image of (\d+) x (\d+) pixels", said).groups())
    assert 24 <= rows == columns < 48 and f"--data.img_size {rows}" in said
    assert fits(memory, (1, rows, columns))
    assert not fits(memory, (1, rows + 4, columns + 4))
    memory.there_bytes = 1
    assert "not even an image of one patch" in way_out(config, memory, (1, 48, 48))


def test_auto_takes_the_most_that_fits_and_a_resumed_run_the_same(
    tmp_path, monkeypatch, small, alone
):
    config = small_config(tmp_path, data={"img_size": 32}, batch_size="auto", epochs=1)
    memory = memory_of(config)
    there = int(memory.bytes_of((20, 32, 32)) / SHARE)
    monkeypatch.setattr(memory_module, "memory_there_is", lambda *how: there)
    assert any(line == "batch_size auto: 16 images fit, of 32 x 32 pixels" for line in run(config))
    kept = yaml.safe_load((tmp_path / "small" / CONFIG).read_text())
    assert kept["batch_size"] == 16
    monkeypatch.setattr(memory_module, "memory_there_is", lambda *how: 100 * there)
    run(replace(config, epochs=2, resume=True))
    assert yaml.safe_load((tmp_path / "small" / CONFIG).read_text())["batch_size"] == 16


def test_auto_takes_no_more_images_than_there_are(tmp_path):
    config = small_config(tmp_path, batch_size="auto")
    memory = memory_of(config, there=1 << 50)
    chosen, _ = with_batch(config, memory.splits, memory)
    assert chosen.batch_size == 56  # of 61, in eights
    with pytest.raises(ValueError, match="name a number"):
        with_batch(config, memory.splits, memory_of(config))


@pytest.mark.parametrize("fit", [1, 5, 33])
def test_the_largest_batch_is_the_largest(tmp_path, alone, fit):
    memory = memory_of(small_config(tmp_path, data={"img_size": 32}))
    memory.there_bytes = int((memory.bytes_of((fit, 32, 32)) + 1) / SHARE)
    found = largest_batch(memory, (32, 32), 1000)
    assert 0.87 * fit <= found <= fit
    assert largest_batch(memory, (32, 32), 3) == min(fit, 3)
    assert largest_batch(memory, (32, 32), 0) == 0


def test_more_images_pixels_and_an_average_take_more_and_checkpointing_less(tmp_path):
    config = small_config(tmp_path)
    taken = memory_of(config).bytes_of((8, 32, 32))
    assert memory_of(config).bytes_of((9, 32, 32)) > taken
    assert memory_of(config).bytes_of((8, 32, 36)) > taken
    assert memory_of(config).bytes_of((8, 32, 32), (32, 32, 64)) >= taken
    model, _ = build_model(config.model, quadrants().spec)
    spec, optim = quadrants().spec, config.optim
    plain = Passes(model, spec, CPU, "none").step_bytes((8, 32, 32), optim)
    accumulated = replace(optim, accumulate=2)
    assert Passes(model, spec, CPU, "none").step_bytes((8, 32, 32), accumulated) > plain
    weights = sum(p.numel() * 4 for p in model.parameters())
    ddp = Passes(model, spec, CPU, "none").step_bytes((8, 32, 32), optim, kind="ddp", processes=2)
    assert ddp - plain == pytest.approx(1.2 * weights, abs=2)


def test_a_model_that_looks_at_values_has_no_expected_memory(tmp_path):
    class Looks(torch.nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1)) * float(images.sum())

    memory = Passes(Looks(256, 4), quadrants().spec, CPU, "none")
    assert memory.step_bytes((2, 16, 16), small_config(tmp_path).optim) is None
    assert str(Expected(None, 5)) == "memory: not known beforehand for this model"


def test_counting_memory_leaves_model_and_generators(tmp_path):
    config = small_config(tmp_path, model={"drop_path_rate": 0.5})
    memory, before = memory_of(config), random_state()
    weights = {k: v.clone() for k, v in memory.passes.model.state_dict().items()}
    memory.bytes_of((4, 16, 16))
    same(random_state(), before)
    same(memory.passes.model.state_dict(), weights)
    assert all(p.grad is None for p in memory.passes.model.parameters())


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


def test_seconds_lie_on_the_line_through_the_trials():
    pixels = np.array([100, 400, 1000])
    one = [Trial((1, 10, 40), 2.0)]
    assert seconds_at(one, pixels).tolist() == [0.5, 2.0, 5.0]
    two = [Trial((1, 10, 10), 1.0), Trial((1, 10, 40), 2.5)]
    assert seconds_at(two, pixels) == pytest.approx([1.0, 2.5, 5.5])
    falling = [Trial((1, 10, 10), 3.0), Trial((1, 10, 40), 2.0)]
    assert seconds_at(falling, pixels).tolist() == [0.5, 2.0, 5.0]


def test_an_epoch_takes_as_long_as_the_slower_of_computing_and_loading():
    assert epoch_seconds(10, 4, 0, 1, cores=8) == 14
    assert epoch_seconds(10, 4, 2, 1, cores=8) == 10
    assert epoch_seconds(10, 60, 2, 1, cores=8) == 30
    assert epoch_seconds(10, 60, 16, 1, cores=8) == pytest.approx(8.75 * 1.1429, rel=1e-3)
    assert epoch_seconds(10, 6, 2, 2, cores=2) == 13  # no core is left for loading


def test_the_shapes_of_an_epoch_are_those_of_its_batches():
    sizes = np.array([[32, 48], [32, 48], [64, 16], [10, 10], [32, 48], [64, 16], [33, 40]])
    choices = tuple(Geometry("native", limit, None, (16, 16)) for limit in ((64, 64), (32, 32)))
    seen = np.stack([canvases(sizes, choice) for choice in choices], 1)
    keys = _BatchKeys(len(sizes), 2, choices, 5, seen)
    expected = []
    for batch_keys in keys:
        first = batch_keys[0]
        known = sizes[first.index].min() >= 16
        size = first.geometry.view(*sizes[first.index]).canvas if known else (0, 0)
        expected.append((len(batch_keys), *size))
    assert keys.shapes().tolist() == [list(each) for each in expected]
    assert (0, 0) in {each[1:] for each in expected} and len({e[1:] for e in expected}) > 3
    cropped = _BatchKeys(5, 2, (Geometry("crop", (32, 48)),), None)
    assert cropped.shapes().tolist() == [[2, 32, 48], [2, 32, 48], [1, 32, 48]]


def test_the_largest_batch_has_the_most_pixels_and_then_the_largest_images():
    shapes = np.array([[4, 10, 10], [1, 20, 20], [2, 10, 10]])
    assert largest_shape(shapes) == (1, 20, 20)


def test_a_line_says_what_was_tried_where_that_was_less_than_a_step():
    told = Forecast(
        "3 images", Expected(2 * MIB, MIB), 61.0, 7200.0, 2, True, "1 of 4 images tried"
    )
    assert told.line() == (
        "3 images; memory: 2 MiB expected, 1 MiB there, which may not do; 1 min 1 s per step (1 of "
        "4 images tried), 2 h per epoch, most of it for loading images, 4 h in all"
    )


def test_the_batch_size_is_a_number_or_auto(tmp_path):
    from visionattn.training.options import parse_train

    assert parse_train(["--batch-size", "auto"]).batch_size == "auto"
    assert parse_train(["--batch-size", "7"]).batch_size == 7
    for wrong in ("most", "1.5"):
        with pytest.raises(ValueError, match="batch_size must be a whole number or one of auto"):
            parse_train([f"--batch-size={wrong}"])
    assert asdict(small_config(tmp_path))["batch_size"] == 8
