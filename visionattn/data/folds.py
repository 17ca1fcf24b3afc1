"""Divide training images into training and validation: by class, by group, or in folds."""

import re
import warnings
from collections.abc import Sequence

import numpy as np

from visionattn.data.digits_and_canvas import stratified_split


def hold_out(
    labels: np.ndarray,
    groups: np.ndarray | None,
    val_fraction: float,
    seed: int,
    fold: tuple[int, int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and of the validation images, sorted; no validation images
    if there are too few.

    Classes have about the same share in both. All images of a group are in one of them.

    Args:
        labels: classes ``[n]``, or other labels ``[n, outputs]``, which are divided at random.
        groups: group of each image, ``[n]``; None: each image is independent.
        val_fraction: share of the validation images; with groups rounded to a half, a third, a
            quarter and so on.
        seed: seed of the division.
        fold: number of the validation fold, from 1, and count of the folds, in place of
            ``val_fraction``; None: no folds.

    Raises:
        ValueError: there are too few images or groups for the folds; one line.
    """
    classes = labels if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    if groups is None and fold is None:
        return stratified_split(classes, val_fraction, seed)
    units = len(labels) if groups is None else len(np.unique(groups))
    most = int(np.unique(classes, return_counts=True)[1].max())
    number, count = fold or (1, min(max(2, round(1 / val_fraction)), units, most))
    if count == 1:
        return np.arange(len(labels)), np.arange(0)
    if count > min(units, most):
        raise ValueError(
            f"too few images for {count} folds: {units} "
            f"{'images' if groups is None else 'groups'}, {most} images in the largest class; use "
            "fewer folds or add images"
        )
    # Importing scikit-learn takes a second.
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    with warnings.catch_warnings():  # a class has fewer images than folds
        warnings.simplefilter("ignore", UserWarning)
        folds = kind(count, shuffle=True, random_state=seed % 2**32)
        return list(folds.split(classes, classes, groups))[number - 1]


def groups_of(paths: Sequence[str], pattern: str) -> np.ndarray:
    """Return the group of each image: the first group of a regular expression that is searched in
    its path, else the whole match.

    Raises:
        ValueError: a path has no match; one line.
    """
    matches = [re.search(pattern, path) for path in paths]
    found = [match and match[min(match.re.groups, 1)] for match in matches]
    if lost := [path for path, group in zip(paths, found, strict=True) if group is None]:
        raise ValueError(
            f"data.group_from {pattern} has no match in {len(lost)} of {len(paths)} paths; first: "
            f"{lost[0]}"
        )
    return np.array(found)
