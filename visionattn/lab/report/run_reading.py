"""Read the folder of a run in any state: running, killed, failed or finished.

Missing and unreadable files are listed in ``problems``.
"""

import math
import os.path
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from visionattn.cli import untrusted
from visionattn.data.data_config import DataConfig
from visionattn.lab.charts import Chart, Series, SeriesStyle
from visionattn.lab.figures import number
from visionattn.model_config import VECTOR_TASKS
from visionattn.training.mistakes import ByClass, read_by_class
from visionattn.training.output_scores import ByOutput, read_by_output
from visionattn.training.run_folder import BEST, BY_CLASS, CONFIG, METRICS, STATUS, Ended, flat

Values = dict[str, Any]
NO_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")
"""Name endings of batch-norm buffers, which are not trained."""
WORDS = {
    "finished": "finished",
    "running": "running or killed",
    "stopped": "stopped",
    "nan": "not finite",
    "oom": "out of memory",
    "failed": "failed",
    "unknown": "unknown",
}
"""Each status as the page shows it."""
OF_TRAINING = {
    *("augment", "img_size_choices", "batch_patches", "args.train_images"),
    *("mean", "std", "workers", "download", "sampler", "crop", "crop_around", "crops", "cache"),
}
"""Data options that change neither the evaluated images nor their size."""

CURVES: tuple[tuple, ...] = (
    ("Training loss", "", 1, "loss", "train_loss"),
    ("Validation loss", "", 1, "val_loss"),
    ("Validation accuracy", "%", 100, "val_accuracy"),
    ("Validation mean IoU", "%", 100, "val_mean_iou"),
    ("Validation F1", "%", 100, "val_f1"),
    ("Validation mAP", "%", 100, "val_map"),
    ("Validation R2", "", 1, "val_r2"),
    ("Learning rate", "per step", 1, "lr"),
    ("Throughput of training", "images per second", 1, "images_per_second"),
    ("Waiting for data", "% of the time", 100, "wait_share"),
)
"""Charts of runs: title, unit, factor to the unit, and keys of lines in ``metrics.jsonl``. The unit
of a loss depends on the task.
"""
LISTED = 20
"""Maximum number of unreadable images that a page names."""
FROM_ZERO = ("Throughput of training", "Waiting for data")
"""Charts with a vertical axis from 0."""


