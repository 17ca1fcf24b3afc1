"""What ``visionattn benchmark`` does: runs what is named, prints tables, writes files."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from visionattn.cli.commands import program, typed
from visionattn.cli.files import write_text, write_whole
from visionattn.cli.parsing import parse, with_first
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, line
from visionattn.lab import papers, targets
from visionattn.lab.benchmark_options import (
    CaseOptions,
    LoaderOptions,
    ModelOptions,
    OperationOptions,
    PaperOptions,
    TargetOptions,
)
from visionattn.lab.cases import Case
from visionattn.lab.compare import COLUMNS, cells_of, measure_together, record_of
from visionattn.lab.gpu.gpu_table import benchmark_gpu

if TYPE_CHECKING:  # reading images needs libraries that a machine with a GPU may lack
    from visionattn.lab.loader import LoaderCase

Print = Callable[[str], None]


def benchmark(argv: Sequence[str], show: Print) -> None:
    """Do what the command that stands first says; ``show`` gets the table line by line.

    Raises:
        ValueError, OSError: an option is wrong, or a file cannot be written; before anything is
            measured, where it can be known.
        Failed: rows of ``gpu`` are wrong, or could not be measured.
    """
    name, *words = argv or ("",)
    if name in ("-h", "--help"):
        show_commands()
    if name == "gpu":
        benchmark_gpu(words, show)
        return
    if name not in COMMANDS:
        wanted = ", ".join([*COMMANDS, "gpu"])
        raise ValueError(f"wanted one of {wanted}, got {name[:80]!r}; --help says what they do")
    command, before = COMMANDS[name], torch.get_num_threads()
    options = parse(
        command.options,
        with_first(words, command.first) if command.first else words,
        command=f"benchmark {name}",
        description=cleandoc(command.options.__doc__ or ""),
        example=command.example,
    )
    prepared = options.prepare()
    try:
        torch.set_num_threads(options.threads or before)
        provenance = provenance_of(getattr(options, "device", "cpu"), ["benchmark", *argv])
        show(summary(provenance) + "\n")
        records = command.run(options, prepared, provenance, show)
        if options.csv and records:
            write_text(options.csv, csv_text(records, provenance))
    finally:
        torch.set_num_threads(before)


def show_commands() -> NoReturn:
    """Print what the commands do, and leave."""
    about = {name: command.options.__doc__ or "" for name, command in COMMANDS.items()}
    about["gpu"] = "On an NVIDIA GPU: kernels and models against floors measured there; minutes."
    lines = [f"  {name:12}{' '.join(text.split())}" for name, text in about.items()]
    argparse.ArgumentParser(
        prog=program("benchmark"),
        usage=f"{program('benchmark')} COMMAND ...",
        description="\n".join(["COMMAND --help lists the options of a command.", "", *lines]),
        epilog=f"try:\n  {typed('benchmark', 'operations', *CASES.split())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(["--help"])
    raise AssertionError("the parser leaves")


def run_cases(
    options: CaseOptions, groups: Sequence[Sequence[Case]], provenance: Record, show: Print
) -> list[Record]:
    """Measure cases of one size against each other, and print them size by size."""
    records: list[Record] = []
    show(heading(list(COLUMNS)))
    for cases in groups:
        for row in measure_together(cases, options.plan, options.baseline_of(cases)):
            records.append(record_of(row))
            show(line(cells_of(records[-1], COLUMNS)))
    if options.plot:
        from visionattn.lab.charts import png
        from visionattn.lab.figures import sizes_of

        charts, notes = sizes_of(records), [summary(provenance), provenance["command"]]
        write_whole(options.plot, lambda path: png(path, charts, notes=notes))
    return records


def run_targets(
    options: TargetOptions, chosen: Sequence[targets.Target], provenance: Record, show: Print
) -> list[Record]:
    """Measure the figures to reach and print each as it is ready."""
    records: list[Record] = []
    show(heading(list(targets.COLUMNS)))
    for record in targets.measure_targets(chosen):
        show(line(cells_of(record, targets.COLUMNS)))
        records.append(record)
    return records


def run_papers(
    options: PaperOptions, figure: papers.Figure, provenance: Record, show: Print
) -> list[Record]:
    """Redraw a figure of the papers, which writes its own rows."""
    place = Path(options.files()[0])
    ways = {"quick": options.quick, "processor_time": options.processor_time}
    papers.redraw(figure, place.parent, place.stem, provenance, show, **ways)
    return []


def run_loader(
    options: LoaderOptions, cases: "Sequence[LoaderCase]", provenance: Record, show: Print
) -> list[Record]:
    """Measure how fast images are loaded, and print what is counted and a row for each way."""
    from visionattn.lab import loader

    show(f"{loader.COUNTED}\n\n{heading(list(loader.COLUMNS))}")
    records = loader.measure_loaders(cases, rounds=options.rounds, seconds=options.seconds)
    for record in records:
        show(line(cells_of(record, loader.COLUMNS)))
    return records


@dataclass(frozen=True)
class Command:
    """A command: its options, and what it does."""

    options: type
    run: Callable[[Any, Any, Record, Print], list[Record]]
    example: str
    first: str = ""
    """The option whose name may be left out before what stands first."""


CASES = "taylorshift kernelized+joint sdpa --tokens 256 512 --width 32 --no-memory"
COMMANDS = {
    "operations": Command(OperationOptions, run_cases, CASES, "names"),
    "models": Command(ModelOptions, run_cases, "scaleformer_vit_t --img_size 224", "names"),
    "targets": Command(TargetOptions, run_targets, "--only 'N = 4096'"),
    "papers": Command(PaperOptions, run_papers, "crossover --quick", "figure"),
    "loader": Command(LoaderOptions, run_loader, "digits --workers 0 --rounds 2", "names"),
}
