"""``tools/benchmark.py --gpu``: kernels and models on the GPU at hand, row by row, and kernels against eager operations."""

from collections.abc import Callable, Iterator, Sequence

import timm
import torch

from visionattn.benchmark import gpu_eager
from visionattn.benchmark.cases import Case
from visionattn.benchmark.gpu_eager import measure_against_eager
from visionattn.benchmark.gpu_figures import COLUMNS, Figure, Result, all_figures, choose
from visionattn.benchmark.gpu_floors import measure_ceilings
from visionattn.benchmark.gpu_operations import Bench, measure_crossover, measure_operation
from visionattn.benchmark.gpu_timing import Budget, in_words, is_fatal
from visionattn.benchmark.table import Record, heading, line

Print = Callable[[str], None]
MEASURED = (
    "Bfloat16, medians of interleaved runs after warm-up, fresh random data (seed {seed}). Operations and inference are "
    "recorded as CUDA graphs, so that launches do not count; eager operations, training and the large image are called as they "
    "are. Blocks of models are compiled. Floor: operations or bytes over the rates above. A result that is wrong has no time."
)


def describe_gpu(device: torch.device, seed: int) -> Record:
    """What the numbers depend on besides what every benchmark notes."""
    import triton

    found = torch.cuda.get_device_properties(device)
    record: Record = {"capability": f"{found.major}.{found.minor}", "multiprocessors": found.multi_processor_count}
    record |= {"memory_gib": round(found.total_memory / 2**30, 1), "l2_mib": round(found.L2_cache_size / 2**20)}
    record |= {"cuda": torch.version.cuda, "triton": triton.__version__, "timm": timm.__version__, "seed": seed}
    return record


def rows(only: str | None) -> tuple[list[Figure], list[Case]]:
    """The figures, and the cases of kernels against eager operations, that ``--only`` leaves.

    Raises:
        ValueError: it leaves none.
    """
    figures, cases = all_figures(), gpu_eager.eager_cases()
    names = [f"{figure.what} {figure.size}" for figure in figures]
    names += [gpu_eager.name_of(case) for case in cases]
    chosen = choose(only, names)
    return [figures[i] for i in chosen if i < len(figures)], [cases[i - len(figures)] for i in chosen if i >= len(figures)]


def run_gpu(
    device: torch.device, only: str | None, minutes: float, provenance: Record, show: Print
) -> tuple[list[Record], int]:
    """Measure and print, row by row.

    Args:
        only: regular expression that the rows are to fit; None: all.
        minutes: after which no row is begun.
        provenance: gets what only a GPU has, rates included.

    Returns:
        All rows, and how many of them are wrong or failed.
    """
    budget = Budget(minutes)
    figures, cases = rows(only)
    seed = torch.seed() % 2**31
    generator = torch.Generator(device).manual_seed(seed)
    about = describe_gpu(device, seed)
    show(", ".join(f"{name} {value}" for name, value in about.items()))
    ceilings = measure_ceilings(device, generator)
    show(f"measured: {ceilings}\n\n{MEASURED.format(seed=seed)}\n")
    provenance |= about | {"copy_bytes_per_second": ceilings.bytes_per_second}
    provenance |= {"matmul_operations_per_second": ceilings.operations_per_second}
    return run_rows(figures, cases, Bench(device, generator, ceilings), budget, show)


def run_rows(
    figures: Sequence[Figure], cases: Sequence[Case], bench: Bench, budget: Budget, show: Print
) -> tuple[list[Record], int]:
    """Measure operations, then kernels against eager operations, then what takes longer; see ``run_gpu``.

    What eager operations were faster in is shown at the end, also where Ctrl-C brings it.
    """
    first = [figure for figure in figures if figure.kind == "operation"]
    against: list[Record] = []
    try:
        results = _show_figures(first, bench, budget, show)
        for record in _against_eager(cases, bench, budget, show):
            against.append(record)
        if cases and len(first) < len(figures):
            show("")
        later = _show_figures([figure for figure in figures if figure.kind != "operation"], bench, budget, show)
    finally:
        if cases:
            show("\n" + gpu_eager.verdict(cases[: len(against)], against))
    records = [*(result.record() for result in results), *against, *(result.record() for result in later)]
    broken = sum(result.broken for result in (*results, *later))
    broken += sum(record["status"].startswith(("wrong", "failed")) for record in against)
    names = dict.fromkeys(name for record in records for name in record)
    return [names | record for record in records], broken


def _show_figures(figures: Sequence[Figure], bench: Bench, budget: Budget, show: Print) -> list[Result]:
    if figures:
        show(heading(COLUMNS))
    results = []
    for result in results_of(figures, bench, budget):
        show(line(result.cells()))
        results.append(result)
    return results


def _against_eager(cases: Sequence[Case], bench: Bench, budget: Budget, show: Print) -> Iterator[Record]:
    if cases:
        about = f"{gpu_eager.AGAINST_EAGER}, each called as a user calls it"
        show(f"\n{about}:\n\n{heading(gpu_eager.COLUMNS)}")
    for case in cases:
        found = _attempt(lambda case=case: measure_against_eager(case, bench), budget, lambda status: {"status": status})
        record = gpu_eager.record_of(case, found)
        show(line(gpu_eager.cells_of(record)))
        yield record


def results_of(figures: Sequence[Figure], bench: Bench, budget: Budget) -> Iterator[Result]:
    """Results as they come, those that share a run one after the other."""
    places = list(dict.fromkeys(figure.place for figure in figures))
    for place in places:
        together = [figure for figure in figures if figure.place == place]

        def failed(status: str, together=together) -> list[Result]:
            return [Result(figure, status) for figure in together]

        yield from _attempt(lambda together=together: _measure(together, bench), budget, failed)


def _measure(figures: Sequence[Figure], bench: Bench) -> list[Result]:
    from visionattn.benchmark import gpu_models

    kind = figures[0].kind
    if kind == "model":
        return gpu_models.measure_inference(figures, bench)
    by_kind = {"operation": measure_operation, "crossover": measure_crossover}
    by_kind |= {"image": gpu_models.measure_image, "training": gpu_models.measure_training}
    return [by_kind[kind](figure, bench) for figure in figures]


def _attempt(work: Callable, budget: Budget, instead: Callable):
    """What ``work()`` gives; where it cannot be done, ``instead(why)``, since the other rows are to be measured all the same."""
    if budget.over:
        return instead(f"not measured: {budget.why_over}")
    try:
        return work()
    except Exception as error:  # of compilers, drivers and kernels alike, which share no base class
        budget.fatal = is_fatal(error)
        return instead(in_words(error) + "; later rows of this run would mean nothing" * budget.fatal)
