"""Whole images compared with tiles: the table of ``docs/large.md``.

    python docs/figures/large.py             # writes large.csv, an hour

Pretrained models classify test images of 2,048 px, whole and in overlapping tiles whose outputs are
combined in five ways. Seconds are interleaved. For peak memory, run ``forward_tiles`` in a process
of its own (``visionattn profile`` measures whole images).
"""

import sys
import time
from pathlib import Path

import numpy as np
import timm
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from pointing import examples

from visionattn.cli.files import write_text
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import csv_text
from visionattn.models.large.tiled_inference import tiling

PX, IMAGES = 2048, 200
PAGES = ((512, 64, 1), (1024, 128, 1))
CUTS = {
    "taylorshift_vit_documents": PAGES,
    "scaleformer_vit_documents": PAGES,
    "taylorshift_vit_canvas": ((128, 40, 16), (256, 40, 4), (512, 64, 1)),
}
"""Tile, overlap (no less than a mark or digit) and tiles at once."""
WAYS = {
    "mean of logits": lambda logits, features, head: logits.mean(0),
    "mean of probabilities": lambda logits, features, head: logits.softmax(1).mean(0),
    "maximum of logits": lambda logits, features, head: logits.amax(0),
    "maximum of probabilities": lambda logits, features, head: logits.softmax(1).amax(0),
    "maximum of features": lambda logits, features, head: head(features.amax(0)),
}


def of_tiles(model: nn.Module, inputs: Tensor, cut: tuple | None) -> tuple[Tensor, Tensor]:
    """Return logits and pooled features of all tiles (None: of the whole image)."""
    tile, overlap, at_once = cut or (PX, 0, 1)
    patch_px = tuple(model.patch_embed.patch_size)
    places = [(slice(None), slice(None))]
    if cut:
        places = list(tiling(*inputs.shape[2:], tile, overlap, patch_px).places())
    features = [
        model.forward_head(model.forward_features(torch.cat(batch)), pre_logits=True)
        for batch in (
            [inputs[:, :, rows, columns] for rows, columns in places[first : first + at_once]]
            for first in range(0, len(places), at_once)
        )
    ]
    return model.get_classifier()(torch.cat(features)), torch.cat(features)


def rows_of(name: str) -> list[dict]:
    """Return a row for the whole image and for each way of each kind of tiles."""
    model = timm.create_model(name, pretrained=True).eval()
    head, kinds = model.get_classifier(), (None, *CUTS[name])
    right: dict[tuple, list[bool]] = {}
    seconds: dict[tuple | None, list[float]] = {kind: [] for kind in kinds}
    patch_px = tuple(model.patch_embed.patch_size)
    for pixels, label, _ in examples(name.rpartition("_")[2], PX, IMAGES, patch_px):
        inputs = model.data_spec.prepare(pixels)
        for kind in kinds:
            begin = time.process_time()
            logits, features = of_tiles(model, inputs, kind)
            seconds[kind].append(time.process_time() - begin)
            ways = WAYS if kind else {"whole image": WAYS["mean of logits"]}
            for way, combine in ways.items():
                found = int(combine(logits, features, head).argmax()) == label
                right.setdefault((kind, way), []).append(found)
    whole = right[None, "whole image"]
    rows = []
    for (kind, way), found in right.items():
        share, pairs = np.mean(found), np.subtract(found, whole, dtype=float)
        tile, overlap, at_once = kind or (None, None, None)
        rows.append(
            {"model": name, "px": PX, "images": IMAGES, "method": way, "tile": tile}
            | {"overlap": overlap, "batch_size": at_once, "accuracy": share}
            | {"standard_error": (share * (1 - share) / IMAGES) ** 0.5}
            | {"difference": pairs.mean(), "difference_error": pairs.std() / IMAGES**0.5}
            | {"seconds_median": np.median(seconds[kind])}
            | {"ratio_median": np.median(np.divide(seconds[kind], seconds[None]))}
        )
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    provenance = provenance_of("cpu", []) | {"command": "python docs/figures/large.py"}
    with torch.inference_mode():
        records = [row for name in CUTS for row in rows_of(name)]
    for row in records:
        print(f"{row['model']}, {row['tile']} px, {row['method']}: {row['accuracy']:.1%}")
    write_text("docs/figures/large.csv", csv_text(records, provenance))
