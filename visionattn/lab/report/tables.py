"""The tables of a page: results, settings that differ, sweeps, memory. Cells are plain text; the
page escapes them.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from visionattn.cli.tables import lasting
from visionattn.lab.charts import Look
from visionattn.lab.figures import MIB, accuracy_column, deviation, looks_of, name_of
from visionattn.lab.report.origin import NAMES, gibibytes, values_of, varied
from visionattn.lab.report.rows import Row, chosen, distinct, trained_itself, value_of
from visionattn.lab.report.runs import WORDS, Run, flatten, number
from visionattn.lab.report.sameness import best_of, data_words, same_data
from visionattn.training.config import TrainConfig

PLACE = ("run", "output", "resume", "overwrite")
"""Settings that say where a run is kept, and not what it is."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str = ""
    numeric: bool = False
    strong: bool = False
    status: str = ""
    """A key of ``WORDS``, whose mark the cell shows."""
    note: str = ""
    """What stands small below the text."""
    look: Look | None = None
    """The look of the run or series whose name this is."""
    wide: bool = False
    """Whether the text may be long: it is wrapped."""


@dataclass
class Table:
    """A heading and rows of cells; the first cell of a row is its name."""

    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def without_empty_columns(self) -> "Table":
        """Return the table without the columns in which no row says anything."""
        used = [
            i
            for i in range(len(self.columns))
            if any(row[i].text or row[i].note for row in self.rows)
        ]
        return Table([self.columns[i] for i in used], [[row[i] for i in used] for row in self.rows])


def results(runs: Sequence[Run]) -> Table:
    """Return the results of each run; the best figure of several on the same images is strong.
    Where runs have different data, a column says which.
    """
    # Columns of a figure that no run has are left out; that of images stands where none has any.
    figures = {"accuracy": "accuracy", "mean IoU": "mean_iou"}
    scores = {
        f"{split} {name}": [number(run.result.get(f"{split}_{key}")) for run in runs]
        for name, key in figures.items()
        for split in ("test", "validation")
        if not all(map(writes, runs))
        and (
            (key == "mean_iou") == any(map(is_of_pixels, runs))
            or any(f"{each}_{key}" in run.result for run in runs for each in ("test", "validation"))
        )
    }
    strongest = {
        name: best_of(values, [same_data(run, test=name.startswith("test")) for run in runs])
        for name, values in scores.items()
    }
    bits = {f"{split} bits/dim": bits_of(runs, split) for split in ("test", "validation")}
    bits = bits if any(map(writes, runs)) else {}
    words = data_words(runs)
    columns = [
        "run",
        "status",
        *scores,
        *bits,
        "best epoch",
        "parameters",
        "time",
        "images/s",
        "model",
        *(["data"] if any(words) else []),
    ]
    table = Table(columns)
    for i, run in enumerate(runs):
        epochs, result = run.setting("epochs"), run.result
        best = number(result.get("best_epoch"))
        seconds = number(result.get("train_seconds"))
        speed = number(result.get("images_per_second"))
        table.rows.append(
            [
                Cell(run.name, look=Look.of(i)),
                Cell(WORDS[run.status], status=run.status, note=run.reason or ""),
                *(
                    accuracy_cell(
                        values[i],
                        strongest[name][i],
                        share_of(result, "test_images") if name.startswith("test") else "",
                    )
                    for name, values in scores.items()
                ),
                *(cells[i] for cells in bits.values()),
                Cell(f"{best:.0f}" + (f" of {epochs}" if epochs else "") if best else "", True),
                Cell(f"{run.parameters:,}" if run.parameters is not None else "", True),
                Cell(lasting(seconds) if seconds is not None else "", True),
                Cell(f"{speed:,.0f}" if speed is not None else "", True),
                Cell(str(run.setting("model", "name") or "")),
                *([Cell(words[i], wide=True)] if any(words) else []),
            ]
        )
    return table


def bits_of(runs: Sequence[Run], split: str) -> list[Cell]:
    """Return the bits per dimension of the runs that write images; the least of several on the same
    images is strong.
    """
    found = [number(run.result.get(f"{split}_loss")) if writes(run) else None for run in runs]
    lower = [None if value is None else -value for value in found]
    strong = best_of(lower, [same_data(run, test=split == "test") for run in runs])
    return [
        Cell("" if value is None else f"{value:.4f}", True, best)
        for value, best in zip(found, strong, strict=True)
    ]


def writes(run: Run) -> bool:
    """Tell whether a run learns to write images."""
    return run.setting("data", "task") == "generate"


