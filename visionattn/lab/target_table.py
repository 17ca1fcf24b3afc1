"""The one table of figures to reach: on two cores in float32, and on an NVIDIA H100 or H200 in
bfloat16. It measures nothing.

What is compared on two cores has six heads and one image; what a GPU times is large enough to fill
it.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from visionattn.lab.cases import Case
from visionattn.lab.targets import (
    Bound,
    Target,
    choose_rows,
    growth_of_bytes_kept,
    memory_over_inputs,
)

WITH_GRAPH, WITHOUT_GRAPH = "x ViT-S's with a graph", "x ViT-S's without"
"""Units of speed at batch 1."""
BATCH, HEADS = 2, Case.heads
"""Images and heads of an operation on a GPU."""
NO_SLOWER_FROM = 512
"""Pixels from which on one image is to take no longer than through timm's ViT-S."""
TOKENS_PER_RUN = 65_536
"""Patches of all images of a batch that a model is timed with."""
KINDS = ("operation", "model", "image", "training", "latency", "crossover")
"""The kinds of figures, as a GPU measures them: what is wanted most comes first."""
SHIFT = "taylorshift+temperature"
RATES = (Bound(None, "TFLOP/s"), Bound(None, "TFLOP/s of SDPA"))
"""The rates of the two products of attention: ours, and SDPA's."""


def targets() -> list[Target]:
    """Return the figures of a processor, in order."""
    return [*_operations(), _memory(), *_models(), *_kept()]


def gpu_targets() -> list[Target]:
    """Return the figures of a GPU, in order."""
    figures = (_gpu_operations(), _gpu_models(), _gpu_large(), _gpu_latencies(), _gpu_crossovers())
    return [figure for some in figures for figure in some]


def choose(pattern: str | None) -> list[Target]:
    """Return the targets of a processor whose text, ``what at``, contains the regular expression;
    see ``choose_rows``.
    """
    every = targets()
    return [every[i] for i in choose_rows(pattern, [target.name for target in every])]


# On a processor


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


def operation(name: str, tokens: int, width: int, form: str = "efficient", **more) -> Case:
    """Return an operation; ``more`` is of ``Case``."""
    return Case("operation", name, tokens, width, form, **more)


def _operations() -> Iterator[Target]:
    for words, tokens, backward, limits in (
        ("forward / SDPA", 4096, False, (0.18, 0.38, 1.0)),
        ("forward / SDPA", 16384, False, (0.05, 0.12, 0.28)),
        ("forward+backward / SDPA's", 4096, True, (0.25, 0.4, 1.0)),
    ):
        for width, limit in zip((16, 32, 64), limits, strict=True):
            case = operation("taylorshift", tokens, width, backward=backward)
            base = replace(case, name="sdpa", form="auto")
            what, at = f"efficient TaylorShift {words}", f"N = {tokens}, d = {width}"
            yield make_target(what, at, case, base, high=limit)
    for what, name, form, tokens, limit in (
        ("direct TaylorShift", "taylorshift", "direct", 4096, 1.3),
        ("kernelized", "kernelized", "efficient", 16384, 0.025),
        ("kernelized + Joint R = 3", "kernelized+joint", "efficient", 16384, 0.045),
    ):
        case, base = operation(name, tokens, 64, form), operation("sdpa", tokens, 64, "auto")
        yield make_target(f"{what} forward / SDPA", f"N = {tokens}, d = 64", case, base, high=limit)
    chunked = operation("kernelized+causal", 4096, 64)
    for words, base, limit in (
        ("quadratic masked", operation("eager-kernelized+causal", 4096, 64, "auto"), 0.1),
        (
            "our quadratic blocks, which skip the future",
            operation("kernelized+causal", 4096, 64, "direct"),
            None,
        ),
    ):
        what = f"causal kernelized, chunked / {words}"
        yield make_target(what, "N = 4096, d = 64", chunked, base, high=limit)


def _memory() -> Target:
    what = "memory above inputs and output, efficient TaylorShift forward / size of q, k, v"
    case = operation("taylorshift", 65536, 64)
    return make_target(what, "N = 65536, d = 64", case, high=1.0, measure=memory_over_inputs)


def _models() -> Iterator[Target]:
    ours, timm = "scaleformer_vit_s", "vit_small_patch16_224"
    twin = f"{ours}+identity"
    for name, base, limits in (
        (ours, timm, (0.47, 0.16)),
        (ours, twin, (1.3, 1.3)),
        ("taylorshift_vit_s+heads=12", timm, (0.7, 0.24)),
        (twin, timm, (None, None)),
    ):
        for pixels, limit in zip((1024, 2048), limits, strict=True):
            case, other = (Case("model", model, pixels) for model in (name, base))
            yield make_target(f"{name} forward / {base}", f"{pixels} px", case, other, high=limit)


def _kept() -> Iterator[Target]:
    shift = ("", "+temperature", "+joint")
    kernelized = ("", "+relu", "+causal", "+joint", "+axial", "+flat")
    names = [f"taylorshift{more}" for more in shift] + [f"kernelized{more}" for more in kernelized]
    names += ["taylorshift+axial", "taylorshift+flat", "kernelized+causal+flat"]
    for name in [*names, "kernelized+softmax", "kernelized+favor"]:
        what = f"bytes kept for backward, N -> 2N, {name} efficient"
        case = operation(name, 4096, 64, backward=True)
        limits = dict(low=1.8, high=2.1, measure=growth_of_bytes_kept)
        yield make_target(what, "N = 4096 -> 8192, d = 64", case, **limits)


