"""Training on several processes: the losses and weights of one process, with DDP and with FSDP,
also after a resumption.
"""

import json
import os
import re
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.geometry import square
from tests.helpers.several_processes import Ended, run_processes
from tests.helpers.small_runs import MODEL, SPEC, Quadrants, quadrants, small_config
from visionattn.cli.exit_codes import run_tool
from visionattn.data.batches import Unreadable
from visionattn.data.splits import build_splits
from visionattn.data.streams import Shards, StreamTrainBatches
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.weights import load_model
from visionattn.training import checkpoint, engine
from visionattn.training.config import LossConfig
from visionattn.training.distributed import check_model, choose_kind, joined
from visionattn.training.engine import train
from visionattn.training.trainer import Trainer

EVERYTHING = dict(
    mixup=0.3, cutmix=0.5, ema_decay=0.9, accumulate=3, layer_decay=0.8, label_smoothing=0.1
)


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """Batches of 8 and a last one of 1 image, of which all processes but one have nothing."""
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: quadrants(57))


def run_on(size: int, output: Path, *, code: int = 0, **options) -> list[Ended]:
    """Train on so many processes, forked also where there is but one."""
    config = small_config(output, **options)

    def work(rank):
        def tool():
            with joined() as processes:
                train(config, processes=processes)

        return run_tool(tool, several=True)

    ended = run_processes(size, work, output / "streams")
    assert [each.code for each in ended] == [code] * size, "".join(each.err for each in ended)
    assert all(each.out == each.err == "" for each in ended[1:])
    return ended


def figures(folder: Path, kind: str, *keys: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if line["kind"] == kind for key in keys]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "last.pt", weights_only=True)
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
        assert figures(several, kind, *keys) == pytest.approx(
            figures(one, kind, *keys), abs=1e-6
        ), kind
    assert figures(several, "train", "grad_norm") == pytest.approx(
        figures(one, "train", "grad_norm"), rel=1e-4
    )
    expected = weights(one)
    assert weights(several).keys() == expected.keys()
    for name, value in weights(several).items():
        assert type(value) is torch.Tensor
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=2e-5, msg=name)
    best = load_model(one / "best.safetensors").state_dict()
    for name, value in load_model(several / "best.safetensors").state_dict().items():
        torch.testing.assert_close(value, best[name], rtol=1e-3, atol=2e-5, msg=name)


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
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for number in range(count):
            mask = rng.choice([0, 1, 2, 255], (31, 27 + number), p=[0.7, 0.1, 0.1, 0.1])
            image = Image.fromarray(mask.astype(np.uint8))
            image.save(root / split / "masks" / f"{number}.png")
            image.convert("RGB").save(root / split / "images" / f"{number}.png")


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
    data, batch_size = {"sampler": "balanced", "crop": [12, 8], "crops": 2}, 250
    if task == "segmentation":
        write_masks(tmp_path / "data")
        data = {"name": "folder", "root": str(tmp_path / "data"), "task": task, "img_size": None}
        data |= {"masks": {"classes": ["a", "b", "c"]}, "augment": "light"}
        data |= {"crop": 16, "crop_around": 0.5, "crops": 3}
        batch_size = 4
    options = dict(data=data, loss=loss, batch_size=batch_size, optim={"accumulate": 2})
    run_on(1, tmp_path / "one", **options)
    run_on(2, tmp_path / "two", **options)
    assert_alike(tmp_path / "one" / "small", tmp_path / "two" / "small")


def stop_after(monkeypatch, step: int, rank: int) -> None:
    """Send SIGTERM to one process in a step, which is counted from the start of the process."""
    real, steps = Trainer.step, iter(range(1, 1000))

    def stopped(self, group, *more):
        if next(steps) == step and self.processes.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, group, *more)

    monkeypatch.setattr(Trainer, "step", stopped)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_and_another_way_to_spread_the_model(
    tmp_path, monkeypatch
):
    run_on(1, tmp_path / "whole", optim=EVERYTHING)
    for number, (size, kind) in enumerate(((2, "ddp"), (1, None), (2, "fsdp"), (3, None))):
        options = {"optim": EVERYTHING, "parallel": kind, "resume": number > 0}
        with monkeypatch.context() as patch:
            if number < 3:
                stop_after(patch, 1 if number else 2, rank=size - 1)
            ended = run_on(size, tmp_path / "parts", code=130 if number < 3 else 0, **options)
        if number < 3:
            assert ended[0].err.startswith(f"stopped after step {number + 2} (epoch ")
            assert status(tmp_path / "parts")["status"] == "stopped"
    assert_alike(tmp_path / "whole" / "small", tmp_path / "parts" / "small")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_that_goes_on_with_as_many_processes_ends_in_the_same_bits(
    tmp_path, monkeypatch, kind
):
    options = {"optim": EVERYTHING, "model": {"drop_path_rate": 0.2}, "parallel": kind}
    run_on(2, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, rank=1)
        run_on(2, tmp_path / "parts", code=130, **options)
    run_on(2, tmp_path / "parts", resume=True, **options)
    whole, parts = weights(tmp_path / "whole" / "small"), weights(tmp_path / "parts" / "small")
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    assert figures(tmp_path / "whole" / "small", "train", "loss") == figures(
        tmp_path / "parts" / "small", "train", "loss"
    )


def status(output: Path) -> dict:
    return json.loads((output / "small" / "status.json").read_text())


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
        line = (
            r"error: parameter blocks\.1\.\S+ does not affect the loss, .* use parallel "
            r"fsdp.*\n"
        )
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


@pytest.mark.slow
def test_an_image_that_one_process_cannot_read_is_left_out_by_all(tmp_path, monkeypatch):
    splits = replace(quadrants(57), train=Damaged(57, 1))
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: splits)
    config = small_config(tmp_path, data={"on_error": "skip"}, epochs=1, optim={"mixup": 0.2})

    def work(rank):
        warnings.simplefilter("ignore")
        with joined() as processes:
            train(config, processes=processes)

    ended = run_processes(2, work, tmp_path / "streams")
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


def test_models_that_would_train_otherwise_on_several_processes_are_refused():
    norm, _ = build_model(ModelConfig("resnet10t"), SPEC)
    with pytest.raises(ValueError, match="^model resnet10t has batch norm .conv1.1., "):
        check_model(norm, "resnet10t", 2)
    check_model(norm, "resnet10t", 1)
    for args, line in (
        ({"softmax_blocks": [0]}, "got softmax over all tokens in block 0"),
        ({"proj_drop_rate": 0.1}, "proj_drop would drop different entries"),
    ):
        model, _ = build_model(ModelConfig("scaleformer_vit_t", MODEL | args), SPEC)
        with pytest.raises(ValueError, match=line):
            check_model(model, "scaleformer_vit_t", 2, "sequence")
        check_model(model, "scaleformer_vit_t", 2, "ddp")


def test_several_processes_are_for_torchrun_to_start(tmp_path):
    with pytest.raises(
        ValueError,
        match="^parallel ddp needs several processes; start with torchrun --nproc-per-node 2",
    ):
        train(small_config(tmp_path / "out", parallel="ddp"))
    assert not (tmp_path / "out").exists()


def test_a_stream_of_shards_is_for_one_process():
    shards = Shards("wds/x", "train", (5, 4), True, 3, 0, None)
    batches = StreamTrainBatches(shards, 0, batch_size=2, choices=(square(16),))
    batches.divide(0, 1)
    with pytest.raises(
        ValueError,
        match="^a stream of shards supports only one training process .wds/x.; unpack it",
    ):
        batches.divide(0, 2)
