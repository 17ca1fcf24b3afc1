"""Charts drawn: a PNG, or out of the same drawing SVG for a page that may be light or dark.

This module owns what matplotlib is told. matplotlib is imported when something is drawn.
"""

import html
import io
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from visionattn.lab.charts import (
    DASHES,
    LINE_POINTS,
    MARKERS,
    MOST_MARKED,
    NEUTRAL_COLOURS,
    SERIES_COLOURS,
    Chart,
    Point,
    Series,
    hidden_under,
    reach,
    short,
    spread_out,
    thin,
    tick_text,
    wrapped,
)


def png(
    path: Path, charts: Sequence[Chart], *, title: str = "", notes: Sequence[str] = (), columns=2
) -> None:
    """Write charts as one PNG on white.

    Args:
        path: the file.
        charts: in the order of reading; an empty one says that it is.
        title: what all of them show; names the data set.
        notes: what stands below them.
        columns: charts side by side.
    """
    names = {f"series-{i}": colour for i, colour in enumerate(SERIES_COLOURS["light"])}
    colours = NEUTRAL_COLOURS["light"] | names | {"panel": "#ffffff"}
    # Few charts make a narrower figure; one alone gets some room for its labels.
    columns = min(columns, len(charts))
    rows = math.ceil(len(charts) / columns)
    width = 5.4 * columns if columns > 1 else 7.2
    with _style(colours):
        figure = _figure((width, 3.5 * rows + 0.6))
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for chart, ax in zip(charts, axes, strict=False):
            ax.set_title(chart.title, pad=24)
            _draw_chart(ax, chart, colours, {}, labelled=True)
        for ax in list(axes)[len(charts) :]:
            ax.set_axis_off()
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold")
        lines = [line for note in notes for line in textwrap.wrap(note, int(16.5 * width))]
        figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=7.5, color=colours["muted"])
        _place_labels(figure, charts)
        figure.savefig(path, dpi=160, format="png", facecolor="white")


def svg(chart: Chart, name: str) -> str:
    """Return the chart as an SVG element, without its title and legend.

    Args:
        chart: what to draw; not empty.
        name: a word that no other chart of the page has; identifiers begin with it.
    """
    variables = ["ink", "muted", "grid", "panel"]
    variables += [f"series-{i}" for i in range(len(SERIES_COLOURS["light"]))]
    # matplotlib takes no CSS variables: each gets a colour of its own, which is replaced in the
    # text below.
    stand_ins = {variable: f"#1e00{i:02x}" for i, variable in enumerate(variables)}
    titles: dict[str, str] = {}
    with _style(stand_ins | {"salt": name}):
        figure = _figure((4.7, 3.3))
        _draw_chart(figure.add_subplot(), chart, stand_ins, titles, labelled=chart.labelled)
        _place_labels(figure, [chart])
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    for variable, colour in stand_ins.items():
        text = text.replace(colour, f"var(--{variable})")
    return _for_page(text, chart.title, name, titles)


def _style(colours: Mapping[str, str]):
    """Return the settings of matplotlib while a chart is drawn: quiet axes, text as it stands."""
    import matplotlib

    matplotlib.use("Agg")
    muted, grid = colours["muted"], colours["grid"]
    axes = {"labelsize": 9.5, "labelcolor": muted, "edgecolor": muted, "linewidth": 0.7}
    axes |= {"titlesize": 11, "titleweight": "bold", "titlelocation": "left"}
    axes |= {f"spines.{side}": False for side in ("left", "right", "top")}
    ticks = {"labelsize": 9, "labelcolor": muted, "color": grid, "major.size": 3}
    settings = {f"axes.{key}": value for key, value in axes.items()}
    settings |= {f"{axis}tick.{key}": value for axis in "xy" for key, value in ticks.items()}
    settings |= {"font.size": 9.5, "text.color": colours["ink"], "text.parse_math": False}
    settings |= {"grid.color": grid, "grid.linewidth": 0.6, "ytick.major.size": 0}
    settings |= {"svg.fonttype": "none", "svg.hashsalt": colours.get("salt")}
    return matplotlib.rc_context(settings)


