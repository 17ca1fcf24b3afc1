"""What the kernels share: the decorator that compiles a kernel once for all sizes, feature maps,
and addresses.

Names in kernels: ``p_`` pointers, ``i_`` indices of programs, ``o_`` offsets, ``m_`` masks, ``b_``
values in registers, capitals for compile-time sizes. Strides come in octets (``launch.octets``),
multiplied by 8 here, so that the compiler knows alignment.
"""

import inspect
from collections.abc import Callable

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def kernel(function: Callable) -> Callable:
    """``triton.jit`` without specialisation of any number: one compilation serves every N. Pointers
    are named ``p_...``.
    """
    parameters = inspect.signature(function).parameters.values()
    numbers = [
        p.name
        for p in parameters
        if p.annotation is not tl.constexpr and not p.name.startswith("p_")
    ]
    return triton.jit(do_not_specialize=numbers)(function)


@triton.jit
def phi(x, MAP: tl.constexpr):
    """Features of ``x`` in float32: "elu1", "relu", or "given", x itself."""
    x = x.to(tl.float32)
    if MAP == "elu1":
        return tl.maximum(x, 0) + phi_slope(x, MAP)
    elif MAP == "relu":
        return tl.maximum(x, 0)
    else:
        return x


@triton.jit
def phi_slope(x, MAP: tl.constexpr):
    """The derivative of ``phi`` at ``x``, float32."""
    x = x.to(tl.float32)
    if MAP == "elu1":
        return tl.exp2(
            tl.minimum(x, 0) * LOG2_E
        )  # exp takes four more instructions, for numbers below 1e-38
    elif MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def operand(x, DTYPE: tl.constexpr, PER_ROW: tl.constexpr):
    """``x [rows, columns]`` in ``DTYPE`` as an operand of a product, and its unit, for ``in_units``
    of the product.

    Float16 loses digits below 6e-5, ends at 6e-8 and at 65,504. There the unit makes the largest
    magnitude 16, of each row where PER_ROW (then the unit is ``[rows]``), else of all; what two of
    them give over 64 columns is a float16 number again. Other dtypes have the range of float32, and
    no unit.
    """
    if tl.float16 == DTYPE:
        most = tl.max(tl.abs(x), 1)
        if PER_ROW:
            unit = tl.maximum(most / 16, 1e-30)
            x = x * (1 / unit)[:, None]
        else:
            unit = tl.maximum(tl.max(most, 0) / 16, 1e-30)
            x = x * (1 / unit)
        return x.to(DTYPE), unit
    elif PER_ROW:
        return x.to(DTYPE), tl.full([x.shape[0]], 1.0, tl.float32)
    else:
        return x.to(DTYPE), 1.0


@triton.jit
def unit_of(x, DTYPE: tl.constexpr):
    """What ``x [rows, columns]`` is divided by for a product in ``DTYPE``, as ``operand`` says."""
    if tl.float16 == DTYPE:
        return tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0) / 16, 1e-30)
    else:
        return 1.0


@triton.jit
def parts(x, DTYPE: tl.constexpr):
    """``x`` in ``DTYPE``, and what rounding took from it, in ``DTYPE`` too."""
    b_high = x.to(DTYPE)
    return b_high, (x - b_high.to(tl.float32)).to(DTYPE)


@triton.jit
def high_and_low(x, DTYPE: tl.constexpr):
    """``x [rows, columns]`` as two operands of ``DTYPE`` that add up to it, and the unit of both,
    for ``in_units``.

    They have 16 bits of ``x`` in bfloat16 and 22 in float16; for ``product_of_both``. Float32 needs
    the first alone.
    """
    unit = unit_of(x, DTYPE)
    if tl.float16 == DTYPE:
        x = x * (1 / unit)
    b_high, b_low = parts(x, DTYPE)
    return b_high, b_low, unit


@triton.jit
def product_of_both(left, high, low, PRECISION: tl.constexpr, LOW: tl.constexpr = True):
    """``left`` times the sum of ``high`` and ``low``, which are of its dtype; times ``high`` alone
    where not LOW.
    """
    product = tl.dot(left, high, input_precision=PRECISION)
    if LOW and tl.float32 != left.dtype:
        product = tl.dot(left, low, acc=product, input_precision=PRECISION)
    return product


@triton.jit
def in_units(product, unit, DTYPE: tl.constexpr):
    """``product`` times the units of its operands, which only float16 has: no other dtype is to
    multiply by 1.
    """
    if tl.float16 == DTYPE:
        return product * unit
    else:
        return product


@triton.jit
def head(p, i_batch, i_head, batch_octets, head_octets):
    """The address of one head of one image."""
    return p + (i_batch.to(tl.int64) * batch_octets + i_head.to(tl.int64) * head_octets) * 8


@triton.jit
def rows(p, o_rows, row_octets, o_columns):
    """Addresses ``[rows, columns]``."""
    return p + o_rows.to(tl.int64)[:, None] * (row_octets * 8) + o_columns[None, :]


@triton.jit
def read(p, o_rows, row_octets, o_columns, m_rows, WIDTH: tl.constexpr, SOME: tl.constexpr):
    """``[rows, columns]`` from ``p`` on, 0 from column ``WIDTH`` on.

    Where SOME, only the rows of ``m_rows`` are read and the others are 0; else all are, without a
    mask for rows.
    """
    if SOME:
        m_read = m_rows[:, None] & (o_columns < WIDTH)[None, :]
        return tl.load(rows(p, o_rows, row_octets, o_columns), mask=m_read, other=0)
    elif o_columns.shape[0] > WIDTH:
        return tl.load(
            rows(p, o_rows, row_octets, o_columns), mask=(o_columns < WIDTH)[None, :], other=0
        )
    else:
        return tl.load(rows(p, o_rows, row_octets, o_columns))


@triton.jit
def reciprocal(b_mass):
    """``1 / mass``, and 0 where the mass is 0: a query that sees no key gets 0."""
    return tl.where(b_mass == 0, 0.0, 1 / tl.where(b_mass == 0, 1.0, b_mass))
