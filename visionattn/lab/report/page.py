"""The page: what ``visionattn report`` writes. This module owns its sections, and that
nothing in it comes from anywhere else.

Whatever stands in files (names, classes, reasons) reaches the page through Jinja's escaping, and
the page forbids scripts and any request by itself.
"""

import shlex
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import visionattn
from visionattn.cli.files import printable, write_text
from visionattn.lab.charts import MOST_POINTS, Chart, Look, page_colours
from visionattn.lab.drawing import svg
from visionattn.lab.figures import heads_of, memory_of
from visionattn.lab.profile.config import FILES
from visionattn.lab.report import origin, tables
from visionattn.lab.report.batches import batches_of
from visionattn.lab.report.classes import classes_of
from visionattn.lab.report.examples import galleries
from visionattn.lab.report.figures import Figure, curves_of
from visionattn.lab.report.masks import class_table, mask_galleries
from visionattn.lab.report.options import Wanted, parse_report, trainings_in
from visionattn.lab.report.rows import Rows, distinct
from visionattn.lab.report.runs import Run, read_run
from visionattn.lab.sweep.folder import ROWS

KINDS = {"sweep": "Head counts", "memory": "Memory", "largest": "Largest images"}
"""Headings of the files of rows."""


@dataclass(frozen=True)
class Measured:
    """A sweep or a memory profile, ready for the page."""

    title: str
    path: str
    shared: str
    """What all rows share."""
    figures: Sequence[Figure]
    table: tables.Table
    sources: Sequence[tuple[str, str]]
    trainings: int
    """Run folders of a sweep that lie beside its file."""
    command: str
    """Shows them."""


def report(argv: Sequence[str]) -> str:
    """Write the page that the flags ask for; returns a line about it.

    Raises:
        ValueError, OSError: a flag is wrong, there is nothing to show, or the page cannot be
            written.
    """
    wanted = parse_report(argv)
    now = time.time()
    runs = [read_run(folder, name, now=now) for name, folder in wanted.runs.items()]
    text = page(wanted, runs, now=now)
    text = printable(text)
    write_text(wanted.output, text)
    kinds = [rows.kind for rows in wanted.tables]
    parts = {
        "run": len(runs),
        "sweep": kinds.count("sweep"),
        "memory profile": kinds.count("memory"),
    }
    what = [origin.counted(count, words) for words, count in parts.items() if count]
    what += (
        [f"{origin.counted(count, 'table')} of largest images"]
        if (count := kinds.count("largest"))
        else []
    )
    return f"{wanted.output}: {', '.join(what)}; {len(text.encode()) / 1e6:.2g} MB"


def page(wanted: Wanted, runs: Sequence[Run], *, now: float) -> str:
    """Return the page as text.

    Args:
        wanted: the options.
        runs: what was read of the runs.
        now: seconds since 1970.
    """
    shown, skipped = galleries(runs, wanted.images) if wanted.images else ([], {})
    masked, unmasked = mask_galleries(runs, wanted.images) if wanted.images else ([], {})
    seen, unseen = batches_of(runs) if wanted.images else ([], {})
    charts = Charts()
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(resource),
    )
    return environment.get_template("page.html").render(
        title=wanted.title,
        written=f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M} UTC",
        version=visionattn.__version__,
        style=Markup(page_colours() + resource("page.css")),
        draw=charts.draw,
        problems=wanted.problems,
        runs=runs,
        looks={run.name: Look.of(i) for i, run in enumerate(runs)},
        results=tables.results(runs),
        curves=curves_of(runs),
        most_points=MOST_POINTS,
        classes=classes_of(runs, wanted.images),
        galleries=shown,
        masked=masked,
        pixel_classes=class_table(runs),
        skipped=skipped | unmasked,
        batches=seen,
        unseen={name: why for name, why in unseen.items() if skipped.get(name) != why},
        settings=tables.settings(runs) if runs else None,
        provenance=tables.provenance(runs),
        measured=[measured(rows) for kind in KINDS for rows in wanted.tables if rows.kind == kind],
    )


def measured(found: Rows) -> Measured:
    """Return the figures and the table of a file of rows."""
    rows, path = found.rows, found.path
    figures, table = {
        "sweep": lambda: (
            [
                shown(heads_of(rows, px), f"Images of {px} px")
                for (px,) in distinct(rows, "img_size")
            ],
            tables.sweep(rows),
        ),
        "memory": lambda: (
            [shown(memory_of(rows, ("above_bytes", "peak_bytes")))],
            tables.memory(rows),
        ),
        "largest": lambda: ([], tables.largest(rows)),
    }[found.kind]()
    # A file of the usual name says nothing: its folder names it.
    name = path.absolute().parent.name if path.name in (ROWS, FILES["csv"]) else path.stem
    about, sources = origin.shared(found.kind, rows), origin.sources(found.kind, rows)
    trainings = len(trainings_in(path.parent)) if found.kind == "sweep" else 0
    command = (
        f"visionattn report {quoted(path.parent / 'runs')}/*/ --output "
        f"{quoted(path.parent / 'trainings.html')}"
    )
    return Measured(
        f"{KINDS[found.kind]}: {name}",
        str(path),
        about,
        figures,
        table,
        sources,
        trainings,
        command,
    )


def shown(charts: Sequence[Chart], caption: str = "") -> Figure:
    """Return those of the charts that show something."""
    return Figure([chart for chart in charts if not chart.empty], caption)


def quoted(path: Path) -> str:
    """Return a path as a shell takes it."""
    return shlex.quote(str(path))


def resource(name: str) -> str:
    """Return a file that lies beside this one."""
    return files("visionattn.lab.report").joinpath(name).read_text(encoding="utf-8")


class Charts:
    """Draws the charts of one page, each under a name of its own."""

    def __init__(self) -> None:
        self._count = 0

    def draw(self, chart: Any) -> Markup:
        """Return a chart as an element of the page; where numbers make that impossible, a line that
        says so.
        """
        self._count += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error", RuntimeWarning
                )  # so matplotlib says that numbers overflow
                return Markup(svg(chart, f"chart{self._count}"))
        except (ArithmeticError, ValueError, RuntimeWarning) as error:
            reason = " ".join(str(error).split())
            return Markup('<p class="problem">This chart cannot be drawn: {}.</p>').format(reason)
