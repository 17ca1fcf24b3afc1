"""``tools/report.py``: what its page says of runs, sweeps and profiles in any state, and how it
ends.
"""

import base64
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tests.helpers.report_folders as folders
from tests.helpers.report_folders import (
    Page,
    memory_rows,
    sweep_rows,
    write_rows,
    write_run,
    write_weights,
)
from tests.helpers.tools import assert_one_error, load_tool
from visionattn.cli.files import unfinished
from visionattn.data.embedded import digit_splits
from visionattn.lab.charts import Chart, Look, Series, reach, thin
from visionattn.lab.drawing import svg
from visionattn.lab.report.batches import address as sheet_address
from visionattn.lab.report.batches import batches_of
from visionattn.lab.report.examples import address, galleries, predict
from visionattn.lab.report.figures import curves_of
from visionattn.lab.report.page import report
from visionattn.lab.report.runs import read_run
from visionattn.models.weights import DataSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def main():
    return load_tool("report")


def page_of(*paths, output, more=("--images", "0")):
    report([*map(str, paths), "--output", str(output), *more])
    return Page(output.read_text())


def test_the_page_of_a_run_says_what_its_files_say(tmp_path):
    run = write_run(tmp_path / "mine")
    count = write_weights(run, 7)
    page = page_of(run, output=tmp_path / "page.html")
    said = page.row("mine")
    assert said[:3] == ["finished", "56.25 % of 359 images", "62.50 %"]
    assert said[3:] == ["2 of 3", f"{count:,}", "2 h 1 min", "1,234", "scaleformer_vit_t"]
    assert {
        "Training loss",
        "Validation accuracy",
        "Learning rate",
        "Speed of training",
        "Waiting for data",
    } <= set(page.texts)
    assert (
        "mine: 62.5 at 2" in page.titles and "mine: 0.5 at 1" in page.titles
    )  # accuracy of epoch 2; loss of step 4
    assert (
        page.row("optim.warmup_epochs") == ["0.5", "1.0"] and "optim.lr" not in page.text
    )  # the default
    assert page.rows[-1][1:5] == ["a machine", "2.99", "0.1.0", "c0ffee"]


STATES = {
    "killed": (
        {"status": "running", "result": None},
        ["running or killed", "last line 2", "before this page"],
    ),
    "diverged": (
        {"status": "nan", "reason": "the loss was not finite 10 steps in a row"},
        ["not finite", "10 steps in a row"],
    ),
    "full": ({"status": "oom", "reason": "the step needs 3 GiB"}, ["out of memory", "needs 3 GiB"]),
    "broken": ({"status": "failed", "reason": "no space left"}, ["failed", "no space left"]),
    "older": ({"status": None}, ["unknown"]),
}


def test_a_run_whose_epochs_are_too_short_for_lines_about_steps_has_all_curves(tmp_path):
    long, short = write_run(tmp_path / "long"), write_run(tmp_path / "short")
    lines = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    of_epochs = [
        line | {"lr": 0.1, "images_per_second": 5.0, "wait_share": 0.5}
        for line in lines
        if line["kind"] == "epoch"
    ]
    (short / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in of_epochs))
    charts = curves_of([read_run(run, run.name, now=0.0) for run in (long, short)]).charts
    assert len(charts) == 6
    for chart in charts:
        assert [series.name for series in chart.series] == ["long", "short"]
        assert list(chart.series[1].x) == [1, 2, 3]
    assert charts[0].series[1].y == [1.0, 1.0, 1.0] and len(charts[0].series[0].y) == 12


def test_a_curve_has_the_source_with_the_most_values(tmp_path):
    run = write_run(tmp_path / "mine")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["kind"] == "epoch" or line["step"] in (4, 12)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    figure = curves_of([read_run(run, "mine", now=0.0)])
    charts = {chart.title: chart.series[0] for chart in figure.charts}
    assert charts["Training loss"].y == [1.0, 1.0, 1.0]  # of three epochs, not of two steps
    assert list(charts["Speed of training"].y) == [904.0, 912.0] and not figure.thinned


