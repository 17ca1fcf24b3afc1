"""The figures that kernels and models are to reach on an NVIDIA H200 in bfloat16, and the table of what they come to.

It measures nothing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from visionattn.benchmark.cases import Case
from visionattn.benchmark.compare import Quartiles
from visionattn.benchmark.table import Record

COLUMNS = ("what", "size", "dtype", "time", "floor", "of floor", "SDPA", "eager", "reach", "measured", "reached", "error", "note")
BATCH, HEADS = 2, 6
TOKENS_PER_RUN = 65_536
"""Patches of all images of a batch that a model is timed with."""
KINDS = ("operation", "model", "image", "training", "crossover")
"""In the order in which they are measured: what is wanted most comes first."""


@dataclass(frozen=True)
class Bound:
    """A number to reach."""

    limit: float
    unit: str
    """What stands behind the number."""
    most: bool = False
    """Whether the number may be at most the limit; else it is to be at least that."""

    def met(self, value: float) -> bool:
        """Whether the number is reached; one that is not a number is not."""
        return value <= self.limit if self.most else value >= self.limit

    def text(self, value: float) -> str:
        """A number with its unit, three digits; infinity is "none"."""
        if math.isinf(value):
            return "none"
        number = f"{100 * value:.3g}" if self.unit.startswith("%") else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
        return f"{number} {self.unit}"

    def __str__(self) -> str:
        return f"{'<=' if self.most else '>='} {self.text(self.limit)}"


@dataclass(frozen=True)
class Figure:
    """A row of the table."""

    what: str
    size: str
    kind: str
    """One of ``KINDS``: how it is measured."""
    case: Case
    bounds: tuple[Bound, ...]
    """What is to be reached, one for each number that is measured."""
    baseline: str = ""
    """Of a model: the model that it is compared with."""

    @property
    def reach(self) -> str:
        """The bounds in words."""
        return ", ".join(map(str, self.bounds))

    @property
    def place(self) -> tuple:
        """What figures share that are measured in one run."""
        return (self.kind, self.case)


@dataclass
class Result:
    """What came of a figure."""

    figure: Figure
    status: str = "ok"
    """"ok", or why there are no numbers: "wrong: ...", "out of memory", "failed: ...", "not measured: ..."."""
    seconds: Quartiles | None = None
    floor_seconds: float | None = None
    sdpa: float | str | None = None
    """Seconds of ``scaled_dot_product_attention``, or of the model with it; or why there are none."""
    eager: float | str | None = None
    """Seconds of the same form in PyTorch's own operations; or why there are none."""
    values: tuple[float, ...] = ()
    """The numbers of the bounds."""
    error: float | None = None
    """Largest relative error of an output or a gradient."""
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        """Whether something is not as it should be, as distinct from slow or large."""
        return self.status.startswith(("wrong", "failed"))

    @property
    def reached(self) -> str:
        """"yes" or "no"; without numbers the status."""
        if self.status != "ok":
            return self.status
        if not self.values:
            return "not measured"
        return "yes" if all(bound.met(value) for bound, value in zip(self.figure.bounds, self.values, strict=True)) else "no"

    def record(self) -> Record:
        """The result as plain values."""
        figure, seconds = self.figure, self.seconds
        record = {"what": figure.what, "size": figure.size, "dtype": figure.case.dtype, "status": self.status}
        record |= {f"seconds_{name}": getattr(seconds, name, None) for name in ("median", "low", "high")}
        fraction = self.floor_seconds / seconds.median if seconds and self.floor_seconds else None
        record |= {"floor_seconds": self.floor_seconds, "of_floor": fraction, "sdpa_seconds": self.sdpa}
        numbers = [value if math.isfinite(value) else None for value in self.values]
        record |= {"eager_seconds": self.eager, "reach": figure.reach, "measured": numbers or None}
        record |= {"shown": self.shown, "reached": self.reached, "error": self.error}
        return record | {"note": "; ".join(self.notes) or None}

    @property
    def shown(self) -> str | None:
        """The numbers of the bounds in words."""
        return ", ".join(bound.text(value) for bound, value in zip(self.figure.bounds, self.values, strict=False)) or None

    def cells(self) -> list[str | None]:
        """The result for people, under ``COLUMNS``."""
        record = self.record()
        times = [milliseconds(record[name]) for name in ("seconds_median", "floor_seconds", "sdpa_seconds", "eager_seconds")]
        fraction = None if record["of_floor"] is None else f"{100 * record['of_floor']:.0f} %"
        error = None if self.error is None else f"{self.error:.1e}"
        named = [record[name] for name in ("what", "size", "dtype")]
        return [*named, *times[:2], fraction, *times[2:], record["reach"], self.shown, self.reached, error, record["note"]]


