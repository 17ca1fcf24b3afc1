"""Memory profiles: the parts of a cell, growth, the file for the memory viewer, and the command as
it is typed.
"""

import math
import pickle
import sys
from dataclasses import asdict, replace

import pytest
import timm
import torch

from tests.helpers.tools import assert_one_error, load_tool, read_csv, words
from visionattn.cli.exit_codes import Failed
from visionattn.lab.cases import PRECISIONS, Case
from visionattn.lab.figures import memory_of
from visionattn.lab.model_step import bytes_of
from visionattn.lab.profile import memory_profile
from visionattn.lab.profile.memory_cells import PARTS, measure, measure_here, place, warm_step
from visionattn.lab.profile.memory_profile import n1_of, shapes_of
from visionattn.lab.profile.profile_flags import ProfileConfig

main = load_tool("profile_memory")
linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory of a CPU is measured under Linux only"
)
TINY = Case("model", "taylorshift_vit_t", 48, depth=1)
BACKWARD = replace(TINY, backward=True)
FAKE = words("--models taylorshift_vit_t vit_tiny_patch16_224 --depth 1 --device cpu")


def step_at(case: Case):
    """A step of a case, warm, with an image in place."""
    step = warm_step(case, "cpu")
    place(step, case)
    return step


@pytest.mark.parametrize(("precision", "size"), [("bfloat16", 2), ("amp_fp16", 4)])
def test_parameters_gradients_and_optimizer_state_are_the_bytes_of_their_tensors(precision, size):
    own = timm.create_model("vit_tiny_patch16_224", depth=1)
    tensors = list(own.parameters())
    count = sum(parameter.numel() for parameter in tensors)
    dtype, amp = PRECISIONS[precision]
    how = dict(dtype=dtype, amp=amp, backward=True, update=True, depth=1)
    step = step_at(Case("model", "vit_tiny_patch16_224", 48, **how))
    assert step.gradients() == [] and step.images.shape == (1, 3, 48, 48)
    step.run()
    assert bytes_of(step.parameters()) == size * count
    # The gradient of the class token is a view of the gradient of all 10 tokens.
    assert bytes_of(step.gradients()) == size * (count + 9 * 192)
    state = 2 * size * count + 4 * len(tensors)
    assert bytes_of(step.optimizer_state()) == state


def test_a_checkpointed_block_keeps_its_input_alone():
    def saved(depth: int, checkpointing: bool) -> int:
        case = replace(BACKWARD, size=80, depth=depth, checkpointing=checkpointing)
        return step_at(case).saved_bytes()

    assert saved(2, True) - saved(1, True) == (25 + 1) * 192 * 4
    assert saved(2, False) - saved(1, False) > 10 * 26 * 192 * 4


@linux
def test_what_inference_holds_are_activations_and_a_backward_counts_what_is_saved():
    def sizes(case):
        found = measure_here(asdict(case), "cpu", None, torch.get_num_threads())
        return [found[f"{part}_bytes"] for part in PARTS]

    peak, reserved, above, _, gradients, state, activations = sizes(TINY)
    assert reserved is None and peak > above == activations and gradients == state == 0
    *_, parameters, gradients, _, activations = sizes(BACKWARD)
    assert 10 * 192 * 4 * 8 < activations < parameters / 4
    assert gradients == parameters + 9 * 192 * 4


def test_the_plot_marks_n1_in_tokens_and_pixels_for_taylorshift_alone():
    models = ["taylorshift_vit_t", "scaleformer_vit_t", "taylorshift_vit_t+identity"]
    shapes = shapes_of(ProfileConfig(models=models, img_size=[112]))
    assert [shape.tokens(112) for shape in shapes.values()] == [50, 50, 50]
    rows = [{"model": models[0], "pass": "inference", "px": px, "above_bytes": px << 20}
            for px in (64, 128)]  # fmt: skip
    rows = [row | {"tokens": row["px"] ** 2, "growth_exponent": 0.5} for row in rows]
    (chart,) = memory_of(rows, n1=n1_of(shapes.values()))
    (line,), (mark,) = chart.series, chart.marks
    assert (list(line.x), list(line.y)) == ([64, 128], [64, 128]) and "tokens⁰·⁵" in line.name
    assert mark.text == "N1 of TaylorShift, d = 32: 574 tokens"  # as in the table of the paper
    assert round(mark.x) == 383 and mark.y is None


