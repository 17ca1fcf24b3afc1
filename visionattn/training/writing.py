"""Images that are written value by value as what a training learns: the likelihood of each value
under those before it.

The figure is bits per dimension: the mean over values of ``-log2 p``, what an ideal coder with the
model's probabilities would take for one value.
"""

import math

import torch
from torch import Tensor, nn

from visionattn.models.pixel_decoder import PixelDecoder
from visionattn.training.config import OptimConfig
from visionattn.training.objective import Judged, Objective


class Writing(Objective):
    """The values of images, in bits per dimension: the mean over the values of an image that count,
    and over the images of a batch.
    """

    unit = " bits/dim"

    def __init__(self, config: OptimConfig):
        """Take the options of an optimisation, of which none changes this loss."""

    def outputs(
        self, called: nn.Module, inputs: Tensor, sizes: Tensor | None, targets: Tensor
    ) -> Tensor:
        """Return the log-likelihood of every value in nats, ``[B, C, H, W]``."""
        return called(inputs, targets) if takes_labels(called) else called(inputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean bits per dimension of log-likelihoods ``[B, C, H, W]``.

        Args:
            outputs: in nats.
            targets: classes of images, int64 ``[B]``, all of whose values count; or uint8
                ``[B, H, W]``, which is not 0 where values count.
        """
        return self._bits(outputs, targets).mean()

    def judge(
        self, model: nn.Module, inputs: Tensor, sizes: Tensor | None, labels: Tensor
    ) -> Judged:
        """Judge a model, in eval mode, by a batch; ``labels`` are as for ``loss``."""
        found = self.outputs(model, inputs, sizes, labels)
        return Judged(self._bits(found, labels).sum(), None)

    @staticmethod
    def _bits(found: Tensor, targets: Tensor) -> Tensor:
        """Return the bits per dimension of each image, ``[B]``."""
        bits = found.float() / -math.log(2)
        if targets.ndim == 1:
            return bits.flatten(1).mean(1)
        counted = (targets != 0).unsqueeze(1).expand_as(bits)
        return torch.where(counted, bits, 0).flatten(1).sum(1) / counted.flatten(1).sum(1)


def takes_labels(called: nn.Module) -> bool:
    """Tell whether a decoder, or what stands for it in a training, is written of a class."""
    decoder = next(each for each in called.modules() if isinstance(each, PixelDecoder))
    return decoder.conditioned
