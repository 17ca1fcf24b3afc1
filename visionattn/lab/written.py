"""Table and picture of what ``writing.py`` measured: how fast images are written, and with how much
memory.
"""

from collections.abc import Sequence
from pathlib import Path

from visionattn.cli.provenance import summary
from visionattn.cli.tables import Record, duration, markdown, mebibytes
from visionattn.lab.charts import Chart, Look, Series
from visionattn.lab.drawing import png

RECURRENCE, CACHE, NO_CACHE = "recurrence", "softmax, cache", "softmax, no cache"
WAYS = (RECURRENCE, CACHE, NO_CACHE)
SEGMENTS = 12


def segment(number: int, values: int) -> range:
    """Return the positions of a segment."""
    return range(number * values // SEGMENTS, (number + 1) * values // SEGMENTS)


def step_seconds(row: Record) -> list[float]:
    """Return the seconds of a step in each segment."""
    return [float(x) for x in row["step_seconds_by_segment"].split()]


def _is_with(row: Record, case: Record) -> bool:
    """Tell whether a row is of the relative position, the size and the batch of another."""
    return all(row[key] == case[key] for key in ("relative", "values", "batch"))


def crossover(records: Sequence[Record], case: Record) -> int | None:
    """Return the position from which a step with a cache takes longer than one of the recurrence,
    for the rows of the size, the batch and the relative position of ``case``; None: it never does.

    It is the middle of the first segment from which on that holds.
    """
    steps = {row["way"]: step_seconds(row) for row in records if _is_with(row, case)}
    slower = [c > r for c, r in zip(steps[CACHE], steps[RECURRENCE], strict=True)]
    first = len(slower)
    while first and slower[first - 1]:
        first -= 1
    if first == len(slower):
        return None
    part = segment(first, case["values"])
    return (part.start + part.stop) // 2


def table(records: Sequence[Record]) -> str:
    """Return the rows in Markdown: one for each relative position, size and batch."""
    cells = []
    for base in records:
        if base["way"] != RECURRENCE:
            continue
        by_way = {row["way"]: row for row in records if _is_with(row, base)}
        cell: Record = {"relative": base["relative"], "values": f"{base['values']:,}"}
        cell |= {"batch": base["batch"]}
        for way in WAYS:
            row = by_way[way]
            times = "" if way == RECURRENCE else f" ({row['times_recurrence_median']:.3g} x)"
            mark = "" if row["timed"] == "whole" else "~"
            cell[f"{way}: images/s"] = f"{mark}{row['images_per_second']:.3g}{times}"
        last = [step_seconds(by_way[way])[-1] for way in WAYS[:2]]
        cell["last steps"] = " / ".join(map(duration, last))
        found = crossover(records, base)
        cell["cache slower from"] = "never" if found is None else f"{found:,}"
        cell["states"] = " / ".join(str(mebibytes(by_way[way]["state_bytes"])) for way in WAYS[:2])
        peaks = [mebibytes(by_way[way]["peak_bytes"]) or "out of memory" for way in WAYS]
        cells.append(cell | {"peak memory": " / ".join(peaks)})
    return markdown(cells)


def charts(records: Sequence[Record]) -> list[Chart]:
    """Return images per second over the values of an image for each relative position and batch,
    then memory, and seconds of a step along the longest sequence, of the largest batch.
    """
    relatives = list(dict.fromkeys(row["relative"] for row in records))
    batches = sorted({row["batch"] for row in records})
    named = {"flat": "relative position", "none": "no relative position"}

    def over(relative: str, batch: int, column: str) -> list[Series]:
        series = []
        for number, way in enumerate(WAYS):
            of_way = [row for row in records if (row["way"], row["batch"]) == (way, batch)]
            rows = [row for row in of_way if row["relative"] == relative]
            heights = [row[column] for row in rows]
            if column == "peak_bytes":
                heights = [None if y is None else y / 2**20 for y in heights]
            series.append(Series(way, Look(number), [row["values"] for row in rows], heights))
        return series

    found = []
    sizes = sorted({row["values"] for row in records})
    ticks = sizes[-1:]  # no two so near that their numbers would touch
    for size in reversed(sizes):
        ticks += [size] if 2 * size < ticks[-1] else []
    axis = {"log_x": 4, "log_y": 10, "x_ticks": ticks[::-1]}
    for relative in relatives:
        for batch in batches:
            title = f"Batch {batch}, {named[relative]}"
            series = over(relative, batch, "images_per_second")
            found.append(Chart(title, "values of an image", "images per second", series, **axis))
    relative, batch = relatives[0], batches[-1]
    title = f"Memory, batch {batch}, {named[relative]}"
    series = over(relative, batch, "peak_bytes")
    found.append(Chart(title, "values of an image", "peak memory, MiB", series, **axis))
    rows = [row for row in records if (row["relative"], row["batch"]) == (relative, batch)]
    lines = []
    for number, way in enumerate(WAYS):
        row = next(row for row in rows if row["way"] == way and row["values"] == sizes[-1])
        steps = [1000 * x for x in step_seconds(row)]
        parts = [segment(i, sizes[-1]) for i in range(SEGMENTS)]
        places = [(part.start + part.stop) / 2 for part in parts]
        lines.append(Series(way, Look(number), places, steps))
    title = f"A step of {sizes[-1]:,}, batch {batch}, {named[relative]}"
    found.append(Chart(title, "position", "milliseconds", lines, log_y=10))
    return found


def draw(path: Path, records: Sequence[Record], provenance: Record) -> None:
    """Write the picture of the rows."""
    about = "4 blocks of width 128, 4 heads; seconds of the processor, one run in turns"
    notes = [f"{about}. {summary(provenance)}"]
    png(path, charts(records), title="Images written value by value", notes=notes)
