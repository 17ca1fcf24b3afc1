"""A whole run: what it learns, what it leaves on the disk, how it goes on after an end that came
early.
"""

import io
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.small_runs import (
    SPEC,
    Quadrants,
    lines,
    quadrants,
    quadrants_for,
    rows,
    same,
    small_config,
    timeless,
)
from tests.helpers.tools import words
from visionattn.cli.exit_codes import Stopped
from visionattn.cli.parsing import parse
from visionattn.data.batches import Batch, Unreadable
from visionattn.data.splits import SampleKey, Splits
from visionattn.lab.report.run_reading import read_run
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model, check_img_size
from visionattn.models.weights import load_model
from visionattn.training import engine, trainer
from visionattn.training.config import TrainConfig
from visionattn.training.engine import train
from visionattn.training.evaluate import Evaluation, evaluate
from visionattn.training.run_folder import run_folder
from visionattn.training.trainer import Trainer

EVERYTHING = dict(
    mixup=0.3, cutmix=0.5, ema_decay=0.9, accumulate=2, label_smoothing=0.1, layer_decay=0.8
)


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    monkeypatch.setattr(engine, "build_splits", quadrants_for)


def run(config: TrainConfig) -> tuple[engine.Result, str]:
    stream = io.StringIO()
    return train(config, stream=stream), stream.getvalue()


def files(folder: Path) -> set[str]:
    return (
        {"events" if "tfevents" in path.name else path.name for path in folder.iterdir()}
        if folder.exists()
        else set()
    )


def test_a_run_leaves_weights_state_configuration_and_figures(tmp_path):
    config = small_config(tmp_path, optim=EVERYTHING | {"accumulate": 1})
    result, printed = run(config)
    folder = tmp_path / "small"
    assert parse(TrainConfig, ["--config", str(folder / "config.yaml")]) == config
    assert files(folder) == {
        *words(
            "best.safetensors last.pt previous.pt config.yaml metrics.jsonl summary.csv "
            "status.json validation.json test.json"
        ),
        "events",
    }
    assert result.checkpoint == folder / "best.safetensors" and result.test.images == 29
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["reason"], status["exit_code"]) == ("finished", None, 0)
    assert {"device", "torch", "commit"} < set(status["provenance"])
    told = {name: status["result"][name] for name in ("best_epoch", "test_accuracy", "test_loss")}
    assert list(told.values()) == [result.best_epoch, result.test.accuracy, result.test.loss]
    assert status["result"]["test_images"] == 29 and status["result"]["train_seconds"] > 0
    assert result.seconds > 0 and status["result"]["images_per_second"] > 0
    assert [row["epoch"] for row in rows(folder)] == ["1", "2"]
    assert [row["step"] for row in rows(folder)] == ["8", "16"]
    assert max(float(row["val_accuracy"]) for row in rows(folder)) == result.validation
    kinds = [(line["kind"], line["step"]) for line in lines(folder)]
    steps = [("train", step) for step in range(1, 17)]
    assert kinds == [*steps[:8], ("epoch", 8), *steps[8:], ("epoch", 16), ("test", 16)]
    assert "epoch 2/2" in printed and printed.count("%") == 2
    events = next(folder.glob("events*")).read_bytes()
    assert all(tag in events for tag in (b"train/loss", b"train/lr", b"epoch/val_accuracy"))


def test_the_best_weights_are_those_of_the_best_validation_not_the_last_and_not_the_test(
    tmp_path, monkeypatch
):
    scores = iter([(0.3, 1.0), (0.8, 0.9), (0.8, 0.7), (0.8, 0.7), (0.1, 0.1)])
    weights, tested = [], []

    def scripted(model, batches, spec, **options):
        images = sum(len(labels) for _, labels, *_ in batches)
        weights.append(model.head.weight.detach().clone())
        if images == 29:
            tested.append(model)
            return Evaluation(29, 1.0, 0.95, None, 1.0)
        accuracy, loss = next(scores)
        return Evaluation(images, loss, accuracy, None, 1.0)

    monkeypatch.setattr(trainer, "evaluate", scripted)
    result, _ = run(small_config(tmp_path, epochs=5))
    kept = load_model(result.checkpoint).head.weight
    assert (result.best_epoch, result.validation, result.test.accuracy) == (3, 0.8, 0.95)
    assert len(tested) == 1 and torch.equal(kept, weights[2])
    assert torch.equal(weights[5], weights[2])
    assert not torch.equal(weights[3], weights[2])


