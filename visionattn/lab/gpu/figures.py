"""The figures that kernels and models are to reach on an NVIDIA H100 or H200 in bfloat16, and what
they come to.

It measures nothing.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from visionattn.cli.tables import Record
from visionattn.lab.cases import Case
from visionattn.lab.compare import Quartiles

if TYPE_CHECKING:
    from visionattn.lab.gpu.expected import Expected

COLUMNS = ("what", "size", "dtype", "time", "floor", "of floor", "SDPA", "Flash", "flex", "eager")
COLUMNS += ("reach", "expected", "measured", "reached", "error", "note")
HOPPER = ("H100", "H200")
WITH_GRAPH, WITHOUT_GRAPH = "x ViT-S's with a graph", "x ViT-S's without"
"""Units of speed at batch 1."""
BATCH, HEADS = 2, 6
NO_SLOWER_FROM = 512
"""Pixels from which on one image is to take no longer than through timm's ViT-S."""
TOKENS_PER_RUN = 65_536
"""Patches of all images of a batch that a model is timed with."""
KINDS = ("operation", "model", "image", "training", "latency", "crossover")
"""In the order in which they are measured: what is wanted most comes first."""


@dataclass(frozen=True)
class Bound:
    """A number to reach."""

    limit: float | None
    """None: the number is there for comparison."""
    unit: str
    """What stands behind the number."""
    most: bool = False
    """Whether the number may be at most the limit; else it is to be at least that."""
    gpus: tuple[str, ...] = HOPPER
    """Of which the names of GPUs have one, for which the limit is meant."""

    def is_for(self, gpu: str | None) -> bool:
        """Whether there is a limit for the GPU of this name; None: any."""
        return self.limit is not None and (gpu is None or any(name in gpu for name in self.gpus))

    def met(self, value: float) -> bool:
        """Whether the number is reached; one that is not a number is not."""
        if self.limit is None:
            return True
        return value <= self.limit if self.most else value >= self.limit

    def text(self, value: float) -> str:
        """A number with its unit, three digits; infinity is "none"."""
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
        if self.limit is None:
            return f"({self.unit})"
        where = "" if self.gpus == HOPPER else f" on {' or '.join(self.gpus)}"
        return f"{'<=' if self.most else '>='} {self.text(self.limit)}{where}"


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

    def values_of(self, by_unit: dict[str, float]) -> tuple[float, ...]:
        """The numbers of the bounds by their units; none where one is missing."""
        units = [bound.unit for bound in self.bounds]
        return tuple(by_unit[unit] for unit in units) if by_unit.keys() >= set(units) else ()

    @property
    def place(self) -> tuple:
        """What figures share that are measured in one run."""
        return (self.kind, self.case)


