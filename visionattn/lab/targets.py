"""The figures that the operations and models are to reach on two cores in float32, and what they
come to here.

Every ratio is taken within one interleaved run; targets of one size share it. One head width, six
heads, one image.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from visionattn.cli.ends import Failed, is_out_of_memory
from visionattn.cli.tables import Record, duration
from visionattn.lab.cases import Case
from visionattn.lab.compare import Plan, Row, case_bytes_kept, check_case, measure_together
from visionattn.lab.memory import build, case_peak_bytes

COLUMNS = ("what", "at", "reach", "measured", "spread", "met", "time", "baseline time", "rounds")


@dataclass(frozen=True)
class Target:
    """A figure to reach."""

    what: str
    at: str
    case: Case
    baseline: Case | None = None
    """A ratio of times, to this case; None: a figure of ``measure``."""
    low: float = 0.0
    high: float | None = None
    """The figure lies between the two; None: it is there for comparison."""
    measure: Callable[[Case], float] | None = None

    @property
    def reach(self) -> str:
        """The bounds in words."""
        if self.high is None:
            return "-"
        return f"{self.low:g} to {self.high:g}" if self.low else f"{self.high:g}"


@dataclass(frozen=True)
class Result:
    """What a target came to."""

    target: Target
    status: str
    measured: float | None = None
    row: Row | None = None
    base: Row | None = None

    @property
    def met(self) -> str:
        """yes, no, or why there is no figure."""
        if self.measured is None:
            return self.status
        if self.target.high is None:
            return "-"
        return "yes" if self.target.low <= self.measured <= self.target.high else "no"

    def record(self) -> Record:
        """The result as plain values."""
        target, ratio, timed = (
            self.target,
            self.row and self.row.ratio,
            self.row and self.base and self.row.seconds,
        )
        record = {
            "what": target.what,
            "at": target.at,
            "reach": target.reach,
            "measured": self.measured,
        }
        record |= {
            "low": ratio.low if ratio else None,
            "high": ratio.high if ratio else None,
            "met": self.met,
        }
        record["seconds"] = timed.median if timed else None
        record["baseline_seconds"] = (
            self.base.seconds.median if timed and self.base.seconds else None
        )
        return record | {"rounds": len(self.row.samples) if timed else None}

    def cells(self) -> list[str | None]:
        """The result for people, under ``COLUMNS``."""
        record = self.record()
        spread = None if record["low"] is None else f"{record['low']:.3g}-{record['high']:.3g}"
        times = [
            None if record[name] is None else duration(record[name])
            for name in ("seconds", "baseline_seconds")
        ]
        measured = None if self.measured is None else f"{self.measured:.3g}"
        return [
            *(record[name] for name in ("what", "at", "reach")),
            measured,
            spread,
            self.met,
            *times,
            record["rounds"],
        ]


def all_targets() -> list[Target]:
    """The whole table, in order."""
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
            case, base = (
                _operation(*of, backward) for of in _against_sdpa("taylorshift", tokens, width)
            )
            yield Target(
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
        yield Target(f"{what} forward / SDPA", f"N = {tokens}, d = 64", case, base, high=limit)
    chunked, blocked = (
        _operation("kernelized+causal", 4096, 64, form) for form in ("efficient", "direct")
    )
    masked = _operation("eager-kernelized+causal", 4096, 64, "auto")
    yield Target(
        "causal kernelized, chunked / quadratic masked",
        "N = 4096, d = 64",
        chunked,
        masked,
        high=0.1,
    )
    yield Target(
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
    return Target(what, "N = 65536, d = 64", case, high=1.0, measure=memory_over_inputs)


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
            yield Target(
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
        yield Target(
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
    """Bytes kept for backward at twice the tokens over those at the tokens of the case."""
    return case_bytes_kept(replace(case, size=2 * case.size)) / case_bytes_kept(case)


def choose(pattern: str | None) -> list[Target]:
    """The targets whose text, ``what at``, contains the regular expression; upper and lower case
    are one.

    Raises:
        ValueError: no regular expression, or none of the targets.
    """
    try:
        wanted = re.compile(pattern or "", re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"--only {pattern!r} is no regular expression: {error}") from error
    chosen = [target for target in all_targets() if wanted.search(f"{target.what} {target.at}")]
    if not chosen:
        raise ValueError(
            f"--only {pattern!r} fits none of the figures; parts of their names: SDPA, N = 4096, "
            f"scaleformer, kept"
        )
    return chosen


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
    from visionattn.lab.compare import ratio_of

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
        if row.samples and base.samples:
            row = replace(row, ratio=ratio_of(row.samples, base.samples))
            yield Result(target, "ok", row.ratio.median, row, base)
        else:
            yield Result(
                target, next(r.status for r in (row, base) if r.status != "ok"), None, row, base
            )


def _measure_figure(target: Target) -> Result:
    """A figure that is not a ratio of times."""
    try:
        wrong = check_case(target.case)
        return Result(target, wrong) if wrong else Result(target, "ok", target.measure(target.case))
    except NotImplementedError as error:
        return Result(target, f"not built: {error}")
    except Failed as error:
        return Result(target, f"failed: {error}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Result(target, "out of memory")
