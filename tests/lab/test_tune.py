"""Tuning launches without a GPU: which rows are tried, which is taken, and what is written."""

import json
import os
from itertools import product

import pytest
import torch

import visionattn.lab.gpu.tune as tune
from visionattn.cli.ends import Failed
from visionattn.lab.cases import Case
from visionattn.lab.gpu.device import rehearsed
from visionattn.lab.gpu.operations import Bench
from visionattn.lab.gpu.timing import Timed
from visionattn.lab.gpu.tune import (
    all_keys,
    candidates,
    descend,
    key_of,
    name_of,
    put,
    replaced_row,
    rows_asked,
    sizes_of,
    text_of,
    workloads,
)
from visionattn.ops.gpu import launch

pytest.importorskip("triton", reason="GPU kernels need Triton")
CPU = torch.device("cpu")


def rows_like(**sizes):
    """Rows of three widths in 16 and in 32 bits."""
    return [{"d": d, "e": d, "bits": bits} | sizes for bits in (16, 32) for d in (16, 32, 64)]


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A small launch table, in the place of the package's own."""
    means = rows_like(BLOCK_N=64, num_warps=4, num_stages=1)
    content = {
        "default": {
            "kernelized state": rows_like(BLOCK_N=32, num_warps=4, num_stages=2),
            "kernelized means": means,
        }
    }
    content["8.0"] = {"kernelized state": rows_like(BLOCK_N=16, num_warps=8, num_stages=1)}
    monkeypatch.setattr(launch, "TABLE", tmp_path / "launches.json")
    launch.TABLE.write_text(text_of(content))
    launch._table.cache_clear()
    yield content
    launch._table.cache_clear()


def every_row():
    table = json.loads(launch.TABLE.read_text())
    return [
        (kernel, row)
        for section in table.values()
        for kernel, rows in section.items()
        for row in rows
    ]


def test_the_table_is_written_one_row_in_a_line_as_it_lies_there():
    text = launch.TABLE.read_text()
    assert text_of(json.loads(text)) == text


def test_candidates_keep_what_products_and_kernels_demand():
    for kernel, row in every_row():
        for name in sizes_of(row):
            values = candidates(row, name, row["d"])
            assert row[name] in values and (len(values) > 1 or (name, row["d"]) == ("PAIRS", 16)), (
                kernel,
                row,
                name,
            )
            if name.startswith("BLOCK"):
                assert all(
                    value >= min(16, row[name]) and value & (value - 1) == 0 for value in values
                )
                assert max(values) <= max(256, row[name]) and max(values) <= 4 * row[name]
        assert "num_stages" not in sizes_of(row) or row["num_stages"] > 1
        assert not set(sizes_of(row)) - {
            name for name in row if name.startswith(("BLOCK", "PAIRS", "num_"))
        }


def test_candidates_of_a_row_are_those_worked_out_by_hand():
    row = {"BLOCK_N": 64, "BLOCK_F": 16, "PAIRS": 1, "num_warps": 4, "num_stages": 1}
    assert sizes_of(row) == ["BLOCK_N", "BLOCK_F", "PAIRS", "num_warps"]
    assert candidates(row, "BLOCK_N", 64) == [16, 32, 64, 128, 256]
    assert candidates(row, "BLOCK_F", 64) == [16, 32, 64]
    assert candidates(row, "num_warps", 64) == [2, 4, 8]
    assert candidates(row | {"num_stages": 3}, "num_stages", 64) == [1, 2, 3, 4]
    assert candidates({"BLOCK": 1024}, "BLOCK", 64) == [256, 512, 1024]
    pairs = {d: candidates(row, "PAIRS", d) for d in (8, 16, 32, 48, 64)}
    assert pairs == {8: [1], 16: [1], 32: [1, 3], 48: [1, 2, 3, 6], 64: [1, 2, 5, 10]}


def test_every_number_of_pairs_that_is_tried_is_one_that_programs_share_evenly():
    from visionattn.ops.taylorshift.kernels.efficient_states import num_pairs

    for kernel, row in every_row():
        if "PAIRS" in row:
            shared = [part for part in range(1, 11) if num_pairs(row["d"]) % part == 0]
            assert shared == candidates(row, "PAIRS", row["d"]), (kernel, row)


def test_the_fastest_row_is_found_one_size_at_a_time_and_failures_are_left_out():
    start, asked = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 1}, []

    def seconds(row):
        asked.append(tuple(row.values()))
        if row["BLOCK_N"] == 256:
            return None  # does not fit, though it would be fastest
        return abs(row["BLOCK_N"] - 128) + abs(row["num_warps"] - 8) + 1

    best, tried = descend(start, 64, seconds)
    assert best == {"BLOCK_N": 128, "num_warps": 8, "num_stages": 1}
    assert tried == len(asked) == len(set(asked)) and (64, 4, 1) in asked
    assert descend(start, 64, lambda row: None)[0] == start
    assert descend(start, 64, lambda row: None if row == start else 1.0)[0] != start