def test_a_cell_beyond_the_budget_ends_as_out_of_memory_in_a_process_of_its_own(started_quickly):
    """A matrix of 3 x 16,385 x 16,385 float32 is 3 GiB."""
    case = Case("model", "vit_tiny_patch16_224+eager", 2048, depth=1)
    with pytest.raises(torch.OutOfMemoryError, match=r"2048 px does not fit"):
        measure(case, "cpu", 3 << 29)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_peaks_are_those_of_pytorchs_allocator_and_a_budget_is_a_smaller_card(tmp_path):
    path, table = tmp_path / "pass.pickle", tmp_path / "out"
    one = words("--models vit_tiny_patch16_224+eager --img-size 1024 --depth 1 --device cuda")
    one += words("--passes training_step --snapshot {} --output {}", path, table)
    assert main(one) == 0
    (row,) = read_csv(table / "memory.csv")
    peak, reserved, above, parameters, _, state, _ = (int(row[f"{part}_bytes"]) for part in PARTS)
    matrix = 3 * 4097**2 * 4
    assert reserved >= peak >= above > 2 * matrix and state > 2 * parameters
    events = pickle.loads(path.read_bytes())["device_traces"][0]
    assert max(event["size"] for event in events if "size" in event) >= matrix
    case = Case("model", "vit_tiny_patch16_224+eager", 1024, backward=True, depth=1)
    with pytest.raises(torch.OutOfMemoryError):
        measure(case, "cuda", 2 * matrix)


@pytest.fixture
def cases(monkeypatch):
    """Cases that were measured, without the processes: 1000 bytes per patch and some more for
    small images, out of memory from the budget on, and a failure at 80 px; nothing is drawn.
    """
    seen = []

    def measured(case, device, budget_bytes):
        seen.append(case)
        above = 1000 * (case.size // 16) ** 2 + (5000 if case.size < 1024 else 0)
        if case.size == 80:
            raise Failed("NotImplementedError: no such kernel")
        if above >= budget_bytes:
            raise torch.OutOfMemoryError("too large")
        sizes = (above + 5, None, above, 1, 2, 3, 4)
        return {f"{part}_bytes": size for part, size in zip(PARTS, sizes, strict=True)}

    monkeypatch.setattr(memory_profile, "measure", measured)
    monkeypatch.setattr(memory_profile, "png", lambda path, charts, **options: path.touch())
    return seen


def table_in(text):
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows]


@linux
def test_a_profile_of_real_models_is_printed_and_written_with_its_growth(
    started_quickly, tmp_path, capsys
):
    """Levels differ from processor to processor, so that none is compared with a number here."""
    folder = tmp_path / "new" / "profile"
    real = words("--models vit_tiny_patch16_224+eager --img-size 512 736 --fit-from 512 --depth 1")
    assert main([*real, *words("--threads 1 --device cpu --output {}", folder)]) == 0
    printed, rows = capsys.readouterr(), read_csv(folder / "memory.csv")
    assert printed.err == "" and printed.out == (folder / "memory.md").read_text()
    assert [(row["tokens"], row["status"]) for row in rows] == [("1025", "ok"), ("2117", "ok")]
    above = [int(row["above_bytes"]) for row in rows]
    growth = math.log(above[1] / above[0]) / math.log(2117 / 1025)
    assert float(rows[0]["growth_exponent"]) == pytest.approx(growth, rel=1e-9)
    head, *cells = table_in(printed.out)
    assert [row[head.index("growth")] for row in cells] == ["-", f"{growth:.2f}"]
    assert above[1] > 2 * 3 * 2117**2 * 4  # the scores and their softmax
    assert int(rows[0]["peak_bytes"]) > above[0] > 0
    assert rows[0]["device"] == "cpu, 1 threads" and rows[0]["torch"] == torch.__version__
    assert rows[0]["command"].startswith("visionattn profile --models vit_tiny_patch16_224+eager")
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_each_cell_is_printed_and_written_before_the_next_is_measured(
    cases, tmp_path, capsys, monkeypatch
):
    counts, real = [], memory_profile.measure

    def measured(*given):
        rows = read_csv(tmp_path / "memory.csv") if cases else []
        drawn = (tmp_path / "memory.png").exists()
        counts.append((len(rows), len(table_in(capsys.readouterr().out)), drawn))
        return real(*given)

    monkeypatch.setattr(memory_profile, "measure", measured)
    assert main([*FAKE, *words("--img-size 64 96 --output {}", tmp_path)]) == 0
    assert counts == [(0, 1, False), (1, 1, True), (2, 1, True), (3, 1, True)]
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "depth 1, batch 1, passes inference, precision float32, form auto, checkpointing without, "
        "fit_from 1024",
        f"command: visionattn profile {' '.join(FAKE)} --img-size 64 96 --output {tmp_path}",
    ]


