"""What a training says before its first step: memory, time, what would fit; and what it leaves as
it was.
"""

import io
import json
import math
import random
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.helpers.small_runs import (
    MODEL,
    Quadrants,
    batch,
    quadrants,
    quadrants_for,
    same,
    small_config,
)
from tests.helpers.small_runs import small_trainer as trainer_of
from tests.helpers.stand_in_gpu import GPU, Card, OnProcessor
from visionattn.cli.ends import DoesNotFit, exit_code, run_tool
from visionattn.data.batches import Unreadable, _BatchKeys
from visionattn.data.buckets import canvases
from visionattn.data.geometry import Geometry
from visionattn.training import engine, passes
from visionattn.training import forecast as forecast_module
from visionattn.training import memory as memory_module
from visionattn.training.build import build_model
from visionattn.training.checkpoint import random_state
from visionattn.training.config import ModelConfig, OptimConfig
from visionattn.training.distributed import Processes
from visionattn.training.forecast import Forecast, forecast, seconds_at
from visionattn.training.memory import (
    SHARE,
    WORKER_BYTES,
    Expected,
    TrainingMemory,
    largest_batch,
    largest_shape,
    share_of,
    way_out,
    with_batch,
)
from visionattn.training.passes import Passes
from visionattn.training.record import BEST, CONFIG, LAST, STATUS
from visionattn.training.trial import (
    LONG_SECONDS,
    Trial,
    batch_of,
    read_seconds,
    try_evaluation,
    try_steps,
    undone,
)

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


def cheap_config(folder, *, depth=1, **options):
    """A run of a model that is counted quickly."""
    args = {key: value for key, value in MODEL.items() if key != "horizon"}
    args |= {"depth": depth, "relative": "none"}
    return replace(small_config(folder, **options), model=ModelConfig("scaleformer_vit_t", args))


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
    config = cheap_config(tmp_path, data={"img_size": 32}, batch_size=32)
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


class Counted(TrainingMemory):
    """A pixel takes a byte, and the first image 100 more."""

    def __init__(self, config, there, processes=None, **splits):
        self.config, self.there_bytes = config, there
        self.processes, self.patch_px = processes or Processes(), (4, 4)
        self.splits = quadrants(img_size=config.data.img_size, **splits)

    def bytes_of(self, shape, evaluation=None):
        return 100 + math.prod(shape)


class OfGpu(TrainingMemory):
    """Tells the memory of a run as if it were on a GPU."""

    def __init__(self, config, model, splits, device, processes):
        super().__init__(config, OfGpu.card.runs(model), splits, GPU, processes)


def test_on_a_gpu_what_does_not_fit_is_refused_and_auto_takes_the_most_that_does(
    tmp_path, monkeypatch, small, capsys
):
    """A step takes 2560 bytes of an image, besides what the optimiser keeps."""
    config = cheap_config(tmp_path, batch_size=61, epochs=1)
    model, _ = build_model(config.model, quadrants().spec)
    kept = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    OfGpu.card = Card(monkeypatch, 1000 + kept + 20 * 2560)
    with monkeypatch.context() as patch, OnProcessor():
        patch.setattr(engine, "TrainingMemory", OfGpu)
        assert run_tool(lambda: run(config)) == 3
    error, status = capsys.readouterr().err, tmp_path / "small" / STATUS
    assert error.startswith(
        "error: a step on 61 images of 16 x 16 pixels would take more than the 0 MiB of memory "
        "that there are; --batch-size 8 would fit, with --optim.accumulate 8 for as many images in "
        "a step; --batch-size auto takes the most that fits, and model.grad_checkpointing saves"
    )
    assert error.count("\n") == 1 and json.loads(status.read_text())["status"] == "oom"
    with monkeypatch.context() as patch, OnProcessor():
        patch.setattr(engine, "TrainingMemory", OfGpu)
        lines = run(replace(config, batch_size="auto", overwrite=True))
    assert "batch_size auto: 8 images fit, of 16 x 16 pixels" in lines
    assert any(re.search("; memory: 0 MiB expected, 0 MiB there; ", line) for line in lines)


