"""Training on several processes: the losses and weights of one process, with DDP and with FSDP,
also after a resumption.
"""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.geometry import square
from tests.helpers.image_files import write_pair
from tests.helpers.resumed_runs import best_of, state_of, status_of, stop_after
from tests.helpers.several_processes import Ended, run_processes, train_on, training
from tests.helpers.small_runs import (
    MODEL,
    SPEC,
    Quadrants,
    lines,
    quadrants,
    same,
    small_config,
    timeless,
)
from visionattn.data.batches import Unreadable
from visionattn.data.splits import build_splits
from visionattn.data.streams import Shards, StreamTrainBatches
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.training import checkpoint, engine
from visionattn.training.config import LossConfig
from visionattn.training.distributed import check_model, choose_kind

NAME = "scaleformer_vit_t"
EVERYTHING = dict(
    mixup=0.3, cutmix=0.5, ema_decay=0.9, accumulate=3, layer_decay=0.8, label_smoothing=0.1
)


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """Batches of 8 and a last one of 1 image, of which all processes but one have nothing."""
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: quadrants(57))


def run_on(size: int, output: Path, *, code: int = 0, **options) -> list[Ended]:
    return train_on(size, small_config(output, **options), code=code)


def figures(folder: Path, kind: str, *keys: str) -> list[float]:
    return [line[key] for line in lines(folder) if line["kind"] == kind for key in keys]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = state_of(folder)
    moments = {
        f"{i}.{k}": v for i, each in state["optimizer"]["state"].items() for k, v in each.items()
    }
    return state["model"] | {f"ema.{k}": v for k, v in (state["ema"] or {}).items()} | moments


