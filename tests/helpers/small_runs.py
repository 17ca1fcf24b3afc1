"""Runs of a second: images of one bright quadrant of four, and a model of a few thousand
weights.
"""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from tests.helpers.geometry import square
from visionattn.data.batches import Batch, Item, collate
from visionattn.data.data_config import DataConfig
from visionattn.data.splits import SampleKey, Splits
from visionattn.model_config import ModelConfig
from visionattn.models.building import build_model
from visionattn.models.weights import DataSpec
from visionattn.training import engine, trainer
from visionattn.training.config import OptimConfig, TrainConfig
from visionattn.training.evaluate import Evaluation
from visionattn.training.trainer import Trainer

SPEC = DataSpec(1, 4, ("ne", "nw", "se", "sw"), (0.3,), (0.2,), None, 16)
MODEL = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "horizon": 1}
MODEL |= {"global_pool": "token", "class_token": True}


TIMES = {"seconds", "epoch_seconds", "train_seconds", "waited", "stepped"}
TIMES |= {"images_per_second", "wait_share"}
"""What differs between equal runs."""


class Quadrants(Dataset):
    """``length`` noisy square images; the label is the quadrant that is bright."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: SampleKey) -> Item:
        px = key.geometry.img_size[0]
        draw = np.random.default_rng((self.seed, key.epoch, key.index))
        image = draw.integers(0, 120, (px, px, 1))
        label, half = key.index % 4, px // 2
        rows = slice(half * (label // 2), half * (label // 2 + 1))
        columns = slice(half * (label % 2), half * (label % 2 + 1))
        image[rows, columns] += 60
        return Item(image.astype(np.uint8), label, (px, px))


def quadrants(train: int = 61, *, test: bool = True, img_size: int | None = None) -> Splits:
    """Splits of ``train``, 23 and 29 images, of 16 px where no size is given."""
    spec = replace(SPEC, img_size=img_size or SPEC.img_size)
    return Splits(Quadrants(train, 1), Quadrants(23, 2), Quadrants(29, 3) if test else None, spec)


def quadrants_for(config: DataConfig, seed: int) -> Splits:
    """Splits of the size that is configured, in place of ``build_splits``."""
    return quadrants(img_size=config.img_size)


def small_config(
    output: Path,
    *,
    optim: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> TrainConfig:
    """Two epochs of 8 steps, the last one of 5 images, in the main process."""
    config = TrainConfig(
        model=ModelConfig("scaleformer_vit_t", MODEL | (model or {})),
        data=DataConfig(**{"img_size": 16, "workers": 0} | (data or {})),
        optim=OptimConfig(**{"lr": 3e-3, "warmup_epochs": 0.5} | (optim or {})),
    )
    return replace(
        config,
        **{"epochs": 2, "batch_size": 8, "output": str(output), "run": "small"} | options,
    )


def small_trainer(config: TrainConfig, splits: Splits | None = None) -> Trainer:
    """A trainer on the CPU, its weights drawn from ``config.seed``."""
    torch.manual_seed(config.seed)
    np.random.seed(config.seed)
    splits = splits or quadrants()
    model, args = build_model(config.model, splits.spec)
    return Trainer(config, splits, model, args, torch.device("cpu"))


def batch(count: int, *, start: int = 0, img_size: int = 16) -> Batch:
    """A batch as the loaders give it: images ``start`` to ``start + count`` of the training set."""
    images = Quadrants(999, 1)
    numbers = range(start, start + count)
    return collate([images[SampleKey(number, 0, square(img_size))] for number in numbers])[0]


def lines(folder: Path) -> list[dict]:
    """Those of ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows(folder: Path) -> list[dict]:
    """Those of ``summary.csv``."""
    return list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))


def timeless(figures: list[dict]) -> list[dict]:
    """The figures without the times among them."""
    return [{key: value for key, value in each.items() if key not in TIMES} for each in figures]


def same(left: Any, right: Any, path: str = "state") -> None:
    """Assert that two states of plain types are equal but for times, and say where they are not."""
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left.keys() - TIMES:
            same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            same(a, b, f"{path}[{i}]")
    else:
        assert left == right, f"{path}: {left} {right}"


TESTED = Evaluation(29, 0.5, 0.5, None, 1.0, f1=0.25)


def script(patch: pytest.MonkeyPatch, *results: Evaluation, test: Evaluation = TESTED) -> None:
    """Replace the evaluations of the 23 validation images by these results, one after the other,
    and those of the 29 test images by one result.
    """
    left = iter(results)

    def scripted(model, batches, spec, **options):
        return test if sum(len(batch.labels) for batch in batches) == 29 else next(left)

    patch.setattr(trainer, "evaluate", scripted)


def lines_of(config: TrainConfig) -> list[str]:
    """Run a training, and return the lines that it printed."""
    stream = io.StringIO()
    engine.train(config, stream=stream)
    return stream.getvalue().splitlines()
