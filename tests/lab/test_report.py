"""``visionattn report``: what its page says of runs in any state and of example images, how it
ends, and what a browser makes of the page.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import jaccard_score

from tests.helpers.report_folders import (
    MODEL,
    RESULT,
    Page,
    memory_rows,
    sweep_rows,
    write_classes,
    write_rows,
    write_run,
    write_weights,
)
from tests.helpers.small_runs import lines_of, small_config
from tests.helpers.tools import assert_one_error, load_tool, words
from tests.training.test_segmentation import CLASSES, TINY, write_folder
from visionattn.cli.files import unfinished
from visionattn.data.digits_and_canvas import digit_splits
from visionattn.lab.report.page_tables import MOST_IN_MATRIX, classes_of, results
from visionattn.lab.report.report_examples import galleries
from visionattn.lab.report.report_page import report
from visionattn.lab.report.run_reading import curves_of, read_run, same_data
from visionattn.lab.report.templates import look_page
from visionattn.models.weights import DataSpec

COUNTS = [[5, 2, 0], [0, 3, 0], [1, 0, 1]]
NAMES = ["ape", "bear", "a cat of a long name"]


main = load_tool("report")


def page_of(*paths, output, images=0, title="T"):
    flags = ["--output", str(output), "--images", str(images), "--title", title, "--overwrite"]
    report([*map(str, paths), *flags])
    return Page(output.read_text())


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_lines(run, lines):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)


STATES = {
    "killed": ({"status": "running"}, "running or killed", "last line 2"),
    "diverged": ({"status": "nan", "reason": "the loss was not"}, "not finite", "the loss was"),
    "full": ({"status": "oom", "reason": "needs 3 GiB"}, "out of memory", "needs 3 GiB"),
    "older": ({"status": None}, "unknown", ""),
}


def test_the_page_of_runs_says_what_their_files_say(tmp_path):
    run = write_run(tmp_path / "mine")
    count = write_weights(run, 7)
    fixed = {"result": None, "epochs": 1}
    runs = [write_run(tmp_path / name, **fixed | STATES[name][0]) for name in STATES]
    page = page_of(run, *runs, output=tmp_path / "page.html")
    row = ["finished", "56.25 %", "62.50 %", "359", "2", "2 h 1 min", "1,234", f"{count:,}"]
    assert page.row("mine") == [*row, "scaleformer_vit_t"]
    for name, (_, *parts) in STATES.items():
        cells = page.row(name)
        assert all(part in cells[0] for part in parts)
        assert cells[2] == "50.00 %"  # from the lines: no test, the first epoch
    titles = {"Training loss", "Validation loss", "Validation accuracy", "Learning rate"}
    assert titles | {"Throughput of training", "Waiting for data"} <= set(page.texts)
    assert page.rows[-5][1:5] == ["a machine", "2.99", "0.1.0", "c0ffee"]


def test_a_run_without_status_that_tested_its_weights_has_finished(tmp_path):
    run = write_run(tmp_path / "old", status=None)
    test = {"kind": "test", "step": 12, "accuracy": 0.75, "loss": 0.5, "images": 359}
    write_lines(run, [*metrics_of(run), test])
    found = read_run(run, "old")
    assert (found.status, found.result["test_accuracy"], found.problems) == ("finished", 0.75, [])
    # Of equal accuracies, the epoch with the smaller loss.
    assert (found.result["best_epoch"], found.result["train_seconds"]) == (3, 30.0)


@pytest.mark.filterwarnings("error")
def test_what_is_damaged_or_absurd_is_named_and_the_rest_is_shown(tmp_path):
    names = ["metrics.jsonl", "status.json", "config.yaml", "test.json", "best.safetensors"]
    runs = [write_run(tmp_path / name.partition(".")[0], epochs=1) for name in names]
    for run, name in zip(runs, names, strict=True):
        (run / name).write_text("[" * 100_000 if name != "status.json" else '{"status": ["x"]}')
    early = tmp_path / "early"
    (early / "status.json").mkdir(parents=True)
    odd = write_run(tmp_path / "odd", status=None)
    absurd = ['"step": 12, "val_loss": 1e999', '"step": [1], "val_loss": 1.0, "epoch": "x"']
    absurd += ['"step": 12, "epoch": -1e308, "val_accuracy": 1' + "0" * 400]
    with open(odd / "metrics.jsonl", "a") as file:
        file.write("".join(f'{{"kind": "epoch", {each}}}\n' for each in absurd) + '{"kind": "ep')
    with pytest.raises(ValueError, match="early is not a run"):
        page_of(early, output=tmp_path / "page.html")
    (early / "config.yaml").write_text("epochs: 9\n")
    page = page_of(*runs, early, odd, output=tmp_path / "page.html", images=1)
    assert all(f"{name} cannot be read" in page.text for name in names[1:])
    assert "there is no metrics.jsonl" in page.text and page.row("test")[0] == "finished"
    assert "1 of 19 lines of metrics.jsonl cannot be read" in page.text
    assert "62.50 %" in page.row("odd") and page.tags.count("figure") == 6
    assert "no images (there is no best.safetensors" in page.text


def test_a_curve_has_the_source_with_the_most_values(tmp_path):
    long, short = write_run(tmp_path / "long"), write_run(tmp_path / "short")
    write_lines(short, [x for x in metrics_of(short) if x["kind"] == "epoch" or x["step"] == 12])
    runs = [read_run(run, run.name) for run in (long, short)]
    charts = {chart.title: chart for chart in curves_of(runs)}
    steps, epochs = charts["Training loss"].series
    assert (len(steps.y), steps.x[:4]) == (12, [0.25, 0.5, 0.75, 1.0])
    assert (epochs.x, epochs.y) == ([1, 2, 3], [1.0] * 3)
    assert charts["Validation accuracy"].series[0].y == [50.0, 62.5, 62.5]
    write_lines(short, metrics_of(long)[:1])
    (chart, *_) = curves_of([read_run(short, "short")])
    assert (chart.x_name, chart.series[0].x) == ("optimizer step", [1])


def folder(root):
    return {"data": {"name": "folder", "root": root}}


SAME = [
    ({}, {"data": {"img_size": 48}}, False),
    ({}, {"seed": 3}, False),
    (folder("a/b"), folder("./a/b/"), True),
    (folder("a/b"), folder("a/c"), False),
    ({}, {"data": {"augment": "light", "workers": 4}}, True),
    ({}, {"data": {"on_error": "fail", "img_size_choices": [24, 32]}}, True),
    ({}, {"optim": {"lr": 0.1}, "model": {"name": "taylorshift_vit_t"}}, True),
]


def test_runs_are_compared_where_their_images_are_the_same(tmp_path):
    for number, (*configs, same) in enumerate(SAME):
        runs = [write_run(tmp_path / f"{number}{i}", config=each) for i, each in enumerate(configs)]
        found = [same_data(read_run(run, run.name)) for run in runs]
        assert (found[0] == found[1]) == same and None not in found, configs
    seeds = [(0.5, {}), (0.6, {}), (0.9, {"seed": 1}), (0.3, {"seed": 2}), (0.4, {"seed": 2})]
    runs = [
        write_run(tmp_path / f"run{i}", config=config, result=RESULT | {"test_accuracy": value})
        for i, (value, config) in enumerate(seeds)
    ]
    page_of(*runs, output=tmp_path / "page.html")
    strong = re.findall(r'"number strong">([\d.]+) %', (tmp_path / "page.html").read_text())
    assert [each for each in strong if each != "62.50"] == ["60.00", "40.00"]
    model = {"args": MODEL | {"form": "direct"}}
    other = write_run(tmp_path / "other", config={"optim": {"lr": 0.003}, "model": model})
    page = page_of(runs[0], other, output=tmp_path / "page.html")
    place = page.rows.index(["setting", "run0", "other"]) + 1
    wanted = [["model.args.form", "-", "direct"], ["optim.lr", "0.001", "0.003"]]
    assert page.rows[place : place + 2] == wanted


def test_runs_that_generate_images_have_bits_per_dimension(tmp_path):
    runs = []
    for name, task, loss in (("one", "generate", 2.25), ("other", "classification", 4.0)):
        run = write_run(tmp_path / name, config={"data": {"task": task}}, status=None)
        write_lines(run, [{"kind": "epoch", "step": 1, "epoch": 1, "val_loss": loss}])
        runs.append(read_run(run, name))
    table = results(runs)
    place = table.columns.index("validation bits/dim")
    assert [row[place].text for row in table.rows] == ["2.2500", ""]
    units = ["bits per dimension", "nats per image, or bits per dimension"]
    assert [curves_of(chosen)[0].y_name for chosen in (runs[:1], runs)] == units


# Classes


def test_each_class_has_its_row_in_a_matrix_its_accuracy_and_its_mistakes(tmp_path):
    run, two = (write_run(tmp_path / name, epochs=0) for name in ("mine", "two"))
    wrong = [(0, 1, 0.0012, 0.9876, "a/1.png", picture(400, 600)), (2, 0, 0.25, 0.5, None, None)]
    write_classes(run, COUNTS, names=NAMES, mistakes=wrong)
    write_classes(two, [[6, 1, 0], [1, 2, 0], [1, 0, 1]], names=NAMES)
    both = page_of(run, two, output=tmp_path / "page.html").rows
    assert both[both.index(["class", "test images", "mine", "two"]) + 1][2:] == [
        "71.43 %",
        "85.71 %",
    ]
    page = page_of(run, output=tmp_path / "page.html", images=12)
    text = (tmp_path / "page.html").read_text()
    matrix = [["ape", "5", "2", "", "7"], ["bear", "", "3", "", "3"], [NAMES[2], "1", "", "1", "2"]]
    assert all(row in page.rows for row in matrix)
    assert "9 of 12 test images are correct, with the weights of epoch 2" in page.text
    head = ["class", "test images", "mine", "precision", "most frequent mistake"]
    assert page.rows[page.rows.index(head) + 1 :][:2] == [
        ["ape", "7", "71.43 %", "83.33 %", "bear (2)"],
        ["bear", "3", "100.00 %", "60.00 %", ""],
    ]
    for part in ("ape (0.1 %) ✗ bear (98.8 %)", "a/1.png 400 x 600 px", "could not be saved"):
        assert part in page.text
    assert text.count('<img src="data:image/jpeg') == 1


def test_many_classes_have_their_most_frequent_mistakes_in_place_of_a_matrix(tmp_path):
    classes, run = MOST_IN_MATRIX + 1, write_run(tmp_path / "mine", epochs=0)
    counts = np.diag(np.full(classes, 100))
    counts[0, 1], counts[2, 3], counts[1] = 25, 50, 0
    write_classes(run, counts[:-1, :-1].tolist())
    assert classes_of([read_run(run, "mine")], 0)[0].matrix
    write_classes(run, counts.tolist())
    page = page_of(run, output=tmp_path / "page.html")
    place = page.rows.index(["true class", "predicted class", "images", "share of class"]) + 1
    assert page.rows[place : place + 2] == [
        ["2", "3", "50", "33.33 %"],
        ["0", "1", "25", "20.00 %"],
    ]
    *rows, last = [row for row in page.rows if len(row) == 5][1:]
    assert [row[0] for row in rows[:3]] == ["2", "0", "3"]  # the least accurate first
    assert last[:3] == ["1", "0", ""] and rows[1][4] == "1 (25)"  # a class without images


def test_a_page_has_a_bounded_number_of_pictures_of_the_best_weights(tmp_path):
    folder = write_run(tmp_path / "run")  # whose best epoch is 2
    wrong = [(0, 1, 0.1, 0.9, None, picture(8, 8, i)) for i in range(12)]
    for split, epoch, shown in (("validation", 2, "validation"), ("test", 1, "validation"),
                                ("test", 2, "test"), ("validation", 3, "test")):  # fmt: skip
        write_classes(folder, COUNTS, mistakes=wrong, split=split, epoch=epoch)
        run = read_run(folder, "run")
        assert run.by_class.split == shown
    for count, each in ((1, 12), (3, 8), (7, 3), (70, 1)):
        found = classes_of([run] * count, 12)
        assert [len(one.mistakes) for one in found] == [each] * count


# The page as a whole


def test_nothing_of_a_file_is_taken_for_markup_and_nothing_is_fetched(tmp_path):
    name, bad = "<img src=x onerror=alert(1)>$x_{$", '"><script>alert(2)<&>'
    spec = DataSpec(1, 10, (bad, *"123456789"), (0.306,), (0.324,), None, 32)
    run = write_run(tmp_path / name, status="failed", reason=f"</td>{bad}", always=0, spec=spec)
    write_rows(run / "memory.csv", [memory_rows()[0] | {"model": "<b onclick=alert(4)>"}])
    write_rows(run / "cells.csv", sweep_rows())
    wrong = [(0, 1, 0.1, 0.9, f"{bad}.png", picture(8, 8))]
    write_classes(run, COUNTS, names=[bad, "<b>", "'&"], mistakes=wrong)
    page = page_of(run, output=tmp_path / "page.html", title=bad, images=2)
    text = (tmp_path / "page.html").read_text()
    assert "script" not in page.tags and "b" not in page.tags and page.tags.count("img") == 1
    assert name in page.text and bad in page.text and "<b onclick=alert(4)>" in page.text
    assert "default-src 'none'" in text
    fetched = ("src", "href", "xlink:href", "srcset", "action")
    assert all(value.startswith(("data:", "#")) for _, k, value in page.attributes if k in fetched)
    assert not any(key.startswith("on") for _, key, _ in page.attributes)
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids)) and page.tags.count("svg") > 11


def test_pages_of_look_lead_each_figure_to_its_file_and_names_are_texts():
    figure = {"title": "Patches", "lines": ["What <b>patches</b> add."], "file": "1-a.png"}
    figure |= {"source": "data:image/jpeg;base64,AAAA", "details": ["data:image/jpeg;base64,BB"]}
    text = look_page("T", [{"title": "<script>&", "lines": ["l"], "figures": [figure]}])
    page = Page(text)
    assert "script" not in page.tags and "<script>&" in page.text and "b" not in page.tags
    assert ("a", "href", "1-a.png") in page.attributes and "default-src 'none'" in text
    assert ",AAAA" in text and ",BB" in text


# Rows of sweeps and profiles


def page_of_rows(tmp_path, rows, name="cells.csv"):
    return page_of(write_rows(tmp_path / name, rows), output=tmp_path / "page.html")


def test_the_rows_of_a_sweep_become_means_over_seeds(tmp_path):
    page = page_of_rows(tmp_path, sweep_rows(), "heads/cells.csv")
    first, second, *rest = page.rows[1:]
    assert first[:6] == ["taylorshift", "direct", "32", "4", "64", "1,024"]
    assert first[6:] == ["83 ± 2.8", "123,456", "2.5", "400", "4", "100", "12",
                         "taylorshift direct", "finished", ""]  # fmt: skip
    assert second[6] == "81 (1 of 2)" and second[11:13] == ["out of memory"] * 2
    assert second[-2:] == ["finished, not finite", "the loss was not finite"]
    assert [row[1:4] for row in rest] == [["efficient", "32", heads] for heads in "48"]
    assert {"Accuracy", "Throughput of inference", "Peak memory of training step"} <= set(
        page.texts
    )
    assert {"Head counts: heads", "Images of 32 px"} <= set(page.texts)
    write_run(tmp_path / "heads" / "runs" / "one", epochs=0)
    page = page_of(tmp_path / "heads", output=tmp_path / "page.html")
    runs, output = (str(tmp_path / "heads" / name) for name in ("runs", "trainings.html"))
    assert f"visionattn report {runs}/*/ --output {output}" in page.texts


def test_a_sweep_says_what_it_was_measured_on_and_not_where_its_tables_were_written(tmp_path):
    about = dict(measure_device="cuda", measure_threads=4, measure_batch=16, trained_form="direct")
    about |= dict(measure_processor="the card's host", measure_commit="beef", train_commit="cafe")
    about |= dict(processor="a laptop", commit="f00d", device="cpu, 9 threads")
    rows = [row | about | {"measured": f"2031-05-0{1 + row['seed']}"} for row in sweep_rows()]
    page = page_of_rows(tmp_path, rows)
    # A form that was not trained has no accuracy of its own.
    assert [row[6] for row in page.rows[1:]] == ["83 ± 2.8", "81 (1 of 2)", "", ""]
    assert "trained form direct, batch 16, device cuda, threads 4" in page.text
    for part in ("the card's host", "beef", "cafe", "2031-05-01; 2031-05-02"):
        assert part in page.text, part
    assert not any(part in page.text for part in ("a laptop", "f00d", "9 threads"))


def test_the_rows_of_a_memory_profile_have_their_conditions_above(tmp_path):
    rows = [row | {"batch": 3, "depth": 2, "budget_bytes": 5 * 2**30} for row in memory_rows()]
    page = page_of_rows(tmp_path, rows)
    same = "pass inference, precision float32, form auto, checkpointing no, batch 3, blocks 2"
    assert f"{same}, budget, GiB 5." in page.text and page.tags.count("figure") == 2
    assert page.row("scaleformer_vit_t") == ["512", "1,024", "1,324", "1,024", "22", "1", "ok"]
    rows[0] |= {"px": 0, "above_bytes": -5, "peak_bytes": "1e308", "growth_exponent": "1e400"}
    page = page_of_rows(tmp_path, [row | {"batch": 1 + i % 2} for i, row in enumerate(rows)])
    assert page.rows[0][:4] == ["model", "px", "tokens", "batch"] and page.rows[1][3] == "1"


# How it ends


BAD_INPUT = {
    "": "expected --runs: folders of runs or sweeps",
    "nowhere": "no run or sweep at nowhere",
    ".": "pass the runs in it, e.g. run",
    "run/metrics.jsonl": "CSV file of a sweep or memory profile; pass other folders",
    "run": "report.html exists; pass --overwrite to replace it",
    "run --output nowhere/a.html": "nowhere for a.html",
    "run --output page.pdf": "expected --output to end in .html, got page.pdf",
    "run --images -1": "images must be from 0 to 100, got -1",
    "run --runs run": "the first word and --runs set the same option",
}


def test_bad_input_ends_with_one_line_and_code_2(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", epochs=1)
    (run / "report.html").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for flags, part in BAD_INPUT.items():
        assert main(flags.split()) == 2
        assert_one_error(capsys, part)
    assert sorted(tmp_path.rglob("*")) == before and Path("run/report.html").read_text() == "mine"
    assert main(["run", "--images", "0", "--overwrite"]) == 0
    assert capsys.readouterr().out.startswith("run/report.html: runs 1, sweeps and profiles 0; 0.")
    assert "<h1>run</h1>" in Path("run/report.html").read_text() and not unfinished(run)


def test_examples_are_test_images_with_the_classes_and_probabilities_of_the_best_weights(tmp_path):
    runs = [write_run(tmp_path / f"{always}", always=always) for always in (7, 2)]
    page = page_of(*runs, output=tmp_path / "page.html", images=35)
    labels = digit_splits(0.1, 0)["test"].labels
    (gallery,), skipped = galleries([read_run(run, run.name) for run in runs], 35)
    assert (skipped, gallery.runs, gallery.split) == ({}, ["7", "2"], "test")
    assert gallery.total == len(labels) == 359
    shown = [int(example.label) for example in gallery.examples]
    assert len(shown) == len({example.source for example in gallery.examples}) == 35
    assert 0 < shown.count(7) < 35 and gallery.wrong("7") == 35 - shown.count(7)
    for example, label in zip(gallery.examples, shown, strict=True):
        said = [(each.run, each.text, each.right) for each in example.said]
        assert said == [(name, name, label == int(name)) for name in ("7", "2")]
        shares = [each.share for each in example.said]
        assert shares == pytest.approx([np.exp(3) / (np.exp(3) + 9)] * 2)
    assert "35 of the 359 test images, drawn at random, 32 px" in page.text
    assert f"7: {gallery.wrong('7')} wrong" in page.text and page.text.count("(69.1 %)") == 70
    assert page.text.count("✗") == gallery.wrong("7") + gallery.wrong("2")


def test_images_that_are_not_there_are_left_out_with_the_reason(tmp_path):
    data = {"data": {"name": "folder", "root": str(tmp_path / "nowhere")}}
    spec = DataSpec(1, 4, ("n", "e", "s", "w"), (0.3,), (0.2,), None, 32)
    away = write_run(tmp_path / "away", config=data, always=1)
    other = write_run(tmp_path / "other", always=1, spec=spec)
    young = write_run(tmp_path / "young")
    page = page_of(away, other, young, output=tmp_path / "page.html", images=12)
    assert re.search(r"away : no images \(.*nowhere does not exist", page.text)
    assert "other : no images (the checkpoint does not fit the data" in page.text
    assert "young : no images (there is no best.safetensors" in page.text
    assert "img" not in page.tags


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A run that gives classes of pixels."""
    folder = tmp_path_factory.mktemp("masked_report")
    write_folder(folder / "data")
    data = dict(name="folder", task="segmentation", root=str(folder / "data"), fit="crop")
    data |= dict(masks={"classes": list(CLASSES)})
    model, optim = TINY | {"head_stride": 2}, {"lr": 1e-2}
    lines_of(small_config(folder, data=data, model=model, epochs=3, batch_size=4, optim=optim))
    return folder / "small"


