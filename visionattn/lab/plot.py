"""Log-log plots of rows, with the slopes of the curves. It measures nothing; matplotlib is imported
when something is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from visionattn.lab.compare import Row


@dataclass(frozen=True)
class Curve:
    """A line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: dict = field(default_factory=dict)
    """Keyword arguments of matplotlib's ``plot``."""


@dataclass(frozen=True)
class Panel:
    """A pair of axes."""

    curves: Sequence[Curve]
    x_name: str
    y_name: str
    title: str = ""
    slopes: bool = True
    """Whether the legend gives the slope of each curve."""
    marks: Sequence[Curve] = ()
    """Single points."""
    log2: bool = False
    """Whether the vertical axis counts in powers of 2, as the horizontal one does."""


def slope_of(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Slope of the least-squares line through ``log y`` over ``log x`` for the larger half of the
    sizes, at least two.

    Small sizes are left out since there the cost of a call outweighs the work. None for fewer than
    two points.
    """
    pairs = sorted(zip(x, y, strict=True))[-max(2, math.ceil(len(x) / 2)) :]
    if len(pairs) < 2:
        return None
    points = [(math.log(a), math.log(b)) for a, b in pairs]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((a - mean_x) ** 2 for a, _ in points)
    return sum((a - mean_x) * (b - mean_y) for a, b in points) / spread if spread else None


def crossing(x: Sequence[float], rising: Sequence[float], flat: Sequence[float]) -> float | None:
    """Where ``rising`` overtakes ``flat`` for good, by log-log interpolation between sizes; None
    where it never does.

    Args:
        x: sizes in order.
        rising, flat: two curves over them.
    """
    above = [math.log(a / b) for a, b in zip(rising, flat, strict=True)]
    if above[-1] <= 0:
        return None
    last = next((i for i in range(len(above) - 1, -1, -1) if above[i] <= 0), None)
    if last is None:
        return None
    part = -above[last] / (above[last + 1] - above[last])
    return math.exp(math.log(x[last]) + part * (math.log(x[last + 1]) - math.log(x[last])))


def draw(path: Path, panels: Sequence[Panel], note: str) -> None:
    """Write the panels side by side as a PNG, ``note`` below them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(7.5 * len(panels), 6.4), squeeze=False, layout="constrained"
    )
    for panel, ax in zip(panels, axes[0], strict=True):
        for curve in panel.curves:
            slope = slope_of(curve.x, curve.y) if panel.slopes else None
            label = curve.label if slope is None else f"{curve.label}  (slope {slope:.2f})"
            ax.plot(
                curve.x, curve.y, label=label, **({"marker": "o", "markersize": 4} | curve.style)
            )
        for mark in panel.marks:
            ax.plot(mark.x, mark.y, label=mark.label or None, linestyle="none", **mark.style)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2 if panel.log2 else 10)
        ax.set(xlabel=panel.x_name, ylabel=panel.y_name, title=panel.title)
        ax.grid(True, which="major", alpha=0.3)
        if panel.curves:
            below = (
                {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13)}
                if len(panel.curves) + len(panel.marks) > 8
                else {}
            )
            ax.legend(fontsize=8, **below)
    figure.supxlabel(note, fontsize=8, color="grey")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def curves_of(rows: Sequence[Row], value) -> list[Curve]:
    """A curve per label (and width, where there are several) of what ``value(row)`` gives; rows
    without one are left out.
    """
    widths = {row.case.width for row in rows}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        label = row.case.label if len(widths) == 1 else f"{row.case.label}, d = {row.case.width}"
        label = label if len({r.case.dtype for r in rows}) == 1 else f"{label}, {row.case.dtype}"
        if value(row):
            found.setdefault(label, []).append((row.case.size, value(row)))
    return [Curve(label, *zip(*sorted(points), strict=True)) for label, points in found.items()]


def sweep_panels(rows: Sequence[Row]) -> list[Panel]:
    """Time over size and, where it was measured, peak memory over size."""
    name = "tokens N" if rows[0].case.kind == "operation" else "image side in pixels"
    way = "forward + backward" if rows[0].case.backward else "forward"
    panels = [
        Panel(
            curves_of(rows, lambda row: row.seconds and row.seconds.median),
            name,
            "seconds",
            f"time of {way}",
        )
    ]
    memory = curves_of(rows, lambda row: row.peak_bytes and row.peak_bytes / 2**20)
    return (
        [*panels, Panel(memory, name, "MiB", "peak memory above the inputs")] if memory else panels
    )
