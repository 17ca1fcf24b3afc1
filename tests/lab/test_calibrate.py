"""Calibration: fits find the seconds that made the times, and what is written is what
``choose_form`` reads.
"""

import json
import os

import pytest
import torch

from visionattn.lab import calibrate
from visionattn.lab.calibrate import (
    Row,
    Sizes,
    cases,
    cross_validate,
    fit,
    measure,
    non_negative_fit,
    predict,
)
from visionattn.ops import choice

SECONDS = {
    "taylorshift": {
        "direct": {"multiply_adds": 2e-11, "elements": 3e-10, "values": 1e-9, "calls": 2e-4},
        "efficient": dict(multiply_adds=1e-11, elements=5e-10, values=2e-9, calls=4e-4, rows=5e-6),
    },
    "kernelized": {
        "direct": {"multiply_adds": 2e-11, "elements": 3e-10, "values": 1e-9, "calls": 2e-4},
        "efficient": {"multiply_adds": 1e-11, "values": 2e-9, "calls": 3e-4},
    },
}


def made_of(operation, grid, seconds):
    """What would be measured if times were exactly linear in the work."""
    times = []
    for case in grid:
        by_form = {form: case.work(operation, form) for form in ("direct", "efficient")}
        times.append(
            (
                case,
                {
                    form: sum(n * seconds[form][kind] for kind, n in by_form[form].items())
                    for form in by_form
                },
            )
        )
    return times


@pytest.mark.parametrize("operation", ["taylorshift", "kernelized"])
def test_fit_finds_the_seconds_that_made_the_times(operation):
    found = fit(operation, made_of(operation, cases(), SECONDS[operation]))
    for form, seconds in SECONDS[operation].items():
        assert found[form] == pytest.approx(seconds, rel=1e-5)


def test_a_non_negative_fit_is_the_best_point_of_the_positive_quadrant():
    generator = torch.Generator().manual_seed(3)
    for rows, kinds in ((9, 2), (7, 3), (11, 5)):
        terms = torch.randn(rows, kinds, dtype=torch.float64, generator=generator)
        wanted = torch.randn(rows, dtype=torch.float64, generator=generator)
        found = non_negative_fit(terms, wanted)
        slope = terms.mT @ (terms @ found - wanted)
        # What Karush, Kuhn and Tucker ask for: no slope where x > 0, none downwards where x = 0.
        assert (found >= 0).all() and (slope > -1e-12).all() and (slope * found).abs().max() < 1e-12
    assert (found == 0).any() and (found > 0).any()


def test_fit_is_never_negative_and_calls_the_efficient_form_at_no_less_than_the_direct_one():
    seconds = {form: dict(kinds) for form, kinds in SECONDS["kernelized"].items()}
    seconds["efficient"]["calls"] = 1e-5  # below the 2e-4 of the direct form
    found = fit("kernelized", made_of("kernelized", cases(), seconds))
    assert min(min(kinds.values()) for kinds in found.values()) >= 0
    assert found["efficient"]["calls"] >= found["direct"]["calls"] > 1e-4


def test_each_case_is_predicted_by_the_other_cases():
    measured = made_of("kernelized", cases(), SECONDS["kernelized"])
    case, times = measured[7]
    measured[7] = (
        case,
        {form: 50 * t for form, t in times.items()},
    )  # an outlier that its own prediction must not know
    row = cross_validate("kernelized", measured)[7]
    assert row.predicted == pytest.approx(times, rel=1e-5)
    assert row.measured["direct"] == 50 * times["direct"]


def test_prediction_is_that_of_the_choice(monkeypatch, tmp_path):
    case = Sizes(77, 91, 16, 24, 2, 3)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"about": "kept", "devices": {"cuda": {"seconds": "kept too"}}}))
    calibrate.write({"float32": SECONDS}, {"float32": {}}, path)
    monkeypatch.setattr(choice, "CALIBRATION", path)
    choice._calibration.cache_clear()
    try:
        for operation in SECONDS:
            seconds = predict(operation, case, SECONDS[operation])
            for form in ("direct", "efficient"):
                assert seconds[form] == choice.predicted_seconds(
                    operation, form, 77, 91, 16, 24, batch=2, heads=3
                )
    finally:
        choice._calibration.cache_clear()