def decoded(address):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


def test_masks_are_the_known_ones_and_what_the_weights_give(masked, tmp_path):
    run = read_run(masked, "small")
    [gallery], skipped = galleries([run], 8)
    assert (skipped, gallery.split, gallery.total) == ({}, "test", 4)
    files = sorted((masked.parent / "data/test/masks").iterdir())
    pairs = []
    for shown, path in zip(gallery.examples, files, strict=True):
        known, [said] = np.asarray(Image.open(path)), shown.said
        assert np.array_equal(decoded(shown.mask), known)
        found, counted = decoded(said.mask), known != 255
        pairs.append((known[counted], found[counted]))
        wanted = jaccard_score(*pairs[-1], average=None, labels=np.unique(pairs[-1][0]))
        assert said.share == pytest.approx(wanted.mean())
        assert decoded(shown.source).shape == (16, 16, 3)
    every = map(np.concatenate, zip(*pairs, strict=True))
    assert jaccard_score(*every, average=None) == pytest.approx(run.result["test_ious"])
    page = page_of(masked, output=tmp_path / "page.html", images=12)
    legend = [name for _, name in gallery.legend]
    assert legend == [*CLASSES, "does not count"] and set(legend) <= set(page.texts)
    assert page.tags.count("img") == 12 and "predicted, " in page.text
    for name, iou in zip(CLASSES, run.result["test_ious"], strict=True):
        assert [name, f"{100 * iou:.2f} %"] in page.rows
    assert "Validation mean IoU" in page.text and "test accuracy" not in page.text


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = words(
    "--headless --disable-gpu --no-first-run --disable-background-networking "
    "--enable-logging=stderr"
)
FLAGS += [
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--allow-file-access-from-files",
]


