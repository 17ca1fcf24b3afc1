"""``visionattn benchmark``: what it prints, writes and refuses. No test looks at a time."""

import pytest
import torch

import visionattn.lab.case_comparison as compare
import visionattn.lab.measure as measure
from tests.helpers.tools import assert_one_error, load_tool, read_csv, words
from visionattn.lab.papers import FIGURES

SMALL = words("--rounds 1 --seconds 0 --no-memory")


@pytest.fixture(scope="module")
def main():
    return load_tool("benchmark")


def test_the_printed_rows_are_written_with_what_they_depend_on(main, tmp_path, capsys):
    csv, plot, before = tmp_path / "rows.csv", tmp_path / "rows.png", torch.get_num_threads()
    named = "operations kernelized relative+causal sdpa --width 8 --tokens 77 45 --horizon 0"
    files = words("--csv {} --plot {} --threads 3 --backward", csv, plot)
    assert main([*words(named), *SMALL, *files]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert printed.err == "" and "cpu, 3 threads" in lines[0] and "torch " in lines[0]
    assert torch.get_num_threads() == before
    labels = ["kernelized efficient", "relative+causal efficient", "sdpa"]
    cells = [line.strip("| ").split(" | ") for line in lines[4:]]
    assert [row[:2] for row in cells] == [[label, n] for n in ("77", "45") for label in labels]
    rows = read_csv(csv)
    assert [row["case"] for row in rows] == 2 * labels
    assert {(row["status"], row["baseline"], row["pass"]) for row in rows} == {
        ("ok", "sdpa", "forward+backward")
    }
    assert all(float(row["kept_bytes"]) > 0 and row["peak_bytes"] == "" for row in rows)
    assert rows[0]["command"].startswith("visionattn benchmark operations kernelized")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*words(named), *SMALL, "--csv", str(csv)]) == 2
    assert f"{csv} exists; pass --overwrite to replace it" in capsys.readouterr().err


def test_models_are_compared_with_twin_and_timm(main, capsys):
    names = ["scaleformer_vit_t", "scaleformer_vit_t+identity", "vit_tiny_patch16_224+eager"]
    flags = ["models", *names, "--img-size", "32", *SMALL]
    assert main([*flags, "--baseline", "vit_tiny_patch16_224+eager"]) == 0
    lines = capsys.readouterr().out.splitlines()[4:]
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}" for name in names]
    assert all(line.endswith(" ok |") for line in lines) and " | 1 | 1 | 1 | " in lines[2]


def test_some_of_the_figures_to_reach_are_printed(main, tmp_path, capsys):
    kept = tmp_path / "targets.csv"
    assert main(["targets", "--only", "kept.*kernelized efficient", "--csv", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "| 1.8 to 2.1 | 1.996 |  |  | yes |" in lines[4]
    (row,) = read_csv(kept)
    assert row["met"] == "yes" and row["command"].startswith("visionattn benchmark targets --only")


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_drawn_and_their_rows_written(main, tmp_path, capsys, monkeypatch, figure):
    def peak_here(case, device, warm):
        return measure.peak_bytes(compare.build(case))

    monkeypatch.setattr(compare, "case_peak_bytes", peak_here)
    path = tmp_path / f"{figure}.csv"
    assert main(["papers", figure, "--quick", "--csv", str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    rows = read_csv(path)
    assert len(rows) >= 4 and {row["status"] for row in rows} == {"ok"}
    assert capsys.readouterr().out.count("\n| ") >= len(rows)


BAD_FLAGS = {
    "": "expected one of operations, models, targets, papers, loader, gpu, got ''",
    "figures": "got 'figures'",
    "operations": "nothing to measure",
    "operations sdqa": "operation 'sdqa': expected one of sdpa, eager",
    "operations sdpa+joint": "sdpa has no option 'joint'; expected causal",
    "operations kernelized+joint+axial": "expected at most one relative position",
    "operations kernelized+relu+favor": "expected at most one feature map",
    "models scaleformer_vit_q": "taylorshift_vit_s), got 'scaleformer_vit_q'",
    "models vit_tiny_patch16_224+identity": "identity needs a model of visionattn",
    "models scaleformer_vit_t+eager": "eager needs a timm vit_*",
    "models scaleformer_vit_t+heads=none": "expected options identity, eager or heads=NUMBER",
    "models scaleformer_vit_t+heads=5": "expected num_heads that divides the width 192",
    "models vit_tiny_patch16_224+heads=5": "cannot be built as a vision transformer: dim should",
    "models resnet18": "resnet18 cannot be built as a vision transformer: ",
    "models swin_tiny_patch4_window7_224": "expected a plain vision transformer of timm or visiona",
    "models vit_tiny_r_s16_p8_224": "expected a plain vision transformer of timm or visionattn",
    "models scaleformer_vit_t --img-size 65": "is not a whole number of 16-pixel patches",
    "operations sdpa --baseline eager": "baseline eager: expected one of the cases: sdpa",
    "operations sdpa --tokens 0": "tokens must be at least 1, got 0",
    "operations sdpa --tokens 99999999999999": "its inputs need ",
    "operations relative --horizon -1": "horizon must be at least 0, got -1",
    "operations sdpa --dtype int8": "dtype",
    "operations sdpa --seconds -1": "seconds must be at least 0, got -1",
    "operations sdpa --device cuda:99": "device 'cuda:99' is not available",
    "operations sdpa --csv nowhere/rows.csv": "nowhere for rows.csv",
    "operations sdpa --plot rows.csv": "expected --plot to end in .png, got rows.csv",
    "papers crossover --csv crossover.png": "expected --csv to end in .csv, got crossover.png",
    "operations sdpa eager --form direct": "form has no effect, because sdpa, eager have no forms",
    "operations sdpa --img-size 64": "unknown option --img-size",
    "targets --only nothing": "matches none of 37 rows",
    "papers five": "figure must be one of crossover",
    "papers crossover --csv nowhere/a.csv": "nowhere for a.csv",
    "gpu": "expected a GPU for PyTorch",
    "gpu all": "unrecognized arguments: all; --help lists the options",
    "gpu --only nothing": "rows; first: 'kernelized forward d = 64",
    "gpu --minutes -1": "--minutes must be at least 0, got -1",
    "gpu --csv nowhere/rows.csv": "nowhere for rows.csv",
}


@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_input_ends_with_one_line_and_code_2(main, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(flags.split()) == 2
    assert_one_error(capsys, BAD_FLAGS[flags])
    assert list(tmp_path.iterdir()) == []
