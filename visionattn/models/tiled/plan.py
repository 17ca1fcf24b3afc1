"""How many rows a band has, and whether tokens are in memory or in files, under a bound of
memory.
"""

from dataclasses import dataclass

from torch import nn

from visionattn.cli.memory import memory_there_is, taken_bytes
from visionattn.cli.tables import sized
from visionattn.layout import Grid
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.segmentation import Segmenter

BAND_TOKENS = 1 << 16
"""Tokens of a band where memory does not ask for fewer: more of them gain nothing."""
VECTORS = 20
"""Vectors as wide as the model that a token of a band takes while it is worked on, measured."""
SHARE = 0.8
"""The share of the memory there is that is used unless a bound is given."""


@dataclass(frozen=True)
class Plan:
    """How a pass is done."""

    rows: int
    """Rows of patches of a band."""
    mapped: bool
    """Whether tokens are in files that are mapped into memory."""
    line: str
    """What it will take, in words."""


def plan(
    body: VisionAttnTransformer, grid: Grid, memory: int | None, want: str, model: nn.Module
) -> Plan:
    """Return how a pass is done within ``memory`` bytes; None: within what there is.

    Raises:
        ValueError: the bound is below one band.
    """
    weight = body.patch_embed.proj.weight
    there = None
    if memory is None:
        there = memory_there_is(weight.device)
        memory = None if there is None else int(SHARE * (there - taken_bytes(weight.device)))
    held = _held_bytes(body, grid, want, model)
    least = _least_rows(body)
    row = grid.width * _token_bytes(body)
    usual = max(least, min(grid.height, -(-BAND_TOKENS // grid.width)))
    if memory is None:
        rows, mapped = usual, False
    else:
        mapped = held + row * least > memory
        rows = (memory - (0 if mapped else held)) // row
        if rows < least:
            bound = "the memory there is" if there is not None else f"memory {sized(memory)}"
            fewest = "1 row" if least == 1 else f"{least} rows"
            raise ValueError(
                f"{bound} is below one band: {sized(row * least)} for {fewest} of {grid.width} "
                "patches"
            )
        rows = min(rows, usual)
    rows = min(rows, grid.height)
    bands = -(-grid.height // rows)
    where = "in files" if mapped else "in memory"
    line = (
        f"{grid.height} x {grid.width} patches in {bands} band{'s' * (bands > 1)}, tokens {where} "
        f"({sized(held)})"
    )
    return Plan(rows, mapped, line)


def _held_bytes(body: VisionAttnTransformer, grid: Grid, want: str, model: nn.Module) -> int:
    """Return what is held of all tokens: themselves, the values of a layer, and logits of cells."""
    wide = 2 * body.embed_dim
    if isinstance(model, Segmenter) and len(model.taken) > 1 and want == "masks":
        wide += model.head.out_channels
    return grid.num_patches * wide * body.patch_embed.proj.weight.element_size()


def _token_bytes(body: VisionAttnTransformer) -> int:
    """Return what a token of a band takes."""
    size = body.patch_embed.proj.weight.element_size()
    down, across = body.patch_embed.patch_size
    pixels = body.patch_embed.proj.in_channels * down * across
    classes = 0
    for block in body.blocks:
        tables = block.attn.relative
        if tables is not None and tables.kind == "joint" and not block.attn.kind.windows:
            classes = max(classes, (2 * tables.horizon + 1) ** 2)
    return size * (VECTORS * body.embed_dim + max(3 * pixels, 4 * classes))


def _least_rows(body: VisionAttnTransformer) -> int:
    """Return the fewest rows that a band may have: one, or those of a window and a half."""
    sides: list[int] = [
        block.attn.window_size + block.attn.window_size // 2
        for block in body.blocks
        if block.attn.kind.windows
    ]
    return max([1, *sides])
