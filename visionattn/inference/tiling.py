"""Predictions and features over overlapping tiles of images: what ``--tiles`` changes.

This module owns what its options do to a computation. ``models/large/tiles.py`` has the tiles;
images still come whole into memory.
"""

from typing import Literal, NamedTuple

from torch import nn

from visionattn.data.geometry import pixels
from visionattn.inference.opening import Opened
from visionattn.inference.options import InferenceOptions
from visionattn.inference.running import Compute
from visionattn.models.patches import last_map


class Work(NamedTuple):
    """What is computed of images."""

    compute: Compute
    batch_size: int | Literal["auto"]
    """Images at once, or ``auto``; 1 where ``batch_size`` counts tiles."""
    shown: nn.Module
    """What tells block by block how far a batch has come; with tiles nothing does."""
    lines: tuple[str, ...]
    """What is worth saying of the tiles."""


def work_of(
    options: InferenceOptions, opened: Opened, compute: Compute, *, masks: Compute | None = None
) -> Work:
    """Return what is computed: ``compute``, or with ``tiles`` what it gives of tiles, put together.

    Args:
        options: checked by ``check``.
        opened: the model.
        compute: which outputs of it are wanted; of maps without ``masks``, ``last_map``.
        masks: gives logits of pixels, where ``compute`` gives their classes.

    Raises:
        ValueError: tiles are no whole patches, or no image would be larger than one; one line.
    """
    if options.tiles is None:
        asked = options.batch_size or opened.usual_batch
        return Work(compute, asked, opened.model, ())
    from visionattn.models.large.tiles import cell_of, check_tiles, over_tiles, usual_overlap

    patch_px = cell_of(opened.model, "dense" if compute is last_map else "logits")
    overlap = options.overlap
    if overlap is None:
        overlap = usual_overlap(options.tiles, patch_px)
    check_tiles(options.tiles, overlap, patch_px)
    seen = opened.geometry.img_size
    if opened.geometry.fit == "pad":
        raise ValueError(
            "fit pad, as in training, adds to images what no tile should see: name another --fit, "
            "or leave --img-size out for images at their own sizes"
        )
    if seen is not None and max(seen) <= options.tiles:
        raise ValueError(
            f"tiles of {options.tiles} pixels do nothing: images are brought to {pixels(seen)} or "
            "less; name smaller tiles, or --img-size native"
        )
    found = over_tiles(
        masks or compute,
        tile=options.tiles,
        overlap=overlap,
        patch_px=patch_px,
        combine=options.combine or "mean",
        batch_size=options.batch_size or 1,
        masks=masks is not None,
    )
    how = {"mean": "the mean", "max": "the maximum"}[
        options.combine or "mean"
    ] + " of their outputs"
    how = "maps are blended" if masks or compute is last_map else how
    line = f"images are cut into tiles of {options.tiles} px that overlap by {overlap} px: {how}"
    return Work(found, 1, nn.Identity(), (line,))