def test_rows_are_those_that_launches_take(table):
    distinct = [
        row | {"BLOCK_N": 16 + i} for i, row in enumerate(table["default"]["kernelized means"])
    ]
    table["default"]["kernelized means"] = distinct
    launch.TABLE.write_text(text_of(table))
    for d, e, dtype in product((8, 16, 40, 64), (8, 24, 64), (torch.bfloat16, torch.float32)):
        with rows_asked(table, "9.0") as keys:
            row = launch.launch_row("kernelized means", d, e, dtype, CPU)
        ((name, *held),) = keys
        assert name == "kernelized means"
        assert dict(zip(tune.HELD, held, strict=True)) | row in distinct
    assert key_of(table, "9.0", "kernelized means", 4096, 16, 16) is None


def test_a_row_is_replaced_for_the_widths_that_it_serves_alone(table):
    key = key_of(table, "9.0", "kernelized means", 64, 64, 16)
    before = launch.launch_row("kernelized means", 64, 64, torch.bfloat16, CPU)
    row = {"BLOCK_N": 16, "num_warps": 1}
    with replaced_row(table, "9.0", key, row):
        taken = launch.launch_row("kernelized means", 64, 64, torch.bfloat16, CPU)
        assert taken == row | {tune.MARK: True}
        assert launch.launch_row("kernelized means", 64, 64, torch.float32, CPU)["num_warps"] > 1
        assert launch.launch_row("kernelized state", 64, 64, torch.bfloat16, CPU)["num_warps"] > 1
    assert launch.launch_row("kernelized means", 64, 64, torch.bfloat16, CPU) == before


def test_a_section_has_all_rows_of_a_kernel_and_leaves_with_its_last_difference(table):
    whole = json.loads(json.dumps(table))
    key = next(key for key in all_keys(table, "9.0") if key[0] == "kernelized means")
    old = table["default"]["kernelized means"][0]
    put(table, "9.0", key, {"BLOCK_N": 32, "num_warps": 2, "num_stages": 1})
    rows = table["9.0"]["kernelized means"]
    assert rows[0] == old | {"BLOCK_N": 32, "num_warps": 2}
    assert rows[1:] == whole["default"]["kernelized means"][1:]
    assert table["default"] == whole["default"] and list(table["9.0"]) == ["kernelized means"]
    put(table, "8.0", key, {"BLOCK_N": 16, "num_warps": 2, "num_stages": 1})
    assert table["9.0"]["kernelized means"] == rows
    assert list(table["8.0"]) == ["kernelized state", "kernelized means"]
    for capability in ("9.0", "8.0"):
        put(table, capability, key, {name: old[name] for name in old if name not in tune.HELD})
    assert table == whole


def test_what_is_written_serves_the_next_launch_and_leaves_the_other_sections(table, monkeypatch):
    monkeypatch.setattr(launch, "capability", lambda device: "9.0")
    before = launch.TABLE.read_text()
    key = key_of(table, "9.0", "kernelized means", 64, 64, 16)
    put(table, "9.0", key, {"BLOCK_N": 32, "num_warps": 2, "num_stages": 1})
    tune.save(table)
    assert launch.launch_row("kernelized means", 64, 64, torch.bfloat16, CPU)["BLOCK_N"] == 32
    added = launch.TABLE.read_text().removeprefix(before.removesuffix("\n}\n"))
    assert added.startswith(',\n  "9.0": {\n    "kernelized means": [\n      {"d": 16, ')
    assert added.count("\n") == 12


def test_every_row_has_a_workload_of_its_widths_and_the_usual_ones_come_first():
    table = json.loads(launch.TABLE.read_text())
    found = list(workloads(table, "9.0"))
    assert [
        (case.width, width, case.dtype) for case, width in found[:1] + found[10:11] + found[20:21]
    ] == [
        (64, 64, "bfloat16"),
        (32, 32, "bfloat16"),
        (16, 16, "bfloat16"),
    ]
    assert [case.backward for case, _ in found[:4]] == [False, True, False, True]
    assert len({name_of(key) for key in all_keys(table, "9.0")}) == len(all_keys(table, "9.0"))


