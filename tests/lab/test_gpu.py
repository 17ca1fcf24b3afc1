"""The table of a GPU without one: floors against numbers worked out by hand, rows, and what stands
where something is wrong.
"""

import csv
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import visionattn.ops as ops
from visionattn.cli.tables import csv_text, json_text
from visionattn.lab.compare import Quartiles
from visionattn.lab.gpu import operations as gpu_operations
from visionattn.lab.gpu import table as gpu
from visionattn.lab.gpu import timing as gpu_timing
from visionattn.lab.gpu.device import Gpu, rehearsed
from visionattn.lab.gpu.eager import eager_cases
from visionattn.lab.gpu.expected import cost_of
from visionattn.lab.gpu.operations import (
    Bench,
    auto_crossing,
    crossing,
    definition,
    draw,
    measure_operation,
    wrong,
)
from visionattn.lab.gpu.results import GpuResult
from visionattn.lab.gpu.timing import Budget, Ceilings
from visionattn.lab.target_table import gpu_operation, gpu_targets
from visionattn.lab.targets import Bound, choose_rows
from visionattn.ops import reference
from visionattn.ops.taylorshift.gpu import takes_efficient_kernels, tile_features

# blocks of scores are not fused where nothing is compiled for a GPU:
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")

CPU = torch.device("cpu")
H200 = Ceilings(4.3e12, 790e12)


def bench(**more):
    options = dict(impl="eager", seconds=0.0, rounds=1, backend="aot_eager")
    return Bench(
        rehearsed(), torch.Generator().manual_seed(3), Ceilings(1e10, 1e11), **options | more
    )


def small(what, dtype="float32"):
    """A figure at a size that a processor has done at once."""
    figure = next(figure for figure in gpu_targets() if figure.what == what)
    return replace(figure, case=replace(figure.case, size=90, batch=1, heads=2, dtype=dtype))


# Microseconds of one head, forward, at 790 TFLOP/s and 4.3 TB/s: direct, efficient with tiles of
# 16, bytes alone.
FLOORS = [
    (16, 16_384, 21.75, 0.382, 0.488),
    (32, 16_384, 43.5, 2.21, 0.975),
    (64, 4096, 5.44, 3.57, 0.488),
    (64, 16_384, 87.0, 14.27, 1.95),
    (64, 65_536, 1392, 57.1, 7.80),
]


@pytest.mark.parametrize("d, tokens, direct, efficient, transfer", FLOORS)
def test_floors_of_a_head_are_those_worked_out_by_hand(d, tokens, direct, efficient, transfer):
    costs = {
        form: cost_of("taylorshift", form, tokens, d, groups=1, backward=False)
        for form in ("direct", "efficient")
    }
    assert 1e6 * costs["direct"].operations / 790e12 == pytest.approx(direct, rel=0.005)
    assert 1e6 * costs["efficient"].operations / 790e12 == pytest.approx(efficient, rel=0.005)
    assert 1e6 * costs["efficient"].bytes / 4.3e12 == pytest.approx(transfer, rel=0.005)
    assert 1e6 * H200.floor_seconds(costs["efficient"]) == pytest.approx(
        max(efficient, transfer), rel=0.005
    )
    kernelized = cost_of("kernelized", "efficient", tokens, d, groups=12, backward=False)
    assert 1e6 * H200.floor_seconds(kernelized) == pytest.approx(
        12 * transfer, rel=0.005
    )  # bound by memory at every width


def test_a_backward_pass_adds_its_operations_and_bytes():
    both = {
        form: cost_of("taylorshift", form, 1000, 32, groups=3, backward=True)
        for form in ("direct", "efficient")
    }
    assert both["direct"].operations == 3 * 14 * 1000**2 * 32
    assert both["efficient"].operations == 3 * (12 * 1000 * 768 * 32 + 28 * 1000 * 32**2)
    assert both["direct"].bytes == both["efficient"].bytes == 3 * 22 * 1000 * 32


