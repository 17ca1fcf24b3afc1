"""Number of rows per band, and whether tokens are in memory or in files, under a memory limit."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod

from torch import nn

from visionattn.cli.memory import memory_there_is, taken_bytes
from visionattn.cli.tables import sized
from visionattn.layers import Attention
from visionattn.layout import Grid
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.rowwise_support import weight_like
from visionattn.models.segmentation import Segmenter

BAND_TOKENS = 1 << 16
"""Maximum number of tokens per band; more do not help."""
VECTORS = 20
"""Memory of a token while its band is processed, in vectors as wide as the model; measured."""
CLASS_COPIES = 6
"""Number of copies in memory of the keys per class while they are laid out for a band."""
PIXEL_COPIES = 3
"""Number of copies in memory of the probabilities of a band while they are written."""
WORKING_BYTES = 3 << 23
"""Maximum memory of operations in addition to their operands, for any band: pieces that stay in
cache. A limit does not include it.
"""
SHARE = 0.8
"""Share of the available memory that is used unless a limit is given."""
Bands = list[tuple[int, int]]
"""First row and end (exclusive) of each band, from the top."""


def bands_of(height: int, rows: int, attn: Attention | None = None) -> Bands:
    """Return bands of about ``rows`` rows, which do not split windows of the attention; the last
    may be smaller.
    """
    window, begin = 1, 0
    if attn is not None and attn.kind.windows:
        window = attn.window_size
        begin = window // 2 if attn.shifted else 0
    step = max(1, rows // window) * window
    return list(pairwise([0, *range(begin + step, height, step), height]))


@dataclass(frozen=True)
class BandPlan:
    """The plan of a pass."""

    rows: int
    """Rows of patches per band."""
    mapped: bool
    """Whether tokens are in memory-mapped files."""
    line: str
    """Description of the plan, for people."""


class BelowOneBand(ValueError):
    """The memory limit is below one band; the message states the memory of a band."""


def plan(
    body: VisionAttnTransformer,
    grid: Grid,
    memory: int | None,
    want: str,
    model: nn.Module,
    *,
    rows: int | None = None,
    in_files: bool = False,
) -> BandPlan:
    """Return the plan of a pass.

    Args:
        body: the model, or the body of a ``Segmenter``.
        grid: patches of the image.
        memory: limit in bytes; None: 80 % of the available memory.
        want: as for ``forward_tiled``.
        model: the model with its head.
        rows: rows per band of a resumed pass.
        in_files: keep tokens in files even if they fit in memory.

    Raises:
        BelowOneBand: the memory limit is below one band.
    """
    device, bound = weight_like(body).device, f"memory {sized(memory or 0)}"
    if memory is None and (there := memory_there_is(device)) is not None:
        memory, bound = int(SHARE * (there - taken_bytes(device))), "the available memory"
    held = _held_bytes(body, grid, want, model)
    least = min(_least_rows(body), grid.height)
    usual = max(least, min(grid.height, -(-BAND_TOKENS // grid.width)))
    row = grid.width * prod(body.patch_embed.patch_size) * PIXEL_COPIES * 2  # float16
    row *= model.num_classes if want == "probabilities" else 0
    mapped = False
    if rows is None:
        takes = {
            each: _band_bytes(body, grid, each) + each * row for each in range(least, usual + 1)
        }
        room = inf if memory is None else memory
        # Tokens in memory first, with bands of as many rows as fit.
        fitting = [
            (in_map, each)
            for in_map in (False, True)
            for each in reversed(takes)
            if takes[each] + (0 if in_map else held) <= room
        ]
        if not fitting:
            fewest = min(takes, key=takes.__getitem__)
            said = "1 row" if fewest == 1 else f"{fewest} rows"
            raise BelowOneBand(
                f"{bound} is below one band: {sized(takes[fewest])} for {said} of {grid.width} "
                "patches"
            )
        mapped, rows = fitting[0]
    bands, mapped = -(-grid.height // rows), mapped or in_files
    line = (
        f"{grid.height} x {grid.width} patches in {bands} band{'s' * (bands > 1)}, tokens in "
        f"{'files' if mapped else 'memory'} ({sized(held)})"
    )
    return BandPlan(rows, mapped, line)


def _held_bytes(body: VisionAttnTransformer, grid: Grid, want: str, model: nn.Module) -> int:
    """Return the bytes kept for all patches: their tokens before and after a block, and likewise
    logits of cells.
    """
    wide = body.embed_dim
    if want in ("masks", "probabilities") and isinstance(model, Segmenter) and len(model.taken) > 1:
        wide += model.cell_logits
    return 2 * grid.num_patches * wide * weight_like(body).element_size()


def _band_bytes(body: VisionAttnTransformer, grid: Grid, rows: int) -> int:
    """Return the memory of bands with this many rows.

    It covers one band with its halo, a row for the sums on either side, and these sums for each
    band of the two layers in progress.
    """
    classes, halo, far = 0, 0, 0
    pixels = body.in_chans * prod(body.patch_embed.patch_size)
    bands = -(-grid.height // rows)
    for block in body.blocks:
        tables, conv = block.attn.relative, block.attn.value_conv
        if conv is not None:
            halo = max(halo, conv.reach)
        if tables is None or block.attn.kind.windows:
            continue
        if tables.kind == "joint":
            halo, classes = max(halo, tables.horizon), max(classes, (2 * tables.horizon + 1) ** 2)
            far = 4 * bands * grid.width * body.embed_dim
        elif tables.kind == "flat":
            halo = max(halo, -(-tables.horizon // grid.width))
            classes = max(classes, 2 * tables.horizon + 1)
        else:
            longest = min(tables.horizon, max(grid))
            far = max(far, 4 * longest * body.embed_dim)
    token = VECTORS * body.embed_dim + max(3 * pixels, CLASS_COPIES * classes)
    high = min(rows + 2 * halo, grid.height) + 2
    return weight_like(body).element_size() * (token * high * grid.width + far)


def _least_rows(body: VisionAttnTransformer) -> int:
    """Return the minimum number of rows per band: one, or one and a half windows."""
    sides: list[int] = [
        block.attn.window_size + block.attn.window_size // 2
        for block in body.blocks
        if block.attn.kind.windows
    ]
    return max([1, *sides])
