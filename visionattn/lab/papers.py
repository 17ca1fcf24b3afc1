"""The papers' figures, measured on this machine: each writes a PNG and a CSV, and prints its
table.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from visionattn.cli.files import write_whole
from visionattn.cli.provenance import summary
from visionattn.cli.tables import Record, csv_text, heading, line, markdown
from visionattn.lab.cases import Case
from visionattn.lab.compare import COLUMNS, Plan, Row, cells_of, measure_together, record_of
from visionattn.lab.plot import Curve, Panel, crossing, curves_of, draw

Print = Callable[[str], None]
PLAN = Plan(rounds=5, seconds=0.5, max_rounds=15)
QUICK = Plan(rounds=2, seconds=0.0, max_rounds=2)

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


def redraw(figure: str, folder: Path, quick: bool, provenance: Record, show: Print) -> None:
    """Measure and draw a figure; ``<figure>.png`` and ``<figure>.csv`` in ``folder``, its table to
    ``show``.

    Args:
        figure: a name of ``FIGURES``.
        folder: exists.
        quick: few small sizes.
        provenance: what the CSV and the PNG say of the machine.
        show: gets the table line by line.
    """
    cases, panels, more = FIGURES[figure]
    rows: list[Row] = []
    show(heading(COLUMNS))
    for group in cases(quick):
        two_forms = (
            more is not None
        )  # each group is the direct form and the efficient one, whose ratio and memory count
        plan = replace(QUICK if quick else PLAN, memory=two_forms)
        for row in measure_together(group, plan, group[0].label if two_forms else None):
            rows.append(row)
            show(line(list(cells_of(row).values())))
    if more is not None:
        show("\n" + markdown(more(rows)))
    note = summary(provenance)
    write_whole(folder / f"{figure}.png", lambda path: draw(path, panels(rows), note))
    text = csv_text([record_of(row) for row in rows], provenance)
    write_whole(
        folder / f"{figure}.csv", lambda path: path.write_text(text, encoding="utf-8", newline="")
    )
    show(f"\n{folder / figure}.png and .csv are written")


def seconds_of(row: Row) -> float | None:
    """Median time, where the row has one."""
    return row.seconds and row.seconds.median


def mebibytes_of(row: Row) -> float | None:
    """Peak memory in MiB, where the row has one that is above the resolution of the measurement."""
    return row.peak_bytes / 2**20 if row.peak_bytes and row.peak_bytes > 2**20 else None


# crossover: from how many tokens on the efficient form of TaylorShift is the faster, and the
# smaller, one


def crossover_cases(quick: bool) -> Iterator[list[Case]]:
    """Both forms of one head, over N around the published crossing of each width."""
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
                Case("operation", "taylorshift", size, width, form=form, heads=4)
                for form in ("direct", "efficient")
            ]


def _by_form(rows: Sequence[Row], width: int, value: Callable) -> tuple[list, list, list]:
    """Sizes that have a value in both forms, and the values of each."""
    of = {
        (row.case.size, row.case.form): value(row)
        for row in rows
        if row.case.width == width and value(row)
    }
    sizes = sorted(size for size, form in of if form == "direct" and (size, "efficient") in of)
    return sizes, [of[size, "direct"] for size in sizes], [of[size, "efficient"] for size in sizes]


def crossings(rows: Sequence[Row]) -> list[Record]:
    """For each width the measured crossings in time and in memory beside the published N0 and
    N1.
    """
    from visionattn.ops.published import N0, N1

    table = []
    for width in sorted({row.case.width for row in rows}):
        found = []
        for value in (seconds_of, mebibytes_of):
            sizes, direct, efficient = _by_form(rows, width, value)
            at = crossing(sizes, direct, efficient) if sizes else None
            found.append(f"{at:.0f}" if at else _no_crossing(sizes, direct, efficient))
        record = {"d": width, "N0 published": N0(width), "N0 measured (time)": found[0]}
        table.append(record | {"N1 published": N1(width), "N1 measured (memory)": found[1]})
    return table


def _no_crossing(sizes: Sequence[int], direct: Sequence[float], efficient: Sequence[float]) -> str:
    """Why there is no crossing among the sizes."""
    if not sizes:
        return "-"
    return f"below {sizes[0]}" if direct[-1] > efficient[-1] else f"none up to {sizes[-1]}"


def crossover_panels(rows: Sequence[Row]) -> list[Panel]:
    """Time and memory of both forms; a star where they cross, a vertical line where the paper's
    count says.
    """
    from visionattn.ops.published import N0, N1

    panels = []
    for value, published, name, unit in (
        (seconds_of, N0, "N0", "seconds"),
        (mebibytes_of, N1, "N1", "MiB"),
    ):
        curves, marks = [], []
        for index, width in enumerate(sorted({row.case.width for row in rows})):
            color = f"C{index}"
            sizes, direct, efficient = _by_form(rows, width, value)
            if not sizes:
                continue
            curves.append(
                Curve(f"direct, d = {width}", sizes, direct, {"color": color, "linestyle": "--"})
            )
            curves.append(Curve(f"efficient, d = {width}", sizes, efficient, {"color": color}))
            at = crossing(sizes, direct, efficient)
            if at:
                star = {"color": color, "marker": "*", "markersize": 15, "markeredgecolor": "black"}
                marks.append(
                    Curve(
                        f"measured {name}, d = {width}: {at:.0f}",
                        [at],
                        [_interpolate(sizes, efficient, at)],
                        star,
                    )
                )
            text = {
                "color": color,
                "marker": "v",
                "markersize": 10,
                "markeredgecolor": "black",
                "clip_on": False,
            }
            label = f"published {name}, d = {width}: {published(width)}"
            marks.append(Curve(label, [published(width)], [_floor(rows, value)], text))
        title = f"{'time' if name == 'N0' else 'peak memory'} of TaylorShift, 4 heads"
        panels.append(Panel(curves, "tokens N", unit, title, slopes=name == "N0", marks=marks))
    return panels


def _floor(rows: Sequence[Row], value: Callable) -> float:
    """A place under all curves."""
    return 0.7 * min(value(row) for row in rows if value(row))


def _interpolate(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The curve at a place between its sizes, log-log."""
    for left in range(len(x) - 1):
        if at <= x[left + 1]:
            part = math.log(at / x[left]) / math.log(x[left + 1] / x[left])
            return y[left] * (y[left + 1] / y[left]) ** part
    return y[-1]