def test_on_a_gpu_the_optimiser_counts_and_what_loads_images_does_not(tmp_path, monkeypatch):
    config = cheap_config(tmp_path, data={"workers": 3})
    OfGpu.card = Card(monkeypatch, 1 << 30)
    model, _ = build_model(config.model, quadrants().spec)
    kept = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    with OnProcessor():
        memory = OfGpu(config, model, quadrants(), GPU, Processes())
        assert memory.there_bytes == 1 << 30
        assert memory.bytes_of((5, 16, 16)) == 1000 + 5 * 2560 + kept
        evaluated = memory.bytes_of((5, 16, 16), (9, 16, 16))
        assert evaluated == 1000 + 9 * 2560 + kept
        OfGpu.card.size = 1000 + 7 * 2560
        assert memory.bytes_of((8, 16, 16)) == math.inf


def test_where_not_one_image_fits_the_size_that_would_is_named(tmp_path):
    config = small_config(tmp_path, data={"img_size": 48}, batch_size=1)
    memory = Counted(config, there=int((100 + 30 * 30) / SHARE))
    assert way_out(config, memory, (1, 48, 48)) == (
        "one image of 28 x 28 pixels would fit: --data.img_size 28, and model.grad_checkpointing "
        "saves memory"
    )
    assert "36 x 24 pixels would fit: --data.img_size 36 24," in way_out(
        config, memory, (1, 48, 34)
    )
    memory.splits = replace(memory.splits, spec=replace(memory.splits.spec, fit="native"))
    assert way_out(config, memory, (1, 48, 48)).startswith(
        "one image of up to 49 patches would fit: --data.max_patches 49 with --data.img_size null, "
        "or --data.img_size 28"
    )
    memory.there_bytes = 1
    checkpointed = replace(config, model=replace(config.model, grad_checkpointing=True))
    assert way_out(checkpointed, memory, (1, 48, 48)) == (
        "not even an image of one patch would fit: a smaller model takes less"
    )


def test_the_batch_that_would_fit_keeps_the_step(tmp_path):
    config = small_config(tmp_path, optim={"accumulate": 2}, batch_size=32)
    memory = Counted(config, there=int((100 + 5 * 256) / SHARE) + 1)
    assert way_out(config, memory, (31, 16, 16)).startswith(
        "--batch-size 4 would fit, with --optim.accumulate 16 for as many images in a step; "
        "--batch-size auto takes the most that fits, and model.grad_checkpointing saves memory"
    )
    memory.splits = replace(memory.splits, spec=replace(memory.splits.spec, fit="native"))
    assert way_out(config, memory, (31, 16, 16)).startswith(
        "--data.batch_patches 64 would fit, 4 such images; --batch-size auto takes"
    )


def test_auto_takes_the_most_that_fits_and_a_resumed_run_the_same(
    tmp_path, monkeypatch, small, alone
):
    config = cheap_config(tmp_path, data={"img_size": 32}, batch_size="auto", epochs=1)
    memory = memory_of(config)
    there = int(memory.bytes_of((20, 32, 32)) / SHARE)
    monkeypatch.setattr(memory_module, "memory_there_is", lambda *how: there)
    assert any(line == "batch_size auto: 16 images fit, of 32 x 32 pixels" for line in run(config))
    kept = yaml.safe_load((tmp_path / "small" / CONFIG).read_text())
    assert kept["batch_size"] == 16
    monkeypatch.setattr(memory_module, "memory_there_is", lambda *how: 100 * there)
    run(replace(config, epochs=2, resume=True))
    assert yaml.safe_load((tmp_path / "small" / CONFIG).read_text())["batch_size"] == 16


def test_auto_takes_no_more_images_than_there_are_nor_512(tmp_path):
    config = small_config(tmp_path, batch_size="auto")
    chosen, _ = with_batch(config, quadrants(), Counted(config, 1 << 50))
    assert chosen.batch_size == 56  # of 61, in eights
    many = Counted(config, 1 << 50, train=9999)
    assert with_batch(config, many.splits, many)[0].batch_size == 512
    with pytest.raises(ValueError, match="name a number"):
        with_batch(config, quadrants(), Counted(config, None))
    named = small_config(tmp_path, batch_size=7)
    assert with_batch(named, quadrants(), Counted(named, 1)) == (named, [])