def test_rows_that_do_not_fit_the_budget_or_fail_stay_and_the_others_are_fitted(
    cases, tmp_path, capsys
):
    sizes = words("--img-size 2048 1024 1536 1024 80 64 --budget-gib 0.01")
    assert main([*FAKE, *sizes, "--output", str(tmp_path)]) == 4
    rows = read_csv(tmp_path / "memory.csv")
    failed = "failed: NotImplementedError: no such kernel"
    wanted = [
        ("64", "ok"),
        ("80", failed),
        ("1024", "ok"),
        ("1536", "ok"),
        ("2048", "out of memory"),
    ]
    assert [(row["px"], row["status"]) for row in rows] == 2 * wanted
    assert all(float(row["growth_exponent"]) == pytest.approx(1, abs=1e-3) for row in rows)
    assert rows[4]["peak_bytes"] == "" and rows[4]["tokens"] == "16385"
    said = f"error: 2 of 10 cells failed; taylorshift_vit_t: {failed}\n"
    assert capsys.readouterr().err == said


def test_a_grid_has_a_row_for_each_choice_that_acts(cases, tmp_path):
    grid = words("--img-size 64 --passes inference training_step --precision float32 amp_bf16")
    grid += words("--form direct efficient --checkpointing both --output {}", tmp_path)
    assert main([*FAKE, *grid]) == 0
    rows = read_csv(tmp_path / "memory.csv")
    keys = ("model", "pass", "precision", "form", "checkpointing")
    assert len(rows) == len({tuple(row[key] for key in keys) for row in rows}) == 18
    assert {row["form"] for row in rows if row["model"] == "vit_tiny_patch16_224"} == {""}
    assert {row["checkpointing"] for row in rows if row["pass"] == "inference"} == {"no"}
    assert {case.form for case in cases} == {"auto", "direct", "efficient"}


def test_the_largest_image_is_found_among_rows_of_each_series(cases, tmp_path, capsys):
    assert main([*FAKE, *words("--largest --budget-gib 0.001 --output {}", tmp_path)]) == 0
    wanted = max(n for n in range(1, 99) if 1000 * n * n < int(0.001 * 2**30))
    said = f"largest image of taylorshift_vit_t that fits: {16 * wanted} px"
    assert said in capsys.readouterr().out.splitlines()
    rows = read_csv(tmp_path / "memory.csv")
    for model in FAKE[1:3]:
        tried = {int(row["px"]): row["status"] for row in rows if row["model"] == model}
        assert max(px for px in tried if tried[px] == "ok") == 16 * wanted
        assert tried[16 * (wanted + 1)] == "out of memory"


BAD = {
    "--models scaleformer_vit_q": "taylorshift_vit_s), got 'scaleformer_vit_q'",
    "--models resnet18": "resnet18",
    "--img-size 1000": "not a whole number of 16-pixel patches; the nearest that fit: 992 or 1008",
    "--img-size 0": "img_size must be at least 1, got 0",
    "--passes forward": "passes[0] must be one of inference, forward+backward, training_step, got "
    "forward",
    "--models vit_tiny_patch16_224 --form direct": "form needs models of "
    "visionattn, got vit_tiny_patch16_224",
    "--checkpointing with": "checkpointing has no effect in inference",
    "--snapshot new.pickle": "expected one cell for snapshot, got 2",
    "--snapshot new.pickle --largest": "expected one cell for snapshot, got many",
    "--models taylorshift_vit_t --img-size 1024 --snapshot new.pickle": "snapshot is for a GPU",
    "--largest --img-size 64": "largest searches for the image size; remove img_size",
    "--budget-gib -1": "budget_gib must be above 0, got -1",
    "--depth 99": "expected depth at most 12 for taylorshift_vit_t, got 99",
    "--models": "--models needs a value",
    "--output kept": "memory.csv exists; pass --overwrite to replace it",
    "--output kept/memory.csv": "memory.csv is a file",
    "--models taylorshift_vit_t --snapshot nowhere/new.pickle": "no folder",
    "--device abacus": "device 'abacus' is not available",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_one_line_and_nothing_is_measured_or_written(
    cases, flags, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept" / "memory.csv"
    kept.parent.mkdir()
    kept.write_text("old")
    before = sorted(tmp_path.rglob("*"))
    base = [] if "--img-size" in flags or "--largest" in flags else ["--img-size", "64"]
    assert main([*FAKE, *base, *flags.split()]) == 2
    assert_one_error(capsys, BAD[flags])
    assert cases == [] and sorted(tmp_path.rglob("*")) == before and kept.read_text() == "old"
    if flags == "--output kept":
        assert main([*FAKE, *base, *flags.split(), "--overwrite"]) == 0
        assert len(read_csv(kept)) == 2