def test_a_page_says_that_long_curves_are_means(tmp_path):
    run = write_run(tmp_path / "mine")
    said = "each point is the mean of its neighbours"
    assert said not in page_of(run, output=tmp_path / "page.html").text
    (run / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"kind": "train", "step": i, "epoch": 1, "loss": 1.0 / i}) + "\n"
            for i in range(1, 302)
        )
    )
    assert said in page_of(run, output=tmp_path / "other.html").text


def test_a_run_that_did_not_finish_is_shown_with_its_state_and_reason(tmp_path):
    fixed = {"result": None, "epochs": 1}
    runs = [write_run(tmp_path / name, **fixed | STATES[name][0]) for name in STATES]
    page = page_of(*runs, output=tmp_path / "page.html")
    for name, (_, parts) in STATES.items():
        assert all(part in page.row(name)[0] for part in parts)
        assert page.row(name)[1:3] == ["", "50.00 %"]  # from the lines: no test, the first epoch


def test_files_that_are_cut_off_or_missing_are_named_and_the_rest_is_shown(tmp_path):
    run = write_run(tmp_path / "cut")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b"\xff\x00 {\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines)[:-9])
    (run / "status.json").write_text("{")
    (run / "best.safetensors").write_bytes(b"\x10")
    early = tmp_path / "early"
    early.mkdir()
    (early / "config.yaml").write_text("epochs: 9\n")
    page = page_of(run, early, output=tmp_path / "page.html", more=())
    for part in (
        "line 3 of metrics.jsonl cannot be",
        "the last line of metrics.jsonl is cut off",
        "status.json cannot be read",
    ):
        assert part in page.text
    assert page.text.count("best.safetensors") == 3  # no header; no images for either
    assert page.row("cut")[2] == "62.50 %"
    assert page.row("early")[0].startswith("unknown it has written no metrics yet")


def test_a_run_without_status_that_tested_its_weights_has_finished(tmp_path):
    run = write_run(tmp_path / "old", status=None)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "test", "step": 12, "accuracy": 0.75, "loss": 0.5, "images": 359}\n')
    found = read_run(run, "old", now=0.0)
    assert (found.status, found.result["test_accuracy"], found.result["best_epoch"]) == (
        "finished",
        0.75,
        3,
    )
    assert found.result["train_seconds"] == 30.0 and found.problems == []


def test_only_settings_that_differ_are_listed_a_column_per_run(tmp_path):
    one = write_run(tmp_path / "one")
    model = {"args": folders.MODEL | {"form": "direct"}}
    two = write_run(tmp_path / "two", config={"optim": {"lr": 0.003}, "seed": 5, "model": model})
    page = page_of(one, two, output=tmp_path / "page.html")
    table = page.rows[next(i for i, row in enumerate(page.rows) if row[:1] == ["setting"]) :][:4]
    assert table == [
        ["setting", "one", "two"],
        ["model.args.form", "-", "direct"],
        ["optim.lr", "0.001", "0.003"],
        ["seed", "0", "5"],
    ]
    assert "warmup_epochs" not in page.text


def test_an_image_that_must_not_be_written_to_is_seen_without_a_warning():
    """As digits at their own size are, which are views of what scikit-learn read."""
    image = np.full((8, 8, 1), 3, np.uint8)
    image.flags.writeable = False
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 64))
    spec = SimpleNamespace(prepare=lambda pixels: pixels.float())
    probability, best = predict(SimpleNamespace(model=model, spec=spec), image, (8, 8))
    assert best == 0 and probability > 0.99


