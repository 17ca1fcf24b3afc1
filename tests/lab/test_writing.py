"""Images written value by value: what is timed, what is counted, and what becomes of it."""

import csv
from dataclasses import asdict

import pytest
import torch

from visionattn.cli.ends import Failed
from visionattn.lab import writing
from visionattn.lab.writing import Case, Timed, Writer, check, main, measure, middle
from visionattn.lab.written import (
    CACHE,
    NO_CACHE,
    RECURRENCE,
    SEGMENTS,
    WAYS,
    charts,
    crossover,
    segment,
    table,
)

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A small model, and no memory measured."""
    monkeypatch.setattr(writing, "MODEL", SMALL)
    monkeypatch.setattr(writing, "_peak", lambda case, run: 3 * 2**20)


@pytest.mark.parametrize("relative", ["flat", "none"])
def test_ways_give_what_the_whole_image_gives_and_others_are_refused(monkeypatch, relative):
    with torch.inference_mode():
        check(relative)
    step = Writer.step
    monkeypatch.setattr(Writer, "step", lambda self, i: step(self, i) * (1.01 if i == 7 else 1))
    with torch.inference_mode(), pytest.raises(Failed, match="recurrence differs from the whole"):
        check(relative)


def test_segments_are_the_whole_sequence_and_samples_lie_in_their_middle():
    parts = [segment(number, 49) for number in range(SEGMENTS)]
    assert [i for part in parts for i in part] == list(range(49))
    assert {len(part) for part in parts} == {4, 5}
    assert middle(range(10, 20), 4) == range(13, 17) and middle(range(3), 9) == range(3)


def tick(monkeypatch, cost):
    """Let each step take the seconds that ``cost`` tells for its position; return all positions."""
    clock, seen = [0.0], []

    def step(self, position):
        clock[0] += cost(position)
        seen.append(position)
        if self.state is not None:
            assert self.state.position == position
            self.state.position += 1

    monkeypatch.setattr(Writer, "step", step)
    monkeypatch.setattr(writing.time, "process_time", lambda: clock[0])
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_whole_images_are_timed_on_all_steps(monkeypatch, way):
    seen = tick(monkeypatch, lambda position: 1 + position)
    timed = Timed(Case(way, "flat", 7, 1), 1e9)
    seen.clear()
    for number in range(SEGMENTS):
        timed.take(number)
    assert timed.is_whole and seen == list(range(49))
    assert timed.samples() == pytest.approx([49 * 50 / 2])


@pytest.mark.parametrize("power, way", [(0, RECURRENCE), (1, CACHE), (2, NO_CACHE)])
@pytest.mark.parametrize("unit", [1e-7, 1.0])
def test_other_images_are_the_sum_of_their_segments(monkeypatch, power, way, unit):
    seen = tick(monkeypatch, lambda position: unit * (1 + position**power))
    timed = Timed(Case(way, "none", 36, 1), 0.0)
    for number in range(SEGMENTS):
        timed.take(number)
    assert not timed.is_whole and len(timed.segments) == (12 if unit < 1 else 4)
    wanted = unit * sum(1 + i**power for i in range(36**2))
    assert timed.samples() == pytest.approx([wanted], rel=0.02)
    assert len(timed.by_segment()) == SEGMENTS and max(seen) < 36**2


def test_rows_say_what_was_timed_and_a_batch_may_be_so_many_images(monkeypatch):
    tick(monkeypatch, lambda position: 1e-3)
    monkeypatch.setattr(writing, "PAIRS", 1)
    cases = [Case(way, "flat", 7, batch) for batch in (1, 5) for way in WAYS]
    rows = measure(cases, 3, 1e9, 1e9)
    assert [(row["way"], row["batch"]) for row in rows] == [(c.way, c.batch) for c in cases]
    assert {row["rounds"] for row in rows} == {3} and {row["timed"] for row in rows} == {"whole"}
    by_case = {(row["way"], row["batch"]): row for row in rows}
    assert by_case[RECURRENCE, 5]["seconds_median"] == pytest.approx(49e-3)
    assert by_case[RECURRENCE, 5]["images_per_second"] == pytest.approx(5 / 49e-3)
    last = by_case[NO_CACHE, 5]
    assert last["at_once"] == 1 and last["seconds_median"] == pytest.approx(5 * 49e-3)
    assert last["times_recurrence_median"] == pytest.approx(5)
    assert last["step_seconds_by_segment"].split() == ["0.005"] * SEGMENTS
    # Keys and values of 49 tokens, and sums with a column of masses.
    assert by_case[CACHE, 5]["state_bytes"] == 4 * 2 * 5 * 16 * 49 * 2
    horizon = 2 * 7 + 3
    assert by_case[RECURRENCE, 5]["state_bytes"] == 4 * 2 * 5 * 2 * (8 + horizon + 1) * 9
    assert last["state_bytes"] == 0
    alone = measure(cases[3:], 3, 1e9, 1e9)[-1]
    assert alone["seconds_median"] == pytest.approx(last["seconds_median"])
    assert alone["step_seconds_by_segment"] == last["step_seconds_by_segment"]
    assert "| 5 |" in table(rows) and "(5 x)" in table(rows)
    drawn = charts(rows)
    assert [chart.title for chart in drawn[:2]] == [f"Batch {n}, relative position" for n in (1, 5)]
    assert drawn[1].series[2].y == [pytest.approx(1 / 49e-3)]
    assert drawn[-1].series[0].y == [pytest.approx(1.0)] * SEGMENTS


def test_the_crossover_is_where_the_cache_stays_slower():
    key = {"relative": "none", "values": 1200, "batch": 2}
    steps = {RECURRENCE: [2.0] * 12, CACHE: [1, 3, 1, 1, 2.5, *[4] * 7], NO_CACHE: [9] * 12}
    rows = [
        {"way": way, "step_seconds_by_segment": " ".join(map(str, each))} | key
        for way, each in steps.items()
    ]
    assert crossover(rows, key) == 450
    rows[1]["step_seconds_by_segment"] = " ".join(["1"] * 12)
    assert crossover(rows, key) is None
    rows[1]["step_seconds_by_segment"] = " ".join(["3"] * 12)
    assert crossover(rows, key) == 50


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_that_of_the_last_step_with_its_state(monkeypatch, way):
    made, peaks = [], []
    begin = Writer.begin
    monkeypatch.setattr(Writer, "begin", lambda self: made.append(self) or begin(self))
    monkeypatch.setattr(writing, "peak_bytes", lambda work: peaks.append(work()) or 5)
    case = Case(way, "flat", 7, 2)
    assert writing.peak_here(asdict(case), torch.get_num_threads()) == 5 and len(peaks) == 1
    assert made[-1].case == case
    if way != NO_CACHE:
        assert made[-1].state.position == 49


def test_the_tool_writes_rows_and_a_picture(tmp_path, capsys):
    rows, picture = tmp_path / "rows.csv", tmp_path / "picture.png"
    threads = torch.get_num_threads()
    flags = ["--sides", "5", "6", "--batches", "1", "2", "--rounds", "2", "--relative", "none"]
    assert main([*flags, "--csv", str(rows), "--png", str(picture)]) == 0
    assert torch.get_num_threads() == threads
    with open(rows) as file:
        found = list(csv.DictReader(file))
    assert [int(row["values"]) for row in found] == [25] * 6 + [36] * 6
    assert all(float(row["seconds_median"]) > 0 and row["commit"] for row in found)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| none | 36 | 2 | " in capsys.readouterr().out


def test_bad_input_is_one_line(capsys, tmp_path):
    assert main(["--sides", "3", "16"]) == 2
    assert capsys.readouterr().err.startswith("error: --sides: images of 3 px")
    assert main(["--csv", str(tmp_path / "no" / "rows.csv")]) == 2
    assert capsys.readouterr().err.startswith("error: no folder")
