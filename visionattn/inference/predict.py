"""Classes or numbers of many images as CSV, JSON or a table: ``visionattn predict``.

This module owns the rows, which are written as they come. A file of rows is written completely or
not at all.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visionattn.cli.files import check_free, printable
from visionattn.cli.tables import heading, line
from visionattn.inference.image_batches import FIELDS, Outcome, check_any, say_failed
from visionattn.inference.image_listing import find_images
from visionattn.inference.image_run import ImageRun, read_as_asked
from visionattn.inference.inference_options import PredictOptions
from visionattn.inference.model_opening import Opened, open_model
from visionattn.inference.result_files import write_records, write_table
from visionattn.model_config import VECTOR_TASKS
from visionattn.models.patches import call
from visionattn.models.weights import DataSpec

SUFFIXES = (".csv", ".json")
DIGITS = 6
"""Decimals of a probability."""
USUAL, SHOWN = 5, 3
"""Default number of classes per image: in files, and in the table on standard output."""


def predict(options: PredictOptions, say: Callable[[str], None]) -> None:
    """Write the rows as they come, and report the result; nothing is written before all options are
    checked.

    Args:
        options: result of ``parse_options``.
        say: receives the report and, without an output, the rows.

    Raises:
        ValueError, FileNotFoundError: an option is wrong, a file is in the way, or no image has a
            result.
        OutOfMemory: no image fits into memory.
        DoesNotFit: a batch clearly needs more than the available memory; nothing is written.
        Failed: a process that reads images ended.
    """
    output = Path(options.output) if options.output else None
    if output is None and options.overwrite:
        raise ValueError("overwrite needs --output")
    if output is not None and output.suffix not in SUFFIXES:
        raise ValueError(f"expected --output to end in {' or '.join(SUFFIXES)}, got {output}")
    listing = find_images(options.images or [], options.labels)
    if output is not None:
        check_free(output, options.overwrite)
    opened = open_model(options, classifies=True)
    top_k = count_of_classes(opened, options.top_k, SHOWN if output is None else USUAL)
    images, spec = read_as_asked(options, opened, listing), opened.spec
    run = ImageRun(options, opened, images, call, output=output)
    images.check_asked()
    failed = list[Outcome]()

    def rows() -> Iterator[dict[str, Any]]:
        for outcome in chain.from_iterable(run.outcomes()):
            if outcome.value is None:
                failed.append(outcome)
            yield outcome.row() | listing.cells.get(outcome.path, {}) | result(outcome, spec, top_k)

    with run.begun(say):
        if output is None:
            say(heading(["image", *shown(spec, top_k)]))
            for row in rows():
                run.progress.say(line(cells(row)), say)
        elif output.suffix == ".csv":
            columns = [*FIELDS, *listing.columns, *columns_of(spec, top_k)]
            write_table(output, columns, (flat(row, top_k) for row in rows()))
        else:
            from visionattn.inference.picture_folder import about

            head = {"provenance": about(opened, options)}
            write_records(output, head, "rows", map(json.dumps, rows()))
    done = len(images) - len(failed)
    if output is not None:
        what = "values" if spec.task == "regression" else "classes"
        say(f"{done} of {len(images)} images have {what}: {output}")
        say_failed(failed, say)
    # The file is written anyway: its rows have the status of each image.
    check_any(failed, len(images), "a result")


def result(outcome: Outcome, spec: DataSpec, top_k: int) -> dict[str, Any]:
    """Return the last JSON members of a row: ``classes``, a list of class and probability, the most
    probable first, empty without a result. ``VECTOR_TASKS`` have the columns of ``outputs_of``
    instead.
    """
    several = spec.task in VECTOR_TASKS
    if outcome.value is None:
        return {} if several else {"classes": []}
    if several:
        return outputs_of(spec, outcome.value)
    names, shares = most_probable(outcome.value, top_k, spec.class_names)
    pairs = zip(names, shares.tolist(), strict=True)
    return {
        "classes": [{"class": name, "probability": round(share, DIGITS)} for name, share in pairs]
    }


def shown(spec: DataSpec, top_k: int) -> list[str]:
    """Return the headings of the table on standard output, after the image."""
    usual = [str(i + 1) for i in range(top_k)]
    of_task = {"multilabel": ["label"], "regression": list(spec.output_names)}
    return of_task.get(spec.task, usual)


def columns_of(spec: DataSpec, top_k: int) -> list[str]:
    """Return the columns of CSV after ``FIELDS`` and cells of ``--labels``."""
    if spec.task in VECTOR_TASKS:
        return list(outputs_of(spec, torch.zeros(spec.num_classes)))
    return [f"{what}_{i}" for i in range(1, top_k + 1) for what in ("class", "probability")]


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
