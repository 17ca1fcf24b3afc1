"""Tables: Markdown for people, and the same rows as CSV or JSON with what the numbers depend on."""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
ESCAPED = str.maketrans({"|": r"\|", "\n": r"\n", "\r": r"\r"})


def duration(seconds: float) -> str:
    """Write seconds with three digits and a unit that suits them."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


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


def csv_text(records: Sequence[Record], provenance: Record) -> str:
    """Write rows as CSV with the provenance behind each, so that a row alone still says where it
    comes from.
    """
    stream = io.StringIO()
    rows = [record | provenance for record in records]
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def json_text(records: Sequence[Record], provenance: Record) -> str:
    """Write rows as JSON: ``{"provenance": ..., "rows": [...]}``."""
    return json.dumps({"provenance": provenance, "rows": list(records)}, indent=2) + "\n"