# On a GPU


def gpu_operation(name: str, tokens: int, width: int, form: str = "efficient", **more) -> Case:
    """Return an operation in bfloat16; TaylorShift has a temperature, as in the models."""
    return operation(name, tokens, width, form, **dict(dtype="bfloat16", batch=BATCH) | more)


def model(pixels: int) -> Case:
    """Return a batch of images that are ``TOKENS_PER_RUN`` patches together, or one image that is
    larger.
    """
    batch = max(1, TOKENS_PER_RUN // (pixels // 16) ** 2)
    return Case("model", "scaleformer_vit_s", pixels, dtype="bfloat16", batch=batch)


def published(batch: int) -> Case:
    """Return a ViT-B of 8,192 tokens: 12.86 ms with softmax, 8.27 with the best hybrid, 7.37 with
    linear attention alone are published for an H100, in eager PyTorch.
    """
    sizes = dict(dtype="bfloat16", batch=batch, image_width=2048)
    return Case("model", "scaleformer_vit_b", 1024, **sizes)


def _gpu_operations() -> Iterator[Target]:
    copy, matmul, faster = "% of the copy", "% of the matmul", "x SDPA"
    for what, case, *bounds in (
        ("kernelized forward", gpu_operation("kernelized", 65_536, 64), Bound(0.70, copy)),
        (
            "kernelized forward+backward",
            gpu_operation("kernelized", 65_536, 64, backward=True),
            Bound(0.60, copy),
        ),
        ("efficient TaylorShift forward", gpu_operation(SHIFT, 65_536, 64), Bound(0.50, matmul)),
        ("efficient TaylorShift forward", gpu_operation(SHIFT, 65_536, 32), Bound(0.35, matmul)),
        (
            "efficient TaylorShift forward+backward",
            gpu_operation(SHIFT, 16_384, 32, backward=True),
            Bound(15, faster),
        ),
        (
            "direct TaylorShift forward",
            gpu_operation(SHIFT, 4096, 64, "direct"),
            Bound(1, faster),
            *RATES,
        ),
    ):
        at = f"d = {case.width}, N = {case.size:,}, B*h = {case.batch * HEADS}"
        yield Target(what, at, "operation", case, tuple(bounds))


def _gpu_models() -> Iterator[Target]:
    speed = Bound(None, "x images/s")
    compared = [
        (model(px), "s", "small", (Bound(limit, "x images/s"),), (Bound(0.8, "x images/s"),))
        for px, limit in ((1024, 1.5), (2048, 4), (4096, 14))
    ]
    for batch in (1, 8):
        time = Bound(6.0 * batch, "ms", most=True, gpus=("H100",))
        compared.append((published(batch), "b", "base", (time, speed), (speed,)))
    for case, size, word, *bounds in compared:
        width = f" x {case.image_width}" if case.image_width else ""
        name, at = f"scaleformer_vit_{size}", f"{case.size}{width} px, batch {case.batch}"
        for other, bound, words in (
            (f"vit_{word}_patch16_224", bounds[0], f"timm's ViT-{size.upper()} with SDPA"),
            (f"{name}+identity", bounds[1], "its identity-attention twin"),
        ):
            yield Target(f"{name} inference / {words}", at, "model", case, bound, other)


def _gpu_large() -> Iterator[Target]:
    below = (Bound(1, "s", most=True), Bound(24, "GiB", most=True))
    what, at = "scaleformer_vit_s, one image, plain forward", "16384 x 16384 px, 1,048,576 tokens"
    yield Target(what, at, "image", model(16_384), below)
    step = replace(model(2048), dtype="float32", amp="bf16", backward=True, update=True)
    against = (Bound(3, "x steps/s"), Bound(1.02, "x memory", most=True))
    what, at = "scaleformer_vit_s training step / ViT-S with SDPA", f"2048 px, batch {step.batch}"
    yield Target(what, at, "training", step, against, "vit_small_patch16_224")


def _gpu_latencies() -> Iterator[Target]:
    for pixels in (224, 384, 512, 768, 1024):
        limit = 1 if pixels >= NO_SLOWER_FROM else None
        bounds = (Bound(limit, WITH_GRAPH), Bound(limit, WITHOUT_GRAPH))
        what, at = "scaleformer_vit_s latency / timm's ViT-S with SDPA", f"{pixels} px, batch 1"
        case = replace(model(pixels), batch=1)
        yield Target(what, at, "latency", case, bounds, "vit_small_patch16_224")


def _gpu_crossovers() -> Iterator[Target]:
    for width, limit in ((16, 400), (32, 1200), (64, 3700)):
        what = "crossover of direct and efficient TaylorShift, forward"
        bounds = (Bound(limit, "tokens", most=True),)
        case = gpu_operation(SHIFT, limit, width)
        yield Target(what, f"d = {width}, GPU filled", "crossover", case, bounds)
