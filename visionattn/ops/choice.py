"""Which form of an attention to take: the faster by one count of work.

The constants were fitted to 236 measurements on a CPU (AMD EPYC, one thread, torch 2.15, float32,
26 November 2026): N from 49 to 4,096, d of 16, 32 and 64, 1 to 12 heads. The form taken was slower
than the better one by 0.35 % (TaylorShift), 0.0 % and 0.3 % (kernelized, causal) in the mean, by
15 % at worst. Everything here is arithmetic on sizes, so that operations may import this module.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from visionattn.ops.attentions import ATTENTIONS

OPERATIONS = tuple(
    operation for kind in ATTENTIONS.values() if kind.forms for operation in kind.operations
)
LONGEST = 1 << 24
EACH_PAIR, EACH_FEATURE, EFFICIENT_CALL = 8, 24, 1e6
"""What costs time besides products, in multiply-adds: each score of the direct form, each feature
of the efficient form, and a call of the efficient form."""
KEYS_OF_ALL_CLASSES, KEYS_OF_A_ROW = 60, 40

_tokens: int | None = None


@contextmanager
def choosing_as(*, tokens: int) -> Iterator[None]:
    """Within the context, choose as for so many tokens how classes of positions are summed and
    whether all pairs fit one matrix. Forms go by the tokens of the inputs.

    A check of few tokens then follows the code that many tokens run.
    """
    global _tokens
    before, _tokens = _tokens, tokens
    try:
        yield
    finally:
        _tokens = before


def tokens_asked(tokens: int) -> int:
    """Return the tokens by which a choice is made: these, unless ``choosing_as`` names others."""
    return tokens if _tokens is None else _tokens


def check_sizes(least: int, **sizes: int) -> None:
    """Raise ValueError for a size that is no whole number from ``least`` on."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name}={size!r}: wanted a whole number from {least}")


def packed_operations(n: int, m: int, d: int, e: int) -> int:
    """Count the operations of one head of TaylorShift's efficient form with packed features, a
    multiply and an add being two.

    ``F = d (d + 1) / 2`` features of each query and key, ``(2 F + 2 d) e`` to sum the values over
    them and over x itself and as many to use the sums, ``2 d^2`` to sum and to use ``K^T K`` for
    the mass. What grows neither with ``n`` nor with ``m`` is not counted.
    """
    features = d * (d + 1) // 2
    per_token = features + 2 * (features + d) * e + 2 * d * d
    return (n + m) * per_token + m * (d + e) + n * (4 * d + 3 * e + 4)


def choose_form(
    operation: str, n: int, m: int, d: int, e: int, *, heads: int = 1, batch: int = 1
) -> str:
    """Return the form that ``form="auto"`` stands for: "direct" or "efficient", the one of less
    work. An attention that takes the efficient form keeps it as its tokens grow.

    Args:
        operation: one of ``OPERATIONS``, such as "kernelized causal".
        n, m, d, e: queries, keys, width of q and k per head, width of v per head.

    Raises:
        ValueError: an unknown operation, or a size that is no whole number from 0 (d: 1).
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation {operation!r}: wanted one of {', '.join(OPERATIONS)}")
    check_sizes(1, d=d)
    check_sizes(0, n=n, m=m, e=e, heads=heads, batch=batch)  # there may be no tokens or images
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
        class_rows: 2R+1 where the direct form has joint relative position in its weights of pairs.
            The efficient one sums over classes besides, which costs a query as much as some keys
            do, the more the more classes of rows there are. Measured on a CPU, forward and
            backward, the two meet for kernelized attention near 300 tokens at R = 1, 400 to 550 at
            R = 3 and 650 at R = 7.
    """
    (batch, heads, n, d), (_, _, m, e) = q, v
    if class_rows:
        m = max(0, m - KEYS_OF_ALL_CLASSES - KEYS_OF_A_ROW * class_rows)
    return choose_form(operation, n, m, d, e, heads=heads, batch=batch)


def crossover(operation: str, d: int, *, heads: int = 1, batch: int = 1) -> int | None:
    """Return the smallest number of tokens N = M from which ``choose_form`` takes the efficient
    form, v being as wide as q; None where the direct form is taken up to 2^24 tokens.
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
