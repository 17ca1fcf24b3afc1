"""What every attention demands of its arguments; one ValueError that says what was wanted and what came."""

import torch
from torch import Tensor

from visionattn.ops.relative import RelativePosition, check_relative
from visionattn.ops.value_drop import check_value_drop

FORMS = ("auto", "direct", "efficient")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Check shapes, dtypes and devices of ``q [B, h, N, d]``, ``k [B, h, M, d]``, ``v [B, h, M, e]``, ``key_mask [B, M]``."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: wanted [B, h, tokens, width], got {tuple(x.shape)}")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name}: wanted a floating point dtype, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"q is on {q.device}, {name} on {x.device}; move them to one device")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"k: wanted [{q.shape[0]}, {q.shape[1]}, M, {q.shape[3]}] like q, got {tuple(k.shape)}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v: wanted [{k.shape[0]}, {k.shape[1]}, {k.shape[2]}, e] like k, got {tuple(v.shape)}")
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (k.shape[0], k.shape[2])):
        shape, dtype = tuple(key_mask.shape), key_mask.dtype
        raise ValueError(f"key_mask: wanted bool [{k.shape[0]}, {k.shape[2]}], got {dtype} {shape}")


def check_options(
    *, form: str = "auto", impl: str = "eager", value_drop: float = 0.0, generator: torch.Generator | None = None
) -> None:
    """Check the options that are not tensors."""
    if form not in FORMS:
        raise ValueError(f"form {form!r}: wanted one of {', '.join(FORMS)}")
    if impl not in ("auto", "eager", "triton"):
        raise ValueError(f"impl {impl!r}: wanted one of auto, eager, triton")
    if impl == "triton":
        raise NotImplementedError('impl="triton": there are no GPU kernels yet; use "eager" or "auto"')
    check_value_drop(value_drop, generator)


def check_attention(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, relative: RelativePosition | None, *, signed: bool = False
) -> None:
    """All checks on tensors, including those of the relative position."""
    check_tensors(q, k, v, key_mask)
    if relative is not None:
        check_relative(relative, q, k, signed=signed)
