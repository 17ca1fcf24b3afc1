"""Define training objectives with their evaluation: the classes of images (``Objective``), the
classes of pixels (``PixelClasses``), the likelihood of each pixel value (``Likelihood``), several
classes per image (``ManyLabels``) or numbers (``Numbers``).

The training loop uses only the methods of ``Objective``; distillation adds its own objective.

Source of mean IoU: PASCAL VOC (Everingham et al. 2010, section 4.2). Bits per dimension are the
mean of ``-log2 p`` over pixel values.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from visionattn.models.patches import call
from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.models.segmentation import IGNORED
from visionattn.models.weights import DataSpec
from visionattn.training.config import LossConfig, OptimConfig
from visionattn.training.losses import (
    class_losses,
    dice_losses,
    label_losses,
    number_losses,
    pixel_losses,
)

MOST_CURVES = 20
"""Maximum number of classes for which evaluations keep scores."""
SCORE_BINS, LARGEST_ODDS = 65536, 32
"""Number of score bins, and the largest log odds with a bin of their own."""


class Judged(NamedTuple):
    """The evaluation of a batch."""

    loss: Tensor
    """Sum of the losses of the images."""
    logits: Tensor | None
    """Outputs per class, ``[B, classes]``; None if the labels are not classes of the outputs."""
    confusion: Tensor | None = None
    """For classes of pixels, the counts of ``confusion_of``."""
    values: Tensor | None = None
    """For ``VECTOR_TASKS``, the result of ``DataSpec.values_of``, ``[B, K]``."""
    masks: Tensor | None = None
    """For classes of pixels, the predicted classes, ``[B, H, W]``."""
    scores: Tensor | None = None
    """For up to ``MOST_CURVES`` classes of pixels, the counts of ``score_counts``."""


class Objective:
    """Learn the classes of images by cross-entropy or focal loss. Evaluations use the unweighted
    cross-entropy, so that runs with different losses compare.

    Args:
        config: options of label smoothing and mixing.
        kind: the loss and its class weights, as numbers; None: cross-entropy without weights.
        spec: the specification of the images; only ``VECTOR_TASKS`` need it.
    """

    measure = "accuracy"
    """Name of the score, for ``Evaluation.value``."""
    unit = ""
    """Unit of the loss, for printing."""
    learns_labels = True
    """Whether labels are the targets, so that advice on predicted classes makes sense."""

    def __init__(
        self, config: OptimConfig, kind: LossConfig | None = None, spec: DataSpec | None = None
    ):
        self.kind, self.smoothing = kind or LossConfig(), config.label_smoothing
        plain = type(self) is Objective and self.kind == LossConfig()
        self.criterion = make_criterion(config) if plain else None
        """The mean loss of images with one class, also with mixed images; None: from ``each``."""
        self.spec = spec

    def called(self, model: nn.Module) -> nn.Module:
        """Return the module that a training step calls. It has the arguments of ``call`` and the
        model's parameters; its outputs go to ``loss``.
        """
        return model

    def outputs(
        self, called: nn.Module, inputs: Tensor, sizes: Tensor | None, targets: Tensor
    ) -> Tensor:
        """Return the outputs for ``loss``.

        Args:
            called: the result of ``called``, or its wrapper on several processes.
            inputs: ``[B, C, H, W]``.
            sizes: the size of each image without padding, as for ``call``.
            targets: the targets of the batch.
        """
        return call(called, inputs, sizes)

    def targets(self, images: int, size: tuple[int, int]) -> Tensor:
        """Return placeholder targets for ``images`` images of a height and width in pixels."""
        return torch.zeros(images, dtype=torch.int64)

    def loss(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch, each image times its weight, ``[B]``; None: 1."""
        if weights is None and self.criterion is not None:
            return self.criterion(outputs, targets)
        return weighted_mean(self.each(outputs, targets), weights)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the training loss of each image, ``[B]``; targets are not shares of classes."""
        return class_losses(outputs, targets, **self.options(outputs))

    def options(self, outputs: Tensor) -> dict[str, Any]:
        """Return the options of ``class_losses`` and ``pixel_losses`` for training."""
        weights = self.kind.class_weights
        assert not isinstance(weights, str), "with_class_weights replaces balanced by numbers"
        return {
            "weights": None if weights is None else outputs.new_tensor(weights),
            "smoothing": self.smoothing,
            "focal": self.kind.name == "focal",
        }

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Evaluate a model in eval mode on a batch.

        Args:
            model: the whole model.
            inputs: ``[B, C, H, W]``.
            sizes: the size of each image without padding, as for ``call``.
            labels: int64 ``[B]``, on the device of the inputs.
        """
        logits = call(model, inputs, sizes).float()
        return Judged(F.cross_entropy(logits, labels, reduction="sum"), logits)

    def rank(self, score: float, loss: float) -> tuple[float, ...]:
        """Return a key that is larger for better weights, from their score (-1: none) and loss on
        the validation images.
        """
        return score, -loss


