"""What the folder of a run says, whatever state the run was left in. It reads files and draws
nothing.

A run that still trains, was killed, or ended with an error is read as far as it goes: what is
missing is missing in the page, and what cannot be read is listed in ``problems``.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from visionattn.cli import untrusted
from visionattn.cli.ends import is_out_of_memory
from visionattn.training.mistakes import ByClass, read_by_class
from visionattn.training.record import BEST, BY_CLASS, CONFIG, METRICS, STATUS

Values = dict[str, Any]
RUN_FILES = (CONFIG, METRICS, STATUS)
MOST = 1e38
"""Larger numbers of a file are none: no measurement gives them (float32 ends there), and sums of
them overflow.
"""
NO_PARAMETERS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of the names of tensors that batch norm keeps and nobody trains."""
WORDS = {
    "finished": "finished",
    "running": "running or killed",
    "stopped": "stopped",
    "nan": "not finite",
    "oom": "out of memory",
    "failed": "failed",
    "unknown": "unknown",
}
"""How a page says each status."""


@dataclass
class Run:
    """What is known of a run."""

    folder: Path
    name: str
    """The run as the page calls it."""
    config: Values = field(default_factory=dict)
    """Nested, as in ``config.yaml``; empty where there is none."""
    steps: list[Values] = field(default_factory=list)
    """Lines of ``metrics.jsonl`` about steps."""
    epochs: list[Values] = field(default_factory=list)
    """Those about epochs."""
    status: str = "unknown"
    """A key of ``WORDS``."""
    reason: str | None = None
    """Why it ended as it did, or what is known of it."""
    result: Values = field(default_factory=dict)
    """``test_accuracy``, ``best_epoch`` and the like, as far as they are known."""
    provenance: Values = field(default_factory=dict)
    parameters: int | None = None
    """Numbers that the best weights consist of."""
    by_class: ByClass | None = None
    """What the best weights say of each class: of the test images, or where these have not been
    evaluated of the validation images.
    """
    problems: list[str] = field(default_factory=list)
    """What could not be read, a line each."""

    @property
    def weights(self) -> Path:
        """The path of the best weights; they need not exist."""
        return self.folder / BEST

    def setting(self, *keys: str) -> Any:
        """Return an entry of the configuration; None where there is none."""
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def is_run(folder: Path) -> bool:
    """Tell whether a folder has a file that only runs have."""
    return any((folder / name).is_file() for name in RUN_FILES)


def read_run(folder: Path, name: str, *, now: float) -> Run:
    """Read a run.

    Args:
        folder: one for which ``is_run`` holds.
        name: what to call it.
        now: seconds since 1970; how long ago a run that does not say how it ended wrote its last
            line is counted from it.
    """
    run = Run(folder, name)
    run.config = read_yaml(folder / CONFIG, run.problems)
    lines = read_lines(folder / METRICS, run.problems)
    beyond = sum(is_beyond(value) for line in lines for value in line.values())
    if beyond:
        run.problems.append(
            f"{beyond} value{'s' * (beyond > 1)} of {METRICS} beyond {MOST:g} left out"
        )
    run.steps = [line for line in lines if line.get("kind") == "train"]
    run.epochs = [line for line in lines if line.get("kind") == "epoch"]
    test = next((line for line in reversed(lines) if line.get("kind") == "test"), None)
    run.result = result_of(run.epochs, run.steps, test)
    add_status(run, read_json(folder / STATUS, run.problems), tested=test is not None)
    if run.status in ("running", "unknown"):
        run.reason = last_sign(folder / METRICS, now)
    if run.weights.is_file():
        run.parameters = count_parameters(run.weights, run.problems)
    run.by_class = find_by_class(run)
    return run


def find_by_class(run: Run) -> ByClass | None:
    """Return what the best weights say of each class; a problem for a file that cannot be read. A
    file of other weights counts as none: a run that went on has not come to its test yet.
    """
    best = number(run.result.get("best_epoch"))
    for split in ("test", "validation"):
        path = run.folder / BY_CLASS[split]
        if not path.exists():
            continue
        try:
            found = read_by_class(path)
        except (ValueError, OSError) as error:
            said = " ".join(str(error).split()).removeprefix(f"{path} ")
            run.problems.append(f"{path.name} cannot be read: {said[:160]}")
            continue
        if found.split == split and best in (None, found.epoch):
            return found
    return None


def add_status(run: Run, told: Values | None, *, tested: bool) -> None:
    """Take over what ``status.json`` says; without one, a run that tested its weights has
    finished.
    """
    if told is None:
        run.status = "finished" if tested else "unknown"
        return
    status = told.get("status")
    run.status = status if isinstance(status, str) and status in WORDS else "unknown"
    run.reason = text_or_none(told.get("reason"))
    run.provenance = told["provenance"] if isinstance(told.get("provenance"), dict) else {}
    if isinstance(told.get("result"), dict):
        run.result |= {key: value for key, value in told["result"].items() if value is not None}


