"""The ends of a run: signals, memory, numbers, dead processes; and what a run says of itself."""

import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from tests.helpers.long_operation import ended, one_long_operation
from tests.helpers.resumed_runs import (
    FORK,
    assert_same_end,
    config_of,
    run,
    scaler_with,
    state_of,
    status_of,
    stop_after,
)
from tests.helpers.small_runs import TESTED, Quadrants, lines, quadrants, rows, script
from tests.helpers.tools import assert_one_error
from visionattn.cli.exit_codes import run_tool
from visionattn.data.batches import SampleKey
from visionattn.training import engine, optimize, run_progress
from visionattn.training.evaluate import Evaluation
from visionattn.training.run_progress import Pace

pytestmark = [
    pytest.mark.usefixtures("small_data"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def test_a_step_that_takes_too_long_is_given_up_and_the_run_goes_on_bit_for_bit(
    tmp_path, monkeypatch, whole
):
    real, calls, begun = optimize.OptimizerStep.add_gradients, iter(range(1000)), FORK.Event()

    def long(self, *given, **options):
        loss = real(self, *given, **options)
        if next(calls) == 9:  # in the second batch of the fifth step
            begun.set()
            one_long_operation()
        return loss

    config = config_of(tmp_path, save_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(optimize.OptimizerStep, "add_gradients", long)
        code, said = ended(lambda: run(config), signal.SIGINT, begun, tmp_path / "errors")
    folder = tmp_path / "small"
    step = state_of(folder)["position"]["step"]
    assert code == 130 and step in (3, 4) and status_of(folder)["status"] == "stopped"
    assert said.startswith(
        f"stopped amid an operation of over 2 s; the state of step {step} is kept, --resume"
    )
    assert said.endswith(" --resume\n") and said.count("\n") == 1
    assert not (folder / "run.lock").exists() and not list(folder.glob("*.tmp"))
    config.resume = True
    assert run_tool(lambda: run(config)) == 0
    assert_same_end(whole, folder)


@pytest.mark.parametrize(
    "lack",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_too_little_memory_is_a_result(tmp_path, whole, capsys, lack):
    def fail():
        raise lack

    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 6, fail)
        code = run_tool(lambda: run(config_of(tmp_path)))
    error, status = capsys.readouterr().err, status_of(tmp_path / "small")
    assert code == status["exit_code"] == 3 and status["status"] == "oom"
    assert error == f"error: {status['reason']}\n"
    for part in (
        "out of memory at batches of 8 images of 16 x 16 pixels; use a smaller batch_size with",
        "a larger optim.accumulate, ",
        "gradient checkpointing",
        "the state of step 4 is kept",
    ):
        assert part in error
    run(config_of(tmp_path, resume=True))
    assert_same_end(whole, tmp_path / "small")


def test_weights_that_are_not_finite_are_neither_kept_nor_a_result(tmp_path, capsys):
    """Two steps, too few for the count of losses in a row to end the run."""
    optim = {"lr": 1e9, "min_lr": 1.0, "warmup_epochs": 0}
    config = config_of(tmp_path, optim=optim, epochs=1, batch_size=32)
    assert run_tool(lambda: run(config)) == 1
    status = status_of(tmp_path / "small")
    assert (status["status"], status["exit_code"], status["result"]) == ("nan", 1, None)
    assert status["reason"].startswith("the loss on the validation images is nan (epoch 1 of 1): ")
    assert capsys.readouterr().err == f"error: {status['reason']}\n"
    assert "NaN" not in (tmp_path / "small" / "status.json").read_text()  # which JSON has not
    assert not (tmp_path / "small" / "best.safetensors").exists()


def test_a_loss_on_the_test_images_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    script(monkeypatch, Evaluation(23, 1.0, 0.5, None, 1.0), test=replace(TESTED, loss=math.inf))
    assert run_tool(lambda: run(config_of(tmp_path, epochs=1))) == 1
    status = status_of(tmp_path / "small")
    assert status["status"] == "nan"
    assert status["reason"].startswith("the loss on the test images is ")
    assert lines(tmp_path / "small")[-1]["kind"] == "epoch"


def test_a_run_in_which_no_step_changed_the_weights_has_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", scaler_with(init_scale=2.0**100))
    config = config_of(tmp_path, epochs=1, amp="fp16")
    for resume in (False, True):
        assert run_tool(lambda again=resume: run(replace(config, resume=again))) == 1
        status = status_of(tmp_path / "small")
        assert status["status"] == "nan"
        assert status["reason"].startswith("none of the 4 steps had a finite loss and gradient")


class Deadly(Quadrants):
    def __getitem__(self, key: SampleKey):
        if key.index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_loading_process_that_dies_ends_the_run_with_code_4(tmp_path, monkeypatch, capsys):
    splits = replace(quadrants(), train=Deadly(61, 1))
    monkeypatch.setattr(engine, "build_splits", lambda *_: splits)
    assert run_tool(lambda: run(config_of(tmp_path, data={"workers": 1}))) == 4
    status = status_of(tmp_path / "small")
    assert_one_error(capsys, "error: a data loader process died: DataLoader worker")
    assert (status["status"], status["exit_code"]) == ("failed", 4)


def test_the_pace_of_real_steps_is_told_once_with_the_time_that_is_left(tmp_path, monkeypatch):
    pace = Pace()
    told = [pace.add(0.9, 0.9) for _ in range(10)]  # libraries and loaders start
    told += [pace.add(0.25, 1.0) for _ in range(40)]
    assert told.index(True) == 29 and sum(told) == 1
    start = "measured: 1.0 s per step, 25% of it waiting for data (data.workers 3, "
    line = pace.line(90, 3)
    assert line.startswith(start) and line.endswith(" cores); about 1 min 30 s left")
    slow = Pace()
    assert [slow.add(0.0, 25.0) for _ in range(6)].index(True) == 3
    for name, value in {"PACE_SECONDS": 0.0, "STARTING_STEPS": 0, "PACE_STEPS": 1}.items():
        monkeypatch.setattr(run_progress, name, value)
    assert run(config_of(tmp_path)).count("waiting for data (data.workers 0") == 1
    assert all(0 < float(row["wait_share"]) < 1 for row in rows(tmp_path / "small"))
