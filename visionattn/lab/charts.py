"""Describe charts, and draw them with matplotlib as PNG, or as SVG for light and dark pages.

This module owns the colors and line styles of all charts. It knows nothing of runs and rows.
matplotlib is imported when a chart is drawn.
"""

import html
import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

SERIES_COLOURS = {
    "light": ("#1d56b8", "#b84e0c", "#0a4a38", "#8c2f78", "#5b6470", "#6f63cc"),
    "dark": ("#6f9ff0", "#f0975a", "#a8f0c6", "#f2b6e2", "#b4bcc8", "#ab96d8"),
}
"""Colors of series, distinct for color-blind readers; the first four also differ in gray. Each has
a contrast of at least 4.5 with the page, so that text may have these colors.
"""
NEUTRAL_COLOURS = {
    "light": {"ink": "#16191d", "muted": "#515a66", "grid": "#d5dae1", "panel": "#f6f7f9"},
    "dark": {"ink": "#eceff3", "muted": "#a7b0bc", "grid": "#39414c", "panel": "#1d2127"},
}
DASHES = ((), (6, 3), (1.5, 2.5), (8, 3, 1.5, 3))
"""Dash and gap lengths of line styles; the first is solid."""
MARKERS = ("o", "s", "^", "D")
MOST_POINTS = 300
"""Longer curves become means of neighboring points, with a band from minimum to maximum."""
MOST_MARKED = 40
"""Curves with at most this many points have a marker at each point."""
LABEL_WIDTH = 24
"""Maximum number of characters of a line in a legend."""


