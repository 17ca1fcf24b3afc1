"""The ends of a run: signals, memory, numbers, dead processes; and what a run says of itself."""

import json
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
from tests.helpers.small_runs import Quadrants, lines, quadrants, rows
from visionattn.cli.exit_codes import run_tool
from visionattn.data.batches import SampleKey
from visionattn.training import engine, optimize, run_progress, trainer
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


def lack_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def lack_of_main_memory() -> None:
    where = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: "
    raise RuntimeError(f"{where}can't allocate memory: 9 bytes")


@pytest.mark.parametrize("fail", [lack_of_main_memory, lack_of_memory])
def test_too_little_memory_is_a_result(tmp_path, whole, capsys, fail):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 6, fail)
        code = run_tool(lambda: run(config_of(tmp_path)))
    error, status = capsys.readouterr().err, status_of(tmp_path / "small")
    assert code == status["exit_code"] == 3 and status["status"] == "oom"
    assert error == f"error: {status['reason']}\n"
    assert error.startswith(
        "error: out of memory at batches of 8 images of 16 x 16 pixels; use a smaller batch_size "
        "with a larger optim.accumulate, "
    )
    assert "optim.accumulate" in error and "gradient checkpointing" in error
    assert "the state of step 4 is kept" in error
    run(config_of(tmp_path, resume=True))
    assert_same_end(whole, tmp_path / "small")


def strict(folder) -> dict:
    """``status.json``, without the NaN that JSON does not have."""
    return json.loads(
        (folder / "status.json").read_text(),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )


def test_weights_that_are_not_finite_are_neither_kept_nor_a_result(tmp_path, capsys):
    """Two steps, too few for the count of losses in a row to end the run."""
    config = config_of(
        tmp_path, optim={"lr": 1e9, "min_lr": 1.0, "warmup_epochs": 0}, epochs=1, batch_size=32
    )
    assert run_tool(lambda: run(config)) == 1
    status = strict(tmp_path / "small")
    assert (status["status"], status["exit_code"], status["result"]) == ("nan", 1, None)
    assert status["reason"].startswith("the loss on the validation images is nan (epoch 1 of 1): ")
    assert capsys.readouterr().err == f"error: {status['reason']}\n"
    assert not (tmp_path / "small" / "best.safetensors").exists()


def test_a_loss_on_the_test_images_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    real = trainer.evaluate

    def spoilt(*arguments, **options):
        result = real(*arguments, **options)
        return replace(result, loss=math.inf) if result.images == 29 else result

    monkeypatch.setattr(trainer, "evaluate", spoilt)
    assert run_tool(lambda: run(config_of(tmp_path, epochs=1))) == 1
    status = strict(tmp_path / "small")
    assert (status["status"], status["reason"].split(" is ")[0]) == (
        "nan",
        "the loss on the test images",
    )
    assert lines(tmp_path / "small")[-1]["kind"] == "epoch"


def test_a_run_in_which_no_step_changed_the_weights_has_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", scaler_with(init_scale=2.0**100))
    config = config_of(tmp_path, epochs=1, amp="fp16")
    for resume in (False, True):
        assert run_tool(lambda again=resume: run(replace(config, resume=again))) == 1
        status = strict(tmp_path / "small")
        assert status["status"] == "nan"
        assert status["reason"].startswith("none of the 4 steps had a finite loss and gradient")


class Deadly(Quadrants):
    def __getitem__(self, key: SampleKey):
        if key.index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def test_a_loading_process_that_dies_ends_the_run_with_code_4(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        engine, "build_splits", lambda *_: replace(quadrants(), train=Deadly(61, 1))
    )
    assert run_tool(lambda: run(config_of(tmp_path, data={"workers": 1}))) == 4
    error, status = capsys.readouterr().err, status_of(tmp_path / "small")
    assert error.startswith("error: a data loader process died: DataLoader worker")
    assert error.count("\n") == 1
    assert (status["status"], status["exit_code"]) == ("failed", 4)


def test_the_pace_of_real_steps_is_told_once_with_the_time_that_is_left(tmp_path, monkeypatch):
    pace = Pace()
    told = [pace.add(0.9, 0.9) for _ in range(10)]  # libraries and loaders start
    told += [pace.add(0.25, 1.0) for _ in range(40)]
    assert told.index(True) == 29 and sum(told) == 1
    assert pace.line(90, 3).startswith(
        "measured: 1.0 s per step, 25% of it waiting for data (data.workers 3, "
    )
    assert pace.line(90, 3).endswith(" cores); about 1 min 30 s left")

    slow = Pace()
    assert [slow.add(0.0, 25.0) for _ in range(6)].index(True) == 3 and slow.steps == 3

    monkeypatch.setattr(run_progress, "PACE_SECONDS", 0.0)
    monkeypatch.setattr(run_progress, "STARTING_STEPS", 0)
    monkeypatch.setattr(run_progress, "PACE_STEPS", 1)
    told = [line for line in run(config_of(tmp_path)).splitlines() if "waiting for data" in line]
    assert len(told) == 1 and "data.workers 0" in told[0]
    shares = [float(row["wait_share"]) for row in rows(tmp_path / "small")]
    assert all(0 < share < 1 for share in shares) and len(shares) == 3
