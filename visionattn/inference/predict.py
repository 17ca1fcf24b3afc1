"""Classes of many images as CSV, JSON or a table: the work of ``visionattn predict``.

This module owns the rows and how they are written as they come. A file of rows appears whole or not
at all.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from visionattn.cli.ends import OutOfMemory
from visionattn.cli.files import check_free, printable, write_whole
from visionattn.cli.tables import heading, line, write_rows
from visionattn.inference.image_run import ImageRun
from visionattn.inference.listing import find_images
from visionattn.inference.opening import Opened, open_model
from visionattn.inference.options import InferenceOptions
from visionattn.inference.running import Outcome
from visionattn.models.patches import call

FIELDS = ("path", "status", "reason", "height", "width", "input_height", "input_width")
SUFFIXES = (".csv", ".json")
DIGITS = 6
"""Decimals of a probability."""
SHOWN = 3
"""Classes per image in the table on standard output, where ``top_k`` is left out."""


@dataclass
class PredictOptions(InferenceOptions):
    """Classes of images."""

    top_k: int | None = None
    """Classes per image, the most probable first. None: 5, in a table on standard output 3, or as
    many as there are.
    """


@dataclass(frozen=True)
class Prediction:
    """The classes of one image."""

    outcome: Outcome
    classes: tuple[str, ...]
    """The most probable first; numbers where the classes have no names. Empty where there is no
    result.
    """
    probabilities: tuple[float, ...]

    def flat(self, top_k: int) -> dict[str, Any]:
        """Return a row of CSV: ``FIELDS``, then ``class_1``, ``probability_1`` and so on, with None
        for what does not exist.
        """
        row = {name: getattr(self.outcome, name) for name in FIELDS}
        for i in range(top_k):
            found = i < len(self.classes)
            row[f"class_{i + 1}"] = self.classes[i] if found else None
            row[f"probability_{i + 1}"] = self.probabilities[i] if found else None
        return row

    def nested(self) -> dict[str, Any]:
        """Return a row of JSON: ``FIELDS`` and ``classes``, a list of class and probability."""
        pairs = zip(self.classes, self.probabilities, strict=True)
        listed = [{"class": name, "probability": probability} for name, probability in pairs]
        return {name: getattr(self.outcome, name) for name in FIELDS} | {"classes": listed}

    def cells(self) -> list[str | None]:
        """Return a row for people: the path, then the classes or the reason why there are none."""
        path = printable(self.outcome.path)
        if self.outcome.value is None:
            return [path, printable(f"{self.outcome.status}: {self.outcome.reason}")]
        pairs = zip(self.classes, self.probabilities, strict=True)
        return [path, *(f"{name} {100 * probability:.1f} %" for name, probability in pairs)]


class Predictor:
    """Model and images, after all checks; nothing is written before ``run``.

    Args:
        options: what ``parse_options`` returned.

    Raises:
        ValueError, FileNotFoundError: something is wrong or in the way; one line.
    """

    def __init__(self, options: PredictOptions):
        self.options, self.output = options, Path(options.output) if options.output else None
        if self.output is None and options.overwrite:
            raise ValueError(
                "overwrite replaces the file of --output, which is missing: leave it out"
            )
        if self.output is not None and self.output.suffix not in SUFFIXES:
            raise ValueError(f"--output {self.output} must end in {' or '.join(SUFFIXES)}")
        self.listing = find_images(options.images or [])
        if self.output is not None:
            check_free(self.output, options.overwrite)
        self.opened: Opened = open_model(options, classifies=True)
        usual = SHOWN if self.output is None else 5
        self.top_k = count_of_classes(self.opened, options.top_k, usual)
        self.image_run = ImageRun(options, self.opened, self.listing, call)
        self.image_run.choose_banded(self.output)
        self.image_run.images.check_asked()

    def run(self, say: Callable[[str], None]) -> None:
        """Write a row per image to the output, or print a table, and say what came of it.

        Raises:
            ValueError: none of the images gives a prediction; the rows are there nevertheless.
            OutOfMemory: none of them fits into memory.
            DoesNotFit: a batch clearly takes more memory than there is; nothing is written.
            Failed: a process that reads images ended.
        """
        for note in (*self.opened.notes, *self.image_run.work.lines):
            say(note)
        batch_size = self.image_run.announce(say)
        with self.image_run.banding.at_work():
            self._run(say, batch_size)

    def _run(self, say: Callable[[str], None], batch_size: int) -> None:
        """Do the work of ``run``."""
        counts = {"ok": 0, "other": 0}
        first: list[Outcome] = []

        # Rows are written as they come, so they are counted on their way.
        def counted() -> Iterator[Prediction]:
            outcomes = chain.from_iterable(self.image_run.outcomes(batch_size))
            for prediction in map(self._prediction, outcomes):
                failed = prediction.outcome.value is None
                counts["other" if failed else "ok"] += 1
                if failed and not first:
                    first.append(prediction.outcome)
                yield prediction

        if self.output is None:
            say(heading(["image", *(str(i + 1) for i in range(self.top_k))]))
            for prediction in counted():
                self.image_run.progress.say(line(prediction.cells()), say)
        else:
            self.image_run.banding.say = say
            write_whole(self.output, lambda temporary: self._write(temporary, counted()))
            say(f"{counts['ok']} of {len(self.listing)} images have classes: {self.output}")
        # The file is there all the same: its rows say what happened to each image.
        if not counts["ok"]:
            error = OutOfMemory if first[0].status == "oom" else ValueError
            raise error(
                f"none of the {len(self.listing)} images has a result; the first: {first[0].path}: "
                f"{first[0].reason}"
            )

    def _prediction(self, outcome: Outcome) -> Prediction:
        if outcome.value is None:
            return Prediction(outcome, (), ())
        names = self.opened.spec.class_names
        chosen, probabilities = most_probable(outcome.value, self.top_k, names)
        return Prediction(outcome, chosen, tuple(round(p, DIGITS) for p in probabilities.tolist()))

    def _write(self, path: Path, predictions: Iterator[Prediction]) -> None:
        with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            if self.output.suffix == ".json":
                from visionattn.cli.provenance import provenance

                about = provenance(self.opened.device) | {
                    "model": self.opened.notes,
                    "options": asdict(self.options),
                }
                _write_json(file, predictions, about)
            else:
                _write_csv(file, predictions, self.top_k)


def count_of_classes(opened: Opened, top_k: int | None, usual: int) -> int:
    """Return how many classes to name for an image: ``top_k``, or, where it is None, the usual
    number or as many as there are.

    Raises:
        ValueError: ``top_k`` is below 1 or above the classes of the model, or it has none.
    """
    classes = opened.spec.num_classes
    if classes < 1:
        raise ValueError(f"{opened.name} has no classes to predict")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be above 0, got {top_k}")
    if top_k is not None and top_k > classes:
        raise ValueError(f"top_k {top_k} of a model of {classes} classes")
    return top_k or min(usual, classes)


def most_probable(
    outputs: Tensor, top_k: int, names: Sequence[str]
) -> tuple[tuple[str, ...], Tensor]:
    """Return the classes with the largest shares in the softmax of one image's outputs
    ``[num_classes]``, and these shares ``[top_k]``, the largest first. Classes without names are
    numbers.
    """
    probabilities, classes = torch.softmax(outputs, 0).topk(top_k)
    return tuple(names[i] if names else str(i) for i in classes.tolist()), probabilities


def _write_csv(file: TextIO, predictions: Iterator[Prediction], top_k: int) -> None:
    """Write a row per image as CSV."""
    columns = [
        *FIELDS,
        *(f"{what}_{i + 1}" for i in range(top_k) for what in ("class", "probability")),
    ]
    write_rows(file, columns, (prediction.flat(top_k) for prediction in predictions))


def _write_json(file: TextIO, predictions: Iterator[Prediction], about: dict[str, Any]) -> None:
    """Write ``{"provenance": ..., "rows": [...]}``, a row per line."""
    file.write(f'{{"provenance": {json.dumps(about)},\n"rows": [')
    separator = "\n"
    for prediction in predictions:
        file.write(separator + json.dumps(prediction.nested()))
        separator = ",\n"
    file.write("\n]}\n")
