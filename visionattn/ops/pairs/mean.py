"""The direct form as one operator: content and joint relative position of all pairs in one matrix,
and the mean under it.

Where tokens are few, the sums over classes and the passes over tokens of the other forms cost more
than the pairs. Here the weights of all pairs are made at once, block by block
(``weights.py``), and the sum of a row of them is the mass: time is quadratic and memory
linear. Autograd keeps q, k, v, the mean and its mass; blocks are made anew.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from visionattn.ops.choice import choose_form, tokens_asked
from visionattn.ops.nonfinite import skips_idle_rows
from visionattn.ops.operator import contiguous_like, differentiate, form_ran, operator
from visionattn.ops.pairs.weights import Images, batches
from visionattn.ops.position.kinds import Joint, RelativePosition, joint_classes
from visionattn.ops.sums import accumulation_dtype, divisor_of, tokens_first

MOST_PAIRS = 1 << 22
KEYS_OF_ALL_CLASSES, KEYS_OF_A_ROW = 60, 40


def few_pairs(n: int, m: int) -> bool:
    """Tell whether, on a CPU, looking up all pairs' classes costs less than sums over classes."""
    return tokens_asked(n) * tokens_asked(m) <= MOST_PAIRS


def takes_pairs(
    operation: str, form: str, q: Tensor, v: Tensor, relative: RelativePosition | None
) -> bool:
    """Tell whether ``pair_mean`` runs: for "direct" where pairs are few, for "auto" where it is
    also the faster.

    With a position the other forms sum over classes besides, which costs a query as much as some
    keys do here, the more the more classes of rows there are. Measured on a CPU, forward and
    backward, the two meet for kernelized attention near 300 tokens at R = 1, 400 to 550 at R = 3
    and 650 at R = 7. A compiler, whose sizes may be symbols, keeps to the operators that choose
    within themselves.
    """
    (batch, heads, n, d), m, e = q.shape, v.shape[2], v.shape[3]
    if form == "efficient" or torch.compiler.is_compiling() or q.device.type not in ("cpu", "meta"):
        return False
    if not few_pairs(n, m) or not (relative is None or _on_a_whole_grid(relative)):
        return False
    if form == "direct":
        return True
    if relative is not None:
        m = max(0, m - KEYS_OF_ALL_CLASSES - KEYS_OF_A_ROW * relative.table.shape[1])
    sizes = dict(heads=heads, batch=batch, dtype=accumulation_dtype(q, v), device=q.device.type)
    return choose_form(operation, n, m, d, e, **sizes) == "direct"


def _on_a_whole_grid(relative: RelativePosition) -> bool:
    return isinstance(relative, Joint) and relative.layout.kept is None


def mean_of_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    relative: Joint | None,
    count: Tensor,
    *,
    temperature: Tensor | None = None,
    feature_map: str = "given",
    coefficients: Sequence[float] = (),
) -> tuple[Tensor, Tensor]:
    """Call ``pair_mean`` for a relative position as the attentions have it.

    ``count [B or 1, 1, 1]`` is the number of keys that each query sees, in the dtype of the sums.
    """
    position = (None, None, None) if relative is None else joint_classes(relative, key_mask, count)
    return pair_mean(q, k, v, temperature, key_mask, *position, feature_map, coefficients)


def _flops(q, k, v, table, *, backward: bool) -> int:
    """Count the products of each query with keys and values, and of each with the classes of joint
    relative position.
    """
    (batch, heads, n, d), m, e = q, k[2], v[3]
    per_query = m * (3 * d + 2 * e if backward else d + e)
    if table is not None:
        per_query += table[1] * table[2] * (3 * d if backward else d)
    return 2 * batch * heads * n * per_query