def open_page(path, folder):
    """What the browser makes of a page: its document after loading, and the messages of its
    console.
    """
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    place = [f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    command = [BROWSER, *FLAGS, *as_root, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; .ci/chromium installs one where apt-get is"
)
def test_a_browser_shows_the_rows_and_has_nothing_to_complain_of(tmp_path):
    """A page of everything: two runs, one of a name that is markup, with images; a sweep and a
    profile.
    """
    bad = "</td><script>document.title=2</script>" * 5
    runs = [write_run(tmp_path / "<img src=x onerror=document.title=1>", always=7)]
    runs += [write_run(tmp_path / ("a_long_name_" * 9), status="nan", reason=bad, result=None)]
    write_rows(tmp_path / "heads" / "cells.csv", sweep_rows())
    write_rows(tmp_path / "memory.csv", memory_rows())
    paths = [*runs, tmp_path / "heads", tmp_path / "memory.csv"]
    page_of(*paths, output=tmp_path / "report.html", images=5, title="Mine & <others>")
    document, complaints = open_page(tmp_path / "report.html", tmp_path)
    assert complaints == []
    assert "<title>Mine &amp; &lt;others&gt;</title>" in document
    assert document.rstrip().endswith("</html>")
    shown = Page(document)
    assert "script" not in shown.tags
    assert not any(key.startswith("on") for _, key, _ in shown.attributes)
    cells = [cell for row in shown.rows for cell in row]
    assert {"56.25 %", "finished", "2 h 1 min", "83 ± 2.8", "1,324", "out of memory"} <= set(cells)
    assert cells.count("<img src=x onerror=document.title=1>") >= 2
    assert document.count('<svg class="chart"') == 6 + 6 + 2
    assert document.count('src="data:image/png;base64,') == 5
    assert document.count("</section>") == 7
