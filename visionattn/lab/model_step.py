"""Run a pass over a batch for measurements, and count the bytes of its parts. A pass is inference,
forward and backward, or a training step.

Gradients take more bytes than parameters and grow with the image: the gradient of the class token
is a view that keeps the gradient of all tokens in memory.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from visionattn.lab.measure import bytes_kept
from visionattn.models.devices import autocast
from visionattn.training.config import OptimConfig
from visionattn.training.optimize import OptimizerStep


class ModelStep:
    """A model with the images, labels and optimizer of a pass.

    A training step is the step of ``visionattn train``: forward, loss, backward, clipping and
    update, without data loading, mixup and weight averages. Labels are random.

    Args:
        model: on its device; a pass with a backward switches it to ``train`` mode.
        device: device of the model.
        amp: mixed precision: ``none``, ``bf16`` or ``fp16``.
        backward: the pass has a backward.
        update: the optimizer updates the model after the backward.
        optim: options of the optimizer; None: the defaults of training.

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
        # The usual initial scale overflows and skips the first steps, which create the state.
        self.step = OptimizerStep(model, optim or OptimConfig(), device, amp, initial_scale=1.0)

    def place(self, images: Tensor) -> None:
        """Set the images, which are on the device, and draw random labels."""
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
        """Return the logits, with a graph if gradients are enabled."""
        with autocast(self.device, self.amp):
            return self.model(self.images)

    def parameters(self) -> list[Tensor]:
        """Return parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the last pass."""
        found = [parameter.grad for parameter in self.model.parameters()]
        return [gradient for gradient in found if gradient is not None]

    def optimizer_state(self) -> list[Tensor]:
        """Return the tensors of the optimizer's state."""
        states = self.step.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    def saved_bytes(self) -> int:
        """Return the bytes that autograd saves in a forward for its backward, without parameters
        and images.
        """
        return bytes_kept(self.forward, without=[*self.model.parameters(), self.images])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors. Each storage counts once and in full, because a
    view keeps its whole storage in memory.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