@dataclass
class Result:
    """What came of a figure."""

    figure: Figure
    status: str = "ok"
    """"ok", or why there are no numbers: "wrong: ...", "out of memory", "failed: ...", "not
    measured: ...".
    """
    seconds: Quartiles | None = None
    floor_seconds: float | None = None
    sdpa: float | str | None = None
    """Seconds of ``scaled_dot_product_attention``, or of the model with it; or why there are none.
    """
    flash: float | str | None = None
    """Seconds of FlashAttention, as ``scaled_dot_product_attention`` has it; or why there are none.
    """
    flex: float | str | None = None
    """Seconds of ``flex_attention``, compiled; or why there are none."""
    eager: float | str | None = None
    """Seconds of the same form in PyTorch's own operations; or why there are none."""
    values: tuple[float, ...] = ()
    """The numbers of the bounds."""
    error: float | None = None
    """Largest relative error of an output or a gradient."""
    notes: list[str] = field(default_factory=list)
    gpu: str | None = None
    """Name of the GPU; None: one for which the marks are meant."""

    @property
    def broken(self) -> bool:
        """Whether something is not as it should be, as distinct from slow or large."""
        return self.status.startswith(("wrong", "failed"))

    @property
    def reached(self) -> str:
        """ "yes" or "no"; without numbers the status, and "no mark" where none is meant for this
        GPU.
        """
        if self.status != "ok":
            return self.status
        if not self.values:
            return "not measured"
        pairs = zip(self.figure.bounds, self.values, strict=True)
        met = [bound.met(value) for bound, value in pairs if bound.is_for(self.gpu)]
        return "no mark" if not met else "yes" if all(met) else "no"

    @property
    def expected(self) -> "Expected | None":
        """What counts of machine code say that it comes to; None where they say nothing."""
        from visionattn.lab.gpu.expected import expected_on

        return expected_on(self.gpu, self.figure)

    def record(self) -> Record:
        """The result as plain values."""
        figure, seconds = self.figure, self.seconds
        record = {
            "what": figure.what,
            "size": figure.size,
            "dtype": figure.case.dtype,
            "status": self.status,
        }
        record |= {
            f"seconds_{name}": getattr(seconds, name, None) for name in ("median", "low", "high")
        }
        fraction = self.floor_seconds / seconds.median if seconds and self.floor_seconds else None
        record |= {
            "floor_seconds": self.floor_seconds,
            "of_floor": fraction,
            "sdpa_seconds": self.sdpa,
        }
        record |= {
            "flash_seconds": self.flash,
            "flex_seconds": self.flex,
            "eager_seconds": self.eager,
        }
        expected = self.expected
        record |= {"expected_seconds": expected and expected.seconds}
        record |= {"reach": figure.reach, "expected": expected and expected.text(figure)}
        record["measured"] = [
            value if math.isfinite(value) else None for value in self.values
        ] or None
        record |= {"shown": self.shown, "reached": self.reached, "error": self.error}
        return record | {"note": "; ".join(self.notes) or None}

    @property
    def shown(self) -> str | None:
        """The numbers of the bounds in words."""
        return (
            ", ".join(
                bound.text(value)
                for bound, value in zip(self.figure.bounds, self.values, strict=False)
            )
            or None
        )

    def cells(self) -> list[str | None]:
        """The result for people, under ``COLUMNS``."""
        record = self.record()
        times = [milliseconds(record[name]) for name in COLUMNS_OF_TIME]
        fraction = None if record["of_floor"] is None else f"{100 * record['of_floor']:.0f} %"
        error = None if self.error is None else f"{self.error:.1e}"
        named = [record[name] for name in ("what", "size", "dtype")]
        marks = [record[name] for name in ("reach", "expected", "shown", "reached")]
        return [*named, *times[:2], fraction, *times[2:], *marks, error, record["note"]]


COLUMNS_OF_TIME = (
    "seconds_median",
    "floor_seconds",
    "sdpa_seconds",
    "flash_seconds",
    "flex_seconds",
    "eager_seconds",
)


def milliseconds(seconds: float | str | None) -> str | None:
    """Three digits, in milliseconds; a reason as it is."""
    return seconds if seconds is None or isinstance(seconds, str) else f"{1e3 * seconds:.3g} ms"


def operation(
    name: str,
    tokens: int,
    width: int,
    form: str = "efficient",
    *,
    backward: bool = False,
    batch: int = BATCH,
) -> Case:
    """An operation in bfloat16; TaylorShift has a temperature, as in the models."""
    return Case("operation", name, tokens, width, form, "bfloat16", backward, batch, HEADS)


def published(batch: int) -> Case:
    """A ViT-B of 8,192 tokens: 12.86 ms with softmax, 8.27 with the best hybrid, 7.37 with linear
    attention alone are published for an H100, in eager PyTorch."""
    case = Case("model", "scaleformer_vit_b", 1024, None, "auto", "bfloat16", False, batch)
    return replace(case, image_width=2048)


