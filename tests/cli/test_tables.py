"""Tables and targets: arithmetic on known numbers, and small runs. No test looks at a
time.
"""

import csv
import json
from dataclasses import replace

import pytest
import torch

import visionattn.lab.targets as targets
from tests.helpers.tools import words
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import (
    csv_text,
    duration,
    json_text,
    markdown,
    read_rows,
    write_rows,
)
from visionattn.lab import target_table
from visionattn.lab.cases import Case
from visionattn.lab.compare import Plan, Quartiles, Row, cells_of, record_of
from visionattn.lab.memory import build
from visionattn.lab.targets import measure_targets

PLAN = Plan(rounds=2, max_rounds=2, seconds=0)


def row_of(name="sdpa", tokens=77, seconds=0.002, form="auto", width=8, **more):
    case = Case("operation", name, tokens, width, form=form, heads=3)
    return Row(
        case,
        seconds=seconds and Quartiles(seconds / 2, seconds, seconds * 2),
        samples=[seconds] * 3,
        **more,
    )


def test_rows_as_cells_values_csv_and_json_say_the_same():
    ready = row_of(
        peak_bytes=3 << 20, flops=1_500_000, ratio=Quartiles(0.5, 0.75, 1.0), baseline="eager"
    )
    full = Row(Case("model", "scaleformer_vit_t", 64), status="out of memory")
    records, provenance = [record_of(ready), record_of(full)], {"device": "cpu", "commit": None}
    assert cells_of(ready)["time"] == "2 ms" and cells_of(ready)["ratio"] == "0.75 (0.5-1)"
    assert cells_of(ready)["peak"] == "3 MiB" and cells_of(ready)["GFLOP"] == "0.0015"
    assert (cells_of(full)["status"], cells_of(full)["time"], cells_of(full)["heads"]) == (
        "out of memory",
        None,
        None,
    )
    read = list(csv.DictReader(csv_text(records, provenance).splitlines()))
    assert [line["status"] for line in read] == ["ok", "out of memory"]
    assert read[1]["seconds_median"] == ""
    assert float(read[0]["seconds_high"]) == 0.004
    assert read[0]["device"] == read[1]["device"] == "cpu"
    assert json.loads(json_text(records, provenance)) == {"provenance": provenance, "rows": records}


def test_durations_have_a_unit_that_suits_them():
    assert [duration(s) for s in (2.5, 0.0025, 0.00025)] == ["2.5 s", "2.5 ms", "250 us"]


def test_columns_without_values_are_left_out():
    assert markdown([{"a": 1, "b": None, "c": 0}, {"a": 2, "b": None, "c": None}]).splitlines() == [
        "| a | c |",
        "|---|---|",
        "| 1 | 0 |",
        "| 2 |  |",
    ]


def test_provenance_says_what_a_number_depends_on():
    found = provenance_of("cpu", ["benchmark", "operations", "sdpa", "--csv", "my file"])
    assert found["command"] == "visionattn benchmark operations sdpa --csv 'my file'"
    assert found["threads"] == torch.get_num_threads() and found["torch"] == torch.__version__
    assert {"device", "processor", "commit", "date", "load"} <= set(found)


def test_every_figure_to_reach_is_in_the_table_with_its_bound():
    bounds = {f"{target.what}, {target.at}": target.reach for target in target_table.targets()}
    assert len(bounds) == len(target_table.targets()) == 37
    shift = "efficient TaylorShift forward"
    for width, short, long, both in (
        (16, "0.18", "0.05", "0.25"),
        (32, "0.38", "0.12", "0.4"),
        (64, "1", "0.28", "1"),
    ):
        assert bounds[f"{shift} / SDPA, N = 4096, d = {width}"] == short
        assert bounds[f"{shift} / SDPA, N = 16384, d = {width}"] == long
        assert bounds[f"{shift}+backward / SDPA's, N = 4096, d = {width}"] == both
    for pixels, ours, shifted in ((1024, "0.47", "0.7"), (2048, "0.16", "0.24")):
        assert bounds[f"scaleformer_vit_s forward / vit_small_patch16_224, {pixels} px"] == ours
        assert (
            bounds[f"scaleformer_vit_s forward / scaleformer_vit_s+identity, {pixels} px"] == "1.3"
        )
        assert bounds[f"taylorshift_vit_s forward / vit_small_patch16_224, {pixels} px"] == shifted
    assert sum(reach == "1.8 to 2.1" for reach in bounds.values()) == 14
    for case in (target.case for target in target_table.targets()):
        assert (case.batch, case.dtype, case.heads) == (1, "float32", 6)


