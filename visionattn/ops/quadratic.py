"""Sums of values under weights that are scores or their squares, by blocks of queries.

The scores of a block stay in cache: time is quadratic, memory linear. The functions take plain
tensors and do not use autograd.
"""

import torch
from torch import Tensor

from visionattn.ops.attention_sums import add_product, wide
from visionattn.ops.chunking import chunks

BLOCK_QUERIES = 256
BLOCK_ELEMENTS = 1 << 20


def _blocks(q: Tensor, k: Tensor):
    """Return blocks as pairs of slices (heads, queries).

    A block has at most ``BLOCK_ELEMENTS`` scores, or ``BLOCK_QUERIES`` queries of one head.
    """
    queries = max(1, min(BLOCK_QUERIES, q.shape[1]))
    heads = max(1, BLOCK_ELEMENTS // max(1, queries * k.shape[1]))
    return [(g, t) for g in chunks(q.shape[0], heads) for t in chunks(q.shape[1], queries)]


def _seen(t: slice, num_keys: int, causal: bool) -> slice:
    """Return the keys that at least one query of a block may attend to."""
    return slice(0, min(t.stop, num_keys) if causal else num_keys)


def _mask_future(scores: Tensor, t: slice, causal: bool) -> Tensor:
    """If ``causal``, set ``scores [g, T, keys]`` of the queries ``t`` to 0, in place, where the key
    comes after the query.
    """
    if causal:  # every query of the block sees all keys before the block
        scores[:, :, t.start :].tril_()
    return scores


def _scores(q: Tensor, k: Tensor, shift: float) -> Tensor:
    return torch.baddbmm(q.new_full((1, 1, 1), shift), q, k.transpose(1, 2))


def blocked_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shift: float = 0.0,
    square: bool = False,
    causal: bool = False,
) -> Tensor:
    """Return ``sum_j w_ij v_j`` with ``w = q.k + shift`` or its square: ``[G, N, e]``.

    Args:
        q, k, v: ``[G, N, d]``, ``[G, M, d]``, ``[G, M, e]``.
        causal: sum over ``j <= i`` only for query i.
    """
    out = v.new_empty(q.shape[0], q.shape[1], v.shape[2])
    for g, t in _blocks(q, k):
        j = _seen(t, k.shape[1], causal)
        scores = _scores(q[g, t], k[g, j], shift)
        weights = _mask_future(scores.square_() if square else scores, t, causal)
        out[g, t] = torch.bmm(weights, v[g, j])
    return out


def blocked_scores_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shift: float = 0.0,
    square: bool = False,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``blocked_scores`` in q, k and v for ``grad [G, N, e]``."""
    dq = q.new_empty(q.shape)
    dk, dv = (x.new_zeros(x.shape, dtype=wide(x.dtype)) for x in (k, v))
    for g, t in _blocks(q, k):
        j = _seen(t, k.shape[1], causal)
        # Recompute the scores: keeping them would take quadratic memory.
        scores = _mask_future(_scores(q[g, t], k[g, j], shift), t, causal)
        weights = scores.square() if square else scores
        add_product(dv[g, j], weights.mT, grad[g, t])
        # The gradient of the scores; a square adds the factor 2 x.
        d_scores = torch.bmm(grad[g, t], v[g, j].transpose(1, 2))
        if square:
            d_scores.mul_(scores).mul_(2)
        d_scores = _mask_future(d_scores, t, causal)
        dq[g, t] = torch.bmm(d_scores, k[g, j])
        add_product(dk[g, j], d_scores.mT, q[g, t])
    return dq, dk, dv