def test_the_averaged_weights_are_the_ones_kept(tmp_path):
    result, _ = run(small_config(tmp_path, optim={"ema_decay": 0.95}, epochs=1))
    state = torch.load(tmp_path / "small" / "last.pt", weights_only=True)
    kept = load_model(result.checkpoint).state_dict()
    assert all(torch.equal(kept[key], state["ema"][key]) for key in kept)
    assert not torch.equal(state["model"]["head.weight"], state["ema"]["head.weight"])


def test_without_test_images_there_is_no_test(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: quadrants(test=False))
    result, _ = run(small_config(tmp_path, epochs=1))
    assert result.test is None and 0 <= result.validation <= 1
    assert [line["kind"] for line in lines(tmp_path / "small")] == ["train"] * 8 + ["epoch"]


def test_every_image_counts_once_in_an_evaluation_however_it_is_batched():
    labels = torch.tensor([0, 1, 2, 3, 3, 1, 0])
    images = torch.zeros(7, 1, 4, 4, dtype=torch.uint8)
    answers = iter([[0, 1, 0], [3, 3, 1], [1]])

    class Scripted(torch.nn.Module):
        def forward(self, x):
            assert not self.training and torch.is_inference_mode_enabled()
            return 10 * torch.nn.functional.one_hot(torch.tensor(next(answers)), 4).float()

    model = Scripted().train()
    parts = [Batch(images[i:j], labels[i:j]) for i, j in ((0, 3), (3, 6), (6, 7))]
    result = evaluate(model, parts, SPEC, device=torch.device("cpu"))
    wrong, right = 10 + math.log1p(3 * math.exp(-10)), math.log1p(3 * math.exp(-10))
    assert (result.images, result.accuracy, result.top5) == (7, pytest.approx(5 / 7), None)
    assert result.loss == pytest.approx((5 * right + 2 * wrong) / 7, rel=1e-6) and model.training
    with pytest.raises(ValueError, match="no images"):
        evaluate(model, [], SPEC, device=torch.device("cpu"))


def stop_at(monkeypatch, steps: int, *signals: signal.Signals) -> None:
    """Send the signals during the given step, counted over all trainers."""
    real, done = Trainer.step, iter(range(1, 1000))

    def step(self, group, *more):
        if next(done) == steps:
            for signum in signals:
                os.kill(os.getpid(), signum)
        return real(self, group, *more)

    monkeypatch.setattr(Trainer, "step", step)


@pytest.mark.parametrize(("stopped_at", "signum"), [(2, signal.SIGTERM), (7, signal.SIGINT)])
def test_a_stopped_and_resumed_run_ends_in_the_very_state_of_one_that_was_not_stopped(
    tmp_path, monkeypatch, stopped_at, signum
):
    options = {
        "optim": EVERYTHING | {"name": "lamb" if stopped_at == 2 else "adamw"},
        "epochs": 3,
        "model": {"drop_path_rate": 0.2},
    }
    run(small_config(tmp_path / "whole", **options))
    with monkeypatch.context() as patch:
        stop_at(patch, stopped_at, signum)
        with pytest.raises(Stopped, match=f"stopped after step {stopped_at} "):
            run(small_config(tmp_path / "parts", **options))
    _, printed = run(small_config(tmp_path / "parts", resume=True, **options))
    assert f"resumes after epoch {(stopped_at - 1) // 4}, step {stopped_at}" in printed
    states = [
        torch.load(tmp_path / part / "small" / "last.pt", weights_only=True)
        for part in ("whole", "parts")
    ]
    for state in states:
        del state["config"]
    same(*states)
    whole, parts = (tmp_path / part / "small" for part in ("whole", "parts"))
    assert timeless(rows(whole)) == timeless(rows(parts))
    assert timeless(lines(whole)) == timeless(lines(parts))
    best = [load_model(folder / "best.safetensors").state_dict() for folder in (whole, parts)]
    same(*best)


@pytest.mark.slow
def test_a_compiled_run_is_resumed_and_its_files_are_those_of_any_run(tmp_path, monkeypatch):
    """``aot_eager`` traces and differentiates as the default backend does, but generates no code,
    so that it takes less time.
    """
    real, compiled = torch.compile, []

    def compile_quickly(model):
        compiled.append(model)
        return real(model, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_quickly)
    options = dict(optim={"ema_decay": 0.9}, epochs=1, model={"depth": 1})
    plain, _ = run(small_config(tmp_path / "plain", **options))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        with pytest.raises(Stopped, match="stopped after step 3 "):
            run(small_config(tmp_path / "compiled", compile=True, **options))
    result, _ = run(small_config(tmp_path / "compiled", compile=True, resume=True, **options))
    assert len(compiled) == 2
    states = [torch.load(each.folder / "last.pt", weights_only=True) for each in (plain, result)]
    for part in ("model", "ema"):
        torch.testing.assert_close(states[1][part], states[0][part], rtol=1e-3, atol=1e-4)
    assert load_model(result.checkpoint).state_dict().keys() == states[0]["model"].keys()