def test_auto_takes_one_image_that_may_just_do_and_refuses_one_that_does_not(tmp_path):
    config = small_config(tmp_path, batch_size="auto")
    there = 100 + 256  # more than 85 % of it
    memory = Counted(config, there)
    assert with_batch(config, memory.splits, memory)[0].batch_size == 1
    with pytest.raises(DoesNotFit) as refused:
        with_batch(config, memory.splits, Counted(config, 200))
    assert "a step on 1 image of 16 x 16 pixels would take about" in str(refused.value)
    assert "one image of 8 x 8 pixels would fit" in str(refused.value)


class Own(Quadrants):
    """Images of their own sizes: three quarters of them are small."""

    def canvases(self, geometry):
        sizes = [(16, 24), (8, 8), (8, 12), (8, 8)]
        return np.array([sizes[n % 4] for n in range(self.length)])


def test_auto_chooses_patches_for_images_of_their_own_sizes(tmp_path):
    config = small_config(tmp_path, batch_size="auto", data={"fit": "native", "max_patches": 99})
    config.data.img_size = None
    memory = Counted(config, int((100 + 9 * 16 * 24) / SHARE) + 1)
    spec = replace(memory.splits.spec, fit="native", img_size=None)
    splits = replace(memory.splits, train=Own(64, 1), spec=spec)
    chosen, lines = with_batch(config, splits, memory)
    # 8 of the largest, of 24 patches each; a mean image has 152 pixels.
    assert (chosen.data.batch_patches, chosen.batch_size) == (8 * 24, 16)
    assert lines == ["batch_size auto: 192 patches fit, 8 of the largest images and 16 on average"]
    config.data.batch_patches = 100
    with pytest.raises(ValueError, match="chooses data.batch_patches, which is 100; leave one"):
        with_batch(config, splits, memory)


@pytest.mark.parametrize("fit", [1, 5, 33, 400])
def test_the_largest_batch_is_the_largest_to_an_eighth(fit):
    asked = []

    class Memory:
        there_bytes = int((1000 + 64 * fit) / SHARE) + 1

        def bytes_of(self, shape):
            asked.append(shape[0])
            bend = 64 * max(0, shape[0] - 20) / 8  # grows a little faster, from 20 images on
            return 1000 + math.prod(shape) + (bend if shape[0] > fit else 0)

    found = largest_batch(Memory(), (8, 8), 1000)
    assert 0.87 * fit <= found <= fit and len(asked) == len(set(asked)) <= 8
    assert largest_batch(Memory(), (8, 8), 3) == min(fit, 3)
    assert largest_batch(Memory(), (8, 8), 0) == 0
    Memory.there_bytes = 900
    assert largest_batch(Memory(), (8, 8), 99) == 0


def test_a_gpu_on_which_more_is_too_much_tells_no_slope():
    class Memory:
        there_bytes = 3000

        def bytes_of(self, shape):
            return 100 + 64 * shape[0] if shape[0] <= 33 else math.inf

    assert 28 <= largest_batch(Memory(), (8, 8), 1000) <= 33


def test_more_images_pixels_and_larger_evaluations_take_more(tmp_path):
    memory = memory_of(cheap_config(tmp_path))
    taken = memory.bytes_of((8, 32, 32))
    assert memory.bytes_of((9, 32, 32)) > taken < memory.bytes_of((8, 32, 36))
    assert memory.bytes_of((8, 32, 32), (8, 32, 32)) == taken
    passes, kept = memory.passes, memory.passes.kept_bytes()
    evaluated = 400, 32, 32
    forward = int(passes.forward_bytes(evaluated) + kept) - passes.step_bytes(
        (8, 32, 32), memory.config.optim
    )
    assert forward > 0 and abs(memory.bytes_of((8, 32, 32), evaluated) - taken - forward) <= 1