def _figure(size: tuple[float, float]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    engine = figure.get_layout_engine()
    engine.set(w_pad=0.1, h_pad=0.09, wspace=0.03)  # type: ignore[call-arg]
    return figure


def _draw_chart(
    ax, chart: Chart, colours: Mapping[str, str], titles: dict[str, str], *, labelled: bool
) -> None:
    """Draw one chart; ``titles`` gets what a mouse shows over an element, by identifier.

    Labels are put at their lines' ends; ``_place_labels`` moves them apart once their heights are
    known.
    """
    ax.annotate(chart.y_name, (0, 1), (0, 9), xycoords="axes fraction",
                textcoords="offset points", color=colours["muted"])  # fmt: skip
    if not chart.measured:
        lost = [
            f"{series.name}: {why}" for series in chart.series for why in series.failed.values()
        ]
        text = "\n".join(dict.fromkeys(lost)) or chart.nothing
        ax.text(0.5, 0.5, text, ha="center", color=colours["muted"], transform=ax.transAxes)
        ax.set_axis_off()
        return
    # Spreads at the same place would hide each other: on a logarithmic axis they stand a little
    # apart.
    with_spread = [series for series in chart.series if series.spread]
    for series, wider in zip(chart.series, hidden_under(chart), strict=True):
        aside = 0.0
        if chart.log_x and series.spread:
            aside = 0.05 * (with_spread.index(series) - (len(with_spread) - 1) / 2)
        _draw_series(ax, series, chart.points(series), colours, titles, wider, aside)
    failing = [series for series in chart.series if series.failed]
    # Places of failures have no height, but the axis is to reach them.
    for x in {x for series in failing for x in series.failed}:
        ax.update_datalim([(x, 1.0)], updatey=False)
    ax.margins(y=0.05 + 0.1 * len(failing))
    _set_axes(ax, chart)
    _draw_marks(ax, chart, colours)
    _draw_failures(ax, chart, colours)
    if labelled:
        _label_ends(ax, chart, colours)


def _draw_series(
    ax,
    series: Series,
    points: Sequence[Point],
    colours: Mapping[str, str],
    titles: dict[str, str],
    wider: int,
    aside: float,
) -> None:
    """Draw line, spreads and points.

    Args:
        ax, series, points, colours, titles: as in ``_draw_chart``.
        wider: lines that will lie on this one, which therefore is drawn wider.
        aside: octaves by which points stand beside their place, so that spreads can be told apart.
    """
    places = [place * 2**aside for place, _, _ in points]
    x, y = thin(places, [height for _, height, _ in points])
    colour, marker = colours[f"series-{series.look.colour}"], MARKERS[series.look.shape]
    dash = DASHES[series.look.shape]
    line = {"color": colour, "linewidth": 1.7 + 2.6 * wider, "gid": _titled(titles, series.name)}
    if wider:  # pale, so that what lies on it is seen where it has the same colour, too
        line["alpha"] = 0.35
    if dash != "none":
        line["linestyle"] = (0, [float(part) / line["linewidth"] for part in dash.split()])
    if len(x) > MOST_MARKED:
        line |= {"marker": marker, "markersize": 4, "markevery": len(x) // 8}
    ax.plot(x, [math.nan if value is None else value for value in y], **line)
    if left_out := reach(places, [height for _, height, _ in points]):
        ax.fill_between(*left_out, color=colour, alpha=0.18, linewidth=0)
    if len(points) > MOST_MARKED:
        return
    # Points are hollow where the line is dashed.
    dot = {"color": colour, "marker": marker, "markersize": 4.2 + 2 * wider, "linestyle": "none"}
    if dash != "none":
        dot["markerfacecolor"] = colours["panel"]
    for shown, (place, height, spread) in zip(places, points, strict=True):
        if height is None:
            continue
        around = f" ± {short(spread)}" if spread else ""
        title = _titled(titles, f"{series.name}: {short(height)}{around} at {short(place)}")
        if spread:
            ax.plot([shown, shown], [height - spread, height + spread], color=colour, linewidth=1.1)
        ax.plot([shown], [height], gid=title, **dot)


def _titled(titles: dict[str, str], text: str) -> str:
    """Keep what a mouse over an element shows; returns the element's identifier."""
    key = f"title{len(titles)}"
    titles[key] = text
    return key


def _draw_marks(ax, chart: Chart, colours: Mapping[str, str]) -> None:
    """Draw rings at places and thin lines across, each with its text beside it."""
    for mark in chart.marks:
        colour = colours["muted" if mark.colour is None else f"series-{mark.colour}"]
        if mark.y is None:
            right = ax.transLimits.transform(ax.transScale.transform((mark.x, 1)))[0] > 0.6
            ax.axvline(mark.x, color=colour, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            # Lines rise to the right, and their names stand there: below them is room.
            at, place = (mark.x, 0 if right else 1), ax.get_xaxis_transform()
            away, side = ((-4, 5), "right") if right else ((4, -8), "left")
        elif mark.x is None:
            ax.axhline(mark.y, color=colour, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            at, place, away, side = (0, mark.y), ax.get_yaxis_transform(), (4, 3), "left"
        else:
            ax.plot([mark.x], [mark.y], "o", markersize=9, color=colour, markerfacecolor="none")
            at, place, away, side = (mark.x, mark.y), ax.transData, (-7, 6), "right"
        ground = {"facecolor": colours["panel"], "alpha": 0.8, "linewidth": 0, "pad": 1}
        ax.annotate(mark.text, at, away, xycoords=place, textcoords="offset points", ha=side,
                    color=colour, fontsize=8.5, bbox=ground)  # fmt: skip


def _draw_failures(ax, chart: Chart, colours: Mapping[str, str]) -> None:
    """Draw a cross at the edge where a series has no value, and why at the first of them."""
    failing = [series for series in chart.series if series.failed]
    for i, series in enumerate(failing):
        colour, place = colours[f"series-{series.look.colour}"], ax.get_xaxis_transform()
        height = 0.05 + 0.08 * i if chart.failed_below else 0.95 - 0.08 * i
        ax.plot(list(series.failed), [height] * len(series.failed), "x", color=colour,
                markersize=6, markeredgewidth=1.8, transform=place, clip_on=False)  # fmt: skip
        first, named = min(series.failed), any(y is not None for y in series.y)
        text = series.failed[first] if named else f"{wrapped(series.name)}: {series.failed[first]}"
        ax.annotate(text, (first, height), (-7, 0), xycoords=place, textcoords="offset points",
                    ha="right", va="center", color=colour, fontsize=8.5,
                    in_layout=False)  # fmt: skip


def _label_ends(ax, chart: Chart, colours: Mapping[str, str]) -> None:
    """Put the name of each series that has one at its last point."""
    for series in chart.series:
        ends = [(x, y) for x, y, _ in chart.points(series) if y is not None]
        if ends and series.name:
            colour = colours[f"series-{series.look.colour}"]
            leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 1,
                      "shrinkB": 4, "relpos": (0, 0.5)}  # fmt: skip
            ax.annotate(wrapped(series.name), ends[-1], (9, 0), textcoords="offset points",
                        va="center", color=colour, fontsize=9, linespacing=1.05,
                        arrowprops=leader, gid="label")  # fmt: skip


def _place_labels(figure, charts: Sequence[Chart]) -> None:
    """Move labels that would overlap lines or each other: to the right of all lines, and apart."""
    figure.draw_without_rendering()
    places = [(ax, _labels_of(ax)) for ax in figure.axes[: len(charts)]]
    aside = [[_crosses_a_line(ax, label) for label in labels] for ax, labels in places]
    # The layout makes room for what stands beside the axes, which then are narrower than the labels
    # were placed for: after three rounds nothing moves by more than a pixel.
    for _ in range(3):
        for (ax, labels), at_the_side in zip(places, aside, strict=True):
            _move_labels(ax, labels, at_the_side, 72 / figure.dpi)
        figure.draw_without_rendering()


def _labels_of(ax) -> list:
    return [text for text in ax.texts if text.get_gid() == "label"]


def _crosses_a_line(ax, label) -> bool:
    box = label.get_window_extent()
    return any(
        line.get_path().interpolated(16).transformed(line.get_transform()).intersects_bbox(box)
        for line in ax.lines
        if len(line.get_xdata()) > 1
    )


def _move_labels(ax, labels: Sequence, at_the_side: Sequence[bool], points: float) -> None:
    """Put each label beside the end of its line, or right of all lines; ``points`` of a pixel."""
    ends = [ax.transData.transform(text.xy) for text in labels]
    right = max((x for x, _ in ends), default=0.0)
    # Labels of one column are moved apart; those that would cross a line share the rightmost.
    columns: dict[float, list[int]] = {}
    for i, (x, _) in enumerate(ends):
        columns.setdefault(right if at_the_side[i] else x, []).append(i)
    for column, here in columns.items():
        heights = [points * ends[i][1] for i in here]
        lines = [1 + labels[i].get_text().count("\n") for i in here]
        moved = spread_out(heights, [LINE_POINTS * count for count in lines])
        ups = [after - before for before, after in zip(heights, moved, strict=True)]
        asides = [points * (column - ends[i][0]) for i in here]
        # A label far from its line's end is led there by a thin line.
        far = [aside > 1 or abs(up) > 4 for aside, up in zip(asides, ups, strict=True)]
        for i, aside, up, led in zip(here, asides, ups, far, strict=True):
            labels[i].set_position((aside + (16 if any(far) else 9), up))
            labels[i].arrow_patch.set_visible(led)


def _set_axes(ax, chart: Chart) -> None:
    """Set scales, limits and ticks: few, round and as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    ax.set_xlabel(chart.x_name)
    # Where ticks may lie: on powers, or on round numbers.
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
            whole = {"integer": True, "min_n_ticks": 1} if axis is ax.xaxis else {}
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], **whole))
        axis.set_minor_locator(NullLocator())
    if chart.from_zero:
        ax.set_ylim(0, ax.dataLim.y1 + 0.05 * max(ax.dataLim.y1, 0) or 1)
    if chart.bounds is not None:  # a little room is left for what lies on them
        low, high = ax.get_ylim()
        room = 0.02 * (high - low)
        ax.set_ylim(max(low, chart.bounds[0] - room), min(high, chart.bounds[1] + room))
    # A chart's own ticks come first. A single place gets one tick there; a logarithmic axis that
    # shows fewer than two powers gets ticks as a linear one does.
    if chart.x_ticks is not None:
        ax.xaxis.set_major_locator(FixedLocator(chart.x_ticks))
    elif len(places := {x for series in chart.series for x, _, _ in chart.points(series)}) == 1:
        ax.xaxis.set_major_locator(FixedLocator(list(places)))
    elif len(_ticks_in_view(ax.xaxis)) < 2:
        ax.xaxis.set_major_locator(MaxNLocator(6))
    if len(_ticks_in_view(ax.yaxis)) < 2:
        ax.yaxis.set_major_locator(MaxNLocator(6, min_n_ticks=3))
    # Numbers get as many digits as even gaps need; 0 stands for gaps that are not even.
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
    if chart.x_texts is not None:
        ax.set_xticks(chart.x_ticks, chart.x_texts)
    ax.grid(True, axis="y")
    ax.set_axisbelow(True)


def _ticks_in_view(axis) -> list[float]:
    low, high = sorted(axis.get_view_interval())
    return sorted(tick for tick in axis.get_majorticklocs() if low <= tick <= high)


def _for_page(text: str, title: str, name: str, titles: dict[str, str]) -> str:
    """Cut the element out of matplotlib's file: the page's font, unique identifiers, titles for the
    mouse.
    """
    box = re.search(r'viewBox="([\d. ]+)"', text)[1]
    heading = f'<svg class="chart" viewBox="{box}" role="img" aria-label="{html.escape(title)}">'
    # What comes before the drawing is matplotlib's heading; the page has its own fonts.
    text = text[text.index(">", text.index("<svg")) + 1 :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;?", "", text)
    text = re.sub(r"font: ([\d.]+px) [^;\"]*;", r"font-size: \1;", text)
    text = text.replace(' id="label"', "")
    # Identifiers of all charts share one page, so each gets the chart's name in front.
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    for key, words in titles.items():
        text = text.replace(f'<g id="{name}-{key}">', f"<g><title>{html.escape(words)}</title>", 1)
    return heading + text
