"""Charts as SVG and PNG, and which charts rows of a benchmark, sweep or profile become."""

import re
from dataclasses import replace

import pytest

from tests.helpers.report_folders import sweep_rows
from visionattn.lab.charts import MOST_POINTS, Chart, Mark, Series, SeriesStyle, png, svg
from visionattn.lab.figures import heads_of, sizes_of, slope_of


def line(x, y, **options):
    return [Series("a", SeriesStyle(0), x, y, **options)]


def ticks_of(chart):
    """Numbers beside the vertical axis."""
    texts = re.findall(r">([^<>]*)</text>", svg(chart, "c"))
    return [float(text.replace(",", "").replace("\N{MINUS SIGN}", "-")) for text in texts
            if re.fullmatch(r"[\d.,\N{MINUS SIGN}]+", text)]  # fmt: skip


def paths(text):
    """The number of points of each path."""
    return [found.count("L") + 1 for found in re.findall(r'd="(M[^"]*)"', text)]


TICKS = [
    ([2.3061, 2.3069], {}, {2.3062, 2.3068}),
    ([110.0, 160.0], {"log_y": 10}, {120.0, 140.0}),
    ([0.09, 110.0], {"log_y": 10}, {0.1, 1.0, 10.0, 100.0}),
    ([150.0, 151.0], {"from_zero": True}, {0.0, 50.0, 100.0, 150.0}),
    ([1e6, 4e6], {}, {2000000.0}),
]


def test_an_axis_has_a_few_plain_and_round_ticks():
    for values, options, shown in TICKS:
        chart = Chart("T", "x", "y", line([2, 4], values), x_ticks=[2, 4], **options)
        found = ticks_of(chart)[2:]
        assert shown <= set(found) and len(set(found)) == len(found) <= 8
    # Epochs have whole ticks, and parts of one have ticks too.
    assert set(ticks_of(Chart("T", "epoch", "%", line([1, 2, 3], [5.5] * 3)))) >= {1, 2, 3}
    assert 0.3 in ticks_of(Chart("T", "epoch", "%", line([0.1, 0.5, 0.9], [5.5] * 3)))


@pytest.mark.filterwarnings("error")
def test_values_that_a_logarithmic_axis_cannot_show_are_left_out_without_a_warning():
    curves = [*line([4, 16], [0.0, -3.0]), Series("b", SeriesStyle(1), [4, 16], [None, 70.0])]
    chart = Chart("T", "tokens", "MiB", curves, log_x=2, log_y=10)
    assert not chart.empty and ">b</text>" in svg(chart, "c")
    assert Chart("T", "tokens", "MiB", curves[:1], log_y=10).empty
    assert not Chart("T", "tokens", "MiB", curves[:1]).empty


def test_long_curves_are_means_of_neighbours_with_a_shade_of_their_reach():
    x, y = range(9000), [float(i % 30) for i in range(9000)]
    text = svg(Chart("T", "step", "nats", line(x, [None, *y[1:]])), "c")
    assert text.count("fill-opacity: 0.18") == 1 and max(paths(text)) < 2 * MOST_POINTS + 10
    assert "fill-opacity" not in svg(Chart("T", "step", "nats", line(x[:200], y[:200])), "c")
    spread = svg(Chart("T", "step", "nats", line([1, 2], [3.0, 4.0], spread=[0.5, 0.0])), "c")
    assert spread.count("fill-opacity: 0.18") == 1
    assert len({SeriesStyle.of(i).swatch() for i in range(24)}) == 24


def test_names_failures_and_marks_stand_in_the_legend():
    long, failed = "an_unbroken_name_of_many_letters", {16: "out of memory"}
    lost = Series(long, SeriesStyle(1), [4], [7.0], failed=failed)
    marks = [Mark("published 73", x=73), Mark("0.1 nats", y=0.1)]
    chart = Chart("T", "px", "MiB", [*line([4, 8], [1.0, 2.0]), lost], marks)
    for name in ("a", long, "out of memory", "published 73"):
        assert f">{name}</text>" in svg(chart, "c")
        assert f">{name}</text>" not in svg(chart, "c", legend=False)
    alone = Chart("T", "px", "MiB", [Series("b", SeriesStyle(1), [], [], failed=failed)])
    for chart in (alone, replace(alone, log_x=2, log_y=10)):
        assert not chart.empty and ">out of memory</text>" in svg(chart, "c")


def test_slopes_are_of_the_larger_half_of_the_sizes():
    sizes = [32, 64, 128, 256, 512]
    assert slope_of(sizes, [7.0, 7.0, *(1e-6 * n**2 for n in sizes[2:])]) == pytest.approx(2)
    assert slope_of(sizes[::-1], [3e-6 * n for n in sizes[::-1]]) == pytest.approx(1)
    assert slope_of([32], [1.0]) is None and slope_of([32, 32], [1.0, 2.0]) is None


def test_rows_of_a_benchmark_become_lines_with_their_growth(tmp_path):
    row = {"pass": "forward", "dtype": "float32", "width": 8, "status": "ok"}
    rows = [
        row | {"case": case, "size": n, "seconds_median": n**2 * 1e-6, "peak_bytes": n << 20}
        for case in ("sdpa", "kernelized", "kernelized efficient")
        for n in (64, 128, 256)
    ]
    rows[2] |= {"seconds_median": None, "peak_bytes": None, "status": "out of memory"}
    rows[3] |= {"peak_bytes": 0}  # too little to be measured
    time, memory = sizes_of(rows)
    assert [series.name.replace("\N{NO-BREAK SPACE}", " ") for series in time.series] == [
        "sdpa ∝ N²·⁰⁰",
        "kernelized ∝ N²·⁰⁰",
        "kernelized efficient ∝ N²·⁰⁰",
    ]
    assert time.series[0].failed == {256: "out of memory"} and time.series[1].x == [64, 128, 256]
    assert time.series[1].y[0] == pytest.approx(4.096) and memory.series[1].y == [128, 256]
    sdpa, chosen, efficient = (series.look for series in time.series)
    assert sdpa.colour != chosen.colour == efficient.colour and chosen.shape != efficient.shape
    png(tmp_path / "a.png", [time, memory, Chart("none", "x", "y")], title="T", notes=["here"])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_sweep_become_means_over_seeds():
    rows = [row | {"trained_form": "efficient"} for row in sweep_rows()]
    charts = {chart.title: chart for chart in heads_of([*rows, rows[0] | {"heads": ""}], 32)}
    (accuracy,) = charts["Accuracy"].series
    assert accuracy.name == "taylorshift efficient" and accuracy.x == [4, 8]
    assert accuracy.y == pytest.approx([83, 83])
    assert accuracy.spread == pytest.approx([2.828] * 2, abs=1e-3)
    direct, efficient = charts["Throughput of training step"].series
    assert (direct.y, direct.failed) == ([100], {8: "out of memory"}) and efficient.y == [250, 250]
    assert direct.look.shape != efficient.look.shape
    assert len(charts) == 6 and not heads_of(rows, 64)[1].series
