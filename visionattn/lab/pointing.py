"""How often the highest attribution lies on what decides the class: ``python -m
visionattn.lab.pointing`` measures the table of ``docs/attribution.md``.

The images are test images of the data set that a model which comes with weights was trained on,
whose one mark or digit decides the class. Of each image each method names one patch (or pixel), and
it is counted whether its centre lies in the box of the mark or digit. Chance is the share of
patches (or of pixels) for which it does.

Source: the pointing game of Zhang et al. 2018, "Top-down neural attention by excitation backprop",
with patches.
"""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import timm
import torch
from einops import rearrange
from torch import Tensor

from visionattn.cli.ends import run_tool
from visionattn.cli.files import check_free, write_text
from visionattn.cli.parsing import Parser, whole_from
from visionattn.cli.provenance import provenance_of, summary
from visionattn.cli.tables import Record, csv_text, heading, line
from visionattn.data.batches import SampleKey
from visionattn.data.config import DataConfig
from visionattn.data.geometry import Box, Geometry
from visionattn.data.images import fill
from visionattn.data.splits import build_splits
from visionattn.layout import Grid
from visionattn.models.attribution import find_attribution, grid_of, watch
from visionattn.models.backbone import VisionAttnTransformer
from visionattn.models.weights import Fit

SIZES: dict[str, tuple[int, int]] = {
    "scaleformer_vit_documents": (512, 1024),
    "taylorshift_vit_documents": (512, 1024),
    "taylorshift_vit_canvas": (128, 256),
}
"""Models, and once and twice the longest side in pixels that they were trained at."""
METHODS = {
    "winning patch": "the patch that adds most to the class through the maximum",
    "gradient, sum": "the patch of the largest sum of gradient times input",
    "gradient, absolute": "the patch of the largest sum of its absolute values",
    "gradient, pixel": "the pixel of its largest absolute value",
    "row of the winning patch": "the patch that it sees with the largest weight, last block",
    "row, content alone": "the same by the share of content",
    "rows of a grid": "the patch of the largest mean share of content in 64 rows, last block",
}
"""Methods, and which patch or pixel each names."""
GRID_ROWS = 64
"""Queries that lie evenly over the image."""


class Named(NamedTuple):
    """What a method names in one image, and how likely a random patch or pixel would do as well."""

    hit: bool
    near: bool
    """It lies in the box, or within a patch of it."""
    chance: float
    near_chance: float


def examples(
    task: str, size: int, count: int, patch_px: tuple[int, int]
) -> Iterator[tuple[np.ndarray, int, Box]]:
    """Yield test images as the model sees them, uint8 ``[H, W, 1]``, with class and the box of what
    decides it.

    Args:
        task: ``documents`` or ``canvas``.
        size: of the longest side in pixels.
        count: how many.
        patch_px: height and width of the model's patches.
    """
    fit: Fit = "native" if task == "documents" else "crop"
    args = {"eval_images": count}
    config = DataConfig(name=task, img_size=size, fit=fit, args=args, workers=0)
    geometry = Geometry(fit, (size, size), None, patch_px)
    test = build_splits(config, seed=0).test
    for index in range(count):
        drawn = test.draw(SampleKey(index, 0, geometry))
        box = drawn.mark if task == "documents" else drawn.digit
        yield fill(drawn.image, geometry.view(*drawn.image.shape[:2])), drawn.label, box


def named_by(
    model: VisionAttnTransformer, inputs: Tensor, box: Box
) -> tuple[int, dict[str, Named]]:
    """Return the class that a model finds in one image ``[1, C, H_px, W_px]``, and what each method
    names for it.
    """
    found, grid = find_attribution(model, inputs), grid_of(model, inputs)
    patch_px = tuple(model.patch_embed.patch_size)
    hits = within(box, grid, patch_px, grow=0)
    near = within(box, grid, patch_px, grow=1)

    def of(scores: Tensor) -> Named:
        best = int(scores.argmax())
        return Named(
            bool(hits.flatten()[best]),
            bool(near.flatten()[best]),
            float(hits.double().mean()),
            float(near.double().mean()),
        )

    def summed(values: Tensor) -> Tensor:
        return (
            values.double()
            .unfold(0, patch_px[0], patch_px[0])
            .unfold(1, patch_px[1], patch_px[1])
            .sum((2, 3))
        )

    gradient = found.gradient
    top = model.num_prefix_tokens + int(found.patches.argmax())
    evenly = np.linspace(0, grid.num_patches - 1, min(GRID_ROWS, grid.num_patches))
    tokens = [top, *(model.num_prefix_tokens + int(place) for place in evenly)]
    last = len(model.blocks) - 1
    rows = watch(model, inputs, {last: tokens})[0][last]
    prefix = model.num_prefix_tokens
    total, content = (x[0].mean(0)[:, prefix:] for x in (rows.total, rows.content))
    return found.target, {
        "winning patch": of(found.patches),
        "gradient, sum": of(summed(gradient)),
        "gradient, absolute": of(summed(gradient.abs())),
        "gradient, pixel": of_pixel(gradient.abs(), box, patch_px),
        "row of the winning patch": of(total[0]),
        "row, content alone": of(content[0]),
        "rows of a grid": of(content[1:].mean(0)),
    }