def model(pixels: int, backward: bool = False) -> Case:
    """A batch of images that are ``TOKENS_PER_RUN`` patches together, or one image that is
    larger.
    """
    batch = max(1, TOKENS_PER_RUN // (pixels // 16) ** 2)
    return Case("model", "scaleformer_vit_s", pixels, None, "auto", "bfloat16", backward, batch)


def all_figures() -> list[Figure]:
    """The whole table, in order."""
    return [
        *_operation_figures(),
        *_model_figures(),
        *_large_figures(),
        *_latency_figures(),
        *_crossover_figures(),
    ]


RATES = (Bound(None, "TFLOP/s"), Bound(None, "TFLOP/s of SDPA"))
"""Of two products each, over the time."""


def _operation_figures() -> list[Figure]:
    copy, matmul, faster = "% of the copy", "% of the matmul", "x SDPA"
    shift = "taylorshift+temperature"
    rows = [
        ("kernelized forward", operation("kernelized", 65_536, 64), Bound(0.70, copy)),
        (
            "kernelized forward+backward",
            operation("kernelized", 65_536, 64, backward=True),
            Bound(0.60, copy),
        ),
        ("efficient TaylorShift forward", operation(shift, 65_536, 64), Bound(0.50, matmul)),
        ("efficient TaylorShift forward", operation(shift, 65_536, 32), Bound(0.35, matmul)),
        (
            "efficient TaylorShift forward+backward",
            operation(shift, 16_384, 32, backward=True),
            Bound(15, faster),
        ),
        (
            "direct TaylorShift forward",
            operation(shift, 4096, 64, "direct"),
            Bound(1, faster),
            *RATES,
        ),
    ]
    size = "d = {0.width}, N = {0.size:,}, B*h = {1}"
    return [
        Figure(what, size.format(case, case.batch * HEADS), "operation", case, tuple(bounds))
        for what, case, *bounds in rows
    ]


def _crossover_figures() -> list[Figure]:
    what = "crossover of direct and efficient TaylorShift, forward"
    limits = ((16, 400), (32, 1200), (64, 3700))
    cases = [
        (operation("taylorshift+temperature", limit, d), Bound(limit, "tokens", most=True))
        for d, limit in limits
    ]
    return [
        Figure(what, f"d = {case.width}, GPU filled", "crossover", case, (bound,))
        for case, bound in cases
    ]


def _model_figures() -> list[Figure]:
    figures = []
    for pixels, limit in ((1024, 1.5), (2048, 4), (4096, 14)):
        case = model(pixels)
        size = f"{pixels} px, batch {case.batch}"
        for other, bound, words in (
            ("vit_small_patch16_224", Bound(limit, "x images/s"), "timm's ViT-S with SDPA"),
            ("scaleformer_vit_s+identity", Bound(0.8, "x images/s"), "its identity-attention twin"),
        ):
            figures.append(
                Figure(
                    f"scaleformer_vit_s inference / {words}", size, "model", case, (bound,), other
                )
            )
    for batch in (1, 8):
        case = published(batch)
        size = f"1024 x 2048 px, batch {batch}"
        time = Bound(6.0 * batch, "ms", most=True, gpus=("H100",))
        for other, bounds, words in (
            ("vit_base_patch16_224", (time, Bound(None, "x images/s")), "timm's ViT-B with SDPA"),
            (
                "scaleformer_vit_b+identity",
                (Bound(None, "x images/s"),),
                "its identity-attention twin",
            ),
        ):
            figures.append(
                Figure(f"scaleformer_vit_b inference / {words}", size, "model", case, bounds, other)
            )
    return figures


def _latency_figures() -> list[Figure]:
    figures = []
    for pixels in (224, 384, 512, 768, 1024):
        limit = 1 if pixels >= NO_SLOWER_FROM else None
        bounds = (Bound(limit, WITH_GRAPH), Bound(limit, WITHOUT_GRAPH))
        case = replace(model(pixels), batch=1)
        what = "scaleformer_vit_s latency / timm's ViT-S with SDPA"
        figures.append(
            Figure(what, f"{pixels} px, batch 1", "latency", case, bounds, "vit_small_patch16_224")
        )
    return figures


def _large_figures() -> list[Figure]:
    image, step = model(16_384), model(2048, backward=True)
    below = (Bound(1, "s", most=True), Bound(24, "GiB", most=True))
    against = (Bound(3, "x steps/s"), Bound(1.02, "x memory", most=True))
    what = "scaleformer_vit_s, one image, plain forward"
    trained = f"2048 px, batch {step.batch}"
    return [
        Figure(what, "16384 x 16384 px, 1,048,576 tokens", "image", image, below),
        Figure(
            "scaleformer_vit_s training step / ViT-S with SDPA",
            trained,
            "training",
            step,
            against,
            "vit_small_patch16_224",
        ),
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
        raise ValueError(
            f"--only {pattern!r} fits none of {len(names)} rows; the first is {names[0]!r}"
        )
    return chosen
