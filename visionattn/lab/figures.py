"""Which charts a table of rows becomes: head counts of a sweep, memory of a profile, cost over
sizes of a benchmark, accuracy over sizes of trained models.

Rows are those that commands write as CSV, read again or still in memory, so that one description
serves a command's PNG and the page of ``visionattn report``. It measures and draws nothing.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from visionattn.lab.charts import Chart, Look, Mark, Series
from visionattn.lab.report.origin import in_words, shared_training, values_of
from visionattn.lab.report.rows import chosen, distinct, trained_itself, value_of
from visionattn.lab.report.runs import WORDS

Row = Mapping[str, Any]
MIB = 2**20
SHAPES = {"efficient": 0, "direct": 1, "auto": 2}
"""Shapes of the lines of the forms, in every chart: the linear one is solid, the quadratic one
dashed.
"""
SUPERSCRIPTS = str.maketrans("0123456789.-", "⁰¹²³⁴⁵⁶⁷⁸⁹·⁻")
SERIES_KEYS = ("model", "precision", "form", "checkpointing", "batch", "depth")
"""What a line of a memory profile is about, besides its pass."""
PASSES = {"inference": "inference", "training": "training step"}


def power(base: str, exponent: float | None) -> str:
    """Write how a quantity grows, " ∝ N¹·⁹⁷"; nothing where that is not known."""
    return (
        ""
        if exponent is None
        else f" ∝\N{NO-BREAK SPACE}{base}{f'{exponent:.2f}'.translate(SUPERSCRIPTS)}"
    )


def slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Slope of the least-squares line through the logarithms; None for fewer than two places."""
    if len({x for x, _ in pairs}) < 2:
        return None
    x_logs, y_logs = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    return statistics.linear_regression(x_logs, y_logs).slope