def is_of_pixels(run: Run) -> bool:
    """Tell whether a run gives classes of pixels."""
    return run.setting("data", "task") == "segmentation"


def accuracy_cell(value: float | None, best: bool = False, note: str = "") -> Cell:
    """Return a figure in %, strong where it is the best, and a note; empty where it is unknown."""
    return Cell("", True) if value is None else Cell(f"{100 * value:.2f} %", True, best, note=note)


def share_of(result: dict[str, Any], key: str) -> str:
    """Say of how many images an accuracy is."""
    images = number(result.get(key))
    return "" if images is None else f"of {images:,.0f} images"


def settings(runs: Sequence[Run]) -> Table:
    """Return the settings in which runs differ, a column per run; of a single run those that are
    not the defaults.
    """
    flat = [
        {key: value for key, value in flatten(run.config).items() if key not in PLACE}
        for run in runs
    ]
    names = list(dict.fromkeys(key for settings in flat for key in settings))
    groups = list(dict.fromkeys(key.partition(".")[0] for key in names))
    names.sort(key=lambda key: groups.index(key.partition(".")[0]))
    if len(runs) == 1:
        usual = flatten(asdict(TrainConfig()))
        differ = [key for key in names if flat[0][key] != usual.get(key)]
        rows = [[Cell(key), Cell(say(flat[0], key)), Cell(say(usual, key))] for key in differ]
        return Table(["setting", "here", "default"], rows)
    differ = [key for key in names if len({say(settings, key) for settings in flat}) > 1]
    table = Table(["setting", *(run.name for run in runs)])
    table.rows = [[Cell(key), *(Cell(say(settings, key)) for settings in flat)] for key in differ]
    return table


def say(settings: dict[str, Any], key: str) -> str:
    """Return a setting in words."""
    if key not in settings:
        return "-"
    value = settings[key]
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def provenance(runs: Sequence[Run]) -> Table:
    """Return what the numbers of each run depend on besides its settings."""
    keys = ["device", "torch", "visionattn", "commit"]
    keys += [key for run in runs for key in run.provenance if key not in keys]
    used = [
        key
        for key in dict.fromkeys(keys)
        if any(run.provenance.get(key) is not None for run in runs)
    ]
    rows = [
        [Cell(run.name), *(Cell(say(run.provenance, key)) for key in used), Cell(str(run.folder))]
        for run in runs
    ]
    return Table(["run", *used, "folder"], rows)


def sweep(rows: Sequence[Row]) -> Table:
    """Return a row per network of a sweep: means over seeds.

    A network whose form was measured alone has no accuracy and no status of its own.
    """
    keys = ("attention", "form", "img_size", "heads")
    accuracy = accuracy_column(rows)
    columns = [
        "attention",
        "px",
        "heads",
        "head width",
        f"{accuracy.replace('_', ' ')} in %",
        "seeds",
        "parameters",
        "GFLOP",
    ]
    passes = {"inference": "inference", "training": "training step"}
    differ = varied("sweep", rows)
    columns += [NAMES[key] for key in differ]
    columns += [f"{words}, {unit}" for words in passes.values() for unit in ("images/s", "MiB")]
    table = Table([*columns, "attention that ran", "status"])
    looks = looks_of(rows)
    for values in distinct(rows, *keys):
        here = chosen(rows, keys, values)
        trained = [row for row in here if trained_itself(row)]
        cells = [
            Cell(name_of(values[:2]), look=looks[values[:2]]),
            Cell(values[2], True),
            Cell(values[3], True),
        ]
        cells += [Cell(here[0].get("head_dim", ""), True)]
        # A form that was measured alone shows, in place of an accuracy, which form was trained.
        another = Cell(numeric=True, note="trained " + here[0].get("trained_form", ""))
        cells += seeds_cells(trained, accuracy) or [another, Cell(numeric=True)]
        cells += [mean_cell(here, "parameters"), mean_cell(here, "flops", 1e-9)]
        cells += [Cell(", ".join(values_of(here, key)), True) for key in differ]
        for name in passes:
            cells.append(mean_cell(here, f"{name}_images_per_second", status=f"{name}_status"))
            cells.append(mean_cell(here, f"{name}_peak_bytes", 1 / MIB, status=f"{name}_status"))
        ran = dict.fromkeys(row.get(f"{name}_backend", "") for row in here for name in passes)
        table.rows.append([*cells, Cell(", ".join(filter(None, ran))), statuses(trained)])
    return table.without_empty_columns()


