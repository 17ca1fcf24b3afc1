"""``tools/benchmark.py`` as it is typed: what it prints and writes, and how it ends."""

import json
from pathlib import Path

import pytest
import torch

import visionattn.lab.compare as compare
import visionattn.lab.targets as targets
from tests.helpers.tools import assert_one_error, load_tool, read_csv, words
from visionattn.lab.papers import FIGURES

ROOT = Path(__file__).parents[2]
SMALL = words("operations kernelized sdpa --tokens 45 77 --width 8 --heads 3 --no-memory")
SMALL += ["--rounds", "2", "--seconds", "0"]


@pytest.fixture(scope="module")
def main():
    return load_tool("benchmark")


@pytest.fixture
def without_processes(monkeypatch):
    """Peak memory as some number, without the process that measures it."""
    monkeypatch.setattr(compare, "case_peak_bytes", lambda case, device, warm: case.size << 14)


def test_a_sweep_prints_the_rows_that_it_writes(main, tmp_path, capsys):
    files = [tmp_path / name for name in ("rows.csv", "rows.json", "rows.png")]
    assert (
        main(
            [
                *SMALL,
                *words("--backward --csv {} --json {} --plot {}", files[0], files[1], files[2]),
            ]
        )
        == 0
    )
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == "" and "torch " in lines[0] and lines[2].startswith("| case | size | d |")
    assert [line.split(" | ")[:2] for line in lines[4:]] == [
        ["| kernelized efficient", "45"],
        ["| sdpa", "45"],
        ["| kernelized efficient", "77"],
        ["| sdpa", "77"],
    ]
    content, read = json.loads(files[1].read_text()), read_csv(files[0])
    assert len(read) == 4
    assert [row["case"] for row in content["rows"]] == [row["case"] for row in read]
    assert all(
        row["status"] == "ok" and row["baseline"] == "sdpa" and row["kept_bytes"] > 0
        for row in content["rows"]
    )
    assert content["provenance"]["command"].startswith(
        "visionattn benchmark operations kernelized sdpa"
    )
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_models_are_compared_with_twin_and_timm(main, capsys):
    names = ["scaleformer_vit_t", "scaleformer_vit_t+identity", "vit_tiny_patch16_224+eager"]
    flags = ["models", *names, *words("--img-size 32 --no-memory --rounds 2 --seconds 0")]
    assert main([*flags, "--baseline", "vit_tiny_patch16_224+eager"]) == 0
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}" for name in names]
    assert all(line.endswith(" ok |") for line in lines) and " 1 (1-1) " in lines[2]


def test_some_of_the_figures_to_reach_are_printed(main, tmp_path, capsys):
    kept = tmp_path / "targets.csv"
    assert main(["targets", "--only", "kept.*kernelized efficient", "--csv", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| what | at | reach | measured |") and len(lines) == 5
    assert "| 1.8 to 2.1 | 2 |  | yes |" in lines[4]
    (row,) = read_csv(kept)
    assert row["met"] == "yes"
    assert (
        row["command"]
        == f"visionattn benchmark targets --only 'kept.*kernelized efficient' --csv {kept}"
    )


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_drawn_and_their_rows_written(
    main, tmp_path, capsys, figure, without_processes
):
    assert main(["papers", figure, "--quick", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{figure}.csv", f"{figure}.png"]
    rows = read_csv(tmp_path / f"{figure}.csv")
    assert len(rows) >= 4
    assert all(row["status"] == "ok" and row["torch"] == torch.__version__ for row in rows)
    assert printed.count("\n| ") >= len(rows)
    assert ("published" in printed) == (figure in ("crossover", "taylorshift-heads"))


def test_a_horizon_may_be_zero(main, tmp_path):
    kept = tmp_path / "rows.csv"
    flags = words(
        "operations relative kernelized+joint kernelized+flat --tokens 245 --width 8 --no-memory"
    )
    assert (
        main([*flags, "--horizon", "0", "--rounds", "1", "--seconds", "0", "--csv", str(kept)]) == 0
    )
    rows = read_csv(kept)
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert float(rows[1]["flops"]) < 2 * 6 * 245 * 8 * (
        3 * 9 + 8 + 8
    )  # the content term, and one class


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], (5, 2.0, True)),
        (["--rounds", "7"], (7, 2.0, False)),
        (["--seconds", "0.5"], (5, 0.5, False)),
    ],
)
def test_rounds_and_seconds_act_on_the_figures_to_reach(main, monkeypatch, flags, expected):
    asked = []

    def measure(chosen, plan, few):
        asked.append((plan.rounds, plan.seconds, few))
        return iter([targets.Result(chosen[0], value=1.0)])

    monkeypatch.setattr(targets, "measure_targets", measure)
    assert main(["targets", *flags]) == 0
    assert asked == [expected]


def test_threads_hold_for_the_run_alone(main, capsys):
    before = torch.get_num_threads()
    assert main([*SMALL, "--threads", "3"]) == 0
    assert "cpu, 3 threads" in capsys.readouterr().out and torch.get_num_threads() == before


