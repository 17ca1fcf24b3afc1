"""Optimiser, schedule, mixing and loss of a configuration, all of them timm's.

Owns how a configuration's words map to timm's, and images without a partner in a batch that is
mixed.
"""

from collections.abc import Callable

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn

from visionattn.training.config import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or LAMB; one-dimensional parameters and those of ``model.no_weight_decay()`` do not
    decay.
    """
    return create_optimizer_v2(
        model,
        opt=config.name,
        lr=config.lr,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, epochs: int, steps_per_epoch: int
) -> CosineLRScheduler:
    """Linear warm-up from ``warmup_lr`` to ``lr``, then a cosine to ``min_lr``; a function of the
    step alone.
    """
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), epochs * steps_per_epoch - 1)
    return CosineLRScheduler(
        optimizer,
        t_initial=epochs * steps_per_epoch - warmup_steps,
        lr_min=config.min_lr,
        warmup_t=warmup_steps,
        warmup_lr_init=config.warmup_lr,
        warmup_prefix=True,
        t_in_epochs=False,
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Take the moments of a saved state and keep the options of the configuration.

    Raises:
        ValueError: the saved state is of other groups of parameters.
    """
    own = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in own] != [group["params"] for group in saved["param_groups"]]:
        raise ValueError(
            "the saved optimiser has other groups of parameters; resume with the optimiser "
            "options of the run"
        )
    # LAMB counts its steps in the group.
    groups = [
        group | {key: old[key] for key in ("step",) if key in old}
        for group, old in zip(own, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def make_criterion(config: OptimConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean cross-entropy of logits ``[B, classes]`` and targets: shares of classes in mixed
    batches, else classes.
    """
    if config.mixup or config.cutmix:
        return SoftTargetCrossEntropy()
    return (
        LabelSmoothingCrossEntropy(config.label_smoothing)
        if config.label_smoothing
        else nn.CrossEntropyLoss()
    )


def make_mixup(config: OptimConfig, num_classes: int) -> Mixup | None:
    """Mixup, cutmix, or for each batch one of the two; None where both are off."""
    if not (config.mixup or config.cutmix):
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
    )


def mix_batch(mix: Mixup, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mix each image with the one opposite in the batch; in a batch of odd length the last one
    stays as it is.

    Args:
        mix: of ``make_mixup``; draws from numpy's global generator.
        images: ``[B, C, H, W]``, changed in place.
        labels: int64 ``[B]``.

    Returns:
        Images, and shares of classes ``[B, classes]``.
    """
    even = len(labels) // 2 * 2
    targets = mixup_target(labels, mix.num_classes, 1.0, mix.label_smoothing)
    if even:
        _, targets[:even] = mix(images[:even], labels[:even])
    return images, targets
