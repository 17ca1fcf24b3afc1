"""The pair that each term of an attention returns. Terms add; one division at the end makes the output."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Weighted sums of the values and the sums of the weights, before the division.

    Args:
        values: ``sum_j w_ij v_j``, ``[B, h, N, e]``, float32 (float64 for float64 inputs).
        mass: ``sum_j w_ij``, ``[B, h, N]``, the same dtype.
    """

    values: Tensor
    mass: Tensor

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.values + other.values, self.mass + other.mass)

    def divide(self) -> Tensor:
        """The weighted mean ``[B, h, N, e]``; 0, with zero gradient, for a query whose weights are all 0."""
        return self.values / self.mass.masked_fill(self.mass == 0, 1).unsqueeze(-1)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32: what sums and mass are held in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which products on the device of ``x`` keep their dtype: sums stay float32 whatever autocast says."""
    if not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)
