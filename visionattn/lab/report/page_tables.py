"""Make the tables of a page: results, differing settings, sweeps, memory profiles, and classes
(confusion matrix, recall, worst mistakes). Cells are plain text, which the page escapes.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from visionattn.cli.tables import lasting
from visionattn.lab.charts import Chart, Series, SeriesStyle
from visionattn.lab.figures import (
    MIB,
    Row,
    accuracy_column,
    chosen,
    distinct,
    looks_of,
    number,
    trained_itself,
    value_of,
)
from visionattn.lab.report.run_reading import WORDS, Run, same_data
from visionattn.models.weights import described, read_metadata
from visionattn.training.config import TrainConfig
from visionattn.training.mistakes import SMALL_PX, ByClass, Mistake
from visionattn.training.output_scores import ByOutput, told
from visionattn.training.run_folder import flat

PLACE = ("run", "output", "resume", "overwrite")
"""Settings of where a run is stored, which the page leaves out."""
SCORES = {"accuracy": "accuracy", "mean_iou": "mean IoU", "loss": "bits/dim"}
SCORES |= {"map": "mAP", "r2": "R2"}
"""Metrics of the results, with their names."""
RESULTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "test_images": ("test images", "{:,.0f}".format),
    "best_epoch": ("best epoch", "{:.0f}".format),
    "train_seconds": ("time", lasting),
    "images_per_second": ("images/s", "{:,.0f}".format),
}
"""Other results, with their names and formats."""
COUNTS = {"segmentation": "mean_iou", "generate": "loss", "multilabel": "map", "regression": "r2"}
"""The main metric by task; for other tasks the accuracy."""
NEEDED = {
    "sweep": {"attention", "heads", "form", "img_size", "seed", "status", "parameters"},
    "memory": {"model", "pass", "px", "tokens", "peak_bytes", "above_bytes", "status"},
}
"""Columns that a CSV file of a sweep or a memory profile must have."""
CONDITIONS = (
    *("pass", "precision", "form", "checkpointing", "batch", "depth", "trained_form"),
    *("measure_batch", "measure_amp", "measure_device", "measure_threads", "measure_rounds"),
    "budget_bytes",
)
"""Columns shown above the table if all rows have the same value."""
COLUMNS: dict[str, tuple[str, float | None]] = {
    "attention": ("attention", None),
    "model": ("model", None),
    "form": ("form", None),
    "trained_form": ("trained form", None),
    "img_size": ("px", 1),
    "px": ("px", 1),
    "heads": ("heads", 1),
    "head_dim": ("head width", 1),
    "tokens": ("tokens", 1),
    "pass": ("pass", None),
    "precision": ("precision", None),
    "checkpointing": ("checkpointing", None),
    "batch": ("batch", 1),
    "depth": ("blocks", 1),
    "budget_bytes": ("budget, GiB", 2**-30),
    "measure_batch": ("batch", 1),
    "measure_amp": ("mixed precision", None),
    "measure_device": ("device", None),
    "measure_threads": ("threads", 1),
    "measure_rounds": ("rounds", 1),
    "test_accuracy": ("test accuracy in %", 100),
    "validation_accuracy": ("validation accuracy in %", 100),
    "parameters": ("parameters", 1),
    "flops": ("GFLOP", 1e-9),
    "inference_images_per_second": ("inference, images/s", 1),
    "inference_times_direct": ("inference, img/s over direct", 1),
    "inference_peak_bytes": ("inference, MiB", 1 / MIB),
    "training_images_per_second": ("training step, images/s", 1),
    "training_times_direct": ("training step, img/s over direct", 1),
    "training_peak_bytes": ("training step, MiB", 1 / MIB),
    "inference_backend": ("attention that ran", None),
    "peak_bytes": ("peak, MiB", 1 / MIB),
    "reserved_bytes": ("reserved, MiB", 1 / MIB),
    "above_bytes": ("above before, MiB", 1 / MIB),
    "parameters_bytes": ("parameters, MiB", 1 / MIB),
    "gradients_bytes": ("gradients, MiB", 1 / MIB),
    "optimizer_bytes": ("optimizer, MiB", 1 / MIB),
    "activations_bytes": ("activations, MiB", 1 / MIB),
    "growth_exponent": ("growth", 1),
    "status": ("status", None),
    "reason": ("reason", None),
}
"""Columns of CSV files in the order of the page. Each has its heading and, for numbers, the factor
to the unit of the heading; None for texts.
"""
SOURCES = {
    "measure_processor": "measured on",
    "measure_torch": "measured with torch",
    "measure_commit": "measured at commit",
    "measured": "measured at",
    "train_commit": "trained at commit",
}
"""Provenance columns of a sweep, with their names. Its other provenance columns describe the last
call, which may have measured nothing.
"""
OF_PROFILE = ("processor", "device", "threads", "torch", "commit", "load")
"""Provenance columns of a memory profile."""
MOST_VALUES = 3
"""Maximum number of values to show for a provenance column."""
MOST_IN_MATRIX = 30
"""With more classes a matrix is unreadable. The page lists the most frequent mistakes instead."""
MOST_PAIRS, MOST_LISTED = 20, 1000
"""Maximum number of rows of the tables of mistakes and of classes. Of more classes, the ones with
the lowest recall are listed.
"""
MOST_CHARTS = 12
"""Maximum number of scatter plots of a run."""
MOST_MISTAKES, MOST_PICTURES = 12, 24
"""Maximum number of mistakes to show for a run, and for all runs of a page. Each run shows at least
one.
"""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str = ""
    numeric: bool = False
    strong: bool = False
    status: str = ""
    """A key of ``WORDS``; the cell shows its mark."""
    note: str = ""
    """Small text below."""
    look: SeriesStyle | None = None
    """The style of the run or series that the cell names."""


@dataclass
class Table:
    """A heading and rows of cells; the first cell of a row is its name."""

    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def without_empty_columns(self) -> "Table":
        """Return the table without columns that are empty in all rows."""
        used = [i for i in range(len(self.columns)) if any(row[i] != Cell() for row in self.rows)]
        return Table([self.columns[i] for i in used], [[row[i] for i in used] for row in self.rows])


def numeric(value: Any, write: Callable[[Any], str] = "{:,}".format) -> Cell:
    """Return the cell of a number; an empty cell for None."""
    return Cell() if value is None else Cell(write(value), True)


def percent(value: float) -> str:
    """Format a share in %."""
    return f"{100 * value:.2f} %"


def results(runs: Sequence[Run]) -> Table:
    """Return the results of each run. The best value among runs on the same images is bold."""
    columns: dict[str, list[Cell]] = {
        "run": [Cell(run.name, look=SeriesStyle.of(i)) for i, run in enumerate(runs)],
        "status": [
            Cell(WORDS[run.status], status=run.status, note=run.reason or "") for run in runs
        ],
    }
    for split in ("test", "validation"):
        for key, name in SCORES.items():
            columns[f"{split} {name}"] = scores(runs, split, key)
    for key, (name, write) in RESULTS.items():
        columns[name] = [numeric(number(run.result.get(key)), write) for run in runs]
    columns["parameters"] = [numeric(run.parameters) for run in runs]
    columns["model"] = [Cell(str(run.setting("model", "name") or "")) for run in runs]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    return Table(list(columns), rows).without_empty_columns()


def scores(runs: Sequence[Run], split: str, key: str) -> list[Cell]:
    """Return the cells of a metric, which are empty for runs of other tasks. The best value among
    runs on the same images is bold.
    """
    values: list[float | None] = [
        number(run.result.get(f"{split}_{key}"))
        if COUNTS.get(run.task, "accuracy") == key
        else None
        for run in runs
    ]
    data = [same_data(run) for run in runs]
    cells = []
    for value, own in zip(values, data, strict=True):
        others = [x for x, of in zip(values, data, strict=True) if x is not None and of == own]
        best = others and (min if key == "loss" else max)(others)
        cell = numeric(value, "{:.4f}".format if key in ("loss", "r2") else percent)
        strong = own is not None and len(others) > 1 and value == best
        cells.append(replace(cell, strong=strong))
    return cells


def settings(runs: Sequence[Run]) -> Table:
    """Return the settings in which runs differ, with one column per run. For a single run, return
    the settings that differ from the defaults.
    """
    found = [flat(run.config) for run in runs]
    columns = ["setting", *(run.name for run in runs)]
    if len(runs) == 1:
        usual = flat(asdict(TrainConfig()))
        found.append({key: usual.get(key) for key in found[0]})
        columns = ["setting", "here", "default"]
    names = list(dict.fromkeys(key for settings in found for key in settings if key not in PLACE))
    groups = list(dict.fromkeys(key.partition(".")[0] for key in names))
    names.sort(key=lambda key: groups.index(key.partition(".")[0]))
    rows = [[say(settings.get(key, "-")) for settings in found] for key in names]
    pairs = zip(names, rows, strict=True)
    return Table(columns, [[Cell(key), *map(Cell, row)] for key, row in pairs if len({*row}) > 1])


def say(value: Any) -> str:
    """Return a setting as text."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return {"True": "yes", "False": "no", "None": "none"}.get(str(value), str(value))


