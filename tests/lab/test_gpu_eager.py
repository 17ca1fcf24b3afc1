"""Rows of kernels against eager operations: which there are, in which order, what is said of them,
and what stops a table.
"""

from dataclasses import replace

import pytest
import torch

from tests.helpers.tools import words
from visionattn.lab.gpu import eager as gpu_eager
from visionattn.lab.gpu import operations as gpu_operations
from visionattn.lab.gpu import table as gpu
from visionattn.lab.gpu.device import rehearsed
from visionattn.lab.gpu.eager import eager_cases
from visionattn.lab.gpu.operations import Bench, definition, draw
from visionattn.lab.gpu.results import GpuResult
from visionattn.lab.gpu.timing import Budget
from visionattn.lab.operations import function_of
from visionattn.lab.target_table import gpu_operation, gpu_targets
from visionattn.ops.gpu import machine
from visionattn.ops.kernelized import gpu as kernelized_gpu
from visionattn.ops.taylorshift import gpu as taylorshift_gpu


def bench():
    return Bench(rehearsed(), torch.Generator().manual_seed(3), impl="eager", seconds=0.0, rounds=1)


def order_of(monkeypatch, **failing):
    """What is begun, and what is shown, of one row of each kind; the row named is to fail so."""
    begun, lines = [], []

    def measure(name):
        def measured(first, bench):
            begun.append(name)
            if name in failing:
                raise RuntimeError(failing[name])
            against = {"status": "ok", "error": 0.0, "ratio": 2.0}
            return against if name == "against" else GpuResult(first)

        return measured

    monkeypatch.setattr(gpu, "measure_operation", measure("operation"))
    monkeypatch.setattr(gpu, "measure_crossover", measure("crossover"))
    monkeypatch.setattr(gpu, "measure_against_eager", measure("against"))
    figures = [
        next(figure for figure in gpu_targets() if figure.kind == kind)
        for kind in ("operation", "crossover")
    ]
    records, broken = gpu.run_rows(figures, eager_cases()[:2], bench(), Budget(1), lines.append)
    return begun, lines, records, broken


def test_kernels_against_eager_come_last_with_the_time_that_is_left(monkeypatch):
    begun, lines, records, _ = order_of(monkeypatch)
    assert begun == ["operation", "crossover", "against", "against"]
    assert [record["what"].split()[0] for record in records] == words(
        "kernelized crossover kernel kernel"
    )
    assert [text.startswith("| what |") for text in lines].count(True) == 1
    assert lines[-1].startswith("\neager was faster in none of the 2 rows")


@pytest.mark.parametrize(
    "text",
    [
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "Triton Error [CUDA]: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: device-side assert triggered",
    ],
)
def test_no_row_is_begun_after_an_error_that_breaks_the_process(monkeypatch, text):
    begun, lines, records, broken = order_of(monkeypatch, crossover=text)
    assert begun == ["operation", "crossover"] and broken == 1
    assert [record["status"] for record in records] == [
        "ok",
        f"failed: RuntimeError: {text}; later rows of this run would mean nothing",
        *["not measured: an earlier row broke what this process computes on the GPU"] * 2,
    ]


@pytest.mark.parametrize(
    "text", ["out of resource: shared memory", "CUDA error: out of memory", "not illegal"]
)
def test_rows_go_on_after_errors_that_leave_the_gpu_whole(monkeypatch, text):
    assert order_of(monkeypatch, operation=text)[0] == words("operation crossover against against")


def test_the_rows_against_eager_cover_each_operation_small_and_16_bits_first():
    cases = eager_cases()
    order = [(case.dtype == "float32", case.size) for case in cases]
    assert order == sorted(order) and len(set(cases)) == len(cases)
    plain = {
        (c.label, c.width, c.size, c.backward)
        for c in cases
        if c.dtype == "bfloat16" and "masked" not in c.name
    }
    labels = {"kernelized efficient", "kernelized+causal efficient", "kernelized+joint efficient"}
    labels |= {
        f"taylorshift+temperature{more}" for more in (" efficient", " direct", "+joint efficient")
    }
    passes = (False, True)
    assert plain == {
        (n, d, t, b)
        for n in labels
        for d in (16, 32, 64)
        for t in (196, 1024, 16_384)
        for b in passes
    }
    assert {c.label for c in cases if c.dtype == "float32"} == labels
    assert {c.width for c in cases if c.dtype == "float32" or "masked" in c.name} == {16, 32}
    assert {c.base for c in cases if "masked" in c.name} == {"kernelized", "taylorshift"}


