"""The depth-wise convolution of the values as a module."""

import torch
from torch import Tensor, nn

from visionattn.layout import TokenLayout
from visionattn.ops.attention_additions import value_convolution


class ValueConvolution(nn.Module):
    """A depth-wise convolution of the values over the grid, added to the output of an attention.

    The kernel starts at 0, so that a model with pretrained weights keeps its outputs. The module is
    not an ``nn.Conv2d``, because initializers of timm would reset its weights.

    Args:
        dim: D, the width of all heads together.
        side: K, the side of the kernel in patches, odd.

    Raises:
        ValueError: K is even or below 1.
    """

    def __init__(self, dim: int, side: int, device=None, dtype=None):
        super().__init__()
        if side < 1 or side % 2 == 0:
            raise ValueError(f"value_conv: expected an odd side of at least 1 patch, got {side}")
        self.reach = side // 2
        """Number of patches that the kernel reaches on each side of a patch."""
        self.weight = nn.Parameter(torch.empty(dim, 1, side, side, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the kernel to 0."""
        self.weight.zero_()

    def forward(self, v: Tensor, layout: TokenLayout, key_mask: Tensor | None = None) -> Tensor:
        """Return the convolution of values ``[B, h, N, e]``; see ``value_convolution``."""
        return value_convolution(v, self.weight, layout, key_mask=key_mask)
