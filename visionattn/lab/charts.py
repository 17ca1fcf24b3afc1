"""What a chart is: its axes, lines and marks, and what follows from them without drawing: which
lines hide others, where labels stand, how numbers are written.

This module owns the colours and shapes of everything that the laboratory draws; ``drawing.py``
draws it. It knows nothing of runs and rows.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Point = tuple[float, float | None, float | None]
SERIES_COLOURS = {
    "light": ("#1d56b8", "#b84e0c", "#0a4a38", "#8c2f78", "#5b6470", "#6f63cc"),
    "dark": ("#6f9ff0", "#f0975a", "#a8f0c6", "#f2b6e2", "#b4bcc8", "#ab96d8"),
}
"""Colours of series, chosen to differ for colour-blind eyes and, the first four, in grey. Each is a
colour of text, too, with a contrast of 4.5 at least.
"""
NEUTRAL_COLOURS = {
    "light": {"ink": "#16191d", "muted": "#515a66", "grid": "#d5dae1", "panel": "#f6f7f9"},
    "dark": {"ink": "#eceff3", "muted": "#a7b0bc", "grid": "#39414c", "panel": "#1d2127"},
}
DASHES = ("none", "6 3", "1.5 2.5", "8 3 1.5 3")
MARKERS = ("o", "s", "^", "D")
MOST_POINTS = 300
"""Longer curves are shown by means of neighbours, with a shade between the least and the largest of
them.
"""
MOST_MARKED = 40
"""Curves with at most so many points have each marked, with its values for the mouse; longer ones
have a few.
"""
LABEL_WIDTH = 24
"""Characters of a line of a label."""
MOST_LABELS = 8
"""Series of a chart on a page that have their names at their ends; more have a legend above."""
LINE_POINTS = 11.5
"""Height of a line of a label, in points."""
COINCIDE = 0.012
"""A share of the height of a chart: closer lines are one to the eye."""


@dataclass(frozen=True)
class Look:
    """The colour and the shape, which is dash and marker, of a series in every chart and legend."""

    colour: int
    shape: int = 0

    @classmethod
    def of(cls, number: int) -> "Look":
        """Return the look of the series of this number; the first 24 differ in colour or shape."""
        colours = len(SERIES_COLOURS["light"])
        return cls(number % colours, (number + number // (2 * colours)) % len(DASHES))

    def swatch(self) -> str:
        """Return a short line of this look, as SVG for a legend."""
        stroke, marker = f"stroke:var(--series-{self.colour})", MARKERS[self.shape]
        fill = f'style="fill:var(--{"panel" if self.shape else f"series-{self.colour}"});{stroke}"'
        mark = {
            "o": f'<circle cx="16" cy="6" r="3.2" {fill}/>',
            "s": f'<rect x="13" y="3" width="6" height="6" {fill}/>',
            "^": f'<path d="M16 2l3.8 7h-7.6z" {fill}/>',
            "D": f'<path d="M16 2l4 4-4 4-4-4z" {fill}/>',
        }[marker]
        line = (
            f'<path d="M1 6h30" '
            f'style="{stroke};stroke-width:2;fill:none;stroke-dasharray:{DASHES[self.shape]}"/>'
        )
        return (
            f'<svg class="swatch" viewBox="0 0 32 12" width="32" height="12" '
            f'aria-hidden="true">{line}{mark}</svg>'
        )


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[float | None]
    """None is a gap."""
    spread: Sequence[float] | None = None
    """Half the height of the bar at each point."""
    failed: Mapping[float, str] = field(default_factory=dict)
    """Why there is no value, by place: "out of memory"."""


@dataclass(frozen=True)
class Mark:
    """Something that a chart points at: a place where x and y are given, else a line across it at
    the one of them that is.
    """

    text: str
    x: float | None = None
    y: float | None = None
    colour: int | None = None
    """The colour of a series; None: a quiet one."""


@dataclass(frozen=True)
class Chart:
    """A pair of axes with its title."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series] = ()
    marks: Sequence[Mark] = ()
    log_x: int | None = None
    """Base of a logarithmic axis; None: linear."""
    log_y: int | None = None
    from_zero: bool = False
    """Whether the vertical axis begins at 0, as where ratios are read off it."""
    bounds: tuple[float, float] | None = None
    """Between which values all must lie: the vertical axis has no ticks beyond."""
    x_ticks: Sequence[float] | None = None
    """Where the ticks are; None: where matplotlib puts them."""
    x_texts: Sequence[str] | None = None
    """What stands at ``x_ticks``; None: the numbers."""
    nothing: str = "nothing was measured"
    """What is said in place of an empty chart."""
    failed_below: bool = False
    """Whether what failed is marked at the lower edge, where a speed would be none."""

    @property
    def measured(self) -> bool:
        """Whether there is a point to draw."""
        return any(y is not None for series in self.series for _, y, _ in self.points(series))

    @property
    def empty(self) -> bool:
        """Whether there is neither a point nor a failure to draw."""
        return not self.measured and not any(series.failed for series in self.series)

    @property
    def labelled(self) -> bool:
        """Whether the names fit beside the lines of a chart on a page; else it needs a legend."""
        shown = [series for series in self.series if self.points(series) or series.failed]
        lines = [line for series in shown for line in wrapped(series.name).splitlines()]
        return len(shown) <= MOST_LABELS and all(len(line) <= LABEL_WIDTH for line in lines)

    def points(self, series: Series) -> list[Point]:
        """Return place, height (None: a gap) and spread of what the axes can show of a series: on a
        logarithmic one, what is above 0.
        """
        spreads = series.spread or [None] * len(series.x)
        return [
            (x, None if y is not None and self.log_y and y <= 0 else y, spread)
            for x, y, spread in zip(series.x, series.y, spreads, strict=True)
            if not self.log_x or x > 0
        ]


