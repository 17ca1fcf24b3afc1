"""Weights of images in the loss, folds, and runs on images of a table."""

import statistics
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.helpers.image_files import config_of, write_classes
from tests.helpers.resumed_runs import assert_resumes, on_small_data, status_of, stop
from tests.helpers.small_runs import (
    SPEC,
    batch,
    lines_of,
    small_config,
    small_trainer,
)
from tests.helpers.tools import read_csv
from tests.helpers.vector_labels import write_csv
from visionattn.command import run
from visionattn.data.splits import build_splits, train_batches
from visionattn.training.config import LossConfig, OptimConfig, parse_train
from visionattn.training.losses import dice_losses, pixel_losses
from visionattn.training.objectives import PixelClasses
from visionattn.training.validate import parse_validate

COUNTS = {"bird": 9, "cat": 6, "dog 2": 12}


@pytest.fixture
def images(tmp_path):
    """Images of a table, with a group for every three and the weight 1, 2 or 3."""
    write_classes(tmp_path / "data", COUNTS)
    write_table(tmp_path)
    with on_small_data(build_splits):
        yield tmp_path / "data"


def write_table(folder, first_label="bird"):
    rows = [
        {"path": f"{name}/{i}.png", "label": name, "group": f"{name}{i // 3}", "weight": 1 + i % 3}
        for name, count in COUNTS.items()
        for i in range(count)
    ]
    rows[0]["label"] = first_label
    write_csv(folder / "labels.csv", rows)


def data_of(images, **options):
    return asdict(config_of(images, labels=str(images.parent / "labels.csv"), **options))


def test_weights_multiply_the_loss_of_each_mask():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 6, 7, generator=generator, dtype=torch.float64)
    masks = torch.randint(0, 4, (3, 6, 7), generator=generator).to(torch.uint8)
    losses = pixel_losses(logits, masks) + dice_losses(logits, masks)
    objective = PixelClasses(OptimConfig(), LossConfig("cross_entropy_dice"))
    found = objective.loss(logits, masks, torch.tensor([0.0, 2.5, 0.5]))
    torch.testing.assert_close(found, (2.5 * losses[1] + 0.5 * losses[2]) / 3)


def test_a_step_averages_weighted_losses_over_all_its_images(tmp_path):
    trainer = small_trainer(small_config(tmp_path))
    weights = torch.from_numpy(np.random.default_rng(0).random(13).astype(np.float32))
    images, labels, *_ = batch(13)
    with torch.no_grad():
        logits = trainer.model(SPEC.prepare(images))
    losses = F.cross_entropy(logits, labels, reduction="none")
    group = [
        batch(8)._replace(weights=weights[:8]),
        batch(5, start=8)._replace(weights=weights[8:]),
    ]
    assert trainer.step(group)[0] == pytest.approx((losses * weights).mean().item(), rel=1e-5)


@pytest.mark.parametrize("fit", ["crop", "native"])
def test_batches_have_the_weights_of_their_images_on_any_number_of_processes(images, fit):
    config = replace(
        config_of(images, labels=str(images.parent / "labels.csv"), fold="2/3"),
        fit=fit,
        img_size=None if fit == "native" else 16,
    )
    splits = build_splits(config, 0)
    made = [train_batches(splits, config, batch_size=4, seed=5) for _ in range(3)]
    for rank in (0, 1):
        made[1 + rank].divide(rank, 2)
    for whole, *parts in zip(*(each.epoch(1) for each in made), strict=True):
        # The gray level of an image tells its index, and that its weight.
        index = whole.images[:, 0, 0, 0].int() - torch.tensor([40, 120, 180])[whole.labels]
        mean = splits.train.weights.mean()
        wanted = (1 + index % 3) / np.mean([1 + i % 3 for n in COUNTS.values() for i in range(n)])
        torch.testing.assert_close(whole.weights, wanted.float() * mean, rtol=0.05, atol=0)
        assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)


def test_mixing_is_refused_with_weights(images, tmp_path):
    config = small_config(tmp_path, data=data_of(images), optim={"mixup": 0.2})
    with pytest.raises(ValueError, match="do not work with the column weight of .*labels.csv"):
        lines_of(config)


def test_a_run_with_weights_groups_and_folds_resumes_bit_for_bit(images, tmp_path):
    data = data_of(images, fold="1/3")
    config = small_config(tmp_path, data=data, batch_size=6, save_every=2)
    assert_resumes(config, tmp_path, 5)
    # Other labels, and another fold, are other images.
    stop(config, 5)
    changed = "the images changed since the start of the run|expected .* validation images"
    other = replace(config, data=replace(config.data, fold="2/3"), resume=True)
    with pytest.raises(ValueError, match=changed):
        lines_of(other)
    write_table(tmp_path, first_label="cat")
    with pytest.raises(ValueError, match=changed):
        lines_of(replace(config, resume=True))


def test_the_last_line_of_a_fold_sums_up_the_folds_that_are_done(images, tmp_path, capsys):
    flags = ["--data.name", "folder", "--data.root", str(images), "--data.group-from", r"\d"]
    names = [parse_train([*flags, "--data.fold", f"{k}/3"]).run for k in (1, 2, 3)]
    assert names == [f"folder_scaleformer_vit_t_fold{k}of3" for k in (1, 2, 3)]
    table = tmp_path / "folder_scaleformer_vit_t_folds.csv"
    said, results = [], []
    for number in (1, 3):
        data, folder = data_of(images, fold=f"{number}/3"), tmp_path / names[number - 1]
        said = lines_of(small_config(tmp_path, data=data, run=folder.name))
        results.append(status_of(folder)["result"])
    *folds, mean, deviation = read_csv(table)
    assert [fold["fold"] for fold in folds] == ["1/3", "3/3"]
    values = [result["validation_accuracy"] for result in results]
    assert [float(fold["accuracy"]) for fold in folds] == pytest.approx(values)
    assert float(mean["accuracy"]) == pytest.approx(np.mean(values))
    assert float(deviation["accuracy"]) == pytest.approx(statistics.stdev(values))
    assert said[-1] == f"summary of 2 of 3 folds: {table}; missing: 2/3"
    # The fold is a part of the run's data for later evaluations; another folder is not divided.
    best = ["--checkpoint", str(folder / "best.safetensors")]
    capsys.readouterr()
    assert run("validate", [*best, "--data.workers", "0"]) == 0
    shown = capsys.readouterr().out.splitlines()[-1].split()
    assert float(shown[2]) == pytest.approx(100 * values[1], abs=0.01)
    other = parse_validate([*best, "--data.root", str(tmp_path), "--data.labels", "null"])
    assert other.data.fold is None and parse_validate(best).data.fold == "3/3"
    # A run with another seed has other folds, and one without the fold in its name no summary.
    config = small_config(tmp_path, data=data_of(images, fold="2/3"), run=names[1], seed=1)
    assert lines_of(config)[-1] == f"summary of 1 of 3 folds: {table}; missing: 1/3, 3/3"
    line = "no summary over folds: expected _fold2of3 in the name of the run folder, got"
    assert lines_of(replace(config, run="mine"))[-1].startswith(line)
