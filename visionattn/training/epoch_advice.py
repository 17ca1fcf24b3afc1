"""Advice after an epoch: overfitting, and models that predict one class."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from visionattn.models.weights import DataSpec

RISING_EPOCHS = 3
"""Epochs in a row with rising validation loss and falling training loss that count as
overfitting.
"""


def overfitting(history: Sequence[dict[str, Any]]) -> str | None:
    """Return a line if the last epoch is the first one that completes ``RISING_EPOCHS`` epochs of
    rising validation loss and falling training loss; None otherwise.

    Args:
        history: ``train_loss`` and ``val_loss`` of all epochs so far.
    """
    apart = [
        new["val_loss"] > old["val_loss"] and new["train_loss"] < old["train_loss"]
        for old, new in pairwise(history)
    ]
    ends = range(RISING_EPOCHS, len(apart) + 1)
    complete = [all(apart[end - RISING_EPOCHS : end]) for end in ends]
    if sum(complete) != 1 or not complete[-1]:
        return None
    return (
        f"overfitting: the validation loss rose for {RISING_EPOCHS} epochs while the training "
        "loss fell; try augmentation (--data.augment), a smaller model, or "
        f"--patience {RISING_EPOCHS} to stop early"
    )


def one_class(only: int | None, spec: DataSpec) -> str | None:
    """Return a line if all predictions have one class.

    Args:
        only: ``Evaluation.only`` of the validation images.
        spec: the specification of the images.
    """
    if only is None:
        return None
    name = spec.class_names[only] if spec.class_names else only
    if spec.task == "segmentation":
        return (
            f"every validation pixel is predicted as {name}; if it persists, try --data.crop with "
            "--data.crop_around, --loss.name cross_entropy_dice, or another --optim.lr"
        )
    return (
        f"every validation image is predicted as {name}; if it persists, try --loss.class_weights "
        "balanced, another --optim.lr, pretrained weights (--init-from) or a larger --data.img_size"
    )
