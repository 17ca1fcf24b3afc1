"""Requirements of all kernels on machine and inputs, and the decision of ``impl="auto"``.

The ``*_triton.py`` of each operation defines the widths and options that its kernels support. This
module does not import Triton, and its decisions do not depend on N.
"""

import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor

from visionattn.ops.gpu.launch import capability

CAPABILITIES = ("8.0", "9.0", "10.0")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Widest = Mapping[int, tuple[int, int]]
"""The largest d and e of an operation, by bits per element."""


def takes_kernels(impl: str, q: Tensor, why_not: Callable[[], str | None]) -> bool:
    """Return whether to run the kernels.

    Args:
        impl: "eager": never; "auto": on a GPU, if the kernels support the inputs; "triton": always.
        why_not: returns the reason against the kernels for these inputs, or None; called only if
            needed.

    Raises:
        NotImplementedError: impl="triton" without a kernel; the message gives the reason.
    """
    if impl == "eager" or (impl == "auto" and not _on_gpu(q)):
        return False
    reason = why_not()
    if impl == "triton" and reason is not None:
        raise NotImplementedError(f'impl="triton": {reason}')
    return reason is None


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def why_not(operation: str, widest: Widest, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return in one sentence why the kernels of an operation cannot run on this machine for these
    dtypes and widths; None if they can.
    """
    return why_not_here(q.device, q.dtype) or _why_not_tensors(operation, widest, q, k, v)


@torch.compiler.assume_constant_result
def why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernels can run on this machine; None if they can. A compiler calls this once,
    while tracing.
    """
    if not _has_triton():
        return "Triton is not installed; pip install triton"
    if device.type == "cpu" and is_interpreted():
        return (
            "Triton's interpreter computes bfloat16 wrongly; take float16 or float32"
            if dtype == torch.bfloat16
            else None
        )
    if device.type != "cuda" or torch.version.hip is not None:
        return f"q is on {device.type}; the kernels run on NVIDIA GPUs"
    found = capability(device)
    if found is None:
        return "there is no GPU that PyTorch can use"
    if found not in CAPABILITIES:
        return (
            f"the GPU has compute capability {found}; the kernels are made for "
            f"{', '.join(CAPABILITIES)}"
        )
    if found == "10.0" and _triton_version() < (3, 9):
        return (
            f"Triton {version('triton')} may sum products wrongly on compute capability 10.0; "
            f"take 3.9 or newer"
        )
    return None


def is_interpreted() -> bool:
    """Return whether Triton interprets its kernels on the CPU: ``TRITON_INTERPRET=1``, set before
    the import of Triton.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton_version() -> tuple[int, ...]:
    """Return the major and the minor version.

    Before 3.9, consecutive products into one accumulator may be wrong (Triton issue 10821).
    """
    return tuple(int(part) for part in version("triton").split(".")[:2])


def _why_not_tensors(operation: str, widest: Widest, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return (
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; the kernels take one of float16, "
            f"bfloat16, float32 for all three"
        )
    for name, x, most in zip("qv", (q, v), widest[8 * q.dtype.itemsize], strict=True):
        width = x.shape[3]
        if width % 8 or not 8 <= width <= most:
            return (
                f"{name} is {width} wide; the kernels of {operation} in {q.dtype} take "
                f"multiples of 8 up to {most}"
            )
    return None