def test_examples_are_test_images_with_the_classes_and_probabilities_of_the_best_weights(tmp_path):
    runs = [
        write_run(tmp_path / name, always=always) for name, always in (("seven", 7), ("two", 2))
    ]
    page = page_of(*runs, output=tmp_path / "page.html", more=("--images", "35"))
    labels = digit_splits(0.1, 0)["test"].labels
    (gallery,), skipped = galleries([read_run(run, run.name, now=0.0) for run in runs], 35)
    assert skipped == {} and gallery.runs == ["seven", "two"]
    assert gallery.total == len(labels) == 359
    shown = [int(example.label) for example in gallery.examples]
    assert len(shown) == 35 and gallery.wrong("seven") == sum(label != 7 for label in shown)
    assert gallery.wrong("two") == sum(label != 2 for label in shown) and 0 < shown.count(7) < 35
    sure = np.exp(3) / (np.exp(3) + 9)
    for example, label in zip(gallery.examples, shown, strict=True):
        said = example.predictions
        assert [(one.run, one.label, one.right) for one in said] == [
            ("seven", "7", label == 7),
            ("two", "2", label == 2),
        ]
        assert all(abs(one.probability - sure) < 1e-5 for one in said)
    assert len(set(example.source for example in gallery.examples)) == 35
    assert f"seven: {gallery.wrong('seven')} wrong" in page.text
    assert "35 of the 359 test images, drawn at random, 32 px" in page.text
    assert page.text.count("(69 %)") == 70
    assert page.text.count("✗") == gallery.wrong("seven") + gallery.wrong("two")


def test_images_that_are_not_there_are_left_out_with_the_reason(tmp_path):
    away = write_run(
        tmp_path / "away",
        config={"data": {"name": "folder", "root": str(tmp_path / "nowhere")}},
        always=1,
    )
    other = write_run(
        tmp_path / "other",
        always=1,
        spec=DataSpec(1, 4, ("n", "e", "s", "w"), (0.3,), (0.2,), None, 32),
    )
    page = page_of(
        away, other, write_run(tmp_path / "young"), output=tmp_path / "page.html", more=()
    )
    assert re.search(r"away : no images, since .*nowhere", page.text)
    assert "other : no images, since the weights are for other data" in page.text
    assert "young : no images, since there is no best.safetensors" in page.text
    assert page.text.count("nowhere does not exist") == 1
    # The batches of the two that have data; they share them.
    assert page.tags.count("img") == 1
    assert "first batches of training and of validation of other, young" in page.text


def test_runs_whose_first_batches_are_the_same_share_a_sheet(tmp_path):
    folders = [
        write_run(tmp_path / "one"),
        write_run(tmp_path / "faster", config={"optim": {"lr": 0.5}}),
        write_run(tmp_path / "other", config={"seed": 8}),
        write_run(tmp_path / "gone", config={"data": {"name": "cifar10"}}),
    ]
    sheets, skipped = batches_of([read_run(folder, folder.name, now=0.0) for folder in folders])
    assert [sheet.runs for sheet in sheets] == [["one", "faster"], ["other"]]
    assert sheets[0].source != sheets[1].source
    assert list(skipped) == ["gone"] and skipped["gone"].startswith("cifar10 needs a root")


def test_the_sheet_of_a_run_is_the_one_that_show_batch_draws(tmp_path):
    folder = write_run(tmp_path / "one")
    (sheet,), _ = batches_of([read_run(folder, "one", now=0.0)])
    given = ["--config", str(folder / "config.yaml"), "--show-batch", str(tmp_path / "seen.png")]
    assert load_tool("train")(given) == 0
    kind, _, content = sheet.source.partition(",")
    assert kind == "data:image/png;base64"
    shown = Image.open(io.BytesIO(base64.b64decode(content)))
    with Image.open(tmp_path / "seen.png") as drawn:
        np.testing.assert_array_equal(np.asarray(shown), np.asarray(drawn))


