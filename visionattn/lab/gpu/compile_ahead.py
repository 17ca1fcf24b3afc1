"""Prepare the tests and the table of ``make gpu``: check one kernel, then compile all kernels and
model blocks, with one process per core.

Here a launch compiles its kernel and does not run it. The disk caches of Triton and
``torch.compile`` pass the compiled code to later processes.
"""

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from visionattn.lab.gpu.gpu_models import make_images, work_of
from visionattn.lab.gpu.gpu_operations import (
    call_of,
    check,
    draw,
    expected_of,
    in_words,
    operation_of,
)
from visionattn.lab.gpu.gpu_rows import GpuRow, chosen, operation, small_case
from visionattn.lab.gpu.gpu_table import describe, make_bench
from visionattn.ops.gpu.launch import launching_with

FIRST = operation("kernelized", 1000, 64, backward=True)
TESTS = str(Path(__file__).parents[3] / "tests" / "kernels")
SOME_TESTS = [
    f"{name} and {dtype}"
    for name in ("kernelized", "direct", "efficient")
    for dtype in ("bfloat16", "float16 and not bfloat16", "float32")
]
"""Groups of tests, as arguments of pytest's ``-k``. A process compiles one group at a time."""


def first_kernel(rehearse: bool) -> str | None:
    """Check the first kernel; return the error as one line, or None."""
    try:
        bench = make_bench(rehearse)
        print(", ".join(f"{name} {value}" for name, value in describe(bench).items()), flush=True)
        case = small_case(FIRST) if rehearse else FIRST
        tensors = draw(case, bench)
        status, error = check(case, tensors, expected_of(case, tensors, bench), bench)
    except Exception as failure:  # exceptions of compilers and drivers share no base class
        return f"the first kernel does not run: {in_words(failure)}"
    return None if status == "ok" else f"the first kernel is {status} (largest error {error:.1e})"


def compile_only(launch_one, kernel, grid, *args, **meta) -> None:
    """Compile the kernel of a launch; do nothing in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        kernel.warmup(*args, grid=grid, **meta)


def compile_work(work: GpuRow | str, rehearse: bool) -> str | None:
    """Compile the kernels of a row or of some tests; return the error as one line, or None."""
    try:
        with launching_with(run=compile_only):
            if isinstance(work, str):
                _walk_tests(work)
            else:
                _run_row(work, rehearse)
    except Exception as error:  # the tests and the table will fail with it, too
        named = work if isinstance(work, str) else work.name
        return f"not compiled ahead: {named}: {in_words(error)}"
    return None


def _walk_tests(some: str) -> None:
    """Run tests without output. They fail, because their kernels do not run."""
    import pytest

    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-m", "gpu", "-k", some, "--tb=no", "-p", "no:cacheprovider", TESTS])


def _run_row(row: GpuRow, rehearse: bool) -> None:
    """Run the operation, or one block of each model, as the table runs them."""
    bench, case = make_bench(rehearse), row.case
    if case.kind == "operation":
        call_of(operation_of(case, bench), draw(case, bench), case.backward)()
        return
    case = replace(case, depth=1)
    images = make_images(case, bench)
    names = (None, row.sdpa, f"{case.name}+identity") if row.sdpa else (None,)
    for name in names:
        work_of(case, images, bench, name)()


def main(argv: Sequence[str]) -> int:
    """Check the first kernel, then compile all. Return 2 if the first kernel is wrong, 1 if
    a compilation failed, else 0.
    """
    parser = argparse.ArgumentParser("python -m visionattn.lab.gpu.compile_ahead")
    parser.add_argument("--rehearse", action="store_true", help="on a processor, tiny")
    parser.add_argument("--only", metavar="PATTERN", help="rows of the table that match")
    flags = parser.parse_args(argv)
    if wrong := first_kernel(flags.rehearse):
        print(f"error: {wrong}", flush=True)
        return 2
    began, rows = time.monotonic(), chosen(flags.only, rehearse=flags.rehearse)
    # Models first: they take longest.
    works: list[GpuRow | str] = [row for row in rows if row.case.kind == "model"]
    works += [] if flags.rehearse else SOME_TESTS
    works += [row for row in rows if row.case.kind == "operation"]
    compile_one = partial(compile_work, rehearse=flags.rehearse)
    if flags.rehearse:
        failed = [why for why in map(compile_one, works) if why]
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with get_context("spawn").Pool(cores) as pool:
            failed = [why for why in pool.imap_unordered(compile_one, works, chunksize=1) if why]
    print("\n".join([*failed, f"{len(works)} works compiled in {time.monotonic() - began:.0f} s"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
