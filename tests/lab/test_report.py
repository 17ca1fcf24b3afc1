"""``visionattn report``: what its page says of runs in any state, and how it ends."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

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
from tests.helpers.tools import assert_one_error, load_tool
from visionattn.cli.files import unfinished
from visionattn.lab.report.classes import MOST_IN_MATRIX, MOST_PICTURES, classes_of
from visionattn.lab.report.page import report
from visionattn.lab.report.page_tables import results
from visionattn.lab.report.runs import curves_of, read_run, same_data
from visionattn.lab.report.templates import look_page
from visionattn.models.weights import DataSpec

COUNTS = [[5, 2, 0], [0, 3, 0], [1, 0, 1]]
OF_ONE = ["precision", "most often taken for"]
"""Columns of classes that a single run has."""
NAMES = ["ape", "bear", "a cat of a long name"]


@pytest.fixture(scope="module")
def main():
    return load_tool("report")


def page_of(*paths, output, images=0, title="T"):
    flags = ["--output", str(output), "--images", str(images), "--title", title, "--overwrite"]
    report([*map(str, paths), *flags])
    return Page(output.read_text())


def rows_under(page, name):
    """The rows of tables from the heading that begins with ``name`` on."""
    return page.rows[next(i for i, row in enumerate(page.rows) if row[:1] == [name]) :]


def rows_under_head(page, head):
    """The rows below a row."""
    return page.rows[page.rows.index(head) + 1 :]


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def write_lines(run, lines):
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_page_of_a_run_says_what_its_files_say(tmp_path):
    run = write_run(tmp_path / "mine")
    count = write_weights(run, 7)
    page = page_of(run, output=tmp_path / "page.html")
    row = ["finished", "56.25 %", "62.50 %", "359", "2", "2 h 1 min", "1,234", f"{count:,}"]
    assert page.row("mine") == [*row, "scaleformer_vit_t"]
    titles = {"Training loss", "Validation loss", "Validation accuracy", "Learning rate"}
    assert titles | {"Speed of training", "Waiting for data"} <= set(page.texts)
    assert page.row("optim.warmup_epochs") == ["0.5", "1.0"] and "optim.lr" not in page.text
    assert page.rows[-1][1:5] == ["a machine", "2.99", "0.1.0", "c0ffee"]


STATES = {
    "killed": ({"status": "running"}, ["running or killed", "last line 2"]),
    "diverged": ({"status": "nan", "reason": "the loss was not"}, ["not finite", "the loss was"]),
    "full": ({"status": "oom", "reason": "needs 3 GiB"}, ["out of memory", "needs 3 GiB"]),
    "older": ({"status": None}, ["unknown"]),
}


def test_a_run_that_did_not_finish_is_shown_with_its_state_and_reason(tmp_path):
    fixed = {"result": None, "epochs": 1}
    runs = [write_run(tmp_path / name, **fixed | STATES[name][0]) for name in STATES]
    page = page_of(*runs, output=tmp_path / "page.html")
    for name, (_, parts) in STATES.items():
        assert all(part in page.row(name)[0] for part in parts)
        assert page.row(name)[1] == "50.00 %"  # from the lines: no test, the first epoch


def test_a_run_without_status_that_tested_its_weights_has_finished(tmp_path):
    run = write_run(tmp_path / "old", status=None)
    test = {"kind": "test", "step": 12, "accuracy": 0.75, "loss": 0.5, "images": 359}
    write_lines(run, [*lines_of(run), test])
    found = read_run(run, "old")
    assert (found.status, found.result["test_accuracy"]) == ("finished", 0.75)
    # Of equal accuracies, the epoch with the smaller loss.
    assert (found.result["best_epoch"], found.result["train_seconds"]) == (3, 30.0)
    assert found.problems == []


def test_files_that_are_damaged_are_named_and_the_rest_is_shown(tmp_path):
    names = ["metrics.jsonl", "status.json", "config.yaml", "test.json", "best.safetensors"]
    runs = [write_run(tmp_path / name.partition(".")[0], epochs=1) for name in names]
    for run, name in zip(runs, names, strict=True):
        (run / name).write_text("[" * 100_000 if name != "status.json" else '{"status": ["x"]}')
    early = tmp_path / "early"
    (early / "status.json").mkdir(parents=True)
    (early / "config.yaml").write_text("epochs: 9\n")
    page = page_of(*runs, early, output=tmp_path / "page.html", images=1)
    assert all(f"{name} cannot be read" in page.text for name in names[1:])
    assert "there is no metrics.jsonl" in page.text and page.row("test")[0] == "finished"
    assert "no images, since there is no best.safetensors" in page.text


@pytest.mark.filterwarnings("error")
def test_lines_that_are_cut_off_or_absurd_are_left_out(tmp_path):
    run = write_run(tmp_path / "mine", status=None)
    absurd = ['"step": 12, "val_loss": 1e999', '"step": [1], "val_loss": 1.0, "epoch": "x"']
    absurd += ['"step": 12, "epoch": -1e308, "val_accuracy": 1' + "0" * 400]
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(f'{{"kind": "epoch", {each}}}\n' for each in absurd) + '{"kind": "ep')
    page = page_of(run, output=tmp_path / "page.html")
    assert "2 of 19 lines of metrics.jsonl cannot be read" in page.text
    assert page.row("mine")[1] == "62.50 %" and page.tags.count("figure") == 6


def test_a_curve_has_the_source_with_the_most_values(tmp_path):
    long, short = write_run(tmp_path / "long"), write_run(tmp_path / "short")
    kept = [line for line in lines_of(short) if line["kind"] == "epoch" or line["step"] == 12]
    write_lines(short, kept)
    charts = {
        chart.title: chart for chart in curves_of([read_run(x, x.name) for x in (long, short)])
    }
    steps, epochs = charts["Training loss"].series
    assert (len(steps.y), steps.x[:4]) == (12, [0.25, 0.5, 0.75, 1.0])
    assert (epochs.x, epochs.y) == ([1, 2, 3], [1.0] * 3)
    assert charts["Speed of training"].series[1].y == [912.0]
    assert charts["Validation accuracy"].series[0].y == [50.0, 62.5, 62.5]
    write_lines(short, kept[:1] + [line for line in lines_of(long) if line["kind"] == "train"])
    (short / "metrics.jsonl").write_text(json.dumps(lines_of(long)[0]))
    (chart, *_) = curves_of([read_run(short, "short")])
    assert (chart.x_name, chart.series[0].x) == ("optimiser step", [1])


def test_only_settings_that_differ_are_listed_a_column_per_run(tmp_path):
    one = write_run(tmp_path / "one")
    model = {"args": MODEL | {"form": "direct"}}
    two = write_run(tmp_path / "two", config={"optim": {"lr": 0.003}, "seed": 5, "model": model})
    page = page_of(one, two, output=tmp_path / "page.html")
    assert rows_under(page, "setting")[:4] == [
        ["setting", "one", "two"],
        ["model.args.form", "-", "direct"],
        ["optim.lr", "0.001", "0.003"],
        ["seed", "0", "5"],
    ]
    assert "warmup_epochs" not in page.text


def folder(root):
    return {"data": {"name": "folder", "root": root}}


SAME = [
    ({}, {"data": {"img_size": 48}}, False),
    ({}, {"seed": 3}, False),
    (folder("a/b"), folder("./a/b/"), True),
    (folder("a/b"), folder("a/c"), False),
    ({}, {"data": {"augment": "light", "aug": {"turn": 3.0}, "workers": 4}}, True),
    ({}, {"data": {"on_error": "fail", "img_size_choices": [24, 32]}}, True),
    ({}, {"optim": {"lr": 0.1}, "model": {"name": "taylorshift_vit_t"}}, True),
]


def test_runs_are_compared_where_their_images_are_the_same(tmp_path):
    for number, (*configs, same) in enumerate(SAME):
        runs = [write_run(tmp_path / f"{number}{i}", config=each) for i, each in enumerate(configs)]
        found = [same_data(read_run(run, run.name)) for run in runs]
        assert (found[0] == found[1]) == same and None not in found, configs


def test_the_best_of_runs_of_the_same_images_is_bold(tmp_path):
    runs = [
        write_run(tmp_path / f"run{i}", config=config, result=RESULT | {"test_accuracy": value})
        for i, (value, config) in enumerate(
            [(0.5, {}), (0.6, {}), (0.9, {"seed": 1}), (0.3, {"seed": 2}), (0.4, {"seed": 2})]
        )
    ]
    more = RESULT | {"test_accuracy": 0.95, "test_images": 360}
    runs.append(write_run(tmp_path / "more", result=more))
    unknown = [tmp_path / "run5", tmp_path / "run6"]
    for path in unknown:
        path.mkdir()
        write_lines(path, [{"kind": "test", "accuracy": 0.99, "images": 359}])
    page_of(*runs, *unknown, output=tmp_path / "page.html")
    strong = re.findall(r'"number strong">([\d.]+) %', (tmp_path / "page.html").read_text())
    assert [each for each in strong if each != "62.50"] == ["60.00", "40.00"]


def test_runs_that_generate_images_have_bits_per_dimension(tmp_path):
    runs = []
    for name, task, losses in (("one", "generate", [3.0, 2.25, 2.5]), ("two", "generate", [2.0]),
                               ("other", "classification", [4.0])):  # fmt: skip
        run = write_run(tmp_path / name, config={"data": {"task": task}}, status=None)
        lines = [{"kind": "epoch", "step": i, "epoch": i, "val_loss": loss, "val_accuracy": None}
                 for i, loss in enumerate(losses, 1)]  # fmt: skip
        write_lines(run, [*lines, {"kind": "test", "accuracy": None, "loss": min(losses) / 2}])
        runs.append(read_run(run, name))
    table = results(runs)
    place = table.columns.index("test bits/dim")
    cells = [row[place] for row in table.rows]
    assert [cell.text for cell in cells] == ["1.1250", "1.0000", ""]
    assert [cell.strong for cell in cells] == [False, True, False]
    assert "test accuracy" not in table.columns
    units = [curves_of(chosen)[0].y_name for chosen in (runs[:2], runs[2:], runs)]
    known = ["bits per dimension", "nats per image"]
    assert units == [*known, ", or ".join(known[::-1])]


# Classes


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3)).astype(np.uint8)


def test_each_class_has_its_row_in_a_matrix_its_accuracy_and_its_mistakes(tmp_path):
    run = write_run(tmp_path / "mine", epochs=0)
    wrong = [(0, 1, 0.0012, 0.9876, "a/1.png", picture(400, 600)), (2, 0, 0.25, 0.5, None, None)]
    write_classes(run, COUNTS, names=NAMES, mistakes=wrong)
    page = page_of(run, output=tmp_path / "page.html", images=12)
    text = (tmp_path / "page.html").read_text()
    assert rows_under(page, "class")[1:4] == [
        ["ape", "5", "2", "", "7"],
        ["bear", "", "3", "", "3"],
        ["a cat of a long name", "1", "", "1", "2"],
    ]
    assert "9 of 12 test images are right, with the weights of epoch 2" in page.text
    assert 'title="ape, taken for bear: 2 of 7"' in text
    roots = [("hit", 5 / 7), ("miss", 2 / 7), ("hit", 1), ("miss", 1 / 2), ("hit", 1 / 2)]
    depths = re.findall(r'class="(hit|miss)" style="--depth:(\d+)%"', text)
    assert depths == [(kind, str(round(100 * share**0.5))) for kind, share in roots]
    assert rows_under_head(page, ["class", "test images", "mine", *OF_ONE])[:3] == [
        ["ape", "7", "71.43 %", "83.33 %", "bear (2)"],
        ["bear", "3", "100.00 %", "60.00 %", ""],
        ["a cat of a long name", "2", "50.00 %", "100.00 %", "ape (1)"],
    ]
    for part in ("ape (0.1 %) ✗ bear (98.8 %)", "of a long name (25.0 %) ✗ ape (50.0 %)"):
        assert part in page.text
    assert "a/1.png 400 x 600 px" in page.text and "The image could not be kept" in page.text
    assert text.count('<img src="data:image/jpeg') == 1
    assert "img" not in page_of(run, output=tmp_path / "page.html").tags


def test_runs_of_the_same_images_share_a_table_of_classes(tmp_path):
    runs = [write_run(tmp_path / name, epochs=0) for name in ("one", "two", "other")]
    write_classes(runs[0], COUNTS, names=NAMES)
    write_classes(runs[1], [[6, 1, 0], [1, 2, 0], [1, 0, 1]], names=NAMES)
    write_classes(runs[2], [[6, 2, 0], *COUNTS[1:]], names=NAMES)
    page = page_of(*runs, output=tmp_path / "page.html")
    assert rows_under_head(page, ["class", "test images", "one", "two"])[0] == [
        "ape",
        "7",
        "71.43 %",
        "85.71 %",
    ]
    assert ["ape", "8", "75.00 %", "85.71 %", "bear (2)"] in page.rows


def test_many_classes_have_their_most_frequent_mistakes_in_place_of_a_matrix(tmp_path):
    classes, run = MOST_IN_MATRIX + 1, write_run(tmp_path / "mine", epochs=0)
    draw = np.random.default_rng(0)
    counts = np.diag(draw.integers(40, 60, classes))
    for pair in draw.integers(0, classes, (6 * classes, 2)):
        counts[tuple(pair)] += 1
    counts[0, 1], counts[1] = 33, 0
    write_classes(run, counts[:-1, :-1].tolist())
    page_of(run, output=tmp_path / "page.html")
    assert "colspan" in (tmp_path / "page.html").read_text()
    write_classes(run, counts.tolist())
    page = page_of(run, output=tmp_path / "page.html")
    assert "colspan" not in (tmp_path / "page.html").read_text()
    pairs = rows_under_head(page, ["class", "taken for", "times", "of its images"])[:20]
    made = sorted(counts[~np.eye(classes, dtype=bool)].tolist(), reverse=True)
    assert [int(row[2]) for row in pairs] == made[:20]
    assert pairs[0] == ["0", "1", "33", f"{3300 / counts[0].sum():.2f} %"]
    rows = rows_under_head(page, ["class", "test images", "mine", *OF_ONE])[:classes]
    shares = [float(row[2].rstrip(" %")) for row in rows[:-1]]
    assert shares == sorted(shares) and rows[-1][:3] == ["1", "0", ""]  # a class without images


def test_a_page_has_a_bounded_number_of_pictures(tmp_path):
    folder = write_run(tmp_path / "run", epochs=0)
    wrong = [(0, 1, 0.1, 0.9, None, picture(8, 8, i)) for i in range(12)]
    write_classes(folder, COUNTS, mistakes=wrong)
    runs = [read_run(folder, "run")]
    for count, images, each in ((1, 12, 12), (3, 12, 8), (7, 12, 3), (70, 12, 1), (1, 5, 5)):
        found = classes_of(runs * count, images)
        assert [len(one.mistakes) for one in found] == [each] * count
        assert count * each <= max(count, MOST_PICTURES)


def test_the_test_images_come_first_and_figures_of_other_weights_are_left_out(tmp_path):
    run = write_run(tmp_path / "mine")  # whose best epoch is 2
    splits = []
    for split, epoch in (("validation", 2), ("test", 1), ("test", 2), ("validation", 3)):
        write_classes(run, COUNTS, split=split, epoch=epoch)
        splits.append(read_run(run, "mine").by_class.split)
    assert splits == ["validation", "validation", "test", "test"]
    write_classes(run, COUNTS, split="test", epoch=3)
    assert read_run(run, "mine").by_class is None


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
    inner = re.sub(r"base64,[\w+/=]*", "", text).replace(str(tmp_path), "")
    assert not re.search(r"https?:|//|@import", inner)
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
    assert [value for tag, key, value in page.attributes if (tag, key) == ("a", "href")] == [
        "1-a.png"
    ]
    assert ",AAAA" in text and ",BB" in text and "default-src 'none'" in text


def test_a_page_that_exists_is_replaced_on_request_alone(main, tmp_path, capsys):
    run = write_run(tmp_path / "mine", epochs=1)
    place = run / "report.html"
    place.write_text("mine")
    assert main([str(run), "--images", "0"]) == 2
    assert capsys.readouterr().err == f"error: {place} exists; --overwrite replaces it\n"
    assert place.read_text() == "mine"
    assert main([str(run), "--images", "0", "--overwrite"]) == 0
    assert capsys.readouterr().out.startswith(f"{place}: runs 1, sweeps and profiles 0; 0.")
    assert "<h1>mine</h1>" in place.read_text() and not unfinished(run)


# Rows of sweeps and profiles


MEASURED = {"measure_device": "cuda", "measure_amp": "none", "measure_threads": 4}
MEASURED |= {"measure_batch": 16, "measure_rounds": 5, "measure_processor": "the card's host"}
MEASURED |= {"measure_torch": "2.7", "measure_commit": "beef", "train_commit": "cafe"}
LAST_CALL = dict(processor="a laptop", torch="2.99", commit="f00d", device="cpu, 9 threads")


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
    assert {"Accuracy", "Speed of inference", "Memory of training step"} <= set(page.texts)
    assert {"Head counts: heads", "Images of 32 px"} <= set(page.texts)
    assert "Curves and images" not in page.text  # no trainings beside it
    write_run(tmp_path / "heads" / "runs" / "one", epochs=0)
    page = page_of(tmp_path / "heads", output=tmp_path / "page.html")
    runs, output = (str(tmp_path / "heads" / name) for name in ("runs", "trainings.html"))
    assert f"visionattn report {runs}/*/ --output {output}" in page.texts


def test_a_sweep_says_what_it_was_measured_on_and_not_where_its_tables_were_written(tmp_path):
    about = LAST_CALL | MEASURED | {"trained_form": "efficient"}
    rows = [row | about | {"measured": f"2031-05-0{1 + row['seed']}"} for row in sweep_rows()]
    page = page_of_rows(tmp_path, rows)
    # A form that was not trained has no accuracy of its own.
    assert [row[6] for row in page.rows[1:]] == ["", "", "83 ± 2.8", "83 ± 2.8"]
    same = (
        "trained form efficient, batch 16, mixed precision none, device cuda, threads 4, rounds 5"
    )
    assert same in page.text and "images per second, batch 16" in page.texts
    assert all(part in page.text for part in ("the card's host", "2.7", "beef", "cafe"))
    assert "2031-05-01; 2031-05-02" in page.text
    assert not any(part in page.text for part in ("a laptop", "2.99", "f00d", "9 threads"))
    empty = ("inference", "training", "measure")
    rows = [{k: "" if k.startswith(empty) else v for k, v in row.items()} for row in sweep_rows()]
    page = page_of_rows(tmp_path, rows)
    assert page.rows[0][6:] == ["test accuracy in %", "parameters", "GFLOP", "status", "reason"]


def test_the_rows_of_a_memory_profile_have_their_conditions_above(tmp_path):
    rows = [row | {"batch": 3, "depth": 2, "budget_bytes": 5 * 2**30} for row in memory_rows()]
    page = page_of_rows(tmp_path, rows)
    same = "pass inference, precision float32, form auto, checkpointing no, batch 3, blocks 2"
    assert f"{same}, budget, GiB 5." in page.text and page.tags.count("figure") == 2
    assert page.row("scaleformer_vit_t") == ["512", "1,024", "1,324", "1,024", "22", "1", "ok"]
    assert page.rows[-1] == ["vit_tiny_patch16_224+eager", "1,024", "4,096", "", "", "", "1.97",
                             "out of memory"]  # fmt: skip
    mixed = [row | {"batch": 1 + i % 2} for i, row in enumerate(rows)]
    mixed[0] |= {"px": 0, "above_bytes": -5, "peak_bytes": "1e308", "growth_exponent": "1e400"}
    page = page_of_rows(tmp_path, mixed)
    assert page.rows[0][:4] == ["model", "px", "tokens", "batch"] and page.rows[1][3] == "1"


def test_the_largest_images_of_a_profile_are_a_table(tmp_path):
    same = {"pass": "training_step", "form": "auto", "batch": 1, "budget_bytes": 2**31}
    fits = same | dict(model="scaleformer_vit_t", largest_px=3072, tokens=36_864, too_large_px=3088)
    fits |= {"peak_bytes": 1500 * 2**20, "status": "ok"}
    none = fits | dict(largest_px="", tokens="", peak_bytes="", status="nothing fits")
    page = page_of_rows(tmp_path, [fits, none], "largest.csv")
    assert page.rows == [
        ["model", "largest px", "tokens", "peak, MiB", "too large px", "status"],
        ["scaleformer_vit_t", "3,072", "36,864", "1,500", "3,088", "ok"],
        ["scaleformer_vit_t", "", "", "", "3,088", "nothing fits"],
    ]
    assert "pass training_step, form auto, batch 1, budget, GiB 2" in page.text


# How it ends


BAD_INPUT = {
    "": "name what to show: folders of runs or sweeps",
    "nowhere": "no run and no sweep at nowhere",
    "empty": "empty is no run (config.yaml), no sweep that has ended (cells.csv) and no CSV file",
    ".": "name the runs within it, e.g. run",
    "run/metrics.jsonl": "no CSV file of a sweep or a memory profile; name other folders",
    "run --output nowhere/a.html": "nowhere for a.html",
    "run --output empty": "empty cannot be written",
    "run --output page.pdf": "output page.pdf: a page is HTML; end its name in .html",
    "run --images -1": "images must be from 0 to 100, got -1",
    "run --runs run": "what stands first is --runs, which is given too",
    "run --titel a": "unknown option --titel; the nearest is --title",
}


@pytest.mark.parametrize("flags", BAD_INPUT)
def test_bad_input_ends_with_one_line_and_code_2(main, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", epochs=1)
    Path("empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(flags.split()) == 2
    assert_one_error(capsys, BAD_INPUT[flags])
    assert sorted(tmp_path.rglob("*")) == before