@dataclass(frozen=True)
class SeriesStyle:
    """The color and the shape (dash and marker) of a series in all charts and legends."""

    colour: int
    shape: int = 0

    @classmethod
    def of(cls, number: int) -> "SeriesStyle":
        """Return the style of series ``number``; the first 24 styles differ."""
        colours = len(SERIES_COLOURS["light"])
        return cls(number % colours, (number + number // (2 * colours)) % len(DASHES))

    def swatch(self) -> str:
        """Return a short line in this style as SVG, for a legend."""
        dashes = " ".join(map(str, DASHES[self.shape])) or "none"
        style = f"stroke:var(--series-{self.colour});stroke-width:3;stroke-dasharray:{dashes}"
        return (
            '<svg class="swatch" viewBox="0 0 32 12" width="32" height="12" aria-hidden="true">'
            f'<path d="M1 6h30" style="{style}"/></svg>'
        )


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    look: SeriesStyle
    x: Sequence[float]
    y: Sequence[float | None]
    """None is a gap."""
    spread: Sequence[float] | None = None
    """Half the height of the band at each point."""
    failed: Mapping[float, str] = field(default_factory=dict)
    """Reason of a missing value, by x position: "out of memory"."""
    dots: bool = False
    """Draw points without a line."""


@dataclass(frozen=True)
class Mark:
    """A thin line across a chart, at ``x`` or at ``y``."""

    text: str
    x: float | None = None
    y: float | None = None


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
    """Start the vertical axis at 0, for values whose ratios matter."""
    x_ticks: Sequence[float] | None = None
    """Tick positions; None: matplotlib's choice."""
    x_texts: Sequence[str] | None = None
    """Texts at ``x_ticks``; None: the numbers."""
    failed_below: bool = False
    """Mark failures at the lower edge, as a throughput of 0."""

    @property
    def empty(self) -> bool:
        """Whether there is neither a point nor a failure to draw."""
        return not any(
            series.failed or np.isfinite(self.heights(series)).any() for series in self.series
        )

    def heights(self, series: Series) -> np.ndarray:
        """Return the values of a series, with NaN where a logarithmic axis cannot show them."""
        y = np.array(series.y, dtype=float)
        return np.where(y > 0, y, math.nan) if self.log_y else y


def page_colours() -> str:
    """Return the colors as CSS variables of a page, for light and dark."""

    def variables(theme: str) -> str:
        named = NEUTRAL_COLOURS[theme] | series_variables(theme)
        return ":root { " + " ".join(f"--{name}: {value};" for name, value in named.items()) + " }"

    return f"{variables('light')}\n@media (prefers-color-scheme: dark) {{ {variables('dark')} }}\n"


def series_variables(theme: str) -> dict[str, str]:
    """Return the colors of series by the names of their CSS variables."""
    return {f"series-{i}": colour for i, colour in enumerate(SERIES_COLOURS[theme])}


def png(path: Path, charts: Sequence[Chart], *, title: str = "", notes: Sequence[str] = ()) -> None:
    """Write charts as one PNG on white, two side by side.

    Args:
        path: the file.
        charts: in reading order; an empty chart shows a note.
        title: title of the figure, with the dataset.
        notes: text below the charts.
    """
    from matplotlib.figure import Figure

    colours = NEUTRAL_COLOURS["light"] | series_variables("light")
    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    width = 6.0 * columns if columns > 1 else 7.2
    with _style(colours):
        figure = Figure(figsize=(width, 3.5 * rows + 0.6), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.09)  # type: ignore[call-arg]
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for chart, ax in zip(charts, axes, strict=False):
            ax.set_title(chart.title, pad=24)
            _draw(ax, chart, colours, legend=True)
        for ax in axes[len(charts) :]:
            ax.set_axis_off()
        figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        lines = [line for note in notes for line in textwrap.wrap(note, int(16.5 * width))]
        figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=7.5, color=colours["muted"])
        figure.savefig(path, dpi=160, format="png", facecolor="white")


def svg(chart: Chart, name: str, *, legend: bool = True) -> str:
    """Return the chart as an SVG element of a page, without its title.

    Args:
        chart: what to draw; not empty.
        name: prefix of the identifiers in the SVG, unique on the page.
        legend: show the names of the series next to the axes.
    """
    from matplotlib.figure import Figure

    # matplotlib knows no CSS variables. So give each a unique color, and replace these colors in
    # the SVG text.
    variables = [*NEUTRAL_COLOURS["light"], *series_variables("light")]
    stand_ins = {variable: f"#1e00{i:02x}" for i, variable in enumerate(variables)}
    stream = io.StringIO()
    with _style(stand_ins, name):
        figure = Figure(figsize=(4.7, 3.1), layout="constrained")
        _draw(figure.add_subplot(), chart, stand_ins, legend=legend)
        figure.savefig(stream, format="svg", transparent=True)
    text = stream.getvalue()
    for variable, colour in stand_ins.items():
        text = text.replace(colour, f"var(--{variable})")
    # Remove fonts, styles and identifiers, which the page sets itself.
    heading = f'<svg class="chart" role="img" aria-label="{html.escape(chart.title)}" '
    heading += re.search(r'viewBox="[^"]*"', text)[0]
    text = heading + text[text.index(">", text.index("<svg")) :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*;", r"font-size: \1;", text)
    return re.sub(r'<g id="[^"]*"', "<g", text)


def _style(colours: Mapping[str, str], salt: str | None = None):
    """Return a context with the matplotlib settings of a chart: faint axes, and text as text."""
    import matplotlib

    muted, grid = colours["muted"], colours["grid"]
    settings = {
        "axes.axisbelow": True,
        "axes.edgecolor": muted,
        "axes.formatter.limits": (-4, 7),
        "axes.formatter.useoffset": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.labelcolor": muted,
        "axes.labelsize": 9.5,
        "axes.linewidth": 0.7,
        "axes.spines.left": False,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "font.size": 9.5,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "legend.handlelength": 2.6,
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.color": colours["ink"],
        "text.parse_math": False,
        "xtick.color": grid,
        "xtick.labelcolor": muted,
        "xtick.major.size": 3,
        "ytick.labelcolor": muted,
        "ytick.major.size": 0,
    }
    return matplotlib.rc_context(settings)


def _draw(ax, chart: Chart, colours: Mapping[str, str], *, legend: bool) -> None:
    """Draw one chart, without its title."""
    if chart.empty:
        ax.text(0.5, 0.5, "nothing was measured", ha="center", color=colours["muted"])
        ax.set_axis_off()
        return
    ax.set_xlabel(chart.x_name)
    ax.annotate(chart.y_name, (0, 1), (0, 9), xycoords="axes fraction",
                textcoords="offset points", color=colours["muted"])  # fmt: skip
    for series in chart.series:
        colour, shape = colours[f"series-{series.look.colour}"], series.look.shape
        if series.dots:
            ax.plot(series.x, series.y, "o", color=colour, markersize=2.5, label=series.name)
            continue
        x, y, low, high = thinned(series.x, chart.heights(series), series.spread)
        marker = MARKERS[shape] if len(x) <= MOST_MARKED else ""
        style = {"color": colour, "linewidth": 1.7, "marker": marker, "markersize": 4.2}
        dashes = tuple(part / 1.7 for part in DASHES[shape])
        label = "\n".join(textwrap.wrap(series.name, LABEL_WIDTH, break_long_words=False))
        ax.plot(x, y, linestyle=(0, dashes or None), label=label or None, **style)
        if (high > low).any():
            ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    for i, series in enumerate(one for one in chart.series if one.failed):
        height = 0.05 + 0.08 * i if chart.failed_below else 0.95 - 0.08 * i
        ax.plot(list(series.failed), [height] * len(series.failed), "x", markeredgewidth=1.8,
                color=colours[f"series-{series.look.colour}"], label=min(series.failed.values()),
                transform=ax.get_xaxis_transform(), clip_on=False)  # fmt: skip
    for i, mark in enumerate(chart.marks):
        line = {"color": colours["muted"], "linestyle": ("--", ":")[i % 2], "linewidth": 0.9}
        draw = ax.axhline if mark.x is None else ax.axvline
        draw(mark.y if mark.x is None else mark.x, label=mark.text, **line)
    _set_axes(ax, chart)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=(1, 1))


def thinned(
    x: Sequence[float], y: np.ndarray, spread: Sequence[float] | None
) -> tuple[np.ndarray, ...]:
    """Reduce a curve to at most ``MOST_POINTS`` points, each the mean of its neighbors.

    Return x, y, and the lower and upper edge of the band. The band is the spread or, for a reduced
    curve, the range of the averaged points.
    """
    places, half = np.array(x, dtype=float), np.array(spread if spread else 0.0)
    if len(places) <= MOST_POINTS:
        return places, y, y - half, y + half
    groups = np.array_split(np.flatnonzero(np.isfinite(y)), MOST_POINTS)
    groups = [group for group in groups if len(group)]
    pairs = ((places, np.mean), (y, np.mean), (y, np.min), (y, np.max))
    return tuple(np.array([reduce(of[group]) for group in groups]) for of, reduce in pairs)


def _set_axes(ax, chart: Chart) -> None:
    """Set scales, limits and ticks: few, round, plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    for axis, base, scale in (
        (ax.xaxis, chart.log_x, ax.set_xscale),
        (ax.yaxis, chart.log_y, ax.set_yscale),
    ):
        if base and axis.get_minpos() < math.inf:  # else nothing was measured
            scale("log", base=base)
            low, high = axis.get_view_interval()
            # Several ticks per power on a long axis make matplotlib use the ticks of a linear axis.
            few = math.log(high / low, base) < 2
            within = (1, 2, 5) if base == 10 else (1, 1.5)
            axis.set_major_locator(LogLocator(base, within if few else (1,), numticks=9))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if chart.x_ticks is not None:
        ax.set_xticks(chart.x_ticks, chart.x_texts or [short(tick) for tick in chart.x_ticks])
    if chart.from_zero:
        ax.set_ylim(0, 1.05 * ax.dataLim.y1 or 1)


def short(value: float) -> str:
    """Format a number with four digits and thousands separators."""
    few = f"{value:.3g}" if abs(value) >= 1e7 else f"{float(f'{value:.4g}'):g}"
    text = f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else few
    return text.replace("-", "\N{MINUS SIGN}")
