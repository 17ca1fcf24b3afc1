"""Compare cases: check their results, measure memory, count operations, and time all in one
interleaved run.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visionattn.cli.exit_codes import Failed, is_out_of_memory
from visionattn.cli.files import write_text
from visionattn.cli.fresh_process import ask
from visionattn.cli.tables import Record, csv_text, duration, heading, line, mebibytes
from visionattn.lab.cases import Case, Work
from visionattn.lab.charts import short
from visionattn.lab.compared_models import build_network, check_network
from visionattn.lab.compared_operations import build_operation, check_operation
from visionattn.lab.measure import (
    bytes_kept,
    flops_of,
    interleaved_seconds,
    peak_bytes,
    warm_up,
)

COLUMNS = {name: name for name in ("case", "size", "width", "heads", "batch", "dtype", "pass")}
COLUMNS |= {"time": "seconds_median", "from": "seconds_low", "to": "seconds_high"}
COLUMNS |= {"ratio": "ratio_median", "low": "ratio_low", "high": "ratio_high"}
COLUMNS |= {"peak": "peak_bytes", "kept": "kept_bytes", "operations": "flops", "status": "status"}
"""Headings of the printed table, with the field of a record for each."""


def spread(name: str, samples: Sequence[float]) -> Record:
    """Return median and quartiles of samples as three columns of a record; None without samples."""
    ends = (f"{name}_median", f"{name}_low", f"{name}_high")
    if not samples:
        return dict.fromkeys(ends)
    return dict(zip(ends, np.quantile(samples, (0.5, 0.25, 0.75)).tolist(), strict=True))


@dataclass
class CaseResult:
    """The result of a case."""

    case: Case
    status: str = "ok"
    """"ok", "out of memory", "wrong: ...", "not built: ..."; only "ok" has all numbers."""
    samples: list[float] = field(default_factory=list)
    """Seconds of one run in each round."""
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    flops: int | None = None
    ratios: list[float] = field(default_factory=list)
    """Ratio to the baseline's seconds in each round."""
    baseline: str | None = None


@dataclass(frozen=True)
class MeasurementPlan:
    """What to measure, and for how long."""

    rounds: int = 5
    """Minimum rounds of the interleaved run."""
    max_rounds: int = 30
    seconds: float = 1.0
    """Time for each case. More than ``rounds`` rounds run if they fit."""
    memory: bool = True
    counts: bool = True
    """Count operations and, for cases with a backward pass, bytes kept for it."""
    device: str = "cpu"
    clock: Callable[[], float] = time.perf_counter
    """Returns seconds. ``time.process_time`` measures CPU time, so that other work on the machine
    does not count; meant for one thread.
    """
    first_call: bool = False
    """Measure time and memory of the first call only, for runs that take minutes. One-time work of
    libraries counts. ``rounds`` and ``seconds`` have no effect.
    """


def check_case(case: Case, device: str = "cpu") -> str | None:
    """Compare the results of the case with its definition at a small size. Return the error as
    text, or None.
    """
    return (check_operation if case.kind == "operation" else check_network)(case, device)


def build(case: Case, device: str = "cpu") -> Work:
    """Build the operation or the model of a case, with its inputs."""
    return (build_operation if case.kind == "operation" else build_network)(case, device)


def case_peak_bytes(case: Case, device: str = "cpu", *, warm: bool = True) -> int:
    """Return the peak memory of one run in bytes, above the level with inputs and weights in
    memory. The result counts.

    On a CPU this takes a fresh process: elsewhere an allocation may reuse memory that was freed
    earlier, which does not raise the peak.

    Args:
        case: the operation or model.
        device: where it runs.
        warm: run once before. Libraries keep buffers from their first call at a size (some MiB per
            thread), which then do not count.

    Raises:
        torch.OutOfMemoryError: the case does not fit into memory.
        Failed: the process failed in another way. Measuring a CPU needs Linux.
    """
    if device != "cpu":
        return peak_here(asdict(case), None, device, warm)
    given = {"case": asdict(case), "threads": torch.get_num_threads(), "device": device}
    return ask(peak_here, given | {"warm": warm}, f"{case.label} at {case.size}")


def peak_here(case: dict[str, Any], threads: int | None, device: str, warm: bool) -> int:
    """Measure ``case_peak_bytes`` in this process, for a case given as plain values."""
    torch.set_num_threads(threads or torch.get_num_threads())
    work = build(Case(**case), device)
    if warm:
        work()
    return peak_bytes(work, device)


