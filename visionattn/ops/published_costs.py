"""The published crossovers of TaylorShift: the least number of tokens for which the efficient form
costs no more than the direct form, rounded up as in the table of the paper.

Source: Nauen, Palacio and Dengel 2024, "TaylorShift"; functions cite its sections by title.
"""

from math import isqrt


def N0(d: int) -> int:
    """Return the least number of tokens for which efficient TaylorShift needs no more operations
    than direct.

    It is ``(4 d^3 + 10 d^2 + 9 d + 4) / (4 d + 6)``, rounded up: 73, 273, 1057, 4161, 16513 for
    d = 8 .. 128. Source: TaylorShift, "Floating Point Operations".
    """
    return -(-(4 * d**3 + 10 * d**2 + 9 * d + 4) // (4 * d + 6))


def N1(d: int) -> int:
    """Return the least number of tokens for which efficient TaylorShift holds no more entries than
    direct.

    It is ``(d^2 + 2 d + 1 + sqrt(d^4 + 12 d^3 + 14 d^2 + 4 d + 1)) / 4``, rounded up: 47, 159, 574,
    2174, 8446 for d = 8 .. 128. Source: TaylorShift, "Size of intermediate Results".
    """
    square = (d + 1) ** 4 + 8 * (d**3 + d**2)
    root = isqrt(square)
    return -(-((d + 1) ** 2 + root + (root * root < square)) // 4)
