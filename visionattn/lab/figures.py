"""Turn table rows into charts: head counts of a sweep, memory of a profile, cost over sizes of a
benchmark.

Rows have the columns of the commands' CSV files. The same charts serve a command's PNG and the page
of ``visionattn report``. This module neither measures nor draws.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from visionattn.lab.charts import Chart, Mark, Series, SeriesStyle

Row = Mapping[str, Any]
MIB = 2**20
MOST = 1e38
"""Larger numbers in a file count as missing, because they overflow float32."""
SHAPES = {"efficient": 0, "direct": 1, "auto": 2}
"""Line shapes of the forms in all charts: the efficient form is solid, the direct form dashed."""
SUPERSCRIPTS = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹·⁻")
SERIES_KEYS = ("model", "precision", "form", "checkpointing", "batch", "depth")
"""Columns that identify a line of a memory profile, together with the pass."""


def number(value: Any) -> float | None:
    """Convert a number or text to float; None for NaN, other values, and values beyond ``MOST``."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if abs(found) <= MOST else None


def value_of(row: Row, column: str) -> float | None:
    """Return a number of a row; None if missing."""
    return number(row.get(column))


def distinct(rows: Sequence[Row], *columns: str) -> list[tuple]:
    """Return the distinct combinations of values in the columns, in order of appearance."""
    return list(dict.fromkeys(tuple(row.get(column, "") for column in columns) for row in rows))


def chosen(rows: Sequence[Row], columns: Sequence[str], values: Sequence[Any]) -> list[Row]:
    """Return the rows with the given values in the columns."""
    return [row for row in rows if distinct([row], *columns) == [tuple(values)]]


def trained_itself(row: Row) -> bool:
    """Tell whether the form of a sweep's row was trained. Otherwise the row has the accuracy of
    another form, which computes the same function.
    """
    return row.get("trained_form", row["form"]) == row["form"]


def power(base: str, exponent: float | None) -> str:
    """Format the growth of a value: " ∝ N¹·⁹⁷"; empty if unknown."""
    if exponent is None:
        return ""
    return f" ∝\N{NO-BREAK SPACE}{base}{f'{exponent:.2f}'.translate(SUPERSCRIPTS)}"


def slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of the least-squares line of ``log y`` over ``log x``; None for fewer than
    two distinct x.
    """
    if len({x for x, _ in pairs}) < 2:
        return None
    x_logs, y_logs = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    return statistics.linear_regression(x_logs, y_logs).slope


def slope_of(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return ``slope`` over the larger half of the sizes, at least two.

    At small sizes the overhead of a call dominates.
    """
    return slope(sorted(zip(x, y, strict=True))[-max(2, math.ceil(len(x) / 2)) :])


def over(
    rows: Sequence[Row],
    x_column: str,
    value: Callable[[Row], float | None],
    name: str,
    look: SeriesStyle,
    *,
    spread: bool = False,
    status: str = "status",
) -> Series:
    """Return a series: the mean of a value for each number in a column.

    Args:
        rows: the rows of one series.
        x_column: the column; rows without a number in it are skipped.
        value: returns the value of a row in the unit of the chart; None if missing.
        name, look: name and style of the series.
        spread: show the standard deviation where there are several values.
        status: column with the reason of a missing value; only out of memory is shown.
    """
    groups: dict[float, list[float]] = {}
    failed: dict[float, str] = {}
    for row in rows:
        x, y = value_of(row, x_column), value(row)
        if x is not None and y is not None:
            groups.setdefault(x, []).append(y)
        elif x is not None and row.get(status) in ("oom", "out of memory"):
            failed[x] = "out of memory"
    groups = dict(sorted(groups.items()))
    deviations = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in groups.values()]
    means = [statistics.mean(each) for each in groups.values()]
    failed = {x: why for x, why in failed.items() if x not in groups}
    return Series(name, look, list(groups), means, deviations if spread else None, failed)


def scaled(column: str, factor: float) -> Callable[[Row], float | None]:
    """Return a function that reads a column of a row and multiplies it by a factor."""

    def value(row: Row) -> float | None:
        found = value_of(row, column)
        return None if found is None else factor * found

    return value