def test_options_of_training_are_refused_where_no_epoch_is_left(tmp_path):
    run(small_config(tmp_path))
    kept = (tmp_path / "small" / "config.yaml").read_bytes()
    with pytest.raises(
        ValueError,
        match="all 2 epochs are done, so another optim.lr has no effect; remove it, or pass",
    ):
        run(small_config(tmp_path, resume=True, optim={"lr": 2e-3}))
    assert (tmp_path / "small" / "config.yaml").read_bytes() == kept
    run(small_config(tmp_path, resume=True))
    _, printed = run(small_config(tmp_path, resume=True, epochs=3, optim={"lr": 2e-3}))
    assert "resumes after epoch 2, step 16" in printed and "epochs is now 3, was 2" in printed
    assert "optim.lr is now 0.002, was 0.003" in printed and "epoch 2/3" not in printed
    assert [row["epoch"] for row in rows(tmp_path / "small")] == ["1", "2", "3"]
    assert [line["kind"] for line in lines(tmp_path / "small")].count("test") == 1


def test_a_second_ctrl_c_ends_at_once_and_the_handler_is_put_back(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    stop_at(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(small_config(tmp_path))
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(tmp_path / "small" / "last.pt", weights_only=True)["position"]["step"] == 0


def test_a_folder_in_use_is_refused_and_overwriting_deletes_only_what_a_run_wrote(tmp_path):
    folder, own = tmp_path / "small", ("notes.txt", "mine.tmp", "last.pt.tmp")
    folder.mkdir()
    for name in own:
        (folder / name).write_text("mine")
    refusal = "small is not empty; --overwrite deletes it, --run NAME writes to another folder$"
    with pytest.raises(ValueError, match=refusal):
        run(small_config(tmp_path))
    assert files(folder) == set(own)
    run(small_config(tmp_path, overwrite=True))
    with pytest.raises(ValueError, match="--resume continues it"):
        run(small_config(tmp_path))
    with pytest.raises(
        ValueError, match="expected epochs at least 2, which the run has finished, got 1"
    ):
        run(small_config(tmp_path, epochs=1, resume=True))
    refused = tmp_path / "refused"
    refused.mkdir()
    (refused / "status.json").write_text("{}")  # as a run that does not fit into memory leaves it
    assert run_folder(small_config(tmp_path, run="refused")) == refused
    left = folder / ".last.pt.0123456789abcdef.visionattn.tmp"
    left.write_text("cut off")
    run(small_config(tmp_path, epochs=1, overwrite=True))
    assert {(folder / name).read_text() for name in own} == {"mine"} and not left.exists()
    assert len(rows(folder)) == 1 and len(list(folder.glob("events*"))) == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"resume": True}, "nothing to resume: .*last.pt does not exist; check --run"),
        ({"run": "../elsewhere"}, "run to be the name of a folder within .*, got '../elsewhere'"),
        ({"run": ".."}, "run to be the name of a folder"),
        ({"epochs": 0}, "epochs must be above 0"),
        ({"device": "abacus"}, "device 'abacus' is not available"),
        ({"init_from": "nowhere.pt"}, "no checkpoint at nowhere.pt"),
        ({"model": {"num_headz": 4}}, "has no argument num_headz; did you mean num_heads\\?$"),
        ({"model": {"embed_dim": 0}}, "^embed_dim: expected an integer of at least 1, got 0$"),
        (
            {"model": {"norm_layer": "foo"}},
            r"^model scaleformer_vit_t does not .* \(KeyError: 'foo'\)$",
        ),
        (
            {"model": {"num_classes": 4}},
            "model.args.num_classes is set by the data; remove it",
        ),
        (
            {"data": {"img_size": 18}},
            "image of 18 x 18 pixels is not a whole number of 4-pixel patches; .* 16 or 20$",
        ),
        ({"data": {"img_size_choices": [16, 21]}}, "image of 21 x 21 pixels is not a whole number"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, options, line):
    output = tmp_path / "out"
    with pytest.raises((ValueError, FileNotFoundError), match=line) as error:
        run(small_config(output, **options))
    assert "\n" not in str(error.value) and not output.exists()


