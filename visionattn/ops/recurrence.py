"""Causal attention one token at a time.

Kernelized attention with ``Flat`` relative position keeps a state of constant size; softmax
attention keeps a cache of keys and values. Both return, token by token, the output of the
operation with ``causal=True``. States are changed in place. ``states.py`` has states that add,
without relative position.

Sources: Katharopoulos et al. 2020, eq. 16 to 20 (the recurrence, without relative position);
Scaleformer, section 4 (clipped relative position); the ring buffer of recent values is ours.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from visionattn.ops.attention_sums import accumulation_dtype, divisor_of
from visionattn.ops.feature_maps import (
    FEATURE_MAPS,
    FeatureMap,
    elu1,
    get_feature_map,
    key_features,
    query_features,
)
from visionattn.ops.operator import without_autocast
from visionattn.ops.position.relative_position import Flat


class PastTable:
    """The entries of a ``Flat`` table for past keys, in the order in which steps read them.

    Args:
        relative: relative position with a table ``[h or 1, 2R+1, d]``, without layout.
        tokens: maximum number of tokens; entries for larger offsets are dropped.
    """

    def __init__(self, relative: Flat, tokens: int):
        past = relative.table[:, : relative.table.shape[1] // 2 + 1].flip(1)
        # Converted once for all steps, to the dtype of sums.
        past = past.to(accumulation_dtype(past))
        self.horizon = min(past.shape[1] - 1, tokens)
        self.entries = past[:, : self.horizon + 1]
        """Entry o is for the key o tokens before the query; the last entry is for all keys at least
        R tokens before.
        """
        self.is_mean = relative.normalization == "mean"
        self.last = self.entries[:, -1:].mT
        """The entry for all far keys, ``[h or 1, d, 1]``."""
        self.falling = self.entries[:, : self.horizon].flip(1)
        """The other entries, for the oldest key first, ``[h or 1, R, d]``."""

    @cached_property
    def ring(self) -> Tensor:
        """Return ``falling`` twice in a row, ``[h or 1, 2R, d]``.

        The ring buffer ``RecurrentState.recent`` may begin anywhere: the entries in its order are
        always a slice of this tensor.
        """
        return torch.cat([self.falling, self.falling], 1)

    @cached_property
    def beyond_far(self) -> Tensor:
        """Return ``(falling - last) / sqrt(d)``: entries relative to the entry of far keys."""
        return (self.falling - self.last.mT) * self.last.shape[1] ** -0.5


def _by_head(x: Tensor, entries: Tensor) -> Tensor:
    """Return ``x r^T`` of one token, ``[B, h, 1, n]`` for ``x [B, h, 1, d]`` and entries
    ``[h or 1, n, d]``.

    One product per head avoids a copy of the table for each image.
    """
    heads = x.squeeze(2).transpose(0, 1)
    return torch.matmul(heads, entries.mT).transpose(0, 1).unsqueeze(2)


@dataclass
class RecurrentState:
    """The state of kernelized attention after the tokens so far; float32 (float64 for float64
    inputs).

    Values have an extra column of ones, ``[v_j, 1]``, whose sums are masses and numbers of keys.

    Args:
        S: ``sum_j phi(k_j) [v_j, 1]^T``, ``[B, h, f, e+1]``.
        recent: ring buffer with ``[v_j, 1]`` of the last R tokens, ``[B, h, R, e+1]``: token j at
            index ``j mod R``, 0 at indices not yet filled.
        far: the sum of ``[v_j, 1]`` of all earlier tokens, ``[B, h, 1, e+1]``.
        count: number of tokens so far.
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
        """Return the state before the first token.

        Args:
            shape: B, h, number of features f of the map, and width e of values.
            horizon: ``PastTable.horizon``; 0 without relative position.
            dtype: dtype of the sums.
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
        """Add one token at constant cost, and return its output over all tokens up to itself.

        Args:
            q, k, v: ``[B, h, 1, d]``, ``[B, h, 1, d]``, ``[B, h, 1, e]``.
            feature_map: as for ``kernelized_attention``.
            table: table of the relative position, with the horizon of the state; None: no relative
                position.

        Returns:
            ``[B, h, 1, e]`` in the dtype of v.
        """
        phi, dtype = get_feature_map(feature_map), self.S.dtype
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
        """Store the value, and add the relative term to ``sums [B, h, 1, e+1]``."""
        horizon, far, slot = table.horizon, self.far, 0
        # With "mean", each class contributes its mean times the number of all keys. Each class
        # within the horizon has one key.
        scale = self.count + 1 if table.is_mean else 1
        num_far = max(1, self.count + 1 - horizon) if table.is_mean else 1
        if horizon:
            # The new value replaces the oldest recent value, which is added to the far sum.
            slot = self.count % horizon
            oldest = self.recent[:, :, slot : slot + 1]
            far += oldest
            oldest.copy_(with_mass)
            start = horizon - 1 - slot
            weights = _by_head(phi_q, table.ring[:, start : start + horizon])
            sums.add_(weights @ self.recent, alpha=scale)
        else:  # one class: all keys
            far += with_mass
        sums.addcmul_(torch.matmul(phi_q, table.last), far, value=scale / num_far)


@dataclass
class KeyValueCache:
    """Keys and values of softmax attention for at most N tokens.

    Args:
        keys: ``[B, h, N, d]``, stored as ``[B, h, d, N]``: on a CPU this order is fastest for the
            product of one query with all keys.
        values: ``[B, h, N, e]``.
        count: number of tokens so far.
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
            tokens: N, the maximum number of tokens.
        """
        batch, heads, d, e = shape
        keys = torch.zeros(batch, heads, d, tokens, dtype=dtype, device=device)
        return cls(keys.mT, torch.zeros(batch, heads, tokens, e, dtype=dtype, device=device))

    def step(self, q: Tensor, k: Tensor, v: Tensor, table: PastTable | None = None) -> Tensor:
        """Add one token and return its output over all tokens up to itself.

        The cost grows with the number of tokens so far.

        Args:
            q, k, v: ``[B, h, 1, d]``, ``[B, h, 1, d]``, ``[B, h, 1, e]``.
            table: signed table of the relative position; None: no relative position.

        Returns:
            ``[B, h, 1, e]`` in the dtype of v.
        """
        self.keys[:, :, self.count] = k[:, :, 0]
        self.values[:, :, self.count] = v[:, :, 0]
        self.count += 1
        # Two plain products read the slices without a copy. For one query they are faster than
        # PyTorch's fused attention and give the same result.
        keys, values = (x.flatten(0, 1)[:, : self.count] for x in (self.keys, self.values))
        with without_autocast(q):
            query = q.to(keys.dtype) * q.shape[3] ** -0.5
            scores = torch.bmm(query.flatten(0, 1), keys.mT)
            if table is not None and table.horizon:
                # Softmax is invariant to a term common to all keys: subtract the entry of far keys
                # from all entries, so that far keys need none.
                own = table.beyond_far[:, -self.count :]
                near = scores[:, :, -own.shape[1] :].unflatten(0, q.shape[:2])
                near += _by_head(q.to(keys.dtype), own)
            out = torch.bmm(scores.softmax(2), values)
        return out.unflatten(0, q.shape[:2]).to(v.dtype)
