"""Tables: Markdown for people, the same rows as CSV or JSON with what the numbers depend on. It
measures nothing.
"""

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
ESCAPED = str.maketrans({"|": r"\|", "\n": r"\n", "\r": r"\r"})


def duration(seconds: float) -> str:
    """Three digits with a unit that suits them."""
    for unit, factor in (("s", 1), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def mebibytes(count: int | None) -> str | None:
    """A number of bytes in MiB."""
    return None if count is None else f"{count / 2**20:.3g} MiB"


def markdown(cells: Sequence[Record]) -> str:
    """A Markdown table; columns that are empty in every row are left out."""
    used = [name for name in cells[0] if any(row[name] is not None for row in cells)]
    return "\n".join([heading(used), *(line([row[name] for name in used]) for row in cells)])


def heading(columns: Sequence[str]) -> str:
    """The first two lines of a Markdown table."""
    return line(columns) + "\n|" + "---|" * len(columns)


def line(values: Sequence[Any]) -> str:
    """A line of a Markdown table, an empty cell for None; what would end a cell or the line has a
    backslash.
    """
    return (
        "| "
        + " | ".join("" if value is None else str(value).translate(ESCAPED) for value in values)
        + " |"
    )


def csv_text(records: Sequence[Record], provenance: Record) -> str:
    """The rows with the provenance behind each, so that a row alone still says where it comes
    from.
    """
    stream = io.StringIO()
    rows = [record | provenance for record in records]
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def json_text(records: Sequence[Record], provenance: Record) -> str:
    """``{"provenance": ..., "rows": [...]}``."""
    return json.dumps({"provenance": provenance, "rows": list(records)}, indent=2) + "\n"
