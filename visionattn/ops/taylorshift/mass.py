"""The sums of TaylorShift's weights without weights or features, their gradient, and how much they
cancel.

``sum_j (a x_ij^2 + b x_ij + c) = a q^T (K^T K) q + b q . sum k + c M`` for one chunk of heads.
"""

import torch
from torch import Tensor

from visionattn.ops.operator import without_autocast
from visionattn.ops.sums import accumulation_dtype
from visionattn.ops.taylorshift.passes import Pass, passes

MOST_CANCELLATION = {torch.float32: 2.0**13, torch.float64: 2.0**28}
"""How many times a query's mass the terms of its sums may be in the efficient form that "auto"
takes, by the dtype of the sums. The error of the result is up to a quarter of eps times as many of
the largest value: 2.5e-4 in float32, 1.5e-8 in float64."""


def fill_mass(
    step: Pass,
    q: Tensor,
    k: Tensor,
    abc: tuple[float, float, float],
    moments: tuple[Tensor, Tensor],
    out: Tensor,
):
    """Fill the chunk's ``K^T K [g, d, d]``, ``sum k [g, d]`` and sums of weights ``out [g, N]``."""
    (a, b, c), (second, first) = abc, moments
    second.zero_(), first.zero_()
    for t in step.slices(k):
        key = step.k.load(t)
        second.baddbmm_(key, key.mT)
        first += key.sum(2)
    for t in step.slices(q):
        query = step.q.load(t)
        score = torch.baddbmm((b * first).unsqueeze(2), second, query, alpha=a)
        out[:, t] = (score * query).sum(1) + c * step.count


class MassGradient:
    """Gradients through ``a q^T (K^T K) q + b q . sum k`` of one chunk of heads, for
    ``d_mass [g, N]``.
    """

    def __init__(self, d_mass: Tensor, second: Tensor, first: Tensor, a: float, b: float):
        self.d_mass, self.a, self.b = d_mass, a, b
        self.second, self.slope = second, b * first.unsqueeze(2)
        self.d_second, self.d_first = torch.zeros_like(second), torch.zeros_like(first)

    def add_to_queries(self, query: Tensor, t: slice, out: Tensor) -> Tensor:
        """Add to ``out [g, d, T]``, and keep what the keys will need."""
        z = self.d_mass[:, None, t]
        self.d_second.baddbmm_(query * z, query.mT, alpha=self.a)
        self.d_first.add_((query * z).sum(2), alpha=self.b)
        return out.addcmul_(z, torch.baddbmm(self.slope, self.second, query, alpha=2 * self.a))

    def add_to_keys(self, key: Tensor, out: Tensor) -> Tensor:
        """Add to ``out [g, d, T]``; the queries come first."""
        return out.baddbmm_(self.d_second, key, alpha=2).add_(self.d_first.unsqueeze(2))


def cancels_little(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, abc: tuple[float, float, float]
) -> bool:
    """Tell whether for each query the terms of its sums, ``a |q|^2 |k|^2 + c`` of each key, are no
    more than ``MOST_CANCELLATION`` times its mass.

    Products of features have either sign. Where q is orthogonal to keys and both are long, large
    ones cancel, and their rounding stays.
    """
    (a, b, c), dtype = abc, accumulation_dtype(q, k, v)
    with torch.no_grad(), without_autocast(q):
        for step in passes((q, k, v, None, key_mask), dtype):
            of_queries, of_keys = (
                torch.linalg.vector_norm(x, dim=2, dtype=dtype).square_()
                for x in (step.q.x, step.k.x)
            )
            if step.absent is not None:
                of_keys.masked_fill_(step.absent, 0)
            count = torch.as_tensor(step.count, dtype=dtype)
            terms = a * of_queries * of_keys.sum(1, keepdim=True) + c * count
            # No mass is less than this: where it is enough, the masses themselves are not needed.
            least = (c - b * b / (4 * a)) * count
            if (terms <= MOST_CANCELLATION[dtype] * least).all():
                continue
            groups, n, d = step.q.x.shape
            moments = q.new_empty(groups, d, d, dtype=dtype), q.new_empty(groups, d, dtype=dtype)
            mass = torch.empty_like(terms)
            fill_mass(step, q, k, abc, moments, mass)
            if (terms > MOST_CANCELLATION[dtype] * mass.maximum(least)).any():
                return False
    return True
