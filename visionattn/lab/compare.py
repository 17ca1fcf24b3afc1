"""Measure cases against each other: check first, then memory and counts, then time in one
interleaved run.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from visionattn.cli.ends import Failed, is_out_of_memory
from visionattn.cli.tables import Record, duration, mebibytes
from visionattn.lab.cases import Case
from visionattn.lab.measure import bytes_kept, flops_of, interleaved_seconds, warm_up
from visionattn.lab.memory import build, case_peak_bytes

COLUMNS = ("case", "size", "d", "heads", "batch", "dtype", "pass")
COLUMNS += ("time", "quartiles", "ratio", "peak", "kept", "GFLOP", "status")


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles of what rounds gave."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quartiles":
        """Make them of any number of samples above zero."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(low, median, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


def spread(name: str, quartiles: Quartiles | None) -> Record:
    """Return three columns of a row; None where nothing was measured."""
    ends = ("median", "low", "high")
    return {f"{name}_{end}": quartiles and getattr(quartiles, end) for end in ends}


@dataclass
class Row:
    """The result of a case."""

    case: Case
    status: str = "ok"
    """"ok", "out of memory", "wrong: ...", "not built: ..."; only "ok" has all its numbers."""
    seconds: Quartiles | None = None
    samples: list[float] = field(default_factory=list)
    """Seconds of one run, round by round."""
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    flops: int | None = None
    ratio: Quartiles | None = None
    """The ratio of the seconds to those of the baseline, round by round."""
    baseline: str | None = None


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long."""

    rounds: int = 5
    """Rounds of the interleaved run at least."""
    max_rounds: int = 30
    seconds: float = 1.0
    """Time for each case, beyond which no more rounds than ``rounds`` are made."""
    check: bool = True
    time: bool = True
    memory: bool = True
    flops: bool = True
    kept: bool = True
    """Bytes kept for backward, of cases with a backward pass."""
    device: str = "cpu"
    processor_time: bool = False
    """Seconds are those that a processor spent, not those of a clock on the wall: what other work
    on the machine takes does not count. Meant for one thread.
    """
    first_call: bool = False
    """A run takes minutes: its first call is what is measured, in time and in memory, and what
    libraries do once counts with it. ``rounds`` and ``seconds`` do nothing.
    """

    @property
    def clock(self) -> Callable[[], float]:
        """What tells the seconds where no GPU does."""
        return time.process_time if self.processor_time else time.perf_counter


def check_case(case: Case, device: str = "cpu") -> str | None:
    """Say what is wrong with the results of the case at a small size; None: they agree with their
    definition.
    """
    if case.kind == "operation":
        from visionattn.lab.operations import check_operation

        return check_operation(case, device)
    from visionattn.lab.networks import check_network

    return check_network(case, device)


def measure_together(cases: Sequence[Case], plan: Plan, baseline: str | None = None) -> list[Row]:
    """Measure a row for each case; their times come from one interleaved run.

    A case that disagrees with its definition is not measured further, one that does not fit is not
    timed: the status says so.

    Args:
        cases: of one place (``Case.place``) or in two dtypes, so that they may be compared.
        plan: what to measure.
        baseline: label of the case to which the others are related; None: there are no ratios.
    """
    rows = [Row(case) for case in cases]
    for row in rows:
        attempt(row, lambda row=row: _measure_alone(row, plan))
    if plan.time:
        _measure_times(rows, plan)
    for row in rows:
        base = next((other for other in rows if other.case.label == baseline), None)
        if base is not None and row.samples and base.samples:
            row.ratio, row.baseline = ratio_of(row.samples, base.samples), baseline
    return rows


def ratio_of(samples: Sequence[float], base: Sequence[float]) -> Quartiles:
    """Return quartiles of the ratios round by round: what slows the machine for a round slows both
    and cancels.
    """
    return Quartiles.of([mine / other for mine, other in zip(samples, base, strict=True)])


def attempt(row: Any, stage: Callable[[], None]) -> None:
    """Run a stage of what has a status; where it cannot be done the status says so."""
    try:
        stage()
    except NotImplementedError as error:
        row.status = f"not built: {error}"
    except Failed as error:
        row.status = f"failed: {error}"
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        row.status = "out of memory"


def _measure_alone(row: Row, plan: Plan) -> None:
    case = row.case
    if plan.check:
        row.status = check_case(case, plan.device) or "ok"
    if row.status != "ok":
        return
    if plan.flops:
        row.flops = flops_of(_on_meta(case))
    if plan.memory:
        row.peak_bytes = case_peak_bytes(case, plan.device, warm=not plan.first_call)
    if plan.kept and case.backward:
        row.kept_bytes = case_bytes_kept(case, plan.device)


def _on_meta(case: Case) -> Callable[[], object]:
    """Return a run without memory or work, whose shapes alone are followed."""
    work = build(case, "meta")
    if case.backward:
        return work

    def forward() -> None:
        with torch.no_grad():
            work.forward()

    return forward


def case_bytes_kept(case: Case, device: str = "cpu") -> int:
    """Return bytes that the case keeps for its backward pass: of an operation with its inputs, of a
    model without its weights.
    """
    work = build(replace(case, backward=True), device)
    return bytes_kept(work.forward, without=work.leaves if case.kind == "model" else ())


def _measure_times(rows: list[Row], plan: Plan) -> None:
    """Fill in the seconds of the rows that are in order."""
    ready = []
    for row in rows:
        if row.status == "ok":
            attempt(row, lambda row=row: ready.append(_Ready(row, plan)))
    if not ready:
        return
    if plan.first_call:
        for entry in ready:
            entry.row.samples, entry.row.seconds = [entry.seconds], Quartiles.of([entry.seconds])
        return
    samples = interleaved_seconds(
        [entry.work for entry in ready],
        [entry.seconds for entry in ready],
        rounds=plan.rounds,
        max_rounds=plan.max_rounds,
        seconds_per_work=plan.seconds,
        device=plan.device,
        clock=plan.clock,
    )
    for entry, times in zip(ready, samples, strict=True):
        entry.row.samples, entry.row.seconds = times, Quartiles.of(times)


class _Ready:
    """A row whose work is in memory and has run."""

    def __init__(self, row: Row, plan: Plan):
        self.row, self.work = row, build(row.case, plan.device)
        self.seconds = warm_up(self.work, device=plan.device, clock=plan.clock)


def record_of(row: Row) -> Record:
    """Return a row as plain values, units in the names; None where nothing was measured."""
    case, record = row.case, {}
    record |= {
        "case": case.label,
        "size": case.size,
        "width": case.width,
        "heads": case.heads,
        "batch": case.batch,
    }
    if case.kind == "model":
        record["heads"] = None
    record |= {
        "dtype": case.dtype,
        "pass": "forward+backward" if case.backward else "forward",
        "status": row.status,
    }
    record |= spread("seconds", row.seconds) | {"rounds": len(row.samples) or None}
    record |= {"baseline": row.baseline} | spread("ratio", row.ratio)
    return record | {"peak_bytes": row.peak_bytes, "kept_bytes": row.kept_bytes, "flops": row.flops}


def cells_of(row: Row) -> Record:
    """Return a row for people, under ``COLUMNS``."""
    record = record_of(row)
    seconds = row.seconds
    values = [record[name] for name in ("case", "size", "width", "heads", "batch", "dtype", "pass")]
    values += [
        seconds and duration(seconds.median),
        seconds and f"{duration(seconds.low)} - {duration(seconds.high)}",
        row.ratio and str(row.ratio),
    ]
    values += [mebibytes(row.peak_bytes), mebibytes(row.kept_bytes)]
    values += [None if row.flops is None else f"{row.flops / 1e9:.3g}", row.status]
    return dict(zip(COLUMNS, values, strict=True))