class FakeWork:
    """An operation whose time depends on the row of one kernel as it is launched."""

    def __init__(self, case, value_width, bench):
        self.case, self.width = case, value_width

    def prepare(self, launches):
        row = launch.launch_row(
            "kernelized means", self.case.width, self.width, self.case.torch_dtype, CPU
        )
        return (
            None
            if row["num_warps"] == 2
            else Timed(lambda: None, calls=row["BLOCK_N"], replayed=True)
        )

    def seconds(self, *prepared):
        return [1 / timed.calls for timed in prepared]


@pytest.fixture
def fake_work(table, monkeypatch):
    """Every operation launches "kernelized means" of its widths and nothing else."""
    monkeypatch.setattr(tune, "Workload", FakeWork)
    monkeypatch.setattr(tune, "keys_of", lambda case, width, table, capability, bench: [
        key_of(table, capability, "kernelized means", case.width, width,
               8 * case.torch_dtype.itemsize)
    ])  # fmt: skip
    return table


def run(only, minutes=1, **options):
    lines = []
    bench = Bench(rehearsed(), torch.Generator().manual_seed(0))
    return tune.run_tune(only, minutes, bench, "9.0", lines.append, **options), lines


def test_tuning_writes_what_is_faster_and_prints_what_changed(fake_work):
    before = fake_work["default"]
    records, lines = run("kernelized means d = 64 e = 64 16 bits")
    (record,) = records
    was = next(
        row
        for row in before["kernelized means"]
        if (row["d"], row["e"], row["bits"]) == (64, 64, 16)
    )
    assert json.loads(record["now"])["BLOCK_N"] == 256
    assert json.loads(record["was"])["BLOCK_N"] == was["BLOCK_N"]
    assert record["seconds_now"] < record["seconds_was"]
    assert record["operation"] == "kernelized efficient forward"
    written = json.loads(launch.TABLE.read_text())
    changed = [
        row for row in written["9.0"]["kernelized means"] if row not in before["kernelized means"]
    ]
    assert [row["BLOCK_N"] for row in changed] == [256] and written["default"] == before
    assert "1 rows tuned, 1 changed, 0 not reached" in lines[-1]


def test_a_gain_within_the_noise_changes_nothing(fake_work, monkeypatch):
    monkeypatch.setattr(
        FakeWork, "seconds", lambda self, *prepared: [1 + 0.01 / timed.calls for timed in prepared]
    )
    text = launch.TABLE.read_text()
    records, lines = run("kernelized means d = 64 e = 64 16")
    assert records[0]["now"] == records[0]["was"] and "| unchanged |" in lines[1]
    assert launch.TABLE.read_text() == text


def test_no_row_is_begun_when_the_time_is_over(fake_work):
    records, lines = run("kernelized", minutes=0)
    assert records == [] and lines[-1].startswith("\n0 rows tuned, 0 changed, ")


def test_an_operation_that_breaks_leaves_the_others(fake_work, monkeypatch):
    keys_of = tune.keys_of

    def ask(case, *given):
        if "joint" in case.name:
            raise AttributeError("no such\nplace")
        return keys_of(case, *given)

    monkeypatch.setattr(tune, "keys_of", ask)
    later = tune.OPERATIONS[2:]  # the one that breaks comes first
    records, lines = run("kernelized means d = 64 e = 64 16", operations=later)
    assert len(records) == 1
    assert records[0]["operation"] == "taylorshift+temperature efficient forward"
    assert lines[1].startswith(
        "| kernelized+joint efficient: failed: AttributeError: no such place | "
    )


@pytest.mark.parametrize("place", ["prepare", "seconds"])
def test_tuning_ends_with_an_error_that_breaks_the_process_and_keeps_what_it_wrote(
    fake_work, monkeypatch, place
):
    right = getattr(FakeWork, place)
    text = "Triton Error [CUDA]: an illegal memory access was encountered"

    def measure(self, *prepared):
        if self.case.width == 32:
            raise RuntimeError(text)
        return right(self, *prepared)

    monkeypatch.setattr(FakeWork, place, measure)
    with pytest.raises(
        Failed, match="illegal memory access.*rows that were tuned before are written"
    ):
        run("kernelized means .* 16 bits")
    assert 256 in [
        row["BLOCK_N"] for row in json.loads(launch.TABLE.read_text())["9.0"]["kernelized means"]
    ]


def test_rows_that_no_operation_takes_and_tables_that_are_read_only_are_told(
    fake_work, monkeypatch
):
    records, lines = run("kernelized state d = 64 e = 64 16")
    assert records == [] and lines[-1].endswith("1 not reached")
    with pytest.raises(ValueError, match="fits none of"):
        tune.check_rows("no such kernel")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="launches.json cannot be written"):
        tune.check_rows(None)