def assert_alike(one: Path, several: Path) -> None:
    """Losses to 1e-6, weights, averages and moments closely, best weights and accuracies of the
    same epoch.
    """
    compared = {
        "train": ("loss", "lr"),
        "epoch": ("train_loss", "val_loss", "val_accuracy"),
        "test": ("loss", "images"),
    }
    for kind, keys in compared.items():
        wanted = pytest.approx(figures(one, kind, *keys), abs=1e-6)
        assert figures(several, kind, *keys) == wanted, kind
    norms = [figures(folder, "train", "grad_norm") for folder in (several, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for read in (weights, lambda folder: best_of(folder)[1]):
        torch.testing.assert_close(read(several), read(one), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "size", "optim"),
    [
        ("ddp", 2, EVERYTHING),
        pytest.param("ddp", 3, EVERYTHING, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, EVERYTHING, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, {"name": "lamb"}, marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_as_one_does_with_accumulation_mixing_and_an_incomplete_last_batch(
    tmp_path, kind, size, optim
):
    run_on(1, tmp_path / "one", optim=optim)
    ended = run_on(size, tmp_path / "more", optim=optim, parallel=kind)
    assert f"on {size} processes ({kind}), cpu" in ended[0].out and "epoch 2/2" in ended[0].out
    assert ended[0].err == ""
    assert_alike(tmp_path / "one" / "small", tmp_path / "more" / "small")


def write_masks(root: Path) -> None:
    """Seven training images, so that three crops of each leave one process without any at the end
    of an epoch.
    """
    rng = np.random.default_rng(0)
    for split, count in (("train", 7), ("val", 3)):
        for number in range(count):
            mask = rng.choice([0, 1, 2, 255], (31, 27 + number), p=[0.7, 0.1, 0.1, 0.1])
            mask = mask.astype(np.uint8)
            write_pair(root / split, number, np.stack([mask] * 3, 2), mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "loss"),
    [
        ("segmentation", LossConfig("cross_entropy_dice", "balanced")),
        ("segmentation", LossConfig("dice")),
        ("segmentation", LossConfig("focal", [1.0, 3.0, 2.0])),
        ("classification", LossConfig("focal", "balanced")),
    ],
)
def test_several_processes_train_as_one_does_with_losses_for_rare_classes(
    tmp_path, monkeypatch, task, loss
):
    monkeypatch.setattr(engine, "build_splits", build_splits)
    options = dict(data={"sampler": "balanced", "crop": [12, 8], "crops": 2}, batch_size=250)
    if task == "segmentation":
        write_masks(tmp_path / "data")
        data = {"name": "folder", "root": str(tmp_path / "data"), "task": task, "img_size": None}
        data |= {"masks": {"classes": ["a", "b", "c"]}, "augment": "light"}
        data |= {"crop": 16, "crop_around": 0.5, "crops": 3}
        options = dict(data=data, batch_size=4)
    for size in (1, 2):
        run_on(size, tmp_path / str(size), loss=loss, optim={"accumulate": 2}, **options)
    assert_alike(tmp_path / "1" / "small", tmp_path / "2" / "small")


def stop_rank(patch, step: int, rank: int) -> None:
    """Send SIGTERM to one process in a step, which is counted from the start of the process."""

    def terminate():
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)

    stop_after(patch, step, terminate)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_another_way_to_spread_the_model(
    tmp_path, monkeypatch
):
    run_on(1, tmp_path / "whole", optim=EVERYTHING)
    options, parts = {"optim": EVERYTHING}, tmp_path / "parts"
    for number, (size, kind) in enumerate(((2, "ddp"), (1, None), (2, "fsdp"))):
        with monkeypatch.context() as patch:
            stop_rank(patch, 1 if number else 2, rank=size - 1)
            ended = run_on(size, parts, code=130, parallel=kind, resume=number > 0, **options)
        assert ended[0].err.startswith(f"stopped after step {number + 2} (epoch ")
        assert status_of(parts / "small")["status"] == "stopped"
    run_on(3, parts, resume=True, **options)
    assert_alike(tmp_path / "whole" / "small", parts / "small")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_that_goes_on_with_as_many_processes_ends_in_the_same_bits(
    tmp_path, monkeypatch, kind
):
    options = {"optim": EVERYTHING, "model": {"drop_path_rate": 0.2}, "parallel": kind}
    run_on(2, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        stop_rank(patch, 2, rank=1)
        run_on(2, tmp_path / "parts", code=130, **options)
    run_on(2, tmp_path / "parts", resume=True, **options)
    folders = [tmp_path / name / "small" for name in ("whole", "parts")]
    same(*map(weights, folders))
    assert timeless(lines(folders[0])) == timeless(lines(folders[1]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [("ddp", 2), ("fsdp", 0)])
def test_a_parameter_that_takes_no_part_in_the_loss_is_told_where_it_would_stop_the_run(
    tmp_path, monkeypatch, kind, code
):
    real = checkpoint.build_model

    def build(*args):
        model, rest = real(*args)
        model.blocks[1].forward = lambda tokens, *more: 1.0 * tokens
        return model, rest

    monkeypatch.setattr(checkpoint, "build_model", build)
    ended = run_on(2, tmp_path, code=code, parallel=kind, epochs=1)
    if code:
        line = r"error: parameter blocks\.1\.\S+ does not affect the loss, .* use parallel fsdp.*\n"
        assert re.fullmatch(line, ended[0].err)
        assert not (tmp_path / "small").exists()


class Damaged(Quadrants):
    """One of the images cannot be read."""

    def __getitem__(self, key):
        return (
            Unreadable("train/37.png", "it is cut off")
            if key.index == 37
            else super().__getitem__(key)
        )


@pytest.mark.filterwarnings("ignore:skipped unreadable image")
@pytest.mark.slow
def test_an_image_that_one_process_cannot_read_is_left_out_by_all(tmp_path, monkeypatch):
    splits = replace(quadrants(57), train=Damaged(57, 1))
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: splits)
    options = dict(data={"on_error": "skip"}, epochs=1, optim={"mixup": 0.2})
    ended = run_processes(2, training(small_config(tmp_path, **options)), tmp_path / "streams")
    assert [each.code for each in ended] == [0, 0]
    assert figures(tmp_path / "small", "epoch", "left_out") == [1]


@pytest.mark.parametrize(
    ("size", "options", "line"),
    [
        (3, {"batch_size": 2}, "so that each of 3 processes has an image, got 2"),
        (3, {"batch_size": 5, "optim": {"mixup": 0.2}}, "expected batch_size at least 6, so that"),
        (
            4,
            {"batch_size": 1, "parallel": 2},
            "expected batch_size at least 2, .* or fewer processes",
        ),
        (3, {"parallel": 2}, "does not divide the 3 processes of"),
    ],
)
def test_a_number_of_processes_that_does_not_fit_is_one_line(tmp_path, size, options, line):
    with pytest.raises(ValueError, match=line) as error:
        choose_kind(small_config(tmp_path, **options), size)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"softmax_blocks": [0]}, "got softmax over all tokens in block 0"),
        ({"proj_drop_rate": 0.1}, "proj_drop would drop different entries"),
    ],
)
def test_models_that_would_train_otherwise_on_shared_images_are_refused(args, line):
    model, _ = build_model(ModelConfig(NAME, MODEL | args), SPEC)
    check_model(model, NAME, 2, "ddp")
    with pytest.raises(ValueError, match=line):
        check_model(model, NAME, 2, "sequence")


def test_batch_norm_is_refused_on_several_processes():
    model, _ = build_model(ModelConfig("resnet10t"), SPEC)
    check_model(model, "resnet10t", 1)
    with pytest.raises(ValueError, match="^model resnet10t has batch norm .conv1.1., "):
        check_model(model, "resnet10t", 2)


def test_a_stream_of_shards_is_for_one_process():
    shards = Shards("wds/x", "train", (5, 4), True, 3, 0, None)
    batches = StreamTrainBatches(shards, 0, batch_size=2, choices=(square(16),))
    batches.divide(0, 1)
    line = "^a stream of shards supports only one training process .wds/x.; unpack it"
    with pytest.raises(ValueError, match=line):
        batches.divide(0, 2)
