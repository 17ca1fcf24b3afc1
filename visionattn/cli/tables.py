"""Format tables as Markdown, and the same rows as CSV with their provenance.

Names of files and classes may come from others, and spreadsheets run texts that begin with ``=``.
In CSV such a text gets an apostrophe in front, which marks text in spreadsheets. ``read_rows``
removes the apostrophe.
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, TextIO

Record = dict[str, Any]
RUN = re.compile("'*[=+\\-@\t\r\n＝＋－＠]")
"""Matches the start of a text that a spreadsheet would run, with or without apostrophes in front.
"""
ESCAPED = str.maketrans({"|": r"\|", "\n": r"\n", "\r": r"\r"})


def duration(seconds: float) -> str:
    """Format seconds with three digits as s, ms or us."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def sized(count: float) -> str:
    """Format a number of bytes: ``812 MiB``, ``1.4 GiB``."""
    if count < 1000 * 2**20:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.{1 if count < 100 * 2**30 else 0}f} GiB"


def lasting(seconds: float) -> str:
    """Format a duration: ``0.42 s``, ``8 min 20 s``, ``3 h``."""
    if seconds < 59.5:
        digits = 0 if seconds >= 9.5 else 1 - math.floor(math.log10(max(seconds, 1e-4)))
        return f"{seconds:.{min(4, digits)}f} s"
    (high, low), (whole, part) = divmod(round(seconds), 60), ("min", "s")
    if high >= 60:
        (high, low), (whole, part) = divmod(round(seconds / 60), 60), ("h", "min")
    return f"{high} {whole} {low} {part}" if low else f"{high} {whole}"


def mebibytes(count: int | None) -> str | None:
    """Format a number of bytes in MiB."""
    if count is None:
        return None
    size = count / 2**20
    return f"{size:.3g} MiB" if size < 999.5 else f"{size:,.0f} MiB"


def markdown(cells: Sequence[Record]) -> str:
    """Return a Markdown table without the columns that are empty in every row."""
    used = [name for name in cells[0] if any(row[name] is not None for row in cells)]
    return "\n".join([heading(used), *(line([row[name] for name in used]) for row in cells)])


def heading(columns: Sequence[str]) -> str:
    """Return the first two lines of a Markdown table."""
    return line(columns) + "\n|" + "---|" * len(columns)


def line(values: Sequence[Any]) -> str:
    """Return a line of a Markdown table, with an empty cell for None. Characters that would end a
    cell or the line are escaped.
    """
    return (
        "| "
        + " | ".join("" if value is None else str(value).translate(ESCAPED) for value in values)
        + " |"
    )


def as_text(value: Any) -> Any:
    """Return a CSV cell that no spreadsheet runs; numbers are unchanged. ``from_text`` is the
    inverse.
    """
    return f"'{value}" if isinstance(value, str) and RUN.match(value) else value


def from_text(cell: str) -> str:
    """Return the original text of a cell that ``as_text`` made."""
    return cell[1:] if cell[:1] == "'" and RUN.match(cell) else cell


def write_rows(stream: TextIO, columns: Sequence[str], rows: Iterable[Record]) -> None:
    """Write a heading and rows as CSV, with texts escaped by ``as_text``."""
    # With "\r\n" as the line end, the writer quotes all characters that may end a line.
    lines = SimpleNamespace(write=lambda text: stream.write(text.removesuffix("\r\n") + "\n"))
    writer = csv.DictWriter(lines, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: as_text(value) for key, value in row.items()} for row in rows)


def read_rows(stream: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of CSV that ``write_rows`` wrote, by column, with all cells as texts. Missing
    cells are empty, and surplus cells are dropped.
    """
    for row in csv.DictReader(stream):
        yield {key: from_text(value or "") for key, value in row.items() if key is not None}


def csv_text(records: Sequence[Record], provenance: Record) -> str:
    """Return rows as CSV, each with its provenance, so that a single row still tells its origin."""
    stream = io.StringIO()
    rows = [record | provenance for record in records]
    write_rows(stream, list(rows[0]), rows)
    return stream.getvalue()