def test_a_large_sheet_is_a_jpeg():
    noise = np.random.default_rng(0).integers(0, 256, (500, 600, 3), dtype=np.uint8)
    assert sheet_address(Image.fromarray(noise)).startswith("data:image/jpeg;base64,")


def test_a_large_image_is_shown_small(tmp_path):
    image = np.random.default_rng(0).integers(0, 255, (1024, 700, 3)).astype(np.uint8)
    assert address(image).startswith("data:image/jpeg;base64,") and len(address(image)) < 60_000
    assert address(image[:64, :30, :1]).startswith("data:image/png;base64,")


def test_the_rows_of_a_sweep_become_means_over_seeds_and_curves_over_heads(tmp_path):
    write_rows(tmp_path / "heads" / "cells.csv", sweep_rows())
    page = page_of(tmp_path / "heads", output=tmp_path / "page.html")
    rows = [row for row in page.rows if row[0].startswith("taylorshift")]
    assert [row[:4] for row in rows] == [
        [f"taylorshift {form}", "32", *sizes]
        for form in ("direct", "efficient")
        for sizes in (("4", "64"), ("8", "32"))
    ]
    assert rows[0][4:] == [
        "83.0 ± 2.8",
        "2",
        "123,456",
        "2.5",
        "400",
        "4",
        "100",
        "12",
        "taylorshift direct",
        "finished",
    ]
    assert rows[1][4:6] == ["81.0", "1 of 2"] and rows[1][10:12] == ["out of memory"] * 2
    assert rows[1][-1] == "finished (1), not finite (1) the loss was not finite"
    assert {"Accuracy", "Speed of inference", "Memory of training step"} <= set(page.texts)
    assert "taylorshift efficient: 83 ± 2.828 at 4" in page.titles
    assert "taylorshift efficient: 2,000 at 8" in page.titles


def test_the_rows_of_a_memory_profile_become_curves_over_pixels(tmp_path):
    path = write_rows(tmp_path / "memory.csv", memory_rows())
    page = page_of(path, output=tmp_path / "page.html")
    assert page.row("scaleformer_vit_t") == ["512", "1024", "1,324", "1,024", "22", "1.00", "ok"]
    assert page.rows[-1] == [
        "vit_tiny_patch16_224+eager",
        "1024",
        "4096",
        "",
        "",
        "",
        "1.97",
        "out of memory",
    ]
    assert any("tokens¹·⁰⁰" in text for text in page.texts) and "1,024" in page.texts
    assert "scaleformer_vit_t ∝\N{NO-BREAK SPACE}tokens¹·⁰⁰: 4,096 at 1,024" in page.titles
    assert page.texts.count("out of memory") == 3  # marked in both charts, and in the table


def test_nothing_of_a_file_is_taken_for_markup_and_nothing_is_fetched(tmp_path):
    name = "<img src=x onerror=alert(1)>$x_{$"
    spec = DataSpec(
        1, 10, ("<script>alert(2)<&>", *map(str, range(1, 10))), (0.306,), (0.324,), None, 32
    )
    run = write_run(
        tmp_path / name, status="failed", reason="</td><script>alert(3)", always=0, spec=spec
    )
    write_rows(
        run / "memory.csv",
        memory_rows()[:2] + [memory_rows()[2] | {"model": "<b onclick=alert(4)>"}],
    )
    page = page_of(
        run, output=tmp_path / "page.html", more=("--title", "<script>alert(5)", "--images", "2")
    )
    assert "script" not in page.tags and "b" not in page.tags and page.tags.count("img") == 1
    assert name in page.text and "<script>alert(5)" in page.text
    assert any(text.startswith("<b onclick") for text in page.titles)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(
        r"https?:|//|@import", re.sub(r"base64,[\w+/=]*", "", text).replace(str(tmp_path), "")
    )
    places = [
        (tag, value)
        for tag, key, value in page.attributes
        if key in ("src", "href", "xlink:href", "srcset", "action")
    ]
    assert all(value.startswith(("data:", "#")) for _, value in places)
    assert not any(key.startswith("on") for _, key, _ in page.attributes)


