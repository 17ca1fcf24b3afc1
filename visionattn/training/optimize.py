"""Build optimizer, schedule and mixing from timm, and do the optimizer step."""

from collections.abc import Callable
from typing import Any

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from visionattn.models.devices import autocast
from visionattn.training.config import OptimConfig
from visionattn.training.objectives import make_criterion

WARMUP_LR = 1e-6
"""The learning rate at the start of the warm-up."""


class OptimizerStep:
    """Do a training step: forward, loss, backward, gradient clipping and update.

    Call ``step.add_gradients(model, inputs, targets)`` for each batch, then ``step.update()``.
    ``Trainer.step`` calls ``unscale`` and ``apply`` instead, to check the norm in between.

    Args:
        model: on its device; its parameters are updated in place.
        config: optimizer, loss and clipping.
        device: device of the model.
        amp: mixed precision: ``none``, ``bf16`` or ``fp16``; ``fp16`` scales the loss.
        loss: a function of outputs and targets; None: the classification loss of ``config``.
        initial_scale: initial loss scale of ``fp16``. The default overflows in the first steps,
            which are skipped.

    Attributes:
        optimizer, scaler, criterion: the parts of the step.
        parameters: the trainable parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        device: torch.device,
        amp: str,
        *,
        loss: Callable[..., Tensor] | None = None,
        initial_scale: float = 2.0**16,
    ):
        self.config, self.device, self.amp = config, device, amp
        self.optimizer = make_optimizer(model, config)
        self.criterion = loss or make_criterion(config)
        self.scaler = torch.amp.GradScaler(
            device.type, init_scale=initial_scale, enabled=amp == "fp16"
        )
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def add_gradients(
        self,
        forward: Callable[[Tensor], Tensor],
        inputs: Tensor,
        targets: Tensor,
        *,
        weights: Tensor | None = None,
        share: float = 1.0,
        factor: int = 1,
    ) -> Tensor:
        """Add the scaled gradient of a batch's mean loss to the gradients.

        Args:
            forward: the forward pass of training.
            inputs: ``[B, C, H, W]``.
            targets: the targets of the loss.
            weights: weights of the images, ``[B]``, for a ``loss`` that accepts them; None: 1.
            share: the weight of this batch's mean in the loss.
            factor: the weight of the loss in the gradient.

        Returns:
            The loss times ``share``, detached.
        """
        with autocast(self.device, self.amp):
            outputs = forward(inputs)
        more = () if weights is None else (weights,)
        loss = self.criterion(outputs.float(), targets, *more) * share
        self.scaler.scale(loss * factor).backward()
        return loss.detach()

    def unscale(self) -> Tensor:
        """Unscale the gradients, and return their global norm."""
        self.scaler.unscale_(self.optimizer)
        return nn.utils.get_total_norm(
            [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        )

    def apply(self, norm: Tensor) -> None:
        """Clip the gradients, given their global norm, and update the parameters."""
        if self.config.clip_grad:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_grad, norm)
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        """Clip, update the parameters, and adapt the loss scale."""
        self.apply(self.unscale())
        self.scaler.update()


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW, LAMB or RAdam, without weight decay for one-dimensional parameters and the
    names in ``model.no_weight_decay()``.
    """
    return create_optimizer_v2(
        model,
        # timm's name for RAdam with decoupled weight decay.
        opt="radamw" if config.name == "radam" else config.name,
        lr=config.lr,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, epochs: int, steps_per_epoch: int
) -> Scheduler:
    """Return the learning-rate schedule, a function of the step: linear warm-up from ``WARMUP_LR``
    to ``lr``, then a cosine to ``min_lr``, or a drop to ``min_lr`` after ``drop_epochs``.
    """
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), epochs * steps_per_epoch - 1)
    warmup: dict[str, Any] = dict(warmup_t=warmup_steps, warmup_lr_init=min(WARMUP_LR, config.lr))
    if config.drop_epochs is not None:
        return MultiStepLRScheduler(
            optimizer,
            # timm drops the rate one step before the given step.
            decay_t=[round(config.drop_epochs * steps_per_epoch) + 1],
            decay_rate=config.min_lr / config.lr,
            warmup_prefix=False,
            t_in_epochs=False,
            **warmup,
        )
    return CosineLRScheduler(
        optimizer,
        t_initial=epochs * steps_per_epoch - warmup_steps,
        lr_min=config.min_lr,
        warmup_prefix=True,
        t_in_epochs=False,
        **warmup,
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Restore the moments of a saved state, with the options of the current configuration.

    Raises:
        ValueError: the saved state has other groups of parameters.
    """
    own = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in own] != [group["params"] for group in saved["param_groups"]]:
        raise ValueError(
            "the saved optimizer has other parameter groups; resume with the optimizer options "
            "of the run"
        )
    # LAMB keeps its step count in the group.
    groups = [
        group | {key: old[key] for key in ("step",) if key in old}
        for group, old in zip(own, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def make_mixup(config: OptimConfig, num_classes: int) -> Mixup | None:
    """Return mixup, cutmix, or a random choice of the two per batch; None if both are off."""
    if not (config.mixup or config.cutmix):
        return None
    return Mixup(
        mixup_alpha=config.mixup,
        cutmix_alpha=config.cutmix,
        label_smoothing=config.label_smoothing,
        num_classes=num_classes,
    )


def mix_batch(mix: Mixup, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mix each image with its opposite in the batch; the last image of an odd batch is unchanged.

    Args:
        mix: the result of ``make_mixup``; it draws from numpy's global generator.
        images: ``[B, C, H, W]``, changed in place.
        labels: int64 ``[B]``.

    Returns:
        The images, and shares of classes ``[B, classes]``.
    """
    even = len(labels) // 2 * 2
    targets = mixup_target(labels, mix.num_classes, 1.0, mix.label_smoothing)
    if even:
        _, targets[:even] = mix(images[:even], labels[:even])
    return images, targets