def test_an_average_moments_sums_of_gradients_and_loading_count(tmp_path, alone):
    config = cheap_config(tmp_path)
    plain, averaged = memory_of(config), memory_of(cheap_config(tmp_path, optim=EVERYTHING))
    model, shape, optim = plain.passes.model, (8, 32, 32), config.optim
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert plain.base_bytes == 0 and averaged.base_bytes == sum(
        p.numel() * 4 for p in averaged.passes.model.parameters()
    )
    loaded = replace(config, data=replace(config.data, workers=2))
    batch = 8 * 32 * 32
    assert plain.bytes_of(shape) == plain.passes.step_bytes(shape, optim) + batch
    more = memory_of(loaded).bytes_of(shape) - plain.bytes_of(shape)
    assert more == 2 * (WORKER_BYTES + 2 * batch) - batch
    step = plain.passes.step_bytes
    assert step(shape, replace(optim, accumulate=2)) > step(shape, optim)
    ddp = step(shape, optim, kind="ddp", processes=2) - step(shape, optim)
    assert ddp == pytest.approx(1.2 * weights, abs=2)
    fsdp = step(shape, optim, kind="fsdp", processes=2) - step(shape, optim)
    assert fsdp == pytest.approx(-1.2 * weights, abs=2)
    assert plain.passes.kept_bytes() == pytest.approx(1.2 * 2 * weights)


def test_libraries_count_once(tmp_path, monkeypatch):
    passes_of = memory_of(cheap_config(tmp_path)).passes
    before = passes_of.forward_bytes((2, 16, 16))
    monkeypatch.setattr(passes, "LIBRARIES_BYTES", passes.LIBRARIES_BYTES + 7777)
    assert passes_of.forward_bytes((3, 16, 16)) > before
    again = Passes(passes_of.model, passes_of.spec, CPU, "none")
    assert again.forward_bytes((2, 16, 16)) == before + 7777


def test_a_share_of_a_batch_is_the_largest_that_a_process_takes():
    assert [share_of((n, 8, 9), 4) for n in (1, 4, 5)] == [(1, 8, 9), (1, 8, 9), (2, 8, 9)]


def test_checkpointed_blocks_hold_less_and_leave_more_gaps(tmp_path, monkeypatch):
    def step_bytes(checkpointing):
        model, _ = build_model(cheap_config(tmp_path, depth=4).model, quadrants().spec)
        model.set_grad_checkpointing(checkpointing)
        given = Passes(model, quadrants().spec, CPU, "none", checkpointing=checkpointing)
        return given.step_bytes((8, 32, 32), OptimConfig())

    usual = step_bytes(True)
    monkeypatch.setattr(passes, "SCATTERED_CHECKPOINTED", passes.SCATTERED)
    assert step_bytes(True) < min(usual, step_bytes(False))


def test_a_model_that_looks_at_values_has_no_expected_memory(tmp_path):
    class Looks(torch.nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1)) * float(images.sum())

    memory = Passes(Looks(256, 4), quadrants().spec, CPU, "none")
    assert memory.step_bytes((2, 16, 16), small_config(tmp_path).optim) is None
    assert str(Expected(None, 5)) == "memory: not known beforehand for this model"


def test_counting_memory_leaves_model_and_generators(tmp_path):
    config = cheap_config(tmp_path, depth=2)
    config.model.args["drop_path_rate"] = 0.5
    memory, before = memory_of(config), random_state()
    weights = {k: v.clone() for k, v in memory.passes.model.state_dict().items()}

    def draw(model, given):
        random.random(), np.random.rand(), torch.rand(3)

    memory.passes.model.register_forward_pre_hook(draw)
    assert memory.bytes_of((4, 16, 16)) is not None
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


