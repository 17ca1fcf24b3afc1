"""The published costs of the attentions, and a calculator:
``python -m visionattn.ops.published_costs --dim 32``.

Counts are for one image and are exact integers. A multiply and an add are two operations. Entries
are numbers held at once, inputs included. Crossovers are rounded up to the smallest number of
tokens at which the efficient form costs no more than the direct form, as in the table of the
TaylorShift paper.

``form_choice.py`` decides what ``form="auto"`` takes; its functions can be imported from here too.
Operations import that module and not this one, so that this one can run as a program. Every
function raises a ValueError for a size that is not an integer of at least 1. ``choose_form``
accepts 0 for all sizes but d, since an operation may have no tokens.

Sources: Nauen, Palacio and Dengel 2024, "TaylorShift" (cited by section titles); Favier and Dal'Maz
Silva, "Scaleformer".
"""

import argparse
from collections.abc import Sequence
from math import isqrt

from visionattn.ops.form_choice import (
    check_sizes,
    choose_form,
    crossover,
    packed_operations,
)

__all__ = [
    "N0",
    "N0_packed",
    "N1",
    "N1_bound",
    "N1_packed",
    "choose_form",
    "crossover",
    "entries_direct",
    "entries_direct_heads",
    "entries_efficient",
    "entries_efficient_heads",
    "entries_efficient_packed",
    "ops_direct",
    "ops_direct_heads",
    "ops_efficient",
    "ops_efficient_heads",
    "ops_efficient_packed",
    "packed_operations",
    "scaleformer_bidirectional_form",
    "scaleformer_causal_form",
    "scaleformer_relative_form",
]


def ops_direct(n: int, d: int) -> int:
    """Count the operations of direct TaylorShift for n tokens of width d: ``4 n^2 d + 6 n^2``.

    Source: TaylorShift, "Floating Point Operations".
    """
    check_sizes(1, n=n, d=d)
    return 4 * n * n * d + 6 * n * n


def ops_efficient(n: int, d: int) -> int:
    """Count the operations of efficient TaylorShift: ``n (4 d^3 + 10 d^2 + 9 d + 4)``.

    Source: TaylorShift, "Floating Point Operations".
    """
    check_sizes(1, n=n, d=d)
    return n * (4 * d**3 + 10 * d**2 + 9 * d + 4)


def entries_direct(n: int, d: int) -> int:
    """Count the entries that direct TaylorShift holds at its peak: V, the scores, and their
    polynomial.

    Source: TaylorShift, "Size of intermediate Results".
    """
    check_sizes(1, n=n, d=d)
    return d * n + 2 * n * n


def entries_efficient(n: int, d: int) -> int:
    """Count the entries that efficient TaylorShift holds at its peak, while it sums V over d^2
    features.

    Source: TaylorShift, "Size of intermediate Results".
    """
    check_sizes(1, n=n, d=d)
    return d * d * (d + 1) + 2 * d * n + (d + 1) * n + d * d * n


