"""Charts of ``tools/report.py``: ticks that tell values apart, logarithmic axes, and values that
nobody can draw.
"""

import re

import pytest

from visionattn.lab.charts import Chart, Look, Mark, Series, hidden_under, spread_out
from visionattn.lab.drawing import svg
from visionattn.lab.figures import quality_of
from visionattn.lab.report.figures import Figure
from visionattn.lab.report.page import Charts


def ticks_of(chart):
    """Texts beside the two axes of a chart, each axis a list."""
    drawn = svg(chart, "c")
    axes = {name: drawn[drawn.index(f'id="c-matplotlib.axis_{name}"') :] for name in "12"}
    axes["1"] = axes["1"][: -len(axes["2"])]
    return [re.findall(r">([^<>]*[0-9][^<>]*)</text>", axes[name]) for name in "12"]


def line(x, y):
    return [Series("a", Look(0), x, y)]


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
    assert 3 <= len(shown) <= 9 and len(set(shown)) == len(shown)
    assert all(len(text) <= 10 for text in shown)
    values = [float(text.replace(",", "").replace("\N{MINUS SIGN}", "-")) for text in shown]
    gaps = [after - before for before, after in zip(values, values[1:], strict=False)]
    assert min(gaps) > 0.9 * max(gaps)


@pytest.mark.parametrize(
    "low, high, log",
    [(110.0, 160.0, 10), (1200.0, 1210.0, 10), (9.0, 101.0, 10), (3.0, 9000.0, 10), (300, 500, 2)],
)
def test_a_logarithmic_axis_has_two_ticks_at_least(low, high, log):
    _, shown = ticks_of(
        Chart("T", "heads", "MiB", line([2, 4], [low, high]), log_x=2, log_y=log, x_ticks=[2, 4])
    )
    assert 2 <= len(set(shown)) == len(shown) <= 9


def test_ticks_of_powers_are_as_short_as_they_can_be():
    _, shown = ticks_of(
        Chart("T", "heads", "MiB", line([2, 4], [0.09, 110.0]), log_x=2, log_y=10, x_ticks=[2, 4])
    )
    assert shown == ["0.1", "1", "10", "100"]
    _, shown = ticks_of(Chart("T", "epoch", "per step", line([1, 2, 3], [0.0, 5e-5, 1e-4])))
    assert shown == ["0", "0.00002", "0.00004", "0.00006", "0.00008", "0.00010"]


def test_evenly_spaced_ticks_of_a_logarithmic_axis_have_one_number_of_digits():
    _, shown = ticks_of(
        Chart("T", "heads", "MiB", line([2, 4], [1.6, 2.6]), log_x=2, log_y=10, x_ticks=[2, 4])
    )
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
        Series("a", Look(0), [0, -4, 4, 16], [1.0, 2.0, 0.0, -3.0]),
        Series("b", Look(1), [4, 16], [7.0, 70.0], [0.0, 0.5]),
    ]
    text = svg(Chart("T", "tokens", "MiB", curves, log_x=2, log_y=10), "c")
    assert "a: " not in text and "b: 7 at 4" in text and "b: 70 ± 0.5 at 16" in text
    assert Chart("T", "tokens", "MiB", curves[:1], log_x=2, log_y=10).empty
    assert not Chart("T", "tokens", "MiB", curves[:1], log_y=10).empty


@pytest.mark.filterwarnings("error")
def test_a_chart_that_cannot_be_drawn_is_a_line_and_the_next_is_drawn():
    charts = Charts()
    absurd = charts.draw(
        Chart("T & co", "step", "nats", line([1.0, 1e308, -1e308], [1e308, -1e308, 1.0]))
    )
    assert absurd.startswith('<p class="problem">This chart cannot be drawn: ')
    assert absurd.count("\n") == 0
    assert charts.draw(Chart("T", "step", "nats", line([1, 2], [1.0, 2.0]))).startswith("<svg")


def test_lines_that_hide_others_are_known_and_what_they_hide_is_drawn_wider():
    x = [1, 2, 4]
    curves = [
        Series("a", Look(0), x, [10.0, 20.0, 40.0]),
        Series("b", Look(1), x, [10.1, 20.0, 40.1]),
        Series("c", Look(2), x, [10.0, 30.0, 90.0]),
        Series("d", Look(3), [4, 8], [40.0, 41.0]),
    ]
    assert hidden_under(Chart("T", "x", "y", curves)) == [1, 0, 0, 0]
    widths = re.findall(r"stroke-width: ([\d.]+)", svg(Chart("T", "x", "y", curves), "c"))
    assert "4.3" in widths and "1.7" in widths


def test_labels_are_moved_apart_as_little_as_their_heights_ask_for():
    assert spread_out([10.0, 90.0, 50.0], [12.0] * 3) == [10.0, 90.0, 50.0]
    assert spread_out([50.0, 51.0], [12.0, 12.0]) == [44.5, 56.5]
    moved = spread_out([5.0, 6.0, 7.0, 60.0], [10.0, 20.0, 10.0, 10.0])
    assert [b - a for a, b in zip(moved, moved[1:3], strict=False)] == [15.0, 15.0]
    assert moved[3] == 60.0 and spread_out([], []) == []


