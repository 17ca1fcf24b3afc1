"""Run ``visionattn benchmark gpu``: check and time each row of the table on the GPU of this
machine, and write it when ready.

This needs only torch, Triton, timm and einops, so argparse reads the options.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import timm
import torch

from visionattn.cli.commands import program
from visionattn.cli.exit_codes import Failed
from visionattn.cli.files import add_line, check_free
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record
from visionattn.lab.case_comparison import tell
from visionattn.lab.gpu.gpu_models import measure_model
from visionattn.lab.gpu.gpu_operations import (
    Bench,
    Ceilings,
    in_words,
    is_broken,
    measure_operation,
    pick_gpu,
)
from visionattn.lab.gpu.gpu_rows import MOST, GpuRow, chosen

Print = Callable[[str], None]
TIMES = ("seconds", "floor_seconds", "sdpa_seconds", "flash_seconds", "eager_seconds")
TIMES += ("identity_seconds",)
MEMORIES = ("gib", "sdpa_gib", "identity_gib")
NAMES = ("time", "floor", "SDPA", "Flash", "eager", "identity")
COLUMNS = {name: name for name in ("what", "size", "dtype")} | dict(zip(NAMES, TIMES, strict=True))
COLUMNS |= {name: name for name in ("reached", "error", "status")}
MEASURED = (
    "Medians, random data (seed {seed}). Operations and inference are replayed from CUDA graphs, "
    "so launch overhead does not count. Eager operations, training and the large image run "
    "without a graph. Blocks of models are compiled. Floor: operations or bytes divided by the "
    "rates above. A wrong result has no time."
)


class _Parser(argparse.ArgumentParser):
    """Raise ValueError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help lists the options")


def benchmark_gpu(argv: Sequence[str], show: Print) -> None:
    """Measure the rows that the flags select; ``show`` gets the table line by line.

    Raises:
        ValueError, OSError: wrong flag, no GPU, or an unwritable file.
        Failed: rows are wrong or could not be measured.
    """
    parser = _Parser(program("benchmark gpu"), allow_abbrev=False)
    parser.add_argument("--only", metavar="PATTERN", help="regular expression for rows")
    parser.add_argument("--minutes", type=float, default=5.0, help="start no row after this time")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, at tiny sizes")
    parser.add_argument("--rows", metavar="FILE", help="append each row as a line of JSON")
    parser.add_argument("--csv", metavar="FILE", help="the rows as CSV, with provenance")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    flags = parser.parse_args(argv)
    if not 0 <= flags.minutes < math.inf:
        raise ValueError(f"--minutes must be at least 0, got {flags.minutes}")
    if flags.csv:
        check_free(Path(flags.csv), flags.overwrite)
    rows, bench = chosen(flags.only, rehearse=flags.rehearse), make_bench(flags.rehearse)
    provenance = provenance_of(str(bench.device), ["benchmark", "gpu", *argv])
    show(summary(provenance) + "\n")

    def keep(record: Record) -> None:
        if flags.rows:
            add_line(flags.rows, record)

    records = run_gpu(rows, bench, flags.minutes, provenance, show, keep, flags.csv)
    broken = sum(record["status"].startswith(("wrong", "failed")) for record in records)
    if broken:
        raise Failed(f"{broken} rows are wrong or failed; see the table")


def make_bench(rehearse: bool) -> Bench:
    """Return the GPU of this machine, or the CPU for a rehearsal.

    Raises:
        ValueError: no GPU, or a rehearsal without Triton's interpreter.
    """
    if not rehearse:
        return Bench.on(pick_gpu())
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "a rehearsal interprets kernels: set TRITON_INTERPRET=1 before Python starts"
        )
    return Bench.on(torch.device("cpu"))


def describe(bench: Bench) -> Record:
    """Return the provenance that only GPU benchmarks record."""
    import triton

    found: Record = {"triton": triton.__version__, "timm": timm.__version__}
    if not bench.rehearsed:
        about = torch.cuda.get_device_properties(bench.device)
        found |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}"}
        found |= {"memory_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found | {"seed": bench.generator.initial_seed()}


def run_gpu(
    rows: Sequence[GpuRow],
    bench: Bench,
    minutes: float,
    provenance: Record,
    show: Print,
    keep: Callable[[Record], None],
    csv: str | None = None,
) -> list[Record]:
    """Measure and print row by row; return a record of each row.

    Args:
        rows: the rows to measure.
        bench: device and settings.
        minutes: time after which no row starts.
        provenance: gets the GPU's provenance and rates added.
        show: gets the table line by line.
        keep: gets the provenance, then each record when ready.
        csv: file for the rows, with provenance; None: none.
    """
    end = time.monotonic() + 60 * minutes
    sizes = dict(size=16, copied=2**12) if bench.rehearsed else {}
    bench.ceilings = Ceilings.measured(bench.device, **sizes)
    about = describe(bench)
    provenance |= about | vars(bench.ceilings)
    show(", ".join(f"{name} {value}" for name, value in about.items()))
    show(f"measured: {bench.ceilings}\n\n{MEASURED.format(seed=about['seed'])}\n")
    keep({"kind": "provenance", **provenance})

    def measured() -> Iterator[Record]:
        stopped = None
        for row in rows:
            if time.monotonic() > end:
                stopped = stopped or f"{minutes:g} minutes were over"
            try:
                found = {"status": f"not measured: {stopped}"} if stopped else measure(row, bench)
            except Exception as error:  # exceptions of compilers and kernels share no base class
                found = {"status": f"failed: {in_words(error)}"}
                stopped = "an earlier row broke this process" if is_broken(error) else None
            record = record_of(row, found)
            keep({"kind": "row"} | record)
            yield record

    return tell(measured(), COLUMNS, provenance, show, csv)


def measure(row: GpuRow, bench: Bench) -> Record:
    """Measure one row."""
    return (measure_operation if row.case.kind == "operation" else measure_model)(row, bench)


def record_of(row: GpuRow, found: Record) -> Record:
    """Return a row as plain values, and whether it reached its targets."""
    record: Record = {"what": row.what, "size": row.size, "dtype": row.case.precision}
    record |= dict.fromkeys((*TIMES, "of_floor", *MEMORIES, "error")) | found
    mine = record["seconds"]
    for name in ("sdpa", "identity"):
        other = record[f"{name}_seconds"]
        record[f"x_{name}"] = other / mine if mine and isinstance(other, float) else None
    both = record["gib"] and record["sdpa_gib"]
    record["x_memory"] = record["gib"] / record["sdpa_gib"] if both else None
    outcomes = [_outcome(name, limit, record[name]) for name, limit in row.reach.items()]
    return record | {"reached": "; ".join(outcomes) or None}


def _outcome(name: str, limit: float, value: float | None) -> str:
    """Compare a value with its target as text: "reached 1.7 x_sdpa of 1.5"."""
    if value is None:
        return f"{name} {limit:g}: not measured"
    met = value <= limit if name in MOST else value >= limit
    return f"{'reached' if met else 'MISSED'} {value:.3g} {name} of {limit:g}"