def slope_of(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line through ``log y`` over ``log x`` for the larger
    half of the sizes, at least two.

    Small sizes are left out since there the cost of a call outweighs the work. None for fewer than
    two points.
    """
    return slope(sorted(zip(x, y, strict=True))[-max(2, math.ceil(len(x) / 2)) :])


def over(
    rows: Sequence[Row],
    x_column: str,
    y_column: str,
    factor: float,
    name: str,
    look: Look,
    *,
    spread: bool = False,
    status: str = "status",
) -> Series:
    """Return the mean of a column over another one; rows that have neither count for nothing.

    Args:
        rows: of one series.
        x_column, y_column: names of the columns.
        factor: to the unit of the chart.
        name, look: of the series.
        spread: whether the standard deviation is shown, where there are several values.
        status: column that says why there is no value; places of which it says so are failures.
    """
    groups: dict[float, list[float]] = {}
    failed: dict[float, str] = {}
    for row in rows:
        x, y, why = value_of(row, x_column), value_of(row, y_column), row.get(status)
        if x is not None and y is not None:
            groups.setdefault(x, []).append(factor * y)
        elif x is not None and why in ("oom", "out of memory"):
            failed[x] = WORDS["oom"]
    x = sorted(groups)
    deviations = [deviation(groups[key]) or 0.0 for key in x]
    shown = deviations if spread and any(deviations) else None
    failed = {key: why for key, why in failed.items() if key not in groups}
    return Series(name, look, x, [statistics.mean(groups[key]) for key in x], shown, failed)


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


# Head counts


def accuracy_column(rows: Sequence[Row]) -> str:
    """Return the column of the accuracy that counts: on the test images, or on those of validation
    where there are none.
    """
    tested = any(value_of(row, "test_accuracy") is not None for row in rows)
    return "test_accuracy" if tested else "validation_accuracy"


def name_of(pair: Sequence[str | None]) -> str:
    """Name an attention and its form."""
    return " ".join(filter(None, pair))


def looks_of(rows: Sequence[Row]) -> dict[tuple, Look]:
    """Return the look of each attention and form: an attention has its colour, a form its dash and
    marker.
    """
    attentions = [attention for (attention,) in distinct(rows, "attention")]
    return {
        (attention, form): Look(Look.of(attentions.index(attention)).colour, SHAPES.get(form, 0))
        for attention, form in distinct(rows, "attention", "form")
    }


def heads_of(rows: Sequence[Row], size: str | int) -> list[Chart]:
    """Draw up charts of accuracy, operations, speed and memory over head counts, at one image size
    of a sweep.
    """
    here = [row for row in rows if row.get("img_size") == size]
    looks, form = looks_of(rows), shared_training(rows)
    ticks = sorted({heads for row in here if (heads := value_of(row, "heads"))})
    batches = values_of(rows, "measure_batch")
    batch = f", batch {batches[0]}" if len(batches) == 1 else ""

    def chart(title: str, unit: str, column: str, factor: float, status: str = "") -> Chart:
        accuracy = column.endswith("accuracy")
        # Only a network that was trained has an accuracy; a form that was measured alone has none.
        chosen_rows = [row for row in here if trained_itself(row)] if accuracy else here
        names = {
            pair: pair[0] if accuracy and form else name_of(pair)
            for pair in looks
            if chosen(chosen_rows, ("attention", "form"), pair)
        }
        series = [
            over(
                chosen(chosen_rows, ("attention", "form"), pair),
                *("heads", column, factor, name, looks[pair]),
                spread=accuracy,
                status=status,
            )
            for pair, name in names.items()
        ]
        # Times, memory and operations begin at 0; accuracies may lie close together.
        axes = {"log_x": 2, "x_ticks": ticks, "from_zero": not accuracy}
        return Chart(title, "heads", unit, series, failed_below=unit.startswith("images"), **axes)

    column, seeds = accuracy_column(rows), len(distinct(here, "seed"))
    spread = f"mean and standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    images = "test" if column == "test_accuracy" else "validation"
    trained = f" (trained in the {form} form)" if form else ""
    charts = [
        chart(f"Accuracy{trained}", f"% of the {images} images, {spread}", column, 100),
        chart("Operations of a forward", "GFLOP, one image", "flops", 1e-9),
    ]
    for what, unit, end, factor in (
        ("Speed", f"images per second{batch}", "images_per_second", 1),
        ("Memory", f"peak MiB{batch}", "peak_bytes", 1 / MIB),
    ):
        for key, words in PASSES.items():
            charts.append(
                chart(f"{what} of {words}", unit, f"{key}_{end}", factor, f"{key}_status")
            )
    return charts


# Memory over image sizes


def series_name(keys: Sequence[str], values: Sequence[str], differ: Sequence[int]) -> str:
    """Name the model, and what of the rest is not the same in all series."""
    rest = [
        in_words(keys[i], str(values[i]))
        for i in differ
        if values[i] and (keys[i], values[i]) != ("checkpointing", "no")
    ]
    words = (text.removeprefix("form ").replace(" ", "\N{NO-BREAK SPACE}") for text in rest)
    return ", ".join([values[0], *words])


def memory_series(rows: Sequence[Row]) -> dict[tuple, tuple[Look, str]]:
    """Look and name of each series of a memory profile: a model has its colour."""
    found = distinct(rows, *SERIES_KEYS)
    differ = [
        i
        for i in range(1, len(SERIES_KEYS))
        if len({values[i] for values in found if values[i]}) > 1
    ]
    models = list(dict.fromkeys(values[0] for values in found))
    seen: dict[str, int] = {}
    series = {}
    for values in found:
        shape = seen[values[0]] = seen.get(values[0], -1) + 1
        look = Look(Look.of(models.index(values[0])).colour, shape % 4)
        series[values] = look, series_name(SERIES_KEYS, values, differ)
    return series


def memory_of(
    rows: Sequence[Row], columns: Sequence[str] = ("above_bytes",), n1: Mapping[float, str] = {}
) -> list[Chart]:
    """Draw up charts of memory over image sizes, a chart for each pass and column, a line for each
    model and way to run it.

    Args:
        rows: with the columns of ``visionattn profile``.
        columns: ``above_bytes``, what the pass adds to the level before it, and ``peak_bytes``.
        n1: texts at image sides in pixels.
    """
    pairs = [(value_of(row, "px"), value_of(row, "tokens")) for row in rows]
    sizes = dict(sorted((px, tokens) for px, tokens in pairs if px and tokens))
    few = len(sizes) <= 6
    axis = {"log_x": 2, "log_y": 10, "x_ticks": list(sizes) if few else None}
    axis["x_texts"] = [f"{px:,.0f}\n{n:,.0f}" for px, n in sizes.items()] if few else None
    x_name = "image side in pixels" + (", and tokens" if few else "")
    marks = [Mark(text, px) for px, text in n1.items()]
    units = {"above_bytes": "MiB above the level before", "peak_bytes": "peak MiB"}
    charts = []
    for column in columns:
        for (work,) in distinct(rows, "pass"):
            series = []
            for values, (look, name) in memory_series(rows).items():
                own = chosen(rows, ("pass", *SERIES_KEYS), (work, *values))
                growths = [value_of(row, "growth_exponent") for row in own]
                if own:
                    line = over(own, "px", column, 1 / MIB, name, look)
                    grows = power("tokens", next(filter(None, growths), None))
                    series.append(replace(line, name=name + grows if len(line.x) > 1 else name))
            title = work.replace("_", " ").capitalize()
            charts.append(Chart(title, x_name, units[column], series, marks, **axis))
    return charts


# Cost over sizes


def sizes_of(rows: Sequence[Row]) -> list[Chart]:
    """Time and, where it was measured, peak memory over the sizes of a benchmark, with how they
    grow.
    """
    values = {
        "Time": ("ms", lambda row, end="median": value_of(row, f"seconds_{end}"), 1e3),
        "Peak memory above the inputs": ("MiB", lambda row: value_of(row, "peak_bytes"), 1 / MIB),
    }
    work = rows[0]["pass"].replace("+", " and ")
    return [
        size_chart(f"{title} of {work}" if unit == "ms" else title, unit, rows, value, factor)
        for title, (unit, value, factor) in values.items()
        if unit == "ms" or any(value(row) for row in rows)
    ]


def size_chart(
    title: str,
    unit: str,
    rows: Sequence[Row],
    value: Callable[..., float | None],
    factor: float,
    *,
    names: Callable[[str], str] | None = None,
    **options: Any,
) -> Chart:
    """Draw up a chart of a value over sizes, a line for each case.

    Args:
        title, unit: of the chart.
        rows: with the columns of ``visionattn benchmark``.
        value: of a row, in the unit of the CSV; None where it was not measured.
        factor: to the unit of the chart.
        names: of cases, in words; None: their own. Behind them stands how the value grows, where
            sizes are on a logarithmic axis.
        options: of the chart.
    """
    axis = {"log_x": 2, "log_y": 10} | options
    tokens = any(row.get("width") for row in rows)
    cases = [values[0] for values in distinct(rows, "case")]
    bases = list(dict.fromkeys(case.split()[0] for case in cases))
    differ = [key for key in ("width", "dtype") if len(distinct(rows, key)) > 1]
    series = []
    for number, values in enumerate(distinct(rows, "case", *differ)):
        case, *more = values
        base, _, form = case.partition(" ")
        own = chosen(rows, ("case", *differ), values)
        points = sorted((value_of(row, "size"), value(row)) for row in own if value(row))
        x, y = ([point[i] for point in points] for i in (0, 1))
        failed = {value_of(r, "size"): r["status"] for r in own if r["status"] == "out of memory"}
        look = Look.of(number)
        if not differ:
            shape = SHAPES.get(form or ("auto" if f"{base} efficient" in cases else ""), 0)
            look = Look(Look.of(bases.index(base)).colour if len(bases) > 1 else shape, shape)
        name = ", ".join([names(case) if names else case_name(case, cases), *map(str, more)])
        if axis["log_x"] and x:
            name += power("N" if tokens else "px", slope_of(x, y))
        series.append(Series(name, look, x, [factor * one for one in y], None, failed))
    if tokens:
        ticks = sorted({value_of(row, "size") for row in rows})
        ticks = ticks if len(ticks) < 6 else [n for n in ticks if math.sqrt(n).is_integer()]
        sides = {n: f"\n{16 * math.sqrt(n):,.0f} px" for n in ticks if math.sqrt(n).is_integer()}
        axis |= {"x_ticks": ticks, "x_texts": [f"{n:,.0f}{sides.get(n, '')}" for n in ticks]}
        named = "tokens N" + (", and the side of an image in patches of 16" if sides else "")
    else:
        ticks, named = sorted({value_of(row, "size") for row in rows}), "image side in pixels"
        axis["x_ticks"] = ticks if len(ticks) < 8 else None
    return Chart(title, named, unit, series, **axis)


def case_name(case: str, cases: Sequence[str]) -> str:
    """Name a case in words; a form that was chosen by size is named beside one that is fixed."""
    base, _, form = case.partition(" ")
    fixed = any(other.startswith(f"{base} ") for other in cases)
    return f"{base} {form or ('chosen' if fixed else '')}".strip()


# Accuracy over test sizes

CONTROLS = {
    "area": "Fragments by area, 4 per 128 x 128 px",
    "four": "4 fragments on every canvas",
}
"""Titles of the controls of ``canvas``, as the column ``control`` has them."""


def quality_of(rows: Sequence[Row]) -> list[Chart]:
    """Draw up accuracy over the side of the test images, one chart per control and one line per
    model: means over seeds, with standard deviations.
    """
    models = [model for (model,) in distinct(rows, "model")]
    sizes = sorted({float(row["img_size"]) for row in rows})

    def line_of(number: int, control: str) -> Series:
        own = chosen(rows, ("model", "control"), (models[number], control))
        name, look = models[number], Look.of(number)
        return over(own, "img_size", "accuracy", 100.0, name, look, spread=True)

    return [
        Chart(
            CONTROLS[control],
            "side of the test images in px",
            "test accuracy in %",
            [line_of(number, control) for number in range(len(models))],
            log_x=2,
            bounds=(0.0, 100.0),
            x_ticks=sizes,
            x_texts=[f"{size:g}" for size in sizes],
        )
        for (control,) in distinct(rows, "control")
    ]
