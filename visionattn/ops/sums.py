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
        return weighted_mean(self.values, self.mass)


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32: what sums and mass are held in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which products on the device of ``x`` keep their dtype: sums stay float32 whatever autocast says."""
    if not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def no_double_backward(backward: torch.library.CustomOpDef) -> None:
    """Let the operator of a backward pass say plainly that it has no derivative of its own."""

    def refuse(ctx, *grads):
        raise NotImplementedError(
            "attention of visionattn has no second derivative: call backward() without create_graph=True, "
            "or take the definition in visionattn/ops/reference.py"
        )

    backward.register_autograd(refuse)


@torch.library.custom_op("visionattn::weighted_mean", mutates_args=())
def weighted_mean(values: Tensor, mass: Tensor) -> Tensor:
    """``values [..., e] / mass [...]``, 0 where the mass is 0. For its gradient it keeps the result and the mass alone."""
    return values * _inverse(mass)


def _inverse(mass: Tensor) -> Tensor:
    """``1 / mass [..., 1]``, 0 where it is 0."""
    return torch.where(mass == 0, 0, mass.reciprocal()).unsqueeze(-1)


@weighted_mean.register_fake
def _(values, mass):
    return values.new_empty(values.shape)


@torch.library.custom_op("visionattn::weighted_mean_backward", mutates_args=())
def weighted_mean_backward(grad: Tensor, out: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``weighted_mean``: ``g = grad / mass`` for the values, ``-<g, out>`` for the mass."""
    d_values = grad * _inverse(mass)
    return d_values, torch.linalg.vecdot(d_values, out).neg_()


@weighted_mean_backward.register_fake
def _(grad, out, mass):
    return out.new_empty(out.shape), mass.new_empty(mass.shape)


no_double_backward(weighted_mean_backward)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(output, inputs[1])


weighted_mean.register_autograd(
    lambda ctx, grad: weighted_mean_backward(grad, *ctx.saved_tensors), setup_context=_setup_context
)
