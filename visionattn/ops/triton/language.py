"""What the kernels share: the decorator that compiles a kernel once for all sizes, feature maps, and addresses.

Names in kernels: ``p_`` pointers, ``i_`` indices of programs, ``o_`` offsets, ``m_`` masks, ``b_`` values in registers, capitals
for compile-time sizes. Strides come in octets (``launch.octets``), multiplied by 8 here, so that the compiler knows alignment.
"""

import inspect
from collections.abc import Callable

import triton
import triton.language as tl


def kernel(function: Callable) -> Callable:
    """``triton.jit`` without specialisation of any number: one compilation serves every N. Pointers are named ``p_...``."""
    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation is not tl.constexpr and not p.name.startswith("p_")]
    return triton.jit(do_not_specialize=numbers)(function)


@triton.jit
def phi(x, MAP: tl.constexpr):
    """Features of ``x`` in float32: "elu1", "relu", or "given", x itself."""
    x = x.to(tl.float32)
    if MAP == "elu1":
        return tl.where(x > 0, x + 1, tl.exp(tl.minimum(x, 0)))
    elif MAP == "relu":
        return tl.maximum(x, 0)
    else:
        return x


@triton.jit
def phi_slope(x, MAP: tl.constexpr):
    """The derivative of ``phi`` at ``x``, float32."""
    x = x.to(tl.float32)
    if MAP == "elu1":
        return tl.where(x > 0, 1.0, tl.exp(tl.minimum(x, 0)))
    elif MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def head(p, i_batch, i_head, batch_octets, head_octets):
    """The address of one head of one image."""
    return p + (i_batch.to(tl.int64) * batch_octets + i_head.to(tl.int64) * head_octets) * 8


@triton.jit
def rows(p, o_rows, row_octets, o_columns):
    """Addresses ``[rows, columns]``."""
    return p + o_rows.to(tl.int64)[:, None] * (row_octets * 8) + o_columns[None, :]
