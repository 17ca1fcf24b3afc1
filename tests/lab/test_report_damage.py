"""``tools/report.py`` with files that are damaged or absurd: the page names them and shows the
rest.
"""

import json

import pytest

from tests.helpers.report_folders import Page, memory_rows, write_rows, write_run
from visionattn.lab.report.page import report

DEEP = "[" * 100_000


def page_of(*paths, output):
    report([*map(str, paths), "--output", str(output), "--images", "0"])
    return Page(output.read_text())


def test_a_status_of_another_kind_is_unknown(tmp_path):
    kinds = [{"status": ["x"]}, {"status": {"a": 1}}, {"reason": {"a": ["b"]}}]
    kinds += [{"status": 3, "provenance": [], "result": 7}]
    runs = [write_run(tmp_path / f"run{i}") for i in range(len(kinds))]
    for run, told in zip(runs, kinds, strict=True):
        (run / "status.json").write_text(json.dumps(told))
    page = page_of(*runs, output=tmp_path / "page.html")
    for run in runs:
        assert page.row(run.name)[0].startswith("unknown"), run


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "key, value",
    [
        ("step", "1e308"),
        ("step", "[1]"),
        ("epoch", "-1e308"),
        ("epoch", '"x"'),
        ("loss", "1e999"),
        ("val_accuracy", "1" + "0" * 400),
    ],
)
def test_an_absurd_metric_leaves_the_page_whole(tmp_path, key, value):
    run = write_run(tmp_path / "mine", result=None)
    with open(run / "metrics.jsonl", "a") as file:
        kind = "train" if key == "loss" else "epoch"
        values = {"kind": f'"{kind}"', "step": "12", "epoch": "3", "val_loss": "1.0", key: value}
        file.write("{" + ", ".join(f'"{name}": {text}' for name, text in values.items()) + "}\n")
    page = page_of(run, output=tmp_path / "page.html")
    assert page.row("mine")[0] == "finished" and page.row("mine")[2] == "62.50 %"
    assert page.tags.count("figure") == 6
    assert ("1 value of metrics.jsonl beyond 1e+38 left out" in page.text) == (
        value.lstrip("-")[:2] in ("1e", "10")
    )


@pytest.mark.parametrize(
    "text", [DEEP, "1" * 5000, "a: 2020-13-45", '"'], ids=["deep", "long", "date", "open"]
)
def test_a_file_that_no_reader_takes_is_named(tmp_path, text):
    names = ["metrics.jsonl", "status.json", "config.yaml"]
    runs = [write_run(tmp_path / name.partition(".")[0]) for name in names]
    for run, name in zip(runs, names, strict=True):
        (run / name).write_text(text + "\n")
    text = page_of(*runs, output=tmp_path / "page.html").text
    for name in ("line 1 of metrics.jsonl", "status.json", "config.yaml"):
        assert f"{name} cannot be read" in text


def test_a_folder_in_place_of_a_file_is_named(tmp_path):
    run = write_run(tmp_path / "mine")
    (run / "status.json").unlink()
    (run / "status.json").mkdir()
    assert page_of(run, output=tmp_path / "page.html").row("mine")[2] == "62.50 %"


def test_tables_that_cannot_be_read_are_named_and_the_rest_is_shown(tmp_path):
    run = write_run(tmp_path / "mine")
    write_rows(run / "memory.csv", memory_rows())
    (run / "folder.csv").mkdir()
    (run / "lost.csv").symlink_to(tmp_path / "nowhere")
    page = page_of(run, output=tmp_path / "page.html")
    assert "lost.csv cannot be read" in page.text and page.row("scaleformer_vit_t")[-1] == "ok"


@pytest.mark.filterwarnings("error")
def test_numbers_of_a_table_that_cannot_be_are_left_out_of_its_charts(tmp_path, capsys):
    rows = memory_rows()
    rows[0] |= {"peak_bytes": 0, "above_bytes": -5}
    rows[1] |= {"px": 0, "growth_exponent": "1e400"}
    rows[2] |= {"above_bytes": "1e308"}
    page = page_of(write_rows(tmp_path / "memory.csv", rows), output=tmp_path / "page.html")
    assert page.tags.count("figure") == 2 and capsys.readouterr().err == ""
    drawn = [title for title in page.titles if " at " in title]
    assert drawn == ["vit_tiny_patch16_224+eager: 1,324 at 512"]
