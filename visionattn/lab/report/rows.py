"""The CSV files of sweeps and memory profiles, known by their columns. It reads rows and draws
nothing.

A file that a later version writes with more columns is still read; one that lacks a column that is
needed is no such file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from visionattn.cli.untrusted import read_csv
from visionattn.lab.report.runs import MOST

Row = dict[str, str]
NEEDED = {
    "sweep": {"attention", "heads", "form", "img_size", "seed", "status", "parameters"},
    "memory": {"model", "pass", "px", "tokens", "peak_bytes", "above_bytes", "status"},
    "largest": {"model", "pass", "largest_px", "too_large_px", "tokens", "peak_bytes", "status"},
}
"""Columns by which a file is known: a sweep, a memory profile, a search for the largest images."""


@dataclass(frozen=True)
class Rows:
    """A file of rows."""

    path: Path
    kind: str
    """A key of ``NEEDED``."""
    rows: Sequence[Row]


def read_rows(path: Path) -> Rows | None:
    """Read a file; None where it is no CSV of a sweep or of a memory profile, or has no rows.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        columns, rows = read_csv(path)
    except ValueError:
        return None
    kind = next((kind for kind, needed in NEEDED.items() if needed <= set(columns)), None)
    return Rows(path, kind, rows) if kind and rows else None


def tables_in(folder: Path, problems: list[str]) -> list[Rows]:
    """Return the sweeps and memory profiles that lie in a folder; a problem for each file that
    cannot be opened.
    """
    found = []
    for path in sorted(folder.glob("*.csv")):
        try:
            found.append(None if path.is_dir() else read_rows(path))
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    return list(filter(None, found))


def value_of(row: Row, column: str) -> float | None:
    """Return a number of a row; None where there is none."""
    return number_in(row.get(column))


def number_in(text: str | float | None) -> float | None:
    """Return the number that a text says; None for anything else and for what is beyond
    ``MOST``.
    """
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if abs(value) <= MOST else None


def trained_itself(row: Row) -> bool:
    """Tell whether the accuracy of a sweep's row is of its own form; else the form was measured
    alone, and another one trained.
    """
    return row.get("trained_form", row["form"]) == row["form"]


def distinct(rows: Sequence[Row], *columns: str) -> list[tuple[str, ...]]:
    """Return the values that the columns have together, in order of appearance."""
    return list(dict.fromkeys(tuple(row.get(column, "") for column in columns) for row in rows))


def chosen(rows: Sequence[Row], columns: Sequence[str], values: Sequence[str]) -> list[Row]:
    """Return the rows that have these values in these columns."""
    return [
        row
        for row in rows
        if all(row.get(key, "") == value for key, value in zip(columns, values, strict=True))
    ]