def test_rates_count_bytes_read_and_written_and_two_operations_for_a_multiply_and_add(monkeypatch):
    runs = []

    def seconds(works, gpu, seconds, rounds):
        runs.extend(work.run() for work in works)
        return [Quartiles(1, 2, 3), Quartiles(1, 4, 5)]

    monkeypatch.setattr(gpu_timing, "seconds_of", seconds)
    sizes = dict(copy_bytes=3000, matmul_size=20)
    rates = gpu_timing.measure_ceilings(rehearsed(), torch.Generator().manual_seed(0), **sizes)
    assert rates == Ceilings(2 * 3000 / 2, 2 * 20**3 / 4) and len(runs) == 2
    assert str(H200) == "copy 4.30 TB/s, bf16 matmul 790 TFLOP/s"


def test_a_gpu_is_described_by_what_numbers_depend_on(monkeypatch):
    pytest.importorskip("triton", reason="GPU kernels need Triton")
    about = dict(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    about |= dict(total_memory=140 * 2**30, L2_cache_size=60 << 20)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**about)
    )
    found = gpu.describe_gpu(Gpu(torch.device("cuda", 0)), 5)
    assert (found["gpu"], found["capability"], found["memory_gib"]) == ("NVIDIA H200", "9.0", 140.0)
    assert (found["l2_mib"], found["seed"], found["multiprocessors"]) == (60, 5, 132)
    assert {"driver", "cuda", "triton", "timm"} <= set(found)


def test_features_are_counted_in_whole_pairs_of_tiles():
    assert [tile_features(d) for d in (8, 16, 24, 32, 64)] == [256, 256, 768, 768, 2560]


LATENCY = "scaleformer_vit_s latency / timm's ViT-S with SDPA"
GRAPH, PLAIN = "x ViT-S's with a graph", "x ViT-S's without"
ROWS = [
    ("kernelized forward", "d = 64, N = 65,536, B*h = 12", ">= 70 % of the copy"),
    ("kernelized forward+backward", "d = 64, N = 65,536, B*h = 12", ">= 60 % of the copy"),
    ("efficient TaylorShift forward", "d = 64, N = 65,536, B*h = 12", ">= 50 % of the matmul"),
    ("efficient TaylorShift forward", "d = 32, N = 65,536, B*h = 12", ">= 35 % of the matmul"),
    ("efficient TaylorShift forward+backward", "d = 32, N = 16,384, B*h = 12", ">= 15 x SDPA"),
    (
        "direct TaylorShift forward",
        "d = 64, N = 4,096, B*h = 12",
        ">= 1 x SDPA, (TFLOP/s), (TFLOP/s of SDPA)",
    ),
    (
        "scaleformer_vit_s inference / timm's ViT-S with SDPA",
        "1024 px, batch 16",
        ">= 1.5 x images/s",
    ),
    (
        "scaleformer_vit_s inference / its identity-attention twin",
        "1024 px, batch 16",
        ">= 0.8 x images/s",
    ),
    ("scaleformer_vit_s inference / timm's ViT-S with SDPA", "2048 px, batch 4", ">= 4 x images/s"),
    (
        "scaleformer_vit_s inference / its identity-attention twin",
        "2048 px, batch 4",
        ">= 0.8 x images/s",
    ),
    (
        "scaleformer_vit_s inference / timm's ViT-S with SDPA",
        "4096 px, batch 1",
        ">= 14 x images/s",
    ),
    (
        "scaleformer_vit_s inference / its identity-attention twin",
        "4096 px, batch 1",
        ">= 0.8 x images/s",
    ),
    (
        "scaleformer_vit_b inference / timm's ViT-B with SDPA",
        "1024 x 2048 px, batch 1",
        "<= 6 ms on H100, (x images/s)",
    ),
    (
        "scaleformer_vit_b inference / its identity-attention twin",
        "1024 x 2048 px, batch 1",
        "(x images/s)",
    ),
    (
        "scaleformer_vit_b inference / timm's ViT-B with SDPA",
        "1024 x 2048 px, batch 8",
        "<= 48 ms on H100, (x images/s)",
    ),
    (
        "scaleformer_vit_b inference / its identity-attention twin",
        "1024 x 2048 px, batch 8",
        "(x images/s)",
    ),
    (
        "scaleformer_vit_s, one image, plain forward",
        "16384 x 16384 px, 1,048,576 tokens",
        "<= 1 s, <= 24 GiB",
    ),
    (
        "scaleformer_vit_s training step / ViT-S with SDPA",
        "2048 px, batch 4",
        ">= 3 x steps/s, <= 1.02 x memory",
    ),
    *((LATENCY, f"{pixels} px, batch 1", f"({GRAPH}), ({PLAIN})") for pixels in (224, 384)),
    *(
        (LATENCY, f"{pixels} px, batch 1", f">= 1 {GRAPH}, >= 1 {PLAIN}")
        for pixels in (512, 768, 1024)
    ),
    (
        "crossover of direct and efficient TaylorShift, forward",
        "d = 16, GPU filled",
        "<= 400 tokens",
    ),
    (
        "crossover of direct and efficient TaylorShift, forward",
        "d = 32, GPU filled",
        "<= 1200 tokens",
    ),
    (
        "crossover of direct and efficient TaylorShift, forward",
        "d = 64, GPU filled",
        "<= 3700 tokens",
    ),
]


