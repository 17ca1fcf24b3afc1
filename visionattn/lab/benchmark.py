"""What ``visionattn benchmark`` does: runs what is named, prints tables, writes files."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from visionattn.cli.ends import Failed
from visionattn.cli.files import add_line, write_text, write_whole
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, json_text, line
from visionattn.lab.benchmark_options import Options, parse_options
from visionattn.lab.compare import COLUMNS, cells_of, measure_together, record_of
from visionattn.lab.gpu.gpu_table import run_gpu

Print = Callable[[str], None]


def benchmark(argv: Sequence[str], show: Print) -> None:
    """Do what the flags say; ``show`` gets the table line by line.

    Raises:
        ValueError, OSError: a flag is wrong, or a file cannot be written; before anything is
            measured, where it can be known.
        Failed: rows of ``gpu`` are wrong, or could not be measured.
    """
    options = parse_options(argv)
    flags, before = options.flags, torch.get_num_threads()
    device = "cuda" if flags.command == "gpu" and not flags.rehearse else flags.device
    try:
        torch.set_num_threads(flags.threads or before)
        provenance = provenance_of(device, ["benchmark", *argv])
        show(summary(provenance) + "\n")
        records, broken = RUN[flags.command](options, provenance, show), 0
        if flags.command == "gpu":
            records, broken = records
        for path, text_of in ((flags.csv, csv_text), (flags.json, json_text)):
            if path and records:
                write_text(path, text_of(records, provenance))
        if broken:
            raise Failed(f"{broken} rows are wrong or failed; the table says how")
    finally:
        torch.set_num_threads(before)


def run_papers(options: Options, provenance: Record, show: Print) -> list[Record]:
    """Redraw a figure of the papers, which writes its own rows."""
    from visionattn.lab.papers import FIGURES, redraw

    flags = options.flags
    ways = {"quick": flags.quick, "processor_time": flags.processor_time}
    redraw(FIGURES[flags.names], Path(flags.output), flags.names, provenance, show, **ways)
    return []


def run_figures(options: Options, provenance: Record, show: Print) -> tuple[list[Record], int]:
    """Measure the table of a GPU, or rehearse it; the rows, and how many are wrong or failed."""
    flags = options.flags

    def keep(record: Record) -> None:
        if flags.rows:
            add_line(flags.rows, record)

    return run_gpu(flags.only, flags.minutes, flags.rehearse, provenance, show, keep)


def run_targets(options: Options, provenance: Record, show: Print) -> list[Record]:
    """Measure the figures to reach and print each as it is ready."""
    from visionattn.lab import target_table, targets

    show(heading(targets.COLUMNS))
    records = []
    for result in targets.measure_targets(
        target_table.choose(options.flags.only), options.plan, few=not options.paced
    ):
        show(line(result.cells()))
        records.append(result.record())
    return records


def run_loader(options: Options, provenance: Record, show: Print) -> list[Record]:
    """Measure how fast images are loaded, and print what is counted and a row for each way."""
    from visionattn.lab import loader

    show(f"{loader.COUNTED}\n\n{heading(loader.COLUMNS)}")
    flags = options.flags
    rows = loader.measure_loaders(
        options.loader_cases(), rounds=flags.rounds, seconds=flags.seconds
    )
    for row in rows:
        show(line(row.cells()))
    return [row.record() for row in rows]


def run_sweep(options: Options, provenance: Record, show: Print) -> list[Record]:
    """Measure cases, those of one size against each other, and print them size by size."""
    records: list[Record] = []
    show(heading(COLUMNS))
    for cases in options.cases():
        for row in measure_together(cases, options.plan, options.baseline(cases)):
            records.append(record_of(row))
            show(line(list(cells_of(row).values())))
    if options.flags.plot:
        from visionattn.lab.charts import png
        from visionattn.lab.figures import sizes_of

        charts, notes = sizes_of(records), [summary(provenance), provenance["command"]]
        write_whole(options.flags.plot, lambda path: png(path, charts, notes=notes))
    return records


RUN: dict[str, Callable] = {"operations": run_sweep, "models": run_sweep, "targets": run_targets}
RUN |= {"papers": run_papers, "loader": run_loader, "gpu": run_figures}
