"""Write the predictions of a split to TensorBoard: example pictures, the confusion matrix and
precision-recall curves.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from visionattn.model_config import VECTOR_TASKS
from visionattn.models.pixel_classes import striped
from visionattn.models.weights import DataSpec
from visionattn.training.evaluate import MOST_CURVES, Example, Tally
from visionattn.training.output_scores import decided, in_words
from visionattn.training.picture_sheet import (
    SheetPart,
    SheetPicture,
    draw_confusion,
    draw_sheet,
    visible,
)

MOST_PX = 640
"""Maximum width of a sheet in pixels; long captions may exceed it."""
MASK_PX = 256
"""Maximum side of a drawn mask in pixels."""


def add_predictions(
    events: Any,
    split: str,
    step: int,
    spec: DataSpec,
    tally: Tally,
    rows: np.ndarray,
    probabilities: np.ndarray,
) -> None:
    """Write the predictions of a split as TensorBoard events: the example pictures, and for at most
    ``MOST_CURVES`` classes the confusion matrix and a precision-recall curve of each class.

    Args:
        events: a ``SummaryWriter``.
        split: the name of the split.
        step: the step of the events.
        spec: the specification of the images.
        tally: the record of the first process.
        rows: ``Tally.rows`` of all processes.
        probabilities: ``Tally.probabilities`` of all processes, in the order of ``rows``.
    """
    if tally.examples:
        add_picture(events, f"{split}/examples", draw_examples(tally.examples, split, spec), step)
    if spec.num_classes > MOST_CURVES:
        return
    names, confusion = spec.output_names, tally.confusion
    classes = np.arange(spec.num_classes)
    if spec.task in VECTOR_TASKS:
        labels, probabilities, _ = np.split(rows, [len(classes), 2 * len(classes)], 1)
    elif len(probabilities):
        known, said = rows[:, :2].astype(np.int64).T
        confusion = np.zeros((len(classes), len(classes)), np.int64)
        np.add.at(confusion, (known, said), 1)
        labels = known[:, None] == classes
    if len(probabilities) and spec.task != "regression":
        for name, known, found in zip(names, labels.T, probabilities.T, strict=True):
            counted = np.isfinite(known)
            tag = f"precision_recall_{split}/{name}"
            events.add_pr_curve(tag, known[counted], found[counted], step)
    if confusion is not None:
        add_picture(events, f"{split}/confusion", draw_confusion(confusion, names), step)


def add_picture(events: Any, tag: str, picture: Image.Image, step: int) -> None:
    """Write a picture as an event."""
    events.add_image(tag, np.asarray(picture), step, dataformats="HWC")


def draw_examples(examples: Sequence[Example], split: str, spec: DataSpec) -> Image.Image:
    """Draw images with their true and their predicted class, or with both masks."""
    if spec.task == "segmentation":
        pictures = [each for example in examples for each in with_masks(example, spec)]
        columns = 6
    else:
        pictures = [with_outputs(example, spec) for example in examples]
        columns = 4
    part = SheetPart(split, f"{len(examples)} images", pictures)
    return draw_sheet([part], most_px=MOST_PX, columns=columns)


def with_outputs(example: Example, spec: DataSpec) -> SheetPicture:
    """Return an image with its label, and below it the prediction."""
    label, output, names = example.label, example.output, spec.output_names
    if spec.task in VECTOR_TASKS:
        labels = label.numpy(), decided(spec, output.numpy())
        lines = [in_words(spec, each) for each in labels]
    else:
        said = int(output.argmax())
        lines = [names[int(label)], f"{names[said]}, {output.softmax(0)[said]:.0%}"]
    captions = f"true: {lines[0]}", f"predicted: {lines[1]}"
    return SheetPicture(visible(example.image), tuple(example.image.shape[1:]), captions)


def with_masks(example: Example, spec: DataSpec) -> list[SheetPicture]:
    """Return an image, its mask and the predicted mask."""
    pixels = {"image": visible(example.image)}
    stride = -(-max(example.label.shape) // MASK_PX)
    for name, mask in {"mask": example.label, "prediction": example.output}.items():
        pixels[name] = striped(mask[::stride, ::stride].numpy(), spec)
    return [SheetPicture(values, values.shape[:2], (name,)) for name, values in pixels.items()]