def test_identifiers_are_unique_and_what_charts_refer_to_is_there(tmp_path):
    write_run(tmp_path / "a")
    write_rows(tmp_path / "a" / "cells.csv", sweep_rows())
    page = page_of(tmp_path / "a", output=tmp_path / "page.html")
    names = [value for _, key, value in page.attributes if key == "id"]
    used = {
        value[1:] for _, key, value in page.attributes if key == "href" and value.startswith("#")
    }
    used |= set(re.findall(r"url\(#([^)]+)\)", (tmp_path / "page.html").read_text()))
    assert len(names) == len(set(names)) and used and used <= set(names)
    assert page.tags.count("svg") > 11


def test_long_curves_are_thinned_and_keep_their_means():
    x, y = list(range(10_000)), [float(i % 50) for i in range(10_000)]
    thin_x, thin_y = thin(x, y)
    assert len(thin_x) <= 300 and abs(sum(thin_y) / len(thin_y) - 24.5) < 0.5
    assert thin([1], [None]) == ([1], [None])
    middles, least, largest = reach(x, [None, *y[1:]])
    assert middles == thin_x and reach(x[:300], y[:300]) is None
    assert least[:2] == [1.0, 0.0] and largest[:2] == [33.0, 49.0]  # groups of 34
    text = svg(
        Chart(
            "T",
            "step",
            "nats",
            [Series("a", Look(0), x, y), Series("b", Look(1), x[:2], [None, 3.0])],
        ),
        "c1",
    )
    assert len(text) < 80_000 and "var(--series-1)" in text and "#1e00" not in text
    assert text.count("fill-opacity: 0.18") == 1


def test_the_first_24_series_look_different():
    looks = {(Look.of(i).colour, Look.of(i).shape) for i in range(24)}
    assert len(looks) == 24 and all(
        Look.of(i).colour != Look.of(i + 1).colour != Look.of(i).shape + 9 for i in range(23)
    )


def test_a_page_that_exists_is_replaced_on_request_alone(main, tmp_path, capsys):
    run = write_run(tmp_path / "mine", epochs=1)
    (run / "report.html").write_text("mine")
    assert main([str(run), "--images", "0"]) == 2
    assert (
        capsys.readouterr().err == f"error: {run / 'report.html'} exists; --overwrite replaces it\n"
    )
    assert (run / "report.html").read_text() == "mine"
    assert main([str(run), "--images", "0", "--overwrite"]) == 0
    assert capsys.readouterr().out.startswith(f"{run / 'report.html'}: 1 run; 0.")
    assert "<h1>mine</h1>" in (run / "report.html").read_text() and not unfinished(run)


BAD_INPUT = {
    "": "name what to show: folders of runs or sweeps",
    "nowhere": "no run and no sweep at nowhere",
    "empty": "empty holds no run, no sweep and no memory profile; a run has config.yaml",
    ".": "name the runs within it, e.g. run",
    "half": "the sweep in half has written no cells.csv yet",
    "run/metrics.jsonl": "run/metrics.jsonl has neither the columns of a sweep nor those of a "
    "memory profile",
    "run --output nowhere/a.html": "nowhere for a.html",
    "run --output empty": "empty cannot be written",
    "run --output page.pdf": "output page.pdf: a page is HTML; end its name in .html",
    "run --images -1": "images must be from 0 to 100, got -1",
    "run --images many": "images must be a whole number",
    "run --runs run": "what stands first is --runs, which is given too",
    "run --titel a": "unknown option --titel; the nearest is --title",
    "run --title a run": "--title takes one value",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_ends_with_one_line_and_code_2(main, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", epochs=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "sweep.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert main(flags.split()) == 2
    assert_one_error(capsys, BAD_INPUT[flags])
    assert sorted(tmp_path.rglob("*")) == before
