"""A whole run: what it learns, what it leaves on the disk, how it goes on after an end that came
early.
"""

import io
import math
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.helpers.resumed_runs import (
    assert_resumes,
    interrupt,
    state_of,
    status_of,
    stop,
    stop_after,
)
from tests.helpers.small_runs import (
    SPEC,
    Quadrants,
    lines,
    quadrants,
    rows,
    same,
    script,
    small_config,
)
from tests.helpers.tools import words
from visionattn.cli.exit_codes import Stopped
from visionattn.cli.parsing import parse
from visionattn.data.batches import Batch, Unreadable
from visionattn.data.splits import SampleKey
from visionattn.lab.report.run_reading import read_run
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model, check_img_size
from visionattn.models.weights import load_model
from visionattn.training import engine, trainer
from visionattn.training.config import TrainConfig
from visionattn.training.engine import train
from visionattn.training.evaluate import Evaluation, evaluate
from visionattn.training.run_folder import run_folder

pytestmark = pytest.mark.usefixtures("small")
EVERYTHING = dict(
    mixup=0.3, cutmix=0.5, ema_decay=0.9, accumulate=2, label_smoothing=0.1, layer_decay=0.8
)


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
            "status.json validation.json test.json events"
        )
    }
    assert result.checkpoint == folder / "best.safetensors" and result.test.images == 29
    status = status_of(folder)
    assert (status["status"], status["reason"], status["exit_code"]) == ("finished", None, 0)
    assert {"device", "torch", "commit"} < set(status["provenance"])
    told = {name: status["result"][name] for name in ("best_epoch", "test_accuracy", "test_loss")}
    assert list(told.values()) == [result.best_epoch, result.test.accuracy, result.test.loss]
    assert status["result"]["train_seconds"] > 0 and status["result"]["images_per_second"] > 0
    assert [(row["epoch"], row["step"]) for row in rows(folder)] == [("1", "8"), ("2", "16")]
    assert max(float(row["val_accuracy"]) for row in rows(folder)) == result.validation
    kinds = [(line["kind"], line["step"]) for line in lines(folder)]
    steps = [("train", step) for step in range(1, 17)]
    assert kinds == [*steps[:8], ("epoch", 8), *steps[8:], ("epoch", 16), ("test", 16)]
    assert "epoch 2/2" in printed and printed.count("%") == 2


def test_the_best_weights_are_those_of_the_best_validation_not_the_last_and_not_the_test(
    tmp_path, monkeypatch
):
    scores = [(0.3, 1.0), (0.8, 0.9), (0.8, 0.7), (0.8, 0.7), (0.1, 0.1)]
    script(monkeypatch, *(Evaluation(23, loss, score, None, 1.0) for score, loss in scores))
    weights, scripted = [], trainer.evaluate

    def noted(model, *given, **options):
        weights.append(model.head.weight.detach().clone())
        return scripted(model, *given, **options)

    monkeypatch.setattr(trainer, "evaluate", noted)
    result, _ = run(small_config(tmp_path, epochs=5))
    assert (result.best_epoch, result.validation, result.test.accuracy) == (3, 0.8, 0.5)
    # The test images are evaluated once, at the end, with the weights that are kept.
    assert len(weights) == 6 and torch.equal(weights[5], weights[2])
    assert torch.equal(load_model(result.checkpoint).head.weight, weights[2])
    assert not torch.equal(weights[3], weights[2])


def test_the_averaged_weights_are_the_ones_kept(tmp_path):
    result, _ = run(small_config(tmp_path, optim={"ema_decay": 0.95}, epochs=1))
    state = state_of(tmp_path / "small")
    same(load_model(result.checkpoint).state_dict(), state["ema"])
    assert not torch.equal(state["model"]["head.weight"], state["ema"]["head.weight"])


def test_every_image_counts_once_in_an_evaluation_however_it_is_batched():
    labels, images = torch.tensor([0, 1, 2, 3, 3, 1, 0]), torch.zeros(7, 1, 4, 4, dtype=torch.uint8)
    answers = iter([[0, 1, 0], [3, 3, 1], [1]])

    class Scripted(torch.nn.Module):
        def forward(self, x):
            assert not self.training and torch.is_inference_mode_enabled()
            return 10 * torch.nn.functional.one_hot(torch.tensor(next(answers)), 4).float()

    model = Scripted().train()
    parts = [Batch(images[i:j], labels[i:j]) for i, j in ((0, 3), (3, 6), (6, 7))]
    result = evaluate(model, parts, SPEC, device=torch.device("cpu"))
    loss = math.log1p(3 * math.exp(-10)) + 10 * 2 / 7
    assert (result.images, result.accuracy, result.top5) == (7, pytest.approx(5 / 7), None)
    assert result.loss == pytest.approx(loss, rel=1e-6) and model.training
    with pytest.raises(ValueError, match="no images"):
        evaluate(model, [], SPEC, device=torch.device("cpu"))


@pytest.mark.parametrize(("steps", "name"), [(2, "lamb"), (7, "adamw")])
def test_a_stopped_and_resumed_run_ends_in_the_very_state_of_one_that_was_not_stopped(
    tmp_path, steps, name
):
    options = {"optim": EVERYTHING | {"name": name}, "model": {"drop_path_rate": 0.2}}
    said = assert_resumes(small_config(tmp_path, epochs=3, **options), tmp_path, steps)
    assert f"resumes after epoch {(steps - 1) // 4}, step {steps}" in said