def test_the_rows_against_eager_are_within_what_kernels_declare():
    widest = kernelized_gpu.WIDEST | {"taylorshift": taylorshift_gpu.WIDEST}
    for case in eager_cases():
        name = "kernelized causal" if "causal" in case.name else case.base
        assert case.width <= min(widest[name][8 * case.torch_dtype.itemsize]), case


def test_kernels_are_compared_with_eager_operations(monkeypatch):
    lines, asked = [], []
    names = ("kernelized+masked", "kernelized+causal", "taylorshift+temperature+joint")
    cases = [
        replace(
            eager_cases()[0], name=name, size=70, batch=2, heads=2, dtype="float32", backward=True
        )
        for name in names
    ]
    right = gpu_operations.outputs
    monkeypatch.setattr(
        gpu_operations,
        "outputs",
        lambda f, x, backward: asked.append(x["q"].dtype) or right(f, x, backward),
    )
    records, broken = gpu.run_rows([], cases, bench(), Budget(1), lines.append)
    assert lines[0].startswith("\nkernel against eager")
    assert lines[1].startswith(
        "| kernelized+masked efficient | float32 | 70 | 16 | forward+backward | "
    )
    assert [record["status"] for record in records] == ["ok"] * 3
    assert all(0 < record["error"] < 1e-5 for record in records)
    assert broken == 0 and asked == [torch.float64] * 3  # what they are held to


def test_a_key_mask_leaves_out_every_fourth_key():
    case = replace(gpu_operation("kernelized+masked", 9, 8), heads=1, dtype="float64")
    tensors = draw(case, bench())
    q, k, v = (tensors[name] for name in "qkv")
    out = function_of(case, 9, "cpu")(q, k, v)
    for image, left_out in ((0, (3, 7)), (1, (2, 6))):
        kept = [key for key in range(9) if key not in left_out]
        whole = function_of(replace(case, name="kernelized"), 9, "cpu")
        expected = whole(
            q[image : image + 1], k[image : image + 1, :, kept], v[image : image + 1, :, kept]
        )
        torch.testing.assert_close(out[image : image + 1], expected)
    torch.testing.assert_close(definition(case, tensors)["out"], out)


def test_the_last_line_names_the_rows_in_which_eager_was_faster():
    cases = eager_cases()[:3]
    found = [
        {"status": "ok", "ratio": 0.9},
        {"status": "ok", "ratio": 1.2},
        {"status": "wrong: error", "error": 0.1},
    ]
    records = [gpu_eager.record_of(case, more) for case, more in zip(cases, found, strict=True)]
    text = gpu_eager.verdict(cases, records)
    row = f"kernelized efficient forward bfloat16 N = 196 d = {cases[0].width}"
    assert (
        text.startswith(f"eager was faster in 1 of the 2 rows that were timed (3 in all): {row} - ")
        and text.count(";") == 0
    )
    assert "NOT_BY_AUTO in visionattn/ops/gpu/machine.py" in text
    assert hasattr(machine, "NOT_BY_AUTO")
    assert [gpu_eager.cells_of(record)[-1] for record in records] == [
        "eager is faster",
        "ok",
        "wrong: error",
    ]
    assert (
        gpu_eager.verdict(cases[1:], records[1:])
        == "eager was faster in none of the 1 rows that were timed (2 in all)"
    )


def test_rows_are_named_and_kept_after_an_interruption_too(monkeypatch):
    lines, kept = [], []
    found = iter([{"status": "ok", "ratio": 0.5, "error": 0.0}])

    def measure(case, bench):
        try:
            return next(found)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(gpu, "measure_against_eager", measure)
    with pytest.raises(KeyboardInterrupt):
        gpu.run_rows([], eager_cases()[:2], bench(), Budget(1), lines.append, kept.append)
    assert [(record["kind"], record["ratio"]) for record in kept] == [("row", 0.5)]
    assert lines[-1].startswith("\neager was faster in 1 of the 1 rows")
