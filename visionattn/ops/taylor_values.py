"""Sums of values under TaylorShift's weights: the two forms, chunked, as one operator with its gradient.

Everything here sees flattened heads: ``q [G, N, d]``, ``k [G, M, d]``, ``v [G, M, e]`` with ``G = B * h``, in float32 or
float64. Loops over tokens and the choice of the form by length stand inside the operator, so that a compiler sees one
node whatever N is. Masks, normalisation, the sum of the weights and the division belong to ``taylorshift.py``.
"""

import torch
from torch import Tensor

from visionattn.ops.blocked import blocked_scores, blocked_scores_backward, chunks
from visionattn.ops.sums import without_autocast

CHUNK_TOKENS = 512
BUFFER_ELEMENTS = 1 << 21


def num_features(d: int) -> int:
    """Distinct products ``x_i x_j`` of a vector of width d: ``d (d + 1) / 2``."""
    return d * (d + 1) // 2


def feature_weights(d: int, a: float, like: Tensor) -> Tensor:
    """Weights ``[F, 1]`` that make packed products count like all ``d * d``: a on the diagonal, 2a off it."""
    weights = like.new_full((num_features(d), 1), 2 * a)
    weights[_row_starts(d)] = a
    return weights


def _row_starts(d: int) -> list[int]:
    """Where the products of ``x_i`` with ``x_i .. x_(d-1)`` begin among the packed features, for each i."""
    return [i * d - i * (i - 1) // 2 for i in range(d)]


def _features(x: Tensor, out: Tensor) -> Tensor:
    """Packed products of ``x [g, d, T]`` into ``out [g, F, >= T]``: tokens are contiguous, one multiply per row of x."""
    d, tokens = x.shape[1:]
    features = out[: x.shape[0], :, :tokens]
    for i, start in enumerate(_row_starts(d)):
        torch.mul(x[:, i:], x[:, i : i + 1], out=features[:, start : start + d - i])
    return features


def _features_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient ``[g, d, T]`` of the packed products of ``x [g, d, T]`` for ``grad [g, F, T]``."""
    d = x.shape[1]
    out = torch.zeros_like(x)
    for i, start in enumerate(_row_starts(d)):
        rows = grad[:, start : start + d - i]
        out[:, i] += torch.linalg.vecdot(rows, x[:, i:], dim=1)
        out[:, i:].addcmul_(rows, x[:, i : i + 1])
    return out


def _feature_chunks(groups: int, tokens: int, d: int):
    """Pairs of slices (heads, tokens) whose features fit the buffer."""
    heads = max(1, BUFFER_ELEMENTS // (num_features(d) * min(tokens, CHUNK_TOKENS)))
    return [(g, t) for g in chunks(groups, heads) for t in chunks(tokens, CHUNK_TOKENS)]


def _buffer(x: Tensor) -> Tensor:
    groups, tokens, d = x.shape
    chunk = min(tokens, CHUNK_TOKENS)
    heads = min(groups, max(1, BUFFER_ELEMENTS // (num_features(d) * chunk)))
    return x.new_empty(heads, num_features(d), chunk)


def reduce_features(x: Tensor, y: Tensor) -> Tensor:
    """``phi2(x)^T y``: ``[G, F, e]`` for ``x [G, N, d]`` and ``y [G, N, e]``, F packed products."""
    state = y.new_zeros(x.shape[0], num_features(x.shape[2]), y.shape[2])
    buffer = _buffer(x)
    for g, t in _feature_chunks(*x.shape):
        state[g].baddbmm_(_features(x[g, t].transpose(1, 2).contiguous(), buffer), y[g, t])
    return state


def expand_features(x: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """``out + phi2(x) state`` in place: ``[G, N, e]`` for ``x [G, N, d]`` and ``state [G, F, e]``."""
    buffer = _buffer(x)
    for g, t in _feature_chunks(*x.shape):
        features = _features(x[g, t].transpose(1, 2).contiguous(), buffer)
        out[g, t].baddbmm_(features.transpose(1, 2), state[g])
    return out


def expand_features_backward(x: Tensor, state: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """``out`` plus the gradient of ``sum(phi2(x) state * y)`` with respect to ``x``, in place: ``[G, N, d]``."""
    for g, t in _feature_chunks(*x.shape):
        grad = torch.bmm(state[g], y[g, t].transpose(1, 2))
        out[g, t] += _features_backward(x[g, t].transpose(1, 2).contiguous(), grad).transpose(1, 2)
    return out


def efficient_is_faster(n: int, m: int, d: int) -> bool:
    """Whether the efficient form is expected to be the faster one: ``N M`` against the packed N0 of width d, squared.

    Half of the paper's N0 (eq. 9 there), because the packed features are half as many as the paper's.
    """
    return n * m > ((4 * d**3 + 10 * d**2 + 9 * d + 4) / (8 * d + 12)) ** 2


def _takes_efficient(form: str, q: Tensor, k: Tensor) -> bool:
    return form == "efficient" or (form == "auto" and efficient_is_faster(q.shape[1], k.shape[1], q.shape[2]))


@torch.library.custom_op("visionattn::taylor_values", mutates_args=())
def taylor_values(q: Tensor, k: Tensor, v: Tensor, a: float, b: float, c: float, form: str) -> Tensor:
    """``sum_j (a x_ij^2 + b x_ij + c) v_j`` with ``x_ij = q_i . k_j``: ``[G, N, e]``.

    Args:
        q, k, v: ``[G, N, d]``, ``[G, M, d]``, ``[G, M, e]``, float32 or float64.
        a, b, c: coefficients, ``a > 0``.
        form: "direct" completes the square and works on blocks of scores, O(N M d); "efficient" goes through the packed
            products of each key, O((N + M) d^2 e); "auto" takes the one that is expected to be faster.

    Source: TaylorShift, section 3; the packed products and the completed square are ours.
    """
    if not _takes_efficient(form, q, k):
        rest = (c - b * b / (4 * a)) * v.sum(1, keepdim=True)
        return blocked_scores(q, k, v, shift=b / (2 * a), square=True).mul_(a).add_(rest)
    state = reduce_features(k, v).mul_(feature_weights(q.shape[2], a, v))
    out = torch.baddbmm(c * v.sum(1, keepdim=True), q, torch.bmm(k.transpose(1, 2), v), alpha=b)
    return expand_features(q, state, out)


@taylor_values.register_fake
def _(q, k, v, a, b, c, form):
    return v.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("visionattn::taylor_values_backward", mutates_args=())
def taylor_values_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, a: float, b: float, c: float, form: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``taylor_values`` with respect to q, k and v for ``grad [G, N, e]``."""
    if not _takes_efficient(form, q, k):
        dq, dk, dv = blocked_scores_backward(a * grad, q, k, v, shift=b / (2 * a), square=True)
        return dq, dk, dv.add_((c - b * b / (4 * a)) * grad.sum(1, keepdim=True))
    weights = feature_weights(q.shape[2], a, v)
    state = reduce_features(k, v).mul_(weights)
    d_state = reduce_features(q, grad).mul_(weights)
    d_kv = torch.bmm(q.transpose(1, 2), grad).mul_(b)
    dq = torch.bmm(grad, torch.bmm(v.transpose(1, 2), k)).mul_(b)
    dq = expand_features_backward(q, state, grad, out=dq)
    dk = expand_features_backward(k, d_state, v, out=torch.bmm(v, d_kv.transpose(1, 2)))
    dv = torch.baddbmm(c * grad.sum(1, keepdim=True), k, d_kv)
    return dq, dk, expand_features(k, d_state, dv)


@taylor_values_backward.register_fake
def _(grad, q, k, v, a, b, c, form):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v)


def _backward(ctx, grad):
    with without_autocast(grad):
        return *taylor_values_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None, None


taylor_values.register_autograd(_backward, setup_context=_setup_context)
