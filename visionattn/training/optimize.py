"""Optimiser, schedule, mixing and loss of a configuration, all of them timm's, and the step that
is made of them.

This module maps a configuration's words to timm's, says what a step is, and what becomes of an
image without a partner in a batch that is mixed.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.data.mixup import Mixup, mixup_target
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from visionattn.models.machine import autocast
from visionattn.training.config import OptimConfig
from visionattn.training.objective import make_criterion


class OptimizerStep:
    """Do the step by which a model learns: forward, loss, backward, clipping and update.

    Call ``step.add_gradients(model, inputs, targets)`` for each batch, then ``step.update()``;
    ``learner.py`` has what a training does between the two.

    Args:
        model: on its device; its parameters are updated in place.
        config: optimiser, loss and clipping.
        device: where to compute.
        amp: ``none``, ``bf16`` or ``fp16``; the last scales the loss.
        loss: takes outputs and targets; None: that of classes, as ``config`` says.
        initial_scale: the factor with which ``fp16`` starts. The usual one overflows in the first
            steps, which are skipped.

    Attributes:
        optimizer, scaler, criterion: what the step is made of.
        parameters: those that learn.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        device: torch.device,
        amp: str,
        *,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        initial_scale: float = 2.0**16,
    ):
        self.config, self.device = config, device
        self.amp = amp
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
        share: float = 1.0,
        factor: int = 1,
    ) -> Tensor:
        """Add the gradient of a batch's mean loss to those that are there, scaled.

        Args:
            forward: the model, as it is called in training.
            inputs: ``[B, C, H, W]``.
            targets: as ``make_criterion`` takes them.
            share: the weight of this batch's mean in the loss.
            factor: the weight of the loss in the gradient.

        Returns:
            The loss times ``share``, without a graph.
        """
        with autocast(self.device, self.amp):
            logits = forward(inputs)
        loss = self.criterion(logits.float(), targets) * share
        self.scaler.scale(loss * factor).backward()
        return loss.detach()

    def unscale(self) -> Tensor:
        """Take the scale off the gradients, and return the norm of all of them."""
        self.scaler.unscale_(self.optimizer)
        return nn.utils.get_total_norm(
            [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        )

    def apply(self, norm: Tensor) -> None:
        """Clip the gradients, whose norm is given, and update the parameters by them."""
        if self.config.clip_grad:
            nn.utils.clip_grads_with_norm_(self.parameters, self.config.clip_grad, norm)
        self.scaler.step(self.optimizer)

    def update(self) -> None:
        """Update the parameters by the gradients that are there, and adapt the scale."""
        self.apply(self.unscale())
        self.scaler.update()


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Make AdamW, LAMB or RAdam; one-dimensional parameters and those of
    ``model.no_weight_decay()`` do not decay.
    """
    return create_optimizer_v2(
        model,
        # timm's name of the one whose weight decay is decoupled.
        opt="radamw" if config.name == "radam" else config.name,
        lr=config.lr,
        weight_decay=config.weight_decay,
        layer_decay=config.layer_decay,
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, epochs: int, steps_per_epoch: int
) -> Scheduler:
    """Make the schedule: linear warm-up from ``warmup_lr`` to ``lr``, then a cosine to ``min_lr``,
    or after ``drop_epochs`` ``min_lr`` at once. It depends on the number of the step and on nothing
    else.
    """
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), epochs * steps_per_epoch - 1)
    warmup: dict[str, Any] = dict(warmup_t=warmup_steps, warmup_lr_init=config.warmup_lr)
    if config.drop_epochs is not None:
        drop = round(config.drop_epochs * steps_per_epoch)
        return MultiStepLRScheduler(
            optimizer,
            # timm lets the rate fall at the step before the one that it is told.
            decay_t=[drop + 1],
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
    """Take the moments of a saved state and keep the options of the configuration.

    Raises:
        ValueError: the saved state has other groups of parameters.
    """
    own = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in own] != [
        group.get("params") for group in saved["param_groups"]
    ]:
        raise ValueError(
            "the saved optimiser has other groups of parameters; resume with the optimiser options "
            "of the run"
        )
    # LAMB counts its steps in the group.
    groups = [
        group | {key: old[key] for key in ("step",) if key in old}
        for group, old in zip(own, saved["param_groups"], strict=True)
    ]
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})


def check_moments(optimizer: torch.optim.Optimizer, moments: dict[int, dict[str, Tensor]]) -> None:
    """Raise ValueError where moments are of other weights, which torch finds out at the next
    step.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    names = next((set(kept) for kept in moments.values()), set())
    for number, kept in moments.items():
        known = 0 <= number < len(weights) and names and set(kept) == names
        shape = weights[number].shape if known else None
        if not known or not all(
            value.is_floating_point() and (value.shape == shape or name == "step")
            for name, value in kept.items()
        ):
            raise ValueError(
                f"the saved optimiser has moments of weight {number} that do not go with it; "
                "--overwrite starts the run anew"
            )


def make_mixup(config: OptimConfig, num_classes: int) -> Mixup | None:
    """Make mixup, cutmix, or for each batch one of the two; None where both are off."""
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
        mix: made by ``make_mixup``; it draws from numpy's global generator.
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
