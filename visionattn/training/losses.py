"""Losses of images and of pixels from logits and classes, one value per image.

A value per image makes the loss of a step independent of its division into batches and processes:
it is the mean over all images.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import sigmoid_focal_loss

from visionattn.models.segmentation import IGNORED

FOCAL_GAMMA = 2
"""Exponent of the focal loss; the value that Lin et al. recommend."""


def class_losses(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    focal: bool = False,
    ignore_index: int = -100,
) -> Tensor:
    """Return the cross-entropy ``-w log p`` or focal loss ``-w (1 - p)^2 log p`` of each target, p
    being the softmax probability of its class.

    Source of the focal loss: Lin et al. 2017, equation 5, with the softmax in place of the sigmoid,
    and the class weights as alpha.

    Args:
        logits: ``[B, classes, ...]``.
        targets: classes, int64 ``[B, ...]``.
        weights: weight w of each class, ``[classes]``; None: 1.
        smoothing: label smoothing; 0 with ``focal``.
        focal: compute the focal loss.
        ignore_index: a target with loss 0.
    """
    entropy = partial(
        F.cross_entropy,
        logits,
        targets,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=smoothing,
    )
    losses = entropy(weight=weights)
    if not focal:
        return losses
    plain = losses if weights is None else entropy()
    return (-torch.expm1(-plain)) ** FOCAL_GAMMA * losses


def label_losses(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    focal: bool = False,
) -> Tensor:
    """Return the mean binary cross-entropy or focal loss of each image over its labels that are not
    NaN, ``[B]``; 0 for an image without such a label.

    Args:
        logits: ``[B, K]``.
        targets: 0, 1 or NaN, ``[B, K]``.
        weights: weight of the positives of each class, ``[K]``; None: 1.
        smoothing: label smoothing; 0 with ``focal``.
        focal: compute the focal loss.
    """
    logits, counted = logits.float(), ~targets.isnan()
    known = targets.nan_to_num() * (1 - smoothing) + smoothing / 2
    if focal:
        losses = sigmoid_focal_loss(logits, known, alpha=-1, gamma=FOCAL_GAMMA)
        losses = losses if weights is None else losses * torch.where(known > 0, weights, 1)
    else:
        losses = F.binary_cross_entropy_with_logits(
            logits, known, pos_weight=weights, reduction="none"
        )
    return torch.where(counted, losses, 0).sum(1) / counted.sum(1).clamp(min=1)


def number_losses(outputs: Tensor, targets: Tensor, name: str) -> Tensor:
    """Return the mean loss of each image over its targets, ``[B]``.

    Args:
        outputs: ``[B, K]``.
        targets: ``[B, K]``.
        name: ``l1``, ``smooth_l1`` (quadratic below 1) or ``mse``.
    """
    losses = {"l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "mse": F.mse_loss}
    return losses[name](outputs, targets, reduction="none").mean(1)


def pixel_losses(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    *,
    smoothing: float = 0.0,
    focal: bool = False,
) -> Tensor:
    """Return the mean of ``class_losses`` over the pixels of each image that are not ``IGNORED``,
    ``[B]``; 0 for an image without such a pixel.

    Args:
        logits: ``[B, classes, H, W]``.
        targets: classes of pixels, uint8 ``[B, H, W]``.
        weights, smoothing, focal: as for ``class_losses``.
    """
    counted = (targets != IGNORED).flatten(1).sum(1)
    losses = class_losses(
        logits, targets.long(), weights, smoothing=smoothing, focal=focal, ignore_index=IGNORED
    )
    return losses.flatten(1).sum(1) / counted.clamp(min=1)


def dice_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return one minus the Dice coefficient of each image, ``[B]``: the mean over the classes in
    its mask. ``IGNORED`` pixels do not count; an image without another pixel has 0.

    Source: Milletari et al. 2016, section 3, with sums in place of sums of squares.

    Args:
        logits: ``[B, classes, H, W]``.
        targets: classes of pixels, uint8 ``[B, H, W]``.
    """
    counted = (targets != IGNORED).unsqueeze(1)
    shares = (logits.softmax(1) * counted).flatten(2)
    classes = torch.arange(logits.shape[1], device=logits.device)
    truth = (targets.unsqueeze(1) == classes[:, None, None]).flatten(2)
    common = (shares * truth).sum(2)
    pixels = truth.sum(2)
    present = pixels > 0
    # A class in the mask has at least one pixel, so the divisor is at least 1.
    missed = 1 - 2 * common / (shares.sum(2) + pixels).clamp(min=1)
    return torch.where(present, missed, 0).sum(1) / present.sum(1).clamp(min=1)
