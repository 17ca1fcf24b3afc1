"""Pairs of a tile's queries and keys, in the order that matrix units need for a left operand.

A tile has T queries and some keys, and one warp processes a tile. In a product m16n8k16, lane
``4 g + t`` of the warp holds queries ``g`` and ``g + 8`` and keys ``2 t``, ``2 t + 1``, ``2 t + 8``
and ``2 t + 9`` of the left operand. Weights gathered into a tensor with axes of lanes, tiles and
registers are already in this order. If the compiler recognizes this, they do not move through
shared memory; otherwise the result is the same, but slower.
"""

import triton
import triton.language as tl

LANES_LAST = tl.constexpr(
    tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 9)
)
"""Whether the axes of lanes come last. Triton 3.9 and later distribute the threads of a gather from
the last axis on; earlier versions start from the first axis.
"""


@triton.jit
def pairs(QUERIES: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Return the query (over all tiles) and the key (within its tile) of each pair.

    The shape follows ``LANES_LAST``: ``[registers, TILES, 8, 4]`` or ``[4, 8, TILES, registers]``.
    """
    o_r = tl.arange(0, QUERIES * KEYS // 32)
    o_tile = tl.arange(0, TILES)
    o_g = tl.arange(0, 8)
    o_t = tl.arange(0, 4)
    if LANES_LAST:
        o_r, o_tile = o_r[:, None, None, None], o_tile[None, :, None, None]
        o_g, o_t = o_g[None, None, :, None], o_t[None, None, None, :]
    else:
        o_r, o_tile = o_r[None, None, None, :], o_tile[None, None, :, None]
        o_g, o_t = o_g[None, :, None, None], o_t[:, None, None, None]
    # Registers count, fastest first: two adjacent keys, groups of 8 keys, then groups of 8 queries.
    return o_tile * QUERIES + o_r // (KEYS // 4) * 8 + o_g, o_r // 2 % (
        KEYS // 8
    ) * 8 + o_t * 2 + o_r % 2


@triton.jit
def as_operand(b_pairs, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Turn values gathered in the order of ``pairs`` into ``[TILES, QUERIES, KEYS]``."""
    # The index of a query is (group of 8, g), the index of a key is (group of 8, t, one of two).
    # Permute the axes so that the parts of each index are adjacent.
    if LANES_LAST:
        b_pairs = tl.reshape(b_pairs, [QUERIES // 8, KEYS // 8, 2, TILES, 8, 4])
        b_pairs = tl.permute(b_pairs, [3, 0, 4, 1, 5, 2])
    else:
        b_pairs = tl.reshape(b_pairs, [4, 8, TILES, QUERIES // 8, KEYS // 8, 2])
        b_pairs = tl.permute(b_pairs, [2, 3, 1, 4, 0, 5])
    return tl.reshape(b_pairs, [TILES, QUERIES, KEYS])


@triton.jit
def class_of(o_apart, HORIZON: tl.constexpr):
    """Return the class of columns of a key ``o_apart`` columns after the query."""
    return tl.minimum(tl.maximum(o_apart, -HORIZON), HORIZON) + HORIZON
