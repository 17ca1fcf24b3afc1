"""``tools/profile_memory.py`` as it is typed: what it prints and writes, and how it ends."""

import math
import re
from pathlib import Path

import pytest
import torch

import visionattn.lab.profile.expected as expected
import visionattn.lab.profile.run as run
from tests.helpers.tools import assert_one_error, load_tool, read_csv, words
from visionattn.lab.profile.process import Bytes

ROOT = Path(__file__).parents[2]
REAL = words(
    "--models taylorshift_vit_t vit_tiny_patch16_224+eager --img-size 512 736 --fit-from 512"
)
REAL += ["--depth", "1", "--threads", "1", "--device", "cpu"]
FAKE = ["--models", "taylorshift_vit_t", "vit_tiny_patch16_224", "--depth", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def main():
    return load_tool("profile_memory")


@pytest.fixture
def jobs(monkeypatch):
    """Jobs that were measured, without the processes: 1000 bytes per patch, and out of memory from
    the budget on.
    """
    seen = []

    def measure(job):
        seen.append(job)
        above = 1000 * (job.case.size // 16) ** 2
        if above >= job.budget_bytes:
            raise torch.OutOfMemoryError("too large")
        return Bytes(above + 5, None, above, 1, 2, 3, 4)

    monkeypatch.setattr(run, "measure", measure)
    return seen


def table_in(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def test_a_profile_of_real_models_is_printed_and_written_with_its_growth(
    main, started_quickly, tmp_path, capsys
):
    """What libraries hold differs from processor to processor, so that no level is compared with a
    number here.
    """
    folder = tmp_path / "new" / "profile"
    assert main([*REAL, "--output", str(folder)]) == 0
    printed = capsys.readouterr()
    rows = read_csv(folder / "memory.csv")
    assert printed.err == "" and printed.out == (folder / "memory.md").read_text()
    head, *cells = table_in(printed.out)
    assert (
        [row["model"] for row in rows]
        == [line[0] for line in cells]
        == [REAL[1], REAL[1], REAL[2], REAL[2]]
    )
    assert [row["tokens"] for row in rows] == ["1025", "2117"] * 2
    assert {row["status"] for row in rows} == {"ok"}
    above = [int(row["above_bytes"]) for row in rows]
    for i in (0, 2):
        slope = math.log(above[i + 1] / above[i]) / math.log(2117 / 1025)
        assert [float(row["growth_exponent"]) for row in rows[i : i + 2]] == pytest.approx(
            [slope] * 2, rel=1e-9
        )
        assert [line[head.index("growth")] for line in cells[i : i + 2]] == ["-", f"{slope:.2f}"]
    matrix = 3 * 2117**2 * 4
    assert above[3] > 2 * matrix  # the scores and their softmax
    assert all(int(row["peak_bytes"]) > int(row["above_bytes"]) > 0 for row in rows)
    assert rows[0]["torch"] == torch.__version__ and rows[0]["processor"]
    assert rows[0]["command"].startswith("visionattn profile --models taylorshift_vit_t vit_tiny")
    assert {"device", "commit", "precision", "budget_bytes", "date"} <= set(rows[0])
    assert rows[0]["device"] == "cpu, 1 threads"
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    settings, command = printed.out.splitlines()[-2:]
    assert settings.startswith(
        "depth 1, batch 1, passes inference, precision float32, form auto, checkpointing without"
    )
    assert command == f"command: {rows[0]['command']}"


def test_each_cell_is_printed_and_written_before_the_next_is_measured(
    main, jobs, tmp_path, capsys, monkeypatch
):
    counts, folder, real = [], tmp_path / "out", run.measure

    def measure(job):
        rows = read_csv(folder / "memory.csv") if jobs else []
        drawn = (folder / "memory.png").exists()
        counts.append((len(rows), len(table_in(capsys.readouterr().out)), drawn))
        return real(job)

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "png", lambda path, charts, **options: path.touch())  # in no time
    assert main([*FAKE, *words("--img-size 64 96 128 --fit-from 64 --output {}", folder)]) == 0
    head = 1
    assert counts == [(0, head, False)] + [(done, 1, True) for done in range(1, 6)]


def test_a_dry_run_lists_the_cells_with_the_time_expected_and_measures_nothing(
    main, jobs, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ticks = iter(range(10**6))
    monkeypatch.setattr(expected.time, "perf_counter", lambda: next(ticks))
    given = [*FAKE, *words("--img-size 64 128 --fit-from 64 --output out --dry-run true")]
    assert main(given) == 0
    head, *cells = table_in(printed := capsys.readouterr().out)
    assert [(row[0], row[1]) for row in cells] == [
        (name, px) for name in FAKE[1:3] for px in ("64", "128")
    ]
    # Each reading of the clock comes a second later: a start of 1 s, and passes of 1 s at 64 px.
    assert head[-1] == "expected" and [row[-1] for row in cells[::2]] == ["3.0 s", "3.0 s"]
    seconds = [float(row[-1].split()[0]) for row in cells[1::2]]
    assert all(8 <= each <= 13 for each in seconds), seconds  # 4 to 6 times the operations
    total = float(re.search(r"4 cells, (\S+) s in all; nothing is measured yet\n$", printed)[1])
    assert total == pytest.approx(sum(seconds) + 6, abs=1.5)
    assert [job.case.size for job in jobs] == [64] and not list(tmp_path.iterdir())
    assert main([*FAKE, "--largest", "true", "--dry-run", "true"]) == 2
    assert "largest finds its cells as it goes" in capsys.readouterr().err


def test_constant_settings_and_the_command_stand_under_the_table_and_the_plot(
    main, jobs, tmp_path, capsys, monkeypatch
):
    shown = []
    monkeypatch.setattr(
        run,
        "png",
        lambda path, charts, title, notes: shown.extend(notes) or path.touch(),
    )
    sizes = words("--img-size 1024 1536 --batch 3 --passes training_step --precision amp_bf16")
    assert (
        main(
            [
                *words("--models taylorshift_vit_t --device cpu"),
                *sizes,
                *words("--output {}", tmp_path / "$a$"),
            ]
        )
        == 0
    )
    wanted = (
        "depth all, batch 3, passes training_step, precision amp_bf16, form auto, "
        "checkpointing without, growth from 1024 px"
    )
    text = (tmp_path / "$a$" / "memory.md").read_text()
    assert text == capsys.readouterr().out and text.splitlines()[-2] == wanted
    assert text.splitlines()[-1].startswith(
        "command: visionattn profile --models taylorshift_vit_t --device cpu"
    )
    assert wanted in shown and "--batch 3" in shown[-1] and "torch" in shown[0]
    assert main(words("--models taylorshift_vit_t --device cpu --largest --budget-gib 0.001")) == 0
    assert capsys.readouterr().out.splitlines()[-2].endswith("checkpointing without")


def test_a_caption_with_dollars_is_drawn_as_text(main, jobs, tmp_path):
    path = tmp_path / "$a_{$.png"
    assert main([*FAKE, "--img-size", "64", "--plot", str(path)]) == 0
    assert path.stat().st_size > 1000


def test_growth_that_cannot_be_fitted_is_said(main, jobs, capsys):
    said = "growth -: fewer than two sizes from 1024 px (--fit-from) were measured"
    for sizes in (["64"], ["64", "96"]):
        assert main([*FAKE, "--img-size", *sizes]) == 0
        assert said in capsys.readouterr().out.splitlines()
    assert main([*FAKE, "--img-size", "1024", "1536"]) == 0
    assert "growth -" not in capsys.readouterr().out


def test_a_snapshot_is_named_and_where_there_is_none_the_exit_code_says_so(
    main, jobs, tmp_path, capsys
):
    path = tmp_path / "pass.pickle"
    one = words("--models taylorshift_vit_t --device cpu --img-size 1024 --snapshot {}", path)
    assert main(one) == 0
    assert (
        f"snapshot: {path}; https://pytorch.org/memory_viz shows it"
        in capsys.readouterr().out.splitlines()
    )
    assert main([*one, "--budget-gib", "0.001"]) == 3
    printed = capsys.readouterr()
    assert "out of memory" in printed.out
    assert printed.err == f"error: {path} is not written: the cell does not fit into memory\n"


def test_rows_that_do_not_fit_the_budget_stay_and_the_others_are_fitted(
    main, jobs, tmp_path, capsys
):
    files = [tmp_path / "rows.csv", tmp_path / "rows.png"]
    sizes = ["--img-size", "2048", "1024", "1536", "1024"]
    assert (
        main(
            [*FAKE, *sizes, "--budget-gib", "0.01", "--csv", str(files[0]), "--plot", str(files[1])]
        )
        == 0
    )
    rows = read_csv(files[0])
    assert [(row["px"], row["status"]) for row in rows[:3]] == [
        ("1024", "ok"),
        ("1536", "ok"),
        ("2048", "out of memory"),
    ]
    assert all(float(row["growth_exponent"]) == pytest.approx(1, abs=1e-3) for row in rows)
    assert rows[2]["peak_bytes"] == "" and "out of memory" in capsys.readouterr().out
    assert {job.budget_bytes for job in jobs} == {int(0.01 * 2**30)} and len(jobs) == 6
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_grid_has_a_row_for_each_choice_that_acts(main, jobs, tmp_path):
    path = tmp_path / "rows.csv"
    grid = words("--img-size 64 --passes inference training_step --precision float32 amp_bf16")
    grid += ["--form", "direct", "efficient", "--checkpointing", "both", "--csv", str(path)]
    assert main([*FAKE, *grid]) == 0
    rows = [
        tuple(row[key] for key in ("model", "pass", "precision", "form", "checkpointing"))
        for row in read_csv(path)
    ]
    assert len(rows) == len(set(rows)) == 2 * (2 * 1 + 2 * 2) + 2 * (1 + 2)
    assert {row[3] for row in rows if row[0] == "vit_tiny_patch16_224"} == {""}
    assert {row[4] for row in rows if row[1] == "inference"} == {"no"}
    assert {job.case.form for job in jobs} == {"auto", "direct", "efficient"}


def test_the_largest_image_is_a_row_for_each_series(main, jobs, tmp_path, capsys):
    path = tmp_path / "largest.csv"
    assert (
        main(
            [
                *FAKE,
                *words("--largest --budget-gib 0.001 --csv {} --plot {}", path, tmp_path / "a.png"),
            ]
        )
        == 0
    )
    wanted = max(n for n in range(1, 99) if 1000 * n * n < int(0.001 * 2**30))
    rows = read_csv(path)
    assert [row["largest_px"] for row in rows] == [str(16 * wanted)] * 2
    assert [row["too_large_px"] for row in rows] == [str(16 * (wanted + 1))] * 2
    assert rows[0]["tokens"] == str(wanted**2 + 1)
    assert rows[0]["above_bytes"] == str(1000 * wanted**2)
    assert table_in(capsys.readouterr().out)[1][5] == str(16 * wanted)


def test_a_cell_that_fails_is_a_row_and_the_others_are_measured(
    main, monkeypatch, tmp_path, capsys
):
    def measure(job):
        if job.case.size == 64:
            raise RuntimeError("NotImplementedError: no such kernel")
        return Bytes(9, None, 8, 1, 2, 3, 4)

    monkeypatch.setattr(run, "measure", measure)
    path = tmp_path / "rows.csv"
    assert main([*FAKE, "--img-size", "64", "96", "--csv", str(path)]) == 4
    status = [row["status"] for row in read_csv(path)]
    assert status == ["failed: NotImplementedError: no such kernel", "ok"] * 2
    assert capsys.readouterr().err.splitlines() == [
        "error: 2 of 4 cells failed; taylorshift_vit_t: failed: NotImplementedError: no such kernel"
    ]


BAD = {
    "--models scaleformer_vit_q": "timm knows no model 'scaleformer_vit_q'",
    "--models resnet18": "resnet18",
    "--models scaleformer_vit_t+eager": "eager attention is an option of timm's vit_*",
    "--img-size 1000": "not a whole number of 16-pixel patches; the nearest that fit: 992 or 1008",
    "--img-size 0": "img_size[0] must be above 0, got 0",
    "--passes forward": "passes: wanted any of inference, forward+backward, training_step, got "
    "'forward'",
    "--precision int8": "precision: wanted any of float32",
    "--models vit_tiny_patch16_224 --form direct": "form does nothing here: "
    "vit_tiny_patch16_224 have no forms",
    "--checkpointing with": "checkpointing does nothing in inference",
    "--snapshot new.pickle": "snapshot holds one cell, and these are 2",
    "--snapshot new.pickle --largest": "leave out one of them",
    "--largest --img-size 64": "largest searches for the image size: leave out img_size",
    "--largest --fit-from 64": "fit_from does nothing with largest",
    "--img-size 64 96 --fit-from 96": "fit_from 96: growth needs two sizes from there on, and "
    "img_size has 1",
    "--fit-from 64": "fit_from 64: growth needs two sizes from there on, and img_size has 1",
    "--budget-gib -1": "budget_gib must be above 0, got -1",
    "--budget-gib 0": "budget_gib must be above 0, got 0",
    "--depth 99": "depth 99: taylorshift_vit_t has 12 blocks",
    "--models": "--models needs a value",
    "--csv kept.csv": "kept.csv exists; --overwrite replaces it",
    "--output kept": "memory.csv exists; --overwrite replaces it",
    "--output kept.csv": "kept.csv is a file",
    "--output new --csv new.csv": "leave out csv and plot, or output",
    "--csv new --plot new": "one file for several things: csv new, plot new",
    "--plot nowhere/new.png": "no folder",
    "--output new --models taylorshift_vit_t --snapshot nowhere/new.pickle": "no folder",
    "--device abacus": "device 'abacus' cannot be used here",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_nothing_is_measured_or_written(
    main, jobs, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept.csv").write_text("old")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "memory.csv").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    base = [] if "--img-size" in flags or "--largest" in flags else ["--img-size", "64"]
    assert main([*FAKE, *base, *flags.split()]) == 2
    assert_one_error(capsys, BAD[flags])
    assert jobs == [] and sorted(tmp_path.rglob("*")) == before
    kept = tmp_path / "kept.csv", tmp_path / "kept" / "memory.csv"
    assert [path.read_text() for path in kept] == ["old"] * 2


def test_files_that_exist_are_replaced_when_asked(main, jobs, tmp_path):
    (tmp_path / "memory.csv").write_text("old")
    assert main([*FAKE, "--img-size", "64", "--output", str(tmp_path), "--overwrite"]) == 0
    assert len(read_csv(tmp_path / "memory.csv")) == 2


def test_help_ends_with_the_command_to_paste(main, capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"visionattn profile {run.EXAMPLE}")
