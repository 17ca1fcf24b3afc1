"""What targets and results are, and the figures that operations and models are to reach on two
cores in float32, with what they come to here; those of a GPU are in ``gpu/targets.py``.

Every ratio is taken within one interleaved run; targets of one size share it. One head width, six
heads, one image.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from visionattn.cli.ends import Failed, is_out_of_memory
from visionattn.cli.tables import Record, duration
from visionattn.lab.cases import Case
from visionattn.lab.compare import (
    Plan,
    Quartiles,
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
    """Of which the names of GPUs have one, for which the limit is meant."""
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
    """How it is measured: "ratio" or "figure"; on a GPU one of ``gpu.targets.KINDS``."""
    case: Case
    bounds: tuple[Bound, ...]
    """What is to be reached, one for each number that is measured."""
    baseline: Case | str | None = None
    """What the case is compared with: a case, or on a GPU the name of a model; None: nothing, or
    what its kind says.
    """
    measure: Callable[[Case], float] | None = None
    """Of a "figure": gives its number."""

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
    """What came of a target; a GPU's has more columns."""

    target: Target
    status: str = "ok"
    seconds: Quartiles | None = None
    """Of the case."""
    values: tuple[float, ...] = ()
    """The numbers of the bounds."""
    ratio: Quartiles | None = None
    """Of a "ratio": of the seconds to those of the baseline, round by round."""
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


def make_target(
    what: str,
    at: str,
    case: Case,
    baseline: Case | None = None,
    *,
    low: float = 0.0,
    high: float | None = None,
    measure: Callable[[Case], float] | None = None,
) -> Target:
    """Return a target of a processor: a ratio of times to the baseline, or what ``measure`` gives,
    between ``low`` and ``high``; without ``high`` it is there for comparison.
    """
    bound = Bound(high, most=True, least=low or None)
    return Target(what, at, "figure" if measure else "ratio", case, (bound,), baseline, measure)


def all_targets() -> list[Target]:
    """Return the whole table, in order."""
    return [*_operation_targets(), _memory_target(), *_model_targets(), *_kept_targets()]


def _operation(
    name: str, tokens: int, width: int, form: str = "efficient", backward: bool = False
) -> Case:
    return Case("operation", name, tokens, width, form=form, backward=backward)


def _operation_targets() -> Iterator[Target]:
    by_width = (16, 32, 64)
    for words, tokens, backward, limits in (
        ("forward / SDPA", 4096, False, (0.18, 0.38, 1.0)),
        ("forward / SDPA", 16384, False, (0.05, 0.12, 0.28)),
        ("forward+backward / SDPA's", 4096, True, (0.25, 0.4, 1.0)),
    ):
        for width, limit in zip(by_width, limits, strict=True):
            ours, sdpa = _against_sdpa("taylorshift", tokens, width)
            case = _operation(*ours, backward)  # type: ignore[call-arg]
            base = _operation(*sdpa, backward)  # type: ignore[call-arg]
            yield make_target(
                f"efficient TaylorShift {words}",
                f"N = {tokens}, d = {width}",
                case,
                base,
                high=limit,
            )
    for what, name, form, tokens, limit in (
        ("direct TaylorShift", "taylorshift", "direct", 4096, 1.3),
        ("kernelized", "kernelized", "efficient", 16384, 0.025),
        ("kernelized + Joint R = 3", "kernelized+joint", "efficient", 16384, 0.045),
    ):
        case, base = _operation(name, tokens, 64, form), _operation("sdpa", tokens, 64, "auto")
        yield make_target(f"{what} forward / SDPA", f"N = {tokens}, d = 64", case, base, high=limit)
    chunked, blocked = (
        _operation("kernelized+causal", 4096, 64, form) for form in ("efficient", "direct")
    )
    masked = _operation("eager-kernelized+causal", 4096, 64, "auto")
    yield make_target(
        "causal kernelized, chunked / quadratic masked",
        "N = 4096, d = 64",
        chunked,
        masked,
        high=0.1,
    )
    yield make_target(
        "causal kernelized, chunked / our quadratic blocks, which skip the future",
        "N = 4096, d = 64",
        chunked,
        blocked,
    )


def _against_sdpa(name: str, tokens: int, width: int) -> tuple[tuple, tuple]:
    return (name, tokens, width, "efficient"), ("sdpa", tokens, width, "auto")


def _memory_target() -> Target:
    case = _operation("taylorshift", 65536, 64)
    what = "memory above inputs and output, efficient TaylorShift forward / size of q, k, v"
    return make_target(what, "N = 65536, d = 64", case, high=1.0, measure=memory_over_inputs)


def _model_targets() -> Iterator[Target]:
    names = {
        "ours": "scaleformer_vit_s",
        "twin": "scaleformer_vit_s+identity",
        "shift": "taylorshift_vit_s+heads=12",
    }
    names["timm"] = "vit_small_patch16_224"
    for of, base, limits in (
        ("ours", "timm", (0.47, 0.16)),
        ("ours", "twin", (1.3, 1.3)),
        ("shift", "timm", (0.7, 0.24)),
        ("twin", "timm", (None, None)),
    ):
        for pixels, limit in zip((1024, 2048), limits, strict=True):
            case, other = (Case("model", names[key], pixels) for key in (of, base))
            yield make_target(
                f"{names[of]} forward / {names[base]}", f"{pixels} px", case, other, high=limit
            )


def _kept_targets() -> Iterator[Target]:
    names = [
        "taylorshift",
        "taylorshift+temperature",
        "taylorshift+joint",
        "kernelized",
        "kernelized+relu",
        "kernelized+causal",
    ]
    names += ["kernelized+joint", "kernelized+axial", "kernelized+flat"]
    names += [
        "taylorshift+axial",
        "taylorshift+flat",
        "kernelized+causal+flat",
        "kernelized+softmax",
        "kernelized+favor",
    ]
    for name in names:
        what, at = f"bytes kept for backward, N -> 2N, {name} efficient", "N = 4096 -> 8192, d = 64"
        yield make_target(
            what,
            at,
            _operation(name, 4096, 64, backward=True),
            low=1.8,
            high=2.1,
            measure=growth_of_bytes_kept,
        )


def memory_over_inputs(case: Case) -> float:
    """Peak memory of a forward above its inputs and its output, over the size of q, k and v
    together.
    """
    tensors = build(case, "meta").tensors
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    return (case_peak_bytes(case) - sizes["v"]) / (sizes["q"] + sizes["k"] + sizes["v"])


def growth_of_bytes_kept(case: Case) -> float:
    """Return bytes kept for backward at twice the tokens over those at the tokens of the case."""
    return case_bytes_kept(replace(case, size=2 * case.size)) / case_bytes_kept(case)


def choose(pattern: str | None) -> list[Target]:
    """Return the targets whose text, ``what at``, contains the regular expression; see
    ``choose_rows``.
    """
    targets = all_targets()
    return [targets[i] for i in choose_rows(pattern, [target.name for target in targets])]


def measure_targets(targets: Sequence[Target], plan: Plan, *, few: bool = True) -> Iterator[Result]:
    """Measure; results come as they are ready, those that share an interleaved run one after the
    other.

    Args:
        targets: some of ``all_targets()``.
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
    """Ratios of one size, from one run of all their cases."""
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
    """Return a figure that is not a ratio of times."""
    try:
        wrong = check_case(target.case)
        if wrong:
            return Result(target, wrong)
        return Result(target, values=(target.measure(target.case),))
    except NotImplementedError as error:
        return Result(target, f"not built: {error}")
    except Failed as error:
        return Result(target, f"failed: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Result(target, "out of memory")
