"""Kernels that scale queries and keys to a given length, the first step of direct TaylorShift, and
their launches.

``y = length_h x / max(|x|, 1e-6)`` is finite at the zero vector, as are its gradients. Norms are
computed in float32. Each program processes one block of tokens of one head. Programs of the same
tokens are consecutive over the heads, because the heads of a token are adjacent in memory.

Source: Nauen et al. 2024, "Normalization"; the limit 1e-6 is as in ``unit`` of
``taylorshift_features.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.triton_helpers import head, inverse_length, kernel, read, write


@triton.jit
def _place(heads, blocks):
    """Return the image, the block of tokens and the head of this program."""
    i_program = tl.program_id(0)
    return i_program // (heads * blocks), i_program // heads % blocks, i_program % heads


@kernel
def _unit(
    p_x,
    p_length,
    p_y,
    heads,
    tokens,
    blocks,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Scale one block of tokens of one head to its length."""
    i_batch, i_block, i_head = _place(heads, blocks)
    o_n, o_d = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    p_x = head(p_x, i_batch, i_head, x_batch, x_head)
    p_y = head(p_y, i_batch, i_head, y_batch, y_head)
    b_x = read(p_x, o_n, x_token, o_d, o_n < tokens, D).to(tl.float32)  # [N, D]
    b_scale = inverse_length(b_x)
    if LENGTH:
        b_scale *= tl.load(p_length + i_head).to(tl.float32)
    write(p_y, o_n, y_token, o_d, b_x * b_scale[:, None], o_n < tokens, D)


@kernel
def _unit_backward(
    p_x,
    p_length,
    p_grad,
    p_dx,
    p_parts,
    heads,
    tokens,
    blocks,
    x_batch,
    x_head,
    x_token,
    grad_batch,
    grad_head,
    grad_token,
    dx_batch,
    dx_head,
    dx_token,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """Write the gradient of one block of tokens of one head, and its contribution to the gradient
    of the length.
    """
    i_batch, i_block, i_head = _place(heads, blocks)
    o_n, o_d = i_block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_n = o_n < tokens
    p_x = head(p_x, i_batch, i_head, x_batch, x_head)
    p_dx = head(p_dx, i_batch, i_head, dx_batch, dx_head)
    p_grad = head(p_grad, i_batch, i_head, grad_batch, grad_head)
    b_x = read(p_x, o_n, x_token, o_d, m_n, D).to(tl.float32)  # [N, D]
    b_grad = read(p_grad, o_n, grad_token, o_d, m_n, D).to(tl.float32)  # [N, D]
    # Recompute the factor of the forward pass, which is not saved.
    b_inverse = inverse_length(b_x)
    b_unit = b_x * b_inverse[:, None]
    # The component of the gradient along x. Its sum over tokens is the gradient of the length; each
    # program writes one part of it, and torch adds the parts.
    b_along = tl.sum(b_grad * b_unit, 1)
    b_scale = b_inverse
    if LENGTH:
        b_scale *= tl.load(p_length + i_head).to(tl.float32)
        tl.store(p_parts + tl.program_id(0), tl.sum(b_along, 0))
    # The length of the result is fixed, so subtract the component along x. A vector shorter than
    # 1e-6 is multiplied by a constant: its gradient stays whole.
    b_across = b_grad - b_unit * tl.where(b_inverse < 0.9999e6, b_along, 0)[:, None]
    write(p_dx, o_n, dx_token, o_d, b_across * b_scale[:, None], m_n, D)


def _options(name: str, x: Tensor, length: Tensor | None) -> dict[str, int]:
    d = x.shape[3]
    row = launch.launch_row(name, d, d, x.dtype, x.device)
    return row | dict(D=d, BLOCK_D=launch.block(d), LENGTH=length is not None)


def unit(x: Tensor, length: Tensor | None) -> Tensor:
    """Scale ``x [B, h, N, d]`` to ``length [h]``, or to 1 if it is None; in the dtype of x."""
    batch, heads, tokens, d = x.shape
    options, y = _options("unit", x, length), launch.tokens_first(x, batch, heads, tokens, d)
    blocks, x = launch.cdiv(tokens, options["BLOCK_N"]), launch.readable(x)
    pointers = (x, x if length is None else length.contiguous(), y)
    launch.run(
        _unit,
        (batch * blocks * heads,),
        *pointers,
        heads,
        tokens,
        blocks,
        *launch.octets(x),
        *launch.octets(y),
        **options,
    )
    return y


def unit_backward(
    x: Tensor, length: Tensor | None, grad: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the length for ``grad [B, h, N, d]`` of any dtype.

    The first is in ``dtype``, or the dtype of x if None; the second is float32 ``[h]``, or None
    without a length.
    """
    batch, heads, tokens, d = x.shape
    options = _options("unit backward", x, length)
    dx = launch.tokens_first(x, batch, heads, tokens, d, dtype)
    blocks = launch.cdiv(tokens, options["BLOCK_N"])
    x, grad = launch.readable(x), launch.readable(grad)
    # One number per head and block of tokens; none without a length.
    parts = x.new_empty(0 if length is None else batch * blocks, heads, dtype=torch.float32)
    launch.run(
        _unit_backward,
        (batch * blocks * heads,),
        *(
            x,
            x if length is None else length.contiguous(),
            grad,
            dx,
            x if length is None else parts,
        ),
        *(heads, tokens, blocks),
        *(octet for tensor in (x, grad, dx) for octet in launch.octets(tensor)),
        **options,
    )
    return dx, None if length is None else parts.sum(0)
