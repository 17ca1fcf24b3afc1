"""Expected memory and time of a training: refusals, what would fit, ``batch_size auto``, and the
lines before the first step.
"""

import copy
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from tests.helpers.resumed_runs import status_of
from tests.helpers.small_runs import (
    MODEL,
    Quadrants,
    lines_of,
    quadrants,
    same,
    small_config,
    small_trainer,
)
from tests.helpers.stand_in_gpu import GPU, Card, OnProcessor
from tests.helpers.tools import assert_one_error
from visionattn.cli.exit_codes import DoesNotFit, exit_code, run_tool
from visionattn.cli.tables import lasting
from visionattn.data.batches import _BatchKeys
from visionattn.data.buckets import canvases
from visionattn.data.geometry import Geometry
from visionattn.model_config import ModelConfig
from visionattn.models import cost
from visionattn.models.building import build_model
from visionattn.models.cost import SHARE, WORKER_BYTES, Expected
from visionattn.models.devices import random_state
from visionattn.training import engine, training_cost
from visionattn.training.distributed import Processes
from visionattn.training.run_folder import CONFIG
from visionattn.training.trainer import forward_share
from visionattn.training.training_cost import (
    TrainingMemory,
    forecast,
    forward_seconds,
    with_batch,
)

EVERYTHING = {"ema_decay": 0.9, "mixup": 0.4, "clip_grad": 0.5, "label_smoothing": 0.1}
CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch):
    """What a process takes beside its tensors, which is far more than small models, is nothing."""
    monkeypatch.setattr(cost, "taken_bytes", lambda device: 0)
    monkeypatch.setattr(cost, "LIBRARIES_BYTES", 0)


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


def test_what_does_not_fit_is_refused_with_the_batch_that_would(
    tmp_path, monkeypatch, small, alone
):
    config = cheap_config(tmp_path, data={"img_size": 32}, batch_size=32)
    memory = memory_of(config)
    there = int(0.8 * memory.bytes_of((32, 32, 32)))
    monkeypatch.setattr(cost, "memory_there_is", lambda *how: there)
    with pytest.raises(DoesNotFit, match="a step on 32 images of 32 x 32 pixels would ") as refused:
        lines_of(config)
    assert exit_code(refused.value) == 3
    batch_size = int(re.search(r"--batch-size (\d+) would fit", str(refused.value))[1])
    assert memory.bytes_of((batch_size, 32, 32)) <= there
    assert f"--optim.accumulate {math.ceil(32 / batch_size)} " in str(refused.value)
    status = status_of(tmp_path / "small")
    assert (status["status"], status["exit_code"]) == ("oom", 3)
    lines_of(replace(config, batch_size=batch_size, epochs=1, overwrite=True))


class Counted(TrainingMemory):
    """A pixel takes a byte, and the first image 100 more."""

    def __init__(self, config, there, processes=None, **splits):
        splits = quadrants(img_size=config.data.img_size, **splits)
        model, _ = build_model(config.model, splits.spec)
        super().__init__(config, model, splits, CPU, processes or Processes())
        self.there_bytes = there

    def bytes_of(self, shape, evaluation=None):
        return 100 + math.prod(shape)


class OfGpu(TrainingMemory):
    """Tells the memory of a run as if it were on a GPU."""

    def __init__(self, config, model, splits, device, processes, objective=None):
        super().__init__(config, OfGpu.card.runs(model), splits, GPU, processes, objective)


def test_on_a_gpu_what_does_not_fit_is_refused_and_auto_takes_the_most_that_does(
    tmp_path, monkeypatch, small, capsys
):
    """A step takes 2560 bytes of an image, besides what the optimizer keeps."""
    config = cheap_config(tmp_path, batch_size=61, epochs=1)
    model, _ = build_model(config.model, quadrants().spec)
    kept = 2 * 4 * sum(parameter.numel() for parameter in model.parameters())
    OfGpu.card = Card(monkeypatch, 1000 + kept + 20 * 2560)
    with monkeypatch.context() as patch, OnProcessor():
        patch.setattr(engine, "TrainingMemory", OfGpu)
        assert run_tool(lambda: lines_of(config)) == 3
        said = lines_of(replace(config, batch_size="auto", overwrite=True))
    assert_one_error(
        capsys,
        "error: a step on 61 images of 16 x 16 pixels would need more than the available "
        "memory (0 MiB); --batch-size 8 would fit, with --optim.accumulate 8 for as many images in "
        "a step; --batch-size auto uses the largest batch that fits, and --model.grad_",
    )
    assert "batch_size auto: 8 images fit (16 x 16 pixels)" in said
    assert "; peak memory: 0 MiB estimated, 0 MiB available; " in "\n".join(said)


