"""The launches of kernels without a GPU: recorded on tensors without memory, and specialised as a
GPU would have it.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

CAPABILITIES = (80, 90, 100)
MULTIPROCESSORS = 132
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Launch:
    """One launch as the host asked for it."""

    kernel: object
    grid: tuple[int, ...]
    args: tuple
    meta: dict
    row: tuple = ()
    """Kernel, d, e and bits that its row of ``launches.json`` was asked for with."""

    @property
    def arguments(self) -> dict[str, object]:
        """All that the kernel is given, by the names of its parameters."""
        names = [name for name in self.kernel.arg_names if name not in self.meta]
        return dict(zip(names, self.args, strict=True)) | self.meta

    def specialised(self, capability: int):
        """Triton's key of the compiled kernel and what it compiles, for a GPU of this compute
        capability.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.runtime.jit import create_function_from_signature

        target = GPUTarget("cuda", capability, 32)
        backend = make_backend(target)
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        meta = self.meta | {"debug": False, "enable_fp_fusion": True}
        bound, specialization, options = binder(*self.args, **meta)
        key = f"{self.kernel.__name__} {specialization} {options}"
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, meta, bound, specialization, options
        )
        return (
            key,
            ASTSource(self.kernel, signature, constants, attributes),
            target,
            options.__dict__,
        )


@contextlib.contextmanager
def recorded(capability: int = 90, change: Callable[[str, dict], dict] | None = None):
    """Launches within the context are recorded in the list it gives, and none is made.

    Args:
        capability: of the GPU whose section of ``launches.json`` rows are taken from, with 132
            multiprocessors.
        change: what becomes of a row, given the kernel's name in the table and the row.
    """
    from visionattn.ops.gpu import launch

    launches, row_of = [], launch.launch_row

    def ask(kernel, d, e, dtype, device):
        row = row_of(kernel, d, e, dtype, device)
        row = change(kernel, dict(row)) if change else row
        return row | {"_row": (kernel, d, e, 8 * dtype.itemsize)}

    def record(kernel, grid, *args, _row=(), **meta):
        launch.check_grid(kernel.__name__, grid)
        launches.append(Launch(kernel, tuple(grid), args, meta, _row))

    launch._table.cache_clear()
    with (
        patch.object(launch, "run", record),
        patch.object(launch, "launch_row", ask),
        patch.object(launch, "capability", lambda device: f"{capability / 10:.1f}"),
        patch.object(launch, "_multiprocessors", lambda device: MULTIPROCESSORS),
    ):
        yield launches
    launch._table.cache_clear()
