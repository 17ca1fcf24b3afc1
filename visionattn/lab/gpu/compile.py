"""What comes before tests and table: the first kernel held to its definition, and then all kernels
compiled ahead, in as many processes as there are cores, for the GPU at hand.

Each process walks a share of the table's rows and of the tests marked ``gpu``. Launches within
them compile and launch nothing. A kernel that another process has claimed is left to it. What is
compiled lies in Triton's cache on the disk, from where the processes that come later take it; the
same holds for blocks of models that ``torch.compile`` compiles.
"""

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from visionattn.lab.cases import Case
from visionattn.lab.gpu import models as gpu_models
from visionattn.lab.gpu.device import Gpu, pick_gpu
from visionattn.lab.gpu.operations import Bench, call_of, check, draw, flex_of, takes_flex
from visionattn.lab.gpu.table import rows
from visionattn.lab.gpu.timing import in_words
from visionattn.lab.operations import function_of
from visionattn.lab.target_table import gpu_operation
from visionattn.lab.targets import Target
from visionattn.ops.gpu.launch import launching_with


@dataclass(frozen=True)
class Work:
    """Something that launches kernels."""

    name: str
    run: Callable[[], object]


class CompileOnly:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel):
        self.kernel, self.__name__ = kernel, kernel.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        return partial(self.kernel.run, grid=grid, warmup=True)


