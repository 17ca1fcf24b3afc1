"""Sweeps and memory profiles on the page of ``tools/report.py``: what their numbers are of, and
where they come from.
"""

import shlex

import pytest

from tests.helpers.report_folders import Page, memory_rows, sweep_rows, write_rows
from visionattn.lab.figures import heads_of
from visionattn.lab.report.page import report

MEASURED = {
    "measure_device": "cuda",
    "measure_amp": "none",
    "measure_threads": 4,
    "measure_batch": 16,
    "measure_rounds": 5,
}
MEASURED |= {
    "measure_commit": "beef",
    "measure_torch": "2.7",
    "measure_processor": "the card's host",
    "measure_load": 0.5,
}
LAST_CALL = dict(
    processor="a laptop", torch="2.99", commit="f00d", device="cpu, 9 threads", threads=9
)
LAST_CALL |= dict(
    date="2031-05-06", command="python tools/sweep_heads.py --measure false", sweep_seconds=77.5
)


def page_of(path, tmp_path):
    report([str(path), "--output", str(tmp_path / "page.html"), "--images", "0"])
    return Page((tmp_path / "page.html").read_text())


def shared_rows():
    """A sweep whose networks were trained in the efficient form alone: both forms repeat what came
    of that training.
    """
    efficient = [row for row in sweep_rows() if row["form"] == "efficient"]
    came = ("seed", "status", "reason", "test_accuracy")
    trained = {(row["heads"], row["seed"]): {key: row[key] for key in came} for row in efficient}
    about = LAST_CALL | MEASURED | {"trained_form": "efficient", "train_commit": "cafe"}
    rows = [row | trained[row["heads"], row["seed"]] | about for row in sweep_rows()]
    return [row | {"measured": f"2031-05-0{1 + row['seed']}"} for row in rows]


def test_an_accuracy_stands_with_the_form_that_was_trained_alone(tmp_path):
    page = page_of(write_rows(tmp_path / "heads" / "cells.csv", shared_rows()), tmp_path)
    direct, efficient = (
        [row for row in page.rows if row[0] == f"taylorshift {form}"]
        for form in ("direct", "efficient")
    )
    assert [row[4:6] for row in direct] == [["trained efficient", ""]] * 2
    assert [row[-1] for row in direct] == ["", ""]
    assert [row[4:6] for row in efficient] == [["83.0 ± 2.8", "2"]] * 2
    assert efficient[0][-1] == "finished"
    assert "taylorshift: 83 ± 2.828 at 4" in page.titles
    assert not any(title.startswith("taylorshift direct: 83") for title in page.titles)
    assert "Accuracy (trained in the efficient form)" in page.texts
    assert "trained in the efficient form" in page.text and "cafe" in page.text


def test_a_sweep_says_where_and_how_it_was_measured_and_not_where_its_tables_were_written(tmp_path):
    page = page_of(write_rows(tmp_path / "heads" / "cells.csv", shared_rows()), tmp_path)
    for part in (
        "the card's host",
        "2.7",
        "beef",
        "batch 16",
        "4 threads",
        "5 rounds",
        "cuda",
        "no mixed precision",
    ):
        assert part in page.text, part
    assert "2031-05-01 to 2031-05-02" in page.text and "--measure false" in page.text
    assert "2031-05-06" in page.text
    for part in ("a laptop", "2.99", "f00d", "9 threads"):
        assert part not in page.text, part
    assert "images per second, batch 16" in page.texts


def test_what_measurements_of_a_sweep_do_not_share_is_a_column(tmp_path):
    rows = [row | {"measure_batch": 2 * row["heads"]} for row in shared_rows()]
    page = page_of(write_rows(tmp_path / "heads" / "cells.csv", rows), tmp_path)
    heading = next(row for row in page.rows if row[0] == "attention")
    place = heading.index("batch")
    assert [row[place] for row in page.rows if row[0] == "taylorshift direct"] == ["8", "16"]
    assert "images per second" in page.texts and "batch 8" not in page.text


