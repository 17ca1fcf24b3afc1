"""Evaluate a model on images: accuracy or intersection over union, and loss."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from visionattn.model_config import VECTOR_TASKS
from visionattn.models.devices import autocast
from visionattn.models.patches import in_eval, takes_sizes
from visionattn.models.pixel_classes import average_precisions_of, ious_of
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig
from visionattn.training.distributed import Processes
from visionattn.training.objectives import MOST_CURVES, Objective, objective_of
from visionattn.training.output_scores import OutputScores, scores_of

if TYPE_CHECKING:  # measuring models must not require libraries that read images
    from visionattn.data.batches import Batch


@dataclass(frozen=True)
class Evaluation:
    """The result of a model on a set of images."""

    images: int
    """Number of evaluated images."""
    loss: float
    """Mean loss: cross-entropy in nats for classes, bits per dimension for image generation."""
    accuracy: float | None
    """Accuracy of images, or of pixels, in [0, 1]; None if images have no classes or other classes
    than the model.
    """
    top5: float | None
    """Top-5 accuracy, in [0, 1]; None for at most five classes."""
    images_per_second: float
    """Throughput of the model without data loading, in images per second, summed over processes.
    The first of several batches is not timed.
    """
    mean_iou: float | None = None
    """For segmentation, the mean of ``ious`` over the classes present in the masks."""
    ious: tuple[float | None, ...] | None = None
    """Intersection over union of each class, in [0, 1]; None for a class in no mask."""
    average_precisions: tuple[float | None, ...] | None = None
    """Average precision of each class over all pixels, in [0, 1], from the bins of
    ``score_counts``; None for a class in no mask, and for more than ``MOST_CURVES`` classes.
    """
    f1: float | None = None
    """Macro F1: the mean F1 of the classes that are labels or predictions, in [0, 1]."""
    only: int | None = None
    """The class, if all predictions have the same one and labels do not; else None."""

    @property
    def score(self) -> float | None:
        """Return the usual metric of the task: mean IoU of pixels or accuracy of images."""
        return self.accuracy if self.mean_iou is None else self.mean_iou

    def value(self, measure: str) -> float | None:
        """Return a metric by its name: ``accuracy``, ``mean IoU`` or ``F1``."""
        return getattr(self, measure.lower().replace(" ", "_"))


@dataclass(frozen=True)
class OutputEvaluation(Evaluation):
    """The result of a model of ``VECTOR_TASKS`` on a set of images."""

    outputs: OutputScores = field(kw_only=True)
    """The metrics of all outputs."""

    def value(self, measure: str) -> float | None:
        """Return a metric by its name in ``OutputScores.means``."""
        return self.outputs.means[measure]


EXAMPLES, MASKED_EXAMPLES = 8, 4
"""Maximum number of images that a ``Tally`` keeps, and of images with masks."""


class Example(NamedTuple):
    """An image with its prediction, on the CPU."""

    image: Tensor
    """``[C, H, W]``, as in ``Batch``, without padding."""
    label: Tensor
    """Its class ``[]``, or the mask ``[H, W]``."""
    output: Tensor
    """Outputs ``[classes]``, or the predicted classes of pixels ``[H, W]``."""


class _Rows:
    """The rows of all batches, in one tensor that grows on their device.

    Small tensors kept after each batch lie between the large ones of forward passes, whose memory
    the allocator of a CPU then cannot use again: 8 to 13 MiB per batch of 16 images with 1,024
    tokens.
    """

    def __init__(self) -> None:
        self._kept = torch.zeros(0)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        start, self.count = self.count, self.count + len(rows)
        if not start or self.count > len(self._kept):
            grown = rows.new_zeros(2 * self.count, *rows.shape[1:])
            if start:
                grown[:start] = self._kept[:start]
            self._kept = grown
        self._kept[start : self.count] = rows

    def tensor(self) -> Tensor:
        return self._kept[: self.count]


class Tally:
    """Record the predictions of a model, in the order in which a process evaluates images.

    Args:
        values: number of values that are recorded for each image.

    Attributes:
        examples: some of the first images of this process.
        confusion: for segmentation, the counts of ``confusion_of`` over all processes.
    """

    def __init__(self, values: int = 4) -> None:
        self._labels, self._found, self._probabilities = _Rows(), _Rows(), _Rows()
        self._values = values
        self.examples: list[Example] = []
        self.confusion: np.ndarray | None = None

    @classmethod
    def of(cls, spec: DataSpec) -> "Tally":
        """Return an empty record for images of a specification."""
        return cls(2 * spec.num_classes) if spec.task in VECTOR_TASKS else cls()

    def add_values(self, labels: Tensor, values: Tensor) -> None:
        """Record a batch: labels ``[B, K]``, and the result of ``DataSpec.values_of``."""
        self._labels.add(labels)
        self._found.add(values)

    def add(self, labels: Tensor, said: Tensor, logits: Tensor) -> None:
        """Record a batch.

        Args:
            labels: the classes, int64 ``[B]``.
            said: the predicted classes, int64 ``[B]``.
            logits: the outputs, ``[B, classes]``.
        """
        # All values stay on the device until the end: reading each would wait for the device.
        classes = torch.stack([labels, said], 1)
        self._labels.add(classes)
        self._found.add(logits.log_softmax(1).gather(1, classes))
        if logits.shape[1] <= MOST_CURVES:
            self._probabilities.add(logits.softmax(1))

    def show(self, images: Tensor, labels: Tensor, sizes: Tensor | None, outputs: Tensor) -> None:
        """Keep the first images as examples, equally many of each class if images have classes.

        Args:
            images: as in ``Batch``.
            labels: as in ``Batch``, on the CPU.
            sizes: as in ``Batch``.
            outputs: outputs ``[B, classes]``, or the predicted classes of pixels ``[B, H, W]``.
        """
        if images.dtype == torch.float16:  # feature maps
            return
        most = EXAMPLES if outputs.ndim == 2 else MASKED_EXAMPLES
        most_of_class = math.ceil(EXAMPLES / outputs.shape[1])
        for i in range(len(images)):
            if len(self.examples) == most:
                return
            same = [x for x in self.examples if labels.ndim == 1 and x.label == labels[i]]
            if len(same) == most_of_class:
                continue
            height, width = images.shape[2:] if sizes is None else sizes[i].tolist()
            mask = slice(height), slice(width)
            # Clones, because views would keep the whole batch in memory.
            parts = (each[i].cpu().clone() for each in (images, labels, outputs))
            self.examples.append(Example(*(x[..., *mask] if x.ndim > 1 else x for x in parts)))

    def probabilities(self) -> np.ndarray:
        """Return the probability of each class for each image, float32 ``[N, classes]``, in the
        order of ``rows``; empty for more than ``MOST_CURVES`` classes.
        """
        return self._probabilities.tensor().cpu().float().numpy()

    def rows(self, numbers: Sequence[int] | None) -> np.ndarray:
        """Return a row for each image, float64 ``[N, 5]``: class, predicted class, the log
        probability of each, and the index of the image in the dataset. With ``add_values``, the
        rows are labels, values and the index, ``[N, 2 K + 1]``.

        Args:
            numbers: the indices of the recorded images, in order; None: unknown, -1 in the rows.
        """
        if not self._labels.count:
            return np.zeros((0, self._values + 1))
        classes, logs = (each.tensor().cpu().numpy() for each in (self._labels, self._found))
        order = np.full(len(classes), -1) if numbers is None else np.asarray(numbers)
        return np.column_stack([classes, logs, order]).astype(np.float64)


def evaluate(
    model: nn.Module,
    batches: Iterable["Batch"],
    spec: DataSpec,
    *,
    device: torch.device,
    amp: str = "none",
    processes: Processes | None = None,
    objective: Objective | None = None,
    tally: Tally | None = None,
) -> Evaluation:
    """Evaluate the model in eval mode on batches, counting each image once, and restore its mode.

    Args:
        model: on ``device``; each of several processes has the whole model, or a model for its rows
            of each image (``per_image``).
        batches: the images, or this process's part of them.
        spec: the specification of the images.
        device: device of the model.
        amp: mixed precision, as for ``autocast``.
        processes: the processes with the other parts; all get the same result and the same error.
        objective: the objective to evaluate; None: the classes of the images.
        tally: records the prediction for each image of this process, if the images have the classes
            of the model; the result of ``Tally.of``.

    Raises:
        ValueError: there are no images.
    """
    processes = processes or Processes()
    objective = objective or objective_of(spec, OptimConfig())
    depth = min(5, spec.num_classes)
    tally = Tally.of(spec) if tally is None and spec.task in VECTOR_TASKS else tally
    with in_eval(model):

        def work() -> tuple[tuple[float, ...], Tensor]:
            return _sums(model, batches, spec, device, amp, depth, objective, tally)

        # Processes that share an image communicate as they work.
        own, scores = work() if processes.per_image > 1 else processes.together(work)
    total = processes.sum(*own)
    if processes.per_image > 1:  # they count the same images
        total = [each / processes.per_image for each in total]
    images, loss, correct, among_five, named, images_per_second, *counts = total
    if not images:
        raise ValueError("there are no images to evaluate")
    if spec.task == "segmentation":
        if tally is not None:
            tally.confusion = np.array(counts, dtype=np.int64).reshape(spec.num_classes, -1)
        found = _of_pixels(int(images), loss / images, images_per_second, counts)
        parts = [each for each in processes.gather(scores) if len(each)]
        curves = _known(average_precisions_of(sum(parts).numpy())) if parts else None
        return replace(found, average_precisions=curves)
    if spec.task in VECTOR_TASKS:
        rows = np.concatenate(processes.gather(tally.rows(None)))
        labels, values, _ = np.split(rows, [spec.num_classes, 2 * spec.num_classes], 1)
        known = int(images), loss / images, None, None, images_per_second
        return OutputEvaluation(*known, outputs=scores_of(spec, labels, values))
    accuracy = correct / images if named else None
    top5 = among_five / images if named and spec.num_classes > depth else None
    f1, only = _by_class(*np.array(counts).reshape(3, -1)) if named else (None, None)
    return Evaluation(
        int(images), loss / images, accuracy, top5, images_per_second, f1=f1, only=only
    )


def _by_class(
    labels: np.ndarray, said: np.ndarray, right: np.ndarray
) -> tuple[float | None, int | None]:
    """Return ``f1`` and ``only`` of an evaluation, from the number of labels, of predictions and of
    correct predictions of each class.
    """
    both = labels + said
    if not both.any():
        return None, None
    f1 = (2 * right[both > 0] / both[both > 0]).mean()
    alone = np.count_nonzero(said) == 1 and np.count_nonzero(labels) > 1
    return float(f1), int(said.argmax()) if alone else None


def _of_pixels(
    images: int, loss: float, images_per_second: float, counts: list[float]
) -> Evaluation:
    """Return the evaluation from the counts of ``confusion_of``, row by row."""
    classes = math.isqrt(len(counts))
    confusion = np.array(counts).reshape(classes, classes)
    ious = ious_of(confusion)
    counted = confusion.sum()
    f1, only = _by_class(confusion.sum(1), confusion.sum(0), np.diag(confusion))
    return Evaluation(
        images,
        loss,
        float(np.diag(confusion).sum() / counted) if counted else None,
        None,
        images_per_second,
        float(np.nanmean(ious)) if counted else None,
        _known(ious),
        f1=f1,
        only=only,
    )


def _known(values: np.ndarray) -> tuple[float | None, ...]:
    """Replace NaN by None."""
    return tuple(None if math.isnan(value) else float(value) for value in values)


@torch.inference_mode()
def _sums(
    model: nn.Module,
    batches: Iterable["Batch"],
    spec: DataSpec,
    device: torch.device,
    amp: str,
    depth: int,
    objective: Objective,
    tally: Tally | None,
) -> tuple[tuple[float, ...], Tensor]:
    """Return two parts. First: the number of images; the sums of losses, of correct predictions and
    of top-``depth`` predictions; the number of images with classes of the model; the throughput;
    and counts, row by row (of ``confusion_of`` for segmentation, else labels, predictions and
    correct predictions of each class). Second: the sums of ``score_counts``, with no classes if
    there are none.
    """
    times: list[tuple[int, float]] = []
    # Sums stay on the device until the end: reading each would wait for the device.
    parts = _Rows()
    parts.add(torch.zeros(1, 4, device=device))
    classes = spec.num_classes
    rows = classes if spec.task == "segmentation" else 3
    counts = torch.zeros(rows, classes, dtype=torch.int64, device=device)
    scores = counts.new_zeros(0)
    leaves_out = takes_sizes(model)
    for images, known, sizes, *_ in batches:
        start = time.perf_counter()
        labels = known.to(device, non_blocking=True)
        with autocast(device, amp):
            inputs = spec.prepare(images.to(device, non_blocking=True))
            judged = objective.judge(model, inputs, sizes if leaves_out else None, labels)
        found = torch.zeros(4, device=device)
        found[0] = judged.loss
        if judged.logits is not None:
            named = judged.logits.topk(depth, dim=1).indices
            hits = named == labels[:, None]
            if tally is not None:
                tally.add(labels, named[:, 0], judged.logits)
            found[1], found[2], found[3] = hits[:, 0].sum(), hits.sum(), len(labels)
            of_class = (labels, named[:, 0], labels[hits[:, 0]])
            counts += torch.stack([each.bincount(minlength=classes) for each in of_class])
        if judged.confusion is not None:
            counts += judged.confusion
        if judged.scores is not None:
            scores = judged.scores + (scores if len(scores) else 0)
        if judged.values is not None:
            tally.add_values(labels, judged.values)
        for outputs in (judged.logits, judged.masks, judged.values):
            if tally is not None and outputs is not None:
                tally.show(images, known, sizes, outputs)
        parts.add(found[None])
        # A GPU still computes after a call has returned.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((len(labels), time.perf_counter() - start))
    # The first batch, with the start-up of libraries, is timed only if there is no other.
    timed, seconds = (sum(each) for each in zip(*(times[1:] or times or [(0, 0.0)]), strict=True))
    images_seen = sum(count for count, _ in times)
    sums = parts.tensor().cpu().double().sum(0).tolist()
    speed = timed / max(seconds, 1e-9)
    return (images_seen, *sums, speed, *counts.flatten().tolist()), scores.cpu()
