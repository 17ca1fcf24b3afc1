"""Accuracy or intersection over union, and loss, of a model on images, each counted once."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from visionattn.models.machine import autocast
from visionattn.models.patches import in_eval, takes_sizes
from visionattn.models.pixel_classes import ious_of
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig
from visionattn.training.distributed import Processes
from visionattn.training.objectives import Objective, objective_of

if TYPE_CHECKING:  # where models alone are measured, no reader of images is installed
    from visionattn.data.batches import Batch


@dataclass(frozen=True)
class Evaluation:
    """What a model does on a set of images."""

    images: int
    """Images seen."""
    loss: float
    """Mean loss; of classes the cross-entropy, in nats; of images that are written, bits per
    dimension.
    """
    accuracy: float | None
    """Share of images, or of pixels, whose class has the largest output, in [0, 1]; None where
    images have no classes, or others than the model.
    """
    top5: float | None
    """Share of images whose class is among the five largest outputs; None where there are no more
    than five classes.
    """
    images_per_second: float
    """Images through the model per second, without loading them. The first batch does not count
    where there are more. On several processes it is the sum over them.
    """
    mean_iou: float | None = None
    """Where pixels have classes, the mean of ``ious`` over the classes that masks have."""
    ious: tuple[float | None, ...] | None = None
    """Intersection over union of each class, in [0, 1]; None where no mask has it."""

    @property
    def score(self) -> float | None:
        """Return the figure by which weights are chosen: mean IoU of pixels, accuracy of images."""
        return self.accuracy if self.mean_iou is None else self.mean_iou


class Tally:
    """Note what a model says of images, in the order in which a process sees them."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, labels: Tensor, said: Tensor, logits: Tensor) -> None:
        """Note a batch.

        Args:
            labels: the classes, int64 ``[B]``.
            said: the classes with the largest outputs, int64 ``[B]``.
            logits: the outputs, ``[B, classes]``.
        """
        # All stays on the device until the end: reading each would wait for the device.
        classes = torch.stack([labels, said], 1)
        self._parts.append((classes, logits.log_softmax(1).gather(1, classes)))

    def rows(self, numbers: Sequence[int] | None) -> np.ndarray:
        """Return a row for each image, float64 ``[N, 5]``: class, the class that was said, the log
        of the probability of each of the two, and the image's number in the data set.

        Args:
            numbers: in the order in which images were noted; None where they have none, which
                becomes -1.
        """
        if not self._parts:
            return np.zeros((0, 5))
        classes, logs = (torch.cat(parts).cpu().numpy() for parts in zip(*self._parts, strict=True))
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
    """Run the model in eval mode over batches of images, and put it back into the mode that it was
    in.

    Args:
        model: on ``device``; on several processes each has the whole model, or one for its rows of
            each image (``per_image``).
        batches: the images, or the part of them that this process takes.
        spec: what the images are.
        device: where to compute.
        amp: precision, as ``autocast`` takes it.
        processes: those that take the other parts; all get the same result, and the same error.
        objective: what the model is judged by; None: the classes of the images.
        tally: notes what the model says of each image that this process takes, where images have
            the classes of its outputs.

    Raises:
        ValueError: there are no images.
    """
    processes = processes or Processes()
    objective = objective or objective_of(spec, OptimConfig())
    depth = min(5, spec.num_classes)
    with in_eval(model):

        def work() -> tuple[float, ...]:
            return _sums(model, batches, spec, device, amp, depth, objective, tally)

        # Processes that share an image speak with each other as they work.
        own = work() if processes.per_image > 1 else processes.together(work)
    total = processes.sum(*own)
    if processes.per_image > 1:  # and count the same images
        total = [each / processes.per_image for each in total]
    images, loss, correct, among_five, named, images_per_second, *counts = total
    if not images:
        raise ValueError("there are no images to evaluate")
    if counts:
        return _of_pixels(int(images), loss / images, images_per_second, counts)
    accuracy = correct / images if named else None
    top5 = among_five / images if named and spec.num_classes > depth else None
    return Evaluation(int(images), loss / images, accuracy, top5, images_per_second)


def _of_pixels(
    images: int, loss: float, images_per_second: float, counts: list[float]
) -> Evaluation:
    """Return what the counts of ``confusion_of``, row by row, come to."""
    classes = math.isqrt(len(counts))
    confusion = np.array(counts).reshape(classes, classes)
    ious = ious_of(confusion)
    counted = confusion.sum()
    return Evaluation(
        images,
        loss,
        float(np.diag(confusion).sum() / counted) if counted else None,
        None,
        images_per_second,
        float(np.nanmean(ious)) if counted else None,
        tuple(None if math.isnan(iou) else float(iou) for iou in ious),
    )


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
) -> tuple[float, ...]:
    """Count images, sum their losses, hits and hits among the ``depth`` largest outputs, and count
    those whose outputs have their classes; then images per second and, where pixels have classes,
    the counts of ``confusion_of``, row by row.
    """
    times: list[tuple[int, float]] = []
    # Sums stay on the device until the end: reading each would wait for the device.
    parts = [torch.zeros(4, device=device)]
    pixels = spec.task == "segmentation"
    counts = torch.zeros((spec.num_classes,) * 2 if pixels else 0, dtype=torch.int64, device=device)
    leaves_out = takes_sizes(model)
    for images, labels, sizes in batches:
        start = time.perf_counter()
        labels = labels.to(device, non_blocking=True)
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
        if judged.confusion is not None:
            counts += judged.confusion
        parts.append(found)
        # The device works on after a call has returned.
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((len(labels), time.perf_counter() - start))
    # The first batch, in which libraries start, counts in time only if there is no other.
    timed, seconds = (sum(each) for each in zip(*(times[1:] or times or [(0, 0.0)]), strict=True))
    images_seen = sum(count for count, _ in times)
    sums = torch.stack(parts).cpu().double().sum(0).tolist()
    return images_seen, *sums, timed / max(seconds, 1e-9), *counts.flatten().tolist()
