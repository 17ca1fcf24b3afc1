"""Divide training images into training and validation: by class, by group, or in folds."""

import re
import warnings
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from visionattn.data.embedded import stratified_split

FINEST = Fraction(1, 20)
"""Smallest share, and step of shares, of images held out by group."""


def hold_out(
    labels: np.ndarray,
    groups: np.ndarray | None,
    val_fraction: float,
    seed: int,
    fold: tuple[int, int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and of the validation images, sorted.

    Classes have about the same share in both. All images of a group are in one of them.

    Args:
        labels: classes ``[n]``, or other labels ``[n, outputs]``, which are divided at random.
        groups: group of each image, ``[n]``; None: each image is independent.
        val_fraction: share of the validation images, with groups rounded to ``FINEST`` or coarser.
        seed: seed of the division.
        fold: number, from 1, and count of the folds, the first of which is the validation in place
            of ``val_fraction``; None: no folds.

    Raises:
        ValueError: there are too few images or groups; one line.
    """
    classes = labels if labels.ndim == 1 else np.zeros(len(labels), np.int64)
    if groups is None and fold is None:
        return stratified_split(classes, val_fraction, seed)
    independent = len(labels) if groups is None else len(np.unique(groups))
    most = int(np.unique(classes, return_counts=True)[1].max())
    if fold is not None:
        number, count = fold
    else:
        share = Fraction(val_fraction).limit_denominator(FINEST.denominator)
        share = min(max(share, FINEST), 1 - FINEST)
        count = max(2, min(share.denominator, independent, most))
    if count > min(independent, most):
        unit = "images" if groups is None else "groups"
        raise ValueError(
            f"{independent} {unit}, and {most} images of the most frequent class, are too few for "
            f"{count} parts; add some, or take fewer folds or other groups"
        )
    folds = _folds(classes, groups, count, seed)
    if fold is not None:
        held = folds == number - 1
    else:
        held = folds < min(max(1, round(share * count)), count - 1)
    return np.flatnonzero(~held), np.flatnonzero(held)


def _folds(classes: np.ndarray, groups: np.ndarray | None, count: int, seed: int) -> np.ndarray:
    """Return the fold of each image, from 0."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    found = np.empty(len(classes), np.int64)
    with warnings.catch_warnings():  # a class with fewer images than folds
        warnings.simplefilter("ignore", UserWarning)
        divided = kind(count, shuffle=True, random_state=seed % 2**32)
        for number, (_, held) in enumerate(divided.split(classes, classes, groups)):
            found[held] = number
    return found


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
            f"data.group_from {pattern} has no match in {len(lost)} of {len(paths)} paths; the "
            f"first: {lost[0]}"
        )
    return np.array(found)
