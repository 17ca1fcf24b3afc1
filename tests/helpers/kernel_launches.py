"""The launches of kernels without a GPU: recorded on tensors without memory, and compiled for a GPU
by the compiler that comes with Triton.

``python -m tests.helpers.kernel_launches`` compiles all of ``CASES`` in a process in which Triton
does not interpret, and prints what the compiler says of each kernel as JSON. ``--capability 80`` or
100 is another GPU than Hopper, 90.
"""

import argparse
import contextlib
import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

MULTIPROCESSORS = 132
BITS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COEFFICIENTS = (0.5, 1.0, 1.0)


@dataclass(frozen=True)
class Launch:
    """One launch as the host asked for it."""

    kernel: object
    args: tuple
    meta: dict

    def specialised(self, capability: int):
        """Triton's key of the compiled kernel, and what ``triton.compile`` is given for a GPU."""
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
        source = ASTSource(self.kernel, signature, constants, attributes)
        return key, dict(src=source, target=target, options=options.__dict__)


@contextlib.contextmanager
def recorded(capability: int = 90):
    """Launches within the context are recorded in the list it gives, and none is made; rows are
    those of a GPU of this capability.
    """
    from visionattn.ops.gpu import launch

    launches = []

    def record(launch_one, kernel, grid, *args, **meta):
        launch.check_grid(kernel.__name__, grid)
        if all(grid):
            launches.append(Launch(kernel, args, meta))

    with (
        patch.object(launch, "capability", lambda device: f"{capability / 10:.1f}"),
        patch.object(launch, "_multiprocessors", lambda device: MULTIPROCESSORS),
        launch.launching_with(run=record),
    ):
        yield launches


def both_passes(
    name: str,
    d: int,
    e: int,
    dtype: str,
    *,
    tokens: int = 4096,
    masked: bool = False,
    learned: bool = True,
    horizons: tuple[int, int] | None = None,
    mean: bool = True,
    heads: int = 6,
) -> None:
    """Make every launch of both passes of an operation: "kernelized", "direct" or "efficient".

    Args:
        learned: TaylorShift has a temperature.
        horizons: of a joint position on a grid of 64 rows; None: there is none.
    """
    from visionattn.ops.kernelized import kernelized_triton as kernelized
    from visionattn.ops.taylorshift import taylorshift_triton as taylorshift

    on = dict(device="meta")
    tokens += 5 if horizons else 0
    q, k = torch.empty(1, tokens, 2, heads, d, dtype=BITS[dtype], **on).permute(2, 0, 3, 1, 4)
    v, grad = torch.empty(2, 1, tokens, heads, e, dtype=BITS[dtype], **on).transpose(2, 3)
    mask = torch.empty(1, tokens, dtype=torch.bool, **on) if masked else None
    table, place = None, []
    if horizons:
        y, x = horizons
        table = torch.empty(heads, 2 * y + 1, 2 * x + 1, d, **on)
        place = [64, (tokens - 5) // 64, 5, y, x, int(mean)]
    if name == "kernelized":
        out, mass, state = kernelized.kernel_mean._init_fn(q, k, v, mask, table, "elu1", place)
        kernelized.kernel_mean_backward._init_fn(
            grad, out, mass, q, k, v, mask, table, state, "elu1", place
        )
        return
    options = (*COEFFICIENTS, name, place)
    tau = torch.empty(heads, **on) if learned else None
    out, mass, *state = taylorshift.taylor_mean._init_fn(q, k, v, tau, mask, table, *options)
    taylorshift.taylor_mean_backward._init_fn(
        grad, out, mass, q, k, v, tau, mask, table, *state, *options
    )


CASES = {
    "kernelized 64 64 bf16": {},
    "kernelized 128 128 fp16": dict(masked=True),
    "kernelized 64 64 fp32": {},
    "kernelized 64 64 bf16 joint": dict(horizons=(3, 3)),
    "kernelized 64 64 bf16 wide horizon": dict(horizons=(1, 16), mean=False),
    "kernelized 64 64 fp32 joint": dict(horizons=(3, 3)),
    "direct 64 64 bf16": {},
    "direct 64 128 fp16": dict(masked=True, learned=False),
    "direct 32 32 fp32": {},
    "direct 40 24 fp16 joint": dict(horizons=(4, 4), mean=False),
    "efficient 64 128 bf16": {},
    "efficient 64 64 fp16": dict(masked=True),
    "efficient 32 32 bf16": dict(masked=True, learned=False),
    "efficient 32 32 fp32": dict(masked=True),
}


def run_case(name: str, **more) -> None:
    """Make every launch of a case."""
    operation, d, e, dtype, *_ = name.split()
    both_passes(operation, int(d), int(e), dtype, **CASES[name], **more)


def spilled_bytes(cubin: bytes) -> int:
    """Return the bytes of registers of a thread that did not fit."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return max(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", told.stdout))


def compile_case(name: str, capability: int = 90) -> dict[str, dict]:
    """Return by kernel what the compiler says of it, and how many compilations two other numbers of
    tokens would add.
    """
    import triton

    with recorded(capability) as launches:
        run_case(name)
    with recorded(capability) as others:
        run_case(name, tokens=64 * 33)
        run_case(name, tokens=64 * 17)
    keys = {launch.specialised(capability)[0]: launch for launch in launches}
    anew = {launch.specialised(capability)[0] for launch in others} - keys.keys()
    found: dict[str, dict] = {}
    for key, launch in keys.items():
        made = triton.compile(**launch.specialised(capability)[1])
        found[key] = {
            "kernel": launch.kernel.__name__,
            "spilled_bytes": spilled_bytes(made.asm["cubin"]),
            "shared_bytes": made.metadata.shared,
        }
    return {"kernels": list(found.values()), "anew": sorted(anew)}


def main() -> None:
    """Compile the cases, in two processes, and print what is found."""
    from multiprocessing import get_context

    parser = argparse.ArgumentParser("python -m tests.helpers.kernel_launches")
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    flags = parser.parse_args()
    with get_context("fork").Pool(2) as pool:
        found = pool.map(partial(compile_case, capability=flags.capability), flags.cases, 1)
    print(json.dumps(dict(zip(flags.cases, found, strict=True))))


if __name__ == "__main__":
    main()
