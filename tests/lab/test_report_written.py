"""Runs that learn to write images in the page: their figure is bits per dimension."""

import json

import pytest

from tests.helpers.tools import load_tool
from visionattn.lab.report.figures import curves_of
from visionattn.lab.report.runs import read_run
from visionattn.lab.report.tables import results

report = load_tool("report")


def write_run(folder, losses, task="generate", finished=True):
    """A run whose epochs have these losses on the validation images, and half of them as a test."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"model: {{name: pixel_decoder}}\ndata: {{name: digits, task: {task}}}\nepochs: 3\n"
    )
    rows = [{"kind": "train", "step": 1, "epoch": 1, "loss": 7.5, "images_per_second": 9.0}]
    for epoch, loss in enumerate(losses, start=1):
        rows.append({"kind": "epoch", "epoch": epoch, "step": epoch, "val_loss": loss})
        rows[-1] |= {"val_accuracy": None, "val_top5": None, "train_loss": 3.0, "seconds": 1.0}
    if finished:
        best = min(losses) / 2
        rows.append({"kind": "test", "step": 9, "accuracy": None, "loss": best, "images": 7})
        status = {"status": "finished", "result": {"test_loss": best, "test_accuracy": None}}
        (folder / "status.json").write_text(json.dumps(status))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder, folder.name, now=0.0)


def test_a_table_has_bits_per_dimension_and_no_accuracy(tmp_path):
    runs = [
        write_run(tmp_path / "one", [3.0, 2.25, 2.5]),
        write_run(tmp_path / "two", [3.0, 2.0]),
        write_run(tmp_path / "three", [4.0], finished=False),
    ]
    table = results(runs)
    names = list(table.columns)
    assert not any("accuracy" in name or "IoU" in name for name in names)
    test, validation = names.index("test bits/dim"), names.index("validation bits/dim")
    assert [row[test].text for row in table.rows] == ["1.1250", "1.0000", ""]
    assert [row[validation].text for row in table.rows] == ["2.2500", "2.0000", "4.0000"]
    assert [row[validation].strong for row in table.rows] == [False, True, False]
    assert table.rows[0][names.index("best epoch")].text == "2 of 3"


@pytest.mark.parametrize(
    ("tasks", "unit"),
    [
        (["generate"], "bits per dimension"),
        (["classification"], "nats per image"),
        (["generate", "classification"], "nats per image, or bits per dimension"),
    ],
)
def test_charts_name_the_unit_of_their_losses(tmp_path, tasks, unit):
    runs = [write_run(tmp_path / task, [3.0, 2.0], task) for task in tasks]
    charts = curves_of(runs).charts
    assert {chart.y_name for chart in charts if "loss" in chart.title} == {unit}


def test_the_page_shows_the_figure(tmp_path):
    write_run(tmp_path / "one", [3.0, 2.5])
    assert report([str(tmp_path / "one"), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "1.2500" in page and "bits per dimension" in page and "accuracy" not in page
