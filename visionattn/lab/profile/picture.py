"""The plot of memory over tokens, a line for each series, with N1 of TaylorShift. It measures
nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from visionattn.lab.plot import Curve, Panel, draw
from visionattn.lab.profile.cells import Shape
from visionattn.lab.profile.rows import Row, names_of
from visionattn.ops.published import N1

LINES = ("-", (0, (6, 4)), "-.", (0, (1, 1.5)))
"""Of one series after the other, so that lines that coincide are both seen."""
N1_STYLE = {"linestyle": "--", "color": "black", "linewidth": 1, "marker": ""}


def draw_memory(
    path: Path,
    rows: Sequence[Row],
    growths: dict[tuple, float | None],
    shapes: dict[str, Shape],
    note: str,
) -> None:
    """Write the PNG.

    Args:
        path: the file.
        rows: of any series; those without bytes are left out.
        growths: exponent of each series, for the legend.
        shapes: of each model.
        note: what stands below.
    """
    draw(path, [panel_of(rows, growths, shapes)], note)


def panel_of(
    rows: Sequence[Row], growths: dict[tuple, float | None], shapes: dict[str, Shape]
) -> Panel:
    """Memory above the level just before the pass, over tokens, and the N1 of each width of a head
    of TaylorShift.
    """
    measured = [row for row in rows if row.bytes]
    curves = []
    for i, key in enumerate(dict.fromkeys(row.cell.series for row in measured)):
        series = [row for row in measured if row.cell.series == key]
        exponent = growths.get(key)
        label = label_of(series[0], rows) + (
            "" if exponent is None else f"  (grows as N^{exponent:.2f})"
        )
        x, y = [row.tokens for row in series], [row.bytes.above_bytes / 2**20 for row in series]
        curves.append(
            Curve(label, x, y, {"linestyle": LINES[i % len(LINES)], "markersize": 7 - 2 * (i % 3)})
        )
    heights = [value for curve in curves for value in curve.y] or [1.0]
    title = "peak memory above the level just before the pass"
    return Panel(
        [*curves, *n1_marks(shapes, min(heights), max(heights))],
        "tokens N",
        "MiB",
        title,
        slopes=False,
    )


def label_of(row: Row, rows: Sequence[Row]) -> str:
    """What distinguishes a series from the others."""
    names, every = names_of(row.cell), [names_of(other.cell) for other in rows]
    differ = [
        key
        for key in names
        if key != "model" and len({other[key] for other in every if other[key]}) > 1
    ]
    words = {"checkpointing": {"yes": "checkpointing", "no": None}}
    shown = [words.get(key, {}).get(names[key], names[key]) for key in differ]
    return ", ".join([names["model"], *filter(None, shown)])


def n1_marks(shapes: dict[str, Shape], low: float, high: float) -> list[Curve]:
    """A vertical line at N1, the tokens from which efficient TaylorShift holds no more entries than
    direct, as published.
    """
    marks = {}
    for shape in shapes.values():
        if shape.taylor_width is not None:
            tokens = N1(shape.taylor_width)
            label = (
                f"N1 of TaylorShift, d = {shape.taylor_width}: {tokens:,} tokens, "
                f"{shape.px(tokens):.0f} px a side"
            )
            marks[label] = Curve(label, [tokens, tokens], [low, high], N1_STYLE)
    return list(marks.values())
