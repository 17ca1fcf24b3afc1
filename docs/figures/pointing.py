"""How often the highest attribution lies on the mark or digit that decides the class: the table of
``docs/attribution.md``.

    python docs/figures/pointing.py          # writes pointing.csv, minutes

Source: the pointing game of Zhang et al. 2018, "Top-down neural attention by excitation backprop",
with patches.
"""

from collections.abc import Iterator

import numpy as np
import timm
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from visionattn.cli.files import write_text
from visionattn.cli.provenance import provenance_of
from visionattn.cli.tables import csv_text
from visionattn.data.batches import SampleKey
from visionattn.data.data_config import DataConfig
from visionattn.data.geometry import Box, Geometry
from visionattn.data.images import fill
from visionattn.data.splits import build_splits
from visionattn.models.attribution import find_attribution, watch
from visionattn.models.patches import grid_of

IMAGES = 200
SIZES = {
    "scaleformer_vit_documents": (512, 1024),
    "taylorshift_vit_documents": (512, 1024),
    "taylorshift_vit_canvas": (128, 256),
}
"""Longest side in pixels: of training, and twice that."""
GRID_ROWS = 64


def examples(
    task: str, size: int, count: int, patch_px: tuple[int, int]
) -> Iterator[tuple[Tensor, int, Box]]:
    """Yield test images, uint8 ``[1, 1, H, W]``, with class and box of mark or digit."""
    fit = "native" if task == "documents" else "crop"
    config = DataConfig(name=task, img_size=size, fit=fit, args={"eval_images": count}, workers=0)
    geometry = Geometry(fit, (size, size), None, patch_px)
    test = build_splits(config, seed=0).test
    for index in range(count):
        drawn = test.draw(SampleKey(index, 0, geometry))
        pixels = fill(drawn.image, geometry.view(*drawn.image.shape[:2]))
        yield torch.from_numpy(np.moveaxis(pixels, 2, 0)[None].copy()), drawn.label, drawn.box


def scores_of(model: torch.nn.Module, inputs: Tensor) -> tuple[int, dict[str, Tensor]]:
    """Return the class that a model finds, and the scores of patches (or pixels) by method."""
    patch_px, prefix = tuple(model.patch_embed.patch_size), model.num_prefix_tokens
    found, grid = find_attribution(model, inputs), grid_of(inputs.shape[2:], patch_px)
    gradient = found.gradient.double()
    mean = lambda x: avg_pool2d(x[None, None], patch_px)[0, 0]  # noqa: E731
    evenly = np.linspace(0, grid.num_patches - 1, min(GRID_ROWS, grid.num_patches))
    tokens = [prefix + int(place) for place in (found.patches.argmax(), *evenly)]
    last = len(model.blocks) - 1
    rows = watch(model, inputs, {last: tokens})[0][last]
    total, content = (x[0].mean(0)[:, prefix:] for x in (rows.total, rows.content))
    return found.target, {
        "winning patch": found.patches.reshape(*grid),
        "gradient, sum": mean(gradient),
        "gradient, absolute": mean(gradient.abs()),
        "gradient, pixel": gradient.abs(),
        "row of the winning patch": total[0].reshape(*grid),
        "row, content alone": content[0].reshape(*grid),
        "rows of a grid": content[1:].mean(0).reshape(*grid),
    }


def inside(box: Box, shape: tuple[int, int], cell: tuple[int, int], grow: int) -> Tensor:
    """Return whether the center of each cell lies in a box that is larger by ``grow`` pixels on
    each side, bool ``shape``.
    """
    rows, columns = ((torch.arange(n) + 0.5) * px for n, px in zip(shape, cell, strict=True))
    rows = (rows >= box.top - grow) & (rows < box.top + box.height + grow)
    columns = (columns >= box.left - grow) & (columns < box.left + box.width + grow)
    return rows[:, None] & columns


def measure(name: str, size: int) -> Iterator[dict]:
    """Yield a row for each method: shares in [0, 1] of the images of a size."""
    model = timm.create_model(name, pretrained=True).eval()
    patch_px, hits, right = tuple(model.patch_embed.patch_size), {}, 0
    for pixels, label, box in examples(name.rpartition("_")[2], size, IMAGES, patch_px):
        target, scores = scores_of(model, model.data_spec.prepare(pixels))
        right += target == label
        for method, values in scores.items():
            cell = (1, 1) if method == "gradient, pixel" else patch_px
            areas = [inside(box, values.shape, cell, grow) for grow in (0, patch_px[0])]
            best = int(values.argmax())
            one = [float(area.flatten()[best]) for area in areas]
            hits.setdefault(method, []).append(one + [float(a.double().mean()) for a in areas])
    about = {"model": name, "size": size, "images": IMAGES, "accuracy": right / IMAGES}
    for method, found in hits.items():
        shares = np.mean(found, 0)
        columns = ("hit", "near", "chance", "near_chance")
        yield about | {"method": method} | dict(zip(columns, shares, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    provenance = provenance_of("cpu", []) | {"command": "python docs/figures/pointing.py"}
    rows = [row for name, sizes in SIZES.items() for size in sizes for row in measure(name, size)]
    for row in rows:
        print(f"{row['model']}, {row['size']} px, {row['method']}: {row['hit']:.1%}")
    write_text("docs/figures/pointing.csv", csv_text(rows, provenance))