def measure_together(
    cases: Sequence[Case], plan: MeasurementPlan, baseline: str | None = None
) -> list[CaseResult]:
    """Measure each case; the times come from one interleaved run.

    A case that disagrees with its definition is not measured. A case that runs out of memory is not
    timed. The status of the result says so.

    Args:
        cases: cases with the same ``Case.place``, so that they may be compared.
        plan: what to measure.
        baseline: label of the baseline of the ratios; None: no ratios.
    """
    rows = [CaseResult(case) for case in cases]
    for row in rows:
        with status_of(row):
            _check_and_count(row, plan)
    _measure_times([row for row in rows if row.status == "ok"], plan)
    base = next((row for row in rows if row.case.label == baseline and row.samples), None)
    for row in rows:
        if base is not None and row.samples:
            row.ratios, row.baseline = ratios_of(row.samples, base.samples), baseline
    return rows


def ratios_of(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the ratio of times in each round. Temporary slowdowns of the machine cancel out."""
    return [mine / other for mine, other in zip(samples, base, strict=True)]


@contextmanager
def status_of(row: Any) -> Iterator[None]:
    """Set the status of a row to the reason if work in this context fails."""
    try:
        yield
    except NotImplementedError as error:
        row.status = f"not built: {error}"
    except Failed as error:
        row.status = f"failed: {error}"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        row.status = "out of memory"


def _check_and_count(row: CaseResult, plan: MeasurementPlan) -> None:
    """Check the results of a case, count its operations, and measure its memory."""
    case = row.case
    row.status = check_case(case, plan.device) or "ok"
    if row.status != "ok":
        return
    if plan.counts:
        with torch.set_grad_enabled(case.backward):
            on_meta = build(case, "meta")  # only shapes: takes no memory and no computing
            row.flops = flops_of(on_meta if case.backward else on_meta.forward)
    if plan.memory:
        row.peak_bytes = case_peak_bytes(case, plan.device, warm=not plan.first_call)
    if plan.counts and case.backward:
        row.kept_bytes = case_bytes_kept(case, plan.device)


def case_bytes_kept(case: Case, device: str = "cpu") -> int:
    """Return the bytes that the case keeps for its backward pass. Inputs of an operation count;
    weights of a model do not.
    """
    work = build(replace(case, backward=True), device)
    return bytes_kept(work.forward, without=work.leaves if case.kind == "model" else ())


def _measure_times(rows: Sequence[CaseResult], plan: MeasurementPlan) -> None:
    """Warm up the cases, and measure their seconds in one interleaved run."""
    ready: list[tuple[CaseResult, Callable[[], object], float]] = []
    for row in rows:
        with status_of(row):
            work = build(row.case, plan.device)
            ready.append((row, work, warm_up(work, device=plan.device, clock=plan.clock)))
    if plan.first_call or not ready:
        samples = [[seconds] for _, _, seconds in ready]
    else:
        samples = interleaved_seconds(
            [work for _, work, _ in ready],
            [seconds for _, _, seconds in ready],
            rounds=plan.rounds,
            max_rounds=plan.max_rounds,
            seconds_per_work=plan.seconds,
            device=plan.device,
            clock=plan.clock,
        )
    for (row, _, _), own in zip(ready, samples, strict=True):
        row.samples = own


def record_of(row: CaseResult) -> Record:
    """Return a result as plain values, with units in the names; None for a missing measurement."""
    case = row.case
    record: Record = {"case": case.label, "size": case.size, "width": case.width}
    record |= {"heads": case.heads if case.kind == "operation" else None, "batch": case.batch}
    record |= {"dtype": case.dtype, "pass": "forward+backward" if case.backward else "forward"}
    record |= {"status": row.status} | spread("seconds", row.samples)
    record |= {"rounds": len(row.samples) or None, "baseline": row.baseline}
    record |= spread("ratio", row.ratios)
    return record | {"peak_bytes": row.peak_bytes, "kept_bytes": row.kept_bytes, "flops": row.flops}


def tell(
    rows: Iterable[Record],
    columns: Mapping[str, str],
    provenance: Record,
    show: Callable[[str], None],
    csv: str | Path | None = None,
) -> list[Record]:
    """Print each row when ready under the headings of ``columns``, and return all rows. Write the
    rows so far to ``csv`` after each row, so that a stopped run keeps its measurements.
    """
    records: list[Record] = []
    show(heading(list(columns)))
    for record in rows:
        records.append(record)
        show(line(cells_of(record, columns)))
        if csv:
            write_text(csv, csv_text(records, provenance))
    return records


def cells_of(record: Mapping[str, Any], columns: Mapping[str, str]) -> list[Any]:
    """Format the values of a record for the headings of ``columns``. The end of a field's name
    gives the unit.
    """
    return [_cell(name, record[name]) for name in columns.values()]


def _cell(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if name.startswith("seconds") or name.endswith("seconds"):
        return duration(value)
    if name.endswith("_bytes"):
        return mebibytes(value)
    if name == "flops":
        return f"{value / 1e9:.3g} GFLOP"
    return short(value) if isinstance(value, float) else value
