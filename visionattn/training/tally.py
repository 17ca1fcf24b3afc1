"""What a model says of each image of an evaluation: how often which class is taken for which, and
its worst mistakes. It knows neither files nor pictures.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MOST_MISTAKES = 12
"""How many mistakes are kept."""


class Wrong(NamedTuple):
    """An image that a model gets wrong."""

    loss: float
    """Its cross-entropy, in nats, by which mistakes are compared."""
    number: int
    """Its number in the data set; -1 where images have none."""
    label: int
    """Its class."""
    said: int
    """The class that has the largest output."""
    probability: float
    """That of the latter, in [0, 1]."""


@dataclass(frozen=True)
class Counts:
    """What the images of an evaluation come to."""

    pairs: np.ndarray
    """int64 ``[n, 3]``: class, the one that was said, and how often, in the order of the two."""
    worst: list[Wrong]
    """The worst mistakes, the worst one first."""


class Tally:
    """Note what a model says of images, in the order in which a process sees them."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, labels: Tensor, said: Tensor, logits: Tensor) -> None:
        """Note a batch.

        Args:
            labels: the classes, int64 ``[B]``.
            said: those that have the largest outputs, int64 ``[B]``.
            logits: the outputs, ``[B, classes]``.
        """
        # All stays on the device until the end: reading each would wait for the device.
        classes = torch.stack([labels, said], 1)
        self._parts.append((classes, logits.log_softmax(1).gather(1, classes)))

    @property
    def empty(self) -> bool:
        """Tell whether nothing was noted."""
        return not self._parts

    def count(self, numbers: Sequence[int] | None) -> Counts:
        """Count what was noted.

        Args:
            numbers: of the images in their data set, in the order in which they were noted; None
                where they have none.
        """
        if self.empty:
            return Counts(np.zeros((0, 3), np.int64), [])
        classes, logs = (torch.cat(parts).cpu().numpy() for parts in zip(*self._parts, strict=True))
        found, counts = np.unique(classes, axis=0, return_counts=True)
        wrong = np.flatnonzero(classes[:, 0] != classes[:, 1])
        # Of equal losses the first image counts.
        chosen = wrong[np.argsort(logs[wrong, 0], kind="stable")[:MOST_MISTAKES]]
        worst = [
            Wrong(
                -float(logs[i, 0]),
                -1 if numbers is None else int(numbers[i]),
                int(classes[i, 0]),
                int(classes[i, 1]),
                float(np.exp(logs[i, 1])),
            )
            for i in chosen
        ]
        return Counts(np.column_stack([found, counts]).astype(np.int64), worst)


def merged(parts: Sequence[Counts]) -> Counts:
    """Return the counts of several processes together, each of which saw other images."""
    pairs = np.concatenate([part.pairs for part in parts])
    found, places = np.unique(pairs[:, :2], axis=0, return_inverse=True)
    counts = np.zeros(len(found), np.int64)
    np.add.at(counts, places.reshape(-1), pairs[:, 2])
    worst = sorted(
        (wrong for part in parts for wrong in part.worst),
        key=lambda wrong: (-wrong.loss, wrong.number),
    )
    return Counts(np.column_stack([found, counts]), worst[:MOST_MISTAKES])
