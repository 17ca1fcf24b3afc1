"""Define error measures and their limits. Each answers one question:

- ``disagreement``: does a case compute its definition? The measure is the largest error of an
  entry over the largest entry. It is checked before a case is timed on a CPU.
- ``wrong``: do GPU kernels compute the right result? The measure is the norm of the error over the
  norm of the result.
- ``beyond_eager``: is a whole model about as accurate as PyTorch's own operations in its dtype?
"""

import torch
from torch import Tensor

LIMITS = {
    "bfloat16": (4e-3, 1e-2),
    "float16": (2e-3, 4e-3),
    "float32": (1e-5, 1e-5),
    "float64": (1e-12, 1e-12),
}
"""Largest relative error of an output and of a gradient, by dtype."""
TIMES_EAGER = 2.0
"""Largest error of a model, as a multiple of the error of PyTorch's operations in the same dtype.
"""
ALWAYS_ALLOWED = 1e-2
"""Relative error of a whole model that is always allowed."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the allowed error against float64, relative to the largest expected magnitude."""
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[
        dtype
    ]


def disagreement(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], limit: float
) -> str | None:
    """Describe the first tensor whose error exceeds ``limit`` times its largest expected magnitude.
    Return None if all tensors agree.
    """
    for name, wanted in expected.items():
        got = actual[name]
        if wanted is None and got is None:
            continue
        if wanted is None or got is None or got.shape != wanted.shape:
            return f"wrong: {name} has another shape than the reference"
        error = (
            (got.double() - wanted.double()).abs().max() / wanted.abs().max().clamp(min=1e-30)
        ).item()
        if not error <= limit:
            return f"wrong: {name} differs from the reference by {error:.1e}, allowed {limit:.0e}"
    return None


def errors_of(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return ``|actual - expected| / |expected|`` of each tensor; NaN if the tensor has NaN."""
    norms = {
        name: ((actual[name].double() - x.double()).norm(), x.double().norm())
        for name, x in expected.items()
    }
    return {name: (error / norm.clamp(min=1e-30)).item() for name, (error, norm) in norms.items()}


def wrong(errors: dict[str, float], dtype: str) -> str | None:
    """Describe the tensor that exceeds its limit most; None if all are within their limits."""
    limits = {name: LIMITS[dtype][name != "out"] for name in errors}
    beyond = [name for name, error in errors.items() if not error <= limits[name]]
    if not beyond:
        return None
    worst = max(  # NaN is worst
        beyond, key=lambda name: (errors[name] != errors[name], errors[name] / limits[name])
    )
    return f"wrong: error {errors[worst]:.1e} of {worst}, allowed {limits[worst]:.0e}"


def beyond_eager(errors: dict[str, float], eager_errors: dict[str, float]) -> list[str]:
    """Return the names of the tensors whose error is too large.

    An error is too large if it exceeds both ``ALWAYS_ALLOWED`` and ``TIMES_EAGER`` times the error
    of PyTorch's operations.
    """
    limits = {name: max(ALWAYS_ALLOWED, TIMES_EAGER * eager_errors[name]) for name in errors}
    return [name for name in errors if not errors[name] <= limits[name]]
