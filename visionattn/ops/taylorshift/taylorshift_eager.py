"""Sums of values and of weights under TaylorShift's weights: both forms, chunked, as one operator
with its gradient.

``taylorshift_features.py`` prepares chunks of q, k and v in the forward pass and again in the
backward pass. Autograd saves q, k, v, the moments ``K^T K`` and ``sum k`` and, for an explicit
efficient form, the state. Loops over tokens and the choice of the form are inside the operator: a
compiler sees one node for any N.

The state of the efficient form has one row per feature of ``f(x) = [phi2(x), x, 1]``. The rows are
weighted so that ``f(q) . state`` gives the sums of the values: ``state = W sum_j f(k_j) v_j^T``
with W = a or 2a for phi2, b for x and c for 1. The mass needs no features:
``a q^T (K^T K) q + b q . sum k + c M``. Both forms compute the mass in this way; only the direct
form without a temperature sums its weights instead. The relative term and the division are in
``taylorshift_attention.py``.
"""

import torch
from torch import Tensor

from visionattn.ops.attention_sums import accumulation_dtype, add_product, product_dtype, wide
from visionattn.ops.chunking import part_of
from visionattn.ops.form_choice import form_of_shapes
from visionattn.ops.nonfinite import skips_idle_rows
from visionattn.ops.operator import contiguous_like, differentiate, form_ran, operator
from visionattn.ops.quadratic import blocked_scores, blocked_scores_backward
from visionattn.ops.taylorshift.taylorshift_features import (
    Pass,
    Values,
    cancels_little,
    feature_weights,
    num_features,
    pack,
    passes,
    slopes,
)


def _product_dtype(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor | None) -> torch.dtype:
    """Return the dtype of products. Without a temperature it is the dtype of sums, because nothing
    bounds the cancellation.
    """
    return accumulation_dtype(q, k, v) if temperature is None else product_dtype(q, k, v)


def _weights(d: int, abc: tuple[float, float, float], like: Tensor) -> Tensor:
    """Return W of the features ``[phi2(x), x, 1]``, ``[F + d + 1, 1]``."""
    a, b, c = abc
    return torch.cat(
        [feature_weights(d, a, like), like.new_full((d, 1), b), like.new_full((1, 1), c)]
    )


def _reduce(step: Pass, weights: Tensor, state: Tensor, second: Tensor, first: Tensor) -> None:
    """Compute the chunk's ``state [g, F + d + 1, e]``, ``K^T K`` in ``second [g, d, d]`` and
    ``sum k`` in ``first [g, d]``.
    """
    for sums in (state, second, first):
        sums.zero_()
    for t in step.slices(step.k.x):
        key = step.k.load(t)
        add_product(state, step.features(step.across(key)), step.v.load(t))
        step.add_moments(key, second, first)
    state.mul_(weights)


def _read(
    step: Pass, abc: tuple[float, float, float], state: Tensor, moments: list, out: tuple
) -> None:
    """Compute the chunk's sums of values ``[g, N, e]`` and of weights ``[g, N]`` from the state."""
    values, mass = out
    read = state.to(step.dtype).mT
    for t in step.slices(step.q.x):
        query = step.q.load(t)
        values[:, t] = torch.bmm(read, step.features(step.across(query))).mT
        mass[:, t] = step.mass(query, abc, *moments)


def _direct_values(step: Pass, abc: tuple[float, float, float], v: Tensor) -> Tensor:
    """Return the sums ``[g, N, c]`` of ``v [g, M, c]`` by blocks of scores, under the weights
    ``a ((x + b/2a)^2 + c/a - (b/2a)^2)``.
    """
    a, b, c = abc
    query, key = (x.load(slice(None)).to(step.dtype) for x in (step.q, step.k))
    values = blocked_scores(query, key, v, shift=b / (2 * a), square=True)
    total = v.sum(1, keepdim=True, dtype=wide(v.dtype))
    return values.to(total.dtype).mul_(a).add_((c - b * b / (4 * a)) * total)


def _with_ones(step: Pass, v: Tensor) -> Tensor:
    """Return ``[v, 1]``, or ``[0, 0]`` for absent keys, so that one product gives the sums of
    values and of weights.

    The direct form uses this without a temperature, where a mass through ``K^T K`` would be as
    imprecise as the efficient form.
    """
    ones = v.new_ones(*v.shape[:2], 1)
    if step.absent is not None:
        ones.masked_fill_(step.absent.unsqueeze(2), 0)
    return torch.cat([v, ones], dim=2)


