"""Which charts a page has, and their legends where names do not fit beside lines. It draws nothing
itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from visionattn.lab.charts import MOST_POINTS, Chart, Look, Series
from visionattn.lab.report.runs import Run, Values, number


@dataclass(frozen=True)
class Figure:
    """Charts under one heading."""

    charts: Sequence[Chart]
    caption: str = ""

    @property
    def thinned(self) -> bool:
        """Tell whether a curve has more values than are drawn."""
        return any(len(series.x) > MOST_POINTS for chart in self.charts for series in chart.series)

    @property
    def legend(self) -> dict[str, Look]:
        """Looks by name; empty where every chart has the names beside its lines."""
        if all(chart.labelled for chart in self.charts):
            return {}
        return {series.name: series.look for chart in self.charts for series in chart.series}


def curves_of(runs: Sequence[Run]) -> Figure:
    """Draw up charts of loss, accuracy, learning rate, speed and waiting of runs over their epochs;
    over steps where none finished one.
    """
    # A run that has not finished an epoch has no place on an axis of epochs.
    by_epoch = all(run.epochs or not run.steps for run in runs)
    x_name = "epoch" if by_epoch else "optimiser step"

    def curves(*sources: tuple[str, str], factor: float = 1.0) -> list[Series]:
        """Return a curve of each run, from that of the sources which has the most values of it: a
        run of short epochs may have few lines about steps, or none.
        """
        found = []
        for i, run in enumerate(runs):
            curves = []
            for kind, key in sources:
                lines = [x for x in getattr(run, kind) if number(x.get("step")) is not None]
                values = [number(line.get(key)) for line in lines]
                x = [position(line, run, by_epoch) for line in lines]
                y = [None if value is None else factor * value for value in values]
                curves.append(Series(run.name, Look.of(i), x, y))
            most = max(curves, key=known)
            found += [most] if known(most) else []
        return found

    def of_steps(key: str) -> tuple[tuple[str, str], tuple[str, str]]:
        return ("steps", key), ("epochs", key)

    loss = curves(("steps", "loss"), ("epochs", "train_loss"))
    accuracy = curves(("epochs", "val_accuracy"), factor=100)
    overlap = curves(("epochs", "val_mean_iou"), factor=100)
    waits = curves(*of_steps("wait_share"), factor=100)
    speed = curves(*of_steps("images_per_second"))
    written = {run.setting("data", "task") == "generate" for run in runs}
    unit = {True: "bits per dimension", False: "nats per image"}
    nats = (
        "nats per image, or bits per dimension"
        if len(written) > 1
        else unit[max(written, default=False)]
    )
    charts = [
        Chart("Training loss", x_name, nats, loss),
        Chart("Validation loss", x_name, nats, curves(("epochs", "val_loss"))),
        Chart("Validation accuracy", x_name, "%", accuracy, bounds=(0, 100)),
        Chart("Validation mean IoU", x_name, "%", overlap, bounds=(0, 100)),
        Chart("Learning rate", x_name, "per step", curves(*of_steps("lr"))),
        Chart("Speed of training", x_name, "images per second", speed, from_zero=True),
        Chart("Waiting for data", x_name, "% of the time", waits, from_zero=True),
    ]
    data = {str(run.setting("data", "name") or "") for run in runs}
    return Figure(
        [chart for chart in charts if not chart.empty],
        f"Data: {', '.join(sorted(data))}" if any(data) else "",
    )


def known(series: Series) -> int:
    """Count the values of a curve."""
    return sum(value is not None for value in series.y)


def position(line: Values, run: Run, by_epoch: bool) -> float:
    """Return where a line lies: in epochs that have passed, or in steps."""
    step = number(line["step"]) or 0.0
    if not by_epoch:
        return step
    steps_per_epoch = steps_of_epoch(run)
    return step / steps_per_epoch if steps_per_epoch else step


def steps_of_epoch(run: Run) -> float | None:
    """Return the optimiser steps per epoch, from the last line about an epoch; None where there is
    none.
    """
    for line in reversed(run.epochs):
        step, epoch = number(line.get("step")), number(line.get("epoch"))
        if step and epoch:
            return step / epoch
    return None
