"""The softmax of a few queries over keys that come in pieces."""

import math

import torch
from torch import Tensor

from visionattn.ops.sums import accumulation_dtype


class RunningSoftmax:
    """What is needed of the keys so far: the largest score, and the sums of weights and of weighted
    values under it.
    """

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def add(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add keys and values ``[B, h, n, d]`` as the queries ``[B, h, P, d]`` see them."""
        wide = accumulation_dtype(q)
        scores = (q.to(wide) @ k.to(wide).mT) / math.sqrt(q.shape[3])
        largest = scores.amax(3, keepdim=True)
        if self.sums:
            largest = torch.maximum(largest, self.sums[0])
        weights = (scores - largest).exp()
        mass, values = weights.sum(3, keepdim=True), weights @ v.to(wide)
        if self.sums:
            before, old_mass, old_values = self.sums
            shrunk = (before - largest).exp()
            mass, values = mass + shrunk * old_mass, values + shrunk * old_values
        self.sums = [largest, mass, values]

    def mean(self) -> Tensor:
        """Return the weighted mean of the values, ``[B, h, P, e]``."""
        _, mass, values = self.sums
        return values / mass
