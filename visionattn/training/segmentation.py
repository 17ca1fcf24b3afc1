"""Classes of pixels as what a training learns, and how well masks agree: intersection over union.

Source: the figure of PASCAL VOC (Everingham et al. 2010, section 4.2): of each class, the pixels
that are rightly given it, over those that have it or are given it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visionattn.models.patches import call
from visionattn.models.segmentation import IGNORED
from visionattn.training.config import OptimConfig
from visionattn.training.objective import Judged, Objective


class Segmenting(Objective):
    """The classes of pixels: the cross-entropy of each image is the mean over its pixels that
    count, and that of a batch the mean over its images, however these are batched.
    """

    measure = "mean IoU"

    def __init__(self, config: OptimConfig):
        self.smoothing = config.label_smoothing

    def targets(self, images: int, size: tuple[int, int]) -> Tensor:
        """Return targets for so many images of a size, where any will do."""
        return torch.zeros(images, *size, dtype=torch.uint8)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of logits ``[B, classes, H, W]`` and classes uint8 ``[B, H, W]``,
        where ``IGNORED`` pixels do not count.
        """
        return self._losses(outputs, targets, self.smoothing).mean()

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Judge a model, in eval mode, by a batch whose ``labels`` are uint8 ``[B, H, W]``."""
        logits = call(model, inputs, sizes).float()
        loss = self._losses(logits, labels, 0.0).sum()
        return Judged(loss, None, confusion_of(labels, logits.argmax(1), logits.shape[1]))

    @staticmethod
    def _losses(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        counted = (targets != IGNORED).flatten(1).sum(1)
        losses = F.cross_entropy(
            logits,
            targets.long(),
            ignore_index=IGNORED,
            reduction="none",
            label_smoothing=smoothing,
        )
        return losses.flatten(1).sum(1) / counted.clamp(min=1)


def confusion_of(known: Tensor, found: Tensor, classes: int) -> Tensor:
    """Count the pixels of each class, by row, that are given which, by column: int64
    ``[classes, classes]``; ``known`` that are ``IGNORED`` do not count.
    """
    counted = known != IGNORED
    pairs = known[counted].long() * classes + found[counted]
    return pairs.bincount(minlength=classes**2).view(classes, classes)
