"""List the rows of the GPU table: operations and models, their sizes, and their targets on an
NVIDIA H100 or H200. This module measures nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from visionattn.lab.cases import Case
from visionattn.lab.targets import choose_rows

BATCH = 2
"""Batch size of an operation, with six heads per image: enough to fill a GPU."""
TOKENS_PER_RUN = 65_536
"""Patches of all images in a batch of a timed model."""
SHIFT = "taylorshift+temperature"
MOST = ("seconds", "gib", "x_memory")
"""Targets that are upper limits; all others are lower limits."""
REHEARSED_TOKENS, REHEARSED_PIXELS = 40, 32


@dataclass(frozen=True)
class GpuRow:
    """A row of the table.

    Args:
        sdpa: the baseline of a model: timm's model with ``scaled_dot_product_attention``. The
            baseline of an operation is that function itself.
        reach: targets by column: "of_floor", "x_sdpa" and "x_identity" (speed relative to SDPA and
            to the same network without attention), "seconds", "gib", "x_memory" (relative to the
            model with SDPA).
    """

    what: str
    case: Case
    sdpa: str | None = None
    reach: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> str:
        """The size as text."""
        case = self.case
        if case.kind == "operation":
            return f"d = {case.width}, N = {case.size:,}, B*h = {case.batch * case.heads}"
        return f"{case.size} x {case.image_width or case.size} px, batch {case.batch}"

    @property
    def name(self) -> str:
        """The text that the regular expression of ``--only`` searches."""
        return f"{self.what} {self.size}"


def operation(name: str, tokens: int, width: int, form: str = "efficient", **more) -> Case:
    """Return an operation in bfloat16; TaylorShift has a temperature, as in the models."""
    return Case(
        "operation", name, tokens, width, form, **dict(dtype="bfloat16", batch=BATCH) | more
    )


def model(pixels: int, name: str = "scaleformer_vit_s", **more) -> Case:
    """Return a model in bfloat16 with ``TOKENS_PER_RUN`` patches in a batch, or with one larger
    image.
    """
    batch = max(1, TOKENS_PER_RUN // (pixels // 16) ** 2)
    return Case("model", name, pixels, **dict(dtype="bfloat16", batch=batch) | more)


def all_rows() -> list[GpuRow]:
    """Return all rows, the most important first."""
    return [*_operations(), *_models()]


def _operations() -> Iterator[GpuRow]:
    linear, joint, shift = "kernelized", "kernelized with Joint", "efficient TaylorShift"
    both = dict(backward=True)
    for what, case, reach in (
        (f"{linear} forward", operation(linear, 65_536, 64), {"of_floor": 0.7}),
        (f"{linear} forward+backward", operation(linear, 65_536, 64, **both), {"of_floor": 0.6}),
        (f"{shift} forward", operation(SHIFT, 65_536, 64), {"of_floor": 0.5}),
        (f"{shift} forward", operation(SHIFT, 65_536, 32), {"of_floor": 0.35}),
        (f"{shift} forward+backward", operation(SHIFT, 16_384, 32, **both), {"x_sdpa": 15}),
        ("direct TaylorShift forward", operation(SHIFT, 4096, 64, "direct"), {"x_sdpa": 1}),
        ("direct TaylorShift forward+backward", operation(SHIFT, 4096, 64, "direct", **both), {}),
        (f"{joint} forward", operation(f"{linear}+joint", 16_384, 64), {}),
        (f"{joint} forward+backward", operation(f"{linear}+joint", 16_384, 64, **both), {}),
        (f"{linear} forward", operation(linear, 1024, 64), {}),
        (f"{shift} forward", operation(SHIFT, 1024, 32), {}),
    ):  # fmt: skip
        yield GpuRow(what, case, reach=reach)


def _models() -> Iterator[GpuRow]:
    small, what = "vit_small_patch16_224", "scaleformer_vit_s inference"
    for pixels, batch, speed in (
        (512, 1, 1), (512, 64, None), (1024, 1, 1), (1024, 16, 1.5), (2048, 4, 4), (4096, 1, 14)
    ):  # fmt: skip
        reach = {"x_identity": 0.8} if batch > 1 or pixels > 1024 else {}
        reach |= {} if speed is None else {"x_sdpa": speed}
        yield GpuRow(what, model(pixels, batch=batch), small, reach)
    # Published for this ViT-B with 8,192 tokens on an H100 in eager PyTorch: 12.86 ms with softmax,
    # 8.27 ms with the best hybrid, 7.37 ms with linear attention only.
    for batch in (1, 8):
        case = model(1024, "scaleformer_vit_b", batch=batch, image_width=2048)
        reach = {"seconds": 0.006 * batch}
        yield GpuRow("scaleformer_vit_b inference", case, "vit_base_patch16_224", reach)
    reach = {"seconds": 1, "gib": 24}
    yield GpuRow("scaleformer_vit_s, one image", model(16_384), reach=reach)
    step = model(2048, dtype="float32", amp="bf16", backward=True, update=True)
    reach = {"x_sdpa": 3, "x_memory": 1.02}
    yield GpuRow("scaleformer_vit_s training step", step, small, reach)


def chosen(only: str | None, *, rehearse: bool = False) -> list[GpuRow]:
    """Return the rows whose name matches the regular expression. For a rehearsal, return one row of
    each kind, at a size that Triton's interpreter handles quickly.

    Raises:
        ValueError: ``only`` is not a regular expression, or matches no row.
    """
    rows = all_rows()
    if rehearse:
        first = {(row.what, row.sdpa): row for row in reversed(rows)}
        rows = [replace(row, case=small_case(row.case)) for row in reversed(first.values())]
    return [rows[i] for i in choose_rows(only, [row.name for row in rows])]


def small_case(case: Case) -> Case:
    """Return a small case for a rehearsal, in float16: the interpreter is wrong in bfloat16."""
    dtype = case.dtype.replace("bfloat16", "float16")
    if case.kind == "operation":
        return replace(case, size=REHEARSED_TOKENS, batch=1, heads=1, width=16, dtype=dtype)
    wide = case.image_width and 2 * REHEARSED_PIXELS
    sizes = dict(size=REHEARSED_PIXELS, image_width=wide, batch=min(case.batch, 2), depth=1)
    return replace(case, dtype=dtype, amp=case.amp.replace("bf16", "fp16"), **sizes)
