"""The ends of a run: signals, memory, numbers, dead processes; and what a run says of itself."""

import json
import math
import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from tests.helpers.long_operation import ended, one_long_operation
from tests.helpers.resumed_runs import (
    FORK,
    assert_same_end,
    config_of,
    end,
    run,
    scaler_with,
    start,
    state_of,
    states_written,
    status_of,
    stop_after,
)
from tests.helpers.small_runs import Quadrants, lines, quadrants, rows
from visionattn.cli.ends import OutOfMemory, run_tool
from visionattn.data.batches import SampleKey
from visionattn.training import engine, objective, optimize, progress, trainer
from visionattn.training import status as status_module
from visionattn.training.forecast import forecast
from visionattn.training.progress import WaitWatch
from visionattn.training.record import LAST

pytestmark = [
    pytest.mark.usefixtures("small_data"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.mark.parametrize("workers", [0, 1])
def test_sigterm_to_all_processes_of_a_run_saves_the_state_and_ends_with_code_130(
    tmp_path, whole, workers
):
    config = config_of(tmp_path, data={"workers": workers}, epochs=3)

    def work() -> None:
        os.setsid()
        os._exit(run_tool(lambda: run(config)))

    process = FORK.Process(target=work)
    process.start()
    folder = tmp_path / "small"
    while not states_written(folder):
        time.sleep(0.002)
    for _ in range(2):  # as ``timeout`` does: to the process, and to its group
        os.killpg(process.pid, signal.SIGTERM)
    assert end(process) == 130
    status = status_of(folder)
    assert (status["status"], status["exit_code"]) == ("stopped", 130)
    step = state_of(folder)["position"]["step"]
    assert status["reason"].startswith(f"stopped after step {step} ") and step < 12
    config.resume = True
    assert end(start(config)) == 0
    assert_same_end(whole, folder)


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
        f"stopped amid an operation of over 2 s; the state of step {step} is kept, --resume goes on"
    )
    assert said.endswith(" --resume\n") and said.count("\n") == 1
    assert not (folder / "run.lock").exists() and not list(folder.glob("*.tmp"))
    config.resume = True
    assert run_tool(lambda: run(config)) == 0
    assert_same_end(whole, folder)


def test_a_signal_amid_the_trial_ends_at_once_and_changes_no_state(tmp_path, monkeypatch, whole):
    config, begun = config_of(tmp_path), FORK.Event()
    with pytest.raises(OutOfMemory), monkeypatch.context() as patch:
        stop_after(patch, 6, lack_of_memory)
        run(config)
    config.resume = True
    before = (tmp_path / "small" / LAST).read_bytes()

    def long(trainer, memory):
        begun.set()
        one_long_operation()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "forecast", long)
        code, said = ended(lambda: run(config), signal.SIGINT, begun, tmp_path / "errors")
    assert code == 130 and "the state of step 4 is kept" in said
    assert (tmp_path / "small" / LAST).read_bytes() == before
    monkeypatch.setattr(engine, "forecast", forecast)  # a real trial changes nothing either
    run(config)
    assert_same_end(whole, tmp_path / "small")


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
        "error: out of memory at batches of 8 images of 16 x 16 pixels; a smaller batch_size with "
    )
    assert "optim.accumulate" in error and "gradient checkpointing" in error
    assert "the state of step 4 is kept" in error
    run(config_of(tmp_path, resume=True))
    assert_same_end(whole, tmp_path / "small")


def test_a_loss_that_is_not_finite_is_a_result(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            objective,
            "make_criterion",
            lambda config: lambda logits, targets: logits.sum() * torch.nan,
        )
        assert run_tool(lambda: run(config_of(tmp_path))) == 1
    status = status_of(tmp_path / "small")
    assert (status["status"], status["exit_code"], status["result"]) == ("nan", 1, None)
    assert status["reason"].startswith("the loss was not finite 3 steps in a row")


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
    assert status["reason"].startswith("the loss on the validation images of epoch 1 is nan")
    assert capsys.readouterr().err == f"error: {status['reason']}\n"
    assert not (tmp_path / "small" / "best.safetensors").exists()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_on_the_test_images_that_is_not_finite_is_no_result(tmp_path, monkeypatch, loss):
    real = trainer.evaluate

    def spoilt(*arguments, **options):
        result = real(*arguments, **options)
        return replace(result, loss=loss) if result.images == 29 else result

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
    assert error.startswith("error: a process that loads data ended: DataLoader worker")
    assert error.count("\n") == 1
    assert (status["status"], status["exit_code"]) == ("failed", 4)


@pytest.mark.parametrize(
    "end", [ConnectionResetError(104, "Connection reset by peer"), EOFError()], ids=["reset", "end"]
)
def test_a_loading_process_that_dies_while_it_hands_over_a_batch_is_told_alike(
    end, tmp_path, monkeypatch, capsys
):
    """Its end of the connection breaks first; torch's handler of the signal then interrupts the
    writing of the status.
    """
    real, calls = status_module.write_text, iter(range(99))

    def interrupted(path, text) -> None:
        if next(calls) == 1:
            raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
        real(path, text)

    def broken(self):
        raise end
        yield

    monkeypatch.setattr(status_module, "write_text", interrupted)
    monkeypatch.setattr(torch.utils.data.DataLoader, "__iter__", broken)
    assert run_tool(lambda: run(config_of(tmp_path))) == 4
    status = status_of(tmp_path / "small")
    assert capsys.readouterr().err == f"error: {status['reason']}\n"
    assert (status["status"], status["exit_code"]) == ("failed", 4)
    assert status["reason"].startswith(
        "a process that loads data ended: DataLoader worker ended amid a batch"
    )


def test_a_finished_run_says_what_came_of_it(whole):
    status, test = status_of(whole), lines(whole)[-1]
    assert (status["status"], status["reason"], status["exit_code"]) == ("finished", None, 0)
    assert status["provenance"] == {"device": "cpu", "processes": 1}
    result, best = status["result"], max(rows(whole), key=lambda row: float(row["val_accuracy"]))
    assert result["best_epoch"] == int(best["epoch"])
    assert result["validation_accuracy"] == float(best["val_accuracy"])
    assert (result["test_accuracy"], result["test_loss"]) == (test["accuracy"], test["loss"])
    assert result["test_images"] == 29 and result["train_seconds"] > 0
    assert result["images_per_second"] > 0


def test_waiting_for_data_is_told_once_and_not_while_the_loaders_start(tmp_path, monkeypatch):
    watch = WaitWatch()
    shares = [watch.add(0.9, 1.0) for _ in range(10)]  # the start
    shares += [watch.add(0.19, 1.0) for _ in range(20)] + [watch.add(0.21, 1.0) for _ in range(60)]
    assert [share for share in shares if share] == [pytest.approx(0.21)] and shares.index(None) == 0
    assert shares[49] is not None
    quick = WaitWatch()
    assert not any(quick.add(0.125, 0.125) for _ in range(10 + 79)) and quick.add(0.125, 0.125)

    monkeypatch.setattr(progress, "WATCH_SECONDS", 0.0)
    monkeypatch.setattr(progress, "WATCH_STEPS", 1)
    monkeypatch.setattr(progress, "LONG_WAIT", 0.0)
    printed = run(config_of(tmp_path))
    told = [line for line in printed.splitlines() if "waiting for data" in line]
    assert len(told) == 1 and "data.workers is 0" in told[0]
    shares = [float(row["wait_share"]) for row in rows(tmp_path / "small")]
    assert all(0 < share < 1 for share in shares) and len(shares) == 3
