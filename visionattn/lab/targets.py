"""What targets and results are, on a processor and on a GPU, and how those of a processor are
measured. ``target_table.py`` lists all of them.

Every ratio is taken within one interleaved run; targets of one size share it. Models run in
bfloat16 too, weights and images, where the processor multiplies it.
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
    Row,
    attempt,
    case_bytes_kept,
    check_case,
    measure_together,
    ratio_of,
)
from visionattn.lab.memory import build, case_peak_bytes
from visionattn.ops.sums import has_bfloat16_products

COLUMNS = ("what", "at", "reach", "measured", "spread", "met", "bfloat16")
COLUMNS += ("time", "baseline time", "rounds")
NO_PRODUCTS = "not run: no bfloat16 products"


@dataclass(frozen=True)
class Target:
    """A row of the table of targets."""

    what: str
    at: str
    """The size, in words."""
    case: Case
    most: float | None
    """The number may be at most this; None: it is there for comparison."""
    least: float | None = None
    """The number is to be at least this; None: any."""
    baseline: Case | None = None
    """The case that times are taken to."""
    measure: Callable[[Case], float] | None = None
    """Gives the number, where it is no ratio of times."""

    @property
    def name(self) -> str:
        """What ``--only`` looks at."""
        return f"{self.what} {self.at}"

    @property
    def reach(self) -> str:
        """What is to be reached, in words."""
        if self.most is None:
            return "-"
        return f"{self.most:g}" if self.least is None else f"{self.least:g} to {self.most:g}"


@dataclass
class Result:
    """The result of a target."""

    target: Target
    status: str = "ok"
    value: float | None = None
    seconds: Quartiles | None = None
    """The seconds of the case."""
    ratio: Quartiles | None = None
    """The seconds of the case over those of the baseline, round by round."""
    bfloat16: Quartiles | str | None = None
    """The ratio with both models in bfloat16, or why there is none; None: no model is timed."""
    baseline_seconds: float | None = None
    rounds: int | None = None

    @property
    def met(self) -> str:
        """ "yes" or "no", "-" where nothing is to be reached; without a number the status."""
        if self.status != "ok":
            return self.status
        if self.target.most is None:
            return "-"
        low = -math.inf if self.target.least is None else self.target.least
        return "yes" if low <= self.value <= self.target.most else "no"

    def record(self) -> Record:
        """Return the result as plain values."""
        target, ratio = self.target, self.ratio
        record: Record = {"what": target.what, "at": target.at, "reach": target.reach}
        record |= {"measured": self.value, "low": ratio and ratio.low, "high": ratio and ratio.high}
        record |= {"met": self.met, "bfloat16": getattr(self.bfloat16, "median", self.bfloat16)}
        record["seconds"] = self.seconds and self.seconds.median
        return record | {"baseline_seconds": self.baseline_seconds, "rounds": self.rounds}

    def cells(self) -> list[str | None]:
        """Return the result for people, under ``COLUMNS``."""
        record = self.record()
        spread = self.ratio and f"{self.ratio.low:.3g}-{self.ratio.high:.3g}"
        measured = None if self.value is None else f"{self.value:.3g}"
        times = [
            record[name] and duration(record[name]) for name in ("seconds", "baseline_seconds")
        ]
        named = [record[name] for name in ("what", "at", "reach")]
        half = self.bfloat16 and str(self.bfloat16)
        return [*named, measured, spread, record["met"], half, *times, self.rounds]


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
    half = {case: replace(case, dtype="bfloat16") for case in cases if case.kind == "model"}
    runs = [*cases, *half.values()] if has_bfloat16_products() else cases
    rows = {row.case: row for row in measure_together(runs, plan)}
    for target in targets:
        row, base = rows[target.case], rows[target.baseline]
        result = Result(target, seconds=row.seconds, rounds=len(row.samples))
        result.baseline_seconds = base.seconds and base.seconds.median
        ratio = _ratio(row, base)
        if isinstance(ratio, str):
            result.status = ratio
        else:
            result.ratio, result.value = ratio, ratio.median
        if target.case in half:
            pair = [rows.get(half[case]) for case in (target.case, target.baseline)]
            result.bfloat16 = _ratio(*pair) if all(pair) else NO_PRODUCTS
        if row.seconds is None:
            result.baseline_seconds = result.rounds = None
        yield result


def _ratio(row: Row, base: Row) -> Quartiles | str:
    """Return the ratio of the seconds, or the status of the row that has none."""
    if row.samples and base.samples:
        return ratio_of(row.samples, base.samples)
    return next(r.status for r in (row, base) if r.status != "ok")


def _measure_figure(target: Target) -> Result:
    """Measure a figure that is not a ratio of times."""
    result = Result(target)

    def measure() -> None:
        result.status = check_case(target.case) or "ok"
        if result.status == "ok":
            result.value = target.measure(target.case)

    attempt(result, measure)
    return result