# Scaleformer, figures 4 to 6: model width 256, sequences


def scaleformer_cases(
    names: dict[str, Sequence[str]], *, width: int, heads: int, largest: dict[str, int]
) -> Callable:
    """Cases of each name in each of its forms, up to the largest size of the form.

    Args:
        names: options and forms.
        width, heads: of the tensors.
        largest: tokens up to which a name or a form is run.
    """

    def cases(quick: bool) -> Iterator[list[Case]]:
        for size in (64, 128) if quick else [2**power for power in range(7, 15)]:
            forms = [(name, form) for name, listed in names.items() for form in listed]
            forms = [
                (name, form)
                for name, form in forms
                if size <= min(largest.get(key, size) for key in (name, form))
            ]
            shared = dict(heads=heads, horizon=10)
            yield [
                Case("operation", name, size, width, form=form, **shared) for name, form in forms
            ]

    return cases


def scaleformer_panels(title: str) -> Callable[[Sequence[Row]], list[Panel]]:
    """Time over N on log2 axes with slopes: 1 is linear, 2 quadratic."""

    def panels(rows: Sequence[Row]) -> list[Panel]:
        return [Panel(curves_of(rows, seconds_of), "tokens N", "seconds", title, log2=True)]

    return panels


BOTH = ("efficient", "direct")
CHOSEN = ("efficient", "auto")
"""The efficient form beside the one that is chosen by size, as in the paper."""


