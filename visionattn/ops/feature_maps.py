"""Feature maps of kernelized attention: ``w_ij = phi(q_i) . phi(k_j)``."""

from typing import Protocol

import torch
from torch import Tensor


class FeatureMap(Protocol):
    """A pair of non-negative maps over the last axis of ``[B, h, N, d]`` tensors."""

    def query(self, x: Tensor) -> Tensor:
        """Features of queries, ``[B, h, N, f]``."""

    def key(self, x: Tensor) -> Tensor:
        """Features of keys, ``[B, h, M, f]``."""


def elu1(x: Tensor) -> Tensor:
    """``elu(x) + 1``, positive everywhere. Source: Katharopoulos et al. 2020, eq. 7.

    Written as ``exp(min(x, 0)) + max(x, 0)``: adding 1 to ``elu`` rounds to zero below -17 in float32.
    """
    return x.clamp(max=0).exp() + x.relu()


class Elu1:
    """``elu(x) + 1`` for queries and keys."""

    query = key = staticmethod(elu1)


class Relu:
    """``max(x, 0)`` for queries and keys; a query that meets no key gets 0."""

    query = key = staticmethod(torch.relu)


class PositionSoftmax:
    """Softmax over features for queries, over positions for keys. Source: Shen et al. 2021, "Efficient attention".

    The keys are multiplied by M, the number of keys present, so that the mass of a query is M like that of other maps.
    A key's feature depends on all other keys: states of this map do not add, and it cannot be causal.
    """

    @staticmethod
    def query(x: Tensor) -> Tensor:
        """Softmax over the last axis of ``[B, h, N, d]``."""
        return x.softmax(-1)

    @staticmethod
    def key(x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Softmax over the positions that ``key_mask [B, M]`` keeps, times their number; 0 elsewhere."""
        if key_mask is None:
            return x.softmax(-2) * x.shape[-2]
        mask = key_mask[:, None, :, None]
        features = x.masked_fill(~mask, torch.finfo(x.dtype).min).softmax(-2)
        return (features * mask) * mask.sum(-2, keepdim=True)


FEATURE_MAPS = {"elu1": Elu1, "relu": Relu, "softmax": PositionSoftmax}


def get_feature_map(feature_map: str | FeatureMap) -> FeatureMap:
    """The map of that name, or the object itself.

    Raises:
        ValueError: no map of that name.
    """
    if not isinstance(feature_map, str):
        return feature_map
    if feature_map not in FEATURE_MAPS:
        names = ", ".join(FEATURE_MAPS)
        raise ValueError(f"feature_map {feature_map!r}: wanted one of {names}, or an object with .query and .key")
    return FEATURE_MAPS[feature_map]
