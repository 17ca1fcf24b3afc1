"""Cheap additions that make up for what linear attention lacks compared with softmax.

They are a convolution of the values over the grid, keys without their mean, and a gate on the
output. Each costs a few operations per token, works with any attention of this package, and does
not use the attention weights.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.layout import TokenLayout
from visionattn.ops.checks import (
    check_device,
    check_key_mask,
    check_layout,
    check_token_tensor,
    described,
)
from visionattn.ops.nonfinite import is_known_finite


def value_convolution(
    v: Tensor, weight: Tensor, layout: TokenLayout, *, key_mask: Tensor | None = None
) -> Tensor:
    """Return a depth-wise convolution of the values over the grid, to be added to the output of an
    attention.

    Absent or masked patches, and positions beyond the border, count as 0. Prefix tokens take no
    part and get 0.

    Args:
        v: ``[B, h, P + n, e]``, as for the attention.
        weight: ``[h * e, 1, K, K]``, K odd, as in a depth-wise ``nn.Conv2d``.
        layout: the grid positions of the tokens.
        key_mask: bool ``[B, P + n]``, True takes part.

    Returns:
        ``[B, h, P + n, e]`` in the dtype of v; undefined for absent patches.

    Raises:
        ValueError: shapes or devices that do not fit, or a kernel with an even side.

    Source: FLatten Transformer (Han et al. 2023), the depth-wise convolution of the values.
    """
    check_token_tensor("v", v)
    check_key_mask(key_mask, v)
    check_layout(layout, v, v)
    _, heads, _, width = v.shape
    channels, side = heads * width, weight.shape[-1]
    if weight.shape != (channels, 1, side, side) or side % 2 == 0:
        raise ValueError(
            f"weight: expected [{channels}, 1, K, K] with K odd, got {described(weight)}"
        )
    check_device("weight", weight, v.device, "v")
    mask = layout.key_mask(key_mask)
    if mask is not None:
        v = v.masked_fill(~mask[:, None, :, None], 0)
    # ``[B, h, n, e]`` is an image ``[B, h * e, H, W]`` with adjacent channels. Declare the memory
    # format: the strides of a single image do not show it, and the convolution would take seven
    # times as long.
    image = layout.on_grid(v).permute(0, 1, 4, 2, 3).flatten(1, 2)
    image = image.contiguous(memory_format=torch.channels_last)
    out = F.conv2d(image, weight.to(image.dtype), padding=side // 2, groups=channels)
    out = out.permute(0, 2, 3, 1).flatten(1, 2)
    if layout.kept is not None:
        out = out.gather(1, layout.kept.unsqueeze(-1).expand(-1, -1, channels))
    if layout.num_prefix:
        # ``F.pad`` would take twice as long, because it first fills its whole result.
        out = torch.cat([out.new_zeros(out.shape[0], layout.num_prefix, channels), out], 1)
    return out.unflatten(2, (heads, width)).transpose(1, 2).to(v.dtype)


def centred_keys(k: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Subtract from each key the mean key of its head.

    Softmax is invariant to a vector added to all keys; the weights of TaylorShift and of feature
    maps are not. In pretrained models the mean has about half the norm of a key.

    Args:
        k: ``[B, h, M, d]``.
        key_mask: bool ``[B, M]``, True takes part. Only these keys enter the mean; the contents of
            other keys have no effect.

    Returns:
        ``[B, h, M, d]`` in the dtype of k; sums are in float32 or wider.

    Raises:
        ValueError: shapes or devices that do not fit.
    """
    check_token_tensor("k", k)
    check_key_mask(key_mask, k)
    if key_mask is None:
        return k - k.mean(2, keepdim=True)
    present = key_mask[:, None, :, None]
    masked_keys = k.masked_fill(~present, 0)
    total = masked_keys.sum(2, keepdim=True, dtype=torch.promote_types(k.dtype, torch.float32))
    return masked_keys - (total / present.sum(2, keepdim=True).clamp(min=1)).to(k.dtype)


def gated(out: Tensor, gate: Tensor) -> Tensor:
    """Return ``out * silu(gate)`` of tokens ``[B, N, D]``.

    A token whose upstream gradient is 0 adds nothing to any gradient, even if it holds NaN.
    Autograd saves only the two factors.
    """
    return _Gated.apply(out, gate)


class _Gated(torch.autograd.Function):
    """``out * silu(gate)`` with gradients that NaN in unused tokens does not affect.

    In PyTorch's own gradient, an upstream gradient of 0 times NaN is NaN, and attention would
    spread it to all keys.
    """

    @staticmethod
    def forward(out: Tensor, gate: Tensor) -> Tensor:
        return out * F.silu(gate)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        out, gate = ctx.saved_tensors
        if grad.device.type == "cpu":  # on an accelerator the check would wait for the device
            grads = _gated_backward(grad, out, gate)
            if is_known_finite(*grads):
                return grads
        idle = (grad == 0).all(-1, keepdim=True)
        return _gated_backward(grad, out.masked_fill(idle, 0), gate.masked_fill(idle, 0))


def _gated_backward(grad: Tensor, out: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both factors, each in its own dtype."""
    d_gate = torch.ops.aten.silu_backward((grad * out).to(gate.dtype), gate)
    return (grad * F.silu(gate)).to(out.dtype), d_gate
