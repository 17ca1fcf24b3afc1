"""What a case of a profile runs, and the bytes of its parts. It knows nothing of processes and
peaks.

Parameters, gradients and optimiser state are the exact bytes of what their tensors hold. The
gradient of the class token is a view of that of all tokens, which it keeps, so that gradients are
more than parameters and grow with the image.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from visionattn.lab.cases import Case
from visionattn.lab.measure import bytes_kept
from visionattn.lab.networks import build_model, make_image
from visionattn.models.machine import autocast
from visionattn.training.config import OptimConfig
from visionattn.training.optimize import OptimizerStep

WARM_UP_PATCHES = 8
"""Patches a side of the image with which libraries, threads and the optimiser take their memory
before the measurement.
"""


class Step:
    """A model, and what a pass needs besides: an image, labels, an optimiser whose state is there.

    A training step is that of ``visionattn train`` with its defaults: timm's AdamW, cross-entropy,
    gradients set to none before it, clipped after it; labels are random.

    Attributes:
        model: in ``train`` where a pass has a backward.
        image: ``[B, C, px, px]``; None before ``place``.
        optimizer: None where the pass has none.
    """

    def __init__(self, case: Case, device: str = "cpu"):
        self.case, self.device = case, torch.device(device)
        self.model: nn.Module = build_model(case, device)
        self.image, self.labels = None, None
        # From 1: the usual start overflows, which skips the first steps and with them the
        # optimiser's state.
        self.step = OptimizerStep(
            self.model, OptimConfig(), self.device, case.amp, initial_scale=1.0
        )
        self.optimizer = self.step.optimizer if case.update else None

    def place(self, px: int) -> None:
        """Put an image of this size, and labels, on the device."""
        self.image = None  # first, so that no two are there at once
        self.image = make_image(self.case, self.model, px, px, str(self.device))
        generator = torch.Generator().manual_seed(px)
        self.labels = torch.randint(
            self.model.num_classes, (self.case.batch,), generator=generator
        ).to(self.device)

    def warm_up(self) -> None:
        """Run one pass over a small image, after which the optimiser's state is there and the
        gradients are not.
        """
        rows, columns = self.model.patch_embed.patch_size
        self.place(min(self.case.size, WARM_UP_PATCHES * max(rows, columns)))
        self.run()
        self.model.zero_grad(set_to_none=True)

    def run(self) -> None:
        """Run the pass."""
        if not self.case.backward:
            with torch.inference_mode():
                self.forward()
            return
        self.model.zero_grad(set_to_none=True)
        self.step.add_gradients(self.model, self.image, self.labels)
        if self.optimizer is not None:
            self.step.update()

    def forward(self) -> Tensor:
        """Return the logits, with a graph where gradients are enabled."""
        with autocast(self.device, self.case.amp):
            return self.model(self.image)

    @property
    def parameters_bytes(self) -> int:
        """Bytes of the parameters and buffers."""
        return bytes_of([*self.model.parameters(), *self.model.buffers()])

    @property
    def gradients_bytes(self) -> int:
        """Bytes of the gradients that the last pass left."""
        return bytes_of(
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        )

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimiser's state."""
        if self.optimizer is None:
            return 0
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        return bytes_of(value for value in values if isinstance(value, Tensor))

    def saved_bytes(self) -> int:
        """Return what autograd saves of a forward for its backward; parameters and the image, which
        are there anyway, do not count.
        """
        return bytes_kept(self.forward, without=[*self.model.parameters(), self.image])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return bytes of the storages that tensors hold, each once and whole: a view of some elements
    keeps all of them.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