def milliseconds(seconds: float | str | None) -> str | None:
    """Three digits, in milliseconds; a reason as it is."""
    return seconds if seconds is None or isinstance(seconds, str) else f"{1e3 * seconds:.3g} ms"


def operation(name: str, tokens: int, width: int, form: str = "efficient", *, backward: bool = False, batch: int = BATCH) -> Case:
    """An operation in bfloat16; TaylorShift has a temperature, as in the models."""
    return Case("operation", name, tokens, width, form, "bfloat16", backward, batch, HEADS)


def model(pixels: int, backward: bool = False) -> Case:
    """A batch of images that are ``TOKENS_PER_RUN`` patches together, or one image that is larger."""
    batch = max(1, TOKENS_PER_RUN // (pixels // 16) ** 2)
    return Case("model", "scaleformer_vit_s", pixels, None, "auto", "bfloat16", backward, batch)


def all_figures() -> list[Figure]:
    """The whole table, in order."""
    return [*_operation_figures(), *_model_figures(), *_large_figures(), *_crossover_figures()]


def _operation_figures() -> list[Figure]:
    copy, matmul, faster = "% of the copy", "% of the matmul", "x SDPA"
    shift = "taylorshift+temperature"
    rows = [
        ("kernelized forward", operation("kernelized", 65_536, 64), Bound(0.70, copy)),
        ("kernelized forward+backward", operation("kernelized", 65_536, 64, backward=True), Bound(0.60, copy)),
        ("efficient TaylorShift forward", operation(shift, 65_536, 64), Bound(0.50, matmul)),
        ("efficient TaylorShift forward", operation(shift, 65_536, 32), Bound(0.35, matmul)),
        ("efficient TaylorShift forward+backward", operation(shift, 16_384, 32, backward=True), Bound(15, faster)),
        ("direct TaylorShift forward", operation(shift, 4096, 64, "direct"), Bound(1, faster)),
    ]
    size = "d = {0.width}, N = {0.size:,}, B*h = {1}"
    return [Figure(what, size.format(case, case.batch * HEADS), "operation", case, (bound,)) for what, case, bound in rows]


def _crossover_figures() -> list[Figure]:
    what = "crossover of direct and efficient TaylorShift, forward"
    limits = ((16, 400), (32, 1200), (64, 3700))
    cases = [(operation("taylorshift+temperature", limit, d), Bound(limit, "tokens", most=True)) for d, limit in limits]
    return [Figure(what, f"d = {case.width}, GPU filled", "crossover", case, (bound,)) for case, bound in cases]


def _model_figures() -> list[Figure]:
    figures = []
    for pixels, limit in ((1024, 1.5), (2048, 4), (4096, 14)):
        case = model(pixels)
        size = f"{pixels} px, batch {case.batch}"
        for other, bound, words in (
            ("vit_small_patch16_224", Bound(limit, "x images/s"), "timm's ViT-S with SDPA"),
            ("scaleformer_vit_s+identity", Bound(0.8, "x images/s"), "its identity-attention twin"),
        ):
            figures.append(Figure(f"scaleformer_vit_s inference / {words}", size, "model", case, (bound,), other))
    return figures


def _large_figures() -> list[Figure]:
    image, step = model(16_384), model(2048, backward=True)
    below = (Bound(1, "s", most=True), Bound(24, "GiB", most=True))
    against = (Bound(3, "x steps/s"), Bound(1.02, "x memory", most=True))
    what = "scaleformer_vit_s, one image, plain forward"
    trained = f"2048 px, batch {step.batch}"
    return [
        Figure(what, "16384 x 16384 px, 1,048,576 tokens", "image", image, below),
        Figure("scaleformer_vit_s training step / ViT-S with SDPA", trained, "training", step, against, "vit_small_patch16_224"),
    ]


def choose(pattern: str | None, names: Sequence[str]) -> list[int]:
    """The places of the names that contain the regular expression; upper and lower case are one.

    Raises:
        ValueError: no regular expression, or it is in none of the names.
    """
    try:
        wanted = re.compile(pattern or "", re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"--only {pattern!r} is no regular expression: {error}") from error
    chosen = [i for i, name in enumerate(names) if wanted.search(name)]
    if not chosen:
        raise ValueError(f"--only {pattern!r} fits none of {len(names)} rows; the first is {names[0]!r}")
    return chosen
