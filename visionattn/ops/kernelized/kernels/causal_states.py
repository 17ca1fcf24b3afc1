"""What the sweeps of causal kernelized attention share: segments, the states they start from, and
how chunks are read.

The state of a segment starts from the sum of the segments before it, or after it. Each segment's
own sum is made first; then they are added in order, and none is ever taken off again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from visionattn.ops.gpu import launch
from visionattn.ops.gpu.language import phi, read, reciprocal
from visionattn.ops.gpu.sums import sums_of_parts
from visionattn.ops.kernelized.kernels.state import states_of_segments

CHUNK = 64
"""Tokens of which a segment has a whole number of times; every BLOCK_N of the causal sweeps divides
it.
"""


@triton.jit
def features_of(x, m_n, o_d, D: tl.constexpr, MAP: tl.constexpr):
    """Return ``phi`` of x, 0 outside the tokens of ``m_n`` and the width; float32."""
    return tl.where(m_n[:, None] & (o_d < D)[None, :], phi(x, MAP), 0)


@triton.jit
def keys_of(
    p_k,
    p_v,
    p_present,
    o_n,
    m_n,
    k_token,
    v_token,
    o_d,
    o_e,
    D: tl.constexpr,
    E: tl.constexpr,
    MAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Read keys, their features and values of one chunk, 0 for those that take no part."""
    if MASKED:
        m_n = m_n & (tl.load(p_present + o_n, mask=m_n, other=0) != 0)
    b_k = read(p_k, o_n, k_token, o_d, m_n, D, True)
    b_v = read(p_v, o_n, v_token, o_e, m_n, E, True)
    return b_k, features_of(b_k, m_n, o_d, D, MAP), b_v


@triton.jit
def reciprocal_of(p_mass, o_n, m_n, factor):
    """Return ``factor / mass`` of one chunk, 0 where the mass is 0; float32.

    Features of queries are multiplied by it: half precision may not hold a gradient divided by a
    small mass.
    """
    return factor * reciprocal(tl.load(p_mass + o_n, mask=m_n, other=0))


def options_of(name: str, q: Tensor, v: Tensor) -> dict[str, object]:
    """Return the compile-time values of a kernel, whose chunks have to fit segments."""
    options = launch.options(name, q, v)
    assert CHUNK % options["BLOCK_N"] == 0, (
        f"{name}: BLOCK_N = {options['BLOCK_N']} does not divide {CHUNK}"
    )
    return options


def segments_of(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Return into how many segments to cut the tokens of ``q [B, h, N, d]``, and how many tokens
    each has: a multiple of ``CHUNK``.
    """
    batch, heads, tokens, d = q.shape
    resident = launch.resident_programs("causal means", d, v.shape[3], q.dtype, q.device)
    parts = launch.segments(tokens, batch * heads, CHUNK, resident)
    # Whole chunks for each; rounded up, fewer segments may be enough.
    segment_tokens = max(1, launch.cdiv(tokens, parts * CHUNK)) * CHUNK
    return max(1, launch.cdiv(tokens, segment_tokens)), segment_tokens


def states_before(k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str) -> Tensor:
    """Return the state of all keys before each segment, ``[parts, length of a state]``, float32."""
    (batch, heads, _, d), e = k.shape, v.shape[3]
    parts, segment_tokens = segments_of(k, v)
    if parts == 1:
        return k.new_zeros(parts, batch * heads * d * (e + 1), dtype=torch.float32)
    return sums_of_parts(
        states_of_segments(k, v, key_mask, feature_map, parts, segment_tokens, 1.0), "before"
    )
