"""Chunks of queries, keys, values and gradients for ``kernelized_eager.py``: cast, mapped to
features and laid out to stay in cache.

Inputs are ``[B, h, tokens, width]`` of any strides and any floating point dtype. A chunk is some
tokens of all heads of some images: ``[g, T, width]`` with ``g = images * heads``, in a buffer that
the next chunk reuses.
"""

import torch
from torch import Tensor

from visionattn.ops.attention_sums import wide
from visionattn.ops.chunking import chunks

CHUNK_ELEMENTS = {"cpu": 1 << 18}
CHUNK_ELEMENTS_ELSEWHERE = 1 << 23


class Features:
    """Features of q or k, and the gradient of q or k from the gradient of the features.

    Both are 0 for tokens in ``absent [B, tokens]``.
    """

    def __init__(
        self, x: Tensor, feature_map: str, dtype: torch.dtype, absent: Tensor | None = None
    ):
        self.x, self.feature_map, self.absent = x, feature_map, absent
        self.width, self.dtype = x.shape[3], dtype
        self.buffer = x.new_empty(0, 0, 0, 0)

    def load(self, b: slice, t: slice) -> Tensor:
        """Return the features of images ``b`` and tokens ``t``, ``[g, T, f]``; 0 for tokens past
        the end.

        The result is valid until the next call.
        """
        x, tokens = self.x[b, :, t], t.stop - t.start
        if (
            self.feature_map == "given"
            and self.absent is None
            and x.dtype == self.dtype
            and x.shape[2] == tokens
        ):
            return x.flatten(0, 1)
        # Allocate buffers if the shape changes. For bfloat16, elu1 is computed in float32, which is
        # faster and rounds once.
        size = (*x.shape[:2], tokens, self.width)
        if self.buffer.shape != size:
            self.buffer = self.wide = self.spare = x.new_empty(size, dtype=self.dtype)
            if self.feature_map == "elu1":
                self.spare = torch.empty_like(self.buffer, dtype=wide(self.dtype))
                if self.dtype != self.spare.dtype:
                    self.wide = torch.empty_like(self.spare)
        buffers = self.buffer, self.wide, self.spare
        out, features, spare = (buffer[:, :, : x.shape[2]] for buffer in buffers)
        if x.dtype != features.dtype or self.feature_map == "given":
            # Casting strided rows directly takes longer.
            x = features.copy_(x.contiguous())
        if self.feature_map == "elu1":  # exp(min(x, 0)) + max(x, 0), as in feature_maps.py
            torch.clamp(x, min=0, out=spare)
            torch.clamp(x, max=0, out=features).exp_().add_(spare)
        elif self.feature_map == "relu":
            torch.clamp(x, min=0, out=features)
        if self.wide is not self.buffer:
            out.copy_(features)
        if self.absent is not None:
            out.masked_fill_(self.absent[b, None, t, None], 0)
        self.buffer[:, :, x.shape[2] :].zero_()
        return self.buffer.flatten(0, 1)

    def store(self, grad: Tensor, b: slice, t: slice, out: Tensor) -> None:
        """Write the gradient of q or k into ``out[b, :, t]``.

        ``grad [g, T, f]`` is the gradient of the features loaded last; it and these features are
        overwritten.
        """
        target = out[b, :, t]
        features = self.buffer[:, :, : target.shape[2]]
        grad = grad.unflatten(0, target.shape[:2])[:, :, : target.shape[2]]
        if self.feature_map == "elu1":
            # The derivative is min(phi, 1): phi is exp(x) below 0 and 1 + x above.
            torch.mul(grad, features.clamp_(max=1), out=target)
        elif self.feature_map == "relu":
            torch.mul(grad, features.sign_(), out=target)
        else:
            target.copy_(grad)
        if self.absent is not None:
            target.masked_fill_(self.absent[b, None, t, None], 0)


class Rows:
    """Values ``[B, h, tokens, e]``, cast but not otherwise changed."""

    def __init__(self, x: Tensor, dtype: torch.dtype):
        self.x, self.dtype = x, dtype

    def load(self, b: slice, t: slice) -> Tensor:
        """Return ``[g, T, e]``, 0 for tokens past the end. The caller must not write to it."""
        x, tokens = self.x[b, :, t], t.stop - t.start
        if x.shape[2] == tokens and x.shape[0] == 1 and x.dtype == self.dtype:
            return x.flatten(0, 1)
        out = x.new_zeros(*x.shape[:2], tokens, x.shape[3], dtype=self.dtype)
        out[:, :, : x.shape[2]] = x
        return out.flatten(0, 1)


class WithMass:
    """Rows ``[x, y]`` of width ``e1 = e + 1``: x for the values, ``[B, h, tokens, e]``, and y for
    the mass, ``[B, h, tokens]``; None: ones.
    """

    def __init__(self, x: Tensor, dtype: torch.dtype, y: Tensor | None = None):
        self.x, self.y, self.dtype = x, y, dtype
        self.width = x.shape[3] + 1
        self.buffer = x.new_empty(0)

    def load(self, b: slice, t: slice) -> Tensor:
        """Return ``[g, T, e1]``, 0 for tokens past the end; it is valid until the next call."""
        x = self.x[b, :, t]
        size = (*x.shape[:2], t.stop - t.start, self.width)
        if self.buffer.shape != size:
            self.buffer = x.new_empty(size, dtype=self.dtype)
        target = self.buffer[:, :, : x.shape[2]]
        target[..., :-1].copy_(x)
        target[..., -1] = 1 if self.y is None else self.y[b, :, t]
        self.buffer[:, :, x.shape[2] :].zero_()
        return self.buffer.flatten(0, 1)


def put(x: Tensor, b: slice, t: slice, values: Tensor, mass: Tensor | None = None) -> None:
    """Write ``x [g, T, e or e1]`` into ``values[b, :, t]`` and, unless ``mass`` is None, its last
    column into ``mass[b, :, t]``.
    """
    target = values[b, :, t]
    x = x.unflatten(0, target.shape[:2])[:, :, : target.shape[2]]
    target.copy_(x[..., : target.shape[3]])
    if mass is not None:
        mass[b, :, t] = x[..., -1]


def plan_chunks(x: Tensor, tokens: int, width: int, multiple: int = 1) -> tuple[list[slice], int]:
    """Return slices of the images of ``x [B, h, ...]``, and the number of tokens per chunk, a
    multiple of ``multiple``.
    """
    elements = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS_ELSEWHERE) // max(
        1, x.shape[1] * width
    )
    needed = -(-max(1, tokens) // multiple) * multiple
    size = max(1, min(elements, needed) // multiple) * multiple
    return chunks(x.shape[0], max(1, elements // needed)), size