# Head counts


def accuracy_column(rows: Sequence[Row]) -> str:
    """Return the column of the test accuracy, or of the validation accuracy if there is none."""
    tested = any(value_of(row, "test_accuracy") is not None for row in rows)
    return "test_accuracy" if tested else "validation_accuracy"


def looks_of(rows: Sequence[Row]) -> dict[tuple, SeriesStyle]:
    """Return the style of each attention and form: the color shows the attention, dash and marker
    show the form.
    """
    attentions = [attention for (attention,) in distinct(rows, "attention")]
    return {
        (attention, form): SeriesStyle(
            SeriesStyle.of(attentions.index(attention)).colour, SHAPES.get(form, 0)
        )
        for attention, form in distinct(rows, "attention", "form")
    }


def heads_of(rows: Sequence[Row], size: str | int) -> list[Chart]:
    """Return charts of accuracy, operations, throughput and memory over head counts, for one image
    size of a sweep.
    """
    here = [row for row in rows if row.get("img_size") == size]
    ticks = sorted({heads for row in here if (heads := value_of(row, "heads"))})
    batches = [batch for (batch,) in distinct(here, "measure_batch") if batch]
    batch = f", batch {batches[0]}" if len(batches) == 1 else ""

    def chart(title: str, unit: str, column: str, factor: float, status: str = "") -> Chart:
        accuracy = column.endswith("accuracy")
        own = [row for row in here if trained_itself(row)] if accuracy else here
        series = [
            over(chosen(own, ("attention", "form"), pair), "heads", scaled(column, factor),
                 " ".join(filter(None, pair)), look, spread=accuracy, status=status)
            for pair, look in looks_of(rows).items() if pair in distinct(own, "attention", "form")
        ]  # fmt: skip
        # Axes of times, memory and operations start at 0; accuracies may lie close together.
        axes = {"log_x": 2, "x_ticks": ticks, "from_zero": not accuracy}
        return Chart(title, "heads", unit, series, failed_below=unit.startswith("images"), **axes)

    column, seeds = accuracy_column(rows), len(distinct(here, "seed"))
    spread = f", mean and standard deviation of {seeds} seeds" if seeds > 1 else ", one seed"
    images = column.partition("_")[0]
    throughput, memory = f"images per second{batch}", f"MiB{batch}"
    return [
        chart("Accuracy", f"% of {images} images{spread}", column, 100),
        chart("Operations of a forward pass", "GFLOP, one image", "flops", 1e-9),
        *(
            chart(f"{what} of {words}", unit, f"{key}_{end}", factor, f"{key}_status")
            for what, unit, end, factor in (
                ("Throughput", throughput, "images_per_second", 1),
                ("Peak memory", memory, "peak_bytes", 1 / MIB),
            )
            for key, words in (("inference", "inference"), ("training", "training step"))
        ),
    ]


# Memory over image sizes


def memory_of(
    rows: Sequence[Row], columns: Sequence[str] = ("above_bytes",), n1: Mapping[float, str] = {}
) -> list[Chart]:
    """Return charts of memory over image sizes: one chart for each pass and column, one line for
    each model and setting.

    Args:
        rows: with the columns of ``visionattn profile``.
        columns: ``above_bytes`` (the memory that the pass adds) and ``peak_bytes``.
        n1: texts of vertical lines, by image side in pixels.
    """
    pairs = [(value_of(row, "px"), value_of(row, "tokens")) for row in rows]
    sizes = dict(sorted((px, tokens) for px, tokens in pairs if px and tokens))
    few = len(sizes) <= 6
    axis = {"log_x": 2, "log_y": 10, "x_ticks": list(sizes) if few else None}
    axis["x_texts"] = [f"{px:,.0f}\n{n:,.0f}" for px, n in sizes.items()] if few else None
    x_name = "image side in pixels" + ("; below: tokens" if few else "")
    marks = [Mark(text, px) for px, text in n1.items()]
    units = {"above_bytes": "peak MiB added by the pass", "peak_bytes": "peak MiB"}
    differ = [key for key in SERIES_KEYS[1:] if len({*distinct(rows, key)} - {("",)}) > 1]
    models = distinct(rows, "model")
    charts = []
    for column in columns:
        for (work,) in distinct(rows, "pass"):
            series = []
            for count, values in enumerate(distinct(rows, *SERIES_KEYS)):
                own = chosen(rows, ("pass", *SERIES_KEYS), (work, *values))
                if own:
                    words = [f"{key} {own[0][key]}" for key in differ if own[0].get(key)]
                    growths = [value_of(row, "growth_exponent") for row in own]
                    name = ", ".join([own[0]["model"], *words])
                    name += power("tokens", next(filter(None, growths), None))
                    look = SeriesStyle(SeriesStyle.of(models.index(values[:1])).colour, count % 4)
                    series.append(over(own, "px", scaled(column, 1 / MIB), name, look))
            title = work.replace("_", " ").capitalize()
            charts.append(Chart(title, x_name, units[column], series, marks, **axis))
    return charts


