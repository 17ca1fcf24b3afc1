"""``visionattn benchmark gpu``: the rows of the table on the GPU at hand, each checked before it is
timed and written as it comes.
"""

import os
import time
from collections.abc import Callable, Sequence

import timm
import torch

from visionattn.cli.tables import Record, duration, heading, line
from visionattn.lab.gpu.gpu_models import measure_model
from visionattn.lab.gpu.gpu_operations import Bench, measure_operation
from visionattn.lab.gpu.gpu_rows import MOST, GpuRow, chosen
from visionattn.lab.gpu.gpu_timing import Ceilings, in_words, is_broken, pick_gpu

Print = Callable[[str], None]
Keep = Callable[[Record], None]
TIMES = ("seconds", "floor_seconds", "sdpa_seconds", "flash_seconds", "eager_seconds")
TIMES += ("identity_seconds",)
COLUMNS = ("what", "size", "dtype", "time", "floor", "SDPA", "Flash", "eager", "identity")
COLUMNS += ("reached", "error", "status")
MEASURED = (
    "Medians, random data (seed {seed}). Operations and inference are replayed from CUDA graphs, "
    "so that launches do not count; eager operations, training and the large image are called as "
    "they are. Blocks of models are compiled. Floor: operations or bytes over the rates above. A "
    "result that is wrong has no time."
)


def make_bench(rehearse: bool) -> Bench:
    """Return the GPU at hand, or the processor for a rehearsal.

    Raises:
        ValueError: there is no GPU; a rehearsal without Triton's interpreter.
    """
    if not rehearse:
        return Bench.on(pick_gpu())
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "a rehearsal interprets kernels: set TRITON_INTERPRET=1 before Python starts"
        )
    return Bench.on(torch.device("cpu"))


def describe(bench: Bench) -> Record:
    """Return what the numbers depend on besides what every benchmark notes."""
    import triton

    found: Record = {"triton": triton.__version__, "timm": timm.__version__}
    if not bench.rehearsed:
        about = torch.cuda.get_device_properties(bench.device)
        found |= {"gpu": about.name, "capability": f"{about.major}.{about.minor}"}
        found |= {"memory_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found | {"seed": bench.generator.initial_seed()}


def run_gpu(
    only: str | None, minutes: float, rehearse: bool, provenance: Record, show: Print, keep: Keep
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
    end, bench = time.monotonic() + 60 * minutes, make_bench(rehearse)
    sizes = dict(size=16, copied=2**12) if rehearse else {}
    bench.ceilings = Ceilings.measured(bench.device, **sizes)
    provenance |= describe(bench) | vars(bench.ceilings)
    show(", ".join(f"{name} {value}" for name, value in describe(bench).items()))
    show(f"measured: {bench.ceilings}\n\n{MEASURED.format(seed=provenance['seed'])}\n")
    keep({"kind": "provenance", **provenance})
    show(heading(COLUMNS))
    records: list[Record] = []
    why_over = None
    for row in chosen(only, rehearse=rehearse):
        if time.monotonic() > end:
            why_over = why_over or f"{minutes:g} minutes were over"
        try:
            found = {"status": f"not measured: {why_over}"} if why_over else measure(row, bench)
        except Exception as error:  # of compilers, drivers and kernels, which share no base class
            found = {"status": f"failed: {in_words(error)}"}
            why_over = "an earlier row broke this process" if is_broken(error) else None
        records.append(record_of(row, found))
        show(line(cells_of(records[-1])))
        keep({"kind": "row"} | records[-1])
    broken = sum(record["status"].startswith(("wrong", "failed")) for record in records)
    return records, broken


def measure(row: GpuRow, bench: Bench) -> Record:
    """Measure one row."""
    return (measure_operation if row.case.kind == "operation" else measure_model)(row, bench)


def record_of(row: GpuRow, found: Record) -> Record:
    """Return the row as plain values, whatever of it was measured, with what it reaches."""
    record: Record = {"what": row.what, "size": row.size, "dtype": row.case.precision}
    record |= dict.fromkeys((*TIMES, "of_floor", "gib", "sdpa_gib", "error")) | found
    mine = record["seconds"]
    for name in ("sdpa", "identity"):
        other = record[f"{name}_seconds"]
        record[f"x_{name}"] = other / mine if mine and isinstance(other, float) else None
    both = record["gib"] and record["sdpa_gib"]
    record["x_memory"] = record["gib"] / record["sdpa_gib"] if both else None
    told = [_told(name, limit, record[name]) for name, limit in row.reach.items()]
    return record | {"reached": "; ".join(told) or None}


def _told(name: str, limit: float, value: float | None) -> str:
    """Say what was reached of a figure: "reached 1.7 x_sdpa of 1.5"."""
    if value is None:
        return f"{name} {limit:g}: not measured"
    met = value <= limit if name in MOST else value >= limit
    return f"{'reached' if met else 'MISSED'} {value:.3g} {name} of {limit:g}"


def cells_of(record: Record) -> Sequence[str | None]:
    """Return the row for people, under ``COLUMNS``."""
    times = [
        duration(record[name]) if isinstance(record[name], float) else record[name]
        for name in TIMES
    ]
    error = None if record["error"] is None else f"{record['error']:.1e}"
    named = [record[name] for name in ("what", "size", "dtype")]
    return [*named, *times, record["reached"], error, record["status"]]
