"""The last lines of ``make gpu``: how phases ended, tests, and the table in short.

It reads what was written as it came, so it says as much of a run that was cut short.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from visionattn.cli.files import read_lines
from visionattn.cli.tables import duration

Record = dict[str, Any]
MOST_LINES = 60
MOST_COLUMNS = 190
"""60 such lines are what is seen of a run of which the last 12,000 characters are seen."""
MOST_FAILURES = 10
SLOW_ROWS = 6
ABOUT = ("gpu", "driver", "torch", "triton", "timm", "commit", "date")


def summary(out: Path, phases: Sequence[str]) -> tuple[list[str], bool]:
    """Return the lines, and whether all tests that were dealt out passed and no row is wrong.

    Args:
        out: the folder of ``run.py``.
        phases: how each ended.
    """
    tests, tests_good = tests_lines(read_lines(out / "tests.jsonl"))
    rows = read_lines(out / "rows.jsonl")
    table, table_good = table_lines(rows)
    head = ["== summary", about(rows), *phases, *tests]
    files = ", ".join(sorted(path.name for path in out.iterdir()))
    room = MOST_LINES - len(head) - 1
    if len(table) > room:
        table = [*table[: room - 1], f"{len(table) - room + 1} more lines: see rows.jsonl"]
    lines = [*head, *table, f"files in {out}: {files}"]
    return [
        line if len(line) <= MOST_COLUMNS else line[: MOST_COLUMNS - 3] + "..." for line in lines
    ], (tests_good and table_good)


def about(rows: Sequence[Record]) -> str:
    """Return what the table was measured on, in one line."""
    found = next((row for row in rows if row["kind"] == "provenance"), {})
    return (
        ", ".join(f"{name} {found[name]}" for name in ABOUT if found.get(name))
        or "no table was begun"
    )


def tests_lines(records: Sequence[Record]) -> tuple[list[str], bool]:
    """Say how many tests passed, what failed, and whether that is good."""
    dealt = sum(record["tests"] for record in records if record["kind"] == "dealt")
    tests = [record for record in records if record["kind"] == "test"]
    worst = {}  # a test may have failed in its call and in what follows
    for record in tests:
        if worst.get(record["name"], {}).get("outcome") != "failed":
            worst[record["name"]] = record
    counts = Counter(record["outcome"] for record in worst.values())
    left = dealt - len(worst)
    parts = [f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name]]
    parts += [f"{left} not reached, so not checked"] if left else []
    failed = [record for record in worst.values() if record["outcome"] == "failed"]
    lines = [f"tests: {dealt} in all: {', '.join(parts) or 'none ran'}"]
    lines += [
        f"FAILED {record['name'].rpartition('/')[2]}: {record['message']}"
        for record in failed[:MOST_FAILURES]
    ]
    if len(failed) > MOST_FAILURES:
        lines.append(f"{len(failed) - MOST_FAILURES} more failed: see tests.jsonl")
    return lines, counts["passed"] > 0 and not failed and not left


def table_lines(records: Sequence[Record]) -> tuple[list[str], bool]:
    """Return a line for each figure and some for kernels against eager; whether no row is wrong or
    failed.
    """
    rows = [record for record in records if record["kind"] == "row"]
    figures = [row for row in rows if "reach" in row]
    against = [row for row in rows if "reach" not in row]
    lines = [_figure(row) for row in figures]
    reached = Counter(row["reached"] for row in figures)
    lines += [f"table: {len(figures)} figures, {reached['yes']} reached, {reached['no']} missed"]
    if against:
        lines += _against(against)
    good = bool(rows) and not any(row["status"].startswith(("wrong", "failed")) for row in rows)
    return lines, good


def _figure(row: Record) -> str:
    mark = {"yes": "REACHED", "no": "MISSED"}.get(row["reached"], row["reached"])
    time = "" if row["seconds_median"] is None else f" {duration(row['seconds_median'])}"
    expected = "" if row.get("expected") is None else f", expected {row['expected']}"
    floor = "" if row["of_floor"] is None else f" ({100 * row['of_floor']:.0f} % of the floor)"
    if row["shown"] is None:
        return f"{mark}: {row['what']}, {row['size']}: {row['reach']}{expected}"
    return (
        f"{mark}: {row['what']}, {row['size']}:{time}{floor}; {row['shown']} of "
        f"{row['reach']}{expected}"
    )


def _against(rows: Sequence[Record]) -> list[str]:
    timed = [row for row in rows if row["ratio"] is not None]
    slow = sorted((row for row in timed if row["ratio"] < 1), key=lambda row: row["ratio"])
    bad = [row for row in rows if row["status"].startswith(("wrong", "failed"))]
    lines = [
        f"kernel against eager: {len(timed)} of {len(rows)} rows timed, eager faster in {len(slow)}"
    ]
    for row in [*bad, *slow][:SLOW_ROWS]:
        named = "{operation} {dtype} N = {tokens} d = {width} {pass}".format(**row)
        lines.append(
            f"  {named}: " + (row["status"] if row in bad else f"{row['ratio']:.2g} x eager")
        )
    return lines