def provenance(runs: Sequence[Run]) -> Table:
    """Return the provenance of the numbers of each run."""
    keys = dict.fromkeys(["device", "torch", "visionattn", "commit"])
    keys = list(keys | dict.fromkeys(key for run in runs for key in run.provenance))
    rows = [
        [Cell(run.name), *(Cell(say(run.provenance.get(key, ""))) for key in keys),
         Cell(str(run.folder))]
        for run in runs
    ]  # fmt: skip
    return Table(["run", *keys, "folder"], rows).without_empty_columns()


def kind_of(columns: Sequence[str]) -> str | None:
    """Return the kind of a CSV file by its columns: a key of ``NEEDED``, or None."""
    return next((kind for kind, needed in NEEDED.items() if needed <= set(columns)), None)


def shared(rows: Sequence[Row]) -> list[str]:
    """Return the columns in ``CONDITIONS`` that have the same value in all rows."""
    return [key for key in CONDITIONS if rows[0].get(key) and len(distinct(rows, key)) == 1]


def shared_words(rows: Sequence[Row]) -> str:
    """Return the conditions that all rows share, as one line."""
    return ", ".join(f"{COLUMNS[key][0]} {cell_of(rows[:1], key).text}" for key in shared(rows))


def sources(kind: str, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return the provenance of the numbers as names and values."""
    named = SOURCES if kind == "sweep" else {key: key for key in OF_PROFILE}
    found = []
    for key, name in (named | {"date": "last call", "command": "its command"}).items():
        values = [value for (value,) in distinct(rows, key) if value]
        more = f" and {len(values) - MOST_VALUES} more" if len(values) > MOST_VALUES else ""
        if values:
            found.append((name, "; ".join(values[:MOST_VALUES]) + more))
    return found


def rows_table(kind: str, rows: Sequence[Row]) -> Table:
    """Return the rows of a CSV file as a table. Rows of a sweep become means over seeds."""
    unused = {*shared(rows), "test_accuracy", "validation_accuracy"} - {accuracy_column(rows)}
    used = [key for key in COLUMNS if key in rows[0] and key not in unused]
    groups = [[row] for row in rows]
    if kind == "sweep":
        keys = ("attention", "form", "img_size", "heads")
        groups = [chosen(rows, keys, values) for values in distinct(rows, *keys)]
    table = Table([COLUMNS[key][0] for key in used])
    table.rows = [[cell_of(group, key) for key in used] for group in groups]
    if kind == "sweep":
        looks = looks_of(rows)
        for group, row in zip(groups, table.rows, strict=True):
            row[0] = replace(row[0], look=looks[group[0]["attention"], group[0]["form"]])
    return table.without_empty_columns()


def cell_of(rows: Sequence[Row], column: str) -> Cell:
    """Return the cell of a column for several rows: the mean with its standard deviation, the
    status of a failed measurement, or the distinct texts.
    """
    if column.endswith("accuracy"):
        rows = [row for row in rows if trained_itself(row)]
    factor = COLUMNS[column][1]
    if factor is None:
        texts = [text for (text,) in distinct(rows, column) if text]
        return Cell(", ".join(WORDS.get(text, text) for text in texts))
    values = [factor * value for row in rows if (value := value_of(row, column)) is not None]
    if not values:
        status = f"{column.partition('_')[0]}_status"
        why = [text for (text,) in distinct(rows, status) if text not in ("", "ok")]
        return Cell(WORDS.get(why[0], why[0])) if why else Cell()
    mean = statistics.mean(values)
    text = f"{mean:,.0f}" if mean >= 1000 else f"{mean:.4g}"
    text += f" ± {statistics.stdev(values):.2g}" if len({*values}) > 1 else ""
    text += f" ({len(values)} of {len(rows)})" if len(values) < len(rows) else ""
    return Cell(text, True)


# Classes


@dataclass(frozen=True)
class RunClasses:
    """The predictions of a run's best weights on a split, by class."""

    run: str
    found: ByClass
    matrix: Sequence[Sequence[int]] | None
    """Confusion matrix, a row of counts for each true class; None for too many classes."""
    pairs: Table
    """The most frequent mistakes, if there is no matrix."""
    mistakes: Sequence[Mistake]

    @property
    def small(self) -> bool:
        """Whether all images are small, so that the page enlarges them without smoothing."""
        return all(max(each.size or (0,)) <= SMALL_PX for each in self.mistakes)


def classes_of(runs: Sequence[Run], images: int) -> list[RunClasses]:
    """Return the results by class of each run that has them.

    Args:
        runs: the runs of the page.
        images: maximum number of mistakes to show for each run.
    """
    known = [(run, run.by_class) for run in runs if run.by_class is not None]
    most = min(images, MOST_MISTAKES, max(1, MOST_PICTURES // max(1, len(known))))
    return [
        RunClasses(run.name, found, matrix_of(found), pairs_of(found), found.mistakes[:most])
        for run, found in known
    ]


def matrix_of(found: ByClass) -> list[list[int]] | None:
    """Return the confusion matrix; None for more than ``MOST_IN_MATRIX`` classes."""
    if len(found.classes) > MOST_IN_MATRIX or not found.complete:
        return None
    matrix = np.diag([right for _, right, _ in found.classes])
    for label, said, often in found.confusions:
        matrix[label, said] = often
    return matrix.tolist()


def pairs_of(found: ByClass) -> Table:
    """Return the most frequent mistakes, each with its share of the class's images."""
    rows = [
        [Cell(found.name(label)), Cell(found.name(said)), numeric(often),
         numeric(often / found.classes[label][0], percent)]
        for label, said, often in found.confusions[:MOST_PAIRS]
    ]  # fmt: skip
    return Table(["true class", "predicted class", "images", "share of class"], rows)


def class_tables(shown: Sequence[RunClasses]) -> list[Table]:
    """Return tables with the recall of each class, one for all runs on the same images and classes.

    The table of a single run also has the precision and the most frequent wrong prediction.
    """
    groups: dict[tuple, list[RunClasses]] = {}
    for one in shown:
        images = tuple(images for images, _, _ in one.found.classes)
        groups.setdefault((one.found.split, images, *one.found.class_names), []).append(one)
    tables = []
    for (split, images, *_), group in groups.items():
        first = group[0].found
        table = Table(["class", f"{split} images", *(one.run for one in group)])
        if len(group) == 1:
            table.columns = [*table.columns, "precision", "most frequent mistake"]
        worst = {pair[0]: pair for pair in reversed(first.confusions)}  # most frequent come first
        rights = [[one.found.classes[i][1] for one in group] for i in range(len(images))]
        order = list(range(len(images)))
        if len(images) > MOST_IN_MATRIX:  # classes without images come last
            order.sort(key=lambda i: sum(rights[i]) / images[i] if images[i] else math.inf)
        for i in order[:MOST_LISTED]:
            row = [Cell(first.name(i)), numeric(images[i])]
            row += [share(right, images[i]) for right in rights[i]]
            if len(group) == 1:
                _, said, often = worst.get(i, (i, i, 0))
                mistake = Cell(f"{first.name(said)} ({often:,})") if often else Cell()
                row += [share(rights[i][0], first.classes[i][2]), mistake]
            table.rows.append(row)
        tables.append(table)
    return tables


def share(count: int, total: int) -> Cell:
    """Return the cell of a share in %; empty for a total of 0."""
    return numeric(count / total if total else None, percent)


def outputs_of_runs(runs: Sequence[Run]) -> list[tuple[str, ByOutput, Table, list[Chart]]]:
    """Return name, metrics and table of each run that has metrics of outputs. For ``regression``
    add scatter plots of the first ``MOST_CHARTS`` targets.
    """
    shown = []
    for run, found in ((run, run.by_output) for run in runs):
        if found is None:
            continue
        table = Table(["output", *found.columns])
        for name, *values in zip(found.names, *found.columns.values(), strict=True):
            cells = [
                Cell(told(value, key), True)
                for key, value in zip(found.columns, values, strict=True)
            ]
            table.rows.append([Cell(name), *cells])
        pairs = zip(found.names[:MOST_CHARTS], found.points, strict=False)
        shown.append((run.name, found, table, [scatter(*pair) for pair in pairs]))
    return shown


def scatter(name: str, points: Sequence[tuple[float, float]]) -> Chart:
    """Return the true and the predicted values of a target as a chart, with the diagonal."""
    known, said = zip(*points, strict=True)
    ends = [min(known), max(known)]
    dots = Series("predicted", SeriesStyle.of(0), known, said, dots=True)
    return Chart(
        name,
        "true value",
        "predicted value",
        [dots, Series("equal", SeriesStyle.of(4), ends, ends)],
    )


def iou_table(runs: Sequence[Run]) -> Table | None:
    """Return the intersection over union of each class, with one column for each run that has it.

    The images are the test images or, without these, the validation images. None if no run has it.
    """
    found = {run: run.result.get("test_ious") or run.result.get("validation_ious") for run in runs}
    columns = {run: ious for run, ious in found.items() if isinstance(ious, list)}
    if not columns:
        return None
    known, rows = max(map(names_of, columns), key=len), []
    for i, ious in enumerate(zip_longest(*columns.values())):
        name = known[i] if i < len(known) else str(i)
        rows.append([Cell(name), *(numeric(number(iou), percent) for iou in ious)])
    return Table(["class", *(run.name for run in columns)], rows)


def names_of(run: Run) -> Sequence[str]:
    """Return the names of a run's classes, which are stored with its weights; empty if unknown."""
    try:
        return described(read_metadata(run.weights), run.weights)[2].output_names
    except (ValueError, OSError):
        return ()