def _empty_mean(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the mean, tokens before heads, and the mass."""
    dtype = accumulation_dtype(q, k, v)
    out = tokens_first(q, *q.shape[:3], v.shape[3], dtype=dtype)  # type: ignore[call-arg]
    return out, q.new_empty(q.shape[:3], dtype=dtype)


@operator(fake=_empty_mean, flops=partial(_flops, backward=False))
def pair_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    table: Tensor | None,
    counts: Tensor | None,
    total: Tensor | None,
    feature_map: str,
    coefficients: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean under the content and, with a table, the joint relative position,
    and the sum of the weights.

    Args:
        q, k, v: ``[B, h, N, d]``, ``[B, h, M, d]``, ``[B, h, M, e]``, any floating dtype and
            strides.
        temperature: ``[h]``: TaylorShift's q is brought to this length and k to unit length. None:
            both as they are.
        key_mask: bool ``[B, M]``, True takes part.
        table: ``[h or 1, 2Ry+1, 2Rx+1, d]`` in the dtype of the sums; prefix tokens and the whole
            grid follow one another then.
        counts: keys of each class as seen from each patch, ``[1 or B, H, W, C]``; with a table.
        total: with "mean" the keys that take part, ``[1 or B, 1, 1, 1]``; None: "sum".
        feature_map: of kernelized attention: "elu1", "relu", or "given": q and k are features
            already.
        coefficients: (a, b, c) of TaylorShift; empty: kernelized attention.

    Returns:
        the mean ``[B, h, N, e]``, 0 for a query without weights, tokens before heads in memory, and
        the mass ``[B, h, N]``; float32 (float64 for float64 inputs).
    """
    (out, mass), e = _empty_mean(q, k, v), v.shape[3]
    with form_ran("taylorshift" if coefficients else "kernelized", "direct"):
        for b in batches(q, k):
            step = Images(
                b, (q, k, v, temperature, key_mask, table, counts, total), feature_map, coefficients
            )
            values, own_mass = out.new_empty(len(step.v), q.shape[2], e), mass[b].flatten(0, 1)
            for block in step.blocks((values, own_mass), ()):
                own_values, row_mass = block.by_query
                torch.bmm(block.weights, block.v, out=own_values)
                torch.sum(block.weights, 2, out=row_mass)
            torch.div(values.view(out[b].shape), divisor_of(mass[b]), out=out[b])
    return out, mass


def _empty_gradients(out, q, k, v, temperature, table) -> tuple[Tensor, ...]:
    return *contiguous_like(q, k, v), *contiguous_like(temperature, table, like=out)


@operator(fake=_empty_gradients, flops=partial(_flops, backward=True))
@skips_idle_rows("grad", rows="out mass q")
def pair_mean_backward(
    grad: Tensor,
    out: Tensor,
    mass: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    key_mask: Tensor | None,
    table: Tensor | None,
    counts: Tensor | None,
    total: Tensor | None,
    feature_map: str,
    coefficients: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``pair_mean`` with respect to q, k, v, in their dtype, temperature
    and table (empty without one).
    """
    dq, dk, dv = (out.new_empty(x.shape) for x in (q, k, v))
    learned = [out.new_zeros(0 if x is None else x.shape) for x in (temperature, table)]
    for b in batches(q, k):
        step = Images(
            b, (q, k, v, temperature, key_mask, table, counts, total), feature_map, coefficients
        )
        _add_gradients(
            step, [x[b] for x in (grad, out, mass)], [x[b] for x in (dq, dk, dv)], learned
        )
    d_temperature = learned[0] if temperature is None else learned[0].to(temperature.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_temperature, learned[1]


def _add_gradients(
    step: Images, results: list[Tensor], grads: list[Tensor], learned: list[Tensor]
) -> None:
    """Write the gradients of q, k and v of some images; add those of temperature and table."""
    grad, out, mass = results
    heads, (dq, dk, dv) = mass.shape[:2], (x.flatten(0, 1) for x in grads)
    # Of sums and their mass under a division: g = grad / mass, and -<g, out>.
    d_values = torch.div(grad, divisor_of(mass), out=out.new_empty(out.shape)).masked_fill_(
        (mass == 0).unsqueeze(3), 0
    )
    d_mass = (d_values * out).sum(3).neg_().flatten(0, 1)
    d_classes = _through_blocks(step, d_values.flatten(0, 1), d_mass.unsqueeze(2), (dq, dk, dv))
    step.k.backward(dk)
    d_length = step.q.backward(dq)
    if step.position is not None:
        d_query, d_table = step.position.backward(d_classes)
        dq += d_query
        d_table = d_table.unflatten(0, heads).sum(0)
        learned[1] += d_table if len(learned[1]) > 1 else d_table.sum(0, keepdim=True)
    if d_length is not None:
        learned[0] += d_length.view(heads).sum(0) * step.factor


def _through_blocks(
    step: Images, d_values: Tensor, d_mass: Tensor, grads: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    """Write the gradients of the rows of queries and keys and of the values; returns that of the
    weights of classes.

    Args:
        d_values, d_mass: of the sums, ``[g, N, e]`` and ``[g, N, 1]``.
        grads: ``[g, N, d]``, ``[g, M, d]`` and ``[g, M, e]``.
    """
    d_q, d_k, d_v = grads
    d_k.zero_(), d_v.zero_()
    d_classes = None if step.position is None else torch.zeros_like(step.position.weights)
    by_query = [d_values, d_mass, d_q] + ([] if d_classes is None else [d_classes])
    for block in step.blocks(by_query, (d_k, d_v)):
        (grad, grad_mass, own_q, *own_classes), (own_k, own_v) = block.by_query, block.by_key
        own_v.baddbmm_(block.weights.mT, grad)
        d_weights = step.buffer("gradient", block.weights.shape).copy_(
            grad_mass.expand_as(block.weights)
        )
        d_weights.baddbmm_(grad, block.v.mT)
        if block.absent is not None:
            d_weights.masked_fill_(block.absent.mT, 0)
        if own_classes:
            own_classes[0].scatter_add_(2, block.index, d_weights)
        if step.square:  # the factor 2 of its derivative follows below
            d_weights.mul_(block.scores)
        torch.bmm(d_weights, block.k, out=own_q)
        own_k.baddbmm_(d_weights.mT, block.q)
    if step.square:
        d_q.mul_(2), d_k.mul_(2)
    if step.absent is not None:
        d_v.masked_fill_(step.absent, 0)
    return d_classes


differentiate(
    pair_mean,
    pair_mean_backward,
    outputs="out mass",
    gradients="q k v temperature table",
)
