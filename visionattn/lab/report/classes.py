"""What a page shows of classes: who is taken for whom, how often each class is right, and the worst
mistakes. It reads nothing; ``training/mistakes.py`` has the file that all of this comes from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from visionattn.lab.report.runs import Run
from visionattn.lab.report.sameness import best_of, same_data
from visionattn.lab.report.tables import Cell, Table, is_of_pixels
from visionattn.training.mistakes import SMALL_PX, ByClass, Mistake

MOST_IN_MATRIX = 30
"""Of more classes nobody could read a matrix: their most frequent mistakes are listed."""
FEWEST_SHOWN, MOST_LISTED = 20, 1000
"""Of more classes than those of a matrix so many with the least accuracy are shown, and up to so
many when asked for.
"""
MOST_MISTAKES, MOST_PICTURES = 12, 24
"""Mistakes that are shown of a run at most, and of all runs of a page; of each run one at least."""


@dataclass(frozen=True)
class Square:
    """A cell of a confusion matrix."""

    count: int
    right: bool
    depth: int
    """How deep its colour is, in percent: the root of its share of the class, so that a few
    mistakes of many images can be seen.
    """
    title: str


@dataclass(frozen=True)
class Matrix:
    """Which classes were taken for which: a row per class, a column for what was said."""

    names: Sequence[str]
    rows: Sequence[Sequence[Square]]
    totals: Sequence[int]


@dataclass(frozen=True)
class RunClasses:
    """What the best weights of a run say of a split."""

    run: str
    found: ByClass
    matrix: Matrix | None
    """None where there are too many classes."""
    pairs: Table
    """The most frequent mistakes, where there is no matrix."""
    mistakes: Sequence[Mistake]

    @property
    def small(self) -> bool:
        """Whether each pixel of the pictures is to be seen."""
        return all(max(each.size or (0,)) <= SMALL_PX for each in self.mistakes)

    def name(self, number: int) -> str:
        """Return the name of a class."""
        return self.found.name(number)


@dataclass(frozen=True)
class Accuracies:
    """How often each class is right, for runs that were evaluated on the same images."""

    split: str
    runs: Sequence[str]
    summary: str
    shown: Table
    """All classes, or of many those that are right least often."""
    others: Table | None
    """All of many classes."""


@dataclass(frozen=True)
class Classes:
    """The sections of a page about classes."""

    runs: Sequence[RunClasses]
    accuracies: Sequence[Accuracies]
    without: Sequence[str]
    """Runs that classify images, but of whose classes nothing is known."""


def classes_of(runs: Sequence[Run], images: int) -> Classes:
    """Return what is known of the classes of runs.

    Args:
        runs: those of the page.
        images: how many mistakes are shown of each run at most.
    """
    known = [(run, run.by_class) for run in runs if run.by_class is not None]
    most = min(images, MOST_MISTAKES, max(1, MOST_PICTURES // max(1, len(known))))
    shown = [
        RunClasses(run.name, found, matrix_of(found), pairs_of(found), found.mistakes[:most])
        for run, found in known
    ]
    groups: dict[object, list[tuple[Run, ByClass]]] = {}
    for run, found in known:
        # Runs share a table where images and names of classes are the same.
        key = (same_data(run) or run.name, found.split, found.images, tuple(found.class_names))
        groups.setdefault((*key, len(found.classes)), []).append((run, found))
    return Classes(
        shown,
        [accuracies_of(group) for group in groups.values()],
        [run.name for run in runs if run.by_class is None and not is_of_pixels(run)],
    )


def matrix_of(found: ByClass) -> Matrix | None:
    """Return the confusion matrix of at most ``MOST_IN_MATRIX`` classes."""
    number = len(found.classes)
    if number > MOST_IN_MATRIX or not found.complete:
        return None
    counts = [[0] * number for _ in range(number)]
    for label, said, often in found.confusions:
        counts[label][said] = often
    totals = [images for images, _, _ in found.classes]
    for i, (_, right, _) in enumerate(found.classes):
        counts[i][i] = right

    def square(label: int, said: int) -> Square:
        count, total = counts[label][said], totals[label]
        depth = round(100 * math.sqrt(min(1.0, count / total))) if total else 0
        taken = "right" if label == said else f"taken for {found.name(said)}"
        title = f"{found.name(label)}, {taken}: {count:,} of {total:,}"
        return Square(count, label == said, depth, title)

    rows = [[square(label, said) for said in range(number)] for label in range(number)]
    return Matrix([found.name(i) for i in range(number)], rows, totals)


def pairs_of(found: ByClass) -> Table:
    """Return the most frequent mistakes, each with its share of the images of the class."""
    table = Table(["class", "taken for", "times", "of its images"])
    for label, said, often in found.confusions[:FEWEST_SHOWN]:
        total = found.classes[label][0]
        table.rows.append(
            [
                Cell(found.name(label), wide=True),
                Cell(found.name(said), wide=True),
                Cell(f"{often:,}", True),
                Cell(f"{100 * often / total:.1f} %" if total else "", True),
            ]
        )
    return table


def accuracies_of(group: Sequence[tuple[Run, ByClass]]) -> Accuracies:
    """Return a row per class for runs that were evaluated on the same images."""
    first = group[0][1]
    images = [row[0] for row in first.classes]
    shares = [
        [right / own if own else None for own, right, _ in found.classes] for _, found in group
    ]
    means = [mean_of([share[i] for share in shares]) for i in range(len(images))]
    row = partial(row_of, group, shares)
    columns = ["class", "images"]
    if len(group) == 1:
        columns += ["accuracy", "precision", "most often taken for"]
    else:
        columns += [run.name for run, _ in group]
    everything = range(len(images))
    many = len(images) > MOST_IN_MATRIX
    # A class without images is not among the worst.
    worst = sorted(everything, key=lambda i: (means[i] is None, means[i] or 0.0, i))
    shown = worst[:FEWEST_SHOWN] if many else list(everything)
    listed = worst[:MOST_LISTED]
    return Accuracies(
        first.split,
        [run.name for run, _ in group],
        summary_of(means, images),
        Table(columns, [row(i) for i in shown]),
        Table(columns, [row(i) for i in listed]) if many else None,
    )


def row_of(
    group: Sequence[tuple[Run, ByClass]], shares: Sequence[Sequence[float | None]], i: int
) -> list[Cell]:
    """Return the row of a class: its accuracy in each run, the best strong; of a single run also
    how much of what is taken for it is right, and what it is most often taken for.
    """
    found = group[0][1]
    images, right, taken = found.classes[i]
    name = [Cell(found.name(i), wide=True), Cell(f"{images:,}", True)]
    here = [share[i] for share in shares]
    best = best_of(here, [0] * len(here)) if len(set(here)) > 1 else [False] * len(here)
    cells = [
        Cell("" if share is None else f"{100 * share:.1f} %", True, strong)
        for share, strong in zip(here, best, strict=True)
    ]
    if len(group) > 1:
        return name + cells
    worst = next((pair for pair in found.confusions if pair[0] == i), None)
    often = f"({worst[2]:,} of {images:,})".replace(" ", "\N{NO-BREAK SPACE}") if worst else ""
    said = f"{found.name(worst[1])} {often}" if worst else ""
    precision = Cell(f"{100 * right / taken:.1f} %" if taken else "", True)
    return [*name, *cells, precision, Cell(said, wide=True)]


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def summary_of(means: Sequence[float | None], images: Sequence[int]) -> str:
    """Say in a sentence how classes differ: the mean over them, the worst and the best."""
    known = [mean for mean in means if mean is not None]
    lost = len(means) - len(known)
    words = f"{len(known):,} classes" if not lost else f"{len(known):,} of {len(means):,} classes"
    words += f" have images, {min(filter(None, images), default=0):,} to {max(images):,} each"
    if not known:
        return words
    low, high = min(known), max(known)
    return (
        f"{words}; their mean accuracy is {100 * sum(known) / len(known):.1f} %, from "
        f"{100 * low:.1f} to {100 * high:.1f} %"
    )
