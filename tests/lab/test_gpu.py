"""``visionattn benchmark gpu`` and the phases of ``make gpu``, without a GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton")

import torch

from tests.helpers.kernel_checks import interpreted
from tests.helpers.tools import load_tool, words
from visionattn.cli.files import add_line, read_lines
from visionattn.lab.gpu import gpu_operations, gpu_phases, gpu_table, launch_tuning
from visionattn.lab.gpu.gpu_models import check_model, make_images
from visionattn.lab.gpu.gpu_operations import Bench, Ceilings
from visionattn.lab.gpu.gpu_phases import MOST_LINES, summary
from visionattn.lab.gpu.gpu_rows import all_rows, chosen, model, operation, small_case
from visionattn.ops.gpu.launch import launching_with

ROOT = Path(__file__).parents[2]
ONE = "direct TaylorShift forward d"


main = load_tool("benchmark")


@interpreted
def test_a_row_is_checked_then_timed_and_written(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert main(["gpu", "--rehearse", "--only", ONE, "--rows", str(out)]) == 0
    about, row = read_lines(out)
    assert about["kind"] == "provenance" and about["seed"] == 1 and about["bytes_per_second"] > 0
    assert row["what"] == "direct TaylorShift forward" and row["status"] == "ok"
    assert row["error"] < 2e-3
    times = ("seconds", "floor_seconds", "sdpa_seconds", "flash_seconds", "eager_seconds")
    assert all(row[name] > 0 for name in times)
    assert row["x_sdpa"] == row["sdpa_seconds"] / row["seconds"]
    assert "x_sdpa of 1" in row["reached"]
    assert row["reached"] in capsys.readouterr().out


@interpreted
def test_a_wrong_result_has_no_time_and_ends_with_code_4(tmp_path, capsys, monkeypatch):
    right = gpu_operations.operation_of

    def faulty(case, bench, impl="triton"):
        function = right(case, bench, impl)
        return function if impl == "eager" else lambda **given: 1.01 * function(**given)

    monkeypatch.setattr(gpu_operations, "operation_of", faulty)
    out = tmp_path / "rows.jsonl"
    assert main(["gpu", "--rehearse", "--only", ONE, "--rows", str(out)]) == 4
    _, row = read_lines(out)
    assert row["status"].startswith("wrong: error 1.0e-02 of out") and row["seconds"] is None
    assert capsys.readouterr().err == "error: 1 rows are wrong or failed; see the table\n"


@interpreted
def test_after_an_error_of_the_gpu_and_after_the_time_no_row_is_begun(monkeypatch):
    def broken(row, bench):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_table, "measure", broken)
    rows, bench = chosen("Taylor", rehearse=True), Bench.on(torch.device("cpu"))
    for minutes, first in ((1, "failed: RuntimeError: CUDA error"), (0, "not measured: 0 minutes")):
        records = gpu_table.run_gpu(rows, bench, minutes, {}, print, print)
        assert records[0]["status"].startswith(first)
        assert all(record["status"].startswith("not measured") for record in records[1:])


@interpreted
def test_a_model_whose_kernels_are_wrong_or_do_not_run_has_no_time(monkeypatch):
    bench, case = Bench.on(torch.device("cpu")), small_case(model(512))
    images = make_images(case, bench)

    def nothing(launch_one, kernel, grid, *args, **meta) -> None:
        for x in args:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float16 and x.ndim == 4:
                x.zero_()

    with launching_with(run=nothing):
        assert check_model(case, images, bench)["status"].startswith("wrong: error")
    monkeypatch.setattr("visionattn.lab.compared_models.set_impl", lambda model, impl: None)
    assert check_model(case, images, bench)["status"].startswith("failed: no kernel ran")


def test_the_table_has_what_it_is_for_and_floors_are_counted():
    names = [row.name for row in all_rows()]
    for part in ("512 x 512 px", "4096 x 4096 px", "1024 x 2048 px", "16384 x 16384", "step 2048"):
        assert any(part in name for name in names), part
    assert len({row.name for row in all_rows()}) == len(names)
    with pytest.raises(ValueError, match="matches none of"):
        chosen("nothing of this name")
    ceilings = Ceilings(bytes_per_second=1e12, operations_per_second=1e14)
    # Bytes: 4 tensors of 2 x 6 heads in 2 bytes. Operations: 2 products of all pairs.
    for case, seconds in (
        (operation("kernelized", 65_536, 64), 4 * 2 * 12 * 65_536 * 64 / 1e12),
        (operation("taylorshift", 4096, 64, "direct"), 2 * 2 * 12 * 4096**2 * 64 / 1e14),
    ):
        assert ceilings.floor_seconds(case) == pytest.approx(seconds)


def test_all_rows_have_the_same_columns_whatever_was_measured():
    found = {"status": "ok", "seconds": 1.0, "gib": 2.0, "sdpa_gib": 3.0, "identity_gib": 1.5}
    first, *_, last = all_rows()
    of_model, other = gpu_table.record_of(last, found), gpu_table.record_of(first, {"status": "no"})
    assert set(of_model) == set(other) and of_model["x_memory"] == pytest.approx(2 / 3)


def test_a_phase_is_ended_at_its_limit_with_all_that_it_started(tmp_path):
    late = tmp_path / "late"
    child = f"import time, pathlib; time.sleep(4); pathlib.Path({str(late)!r}).touch()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    lines, began = [], time.monotonic()
    assert gpu_phases.run_phase([sys.executable, "-c", code], 2.0, False, lines.append) < 0
    assert time.monotonic() - began < 30
    time.sleep(max(0.0, began + 7 - time.monotonic()))
    assert not late.exists()


def test_phases_go_on_after_a_failure_but_not_without_the_first_kernel(tmp_path, monkeypatch):
    def commands(*codes):
        exits = [[sys.executable, "-c", f"raise SystemExit({code})"] for code in codes]
        names = ("compile", "tests", "last")
        return lambda *given: [(*pair, 1.0) for pair in zip(names, exits, strict=True)]

    for codes, goods in (((1, 0, 0), [False, True, True]), ((2, 0, 0), [False])):
        monkeypatch.setattr(gpu_phases, "phases", commands(*codes))
        ended = gpu_phases.run_all(tmp_path, 60.0, None, False, lambda text: None)
        assert [good for _, good in ended] == goods


def test_the_summary_is_short_and_says_what_failed(tmp_path):
    row = dict.fromkeys(("of_floor", "x_sdpa", "x_identity", "gib", "reached"))
    row |= dict(kind="row", what="kernelized", size="d = 64", status="ok", seconds=1e-3)
    add_line(tmp_path / "rows.jsonl", {"kind": "provenance", "gpu": "NVIDIA H100", "torch": "2.11"})
    log = tmp_path / "log.txt"
    log.write_text("tests/kernels/test_a.py::test_b[c d] PASSED [ 50%]\n")
    add_line(tmp_path / "rows.jsonl", row | {"x_sdpa": 2.0, "reached": "reached 2 x_sdpa of 1"})
    lines, good = summary(tmp_path, ["compile: done"])
    assert good and lines[1:5] == [
        "gpu NVIDIA H100, torch 2.11",
        "compile: done",
        "tests: 1 passed",
        "kernelized, d = 64: 1 ms, 2 x sdpa; reached 2 x_sdpa of 1",
    ]
    log.write_text("tests/kernels/test_a.py::test_b FAILED [ 50%]\n")
    for _ in range(80):
        add_line(tmp_path / "rows.jsonl", row | {"seconds": None, "status": "wrong: " + "x" * 300})
    lines, good = summary(tmp_path, [])
    assert not good and "FAILED tests/kernels/test_a.py::test_b" in lines
    assert len(lines) == MOST_LINES and "more lines: see rows.jsonl" in lines[-2]


BLOCKED = tuple(
    words("albumentations cv2 hypothesis pydantic rich xdist tensorboard sklearn matplotlib")
)
BLOCKER = f"""
import sys
from importlib.machinery import PathFinder
class Blocked(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        blocked = name.partition(".")[0] in {BLOCKED!r}
        return None if blocked else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Blocked
"""
"""As where these packages are not installed."""


@interpreted
@pytest.mark.slow
def test_a_rehearsal_runs_where_little_is_installed_and_writes_everything(tmp_path):
    """All phases, with one row; ``make gpu-rehearsal`` runs all."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCKER)
    out, path = tmp_path / "out", os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    command = [sys.executable, "-m", "visionattn.lab.gpu.gpu_phases", str(out), "--rehearse"]
    # Pytest's importer finds plugins that are blocked: it is told to look for none.
    alone = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = dict(env=os.environ | alone, capture_output=True, text=True, cwd=ROOT)
    done = subprocess.run([*command, "--only", "TaylorShift forward d"], **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.startswith("python ") and "torch " in done.stdout.splitlines()[0]
    assert sorted(x.name for x in out.iterdir()) == ["log.txt", "rows.jsonl", "summary.txt"]
    lines = (out / "summary.txt").read_text().splitlines()
    assert done.stdout.splitlines()[-len(lines) :] == lines
    assert [line.split(":")[0] for line in lines[2:6]] == ["compile", "tests", "table", "tests"]
    again = subprocess.run(command, **options)
    assert again.returncode == 2 and "pass another folder with OUT=folder" in again.stderr


@interpreted
@pytest.mark.slow
def test_other_rows_of_each_kernel_are_checked_and_timed(monkeypatch):
    bench = Bench.on(torch.device("cpu"))
    monkeypatch.setattr(launch_tuning, "trials", lambda row: [row, row | {"BLOCK_N": 24}])
    told = [
        line.rsplit(": ", 1)
        for line in launch_tuning.tune("kernelized", 40, 16, "efficient", bench)
    ]
    assert len(told) == 8 and all(how.endswith("s") for _, how in told[::2])
    assert all("24" in row and "power of 2" in how for row, how in told[1::2])
    monkeypatch.setattr(launch_tuning, "check", lambda *given: ("wrong: error", 1.0))
    first = next(launch_tuning.tune("kernelized", 40, 16, "efficient", bench))
    assert first.startswith("kernelized ") and first.endswith("wrong: error")