def result_of(epochs: list[Values], steps: list[Values], test: Values | None) -> Values:
    """Return what the lines alone say of the result, in the words of ``status.json``."""
    found: Values = {}
    figure = "mean_iou" if any("val_mean_iou" in line for line in epochs) else "accuracy"
    key = f"val_{figure}"
    scored = [line for line in epochs if number(line.get(key)) is not None]
    if scored:
        # As in training, the smaller loss counts among equal scores, and the earlier epoch
        # among equal losses.
        best = max(scored, key=lambda line: (line[key], -(number(line.get("val_loss")) or 0.0)))
        found |= {"best_epoch": best.get("epoch"), f"validation_{figure}": best[key]}
        found |= {"ious": best.get("val_ious"), "ious_of": "validation"}
    judged = [line for line in epochs if number(line.get("val_loss")) is not None]
    if judged and not scored:  # weights are chosen by their loss
        best = min(judged, key=lambda line: line["val_loss"])
        found |= {"best_epoch": best.get("epoch"), "validation_loss": best["val_loss"]}
    if judged:
        found["train_seconds"] = sum(number(line.get("seconds")) or 0.0 for line in epochs)
    speeds = [
        speed for line in steps if (speed := number(line.get("images_per_second"))) is not None
    ]
    if speeds:
        found["images_per_second"] = sorted(speeds)[len(speeds) // 2]
    if test is not None:
        found |= {
            f"test_{figure}": test.get(figure),
            "test_loss": test.get("loss"),
            "test_images": test.get("images"),
        }
        if test.get("ious") is not None:
            found |= {"ious": test["ious"], "ious_of": "test"}
    return found


def read_lines(path: Path, problems: list[str]) -> list[Values]:
    """Return the lines of ``metrics.jsonl`` that can be read; a problem for each that cannot."""
    if not path.is_file():
        problems.append(f"there is no {path.name}")
        return []
    found = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    lines = text.split("\n")
    for position, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with suppress(ValueError):
            found.append(untrusted.from_json(dict[str, object], line, "a line"))
            continue
        if position == len(lines):
            problems.append(f"the last line of {path.name} is cut off and left out")
        else:
            problems.append(f"line {position} of {path.name} cannot be read and is left out")
    return found


def read_yaml(path: Path, problems: list[str]) -> Values:
    """Return a YAML file of names and values; a problem where it is none."""
    try:
        values = untrusted.read_yaml(path)
    except FileNotFoundError:
        problems.append(f"there is no {path.name}")
        return {}
    except (ValueError, OSError):
        values = None
    if not isinstance(values, dict):
        problems.append(f"{path.name} cannot be read")
        return {}
    return values


def read_json(path: Path, problems: list[str]) -> Values | None:
    """Return a JSON file of names and values; None where there is none, with a problem where it
    cannot be read.
    """
    if not path.is_file():
        return None
    try:
        return untrusted.read_json(Values, path, "")
    except (ValueError, OSError):
        problems.append(f"{path.name} cannot be read")
        return None


def count_parameters(path: Path, problems: list[str]) -> int | None:
    """Count the numbers in a file of weights, read off its heading; a problem where it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if not name.endswith(NO_PARAMETERS)]  # noqa: SIM118  no mapping
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        problems.append(f"{path.name} cannot be read: {' '.join(str(error).split())[:120]}")
        return None


def last_sign(path: Path, now: float) -> str:
    """Return when a run that does not say how it ended wrote its last line."""
    if not path.is_file():
        return "it has written no metrics yet"
    written = path.stat().st_mtime
    minutes = max(0, round((now - written) / 60))
    ago = (
        f"{minutes} min"
        if minutes < 120
        else f"{minutes // 60} h"
        if minutes < 2880
        else f"{minutes // 1440} days"
    )
    return (
        f"last line {datetime.fromtimestamp(written, UTC):%Y-%m-%d %H:%M} UTC, {ago} before "
        f"this page"
    )


def number(value: Any) -> float | None:
    """Return a number of at most ``MOST`` either way; None for anything else that a
    file may hold.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= MOST else None  # False for NaN


def is_beyond(value: Any) -> bool:
    """Tell whether a value is a number that is left out for its size."""
    return isinstance(value, (int, float)) and abs(value) > MOST


def text_or_none(value: Any) -> str | None:
    """Return text in one line; None for nothing."""
    return None if value is None else " ".join(str(value).split())


def flatten(config: Values, prefix: str = "") -> Values:
    """Return the dotted names and values of a nested configuration; an empty group has none."""
    flat: Values = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def for_each(runs: Sequence[Run], work: Callable[[Run], None]) -> dict[str, str]:
    """Do something for each run; return, for the runs where it cannot be done, the reason in a
    line.
    """
    skipped: dict[str, str] = {}
    for run in runs:
        try:
            work(run)
        except (ValueError, OSError) as error:
            skipped[run.name] = " ".join(str(error).split())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            skipped[run.name] = "out of memory"
    return skipped
