"""The convolution of values as a module."""

import torch
from torch import Tensor, nn

from visionattn.layout import TokenLayout
from visionattn.ops.attention_additions import value_convolution


class ValueConvolution(nn.Module):
    """A depth-wise convolution of the values over the grid, added to the output of an attention.

    It starts at zero, so that pretrained weights keep their results. It is not an ``nn.Conv2d``,
    because some initializers of timm would reset its weights.

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
        """Reach of the kernel: rows and columns of patches on each side of a patch."""
        self.weight = nn.Parameter(torch.empty(dim, 1, side, side, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the kernel to zero."""
        self.weight.zero_()

    def forward(self, v: Tensor, layout: TokenLayout, key_mask: Tensor | None = None) -> Tensor:
        """Map values ``[B, h, N, e]`` to the term, of the same shape, added to the output."""
        return value_convolution(v, self.weight, layout, key_mask=key_mask)
