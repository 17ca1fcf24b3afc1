"""Runs that are killed at any moment and resumed: they end as one that nothing happened to."""

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.helpers.geometry import square
from tests.helpers.resumed_runs import (
    assert_resumes,
    assert_same_end,
    config_of,
    end,
    finished_run,
    run,
    start,
    states_written,
    stop_after,
)
from tests.helpers.small_runs import Quadrants, quadrants, rows, same
from visionattn.data.batches import ORDER_STREAM, SampleKey, TrainBatches, Unreadable, seed_batch
from visionattn.data.data_config import DataConfig
from visionattn.training import engine, trainer

pytestmark = [
    pytest.mark.usefixtures("small_data"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def finished(small_data, tmp_path_factory):
    """The folder of a run with the given options that nothing happens to."""

    @cache
    def folder_of(**options):
        return finished_run(tmp_path_factory.mktemp("finished"), **options)

    return lambda **options: folder_of(**({"save_every": 3} | options))


@pytest.fixture
def whole(finished):
    """That of a run with a state after every third step."""
    return finished()


@pytest.fixture
def rare(finished):
    """That of a run with a state after each epoch alone."""
    return finished(save_every=None)


@pytest.mark.parametrize(
    ("workers", "kills", "options"),
    [
        (0, 3, {}),
        pytest.param(1, 4, {}, marks=pytest.mark.slow),
        pytest.param(0, 8, {"save_every": None}, marks=pytest.mark.slow),
        pytest.param(0, 8, {"amp": "fp16"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_at_random_moments_and_resumed_ends_as_one_never_interrupted(
    tmp_path, finished, workers, kills, options
):
    draw, folder, killed, done = random.Random(20 + workers), tmp_path / "small", 0, False
    whole, options = finished(**options), {"data": {"workers": workers}} | options
    while killed < kills or not done:
        process = start(config_of(tmp_path, resume=folder.exists(), **options))
        if killed < kills:
            # States to wait for, so that the run gets on whatever the machine does.
            for _ in range(draw.randint(0, 2)):
                before = states_written(folder)
                while process.is_alive() and states_written(folder) == before:
                    time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.15))
            process.kill()
        code = end(process)
        assert code in (0, -signal.SIGKILL)
        killed, done = killed + (code != 0), code == 0
        if done:
            assert_same_end(whole, folder)
            shutil.rmtree(folder)


def test_a_run_killed_with_its_first_best_weights_on_the_disk_goes_on(tmp_path, rare):
    def prepare() -> None:
        real = trainer.save_model
        trainer.save_model = lambda *arguments, **options: (
            real(*arguments, **options),
            os.kill(os.getpid(), signal.SIGKILL),
        )

    assert end(start(config_of(tmp_path, save_every=None), prepare)) == -signal.SIGKILL
    folder = tmp_path / "small"
    assert (folder / "best.safetensors").exists() and not (folder / "summary.csv").exists()
    assert "resumes after epoch 0, step 0" in run(config_of(tmp_path, save_every=None, resume=True))
    assert_same_end(rare, folder)


@pytest.mark.parametrize(
    "left", [[], ["config.yaml", ".status.json.0123456789abcdef.visionattn.tmp", "run.lock"]]
)
def test_a_run_killed_before_its_first_state_begins_anew(tmp_path, rare, left):
    folder = tmp_path / "small"
    folder.mkdir()
    for name in left:
        (folder / name).write_text("")
    said = run(config_of(tmp_path, save_every=None, resume=True))
    assert "no state was saved yet; starting from" in said
    assert_same_end(rare, folder)


class Counted(Quadrants):
    """Keeps which images were read; some cannot be."""

    def __init__(self, *arguments, unreadable=()):
        super().__init__(*arguments)
        self.read, self.unreadable = [], unreadable

    def __getitem__(self, key: SampleKey):
        self.read.append(key.index)
        if key.index in self.unreadable:
            return Unreadable(f"{key.index}.png", "cut off")
        return super().__getitem__(key)


def test_the_batches_before_the_one_to_go_on_with_are_not_read():
    dataset = Counted(61, 1)
    batches = TrainBatches(
        dataset, DataConfig(workers=0), batch_size=8, choices=(square(16),), seed=5
    )
    all_of_them = list(batches.epoch(3))
    for first in (0, 5, 7, 8):
        dataset.read.clear()
        rest = list(batches.epoch(3, start=first))
        assert len(dataset.read) == max(0, 61 - 8 * first) and len(batches) == 8
        same(rest, all_of_them[first:])


@pytest.mark.filterwarnings("ignore:skipped unreadable image")
def test_batches_without_a_readable_image_keep_their_place_when_a_run_is_resumed(
    tmp_path, monkeypatch
):
    """Batches of one image each: four of them, and one step of two batches, are empty."""
    order = np.random.default_rng((0, ORDER_STREAM, 0)).permutation(20)
    bad = {int(order[place]) for place in (1, 6, 7, 12)}
    splits = replace(quadrants(20), train=Counted(20, 1, unreadable=bad))
    monkeypatch.setattr(engine, "build_splits", lambda *_: splits)
    options = dict(data={"on_error": "skip"}, batch_size=1, epochs=2, save_every=9)
    said = assert_resumes(config_of(tmp_path, **options), tmp_path, 6)
    assert "resumes after epoch 0, step 6" in said
    assert [row["left_out"] for row in rows(tmp_path / "parts" / "small")] == ["4", "4"]


def test_processes_mix_alike_and_drop_out_differently():
    drawn = []
    for rank in (0, 1):
        seed_batch(7, 2, 5, rank)
        drawn.append((torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()))
    assert drawn[0][0] != drawn[1][0] and drawn[0][1:] == drawn[1][1:]


def test_what_else_draws_from_the_generators_in_a_run_does_not_change_it(
    tmp_path, whole, monkeypatch
):
    stop_after(monkeypatch, 5, lambda: (torch.rand(9), np.random.rand(9), random.random()))
    run(config_of(tmp_path))
    assert_same_end(whole, tmp_path / "small")