@dataclass(eq=False)
class Run:
    """The content of a run's folder."""

    folder: Path
    name: str
    """Name of the run on the page."""
    config: Values = field(default_factory=dict)
    """The nested values of ``config.yaml``; empty without the file."""
    steps: list[Values] = field(default_factory=list)
    """Lines of ``metrics.jsonl`` about steps."""
    epochs: list[Values] = field(default_factory=list)
    """Lines of ``metrics.jsonl`` about epochs."""
    status: str = "unknown"
    """A key of ``WORDS``."""
    reason: str | None = None
    """The reason of the status, if known."""
    result: Values = field(default_factory=dict)
    """The known ones of ``test_accuracy``, ``validation_loss``, ``best_epoch`` and the like."""
    provenance: Values = field(default_factory=dict)
    parameters: int | None = None
    """Number of parameters of the best weights."""
    by_class: ByClass | None = None
    """Predictions of the best weights by class, for the test images or, if these were not
    evaluated, for the validation images.
    """
    by_output: ByOutput | None = None
    """For ``VECTOR_TASKS``: the metrics of each output, for the same images."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, one line each."""

    @property
    def weights(self) -> Path:
        """The path of the best weights, whether or not they exist."""
        return self.folder / BEST

    @property
    def task(self) -> str | None:
        """The task of the model, one of ``Task``."""
        return self.setting("data", "task")

    def setting(self, *keys: str) -> Any:
        """Return an entry of the configuration; None if missing."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def read(self, name: str, reader: Callable[[Path], Any]) -> Any:
        """Read a file of the run with ``reader``; if it is missing or damaged, record a problem and
        return None.
        """
        try:
            return reader(self.folder / name)
        except FileNotFoundError:
            self.problems.append(f"there is no {name}")
        except (ValueError, OSError, SafetensorError) as error:
            said = " ".join(str(error).split()).removeprefix(f"{self.folder / name} ")
            self.problems.append(f"{name} cannot be read: {said[:160]}")
        return None


def is_run(folder: Path) -> bool:
    """Tell whether a folder has a file that only runs have."""
    return any((folder / name).is_file() for name in (CONFIG, METRICS, STATUS))


def read_run(folder: Path, name: str) -> Run:
    """Read a run.

    Args:
        folder: a folder for which ``is_run`` holds.
        name: name of the run on the page.
    """
    run = Run(folder, name)
    config = run.read(CONFIG, untrusted.read_yaml)
    run.config = config if isinstance(config, dict) else {}
    lines = run.read(METRICS, lambda path: read_lines(path, run.problems)) or []
    run.steps = [line for line in lines if line.get("kind") == "train"]
    run.epochs = [line for line in lines if line.get("kind") == "epoch"]
    tests = [line for line in lines if line.get("kind") == "test"]
    if unreadable := [line for line in lines if line.get("kind") == "unreadable"]:
        images = unreadable[-1].get("images") or []
        more = f" and {len(images) - LISTED} more" * (len(images) > LISTED)
        run.problems.append(
            f"unreadable images skipped ({len(images)}): {', '.join(images[:LISTED])}{more}"
        )
    run.result = result_of(run.epochs, tests, run.setting("monitor"))
    run.status = "finished" if tests else "unknown"
    if (folder / STATUS).exists():
        stored = run.read(STATUS, lambda path: untrusted.read_json(Ended, path, "")) or {}
        run.status = stored.get("status") if stored.get("status") in WORDS else "unknown"
        run.reason, run.provenance = stored.get("reason"), stored.get("provenance", {})
        result = stored.get("result") or {}
        run.result |= {key: value for key, value in result.items() if value is not None}
    if run.status in ("running", "unknown") and (folder / METRICS).is_file():
        written = datetime.fromtimestamp((folder / METRICS).stat().st_mtime, UTC)
        run.reason = f"last line {written:%Y-%m-%d %H:%M} UTC"
    if run.weights.is_file():
        run.parameters = run.read(BEST, count_parameters)
    for split in ("validation", "test"):
        there = (folder / BY_CLASS[split]).exists()
        several = run.task in VECTOR_TASKS
        reader = read_by_output if several else read_by_class
        found = run.read(BY_CLASS[split], reader) if there else None
        # After a resume the file may describe earlier weights, until the run tests again.
        if found and run.result.get("best_epoch") in (None, found.epoch):
            setattr(run, "by_output" if several else "by_class", found)
    return run


def read_lines(path: Path, problems: list[str]) -> list[Values]:
    """Return the readable lines of ``metrics.jsonl``; record a problem for unreadable lines."""
    texts = [
        line for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if line
    ]
    found: list[Values] = []
    for text in texts:
        with suppress(ValueError):
            found.append(untrusted.from_json(Values, text, "a line"))
    if lost := len(texts) - len(found):
        problems.append(f"{lost} of {len(texts)} lines of {path.name} cannot be read")
    return found


def result_of(epochs: list[Values], tests: list[Values], monitor: str | None = None) -> Values:
    """Return the result of a run from its lines about epochs and tests, with the keys of
    ``status.json``. ``monitor`` is the option of the run.
    """
    found: Values = {}
    known = [line for line in epochs if number(line.get("val_loss")) is not None]

    def rank(line: Values) -> tuple[float, ...]:
        """Rank as training does: by ``monitor`` or, without it, by the score and then by the
        smallest loss.
        """
        if monitor is not None:
            value = number(line.get(f"val_{monitor}")) or 0.0
            return (-value if monitor in ("loss", "mae", "rmse") else value,)
        keys = ("val_mean_iou", "val_accuracy", "val_map", "val_r2")
        score = next(filter(None, (number(line.get(key)) for key in keys)), None)
        return score or 0.0, -line["val_loss"]

    if known:
        best = max(known, key=rank)
        found |= {f"validation_{key[4:]}": best[key] for key in best if key.startswith("val_")}
        found["best_epoch"] = best.get("epoch")
        found["train_seconds"] = sum(number(line.get("seconds")) or 0.0 for line in epochs)
    for line in tests:
        found |= {f"test_{key}": value for key, value in line.items()}
    return found


def count_parameters(path: Path) -> int:
    """Count the parameters in a file of weights, from its header."""
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if not name.endswith(NO_PARAMETERS)]  # noqa: SIM118  no mapping
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


def same_data(run: Run) -> tuple | None:
    """Return a key that is equal for runs evaluated on the same images at the same size; None if
    the run does not name its data.

    It consists of the data options with defaults, the seed of the split, and the number of test
    images.
    """
    if not isinstance(run.setting("data"), dict):
        return None
    options = flat(asdict(DataConfig())) | flat(run.config["data"])
    options["root"] = options["root"] and os.path.normpath(str(options["root"]))
    kept = {key: value for key, value in options.items() if key not in OF_TRAINING}
    kept = {key: value for key, value in kept.items() if key.partition(".")[0] not in OF_TRAINING}
    return repr(sorted(kept.items())), run.config.get("seed", 0), run.result.get("test_images")


def curves_of(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts in ``CURVES`` over epochs, or over steps if a run has not finished an
    epoch.
    """
    by_epoch = all(run.epochs or not run.steps for run in runs)
    tasks = {run.task for run in runs}
    units = ["nats per image"] * bool(tasks - {"generate", "regression"})
    units += ["bits per dimension"] * ("generate" in tasks)
    units += ["standardized targets"] * ("regression" in tasks)
    charts = []
    for title, unit, factor, *keys in CURVES:
        series = [
            Series(run.name, SeriesStyle.of(i), *curve(run, keys, factor, by_epoch))
            for i, run in enumerate(runs)
        ]
        x_name = "epoch" if by_epoch else "optimizer step"
        zero = title in FROM_ZERO
        charts.append(Chart(title, x_name, unit or ", or ".join(units), series, from_zero=zero))
    return [chart for chart in charts if not chart.empty]


def curve(
    run: Run, keys: Sequence[str], factor: float, by_epoch: bool
) -> tuple[list[float], list[float]]:
    """Return the positions and values of a curve; NaN is a gap.

    The curve comes from the lines about steps or about epochs, whichever have more values: a run
    with short epochs may have few lines about steps. Of several keys, a line's first one counts.
    """
    ends = [line for line in run.epochs if number(line.get("step")) and number(line.get("epoch"))]
    steps_per_epoch = ends[-1]["step"] / ends[-1]["epoch"] if ends and by_epoch else 1
    sources: list[tuple[list[float], list[float]]] = []
    for lines in (run.steps, run.epochs):
        x, y = [], []
        for line in lines:
            values = [number(line[key]) for key in keys if key in line]
            if values and (step := number(line.get("step"))) is not None:
                x.append(step / steps_per_epoch)
                y.append(math.nan if values[0] is None else factor * values[0])
        sources.append((x, y))
    return max(sources, key=lambda source: len(source[0]))