def test_a_sweep_that_measured_nothing_says_so_in_place_of_empty_columns(tmp_path):
    rows = [
        {
            key: "" if key.startswith(("inference", "training")) else value
            for key, value in row.items()
        }
        for row in sweep_rows()
    ]
    page = page_of(write_rows(tmp_path / "heads" / "cells.csv", rows), tmp_path)
    columns = [
        "attention",
        "px",
        "heads",
        "head width",
        "test accuracy in %",
        "seeds",
        "parameters",
        "GFLOP",
        "status",
    ]
    assert page.rows[0] == columns and page.row("taylorshift direct")[3:5] == ["83.0 ± 2.8", "2"]
    assert "speed and memory not measured" in page.text


def test_a_sweep_says_how_to_see_the_curves_and_images_of_its_trainings(tmp_path):
    folder = tmp_path / "my heads"
    write_rows(folder / "cells.csv", sweep_rows())
    assert "Curves and images" not in page_of(folder, tmp_path).text  # no trainings beside it
    for name in ("one", "two"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "config.yaml").write_text("epochs: 1\n")
        (folder / "runs" / f"{name}.log").write_text("")
    (tmp_path / "page.html").unlink()
    page = page_of(folder, tmp_path)
    said = next(text for text in page.texts if text.startswith("visionattn report"))
    runs, output = (shlex.quote(str(folder / name)) for name in ("runs", "trainings.html"))
    assert said == f"visionattn report {runs}/*/ --output {output}"
    assert "images of its 2 trainings" in page.text


def test_what_the_rows_of_a_profile_share_stands_above_them(tmp_path):
    rows = [row | {"batch": 3, "depth": 2, "budget_bytes": 5 * 2**30} for row in memory_rows()]
    rows[3] |= {"form": ""}  # another's model has no forms
    page = page_of(write_rows(tmp_path / "memory.csv", rows), tmp_path)
    assert (
        "inference, float32, form auto, no checkpointing, batch 3, 2 blocks, budget 5 GiB"
        in page.text
    )
    mixed = [row | {"batch": 1 + i % 2, "depth": ""} for i, row in enumerate(rows)]
    (tmp_path / "page.html").unlink()
    page = page_of(write_rows(tmp_path / "memory.csv", mixed), tmp_path)
    assert page.rows[0][:4] == ["model", "px", "tokens", "batch"] and page.rows[1][3] == "1"
    assert "inference, float32, form auto, no checkpointing, all blocks, budget 5 GiB" in page.text


def largest_rows():
    same = {
        "pass": "training_step",
        "precision": "amp_bf16",
        "form": "auto",
        "checkpointing": "yes",
        "batch": 1,
        "depth": "",
    }
    fits = same | dict(model="scaleformer_vit_t", largest_px=3072, tokens=36_864, too_large_px=3088)
    fits |= {"peak_bytes": 1500 * 2**20, "status": "ok", "budget_bytes": 2**31}
    none = fits | dict(
        model="vit_tiny_patch16_224", largest_px="", tokens="", peak_bytes="", too_large_px=16
    )
    return [fits, none | {"status": "nothing fits"}]


def test_the_largest_images_of_a_profile_are_a_table(tmp_path, capsys):
    path = write_rows(tmp_path / "largest.csv", largest_rows())
    assert ": 1 table of largest images; " in report(
        [str(path), "--output", str(tmp_path / "page.html")]
    )
    page = Page((tmp_path / "page.html").read_text())
    assert page.rows[0] == ["model", "largest px", "tokens", "peak, MiB", "too large px", "status"]
    assert page.row("scaleformer_vit_t") == ["3,072", "36,864", "1,500", "3,088", "ok"]
    assert page.row("vit_tiny_patch16_224") == ["", "", "", "16", "nothing fits"]
    assert (
        "training_step, amp_bf16, form auto, checkpointing, batch 1, all blocks, budget 2 GiB"
        in page.text
    )
    assert "Largest images: largest" in page.texts


@pytest.mark.parametrize("column", ["img_size", "heads"])
def test_rows_of_a_sweep_that_name_no_size_are_left_out_of_its_charts(column):
    rows = [{key: str(value) for key, value in row.items()} for row in sweep_rows()]
    charts = heads_of([*rows, rows[0] | {column: "", "test_accuracy": "0.01"}], "32")
    accuracy = charts[0].series[0]
    assert list(accuracy.x) == [4, 8] and min(accuracy.y) > 80
