"""What all kernels share: a decorator that compiles a kernel once for all sizes, which program does
what, reading and writing rows, ``1 / mass``, sums of parts, feature maps, and operands in half
precision.

Names in kernels begin with ``p_`` for pointers, ``i_`` for indices of programs, ``o_`` for offsets,
``m_`` for masks and ``b_`` for values in registers; capitals are compile-time sizes. Strides come
in octets (``launch.octets``) and are multiplied by 8 here, so that the compiler knows their
alignment.
"""

import inspect
from collections.abc import Callable

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def kernel(function: Callable) -> Callable:
    """Compile by ``triton.jit`` without specialising on any number, so that one compilation serves
    every N. Parameters named ``p_...`` are pointers, which are left as they are.
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
    """Return the features of ``x`` in float32: by "elu1", by "relu", or, "given", x itself."""
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
    """Return ``x [rows, columns]`` in ``DTYPE`` as an operand of a product, and its unit, by which
    ``in_units`` multiplies the product.

    Float16 loses digits below 6e-5 and ends at 6e-8 and at 65,504. There the unit makes the largest
    magnitude 16, of each row where PER_ROW (the unit is then ``[rows]``), else of all. A product of
    two such operands over 64 columns is within float16 again. Other dtypes have the range of
    float32: their unit is 1.
    """
    # Rows may differ by more than float16 spans. Each row of a left operand can have a unit of its
    # own, as the same row of the product takes it out again.
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
    """Return what ``x [rows, columns]`` is divided by for a product in ``DTYPE``, as in
    ``operand``.
    """
    if tl.float16 == DTYPE:
        return tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0) / 16, 1e-30)
    else:
        return 1.0


@triton.jit
def in_larger_unit(b_sum, unit, x, DTYPE: tl.constexpr):
    """Return a sum of products, its unit, and ``x [rows, columns]``, an operand of the next
    product, all in one unit that grows with x; only float16 has one.

    There are no registers for a product beside its sum, which would take a unit of its own.
    """
    if tl.float16 == DTYPE:
        larger = tl.maximum(unit, unit_of(x, DTYPE))
        return b_sum * (unit / larger), larger, x * (1 / larger)
    else:
        return b_sum, unit, x


@triton.jit
def parts(x, DTYPE: tl.constexpr):
    """Return ``x`` in ``DTYPE``, and what rounding took from it, in ``DTYPE`` too."""
    b_high = x.to(DTYPE)
    return b_high, (x - b_high.to(tl.float32)).to(DTYPE)


@triton.jit
def high_and_low(x, DTYPE: tl.constexpr):
    """Return ``x [rows, columns]`` as two operands of ``DTYPE`` that add up to it, and the unit of
    both, for ``product_of_both`` and ``in_units``.

    They keep 16 bits of ``x`` in bfloat16 and 22 in float16. Float32 needs the first alone.
    """
    unit = unit_of(x, DTYPE)
    if tl.float16 == DTYPE:
        x = x * (1 / unit)
    b_high, b_low = parts(x, DTYPE)
    return b_high, b_low, unit


@triton.jit
def product_of_both(left, high, low, PRECISION: tl.constexpr, LOW: tl.constexpr = True):
    """Multiply ``left`` by the sum of ``high`` and ``low``, which are of its dtype; where not LOW,
    by ``high`` alone.
    """
    product = tl.dot(left, high, input_precision=PRECISION)
    if LOW and tl.float32 != left.dtype:
        product = tl.dot(left, low, acc=product, input_precision=PRECISION)
    return product


@triton.jit
def in_units(product, unit, DTYPE: tl.constexpr):
    """Multiply ``product`` by the units of its operands, which only float16 has: no other dtype
    spends an instruction on a factor of 1.
    """
    if tl.float16 == DTYPE:
        return product * unit
    else:
        return product


@triton.jit
def program_of(parts, heads):
    """Return which part of the tokens, head of all images, image, and head of the image this
    program works on.

    Parts of one head follow each other: what they share stays in cache.
    """
    i_part, i_group = tl.program_id(0) % parts, tl.program_id(0) // parts
    return i_part, i_group, i_group // heads, i_group % heads


@triton.jit
def head(p, i_batch, i_head, batch_octets, head_octets):
    """Return the address of one head of one image."""
    return p + (i_batch.to(tl.int64) * batch_octets + i_head.to(tl.int64) * head_octets) * 8


@triton.jit
def rows(p, o_rows, row_octets, o_columns):
    """Return the addresses ``[rows, columns]`` of rows and columns from ``p`` on."""
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
    """Read ``[rows, columns]`` from ``p`` on; columns from ``WIDTH`` on are 0.

    Where SOME, only the rows of ``m_rows`` are read and the others are 0; else all rows are read,
    without a mask. Rows that are read AGAIN come from cache, and need not stay there.
    """
    p_rows = rows(p, o_rows, row_octets, o_columns)
    m_some = m_rows[:, None] & (o_columns < WIDTH)[None, :]
    if AGAIN:
        return tl.load(p_rows, mask=m_some, other=0, eviction_policy="evict_first")
    elif SOME:
        return tl.load(p_rows, mask=m_some, other=0)
    # A mask costs instructions: columns have one only where the block is wider than they are.
    elif o_columns.shape[0] > WIDTH:
        return tl.load(p_rows, mask=(o_columns < WIDTH)[None, :], other=0)
    else:
        return tl.load(p_rows)


@triton.jit
def write(p, o_rows, row_octets, o_columns, b, m_rows, WIDTH: tl.constexpr):
    """Write the rows of ``m_rows`` of ``b [rows, columns]`` from ``p`` on, in the dtype there, and
    the columns before ``WIDTH``.
    """
    m_write = m_rows[:, None] & (o_columns < WIDTH)[None, :]
    tl.store(rows(p, o_rows, row_octets, o_columns), b.to(p.dtype.element_ty), mask=m_write)


@triton.jit
def present_rows(p_present, o_rows, m_rows, MASKED: tl.constexpr):
    """Return ``m_rows`` without the tokens that the mask of the image, ``p_present``, leaves
    out.
    """
    if MASKED:
        return m_rows & (tl.load(p_present + o_rows, mask=m_rows, other=0) != 0)
    else:
        return m_rows


@triton.jit
def reciprocal(b_mass):
    """Return ``1 / mass``, and 0 where the mass is 0: a query that sees no key gets 0."""
    return tl.where(b_mass == 0, 0.0, 1 / tl.where(b_mass == 0, 1.0, b_mass))


@triton.jit
def inverse_mass(p_mass, o_rows, m_rows):
    """Read the masses of the queries of one head, and return their ``reciprocal``."""
    return reciprocal(tl.load(p_mass + o_rows, mask=m_rows, other=0))


@triton.jit
def inverse_length(b_x):
    """Return ``1 / max(|x|, 1e-6)`` of each row, float32 ``[rows]``.

    Squares of float16 may leave its range, so the norm is made in float32, and the guard is put on
    the square: one instruction, and finite at 0.
    """
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.maximum(tl.sum(b_x * b_x, 1), 1e-12))


@triton.jit
def sum_of_parts(p, part, parts, m, BLOCK_P: tl.constexpr):
    """Return the sum of what lies at ``p [X]`` in each of the parts, ``part`` elements apart;
    float32.

    BLOCK_P parts are read at once, and added in an order that no timing changes.
    """
    o_p = tl.arange(0, BLOCK_P)
    b_sums = tl.zeros([BLOCK_P, p.shape[0]], tl.float32)
    for start in range(0, parts, BLOCK_P):
        p_part = p[None, :] + (start + o_p).to(tl.int64)[:, None] * part
        b_sums += tl.load(p_part, mask=(start + o_p < parts)[:, None] & m[None, :], other=0)
    return tl.sum(b_sums, 0)