def test_the_rows_are_the_figures_to_reach():
    assert [(figure.what, figure.at, figure.reach) for figure in gpu_targets()] == ROWS
    cases = {figure.what: figure.case for figure in gpu_targets()}
    assert {case.precision for case in cases.values()} == {"bfloat16", "amp_bf16"}
    assert all(case.heads == 6 for case in cases.values())
    assert cases["kernelized forward+backward"].backward
    assert not cases["kernelized forward"].backward
    assert cases["direct TaylorShift forward"].form == "direct"


def test_rows_are_chosen_by_a_pattern():
    figures, cases = gpu.rows("vit_s .* 2048 PX")
    assert [figure.kind for figure in figures] == ["model", "model", "training"] and cases == []
    figures, cases = gpu.rows("against eager.*direct.*bfloat16 N = 1024 d = 16")
    assert figures == [] and [case.backward for case in cases] == [False, True]
    assert [len(part) for part in gpu.rows(None)] == [26, 144]
    with pytest.raises(ValueError, match="no regular expression"):
        choose_rows("(", ["a"])


def test_a_bound_is_met_from_its_side_and_never_by_what_is_not_a_number():
    least, most = Bound(0.7, "% of the copy"), Bound(24, "GiB", most=True)
    assert least.met(0.7) and not least.met(0.69) and most.met(24) and not most.met(24.1)
    assert not least.met(float("nan")) and not most.met(float("nan")) and not most.met(float("inf"))
    assert Bound(None, "TFLOP/s").met(3.0) and str(Bound(None, "TFLOP/s")) == "(TFLOP/s)"
    assert (str(least), most.text(18.52), most.text(float("inf"))) == (
        ">= 70 % of the copy",
        "18.5 GiB",
        "none",
    )


def test_a_result_is_shown_with_its_floor_and_whether_the_figure_is_reached():
    figure = gpu_targets()[4]
    good = GpuResult(
        figure,
        seconds=Quartiles(0.9e-3, 1e-3, 1.1e-3),
        floor_seconds=2.5e-4,
        sdpa=0.016,
        eager="out of memory",
    )
    good.values, good.error, good.notes = (16.0,), 2.2e-3, ["a", "b"]
    good.flash = 0.015
    assert good.cells()[3:10] == [
        "1 ms",
        "0.25 ms",
        "25 %",
        "16 ms",
        "15 ms",
        None,
        "out of memory",
    ]
    assert good.cells()[10].startswith(">= 15 x SDPA") and good.cells()[11].endswith(" x SDPA")
    assert good.cells()[12:] == ["16 x SDPA", "yes", "2.2e-03", "a; b"]
    slow = replace(good, values=(14.9,))
    bad = GpuResult(figure, "wrong: error 1.0e-01 of out, allowed 4e-03", error=0.1)
    assert slow.reached == "no" and bad.reached == bad.status and bad.broken and not slow.broken
    assert bad.cells()[3:6] == [None, None, None] and bad.record()["seconds_median"] is None
    assert GpuResult(figure, "out of memory").broken is False
    assert replace(good, values=()).reached == "not measured"
    image = next(target for target in gpu_targets() if target.kind == "image")
    large = GpuResult(image, values=(0.5, float("nan")))
    assert large.reached == "no" and large.record()["measured"] == [0.5, None]