def test_figures_are_chosen_by_a_pattern():
    assert {target.at for target in target_table.choose("identity.*2048 px")} == {"2048 px"}
    assert [target.case.form for target in target_table.choose("DIRECT")] == ["direct"]
    assert len(target_table.choose(None)) == len(target_table.targets())
    with pytest.raises(ValueError, match="fits none"):
        target_table.choose("nothing of this name")
    with pytest.raises(ValueError, match="no regular expression"):
        target_table.choose("(")


def tiny(name, *, base="sdpa", tokens=77, high=1.0, low=0.0, measure=None, form="efficient"):
    case = Case("operation", name, tokens, 8, form=form, heads=3, backward=measure is not None)
    baseline = None if measure else Case("operation", base, tokens, 8, heads=3)
    given = dict(low=low, high=high, measure=measure)
    return target_table.make_target(name, f"N = {tokens}", case, baseline, **given)


def test_ratios_of_one_size_come_from_one_run_and_are_judged_by_their_bounds(monkeypatch):
    runs = []

    def measure(cases, plan, baseline=None):
        runs.append([case.label for case in cases])
        seconds = {"sdpa": 4.0, "kernelized efficient": 1.0, "taylorshift efficient": 6.0}
        return [
            Row(case, samples=[seconds[case.label]] * 2, seconds=Quartiles(1, 1, 1))
            for case in cases
        ]

    monkeypatch.setattr(targets, "measure_together", measure)
    wanted = [
        tiny("kernelized"),
        tiny("kernelized", tokens=45, high=None),
        tiny("taylorshift", high=1.4),
    ]
    results = list(measure_targets(wanted, PLAN))
    assert runs == [
        ["sdpa", "kernelized efficient", "taylorshift efficient"],
        ["sdpa", "kernelized efficient"],
    ]
    assert [(result.value, result.record()["met"]) for result in results] == [
        (0.25, "yes"),
        (1.5, "no"),
        (0.25, "-"),
    ]


@pytest.mark.parametrize("has", [True, False])
def test_models_run_in_bfloat16_too_where_the_processor_multiplies_it(monkeypatch, has):
    monkeypatch.setattr(targets, "has_bfloat16_products", lambda: has)
    wanted = [*target_table.choose("scaleformer_vit_s forward / vit.*1024"), tiny("kernelized")]
    seconds = {("scaleformer_vit_s", "float32"): 2.0, ("scaleformer_vit_s", "bfloat16"): 0.25}

    def measure(cases, plan, baseline=None):
        samples = {case: seconds.get((case.name, case.dtype), 1.0) for case in cases}
        return [Row(case, samples=[s], seconds=Quartiles(s, s, s)) for case, s in samples.items()]

    monkeypatch.setattr(targets, "measure_together", measure)
    model, operation = measure_targets(wanted, PLAN)
    assert model.value == 2 and operation.bfloat16 is None
    found = model.record()["bfloat16"], model.cells()[6]
    assert found == ((0.25, "0.25 (0.25-0.25)") if has else (targets.NO_PRODUCTS,) * 2)


def test_whole_models_at_2048_pixels_take_three_rounds(monkeypatch):
    rounds = {}

    def measure(cases, plan, baseline=None):
        rounds[cases[0].kind, cases[0].size] = (
            plan.rounds,
            plan.max_rounds,
            plan.check,
            plan.memory,
        )
        return [Row(case, samples=[1.0], seconds=Quartiles(1, 1, 1)) for case in cases]

    monkeypatch.setattr(targets, "measure_together", measure)
    list(measure_targets(target_table.choose("px|N = 16384"), Plan(rounds=5, max_rounds=30)))
    assert rounds["model", 2048] == (3, 5, True, False)
    assert rounds["model", 1024] == (5, 5, True, False)
    assert rounds["operation", 16384] == (5, 30, True, False)
    list(measure_targets(target_table.choose("2048 px"), Plan(rounds=7, max_rounds=30), few=False))
    assert rounds["model", 2048] == (7, 30, True, False)


