"""The convolution of values as parameters."""

import torch
from torch import Tensor, nn

from visionattn.layout import TokenLayout
from visionattn.ops.local import value_convolution


class ValueConvolution(nn.Module):
    """A depth-wise convolution of the values over the grid, which an attention adds to its output.

    It starts at zero, so that weights from elsewhere do what they did before. It is no
    ``nn.Conv2d``, whose weights some of timm's starts draw anew.

    Args:
        dim: D, all heads together.
        side: K, the odd side of the kernel in patches.

    Raises:
        ValueError: K is even or below 1.
    """

    def __init__(self, dim: int, side: int, device=None, dtype=None):
        super().__init__()
        if side < 1 or side % 2 == 0:
            raise ValueError(f"value_conv: wanted an odd side of 1 patch or more, got {side}")
        self.reach = side // 2
        """Rows and columns of patches on either side that a patch sees."""
        self.weight = nn.Parameter(torch.empty(dim, 1, side, side, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the kernel to zero."""
        self.weight.zero_()

    def forward(self, v: Tensor, layout: TokenLayout, key_mask: Tensor | None = None) -> Tensor:
        """Map values ``[B, h, N, e]`` to what is added to the output, of the same shape."""
        return value_convolution(v, self.weight, layout, key_mask=key_mask)
