"""The figures to reach on two cores in float32, of six heads and one image; ``gpu/gpu_rows.py`` has
those of a GPU. It measures nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from visionattn.lab.cases import Case
from visionattn.lab.targets import (
    Target,
    choose_rows,
    growth_of_bytes_kept,
    memory_over_inputs,
)


def targets() -> list[Target]:
    """Return the figures of a processor, in order."""
    return [*_operations(), _memory(), *_models(), *_kept()]


def choose(pattern: str | None) -> list[Target]:
    """Return the targets of a processor whose text, ``what at``, contains the regular expression;
    see ``choose_rows``.
    """
    every = targets()
    return [every[i] for i in choose_rows(pattern, [target.name for target in every])]


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
    return Target(what, at, case, high, low or None, baseline, measure)


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
        ("taylorshift_vit_s", timm, (0.7, 0.24)),
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
