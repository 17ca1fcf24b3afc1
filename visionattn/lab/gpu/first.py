"""The first kernel: compiled, run and held to its definition before anything else is begun."""

import sys
from collections.abc import Sequence

from visionattn.lab.cases import Case
from visionattn.lab.gpu.device import Gpu, pick_gpu
from visionattn.lab.gpu.figures import operation
from visionattn.lab.gpu.operations import Bench, check, draw
from visionattn.lab.gpu.timing import in_words

FIRST = operation("kernelized", 1000, 64, backward=True)


def first_kernel(case: Case, bench: Bench) -> str | None:
    """What is wrong with the kernels of an operation, in one line; None: nothing."""
    try:
        status, error, _ = check(case, draw(case, bench), bench)
    except Exception as failure:  # of compilers and drivers, which share no base class
        return f"the first kernel does not run: {in_words(failure)}"
    return None if status == "ok" else f"the first kernel is {status} (largest error {error:.1e})"


def main(argv: Sequence[str]) -> int:
    """Check the first kernel, with ``--rehearse`` in the interpreter; returns the exit code."""
    if "--rehearse" in argv:
        from visionattn.lab.gpu import rehearsal

        bench, case = rehearsal.make_bench(), rehearsal.shrink(FIRST)
    else:
        try:
            gpu = Gpu(pick_gpu())
        except ValueError as error:
            print(f"error: {error}", flush=True)
            return 1
        bench, case = Bench(gpu, gpu.generator(1)), FIRST
    found = first_kernel(case, bench)
    about = ", ".join(f"{name} {value}" for name, value in bench.gpu.describe().items())
    print(f"{about}\n" + (f"error: {found}" if found else "the first kernel is right"), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