# Cost over sizes


def sizes_of(rows: Sequence[Row]) -> list[Chart]:
    """Return charts of time and, if measured, peak memory over the sizes of a benchmark, with their
    growth.
    """
    work = rows[0]["pass"].replace("+", " and ")
    charts = [size_chart(f"Time of {work}", "ms", rows, scaled("seconds_median", 1e3))]
    if any(value_of(row, "peak_bytes") for row in rows):
        memory = scaled("peak_bytes", 1 / MIB)
        charts.append(size_chart("Peak memory above the inputs", "MiB", rows, memory))
    return charts


def size_chart(
    title: str,
    unit: str,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    *,
    names: Callable[[str], str] = str,
    **options: Any,
) -> Chart:
    """Return a chart of a value over sizes, with one line for each case.

    Args:
        title, unit: title and unit of the chart.
        rows: with the columns of ``visionattn benchmark``.
        value: returns the value of a row, in the unit of the chart; None if missing.
        names: turns the name of a case into words.
        options: further options of the chart.
    """
    axis = {"log_x": 2, "log_y": 10} | options
    bases = distinct([{"base": row["case"].split()[0]} for row in rows], "base")
    differ = [key for key in ("width", "dtype") if len(distinct(rows, key)) > 1]
    series = []
    for count, values in enumerate(distinct(rows, "case", *differ)):
        base, _, form = values[0].partition(" ")
        several = any(row["case"].startswith(f"{base} ") for row in rows)
        look, shape = SeriesStyle.of(count), SHAPES.get(form or "auto" * several, 0)
        # The color shows the operation, and dash and marker show the form. With a single operation,
        # forms differ in color, too.
        if not differ and any(" " in row["case"] for row in rows):
            look = SeriesStyle(
                SeriesStyle.of(bases.index((base,))).colour if len(bases) > 1 else shape, shape
            )
        name = ", ".join([names(values[0]), *map(str, values[1:])])
        own = chosen(rows, ("case", *differ), values)
        # 0 is below the resolution of the measurement.
        line = over(own, "size", lambda row: value(row) or None, name, look)
        if axis["log_x"]:
            name += power("N" if rows[0].get("width") else "px", slope_of(line.x, line.y))
        series.append(replace(line, name=name))
    sizes = sorted({value_of(row, "size") for row in rows})
    if rows[0].get("width"):
        # An image of 4^n patches has a whole number of patches per side.
        few = sizes if len(sizes) < 6 else [n for n in sizes if math.sqrt(n).is_integer()]
        sides = {n: f"\n{16 * math.sqrt(n):,.0f} px" for n in few if math.sqrt(n).is_integer()}
        axis |= {"x_ticks": few, "x_texts": [f"{n:,.0f}{sides.get(n, '')}" for n in few]}
        x_name = "tokens N; below: image side, patches of 16 px"
    else:
        x_name, axis["x_ticks"] = "image side in pixels", sizes if len(sizes) < 8 else None
    return Chart(title, x_name, unit, series, **axis)
