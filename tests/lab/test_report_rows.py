"""Sweeps and memory profiles on the page of ``visionattn report``: what their numbers are of, and
where they come from.
"""

import shlex

from tests.helpers.report_folders import Page, memory_rows, sweep_rows, write_rows
from visionattn.lab.report.page import report

MEASURED = {"measure_device": "cuda", "measure_amp": "none", "measure_threads": 4}
MEASURED |= {"measure_batch": 16, "measure_rounds": 5, "measure_processor": "the card's host"}
MEASURED |= {"measure_torch": "2.7", "measure_commit": "beef", "train_commit": "cafe"}
LAST_CALL = dict(processor="a laptop", torch="2.99", commit="f00d", device="cpu, 9 threads")
LAST_CALL |= dict(date="2031-05-06", command="visionattn sweep --measure false")


def page_of(path, tmp_path):
    report([str(path), "--output", str(tmp_path / "page.html"), "--images", "0", "--overwrite"])
    return Page((tmp_path / "page.html").read_text())


def test_the_rows_of_a_sweep_become_means_over_seeds(tmp_path):
    page = page_of(write_rows(tmp_path / "heads" / "cells.csv", sweep_rows()), tmp_path)
    first, second, *rest = page.rows[1:]
    assert first[:6] == ["taylorshift", "direct", "32", "4", "64", "1,024"]
    assert first[6:] == ["83 ± 2.8", "123,456", "2.5", "400", "4", "100", "12",
                         "taylorshift direct", "finished", ""]  # fmt: skip
    assert second[6] == "81 (1 of 2)" and second[11:13] == ["out of memory"] * 2
    assert second[-2:] == ["finished, not finite", "the loss was not finite"]
    assert [row[1:4] for row in rest] == [["efficient", "32", heads] for heads in "48"]
    assert {"Accuracy", "Speed of inference", "Memory of training step"} <= set(page.texts)
    assert "Head counts: heads" in page.texts and "Images of 32 px" in page.texts


def test_a_sweep_says_what_it_was_measured_on_and_not_where_its_tables_were_written(tmp_path):
    about = LAST_CALL | MEASURED | {"trained_form": "efficient"}
    rows = [row | about | {"measured": f"2031-05-0{1 + row['seed']}"} for row in sweep_rows()]
    page = page_of(write_rows(tmp_path / "cells.csv", rows), tmp_path)
    # A form that was not trained has no accuracy of its own.
    assert [row[6] for row in page.rows[1:]] == ["", "", "83 ± 2.8", "83 ± 2.8"]
    same = (
        "trained form efficient, batch 16, mixed precision none, device cuda, threads 4, rounds 5"
    )
    assert same in page.text and "images per second, batch 16" in page.texts
    for part in ("the card's host", "2.7", "beef", "cafe", "2031-05-01; 2031-05-02", "2031-05-06"):
        assert part in page.text, part
    for part in ("a laptop", "2.99", "f00d", "9 threads"):
        assert part not in page.text, part
    mixed = [row | {"measure_batch": 2 * row["heads"]} for row in rows]
    page = page_of(write_rows(tmp_path / "cells.csv", mixed), tmp_path)
    place = page.rows[0].index("batch")
    assert [row[place] for row in page.rows[1:3]] == ["8", "16"] and "batch 8" not in page.text


def test_a_sweep_that_measured_nothing_has_no_columns_for_it(tmp_path):
    empty = ("inference", "training")
    rows = [{k: "" if k.startswith(empty) else v for k, v in row.items()} for row in sweep_rows()]
    page = page_of(write_rows(tmp_path / "cells.csv", rows), tmp_path)
    assert page.rows[0][6:] == ["test accuracy in %", "parameters", "GFLOP", "status", "reason"]
    assert page.tags.count("figure") == 2


def test_a_sweep_says_how_to_see_the_curves_and_images_of_its_trainings(tmp_path):
    folder = tmp_path / "my heads"
    write_rows(folder / "cells.csv", sweep_rows())
    assert "Curves and images" not in page_of(folder, tmp_path).text  # no trainings beside it
    (folder / "runs" / "one").mkdir(parents=True)
    (folder / "runs" / "one" / "config.yaml").write_text("epochs: 1\n")
    said = [text for text in page_of(folder, tmp_path).texts if text.startswith("visionattn rep")]
    runs, output = (shlex.quote(str(folder / name)) for name in ("runs", "trainings.html"))
    assert said == [f"visionattn report {runs}/*/ --output {output}"]


def test_the_rows_of_a_memory_profile_have_their_conditions_above(tmp_path):
    rows = [row | {"batch": 3, "depth": 2, "budget_bytes": 5 * 2**30} for row in memory_rows()]
    page = page_of(write_rows(tmp_path / "memory.csv", rows), tmp_path)
    same = "pass inference, precision float32, form auto, checkpointing no, batch 3, blocks 2"
    assert f"{same}, budget, GiB 5." in page.text and page.tags.count("figure") == 2
    assert page.row("scaleformer_vit_t") == ["512", "1,024", "1,324", "1,024", "22", "1", "ok"]
    assert page.rows[-1] == ["vit_tiny_patch16_224+eager", "1,024", "4,096", "", "", "", "1.97",
                             "out of memory"]  # fmt: skip
    assert any("tokens¹·⁰⁰" in text for text in page.texts)
    mixed = [row | {"batch": 1 + i % 2} for i, row in enumerate(rows)]
    mixed[0] |= {"px": 0, "above_bytes": -5, "peak_bytes": "1e308", "growth_exponent": "1e400"}
    page = page_of(write_rows(tmp_path / "memory.csv", mixed), tmp_path)
    assert page.rows[0][:4] == ["model", "px", "tokens", "batch"] and page.rows[1][3] == "1"


def test_the_largest_images_of_a_profile_are_a_table(tmp_path):
    same = {"pass": "training_step", "form": "auto", "batch": 1, "budget_bytes": 2**31}
    fits = same | dict(model="scaleformer_vit_t", largest_px=3072, tokens=36_864, too_large_px=3088)
    fits |= {"peak_bytes": 1500 * 2**20, "status": "ok"}
    none = fits | dict(model="vit_tiny_patch16_224", largest_px="", tokens="", peak_bytes="")
    none |= {"status": "nothing fits", "too_large_px": 16}
    page = page_of(write_rows(tmp_path / "largest.csv", [fits, none]), tmp_path)
    assert page.rows == [
        ["model", "largest px", "tokens", "peak, MiB", "too large px", "status"],
        ["scaleformer_vit_t", "3,072", "36,864", "1,500", "3,088", "ok"],
        ["vit_tiny_patch16_224", "", "", "", "16", "nothing fits"],
    ]
    assert "pass training_step, form auto, batch 1, budget, GiB 2" in page.text
    assert "Largest images: largest" in page.texts
