"""Helpers of all kernels: a decorator that compiles once for all sizes, program indices, reading
and writing of rows, ``1 / mass``, sums of parts, feature maps, and half-precision operands.

Names in kernels begin with ``p_`` for pointers, ``i_`` for program indices, ``o_`` for offsets,
``m_`` for masks and ``b_`` for values in registers; capitals are compile-time constants. Strides
are passed in octets (``launch.octets``), and kernels multiply them by 8, so that the compiler knows
the alignment.
"""

import inspect
from collections.abc import Callable

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def kernel(function: Callable) -> Callable:
    """Compile with ``triton.jit``, without specialization on numbers: one compilation serves every
    N.

    Parameters named ``p_...`` are pointers and keep Triton's specialization.
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
    """Return the features of ``x`` in float32, for "elu1", "relu", or "given" (x itself)."""
    x = x.to(tl.float32)
    if MAP == "elu1":
        return tl.maximum(x, 0) + phi_slope(x, MAP)
    elif MAP == "relu":
        return tl.maximum(x, 0)
    else:
        return x


@triton.jit
def phi_slope(x, MAP: tl.constexpr):
    """Return the derivative of ``phi`` at ``x``, float32."""
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
    """Return ``x [rows, columns]`` in ``DTYPE`` as an operand of a product, and its unit: the
    operand is ``x / unit``, and ``in_units`` multiplies the product by the unit.

    Float16 loses precision below 6e-5 and has no numbers below 6e-8 or above 65,504. Its unit
    scales the largest magnitude to 16: in each row with PER_ROW (the unit is ``[rows]``), else
    overall. A product of two such operands over 64 columns fits float16 again. Other dtypes have
    the range of float32, and their unit is 1.
    """
    # Magnitudes of rows may differ by more than the range of float16. A left operand may have a
    # unit per row, because each row of the product comes from one row of it.
    if PER_ROW:
        unit = tl.full([x.shape[0]], 1.0, tl.float32)
        if tl.float16 == DTYPE:
            unit = tl.maximum(tl.max(tl.abs(x), 1) / 16, 1e-30)
            x = x * (1 / unit)[:, None]
        return x.to(DTYPE), unit
    else:
        unit = unit_of(x, DTYPE)
        if tl.float16 == DTYPE:
            x = x * (1 / unit)
        return x.to(DTYPE), unit


@triton.jit
def unit_of(x, DTYPE: tl.constexpr):
    """Return the divisor of ``x [rows, columns]`` for a product in ``DTYPE``, as in ``operand``."""
    if tl.float16 == DTYPE:
        return tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0) / 16, 1e-30)
    else:
        return 1.0


@triton.jit
def in_larger_unit(b_sum, unit, x, DTYPE: tl.constexpr):
    """Return a sum of products, its unit, and ``x [rows, columns]``, the next operand, rescaled to
    one unit that is large enough for all of them. Only float16 has units.

    With a unit for each product, a product would need registers in addition to the sum.
    """
    if tl.float16 == DTYPE:
        larger = tl.maximum(unit, unit_of(x, DTYPE))
        return b_sum * (unit / larger), larger, x * (1 / larger)
    else:
        return b_sum, unit, x


@triton.jit
def parts(x, DTYPE: tl.constexpr):
    """Return ``x`` rounded to ``DTYPE``, and the rounding error in ``DTYPE``."""
    b_high = x.to(DTYPE)
    return b_high, (x - b_high.to(tl.float32)).to(DTYPE)


@triton.jit
def high_and_low(x, DTYPE: tl.constexpr):
    """Return ``x [rows, columns]`` as two operands of ``DTYPE`` that add up to it, and their common
    unit, for ``product_of_both`` and ``in_units``.

    Together they keep 16 bits of ``x`` in bfloat16 and 22 in float16. In float32 the second is 0.
    """
    unit = unit_of(x, DTYPE)
    if tl.float16 == DTYPE:
        x = x * (1 / unit)
    b_high, b_low = parts(x, DTYPE)
    return b_high, b_low, unit


@triton.jit
def product_of_both(left, high, low, PRECISION: tl.constexpr, LOW: tl.constexpr = True):
    """Multiply ``left`` by the sum of ``high`` and ``low``, of the same dtype; without LOW, by
    ``high`` only.
    """
    product = tl.dot(left, high, input_precision=PRECISION)
    if LOW and tl.float32 != left.dtype:
        product = tl.dot(left, low, acc=product, input_precision=PRECISION)
    return product


@triton.jit
def in_units(product, unit, DTYPE: tl.constexpr):
    """Multiply ``product`` by the units of its operands, in float16 only: other dtypes need no
    factor of 1.
    """
    if tl.float16 == DTYPE:
        return product * unit
    else:
        return product


@triton.jit
def program_of(parts, heads):
    """Return four indices of this program: part of the tokens, head counted over all images, image,
    and head within the image.

    The programs of a head are consecutive, so data of the head stays in cache.
    """
    i_part, i_group = tl.program_id(0) % parts, tl.program_id(0) // parts
    return i_part, i_group, i_group // heads, i_group % heads


@triton.jit
def head(p, i_batch, i_head, batch_octets, head_octets):
    """Return the address of one head of one image."""
    return p + (i_batch.to(tl.int64) * batch_octets + i_head.to(tl.int64) * head_octets) * 8


@triton.jit
def rows(p, o_rows, row_octets, o_columns):
    """Return the addresses ``[rows, columns]`` of rows and columns, starting from ``p``."""
    return p + o_rows.to(tl.int64)[:, None] * (row_octets * 8) + o_columns[None, :]


@triton.jit
def read(
    p,
    o_rows,
    row_octets,
    o_columns,
    m_rows,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr = True,
    AGAIN: tl.constexpr = False,
):
    """Read ``[rows, columns]``, starting from ``p``; columns from ``WIDTH`` on are 0.

    With SOME, only the rows of ``m_rows`` are read and the others are 0. Without SOME, all rows are
    read. AGAIN marks a repeated read: the rows come from cache and need not stay there.
    """
    p_rows = rows(p, o_rows, row_octets, o_columns)
    m_some = m_rows[:, None] & (o_columns < WIDTH)[None, :]
    if AGAIN:
        return tl.load(p_rows, mask=m_some, other=0, eviction_policy="evict_first")
    elif SOME:
        return tl.load(p_rows, mask=m_some, other=0)
    # A mask costs instructions: columns have one only if the block is wider than the data.
    elif o_columns.shape[0] > WIDTH:
        return tl.load(p_rows, mask=(o_columns < WIDTH)[None, :], other=0)
    else:
        return tl.load(p_rows)


@triton.jit
def write(p, o_rows, row_octets, o_columns, b, m_rows, WIDTH: tl.constexpr):
    """Write the rows of ``m_rows`` of ``b [rows, columns]``, starting from ``p``, in the dtype of
    ``p``; only columns before ``WIDTH``.
    """
    m_write = m_rows[:, None] & (o_columns < WIDTH)[None, :]
    tl.store(rows(p, o_rows, row_octets, o_columns), b.to(p.dtype.element_ty), mask=m_write)


@triton.jit
def present_rows(p_present, o_rows, m_rows, MASKED: tl.constexpr):
    """Return ``m_rows`` without the tokens that the image's mask ``p_present`` excludes."""
    if MASKED:
        return m_rows & (tl.load(p_present + o_rows, mask=m_rows, other=0) != 0)
    else:
        return m_rows


