"""Packed second-order features ``phi2``: the state of keys and values, and the product of queries
with a state, as two operators with gradients.

Heads are flattened, ``G = B * h``; tensors are float32 or float64. Features are computed by chunks
of tokens and never saved. ``states.py`` has the weights of the features, the other sums and the
division.
"""

import torch
from torch import Tensor

from visionattn.ops.chunking import chunks
from visionattn.ops.operator import contiguous_like, differentiate, operator
from visionattn.ops.taylorshift.taylorshift_features import (
    BUFFER_BYTES,
    chunk_tokens,
    fill_features,
    num_features,
    slopes,
)


def _head_and_token_chunks(x: Tensor) -> list[tuple[slice, slice]]:
    """Return pairs of slices (heads, tokens) of ``x [G, N, d]`` whose features stay in cache."""
    tokens = max(1, min(x.shape[1], chunk_tokens(x.shape[2])))
    heads = max(1, BUFFER_BYTES // (x.element_size() * num_features(x.shape[2]) * tokens))
    return [(g, t) for g in chunks(x.shape[0], heads) for t in chunks(x.shape[1], tokens)]


def _features(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x [g, T, d]`` as ``[g, d, T]``, and its features ``[g, F, T]``."""
    x = x.mT.contiguous()
    out = x.new_empty(x.shape[0], num_features(x.shape[1]), x.shape[2])
    fill_features(x, out)
    return x, out


def _reduce(x: Tensor, y: Tensor) -> Tensor:
    """Return ``phi2(x)^T y``: ``[G, F, e]`` for ``x [G, N, d]`` and ``y [G, N, e]``."""
    state = y.new_zeros(x.shape[0], num_features(x.shape[2]), y.shape[2])
    for g, t in _head_and_token_chunks(x):
        state[g].baddbmm_(_features(x[g, t])[1], y[g, t])
    return state


def _expand(x: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """Add ``phi2(x) state`` to ``out [G, N, e]`` in place, for ``x [G, N, d]`` and
    ``state [G, F, e]``.
    """
    for g, t in _head_and_token_chunks(x):
        out[g, t].baddbmm_(_features(x[g, t])[1].mT, state[g])
    return out


def _expand_backward(x: Tensor, state: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Add the gradient of ``sum(phi2(x) state * y)`` with respect to x to ``out [G, N, d]``, in
    place.
    """
    for g, t in _head_and_token_chunks(x):
        outer = (x[g, t, :, None] * y[g, t, None]).flatten(2)
        out[g, t].baddbmm_(outer, slopes(state[g], x.shape[2]).flatten(1, 2))
    return out


def _flops(x, e: int) -> int:
    """Count the products of the features of ``x [G, N, d]`` with a state or with values of e
    columns.
    """
    return 2 * x[0] * x[1] * num_features(x[2]) * e


@operator(
    fake=lambda k, v: v.new_empty(k.shape[0], num_features(k.shape[2]), v.shape[2]),
    flops=lambda k, v: _flops(k, v[2]),
)
def feature_state(k: Tensor, v: Tensor) -> Tensor:
    """Return ``sum_j phi2(k_j) v_j^T``: ``[G, F, e]`` for ``k [G, M, d]`` and ``v [G, M, e]``."""
    return (
        _reduce(k, v)
        if k.shape[1]
        else v.new_zeros(k.shape[0], num_features(k.shape[2]), v.shape[2])
    )


@operator(fake=lambda k, v: contiguous_like(k, v), flops=lambda k, v: 2 * _flops(k, v[2]))
def feature_state_backward(grad: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``feature_state`` with respect to k and v for ``grad [G, F, e]``."""
    dk, dv = k.new_zeros(k.shape), v.new_zeros(v.shape)
    if not k.shape[1]:
        return dk, dv
    grad = grad.contiguous()
    return _expand_backward(k, grad, v, dk), _expand(k, grad, dv)


@operator(
    fake=lambda q, state: state.new_empty(*q.shape[:2], state.shape[2]),
    flops=lambda q, state: _flops(q, state[2]),
)
def expand_state(q: Tensor, state: Tensor) -> Tensor:
    """Return ``phi2(q_i) state``: ``[G, N, e]`` for ``q [G, N, d]`` and ``state [G, F, e]``."""
    out = state.new_zeros(*q.shape[:2], state.shape[2])
    return _expand(q, state, out) if q.shape[1] else out


@operator(
    fake=lambda q, state: contiguous_like(q, state), flops=lambda q, state: 2 * _flops(q, state[2])
)
def expand_state_backward(grad: Tensor, q: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``expand_state`` for q and state from ``grad [G, N, e]``."""
    if not q.shape[1]:
        return torch.zeros_like(q), torch.zeros_like(state)
    grad = grad.contiguous()
    return _expand_backward(q, state, grad, q.new_zeros(q.shape)), _reduce(q, grad)


differentiate(feature_state, feature_state_backward, outputs="state", gradients="k v")
differentiate(expand_state, expand_state_backward, outputs="out", gradients="q state")