def test_a_mark_holds_for_the_gpus_that_it_names():
    case = gpu_operation("kernelized", 4096, 64)
    bounds = (Bound(6, "ms", most=True, gpus=("H100",)), Bound(None, "x images/s"))
    figure = gpu.Target("b", "", "operation", case, bounds)
    for name, value, reached in (
        ("NVIDIA H100 80GB HBM3", 5.0, "yes"),
        ("NVIDIA H100 80GB HBM3", 7.0, "no"),
        ("NVIDIA H200", 7.0, "no mark"),
        ("rehearsal on a processor", 5.0, "no mark"),
        (None, 7.0, "no"),
    ):
        assert GpuResult(figure, values=(value, 0.1), gpu=name).reached == reached, name
    both = gpu.Target("b", "", "operation", case, (Bound(6, "ms", most=True),))
    assert GpuResult(both, values=(7.0,), gpu="NVIDIA H200").reached == "no"
    assert figure.reach == "<= 6 ms on H100, (x images/s)" and both.reach == "<= 6 ms"


def test_softmax_attention_is_checked_before_it_is_timed(monkeypatch):
    figure = small("direct TaylorShift forward")
    result = measure_operation(figure, bench())
    assert isinstance(result.flash, float) and isinstance(result.flex, float)
    assert result.values[1] * result.seconds.median == pytest.approx(result.values[2] * result.sdpa)
    monkeypatch.setattr(gpu_operations, "flex_of", lambda bench: lambda q, k, v: v + 0 * q)

    def absent(q, k, v):
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(gpu_operations, "_flash", absent)
    result = measure_operation(figure, bench())
    assert result.status == "ok" and result.flex.startswith("wrong: error ")
    assert result.flash == "failed: RuntimeError: No available kernel. Aborting execution."
    monkeypatch.setattr(gpu_operations, "FLEX_TOKENS", 10)
    assert measure_operation(figure, bench()).flex is None


def test_a_crossing_lies_where_two_power_laws_meet():
    assert crossing(lambda n: n / 700, 64, 4096) == pytest.approx(700, rel=0.003)
    assert crossing(lambda n: n / 50, 64, 4096) == 64
    assert crossing(lambda n: n / 5000, 64, 4096) == float("inf")
    asked = []
    assert crossing(lambda n: asked.append(n) or (n / 900) ** 0.8, 64, 16_384) == pytest.approx(
        900, rel=0.005
    )
    assert len(asked) == len(set(asked)) <= 12


def test_errors_beyond_their_bound_are_named_and_nan_is_one():
    assert wrong({"out": 4e-3, "gradient of q": 1e-2}, "bfloat16") is None
    assert (
        wrong({"out": 5e-3, "gradient of q": 9e-2}, "bfloat16")
        == "wrong: error 9.0e-02 of gradient of q, allowed 1e-02"
    )
    assert "error nan of out" in wrong({"out": float("nan"), "gradient of q": 9e-2}, "bfloat16")


