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
from visionattn.lab.report.runs import curves_of, read_run, same_data
from visionattn.lab.report.tables import results
from visionattn.lab.report.templates import look_page
from visionattn.models.weights import DataSpec

COUNTS = [[5, 2, 0], [0, 3, 0], [1, 0, 1]]
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


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "a: 2020-13-45", '{"status": ["x"]}'])
def test_files_that_are_damaged_are_named_and_the_rest_is_shown(tmp_path, text):
    names = ["metrics.jsonl", "status.json", "config.yaml", "test.json", "best.safetensors"]
    runs = [write_run(tmp_path / name.partition(".")[0], epochs=1) for name in names]
    for run, name in zip(runs, names, strict=True):
        (run / name).write_text(text + "\n")
    early = tmp_path / "early"
    early.mkdir()
    (early / "config.yaml").write_text("epochs: 9\n")
    (early / "status.json").mkdir()
    page = page_of(*runs, early, output=tmp_path / "page.html", images=1)
    for name in names[1:]:
        mapping = name == "config.yaml" and "{" in text[:1]
        assert f"{name} cannot be read" in page.text or mapping
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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {"data": {"img_size": 48}}, False),
        ({}, {"seed": 3}, False),
        ({}, {"data": {"task": "segmentation"}}, False),
        (folder("a/b"), folder("./a/b/"), True),
        (folder("a/b"), folder("a/c"), False),
        ({}, {"data": {"augment": "light", "aug": {"turn": 3.0}, "workers": 4}}, True),
        ({}, {"data": {"on_error": "fail", "img_size_choices": [24, 32]}}, True),
        ({}, {"optim": {"lr": 0.1}, "model": {"name": "taylorshift_vit_t"}}, True),
    ],
)
def test_runs_are_compared_where_their_images_are_the_same(tmp_path, one, other, same):
    runs = [write_run(tmp_path / str(i), config=each) for i, each in enumerate((one, other))]
    found = [same_data(read_run(run, run.name)) for run in runs]
    assert (found[0] == found[1]) == same and None not in found


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
    for name, losses in (("one", [3.0, 2.25, 2.5]), ("two", [3.0, 2.0]), ("other", [4.0])):
        config = {"data": {"task": "classification" if name == "other" else "generate"}}
        run = write_run(tmp_path / name, config=config, status=None)
        lines = [{"kind": "epoch", "step": i, "epoch": i, "val_loss": loss, "val_accuracy": None}
                 for i, loss in enumerate(losses, 1)]  # fmt: skip
        write_lines(run, [*lines, {"kind": "test", "accuracy": None, "loss": min(losses) / 2}])
        runs.append(read_run(run, name))
    table = results(runs)
    columns = zip(table.columns, *table.rows, strict=True)
    row = {name: [cell.text for cell in cells] for name, *cells in columns}
    assert row["test bits/dim"] == ["1.1250", "1.0000", ""]
    assert row["validation bits/dim"] == ["2.2500", "2.0000", ""]
    assert row["best epoch"] == ["2", "2", "1"] and "test accuracy" not in row
    strong = [each[table.columns.index("test bits/dim")].strong for each in table.rows]
    assert strong == [False, True, False]
    units = [curves_of(chosen)[0].y_name for chosen in (runs[:2], runs[2:], runs)]
    assert units == ["bits per dimension", "nats per image"] + [
        "nats per image, or bits per dimension"
    ]
    page_of(tmp_path / "one", output=tmp_path / "page.html", images=3)
    assert "Example images" not in (tmp_path / "page.html").read_text()


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
    head = ["class", "test images", "mine", "precision", "most often taken for"]
    assert page.rows[page.rows.index(head) + 1 :][:3] == [
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
    table = page.rows[page.rows.index(["class", "test images", "one", "two"]) :]
    assert table[1] == ["ape", "7", "71.43 %", "85.71 %"]
    assert ["ape", "8", "75.00 %", "85.71 %", "bear (2)"] in page.rows


@pytest.mark.parametrize("classes", [MOST_IN_MATRIX, MOST_IN_MATRIX + 1, 1000])
def test_many_classes_have_their_most_frequent_mistakes_in_place_of_a_matrix(tmp_path, classes):
    run = write_run(tmp_path / "mine", epochs=0)
    draw = np.random.default_rng(0)
    counts = np.diag(draw.integers(40, 60, classes))
    for pair in draw.integers(0, classes, (6 * classes, 2)):
        counts[tuple(pair)] += 1
    counts[0, 1], counts[1] = 33, 0
    write_classes(run, counts.tolist())
    page = page_of(run, output=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert len(text) < 1_500_000 and ("colspan" in text) == (classes <= MOST_IN_MATRIX)
    if classes > MOST_IN_MATRIX:
        pairs = page.rows[page.rows.index(["class", "taken for", "times", "of its images"]) :][1:21]
        made = sorted(counts[~np.eye(classes, dtype=bool)].tolist(), reverse=True)
        assert [int(row[2]) for row in pairs] == made[:20]
        assert pairs[0] == ["0", "1", "33", f"{3300 / counts[0].sum():.2f} %"]
        rows = [row for row in page.rows if len(row) == 5 and row[2].endswith("%")]
        shares = [float(row[2].rstrip(" %")) for row in rows]
        assert len(rows) == classes - 1 and shares == sorted(shares)
        last = [row for row in page.rows if len(row) == 5][-1]
        assert last[:3] == ["1", "0", ""]  # a class without images


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
    parts = [{"title": "<script>&", "lines": ["l"], "figures": [figure, figure | {"details": []}]}]
    text = look_page("T", parts)
    page = Page(text)
    assert "script" not in page.tags and "<script>&" in page.text and "b" not in page.tags
    links = [value for tag, key, value in page.attributes if (tag, key) == ("a", "href")]
    assert links == ["1-a.png"] * 2 and text.count("AAAA") == 2 and text.count(",BB") == 1
    assert "default-src 'none'" in text and "<h1>nothing</h1>" in look_page("nothing", [])


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


BAD_INPUT = {
    "": "name what to show: folders of runs or sweeps",
    "nowhere": "no run and no sweep at nowhere",
    "empty": "empty holds no run, no sweep and no memory profile; a run has config.yaml",
    ".": "name the runs within it, e.g. run",
    "half": "the sweep in half has written no cells.csv yet",
    "run/metrics.jsonl": "has neither the columns of a sweep nor those of a memory profile",
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
    for name in ("empty", "half"):
        Path(name).mkdir()
    Path("half/sweep.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    assert main(flags.split()) == 2
    assert_one_error(capsys, BAD_INPUT[flags])
    assert sorted(tmp_path.rglob("*")) == before
