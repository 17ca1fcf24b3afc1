"""Define and measure the performance targets of a CPU: two cores, float32, six heads, one image.
``gpu/gpu_rows.py`` has the targets of a GPU.

Targets of one size are measured in one interleaved run.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from visionattn.cli.tables import Record
from visionattn.lab.case_comparison import (
    CaseResult,
    MeasurementPlan,
    build,
    case_bytes_kept,
    case_peak_bytes,
    check_case,
    measure_together,
    ratios_of,
    spread,
    status_of,
)
from visionattn.lab.cases import Case

COLUMNS = {name: name for name in ("what", "at", "reach", "measured", "low", "high", "met")}
COLUMNS |= {"time": "seconds", "baseline time": "baseline_seconds", "rounds": "rounds"}
PLAN = MeasurementPlan(rounds=5, seconds=2.0, memory=False, counts=False)
MODEL_PLAN = MeasurementPlan(rounds=5, seconds=0.0, memory=False, counts=False)
"""The plans for operations and for models."""
TIMM = "vit_small_patch16_224"


@dataclass(frozen=True)
class Target:
    """A row of the table of targets."""

    what: str
    at: str
    """The size as text."""
    case: Case
    most: float | None
    """Upper limit of the value; None: only for comparison."""
    baseline: Case | None = None
    """The baseline, if the value is a ratio of times."""
    measure: Callable[[Case], float] | None = None
    """Measures any other value."""
    least: float = 0.0
    """Lower limit of the value."""

    @property
    def name(self) -> str:
        """The text that the regular expression of ``--only`` searches."""
        return f"{self.what} {self.at}"

    @property
    def reach(self) -> str:
        """The limits as text."""
        if self.most is None:
            return "-"
        return f"{self.least:g} to {self.most:g}" if self.least else f"{self.most:g}"

    def met(self, value: float) -> str:
        """Tell whether a value is within the limits; "-" without limits."""
        if self.most is None:
            return "-"
        return "yes" if self.least <= value <= self.most else "no"


def memory_over_inputs(case: Case) -> float:
    """Return the peak memory of a forward above its inputs and output, divided by the bytes of q, k
    and v.
    """
    tensors = build(case, "meta").tensors
    return (case_peak_bytes(case) - tensors["v"].nbytes) / sum(tensors[x].nbytes for x in "qkv")


def growth_of_bytes_kept(case: Case) -> float:
    """Return the factor by which the bytes kept for backward grow when the tokens double."""
    return case_bytes_kept(replace(case, size=2 * case.size)) / case_bytes_kept(case)


def targets() -> list[Target]:
    """Return the targets of a CPU, in order."""
    memory = "memory above inputs and output, efficient TaylorShift forward / size of q, k, v"
    case = operation("taylorshift", 65536)
    memory_target = Target(memory, place_of(case), case, 1.0, measure=memory_over_inputs)
    return [*_operations(), memory_target, *_models(), *_kept()]


def operation(name: str, tokens: int, form: str = "efficient", width: int = 64, **more) -> Case:
    """Return an operation; ``more`` are further fields of ``Case``."""
    return Case("operation", name, tokens, width, form, **more)


def place_of(case: Case) -> str:
    """Return the size of an operation as text."""
    return f"N = {case.size}, d = {case.width}"


def _operations() -> Iterator[Target]:
    for words, tokens, backward, limits in (
        ("forward / SDPA", 4096, False, (0.18, 0.38, 1.0)),
        ("forward / SDPA", 16384, False, (0.05, 0.12, 0.28)),
        ("forward+backward / SDPA's", 4096, True, (0.25, 0.4, 1.0)),
    ):
        for width, limit in zip((16, 32, 64), limits, strict=True):
            case = operation("taylorshift", tokens, width=width, backward=backward)
            base = replace(case, name="sdpa", form="auto")
            yield Target(f"efficient TaylorShift {words}", place_of(case), case, limit, base)
    chunked, causal = operation("kernelized+causal", 4096), "causal kernelized, chunked"
    quadratic = operation("eager-kernelized+causal", 4096, "auto")
    blocks = f"{causal} / our quadratic blocks, which skip the future"
    for what, case, base, limit in (
        ("direct TaylorShift forward / SDPA", operation("taylorshift", 4096, "direct"), None, 1.3),
        ("kernelized forward / SDPA", operation("kernelized", 16384), None, 0.025),
        (
            "kernelized + Joint R = 3 forward / SDPA",
            operation("kernelized+joint", 16384),
            None,
            0.045,
        ),
        (f"{causal} / quadratic masked", chunked, quadratic, 0.1),
        (blocks, chunked, operation("kernelized+causal", 4096, "direct"), None),
    ):
        base = base or replace(case, name="sdpa", form="auto")
        yield Target(what, place_of(case), case, limit, base)


def _models() -> Iterator[Target]:
    ours = "scaleformer_vit_s"
    for name, base, limits in (
        (ours, TIMM, (0.47, 0.16)),
        (ours, f"{ours}+identity", (1.3, 1.3)),
        ("taylorshift_vit_s", TIMM, (0.7, 0.24)),
        (f"{ours}+identity", TIMM, (None, None)),
    ):
        for px, limit in zip((1024, 2048), limits, strict=True):
            case, other = Case("model", name, px), Case("model", base, px)
            yield Target(f"{name} forward / {base}", f"{px} px", case, limit, other)


def _kept() -> Iterator[Target]:
    shift = ("", "+temperature", "+joint", "+axial", "+flat")
    kernelized = ("", "+relu", "+softmax", "+favor", "+causal", "+joint", "+axial", "+flat")
    names = [f"taylorshift{more}" for more in shift] + [f"kernelized{more}" for more in kernelized]
    for name in [*names, "kernelized+causal+flat"]:
        what = f"bytes kept for backward, N -> 2N, {name} efficient"
        case = operation(name, 4096, backward=True)
        place = "N = 4096 -> 8192, d = 64"
        yield Target(what, place, case, 2.1, measure=growth_of_bytes_kept, least=1.8)


def choose(pattern: str | None) -> list[Target]:
    """Return the CPU targets whose name matches the regular expression; see ``choose_rows``."""
    every = targets()
    return [every[i] for i in choose_rows(pattern, [target.name for target in every])]


def choose_rows(pattern: str | None, names: Sequence[str]) -> list[int]:
    """Return the indices of the names that match the regular expression, ignoring case.

    Raises:
        ValueError: not a regular expression, or no name matches.
    """
    try:
        wanted = re.compile(pattern or "", re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"--only {pattern!r} is no regular expression: {error}") from error
    chosen = [i for i, name in enumerate(names) if wanted.search(name)]
    if not chosen:
        raise ValueError(
            f"--only {pattern!r} matches none of {len(names)} rows; first: {names[0]!r}"
        )
    return chosen


def measure_targets(
    chosen: Sequence[Target], plan: MeasurementPlan | None = None
) -> Iterator[Record]:
    """Measure targets, and yield each record when ready. Targets of one interleaved run come
    together.

    Args:
        chosen: some of ``targets()``.
        plan: how to measure; None: chosen by size.
    """
    done = set()
    for target in chosen:
        if target.measure is not None:
            yield _measure_value(target)
        elif target.case.place not in done:
            done.add(target.case.place)
            pairs = [
                (each, each.baseline)
                for each in chosen
                if each.baseline and each.case.place == target.case.place
            ]
            cases = dict.fromkeys(case for each, base in pairs for case in (base, each.case))
            rows = measure_together(list(cases), plan or plan_of(target.case))
            found = dict(zip(cases, rows, strict=True))
            for each, base in pairs:
                yield _ratio_record(each, found[each.case], found[base])


def plan_of(case: Case) -> MeasurementPlan:
    """Return the plan for the size of a case, with fewer rounds if a forward takes seconds."""
    if case.kind == "operation":
        return PLAN
    return MODEL_PLAN if case.size <= 1024 else replace(MODEL_PLAN, rounds=3)


def _ratio_record(target: Target, row: CaseResult, base: CaseResult) -> Record:
    """Return the record of a ratio of times."""
    if not row.samples or not base.samples:
        return _record(target, row.status if row.status != "ok" else base.status)
    ratio = spread("ratio", ratios_of(row.samples, base.samples))
    seconds, others = (spread("", each.samples)["_median"] for each in (row, base))
    return _record(target, "ok", ratio["ratio_median"]) | {
        "low": ratio["ratio_low"],
        "high": ratio["ratio_high"],
        "seconds": seconds,
        "baseline_seconds": others,
        "rounds": len(row.samples),
    }


def _measure_value(target: Target) -> Record:
    """Measure a value that is not a ratio of times, and return its record."""
    row, value = CaseResult(target.case), None
    with status_of(row):
        row.status = check_case(target.case) or "ok"
        if row.status == "ok":
            value = target.measure(target.case)
    return _record(target, row.status, value)


def _record(target: Target, status: str, value: float | None = None) -> Record:
    record: Record = dict.fromkeys([*COLUMNS.values(), "seconds", "baseline_seconds", "rounds"])
    record |= {"what": target.what, "at": target.at, "reach": target.reach, "measured": value}
    return record | {"met": status if value is None else target.met(value)}
