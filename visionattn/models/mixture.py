"""Mixtures of logistic distributions over levels, as outputs of models that write images.

Source: Salimans et al. 2017, section 2.1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def log_mixture(out: Tensor, values: Tensor, levels: int) -> Tensor:
    """Return the log-probability of levels under mixtures of logistic distributions.

    The probability of a level is that of the interval of its width around it, on a scale from -1 to
    1; the outermost levels have all that lies beyond. Of an interval (a, b) in units of the scale
    it is ``sigmoid(b) sigmoid(-a) (1 - exp(a - b))``, which keeps its digits in the tails.

    Args:
        out: ``[..., 3 K]``: logits, means, logarithms of scales; those below -7 count as -7.
        values: whole numbers from 0 to ``levels - 1``, ``[V]`` or ``[..., V]``.
        levels: 2 or more.

    Returns:
        ``[..., V]``.
    """
    weights, means, scales = (x.unsqueeze(-2) for x in out.chunk(3, -1))
    values = values.unsqueeze(-1).to(out.dtype)
    half = 1 / (levels - 1)
    inverse = torch.exp(-scales.clamp(min=-7))
    offset = values * (2 * half) - 1 - means
    below, above = (offset - half) * inverse, (offset + half) * inverse
    at_bottom, at_top = F.logsigmoid(above), F.logsigmoid(-below)
    # The width of an interval in units of the scale does not depend on where it is.
    inside = at_bottom + at_top + torch.log(-torch.expm1(-2 * half * inverse))
    found = torch.where(values == 0, at_bottom, inside)
    found = torch.where(values == levels - 1, at_top, found)
    return torch.logsumexp(F.log_softmax(weights, -1) + found, -1)