@contextlib.contextmanager
def compiling_alone(claims: Path) -> Iterator[list[str]]:
    """Let launches within it compile and launch nothing; the list gets the name of each kernel.

    Args:
        claims: a folder that the processes share, in which each kernel is claimed by one of them.
    """
    from triton import knobs

    names: list[str] = []

    def claimed_by_another(*, key, fn, **rest) -> bool:
        """Answer what Triton asks before it compiles; True: leave it."""
        name = f"{fn.module}.{fn.name}"
        place = claims / hashlib.sha256(f"{name} {key}".encode()).hexdigest()
        # Creating a file succeeds for one process alone: that one compiles the kernel.
        try:
            os.close(os.open(place, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return True
        names.append(name)
        return False

    def compile_only(launch_one, kernel, grid, *args, **meta) -> None:
        launch_one(CompileOnly(kernel), grid, *args, **meta)

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = claimed_by_another
    try:
        with launching_with(run=compile_only):
            yield names
    finally:
        knobs.runtime.jit_cache_hook = before


FIRST = gpu_operation("kernelized", 1000, 64, backward=True)


def first_kernel(case: Case, bench: Bench) -> str | None:
    """Return what is wrong with the kernels of an operation, in one line; None: nothing."""
    try:
        status, error, _ = check(case, draw(case, bench), bench)
    except Exception as failure:  # of compilers and drivers, which share no base class
        return f"the first kernel does not run: {in_words(failure)}"
    return None if status == "ok" else f"the first kernel is {status} (largest error {error:.1e})"


def check_first(rehearse: bool) -> int:
    """Check the first kernel and say what was found; returns the exit code."""
    case = FIRST
    if rehearse:
        from visionattn.lab.gpu import rehearsal

        bench, case = rehearsal.make_bench(), rehearsal.shrink(FIRST)
    else:
        try:
            bench = bench_here()
        except ValueError as error:
            print(f"error: {error}", flush=True)
            return 1
    found = first_kernel(case, bench)
    about = ", ".join(f"{name} {value}" for name, value in bench.gpu.describe().items())
    print(f"{about}\n" + (f"error: {found}" if found else "the first kernel is right"), flush=True)
    return 1 if found else 0


def bench_here() -> Bench:
    """Return the GPU at hand; raises ValueError where there is none."""
    gpu = Gpu(pick_gpu())
    return Bench(gpu, gpu.generator(1))


def works(bench: Bench, figures: Sequence[Target], cases: Sequence[Case]) -> list[Work]:
    """Return whatever the table launches, each once: models first, which take longest."""
    models = [
        (name, figure.case)
        for figure in figures
        if figure.kind in ("model", "training", "latency")
        for name in (figure.case.name, figure.baseline)
    ]
    operations = [figure.case for figure in figures if figure.kind == "operation"]
    softmax = [case for case in operations if takes_flex(case, bench)]
    # A crossover runs both forms, whatever form its case names.
    for figure in figures:
        if figure.kind == "crossover":
            operations += [replace(figure.case, form=form) for form in ("direct", "efficient")]
    return [
        *(
            Work(
                "{} at {} x {} px".format(name, *case.image_size),
                partial(_run_model, name, case, bench),
            )
            for name, case in dict.fromkeys(models)
        ),
        *(
            Work(f"flex_attention of {case.size} tokens", partial(_run_flex, case, bench))
            for case in dict.fromkeys(softmax)
        ),
        *(
            Work(f"{case.label} of {case.size} tokens", partial(_run_operation, case, bench))
            for case in dict.fromkeys([*operations, *cases])
        ),
    ]


def _run_operation(case: Case, bench: Bench) -> None:
    function = function_of(case, case.size, str(bench.device), bench.impl)
    call_of(function, draw(case, bench), case.backward)()


def _run_flex(case: Case, bench: Bench) -> None:
    tensors = {name: x for name, x in draw(case, bench).items() if name in ("q", "k", "v", "grad")}
    call_of(flex_of(bench), tensors, case.backward)()


def _run_model(name: str, case: Case, bench: Bench) -> None:
    """Run one block of a model, compiled as the table compiles it; a step of training where it
    trains.
    """
    bench = replace(bench, depth=1)
    model = gpu_models.compile_blocks(gpu_models.make_model(name, case, bench), bench)
    images = gpu_models.make_images(case, bench)
    if case.update:
        gpu_models.make_step(model, images, case.amp, bench)()
    else:
        gpu_models.infer(model, images)


def run_share(works: Sequence[Work], share: int, of: int, show: Callable[[str], None]) -> int:
    """Do every ``of``-th work; returns how many failed, each of which is shown."""
    failed = 0
    for work in works[share::of]:
        try:
            work.run()
        except Exception as error:  # the table and the tests will say what it means
            failed += 1
            show(f"not compiled ahead: {work.name}: {in_words(error)}")
        torch._dynamo.reset()
    return failed


def run_tests(share: int, of: int, arguments: Sequence[str]) -> None:
    """Walk a share of the tests without a word: what they find wrong is what was not launched."""
    import pytest

    plugin = ["-p", "visionattn.lab.gpu.dealt_tests", f"--share={share}/{of}", "--tb=no"]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main([*plugin, *arguments])


def main(argv: Sequence[str]) -> int:
    """Check the first kernel, or compile a share of all; what follows ``--`` goes to pytest."""
    parser = argparse.ArgumentParser("python -m visionattn.lab.gpu.compile")
    parser.add_argument("--first", action="store_true", help="check the first kernel, no more")
    parser.add_argument("--share", default="0/1", help="I/N: the I-th of N processes, from 0")
    parser.add_argument("--claims", type=Path, help="folder of what is claimed")
    parser.add_argument("--rehearse", action="store_true", help="on a processor, tiny")
    parser.add_argument("--only", metavar="PATTERN", help="rows of the table that this fits")
    # Flags stand before ``--``, the arguments of pytest behind it.
    at = list(argv).index("--") if "--" in argv else len(argv)
    flags, arguments = parser.parse_args(argv[:at]), argv[at + 1 :]
    if flags.first:
        return check_first(flags.rehearse)
    if flags.claims is None:
        parser.error("wanted --claims=FOLDER, or --first")
    share, of = map(int, flags.share.split("/"))
    if flags.rehearse:
        from visionattn.lab.gpu import rehearsal

        bench, figures, cases = rehearsal.make_bench(), *rehearsal.rows(flags.only)
    else:
        bench, figures, cases = bench_here(), *rows(flags.only)
    began = time.monotonic()
    with compiling_alone(flags.claims) as names:
        failed = run_share(
            works(bench, figures, cases), share, of, lambda text: print(text, flush=True)
        )
        if arguments:
            run_tests(share, of, arguments)
    print(
        f"{len(names)} kernels compiled in {time.monotonic() - began:.0f} s, {failed} works failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
