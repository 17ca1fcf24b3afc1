"""The choice of the faster form of an attention, from counts of multiply-adds.

The constants were fitted to 236 measurements on a CPU (AMD EPYC, one thread, torch 2.15, float32,
26 November 2026): N from 49 to 4,096, d of 16, 32 and 64, 1 to 12 heads. The chosen form was slower
than the better form by 0.35 % (TaylorShift), 0.0 % (kernelized) and 0.3 % (causal) on average, and
by 15 % at worst.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

EACH_PAIR, EACH_FEATURE, EFFICIENT_CALL = 8, 24, 1e6
"""Costs in addition to the products, in multiply-adds: per score of the direct form, per feature of
the efficient form, and per call of the efficient form.
"""
KEYS_OF_ALL_CLASSES, KEYS_OF_A_ROW = 60, 40

_tokens: int | None = None


@contextmanager
def choosing_as(*, tokens: int) -> Iterator[None]:
    """Within the context, make two choices as if there were this number of tokens.

    They are the form of the sums over classes of relative position, and whether all pairs are
    computed in one matrix. So a check with few tokens can run the code path of many tokens. The
    form of the attention still depends on the actual number.
    """
    global _tokens
    before, _tokens = _tokens, tokens
    try:
        yield
    finally:
        _tokens = before


def tokens_asked(tokens: int) -> int:
    """Return the number of tokens for a choice: ``tokens``, unless ``choosing_as`` sets another."""
    return tokens if _tokens is None else _tokens


def choose_form(
    operation: str, n: int, m: int, d: int, e: int, *, heads: int = 1, batch: int = 1
) -> str:
    """Return the form that ``form="auto"`` selects: "direct" or "efficient", whichever is expected
    to be faster.

    For N = M there is a threshold: every larger number of tokens selects the efficient form.

    Args:
        operation: "taylorshift", "kernelized" or "kernelized causal".
        n, m, d, e: queries, keys, width of q and k per head, width of v per head.
    """
    groups, pairs = batch * heads, n * m
    if operation == "kernelized causal":
        first = min(n, m)
        pairs = first * (first + 1) // 2 + (n - first) * m
    features = d * (d + 4) // 2 if operation == "taylorshift" else d
    direct = groups * pairs * (d + e + EACH_PAIR)
    efficient = groups * (n + m) * features * (e + EACH_FEATURE) + EFFICIENT_CALL
    return "direct" if direct <= efficient else "efficient"


def form_of_shapes(operation: str, q: Sequence[int], v: Sequence[int], class_rows: int = 0) -> str:
    """Return ``choose_form`` for ``q [B, h, N, d]`` and ``v [B, h, M, e]``.

    Args:
        class_rows: 2R+1 for joint relative position, which the direct form adds to its weights of
            pairs; else 0. The efficient form sums over the classes separately, which costs each
            query as much as some extra keys, and more with more rows of classes. Measured on a CPU,
            forward and backward, kernelized attention breaks even near 300 tokens at R = 1, 400 to
            550 at R = 3 and 650 at R = 7.
    """
    (batch, heads, n, d), (_, _, m, e) = q, v
    if class_rows:
        m = max(0, m - KEYS_OF_ALL_CLASSES - KEYS_OF_A_ROW * class_rows)
    return choose_form(operation, n, m, d, e, heads=heads, batch=batch)