def test_figures_are_measured_and_what_cannot_be_says_why(monkeypatch):
    def fail(case):
        raise torch.OutOfMemoryError("full")

    def exhausted(case):
        raise MemoryError

    def absent(case):
        raise NotImplementedError("later")

    wanted = [
        tiny("kernelized", high=1e9),
        tiny("taylorshift", measure=targets.growth_of_bytes_kept, low=1.8, high=2.1),
    ]
    wanted += [tiny("taylorshift", measure=way) for way in (fail, exhausted, absent)]
    results = list(measure_targets(wanted, PLAN))
    assert [result.met for result in results] == [
        "yes",
        "yes",
        "out of memory",
        "out of memory",
        "not built: later",
    ]
    assert results[0].rounds == 2 and results[0].cells()[-1] == 2
    assert results[1].record()["measured"] == pytest.approx(2, abs=0.2)


def test_a_target_whose_operation_is_wrong_says_so(monkeypatch):
    import visionattn.ops as ops

    monkeypatch.setitem(ops.OPERATIONS, "kernelized", lambda q, k, v, **options: v)
    (ratio,) = measure_targets([tiny("kernelized")], PLAN)
    (figure,) = measure_targets([tiny("kernelized", measure=targets.growth_of_bytes_kept)], PLAN)
    assert ratio.met.startswith("wrong: out differs") and figure.met.startswith("wrong: ")
    assert ratio.record()["measured"] is None and ratio.cells()[3] is None


def test_memory_is_related_to_the_inputs_after_the_output_is_taken_off(monkeypatch):
    case = Case("operation", "taylorshift", 77, 8, form="efficient", heads=3)
    one = 4 * 3 * 77 * 8
    monkeypatch.setattr(targets, "case_peak_bytes", lambda case: one + 6 * one)
    assert targets.memory_over_inputs(case) == 2.0


def test_every_linear_form_is_asked_how_its_memory_for_the_backward_pass_grows():
    kept = [target for target in target_table.choose("bytes kept")]
    named = {target.case.name for target in kept}
    for case in (target.case for target in kept):
        build(
            replace(case, size=77), "meta"
        ).forward()  # the name exists, and so does its efficient form
    positions = {
        f"{base}+{kind}"
        for base in ("taylorshift", "kernelized")
        for kind in ("joint", "axial", "flat")
    }
    assert named >= positions | set(
        words("kernelized+causal+flat kernelized+softmax kernelized+favor kernelized+relu")
    )


RISKY = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "'=1", "''-1", "-", "="]
HARMLESS = ["", "a=1", "'", "'quoted'", "''", " =1", "1-2", "cats/-1.png", "²"]


def test_no_text_of_a_table_begins_as_a_formula_and_programs_read_all_back(tmp_path):
    texts = RISKY + HARMLESS
    rows = [{"name": text, "number": -i - 0.5, "none": None} for i, text in enumerate(texts)]
    path = tmp_path / "rows.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        write_rows(file, ["name", "number", "none"], rows)
    with open(path, encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == len(texts)
    assert [row["number"] for row in cells] == [str(row["number"]) for row in rows]
    assert {row["none"] for row in cells} == {""}
    for text, row in zip(texts, cells, strict=True):
        assert row["name"][:1] not in tuple("=+-@\t\r\n＝")
        assert row["name"] == (f"'{text}" if text in RISKY else text)
    with open(path, encoding="utf-8", newline="") as file:
        assert [row["name"] for row in read_rows(file)] == texts


def test_the_tables_of_all_tools_have_no_formulas():
    written = csv_text([{"case": "=1+1", "seconds": -0.5}], {"command": "visionattn benchmark"})
    assert written == "case,seconds,command\n'=1+1,-0.5,visionattn benchmark\n"