def within(box: Box, grid: Grid, patch_px: tuple[int, int], *, grow: int) -> Tensor:
    """Return whether the centre of each patch lies in a box, made larger by so many patches on each
    side: bool ``[H, W]``.
    """
    inside = []
    ends = ((box.top, box.height), (box.left, box.width))
    for length, px, (first, extent) in zip(grid, patch_px, ends, strict=True):
        centre = (torch.arange(length) + 0.5) * px
        inside.append((centre >= first - grow * px) & (centre < first + extent + grow * px))
    return inside[0][:, None] & inside[1]


def of_pixel(values: Tensor, box: Box, patch_px: tuple[int, int]) -> Named:
    """Return whether the largest of ``values [H_px, W_px]`` lies in a box."""
    place = divmod(int(values.argmax()), values.shape[1])

    def inside(grow: int) -> tuple[bool, float]:
        found, share = True, 1.0
        ends = ((box.top, box.height), (box.left, box.width))
        for at, px, length, (first, extent) in zip(
            place, patch_px, values.shape, ends, strict=True
        ):
            low, high = max(0, first - grow * px), min(length, first + extent + grow * px)
            found, share = found and low <= at < high, share * (high - low) / length
        return found, share

    (hit, chance), (near, near_chance) = inside(0), inside(1)
    return Named(hit, near, chance, near_chance)


def measure(name: str, size: int, count: int) -> list[Record]:
    """Return a row of plain values for each method: shares in [0, 1] of the images of a size."""
    model = timm.create_model(name, pretrained=True).eval()
    patch_px = tuple(model.patch_embed.patch_size)
    found: dict[str, list[Named]] = {method: [] for method in METHODS}
    right = 0
    for image, label, box in examples(name.rpartition("_")[2], size, count, patch_px):
        pixels = torch.from_numpy(rearrange(image, "h w c -> 1 c h w").copy())
        target, named = named_by(model, model.data_spec.prepare(pixels), box)
        right += target == label
        for method, one in named.items():
            found[method].append(one)
    return [
        {"model": name, "size": size, "images": count, "accuracy": right / count}
        | {"method": method}
        | {key: float(np.mean([getattr(one, key) for one in all_of])) for key in Named._fields}
        for method, all_of in found.items()
    ]


def table(records: Sequence[Record]) -> str:
    """Return the table of a model, in Markdown: a row for each method, and for each size how often
    it hits, how often it comes within a patch, and how often chance does.
    """
    sizes = list(dict.fromkeys(record["size"] for record in records))
    columns = ["method"]
    for size in sizes:
        columns += [f"{size} px: in the box", "within a patch"]
    rows = []
    for method in (*METHODS, "chance, a patch", "chance, a pixel"):
        cells = [method]
        key = {"chance, a patch": "winning patch", "chance, a pixel": "gradient, pixel"}
        for size in sizes:
            record = next(
                each
                for each in records
                if each["size"] == size and each["method"] == key.get(method, method)
            )
            names = ("chance", "near_chance") if method in key else ("hit", "near")
            cells += [f"{100 * record[name]:.1f} %" for name in names]
        rows.append(line(cells))
    return "\n".join([heading(columns), *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table for each model, and write the rows; return the exit code."""
    about = "Measure how often the highest attribution lies on what decides the class."
    parser = Parser("python -m visionattn.lab.pointing", description=about)
    parser.add_argument("names", nargs="*", help="models; none: all")
    parser.add_argument("--images", type=whole_from(1), default=200, help="test images of each")
    parser.add_argument("--threads", type=whole_from(1, 1024), default=1, help="threads of torch")
    parser.add_argument("--csv", help="file for the rows, which is replaced")
    flags = parser.parse_args(argv)

    def work() -> None:
        names = flags.names or [*SIZES]
        if unknown := [name for name in names if name not in SIZES]:
            raise ValueError(
                f"{unknown[0]} is none of those with a box to find: {', '.join(SIZES)}"
            )
        if flags.csv:
            check_free(Path(flags.csv), overwrite=True)
        words = ["python", "-m", "visionattn.lab.pointing", *(argv or sys.argv[1:])]
        provenance = provenance_of("cpu", [], threads=flags.threads)
        provenance["command"] = shlex.join(words)
        print(summary(provenance), flush=True)
        before, records = torch.get_num_threads(), []
        torch.set_num_threads(flags.threads)
        try:
            for name in names:
                found = []
                for size in SIZES[name]:
                    found += measure(name, size, flags.images)
                    right = 100 * found[-1]["accuracy"]
                    print(f"{name}, {size} px: {right:.1f} % of {flags.images} right", flush=True)
                print(f"\n{table(found)}\n", flush=True)
                records += found
        finally:
            torch.set_num_threads(before)
        if flags.csv:
            write_text(flags.csv, csv_text(records, provenance))

    return run_tool(work)


if __name__ == "__main__":
    raise SystemExit(main())
