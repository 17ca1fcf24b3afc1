"""Training with the rows of each image shared among processes: the losses and weights of one
process, also beside data parallel, after a resumption, and with everything that is drawn.
"""

import json
from dataclasses import replace

import pytest

from tests.helpers.small_runs import quadrants, same, small_config, small_trainer
from tests.training.test_distributed_training import (
    EVERYTHING,
    assert_alike,
    run_on,
    stop_rank,
    weights,
)
from visionattn.training import engine
from visionattn.training.distributed import ranks_per_image
from visionattn.training.engine import train
from visionattn.training.run_folder import BY_CLASS


@pytest.fixture(autouse=True)
def small_data(monkeypatch):
    """Batches of 8 and a last one of 1 image, of 4 x 4 patches."""
    monkeypatch.setattr(engine, "build_splits", lambda config, seed: quadrants(57))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "build_splits", lambda config, seed: quadrants(57))
        run_on(1, folder, optim=EVERYTHING)
    return folder / "small"


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ranks"), [(3, None), (4, 2)])
def test_processes_that_share_images_train_as_one_does(tmp_path, one, size, ranks):
    """Of four, two have half of each batch, and of the last batch one pair has nothing."""
    options = {"optim": EVERYTHING, "parallel": ranks or "sequence"}
    ended = run_on(size, tmp_path, **options)
    said = f"on {size} processes (sequence, {ranks or size} for each image), cpu"
    assert said in ended[0].out and "epoch 2/2" in ended[0].out and ended[0].err == ""
    assert_alike(one, tmp_path / "small")
    # Each image is counted once.
    for split in BY_CLASS.values():
        several, alone = (json.loads((of / split).read_text()) for of in (tmp_path / "small", one))
        assert several["classes"] == alone["classes"]


@pytest.mark.slow
def test_all_that_share_an_image_draw_alike_and_a_resumed_run_ends_in_the_same_bits(
    tmp_path, monkeypatch
):
    model = {"drop_path_rate": 0.2, "drop_rate": 0.1, "attn_drop_rate": 0.1}
    options = {"parallel": 2, "model": model, "epochs": 1}
    run_on(4, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        stop_rank(patch, 2, rank=1)
        run_on(4, tmp_path / "parts", code=130, **options)
    run_on(4, tmp_path / "parts", resume=True, **options)
    same(*(weights(tmp_path / name / "small") for name in ("whole", "parts")))


def test_images_that_are_too_low_are_found_before_the_first_step(tmp_path):
    trainer = small_trainer(small_config(tmp_path))
    trainer.processes.per_image = 4
    trainer.check_rows()
    trainer.processes.per_image = 5
    with pytest.raises(ValueError, match="^expected at least 5 rows of patches, one per process, "):
        trainer.check_rows()


def test_all_processes_or_some_share_an_image(tmp_path):
    config = small_config(tmp_path, parallel="sequence")
    with pytest.raises(ValueError, match="^parallel sequence needs several processes"):
        train(config)
    kinds = {"sequence": 6, 2: 2, "ddp": 1}
    assert {kind: ranks_per_image(replace(config, parallel=kind), 6) for kind in kinds} == kinds
