"""How much memory a pass of a model takes: a step of training, or a forward alone.

On a processor the tensors of a pass are counted without computing it. On a GPU, where too much is
an error and no disaster, a pass is run and its peak is read. This module knows neither files nor
runs.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn

from visionattn.cli.ends import is_out_of_memory
from visionattn.models.patches import call
from visionattn.models.weights import DataSpec
from visionattn.ops.footprint import counting
from visionattn.training.checkpoint import random_state, restore_random_state
from visionattn.training.config import OptimConfig
from visionattn.training.evaluate import autocast, objective_of
from visionattn.training.objective import Objective

Shape = tuple[int, int, int]
"""Images, height and width in pixels of a batch."""
Compute = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""``compute(model, inputs [B, C, H, W], sizes [B, 2]) -> [B, ...]``."""

LIBRARIES_BYTES = 50 * 2**20
"""What libraries take with the first pass on a processor: code, threads, buffers for packing."""
SCATTERED, SCATTERED_CHECKPOINTED = 1.2, 3.5
"""How much more a process takes from the system than its small tensors hold: what is freed leaves
gaps, most where a checkpointed block is computed anew between what is kept. Measured with glibc.
"""
MOMENTS = 2
"""How many tensors the size of the parameters the optimisers keep."""


class Passes:
    """Tell the bytes that passes of a model take above what is there.

    Args:
        model: on its device; it stays as it is.
        spec: what its images are.
        device: where it computes.
        amp: ``none``, ``bf16`` or ``fp16``.
        leaves_out: the model is told what images fill, and they do not fill all.
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
        self.model, self.spec, self.device = model, spec, device
        self.amp, self.leaves_out = amp, leaves_out
        self.checkpointing = checkpointing
        self.objective = objective
        self._step = lru_cache(maxsize=None)(self._step_bytes)
        self._forward = lru_cache(maxsize=None)(self._forward_bytes)

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
        return None if took is None else _whole(took + self.kept_bytes(kind, processes))

    def kept_bytes(self, kind: str | None = None, processes: int = 1) -> float:
        """Return what the optimiser keeps between steps, and buffers for sums over processes."""
        learnt = (x for x in self.model.parameters() if x.requires_grad)
        weights = sum(x.numel() * x.element_size() for x in learnt)
        kept = MOMENTS * weights / (processes if kind == "fsdp" else 1)
        kept += weights if kind in ("ddp", "sequence") else 0
        return kept * (1 if self.device.type == "cuda" else SCATTERED)

    def forward_bytes(self, shape: Shape, compute: Compute = call) -> int | None:
        """Return the bytes of a forward without gradients, its result included."""
        took = self._forward(shape, compute)
        return None if took is None else _whole(took)

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
            images, sizes = self._batch(shape)
            targets = objective.targets(len(images), shape[1:]).to(self.device)
            with autocast(self.device, self.amp):
                logits = objective.outputs(model, self.spec.prepare(images), sizes, targets)
            if mixes:
                targets = torch.zeros(len(images), logits.shape[1], device=self.device)
            objective.loss(logits.float(), targets).backward()

        return self._peak(work, SCATTERED_CHECKPOINTED if self.checkpointing else SCATTERED)

    def _forward_bytes(self, shape: Shape, compute: Compute) -> float | None:
        def work(model: nn.Module) -> None:
            model.eval()
            images, sizes = self._batch(shape)
            with torch.inference_mode(), autocast(self.device, self.amp):
                compute(model, self.spec.prepare(images), sizes)

        return self._peak(work, SCATTERED)

    def _batch(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return images and, where the model takes them, the sizes that they fill."""
        images, *size = shape
        channels = 1 if self.spec.encoding else self.spec.in_chans
        made = torch.zeros(images, channels, *size, dtype=torch.uint8, device=self.device)
        return made, torch.tensor([size] * images) if self.leaves_out else None

    def _peak(self, work: Callable[[nn.Module], None], scattered: float) -> float | None:
        if self.device.type == "cuda":
            return self._measured(work)
        return self._counted(work, scattered)

    def _counted(self, work: Callable[[nn.Module], None], scattered: float) -> float | None:
        """Count the tensors of a work that is not computed; None where the model does not run so:
        it looks at values, or is wrong for these images, which a real pass will tell.
        """
        kept = random_state()
        try:
            with counting() as (count, copied):
                work(copied(self.model))
        except (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError):
            return None
        finally:
            restore_random_state(kept)
        large_bytes = count.peak_bytes - count.small_bytes
        return LIBRARIES_BYTES + large_bytes + scattered * count.small_bytes

    def _measured(self, work: Callable[[nn.Module], None]) -> float | None:
        """Run a work on the GPU, and leave model and generators as they were."""
        kept, training = random_state(), self.model.training
        buffers = [(each, each.clone()) for each in self.model.buffers()]
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            work(self.model)
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - before
        except RuntimeError as error:
            return math.inf if is_out_of_memory(error) else None
        finally:
            restore_random_state(kept)
            self.model.train(training)
            self.model.zero_grad(set_to_none=True)
            put_back(buffers)
            torch.cuda.empty_cache()


def put_back(kept: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write the kept values of tensors back into them."""
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)


def _whole(count: float) -> int:
    return count if count == math.inf else int(count)  # type: ignore[return-value]