def seeds_cells(rows: Sequence[Row], accuracy: str) -> list[Cell]:
    """Return the mean accuracy over the seeds of a network, and their number; nothing where none
    was trained.
    """
    scores = [100 * score for row in rows if (score := value_of(row, accuracy)) is not None]
    finished = f"{len(scores)}" if len(scores) == len(rows) else f"{len(scores)} of {len(rows)}"
    spread = deviation(scores)
    score = (
        f"{statistics.mean(scores):.1f}" + (f" ± {spread:.1f}" if spread is not None else "")
        if scores
        else ""
    )
    return [Cell(score, True), Cell(finished, True)] if rows else []


def statuses(rows: Sequence[Row]) -> Cell:
    """Return how the trainings of one network ended; the first reason of those that did
    not finish.
    """
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"] or "not trained"] = counts.get(row["status"] or "not trained", 0) + 1
    text = ", ".join(
        WORDS.get(status, status) + (f" ({count})" if len(counts) > 1 else "")
        for status, count in counts.items()
    )
    worst = next(
        (status for status in counts if status != "finished"), "finished" if counts else ""
    )
    reason = next(
        (row["reason"] for row in rows if row["status"] != "finished" and row.get("reason")), ""
    )
    return Cell(text, status=worst if worst in WORDS else "unknown" if worst else "", note=reason)


def mean_cell(
    rows: Sequence[Row], column: str, factor: float = 1.0, *, status: str | None = None
) -> Cell:
    """Return the mean of a column, or where there is none the status that says why."""
    values = [factor * value for row in rows if (value := value_of(row, column)) is not None]
    if values:
        mean = statistics.mean(values)
        return Cell(f"{mean:,.0f}" if mean >= 1000 else f"{mean:.4g}", True)
    why = next(
        (row[status] for row in rows if status and row.get(status) not in (None, "", "ok")), ""
    )
    return Cell(WORDS.get(why, why), True)


def memory(rows: Sequence[Row]) -> Table:
    """Return a row per cell of a memory profile; conditions that are the same in all of them are
    left out.
    """
    differ = varied("memory", rows)
    parts = {
        "peak_bytes": "peak",
        "reserved_bytes": "reserved",
        "above_bytes": "above before",
        "parameters_bytes": "parameters",
    }
    parts |= {
        "gradients_bytes": "gradients",
        "optimizer_bytes": "optimiser",
        "activations_bytes": "activations",
    }
    used = [key for key in parts if any(value_of(row, key) is not None for row in rows)]
    table = Table(
        [
            "model",
            "px",
            "tokens",
            *(NAMES.get(key, key) for key in differ),
            *(f"{parts[key]}, MiB" for key in used),
        ]
    )
    table.columns = [*table.columns, "growth", "status"]
    for row in rows:
        cells = [Cell(row["model"]), Cell(row["px"], True), Cell(row["tokens"], True)]
        cells += conditions(row, differ)
        cells += [mean_cell([row], key, 1 / MIB) for key in used]
        exponent = value_of(row, "growth_exponent")
        cells.append(Cell("" if exponent is None else f"{exponent:.2f}", True))
        table.rows.append([*cells, Cell(row["status"], status=status_of(row["status"]))])
    return table


def largest(rows: Sequence[Row]) -> Table:
    """Return a row per series of a search for the largest image that fits; conditions that are the
    same in all are left out.
    """
    differ = varied("largest", rows)
    columns = ("largest px", "tokens", "peak, MiB", "too large px", "status")
    table = Table(["model", *(NAMES.get(key, key) for key in differ), *columns])
    for row in rows:
        cells = [
            Cell(row["model"]),
            *conditions(row, differ),
            mean_cell([row], "largest_px"),
            mean_cell([row], "tokens"),
        ]
        cells += [mean_cell([row], "peak_bytes", 1 / MIB), mean_cell([row], "too_large_px")]
        table.rows.append([*cells, Cell(row["status"], status=status_of(row["status"]))])
    return table


def conditions(row: Row, columns: Sequence[str]) -> list[Cell]:
    """Return the cells of conditions in which rows differ."""
    words = {"depth": lambda value: value or "all", "budget_bytes": gibibytes}
    return [
        Cell(
            words.get(key, str)(row.get(key, "")), numeric=key in ("batch", "depth", "budget_bytes")
        )
        for key in columns
    ]


def status_of(text: str) -> str:
    """Return the mark of a memory profile's status."""
    return {"ok": "finished", "out of memory": "oom", "nothing fits": "oom"}.get(text, "failed")
