"""The figures of the documentation, the papers' among them, measured on this machine: each writes
a PNG and a CSV, and prints its table.

``python -m visionattn.lab.papers docs/figures`` draws the figures of a folder again from their CSV
files, without measuring anything.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from visionattn.cli.files import write_text, write_whole
from visionattn.cli.provenance import summary
from visionattn.cli.tables import Record, csv_text, heading, line, markdown, read_rows
from visionattn.lab.cases import Case
from visionattn.lab.charts import Chart, Look, Mark, Series
from visionattn.lab.compare import COLUMNS, Plan, cells_of, measure_together, record_of
from visionattn.lab.drawing import png
from visionattn.lab.figures import MIB, SHAPES, heads_of, memory_of, quality_of, size_chart
from visionattn.lab.profile.shape import Shape
from visionattn.lab.report.rows import value_of

Print = Callable[[str], None]
PLAN = Plan(rounds=5, seconds=0.5, max_rounds=15)
QUICK = Plan(rounds=2, seconds=0.0, max_rounds=2)
FORMS = ("direct", "efficient")
PROCESSOR_TIME = "seconds of the processor"

PUBLISHED_HEADS = {
    4: (12060, 596, 2975, 840),
    8: (7657, 1111, 5749, 585),
    16: (4341, 2135, 9713, 459),
    32: (2528, 4187, 14087, 397),
    64: (1235, 8291, 13480, 125),
}
"""TaylorShift, table of head counts: images/s and MiB of the direct form, then of the efficient
one, for width 256 and 1024 tokens at batch 16 on the authors' GPU.
"""


@dataclass(frozen=True)
class Figure:
    """What a figure measures and how it is drawn."""

    title: str
    cases: Callable[[bool], Iterator[list[Case]]]
    """Cases that are measured together, size by size; few small ones if True."""
    charts: Callable[[Sequence[Record]], list[Chart]]
    """The charts of rows, as the CSV has them."""
    table: Callable[[Sequence[Record]], list[Record]] | None = None
    """A second table; memory is measured where there is one."""
    plan: Callable[[int], Plan] = lambda size: PLAN
    """How long cases of a size are measured."""


def redraw(
    figure: str,
    folder: Path,
    provenance: Record,
    show: Print,
    *,
    quick: bool = False,
    processor_time: bool = False,
) -> None:
    """Measure and draw a figure; ``<figure>.png`` and ``<figure>.csv`` in ``folder``, its table to
    ``show``.

    The CSV is written after each size, so that a run that is stopped keeps what it measured.

    Args:
        figure: a name of ``FIGURES``.
        folder: exists.
        provenance: what the CSV and the PNG say of the machine.
        show: gets the table line by line.
        quick: few small sizes.
        processor_time: as ``Plan`` has it; the CSV and the PNG say so.
    """
    chosen, records = FIGURES[figure], []
    if processor_time:
        provenance = provenance | {"device": f"{provenance['device']}, {PROCESSOR_TIME}"}
    show(heading(COLUMNS))
    for group in chosen.cases(quick):
        compared = chosen.table is not None
        plan = QUICK if quick else chosen.plan(group[0].size)
        plan = replace(plan, memory=compared, processor_time=processor_time)
        for row in measure_together(group, plan, group[0].label if compared else None):
            records.append(record_of(row))
            show(line(list(cells_of(row).values())))
        write_text(folder / f"{figure}.csv", csv_text(records, provenance))
    if chosen.table is not None:
        show("\n" + markdown(chosen.table(records)))
    draw(folder / f"{figure}.png", chosen.title, chosen.charts(records), provenance)
    show(f"\n{folder / figure}.png and .csv are written")


def draw(path: Path, title: str, charts: Sequence[Chart], provenance: Record) -> None:
    """Write a PNG with where its numbers come from below it."""
    note = summary(provenance | {"load": float(provenance["load"])})
    write_whole(path, lambda place: png(place, charts, title=title, notes=[note]))


def milliseconds_of(row: Record) -> float | None:
    """Return the median time in ms, where the row has one."""
    seconds = value_of(row, "seconds_median")
    return seconds and 1e3 * seconds


def mebibytes_of(row: Record) -> float | None:
    """Return the peak memory in MiB, where the row has one that is above the resolution of the
    measurement.
    """
    peak = value_of(row, "peak_bytes")
    return peak / MIB if peak and peak > MIB else None


def images_per_second(row: Record) -> float | None:
    """Return the images per second of a forward, where it was timed."""
    seconds = value_of(row, "seconds_median")
    return float(row["batch"]) / seconds if seconds else None


# crossover: from how many tokens on the efficient form of TaylorShift is the faster, and the
# smaller, one


def crossover_cases(quick: bool) -> Iterator[list[Case]]:
    """Yield both forms of one head, over N around the published crossing of each width."""
    from visionattn.ops.published import N0

    for width in (8, 16) if quick else (8, 16, 32, 64):
        middle = round(math.log2(N0(width)))
        sizes = (
            (128, 256)
            if quick
            else [2**power for power in range(max(5, middle - 4), min(15, middle + 5))]
        )
        for size in sizes:
            yield [
                Case("operation", "taylorshift", size, width, form=form, heads=4) for form in FORMS
            ]


def crossing(x: Sequence[float], rising: Sequence[float], flat: Sequence[float]) -> float | None:
    """Find where ``rising`` overtakes ``flat`` for good, by log-log interpolation between sizes;
    None where it never does.

    Args:
        x: sizes in order.
        rising, flat: two curves over them.
    """
    above = [math.log(a / b) for a, b in zip(rising, flat, strict=True)]
    for i in range(len(above) - 2, -1, -1):
        if above[-1] > 0 >= above[i]:
            return between(x[i], x[i + 1], -above[i] / (above[i + 1] - above[i]))
    return None


def between(low: float, high: float, part: float) -> float:
    """Return the value so far on the way from one to another, on a logarithmic axis."""
    return low * (high / low) ** part


def by_form(rows: Sequence[Record], width: int, value: Callable) -> tuple[list, list, list]:
    """Return the sizes that have a value in both forms, and the values of each."""
    of = {
        (int(row["size"]), row["case"].split()[-1]): value(row)
        for row in rows
        if int(row["width"]) == width and value(row)
    }
    sizes = sorted(size for size, form in of if form == "direct" and (size, "efficient") in of)
    return sizes, [of[size, "direct"] for size in sizes], [of[size, "efficient"] for size in sizes]


def widths_of(rows: Sequence[Record]) -> list[int]:
    """Return the widths of a head, in order."""
    return sorted({int(row["width"]) for row in rows})


def crossings(rows: Sequence[Record]) -> list[Record]:
    """Return, for each width, the measured crossings in time and in memory beside the published N0
    and N1.
    """
    from visionattn.ops.published import N0, N1

    table = []
    for width in widths_of(rows):
        found = []
        for value in (milliseconds_of, mebibytes_of):
            sizes, direct, efficient = by_form(rows, width, value)
            at = crossing(sizes, direct, efficient) if sizes else None
            found.append(f"{at:.0f}" if at else _no_crossing(sizes, direct, efficient))
        record = {"d": width, "N0 published": N0(width), "N0 measured (time)": found[0]}
        table.append(record | {"N1 published": N1(width), "N1 measured (memory)": found[1]})
    return table


def _no_crossing(sizes: Sequence[int], direct: Sequence[float], efficient: Sequence[float]) -> str:
    """Say why there is no crossing among the sizes."""
    if not sizes:
        return "-"
    return f"below {sizes[0]}" if direct[-1] > efficient[-1] else f"none up to {sizes[-1]}"


def crossover_charts(rows: Sequence[Record]) -> list[Chart]:
    """Time and memory of both forms, a row for each width; a ring where they cross, a line where
    the paper's count says.
    """
    from visionattn.ops.published import N0, N1

    charts = []
    for width in widths_of(rows):
        own = [row for row in rows if int(row["width"]) == width]
        for what, unit, value, published, name in (
            ("time", "ms", milliseconds_of, N0, "N0"),
            ("peak memory above the inputs", "MiB", mebibytes_of, N1, "N1"),
        ):
            sizes, direct, efficient = by_form(rows, width, value)
            marks = [Mark(f"published {name} {published(width):,}", published(width))]
            if at := crossing(sizes, direct, efficient) if sizes else None:
                height = next(
                    between(low[1], high[1], math.log(at / low[0]) / math.log(high[0] / low[0]))
                    for low, high in pairwise(zip(sizes, direct, strict=True))
                    if at <= high[0]
                )
                marks.append(Mark(f"measured {at:,.0f}", at, height))
            chart = size_chart(f"d = {width}: {what}", unit, own, value, 1, marks=marks,
                               names=lambda case: case.split()[-1],
                               nothing="too little to be measured")  # fmt: skip
            charts.append(chart if len(sizes) > 1 else replace(chart, series=()))
    return charts


# Scaleformer, figures 4 to 6: model width 256, sequences


def scaleformer(
    title: str, names: dict[str, Sequence[str]], width: int, heads: int, **largest: int
) -> Figure:
    """Time over N, with how it grows: 1 is linear, 2 quadratic.

    Args:
        title: of the figure.
        names: options, and the forms of each.
        width, heads: of the tensors.
        largest: tokens up to which a name or a form is run.
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
        return [size_chart("Time of a forward", "ms", rows, milliseconds_of, 1)]

    return Figure(title, cases, charts)


