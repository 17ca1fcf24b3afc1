"""For which inputs there are kernels, and the sentence that says why not. No Triton in here, and
nothing depends on N.
"""

import math
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from types import MappingProxyType

import torch
from torch import Tensor

from visionattn.ops.feature_maps import IN_OPERATORS
from visionattn.ops.gpu.launch import capability
from visionattn.ops.position.kernels import place as joint_place
from visionattn.ops.position.kinds import Joint, RelativePosition

CAPABILITIES = ("8.0", "9.0", "10.0")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = {
    "kernelized": {16: (128, 128), 32: (64, 64)},
    "kernelized causal": {16: (64, 64), 32: (16, 16)},
    "taylorshift": {16: (64, 128), 32: (32, 32)},
}
"""The widest d and e of an operation by the bits of an element: as far as its kernels compile
without a spilled register.
"""
NOT_BY_AUTO: Mapping[tuple[str, torch.dtype], float] = MappingProxyType({})
"""Below how many rows of queries (batch x heads x N) ``impl="auto"`` leaves an operation of
``WIDEST`` in a dtype to eager.

Kernels were slower there; infinity leaves all sizes to eager. Nothing was measured yet, so nothing
is in it.
"""


def why_not(
    operation: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    relative: RelativePosition | None = None,
    feature_map: str = "elu1",
    causal: bool = False,
    form: str = "auto",
) -> str | None:
    """Why the kernels do not run for these inputs, in one sentence; None where they do.

    Args:
        operation: "kernelized" or "taylorshift".
        q, k, v, key_mask, relative: as the operation takes them, checked.
        feature_map: of "kernelized": "elu1", "relu", or "given" for a map that the kernels do not
            know.
        causal: of "kernelized".
        form: "auto", "direct" or "efficient".
    """
    return (
        _why_not_here(q.device, q.dtype)
        or _why_not_tensors(_with_mode(operation, causal), q, k, v)
        or _why_not_options(operation, q, k, feature_map, causal, form)
        or (relative is not None and _why_not_relative(relative, q, v, key_mask))
        or None
    )


def takes_kernels(impl: str, operation: str, q: Tensor, k: Tensor, v: Tensor, **options) -> bool:
    """Whether the kernels run: "eager" never, "auto" on a GPU where nothing is against it, "triton"
    always.

    Args:
        impl: "auto", "eager" or "triton".
        options: those of ``why_not``.

    Raises:
        NotImplementedError: impl="triton", and the reason why there is no kernel.
    """
    if impl == "eager" or (
        impl == "auto" and (not _on_gpu(q) or _left_to_eager(operation, q, **options))
    ):
        return False
    reason = why_not(operation, q, k, v, **options)
    if impl == "triton" and reason is not None:
        raise NotImplementedError(f'impl="triton": {reason}')
    return reason is None


def _left_to_eager(operation: str, q: Tensor, *, causal: bool = False, **options) -> bool:
    """Whether eager operations were faster at this size. A compiled graph serves all sizes: there
    only infinity counts.
    """
    least = NOT_BY_AUTO.get((_with_mode(operation, causal), q.dtype), 0)
    if torch.compiler.is_compiling():
        return least == math.inf
    return least > q.shape[0] * q.shape[1] * q.shape[2]


def _with_mode(operation: str, causal: bool) -> str:
    """The operation as ``WIDEST`` and ``NOT_BY_AUTO`` name it."""
    return f"{operation}{' causal' * causal}"


def _on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def is_interpreted() -> bool:
    """Whether Triton runs its kernels on the processor: ``TRITON_INTERPRET=1``, set before Triton
    is imported.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.compiler.assume_constant_result
def _why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """What this machine has against it. A compiler asks once, as it traces."""
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


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _triton_version() -> tuple[int, ...]:
    """Major and minor. Before 3.9 products that follow each other on one accumulator could be wrong
    (Triton issue 10821).
    """
    return tuple(int(part) for part in version("triton").split(".")[:2])


def _why_not_tensors(operation: str, q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        return (
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; the kernels take one of float16, "
            f"bfloat16, float32 for all three"
        )
    widest = WIDEST[operation][8 * q.dtype.itemsize]
    for name, width, most in (("q", q.shape[3], widest[0]), ("v", v.shape[3], widest[1])):
        if width % 8 or not 8 <= width <= most:
            return (
                f"{name} is {width} wide; the kernels of {operation} in {q.dtype} take "
                f"multiples of 8 up to {most}"
            )
    return None


def _why_not_options(
    operation: str, q: Tensor, k: Tensor, feature_map: str, causal: bool, form: str
) -> str | None:
    if operation == "taylorshift":
        return None
    if form == "direct":
        return 'form="direct" of kernelized attention has no kernel; "efficient" and "auto" have'
    if feature_map not in IN_OPERATORS:
        return (
            'the kernels know the feature maps "elu1" and "relu"; "softmax", random features and '
            "maps of your own have none"
        )
    if causal and q.shape[2] != k.shape[2]:
        return (
            f"causal with {q.shape[2]} queries and {k.shape[2]} keys has no kernel; equal "
            f"numbers have"
        )
    return None


def _why_not_relative(
    relative: RelativePosition, q: Tensor, v: Tensor, key_mask: Tensor | None
) -> str | None:
    if not isinstance(relative, Joint):
        return f"relative position {type(relative).__name__} has no kernel; Joint has"
    if key_mask is not None:
        return "Joint with a key_mask has no kernel"
    if relative.layout.kept is not None:
        return "Joint with patches left out (layout.kept) has no kernel"
    _, rows, columns, _ = relative.table.shape
    return joint_place.why_not(q.shape[3], v.shape[3], q.dtype, (rows // 2, columns // 2))
