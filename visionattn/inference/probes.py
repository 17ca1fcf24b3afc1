"""Probes of features: a linear probe and kNN on pooled features, and a linear probe of patches
against masks on feature maps.

This module selects the samples, fits and evaluates the classifiers, and formats the results. It
identifies features by the paths of their images; ``data/synthetic_images.py`` labels patches.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from einops import rearrange
from torch import Tensor

from visionattn.data.geometry import Size
from visionattn.data.label_table import read_labels
from visionattn.data.own_images import find_images, find_in_table
from visionattn.data.synthetic_images import BACKGROUND, DISTRACTOR, FIRST_CLASS, patch_labels
from visionattn.inference.image_reading import ReadImages
from visionattn.inference.shards import read_features
from visionattn.inference.synthetic_sources import Division, Drawn
from visionattn.models.pixel_classes import ious_of

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

STEPS = 1000
"""Maximum number of optimizer steps of the linear probe."""
MOST_OF_IMAGE = 50
"""Maximum number of background patches, and of distractor patches, per image for fitting."""

Patches = tuple[np.ndarray, np.ndarray]
"""Features of an image's patches, float32 ``[n, D]``, and their labels, int64 ``[n]``."""
Maps = Callable[[range], Iterator[tuple[int, Tensor]]]
"""``maps(numbers)`` yields index and map ``[D, H, W]`` of each of these images that has one."""


def divide_folder(
    root: str, table: str | None = None, *, val_fraction: float, seed: int
) -> Division:
    """Split a folder of class folders, or of ``train/``, ``val/`` and ``test/`` with class folders,
    or the images of a ``table`` of labels, as training does.

    Raises:
        ValueError, FileNotFoundError: there are no classes, or too few images; one line.
    """
    if table is None:
        found = find_images(root)
    else:
        found = find_in_table(root, read_labels(table, root), "classification")
    parts = found.to_train(val_fraction, seed)
    judged_name = "test" if "test" in parts else "validation"

    def labels(name: str) -> dict[str, int]:
        pairs = zip(parts[name].indices, parts[name].labels, strict=True)
        return {found.source.name(index): int(label) for index, label in pairs}

    return Division(labels("train"), labels(judged_name), judged_name, found.names)


def fit_linear(
    x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None
) -> tuple["Pipeline", str]:
    """Fit a logistic regression on standardized features.

    Args:
        x: features ``[n, D]``.
        y: classes, ``[n]``.
        weights: sample weights, ``[n]``; None: equal.

    Returns:
        The classifier, and a note if the optimizer has not converged, else an empty text.
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


def without_features(lost: int) -> list[str]:
    """Return a line with the number of images without features, or no line."""
    return [f"skipped labeled images without features: {lost}"] if lost else []


def fit_probes(
    features: Iterable[tuple[str, Tensor]], division: Division, neighbours: int
) -> list[str]:
    """Fit a logistic regression on standardized features, and kNN with cosine distance, and
    evaluate both.

    Args:
        features: path and features ``[D]`` of images; images outside the division are ignored.
        division: the images to fit on and to evaluate on.
        neighbours: k of kNN.

    Returns:
        Lines with both accuracies.

    Raises:
        ValueError: too few images, neighbors or classes are left to fit or to evaluate.
    """
    from sklearn.neighbors import KNeighborsClassifier

    sides = [(labels, [], []) for labels in (division.fitted, division.judged)]
    for path, vector in features:
        for labels, vectors, known in sides:
            if path in labels:
                vectors.append(vector.float().numpy())
                known.append(labels[path])
    (x, y), (x_judged, y_judged) = ((np.array(a), np.array(b)) for _, a, b in sides)
    if len(x) < neighbours or len(np.unique(y)) < 2 or not len(x_judged):
        raise ValueError(
            f"expected features of at least {neighbours} images (neighbours) of two classes to "
            f"fit and of one to evaluate, got {len(x)} images of {len(np.unique(y))} classes and "
            f"{len(x_judged)}"
        )
    linear, note = fit_linear(x, y)
    knn = KNeighborsClassifier(neighbours, metric="cosine").fit(x, y)
    right = [100 * (found.predict(x_judged) == y_judged).mean() for found in (linear, knn)]
    line = (
        f"linear probe {right[0]:.2f} %{note}, kNN (k = {neighbours}) {right[1]:.2f} % of "
        f"{len(x_judged)} {division.judged_name} images, fitted on {len(x)} images of "
        f"{len(division.class_names)} classes"
    )
    lost = len(division.fitted) + len(division.judged) - len(x) - len(x_judged)
    return [line, *without_features(lost)]


@dataclass(frozen=True)
class DenseResult:
    """The predictions of a probe on the evaluated patches."""

    confusion: np.ndarray
    """Confusion matrix of patches, true values by row, predictions by column: int64
    ``[values, values]``.
    """
    fitted: int
    """Number of patches used for fitting."""
    note: str
    """Note on the fit; empty if it has converged."""

    def line(self, name: str) -> str:
        """Return a line with the IoUs (for classes the mean) and the accuracy. Values without
        evaluated patches do not count.
        """
        ious = ious_of(self.confusion)
        there = np.flatnonzero(~np.isnan(ious))
        classes = there[there >= FIRST_CLASS]
        groups = [("background", [BACKGROUND]), ("distractors", [DISTRACTOR])]
        groups += [(f"{len(classes)} classes", classes)]
        parts = [
            f"{what} {percent(ious[values].mean())}"
            for what, values in groups
            if len(values) and np.isin(values, there).all()
        ]
        accuracy = float(np.diag(self.confusion).sum() / self.confusion.sum())
        return (
            f"{name}{self.note}: mean IoU {percent(np.nanmean(ious))} ({', '.join(parts)}), "
            f"accuracy {percent(accuracy)}"
        )


def percent(share: float) -> str:
    """Format a share as percent."""
    return f"{100 * share:.2f} %"


def sampled(patches: Patches, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Sample the patches of an image for fitting: all patches of classes, and at most
    ``MOST_OF_IMAGE`` random patches of background and of distractors each.

    Returns:
        Features, values, and weights float32 ``[n]``: the number of patches of the image that each
        stands for, so that the fit represents all of them.
    """
    features, values = patches
    chosen, weights = [], []
    for value in np.unique(values):
        places = np.flatnonzero(values == value)
        kept = places
        if value < FIRST_CLASS and len(places) > MOST_OF_IMAGE:
            kept = rng.choice(places, MOST_OF_IMAGE, replace=False)
        chosen.append(kept)
        weights.append(np.full(len(kept), len(places) / len(kept), np.float32))
    order = np.concatenate(chosen)
    return features[order], values[order], np.concatenate(weights)


