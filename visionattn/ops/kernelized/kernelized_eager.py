"""Sums of values and weights of kernelized attention, chunked, as one operator with its gradient.

Each chunk of tokens is mapped to features in a buffer (``kernelized_chunks.py``), in the forward
pass and again in the backward pass. Autograd saves q, k and v, and for the bidirectional efficient
form the state. Loops over tokens are inside the operator: a compiler sees one node for any N.

In most passes values have an extra column of ones, ``v1 = [v, 1]``, so that one product gives the
sums of values and the mass. The letters are ``e1 = e + 1``, ``f`` features, and
``g = images * heads`` of one chunk.

A causal pass works on segments of several blocks of 64 tokens. Batched products compute the masked
scores within all blocks of a segment, the state of each block, and the state before each block:

    segment  | block 0 | block 1 | ... |  state before block b = running state + states of 0 .. b-1

The relative term and the division are in ``kernelized_attention.py``.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from visionattn.ops.attention_sums import (
    accumulation_dtype,
    add_product,
    product_dtype,
    write_product,
)
from visionattn.ops.chunking import chunks
from visionattn.ops.form_choice import form_of_shapes
from visionattn.ops.kernelized.kernelized_chunks import Features, Rows, WithMass, plan_chunks, put
from visionattn.ops.nonfinite import apart, masked, skips_idle_rows
from visionattn.ops.operator import contiguous_like, differentiate, form_ran, operator
from visionattn.ops.quadratic import blocked_scores, blocked_scores_backward

BLOCK_TOKENS = 64


def _join(s: Tensor, z: Tensor, b: slice, dtype: torch.dtype) -> Tensor:
    """Join S ``[B, h, f, e]`` and Z ``[B, h, f]`` of some images into one ``[g, f, e1]``."""
    return torch.cat([s[b], z[b].unsqueeze(3)], dim=3).flatten(0, 1).to(dtype)


def _efficient_forward(q: Features, k: Features, v: WithMass, outputs: tuple[Tensor, ...]) -> None:
    """Write values, mass and state to ``outputs``.

    Values and mass have separate products: values need no copy with an extra column, and the width
    of the products stays e.
    """
    values, mass, s, z = outputs
    n, m = q.x.shape[2], k.x.shape[2]
    images, size = plan_chunks(values, max(n, m), max(k.width, v.width))
    for b in images:
        own, own_mass, state, keys_sum = (x[b].flatten(0, 1) for x in outputs)
        state.zero_(), keys_sum.zero_()
        for t in chunks(m, size):
            keys = k.load(b, t)
            add_product(state, keys.mT, v.x[b, :, t].to(v.dtype).flatten(0, 1))
            keys_sum += keys.sum(1)
        read, read_sum = state.to(q.dtype), keys_sum.unsqueeze(2).to(q.dtype)
        for t in chunks(n, size):
            queries = q.load(b, t)
            write_product(own[:, t], queries, read)
            own_mass[:, t] = torch.bmm(queries, read_sum).squeeze(2)


def _zero_state(k: Features, v: WithMass, b: slice) -> Tensor:
    x = k.x[b]
    return x.new_zeros(x.shape[0] * x.shape[1], k.width, v.width, dtype=k.dtype)


def _efficient_backward(
    q: Features, k: Features, v: WithMass, g: WithMass, state, d_state, grads
) -> None:
    (dq, dk, dv), n, m = grads, q.x.shape[2], k.x.shape[2]
    images, size = plan_chunks(dq, max(n, m), max(k.width, v.width))
    for b in images:
        ds, s, own_dv = d_state(b), state(b), dv[b].flatten(0, 1)
        # Queries: add to the gradient of the state, and compute dq from the state.
        for t in chunks(n, size):
            grad = g.load(b, t)
            ds.baddbmm_(q.load(b, t).mT, grad)
            q.store(torch.bmm(grad, s.mT), b, t, dq)
        # Keys and values: compute dk and dv from the gradient of the state.
        for t in chunks(m, size):
            write_product(own_dv[:, t], k.load(b, t), ds[..., :-1])
            k.store(torch.bmm(v.load(b, t), ds.mT), b, t, dk)


def _blocks(x: Tensor) -> Tensor:
    """Cut ``[g, T, c]`` into blocks, ``[g * T / 64, 64, c]``; copy it if the tokens of a head are
    not contiguous.
    """
    return x.reshape(-1, BLOCK_TOKENS, x.shape[2])


def _states_of_blocks(x: Tensor, y: Tensor, running: Tensor, *, reverse: bool = False) -> Tensor:
    """Return the state before each block (with ``reverse``: after it), ``[g * T / 64, f, e1]``; add
    the states of all blocks to ``running``.

    Args:
        x, y: ``[g, T, f]`` and ``[g, T, e1]``; the state of a block is ``x^T y``.
        running: ``[g, f, e1]``, the state before (after) the first (last) block.
    """
    own = torch.bmm(_blocks(x).mT, _blocks(y)).view(x.shape[0], -1, x.shape[2] * y.shape[2])
    # A product with a triangle of ones sums the states of all blocks before (or after) each block.
    others = own.new_ones(own.shape[1], own.shape[1])
    others = others.triu_(1) if reverse else others.tril_(-1)
    start = running.flatten(1).unsqueeze(1)
    states = torch.baddbmm(start, others.expand(x.shape[0], -1, -1), own).view(
        -1, x.shape[2], y.shape[2]
    )
    running += own.sum(1).view_as(running)
    return states


def _causal_forward(q: Features, k: Features, v: WithMass, outputs: tuple[Tensor, ...]) -> None:
    """Write values, mass and state, with separate products for values and mass as in
    ``_efficient_forward``.
    """
    values, mass, s, z = outputs
    rows, n, m = Rows(v.x, v.dtype), q.x.shape[2], k.x.shape[2]
    images, size = plan_chunks(values, max(n, m), k.width + v.width, BLOCK_TOKENS)
    for b in images:
        running, running_sum = s[b].flatten(0, 1).zero_(), z[b].flatten(0, 1).unsqueeze(2).zero_()
        # All blocks of a segment at once: earlier blocks enter through the state before the block,
        # keys of the query's own block through masked scores.
        for start in range(0, n, size):
            t = slice(start, start + size)
            queries, keys, x = (_blocks(part.load(b, t)) for part in (q, k, rows))
            states = _before_each_block(torch.bmm(keys.mT, x), running)
            sums = _before_each_block(keys.sum(1).unsqueeze(2), running_sum)
            scores = torch.bmm(queries, keys.mT).tril_()
            put(
                torch.bmm(scores, x).baddbmm_(queries, states).view(len(running), -1, x.shape[2]),
                b,
                t,
                values,
            )
            own_mass = scores.sum(2).unsqueeze(2).baddbmm_(queries, sums)
            put(own_mass.view(len(running), -1, 1), b, t, mass.unsqueeze(3))
        for start in range(-(-n // size) * size, m, size):  # keys that no query sees
            t = slice(start, start + size)
            keys = k.load(b, t)
            running.baddbmm_(keys.mT, rows.load(b, t))
            running_sum += keys.sum(1).unsqueeze(2)


def _before_each_block(own: Tensor, running: Tensor) -> Tensor:
    """Return for each block ``running [g, f, c]`` plus the sums ``own [g * blocks, f, c]`` of all
    blocks before it; add the sums of all blocks to ``running``.
    """
    own = own.view(running.shape[0], -1, *running.shape[1:])
    out, state = torch.empty_like(own), running
    for i in range(own.shape[1]):
        out[:, i] = state
        state += own[:, i]
    return out.flatten(0, 1)


def _causal_backward(q: Features, k: Features, v: WithMass, g: WithMass, d_state, grads) -> None:
    """Write dq in a forward sweep, and dk and dv in a backward sweep.

    Source: Katharopoulos et al. 2020, eq. 13 to 15; the mass is ours.
    """
    (dq, dk, dv), n, m = grads, q.x.shape[2], k.x.shape[2]
    images, size = plan_chunks(dq, max(n, m), k.width + v.width, BLOCK_TOKENS)
    segments = [slice(start, start + size) for start in range(0, max(n, m), size)]
    for b in images:
        # Forward: dq from the state of the keys before each query.
        running = _zero_state(k, v, b)
        for t in segments[: -(-n // size)]:
            grad, keys, x = g.load(b, t), k.load(b, t), v.load(b, t)
            states = _states_of_blocks(keys, x, running)
            scores = torch.bmm(_blocks(grad), _blocks(x).mT).tril_()
            d_queries = torch.bmm(scores, _blocks(keys)).baddbmm_(_blocks(grad), states.mT)
            q.load(b, t)
            q.store(d_queries.view_as(keys), b, t, dq)
        # Backward: dk and dv from the gradient of the state, which sums over later queries. It
        # starts from the upstream gradient of S and Z.
        running = d_state(b)
        for t in segments[-(-m // size) :]:  # queries that see all keys
            running.baddbmm_(q.load(b, t).mT, g.load(b, t))
        for t in reversed(segments[: -(-m // size)]):
            grad, queries, keys, x = g.load(b, t), q.load(b, t), k.load(b, t), v.load(b, t)
            states = _states_of_blocks(queries, grad, running, reverse=True)
            scores = torch.bmm(_blocks(queries), _blocks(keys).mT).tril_()
            d_values = torch.bmm(scores.mT, _blocks(grad)).baddbmm_(_blocks(keys), states)
            put(d_values.view_as(x), b, t, dv)
            d_scores = torch.bmm(_blocks(grad), _blocks(x).mT).tril_()
            d_keys = torch.bmm(d_scores.mT, _blocks(queries)).baddbmm_(_blocks(x), states.mT)
            k.store(d_keys.view_as(keys), b, t, dk)


def _direct_forward(
    q: Features, k: Features, v: WithMass, outputs: tuple[Tensor, ...], causal: bool
) -> None:
    values, mass, s, z = outputs
    n, m = q.x.shape[2], k.x.shape[2]
    for b in plan_chunks(values, max(n, m), max(k.width, v.width))[0]:
        keys, x = k.load(b, slice(0, m)), v.load(b, slice(0, m))
        put(
            blocked_scores(q.load(b, slice(0, n)), keys, x, causal=causal),
            b,
            slice(None),
            values,
            mass,
        )
        put(torch.bmm(keys.mT, x), b, slice(None), s, z)


def _direct_backward(
    q: Features, k: Features, v: WithMass, g: WithMass, d_state, grads, causal: bool
) -> None:
    (dq, dk, dv), n, m = grads, q.x.shape[2], k.x.shape[2]
    for b in plan_chunks(dq, max(n, m), max(k.width, v.width))[0]:
        queries, keys = slice(0, n), slice(0, m)
        operands = g.load(b, queries), q.load(b, queries), k.load(b, keys), v.load(b, keys)
        d_queries, d_keys, d_values = blocked_scores_backward(*operands, causal=causal)
        ds = d_state(b)
        put(d_values.baddbmm_(operands[2], ds), b, keys, dv)
        k.store(d_keys.baddbmm_(operands[3], ds.mT), b, keys, dk)
        q.store(d_queries, b, queries, dq)


def form_taken(form: str, causal: bool, q_shape: tuple[int, ...], v_shape: tuple[int, ...]) -> str:
    """Return "direct" or "efficient" for ``q [B, h, N, d]`` and ``v [B, h, M, e]``: ``form``, or
    for "auto" the choice of ``choose_form``.
    """
    if form != "auto":
        return form
    return form_of_shapes("kernelized causal" if causal else "kernelized", q_shape, v_shape)


def _operands(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, feature_map: str, dtype: torch.dtype
):
    """Return loaders of queries, keys and values in ``dtype``, the dtype of products."""
    absent = None if key_mask is None else ~key_mask
    return (
        Features(q, feature_map, dtype),
        Features(k, feature_map, dtype, absent),
        WithMass(masked(v, key_mask), dtype),
    )


def flops(q, v, causal: bool, form: str, *, backward: bool) -> int:
    """Count 2 times the multiply-adds of the products, for features ``[B, h, N, f]`` and values
    ``[B, h, M, e]``; the mass counts as a column.
    """
    (batch, heads, n, f), m, e1 = q, v[2], v[3] + 1
    state, pair = f * e1, (3 * f + 2 * e1 if backward else f + e1)
    if form_taken(form, causal, q, v) == "direct":
        first = min(n, m)
        pairs = first * (first + 1) // 2 + (n - first) * m if causal else n * m
        total = pairs * pair + (2 if backward else 1) * m * state
    elif not causal:
        total = (2 if backward else 1) * (n + m) * state
    elif not backward:
        total = (n + m) * state + n * BLOCK_TOKENS * (f + e1)
    else:
        total = (2 * n + 3 * m) * state + (n + 2 * m) * BLOCK_TOKENS * (f + e1)
    return 2 * batch * heads * total


def _empty_sums(q: Tensor, k: Tensor, v: Tensor, narrow: bool) -> tuple[Tensor, ...]:
    """Return uninitialized memory for values, mass, S and Z."""
    (batch, heads, n, d), e, dtype = q.shape, v.shape[3], accumulation_dtype(q, k, v)
    shapes = (batch, heads, n), (batch, heads, d, e), (batch, heads, d)
    values = q.new_empty(batch, heads, n, e, dtype=v.dtype if narrow else dtype)
    return values, *(q.new_empty(shape, dtype=dtype) for shape in shapes)


@operator(fake=_empty_sums, flops=partial(flops, backward=False))
def kernel_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    feature_map: str,
    causal: bool,
    form: str,
    narrow: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the sums of values and weights under ``w_ij = phi(q_i) . phi(k_j)``, and the state of
    the keys.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``, any strides and floating
            point dtypes.
        key_mask: bool ``[B, M]``, True takes part. Contents of other keys have no effect.
        feature_map: "elu1", "relu", or "given": q and k are features already.
        causal: query i attends to keys ``j <= i`` only, queries from M on to all keys.
        form: "direct" works on blocks of scores, O(N M (d + e)); "efficient" is O((N + M) d e);
            "auto" chooses the form expected to be faster, in compiled graphs at run time.
        narrow: round the sums of values to the dtype of v; only without gradients.

    Returns:
        values ``[B, h, N, e]``, mass ``[B, h, N]``, and the state of all keys, S ``[B, h, d, e]``
        and Z ``[B, h, d]``, including keys that no query sees; float32 (float64 if any input is).

    Source: Katharopoulos et al. 2020, eq. 6 and, causal, eq. 9 to 12; segments and blocks are ours.
    """
    nan_term = None
    if causal:
        v, nan_term = apart(v, key_mask, q.shape[2])
    # Causal passes add many states: their products stay in the dtype of sums.
    dtype = accumulation_dtype(q, k, v) if causal else product_dtype(q, k, v)
    queries, keys, x = _operands(q, k, v, key_mask, feature_map, dtype)
    outputs = _empty_sums(q, k, v, narrow)
    form = form_taken(form, causal, q.shape, v.shape)
    with form_ran("kernelized causal" if causal else "kernelized", form):
        if form == "direct":
            _direct_forward(queries, keys, x, outputs, causal)
        else:
            (_causal_forward if causal else _efficient_forward)(queries, keys, x, outputs)
    if nan_term is not None:
        outputs[0].add_(nan_term)
    return outputs  # type: ignore[return-value]


