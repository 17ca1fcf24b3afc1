"""Charts as SVG for a page that may be light or dark: colours are the page's variables, text is
text in the page's font.

Owns how curves look. Knows nothing of runs. matplotlib draws; it is imported when something is
drawn.
"""

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

COLOURS, DASHES, MARKERS = 6, ("none", "6 3", "1.5 2.5", "8 3 1.5 3"), ("o", "s", "^", "D")
"""Colours of the page (``--series-0`` and so on), dashes and markers; neighbours differ in all
three.
"""
VARIABLES = {"#1e0001": "--ink", "#1e0002": "--grid", "#1e0003": "--muted", "#1e0004": "--paper"}
VARIABLES |= {f"#1e01{i:02x}": f"--series-{i}" for i in range(COLOURS)}
"""Colours that stand for variables of the page while matplotlib draws."""
INK, GRID, MUTED, PAPER = list(VARIABLES)[:4]
MOST_POINTS = 300
"""Longer curves are shown by means of neighbours."""
MOST_MARKED = 40
"""Curves with at most so many points have each marked, with its values for the mouse; longer ones
have a few.
"""


@dataclass(frozen=True)
class Style:
    """How one series looks, in every chart and legend of a page."""

    number: int
    """Of the series, from 0."""

    @property
    def colour(self) -> int:
        """Number of the colour."""
        return self.number % COLOURS

    @property
    def shape(self) -> int:
        """Number of the dash and of the marker: the 24 first series differ in colour or in
        shape.
        """
        return (self.number + self.number // 12) % len(DASHES)

    def swatch(self) -> str:
        """A short line of this look, as SVG for a legend."""
        stroke, marker = f"stroke:var(--series-{self.colour})", MARKERS[self.shape]
        fill = f'style="fill:var(--series-{self.colour})"'
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
class Curve:
    """A line of a chart; points whose y is None are gaps."""

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float | None]
    spread: Sequence[float] | None = None
    """Half the height of the error bar at each point."""


@dataclass(frozen=True)
class Chart:
    """A pair of axes with its caption."""

    title: str
    x_name: str
    y_name: str
    curves: Sequence[Curve] = field(default_factory=tuple)
    log_x: int | None = None
    """Base of a logarithmic axis; None: linear."""
    log_y: int | None = None
    from_zero: bool = False
    """Whether the vertical axis begins at 0."""
    x_ticks: Sequence[float] | None = None
    """Where the ticks are; None: where matplotlib puts them."""

    @property
    def empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(y is not None for curve in self.curves for _, y, _ in self.points(curve))

    def points(self, curve: Curve) -> list[tuple[float, float | None, float | None]]:
        """Place, height (None: a gap) and spread of what the axes can show of a curve: on a
        logarithmic one, what is above 0.
        """
        spreads = [None] * len(curve.x) if curve.spread is None else curve.spread
        found = []
        for x, y, spread in zip(curve.x, curve.y, spreads, strict=True):
            if not self.log_x or x > 0:
                found.append((x, None if y is not None and self.log_y and y <= 0 else y, spread))
        return found


