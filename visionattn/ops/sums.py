"""The pair that each term of an attention returns. Terms add; one division at the end makes the
output.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from visionattn.ops.chunking import chunks

CHUNK_ELEMENTS = 1 << 18


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
        """The weighted mean ``[B, h, N, e]``; 0, with zero gradient, for a query whose weights are
        all 0.
        """
        return weighted_mean(self.values, self.mass)[0]

    def divide_with(self, more: "Sums", skip: int) -> Tensor:
        """The weighted mean under these weights and ``more``, which are for the tokens from
        ``skip`` on.
        """
        return weighted_mean(self.values, self.mass, more.values, more.mass, skip)[0]


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is float64, else float32: what sums and mass are held in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context in which products on the device of ``x`` keep their dtype: sums stay float32
    whatever autocast says.
    """
    if not _has_autocast(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


@torch.compiler.assume_constant_result
def _has_autocast(device_type: str) -> bool:
    """A question that torch 2.11 cannot compile."""
    return torch.amp.is_autocast_available(device_type)


def no_double_backward(backward: torch.library.CustomOpDef) -> None:
    """Let the operator of a backward pass say plainly that it has no derivative of its own."""

    def refuse(ctx, *grads):
        raise NotImplementedError(
            "attention of visionattn has no second derivative: call backward() without "
            "create_graph=True, "
            "or take the definition in visionattn/ops/reference.py"
        )

    backward.register_autograd(refuse)


@torch.library.custom_op("visionattn::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    """``x y`` for ``x [..., n, d]`` and ``y [..., d, m]`` or ``[d, m]``, in their own dtype in both
    directions.

    A plain product leaves autocast in the forward pass alone: its gradient takes the dtype that
    autocast gives it.
    """
    with without_autocast(x):
        return torch.matmul(x, y)


@product.register_fake
def _(x, y):
    return x.new_empty(*x.shape[:-1], y.shape[-1])


def _keep_factors(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _product_backward(ctx, grad):
    (x, y), dx, dy = ctx.saved_tensors, None, None
    if ctx.needs_input_grad[0]:
        dx = product(grad, y.mT)
    if ctx.needs_input_grad[1]:
        x, grad = (x.flatten(0, -2), grad.flatten(0, -2)) if y.ndim == 2 else (x, grad)
        dy = product(x.mT, grad)
    return dx, dy


product.register_autograd(_product_backward, setup_context=_keep_factors)


@torch.library.custom_op("visionattn::weighted_mean", mutates_args=())
def weighted_mean(
    values: Tensor,
    mass: Tensor,
    more_values: Tensor | None = None,
    more_mass: Tensor | None = None,
    skip: int = 0,
) -> tuple[Tensor, Tensor]:
    """The mean ``[B, h, N, e]`` under all weights, 0 where there are none, and their sum
    ``[B, h, N]``.

    Args:
        values, mass: sums of one term, ``[B, h, N, e]`` and ``[B, h, N]``.
        more_values, more_mass: those of another term, for the tokens from ``skip`` on.

    For its gradient it keeps its two results alone. In memory the mean has tokens before heads, as
    a projection of all heads together wants it.
    """
    out, total = tokens_first(values, *values.shape), mass.clone()
    if more_mass is not None:
        total[:, :, skip:] += more_mass
    (batch, heads, tokens), divisor = mass.shape, divisor_of(total)
    elements = CHUNK_ELEMENTS // max(1, heads * values.shape[3])
    for b in chunks(batch, max(1, elements // max(1, tokens))):
        for t in chunks(tokens, max(1, elements)):
            if more_values is None:
                torch.div(values[b, :, t], divisor[b, :, t], out=out[b, :, t])
                continue
            both = slice(max(t.start, skip), t.stop)
            out[b, :, t.start : both.start] = values[b, :, t.start : both.start]
            more = more_values[b, :, both.start - skip : max(t.stop - skip, 0)]
            torch.add(values[b, :, both], more, out=out[b, :, both])
            out[b, :, t].div_(divisor[b, :, t])
    return out, total


def tokens_first(
    like: Tensor, batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Memory for ``[B, h, N, e]`` that lies as ``[B, N, h, e]``, as the projection of all heads
    together wants it.
    """
    return like.new_empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2)


def divisor_of(mass: Tensor) -> Tensor:
    """``mass [..., 1]`` with 1 in place of 0."""
    return torch.where(mass == 0, 1, mass).unsqueeze(-1)


@weighted_mean.register_fake
def _(values, mass, more_values=None, more_mass=None, skip=0):
    return tokens_first(values, *values.shape), mass.new_empty(mass.shape)


@torch.library.custom_op("visionattn::weighted_mean_backward", mutates_args=())
def weighted_mean_backward(grad: Tensor, out: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``weighted_mean``: ``g = grad / mass`` for the values, ``-<g, out>`` for the
    mass.
    """
    d_values = torch.div(grad, divisor_of(mass), out=out.new_empty(out.shape)).masked_fill_(
        (mass == 0).unsqueeze(-1), 0
    )
    return d_values, (d_values * out).sum(-1).neg_()


@weighted_mean_backward.register_fake
def _(grad, out, mass):
    return out.new_empty(out.shape), mass.new_empty(mass.shape)


no_double_backward(weighted_mean_backward)


def _setup_context(ctx, inputs, output):
    ctx.skip, ctx.terms = inputs[4], 1 if inputs[2] is None else 2
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)


def _backward(ctx, grad, unused):
    if grad is None:
        return (None,) * 5
    with without_autocast(grad):
        d_values, d_mass = weighted_mean_backward(grad, *ctx.saved_tensors)
    if ctx.terms == 1:
        return d_values, d_mass, None, None, None
    return d_values, d_mass, d_values[:, :, ctx.skip :], d_mass[:, :, ctx.skip :], None


weighted_mean.register_autograd(_backward, setup_context=_setup_context)
