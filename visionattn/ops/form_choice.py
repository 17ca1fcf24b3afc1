"""The choice of the faster form of an attention, from one count of work.

The constants were fitted to 236 measurements on a CPU (AMD EPYC, one thread, torch 2.15, float32,
26 November 2026): N from 49 to 4,096, d of 16, 32 and 64, 1 to 12 heads. The chosen form was slower
than the better form by 0.35 % (TaylorShift), 0.0 % (kernelized) and 0.3 % (causal) on average, and
by 15 % at worst. This module is arithmetic on sizes, so that operations may import it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from visionattn.ops.attentions import ATTENTIONS

OPERATIONS = tuple(
    operation for kind in ATTENTIONS.values() if kind.forms for operation in kind.operations
)
LONGEST = 1 << 24
EACH_PAIR, EACH_FEATURE, EFFICIENT_CALL = 8, 24, 1e6
"""Costs in addition to the products, in multiply-adds: per score of the direct form, per feature of
the efficient form, and per call of the efficient form.
"""
KEYS_OF_ALL_CLASSES, KEYS_OF_A_ROW = 60, 40

_tokens: int | None = None


@contextmanager
def choosing_as(*, tokens: int) -> Iterator[None]:
    """Within the context, make two choices as for this number of tokens: how to sum classes of
    positions, and whether all pairs fit one matrix. The form still depends on the actual tokens.

    A check with few tokens can then follow the code path of many tokens.
    """
    global _tokens
    before, _tokens = _tokens, tokens
    try:
        yield
    finally:
        _tokens = before


def tokens_asked(tokens: int) -> int:
    """Return the number of tokens that decides a choice: the given one, unless ``choosing_as`` sets
    another.
    """
    return tokens if _tokens is None else _tokens


def check_sizes(least: int, **sizes: int) -> None:
    """Raise ValueError for a size that is not an integer of at least ``least``."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name}={size!r}: expected an integer of at least {least}")


def packed_operations(n: int, m: int, d: int, e: int) -> int:
    """Count the operations of one head of TaylorShift's efficient form with packed features; a
    multiply and an add count as two.

    Each query and key costs ``F = d (d + 1) / 2`` features, ``(2 F + 2 d) e`` to sum the values
    over the features and over x itself (or to use the sums), and ``2 d^2`` to sum ``K^T K`` for the
    mass (or to use it). Terms that grow neither with ``n`` nor with ``m`` are not counted.
    """
    features = d * (d + 1) // 2
    per_token = features + 2 * (features + d) * e + 2 * d * d
    return (n + m) * per_token + m * (d + e) + n * (4 * d + 3 * e + 4)


def choose_form(
    operation: str, n: int, m: int, d: int, e: int, *, heads: int = 1, batch: int = 1
) -> str:
    """Return the form that ``form="auto"`` selects: "direct" or "efficient", whichever needs less
    work.

    Once the number of tokens is large enough for the efficient form, more tokens do not change the
    choice.

    Args:
        operation: one of ``OPERATIONS``, such as "kernelized causal".
        n, m, d, e: queries, keys, width of q and k per head, width of v per head.

    Raises:
        ValueError: an unknown operation, or a size that is not an integer of at least 0 (d: 1).
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r}: expected one of {', '.join(OPERATIONS)}")
    check_sizes(1, d=d)
    check_sizes(0, n=n, m=m, e=e, heads=heads, batch=batch)  # tokens and images may be 0
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
        class_rows: 2R+1 if the direct form includes joint relative position in its pair weights.
            The efficient form then sums over classes in addition, which costs each query as much as
            some extra keys, and more with more rows of classes. Measured on a CPU, forward and
            backward, kernelized attention breaks even near 300 tokens at R = 1, 400 to 550 at R = 3
            and 650 at R = 7.
    """
    (batch, heads, n, d), (_, _, m, e) = q, v
    if class_rows:
        m = max(0, m - KEYS_OF_ALL_CLASSES - KEYS_OF_A_ROW * class_rows)
    return choose_form(operation, n, m, d, e, heads=heads, batch=batch)


def crossover(operation: str, d: int, *, heads: int = 1, batch: int = 1) -> int | None:
    """Return the smallest number of tokens N = M for which ``choose_form`` chooses the efficient
    form.

    v is as wide as q. Return None if the direct form is taken up to 2^24 tokens.
    """
    low, high = 0, 1
    while choose_form(operation, high, high, d, d, heads=heads, batch=batch) == "direct":
        low, high = high, 2 * high
        if high > LONGEST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        chosen = choose_form(operation, middle, middle, d, d, heads=heads, batch=batch)
        low, high = (middle, high) if chosen == "direct" else (low, middle)
    return high
