"""The launches of kernels without a GPU: recorded on tensors without memory, specialised and
compiled as a GPU would have it.

Run in a process of its own, in which Triton does not interpret:
``python -m tests.helpers.kernel_launches MODULE...`` for modules of ``tests.helpers.launches``.
Their ``CASES`` map names to functions of nothing that launch kernels on the meta device, their
``SIZES`` names to a function of one argument and its values. Prints one JSON object by module.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
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


def compile_launch(launch: Launch, capability: int) -> dict[str, object]:
    """What the compiler says: bytes of shared memory and of spilled registers, registers, matrix
    unit.
    """
    from tests.counting.counting import compiled

    found = compiled(launch, capability)
    return {
        "kernel": launch.kernel.__name__,
        "shared_bytes": found.shared_bytes,
        "spilled_bytes": found.spilled_bytes,
        "registers": found.usage["REG"],
        "matrix": found.unit,
    }


def compile_case(module: str, case: str, capability: int) -> list[dict]:
    """One entry for each different kernel that the case launches."""
    with recorded(capability) as launches:
        _launches_of(module).CASES[case]()
    assert launches, f"{case} launched nothing"
    distinct = {launch.specialised(capability)[0]: launch for launch in launches}
    return [compile_launch(launch, capability) for launch in distinct.values()]


def count_keys(module: str, case: str) -> dict[str, int]:
    """By kernel, the number of different compilations over all sizes of the case."""
    work, sizes = _launches_of(module).SIZES[case]
    keys: dict[str, set[str]] = {}
    for size in sizes:
        with recorded() as launches:
            work(size)
        for launch in launches:
            keys.setdefault(launch.kernel.__name__, set()).add(launch.specialised(90)[0])
    return {kernel: len(different) for kernel, different in keys.items()}


def _launches_of(module: str):
    return import_module(f"tests.helpers.launches.{module}")


def results(modules: Sequence[str]) -> dict[str, dict[str, dict]]:
    """By module, what is ``"compiled"``, by case and capability, and the ``"keys"`` by case."""
    found = {module: {"compiled": {}, "keys": {}} for module in modules}
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        waiting = []
        for module in modules:
            for case in _launches_of(module).CASES:
                found[module]["compiled"][case] = into = {}
                for capability in CAPABILITIES:
                    task = pool.apply_async(compile_case, (module, case, capability))
                    waiting.append((into, str(capability), task))
            for case in _launches_of(module).SIZES:
                task = pool.apply_async(count_keys, (module, case))
                waiting.append((found[module]["keys"], case, task))
        for into, name, task in waiting:
            into[name] = task.get()
    return found


def results_in_fresh_process(modules: Sequence[str]) -> dict[str, dict[str, dict]]:
    """``results`` from a process in which Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.kernel_launches", *modules]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


if __name__ == "__main__":
    print(json.dumps(results(sys.argv[1:])))
