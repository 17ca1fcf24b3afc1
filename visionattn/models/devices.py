"""Devices, precisions and random generators of this machine."""

import random
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from visionattn.cli.files import first_line
from visionattn.ops.attention_sums import has_bfloat16_products

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_taken(amp: str, device: torch.device) -> str:
    """Return ``bf16`` or ``none`` for ``auto``: bf16 if the device supports its products; other
    precisions are unchanged. Warn about ``bf16`` on a CPU without bf16 units.
    """
    if amp == "auto":
        has = torch.cuda.is_bf16_supported if device.type == "cuda" else has_bfloat16_products
        return "bf16" if device.type in ("cpu", "cuda") and has() else "none"
    if amp == "bf16" and device.type == "cpu" and not has_bfloat16_products():
        warnings.warn("this CPU has no bf16 units, so bf16 is slow; use --amp auto", stacklevel=2)
    return amp


def autocast(device: torch.device, amp: str):
    """Return the context of mixed precision ``amp``: ``none``, ``bf16``, ``fp16`` or ``auto``."""
    if amp == "auto":
        amp = precision_taken(amp, device)
    return nullcontext() if amp == "none" else torch.autocast(device.type, dtype=AMP_DTYPES[amp])


def pick_device(name: str) -> torch.device:
    """Return the device with this name; ``auto`` is a GPU if available.

    Raises:
        ValueError: this machine has no such device, or it cannot compute.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise ValueError(f"device {name!r} cannot compute; use auto, cpu or cuda")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error).partition(". ")[0]  # drop advice about drivers
        raise ValueError(f"device {name!r} is not available: {reason}; use auto") from error
    return device


def random_state() -> dict[str, Any]:
    """Return the state of every global generator, as plain tensors and plain types."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],  # type: ignore[attr-defined]
        "python": [version, list(internal), gauss],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set every global generator to a state returned by ``random_state``."""
    try:
        torch.set_rng_state(state["torch"])
    except RuntimeError as error:
        raise ValueError(
            f"state.random.torch is not a generator state: {first_line(error)}"
        ) from error
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
