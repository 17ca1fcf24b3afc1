"""Check the labels of the training images, and derive from them class weights and the mean and
standard deviation of targets.
"""

from dataclasses import replace

import numpy as np
from torch.utils.data import Dataset

from visionattn.data.images import ImageDataset
from visionattn.data.kept_features import PatchSamples
from visionattn.data.splits import Splits
from visionattn.model_config import VECTOR_TASKS
from visionattn.training.config import LossConfig


def with_class_weights(loss: LossConfig, splits: Splits) -> LossConfig:
    """Return the loss options with ``balanced`` replaced by one number per class, and with the
    default loss of ``regression``.

    Raises:
        ValueError: the numbers do not match the classes, the classes of the images are unknown
            before training, or a class has no training image or pixel; one line.
    """
    spec = splits.spec
    if spec.task == "regression" and loss.name == LossConfig.name:
        return replace(loss, name="mse")
    if loss.class_weights is None:
        return loss
    if isinstance(loss.class_weights, list):
        if len(loss.class_weights) != spec.num_classes:
            raise ValueError(
                f"expected {spec.num_classes} loss.class_weights, one per class, got "
                f"{len(loss.class_weights)}"
            )
        return loss
    if spec.task == "multilabel":
        labels = splits.train.labels  # type: ignore[attr-defined]
        negatives, positives = ((labels == value).sum(0) for value in (0, 1))
        weights = np.maximum(negatives, 1) / positives  # 0 would ignore the class
        return replace(loss, class_weights=weights.tolist())
    counts = class_counts(splits.train, spec.num_classes)
    what = "image" if spec.task == "classification" else "pixel"
    if not counts.all():
        first = int(np.flatnonzero(counts == 0)[0])
        name = spec.class_names[first] if spec.class_names else first
        raise ValueError(
            f"loss.class_weights balanced: no training {what} has class {name}; add some, or pass "
            f"{spec.num_classes} numbers"
        )
    # The definition of scikit-learn's compute_class_weight.
    return replace(loss, class_weights=(counts.sum() / (len(counts) * counts)).tolist())


def class_counts(dataset: Dataset, classes: int) -> np.ndarray:
    """Return the number of training images, or of pixels in masks, of each class, int64
    ``[classes]``; unreadable masks do not count.

    Raises:
        ValueError: images and masks are drawn or streamed, so that their classes are unknown; or
            samples are balanced already.
    """
    if isinstance(dataset, PatchSamples):
        raise ValueError(
            "loss.class_weights balanced counts pixels, and data.features samples a fixed share of "
            "patches with objects; remove it, or give numbers"
        )
    if isinstance(dataset, ImageDataset) and dataset.masks is not None:
        return dataset.masks.pixel_counts(dataset.indices, classes)
    labels = getattr(dataset, "labels", None)
    if labels is None:
        raise ValueError(
            "loss.class_weights balanced needs image files to count classes in, got streamed or "
            f"drawn images; pass {classes} numbers"
        )
    return np.bincount(labels, minlength=classes)


def with_targets(splits: Splits) -> Splits:
    """Return the images; for ``regression`` their specification gets the mean and the standard
    deviation of each target over the training images.

    Raises:
        ValueError: a class of ``multilabel`` has no positive training image, or a target is
            constant; one line.
    """
    spec = splits.spec
    if spec.task not in VECTOR_TASKS:
        return splits
    labels = np.asarray(splits.train.labels, np.float64)  # type: ignore[attr-defined]
    if spec.task == "multilabel":
        useless, reason = ~(labels > 0).any(0), "no training image has class {}; add some"
    else:
        useless, reason = (
            np.ptp(labels, 0) == 0,
            "target {} is the same for all training images; choose another",
        )
    if useless.any():
        name = spec.class_names[int(useless.argmax())]
        raise ValueError(f"data.task {spec.task}: {reason.format(name)}, or remove it")
    if spec.task == "multilabel":
        return splits
    mean, std = (tuple(each.tolist()) for each in (labels.mean(0), labels.std(0)))
    return replace(splits, spec=replace(spec, target_mean=mean, target_std=std))
