"""Keep NaN and inf in tokens that take no part from reaching other tokens.

A weight of 0 does not stop them, because ``0 * NaN`` is NaN. Keys that a mask excludes are set to 0
when they are read. Two kinds of tokens take no part without a mask: queries whose results receive
no gradient (here called idle), and tokens later than a query in causal attention. Tokens that take
part are unchanged: NaN in an attended token makes the result NaN.

On a CPU one sum over a tensor shows whether it has NaN or inf. An accelerator would have to wait
for this sum. So on accelerators and in compiled graphs, functions that are not operators do not
check their inputs.
"""

import inspect
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def is_readable(x: Tensor) -> bool:
    """Return whether entries can be read without delay.

    They cannot on an accelerator, while a compiler traces, or for a fake tensor, which has no
    entries.
    """
    if torch.compiler.is_compiling():
        return False
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def may_be_read(x: Tensor) -> bool:
    """Return whether ``is_readable`` holds and the tensor is not of a wrapper subclass."""
    return type(x) in (Tensor, nn.Parameter) and is_readable(x)


def is_known_finite(*tensors: Tensor) -> bool:
    """Return whether all tensors are known to hold neither NaN nor inf.

    The result is False if entries may not be read, or if the sum of large entries overflows. It is
    True if all are fake tensors outside a compiler, which only measure memory.
    """
    if not torch.compiler.is_compiling() and all(isinstance(x, FakeTensor) for x in tensors):
        return True
    return all(may_be_read(x) and bool(x.sum().isfinite()) for x in tensors)


def _zeroed(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of NaN and inf; x itself if it is known to have none."""
    return x if is_known_finite(x) else _zeroed(x)


def masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return keys or values ``[B, h, M, c]`` without NaN and inf where ``key_mask`` is False, so
    that a weight of 0 drops them.

    Return x itself if it is known to be finite, else x with 0 there.
    """
    if key_mask is None or is_known_finite(x):
        return x
    return x.masked_fill(~key_mask[:, None, :, None], 0)


def finite_inputs(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v with 0 in place of NaN and inf, and a term to add to the results.

    The term is NaN for results that depend on a replaced NaN or inf, else 0. It is None if nothing
    is replaced, or if the inputs may not be read. Without ``causal``, every query sees all keys, so
    k and v are unchanged.
    """
    replaced = (q, k, v) if causal else (q,)
    if not all(map(may_be_read, replaced)) or is_known_finite(*replaced):
        return q, k, v, None
    nan_term = (q - q).detach().sum(3, keepdim=True)
    if causal:
        key_term = (k - k).detach().sum(3, keepdim=True)
        nan_term = nan_term + up_to_each(key_term + (v - v).detach(), q.shape[2])
        k, v = _zeroed(k), _zeroed(v)
    return _zeroed(q), k, v, nan_term


def apart(v: Tensor, key_mask: Tensor | None, num_queries: int) -> tuple[Tensor, Tensor | None]:
    """Return the values of causal attention with 0 in place of NaN and inf, and a term
    ``[B, h, N, e]`` to add to the sums.

    The term is NaN for queries that see a NaN or inf in an unmasked value, else 0. It is None if
    the values are known to be finite.
    """
    if is_known_finite(v):
        return v, None
    v = masked(v, key_mask)
    return _zeroed(v), up_to_each(v - v, num_queries)


def up_to_each(x: Tensor, num_queries: int) -> Tensor:
    """Return for each query i the sum of ``x [B, h, M, c]`` over the keys ``j <= i``."""
    last = torch.arange(num_queries, device=x.device).clamp_(max=x.shape[2] - 1)
    return x.cumsum(2)[:, :, last]


def skips_idle_rows(upstream: str, rows: str, later: str = "") -> Callable[[Callable], Callable]:
    """Decorate a backward operator so that idle queries add nothing to any gradient, whatever they
    hold. A query is idle if its upstream gradient is 0.

    On a CPU the operator runs unchanged first. If a result has NaN or inf, it runs again with the
    idle rows set to 0. The check reads only the first column of each result per token: a query
    enters the results through its weights, which multiply all columns. On an accelerator the idle
    rows are set to 0 before the only run.

    Args:
        upstream: names of the upstream gradients, separated by spaces: first
            ``[B, h, N, c]``, then ``[B, h, N]``.
        rows: names of the tensors whose idle rows are set to 0, ``[B, h, N, ...]``.
        later: names of tensors per key, ``[B, h, M, ...]``. If the argument ``causal`` is true,
            keys after the last query that is not idle are set to 0 too.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @wraps(function)
        def run(*args, **kwargs):
            on_cpu = next(x for x in args if x is not None).device.type == "cpu"
            if on_cpu:
                results = function(*args, **kwargs)
                if is_known_finite(*(x[..., :1] if x.ndim > 3 else x for x in results)):
                    return results
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            idle = _without_gradient(*(arguments[name] for name in upstream.split()))
            zeroed = dict.fromkeys(rows.split(), idle)
            if later and arguments["causal"]:
                hidden = _after_the_last(~idle, arguments["k"].shape[2])
                zeroed |= dict.fromkeys(later.split(), hidden)
            for name, mask in zeroed.items():
                x = arguments[name]
                shape = mask.shape + (1,) * (x.ndim - mask.ndim)
                arguments[name] = x.masked_fill(mask.view(shape), 0)
            return function(*bound.args, **bound.kwargs)

        return run

    return decorate


def _without_gradient(first: Tensor, *others: Tensor) -> Tensor:
    """Return for which queries all gradients are 0: ``first [..., c]`` and ``others [...]``."""
    idle = (first == 0).all(-1)
    for grad in others:
        idle = idle & (grad == 0)
    return idle


def _after_the_last(queries: Tensor, num_keys: int) -> Tensor:
    """Return which keys ``[B, h, M]`` come after the last query that is True in
    ``queries [B, h, N]``.
    """
    index = torch.arange(1, queries.shape[2] + 1, device=queries.device)
    last = (queries * index).amax(2, keepdim=True)
    return torch.arange(num_keys, device=queries.device) >= last