class PixelClasses(Objective):
    """Learn the classes of pixels. The cross-entropy or focal loss of an image is the mean over its
    pixels except ignored ones; Dice compares its whole mask. The loss of a batch is the mean over
    its images.
    """

    measure = "mean IoU"

    def targets(self, images: int, size: tuple[int, int]) -> Tensor:
        """Return placeholder masks, uint8 ``[images, H, W]``."""
        return torch.zeros(images, *size, dtype=torch.uint8)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image, ``[B]``, for logits ``[B, classes, H, W]`` and classes
        uint8 ``[B, H, W]``; ``IGNORED`` pixels do not count.
        """
        if self.kind.name == "dice":
            return dice_losses(outputs, targets)
        losses = pixel_losses(outputs, targets, **self.options(outputs))
        if self.kind.name == "cross_entropy_dice":
            losses = losses + dice_losses(outputs, targets)
        return losses

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Evaluate a model in eval mode on a batch with ``labels`` uint8 ``[B, H, W]``."""
        logits = call(model, inputs, sizes).float()
        loss, masks = pixel_losses(logits, labels).sum(), logits.argmax(1).to(torch.uint8)
        confusion = confusion_of(labels, masks, logits.shape[1])
        scores = score_counts(labels, logits) if logits.shape[1] <= MOST_CURVES else None
        return Judged(loss, None, confusion, masks=masks, scores=scores)


class Likelihood(Objective):
    """Learn the likelihood of each pixel value given all earlier values, in bits per dimension."""

    unit = " bits/dim"

    def outputs(
        self, called: nn.Module, inputs: Tensor, sizes: Tensor | None, targets: Tensor
    ) -> Tensor:
        """Return the log-likelihood of every value in nats, ``[B, C, H, W]``."""
        decoder = next(each for each in called.modules() if isinstance(each, PixelDecoder))
        return called(inputs, targets) if decoder.conditioned else called(inputs)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the bits per dimension of each image, ``[B]``, for log-likelihoods ``[B, C, H,
        W]`` in nats.

        Args:
            outputs: log-likelihoods.
            targets: classes of images, int64 ``[B]``, if all values count; or uint8 ``[B, H, W]``,
                nonzero where values count.
        """
        bits = outputs.float() / -math.log(2)
        if targets.ndim == 1:
            return bits.flatten(1).mean(1)
        counted = (targets != 0).unsqueeze(1).expand_as(bits)
        return torch.where(counted, bits, 0).flatten(1).sum(1) / counted.flatten(1).sum(1)

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Evaluate a model in eval mode on a batch; ``labels`` are as for ``loss``."""
        outputs = self.outputs(model, inputs, sizes, labels)
        return Judged(self.each(outputs, labels).sum(), None)


