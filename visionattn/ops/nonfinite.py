"""NaN and inf in tokens that do not count, and how they are kept from those that do.

A product with 0 does not stop them: ``0 * NaN`` is NaN. Keys that a mask leaves out are set to 0
where they are read. What no mask names is found here: queries whose results receive no gradient,
and tokens that come later than a query in causal attention. What counts stays as it is: NaN in a
token that is seen makes the results that see it NaN.

On a processor a sum tells whether a tensor has NaN or inf, which costs one pass over it. Elsewhere
that would wait for the device: there, and in graphs of a compiler, functions that are no operators
take their inputs as they are.
"""

import inspect
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def is_readable(x: Tensor) -> bool:
    """Tell whether looking at the entries costs little: not on an accelerator, not while a compiler
    traces, and not of a fake tensor, which has none.
    """
    if torch.compiler.is_compiling():
        return False
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def may_be_read(x: Tensor) -> bool:
    """Tell whether ``is_readable``, and no tensor that stands for others."""
    return type(x) in (Tensor, nn.Parameter) and is_readable(x)


def is_known_finite(*tensors: Tensor) -> bool:
    """Tell whether no tensor holds NaN or inf, as far as that may be read. It is not known either
    where the sum of large entries is inf. A fake tensor, of which memory is counted, stands for one
    without.
    """
    if not torch.compiler.is_compiling() and all(isinstance(x, FakeTensor) for x in tensors):
        return True
    return all(may_be_read(x) and bool(x.sum().isfinite()) for x in tensors)


def _zeroed(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def finite(x: Tensor) -> Tensor:
    """Return x with 0 in place of NaN and inf: x itself where it is known to have none."""
    return x if is_known_finite(x) else _zeroed(x)


def masked(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return keys or values ``[B, h, M, c]`` that weights of 0 drop: with 0 where ``key_mask`` has
    none, or x itself where it is known to be finite.
    """
    if key_mask is None or is_known_finite(x):
        return x
    return x.masked_fill(~key_mask[:, None, :, None], 0)


def finite_inputs(
    q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v with 0 in place of NaN and inf, and what to add to the results instead: NaN
    to those that see one, else 0; None where there is none, or where nothing may be read.

    What all queries see, k and v unless ``causal``, stays as it is.
    """
    own = (q, k, v) if causal else (q,)
    if not all(map(may_be_read, own)) or is_known_finite(*own):
        return q, k, v, None
    spoilt = (q - q).detach().sum(3, keepdim=True)
    if causal:
        of_keys = (k - k).detach().sum(3, keepdim=True)
        spoilt = spoilt + up_to_each(of_keys + (v - v).detach(), q.shape[2])
        k, v = _zeroed(k), _zeroed(v)
    return _zeroed(q), k, v, spoilt


def apart(v: Tensor, key_mask: Tensor | None, num_queries: int) -> tuple[Tensor, Tensor | None]:
    """Return the values of causal attention with 0 in place of NaN and inf and of masked ones, and
    what to add to each query's sum instead, ``[B, h, N, e]``; None where they are known to be
    finite.
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
    """Decorate the function of an operator of gradients, so that rows of queries whose upstream
    gradient is 0 add nothing to any gradient, whatever they hold.

    On a processor the function runs as it is, and again with 0 in those rows where a result has NaN
    or inf. The first column of a result by token tells: what a query holds spreads through its
    weights, and these multiply all columns of the gradient of the values alike. Elsewhere the rows
    are set to 0 beforehand.

    Args:
        upstream: names of the gradients by query, with spaces between; the rows of the last lack no
            or one axis.
        rows: names of the tensors by query that are read as 0 in those rows.
        later: names of tensors by key, ``[B, h, M, ...]``, of which the keys behind the last row
            that has a gradient are read as 0 where the argument ``causal`` is true.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @wraps(function)
        def run(*args, **kwargs):
            on_processor = next(x for x in args if x is not None).device.type == "cpu"
            if on_processor:
                found = function(*args, **kwargs)
                if is_known_finite(*(x[..., :1] if x.ndim > 3 else x for x in found)):
                    return found
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            named = given.arguments
            idle = _without_gradient(*(named[name] for name in upstream.split()))
            zeroed = dict.fromkeys(rows.split(), idle)
            if later and named["causal"]:
                behind = _behind_the_last(~idle, named["k"].shape[2])
                zeroed |= dict.fromkeys(later.split(), behind)
            for name, mask in zeroed.items():
                x = named[name]
                shape = mask.shape + (1,) * (x.ndim - mask.ndim)
                named[name] = x.masked_fill(mask.view(shape), 0)
            return function(*given.args, **given.kwargs)

        return run

    return decorate


def _without_gradient(first: Tensor, *others: Tensor) -> Tensor:
    """Tell which rows of all gradients are 0: those of ``first [..., c]``, and the entries of the
    others.
    """
    idle = (first == 0).all(-1)
    for grad in others:
        idle = idle & (grad == 0)
    return idle


def _behind_the_last(counts: Tensor, num_keys: int) -> Tensor:
    """Tell which of the keys ``[B, h, M]`` come after the last query of ``counts [B, h, N]``."""
    place = torch.arange(1, counts.shape[2] + 1, device=counts.device)
    last = (counts * place).amax(2, keepdim=True)
    return torch.arange(num_keys, device=counts.device) >= last