class Paces:
    """Stands in for the trials of a run: a pixel takes a millisecond in a step and a tenth of it in
    an evaluation, and an image ``reading`` seconds.
    """

    def __init__(self, monkeypatch, reading=0.0, most=10**9):
        self.tried, self.evaluated, self.most = [], [], most
        monkeypatch.setattr(forecast_module, "try_steps", self.steps)
        monkeypatch.setattr(forecast_module, "try_evaluation", self.evaluation)
        monkeypatch.setattr(forecast_module, "read_seconds", lambda dataset, geometry: reading)

    def steps(self, learner, shapes):
        self.tried.append(shapes)
        shapes = [(min(images, self.most), *size) for images, *size in shapes]
        return [Trial(shape, math.prod(shape) / 1000) for shape in shapes]

    def evaluation(self, learner, model, shape, step):
        self.evaluated.append((shape, step.shape))
        return Trial((2, 16, 16), 2 * 256 / 10_000)


def test_an_epoch_has_its_steps_its_evaluation_and_its_images(tmp_path, monkeypatch):
    trainer = trainer_of(small_config(tmp_path, epochs=5, optim={"accumulate": 2}), quadrants(64))
    trainer.position.epoch = 2
    paces = Paces(monkeypatch, reading=0.5)
    told = forecast(trainer, Expected(1, 2))
    assert paces.tried == [[(8, 16, 16)]] and paces.evaluated == [((8, 16, 16), (8, 16, 16))]
    assert told.images == "64 images of 16 x 16 px, 16 patches"
    assert told.seconds_per_step == pytest.approx(2 * 8 * 0.256)
    steps, evaluation, loading = 64 * 0.256, 23 * 0.0256, (64 + 23) * 0.5
    assert told.seconds_per_epoch == pytest.approx(steps + evaluation + loading)
    assert (told.epochs, told.part, told.waits) == (3, "", True)
    assert told.memory == Expected(1, 2)
    Paces(monkeypatch, most=3)
    told = forecast(trainer, Expected(1, 2))
    assert (told.part, told.waits) == ("3 of 8 images tried", False)
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


def test_images_are_read_evenly_and_the_first_and_damaged_ones_do_not_count():
    read, now = [], [0.0]

    class Images:
        """The first takes 1.5 s, others 0.1 s; the fourth that is read cannot be."""

        def __len__(self):
            return 60

        def __getitem__(self, key):
            now[0] += (0.3 if len(read) == 3 else 0.1) if read else Images.first
            read.append((key.index, key.geometry))
            return Unreadable("a.png", "damaged") if len(read) == 4 else (key, 0)

    def seconds():
        read.clear()
        return read_seconds(Images(), "as seen", lambda: now[0])

    Images.first = 1.2
    assert seconds() == pytest.approx(0.1)
    assert read == [(index, "as seen") for index in (0, 10, 20, 30, 40, 50)]
    Images.first = 2.5
    assert seconds() == pytest.approx(2.5) and len(read) == 1
    assert read_seconds(object(), None) is None and read_seconds([], None) is None


def test_trials_see_every_class_and_what_pad_leaves_empty(tmp_path):
    trainer = trainer_of(small_config(tmp_path))
    given = batch_of(trainer, (6, 16, 24))
    assert given.images.shape == (6, 1, 16, 24) and given.images.dtype == torch.uint8
    assert given.labels.tolist() == [0, 1, 2, 3, 0, 1] and given.sizes is None
    trainer.geometry = replace(trainer.geometry, fit="pad")
    assert batch_of(trainer, (2, 16, 24)).sizes.tolist() == [[16, 24]] * 2


def test_seconds_lie_on_the_line_through_the_trials():
    pixels = np.array([100, 400, 1000])
    one = [Trial((1, 10, 40), 2.0)]
    assert seconds_at(one, pixels).tolist() == [0.5, 2.0, 5.0]
    two = [Trial((1, 10, 10), 1.0), Trial((1, 10, 40), 2.5)]
    assert seconds_at(two, pixels) == pytest.approx([1.0, 2.5, 5.5])
    falling = [Trial((1, 10, 10), 3.0), Trial((1, 10, 40), 2.0)]
    assert seconds_at(falling, pixels).tolist() == [0.5, 2.0, 5.0]


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
    assert largest_shape(np.array([[5, 10, 10], [1, 20, 20]])) == (5, 10, 10)


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
