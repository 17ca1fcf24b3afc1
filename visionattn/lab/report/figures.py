"""Which charts a page has: curves of runs, head counts of sweeps, memory over tokens. It draws
nothing itself.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from visionattn.lab.report.charts import Chart, Curve, Style
from visionattn.lab.report.origin import in_words, shared_training, values_of
from visionattn.lab.report.rows import Row, chosen, distinct, trained_itself, value_of
from visionattn.lab.report.runs import Run, Values, number

MIB = 2**20


@dataclass(frozen=True)
class Figure:
    """Charts with one legend."""

    charts: Sequence[Chart]
    legend: Sequence[tuple[Style, str]]
    caption: str = ""


def curves_of(runs: Sequence[Run]) -> Figure:
    """Loss, accuracy, learning rate, speed and waiting of runs over their epochs; over steps where
    none finished one.
    """
    by_epoch = all(run.epochs or not run.steps for run in runs)
    x_name = "epoch" if by_epoch else "optimiser step"

    def curves(kind: str, key: str, factor: float = 1.0) -> list[Curve]:
        found = []
        for i, run in enumerate(runs):
            lines = [line for line in getattr(run, kind) if number(line.get("step")) is not None]
            x = [position(line, run, by_epoch) for line in lines]
            y = [
                None if (value := number(line.get(key))) is None else factor * value
                for line in lines
            ]
            if lines:
                found.append(Curve(run.name, Style(i), x, y))
        return found

    charts = [
        Chart(
            "Training loss",
            x_name,
            "nats per image",
            curves("steps", "loss") or curves("epochs", "train_loss"),
        ),
        Chart("Validation loss", x_name, "nats per image", curves("epochs", "val_loss")),
        Chart("Validation accuracy", x_name, "%", curves("epochs", "val_accuracy", 100)),
        Chart("Learning rate", x_name, "per step", curves("steps", "lr") or curves("epochs", "lr")),
        Chart(
            "Speed of training",
            x_name,
            "images per second",
            curves("steps", "images_per_second"),
            from_zero=True,
        ),
        Chart(
            "Waiting for data",
            x_name,
            "% of the time",
            curves("steps", "wait_share", 100),
            from_zero=True,
        ),
    ]
    legend = [(Style(i), run.name) for i, run in enumerate(runs)]
    return Figure([chart for chart in charts if not chart.empty], legend)


def position(line: Values, run: Run, by_epoch: bool) -> float:
    """Where a line lies: in epochs that have passed, or in steps."""
    step = number(line["step"]) or 0.0
    if not by_epoch:
        return step
    steps_per_epoch = steps_of_epoch(run)
    return step / steps_per_epoch if steps_per_epoch else step


def steps_of_epoch(run: Run) -> float | None:
    """Optimiser steps per epoch, from the last line about an epoch; None where there is none."""
    for line in reversed(run.epochs):
        step, epoch = number(line.get("step")), number(line.get("epoch"))
        if step and epoch:
            return step / epoch
    return None


def accuracy_column(rows: Sequence[Row]) -> str:
    """The accuracy that counts: on the test images, on those of validation where there are none."""
    tested = any(value_of(row, "test_accuracy") is not None for row in rows)
    return "test_accuracy" if tested else "validation_accuracy"


def heads_of(rows: Sequence[Row], size: str) -> Figure:
    """Accuracy, speed and memory over head counts, at one image size of a sweep."""
    here = [row for row in rows if row.get("img_size") == size]
    column = accuracy_column(rows)
    ticks = sorted({heads for row in here if (heads := value_of(row, "heads"))})
    series = {pair: Style(i) for i, pair in enumerate(distinct(rows, "attention", "form"))}

    def curves(column: str, factor: float, spread: bool) -> list[Curve]:
        counted = [row for row in here if trained_itself(row)] if spread else here
        return [
            over(
                chosen(counted, ("attention", "form"), pair),
                "heads",
                column,
                factor,
                name_of(pair),
                style,
                spread,
            )
            for pair, style in series.items()
        ]

    form, batches = shared_training(rows), values_of(rows, "measure_batch")
    named = f"Accuracy ({'test' if column == 'test_accuracy' else 'validation'})" + (
        f", trained {form}" if form else ""
    )
    per_second = "images per second" + (f", batch {batches[0]}" if len(batches) == 1 else "")
    charts = [Chart(named, "heads", "%", curves(column, 100, True), 2, x_ticks=ticks)]
    for key, words in (("inference", "Inference"), ("training", "Training step")):
        speed, memory = (
            curves(f"{key}_images_per_second", 1, False),
            curves(f"{key}_peak_bytes", 1 / MIB, False),
        )
        charts.append(Chart(f"{words}: speed", "heads", per_second, speed, 2, 10, x_ticks=ticks))
        charts.append(Chart(f"{words}: peak memory", "heads", "MiB", memory, 2, 10, x_ticks=ticks))
    legend = [(style, name_of(pair)) for pair, style in series.items()]
    return Figure([chart for chart in charts if not chart.empty], legend, f"Images of {size} px")


def name_of(pair: Sequence[str]) -> str:
    """An attention and its form."""
    return " ".join(filter(None, pair))


def over(
    rows: Sequence[Row],
    x_column: str,
    y_column: str,
    factor: float,
    label: str,
    style: Style,
    spread: bool = False,
) -> Curve:
    """The mean of a column over another one; rows that have neither count for nothing."""
    groups: dict[float, list[float]] = {}
    for row in rows:
        x, y = value_of(row, x_column), value_of(row, y_column)
        if x is not None and y is not None:
            groups.setdefault(x, []).append(factor * y)
    x = sorted(groups)
    deviations = [deviation(groups[key]) or 0.0 for key in x]
    shown = deviations if spread and any(deviations) else None
    return Curve(label, style, x, [statistics.mean(groups[key]) for key in x], shown)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation; None for fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def memory_of(rows: Sequence[Row]) -> Figure:
    """Peak memory above the level just before, and in all, over tokens: a line per model and way to
    run it.
    """
    keys = ("model", "pass", "precision", "form", "checkpointing", "batch", "depth")
    series = {values: Style(i) for i, values in enumerate(distinct(rows, *keys))}
    differ = [
        i for i in range(1, len(keys)) if len({values[i] for values in series if values[i]}) > 1
    ]
    names = {values: series_name(keys, values, differ) for values in series}

    def curves(column: str) -> list[Curve]:
        return [
            over(chosen(rows, keys, values), "tokens", column, 1 / MIB, names[values], style)
            for values, style in series.items()
        ]

    charts = [
        Chart(
            "Memory that the pass adds",
            "tokens",
            "MiB above the level before",
            curves("above_bytes"),
            2,
            10,
        ),
        Chart("Peak memory", "tokens", "MiB", curves("peak_bytes"), 2, 10),
    ]
    legend = []
    for values, style in series.items():
        exponent = next(
            (
                x
                for row in chosen(rows, keys, values)
                if (x := value_of(row, "growth_exponent")) is not None
            ),
            None,
        )
        growth = "" if exponent is None else f", grows as tokens^{exponent:.2f}"
        legend.append((style, names[values] + growth))
    return Figure([chart for chart in charts if not chart.empty], legend)


def series_name(keys: Sequence[str], values: Sequence[str], differ: Sequence[int]) -> str:
    """The model, and what of the rest is not the same in all series."""
    rest = [
        in_words(keys[i], values[i])
        for i in differ
        if values[i] and (keys[i], values[i]) != ("checkpointing", "no")
    ]
    return ", ".join([values[0], *(text.removeprefix("form ") for text in rest)])
