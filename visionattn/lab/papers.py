"""Measure and draw the figures of the papers on this machine. Each figure is a PNG, a CSV and a
printed table. ``docs/figures/redraw.py`` redraws the PNG from the CSV.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from visionattn.cli.files import write_whole
from visionattn.cli.provenance import summary
from visionattn.cli.tables import Record, markdown
from visionattn.lab.case_comparison import (
    COLUMNS,
    MeasurementPlan,
    measure_together,
    record_of,
    tell,
)
from visionattn.lab.cases import Case
from visionattn.lab.charts import Chart, Mark, Series, SeriesStyle, png
from visionattn.lab.figures import MIB, SHAPES, chosen, distinct, scaled, size_chart, value_of
from visionattn.ops.published_costs import N0, N1

Print = Callable[[str], None]
PLAN = MeasurementPlan(rounds=5, seconds=0.5, max_rounds=15)
QUICK = MeasurementPlan(rounds=2, seconds=0.0, max_rounds=2)
FORMS = ("direct", "efficient")

PUBLISHED_HEADS = {
    4: (12060, 596, 2975, 840),
    8: (7657, 1111, 5749, 585),
    16: (4341, 2135, 9713, 459),
    32: (2528, 4187, 14087, 397),
    64: (1235, 8291, 13480, 125),
}
"""Published table of TaylorShift by number of heads: images/s and MiB of the direct form, then of
the efficient form. Width 256, 1024 tokens, batch 16, on the authors' GPU.
"""


@dataclass(frozen=True)
class Figure:
    """The cases that a figure measures, and its charts."""

    title: str
    cases: Callable[[bool], Iterator[list[Case]]]
    """Yields lists of cases to measure together, by size. Called with True, it yields a few small
    sizes.
    """
    charts: Callable[[Sequence[Record]], list[Chart]]
    """Makes the charts from the rows of the CSV."""
    table: Callable[[Sequence[Record]], list[Record]] | None = None
    """Makes a second table. A figure with a second table also measures memory."""
    plan: Callable[[int], MeasurementPlan] = lambda size: PLAN
    """Returns the plan for the cases of a size."""


def redraw(
    figure: Figure,
    folder: Path,
    name: str,
    provenance: Record,
    show: Print,
    *,
    quick: bool = False,
) -> None:
    """Measure a figure, write ``<name>.png`` and ``<name>.csv`` to ``folder``, and print its table.

    Args:
        figure: the figure.
        folder: an existing folder.
        name: name of the files.
        provenance: provenance for the CSV and the PNG.
        show: gets the table line by line.
        quick: measure a few small sizes.
    """
    has_table = figure.table is not None

    def rows() -> Iterator[Record]:
        for group in figure.cases(quick):
            plan = replace(QUICK if quick else figure.plan(group[0].size), memory=has_table)
            baseline = group[0].label if has_table else None
            yield from map(record_of, measure_together(group, plan, baseline))

    records = tell(rows(), COLUMNS, provenance, show, folder / f"{name}.csv")
    if figure.table is not None:
        show("\n" + markdown(figure.table(records)))
    draw(folder / f"{name}.png", figure.title, figure.charts(records), provenance)
    show(f"\n{folder / name}.png and .csv are written")


def draw(path: Path, title: str, charts: Sequence[Chart], provenance: Record) -> None:
    """Write a PNG with the provenance of its numbers below the charts."""
    note = summary(provenance | {"load": float(provenance["load"])})
    write_whole(path, lambda place: png(place, charts, title=title, notes=[note]))


milliseconds_of = scaled("seconds_median", 1e3)


def mebibytes_of(row: Record) -> float | None:
    """Return the peak memory of a row in MiB; None if missing or below the resolution of the
    measurement.
    """
    peak = value_of(row, "peak_bytes")
    return peak / MIB if peak and peak > MIB else None


def images_per_second(row: Record) -> float | None:
    """Return the throughput of a forward in images per second; None if not timed."""
    seconds = value_of(row, "seconds_median")
    return float(row["batch"]) / seconds if seconds else None


# crossover: number of tokens from which the efficient form of TaylorShift needs less time or memory


def crossover_cases(quick: bool) -> Iterator[list[Case]]:
    """Yield both forms at numbers of tokens around the published crossover, for each width."""
    for width in (8, 16) if quick else (8, 16, 32, 64):
        middle = round(math.log2(N0(width)))
        powers = (7, 8) if quick else range(max(5, middle - 4), min(15, middle + 5))
        for size in (2**power for power in powers):
            yield [
                Case("operation", "taylorshift", size, width, form=form, heads=4) for form in FORMS
            ]


def crossing(rows: Sequence[Record], value: Callable[[Record], float | None]) -> float | str:
    """Return the size from which the direct form always has the larger value, or a text if there is
    none. The size is interpolated between measured sizes, on logarithmic axes.
    """
    found = {(int(row["size"]), row["case"].split()[-1]): value(row) for row in rows}
    sizes = sorted({n for n, _ in found if all(found.get((n, form)) for form in FORMS)})
    above = [math.log(found[n, "direct"] / found[n, "efficient"]) for n in sizes]
    if not sizes:
        return "-"
    if above[-1] <= 0:
        return f"none up to {sizes[-1]}"
    last = max((i for i, each in enumerate(above) if each <= 0), default=None)
    if last is None:
        return f"below {sizes[0]}"
    part = -above[last] / (above[last + 1] - above[last])
    return sizes[last] * (sizes[last + 1] / sizes[last]) ** part


def crossings(rows: Sequence[Record]) -> list[Record]:
    """Return, for each width, the measured crossovers in time and in memory, next to the published
    N0 and N1.
    """
    table = []
    for (width,) in distinct(rows, "width"):
        record, own = {"d": width}, chosen(rows, ["width"], [width])
        for name, what, value, published in (
            ("N0", "time", milliseconds_of, N0),
            ("N1", "memory", mebibytes_of, N1),
        ):
            at = crossing(own, value)
            record[f"{name} published"] = published(int(width))
            record[f"{name} measured ({what})"] = at if isinstance(at, str) else f"{at:.0f}"
        table.append(record)
    return table


def crossover_charts(rows: Sequence[Record]) -> list[Chart]:
    """Return charts of time, then of memory: one for each width, with both forms and lines at the
    measured and the published crossover. Widths with fewer than two sizes are left out.
    """
    charts = []
    for what, unit, value, published in (
        ("time of a forward pass", "milliseconds", milliseconds_of, N0),
        ("peak memory above the inputs", "MiB", mebibytes_of, N1),
    ):
        for (width,) in distinct(rows, "width"):
            own = chosen(rows, ["width"], [width])
            if any(
                sum(value(row) is not None for row in own if row["case"].endswith(form)) < 2
                for form in FORMS
            ):
                continue
            at, paper = crossing(own, value), published(int(width))
            marks = [Mark(f"equal at {paper:,}, published", paper)]
            marks += [] if isinstance(at, str) else [Mark(f"equal at {at:,.0f}, measured", at)]
            charts.append(size_chart(f"Head width {width}: {what}", unit, own, value, marks=marks,
                                     names=lambda case: case.split()[-1]))  # fmt: skip
    return charts


# Scaleformer, figures 4 to 6: model width 256, sequences


WORDS = {
    "relative": "relative position",
    "kernelized": "kernelized attention",
    "sdpa": "softmax, fused",
    "eager": "softmax, unfused",
    "causal": "causal",
    "flat": "with relative position",
}
"""Words for operations and their options; other options are left out."""


def words_of(case: str) -> str:
    """Return a case in words: its operation, options and form."""
    names, _, form = case.partition(" ")
    if not form and names not in ("sdpa", "eager"):
        form = "automatic form"
    return ", ".join(filter(None, [*map(WORDS.get, names.split("+")), form]))


def scaleformer(
    title: str, names: dict[str, Sequence[str]], width: int, heads: int, **largest: int
) -> Figure:
    """Return a figure of time over N with its growth exponent: 1 is linear, 2 is quadratic.

    Args:
        title: title of the figure.
        names: operations, with the forms of each.
        width, heads: head dimension and number of heads.
        largest: the maximum number of tokens of an operation or a form.
    """

    def cases(quick: bool) -> Iterator[list[Case]]:
        for size in (64, 128) if quick else [2**power for power in range(7, 15)]:
            yield [
                Case("operation", name, size, width, form=form, heads=heads, horizon=10)
                for name, forms in names.items()
                for form in forms
                if size <= min(largest.get(key, size) for key in (name, form))
            ]

    def charts(rows: Sequence[Record]) -> list[Chart]:
        title = "Time of a forward pass"
        return [size_chart(title, "milliseconds", rows, milliseconds_of, names=words_of)]

    return Figure(title, cases, charts)


CHOSEN = ("efficient", "auto")
"""The efficient form, and the form chosen by size, as in the paper."""


# taylorshift-heads: with more heads, the efficient form needs less time and memory, and the direct
# form needs more


def heads_cases(quick: bool) -> Iterator[list[Case]]:
    """Yield the pixel model in both forms for each number of heads, at the published batch size."""
    for heads in (4, 8) if quick else PUBLISHED_HEADS:
        name = f"taylorshift_vit_pixel+heads={heads}"
        yield [Case("model", name, 32, form=form, batch=1 if quick else 16) for form in FORMS]


HEADS_VALUES = {"images/s": images_per_second, "MiB": mebibytes_of}


def heads_table(rows: Sequence[Record]) -> list[Record]:
    """Return the measured and published values by number of heads; None for missing ones."""
    table: dict[int, Record] = {}
    for row in rows:
        heads, form = row["case"].partition("heads=")[2].split()
        record = table.setdefault(int(heads), {"h": int(heads), "d": 256 // int(heads)})
        for i, (unit, value) in enumerate(HEADS_VALUES.items()):
            measured = value(row)
            record[f"{form} {unit}"] = None if measured is None else f"{measured:.3g}"
            published = PUBLISHED_HEADS[int(heads)][2 * FORMS.index(form) + i]
            record[f"published {form} {unit}"] = published
    return [table[heads] for heads in sorted(table)]


def heads_charts(rows: Sequence[Record]) -> list[Chart]:
    """Return charts of throughput and memory over the number of heads, measured and published."""
    table = heads_table(rows)
    heads = [record["h"] for record in table]
    axis = {"log_x": 2, "x_ticks": heads, "from_zero": True}
    axis["x_texts"] = [f"{record['h']}\n{record['d']}" for record in table]
    charts = []
    for unit, title in zip(HEADS_VALUES, ("Speed", "Peak memory"), strict=True):
        for source, where in (("", "measured"), ("published ", "published, on a GPU")):
            series = [
                Series(form, SeriesStyle(SHAPES[form], SHAPES[form]), heads,
                       [record[f"{source}{form} {unit}"] for record in table])
                for form in FORMS
            ]  # fmt: skip
            charts.append(
                Chart(f"{title}, {where}", "heads; below: head width", unit, series, **axis)
            )
    return charts


FIGURES = {
    "crossover": Figure(
        "TaylorShift: direct and efficient form over the number of tokens, 4 heads",
        crossover_cases,
        crossover_charts,
        crossings,
    ),
    "scaleformer-4": scaleformer(
        "Relative position of Scaleformer: one head of width 256, horizon 10",
        dict.fromkeys(("relative", "relative+causal"), FORMS[::-1]),
        *(256, 1),
        direct=4096,
    ),
    "scaleformer-5": scaleformer(
        "Kernelized attention: one head of width 256",
        dict.fromkeys(("kernelized", "kernelized+causal"), FORMS[::-1]),
        *(256, 1),
        direct=8192,
    ),
    "scaleformer-6": scaleformer(
        "Softmax and kernelized attention: 4 heads of width 64, horizon 10",
        dict.fromkeys(("sdpa", "eager"), ("auto",))
        | dict.fromkeys(("kernelized", "kernelized+flat+sum"), CHOSEN),
        *(64, 4),
        sdpa=8192,
        eager=8192,
    ),
    "taylorshift-heads": Figure(
        "TaylorShift over the number of heads: images of 32 px, width 256, batch 16",
        heads_cases,
        heads_charts,
        heads_table,
    ),
}
