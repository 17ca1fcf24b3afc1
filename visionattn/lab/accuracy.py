"""How wrong a result may be: the measures of an error, and the limits of each.

Four questions are asked, each with a measure of its own:

- ``disagreement``: is this case computed at all as it is defined? The largest error of an entry,
  over the largest entry, before a case is timed on a processor.
- ``wrong``: do kernels compute what they are timed for? The norm of the error over the norm of the
  result, on a GPU.
- ``beyond_eager``: is a whole model about as exact as PyTorch's own operations are in its dtype?
- ``judge``: are kernels as exact as their roundings let expect? It is the rule of the tests; why
  it is so is told in ``tests/helpers/accuracy_rule.py``.

It computes no attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

LIMITS = {
    "bfloat16": (4e-3, 1e-2),
    "float16": (2e-3, 4e-3),
    "float32": (1e-5, 1e-5),
    "float64": (1e-12, 1e-12),
}
"""Largest relative error of an output and of a gradient, by dtype."""
BESIDE_EAGER = 2.0
"""Errors beyond this many times those of PyTorch's operations in the same dtype are named."""
BASELINE_ERROR = 3e-2
"""Relative error to SDPA of what else computes softmax attention, both in 16 bits."""
ALWAYS_ALLOWED = 1e-2
"""Relative error of a whole model that is never wrong."""
WHOLE, ROW = 0.5, 2.0
"""What ``judge`` allows in units of eps, but in float32."""
IN_FLOAT32 = {"whole": 1e-5, "row": 4e-5}


def tolerance(dtype: torch.dtype) -> float:
    """Return how far a result may lie from float64, relative to the largest magnitude of the
    expected one.
    """
    return {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[
        dtype
    ]


def disagreement(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], limit: float
) -> str | None:
    """Return the first entry that differs by more than ``limit`` times the largest expected
    magnitude, in words; None: all agree.
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
    """Return ``|actual - expected| / |expected|`` of each entry; NaN where there is one."""
    norms = {
        name: ((actual[name].double() - x.double()).norm(), x.double().norm())
        for name, x in expected.items()
    }
    return {name: (apart / whole.clamp(min=1e-30)).item() for name, (apart, whole) in norms.items()}


def wrong(errors: dict[str, float], dtype: str) -> str | None:
    """Return the entry that is most beyond its limit, in words; None: all are within."""
    limits = {name: LIMITS[dtype][name != "out"] for name in errors}
    beyond = [name for name, error in errors.items() if not error <= limits[name]]
    if not beyond:
        return None
    worst = max(
        beyond, key=lambda name: (errors[name] != errors[name], errors[name] / limits[name])
    )
    return f"wrong: error {errors[worst]:.1e} of {worst}, allowed {limits[worst]:.0e}"


def beyond_eager(errors: dict[str, float], beside: dict[str, float]) -> list[str]:
    """Return the entries of a model whose error is more than ``BESIDE_EAGER`` times that of
    PyTorch's operations, ``beside``, and more than ``ALWAYS_ALLOWED``.
    """
    limits = {name: max(ALWAYS_ALLOWED, BESIDE_EAGER * beside[name]) for name in errors}
    return [name for name in errors if not errors[name] <= limits[name]]


class Judged(NamedTuple):
    """One quantity of one result: its error and the largest that is allowed."""

    quantity: str
    measure: str
    error: float
    allowed: float

    @property
    def margin(self) -> float:
        """Return how many times larger the error might be; below 1 it is too large."""
        return self.allowed / max(self.error, 1e-30)

    @property
    def passes(self) -> bool:
        """Tell whether the error is allowed; one that is not a number is not."""
        return self.error <= self.allowed


def allowed(measure: str, dtype: torch.dtype) -> float:
    """Return the largest error of a measure, "whole" or "row", where q, k and v have the dtype."""
    if dtype == torch.float32:
        return IN_FLOAT32[measure]
    return {"whole": WHOLE, "row": ROW}[measure] * torch.finfo(dtype).eps


def errors_by_measure(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the errors by measure. What should be 0 throughout is held against 1, the size of what
    goes in.
    """
    actual, expected = (x.detach().double().cpu() for x in (actual, expected))
    assert actual.shape == expected.shape
    if expected.ndim == 1:
        actual, expected = actual[:, None], expected[:, None]
    wrong, size = (actual - expected).norm(dim=-1).flatten(), expected.norm(dim=-1).flatten()
    if size.max() < 1e-9:
        size = torch.full_like(size, expected.shape[-1] ** 0.5)
    usual = size.square().mean()
    return {
        "whole": (wrong.norm() / size.norm()).item(),
        "row": (wrong / (size.square() + usual).sqrt()).max().item(),
    }


def judge(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> list[Judged]:
    """Judge every quantity by every measure that it is held to."""
    assert actual.keys() == expected.keys()
    judged = []
    for quantity, x in expected.items():
        found = errors_by_measure(actual[quantity], x)
        rounded = errors_by_measure(x.to(actual[quantity].dtype), x)
        for measure in ("whole", "row") if x.ndim > 1 and x[..., 0].numel() >= 16 else ("row",):
            judged.append(
                Judged(
                    quantity,
                    measure,
                    found[measure],
                    max(allowed(measure, dtype), 2 * rounded[measure]),
                )
            )
    return judged
