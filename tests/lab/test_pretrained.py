"""The tables of the models that come with weights: what is measured, and that the page has it."""

import csv
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from visionattn.cli.tables import heading
from visionattn.data.config import DataConfig
from visionattn.data.splits import build_splits
from visionattn.lab import pretrained
from visionattn.lab.compare import Quartiles, Row
from visionattn.lab.pretrained import COLUMNS, TASKS, Task, cells, main, section
from visionattn.models.shipped import FILES
from visionattn.models.weights import load_model

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "pretrained.md").read_text(encoding="utf-8")
TABLE = DOCS / "figures" / "pretrained.csv"
NAME = "scaleformer_vit_digits"


def recorded():
    """The rows of the recorded table by model, as they were when they were measured; none before
    they are.
    """
    found: dict[str, list] = {}
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    for row in csv.DictReader(text.splitlines()):
        known = {"size": int(row["size"]), "accuracy": float(row["accuracy"])}
        known |= {"seconds_median": float(row["seconds_median"])}
        known |= {"peak_bytes": int(row["peak_bytes"])}
        found.setdefault(row["model"], []).append(known)
    return found


def test_the_page_has_what_was_measured_of_the_models_that_ship_and_names_no_other():
    tables = recorded()
    assert set(tables) in (set(FILES), set())
    assert PAGE.count(heading(COLUMNS)) == len(tables)
    for name, rows in tables.items():
        assert section(name, rows) in PAGE
        assert tuple(row["size"] for row in rows) == TASKS[name.rpartition("_")[2]].sizes
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == set(FILES)
    assert set(re.findall(r"`((?:scaleformer|taylorshift)_vit_[a-z]{2,})`", PAGE)) == set(FILES)


def accuracy_by_hand(size):
    """The share of the test digits that the weights get right, all in one batch."""
    test = build_splits(DataConfig(name="digits", img_size=size), 0).test
    grown = [cv2.resize(image, (size, size)) for image in test.images]  # linear
    pixels = torch.from_numpy(np.stack(grown))[:, None].float() / 255
    with torch.no_grad():
        found = load_model(FILES[NAME])((pixels - 0.306) / 0.324).argmax(1)
    return (found.numpy() == test.labels).mean()


def test_a_row_has_accuracy_of_the_test_images_and_the_cost_of_one_image(
    monkeypatch, tmp_path, capsys
):
    asked = []

    def cost(cases, plan):
        asked.append((cases, plan))
        return [Row(cases[0], seconds=Quartiles(0.001, 0.002, 0.004), peak_bytes=3 * 2**20)]

    monkeypatch.setattr(pretrained, "measure_together", cost)
    monkeypatch.setitem(TASKS, "digits", Task(DataConfig(name="digits", workers=0), (32,)))
    threads = torch.get_num_threads()
    assert main([NAME, "--threads", "1", "--csv", str(tmp_path / "rows.csv")]) == 0
    assert torch.get_num_threads() == threads
    expected = accuracy_by_hand(32)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"| 32 | {100 * expected:.1f} % | 2 ms | 3 MiB |"
    assert lines[2] == f"`{NAME}`:"
    (row,) = csv.DictReader((tmp_path / "rows.csv").read_text().splitlines())
    assert float(row["accuracy"]) == pytest.approx(expected) and row["images"] == "359"
    assert (row["model"], row["size"], row["peak_bytes"]) == (NAME, "32", str(3 * 2**20))
    assert row["command"].startswith(
        f"python -m visionattn.lab.pretrained {NAME} --threads 1 --csv"
    )
    (((case,), plan),) = asked
    assert (case.kind, case.name, case.size, case.batch) == ("model", NAME, 32, 1)
    assert plan.time and plan.memory and plan.processor_time


def test_memory_below_what_can_be_told_and_sizes_that_do_not_fit_are_words():
    row = {"size": 64, "accuracy": 0.5, "seconds_median": 0.25, "peak_bytes": 4096}
    assert cells(row) == ["64", "50.0 %", "250 ms", "below 1 MiB"]
    row = {"size": 64, "accuracy": None, "seconds_median": None, "peak_bytes": None}
    assert cells(row) == ["64", "out of memory", None, None]


def test_bad_input_is_one_line(capsys, tmp_path):
    assert main(["scaleformer_vit_t"]) == 2
    assert f"comes without weights; those with are {', '.join(FILES)}" in capsys.readouterr().err
    assert main([NAME, "--csv", str(tmp_path / "no" / "rows.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: no folder")
    with pytest.raises(SystemExit) as end:
        main(["--eval-images", "0"])
    assert end.value.code == 2