def fit_and_judge(
    fitted: Iterable[Patches], judged: Iterable[Patches], values: int, seed: int
) -> DenseResult:
    """Fit a logistic regression on standardized features of patches, and evaluate it on others.

    Args:
        fitted, judged: the patches, image by image; only one image at a time is in memory, in
            addition to the patches chosen by ``sampled``.
        values: number of possible mask values.
        seed: seed of the sampling.

    Raises:
        ValueError: fewer than two values to fit, or nothing to evaluate.
    """
    rng = np.random.default_rng(seed)
    chosen = [sampled(patches, rng) for patches in fitted]
    if len(np.unique(np.concatenate([[], *(known for _, known, _ in chosen)]))) < 2:
        raise ValueError(
            "a dense probe needs patches of two classes; raise --data_args.eval_images"
        )
    x, y, weights = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
    probe, note = fit_linear(x, y, weights)
    confusion = np.zeros((values, values), np.int64)
    for features, known in judged:
        np.add.at(confusion, (known, probe.predict(features)), 1)
    if not confusion.any():
        raise ValueError("no test image has features; check the report of the extraction")
    return DenseResult(confusion, len(y), note)


def patches_of(maps: Iterator[tuple[int, Tensor]], drawn: Drawn) -> Iterator[Patches]:
    """Yield the patches of maps with their labels, without unfilled parts of the canvas."""
    for index, feature_map in maps:
        mask, present = drawn.mask(index)
        rows, columns = feature_map.shape[1:]
        known = patch_labels(mask, (rows, columns), len(drawn.value_names))
        # A partly filled patch counts, as for models that skip padding.
        filled = (-(-present[0] * rows // mask.shape[0]), -(-present[1] * columns // mask.shape[1]))
        part = feature_map[:, : filled[0], : filled[1]].float().numpy()
        yield rearrange(part, "d h w -> (h w) d"), known[: filled[0], : filled[1]].ravel()


def pixel_map(pixels: Tensor, rows: int, columns: int) -> Tensor:
    """Return the pixels ``[C, H, W]`` of each patch as its features ``[D, rows, columns]``."""
    return rearrange(pixels, "c (h p) (w q) -> (c p q) h w", h=rows, w=columns)


def probe_folder(folder: Path, images: ReadImages, drawn: Drawn, seed: int) -> Iterator[str]:
    """Fit on the validation maps of a folder, evaluate on the test maps, and compare with the
    pixels of the patches as features.

    Args:
        folder: folder of the shards.
        images, drawn: the images of the maps.
        seed: seed for sampling patches.

    Yields:
        Lines for people, the result of the maps last.
    """
    numbers = {drawn.name(number): number for number in range(len(drawn))}
    grids: dict[int, Size] = {}

    def maps(wanted: range) -> Iterator[tuple[int, Tensor]]:
        for path, feature_map in read_features(folder, {drawn.name(number) for number in wanted}):
            grids[numbers[path]] = feature_map.shape[1:]
            yield numbers[path], feature_map

    def of_pixels(wanted: range) -> Iterator[tuple[int, Tensor]]:
        for number in wanted:
            if number in grids:
                yield number, pixel_map(images[number].pixels, *grids[number])

    def probe(maps: Maps) -> DenseResult:
        fitted, judged = (
            patches_of(maps(drawn.numbers(split)), drawn) for split in ("validation", "test")
        )
        return fit_and_judge(fitted, judged, len(drawn.value_names), seed)

    found = probe(maps)
    each, judged = len(drawn.numbers("test")), found.confusion.sum()
    yield from without_features(len(drawn) - len(grids))
    yield (
        f"linear probes: fitted on {found.fitted:,} patches of {each} validation images, "
        f"evaluated on {judged:,} of {each} test images"
    )
    yield probe(of_pixels).line("pixels")
    yield found.line("dense probe")
