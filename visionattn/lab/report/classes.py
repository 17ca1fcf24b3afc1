"""What a page shows of classes: who is taken for whom, how often each class is right, and the worst
mistakes. It reads nothing; ``training/mistakes.py`` has the file that all of this comes from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from visionattn.lab.figures import number
from visionattn.lab.report.page_tables import Cell, Table, numeric, percent
from visionattn.lab.report.runs import Run
from visionattn.models.pixel_classes import class_names
from visionattn.models.weights import described, read_metadata
from visionattn.training.mistakes import SMALL_PX, ByClass, Mistake

MOST_IN_MATRIX = 30
"""Of more classes nobody could read a matrix: their most frequent mistakes are listed."""
MOST_PAIRS, MOST_LISTED = 20, 1000
"""Rows of the tables of mistakes and of classes; of more classes those that are right least often
are listed.
"""
MOST_MISTAKES, MOST_PICTURES = 12, 24
"""Mistakes that are shown of a run at most, and of all runs of a page; of each run one at least."""


@dataclass(frozen=True)
class RunClasses:
    """What the best weights of a run say of a split."""

    run: str
    found: ByClass
    matrix: Sequence[Sequence[int]] | None
    """How many images of each class, a row, were taken for which; None where there are too many."""
    pairs: Table
    """The most frequent mistakes, where there is no matrix."""
    mistakes: Sequence[Mistake]

    @property
    def small(self) -> bool:
        """Whether each pixel of the pictures is to be seen."""
        return all(max(each.size or (0,)) <= SMALL_PX for each in self.mistakes)


def classes_of(runs: Sequence[Run], images: int) -> list[RunClasses]:
    """Return what is known of the classes of runs.

    Args:
        runs: the runs of the page.
        images: how many mistakes are shown of each run at most.
    """
    known = [(run, run.by_class) for run in runs if run.by_class is not None]
    most = min(images, MOST_MISTAKES, max(1, MOST_PICTURES // max(1, len(known))))
    return [
        RunClasses(run.name, found, matrix_of(found), pairs_of(found), found.mistakes[:most])
        for run, found in known
    ]


def matrix_of(found: ByClass) -> list[list[int]] | None:
    """Return the confusion matrix of at most ``MOST_IN_MATRIX`` classes."""
    if len(found.classes) > MOST_IN_MATRIX or not found.complete:
        return None
    matrix = np.diag([right for _, right, _ in found.classes])
    for label, said, often in found.confusions:
        matrix[label, said] = often
    return matrix.tolist()


def pairs_of(found: ByClass) -> Table:
    """Return the most frequent mistakes, each with its share of the images of the class."""
    rows = [
        [Cell(found.name(label)), Cell(found.name(said)), numeric(often),
         numeric(often / found.classes[label][0], percent)]
        for label, said, often in found.confusions[:MOST_PAIRS]
    ]  # fmt: skip
    return Table(["class", "taken for", "times", "of its images"], rows)


def class_tables(shown: Sequence[RunClasses]) -> list[Table]:
    """Return how often each class is right, a column per run of the same images and classes; of a
    single run also how much of what is taken for it is right, and what it is most often taken for.
    """
    groups: dict[tuple, list[RunClasses]] = {}
    for one in shown:
        images = tuple(images for images, _, _ in one.found.classes)
        groups.setdefault((one.found.split, images, *one.found.class_names), []).append(one)
    tables = []
    for (split, images, *_), group in groups.items():
        first = group[0].found
        table = Table(["class", f"{split} images", *(one.run for one in group)])
        if len(group) == 1:
            table.columns = [*table.columns, "precision", "most often taken for"]
        worst = {pair[0]: pair for pair in reversed(first.confusions)}  # most frequent come first
        rights = [[one.found.classes[i][1] for one in group] for i in range(len(images))]
        order = list(range(len(images)))
        if len(images) > MOST_IN_MATRIX:  # classes without images come last
            order.sort(key=lambda i: sum(rights[i]) / images[i] if images[i] else math.inf)
        for i in order[:MOST_LISTED]:
            row = [Cell(first.name(i)), numeric(images[i])]
            row += [share(right, images[i]) for right in rights[i]]
            if len(group) == 1:
                _, said, often = worst.get(i, (i, i, 0))
                mistake = Cell(f"{first.name(said)} ({often:,})") if often else Cell()
                row += [share(rights[i][0], first.classes[i][2]), mistake]
            table.rows.append(row)
        tables.append(table)
    return tables


def share(count: int, total: int) -> Cell:
    """Return the cell of a share in %, empty where there is nothing to share."""
    return numeric(count / total if total else None, percent)


def iou_table(runs: Sequence[Run]) -> Table | None:
    """Return the intersection over union of each class, a column for each run that has it, of the
    test images or, where there are none, of the validation images; None where no run has it.
    """
    found = {run: run.result.get("test_ious") or run.result.get("validation_ious") for run in runs}
    columns = {run: ious for run, ious in found.items() if isinstance(ious, list)}
    if not columns:
        return None
    known, rows = max(map(names_of, columns), key=len), []
    for i, ious in enumerate(zip_longest(*columns.values())):
        name = known[i] if i < len(known) else str(i)
        rows.append([Cell(name), *(numeric(number(iou), percent) for iou in ious)])
    return Table(["class", *(run.name for run in columns)], rows)


def names_of(run: Run) -> Sequence[str]:
    """Return the names of a run's classes, as its weights say them; none where they do not."""
    try:
        return class_names(described(read_metadata(run.weights), run.weights)[2])
    except (ValueError, OSError):
        return ()
