"""The picture of runs that learn to copy, from what they wrote."""

import csv
import json
import shutil

import pytest
import yaml
from PIL import Image

from visionattn.lab.charts import hidden_under
from visionattn.lab.copying import charts_of, ends_of, main, rows_of
from visionattn.lab.papers import draw_again
from visionattn.lab.report.runs import read_run

LN2 = 0.6931471805599453


def write_run(folder, losses, *, seed=0, length=32, data="copy", **args):
    """A run of which only configuration and losses are known, in bits, a line every five steps."""
    folder.mkdir(parents=True)
    config = {"seed": seed, "data": {"name": data, "img_size": [1, length]}}
    config["model"] = {"args": {"embed_dim": 8, **args}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [{"kind": "train", "step": 5 * i, "loss": loss} for i, loss in enumerate(losses, 1)]
    lines.append({"kind": "epoch", "step": 5 * len(losses), "epoch": 1, "val_loss": 9.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def rows(*folders):
    return [row for folder in folders for row in rows_of(read_run(folder, "run", now=0.0))]


def test_rows_are_losses_in_nats_of_a_named_attention(tmp_path):
    elu = rows(write_run(tmp_path / "a", [3.0, None, 0.5], seed=2))
    expected = {"length": 32, "width": 8, "attention": "elu1", "seed": 2}
    assert elu == [
        expected | {"step": 5, "nats": pytest.approx(3 * LN2, abs=1e-4)},
        expected | {"step": 15, "nats": pytest.approx(0.5 * LN2, abs=1e-4)},
    ]
    (softmax,) = rows(write_run(tmp_path / "b", [1.0], length=128, attention="softmax"))
    assert (softmax["attention"], softmax["length"]) == ("softmax", 128)
    (drawn,) = rows(write_run(tmp_path / "c", [1.0], feature_map="random"))
    assert drawn["attention"] == "random"


def test_a_chart_has_the_runs_of_a_length_and_one_name_for_all_seeds(tmp_path):
    found = rows(
        write_run(tmp_path / "a", [3.0, 1.0], seed=0),
        write_run(tmp_path / "b", [3.0, 2.0], seed=1),
        write_run(tmp_path / "c", [3.0, 0.1], seed=0, attention="softmax"),
        write_run(tmp_path / "d", [3.0], seed=0, length=128),
    )
    long, short = charts_of(found)
    assert long.title == "Sequences of 128, width 8" and len(long.series) == 1
    assert [series.name for series in short.series] == ["softmax", "", "elu + 1"]
    assert short.series[1].look == short.series[2].look != short.series[0].look
    assert short.series[2].x == [5, 10] and short.series[2].y[1] == pytest.approx(2 * LN2, abs=1e-4)
    assert short.marks[0].y == 0.1 and short.log_y


def test_a_run_has_converged_where_its_loss_first_is_below_a_tenth(tmp_path):
    found = rows(
        write_run(tmp_path / "a", [3.0, 0.14, 0.2, 0.05]), write_run(tmp_path / "b", [0.15], seed=1)
    )
    first, second = ends_of(found)
    assert first["below 0.1 at step"] == 10 and first["last step"] == 20
    assert first["nats there"] == "0.035"
    assert second["below 0.1 at step"] == "never" and second["nats there"] == "0.104"


def test_the_tool_draws_a_picture_that_is_drawn_again_from_its_table(tmp_path, capsys):
    folders = [write_run(tmp_path / name, [3.0, 2.0, 0.1], seed=i) for i, name in enumerate("ab")]
    picture = tmp_path / "out" / "copy.png"
    picture.parent.mkdir()
    assert main([*map(str, folders), "--output", str(picture)]) == 0
    assert "| 32 | 8 | elu1 | 1 | 15 | 15 | 0.069 |" in capsys.readouterr().out
    with open(picture.with_suffix(".csv"), newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 6 and table[0]["command"] == "python -m visionattn.lab.copying, 2 runs"
    before = Image.open(picture).convert("RGB")
    shutil.copy(picture.with_suffix(".csv"), tmp_path / "copy.csv")
    assert draw_again(tmp_path) == ["copy"]
    after = Image.open(tmp_path / "copy.png").convert("RGB")
    assert before.size == after.size and before.tobytes() == after.tobytes()


@pytest.mark.parametrize(
    ("run", "output", "line"),
    [
        ("nothing", "copy.png", "nothing is no folder of a run"),
        ("digits", "copy.png", "digits has no losses of a training with data.name copy"),
        ("copy", "copy.pdf", "--output must be a file that ends in .png, got"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys, run, output, line):
    write_run(tmp_path / "digits", [3.0], data="digits")
    write_run(tmp_path / "copy", [3.0])
    assert main([str(tmp_path / run), "--output", str(tmp_path / output)]) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1
    assert not (tmp_path / output).exists()


def test_seeds_that_lie_on_each_other_are_drawn_alike(tmp_path):
    folders = [write_run(tmp_path / name, [3.0, 2.0, 1.0], seed=i) for i, name in enumerate("ab")]
    folders.append(write_run(tmp_path / "c", [3.0, 2.0, 1.0], feature_map="relu"))
    # Only the line of another map hides those of the seeds.
    assert hidden_under(charts_of(rows(*folders))[0]) == [1, 1, 0]
