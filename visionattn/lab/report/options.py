"""The command line of ``visionattn report``: flags, what they must be, and which folders they mean.
It writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from visionattn.cli.files import check_free
from visionattn.cli.parsing import parse, with_first
from visionattn.lab.report.rows import Rows, read_rows, tables_in
from visionattn.lab.report.runs import is_run

EXAMPLE = "checkpoints/digits --overwrite"
MOST_IMAGES = 100


@dataclass
class ReportConfig:
    """A page about runs, sweeps and memory profiles."""

    runs: list[str] | None = None
    """Folders of runs, sweeps and memory profiles, or CSV files of the latter two; they may stand
    first, without ``--runs``.
    """
    output: str | None = None
    """The page; None: ``report.html`` in the first folder."""
    title: str | None = None
    """Heading of the page; None: the names of what it shows."""
    images: int = 12
    """Images shown with the predictions of each run's best weights, 0 to 100; with 0 the page has
    no images, the first batches of the runs included.
    """
    overwrite: bool = False
    """Replace a page that exists."""


@dataclass(frozen=True)
class Wanted:
    """Checked options."""

    runs: dict[str, Path]
    """Folder of each run, by the name that the page gives it."""
    tables: list[Rows]
    output: Path
    title: str
    images: int
    problems: list[str]
    """What could not be read, a line each."""


def parse_report(argv: Sequence[str]) -> Wanted:
    """Read and check the flags.

    Raises:
        ValueError, FileNotFoundError: a flag is wrong, a folder is none or holds nothing to show,
            or a file is in the way.
    """
    config = parse(
        ReportConfig,
        with_first(argv, "runs"),
        command="report",
        description="Write one page of HTML about runs, sweeps and memory profiles; it needs no "
        "network.",
        example=EXAMPLE,
    )
    if not config.runs:
        raise ValueError("name what to show: folders of runs or sweeps, e.g. checkpoints/digits")
    if not 0 <= config.images <= MOST_IMAGES:
        raise ValueError(f"images must be from 0 to {MOST_IMAGES}, got {config.images}")
    paths = list(dict.fromkeys(map(Path, config.runs)))
    problems: list[str] = []
    runs, tables = find(paths, problems)
    place = paths[0] if paths[0].is_dir() else paths[0].absolute().parent
    output = Path(config.output) if config.output else place / "report.html"
    check_free(output, config.overwrite)
    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"output {output}: a page is HTML; end its name in .html")
    return Wanted(runs, tables, output, config.title or title_of(paths), config.images, problems)


def find(paths: Sequence[Path], problems: list[str]) -> tuple[dict[str, Path], list[Rows]]:
    """Find runs by name, and the rows of sweeps and memory profiles; files beside them that cannot
    be read become problems.

    Raises:
        FileNotFoundError, ValueError: a path does not exist, or holds nothing of these.
    """
    folders, tables = [], []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no run and no sweep at {path}")
        found = (
            tables_in(path, problems) if path.is_dir() else list(filter(None, [read_rows(path)]))
        )
        if path.is_dir() and is_run(path):
            folders.append(path)
        elif not found:
            raise ValueError(nothing_in(path))
        tables += found
    names = [path.absolute().name for path in folders]
    shown = [
        name if names.count(name) == 1 else str(path)
        for name, path in zip(names, folders, strict=True)
    ]
    return dict(zip(shown, folders, strict=True)), tables


def nothing_in(path: Path) -> str:
    """Say why a path cannot be shown, and what to name instead."""
    if not path.is_dir():
        return (
            f"{path} has neither the columns of a sweep nor those of a memory profile; name a "
            f"run folder or such a CSV file"
        )
    if (path / "sweep.json").is_file():
        trained = trainings_in(path)
        hint = f"; name its trainings meanwhile, e.g. {trained[0]}" if trained else ""
        return f"the sweep in {path} has written no cells.csv yet; it does so at its end{hint}"
    within = next(iter(runs_in(path)), None)
    hint = (
        f"; name the runs within it, e.g. {within}"
        if within
        else "; a run has config.yaml, a sweep cells.csv"
    )
    return f"{path} holds no run, no sweep and no memory profile{hint}"


def trainings_in(sweep: Path) -> list[Path]:
    """Return the runs of a sweep's folder."""
    return runs_in(sweep / "runs")


def runs_in(folder: Path) -> list[Path]:
    """Return the runs that lie in a folder."""
    return [path for path in sorted(folder.glob("*")) if path.is_dir() and is_run(path)]


def title_of(paths: Sequence[Path]) -> str:
    """Return the names of what is shown, the first three of many."""
    names = [path.absolute().name for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
