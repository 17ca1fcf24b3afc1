"""The time that is expected of kernels and of the marks of the GPU table, from recorded counts."""

import json
from dataclasses import replace

import pytest

from visionattn.lab.cases import Case
from visionattn.lab.gpu import counts as gpu_counts
from visionattn.lab.gpu import expected as gpu_expected
from visionattn.lab.gpu.counts import H100, H200, Gpu, Launch
from visionattn.lab.gpu.operations import auto_crossing
from visionattn.lab.target_table import WITHOUT_GRAPH, gpu_targets
from visionattn.lab.targets import Bound, Target

GPU = Gpu(
    "small", multiprocessors=10, clock_hertz=1e9, bytes_per_second=1e12, operations_per_second=1e13
)
FULL = Launch(
    "k", 40, warps=8, resident=2, instructions=8e6, operations=2e9, bytes=5e7, unit="wgmma"
)


def test_a_launch_takes_as_long_as_the_slowest_of_issue_products_and_memory():
    # 4 of 40 programs on the busiest of 10: 8e5 instructions at 2 in a nanosecond.
    assert FULL.limits(GPU) == pytest.approx((4e-4, 2e-4, 5e-5))
    assert FULL.seconds(GPU) == pytest.approx(4e-4 + 2e-6)
    assert replace(FULL, operations=8e9).seconds(GPU) == pytest.approx(8e-4 + 2e-6)
    assert replace(FULL, bytes=1e9).seconds(GPU) == pytest.approx(1e-3 + 2e-6)


def test_one_program_alone_waits_for_its_products_and_few_warps_issue_less():
    assert replace(FULL, resident=1).seconds(GPU) == pytest.approx(6e-4 + 2e-6)
    assert replace(FULL, warps=2).limits(GPU)[0] == pytest.approx(8e-4)
    assert replace(FULL, unit="mma.sync").limits(GPU)[1] == pytest.approx(2e-4 / 0.62)


def test_the_busiest_multiprocessor_counts_and_none_is_busy_without_programs():
    one_more = replace(FULL, programs=41)
    assert one_more.limits(GPU)[0] == pytest.approx(8e6 / 41 * 5 / 2e9)
    assert replace(FULL, programs=0).limits(GPU) == (0, 0, 0)


def written(tmp_path, monkeypatch, table):
    path = tmp_path / "gpu_counts.json"
    path.write_text(json.dumps(table))
    monkeypatch.setattr(gpu_counts, "TABLE", path)
    gpu_counts.recorded.cache_clear()


@pytest.fixture(autouse=True)
def fresh_table():
    yield
    gpu_counts.recorded.cache_clear()


def values(**given):
    zeros = dict.fromkeys(gpu_counts.FIELDS, 0) | {"unit": "wgmma", "row": "N64"}
    return list((zeros | given).values())


def test_an_operation_takes_what_its_launches_take_and_none_where_nothing_is_recorded(
    tmp_path, monkeypatch
):
    case = Case("operation", "kernelized", 77, 24, "auto", "bfloat16", False, 2, 3)
    launch = values(programs=40, warps=8, resident=2, looped=7e6, once=1e6)
    names = {"forward": ["a", "a"], "both": ["a", "a", "a"]}
    group = {"launches": {"a": launch}, "operations": {"kernelized": names}}
    written(tmp_path, monkeypatch, {"3.6.0": {"9.0 bfloat16 B=2 h=3 N=77 d=24 e=24": group}})
    assert gpu_counts.expected_seconds(case, GPU) == pytest.approx(2 * (4e-4 + 2e-6))
    assert gpu_counts.expected_seconds(replace(case, backward=True), GPU) == pytest.approx(
        3 * (4e-4 + 2e-6)
    )
    assert gpu_counts.expected_seconds(replace(case, size=78), GPU) is None
    assert gpu_counts.expected_seconds(case, GPU, "3.9.0") is None


def test_every_mark_of_the_table_is_expected_to_come_to_something():
    for figure in gpu_targets():
        found = gpu_expected.expected(figure)
        assert found is not None, figure
        known = [
            bound.unit
            for bound, value in zip(figure.bounds, found.values, strict=True)
            if value is None
        ]
        assert set(known) <= {"GiB", "x memory", WITHOUT_GRAPH}, figure
        assert 1e-5 < found.seconds < 1, figure


@pytest.mark.parametrize(
    "figure", [x for x in gpu_targets() if x.kind == "crossover"], ids=lambda x: x.at
)
def test_auto_changes_its_form_where_counts_expect_it(figure):
    (expected,) = gpu_expected.expected(figure).values
    heads = figure.case.heads
    changes = auto_crossing(figure.case, lambda n: max(1, gpu_counts.FILLED_TOKENS // (n * heads)))
    assert changes == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("width", "heads"), [(16, 6), (32, 6), (64, 6), (64, 384)])
def test_with_gradients_auto_changes_earlier(width, heads):
    case = Case("operation", "taylorshift", 1, width, heads=heads)
    forward = auto_crossing(case, lambda n: 1)
    assert auto_crossing(replace(case, backward=True), lambda n: 1) < forward


def test_more_bytes_in_a_second_make_nothing_slower():
    for figure in gpu_targets():
        assert (
            gpu_expected.expected(figure, H200).seconds
            <= gpu_expected.expected(figure, H100).seconds
        )


def test_expected_values_are_in_the_units_of_their_bounds(tmp_path, monkeypatch):
    case = Case("operation", "kernelized", 100, 64, "auto", "bfloat16", False, 1, 1)
    launch = values(programs=1, warps=8, resident=1, looped=2e6)
    group = {"launches": {"a": launch}, "operations": {"kernelized": {"forward": ["a"]}}}
    written(tmp_path, monkeypatch, {"3.6.0": {gpu_counts.group_of(case): group}})
    bounds = (Bound(0.5, "% of the copy"), Bound(1, "x SDPA"), Bound(1, "GiB", most=True))
    found = gpu_expected.expected(Target("k", "", "operation", case, bounds), GPU)
    seconds = 1e-3 + 2e-6
    assert found.seconds == pytest.approx(seconds)
    # q, k, v and the result of 100 tokens of 64 numbers of 2 bytes; 10,000 pairs of 256
    # operations and one exponential.
    flash = 1e4 * (256 / 1e13 + 1 / (16 * 10 * 1e9)) / 0.78
    assert found.values[:2] == pytest.approx((4 * 6400 * 2 / 1e12 / seconds, flash / seconds))
    assert found.values[2] is None
    assert found.text(Target("k", "", "operation", case, bounds)).endswith(", ?")
