"""Run ``visionattn report``: read its flags, and write its page, which is self-contained.

Jinja escapes texts from files (names, classes, reasons), and the page forbids scripts and requests.
"""

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from visionattn.cli.files import check_free, printable, write_text
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.untrusted import read_csv
from visionattn.lab.charts import Chart, SeriesStyle, svg
from visionattn.lab.figures import Row, distinct, heads_of, memory_of
from visionattn.lab.report import page_tables as tables
from visionattn.lab.report.report_examples import galleries
from visionattn.lab.report.run_reading import curves_of, is_run, read_run
from visionattn.lab.report.templates import render

MOST_IMAGES = 100
KINDS = {"sweep": "Head counts", "memory": "Memory"}
"""Headings of CSV files, by kind."""


@dataclass
class ReportConfig:
    """Options of the page about runs, sweeps and memory profiles."""

    runs: list[str] | None = None
    """Folders of runs, sweeps and memory profiles, or CSV files of sweeps and profiles. They may
    come first, without ``--runs``.
    """
    output: str | None = None
    """HTML file to write; None: ``report.html`` in the first folder."""
    title: str | None = None
    """Heading of the page; None: the names of its runs, sweeps and profiles."""
    images: int = 12
    """Number of images to show with the predictions of each run's best weights, from 0 to 100.
    With 0 the page has no pictures of mistakes either.
    """
    overwrite: bool = False
    """Replace an existing page."""


def report(argv: Sequence[str]) -> str:
    """Write the page, and return a line about it.

    Raises:
        ValueError, OSError: a wrong flag, nothing to show, or an unwritable page.
    """
    config = parse(
        ReportConfig,
        with_first(argv, "runs"),
        command="report",
        description="Write one HTML page about runs, sweeps and memory profiles. The page needs no "
        "network.",
        example="checkpoints/digits --overwrite",
    )
    if not config.runs:
        raise ValueError("expected --runs: folders of runs or sweeps, e.g. checkpoints/digits")
    if not 0 <= config.images <= MOST_IMAGES:
        raise ValueError(f"images must be from 0 to {MOST_IMAGES}, got {config.images}")
    paths = list(dict.fromkeys(map(Path, config.runs)))
    folders, found = find(paths)
    place = paths[0] if paths[0].is_dir() else paths[0].absolute().parent
    output = Path(config.output) if config.output else place / "report.html"
    check_free(output, config.overwrite)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"expected --output to end in .html, got {output}")
    names = [path.absolute().name for path in paths]
    title = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    text = printable(page(config.title or title, folders, found, config.images))
    write_text(output, text)
    size = len(text.encode()) / 1e6
    return f"{output}: runs {len(folders)}, sweeps and profiles {len(found)}; {size:.2g} MB"


def find(paths: Sequence[Path]) -> tuple[dict[str, Path], list[tuple[str, Path, Sequence[Row]]]]:
    """Return the runs by name, and the kind, path and rows of sweeps and memory profiles.

    Raises:
        FileNotFoundError, ValueError: a path does not exist, or holds nothing to show.
    """
    runs: dict[str, Path] = {}
    found: list[tuple[str, Path, Sequence[Row]]] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no run or sweep at {path}")
        tables_here = []
        for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
            try:
                columns, rows = read_csv(file)
            except (ValueError, OSError):
                continue
            if (kind := tables.kind_of(columns)) and rows:
                tables_here.append((kind, file, rows))
        if path.is_dir() and is_run(path):
            name = path.absolute().name
            runs[str(path) if name in runs else name] = path
        elif not tables_here:
            raise ValueError(nothing_in(path))
        found += tables_here
    return runs, found


def nothing_in(path: Path) -> str:
    """Return the error for a path that holds nothing to show, with advice."""
    within = runs_in(path) + runs_in(path / "runs")
    way_out = f"pass the runs in it, e.g. {within[0]}" if within else "pass other folders"
    return (
        f"{path} is not a run (config.yaml), a finished sweep (cells.csv) or a CSV file of a sweep "
        f"or memory profile; {way_out}"
    )


def runs_in(folder: Path) -> list[Path]:
    """Return the run folders in a folder."""
    return [path for path in sorted(folder.glob("*")) if path.is_dir() and is_run(path)]


def page(
    title: str,
    folders: dict[str, Path],
    found: Sequence[tuple[str, Path, Sequence[Row]]],
    images: int,
) -> str:
    """Return the page as text.

    Args:
        title: heading of the page.
        folders: run folders by name.
        found: kind, path and rows of sweeps and memory profiles.
        images: number of images to show for each run.
    """
    runs = [read_run(folder, name) for name, folder in folders.items()]
    shown, skipped = galleries(runs, images) if images else ([], {})
    names = (f"chart{i}" for i in itertools.count())
    classes = tables.classes_of(runs, images)
    return render(
        "page.html",
        title=title,
        draw=lambda chart, legend=True: Markup(svg(chart, next(names), legend=legend)),
        runs=runs,
        looks={run.name: SeriesStyle.of(i) for i, run in enumerate(runs)},
        results=tables.results(runs) if runs else None,
        curves=curves_of(runs),
        classes=classes,
        class_tables=tables.class_tables(classes),
        ious=tables.iou_table(runs),
        outputs=tables.outputs_of_runs(runs),
        galleries=shown,
        skipped=skipped,
        settings=tables.settings(runs) if runs else None,
        provenance=tables.provenance(runs) if runs else None,
        measured=[measured(*each) for kind in KINDS for each in found if each[0] == kind],
    )


def measured(kind: str, path: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the section about a CSV file: charts by caption, a table, and the provenance."""
    figures: dict[str, Sequence[Chart]] = {}
    if kind == "sweep":
        sizes = [px for (px,) in distinct(rows, "img_size")]
        figures = {f"Images of {px} px": heads_of(rows, px) for px in sizes}
    if kind == "memory":
        figures = {"": memory_of(rows, ("above_bytes", "peak_bytes"))}
    folder = path.absolute().parent
    # Name a file with the default name after its folder.
    name = folder.name if path.name in ("cells.csv", "memory.csv") else path.stem
    found = {"title": f"{KINDS[kind]}: {name}", "path": path, "command": ""}
    if kind == "sweep" and runs_in(folder / "runs"):
        runs, output = (shlex.quote(str(folder / each)) for each in ("runs", "trainings.html"))
        found["command"] = f"visionattn report {runs}/*/ --output {output}"
    return found | {
        "shared": tables.shared_words(rows),
        "figures": figures,
        "table": tables.rows_table(kind, rows),
        "sources": tables.sources(kind, rows),
    }