@pytest.mark.parametrize(
    "fit, room, shape, asked, way_out",
    [
        (
            "crop",
            100 + 30 * 30,
            (1, 48, 48),
            {},
            "one image of 28 x 28 pixels would fit: --data.img_size 28 "
            "--batch-size 1, and --model.grad_checkpointing true saves memory",
        ),
        (
            "native",
            100 + 30 * 30,
            (1, 48, 48),
            {},
            "one image of up to 49 patches would fit: --data.max_patches 49 with --data.img_size "
            "null, or --data.img_size 28, and ",
        ),
        (
            "crop",
            1,
            (1, 48, 48),
            {},
            "not even an image of one patch would fit; use a smaller model",
        ),
        (
            "crop",
            101 + 5 * 256,
            (31, 16, 16),
            {"accumulate": 2},
            "--batch-size 4 would fit, with --optim.accumulate 16 for as many images in a step; "
            "--batch-size auto uses the largest batch that fits, and --model.grad_"
            "checkpointing true saves memory",
        ),
        (
            "native",
            101 + 5 * 256,
            (31, 16, 16),
            {},
            "--data.batch_patches 64 would fit, 4 such images; --batch-size auto uses ",
        ),
    ],
)
def test_the_way_out_names_the_batch_that_keeps_the_step_or_a_size(
    tmp_path, fit, room, shape, asked, way_out
):
    config = small_config(tmp_path, optim=asked)
    memory = Counted(config, int(room / SHARE) + 1 if room > 1 else 1)
    memory.splits = replace(memory.splits, spec=replace(memory.splits.spec, fit=fit))
    assert memory.way_out(shape).startswith(way_out)


def test_auto_takes_the_most_that_fits_and_a_resumed_run_the_same(
    tmp_path, monkeypatch, small, alone
):
    config = cheap_config(tmp_path, data={"img_size": 32}, batch_size="auto", epochs=1)
    there = int(memory_of(config).bytes_of((20, 32, 32)) / SHARE)
    monkeypatch.setattr(cost, "memory_there_is", lambda *how: there)
    assert "batch_size auto: 16 images fit (32 x 32 pixels)" in lines_of(config)
    monkeypatch.setattr(cost, "memory_there_is", lambda *how: 100 * there)
    lines_of(replace(config, epochs=2, resume=True))
    assert yaml.safe_load((tmp_path / "small" / CONFIG).read_text())["batch_size"] == 16


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
    assert lines == [
        "batch_size auto: 192 patches fit, or 8 of the largest images, 16 average ones"
    ]
    config.data.batch_patches = 100
    with pytest.raises(ValueError, match="sets data.batch_patches, got 100; remove one"):
        with_batch(config, splits, memory)


def test_an_average_moments_sums_of_gradients_and_loading_count(tmp_path, alone):
    config = cheap_config(tmp_path)
    plain, averaged = memory_of(config), memory_of(cheap_config(tmp_path, optim=EVERYTHING))
    shape, batch = (8, 32, 32), 8 * 32 * 32
    weights = sum(p.numel() * 4 for p in plain.passes.model.parameters())
    assert (plain.base_bytes, averaged.base_bytes) == (0, weights)
    loaded = replace(config, data=replace(config.data, workers=2))
    assert plain.bytes_of(shape) == plain.step_bytes(shape) + batch
    more = memory_of(loaded).bytes_of(shape) - plain.bytes_of(shape)
    assert more == 2 * (WORKER_BYTES + 2 * batch) - batch
    assert plain.kept_bytes() == pytest.approx(1.2 * 2 * weights)
    step = plain.step_bytes(shape)
    assert memory_of(cheap_config(tmp_path, optim={"accumulate": 2})).step_bytes(shape) > step
    plain.processes = SimpleNamespace(size=2)
    for plain.kind, more in (("ddp", 1.2), ("fsdp", -1.2)):
        assert plain.step_bytes(shape) - step == pytest.approx(more * weights, abs=2)


def test_a_model_that_looks_at_values_has_no_expected_memory(tmp_path):
    class Looks(torch.nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1)) * float(images.sum())

    config = small_config(tmp_path)
    memory = TrainingMemory(config, Looks(256, 4), quadrants(), CPU, Processes())
    assert memory.step_bytes((2, 16, 16)) is None
    assert str(Expected(None, 5)) == "peak memory: unknown for this model"


def counted(trainer):
    """The memory of a model that draws numbers."""
    memory = TrainingMemory(trainer.config, trainer.model, quadrants(), CPU, Processes())

    def draw(module, inputs):
        random.random(), np.random.rand(), torch.rand(3)

    memory.passes.model.register_forward_pre_hook(draw)
    return memory.bytes_of((4, 16, 16))