@pytest.mark.parametrize(
    "name, form", [("kernelized", "efficient"), ("taylorshift+temperature", "direct")]
)
def test_the_definition_in_parts_is_the_whole_one_with_its_gradients(monkeypatch, name, form):
    case = replace(
        gpu_operation(name, 37, 8, form, backward=True), batch=1, heads=3, dtype="float32"
    )
    tensors = draw(case, bench())
    assert tensors["q"].stride() == (37 * 3 * 3 * 8, 8, 3 * 3 * 8, 1)  # as the projection leaves it
    monkeypatch.setattr(gpu_operations, "CHUNK_ELEMENTS", 3 * 37 * 10)
    found = definition(case, tensors)
    leaves = {n: x.double().requires_grad_() for n, x in tensors.items() if n != "grad"}
    out = getattr(reference, f"{name.split('+')[0]}_attention")(**leaves)
    expected = torch.autograd.grad(out, tuple(leaves.values()), tensors["grad"].double())
    torch.testing.assert_close(found["out"], out.detach(), rtol=1e-12, atol=1e-12)
    for n, x in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[f"gradient of {n}"], x, rtol=1e-10, atol=1e-12)


def test_an_operation_is_checked_and_timed_beside_sdpa_and_eager():
    result = measure_operation(small("efficient TaylorShift forward+backward"), bench())
    assert result.status == "ok" and 0 < result.error < 1e-5 and result.notes == []
    assert result.values == (result.sdpa / result.seconds.median,) and result.eager > 0
    assert (
        result.floor_seconds
        == cost_of("taylorshift", "efficient", 90, 32, groups=2, backward=True).operations / 1e11
    )
    copied = measure_operation(small("kernelized forward"), bench())
    assert copied.values[0] == pytest.approx(2 * 8 * 90 * 64 / copied.seconds.median / 1e10)


def test_a_wrong_operation_has_no_time(monkeypatch):
    right = ops.kernelized_attention

    def call(q, k, v, impl, **options):
        return (1.1 if impl == "triton" else 1) * right(q, k, v, impl="eager", **options)

    monkeypatch.setattr(ops, "kernelized_attention", call)
    result = measure_operation(small("kernelized forward"), bench(impl="triton"))
    assert result.status == "wrong: error 1.0e-01 of out, allowed 1e-05" and result.seconds is None
    assert result.sdpa is None


def test_what_a_kernel_does_not_write_is_found_and_what_is_far_from_eager_is_noted(monkeypatch):
    right = ops.kernelized_attention

    def unwritten(q, k, v, impl, **options):
        out = right(q, k, v, impl="eager", **options)
        return (
            out
            if impl == "eager"
            else torch.cat([out[:, :, :-1], torch.empty_like(out[:, :, -1:])], 2)
        )

    monkeypatch.setattr(ops, "kernelized_attention", unwritten)
    assert (
        "error nan" in measure_operation(small("kernelized forward"), bench(impl="triton")).status
    )
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(
        ops,
        "kernelized_attention",
        lambda q, k, v, impl, **o: (
            (1 + 5e-6 * (impl != "eager")) * right(q, k, v, impl="eager", **o)
        ),
    )
    notes = measure_operation(small("kernelized forward"), bench(impl="triton")).notes
    assert len(notes) == 1, notes
    (note,) = notes
    assert note.startswith("error of out ") and note.endswith(" x eager's")


def test_a_baseline_that_does_not_fit_is_a_cell_and_an_operation_that_does_not_is_a_row(
    monkeypatch,
):
    def full(*tensors, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_operations, "_sdpa", full)
    monkeypatch.setattr(gpu_operations, "flex_of", lambda bench: full)
    result = measure_operation(small("direct TaylorShift forward"), bench())
    assert (result.sdpa, result.status, result.reached) == ("out of memory", "ok", "not measured")
    monkeypatch.setattr(ops, "taylorshift_attention", full)
    (row,) = gpu.results_of([small("direct TaylorShift forward")], bench(), Budget(1))
    assert row.status == "out of memory" and not row.broken


