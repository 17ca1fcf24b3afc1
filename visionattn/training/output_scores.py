"""Metrics of each class of ``multilabel`` and of each target of ``regression``, from scikit-learn,
and their file in a run's folder.
"""

from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np

from visionattn.cli.untrusted import read_json
from visionattn.models.weights import DataSpec

VERSION = 1
MOST_POINTS = 500
"""Maximum number of images in a scatter plot."""
SHARES = ("mAP", "AP", "F1", "IoU")
"""Metrics in [0, 1]."""
Column = list[float | None]
"""One value for each output; None: undefined."""


@dataclass(frozen=True)
class OutputScores:
    """The metrics of all outputs on a set of images."""

    means: dict[str, float | None]
    """Mean of the metrics over the outputs that have them: ``mAP`` and ``F1``, or ``R2``, ``MAE``
    and ``RMSE``; the first is the usual score.
    """
    columns: dict[str, Column]
    """The metrics of each output: ``positives``, ``AP``, ``F1`` and ``threshold``, or ``MAE``,
    ``RMSE`` and ``R2``.
    """


def scores_of(spec: DataSpec, labels: np.ndarray, values: np.ndarray) -> OutputScores:
    """Return the metrics of predictions.

    Args:
        spec: the specification of the images. Without ``thresholds``, each class gets the
            threshold with the largest F1 on these images.
        labels: float64 ``[N, K]``; NaN does not count.
        values: the result of ``DataSpec.values_of``, float64 ``[N, K]``.
    """
    pairs = zip(labels.T, values.T, strict=True)
    if spec.task == "regression":
        return OutputScores(*_summarized([_errors(*pair) for pair in pairs]))
    limits = spec.thresholds or (None,) * spec.num_classes
    rows = [_detection(*pair, limit) for pair, limit in zip(pairs, limits, strict=True)]
    means, columns = _summarized(rows)
    return OutputScores({"mAP": means["AP"], "F1": means["F1"]}, columns)


def _errors(known: np.ndarray, found: np.ndarray) -> dict[str, float | None]:
    """Return the errors of one target, in its units."""
    from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

    return {
        "R2": float(r2_score(known, found)) if len(known) > 1 else None,
        "MAE": float(mean_absolute_error(known, found)),
        "RMSE": float(root_mean_squared_error(known, found)),
    }


def _detection(
    known: np.ndarray, found: np.ndarray, limit: float | None
) -> dict[str, float | None]:
    """Return the metrics of one class; None for AP and F1 without a positive image."""
    from sklearn.metrics import average_precision_score, f1_score

    counted = ~np.isnan(known)
    known, found = known[counted] > 0, found[counted]
    positives = float(known.sum())
    if not positives:
        limit = 0.5 if limit is None else limit
        return {"positives": positives, "AP": None, "F1": None, "threshold": limit}
    limit = best_threshold(known, found) if limit is None else limit
    return {
        "positives": positives,
        "AP": float(average_precision_score(known, found)),
        "F1": float(f1_score(known, found >= limit)),
        "threshold": limit,
    }


def best_threshold(known: np.ndarray, found: np.ndarray) -> float:
    """Return the threshold with the largest F1, halfway between two probabilities.

    Args:
        known: whether each image has the class, bool ``[N]``, at least one of them True.
        found: its probability, ``[N]``.
    """
    from sklearn.metrics import precision_recall_curve

    precision, recall, limits = precision_recall_curve(known, found)
    # With a positive image, precision and recall are not both 0 at the lowest threshold.
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-300)
    best = int(f1[:-1].argmax())
    return float(limits[best] + (limits[best - 1] if best else 0)) / 2


def _summarized(
    rows: list[dict[str, float | None]],
) -> tuple[dict[str, float | None], dict[str, Column]]:
    """Return the mean of each metric over the outputs that have it, and the metrics as columns."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    known = {name: [x for x in column if x is not None] for name, column in columns.items()}
    return {name: float(np.mean(each)) if each else None for name, each in known.items()}, columns


def told(value: float | None, name: str) -> str:
    """Format a metric by its name: shares in %, others as numbers."""
    if value is None:
        return "-"
    return f"{100 * value:.2f} %" if name in SHARES else f"{value:.4g}"


def decided(spec: DataSpec, values: np.ndarray) -> np.ndarray:
    """Return the predicted labels of an image from its ``DataSpec.values_of``, ``[K]``: 0 or 1 for
    ``multilabel``, the values themselves for ``regression``.
    """
    return values if spec.task == "regression" else np.array(spec.holds(values.tolist()), float)


def in_words(spec: DataSpec, labels: np.ndarray) -> str:
    """Return the class of an image ``[]``, its classes (1 in ``labels``) or its values ``[K]`` as
    text.
    """
    if labels.ndim == 0:
        return spec.output_names[int(labels)]
    if spec.task == "regression":
        pairs = zip(spec.output_names, labels.tolist(), strict=True)
        return ", ".join(f"{name} {value:.4g}" for name, value in pairs)
    return "; ".join(compress(spec.output_names, labels == 1)) or "none"


@dataclass(frozen=True)
class ByOutput:
    """The metrics of each output on a split, in ``validation.json`` and ``test.json``."""

    version: int
    split: str
    epoch: int
    """The epoch of the weights, counted from 1."""
    images: int
    """Number of evaluated images."""
    seen: str
    """The preprocessing in words."""
    names: list[str]
    """The names of the outputs."""
    columns: dict[str, Column]
    """``OutputScores.columns``."""
    points: list[list[tuple[float, float]]]
    """For ``regression``, the true and the predicted value of up to ``MOST_POINTS`` images, for
    each target.
    """


def by_output(rows: np.ndarray, spec: DataSpec, *, split: str, epoch: int, seen: str) -> ByOutput:
    """Return the metrics of each output.

    Args:
        rows: ``evaluate.Tally.rows`` of all processes.
        spec: the specification of the images.
        split: their split.
        epoch: the epoch of the weights, counted from 1.
        seen: the preprocessing in words.
    """
    labels, values, _ = np.split(rows, [spec.num_classes, 2 * spec.num_classes], 1)
    points = []
    if spec.task == "regression":
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), MOST_POINTS)).astype(int)
        pairs = zip(labels[chosen].T.tolist(), values[chosen].T.tolist(), strict=True)
        points = [list(zip(*pair, strict=True)) for pair in pairs]
    columns = scores_of(spec, labels, values).columns
    return ByOutput(
        VERSION, split, epoch, len(rows), seen, list(spec.output_names), columns, points
    )


def read_by_output(path: Path) -> ByOutput:
    """Read the metrics of each output from a JSON file, which may be untrusted.

    Raises:
        ValueError: the file has other content; one line.
        OSError: the file cannot be read.
    """
    found: ByOutput = read_json(ByOutput, path, "evaluate the run again to rewrite it")
    columns = [*found.columns.values(), *([found.points] if found.points else [])]
    if found.version != VERSION or any(len(each) != len(found.names) for each in columns):
        raise ValueError(
            f"{path} is damaged: the number of values differs from the number of outputs"
        )
    return found