@pytest.mark.parametrize("work", [counted, lambda trainer: forward_seconds(trainer, (3, 16, 16))])
def test_counting_memory_and_time_leaves_model_and_generators(tmp_path, work):
    config = cheap_config(tmp_path, depth=2)
    config.model.args["drop_path_rate"] = 0.5
    trainer = small_trainer(config)
    model, before = trainer.model, random_state()
    model.train().blocks[1].eval()
    weights = copy.deepcopy(model.state_dict())
    assert work(trainer) > 0
    same(random_state(), before)
    same(model.state_dict(), weights)
    assert all(p.grad is None for p in model.parameters())
    assert model.training and not model.blocks[1].training


def test_the_shapes_of_an_epoch_are_those_of_its_batches():
    sizes = np.array([[32, 48], [32, 48], [64, 16], [10, 10], [32, 48], [64, 16], [33, 40]])
    choices = tuple(Geometry("native", limit, None, (16, 16)) for limit in ((64, 64), (32, 32)))
    seen = np.stack([canvases(sizes, choice) for choice in choices], 1)
    keys, expected = _BatchKeys(len(sizes), 2, choices, 5, seen), []
    for first, *rest in keys:
        known = sizes[first.index].min() >= 16
        size = first.geometry.view(*sizes[first.index]).canvas if known else (0, 0)
        expected.append([1 + len(rest), *size])
    assert keys.shapes().tolist() == expected
    assert len({tuple(size) for _, *size in expected}) > 3
    cropped = _BatchKeys(5, 2, (Geometry("crop", (32, 48)),), None)
    assert cropped.shapes().tolist() == [[2, 32, 48], [2, 32, 48], [1, 32, 48]]


@pytest.fixture
def timed(monkeypatch):
    """The shapes that are timed, where a forward takes a second per thousand pixels."""
    shapes = []

    def forward_seconds(trainer, shape):
        shapes.append(shape)
        return math.prod(shape[1:]) / 1000

    monkeypatch.setattr(training_cost, "forward_seconds", forward_seconds)
    return shapes


@pytest.mark.parametrize("checkpointing, forwards", [(False, 3), (True, 4)])
def test_an_epoch_computes_its_steps_and_its_evaluation(tmp_path, timed, checkpointing, forwards):
    config = small_config(tmp_path, epochs=5, optim={"accumulate": 2})
    trainer = small_trainer(config, quadrants(64))
    trainer.position.epoch, trainer.config.model.grad_checkpointing = 2, checkpointing
    told = forecast(trainer, Expected(1 << 20, None))
    step, epoch = forwards * 2 * 8 * 0.256, forwards * 64 * 0.256 + 23 * 0.256
    assert timed == [(8, 16, 16)] and told == (
        "64 images of 16 x 16 px, 16 patches; peak memory: 1 MiB estimated; estimated time: "
        f"{lasting(step)} per step, {lasting(epoch)} per epoch, {lasting(3 * epoch)} in total"
    )
    steps = trainer.steps_left()
    assert steps == pytest.approx(3 * (4 + 4 * 23 / 64 / forwards))


def test_frozen_parameters_shorten_a_step():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 12, bias=False))
    model[1].weight.requires_grad_(False)  # 48 of 64 parameters
    assert forward_share(model, False) == pytest.approx(1 / (1 + 2 / 4))
    assert forward_share(model, True) == pytest.approx(1 / (1 + 3 / 4))


def test_a_head_on_kept_features_is_not_timed(tmp_path, timed):
    trainer = small_trainer(small_config(tmp_path), quadrants(64))
    trainer.config.data.features = "features"
    told = forecast(trainer, Expected(1 << 20, None))
    memory = "peak memory: 1 MiB estimated"
    assert timed == [] and told == f"{memory}; estimated time: known after the first steps"


def test_the_median_of_batches_is_timed_unless_the_model_is_cut(tmp_path, monkeypatch, timed):
    trainer = small_trainer(small_config(tmp_path))
    shapes = np.array([[4, 8 * n, 8] for n in range(20, 0, -1)])
    monkeypatch.setattr(type(trainer.batches), "shapes", lambda own: shapes)
    assert "in total" in forecast(trainer, Expected(1, 2)) and timed == [(4, 88, 8)]
    trainer.spread.kind = "fsdp"
    told = forecast(trainer, Expected(2 << 20, 1 << 20))
    assert len(timed) == 1 and told.endswith(
        "peak memory: 2 MiB estimated, 1 MiB available, which may not be enough; estimated "
        "time: known after the first steps"
    )