def test_names_stand_beside_their_lines_where_they_fit_and_in_a_legend_elsewhere():
    short = Chart("T", "x", "y", line([1, 2], [3.0, 4.0]))
    assert short.labelled and ">a</text>" in svg(short, "c") and not Figure([short]).legend
    many = [Series(f"run {i}", Look.of(i), [1, 2], [3.0, 4.0]) for i in range(9)]
    long = [Series("an_unbroken_name_of_many_letters", Look(0), [1, 2], [3.0, 4.0])]
    for series in (many, long):
        chart = Chart("T", "x", "y", series)
        assert not chart.labelled and "</text>" in svg(chart, "c")
        assert list(Figure([short, chart]).legend) == ["a", *(one.name for one in series)]
        assert series[0].name + "</text>" not in svg(chart, "c")


@pytest.mark.filterwarnings("error")
def test_what_ran_out_of_memory_is_marked_in_a_chart_and_alone():
    lost = Series("b", Look(1), [4], [7.0], failed={16: "out of memory"})
    curves = [*line([4, 8], [1.0, 2.0]), lost]
    text = svg(Chart("T", "px", "MiB", curves, log_y=10, x_ticks=[4, 16]), "c")
    assert text.count("out of memory</text>") == 1 and ">16</text>" in text
    alone = Chart("T", "px", "MiB", [Series("b", Look(1), [], [], failed={16: "out of memory"})])
    assert not alone.empty and "b: out of memory</text>" in svg(alone, "c")


def test_an_axis_that_ratios_are_read_off_begins_at_0_and_the_others_near_their_values():
    curves = line([1, 2], [150.0, 151.0])
    _, zero = ticks_of(Chart("T", "heads", "MiB", curves, from_zero=True))
    _, near = ticks_of(Chart("T", "heads", "MiB", curves))
    assert zero[0] == "0" and float(near[0]) >= 149.9


@pytest.mark.parametrize("values", [[100.0, 100.0], [0.0, 0.0], [0.0, 100.0], [3.0, 99.0]])
def test_an_axis_has_no_ticks_beyond_what_values_can_be(values):
    _, texts = ticks_of(Chart("T", "epoch", "%", line([1, 2], values), bounds=(0, 100)))
    shown = [float(text.replace("−", "-")) for text in texts]
    assert len(shown) > 1 and min(shown) >= 0 and max(shown) <= 100


def test_the_text_of_a_mark_at_the_right_stands_below_the_names_of_lines():
    def height(x):
        text = svg(Chart("T", "N", "MiB", line([64, 256], [1.0, 3.0]), [Mark("here", x)]), "c")
        return float(re.search(r'<text[^>]* y="([\d.]+)"[^>]*>here<', text)[1])

    assert height(250) > height(70) + 50  # pixels, from the top


def test_marks_are_lines_across_or_rings_with_their_texts():
    marks = [Mark("published 73", 73), Mark("measured 155", 155, 2.0, colour=1)]
    text = svg(Chart("T", "N", "ms", line([64, 256], [1.0, 3.0]), marks, log_x=2), "c")
    assert "published 73</text>" in text and "measured 155</text>" in text


def test_a_name_that_is_moved_beside_all_lines_stays_within_the_chart():
    long = Series("digits", Look.of(0), range(14), [2.3, 1.7, 0.7, 0.3, *[0.1] * 10])
    short = Series("finetune", Look.of(1), [0, 1], [1.1, 1.0])
    text = svg(Chart("Loss", "epoch", "nats", [long, short]), "a")
    width = float(re.search(r'viewBox="0 0 ([\d.]+) ', text).group(1))
    left = float(re.search(r'<text[^>]* x="([\d.]+)"[^>]*>finetune<', text).group(1))
    assert left + 8 * 4.5 < width  # eight letters of 9 points


def test_accuracy_over_sizes_is_the_mean_of_seeds_for_each_model_and_control():
    def rows(model, control, *accuracies):
        return [
            dict(model=model, seed=str(seed), control=control, img_size=size, accuracy=accuracy)
            for seed, pair in enumerate(accuracies)
            for size, accuracy in zip(("128", "64"), pair, strict=True)
        ]

    area, four = quality_of(
        rows("a", "area", ("0.9", "0.5"), ("0.8", "0.7"))
        + rows("b", "area", ("0.6", "0.4"))
        + rows("a", "four", ("0.2", "0.1"))
    )
    first, second = area.series
    assert (first.name, first.x, second.name) == ("a", [64.0, 128.0], "b")
    assert first.y == pytest.approx([60, 85])
    assert first.spread == pytest.approx([14.1421, 7.0711], abs=1e-4)
    assert (second.y, second.spread) == (pytest.approx([40, 60]), None)
    assert four.series[0].y == pytest.approx([10, 20]) and not four.series[1].y
    assert "by area" in area.title and "every canvas" in four.title
    assert area.x_texts == ["64", "128"]