def test_writing_replaces_one_device_with_provenance_and_keeps_the_others(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"about": "kept", "devices": {"cpu": "old", "cuda": "kept too"}}))
    calibrate.write({"float32": SECONDS}, {"float32": {"kernelized": "well"}}, path)
    content = json.loads(path.read_text())
    assert (content["about"], content["devices"]["cuda"]) == ("kept", "kept too")
    entry = content["devices"]["cpu"]
    assert entry["seconds"]["float32"] == SECONDS
    assert entry["results"]["float32"] == {"kernelized": "well"}
    assert entry["provenance"]["torch"] == torch.__version__
    assert entry["provenance"]["threads"] == torch.get_num_threads()
    assert entry["provenance"]["cpu"] and entry["provenance"]["date"].count("-") == 2


def test_regret_is_the_time_lost_against_the_faster_form():
    case = Sizes(77, 91, 16, 24, 2, 3)
    measured = {"direct": 3.0, "efficient": 2.0}
    wrong, right = (Row(case, measured, {"direct": t, "efficient": 2.0}) for t in (1.0, 2.5))
    assert (wrong.chosen, wrong.regret) == ("direct", 0.5)
    assert (right.chosen, right.regret) == ("efficient", 0.0)
    assert calibrate.summary([wrong, right]) == (
        "the faster form in 1 of 2 cases; lost 25.0% on average, 50.0% at worst; predictions off "
        "by 8% in the median"
    )
    line = " ".join(calibrate.table([wrong])[1].split())
    assert line == "77 91 16 24 2 3 3000.000 1000.000 2000.000 2000.000 direct 50.0%"


def test_grid_holds_both_sides_of_the_crossover_and_other_keys_and_values():
    grid = cases()
    for d in calibrate.WIDTHS[:3]:
        measured_at = [case.n for case in grid if case.d == case.e == d and case.n == case.m]
        assert min(measured_at) < choice.crossover("taylorshift", d) < max(measured_at)
    assert any(case.m > case.n for case in grid) and any(case.e > case.d for case in grid)
    assert len({case.batch for case in grid}) > 1 and len({case.heads for case in grid}) > 2


@pytest.mark.parametrize("operation", choice.OPERATIONS)
def test_measuring_runs_both_forms_in_turn(operation):
    ran = []

    def attention(q, k, v, *, form):
        ran.append((form, tuple(q.shape), tuple(k.shape), tuple(v.shape), q.dtype))
        return calibrate.ATTENTIONS[operation](q, k, v, form=form)

    times = measure(attention, Sizes(5, 7, 3, 4, 2, 11), torch.float64, rounds=4)
    shapes = ((2, 11, 5, 3), (2, 11, 7, 3), (2, 11, 7, 4), torch.float64)
    assert ran == 5 * [
        ("direct", *shapes),
        ("efficient", *shapes),
    ]  # the first of each is not timed
    assert 0 < min(times.values()) < 1


def test_command_prints_and_writes_what_it_fitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "cases", lambda: [Sizes(n, n, 3, 4, 2, 1) for n in (5, 7, 11)])
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"about": "", "devices": {}}))
    monkeypatch.setattr(choice, "CALIBRATION", path)
    calibrate.main(["--write"])
    seconds = json.loads(path.read_text())["devices"]["cpu"]["seconds"]
    assert {dtype: set(operations) for dtype, operations in seconds.items()} == dict.fromkeys(
        ("float32", "float64"), set(choice.OPERATIONS)
    )
    printed = capsys.readouterr().out
    assert printed.count("the faster form in") == 2 * len(choice.OPERATIONS)
    assert printed.endswith(f"wrote {path}\n")


def test_help_ends_with_a_command_that_works_as_pasted_and_writes_nothing(
    tmp_path, capsys, monkeypatch
):
    with pytest.raises(SystemExit):
        calibrate.main(["--help"])
    command = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert command[:3] == ["python", "-m", "visionattn.lab.calibrate"]
    monkeypatch.setattr(calibrate, "cases", lambda: [Sizes(n, n, 3, 4, 2, 1) for n in (5, 7, 11)])
    monkeypatch.setattr(choice, "CALIBRATION", tmp_path / "absent.json")
    calibrate.main(command[3:])
    assert "taylorshift, float32" in capsys.readouterr().out and not choice.CALIBRATION.exists()


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"devices": {"cpu": "old"}}))
    before = path.read_text()

    def full(*paths):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        calibrate.write({"float32": SECONDS}, {"float32": {}}, path)
    assert path.read_text() == before and list(tmp_path.iterdir()) == [path]


def test_wrong_arguments_end_with_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        calibrate.main(["--wrte"])
    assert end.value.code == 2
    assert (
        capsys.readouterr().err
        == "python -m visionattn.lab.calibrate: unrecognized arguments: --wrte\n"
    )