@pytest.mark.slow
def test_a_compiled_run_is_resumed_and_its_files_are_those_of_any_run(tmp_path, monkeypatch):
    """``aot_eager`` traces and differentiates as the default backend does, but generates no code,
    so that it takes less time.
    """
    compile_quickly = mock.Mock(wraps=partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch, "compile", compile_quickly)
    options = dict(optim={"ema_decay": 0.9}, epochs=1, model={"depth": 1})
    plain, _ = run(small_config(tmp_path / "plain", **options))
    config = small_config(tmp_path / "compiled", compile=True, **options)
    stop(config, 3)
    result, _ = run(replace(config, resume=True))
    assert compile_quickly.call_count == 2
    states = [state_of(each.folder) for each in (plain, result)]
    for part in ("model", "ema"):
        torch.testing.assert_close(states[1][part], states[0][part], rtol=1e-3, atol=1e-4)
    assert load_model(result.checkpoint).state_dict().keys() == states[0]["model"].keys()


def test_options_of_training_are_refused_where_no_epoch_is_left(tmp_path):
    run(small_config(tmp_path))
    line = "all 2 epochs are done, so another optim.lr has no effect; remove it, or pass"
    with pytest.raises(ValueError, match=line):
        run(small_config(tmp_path, resume=True, optim={"lr": 2e-3}))
    run(small_config(tmp_path, resume=True))
    _, printed = run(small_config(tmp_path, resume=True, epochs=3, optim={"lr": 2e-3}))
    assert "resumes after epoch 2, step 16" in printed and "epochs is now 3, was 2" in printed
    assert "optim.lr is now 0.002, was 0.003" in printed and "epoch 2/3" not in printed
    assert [row["epoch"] for row in rows(tmp_path / "small")] == ["1", "2", "3"]
    assert [line["kind"] for line in lines(tmp_path / "small")].count("test") == 1


def test_sigterm_stops_a_run_as_ctrl_c_does(tmp_path, monkeypatch):
    stop_after(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped after step 3 "):
        run(small_config(tmp_path))
    assert state_of(tmp_path / "small")["position"]["step"] == 3


def test_a_second_ctrl_c_ends_at_once_and_the_handler_is_put_back(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    stop_after(monkeypatch, 3, lambda: (interrupt(), interrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(small_config(tmp_path))
    assert signal.getsignal(signal.SIGINT) is before
    assert state_of(tmp_path / "small")["position"]["step"] == 0


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
    for options, line in (
        ({}, "--resume continues it"),
        ({"epochs": 1, "resume": True}, "expected epochs at least 2, which the run has finished, "),
    ):
        with pytest.raises(ValueError, match=line):
            run(small_config(tmp_path, **options))
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
        (
            {"parallel": "ddp"},
            "^parallel ddp needs several processes; start with torchrun --nproc-per-node 2",
        ),
        ({"parallel": "sequence"}, "^parallel sequence needs several processes"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, options, line):
    output = tmp_path / "out"
    with pytest.raises((ValueError, FileNotFoundError), match=line) as error:
        run(small_config(output, **options))
    assert "\n" not in str(error.value) and not output.exists()


OURS, VIT = "scaleformer_vit_t", "vit_tiny_patch16_224"
SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize(
    ("name", "args", "fit", "other", "line"),
    [
        (VIT, {}, 24, 12, "accepts only 24 x 24 pixels, got 12 x 12; .*dynamic"),
        (VIT, {"dynamic_img_size": True}, 16, None, ""),
        (OURS, {"patch_size": [4, 6]}, 12, 20, "of 4 x 6-pixel patches; .*: 12 or 24"),
        (OURS, {"dynamic_img_pad": True}, 23, None, ""),
    ],
)
def test_a_model_for_one_image_size_alone_is_not_given_another(name, args, fit, other, line):
    model, _ = build_model(ModelConfig(name, SMALL | args), replace(SPEC, img_size=24))
    check_img_size(model, [24, fit])
    if other is not None:
        with pytest.raises(ValueError, match=line):
            check_img_size(model, [24, other])


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


@pytest.mark.parametrize("where", ["train", "validation"])
def test_an_unreadable_image_ends_the_run_with_its_path_and_loses_no_step(
    tmp_path, monkeypatch, where
):
    line = r"x/broken.png.*; the state of step \d is kept, --resume continues from it"
    good = quadrants()
    broken = OneUnreadable(len(getattr(good, where)), {"train": 1, "validation": 2}[where])
    with monkeypatch.context() as patch:
        patch.setattr(engine, "build_splits", lambda *_: replace(good, **{where: broken}))
        with pytest.raises(ValueError, match=line):
            run(small_config(tmp_path, save_every=None))
    position = state_of(tmp_path / "small")["position"]
    assert position["epoch"] == 0 and 0 < position["step"] <= 8
    run(small_config(tmp_path, resume=True))  # the image being repaired
    run(small_config(tmp_path, run="whole"))
    same(*(state_of(tmp_path / name)["model"] for name in ("small", "whole")))


def test_an_unreadable_image_is_left_out_where_that_is_asked_for_and_the_report_tells_it(
    tmp_path, monkeypatch
):
    splits = replace(quadrants(), train=OneUnreadable(61, 1))
    monkeypatch.setattr(engine, "build_splits", lambda *_: splits)
    with pytest.warns(UserWarning, match="skipped unreadable image x/broken.png"):
        run(small_config(tmp_path, data={"on_error": "skip"}, epochs=1))
    told = "unreadable images skipped (1): x/broken.png"
    assert read_run(tmp_path / "small", "small").problems == [told]


def test_a_run_starts_from_the_weights_of_another_with_another_size(tmp_path):
    first, _ = run(small_config(tmp_path, epochs=1))
    config = small_config(tmp_path, epochs=1, run="second", data={"img_size": 24})
    config = replace(config, init_from=str(first.checkpoint))
    assert f"tensors come from {first.checkpoint}" in run(config)[1]
    run(replace(config, epochs=2, resume=True))
