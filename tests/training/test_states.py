"""Runs whose states or whose disk fail: what is said, what is kept, and that they can go on."""

import errno
import io
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.helpers.resumed_runs import (
    FORK,
    OPTIM,
    assert_same_end,
    best_of,
    config_of,
    end,
    run,
    start,
    state_of,
    status_of,
    stop,
    stop_after,
)
from tests.helpers.small_runs import quadrants, same, script
from tests.helpers.tools import assert_one_error, written
from visionattn.cli import files
from visionattn.cli.exit_codes import run_tool
from visionattn.data.data_config import DataConfig
from visionattn.training import checkpoint, engine, run_folder
from visionattn.training.config import OptimConfig, TrainConfig
from visionattn.training.evaluate import Evaluation

pytestmark = [
    pytest.mark.usefixtures("small_data"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture
def stopped(tmp_path):
    """The folder of a run that was stopped after step 8, in its second epoch; its previous state is
    that of step 6.
    """
    stop(config_of(tmp_path), 8)
    folder = tmp_path / "small"
    assert state_of(folder, "previous.pt")["position"]["step"] == 6
    return folder


def flipped(content: bytes) -> bytes:
    """One bit of a weight is another: the file loads, and only its sums tell."""
    state = torch.load(io.BytesIO(content), weights_only=True)
    place = content.index(state["model"]["blocks.0.mlp.fc1.weight"].numpy().tobytes()) + 5
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (
            lambda content: content[: len(content) // 2],
            "is a truncated or damaged checkpoint",
        ),
        (flipped, "is a truncated or damaged checkpoint: wrong checksum of "),
        (None, "is missing"),
    ],
    ids=["truncated", "a bit flipped", "missing"],
)
def test_without_its_last_state_a_run_goes_on_from_the_one_before(stopped, whole, spoil, reason):
    last = stopped / "last.pt"
    content = last.read_bytes()
    last.unlink()
    if spoil:
        last.write_bytes(spoil(content))
    printed = run(config_of(stopped.parent, resume=True))
    [line] = [line for line in printed.splitlines() if reason in line]
    assert line.startswith(f"{last} ")
    assert line.endswith(f"; resumes from {stopped / 'previous.pt'}, step 6")
    assert_same_end(whole, stopped)


def test_without_any_readable_state_a_run_ends_with_one_line_and_nothing_is_touched(
    stopped, capsys
):
    for name in ("last.pt", "previous.pt"):
        (stopped / name).write_bytes((stopped / name).read_bytes()[:4000])
    before = written(stopped)
    assert run_tool(lambda: run(config_of(stopped.parent, resume=True))) == 2
    assert_one_error(capsys, "pass --overwrite to start over")
    assert written(stopped) == before


def fail_to_flush(patch: pytest.MonkeyPatch, victim: str, time_of_failure: int) -> None:
    """From the given write of one file on, there is no room for it."""
    real, count = files.flush_to_disk, iter(range(1, 1000))

    def flush(path) -> None:
        # Until it is whole, it is .NAME.RANDOM.visionattn.tmp.
        name = Path(path).name.removeprefix(".")
        if name.startswith(victim) and next(count) >= time_of_failure:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path)

    for module in (files, run_folder):
        patch.setattr(module, "flush_to_disk", flush)


@pytest.mark.parametrize(
    ("victim", "write", "kept"),
    [
        ("last.pt", 4, 4),
        ("best.safetensors", 1, 3),
        ("metrics.jsonl", 3, 4),
        ("last.pt", 1, None),
    ],
)
def test_a_full_disk_ends_a_run_with_one_line_and_the_run_goes_on_when_there_is_room(
    tmp_path, whole, capsys, victim, write, kept
):
    folder = tmp_path / "small"
    with pytest.MonkeyPatch.context() as patch:
        fail_to_flush(patch, victim, write)
        code = run_tool(lambda: run(config_of(tmp_path)))
    rest = "no state was saved yet"
    if kept is not None:
        rest = f"the state of step {kept} is kept, --resume continues from it"
        assert state_of(folder)["position"]["step"] == kept and (kept < 4 or best_of(folder))
    line = f"{folder / victim}: No space left on device; {rest}"
    assert (code, capsys.readouterr().err) == (2, f"error: {line}\n")
    assert status_of(folder)["status"] == "failed" and status_of(folder)["reason"] == line
    assert not files.unfinished(folder) and (folder / "last.pt").exists() == (kept is not None)
    run(config_of(tmp_path, resume=True))
    assert_same_end(whole, folder)


def test_the_best_weights_are_never_replaced_by_worse_ones_when_an_epoch_runs_again(
    tmp_path, monkeypatch
):
    """As where the arithmetic of a GPU is not the same twice: the epoch that runs again comes out
    worse.
    """
    folder = tmp_path / "small"
    script(monkeypatch, *(Evaluation(23, 1.0, score, None, 1.0) for score in (0.3, 0.8)))
    run(config_of(tmp_path, epochs=2))
    best = best_of(folder)
    (folder / "last.pt").unlink()
    assert state_of(folder, "previous.pt")["position"]["best"] == 0.3
    script(monkeypatch, *(Evaluation(23, 1.0, score, None, 1.0) for score in (0.6, 0.7)))
    run(config_of(tmp_path, resume=True))
    same(best_of(folder), best)
    result = status_of(folder)["result"]
    assert (result["best_epoch"], result["validation_accuracy"]) == (2, 0.8)
    assert state_of(folder)["position"]["best"] == 0.8


