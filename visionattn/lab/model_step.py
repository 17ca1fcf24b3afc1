"""A pass over a batch that is measured: inference, forward and backward, or a training step, and
the bytes of its parts. It knows nothing of processes and peaks.

Parameters, gradients and optimizer state are the exact bytes of what their tensors hold. The
gradient of the class token is a view of the gradient of all tokens, which it keeps, so that
gradients are more than parameters and grow with the image.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from visionattn.lab.measure import bytes_kept
from visionattn.models.machine import autocast
from visionattn.training.config import OptimConfig
from visionattn.training.optimize import OptimizerStep


class ModelStep:
    """A model and what a pass needs besides: images, labels, an optimizer.

    A training step is the step of ``visionattn train``: forward, loss, backward, clipping and
    update, without loading, mixing and averages. Labels are random.

    Args:
        model: on its device; it is put into ``train`` where a pass has a backward.
        device: where it computes.
        amp: ``none``, ``bf16`` or ``fp16``.
        backward: whether the pass has a backward.
        update: whether the optimizer updates the model after the backward.
        optim: of the training; None: its defaults.

    Attributes:
        images: ``[B, C, H, W]``; None before ``place``.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        amp: str = "none",
        *,
        backward: bool = False,
        update: bool = False,
        optim: OptimConfig | None = None,
    ):
        self.model, self.device, self.amp = model.train(backward), device, amp
        self.backward, self.update = backward, update
        self.images: Tensor | None = None
        # The usual scale overflows, which skips the first steps and with them the state.
        self.step = OptimizerStep(model, optim or OptimConfig(), device, amp, initial_scale=1.0)

    def place(self, images: Tensor) -> None:
        """Take images on the device, and labels for them."""
        self.images, generator = images, torch.Generator().manual_seed(images.shape[-1])
        labels = torch.randint(self.model.num_classes, (len(images),), generator=generator)
        self.labels = labels.to(self.device)

    def run(self) -> None:
        """Run the pass."""
        if not self.backward:
            with torch.inference_mode():
                self.forward()
            return
        self.model.zero_grad(set_to_none=True)
        self.step.add_gradients(self.model, self.images, self.labels)
        if self.update:
            self.step.update()

    def forward(self) -> Tensor:
        """Return the logits, with a graph where gradients are enabled."""
        with autocast(self.device, self.amp):
            return self.model(self.images)

    def parameters(self) -> list[Tensor]:
        """Return parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that the last pass left."""
        found = [parameter.grad for parameter in self.model.parameters()]
        return [gradient for gradient in found if gradient is not None]

    def optimizer_state(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        states = self.step.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def saved_bytes(self) -> int:
        """Return what autograd saves of a forward for its backward; parameters and images, which
        are there anyway, do not count.
        """
        return bytes_kept(self.forward, without=[*self.model.parameters(), self.images])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the storages that tensors hold, each once and whole: a view of some elements
    keeps all of them.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