def linear_form(
    form: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    abc: tuple[float, float, float],
) -> str:
    """Return "direct" or "efficient": ``form``, or for "auto" the form expected to be faster,
    except an efficient form that would lose precision.

    With a temperature the efficient form always keeps precision.
    """
    if form != "auto":
        return form
    chosen = form_of_shapes("taylorshift", q.shape, v.shape)
    if chosen == "direct" or temperature is not None or q.device.type == "meta":
        return chosen
    # Only CPU tensors are read: reading on an accelerator would wait for it.
    keeps = q.device.type == "cpu" and cancels_little(q, k, v, key_mask, abc)
    return "efficient" if keeps else "direct"


def flops(
    q, k, v, form: str, *, backward: bool, columns: int | None = None, state_kept: bool = False
) -> int:
    """Count 2 times the multiply-adds of the products, for ``[B, h, N, d]``, ``[B, h, M, d]`` and
    ``[B, h, M, e]``.

    Args:
        columns: number of columns that the weights of the direct form multiply, if the mass is a
            sum of these weights; None: the mass is computed from ``K^T K``.
        state_kept: whether the backward pass has the state of the forward pass.
    """
    (batch, heads, n, d), m, e = q, k[2], v[3]
    groups = batch * heads
    if form == "auto":
        form = form_of_shapes("taylorshift", q, v)
    mass = (2 * n + m if backward else n + m) * d * d
    if form == "direct":
        width = columns or e
        pairs = n * m * (3 * d + 2 * width if backward else d + width)
        return 2 * groups * (pairs + (mass if columns is None else 0))
    passes = 2 * (n + m) + (0 if state_kept else m) if backward else n + m
    return 2 * groups * (passes * (num_features(d) + d + 1) * e + mass)


def _flops(q, k, v, temperature, form: str) -> int:
    columns = v[3] + 1 if temperature is None else None  # ``_with_ones``
    return flops(q, k, v, form, backward=False, columns=columns)


def _flops_backward(q, k, v, temperature, state, form: str) -> int:
    if form == "auto":
        form = form_of_shapes("taylorshift", q, v)
    if form == "direct":
        columns = v[3] + 1 if temperature is None else None
        return flops(q, k, v, form, backward=True, columns=columns)
    (batch, heads, n, d), m, e = q, k[2], v[3]
    of_values = m * (num_features(d) + d + 1) * e
    anew = 0 if state[2] else of_values + m * d * d
    return 2 * batch * heads * ((2 * n + m) * ((d + 1) * e + d) * d + of_values + anew)


def _empty_sums(q: Tensor, k: Tensor, v: Tensor, form: str) -> tuple[Tensor, ...]:
    """Return uninitialized memory for values, mass, state, ``K^T K`` and ``sum k``."""
    (batch, heads, n, d), e, dtype = q.shape, v.shape[3], accumulation_dtype(q, k, v)
    rows = num_features(d) + d + 1 if form == "efficient" else 0
    sizes = (n, e), (n,), (rows, e), (d, d), (d,)
    return tuple([q.new_empty(batch, heads, *size, dtype=dtype) for size in sizes])