class ManyLabels(Objective):
    """Learn several independent classes per image by binary cross-entropy or focal loss. The loss
    of an image is the mean over its classes; classes whose label is NaN do not count.
    """

    measure = "mAP"

    def targets(self, images: int, size: tuple[int, int]) -> Tensor:
        """Return placeholder labels, float32 ``[images, K]``."""
        return torch.zeros(images, self.spec.num_classes)

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image, ``[B]``, from outputs and labels ``[B, K]``."""
        return label_losses(outputs, targets, **self.options(outputs.float()))

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image in evaluations, ``[B]``: binary cross-entropy."""
        return label_losses(outputs, targets)

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Evaluate a model in eval mode on a batch with ``labels`` float32 ``[B, K]``."""
        outputs = call(model, inputs, sizes).float()
        values = self.spec.values_of(outputs)
        return Judged(self.plain(outputs, labels).sum(), None, values=values)


class Numbers(ManyLabels):
    """Learn standardized targets. The loss of an image is the mean over its targets; evaluations
    use the squared error, so that runs with different losses compare.
    """

    measure = "R2"

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image, ``[B]``, from outputs and targets ``[B, K]``; the targets
        are in the units of the labels.
        """
        return number_losses(outputs.float(), self.standardized(targets), self.kind.name)

    def plain(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error of each image, ``[B]``, for standardized targets."""
        return number_losses(outputs, self.standardized(targets), "mse")

    def standardized(self, targets: Tensor) -> Tensor:
        """Return targets with mean 0 and standard deviation 1 over the training images."""
        mean, std = self.spec.targets_like(targets)
        return (targets - mean) / std


def objective_of(spec: DataSpec, config: OptimConfig, kind: LossConfig | None = None) -> Objective:
    """Return the objective for the task of ``spec``, with the loss ``kind``."""
    objectives = {
        "segmentation": PixelClasses,
        "generate": Likelihood,
        "multilabel": ManyLabels,
        "regression": Numbers,
    }
    return objectives.get(spec.task, Objective)(config, kind, spec)


def weighted_mean(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of losses times weights, ``[B]`` each; None: all weights are 1."""
    return (losses if weights is None else losses * weights).mean()


def make_criterion(config: OptimConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the mean cross-entropy of logits ``[B, classes]`` and targets, as a function; targets
    are shares of classes if images are mixed, else classes.
    """
    if config.mixup or config.cutmix:
        return SoftTargetCrossEntropy()
    if config.label_smoothing:
        return LabelSmoothingCrossEntropy(config.label_smoothing)
    return nn.CrossEntropyLoss()


def confusion_of(known: Tensor, found: Tensor, classes: int) -> Tensor:
    """Return the confusion matrix of pixels, int64 ``[classes, classes]``: rows are true classes,
    columns are predictions. ``IGNORED`` pixels do not count.
    """
    counted = known != IGNORED
    pairs = known[counted].long() * classes + found[counted]
    return pairs.bincount(minlength=classes**2).view(classes, classes)


def score_counts(known: Tensor, logits: Tensor) -> Tensor:
    """Count pixels for each class, by membership (0, 1) and by score, int64 ``[classes, 2,
    SCORE_BINS]``; ``IGNORED`` pixels do not count.

    The score is the log odds of the softmax probability, in bins of equal width, so that rare
    classes with small probabilities keep their order.

    Args:
        known: classes of pixels, uint8 ``[B, H, W]``.
        logits: ``[B, classes, H, W]``.
    """
    counted, counts, logits = known != IGNORED, [], logits.float()
    for number in range(logits.shape[1]):
        # Not from the probability, which is 1 for all log odds above 17.
        others = torch.cat([logits[:, :number], logits[:, number + 1 :]], 1).logsumexp(1)
        places = (
            (logits[:, number] - others)[counted].nan_to_num(-math.inf) / LARGEST_ODDS + 1
        ) * (SCORE_BINS // 2)
        bins = places.clamp(0, SCORE_BINS - 1).long()
        bins += SCORE_BINS * (known[counted] == number)
        counts.append(bins.bincount(minlength=2 * SCORE_BINS))
    return torch.stack(counts).view(-1, 2, SCORE_BINS)