CHOSEN = ("efficient", "auto")
"""The efficient form beside the one that is chosen by size, as in the paper."""


# taylorshift-heads: more heads make the efficient form faster and smaller, and the direct one
# slower and larger


def heads_cases(quick: bool) -> Iterator[list[Case]]:
    """Yield the pixel model in both forms for each number of heads, at the batch of the published
    table.
    """
    for heads in (4, 8) if quick else PUBLISHED_HEADS:
        name = f"taylorshift_vit_pixel+heads={heads}"
        yield [Case("model", name, 32, form=form, batch=1 if quick else 16) for form in FORMS]


def by_heads(rows: Sequence[Record]) -> dict[tuple[int, str], Record]:
    """Return the rows by number of heads and form."""
    found = [(row["case"].partition("heads=")[2].split(), row) for row in rows]
    return {(int(heads), form): row for (heads, form), row in found}


HEADS_VALUES = {"images/s": images_per_second, "MiB": mebibytes_of}


def heads_table(rows: Sequence[Record]) -> list[Record]:
    """Make the table of measured and published figures, by number of heads."""
    found, table = by_heads(rows), []
    for heads in sorted({heads for heads, _ in found}):
        published, record = iter(PUBLISHED_HEADS[heads]), {"h": heads, "d": 256 // heads}
        for form in FORMS:
            for unit, value in HEADS_VALUES.items():
                measured = value(found[heads, form])
                record[f"{form} {unit}"] = None if measured is None else f"{measured:.3g}"
                record[f"published {form} {unit}"] = next(published)
        table.append(record)
    return table


def heads_charts(rows: Sequence[Record]) -> list[Chart]:
    """Draw up charts of throughput and memory over the number of heads: measured here, and
    published.
    """
    found = by_heads(rows)
    heads = sorted({count for count, _ in found})
    charts = []
    for j, (unit, value) in enumerate(HEADS_VALUES.items()):
        title = "Speed" if unit == "images/s" else "Peak memory"
        measured, published = [], []
        for i, form in enumerate(FORMS):
            look = Look(SHAPES[form], SHAPES[form])
            y = [value(found[h, form]) if (h, form) in found else None for h in heads]
            measured.append(Series(form, look, heads, y))
            y = [PUBLISHED_HEADS[h][2 * i + j] for h in heads]
            published.append(Series(form, look, heads, y))
        axis = {"log_x": 2, "x_ticks": heads, "from_zero": True}
        axis["x_texts"] = [f"{h}\nd = {256 // h}" for h in heads]
        charts.append(Chart(f"{title} here", "heads", unit, measured, **axis))
        charts.append(
            Chart(f"{title} as published, on the authors' GPU", "heads", unit, published, **axis)
        )
    return charts


# image-size: whole models over the size of an image, for the README

SIZE_MODELS = {
    "vit_small_patch16_224": "timm's ViT-S with SDPA",
    "taylorshift_vit_s+heads=12": "taylorshift_vit_s, 12\N{NO-BREAK SPACE}heads",
    "scaleformer_vit_s+heads=12": "scaleformer_vit_s, 12\N{NO-BREAK SPACE}heads",
}


def size_cases(quick: bool) -> Iterator[list[Case]]:
    """Yield the cases of small models on one image."""
    for size in (32, 64) if quick else (512, 1024, 1536, 2048, 3072, 4096):
        yield [Case("model", name, size) for name in SIZE_MODELS]


def size_plan(size: int) -> Plan:
    """Plan fewer rounds where a forward takes longer; timm's takes many minutes above 2,048 px."""
    rounds = 5 if size <= 1024 else 3 if size < 2048 else 2
    return Plan(rounds=rounds, seconds=0.0, first_call=size > 2048)


def size_table(rows: Sequence[Record]) -> list[Record]:
    """Make the table of speed and memory by size, and how many times as fast as timm's."""
    table: dict[int, Record] = {}
    for row in rows:
        speed = images_per_second(row)
        peak = mebibytes_of(row)
        ratio = value_of(row, "ratio_median")
        record, name = table.setdefault(int(row["size"]), {"px": int(row["size"])}), row["case"]
        record[f"{name} images/s"] = speed and f"{speed:.3g}"
        record[f"{name} MiB"] = peak and f"{peak:,.0f}"
        record[f"{name} / timm's speed"] = ratio and f"{1 / ratio:.3g}"
    return list(table.values())


def size_charts(rows: Sequence[Record]) -> list[Chart]:
    """Draw up charts of images per second and peak memory over the side of an image; beside the
    names how many times as fast as timm's model the others are at the largest size.
    """
    largest = max(int(row["size"]) for row in rows)
    ratios = {
        row["case"]: f": {1 / ratio:.2g} × timm"
        for row in rows
        if int(row["size"]) == largest and (ratio := value_of(row, "ratio_median"))
    }
    ratios[next(iter(SIZE_MODELS))] = ""

    def fast(case: str) -> str:
        return SIZE_MODELS[case] + ratios.get(case, "")

    unit = "peak MiB above weights and image"
    return [
        size_chart("Speed", "images per second", rows, images_per_second, 1, names=fast,
                   log_x=None, failed_below=True),
        size_chart("Memory", unit, rows, mebibytes_of, 1, names=SIZE_MODELS.__getitem__,
                   log_x=None, log_y=None, from_zero=True),
    ]  # fmt: skip


FIGURES = {
    "crossover": Figure(
        "TaylorShift, 4 heads: from where the efficient form is the cheaper one",
        crossover_cases,
        crossover_charts,
        crossings,
    ),
    "scaleformer-4": scaleformer(
        "Relative term of Scaleformer: one head, d = 256, R = 10",
        dict.fromkeys(("relative", "relative+causal"), FORMS[::-1]),
        *(256, 1),
        direct=4096,
    ),
    "scaleformer-5": scaleformer(
        "Kernelized attention: one head, d = 256",
        dict.fromkeys(("kernelized", "kernelized+causal"), FORMS[::-1]),
        *(256, 1),
        direct=8192,
    ),
    "scaleformer-6": scaleformer(
        "Softmax and kernelized attention: 4 heads, d = 64, R = 10",
        dict.fromkeys(("sdpa", "eager"), ("auto",))
        | dict.fromkeys(("kernelized", "kernelized+flat+sum"), CHOSEN),
        *(64, 4),
        sdpa=8192,
        eager=8192,
    ),
    "taylorshift-heads": Figure(
        "TaylorShift's pixel model: images of 32 px, width 256, batch 16",
        heads_cases,
        heads_charts,
        heads_table,
    ),
    "image-size": Figure(
        "One image through a small vision transformer, float32, on a processor",
        size_cases,
        size_charts,
        size_table,
        size_plan,
    ),
}


def profile_charts(rows: Sequence[Record]) -> list[Chart]:
    """Draw up the memory profile of the documentation, whose TaylorShift has heads of width 64."""
    from visionattn.lab.profile.run import n1_of

    return memory_of(rows, n1=n1_of({"taylorshift_vit_s": Shape(16, 256, 1, 64)}))


OTHERS = {
    "heads-digits": (
        "Head counts of a pixel model on digits, images of 32 px",
        partial(heads_of, size="32"),
    ),
    "quality": (
        "canvas: small models trained at 48 to 80 px, 4 epochs; deviations are of seeds",
        quality_of,
    ),
    "memory": ("Memory of one block of small models, one image, float32", profile_charts),
}
"""Pictures of the documentation that other tools measure: title and charts."""


def draw_again(folder: Path) -> list[str]:
    """Draw the figures that lie in a folder as CSV; returns their names."""
    known = {name: (figure.title, figure.charts) for name, figure in FIGURES.items()} | OTHERS
    drawn = [path.stem for path in sorted(folder.glob("*.csv")) if path.stem in known]
    for name in drawn:
        with open(folder / f"{name}.csv", encoding="utf-8", newline="") as file:
            rows = list(read_rows(file))
        title, charts = known[name]
        draw(folder / f"{name}.png", title, charts(rows), rows[0])
    return drawn


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m visionattn.lab.papers", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds NAME.csv, gets NAME.png")
    print("\n".join(draw_again(parser.parse_args().folder)))
