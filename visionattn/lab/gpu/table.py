"""``visionattn benchmark gpu``: kernels and models on the GPU at hand, row by row.

What is wanted most comes first; kernels against eager operations get the time that is left.
"""

from collections.abc import Callable, Iterator, Sequence

import timm
import torch

from visionattn.cli.tables import Record, heading, line
from visionattn.lab.cases import Case
from visionattn.lab.gpu import eager as gpu_eager
from visionattn.lab.gpu.device import Gpu
from visionattn.lab.gpu.eager import measure_against_eager
from visionattn.lab.gpu.operations import Bench, measure_crossover, measure_operation
from visionattn.lab.gpu.results import COLUMNS, GpuResult
from visionattn.lab.gpu.timing import Budget, in_words, is_fatal, measure_ceilings
from visionattn.lab.target_table import gpu_targets
from visionattn.lab.targets import Target, choose_rows

Print = Callable[[str], None]
Keep = Callable[[Record], None]
MEASURED = (
    "Bfloat16, medians of interleaved runs after warm-up, fresh random data (seed {seed}). "
    "Operations and inference are recorded as CUDA graphs, so that launches do not count; eager "
    "operations, training and the large image are called as they are. Blocks of models are "
    "compiled. Floor: operations or bytes over the rates above. A result that is wrong has no time."
)


def describe_gpu(gpu: Gpu, seed: int) -> Record:
    """Return what the numbers depend on besides what every benchmark notes."""
    import triton

    record: Record = gpu.describe()
    record |= {"cuda": torch.version.cuda, "triton": triton.__version__}
    return record | {"timm": timm.__version__, "seed": seed}


def rows(only: str | None) -> tuple[list[Target], list[Case]]:
    """Return the figures, and the cases of kernels against eager operations, that ``--only``
    leaves.

    Raises:
        ValueError: it leaves none.
    """
    return chosen(only, gpu_targets(), gpu_eager.eager_cases())


def chosen(
    only: str | None, figures: list[Target], cases: list[Case]
) -> tuple[list[Target], list[Case]]:
    """Return those of figures and cases that ``--only`` leaves; see ``rows``."""
    names = [figure.name for figure in figures] + [gpu_eager.name_of(case) for case in cases]
    places, first = choose_rows(only, names), len(figures)
    return [figures[i] for i in places if i < first], [
        cases[i - first] for i in places if i >= first
    ]


def run_gpu(
    gpu: Gpu, only: str | None, minutes: float, provenance: Record, show: Print, keep: Keep
) -> tuple[list[Record], int]:
    """Measure and print, row by row.

    Args:
        only: regular expression that the rows are to fit; None: all.
        minutes: after which no row is begun.
        provenance: gets what only a GPU has, rates included.
        keep: gets the provenance, then each row as it is ready.

    Returns:
        All rows, and how many of them are wrong or failed.
    """
    budget = Budget(minutes)
    figures, cases = rows(only)
    seed = torch.seed() % 2**31
    bench = Bench(gpu, gpu.generator(seed))
    return run_table(bench, figures, cases, seed, budget, provenance, show, keep)


def run_table(
    bench: Bench,
    figures: Sequence[Target],
    cases: Sequence[Case],
    seed: int,
    budget: Budget,
    provenance: Record,
    show: Print,
    keep: Keep,
    **rates: int,
) -> tuple[list[Record], int]:
    """Say what is measured on, measure its rates, then the rows; see ``run_gpu``.

    Args:
        rates: sizes that ``measure_ceilings`` takes.
    """
    about = describe_gpu(bench.gpu, seed)
    show(", ".join(f"{name} {value}" for name, value in about.items()))
    bench.ceilings = measure_ceilings(bench.gpu, bench.generator, rounds=bench.rounds, **rates)
    show(f"measured: {bench.ceilings}\n\n{MEASURED.format(seed=seed)}\n")
    provenance |= about | {"copy_bytes_per_second": bench.ceilings.bytes_per_second}
    provenance |= {"matmul_operations_per_second": bench.ceilings.operations_per_second}
    keep({"kind": "provenance", **provenance})
    return run_rows(figures, cases, bench, budget, show, keep)


def run_rows(
    figures: Sequence[Target],
    cases: Sequence[Case],
    bench: Bench,
    budget: Budget,
    show: Print,
    keep: Keep = lambda record: None,
) -> tuple[list[Record], int]:
    """Measure the figures, then kernels against eager operations; see ``run_gpu``.

    What eager operations were faster in is shown at the end, also where Ctrl-C brings it.
    """
    records: list[Record] = []

    def take(record: Record) -> None:
        records.append(record)
        keep({"kind": "row"} | record)

    broken, against = 0, []
    try:
        if figures:
            show(heading(COLUMNS))
        for result in results_of(figures, bench, budget):
            result.gpu = bench.gpu.name
            show(line(result.cells()))
            take(result.record())
            broken += result.broken
        for record in _against_eager(cases, bench, budget, show):
            against.append(record)
            take(record)
            broken += record["status"].startswith(("wrong", "failed"))
    finally:
        if cases:
            show("\n" + gpu_eager.verdict(cases[: len(against)], against))
    names = dict.fromkeys(name for record in records for name in record)
    return [names | record for record in records], broken


def _against_eager(
    cases: Sequence[Case], bench: Bench, budget: Budget, show: Print
) -> Iterator[Record]:
    if cases:
        about = f"{gpu_eager.AGAINST_EAGER}, each called as a user calls it"
        show(f"\n{about}:\n\n{heading(gpu_eager.COLUMNS)}")
    for case in cases:
        found = _attempt(
            lambda case=case: measure_against_eager(case, bench),
            budget,
            lambda status: {"status": status},
        )
        record = gpu_eager.record_of(case, found)
        show(line(gpu_eager.cells_of(record)))
        yield record


def results_of(figures: Sequence[Target], bench: Bench, budget: Budget) -> Iterator[GpuResult]:
    """Yield results as they come, those that share a run one after the other."""
    places = list(dict.fromkeys(figure.place for figure in figures))
    for place in places:
        together = [figure for figure in figures if figure.place == place]

        def failed(status: str, together=together) -> list[GpuResult]:
            return [GpuResult(figure, status) for figure in together]

        yield from _attempt(lambda together=together: _measure(together, bench), budget, failed)


def _measure(figures: Sequence[Target], bench: Bench) -> list[GpuResult]:
    from visionattn.lab.gpu import models as gpu_models

    kind = figures[0].kind
    if kind == "model":
        return gpu_models.measure_inference(figures, bench)
    by_kind = {"operation": measure_operation, "crossover": measure_crossover}
    by_kind |= {"image": gpu_models.measure_image, "training": gpu_models.measure_training}
    by_kind |= {"latency": gpu_models.measure_latency}
    return [by_kind[kind](figure, bench) for figure in figures]


def _attempt(work: Callable, budget: Budget, instead: Callable):
    """Return what ``work()`` gives; where it cannot be done, ``instead(why)``.

    The other rows are to be measured all the same.
    """
    if budget.over:
        return instead(f"not measured: {budget.why_over}")
    try:
        return work()
    except Exception as error:  # of compilers, drivers and kernels alike, which share no base class
        budget.fatal = is_fatal(error)
        return instead(
            in_words(error) + "; later rows of this run would mean nothing" * budget.fatal
        )
