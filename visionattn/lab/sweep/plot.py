"""A sweep as a figure: accuracy, images per second and peak memory over the number of heads. It
measures nothing.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

from visionattn.lab.sweep.grid import Network
from visionattn.lab.sweep.measurement import images_per_second
from visionattn.lab.sweep.table import Outcome

COLOURS = {"taylorshift": "tab:blue", "kernelized": "tab:orange", "softmax": "tab:green"}
LINES = {"direct": "--", "efficient": "-", "auto": ":", None: "-"}
MARKERS = {"direct": "s", "efficient": "o", "auto": "^", None: "o"}
COLUMNS = 3
Value = Callable[[Network], float | None]


def draw_sweep(path: Path, outcome: Outcome, note: str) -> None:
    """Write a PNG: two rows of panels per image size, inference above training, ``note`` below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(network.img_size for network in outcome.plan.grid.networks))
    panels = panels_of(outcome)
    shown = [(size, *panel) for size in sizes for panel in panels]
    rows = len(shown) // COLUMNS
    figure, axes = pyplot.subplots(
        rows, COLUMNS, figsize=(5 * COLUMNS, 4.2 * rows), squeeze=False, layout="constrained"
    )
    for (size, name, value, spread), ax in zip(shown, axes.flat, strict=True):
        draw_panel(ax, outcome, size, value, spread)
        ax.set(xlabel="heads", ylabel=name, title=f"{size} px" if len(sizes) > 1 else "")
    figure.supxlabel(note, fontsize=8, color="grey")
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def panels_of(outcome: Outcome) -> list[tuple[str, Value, Value | None]]:
    """Name, value and spread of each panel, in the order of reading; their number is twice
    ``COLUMNS``.
    """

    def accuracy(network: Network) -> float | None:
        values = outcome.accuracies(network)
        return 100 * statistics.mean(values) if values else None

    def spread(network: Network) -> float:
        values = outcome.accuracies(network)
        return 100 * statistics.stdev(values) if len(values) > 1 else 0.0

    def speed(name: str) -> Value:
        def value(network: Network) -> float | None:
            known = outcome.measured[network]
            return known and images_per_second(known[name], known["conditions"]["batch"])

        return value

    def memory(name: str) -> Value:
        def value(network: Network) -> float | None:
            peak = (outcome.entry(network, name) or {}).get("peak_bytes")
            return peak and peak / 2**20

        return value

    def gflop(network: Network) -> float:
        return outcome.plan.facts[network].flops / 1e9

    first = {
        "inference": ("accuracy in %", accuracy, spread),
        "training": ("GFLOP of a forward", gflop, None),
    }
    panels: list[tuple[str, Value, Value | None]] = []
    for name, panel in first.items():
        panels += [
            panel,
            (f"{name}, images/s", speed(name), None),
            (f"{name}, peak MiB", memory(name), None),
        ]
    return panels


def draw_panel(ax, outcome: Outcome, size: int, value: Value, spread: Value | None) -> None:
    """A curve per attention and form over the head counts, both axes logarithmic, but for the
    accuracy.
    """
    chosen = [network for network in outcome.plan.grid.networks if network.img_size == size]
    trained = outcome.plan.grid.train_form
    drawn = False
    for attention, form in dict.fromkeys((network.attention, network.form) for network in chosen):
        if (
            spread
            and trained
            and form
            and form != next(n.form for n in chosen if n.attention == attention)
        ):
            continue  # one training, one curve
        own = [
            n for n in chosen if (n.attention, n.form) == (attention, form) and value(n) is not None
        ]
        x, y = [network.heads for network in own], [value(network) for network in own]
        label = " ".join([attention, *([form] if form and not (spread and trained) else [])])
        line = "-" if spread and trained else LINES[form]
        style = {
            "color": COLOURS.get(attention, "grey"),
            "linestyle": line,
            "marker": MARKERS[form],
            "markersize": 4,
        }
        if own and spread and len(outcome.plan.grid.seeds) > 1:
            ax.errorbar(
                x, y, yerr=[spread(network) for network in own], capsize=3, label=label, **style
            )
        elif own:
            ax.plot(x, y, label=label, **style)
        drawn = drawn or bool(own)
    heads = sorted({network.heads for network in chosen})
    ax.set_xscale("log", base=2)
    ax.set_xticks(heads, [str(count) for count in heads])
    if not spread and drawn:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.yaxis.set_tick_params(which="minor", labelsize=6)
    ax.grid(True, which="major", alpha=0.3)
    if drawn:
        ax.legend(fontsize=8)