@operator(fake=_empty_sums, flops=_flops)
def taylor_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    a: float,
    b: float,
    c: float,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return ``sum_j w_ij v_j`` and ``sum_j w_ij`` with ``w = a x^2 + b x + c``,
    ``x_ij = q_i . k_j``.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``, any floating point dtype and
            strides.
        temperature: ``[h]``, length to which q is scaled; k is scaled to unit length. None: both
            are unchanged.
        key_mask: bool ``[B, M]``, True takes part.
        a, b, c: coefficients, ``a > 0``.
        form: "direct" completes the square and works on blocks of scores, O(N M d); "efficient"
            uses packed products of each key, O((N + M) d^2 e); "auto" chooses as ``linear_form``.

    Returns:
        values ``[B, h, N, e]``, mass ``[B, h, N]``, and for the gradient the state
        ``[B, h, F + d + 1, e]`` (empty unless the form is "efficient"), ``K^T K [B, h, d, d]`` and
        ``sum k [B, h, d]``; float32 (float64 for float64 inputs).

    Source: TaylorShift, "Efficient TaylorShift"; the packed products, the mass and the completed
    square are ours.
    """
    dtype = _product_dtype(q, k, v, temperature)
    results = _empty_sums(q, k, v, form)
    form = linear_form(form, q, k, v, temperature, key_mask, (a, b, c))
    weights = _weights(q.shape[3], (a, b, c), results[0])
    with form_ran("taylorshift", form):
        for step in passes((q, k, v, temperature, key_mask), dtype):
            out, out_mass, own_state, *moments = (part_of(x, step.chunk) for x in results)
            if form == "efficient":
                own_state = _kept_state(own_state, weights)
                _reduce(step, weights, own_state, *moments)
                _read(step, (a, b, c), own_state, moments, (out, out_mass))
                continue
            for moment in moments:  # stay 0 without a temperature
                moment.zero_()
            value = step.v.load(slice(None))
            if temperature is None:
                both = _direct_values(step, (a, b, c), _with_ones(step, value))
                out.copy_(both[..., :-1]), out_mass.copy_(both[..., -1])
            else:
                out.copy_(_direct_values(step, (a, b, c), value))
                step.add_moments(step.k.load(slice(None)), *moments)
                out_mass.copy_(step.mass(step.q.load(slice(None)), (a, b, c), *moments))
    return results  # type: ignore[return-value]


def _kept_state(state: Tensor, weights: Tensor) -> Tensor:
    """Return the chunk's part of the state, or new memory if the state is not saved ("auto")."""
    return (
        state
        if state.shape[1]
        else state.new_empty(state.shape[0], weights.shape[0], state.shape[2])
    )


def _mass_backward(
    abc: tuple[float, float, float], query: Tensor, d_mass: Tensor, moments: list, grads: list
) -> Tensor:
    """Return the gradient of ``query [g, T, d]`` through the mass; add the gradients of ``K^T K``
    and ``sum k`` to ``grads``.
    """
    (a, b, _), (second, first), (d_second, d_first), d_mass = abc, moments, grads, d_mass[..., None]
    weighed = d_mass * query
    d_second.baddbmm_(query.mT, weighed, alpha=a)
    d_first.add_(weighed.sum(1), alpha=b)
    return torch.baddbmm(b * first.unsqueeze(1), query, second, alpha=2 * a).mul_(d_mass)


def _efficient_backward(
    step: Pass,
    abc: tuple[float, float, float],
    d_mass: Tensor,
    state: Tensor,
    moments: list,
    grads: tuple,
) -> Tensor | None:
    """Write the chunk's gradients through the efficient form; return the gradient of the length of
    the queries.

    ``S [g, (d + 1) e, d]`` are the sums over keys of the products of ``[k, 1]``, v and k. P, the
    products of ``[q, 1]`` and the upstream gradient, is ``[g, (d + 1) e, T]``. Then the gradient of
    q is ``S^T P`` and the gradient of S is ``P q^T``. Gradients of keys have the same form.
    """
    (a, b, c), (d_values, dq, dk, dv) = abc, grads
    (groups, _, e), d, d_length = state.shape, step.d, None
    sums = state.new_empty(groups, d + 1, e, d)
    sums[:, :d], sums[:, d] = slopes(state, d), state[:, -d - 1 : -1].mT
    read, d_sums = sums.flatten(1, 2).to(step.dtype).mT, torch.zeros_like(sums)
    d_moments = [torch.zeros_like(x) for x in moments]
    # Queries first: they add up the gradient of S.
    for t in step.slices(step.q.x):
        query = step.q.load(t)
        across, d_query = (
            step.across(query),
            _mass_backward(abc, query, d_mass[:, t], moments, d_moments),
        )
        outer = step.outer(across, step.across(d_values.load(t)))
        add_product(d_sums.flatten(1, 2), outer, across.mT)
        part = step.q.store(d_query.add_(torch.bmm(read, outer).mT), t, dq)
        d_length = part if d_length is None else d_length + part
    d_sums[:, :d] *= 2 * a
    d_sums[:, d] *= b
    d_state = torch.empty_like(state)
    pack(d_sums[:, :d], d_state)
    d_state[:, : -d - 1] *= feature_weights(d, 0.5, state)
    d_state[:, -d - 1 : -1] = d_sums[:, d].mT
    d_state[:, -1] = c * d_values.x.sum(1, dtype=state.dtype)
    d_state, d_sums = d_state.to(step.dtype).mT, d_sums.flatten(1, 2).to(step.dtype).mT
    d_second, d_first = d_moments
    for t in step.slices(step.k.x):
        key = step.k.load(t)
        across, d_key = (
            step.across(key),
            torch.baddbmm(d_first.unsqueeze(1), key, d_second, alpha=2),
        )
        own = torch.bmm(d_state, step.features(across))
        dv[:, t] = (own if step.absent is None else own.masked_fill_(step.absent[:, None, t], 0)).mT
        outer = step.outer(across, step.across(step.v.load(t)))
        step.k.store(d_key.add_(torch.bmm(d_sums, outer).mT), t, dk)
    return d_length


