"""A linear probe and kNN on pooled features: how much of the classes they hold.

This module owns which images are fitted on and which are judged, and the two classifiers. It knows
features only by the paths of their images.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from visionattn.data.own_images import find_images

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

STEPS = 1000
"""The most steps that the linear probe's optimiser takes."""


@dataclass(frozen=True)
class Division:
    """Which images are fitted on, and which are judged."""

    fitted: dict[str, int]
    """Path and class of each."""
    judged: dict[str, int]
    judged_name: str
    """``test``, or ``validation`` where there is no test split."""
    class_names: tuple[str, ...]


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies in [0, 1] on the judged images, and what they rest on."""

    linear: float
    knn: float
    neighbours: int
    fitted: int
    judged: int
    judged_name: str
    classes: int
    note: str
    """What to say of the linear probe's fit; empty where it has converged."""
    lost: int
    """Images of either kind that have no features."""

    def lines(self) -> list[str]:
        """Put the result into lines for people."""
        lines = [
            f"linear probe {100 * self.linear:.2f} %{self.note}, kNN (k = {self.neighbours}) "
            f"{100 * self.knn:.2f} % of {self.judged} {self.judged_name} images, fitted on "
            f"{self.fitted} images of {self.classes} classes"
        ]
        return lines + without_features(self.lost)


def without_features(lost: int) -> list[str]:
    """Say how many images have no features, in a line or none."""
    return [f"labelled images without features, which count nowhere: {lost}"] if lost else []


def divide_folder(root: str, *, val_fraction: float, seed: int) -> Division:
    """Divide a folder of class folders, or of ``train/``, ``val/`` and ``test/`` with those, as
    training does.

    Raises:
        ValueError, FileNotFoundError: there are no classes, or too few images; one line.
    """
    found = find_images(root)
    parts = found.to_train(val_fraction, seed)
    judged_name = "test" if "test" in parts else "validation"
    fitted, judged = (
        {
            found.source.name(index): int(label)
            for index, label in zip(part.indices, part.labels, strict=True)
        }
        for part in (parts["train"], parts[judged_name])
    )
    return Division(fitted, judged, judged_name, found.names)


def fit_linear(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None
) -> tuple["Pipeline", str]:
    """Fit a logistic regression on standardised features.

    Args:
        x: features ``[n, D]``.
        y: classes, ``[n]``.
        weights: how much each row counts, ``[n]``; None: all the same.

    Returns:
        The classifier, and a note on an optimiser that has not converged, else an empty text.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    linear = make_pipeline(StandardScaler(), LogisticRegression(max_iter=STEPS))
    given = {f"{name}__sample_weight": weights for name in linear.named_steps}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        linear.fit(x, y, **given)
    converged = not any(issubclass(entry.category, ConvergenceWarning) for entry in caught)
    return linear, "" if converged else f" (not converged after {STEPS} steps)"


def fit_probes(
    features: Iterable[tuple[str, Tensor]], division: Division, neighbours: int
) -> ProbeResult:
    """Fit a logistic regression on standardised features, and kNN by cosine, and judge both.

    Args:
        features: path and features ``[D]`` of images; those that the division does not name are
            ignored.
        division: which images are fitted on and judged.
        neighbours: k of kNN.

    Raises:
        ValueError: too few images, neighbours or classes are left to fit or to judge.
    """
    from sklearn.neighbors import KNeighborsClassifier

    # Vectors and labels, sorted into what is fitted on and what is judged.
    parts = {"fitted": ([], []), "judged": ([], [])}
    for path, vector in features:
        for name, (vectors, labels) in parts.items():
            if path in getattr(division, name):
                vectors.append(vector.float().numpy())
                labels.append(getattr(division, name)[path])
    (x, y), (x_judged, y_judged) = (
        (np.array(vectors), np.array(labels)) for vectors, labels in parts.values()
    )
    if len(x) < neighbours or len(np.unique(y)) < 2 or not len(x_judged):
        raise ValueError(
            f"a probe wants at least {neighbours} images (neighbours) of two classes to fit and "
            f"one to judge; got features of {len(x)} of {len(np.unique(y))} and of {len(x_judged)}"
        )
    linear, note = fit_linear(x, y)
    knn = KNeighborsClassifier(neighbours, metric="cosine").fit(x, y)
    of_linear, of_knn = (
        float((classifier.predict(x_judged) == y_judged).mean()) for classifier in (linear, knn)
    )
    # Labelled images without features, as they could not be read.
    lost = len(division.fitted) + len(division.judged) - len(x) - len(x_judged)
    sizes = (neighbours, len(x), len(x_judged), division.judged_name, len(division.class_names))
    return ProbeResult(of_linear, of_knn, *sizes, note, lost)