def page_colours() -> str:
    """Return the colours as variables of a page, light and dark."""

    def variables(theme: str) -> str:
        named = NEUTRAL_COLOURS[theme] | {
            f"series-{i}": colour for i, colour in enumerate(SERIES_COLOURS[theme])
        }
        return ":root { " + " ".join(f"--{name}: {value};" for name, value in named.items()) + " }"

    return f"{variables('light')}\n@media (prefers-color-scheme: dark) {{ {variables('dark')} }}\n"


def hidden_under(chart: Chart) -> list[int]:
    """Count for each series by how many of the later ones it is hidden, three at most; those of the
    same look, as the seeds of a model, hide nothing.
    """

    def height(y: float) -> float:
        return math.log(y) if chart.log_y else y

    points = [
        {x: height(y) for x, y, _ in chart.points(series) if y is not None}
        for series in chart.series
    ]
    every = [y for series in points for y in series.values()]
    reach = max(every, default=0.0) - min(every, default=0.0)

    def coincide(one: dict[float, float], other: dict[float, float]) -> bool:
        # Curves coincide where they share two places (or all of a shorter curve) and lie near each
        # other at half of them.
        shared = one.keys() & other.keys()
        near = [x for x in shared if abs(one[x] - other[x]) <= COINCIDE * reach]
        enough = min(len(one), len(other), 2)
        return 0 < enough <= len(shared) <= 2 * len(near)

    return [
        min(
            3,
            sum(
                coincide(points[i], points[later])
                for later in range(i + 1, len(points))
                if chart.series[later].look != series.look
            ),
        )
        for i, series in enumerate(chart.series)
    ]


def thin(x: Sequence[float], y: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """Return a curve of at most ``MOST_POINTS`` points: means of neighbours without gaps."""
    thinned = [
        (sum(places) / len(places), sum(values) / len(values) if values else None)
        for places, values in _groups(x, y)
    ]
    return [place for place, _ in thinned], [value for _, value in thinned]


def reach(
    x: Sequence[float], y: Sequence[float | None]
) -> tuple[list[float], list[float], list[float]] | None:
    """Return what means of ``thin`` leave out: their places with the least and the largest value
    there; None where nothing is left out.
    """
    if len(x) <= MOST_POINTS:
        return None
    known = [(places, values) for places, values in _groups(x, y) if values]
    middles = [sum(places) / len(places) for places, _ in known]
    return middles, [min(values) for _, values in known], [max(values) for _, values in known]


def _groups(
    x: Sequence[float], y: Sequence[float | None]
) -> list[tuple[Sequence[float], list[float]]]:
    """Return the places of neighbours that become one point, and the values there."""
    step = max(1, math.ceil(len(x) / MOST_POINTS))
    return [
        (x[i : i + step], [value for value in y[i : i + step] if value is not None])
        for i in range(0, len(x), step)
    ]


def wrapped(name: str) -> str:
    """Return a name as it stands beside a line, in several lines where it is long."""
    parts = textwrap.wrap(name.replace("+", " +"), LABEL_WIDTH, break_long_words=False)
    return "\n".join(part.replace(" +", "+") for part in parts)


def spread_out(heights: Sequence[float], sizes: Sequence[float]) -> list[float]:
    """Return heights of labels that do not overlap, as near to the wanted ones as their order
    allows.

    Args:
        heights: wanted, of the middle of each label.
        sizes: of the labels.
    """
    groups: list[list[int]] = []

    def start(group: Sequence[int]) -> float:
        """Return where the lower edge of a pile of labels lies best."""
        below = [sum(sizes[j] for j in group[:k]) for k in range(len(group))]
        wanted = [heights[i] - sizes[i] / 2 - gap for i, gap in zip(group, below, strict=True)]
        return sum(wanted) / len(wanted)

    # From below: a label that would overlap the pile under it joins that pile, which moves.
    for i in sorted(range(len(heights)), key=lambda i: heights[i]):
        groups.append([i])
        while len(groups) > 1 and start(groups[-1]) < start(groups[-2]) + sum(
            sizes[j] for j in groups[-2]
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    found = [0.0] * len(heights)
    for group in groups:
        edge = start(group)
        for i in group:
            found[i] = edge + sizes[i] / 2
            edge += sizes[i]
    return found


def tick_text(value: float, gap: float) -> str:
    """Write a tick's number with as many digits as tell it from its neighbours, as many behind the
    point as they have.

    Args:
        value: of the tick.
        gap: the distance of the ticks of the axis; 0 where they lie as powers do, or there is one
            alone.
    """
    if not gap:
        return short(value)
    if abs(value) < gap / 2:
        return "0"
    # As many decimals as the gap has: one more where its second digit is not 0 (0.25).
    decimals = -int(f"{gap:.0e}".partition("e")[2]) + (float(f"{gap:.1e}") != float(f"{gap:.0e}"))
    if gap >= 1e-5 and abs(value) < 1e7:
        return f"{value:,.{max(decimals, 0)}f}".replace("-", "\N{MINUS SIGN}")
    digits = math.floor(math.log10(abs(value))) + decimals + 1
    return f"{value:.{max(digits, 1)}g}".replace("-", "\N{MINUS SIGN}")


def short(value: float) -> str:
    """Write a number as people do: four digits, thousands divided."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        text = f"{value:.3g}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"
    return text.replace("-", "\N{MINUS SIGN}")