def test_a_model_for_one_image_size_alone_is_not_given_another():
    small = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    fixed, _ = build_model(ModelConfig("vit_tiny_patch16_224", small), SPEC)
    with pytest.raises(
        ValueError,
        match="the model accepts only 16 x 16 pixels, got 24 x 24; .*dynamic_img_size",
    ):
        check_img_size(fixed, [16, 24])
    check_img_size(
        build_model(ModelConfig("vit_tiny_patch16_224", small | {"dynamic_img_size": True}), SPEC)[
            0
        ],
        [16, 24],
    )
    check_img_size(
        build_model(ModelConfig("scaleformer_vit_t", small | {"dynamic_img_pad": True}), SPEC)[0],
        [16, 23],
    )
    oblong, _ = build_model(
        ModelConfig("scaleformer_vit_t", small | {"patch_size": [4, 6]}), replace(SPEC, img_size=24)
    )
    check_img_size(oblong, [12, 24])
    with pytest.raises(
        ValueError,
        match="20 x 20 pixels is not a whole number of 4 x 6-pixel patches; .*: 12 or 24",
    ):
        check_img_size(oblong, [20])


def test_the_state_of_another_model_or_optimiser_is_refused(tmp_path):
    run(small_config(tmp_path, epochs=1))
    before = (tmp_path / "small" / "last.pt").read_bytes()
    for options, line in (
        ({"model": {"embed_dim": 24}}, "has the state of another model, .*of another shape"),
        ({"model": {"depth": 3}}, "has the state of another model, .* missing"),
        ({"optim": {"name": "lamb"}}, "the run has optim.name adamw, not lamb"),
        ({"optim": {"layer_decay": 0.9}}, "the run has optim.layer_decay None, not 0.9"),
        (
            {"optim": {"ema_decay": 0.9}},
            "expected optim.ema_decay None as at the start of the run",
        ),
    ):
        with pytest.raises(ValueError, match=line):
            run(small_config(tmp_path, resume=True, epochs=2, **options))
    assert (tmp_path / "small" / "last.pt").read_bytes() == before


class OneUnreadable(Quadrants):
    def __getitem__(self, key: SampleKey):
        return Unreadable("x/broken.png", "cut off") if key.index == 5 else super().__getitem__(key)


def unreadable_in(where: str, monkeypatch) -> None:
    """Let the runs that follow read one image less of a split."""
    good = quadrants()
    broken = OneUnreadable(len(getattr(good, where)), {"train": 1, "validation": 2}[where])
    parts = {"train": good.train, "validation": good.validation} | {where: broken}
    monkeypatch.setattr(
        engine, "build_splits", lambda config, seed: Splits(**parts, test=good.test, spec=SPEC)
    )


@pytest.mark.parametrize("where", ["train", "validation"])
def test_an_unreadable_image_ends_the_run_with_its_path_and_loses_no_step(
    tmp_path, monkeypatch, where
):
    with monkeypatch.context() as patch:
        unreadable_in(where, patch)
        with pytest.raises(
            ValueError,
            match=r"x/broken.png.*; the state of step \d is kept, --resume continues from it",
        ):
            run(small_config(tmp_path, save_every=None))
    state = torch.load(tmp_path / "small" / "last.pt", weights_only=True)
    assert state["position"]["epoch"] == 0 and 0 < state["position"]["step"] <= 8
    run(small_config(tmp_path, resume=True))  # the image being repaired
    run(small_config(tmp_path, run="whole"))
    repaired, whole = (
        torch.load(tmp_path / name / "last.pt", weights_only=True)["model"]
        for name in ("small", "whole")
    )
    assert all(torch.equal(repaired[key], whole[key]) for key in whole)


@pytest.mark.parametrize("where", ["train", "validation"])
def test_an_unreadable_image_is_left_out_where_that_is_asked_for(tmp_path, monkeypatch, where):
    unreadable_in(where, monkeypatch)
    with pytest.warns(UserWarning, match="skipped unreadable image x/broken.png"):
        run(small_config(tmp_path, data={"on_error": "skip"}, epochs=1))
    assert rows(tmp_path / "small")[0]["left_out"] == "1"
    told = "unreadable images skipped (1): x/broken.png"
    assert read_run(tmp_path / "small", "small").problems == [told]


def test_a_run_starts_from_the_weights_of_another_with_another_size(tmp_path):
    first, _ = run(small_config(tmp_path, epochs=1))
    config = small_config(
        tmp_path, epochs=1, run="second", init_from=str(first.checkpoint), data={"img_size": 24}
    )
    _, printed = run(config)
    assert f"tensors come from {first.checkpoint}" in printed
    run(
        small_config(
            tmp_path,
            epochs=2,
            run="second",
            init_from=str(first.checkpoint),
            resume=True,
            data={"img_size": 24},
        )
    )