def test_best_weights_lost_after_the_last_epoch_ask_for_one_more(stopped):
    config = config_of(stopped.parent, resume=True)
    run(config)
    (stopped / "best.safetensors").unlink()
    line = "^all 3 epochs are done, but their best weights are lost; pass --epochs 4 to train"
    with pytest.raises(ValueError, match=line):
        run(config)
    run(replace(config, epochs=4))
    assert status_of(stopped)["result"]["best_epoch"] == 4 and best_of(stopped)


NATIVE = TrainConfig(data=DataConfig(fit="native"))
DATA, OPTIMISATION = asdict(NATIVE.data), asdict(OptimConfig())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"seed": 7}, "the run has seed 0, not 7; resume with the same"),
        (
            {"data": DATA | {"args": {"train_images": 9}}},
            "the run has data.args {}, not {'train_images': 9}; resume with the same",
        ),
        (
            {"batch_size": 16},
            "the run has batch_size 64, not 16; resume with the same until the epoch is over",
        ),
        (
            {"data": DATA | {"img_size_choices": [48, 64]}},
            "the run has data.img_size_choices None, not [48, 64]; resume with the same until the "
            "epoch is over",
        ),
        (
            {"optim": OPTIMISATION | {"accumulate": 4}},
            "the run has optim.accumulate 1, not 4; resume with the same until the epoch is over",
        ),
        (
            {"init_from": "a.pt"},
            "init_from a.pt applies only to a new run; a resumed run keeps its own "
            "weights; remove it",
        ),
    ],
)
def test_options_that_move_images_are_refused_on_resumption(options, line):
    old = asdict(NATIVE)
    with pytest.raises(ValueError) as error:
        checkpoint.check_options(old, old | options, amid_epoch=True, done=False)
    assert str(error.value) == line
    if line.endswith("until the epoch is over"):
        checkpoint.check_options(old, old | options, amid_epoch=False, done=False)


def test_options_that_a_state_does_not_have_were_at_their_defaults():
    old = asdict(NATIVE)
    del old["data"]["val_fraction"], old["data"]["fold"], old["dist_timeout"], old["loss"]
    assert checkpoint.check_options(old, asdict(NATIVE), amid_epoch=True, done=False) == []


def test_other_images_than_those_of_the_run_are_refused(stopped, monkeypatch):
    monkeypatch.setattr(engine, "build_splits", lambda *_: quadrants(62))
    line = "^expected 61 training and 23 validation images, as in the run, got 62 and 23; resume "
    with pytest.raises(ValueError, match=line):
        run(config_of(stopped.parent, resume=True))


def test_between_epochs_a_run_may_take_other_batches_and_another_precision(tmp_path):
    run(config_of(tmp_path, epochs=1))
    for epochs, options in (
        (2, {"batch_size": 16, "amp": "fp16"}),
        (3, {"optim": OPTIM | {"accumulate": 1}, "amp": "none"}),
    ):
        printed = run(config_of(tmp_path, epochs=epochs, resume=True, **options))
        assert "batch_size is now" in printed and f"amp is now {options['amp']}" in printed
    assert state_of(tmp_path / "small")["position"]["epoch"] == 3


def test_best_weights_that_are_garbled_give_way_to_those_of_the_next_epoch(stopped):
    best = stopped / "best.safetensors"
    best.write_bytes(best.read_bytes()[:2000])
    printed = run(config_of(stopped.parent, resume=True))
    assert f"{best} is truncated or not a safetensors file" in printed
    assert "; the weights of the next epoch replace it" in printed
    assert status_of(stopped)["result"]["best_epoch"] > 1 and best_of(stopped)


def test_a_state_of_another_version_is_refused_with_the_way_out(tmp_path):
    torch.save({"format": checkpoint.STATE_FORMAT, "version": 99}, tmp_path / "last.pt")
    line = "^expected state format .*, got 99 .*; resume with the visionattn that wrote it$"
    with pytest.raises(ValueError, match=line):
        checkpoint.read_state(tmp_path / "last.pt")


def test_two_runs_are_never_at_work_in_one_folder(tmp_path, whole):
    """The second one is refused, whatever it is asked for, and the first one does not notice."""
    folder = tmp_path / "small"
    reached, go_on = FORK.Event(), FORK.Event()

    def prepare() -> None:
        stop_after(pytest.MonkeyPatch(), 5, lambda: (reached.set(), go_on.wait(60)))

    process = start(config_of(tmp_path), prepare)
    assert reached.wait(60)
    before = written(folder)
    line = f"^another process is running in {folder}; wait for it or end it, or pass"
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=line):
            run(config_of(tmp_path, **options))
    assert written(folder) == before
    go_on.set()
    assert end(process) == 0
    assert_same_end(whole, folder)
    assert not (folder / "run.lock").exists()
