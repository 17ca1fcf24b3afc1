"""How much memory a step of training takes."""

from functools import lru_cache

import torch
from torch import nn

from visionattn.models.cost import SCATTERED, SCATTERED_CHECKPOINTED, Passes, Shape, whole_bytes
from visionattn.models.machine import autocast
from visionattn.models.weights import DataSpec
from visionattn.training.config import OptimConfig
from visionattn.training.evaluate import objective_of
from visionattn.training.objective import Objective

MOMENTS = 2
"""How many tensors the size of the parameters the optimisers keep."""


class StepPasses(Passes):
    """Tell the bytes that steps and forwards of a model take above what is there.

    Args:
        model, spec, device, amp, leaves_out: as for ``Passes``.
        checkpointing: the blocks of a step are computed anew for the backward pass.
        objective: what the model, or what is called in its place, learns; None: classes.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: DataSpec,
        device: torch.device,
        amp: str,
        *,
        leaves_out: bool = False,
        checkpointing: bool = False,
        objective: Objective | None = None,
    ):
        super().__init__(model, spec, device, amp, leaves_out=leaves_out)
        self.checkpointing = checkpointing
        self.objective = objective
        self._step = lru_cache(maxsize=None)(self._step_bytes)

    def step_bytes(
        self, shape: Shape, config: OptimConfig, *, kind: str | None = None, processes: int = 1
    ) -> int | None:
        """Return the bytes of a training step, those that the optimiser keeps included.

        Args:
            shape: of the batch.
            config: loss and optimiser.
            kind: how several processes hold the model; ``ddp`` sums gradients in buffers of their
                size, and ``fsdp`` divides what the optimiser keeps.
            processes: how many they are.

        Returns:
            None where nobody can tell; on a GPU infinity stands for too much.
        """
        smoothing, mixes = config.label_smoothing, bool(config.mixup or config.cutmix)
        took = self._step(shape, smoothing, mixes, config.accumulate > 1)
        return None if took is None else whole_bytes(took + self.kept_bytes(kind, processes))

    def kept_bytes(self, kind: str | None = None, processes: int = 1) -> float:
        """Return what the optimiser keeps between steps, and buffers for sums over processes."""
        learnt = (x for x in self.model.parameters() if x.requires_grad)
        weights = sum(x.numel() * x.element_size() for x in learnt)
        kept = MOMENTS * weights / (processes if kind == "fsdp" else 1)
        kept += weights if kind in ("ddp", "sequence") else 0
        return kept * (1 if self.device.type == "cuda" else SCATTERED)

    def _step_bytes(
        self, shape: Shape, smoothing: float, mixes: bool, accumulates: bool
    ) -> float | None:
        config = OptimConfig(label_smoothing=smoothing, mixup=float(mixes))
        objective = self.objective or objective_of(self.spec, config)

        def work(model: nn.Module) -> None:
            model.train()
            if accumulates:  # the gradients of the batches before are there
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.grad = torch.zeros_like(parameter)
            images, sizes = self.batch(shape)
            targets = objective.targets(len(images), shape[1:]).to(self.device)
            with autocast(self.device, self.amp):
                logits = objective.outputs(model, self.spec.prepare(images), sizes, targets)
            if mixes:
                targets = torch.zeros(len(images), logits.shape[1], device=self.device)
            objective.loss(logits.float(), targets).backward()

        return self.peak(work, SCATTERED_CHECKPOINTED if self.checkpointing else SCATTERED)
