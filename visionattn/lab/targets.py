"""What targets and results are, on a processor and on a GPU, and how those of a processor are
measured. ``target_table.py`` lists all of them.

Every ratio is taken within one interleaved run; targets of one size share it.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from visionattn.cli.tables import Record, duration
from visionattn.lab.cases import Case
from visionattn.lab.compare import (
    Plan,
    Quartiles,
    attempt,
    case_bytes_kept,
    check_case,
    measure_together,
    ratio_of,
)
from visionattn.lab.memory import build, case_peak_bytes

COLUMNS = ("what", "at", "reach", "measured", "spread", "met", "time", "baseline time", "rounds")
HOPPER = ("H100", "H200")


@dataclass(frozen=True)
class Bound:
    """A number to reach."""

    limit: float | None
    """None: the number is there for comparison."""
    unit: str = ""
    """What stands behind the number; empty: it is a plain ratio, told as a number alone."""
    most: bool = False
    """Whether the number may be at most the limit; else it is to be at least that."""
    gpus: tuple[str, ...] = HOPPER
    """The limit is meant for GPUs whose name contains one of these."""
    least: float | None = None
    """Where the number may be at most the limit: it is to be at least this."""

    def is_for(self, gpu: str | None) -> bool:
        """Tell whether there is a limit for the GPU of this name; None: any."""
        return self.limit is not None and (gpu is None or any(name in gpu for name in self.gpus))

    def met(self, value: float) -> bool:
        """Tell whether the number is reached; one that is not a number is not."""
        if self.limit is None:
            return True
        if self.most:
            return value <= self.limit and (self.least is None or value >= self.least)
        return value >= self.limit

    def text(self, value: float) -> str:
        """Return a number with its unit, three digits; infinity is "none"."""
        if math.isinf(value):
            return "none"
        number = (
            f"{100 * value:.3g}"
            if self.unit.startswith("%")
            else f"{value:.0f}"
            if value >= 1000
            else f"{value:.3g}"
        )
        return f"{number} {self.unit}"

    def __str__(self) -> str:
        if not self.unit:
            at_least = "" if self.least is None else f"{self.least:g} to "
            return "-" if self.limit is None else f"{at_least}{self.limit:g}"
        if self.limit is None:
            return f"({self.unit})"
        where = "" if self.gpus == HOPPER else f" on {' or '.join(self.gpus)}"
        return f"{'<=' if self.most else '>='} {self.text(self.limit)}{where}"


@dataclass(frozen=True)
class Target:
    """A row of a table of targets, on a processor or on a GPU."""

    what: str
    at: str
    """The size, in words."""
    kind: str
    """How it is measured: "ratio" or "figure"; on a GPU one of
    ``target_table.KINDS``."""
    case: Case
    bounds: tuple[Bound, ...]
    """What is to be reached, one for each number that is measured."""
    baseline: Case | str | None = None
    """What the case is compared with: a case, or on a GPU the name of a model; None: nothing, or
    what its kind says.
    """
    measure: Callable[[Case], float] | None = None
    """Gives the number of a "figure"."""

    @property
    def name(self) -> str:
        """What ``--only`` looks at."""
        return f"{self.what} {self.at}"

    @property
    def reach(self) -> str:
        """The bounds in words."""
        return ", ".join(map(str, self.bounds))

    def values_of(self, by_unit: dict[str, float]) -> tuple[float, ...]:
        """Return the numbers of the bounds by their units; none where one is missing."""
        units = [bound.unit for bound in self.bounds]
        return tuple(by_unit[unit] for unit in units) if by_unit.keys() >= set(units) else ()

    @property
    def place(self) -> tuple:
        """What targets of a GPU share that are measured in one run."""
        return (self.kind, self.case)


@dataclass
class Result:
    """The result of a target; that of a GPU has more columns."""

    target: Target
    status: str = "ok"
    seconds: Quartiles | None = None
    """The seconds of the case."""
    values: tuple[float, ...] = ()
    """The numbers of the bounds."""
    ratio: Quartiles | None = None
    """The seconds of a "ratio" over those of the baseline, round by round."""
    baseline_seconds: float | None = None
    rounds: int | None = None
    gpu: str | None = None
    """Name of the GPU; None: one for which the marks are meant, or none at all."""

    @property
    def broken(self) -> bool:
        """Tell whether something is not as it should be, as distinct from slow or large."""
        return self.status.startswith(("wrong", "failed"))

    @property
    def reached(self) -> str:
        """ "yes" or "no"; without numbers the status, and "no mark" where none is meant for this
        machine.
        """
        if self.status != "ok":
            return self.status
        if not self.values:
            return "not measured"
        pairs = zip(self.target.bounds, self.values, strict=True)
        met = [bound.met(value) for bound, value in pairs if bound.is_for(self.gpu)]
        return "no mark" if not met else "yes" if all(met) else "no"

    @property
    def shown(self) -> str | None:
        """The numbers of the bounds in words."""
        pairs = zip(self.target.bounds, self.values, strict=False)
        return ", ".join(bound.text(value) for bound, value in pairs) or None

    def record(self) -> Record:
        """Return the result as plain values."""
        target, ratio = self.target, self.ratio
        record: Record = {"what": target.what, "at": target.at, "reach": target.reach}
        record["measured"] = self.values[0] if self.values else None
        record |= {"low": ratio and ratio.low, "high": ratio and ratio.high}
        record["met"] = "-" if self.reached == "no mark" else self.reached
        record["seconds"] = self.seconds and self.seconds.median
        return record | {"baseline_seconds": self.baseline_seconds, "rounds": self.rounds}

    def cells(self) -> list[str | None]:
        """Return the result for people, under ``COLUMNS``."""
        record = self.record()
        spread = self.ratio and f"{self.ratio.low:.3g}-{self.ratio.high:.3g}"
        measured = f"{self.values[0]:.3g}" if self.values else None
        times = [
            record[name] and duration(record[name]) for name in ("seconds", "baseline_seconds")
        ]
        named = [record[name] for name in ("what", "at", "reach")]
        return [*named, measured, spread, record["met"], *times, self.rounds]


def choose_rows(pattern: str | None, names: Sequence[str]) -> list[int]:
    """Return the places of the names that contain the regular expression; upper and lower case are
    one.

    Raises:
        ValueError: no regular expression, or it is in none of the names.
    """
    try:
        wanted = re.compile(pattern or "", re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"--only {pattern!r} is no regular expression: {error}") from error
    chosen = [i for i, name in enumerate(names) if wanted.search(name)]
    if not chosen:
        raise ValueError(
            f"--only {pattern!r} fits none of {len(names)} rows; the first is {names[0]!r}"
        )
    return chosen


def memory_over_inputs(case: Case) -> float:
    """Return the peak memory of a forward above its inputs and its output, over the size of q, k
    and v together.
    """
    tensors = build(case, "meta").tensors
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    return (case_peak_bytes(case) - sizes["v"]) / (sizes["q"] + sizes["k"] + sizes["v"])


def growth_of_bytes_kept(case: Case) -> float:
    """Return bytes kept for backward at twice the tokens over those at the tokens of the case."""
    return case_bytes_kept(replace(case, size=2 * case.size)) / case_bytes_kept(case)


def measure_targets(targets: Sequence[Target], plan: Plan, *, few: bool = True) -> Iterator[Result]:
    """Measure targets and yield their results as they are ready, those of one interleaved run one
    after the other.

    Args:
        targets: some of ``target_table.targets()``.
        plan: how long; memory and counts are left out.
        few: of models, which take seconds each, no more than 5 rounds are made, 3 above 1024
            pixels.
    """
    plan, done = replace(plan, memory=False, flops=False, kept=False), set()
    for target in targets:
        if target.measure is not None:
            yield _measure_figure(target)
        elif target.case.place not in done:
            done.add(target.case.place)
            yield from _measure_place(
                [other for other in targets if other.case.place == target.case.place], plan, few
            )


def _measure_place(targets: Sequence[Target], plan: Plan, few: bool) -> Iterator[Result]:
    """Measure the ratios of one size, in one run of all their cases."""
    targets = [target for target in targets if target.baseline is not None]
    cases = list(
        dict.fromkeys(case for target in targets for case in (target.baseline, target.case))
    )
    if few and cases[0].kind == "model":
        plan = replace(
            plan, rounds=min(plan.rounds, 3 if cases[0].size > 1024 else 5), max_rounds=plan.rounds
        )
    rows = {row.case: row for row in measure_together(cases, plan)}
    for target in targets:
        row, base = rows[target.case], rows[target.baseline]
        result = Result(target, seconds=row.seconds, rounds=len(row.samples))
        result.baseline_seconds = base.seconds and base.seconds.median
        if row.samples and base.samples:
            result.ratio = ratio_of(row.samples, base.samples)
            result.values = (result.ratio.median,)
        else:
            result.status = next(r.status for r in (row, base) if r.status != "ok")
        if row.seconds is None:
            result.baseline_seconds = result.rounds = None
        yield result


def _measure_figure(target: Target) -> Result:
    """Measure a figure that is not a ratio of times."""
    result = Result(target)

    def measure() -> None:
        result.status = check_case(target.case) or "ok"
        if result.status == "ok":
            result.values = (target.measure(target.case),)

    attempt(result, measure)
    return result
