"""The packed second-order features of keys reduced to a state, and read by queries: two operators
with their gradients.

Flattened heads, ``G = B * h``; float32 or float64. No tensor of features of all tokens is ever held
or kept. Weights of the features, the other sums and the division belong to ``states.py``.
"""

import torch
from torch import Tensor

from visionattn.ops.sums import no_double_backward, without_autocast
from visionattn.ops.taylorshift.features import (
    expand_features,
    expand_features_backward,
    num_features,
    reduce_features,
)


@torch.library.custom_op("visionattn::feature_state", mutates_args=())
def feature_state(k: Tensor, v: Tensor) -> Tensor:
    """``sum_j phi2(k_j) v_j^T``: ``[G, F, e]`` for ``k [G, M, d]`` and ``v [G, M, e]``."""
    return (
        reduce_features(k, v)
        if k.shape[1]
        else v.new_zeros(k.shape[0], num_features(k.shape[2]), v.shape[2])
    )


@feature_state.register_fake
def _(k, v):
    return v.new_empty(k.shape[0], num_features(k.shape[2]), v.shape[2])


@torch.library.custom_op("visionattn::feature_state_backward", mutates_args=())
def feature_state_backward(grad: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``feature_state`` with respect to k and v for ``grad [G, F, e]``."""
    dk, dv = k.new_zeros(k.shape), v.new_zeros(v.shape)
    if not k.shape[1]:
        return dk, dv
    return expand_features_backward(k, grad, v, dk), expand_features(k, grad, dv)


@feature_state_backward.register_fake
def _(grad, k, v):
    return k.new_empty(k.shape), v.new_empty(v.shape)


@torch.library.custom_op("visionattn::expand_state", mutates_args=())
def expand_state(q: Tensor, state: Tensor) -> Tensor:
    """``phi2(q_i) state``: ``[G, N, e]`` for ``q [G, N, d]`` and ``state [G, F, e]``."""
    out = state.new_zeros(*q.shape[:2], state.shape[2])
    return expand_features(q, state, out) if q.shape[1] else out


@expand_state.register_fake
def _(q, state):
    return state.new_empty(q.shape[0], q.shape[1], state.shape[2])


@torch.library.custom_op("visionattn::expand_state_backward", mutates_args=())
def expand_state_backward(grad: Tensor, q: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``expand_state`` with respect to q and state for ``grad [G, N, e]``."""
    if not q.shape[1]:
        return torch.zeros_like(q), torch.zeros_like(state)
    return expand_features_backward(q, state, grad, q.new_zeros(q.shape)), reduce_features(q, grad)


@expand_state_backward.register_fake
def _(grad, q, state):
    return q.new_empty(q.shape), state.new_empty(state.shape)


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward_of(backward: torch.library.CustomOpDef):
    """What autograd calls: the operator of the backward pass on the gradient and the inputs, in
    their own dtypes.
    """

    def run(ctx, grad):
        with without_autocast(grad):
            return backward(grad.contiguous(), *ctx.saved_tensors)

    return run


feature_state.register_autograd(_backward_of(feature_state_backward), setup_context=_keep_inputs)
expand_state.register_autograd(_backward_of(expand_state_backward), setup_context=_keep_inputs)
no_double_backward(feature_state_backward)
no_double_backward(expand_state_backward)
