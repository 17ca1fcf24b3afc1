"""Classes or numbers of many images as CSV, JSON or a table: ``visionattn predict``.

This module owns the rows, which are written as they come. A file of rows is written completely or
not at all.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visionattn.cli.files import check_free, printable
from visionattn.cli.tables import heading, line
from visionattn.inference.image_batches import Outcome, say_failed
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_run import ImageRun, read_as_asked
from visionattn.inference.inference_options import PredictOptions
from visionattn.inference.model_opening import Opened, open_model
from visionattn.inference.result_files import write_records, write_table
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.patches import call
from visionattn.models.weights import DataSpec

FIELDS = ("path", "status", "reason", "height", "width", "input_height", "input_width")
SUFFIXES = (".csv", ".json")
DIGITS = 6
"""Decimals of a probability."""
USUAL, SHOWN = 5, 3
"""Default number of classes per image: in files, and in the table on standard output."""


class Predictor:
    """Model and images, after all checks; nothing is written before ``run``.

    Args:
        options: result of ``parse_options``.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, or a file is in the way; one line.
    """

    def __init__(self, options: PredictOptions):
        self.options, self.output = options, Path(options.output) if options.output else None
        if self.output is None and options.overwrite:
            raise ValueError("overwrite needs --output")
        if self.output is not None and self.output.suffix not in SUFFIXES:
            raise ValueError(
                f"expected --output to end in {' or '.join(SUFFIXES)}, got {self.output}"
            )
        self.listing = find_images(options.images or [], options.labels)
        if self.output is not None:
            check_free(self.output, options.overwrite)
        self.opened: Opened = open_model(options, classifies=True)
        usual = SHOWN if self.output is None else USUAL
        self.top_k = count_of_classes(self.opened, options.top_k, usual)
        images = read_as_asked(options, self.opened, self.listing)
        self.image_run = ImageRun(options, self.opened, images, call, output=self.output)
        images.check_asked()
        self.done, self.failed = 0, list[Outcome]()

    def run(self, say: Callable[[str], None]) -> None:
        """Write the rows as they come, and report the result.

        Raises:
            ValueError: no image has a result.
            OutOfMemory: no image fits into memory.
            DoesNotFit: a batch clearly needs more than the available memory; nothing is written.
            Failed: a process that reads images ended.
        """
        run = self.image_run
        for note in (*self.opened.notes, *run.lines):
            say(note)
        batch_size = run.announce(say)
        with run.banding.at_work():
            rows = map(self._row, chain.from_iterable(run.outcomes(batch_size)))
            if self.output is None:
                say(heading(["image", *self._shown()]))
                for row in rows:
                    run.progress.say(line(cells(row)), say)
            else:
                run.banding.say = say
                self._write(rows)
                what = "values" if self.opened.spec.task == "regression" else "classes"
                say(f"{self.done} of {len(run.images)} images have {what}: {self.output}")
                say_failed(self.failed, len(self.failed), say)
        # The file is written anyway: its rows have the status of each image.
        if not self.done:
            text = f"none of the {len(run.images)} images has a result; first: "
            raise self.failed[0].error(text)

    def _row(self, outcome: Outcome) -> dict[str, Any]:
        """Return a JSON row of ``FIELDS``, cells of ``--labels`` and ``classes``, and count images
        with and without a result.

        ``classes`` is a list of class and probability, the most probable first, empty without a
        result. ``VECTOR_TASKS`` have the columns of ``outputs_of`` instead.
        """
        row = {name: getattr(outcome, name) for name in FIELDS}
        row |= self.listing.cells.get(outcome.path, {})
        several = self.opened.spec.task in VECTOR_TASKS
        row |= {} if several else {"classes": []}
        if outcome.value is None:
            self.failed = self.failed or [outcome]
            return row
        self.done += 1
        if several:
            return row | outputs_of(self.opened.spec, outcome.value)
        names, shares = most_probable(outcome.value, self.top_k, self.opened.spec.class_names)
        row["classes"] = [
            {"class": name, "probability": round(share, DIGITS)}
            for name, share in zip(names, shares.tolist(), strict=True)
        ]
        return row

    def _shown(self) -> list[str]:
        """Return the headings of the table on standard output, after the image."""
        spec = self.opened.spec
        usual = [str(i + 1) for i in range(self.top_k)]
        of_task = {"multilabel": ["label"], "regression": list(spec.output_names)}
        return of_task.get(spec.task, usual)

    def _columns(self) -> list[str]:
        """Return the columns of CSV after ``FIELDS``."""
        spec = self.opened.spec
        if spec.task in VECTOR_TASKS:
            return list(outputs_of(spec, torch.zeros(spec.num_classes)))
        numbers = range(1, self.top_k + 1)
        return [f"{what}_{i}" for i in numbers for what in ("class", "probability")]

    def _write(self, rows: Iterator[dict[str, Any]]) -> None:
        assert self.output is not None
        if self.output.suffix == ".csv":
            columns = [*FIELDS, *self.listing.columns, *self._columns()]
            write_table(self.output, columns, (flat(row, self.top_k) for row in rows))
            return
        from visionattn.cli.provenance import provenance

        about = provenance(self.opened.device) | {"model": self.opened.notes}
        about |= {"options": asdict(self.options)}
        write_records(self.output, {"provenance": about}, "rows", map(json.dumps, rows))


def flat(row: dict[str, Any], top_k: int) -> dict[str, Any]:
    """Return a CSV row: ``FIELDS`` and cells of ``--labels``, then ``class_1``, ``probability_1``
    and so on, None for missing values.
    """
    if "classes" not in row:  # of VECTOR_TASKS
        return row
    found = {name: row[name] for name in row if name in FIELDS or name.startswith("table_")}
    for i, pair in enumerate(row["classes"] or [{"class": None, "probability": None}] * top_k, 1):
        found |= {f"{what}_{i}": pair[what] for what in pair}
    return found


def cells(row: dict[str, Any]) -> list[str]:
    """Return a readable row: the path, then the classes or the reason for their absence."""
    pairs = [
        f"{each['class']} {100 * each['probability']:.1f} %" for each in row.get("classes", [])
    ]
    if "label" in row:
        named = filter(None, row["label"].split(";"))
        told = [f"{name} {100 * row[f'probability_{name}']:.1f} %" for name in named]
        pairs = ["; ".join(told) or "none"]
    pairs += [f"{value:.5g}" for name, value in row.items() if name.startswith("value_")]
    told = pairs or [f"{row['status']}: {row['reason']}"]
    return [printable(each) for each in (row["path"], *told)]


def outputs_of(spec: DataSpec, outputs: Tensor) -> dict[str, Any]:
    """Return the columns of a row of ``VECTOR_TASKS``: for ``multilabel`` the ``label`` as ``a;b``
    and ``probability_<class>``, for ``regression`` ``value_<target>``.
    """
    held, values = all_outputs(spec, outputs)
    named = zip(spec.output_names, values.tolist(), strict=True)
    if spec.task == "regression":
        return {f"value_{name}": float(f"{value:.8g}") for name, value in named}
    row = {"label": ";".join(held)}
    return row | {f"probability_{name}": round(value, DIGITS) for name, value in named}


def all_outputs(spec: DataSpec, outputs: Tensor) -> tuple[tuple[str, ...], Tensor]:
    """Return the classes of one image that reach their thresholds (``regression``: all targets),
    and the result of ``DataSpec.values_of`` for its outputs ``[num_classes]``.
    """
    names, values = spec.output_names, spec.values_of(outputs)
    if spec.task == "multilabel":
        names = tuple(compress(names, spec.holds(values.tolist())))
    return names, values


def count_of_classes(opened: Opened, top_k: int | None, usual: int = USUAL) -> int:
    """Return the number of classes to name per image: ``top_k``, or if None the default number,
    limited by the model's classes.

    Raises:
        ValueError: ``top_k`` is below 1 or above the number of classes, or the model has no
            classes.
    """
    classes = opened.spec.num_classes
    if classes < 1:
        raise ValueError(f"expected a model with classes, got {opened.name}")
    if opened.spec.task in VECTOR_TASKS:
        if top_k is not None:
            raise ValueError(
                f"top_k needs one class per image, got {opened.name} with data.task "
                f"{opened.spec.task}, which prints all outputs; remove it"
            )
        return classes
    if top_k is not None and not 1 <= top_k <= classes:
        raise ValueError(f"expected top_k from 1 to {classes}, the model's classes, got {top_k}")
    return top_k or min(usual, classes)


def most_probable(
    outputs: Tensor, top_k: int, names: Sequence[str]
) -> tuple[tuple[str, ...], Tensor]:
    """Return the classes with the largest softmax probabilities of one image's outputs
    ``[num_classes]``, and these probabilities ``[top_k]``, in descending order.

    Classes without names are numbers.
    """
    probabilities, classes = torch.softmax(outputs, 0).topk(top_k)
    return tuple(names[i] if names else str(i) for i in classes.tolist()), probabilities