def thin(x: Sequence[float], y: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    """A curve of at most ``MOST_POINTS`` points: means of neighbours, gaps left out of them."""
    step = math.ceil(len(x) / MOST_POINTS)
    if step <= 1:
        return list(x), list(y)
    thinned_x, thinned_y = [], []
    for start in range(0, len(x), step):
        values = [value for value in y[start : start + step] if value is not None]
        thinned_x.append(sum(x[start : start + step]) / len(x[start : start + step]))
        thinned_y.append(sum(values) / len(values) if values else None)
    return thinned_x, thinned_y


def svg(chart: Chart, name: str) -> str:
    """The chart as an SVG element, without its caption and legend.

    Args:
        chart: what to draw; not empty.
        name: a word that no other chart of the page has; identifiers begin with it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    sizes = {
        "font.size": 10.5,
        "axes.labelsize": 10.5,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
    }
    colours = {
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": GRID,
        "xtick.color": GRID,
        "ytick.color": GRID,
    }
    labels = {"xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED, "grid.color": GRID}
    quiet = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    titles: dict[str, str] = {}
    with matplotlib.rc_context(sizes | colours | labels | quiet):
        figure = Figure(figsize=(5, 3.2), layout="constrained")
        ax = figure.add_subplot()
        for curve in chart.curves:
            _draw(ax, curve, chart.points(curve), titles)
        _set_axes(ax, chart)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(stream.getvalue(), chart.title, name, titles)


def _draw(
    ax,
    curve: Curve,
    points: Sequence[tuple[float, float | None, float | None]],
    titles: dict[str, str],
) -> None:
    x, y = thin([place for place, _, _ in points], [height for _, height, _ in points])
    colour, marker = f"#1e01{curve.style.colour:02x}", MARKERS[curve.style.shape]
    heights = [math.nan if value is None else value for value in y]
    dash = DASHES[curve.style.shape]
    pattern = "-" if dash == "none" else (0, [float(part) / 1.6 for part in dash.split()])
    if curve.spread is not None:
        ax.errorbar(
            x,
            heights,
            yerr=[spread for _, _, spread in points],
            color=colour,
            linestyle="none",
            capsize=3,
            elinewidth=1.2,
        )
    line = {
        "color": colour,
        "linestyle": pattern,
        "linewidth": 1.6,
        "gid": _titled(titles, curve.label),
    }
    if len(x) > MOST_MARKED:
        line |= {"marker": marker, "markersize": 4, "markevery": len(x) // 8}
    ax.plot(x, heights, **line)
    if len(points) > MOST_MARKED:
        return
    for place, height, spread in points:
        if height is not None:
            around = f" ± {short(spread)}" if spread else ""
            title = _titled(titles, f"{curve.label}: {short(height)}{around} at {short(place)}")
            ax.plot(
                [place],
                [height],
                color=colour,
                marker=marker,
                markersize=4,
                linestyle="none",
                gid=title,
            )


def _titled(titles: dict[str, str], text: str) -> str:
    """Keep what a mouse over an element shows; returns the element's identifier."""
    key = f"title{len(titles)}"
    titles[key] = text
    return key


def _set_axes(ax, chart: Chart) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ax.set(xlabel=chart.x_name, ylabel=chart.y_name)
    for axis, base, scale in (
        (ax.xaxis, chart.log_x, ax.set_xscale),
        (ax.yaxis, chart.log_y, ax.set_yscale),
    ):
        if base:
            scale("log", base=base)
            low, high = axis.get_view_interval()
            few = math.log(high / low, base) < 2
            axis.set_major_locator(
                LogLocator(base=base, subs=(1, 2, 5) if base == 10 and few else (1,), numticks=9)
            )
        else:
            axis.set_major_locator(MaxNLocator(6, integer=axis is ax.xaxis, min_n_ticks=1))
        axis.set_minor_locator(NullLocator())
    if chart.from_zero:
        ax.set_ylim(bottom=0)
    if chart.x_ticks is not None:
        ax.xaxis.set_major_locator(FixedLocator(chart.x_ticks))
    elif len(places := {x for curve in chart.curves for x, _, _ in chart.points(curve)}) == 1:
        ax.xaxis.set_major_locator(FixedLocator(list(places)))
    elif len(_ticks_in_view(ax.xaxis)) < 2:
        ax.xaxis.set_major_locator(MaxNLocator(6))
    if len(_ticks_in_view(ax.yaxis)) < 2:
        ax.yaxis.set_major_locator(MaxNLocator(6, min_n_ticks=3))
    for axis in (ax.xaxis, ax.yaxis):
        shown = _ticks_in_view(axis)
        gaps = [after - before for before, after in zip(shown, shown[1:], strict=False)]
        even = (
            bool(gaps)
            and max(gaps) < 1.01 * min(gaps)
            and (len(gaps) > 1 or axis.get_scale() == "linear")
        )
        gap = min(gaps) if even else 0.0
        axis.set_major_formatter(FuncFormatter(lambda value, _, gap=gap: tick_text(value, gap)))
    ax.grid(True, which="major", linewidth=0.7)
    ax.set_axisbelow(True)


def _ticks_in_view(axis) -> list[float]:
    low, high = sorted(axis.get_view_interval())
    return sorted(tick for tick in axis.get_majorticklocs() if low <= tick <= high)


def tick_text(value: float, gap: float) -> str:
    """A tick's number with as many digits as tell it from its neighbours, as many behind the point
    as they have.

    Args:
        value: of the tick.
        gap: the distance of the ticks of the axis; 0 where they lie as powers do, or there is one
            alone.
    """
    if not gap:
        return short(value)
    if abs(value) < gap / 2:
        return "0"
    decimals = -int(f"{gap:.0e}".partition("e")[2]) + (float(f"{gap:.1e}") != float(f"{gap:.0e}"))
    if gap >= 1e-5 and abs(value) < 1e7:
        return f"{value:,.{max(decimals, 0)}f}"
    digits = math.floor(math.log10(abs(value))) + decimals + 1
    return f"{value:.{max(digits, 1)}g}"


def short(value: float) -> str:
    """A number as people write it: four digits, thousands divided."""
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.4g}'):g}"


def _for_page(text: str, title: str, name: str, titles: dict[str, str]) -> str:
    """Cut the element out of matplotlib's file: the page's colours and font, unique identifiers,
    titles for the mouse.
    """
    heading = (
        f'<svg class="chart" viewBox="{_view_box(text)}" role="img" '
        f'aria-label="{html.escape(title)}">'
    )
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r"#1e[0-9a-f]{4}", lambda found: f"var({VARIABLES[found[0]]})", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    for key, words in titles.items():
        text = text.replace(f'<g id="{name}-{key}">', f"<g><title>{html.escape(words)}</title>", 1)
    return heading + text


def _view_box(text: str) -> str:
    return re.search(r'viewBox="([\d. ]+)"', text)[1]