def _direct_backward(
    step: Pass,
    abc: tuple[float, float, float],
    d_mass: Tensor,
    moments: list,
    grads: tuple,
) -> Tensor | None:
    """Write the chunk's gradients through blocks of scores; return the gradient of the length of
    the queries.
    """
    (a, b, c), (d_values, dq, dk, dv), everything = abc, grads, slice(None)
    query, key, value, grad = (x.load(everything) for x in (step.q, step.k, step.v, d_values))
    rows = (x.to(step.dtype) for x in (query, key))
    if step.q.length is None:  # the mass is a column of the values
        value = _with_ones(step, value)
        grad = torch.cat([grad, d_mass.unsqueeze(2)], dim=2)
    operands = (a * grad, *rows, value)
    d_query, d_key, d_value = blocked_scores_backward(*operands, shift=b / (2 * a), square=True)
    total = grad.sum(1, keepdim=True, dtype=d_value.dtype)
    d_value = d_value.add_((c - b * b / (4 * a)) * total)[..., : dv.shape[2]]
    dv.copy_(d_value if step.absent is None else d_value.masked_fill_(step.absent.unsqueeze(2), 0))
    d_query = d_query.to(query.dtype)
    if step.q.length is not None:  # the mass is a q^T (K^T K) q + b q . sum k + c M
        d_second, d_first = d_moments = [torch.zeros_like(x) for x in moments]
        d_query += _mass_backward(abc, query, d_mass, moments, d_moments)
        d_key = torch.baddbmm(d_key, key, d_second, alpha=2).add_(d_first.unsqueeze(1))
    d_length = step.q.store(d_query, everything, dq)
    step.k.store(d_key, everything, dk)
    return d_length


@operator(
    fake=lambda q, k, v, temperature: contiguous_like(q, k, v, temperature, like=q),
    flops=_flops_backward,
)
@skips_idle_rows("d_values d_mass", rows="q")
def taylor_sums_backward(
    d_values: Tensor,
    d_mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    state: Tensor,
    second: Tensor,
    first: Tensor,
    a: float,
    b: float,
    c: float,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``taylor_sums`` with respect to q, k, v and temperature (empty if
    None).

    The upstream gradients are ``d_values [B, h, N, e]`` and ``d_mass [B, h, N]``. Features are
    recomputed.
    """
    dtype = _product_dtype(q, k, v, temperature)
    form = linear_form(form, q, k, v, temperature, key_mask, (a, b, c))
    grads = contiguous_like(q, k, v)
    d_temperature = (
        q.new_zeros(0) if temperature is None else torch.zeros_like(temperature, dtype=wide(dtype))
    )
    weights = _weights(q.shape[3], (a, b, c), second)
    for step in passes((q, k, v, temperature, key_mask), dtype):
        own_state, *moments = (part_of(x, step.chunk) for x in (state, second, first))
        own_mass = part_of(d_mass, step.chunk)
        own = (
            Values(part_of(d_values, step.chunk), dtype),
            *(part_of(x, step.chunk) for x in grads),
        )
        if form == "efficient":
            if not own_state.shape[1]:
                own_state = _kept_state(own_state, weights)
                _reduce(step, weights, own_state, *map(torch.empty_like, moments))
            d_length = _efficient_backward(step, (a, b, c), own_mass, own_state, moments, own)
        else:
            d_length = _direct_backward(step, (a, b, c), own_mass, moments, own)
        if temperature is not None:
            heads = step.chunk[1]
            d_temperature[heads] += d_length.view(-1, heads.stop - heads.start).sum(0)
    return *grads, d_temperature if temperature is None else d_temperature.to(temperature.dtype)  # type: ignore[return-value]


differentiate(
    taylor_sums,
    taylor_sums_backward,
    outputs="values mass state second first",
    gradients="q k v temperature",
)
