"""The figures that kernels and models are to reach on an NVIDIA H100 or H200 in bfloat16, and what
they come to.

It measures nothing.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from visionattn.cli.tables import Record
from visionattn.lab.cases import Case
from visionattn.lab.targets import Bound, Result, Target

if TYPE_CHECKING:
    from visionattn.lab.gpu.expected import Expected

COLUMNS = ("what", "size", "dtype", "time", "floor", "of floor", "SDPA", "Flash", "flex", "eager")
COLUMNS += ("reach", "expected", "measured", "reached", "error", "note")
WITH_GRAPH, WITHOUT_GRAPH = "x ViT-S's with a graph", "x ViT-S's without"
"""Units of speed at batch 1."""
BATCH, HEADS = 2, 6
NO_SLOWER_FROM = 512
"""Pixels from which on one image is to take no longer than through timm's ViT-S."""
TOKENS_PER_RUN = 65_536
"""Patches of all images of a batch that a model is timed with."""
KINDS = ("operation", "model", "image", "training", "latency", "crossover")
"""In the order in which they are measured: what is wanted most comes first."""


@dataclass
class GpuResult(Result):
    """What came of a target on a GPU."""

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
    error: float | None = None
    """Largest relative error of an output or a gradient."""
    notes: list[str] = field(default_factory=list)

    @property
    def expected(self) -> "Expected | None":
        """What counts of machine code say that it comes to; None where they say nothing."""
        from visionattn.lab.gpu.expected import expected_on

        return expected_on(self.gpu, self.target)

    def record(self) -> Record:
        """Return the result as plain values."""
        figure, seconds = self.target, self.seconds
        record = {
            "what": figure.what,
            "size": figure.at,
            "dtype": figure.case.precision,
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

    def cells(self) -> list[str | None]:
        """Return the result for people, under ``COLUMNS``."""
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
    """Return an operation in bfloat16; TaylorShift has a temperature, as in the models."""
    return Case("operation", name, tokens, width, form, "bfloat16", backward, batch, HEADS)


def published(batch: int) -> Case:
    """Return a ViT-B of 8,192 tokens: 12.86 ms with softmax, 8.27 with the best hybrid, 7.37 with
    linear attention alone are published for an H100, in eager PyTorch.
    """
    sizes = dict(dtype="bfloat16", batch=batch, image_width=2048)
    return Case("model", "scaleformer_vit_b", 1024, **sizes)


def model(pixels: int) -> Case:
    """Return a batch of images that are ``TOKENS_PER_RUN`` patches together, or one image that is
    larger.
    """
    batch = max(1, TOKENS_PER_RUN // (pixels // 16) ** 2)
    return Case("model", "scaleformer_vit_s", pixels, dtype="bfloat16", batch=batch)


def all_targets() -> list[Target]:
    """Return the whole table, in order."""
    return [
        *_operation_figures(),
        *_model_figures(),
        *_large_figures(),
        *_latency_figures(),
        *_crossover_figures(),
    ]


RATES = (Bound(None, "TFLOP/s"), Bound(None, "TFLOP/s of SDPA"))
"""Of two products each, over the time."""


def _operation_figures() -> list[Target]:
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
        Target(what, size.format(case, case.batch * HEADS), "operation", case, tuple(bounds))
        for what, case, *bounds in rows
    ]


def _crossover_figures() -> list[Target]:
    what = "crossover of direct and efficient TaylorShift, forward"
    limits = ((16, 400), (32, 1200), (64, 3700))
    cases = [
        (operation("taylorshift+temperature", limit, d), Bound(limit, "tokens", most=True))
        for d, limit in limits
    ]
    return [
        Target(what, f"d = {case.width}, GPU filled", "crossover", case, (bound,))
        for case, bound in cases
    ]


def _model_figures() -> list[Target]:
    figures = []
    for pixels, limit in ((1024, 1.5), (2048, 4), (4096, 14)):
        case = model(pixels)
        size = f"{pixels} px, batch {case.batch}"
        for other, bound, words in (
            ("vit_small_patch16_224", Bound(limit, "x images/s"), "timm's ViT-S with SDPA"),
            ("scaleformer_vit_s+identity", Bound(0.8, "x images/s"), "its identity-attention twin"),
        ):
            figures.append(
                Target(
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
                Target(f"scaleformer_vit_b inference / {words}", size, "model", case, bounds, other)
            )
    return figures


def _latency_figures() -> list[Target]:
    figures = []
    for pixels in (224, 384, 512, 768, 1024):
        limit = 1 if pixels >= NO_SLOWER_FROM else None
        bounds = (Bound(limit, WITH_GRAPH), Bound(limit, WITHOUT_GRAPH))
        case = replace(model(pixels), batch=1)
        what = "scaleformer_vit_s latency / timm's ViT-S with SDPA"
        figures.append(
            Target(what, f"{pixels} px, batch 1", "latency", case, bounds, "vit_small_patch16_224")
        )
    return figures


def _large_figures() -> list[Target]:
    image = model(16_384)
    step = replace(model(2048), dtype="float32", amp="bf16", backward=True, update=True)
    below = (Bound(1, "s", most=True), Bound(24, "GiB", most=True))
    against = (Bound(3, "x steps/s"), Bound(1.02, "x memory", most=True))
    what = "scaleformer_vit_s, one image, plain forward"
    trained = f"2048 px, batch {step.batch}"
    return [
        Target(what, "16384 x 16384 px, 1,048,576 tokens", "image", image, below),
        Target(
            "scaleformer_vit_s training step / ViT-S with SDPA",
            trained,
            "training",
            step,
            against,
            "vit_small_patch16_224",
        ),
    ]
