"""Images, labels and splits of ``predict`` and ``features`` from a table."""

import json
from pathlib import Path

import pytest

from tests.helpers.inference_files import write_folder, write_weights
from tests.helpers.tools import assert_one_error, read_csv
from visionattn.command import run

FLAGS = ["--checkpoint", "best.safetensors", "--images", "images", "--img-size", "native"]
FLAGS += ["--labels", "labels.csv", "--workers", "0"]
ROWS = ["path,label,status,split", *(f"{i}.png,{'ab'[i % 2]},s{i},train" for i in (4, 0, 3, 2, 1))]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.safetensors")
    write_folder(tmp_path / "images", [(16, 24)] * 6)
    Path("labels.csv").write_text("\n".join(ROWS))


@pytest.mark.filterwarnings("ignore:skipped 1 of 6 images in images without a row")
def test_the_rows_of_a_table_are_the_images_and_the_results_have_its_columns():
    wanted = [(f"images/{i}.png", "ab"[i % 2], f"s{i}") for i in (4, 0, 3, 2, 1)]
    columns = ("path", "table_label", "table_status")
    for output in ("out.csv", "out.json"):
        assert run("predict", [*FLAGS, "--output", output]) == 0
    for found in (read_csv("out.csv"), json.loads(Path("out.json").read_text())["rows"]):
        assert [tuple(row[name] for name in columns) for row in found] == wanted
        assert all(row["status"] == "ok" for row in found)
    assert run("features", [*FLAGS, "--output", "features"]) == 0
    for number in (1, 2):
        assert run("features", [*FLAGS, "--output", "parts", "--shard", f"{number}/2"]) == 0
    assert run("features", ["--output", "parts", "--merge"]) == 0
    for output in ("features", "parts"):
        found = read_csv(Path(output) / "index.csv")
        assert [tuple(row[name] for name in columns) for row in found] == wanted


@pytest.mark.filterwarnings("ignore:skipped 1 of 6 images in images without a row")
def test_a_probe_takes_classes_and_splits_of_the_table(capsys):
    Path("labels.csv").write_text("\n".join([*ROWS[:4], "2.png,a,x,test", "1.png,b,x,val"]))
    flags = [*FLAGS, "--output", "probed", "--probe", "--neighbours", "1"]
    assert run("features", flags) == 0
    assert "of 1 test images, fitted on 3 images of 2 classes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--images", "images", "images/1.png"], "--labels needs one folder as --images, for"),
        (["--labels", "other.csv"], "no label table at other.csv"),
    ],
)
def test_a_table_needs_a_file_and_one_folder(flags, line, capsys):
    assert run("predict", [*FLAGS, *flags]) == 2
    assert_one_error(capsys, line)