def test_rows_come_as_they_are_ready_and_none_is_begun_when_the_time_is_over(monkeypatch):
    now, lines = [0.0], []
    figures = [
        small("kernelized forward"),
        small("kernelized forward+backward"),
        small("direct TaylorShift forward"),
    ]

    def measure(figure, bench):
        now[0] += 40
        if figure.case.backward:
            raise TypeError("a pointer\nis none")
        return GpuResult(figure, values=(1.0,))

    monkeypatch.setattr(gpu, "measure_operation", measure)
    cases = eager_cases()[:1]
    records, broken = gpu.run_rows(figures, cases, bench(), Budget(1, lambda: now[0]), lines.append)
    over = "not measured: 1 minutes were over"
    assert [record["status"] for record in records] == [
        "ok",
        "failed: TypeError: a pointer is none",
        over,
        over,
    ]
    assert broken == 1 and len(lines) == 1 + 3 + 1 + 1 + 1
    assert lines[0].startswith("| what | size | dtype | time | floor |")
    assert lines[-1] == "\neager was faster in none of the 0 rows that were timed (1 in all)"
    provenance = {"device": "x"}
    assert len(list(csv.DictReader(csv_text(records, provenance).splitlines()))) == 4
    assert json.loads(json_text(records, provenance))["rows"][3]["what"] == "kernel against eager"


@pytest.mark.parametrize("batch_of", [lambda n: 2, lambda n: max(1, 2**20 // (6 * n))])
def test_where_auto_changes_is_the_first_length_at_which_it_takes_the_efficient_form(batch_of):
    case = gpu_operation("taylorshift+temperature", 400, 16)
    found = auto_crossing(case, batch_of)

    def takes(n):
        return takes_efficient_kernels(
            "auto", *[torch.empty(batch_of(n), 6, n, 16, device="meta")] * 3
        )

    assert 16 < found < 2**16 and takes(found) and not takes(found - 1)


def test_a_crossover_notes_where_auto_changes(monkeypatch):
    monkeypatch.setattr(gpu_operations, "check", lambda case, tensors, bench: ("ok", 0.0, []))
    monkeypatch.setattr(gpu_operations, "draw", lambda case, bench: {})
    monkeypatch.setattr(
        gpu_operations,
        "_direct_over_efficient",
        lambda case, n, batch, bench: n / (300 if batch > 2 else 500),
    )
    few, many = (
        lambda form, q, k, v, both, first=first: q.shape[2] >= first for first in (601, 351)
    )
    monkeypatch.setattr(
        gpu_operations, "takes_efficient_kernels", lambda *x: (many if len(x[1]) > 2 else few)(*x)
    )
    figure = next(figure for figure in gpu_targets() if figure.kind == "crossover")
    result = gpu_operations.measure_crossover(figure, bench())
    assert result.values[0] == pytest.approx(300, rel=0.01)
    assert result.notes == ["auto changes at 351", "B*h = 12: 500 tokens, auto changes at 601"]


def test_the_definition_keeps_one_gradient_of_all_keys_whatever_the_number_of_parts(monkeypatch):
    case = replace(
        gpu_operation("kernelized", 40, 8, backward=True), batch=1, heads=2, dtype="float32"
    )
    monkeypatch.setattr(gpu_operations, "CHUNK_ELEMENTS", 2 * 40 * 4)
    right, made, alive = gpu_operations.outputs, [], []

    def outputs(*given):
        alive.append(sum(one() is not None for one in made))
        found = right(*given)
        made.extend(weakref.ref(found[f"gradient of {name}"]) for name in "kv")
        return found

    monkeypatch.setattr(gpu_operations, "outputs", outputs)
    definition(case, draw(case, bench()))
    assert len(alive) == 10 and max(alive) <= 2  # at most one of k and one of v


def test_the_command_needs_no_more_than_torch_timm_and_triton_and_says_that_there_is_no_gpu():
    code = (
        "import sys\n"
        "for name in ('albumentations', 'cv2', 'jsonargparse', 'tensorboard', 'sklearn', 'rich', "
        "'matplotlib', 'jinja2'):\n"
        "    sys.modules[name] = None\n"
        "sys.path.insert(0, 'tools')\n"
        "import benchmark, torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "import visionattn.lab.gpu.models, visionattn.lab.gpu.tune, visionattn.lab.gpu.table\n"
        "sys.exit([benchmark.main(['gpu']), benchmark.main(['tune', '--only', 'taylor'])] != "
        "[2, 2])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr.splitlines()
        == ["error: no GPU here that PyTorch can use (torch.cuda.is_available() is False)"] * 2
    )