@triton.jit
def reciprocal(b_mass):
    """Return ``1 / mass``, or 0 for a mass of 0: a query without keys gets 0."""
    return tl.where(b_mass == 0, 0.0, 1 / tl.where(b_mass == 0, 1.0, b_mass))


@triton.jit
def inverse_mass(p_mass, o_rows, m_rows):
    """Read the masses of a head's queries and return their ``reciprocal``."""
    return reciprocal(tl.load(p_mass + o_rows, mask=m_rows, other=0))


@triton.jit
def inverse_length(b_x):
    """Return ``1 / max(|x|, 1e-6)`` of each row, float32 ``[rows]``; finite at 0.

    The norm is computed in float32, because squares of float16 may overflow.
    """
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.maximum(tl.sum(b_x * b_x, 1), 1e-12))


@triton.jit
def sum_of_parts(p, part, parts, m, BLOCK_P: tl.constexpr):
    """Return the sum over parts of the values at ``p [X]``, float32; parts are ``part`` elements
    apart.

    BLOCK_P parts are read at once and added in a fixed order.
    """
    o_p = tl.arange(0, BLOCK_P)
    b_sums = tl.zeros([BLOCK_P, p.shape[0]], tl.float32)
    for start in range(0, parts, BLOCK_P):
        p_part = p[None, :] + (start + o_p).to(tl.int64)[:, None] * part
        b_sums += tl.load(p_part, mask=(start + o_p < parts)[:, None] & m[None, :], other=0)
    return tl.sum(b_sums, 0)
