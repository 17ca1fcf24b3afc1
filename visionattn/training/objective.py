"""What a model learns, and by what it is judged: the classes of images, unless another objective is
given.

The loop of a training knows an ``Objective`` alone, so that whatever else is learnt has its states,
several processes, precision and figures too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from visionattn.models.patches import call
from visionattn.training.config import OptimConfig


class Judged(NamedTuple):
    """What is found of a batch."""

    loss: Tensor
    """Sum of the losses of its images."""
    logits: Tensor | None
    """Outputs per class, ``[B, classes]``; None where the labels are not those of the outputs."""
    confusion: Tensor | None = None
    """Where pixels have classes, how many of each, by row, are given which, by column: int64
    ``[classes, classes]``.
    """


class Objective:
    """The classes of images.

    Args:
        config: how the loss is smoothed, and whether images are mixed.
    """

    measure = "accuracy"
    """What ``Evaluation.score`` is of, in words."""
    unit = ""
    """What follows the number of a loss, for people."""

    def __init__(self, config: OptimConfig):
        self.criterion = make_criterion(config)

    def called(self, model: nn.Module) -> nn.Module:
        """Return what is called in a step of training: it takes what ``call`` gives a model, has
        the model's parameters, and its outputs go to ``loss``.
        """
        return model

    def outputs(
        self, called: nn.Module, inputs: Tensor, sizes: Tensor | None, targets: Tensor
    ) -> Tensor:
        """Return what is to go to ``loss``.

        Args:
            called: what ``called`` returned, or what stands for it on several processes.
            inputs: ``[B, C, H, W]``.
            sizes: what images fill, as ``call`` takes it.
            targets: those of the batch.
        """
        return call(called, inputs, sizes)

    def targets(self, images: int, size: tuple[int, int]) -> Tensor:
        """Return targets for so many images of a height and width in pixels, where any will do."""
        return torch.zeros(images, dtype=torch.int64)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return self.criterion(outputs, targets)

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Judge a model, in eval mode, by a batch.

        Args:
            inputs: ``[B, C, H, W]``.
            sizes: what images fill, as ``call`` takes it.
            labels: int64 ``[B]``, on the device of the inputs.
        """
        logits = call(model, inputs, sizes).float()
        return Judged(F.cross_entropy(logits, labels, reduction="sum"), logits)

    def rank(self, score: float, loss: float) -> tuple[float, ...]:
        """Return what is larger for better weights, of their score, -1 where there is none, and of
        their loss on the validation images.
        """
        return score, -loss


def make_criterion(config: OptimConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the mean cross-entropy of logits ``[B, classes]`` and targets, which are shares of
    classes in mixed batches and classes in others.
    """
    if config.mixup or config.cutmix:
        return SoftTargetCrossEntropy()
    return (
        LabelSmoothingCrossEntropy(config.label_smoothing)
        if config.label_smoothing
        else nn.CrossEntropyLoss()
    )
