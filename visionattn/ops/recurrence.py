"""Causal attention one token at a time: kernelized attention with ``Flat`` relative position by a
state whose size does not depend on how many tokens came before, and softmax attention by a cache of
their keys and values.

Both give what the causal form of the operation gives for the same tokens, row by row. States are
changed in place; ``states.py`` has those that add, and knows nothing of relative position.

Sources: Katharopoulos et al. 2020, eq. 16 to 20 (the recurrence, without relative position);
Scaleformer, section 4 (clipped relative position); the ring of recent values is ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.feature_maps import (
    FeatureMap,
    elu1,
    get_feature_map,
    is_per_token,
    key_features,
    query_features,
)
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.kinds import Flat
from visionattn.ops.sums import Sums


class PastTable:
    """The entries of a ``Flat`` table for keys of the past, in the order in which steps read them.

    Args:
        relative: its table, ``[h or 1, 2R+1, d]``; no layout.
        tokens: the most tokens that there will be; entries beyond are left out.
    """

    def __init__(self, relative: Flat, tokens: int):
        if relative.layout is not None:
            raise ValueError("relative: wanted Flat without a layout: every token takes a step")
        past = relative.table[:, : relative.table.shape[1] // 2 + 1].flip(1)
        self.horizon = min(past.shape[1] - 1, tokens)
        self.entries = past[:, : self.horizon + 1]
        """Entry o is that of the key o tokens before the query; the last is of all from R on."""
        self.is_mean = relative.normalization == "mean"
        # Twice one after the other: whichever place of the ring is the newest, the entries of all
        # places are one slice.
        falling = self.entries[:, : self.horizon].flip(1)
        self.ring = torch.cat([falling, falling], 1)


@dataclass
class RecurrentState:
    """What kernelized attention needs of the tokens before; float32 (float64 for float64 inputs).

    The last of ``e + 1`` columns holds masses, and numbers of keys.

    Args:
        S: ``sum_j phi(k_j) [v_j, 1]^T``, ``[B, h, f, e+1]``.
        recent: ``[v_j, 1]`` of the last R tokens, ``[B, h, R, e+1]``: token j at place ``j mod R``,
            0 where there was none.
        far: the sum of ``[v_j, 1]`` of all tokens before those, ``[B, h, 1, e+1]``.
        count: how many tokens came.
    """

    S: Tensor
    recent: Tensor
    far: Tensor
    count: int = 0

    @classmethod
    def begin(
        cls,
        shape: tuple[int, int, int, int],
        horizon: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "RecurrentState":
        """Return the state of no tokens.

        Args:
            shape: B, h, features f of the map, and width e of values.
            horizon: R of the relative position, at most the number of tokens to come.
            dtype: of the sums.
        """
        batch, heads, features, width = shape
        sizes = features, horizon, 1
        made = (
            torch.zeros(batch, heads, size, width + 1, dtype=dtype, device=device) for size in sizes
        )
        return cls(*made)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        feature_map: str | FeatureMap = "elu1",
        table: PastTable | None = None,
    ) -> Tensor:
        """Take one token at constant cost, and return what it gets of all up to itself.

        Args:
            q, k, v: ``[B, h, 1, d]``, ``[B, h, 1, d]``, ``[B, h, 1, e]``.
            feature_map: as ``kernelized_attention`` takes it.
            table: of the relative position; its horizon is that of the state.

        Returns:
            ``[B, h, 1, e]`` in the dtype of v.

        Raises:
            ValueError: a feature map whose keys depend on each other.
        """
        phi, dtype = get_feature_map(feature_map), self.S.dtype
        if not is_per_token(phi):
            raise ValueError(
                'a feature_map such as "softmax" has no steps: its keys depend on each other; take '
                '"elu1" or "relu"'
            )
        with without_autocast(q):
            query = q.to(dtype)
            with_mass = F.pad(v.to(dtype), (0, 1), value=1.0)
            self.S += key_features(phi, k.to(dtype), None).mT * with_mass
            sums = query_features(phi, query, self.S.shape[2]) @ self.S
            if table is not None:
                sums = sums + self._placed(elu1(query), with_mass, table)
            self.count += 1
            return Sums(sums[..., :-1], sums[..., -1]).divide().to(v.dtype)

    def _placed(self, phi_q: Tensor, with_mass: Tensor, table: PastTable) -> Tensor:
        """Take in the value, and return the sums ``[B, h, 1, e+1]`` of the relative term."""
        horizon, far = table.horizon, self.far
        if horizon:
            # The oldest value makes room for the new one, and joins the far ones.
            place = self.count % horizon
            oldest = self.recent[:, :, place : place + 1]
            far += oldest
            oldest.copy_(with_mass)
            start = horizon - 1 - place
            entries = table.ring[:, start : start + horizon]
            near = (phi_q @ entries.to(phi_q.dtype).mT) @ self.recent
        else:  # one class: all keys
            far += with_mass
            near = torch.zeros_like(far)
        weight = phi_q @ table.entries[:, -1:].to(phi_q.dtype).mT
        if not table.is_mean:
            return near + weight * far
        # Each class in units of its mean, times all keys, as content is.
        return (near + weight * far / far[..., -1:].clamp(min=1)) * (self.count + 1)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that it holds, as tensors by name."""
        held = {"S": self.S, "recent": self.recent, "far": self.far}
        return held | {"count": torch.tensor(self.count)}


