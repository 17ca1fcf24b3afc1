"""Check labels of several numbers per image before training, and standardize targets."""

from dataclasses import replace

import numpy as np

from visionattn.data.splits import Splits
from visionattn.model_config import VECTOR_TASKS


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