BAD_FLAGS = [
    (
        [],
        "wanted one of operations, models, targets, papers, loader, gpu, got none",
    ),
    (["figures"], "invalid choice: 'figures'"),
    (["operations"], "the following arguments are required: NAME"),
    (["targets", "operations", "sdpa"], "unrecognized arguments: operations sdpa"),
    (["--operations", "sdpa"], "--operations is now a command: benchmark operations"),
    (["--models=scaleformer_vit_s"], "--models is now a command: benchmark models"),
    (["--json", "a.json", "--targets"], "--targets is now a command: benchmark targets"),
    (["--figure", "crossover"], "--figure is now a command: benchmark papers"),
    (["--loader", "digits"], "--loader is now a command: benchmark loader"),
    (["--gpu"], "--gpu is now a command: benchmark gpu"),
    (["operations", "sdqa"], "operation 'sdqa': wanted one of sdpa, eager"),
    (["operations", "sdpa+joint"], "sdpa has no option 'joint'; it has causal"),
    (["operations", "kernelized+joint+axial"], "one relative position at a time"),
    (["models", "scaleformer_vit_q"], "timm knows no model 'scaleformer_vit_q'"),
    (
        ["models", "vit_tiny_patch16_224+identity"],
        "an identity twin is made of visionattn's models",
    ),
    (["models", "scaleformer_vit_t+eager"], "eager attention is an option of timm's vit_*"),
    (["models", "scaleformer_vit_t+heads=none"], "has no option 'heads=none'"),
    (
        ["models", "scaleformer_vit_t+heads=5", "--no-memory"],
        "num_heads 5 does not divide the width 192",
    ),
    (
        ["models", "scaleformer_vit_t", "--img-size", "65"],
        "is not a whole number of 16-pixel patches",
    ),
    (
        ["operations", "sdpa", "--baseline", "eager"],
        "--baseline 'eager': wanted one of the cases: sdpa",
    ),
    (["operations", "sdpa", "--tokens", "0"], "wanted a whole number from 1, got '0'"),
    (["operations", "sdpa", "--dtype", "int8"], "invalid choice: 'int8'"),
    (["operations", "sdpa", "--img-size", "64"], "--img-size does nothing with operations"),
    (["operations", "sdpa", "--seconds", "-1"], "--seconds: wanted 0 or more, got -1;"),
    (["operations", "sdpa", "--device", "cuda:99"], "device 'cuda:99' cannot be used here"),
    (["operations", "sdpa", "--csv", "nowhere/rows.csv"], "nowhere for rows.csv"),
    (["targets", "--only", "nothing of this name"], "fits none of 37 rows"),
    (["papers", "five"], "invalid choice: 'five'"),
    (["papers", "crossover", "--output", "nowhere"], "nowhere for crossover.png"),
    (
        ["papers", "crossover", "--rounds", "9"],
        "--rounds does nothing with papers; it belongs to operations and models",
    ),
    (["papers", "crossover", "--seconds", "9"], "--seconds does nothing with papers"),
    (["targets", "--only", "kept", "--rounds", "9"], "--rounds and --seconds do nothing here"),
    (
        ["operations", "sdpa", "eager", "--form", "direct"],
        "--form does nothing here: sdpa, eager have no forms",
    ),
    (
        ["models", "vit_tiny_patch16_224", "--form", "direct"],
        "--form does nothing here: vit_tiny_patch16_224 have",
    ),
    (
        ["operations", "kernelized", "--horizon", "2"],
        "--horizon does nothing here: kernelized have no relative position",
    ),
    (["operations", "relative", "--horizon", "-1"], "wanted a whole number from 0, got '-1'"),
    (["targets", "--speed", "9"], "unrecognized arguments: --speed 9; targets --help lists"),
    (["gpu", "all"], "unrecognized arguments: all"),
    (["gpu", "--only", "nothing of this name"], "rows; the first is 'kernelized forward d = 64"),
    (["gpu", "--minutes", "-1"], "--minutes: wanted 0 or more, got -1;"),
    (["gpu", "--tokens", "64"], "--tokens does nothing with gpu; it belongs to operations"),
    (
        ["targets", "--minutes", "1"],
        "--minutes does nothing with targets; it belongs to gpu",
    ),
    (["gpu", "--json", "nowhere/rows.json"], "nowhere for rows.json"),
]


@pytest.mark.parametrize(
    "flags, part", BAD_FLAGS, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_ends_with_one_line_and_code_2(main, tmp_path, capsys, monkeypatch, flags, part):
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    assert_one_error(capsys, part)
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_there_is_one_line_and_code_2(main, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu"]) == 2
    printed = capsys.readouterr()
    assert (
        printed.err
        == "error: no GPU here that PyTorch can use (torch.cuda.is_available() is False)\n"
        and printed.out == ""
    )


def test_files_that_exist_are_replaced_on_request_alone(main, tmp_path, capsys, without_processes):
    for flags, name in (
        (["--csv"], "rows.csv"),
        (["--json"], "rows.json"),
        (["--plot"], "rows.png"),
    ):
        path = tmp_path / name
        path.write_text("mine")
        assert main([*SMALL, *flags, str(path)]) == 2
        assert f"{path} exists; --overwrite replaces it" in capsys.readouterr().err
        assert path.read_text() == "mine"
    (tmp_path / "scaleformer-6.csv").write_text("mine")
    assert main(["papers", "scaleformer-6", "--quick", "--output", str(tmp_path)]) == 2
    assert (tmp_path / "scaleformer-6.csv").read_text() == "mine"
    assert not (tmp_path / "scaleformer-6.png").exists()
    assert main([*SMALL, "--csv", str(tmp_path / "rows.csv"), "--overwrite"]) == 0
    assert (tmp_path / "rows.csv").read_text().startswith("case,size,width")