def test_an_operation_that_fails_or_has_a_wrong_result_is_not_timed(monkeypatch):
    bench = Bench(rehearsed(), torch.Generator().manual_seed(0), impl="eager")
    case = Case("operation", "kernelized", 40, 8, "efficient", "float32", True, 1, 2)
    work = tune.Workload(case, 16, bench)
    call, launches = tune.call_of, []

    def call_and_launch(*given):
        """As if a kernel took the row."""
        launches.append(lambda: None)
        return call(*given)

    monkeypatch.setattr(tune, "call_of", call_and_launch)
    assert work.prepare(launches).calls == len(work.sets)
    assert work.expected["gradient of v"].shape == (1, 2, 40, 16)
    right = work.expected["gradient of v"]
    work.expected["gradient of v"] = 1.1 * right
    assert work.prepare(launches) is None
    work.expected["gradient of v"] = right
    assert work.prepare(launches) is not None
    monkeypatch.setattr(tune, "call_of", call)
    assert work.prepare(launches) is None  # nothing takes the row

    reason = "out of resource: shared memory"

    def fail(*given):
        raise RuntimeError(reason)

    monkeypatch.setattr(tune, "outputs", fail)
    assert work.prepare(launches) is None
    reason = "Triton Error [CUDA]: misaligned address"
    with pytest.raises(RuntimeError, match="misaligned"):
        work.prepare(launches)


interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="kernels of tensors on a processor are interpreted",
)


@interpreted
def test_the_launch_that_takes_the_row_is_timed_and_no_other(monkeypatch):
    bench = Bench(rehearsed(), torch.Generator().manual_seed(0))
    monkeypatch.setattr(
        bench.gpu, "graph_of", lambda calls: None
    )  # so that launches are made as they are timed
    table = json.loads(launch.TABLE.read_text())
    case = Case("operation", "kernelized", 40, 16, "efficient", "float32", True, 1, 1)
    key = key_of(table, "9.0", "kernelized means", 16, 16, 32)
    row = {"BLOCK_N": 16, "num_warps": 1, "num_stages": 1}
    work = tune.Workload(case, 16, bench)
    with replaced_row(table, "9.0", key, row) as launches:
        timed = work.prepare(launches)
    made = []
    monkeypatch.setattr(launch, "_launch", None)  # what is timed was kept
    for launched in launches:
        kernel, grid, *_ = launched.args
        made.append((kernel.__name__, grid))
        assert launched.keywords.items() >= row.items() and tune.MARK not in launched.keywords
    assert [grid for _, grid in made] == [(3,)] * len(work.sets)
    assert len({name for name, _ in made}) == 1
    assert timed.calls == len(work.sets)
    out = launches[0].args[5].detach()  # of the means
    expected = out.clone()
    out.fill_(torch.nan)
    timed.run()
    assert torch.equal(out, expected)


@interpreted
def test_whatever_row_an_operation_asks_for_some_launch_takes():
    with launch.launching_with(run=lambda *launched, **meta: None):
        check_that_every_row_is_taken()


def check_that_every_row_is_taken():
    """Ask every operation for its rows, and replace each: some launch takes it."""
    bench = Bench(rehearsed(), torch.Generator().manual_seed(0))
    table = json.loads(launch.TABLE.read_text())
    for name, form, _ in tune.OPERATIONS:
        case = Case("operation", name, 40, 16, form, "float32", True, 1, 1)
        for key in tune.keys_of(case, 16, table, "9.0", bench):
            with replaced_row(table, "9.0", key, dict(row_of(table, key))) as launches:
                tune.call_of(
                    tune.function_of(case, 40, "cpu", "triton"), tune.draw(case, bench), True
                )()
            assert launches, key


def row_of(table, key):
    """The row of a key, without what it is found by."""
    found = next(
        row
        for row in tune.rows_of(table, "9.0", key[0])
        if tuple(row[name] for name in tune.HELD) == key[1:]
    )
    return {name: value for name, value in found.items() if name not in tune.HELD}


@interpreted
def test_an_operation_without_kernels_takes_no_rows(table):
    bench = Bench(rehearsed(), torch.Generator().manual_seed(0), impl="triton")
    case = Case("operation", "kernelized", 40, 8, "efficient", "bfloat16", False, 1, 2)
    assert (
        tune.keys_of(case, 8, table, "9.0", bench) == []
    )  # neither a GPU nor the interpreter runs bfloat16
    kernels = {
        key[0]
        for key in tune.keys_of(
            Case(**case.as_dict() | {"dtype": "float32"}), 8, table, "9.0", bench
        )
    }
    assert kernels == {"kernelized state", "kernelized means"}
