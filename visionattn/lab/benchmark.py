"""What ``tools/benchmark.py`` does: runs what the flags ask for, prints tables, writes files."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from visionattn.cli.ends import Failed
from visionattn.cli.tables import Record, csv_text, heading, json_text, line, provenance_of, summary
from visionattn.lab import row_file
from visionattn.lab.benchmark_options import Options, parse_options, pick_gpu
from visionattn.lab.compare import COLUMNS, Row, cells_of, measure_together, record_of
from visionattn.lab.gpu.device import Gpu
from visionattn.lab.gpu.table import run_gpu
from visionattn.models.weights import write_whole

Print = Callable[[str], None]


def benchmark(argv: Sequence[str], show: Print) -> None:
    """Do what the flags say; ``show`` gets the table line by line.

    Raises:
        ValueError, OSError: a flag is wrong, or a file cannot be written; before anything is
            measured, where it can be known.
        Failed: rows of ``--gpu`` are wrong, or could not be measured.
    """
    options = parse_options(argv)
    flags, before = options.flags, torch.get_num_threads()
    try:
        torch.set_num_threads(flags.threads or before)
        provenance = provenance_of("cuda" if on_gpu(flags) else flags.device, argv)
        show(summary(provenance) + "\n")
        if flags.figure:
            from visionattn.lab.papers import redraw

            redraw(flags.figure, Path(flags.output), flags.quick, provenance, show)
            return
        broken = 0
        if flags.gpu:
            records, broken = run_figures(options, provenance, show)
        elif flags.tune:
            records = run_tune(options, show)
        elif flags.loader:
            records = run_loader(options, show)
        else:
            records = (
                run_targets(options, show)
                if flags.targets
                else run_sweep(options, provenance, show)
            )
        if records:
            save(flags.csv, csv_text(records, provenance))
            save(flags.json, json_text(records, provenance))
        if broken:
            raise Failed(f"{broken} rows are wrong or failed; the table says how")
    finally:
        torch.set_num_threads(before)


def on_gpu(flags: argparse.Namespace) -> bool:
    """Whether a GPU is measured."""
    return (flags.gpu or flags.tune) and not flags.rehearse


def run_figures(options: Options, provenance: Record, show: Print) -> tuple[list[Record], int]:
    """Measure the table of a GPU, or rehearse it; the rows, and how many are wrong or failed."""
    flags = options.flags

    def keep(record: Record) -> None:
        if flags.rows:
            row_file.append(flags.rows, record)

    if flags.rehearse:
        from visionattn.lab.gpu import rehearsal

        return rehearsal.run_gpu(flags.only, options.minutes, provenance, show, keep)
    return run_gpu(Gpu(pick_gpu()), flags.only, options.minutes, provenance, show, keep)


def save(path: str | None, text: str) -> None:
    """Write a file whole or not at all; None: nowhere."""
    if path is not None:
        write_whole(
            path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="")
        )


def run_targets(options: Options, show: Print) -> list[Record]:
    """Measure the figures to reach and print each as it is ready."""
    from visionattn.lab import targets

    chosen = targets.choose(options.flags.only)
    plan = replace(options.plan, device="cpu")
    show(heading(targets.COLUMNS))
    records = []
    for result in targets.measure_targets(chosen, plan, few=not options.paced):
        show(line(result.cells()))
        records.append(result.record())
    return records


def run_tune(options: Options, show: Print) -> list[Record]:
    """Tune the launches of kernels on the GPU at hand, and write their table; or rehearse it."""
    from visionattn.lab.gpu import tune

    only, minutes = options.flags.only, options.minutes
    if options.flags.rehearse:
        from visionattn.lab.gpu import rehearsal

        return rehearsal.run_tune(only, minutes, show)
    gpu = Gpu(pick_gpu())
    return tune.run_tune(only, minutes, tune.make_bench(gpu), gpu.capability, show)


def run_loader(options: Options, show: Print) -> list[Record]:
    """Measure how fast images are loaded, and print what is counted and a row for each way."""
    from visionattn.lab import loader

    show(f"{loader.COUNTED}\n\n{heading(loader.COLUMNS)}")
    rows = loader.measure_loaders(
        options.loader_cases(), rounds=options.plan.rounds, seconds=options.plan.seconds
    )
    for row in rows:
        show(line(row.cells()))
    return [row.record() for row in rows]


def run_sweep(options: Options, provenance: Record, show: Print) -> list[Record]:
    """Measure cases, those of one size against each other, and print them size by size."""
    rows: list[Row] = []
    show(heading(COLUMNS))
    for cases in options.cases():
        for row in measure_together(cases, options.plan, options.baseline(cases)):
            rows.append(row)
            show(line(list(cells_of(row).values())))
    if options.flags.plot:
        from visionattn.lab.plot import draw, sweep_panels

        write_whole(
            options.flags.plot, lambda path: draw(path, sweep_panels(rows), summary(provenance))
        )
    return [record_of(row) for row in rows]
