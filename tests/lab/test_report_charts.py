"""Charts of ``tools/report.py``: ticks that tell values apart, logarithmic axes, and values that
nobody can draw.
"""

import re

import pytest

from visionattn.lab.report.charts import Chart, Curve, Style, svg
from visionattn.lab.report.page import Charts


def ticks_of(chart):
    """Texts beside the two axes of a chart, each axis a list."""
    drawn = svg(chart, "c")
    axes = {name: drawn[drawn.index(f'id="c-matplotlib.axis_{name}"') :] for name in "12"}
    axes["1"] = axes["1"][: -len(axes["2"])]
    return [re.findall(r">([^<>]*[0-9][^<>]*)</text>", axes[name]) for name in "12"]


def line(x, y):
    return [Curve("a", Style(0), x, y)]


@pytest.mark.parametrize(
    "low, high",
    [
        (2.3061, 2.3069),
        (0.0, 1e-6),
        (0.25, 1.0),
        (1e-4, 9e-4),
        (123_456.0, 123_457.0),
        (-2.0, 7e9),
        (1e30, 1e38),
    ],
)
def test_ticks_of_an_axis_are_told_apart_by_their_texts(low, high):
    _, shown = ticks_of(Chart("T", "epoch", "nats", line([1, 2, 3], [low, (low + high) / 2, high])))
    assert (
        3 <= len(shown) <= 9
        and len(set(shown)) == len(shown)
        and all(len(text) <= 10 for text in shown)
    )
    values = [float(text.replace(",", "").replace("\N{MINUS SIGN}", "-")) for text in shown]
    gaps = [after - before for before, after in zip(values, values[1:], strict=False)]
    assert min(gaps) > 0.9 * max(gaps)


@pytest.mark.parametrize(
    "low, high, log",
    [(110.0, 160.0, 10), (1200.0, 1210.0, 10), (9.0, 101.0, 10), (3.0, 9000.0, 10), (300, 500, 2)],
)
def test_a_logarithmic_axis_has_two_ticks_at_least(low, high, log):
    _, shown = ticks_of(
        Chart("T", "heads", "MiB", line([2, 4], [low, high]), 2, log, x_ticks=[2, 4])
    )
    assert 2 <= len(set(shown)) == len(shown) <= 9


def test_ticks_of_powers_are_as_short_as_they_can_be():
    _, shown = ticks_of(
        Chart("T", "heads", "MiB", line([2, 4], [0.09, 110.0]), 2, 10, x_ticks=[2, 4])
    )
    assert shown == ["0.1", "1", "10", "100"]
    _, shown = ticks_of(Chart("T", "epoch", "per step", line([1, 2, 3], [0.0, 5e-5, 1e-4])))
    assert shown == ["0", "0.00002", "0.00004", "0.00006", "0.00008", "0.00010"]


def test_evenly_spaced_ticks_of_a_logarithmic_axis_have_one_number_of_digits():
    _, shown = ticks_of(Chart("T", "heads", "MiB", line([2, 4], [1.6, 2.6]), 2, 10, x_ticks=[2, 4]))
    assert "2.0" in shown and {len(text) for text in shown} == {3}


def test_part_of_an_epoch_has_ticks_and_a_single_epoch_has_its_own():
    shown, _ = ticks_of(
        Chart("T", "epoch", "nats", line([0.05 * i for i in range(1, 20)], [1.0] * 19))
    )
    assert len(shown) >= 2
    shown, _ = ticks_of(Chart("T", "epoch", "%", line([1], [9.79])))
    assert shown == ["1"]


@pytest.mark.filterwarnings("error")
def test_what_a_logarithmic_axis_cannot_show_is_left_out_without_a_warning():
    curves = [
        Curve("a", Style(0), [0, -4, 4, 16], [1.0, 2.0, 0.0, -3.0]),
        Curve("b", Style(1), [4, 16], [7.0, 70.0], [0.0, 0.5]),
    ]
    text = svg(Chart("T", "tokens", "MiB", curves, 2, 10), "c")
    assert "a: " not in text and "b: 7 at 4" in text and "b: 70 ± 0.5 at 16" in text
    assert (
        Chart("T", "tokens", "MiB", curves[:1], 2, 10).empty
        and not Chart("T", "tokens", "MiB", curves[:1], None, 10).empty
    )


@pytest.mark.filterwarnings("error")
def test_a_chart_that_cannot_be_drawn_is_a_line_and_the_next_is_drawn():
    charts = Charts()
    absurd = charts.draw(
        Chart("T & co", "step", "nats", line([1.0, 1e308, -1e308], [1e308, -1e308, 1.0]))
    )
    assert (
        absurd.startswith('<p class="problem">This chart cannot be drawn: ')
        and absurd.count("\n") == 0
    )
    assert charts.draw(Chart("T", "step", "nats", line([1, 2], [1.0, 2.0]))).startswith("<svg")