def N0(d: int) -> int:
    """Return the number of tokens from which efficient TaylorShift needs no more operations than
    direct.

    It is 73, 273, 1057, 4161, 16513 for d = 8 .. 128: ``(4 d^3 + 10 d^2 + 9 d + 4) / (4 d + 6)``,
    rounded up; rounding to nearest gives the same table. Source: TaylorShift, "Floating Point
    Operations".
    """
    check_sizes(1, d=d)
    return -(-ops_efficient(1, d) // ops_direct(1, d))


def N1(d: int) -> int:
    """Return the number of tokens from which efficient TaylorShift holds no more entries than
    direct.

    It is 47, 159, 574, 2174, 8446 for d = 8 .. 128:
    ``(d^2 + 2 d + 1 + sqrt(d^4 + 12 d^3 + 14 d^2 + 4 d + 1)) / 4``, rounded up. The table's 159 at
    d = 16 is 158.25 before rounding: only rounding up gives it. The calculator on the paper's web
    page shows ``N1_bound`` instead. Source: TaylorShift, "Size of intermediate Results".
    """
    check_sizes(1, d=d)
    return _positive_root((d + 1) ** 2, d**3 + d**2)


def N1_bound(d: int) -> int:
    """Return the upper bound of N1, ``d^2 / 2 + 2 d + 1 / 2`` rounded up: 577 at d = 32, where N1
    is 574.

    Source: TaylorShift, "Size of intermediate Results".
    """
    check_sizes(1, d=d)
    return (d * d + 4 * d + 2) // 2


def _positive_root(p: int, q: int) -> int:
    """Return the smallest integer N > 0 with ``2 N^2 >= p N + q``; p and q are not negative."""
    square = p * p + 8 * q
    root = isqrt(square)
    return -(-(p + root + (root * root < square)) // 4)


def _head_width(dim: int, heads: int) -> int:
    check_sizes(1, dim=dim, heads=heads)
    if dim % heads:
        raise ValueError(f"width {dim}: expected a multiple of the number of heads, {heads}")
    return dim // heads


def ops_direct_heads(n: int, dim: int, heads: int) -> int:
    """Count the operations of direct TaylorShift with ``heads`` heads of width ``dim / heads``:
    ``4 n^2 dim + 6 n^2 heads``.

    Grows with the number of heads. Source: TaylorShift, "Floating Point Operations", once per head.
    """
    return heads * ops_direct(n, _head_width(dim, heads))


def ops_efficient_heads(n: int, dim: int, heads: int) -> int:
    """Count the operations of efficient TaylorShift:
    ``n (4 dim^3 / heads^2 + 10 dim^2 / heads + 9 dim + 4 heads)``.

    Falls with the number of heads. Source: TaylorShift, "How can we increase the efficiency?".
    """
    return heads * ops_efficient(n, _head_width(dim, heads))


def entries_direct_heads(n: int, dim: int, heads: int) -> int:
    """Count the entries of direct TaylorShift: ``dim n + 2 heads n^2``.

    Source: TaylorShift, "Size of intermediate Results", once per head.
    """
    return heads * entries_direct(n, _head_width(dim, heads))


def entries_efficient_heads(n: int, dim: int, heads: int) -> int:
    """Count the entries of efficient TaylorShift:
    ``dim^3 / heads^2 + (n + 1) dim^2 / heads + 3 n dim + n heads``.

    Falls with the number of heads. Source: TaylorShift, "How can we increase the efficiency?".
    """
    return heads * entries_efficient(n, _head_width(dim, heads))


def ops_efficient_packed(n: int, d: int) -> int:
    """Count the operations of our efficient form: ``n (2 d^3 + 11 d^2 + 10 d + 4)``, about half of
    ``ops_efficient``.

    The features are the ``d (d + 1) / 2`` distinct products (the code keeps ``d (d + 4) / 2``, in
    tiles), and the mass goes through ``K^T K`` instead of a column of ones.
    """
    check_sizes(1, n=n, d=d)
    return packed_operations(n, n, d, d)


def entries_efficient_packed(n: int, d: int, *, chunk_tokens: int | None = None) -> int:
    """Count the entries that our efficient form holds for one head: q, k, v, the sums over
    features, and the features of one chunk.

    Args:
        chunk_tokens: tokens whose features are held at once; None: as in the code.
    """
    check_sizes(1, n=n, d=d)
    features = d * (d + 1) // 2
    return 3 * d * n + features * d + features * min(n, _chunk_tokens(chunk_tokens, d))


def _chunk_tokens(given: int | None, d: int) -> int:
    if given is not None:
        check_sizes(1, chunk_tokens=given)
        return given
    from visionattn.ops.taylorshift.taylorshift_features import chunk_tokens

    return chunk_tokens(d)


def N0_packed(d: int) -> int:
    """Return the number of tokens from which our efficient form needs no more operations than
    ``ops_direct``: 160, 576, 2175 for d = 16, 32, 64.
    """
    check_sizes(1, d=d)
    return -(-ops_efficient_packed(1, d) // ops_direct(1, d))


def N1_packed(d: int, *, chunk_tokens: int | None = None) -> int:
    """Return the number of tokens from which our efficient form holds no more entries than
    ``entries_direct``, the whole score matrix.

    Our own direct form works on blocks and holds less.
    """
    check_sizes(1, d=d)
    features = d * (d + 1) // 2
    within_a_chunk = _positive_root(2 * d + features, features * d)
    beyond = _positive_root(2 * d, features * (d + _chunk_tokens(chunk_tokens, d)))
    return min(within_a_chunk, beyond)


def scaleformer_causal_form(n: int, m: int, d: int) -> str:
    """Return the form of the causal content term for n queries and m keys: direct holds ``n m``,
    efficient ``d^2 max(n, m)``.

    As in the source, without batch or heads; a tie goes to the quadratic form in all three rules.
    Source: Scaleformer, section 5.
    """
    check_sizes(1, n=n, m=m, d=d)
    return "direct" if n * m <= d * d * max(n, m) else "efficient"


def scaleformer_bidirectional_form(n: int, m: int, d: int) -> str:
    """Return the form of the content term without a mask: direct holds ``n m``, efficient ``d^2``.

    Source: Scaleformer, section 5.
    """
    check_sizes(1, n=n, m=m, d=d)
    return "direct" if n * m <= d * d else "efficient"


def scaleformer_relative_form(n: int, m: int, horizon: int) -> str:
    """Return the form of the relative term: direct holds ``n m``, efficient
    ``n (2 horizon + 1 + 4)``.

    Source: Scaleformer, section 5.
    """
    check_sizes(1, n=n, m=m)
    check_sizes(0, horizon=horizon)
    return "direct" if n * m <= n * (2 * horizon + 1 + 4) else "efficient"


def _row(name: str, *cells: object) -> str:
    return f"{name:<24}" + "".join(
        f"{cell:>20,}" if isinstance(cell, int) else f"{cell:>20}" for cell in cells
    )


def _crossovers(d: int, heads: int) -> list[str]:
    """Return lines with the number of tokens from which the efficient form costs less."""
    return [
        f"TaylorShift, {d} channels per head: tokens from which the efficient form costs no more "
        f"than the direct one",
        _row("", "operations: N_0", "entries: N_1"),
        _row("published", N0(d), N1(d)),
        _row("packed features", N0_packed(d), N1_packed(d)),
        _row(f'form="auto", heads={heads}', crossover("taylorshift", d, heads=heads) or "never"),
        f"(upper bound of the published N_1: {N1_bound(d):,})",
    ]


def _totals(n: int, d: int, heads: int) -> list[str]:
    """Return lines that count operations and entries of one image."""
    dim = d * heads
    return [
        f"{n:,} tokens of width {dim:,}, heads={heads}",
        _row("", "operations", "entries"),
        _row("direct", ops_direct_heads(n, dim, heads), entries_direct_heads(n, dim, heads)),
        _row(
            "efficient", ops_efficient_heads(n, dim, heads), entries_efficient_heads(n, dim, heads)
        ),
        _row(
            "efficient, packed",
            heads * ops_efficient_packed(n, d),
            heads * entries_efficient_packed(n, d),
        ),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the calculator; wrong arguments end with exit code 2."""
    example = "python -m visionattn.ops.published_costs --dim 32 --heads 12 --tokens 4096"
    parser = argparse.ArgumentParser(
        prog="python -m visionattn.ops.published_costs",
        description="Number of tokens from which TaylorShift's efficient form is cheaper.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dim", type=int, required=True, help="width d of one head")
    parser.add_argument("--heads", type=int, default=1, help="number of heads (default 1)")
    parser.add_argument(
        "--tokens", type=int, help="also count operations and entries for this many tokens"
    )
    args = parser.parse_args(argv)
    if min(value for value in vars(args).values() if value is not None) < 1:
        parser.error("expected whole numbers from 1")
    lines = _crossovers(args.dim, args.heads)
    if args.tokens is not None:
        lines += ["", *_totals(args.tokens, args.dim, args.heads)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
