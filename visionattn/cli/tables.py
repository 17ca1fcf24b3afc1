"""Tables: Markdown for people, and the same rows as CSV or JSON with what the numbers depend on.

Names of files and classes come from others, and spreadsheets run what begins with ``=``. In CSV
such a text gets an apostrophe before it, as spreadsheets mark text, and ``read_rows`` takes it off.
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
"""How a text begins that a spreadsheet would run, or that such an apostrophe stands before."""
ESCAPED = str.maketrans({"|": r"\|", "\n": r"\n", "\r": r"\r"})


def duration(seconds: float) -> str:
    """Write seconds with three digits and a unit that suits them."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def sized(count: float) -> str:
    """Write bytes for people: ``812 MiB``, ``1.4 GiB``."""
    if count < 1000 * 2**20:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / 2**30:.{1 if count < 100 * 2**30 else 0}f} GiB"


def lasting(seconds: float) -> str:
    """Write a time for people: ``0.42 s``, ``8 min 20 s``, ``3 h``."""
    if seconds < 59.5:
        digits = 0 if seconds >= 9.5 else 1 - math.floor(math.log10(max(seconds, 1e-4)))
        return f"{seconds:.{min(4, digits)}f} s"
    (high, low), (whole, part) = divmod(round(seconds), 60), ("min", "s")
    if high >= 60:
        (high, low), (whole, part) = divmod(round(seconds / 60), 60), ("h", "min")
    return f"{high} {whole} {low} {part}" if low else f"{high} {whole}"


def mebibytes(count: int | None) -> str | None:
    """Write a number of bytes in MiB."""
    if count is None:
        return None
    size = count / 2**20
    return f"{size:.3g} MiB" if size < 999.5 else f"{size:,.0f} MiB"


def markdown(cells: Sequence[Record]) -> str:
    """Make a Markdown table; columns that are empty in every row are left out."""
    used = [name for name in cells[0] if any(row[name] is not None for row in cells)]
    return "\n".join([heading(used), *(line([row[name] for name in used]) for row in cells)])


def heading(columns: Sequence[str]) -> str:
    """Return the first two lines of a Markdown table."""
    return line(columns) + "\n|" + "---|" * len(columns)


def line(values: Sequence[Any]) -> str:
    """Return a line of a Markdown table, with an empty cell for None; what would end a cell or the
    line gets a backslash.
    """
    return (
        "| "
        + " | ".join("" if value is None else str(value).translate(ESCAPED) for value in values)
        + " |"
    )


def as_text(value: Any) -> Any:
    """Return a cell of CSV that no spreadsheet runs; numbers stay as they are, ``from_text`` gives
    texts back.
    """
    return f"'{value}" if isinstance(value, str) and RUN.match(value) else value


def from_text(cell: str) -> str:
    """Return the text that ``as_text`` made a cell of."""
    return cell[1:] if cell[:1] == "'" and RUN.match(cell) else cell


def write_rows(stream: TextIO, columns: Sequence[str], rows: Iterable[Record]) -> None:
    """Write a heading and rows as CSV, as they come, with texts as ``as_text`` writes them."""
    # Such a writer quotes whatever another program may take for the end of a line.
    lines = SimpleNamespace(write=lambda text: stream.write(text.removesuffix("\r\n") + "\n"))
    writer = csv.DictWriter(lines, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({key: as_text(value) for key, value in row.items()} for row in rows)


def read_rows(stream: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of CSV that ``write_rows`` wrote, by column, all cells as texts; cells that
    are missing are empty, and those beyond the columns are left out.
    """
    for row in csv.DictReader(stream):
        yield {key: from_text(value or "") for key, value in row.items() if key is not None}


def csv_text(records: Sequence[Record], provenance: Record) -> str:
    """Write rows as CSV with the provenance behind each, so that a row alone still says where it
    comes from.
    """
    stream = io.StringIO()
    rows = [record | provenance for record in records]
    write_rows(stream, list(rows[0]), rows)
    return stream.getvalue()
