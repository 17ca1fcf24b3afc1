"""Pairs of the queries and keys of tiles, in the order in which matrix units want a left operand.

A tile has T queries and some keys, and a warp works on a tile. In a product of m16n8k16, lane
``4 g + t`` of the warp holds of the left operand the queries ``g`` and ``g + 8`` and the keys
``2 t``, ``2 t + 1``, ``2 t + 8`` and ``2 t + 9``. Weights gathered in axes of lanes, tiles and
registers are that operand already: they need no move through shared memory where the compiler sees
it, and elsewhere the compiler moves them.
"""

import triton
import triton.language as tl

LANES_LAST = tl.constexpr(
    tuple(int(number) for number in triton.__version__.split(".")[:2]) >= (3, 9)
)
"""Triton 3.9 spreads the threads of a gather from its last axis on, so that lanes come last,
``[registers, TILES, 8, 4]``; 3.6 spreads them from the first, ``[4, 8, TILES, registers]``.
"""


@triton.jit
def pairs(QUERIES: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Return, for each pair, which query of all tiles and which key of its tile it has.

    The shape is that of ``LANES_LAST``: ``[registers, TILES, 8, 4]`` or
    ``[4, 8, TILES, registers]``.
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
    # Registers count, fastest first: two neighbouring keys, groups of 8 keys, then groups of 8
    # queries.
    return o_tile * QUERIES + o_r // (KEYS // 4) * 8 + o_g, o_r // 2 % (
        KEYS // 8
    ) * 8 + o_t * 2 + o_r % 2


@triton.jit
def as_operand(b_pairs, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Turn what was gathered in the order of ``pairs`` into ``[TILES, QUERIES, KEYS]``."""
    # The number of a query is (group of 8, g), that of a key (group of 8, t, one of two): bring
    # these parts together.
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
