"""Causal attention one token at a time: kernelized attention with ``Flat`` relative position by a
state whose size does not depend on how many tokens came before, and softmax attention by a cache of
their keys and values.

Both give what the causal form of the operation gives for the same tokens, row by row. States are
changed in place; ``states.py`` has those that add, and knows nothing of relative position.

Sources: Katharopoulos et al. 2020, eq. 16 to 20 (the recurrence, without relative position);
Scaleformer, section 4 (clipped relative position); the ring of recent values is ours.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.feature_maps import (
    FEATURE_MAPS,
    FeatureMap,
    elu1,
    get_feature_map,
    is_per_token,
    key_features,
    query_features,
)
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.kinds import Flat
from visionattn.ops.sums import accumulation_dtype, divisor_of


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
        # In the dtype of sums, once for all steps.
        past = past.to(accumulation_dtype(past))
        self.horizon = min(past.shape[1] - 1, tokens)
        self.entries = past[:, : self.horizon + 1]
        """Entry o is that of the key o tokens before the query; the last is of all from R on."""
        self.is_mean = relative.normalization == "mean"
        self.last = self.entries[:, -1:].mT
        """The entry of all far keys, ``[h or 1, d, 1]``."""
        self.falling = self.entries[:, : self.horizon].flip(1)
        """The others in the order of the sequence, the oldest key first, ``[h or 1, R, d]``."""

    @cached_property
    def ring(self) -> Tensor:
        """Return ``falling`` twice one after the other, ``[h or 1, 2R, d]``: whichever place of the
        ring is the newest, the entries of all places are one slice.
        """
        return torch.cat([self.falling, self.falling], 1)

    @cached_property
    def beyond_far(self) -> Tensor:
        """Return by how much the entries of ``falling`` exceed that of far keys, over
        ``sqrt(d)``.
        """
        return (self.falling - self.last.mT) * self.last.shape[1] ** -0.5


def _by_head(x: Tensor, entries: Tensor) -> Tensor:
    """Return ``x r^T`` of one token, ``[B, h, 1, n]`` for ``x [B, h, 1, d]`` and entries
    ``[h or 1, n, d]``, as a product for each head: the table is not copied for each image.
    """
    heads = x.squeeze(2).transpose(0, 1)
    return torch.matmul(heads, entries.mT).transpose(0, 1).unsqueeze(2)


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
            self.S.addcmul_(key_features(phi, k.to(dtype), None).mT, with_mass)
            phi_q = query_features(phi, query, self.S.shape[2])
            sums = phi_q @ self.S
            if table is not None:
                is_elu1 = phi is FEATURE_MAPS["elu1"]
                self._add_placed(sums, phi_q if is_elu1 else elu1(query), with_mass, table)
            self.count += 1
            return (sums[..., :-1] / divisor_of(sums[..., -1])).to(v.dtype)

    def _add_placed(self, sums: Tensor, phi_q: Tensor, with_mass: Tensor, table: PastTable) -> None:
        """Take in the value, and add the relative term to ``sums [B, h, 1, e+1]``."""
        horizon, far, place = table.horizon, self.far, 0
        # With "mean" each class is in units of its mean, times all keys, as content is. Each of
        # those nearby has one key.
        times = self.count + 1 if table.is_mean else 1
        many = max(1, self.count + 1 - horizon) if table.is_mean else 1
        if horizon:
            # The oldest value makes room for the new one, and joins the far ones.
            place = self.count % horizon
            oldest = self.recent[:, :, place : place + 1]
            far += oldest
            oldest.copy_(with_mass)
            start = horizon - 1 - place
            weights = _by_head(phi_q, table.ring[:, start : start + horizon])
            sums.add_(weights @ self.recent, alpha=times)
        else:  # one class: all keys
            far += with_mass
        sums.addcmul_(torch.matmul(phi_q, table.last), far, value=times / many)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that it holds, as tensors by name."""
        held = {"S": self.S, "recent": self.recent, "far": self.far}
        return held | {"count": torch.tensor(self.count)}


@dataclass
class KeyValueCache:
    """Keys and values of the tokens before, with room for those to come, for softmax attention.

    Args:
        keys: ``[B, h, N, d]``; in memory ``[B, h, d, N]``, as the product of one query with all of
            them reads them fastest on a processor.
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
        batch, heads, d, e = shape
        keys = torch.zeros(batch, heads, d, tokens, dtype=dtype, device=device)
        return cls(keys.mT, torch.zeros(batch, heads, tokens, e, dtype=dtype, device=device))

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
        # Two plain products read the slices where they lie. For one query they take less time than
        # the fused attention of PyTorch, which they agree with.
        keys, values = (x.flatten(0, 1)[:, : self.count] for x in (self.keys, self.values))
        with without_autocast(q):
            query = q.to(keys.dtype) * q.shape[3] ** -0.5
            scores = torch.bmm(query.flatten(0, 1), keys.mT)
            if table is not None and table.horizon:
                # Far keys share one entry, and a softmax does not notice what all keys share.
                own = table.beyond_far[:, -self.count :]
                near = scores[:, :, -own.shape[1] :].unflatten(0, q.shape[:2])
                near += _by_head(q.to(keys.dtype), own)
            out = torch.bmm(scores.softmax(2), values)
        return out.unflatten(0, q.shape[:2]).to(v.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that it holds, as tensors by name."""
        keys, values = (x[:, :, : self.count].contiguous() for x in (self.keys, self.values))
        return {"keys": keys, "values": values, "count": torch.tensor(self.count)}