# taylorshift-heads: more heads make the efficient form faster and smaller, and the direct one
# slower and larger


def heads_cases(quick: bool) -> Iterator[list[Case]]:
    """The pixel model in both forms for each number of heads, at the batch of the published
    table.
    """
    for heads in (4, 8) if quick else PUBLISHED_HEADS:
        name = f"taylorshift_vit_pixel+heads={heads}"
        yield [
            Case("model", name, 32, form=form, batch=1 if quick else 16)
            for form in ("direct", "efficient")
        ]


def _heads_of(row: Row) -> int:
    return int(row.case.name.partition("heads=")[2])


def images_per_second(row: Row) -> float | None:
    """Images per second of a forward, where it was timed."""
    return row.case.batch / row.seconds.median if row.seconds else None


def heads_table(rows: Sequence[Row]) -> list[Record]:
    """Measured and published, by number of heads."""
    found = {(_heads_of(row), row.case.form): row for row in rows}
    table = []
    for heads in sorted({heads for heads, _ in found}):
        published, record = PUBLISHED_HEADS[heads], {"h": heads, "d": 256 // heads}
        for i, form in enumerate(("direct", "efficient")):
            row = found[heads, form]
            for j, (unit, value) in enumerate(
                (("images/s", images_per_second), ("MiB", mebibytes_of))
            ):
                record[f"{form} {unit}"] = None if value(row) is None else f"{value(row):.3g}"
                record[f"published {form} {unit}"] = published[2 * i + j]
        table.append(record)
    return table


def heads_panels(rows: Sequence[Row]) -> list[Panel]:
    """Throughput and memory over the number of heads: measured solid, published dashed."""
    panels = []
    for j, (unit, value) in enumerate((("images/s", images_per_second), ("MiB", mebibytes_of))):
        curves = []
        for i, form in enumerate(("direct", "efficient")):
            measured = sorted(
                (_heads_of(row), value(row)) for row in rows if row.case.form == form and value(row)
            )
            if measured:
                curves.append(
                    Curve(f"{form}, here", *zip(*measured, strict=True), {"color": f"C{i}"})
                )
            heads = sorted({_heads_of(row) for row in rows})
            published = [PUBLISHED_HEADS[h][2 * i + j] for h in heads]
            style = {"color": f"C{i}", "linestyle": "--", "alpha": 0.6}
            curves.append(Curve(f"{form}, published (GPU)", heads, published, style))
        title = (
            f"pixel model, width 256, 1025 tokens: "
            f"{'throughput' if unit == 'images/s' else 'peak memory'}"
        )
        panels.append(Panel(curves, "heads h (d = 256 / h)", unit, title, slopes=False))
    return panels


FIGURES: dict[str, tuple[Callable, Callable, Callable | None]] = {
    "crossover": (crossover_cases, crossover_panels, crossings),
    "scaleformer-4": (
        scaleformer_cases(
            {"relative": BOTH, "relative+causal": BOTH},
            width=256,
            heads=1,
            largest={"direct": 4096},
        ),
        scaleformer_panels("A_rel, d = 256, R = 10, one head"),
        None,
    ),
    "scaleformer-5": (
        scaleformer_cases(
            {"kernelized": BOTH, "kernelized+causal": BOTH},
            width=256,
            heads=1,
            largest={"direct": 8192},
        ),
        scaleformer_panels("kernelized attention, d = 256, one head"),
        None,
    ),
    "scaleformer-6": (
        scaleformer_cases(
            dict.fromkeys(("sdpa", "eager"), ("auto",))
            | dict.fromkeys(("kernelized", "kernelized+flat+sum"), CHOSEN),
            width=64,
            heads=4,
            largest={"sdpa": 8192, "eager": 8192},
        ),
        scaleformer_panels("multi-head attention, width 256, 4 heads, R = 10"),
        None,
    ),
    "taylorshift-heads": (heads_cases, heads_panels, heads_table),
}
"""Of each figure its cases, its panels, and a second table."""
