"""A table on disk of images with several labels and numbers each, and runs on it."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers.small_runs import small_config
from visionattn.training.config import TrainConfig

NAMES = ("ne", "nw", "se")


def write_table(folder: Path) -> Path:
    """Write 90 images of four gray quadrants, and a table: 0, 1 or nothing for dark and bright
    quadrants in the columns of ``NAMES``, and their brightness in units of 7 from 100 on.
    """
    rng = np.random.default_rng(0)
    light, known = rng.random((90, 4)), rng.random((90, 3)) > 0.1
    rows = []
    for number, own in enumerate(light):
        path = f"{number:02}.png"
        values = (255 * own).astype(np.uint8).reshape(2, 2).repeat(8, 0).repeat(8, 1)
        Image.fromarray(values).save(folder / path)
        split = ("train", "train", "train", "val", "test")[number % 5]
        row = {"path": path, "split": split}
        for name, x, there in zip(NAMES, own[:3], known[number], strict=True):
            row |= {name: int(x > 0.5) if there else "", f"light {name}": 100 + 7 * x}
        rows.append(row)
    write_csv(folder / "labels.csv", rows)
    return folder


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def rows_of(images: Path) -> list[dict]:
    return list(csv.DictReader((images / "labels.csv").read_text().splitlines()))


def columns(task: str) -> list[str]:
    return [name if task == "multilabel" else f"light {name}" for name in NAMES]


def config_of(images: Path, output: Path, task: str, **options) -> TrainConfig:
    data = {"name": "folder", "root": str(images), "labels": str(images / "labels.csv")}
    data |= {"task": task, "columns": columns(task), "fit": "crop"}
    fixed = {"epochs": 4, "monitor": {"regression": "mae"}.get(task)}
    return small_config(output, data=data, model={"global_pool": "avg"}, **fixed | options)
