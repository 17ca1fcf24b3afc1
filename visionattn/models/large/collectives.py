"""Differentiable sums, maxima and exchanges over the ranks of a group.

The differentiated function is the sum of the losses of all ranks: the gradient of a sum over ranks
is the sum of the gradients of all ranks, and the gradient of an exchange is the reverse exchange.
If every rank has the same loss, each gets a part of the gradients of the weights. The mean of these
parts over the ranks, which DDP computes, is the gradient of the loss.

All ranks call the same functions in the same order. They use PyTorch's functional collectives, over
gloo or NCCL, forward and backward; a group of one rank sends nothing.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from visionattn.ops.attention_sums import accumulation_dtype

Collective = Callable[[Tensor], Tensor]


def _waited(x: Tensor) -> Tensor:
    """Return the result of a collective, after waiting for it."""
    return x.wait() if isinstance(x, functional.AsyncCollectiveTensor) else x


def _reduced(x: Tensor, how: str, group: ProcessGroup) -> Tensor:
    return _waited(functional.all_reduce(x.contiguous(), how, group))


class _Sent(torch.autograd.Function):
    """A collective, and the collective for its gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Collective, back: Collective) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad.contiguous()), None, None


def summed(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Return the sums over the ranks of tensors with equal shapes on all ranks, in one message.

    Args:
        tensors: tensors of one dtype.
        group: the ranks.
    """
    if distributed.get_world_size(group) == 1 or not tensors:
        return list(tensors)

    def total(x: Tensor) -> Tensor:
        return _reduced(x, "sum", group)

    flat = _Sent.apply(torch.cat([x.flatten() for x in tensors]), total, total)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def largest(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the maximum over all tokens of all ranks, ``[B, D]`` of ``x [B, n, D]``.

    Ranks with equal maxima get equal parts of the gradient.
    """
    own = x.amax(1)
    if distributed.get_world_size(group) == 1:
        return own
    found = _reduced(own.detach(), "max", group)
    holds = (own == found).to(accumulation_dtype(x))
    (holders,) = summed([holds], group)
    # A sum of zeros that carries the gradient of the maximum.
    part = (own - own.detach()) * (holds / holders.clamp(min=1))
    return found + summed([part], group)[0].to(x.dtype)


def exchanged(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[Sequence[int]]],
    group: ProcessGroup,
) -> list[list[Tensor]]:
    """Return the tensors that other ranks send to this one, in one message.

    Every rank must send something to another rank, at least an empty tensor, and must use
    everything it receives: otherwise it would not call the exchange of the gradients.

    Args:
        sent: tensors for each rank, of one dtype; none for this rank.
        shapes: shapes of the tensors that each rank sends here.
        group: the ranks.
    """
    counts = [[prod(shape) for shape in each] for each in shapes]
    here, there = [sum(each) for each in counts], [sum(x.numel() for x in each) for each in sent]

    def exchange(received: list[int], given: list[int]) -> Collective:
        return lambda x: _waited(functional.all_to_all_single(x, received, given, group))

    flat = torch.cat([x.flatten() for each in sent for x in each])
    found = _Sent.apply(flat, exchange(here, there), exchange(there, here)).split(here)
    return [
        [part.view(*shape) for part, shape in zip(own.split(sizes), each, strict=True)]
        for own, sizes, each in zip(found, counts, shapes, strict=True)
    ]
