"""Runs that are killed or stopped, in forks of this process, so that none of them has to import
torch; and their ends.
"""

import contextlib
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.small_runs import (
    lines,
    lines_of,
    quadrants_for,
    rows,
    same,
    small_config,
    timeless,
)
from visionattn.cli.exit_codes import Stopped
from visionattn.cli.files import unfinished
from visionattn.models.weights import read_safetensors
from visionattn.training import engine
from visionattn.training.config import TrainConfig
from visionattn.training.trainer import Trainer

FORK = multiprocessing.get_context("fork")
OPTIM = {"mixup": 0.4, "cutmix": 0.5, "ema_decay": 0.9, "accumulate": 2, "clip_grad": 0.5}


def scaler_with(**options):
    """A maker of scalers of gradients, whatever else they are asked to be."""
    made = torch.amp.grad_scaler.GradScaler
    return lambda *given, **asked: made(*given, **(asked | options))


@contextlib.contextmanager
def on_small_data(build_splits=quadrants_for):
    """Small images for every run, one thread, a lively factor of scaled gradients, no trial of what
    a step takes, which faults at some pass would count, no estimate of memory and no call of git.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "build_splits", build_splits)
        patch.setattr(engine, "check_memory", lambda trainer, memory: None)
        patch.setattr(engine, "forecast", lambda trainer, memory: None)
        patch.setattr(engine, "provenance", lambda device, threads: {"device": str(device)})
        # For fp16: the first steps overflow, and the factor rises again within a run.
        patch.setattr(torch.amp, "GradScaler", scaler_with(init_scale=2.0**17, growth_interval=3))
        yield
    torch.set_num_threads(threads)


def config_of(output: Path, **options) -> TrainConfig:
    """Three epochs of 4 steps of 2 batches, with a state after every third step and everything
    random that there is.
    """
    fixed = {"optim": OPTIM, "model": {"drop_path_rate": 0.2, "attn_drop_rate": 0.1}, "epochs": 3}
    return small_config(output, **(fixed | {"save_every": 3} | options))


def run(config: TrainConfig) -> str:
    return "\n".join(lines_of(config))


def state_of(folder: Path, name: str = "last.pt") -> dict:
    return torch.load(folder / name, weights_only=True)


def best_of(folder: Path) -> tuple[dict, dict]:
    return read_safetensors(folder / "best.safetensors")


def status_of(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def assert_same_end(left: Path, right: Path) -> None:
    """States, best weights, what these say of each class, and figures of two runs are equal bit for
    bit, but for times.
    """
    for name in ("last.pt", "previous.pt"):
        same(*(state_of(folder, name) | {"config": None} for folder in (left, right)))
    same(best_of(left), best_of(right))
    for name in ("validation.json", "test.json"):  # one of masks has none
        found = [path.read_bytes() for folder in (left, right) for path in folder.glob(name)]
        assert found[:1] == found[1:]
    assert timeless(lines(left)) == timeless(lines(right))
    assert timeless(rows(left)) == timeless(rows(right))
    ends = [status_of(folder) for folder in (left, right)]
    same(ends[0]["result"], ends[1]["result"])
    assert not unfinished(right) and ends[1]["status"] == "finished"
    assert ends[1]["exit_code"] == 0


def start(config: TrainConfig, prepare=lambda: None):
    """Start a run in a process of its own that says nothing."""

    def work() -> None:
        prepare()
        run(config)
        os._exit(0)  # without what this process would do at its end

    process = FORK.Process(target=work)
    process.start()
    return process


def end(process) -> int:
    process.join(60)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def states_written(folder: Path) -> int:
    """A number that changes with each state."""
    try:
        return (folder / "last.pt").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def stop_after(patch: pytest.MonkeyPatch, steps: int, what) -> None:
    """Do something in the given step, counted over all trainers."""
    real, done = Trainer.step, iter(range(1, 1000))

    def step(self, group, *more):
        if next(done) == steps:
            what()
        return real(self, group, *more)

    patch.setattr(Trainer, "step", step)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def stop(config: TrainConfig, steps: int) -> None:
    """Stop a run by Ctrl-C in the given step."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, steps, interrupt)
        with pytest.raises(Stopped, match=f"stopped after step {steps} "):
            run(config)


def assert_resumes(config: TrainConfig, folder: Path, steps: int) -> str:
    """Assert that a run that is stopped in the given step and resumed ends as one that is not;
    return what it said when it went on.
    """
    parts = replace(config, output=str(folder / "parts"))
    stop(parts, steps)
    said = run(replace(parts, resume=True))
    run(replace(config, output=str(folder / "whole")))
    assert_same_end(folder / "whole" / "small", folder / "parts" / "small")
    return said


def finished_run(output: Path, **options) -> Path:
    """The folder of a run that nothing happens to."""
    run(config_of(output, **options))
    return output / "small"
