"""``visionattn benchmark tune``: which rows are tried, and what is written; without a GPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch

from tests.helpers.kernel_checks import interpreted
from visionattn.lab.gpu import tune
from visionattn.lab.gpu.gpu_operations import Bench
from visionattn.ops.gpu import launch

ROW = {"d": 64, "e": 64, "bits": 16, "BLOCK_N": 32, "PAIRS": 10, "num_warps": 4, "num_stages": 1}


def test_blocks_and_warps_are_halved_and_doubled_and_one_stage_stays_one():
    trials = list(tune.candidates(ROW))
    changed = {(name, x[name]) for x in trials for name in x if x[name] != ROW[name]}
    wanted = {("BLOCK_N", 16), ("BLOCK_N", 64), ("num_warps", 2), ("num_warps", 8)}
    assert changed == wanted | {("PAIRS", 1), ("PAIRS", 2), ("PAIRS", 5)}
    assert {x["num_stages"] for x in tune.candidates(ROW | {"num_stages": 3})} == {1, 2, 3, 4}
    assert 8 not in {x["BLOCK_N"] for x in tune.candidates(ROW | {"BLOCK_N": 16})}


def test_the_fastest_row_is_found_step_by_step_and_rows_that_fail_are_not_taken():
    def seconds(row):
        if row["num_warps"] > 4:
            return float("inf")
        return 1 + abs(row["BLOCK_N"] - 128) / 100 + row["PAIRS"] / 10

    best, least = tune.descend(ROW, seconds)
    assert best == ROW | {"BLOCK_N": 128, "PAIRS": 1} and least == pytest.approx(1.1)
    assert tune.descend(ROW, lambda row: 1.0) == (ROW, 1.0)


@pytest.fixture
def table(tmp_path, monkeypatch) -> Path:
    """A copy of the table, which launches take rows from."""
    path = tmp_path / "launches.json"
    path.write_text(launch.TABLE.read_text())
    monkeypatch.setattr(launch, "TABLE", path)
    launch.forget()
    yield path
    monkeypatch.undo()
    launch.forget()


def test_a_row_is_put_into_the_section_of_its_gpu_and_nothing_else_changes(table):
    before = json.loads(table.read_text())
    row = before["default"]["kernelized means"][0]
    tune.put("9.9", "kernelized means", row | {"BLOCK_N": 256})
    after = json.loads(table.read_text())
    own = after.pop("9.9")
    assert after == before and list(own) == ["kernelized means"]
    assert len(own["kernelized means"]) == len(before["default"]["kernelized means"])
    assert row | {"BLOCK_N": 256} in own["kernelized means"]
    # One row in a line, as the table is kept.
    assert table.read_text().startswith(launch.TABLE.read_text()[:2000])
    assert max(map(len, table.read_text().splitlines())) < 160


@interpreted
def test_a_row_is_tuned_within_its_operation(table, monkeypatch):
    """Smaller blocks are made to seem faster; wrong results of larger ones are not taken."""
    tried = []

    def seconds(work, kernel, row):
        tried.append((kernel, row["BLOCK_N"]))
        return float(row["BLOCK_N"]) * row["num_warps"]

    measured = tune.Workload.seconds
    bench = Bench.on(torch.device("cpu"))
    only = "kernelized means d = 16 e = 16 32 bits"
    work = tune.Workload(tune.operation("kernelized", 40, 16, dtype="float32"), bench)
    (kernel, row), rows = work.rows()[only], set(work.rows())
    assert rows > {only} and 0 < measured(work, kernel, row) < float("inf")
    monkeypatch.setattr(tune, "check", lambda *given: ("wrong: error", 1.0))
    assert measured(work, kernel, row) == float("inf")
    monkeypatch.setattr(tune.Workload, "seconds", seconds)
    records = tune.run_tune(only, 10, bench, "9.0", lambda text: None, tokens=40)
    assert [record["row"] for record in records] == [only] and len(tried) > 3
    found = json.loads(table.read_text())["9.0"]["kernelized means"]
    (tuned,) = (x for x in found if tune.name_of("kernelized means", x) == only)
    assert (tuned["BLOCK_N"], tuned["num_warps"]) == (16, 1)