def _state_not_needed(causal: bool, form: str) -> Sequence[str]:
    """Return names of tensors that autograd need not save: only the bidirectional efficient form
    reads the state.
    """
    return ("s", "z") if causal or form == "direct" else ()


@operator(fake=lambda q, k, v: contiguous_like(q, k, v), flops=partial(flops, backward=True))
@skips_idle_rows("d_values d_mass", rows="q", later="k v")
def kernel_sums_backward(
    d_values: Tensor,
    d_mass: Tensor,
    d_s: Tensor | None,
    d_z: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    s: Tensor | None,
    z: Tensor | None,
    feature_map: str,
    causal: bool,
    form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``kernel_sums`` with respect to q, k and v, in their dtypes.

    Features are recomputed.
    """
    # Products are in the dtype of sums, because the gradients of dq through values and through mass
    # nearly cancel.
    queries, keys, x = _operands(q, k, v, key_mask, feature_map, accumulation_dtype(q, k, v))
    grad = WithMass(d_values, x.dtype, d_mass)
    grads = contiguous_like(q, k, v)

    def d_state(b: slice) -> Tensor:
        start = _zero_state(keys, x, b).unflatten(0, q[b].shape[:2])
        if d_s is not None:
            start[..., :-1] = d_s[b]
        if d_z is not None:
            start[..., -1] = d_z[b]
        return start.flatten(0, 1)

    if form_taken(form, causal, q.shape, v.shape) == "direct":
        _direct_backward(queries, keys, x, grad, d_state, grads, causal)
    elif causal:
        _causal_backward(queries, keys, x, grad, d_state, grads)
    else:
        _efficient_backward(
            queries, keys, x, grad, lambda b: _join(s, z, b, x.dtype), d_state, grads
        )
    return grads  # type: ignore[return-value]


differentiate(
    kernel_sums,
    kernel_sums_backward,
    outputs="values mass s z",
    gradients="q k v",
    forget=_state_not_needed,
)