@dataclass
class KeyValueCache:
    """Keys and values of the tokens before, with room for those to come, for softmax attention.

    Args:
        keys: ``[B, h, N, d]``.
        values: ``[B, h, N, e]``.
        count: how many tokens came.
    """

    keys: Tensor
    values: Tensor
    count: int = 0

    @classmethod
    def begin(
        cls,
        shape: tuple[int, int, int, int],
        tokens: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "KeyValueCache":
        """Return an empty cache.

        Args:
            shape: B, h, d and e.
            tokens: N, the most tokens to come.
        """
        batch, heads, *widths = shape
        made = (
            torch.zeros(batch, heads, tokens, width, dtype=dtype, device=device) for width in widths
        )
        return cls(*made)

    def step(self, q: Tensor, k: Tensor, v: Tensor, table: PastTable | None = None) -> Tensor:
        """Take one token, at a cost that grows with their number, and return what it gets of all up
        to itself.

        Args:
            q, k, v: ``[B, h, 1, d]``, ``[B, h, 1, d]``, ``[B, h, 1, e]``.
            table: of the relative position, signed.

        Returns:
            ``[B, h, 1, e]`` in the dtype of v.

        Raises:
            ValueError: the cache is full.
        """
        if self.count == self.keys.shape[2]:
            raise ValueError(f"the cache is full: it has room for {self.keys.shape[2]} tokens")
        self.keys[:, :, self.count] = k[:, :, 0]
        self.values[:, :, self.count] = v[:, :, 0]
        self.count += 1
        dtype = self.keys.dtype
        with without_autocast(q):
            query = q.to(dtype)
            bias = None if table is None else self._bias(query, table)
            out = F.scaled_dot_product_attention(
                query,
                self.keys[:, :, : self.count],
                self.values[:, :, : self.count],
                attn_mask=bias,
            )
        return out.to(v.dtype)

    def _bias(self, q: Tensor, table: PastTable) -> Tensor:
        """Return ``q . r / sqrt(d)`` of every key so far, ``[B, h, 1, count]``."""
        scores = q @ (table.entries.to(q.dtype) * q.shape[3] ** -0.5).mT
        past = torch.arange(self.count - 1, -1, -1, device=q.device)
        return scores.index_select(3, past.clamp(max=table.horizon))

    def tensors(self) -> dict[str, Tensor]:
        """Return all that it holds, as tensors by name."""
        keys, values = (x[:, :, : self.count].contiguous() for x in (self.keys, self.values))
        return {"keys": keys, "values": values, "count": torch.tensor(self.count)}
