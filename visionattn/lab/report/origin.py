"""What all rows of a sweep or of a memory profile share, in words, and where their numbers come
from. It draws nothing.
"""

from collections.abc import Sequence

from visionattn.lab.report.rows import Row, number_in, trained_itself

CONDITIONS = {
    "sweep": (
        "measure_batch",
        "measure_amp",
        "measure_device",
        "measure_threads",
        "measure_rounds",
    ),
    "memory": ("pass", "precision", "form", "checkpointing", "batch", "depth", "budget_bytes"),
}
"""Columns of what was measured; those that do not vary stand above the rows, the others among their
columns.
"""
CONDITIONS["largest"] = CONDITIONS["memory"]
NAMES = {"depth": "blocks", "budget_bytes": "budget", "measure_amp": "mixed precision"}
NAMES |= {f"measure_{key}": key for key in ("batch", "device", "threads", "rounds")}
"""How a page calls the columns of conditions, where not as the file does."""
SOURCES = {
    "sweep": {
        "measure_processor": "measured on",
        "measure_torch": "measured with torch",
        "measure_commit": "measured at commit",
        "measure_load": "load before",
        "measured": "measured at",
        "train_commit": "trained at commit",
        "date": "last call",
        "command": "its command",
        "sweep_seconds": "seconds, all calls",
    },
    "memory": {
        key: key
        for key in ("processor", "device", "threads", "torch", "commit", "load", "date", "command")
    },
}
"""Columns of where numbers come from, and their names on the page. ``processor``, ``torch`` and the
like of a sweep's rows are those of the last call, which need not have measured anything: they are
no source of its numbers.
"""
SOURCES["largest"] = SOURCES["memory"]
RANGES = ("measure_load", "load", "measured")
"""Sources of which the first and the last are enough."""
MOST_VALUES = 3
"""How many values of a source are shown."""


def varied(kind: str, rows: Sequence[Row]) -> list[str]:
    """Return the columns of conditions in which rows differ."""
    return [key for key in CONDITIONS[kind] if len(values_of(rows, key)) > 1]


def shared(kind: str, rows: Sequence[Row]) -> str:
    """Return the conditions that all rows share, in a line."""
    alike = [
        (key, values[0]) for key in CONDITIONS[kind] if len(values := values_of(rows, key)) == 1
    ]
    words = [text for key, value in alike if (text := in_words(key, value))]
    if kind == "sweep":
        form = shared_training(rows)
        words += [f"trained in the {form} form"] if form else []
        measured = values_of(rows, "inference_status") + values_of(rows, "training_status")
        words += [] if measured else ["speed and memory not measured"]
    return ", ".join(words)


def shared_training(rows: Sequence[Row]) -> str | None:
    """Return the form in which all networks of a sweep were trained that have forms; None where
    each form was trained.
    """
    forms = {row["trained_form"] for row in rows if not trained_itself(row)}
    return forms.pop() if len(forms) == 1 else None


def values_of(rows: Sequence[Row], column: str) -> list[str]:
    """Return the values of a column, each once; nothing counts as one for the number of blocks
    alone, where it means all.
    """
    values = dict.fromkeys(row[column] for row in rows if column in row)
    return [value for value in values if value or column == "depth"]


def in_words(column: str, value: str) -> str:
    """Return a condition as part of a sentence."""
    name = NAMES.get(column, column)
    match name:
        case "batch" | "form":
            return f"{name} {value}"
        case "blocks":
            return counted(value, "block") if value else "all blocks"
        case "threads" | "rounds":
            return counted(value, name[:-1])
        case "checkpointing":
            return {"yes": "checkpointing", "no": "no checkpointing"}.get(value, value)
        case "mixed precision":
            return "no mixed precision" if value == "none" else f"mixed precision {value}"
        case "budget":
            return f"budget {gibibytes(value)}"
    return value


def counted(count: int | str, what: str) -> str:
    """Write a number and what is counted, in the singular or plural."""
    return f"{count} {what}{'' if str(count) == '1' else 's'}"


def gibibytes(value: str) -> str:
    """Return bytes of a file in GiB; what is no number as it stands."""
    count = number_in(value)
    return value if count is None else f"{count / 2**30:.3g} GiB"


def sources(kind: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return names and values of where the numbers come from."""
    found = [(name, key, values_of(rows, key)) for key, name in SOURCES[kind].items()]
    return [(name, listed(key, values)) for name, key, values in found if values]


def listed(key: str, values: Sequence[str]) -> str:
    """Return the values of a source in a line."""
    if key in ("load", "measure_load"):
        values = [f"{load:.1f}" for load in sorted(filter(None, map(number_in, values)))]
    if key in RANGES:
        values = sorted(values) if key == "measured" else values
        return " to ".join(dict.fromkeys([values[0], values[-1]])) if values else "unknown"
    more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
    return "; ".join(values[:MOST_VALUES]) + more
